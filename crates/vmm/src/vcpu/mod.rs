//! vCPUs and their threads.
//!
//! - [`Vcpus`] is what the rest sees: start, pause, resume, save, restore;
//! - `control` is the agreement on who runs, with a kick that cannot be lost;
//! - `thread` runs a vCPU, `exits` serves what it comes out for;
//! - `state` and `msrs` read and set what a vCPU is made of; `sys` is the only unsafe code.
//!
//! Invariants:
//!
//! - a parked vCPU is in the middle of nothing: an access that was served has reached its registers;
//! - a pause returns only when every vCPU is parked, a resume only when every one was let go;
//! - a thread that is gone is waited for by nobody, and ends the guest;
//! - vCPUs whose restore failed cannot be resumed.

mod control;
mod exits;
mod msrs;
mod state;
mod sys;
#[cfg(test)]
mod tests;
mod thread;

use crate::kvm::{Host, Needs, Vm};
use crate::state::{Incoming, section};
use crate::wiring::{Ending, Exits};
use crate::{Error, Result};
use control::Control;
use kvm_bindings::{CpuId, kvm_clock_data, kvm_regs, kvm_sregs};
use kvm_ioctls::{VcpuFd, VmFd};
use machine::Section;
use serde::{Deserialize, Serialize};
#[cfg(feature = "fuzzing")]
pub(crate) use state::fuzzing;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use sys::RunPage;
use thread::Worker;

/// The section of what the vCPUs have in common.
const COMMON: &str = "vcpus";
const COMMON_VERSION: u32 = 1;

/// What the vCPUs have in common, as it is written.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Common {
    vcpus: usize,
    /// KVM's clock as the guest reads it, when it was saved.
    clock_ns: u64,
}

/// All vCPUs of a VM, a thread each. Dropped, they end, whatever state they are in.
pub(crate) struct Vcpus {
    control: Arc<Control>,
    fds: Vec<Arc<Mutex<VcpuFd>>>,
    vm: Arc<VmFd>,
    host: Arc<Host>,
    needs: BTreeMap<String, String>,
    /// Held by whoever pauses, resumes, saves or restores: one at a time.
    kept: Mutex<Kept>,
}

/// What is known of the vCPUs beside what KVM knows.
struct Kept {
    /// A restore failed half-way.
    broken: bool,
    /// Of each: what it was given.
    given: Vec<Given>,
}

/// What a vCPU was given, by whoever started or restored it. A guest that goes on from here takes just this along, so that
/// what its first host found out about its destinations stays true.
struct Given {
    cpuid: CpuId,
    msrs: Vec<u32>,
}

impl Vcpus {
    /// Makes a vCPU for each of `cpuids`, with threads that wait for [`Vcpus::resume`].
    ///
    /// # Errors
    /// KVM refuses a vCPU or its CPUID; a thread cannot be had.
    pub(crate) fn start(vm: &Vm, cpuids: Vec<CpuId>, exits: Arc<dyn Exits>, ending: Ending) -> Result<Vcpus> {
        if cpuids.len() != vm.vcpus() as usize {
            let (given, made_for) = (cpuids.len(), vm.vcpus());
            return Err(Error::Condition(format!(
                "{given} vCPUs for a VM that was made for {made_for}"
            )));
        }
        let mut pages = Vec::new();
        let mut fds = Vec::new();
        for (index, cpuid) in cpuids.iter().enumerate() {
            let (fd, page) = make(vm, index, cpuid)?;
            fds.push(Arc::new(Mutex::new(fd)));
            pages.push(Arc::new(page));
        }
        let (needs, msrs) = match (fds.first(), cpuids.first()) {
            (Some(fd), Some(cpuid)) => needs(&lock(fd), vm.host(), cpuid)?,
            _ => return Err(Error::Config("0 vCPUs: a machine has at least one".to_owned())),
        };
        let given = cpuids.into_iter().map(|cpuid| Given {
            cpuid,
            msrs: msrs.clone(),
        });
        let vcpus = Vcpus {
            control: Arc::new(Control::new(pages.clone(), ending.clone())?),
            fds,
            vm: Arc::clone(vm.fd()),
            host: Arc::clone(vm.host()),
            needs,
            kept: Mutex::new(Kept {
                broken: false,
                given: given.collect(),
            }),
        };
        let control = Arc::downgrade(&vcpus.control);
        ending.on_told(move || {
            if let Some(control) = control.upgrade() {
                control.guest_ended();
            }
        });
        for (index, page) in pages.into_iter().enumerate() {
            let worker = Worker {
                index,
                vcpu: number(index),
                fd: Arc::clone(&vcpus.fds[index]),
                page,
                control: Arc::clone(&vcpus.control),
                exits: Arc::clone(&exits),
                ending: ending.clone(),
                ring: vm.ring().cloned(),
                memory: Arc::clone(vm.ram()),
            };
            let thread = Builder::new().name(state::name(index)).spawn(move || worker.work());
            // If there is none, dropping ends those that there are.
            vcpus.control.set_thread(index, thread.map_err(Error::Thread)?);
        }
        Ok(vcpus)
    }

    /// Sets the registers that vCPU 0 starts with. The others wait for INIT and SIPI.
    pub(crate) fn set_first_state(&self, set: impl FnOnce(&mut kvm_sregs, &mut kvm_regs) -> Result<()>) -> Result<()> {
        let _kept = self.kept();
        self.control.check_parked("setting the first state")?;
        let fd = lock(&self.fds[0]);
        let failed = |what: &str, e| Error::kvm(format!("{what} of vCPU 0"), e);
        let mut sregs = fd.get_sregs().map_err(|e| failed("reading the system registers", e))?;
        let mut regs = fd.get_regs().map_err(|e| failed("reading the registers", e))?;
        set(&mut sregs, &mut regs)?;
        fd.set_sregs(&sregs)
            .map_err(|e| failed("setting the system registers", e))?;
        fd.set_regs(&regs).map_err(|e| failed("setting the registers", e))
    }

    /// Stops all vCPUs, and returns when none is in the guest or in the middle of an exit. Fine when paused, and when the
    /// guest has ended.
    ///
    /// Waits for a vCPU that serves an exit, however long its device takes.
    pub(crate) fn pause(&self) -> Result<()> {
        let _kept = self.kept();
        self.control.pause();
        Ok(())
    }

    /// Lets all vCPUs go on. Fine when running. Those of a guest that has ended park again at once.
    ///
    /// # Errors
    /// A restore failed before, or a vCPU's thread is gone. None runs then.
    pub(crate) fn resume(&self) -> Result<()> {
        let kept = self.kept();
        kept.check()?;
        self.control.resume()
    }

    /// Whether they run: they were let go, and the guest has not ended.
    pub(crate) fn is_running(&self) -> bool {
        self.control.is_running()
    }

    /// The sections `vcpus`, `vcpu0`, `vcpu1`, ... of a paused machine.
    ///
    /// The clock is read here, not at the pause: the guest's clock then goes on at the destination from a moment during the
    /// pause, and stands still for less than the downtime. The TSCs are read right after it.
    pub(crate) fn save(&self) -> Result<Vec<Section>> {
        let kept = self.kept();
        kept.check()?;
        self.control.check_parked("saving the vCPUs")?;
        let clock = self
            .vm
            .get_clock()
            .map_err(|e| Error::kvm("reading the guest's clock", e))?;
        let common = Common {
            vcpus: self.fds.len(),
            clock_ns: clock.clock,
        };
        let mut sections = vec![section(COMMON, COMMON_VERSION, &common)?];
        for (index, (fd, given)) in self.fds.iter().zip(&kept.given).enumerate() {
            let state = state::save(index, &lock(fd), &self.host, &given.cpuid, &given.msrs)?;
            sections.push(section(state::name(index), state::VERSION, &state)?);
        }
        Ok(sections)
    }

    /// Takes them over, into vCPUs that never ran. All of it is read and checked before any of it is set.
    ///
    /// # Errors
    /// State that does not fit this machine or this host, by section. The vCPUs cannot be resumed then.
    pub(crate) fn restore(&self, incoming: &mut Incoming<'_>) -> Result<()> {
        let mut kept = self.kept();
        self.control.check_parked("restoring the vCPUs")?;
        if self.control.resumes() > 0 {
            let why = "restoring the vCPUs: they ran before, and KVM takes no other CPUID then";
            return Err(Error::Condition(why.to_owned()));
        }
        kept.broken = true;
        let common: Common = incoming.take(COMMON, COMMON_VERSION)?;
        if common.vcpus != self.fds.len() {
            let (came, ours) = (common.vcpus, self.fds.len());
            return Err(Error::state(
                COMMON,
                format!("{came} vCPUs came, this machine has {ours}"),
            ));
        }
        if i64::try_from(common.clock_ns).is_err() {
            return Err(Error::state(COMMON, format!("a clock of {} ns", common.clock_ns)));
        }
        let (host_cpuid, host_msrs) = (self.host.cpuid()?, self.host.msrs()?);
        let mut states = Vec::new();
        for index in 0..self.fds.len() {
            let state: state::State = incoming.take(&state::name(index), state::VERSION)?;
            states.push(state.check(index, self.host.xsave_bytes(), &host_cpuid, &host_msrs)?);
        }
        // The clock first: one of the MSRs has KVM tell the guest when it was zero. Without the flag that has KVM add the
        // time since, so that the clock stood still meanwhile.
        let clock = kvm_clock_data {
            clock: common.clock_ns,
            ..Default::default()
        };
        self.vm
            .set_clock(&clock)
            .map_err(|e| Error::state(COMMON, format!("KVM does not take the guest's clock: {e}")))?;
        for (fd, state) in self.fds.iter().zip(&states) {
            state.set(&lock(fd), &self.host)?;
        }
        let given = states.into_iter().map(|state| Given {
            msrs: state.msr_numbers(),
            cpuid: state.cpuid,
        });
        kept.given = given.collect();
        kept.broken = false;
        Ok(())
    }

    /// What a host needs to run these vCPUs, for [`machine::MachineConfig::extra`]; [`crate::kvm::preflight()`] reads it.
    /// Of the machine as it was started: one that was restored passes on what came with it.
    pub(crate) fn needs(&self) -> BTreeMap<String, String> {
        self.needs.clone()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Vcpus {
    fn drop(&mut self) {
        self.control.end();
    }
}

impl Kept {
    fn check(&self) -> Result<()> {
        if self.broken {
            let why = "the state of the vCPUs was restored in part only: this guest cannot run here";
            return Err(Error::Condition(why.to_owned()));
        }
        Ok(())
    }
}

/// A vCPU whose thread panicked is as good as any other: only its thread is gone.
fn lock(fd: &Mutex<VcpuFd>) -> MutexGuard<'_, VcpuFd> {
    fd.lock().unwrap_or_else(PoisonError::into_inner)
}

fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

fn make(vm: &Vm, index: usize, cpuid: &CpuId) -> Result<(VcpuFd, RunPage)> {
    let failed = |what: &str, e| Error::kvm(format!("{what} vCPU {index}"), e);
    let fd = vm.fd().create_vcpu(index as u64).map_err(|e| failed("making", e))?;
    fd.set_cpuid2(cpuid).map_err(|e| failed("setting the CPUID of", e))?;
    if let Some(ring) = vm.ring() {
        ring.add_vcpu(number(index), &fd)?;
    }
    let page = RunPage::map(&fd).map_err(|e| Error::kvm(format!("mapping the run page of vCPU {index}"), e))?;
    Ok((fd, page))
}

/// What vCPUs like this one need of a host, and the MSRs that they have.
fn needs(fd: &VcpuFd, host: &Host, cpuid: &CpuId) -> Result<(BTreeMap<String, String>, Vec<u32>)> {
    let msrs: Vec<u32> = msrs::read(fd, &host.msrs()?)?
        .into_iter()
        .map(|(number, _)| number)
        .collect();
    let needs = Needs {
        cpuid,
        tsc_khz: state::tsc_khz(fd),
        xsave_bytes: host.xsave_bytes(),
        msrs: &msrs,
    };
    Ok((needs.entries(), msrs))
}
