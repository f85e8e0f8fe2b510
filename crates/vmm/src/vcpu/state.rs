//! A vCPU's state: read from KVM, and set there, in the orders that KVM needs.
//!
//! Reading: whether the vCPU runs comes first, as asking for it takes pending INIT and SIPI in; what is pending comes last.
//!
//! Setting: CPUID decides what else can be set; the segment and control registers come before what they govern; the TSC
//! before the time at which its timer expires, and that after the local APIC that has the timer; setting registers
//! forgets what was pending, so that comes after them.

use super::msrs;
use super::sys;
use crate::kvm::{Blob, Fit, Host, Tsc, invariant_tsc, lacking, leaf};
use crate::{Error, Result};
use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MAX_MSR_ENTRIES, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state,
    kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The version of [`State`]'s form.
pub(super) const VERSION: u32 = 1;

/// The name of vCPU `index`'s section.
pub(super) fn name(index: usize) -> String {
    format!("vcpu{index}")
}

/// A vCPU's state as it is written.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    /// Function, index, flags, EAX, EBX, ECX, EDX.
    cpuid: Vec<[u32; 7]>,
    /// `None` where the host does not know it.
    tsc_khz: Option<u32>,
    mp_state: Blob,
    regs: Blob,
    sregs: Blob,
    xsave: Blob,
    xcrs: Blob,
    debugregs: Blob,
    lapic: Blob,
    /// Number and value.
    msrs: Vec<(u32, u64)>,
    events: Blob,
}

/// A vCPU's state that was checked as far as can be without KVM.
pub(super) struct Checked {
    section: String,
    pub(super) cpuid: CpuId,
    tsc_khz: Option<u32>,
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: Vec<u8>,
    xcrs: kvm_xcrs,
    debugregs: kvm_debugregs,
    lapic: kvm_lapic_state,
    msrs: Vec<(u32, u64)>,
    deadline: Option<(u32, u64)>,
    events: kvm_vcpu_events,
}

/// Reads the state of a vCPU that does not run. `cpuid` and `msrs` are what it was given.
pub(super) fn save(index: usize, vcpu: &VcpuFd, host: &Host, cpuid: &CpuId, msrs: &[u32]) -> Result<State> {
    let failed = |what: &str, e| Error::kvm(format!("reading the {what} of vCPU {index}"), e);
    let mp_state = vcpu.get_mp_state().map_err(|e| failed("run state", e))?;
    let regs = vcpu.get_regs().map_err(|e| failed("registers", e))?;
    let sregs = vcpu.get_sregs().map_err(|e| failed("system registers", e))?;
    let xsave = sys::get_xsave(vcpu, host.xsave_bytes(), host.has_xsave2())?;
    let xcrs = vcpu.get_xcrs().map_err(|e| failed("extended control registers", e))?;
    let debugregs = vcpu.get_debug_regs().map_err(|e| failed("debug registers", e))?;
    let lapic = vcpu.get_lapic().map_err(|e| failed("local APIC", e))?;
    let msrs = msrs::read(vcpu, msrs)?;
    let events = vcpu.get_vcpu_events().map_err(|e| failed("pending events", e))?;
    let row = |e: &kvm_cpuid_entry2| [e.function, e.index, e.flags, e.eax, e.ebx, e.ecx, e.edx];
    Ok(State {
        cpuid: cpuid.as_slice().iter().map(row).collect(),
        tsc_khz: tsc_khz(vcpu),
        mp_state: Blob::of(&mp_state),
        regs: Blob::of(&regs),
        sregs: Blob::of(&sregs),
        xsave: Blob::from_bytes(xsave),
        xcrs: Blob::of(&xcrs),
        debugregs: Blob::of(&debugregs),
        lapic: Blob::of(&lapic),
        msrs,
        events: Blob::of(&events),
    })
}

/// A vCPU's TSC frequency, where the host knows it.
pub(super) fn tsc_khz(vcpu: &VcpuFd) -> Option<u32> {
    vcpu.get_tsc_khz().ok().filter(|khz| *khz != 0)
}

impl State {
    /// Checks state that came in as vCPU `index`'s, for a host with room for so much XSAVE state.
    pub(super) fn check(
        self,
        index: usize,
        xsave_bytes: usize,
        host_cpuid: &CpuId,
        host_msrs: &[u32],
    ) -> Result<Checked> {
        let section = name(index);
        let no = |why: String| Error::state(&section, why);
        let cpuid = cpuid(&self.cpuid).map_err(no)?;
        if let Some(reason) = lacking(|number, index| leaf(&cpuid, number, index), host_cpuid).first() {
            return Err(no(reason.clone()));
        }
        check_msrs(&self.msrs, host_msrs).map_err(no)?;
        let room = xsave_bytes;
        let xsave = self.xsave.bytes().to_vec();
        if xsave.len() > room {
            let came = xsave.len();
            return Err(no(format!("xsave: {came} bytes came, this host has room for {room}")));
        }
        let (deadline, msrs) = self.msrs.into_iter().partition(|(msr, _)| *msr == msrs::TSC_DEADLINE);
        let deadline: Vec<(u32, u64)> = deadline;
        Ok(Checked {
            tsc_khz: self.tsc_khz,
            mp_state: self.mp_state.read(&section, "mp_state")?,
            regs: self.regs.read(&section, "regs")?,
            sregs: self.sregs.read(&section, "sregs")?,
            xsave,
            xcrs: self.xcrs.read(&section, "xcrs")?,
            debugregs: self.debugregs.read(&section, "debugregs")?,
            lapic: self.lapic.read(&section, "lapic")?,
            events: self.events.read(&section, "events")?,
            msrs: tsc_first(msrs),
            deadline: deadline.first().copied(),
            cpuid,
            section,
        })
    }
}

impl Checked {
    /// The numbers of its MSRs.
    pub(super) fn msr_numbers(&self) -> Vec<u32> {
        let all = self.msrs.iter().chain(&self.deadline);
        all.map(|(number, _)| *number).collect()
    }

    /// Sets all of it.
    pub(super) fn set(&self, vcpu: &VcpuFd, host: &Host) -> Result<()> {
        let refused = |what: &str, why: &dyn std::fmt::Display| {
            Error::state(&self.section, format!("KVM does not take its {what}: {why}"))
        };
        let other = |why: String| Error::state(&self.section, why);
        self.set_tsc_khz(vcpu, host)?;
        vcpu.set_cpuid2(&self.cpuid).map_err(|e| refused("CPUID", &e))?;
        vcpu.set_sregs(&self.sregs)
            .map_err(|e| refused("system registers", &e))?;
        vcpu.set_regs(&self.regs).map_err(|e| refused("registers", &e))?;
        sys::set_xsave(vcpu, &self.xsave, host.xsave_bytes()).map_err(|e| refused("extended register state", &e))?;
        vcpu.set_xcrs(&self.xcrs)
            .map_err(|e| refused("extended control registers", &e))?;
        msrs::write(vcpu, &self.msrs).map_err(other)?;
        vcpu.set_lapic(&self.lapic).map_err(|e| refused("local APIC", &e))?;
        if let Some(deadline) = self.deadline {
            msrs::write(vcpu, &[deadline]).map_err(other)?;
        }
        vcpu.set_vcpu_events(&self.events)
            .map_err(|e| refused("pending events", &e))?;
        vcpu.set_mp_state(self.mp_state).map_err(|e| refused("run state", &e))?;
        vcpu.set_debug_regs(&self.debugregs)
            .map_err(|e| refused("debug registers", &e))?;
        // EINVAL: the guest does not use KVM's clock. Else it learns that it stood still for a while.
        match vcpu.kvmclock_ctrl() {
            Err(e) if e.errno() != libc::EINVAL => Err(refused("news that it was paused", &e)),
            _ => Ok(()),
        }
    }

    fn set_tsc_khz(&self, vcpu: &VcpuFd, host: &Host) -> Result<()> {
        let Some(khz) = self.tsc_khz else { return Ok(()) };
        let tsc = Tsc {
            khz,
            invariant: invariant_tsc(leaf(&self.cpuid, 0x8000_0007, 0)),
        };
        let ours =
            tsc_khz(vcpu).ok_or_else(|| Error::state(&self.section, "this host does not know its TSC's frequency"))?;
        match tsc.fit(ours, host.scales_tsc()) {
            Fit::AsIs => Ok(()),
            Fit::Refuse(why) => Err(Error::state(&self.section, why)),
            Fit::Scale => vcpu
                .set_tsc_khz(khz)
                .map_err(|e| Error::state(&self.section, format!("its TSC cannot be scaled to {khz} kHz: {e}"))),
        }
    }
}

fn cpuid(rows: &[[u32; 7]]) -> std::result::Result<CpuId, String> {
    if rows.is_empty() || rows.len() > KVM_MAX_CPUID_ENTRIES {
        return Err(format!(
            "{} CPUID leaves: there are 1 to {KVM_MAX_CPUID_ENTRIES}",
            rows.len()
        ));
    }
    let entry = |[function, index, flags, eax, ebx, ecx, edx]: &[u32; 7]| kvm_cpuid_entry2 {
        function: *function,
        index: *index,
        flags: *flags,
        eax: *eax,
        ebx: *ebx,
        ecx: *ecx,
        edx: *edx,
        ..Default::default()
    };
    let entries: Vec<_> = rows.iter().map(entry).collect();
    CpuId::from_entries(&entries).map_err(|e| format!("{} CPUID leaves: {e:?}", rows.len()))
}

fn check_msrs(msrs: &[(u32, u64)], host: &[u32]) -> std::result::Result<(), String> {
    if msrs.len() > KVM_MAX_MSR_ENTRIES {
        return Err(format!("{} MSRs: there are at most {KVM_MAX_MSR_ENTRIES}", msrs.len()));
    }
    let mut seen = BTreeSet::new();
    for (number, _) in msrs {
        if !host.contains(number) {
            return Err(format!("MSR {number:#x}: this host's KVM does not have it"));
        }
        if !seen.insert(number) {
            return Err(format!("MSR {number:#x} came twice"));
        }
    }
    Ok(())
}

/// The TSC first: other MSRs are times.
fn tsc_first(mut msrs: Vec<(u32, u64)>) -> Vec<(u32, u64)> {
    msrs.sort_by_key(|(number, _)| *number != msrs::TSC);
    msrs
}

/// A section that is read and checked without KVM, for the fuzz targets.
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    use super::{Blob, Result, State, VERSION, name};
    use crate::state::{Incoming, section};
    use kvm_bindings::{CpuId, kvm_cpuid_entry2};
    use machine::Section;

    /// Room for XSAVE state, and MSRs, of the host that a section is checked for.
    const XSAVE_BYTES: usize = 4096;
    const MSRS: [u32; 3] = [0x10, 0x6e0, 0xc000_0080];

    /// The section of a vCPU whose registers are all zero.
    pub(crate) fn zeroed() -> Result<Section> {
        let state = State {
            cpuid: vec![[0, 0, 0, 1, 2, 3, 4]],
            tsc_khz: Some(1_000_000),
            mp_state: Blob::of(&kvm_bindings::kvm_mp_state::default()),
            regs: Blob::of(&kvm_bindings::kvm_regs::default()),
            sregs: Blob::of(&kvm_bindings::kvm_sregs::default()),
            xsave: Blob::from_bytes(vec![0; XSAVE_BYTES]),
            xcrs: Blob::of(&kvm_bindings::kvm_xcrs::default()),
            debugregs: Blob::of(&kvm_bindings::kvm_debugregs::default()),
            lapic: Blob::of(&kvm_bindings::kvm_lapic_state::default()),
            msrs: MSRS.iter().map(|msr| (*msr, 0)).collect(),
            events: Blob::of(&kvm_bindings::kvm_vcpu_events::default()),
        };
        section(name(0), VERSION, &state)
    }

    /// Takes it, and checks it.
    pub(crate) fn check(incoming: &mut Incoming<'_>) -> Result<()> {
        let state: State = incoming.take(&name(0), VERSION)?;
        let all = kvm_cpuid_entry2 {
            eax: u32::MAX,
            ebx: u32::MAX,
            ecx: u32::MAX,
            edx: u32::MAX,
            ..Default::default()
        };
        let host = CpuId::from_entries(&[all]).map_err(|e| crate::Error::state(name(0), format!("{e:?}")))?;
        let checked = state.check(0, XSAVE_BYTES, &host, &MSRS)?;
        assert!(checked.msr_numbers().len() <= MSRS.len());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_from_a_peer_are_bounded() {
        assert!(cpuid(&[]).is_err());
        assert!(cpuid(&[[0; 7]; 256]).is_ok());
        assert!(cpuid(&[[0; 7]; 257]).unwrap_err().contains("257"));
        let many: Vec<(u32, u64)> = (0..257).map(|n| (n, 0)).collect();
        let host: Vec<u32> = (0..300).collect();
        assert!(check_msrs(&many[..256], &host).is_ok());
        assert!(check_msrs(&many, &host).unwrap_err().contains("257"));
    }

    #[test]
    fn msrs_of_another_host_and_doubles_are_named() {
        assert!(
            check_msrs(&[(0x10, 1), (0x99, 2)], &[0x10])
                .unwrap_err()
                .contains("0x99")
        );
        assert!(
            check_msrs(&[(0x10, 1), (0x10, 2)], &[0x10])
                .unwrap_err()
                .contains("0x10 came twice")
        );
    }

    #[test]
    fn the_tsc_comes_first_and_the_rest_stays_in_order() {
        let sorted = tsc_first(vec![(0x3b, 1), (0xc000_0082, 2), (0x10, 3), (0x1a0, 4)]);
        assert_eq!(sorted, [(0x10, 3), (0x3b, 1), (0xc000_0082, 2), (0x1a0, 4)]);
    }
}
