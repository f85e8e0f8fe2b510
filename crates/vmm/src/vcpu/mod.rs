//! vCPUs and their threads.

use crate::kvm::Vm;
use crate::state::Incoming;
use crate::wiring::{Ending, Exits};
use crate::{Error, Result};
use kvm_bindings::{CpuId, kvm_regs, kvm_sregs};
use machine::Section;
use std::collections::BTreeMap;
use std::sync::Arc;

/// All vCPUs of a VM, a thread each. Dropped, they end, whatever state they are in.
pub(crate) struct Vcpus {}

impl Vcpus {
    /// Makes a vCPU for each of `cpuids`, with threads that wait for [`Vcpus::resume`].
    pub(crate) fn start(vm: &Vm, cpuids: Vec<CpuId>, exits: Arc<dyn Exits>, ending: Ending) -> Result<Vcpus> {
        let _ = (vm, cpuids, exits, ending);
        Err(Error::Condition("not built yet".to_owned()))
    }

    /// Sets the registers that vCPU 0 starts with. The others wait for INIT and SIPI.
    pub(crate) fn set_first_state(&self, set: impl FnOnce(&mut kvm_sregs, &mut kvm_regs) -> Result<()>) -> Result<()> {
        let _ = set;
        Err(Error::Condition("not built yet".to_owned()))
    }

    /// Stops all vCPUs, and returns when none is in the guest or in the middle of an exit. Fine when paused.
    pub(crate) fn pause(&self) -> Result<()> {
        Err(Error::Condition("not built yet".to_owned()))
    }

    /// Lets all vCPUs go on. Fine when running. An error leaves none running.
    pub(crate) fn resume(&self) -> Result<()> {
        Err(Error::Condition("not built yet".to_owned()))
    }

    /// Whether they run.
    pub(crate) fn is_running(&self) -> bool {
        false
    }

    /// The sections `clock`, `vcpu0`, `vcpu1`, ... of a paused machine.
    pub(crate) fn save(&self) -> Result<Vec<Section>> {
        Err(Error::Condition("not built yet".to_owned()))
    }

    /// Takes them over, into a machine that never ran. After an error it cannot be resumed.
    pub(crate) fn restore(&self, incoming: &mut Incoming<'_>) -> Result<()> {
        let _ = incoming;
        Err(Error::Condition("not built yet".to_owned()))
    }

    /// What a host needs to run these vCPUs, for [`machine::MachineConfig::extra`]; [`crate::kvm::preflight`] reads it.
    /// Of the machine as it was started: one that was restored passes on what came with it.
    pub(crate) fn needs(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}
