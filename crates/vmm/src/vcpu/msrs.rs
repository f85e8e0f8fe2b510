//! A vCPU's model-specific registers.
//!
//! KVM reads and writes lists of them, and stops at the first that it does not like: so each list is worked off piece by
//! piece.

use crate::{Error, Result};
use kvm_bindings::{KVM_MAX_MSR_ENTRIES, Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

/// The time-stamp counter.
pub(super) const TSC: u32 = 0x10;
/// When the local APIC's timer expires, as a value of the TSC.
pub(super) const TSC_DEADLINE: u32 = 0x6e0;

/// Reads `wanted`, leaving out what this vCPU does not have: which those are depends on its CPUID.
pub(super) fn read(vcpu: &VcpuFd, wanted: &[u32]) -> Result<Vec<(u32, u64)>> {
    let mut values = Vec::with_capacity(wanted.len());
    let mut left = wanted;
    while !left.is_empty() {
        let (now, _) = left.split_at(left.len().min(KVM_MAX_MSR_ENTRIES));
        let entry = |index: &u32| kvm_msr_entry {
            index: *index,
            ..Default::default()
        };
        let mut msrs = list(&now.iter().map(entry).collect::<Vec<_>>())?;
        let got = vcpu
            .get_msrs(&mut msrs)
            .map_err(|e| Error::kvm(format!("reading {} MSRs", now.len()), e))?;
        values.extend(msrs.as_slice().iter().take(got).map(|msr| (msr.index, msr.data)));
        let mut next = got;
        if let Some(index) = now.get(got) {
            tracing::debug!(msr = format!("{index:#x}"), "an MSR is not readable: it is left out");
            next += 1;
        }
        left = left.get(next..).unwrap_or_default();
    }
    Ok(values)
}

/// Writes `values`. One that cannot be written, but has its value already, will do.
///
/// # Errors
/// Names the MSR and its value.
pub(super) fn write(vcpu: &VcpuFd, values: &[(u32, u64)]) -> std::result::Result<(), String> {
    let mut left = values;
    while !left.is_empty() {
        let (now, _) = left.split_at(left.len().min(KVM_MAX_MSR_ENTRIES));
        let entry = |(index, data): &(u32, u64)| kvm_msr_entry {
            index: *index,
            data: *data,
            ..Default::default()
        };
        let msrs = list(&now.iter().map(entry).collect::<Vec<_>>()).map_err(|e| e.to_string())?;
        let set = vcpu
            .set_msrs(&msrs)
            .map_err(|e| format!("KVM does not take its {} MSRs: {e}", now.len()))?;
        let mut next = set;
        if let Some((index, value)) = now.get(set) {
            let has = read(vcpu, &[*index]).map_err(|e| e.to_string())?;
            if has != [(*index, *value)] {
                return Err(format!("MSR {index:#x} cannot be set to {value:#x} here"));
            }
            next += 1;
        }
        left = left.get(next..).unwrap_or_default();
    }
    Ok(())
}

fn list(entries: &[kvm_msr_entry]) -> Result<Msrs> {
    Msrs::from_entries(entries).map_err(|e| Error::Condition(format!("{} MSRs: {e:?}", entries.len())))
}
