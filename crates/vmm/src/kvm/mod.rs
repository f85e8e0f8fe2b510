//! The VM, and what of it lives in the kernel.

mod preflight;

pub(crate) use preflight::preflight;

use crate::state::Incoming;
use crate::wiring::Wiring;
use crate::{Error, Result, Tracking};
use kvm_bindings::CpuId;
use machine::{DirtyTracker, Section};
use memory::GuestMemory;
use std::sync::Arc;
use vmm_sys_util::eventfd::EventFd;

/// A VM with its RAM, its interrupt controllers and its timer; vCPUs are [`crate::vcpu::Vcpus`].
pub(crate) struct Vm {}

impl Vm {
    /// Makes a VM that can have `vcpus` vCPUs.
    pub(crate) fn new(vcpus: u32, ram: &Arc<GuestMemory>, tracking: Tracking) -> Result<Vm> {
        let _ = (vcpus, ram, tracking);
        Err(Error::Condition("not built yet".to_owned()))
    }

    /// What this host's KVM offers a guest, without what cannot be moved (nested virtualization).
    pub(crate) fn host_cpuid(&self) -> Result<CpuId> {
        Err(Error::Condition("not built yet".to_owned()))
    }

    /// A tracker of the kind asked for in [`Vm::new`].
    pub(crate) fn tracker(&self) -> Result<Box<dyn DirtyTracker>> {
        Err(Error::Condition("not built yet".to_owned()))
    }

    /// The sections `irqchip` and `pit` of a paused machine. Called after [`crate::vcpu::Vcpus::save`].
    pub(crate) fn save(&self) -> Result<Vec<Section>> {
        Err(Error::Condition("not built yet".to_owned()))
    }

    /// Takes them over. Called after [`crate::vcpu::Vcpus::restore`]: pending interrupts go to the local APICs.
    pub(crate) fn restore(&self, incoming: &mut Incoming<'_>) -> Result<()> {
        let _ = incoming;
        Err(Error::Condition("not built yet".to_owned()))
    }
}

impl Wiring for Vm {
    fn irq(&self, gsi: u32) -> Result<EventFd> {
        let _ = gsi;
        Err(Error::Condition("not built yet".to_owned()))
    }

    fn doorbell(&self, bell: &EventFd, address: u64, value: u32) -> Result<()> {
        let _ = (bell, address, value);
        Err(Error::Condition("not built yet".to_owned()))
    }
}
