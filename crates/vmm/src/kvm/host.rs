//! This host's KVM: whether it is there, and whether it has what a guest needs.

use crate::{Error, Result};
use kvm_bindings::{CpuId, KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm, VmFd};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Where the kernel puts it.
pub(crate) const DEVICE: &str = "/dev/kvm";

/// What every guest of ours needs. All of it is in any KVM since Linux 4.12.
const NEEDED: [(Cap, &str); 18] = [
    (Cap::UserMemory, "USER_MEMORY (guest memory given by a process)"),
    (Cap::Irqchip, "IRQCHIP (interrupt controllers in the kernel)"),
    (Cap::Pit2, "PIT2 (a timer in the kernel)"),
    (Cap::PitState2, "PIT_STATE2 (the timer's state)"),
    (Cap::SetTssAddr, "SET_TSS_ADDR"),
    (Cap::SetIdentityMapAddr, "SET_IDENTITY_MAP_ADDR"),
    (Cap::ExtCpuid, "EXT_CPUID (a guest's CPUID)"),
    (
        Cap::MpState,
        "MP_STATE (whether a vCPU runs, halts or waits for others)",
    ),
    (Cap::VcpuEvents, "VCPU_EVENTS (pending exceptions and interrupts)"),
    (Cap::Debugregs, "DEBUGREGS (debug registers)"),
    (Cap::Xsave, "XSAVE (extended register state)"),
    (Cap::Xcrs, "XCRS (extended control registers)"),
    (Cap::Ioeventfd, "IOEVENTFD (doorbells without an exit)"),
    (Cap::Irqfd, "IRQFD (interrupts by eventfd)"),
    (Cap::AdjustClock, "ADJUST_CLOCK (the guest's clock)"),
    (Cap::KvmclockCtrl, "KVMCLOCK_CTRL (telling a guest that it was paused)"),
    (Cap::ImmediateExit, "IMMEDIATE_EXIT (a pause that cannot be missed)"),
    (Cap::DestroyMemoryRegionWorks, "DESTROY_MEMORY_REGION_WORKS"),
];

/// VMX, in leaf 1's ECX.
const VMX: u32 = 1 << 5;
/// SVM, in leaf 0x80000001's ECX.
const SVM: u32 = 1 << 2;
/// The TSC deadline timer, in leaf 1's ECX.
const TSC_DEADLINE: u32 = 1 << 24;

/// This host's KVM, open and checked.
#[derive(Debug)]
pub(crate) struct Host {
    kvm: Kvm,
}

impl Host {
    /// Opens KVM, by default at [`DEVICE`], and checks it.
    ///
    /// # Errors
    /// [`Error::NoKvm`], [`Error::KvmPermission`]; [`Error::KvmLacks`] with everything that is missing.
    pub(crate) fn open(path: &Path) -> Result<Host> {
        let doing = || format!("opening {}", path.display());
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|e| Error::kvm(doing(), e))?;
        let kvm = Kvm::new_with_path(&name).map_err(|e| match e.errno() {
            libc::ENOENT | libc::ENXIO | libc::ENODEV | libc::ENOTDIR => Error::NoKvm { path: path.to_owned() },
            libc::EACCES | libc::EPERM => Error::KvmPermission { path: path.to_owned() },
            _ => Error::kvm(doing(), e),
        })?;
        let version = kvm.get_api_version();
        if u32::try_from(version) != Ok(KVM_API_VERSION) {
            return Err(Error::KvmLacks(format!(
                "API version {KVM_API_VERSION}: {} says {version}",
                path.display()
            )));
        }
        let missing = missing(|cap| kvm.check_extension(cap));
        match missing.is_empty() {
            true => Ok(Host { kvm }),
            false => Err(Error::KvmLacks(missing.join(", "))),
        }
    }

    /// A new VM, with nothing in it.
    pub(crate) fn create_vm(&self) -> Result<VmFd> {
        // A signal may come in between; twice in a row is odd, sixteen times is something else.
        for _ in 0..16 {
            match self.kvm.create_vm() {
                Err(e) if e.errno() == libc::EINTR => {}
                made => return made.map_err(|e| Error::kvm("making a VM", e)),
            }
        }
        Err(Error::kvm(
            "making a VM",
            std::io::Error::from_raw_os_error(libc::EINTR),
        ))
    }

    /// The CPUID that a guest may have here: all that KVM supports, without nested virtualization, whose state we do not
    /// carry.
    pub(crate) fn cpuid(&self) -> Result<CpuId> {
        let mut cpuid = self
            .kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(|e| Error::kvm("asking KVM which CPUID it supports", e))?;
        let deadline = self.kvm.check_extension(Cap::TscDeadlineTimer);
        for entry in cpuid.as_mut_slice() {
            match entry.function {
                1 => {
                    entry.ecx &= !VMX;
                    // KVM says it apart, as it depends on the interrupt controllers, which we have.
                    entry.ecx |= if deadline { TSC_DEADLINE } else { 0 };
                }
                0x8000_0001 => entry.ecx &= !SVM,
                _ => {}
            }
        }
        Ok(cpuid)
    }

    /// The MSRs that make up a vCPU's state here.
    pub(crate) fn msrs(&self) -> Result<Vec<u32>> {
        let list = self
            .kvm
            .get_msr_index_list()
            .map_err(|e| Error::kvm("asking KVM which MSRs a vCPU has", e))?;
        let listed = list.as_slice().iter().copied();
        let mut msrs: Vec<u32> = listed.filter(|msr| !WALL_CLOCK.contains(msr)).collect();
        msrs.extend(
            MEMORY_TYPES
                .into_iter()
                .flatten()
                .filter(|msr| !list.as_slice().contains(msr)),
        );
        Ok(msrs)
    }

    /// Bytes of a vCPU's extended register state.
    pub(crate) fn xsave_bytes(&self) -> usize {
        // Before Linux 5.17 there was no way to have more than this.
        let least = size_of::<kvm_bindings::kvm_xsave>();
        usize::try_from(self.kvm.check_extension_int(Cap::Xsave2)).map_or(least, |bytes| bytes.max(least))
    }

    /// Whether `KVM_GET_XSAVE2` is there.
    pub(crate) fn has_xsave2(&self) -> bool {
        self.kvm.check_extension_int(Cap::Xsave2) > 0
    }

    /// Whether a guest's TSC can have another frequency than the host's.
    pub(crate) fn scales_tsc(&self) -> bool {
        self.kvm.check_extension(Cap::TscControl)
    }

    /// The most vCPUs of a VM.
    pub(crate) fn max_vcpus(&self) -> usize {
        self.kvm.get_max_vcpus()
    }
}

/// Where the guest last asked KVM to write the wall clock. Not a vCPU's state: setting it makes KVM write there, once more,
/// whatever the guest keeps there by now. A guest sets it each time before it reads.
const WALL_CLOCK: [u32; 2] = [0x11, 0x4b56_4d00];

/// Memory type ranges, which KVM has and does not list.
const MEMORY_TYPES: [std::ops::RangeInclusive<u32>; 5] = [
    0x200..=0x20f,
    0x250..=0x250,
    0x258..=0x259,
    0x268..=0x26f,
    0x2ff..=0x2ff,
];

/// Everything of [`NEEDED`] that is not there.
fn missing(has: impl Fn(Cap) -> bool) -> Vec<&'static str> {
    let lacking = NEEDED.into_iter().filter(|(cap, _)| !has(*cap));
    lacking.map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_host_without_kvm_is_told_in_a_sentence() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["kvm", "no/such/folder"] {
            let path = dir.path().join(name);
            let error = Host::open(&path).unwrap_err();
            assert!(matches!(error, Error::NoKvm { .. }), "{error}");
            assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        }
    }

    #[test]
    fn a_device_that_may_not_be_opened_is_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kvm");
        let file = File::create(&path).unwrap();
        file.set_permissions(std::fs::Permissions::from_mode(0o000)).unwrap();
        match Host::open(&path).unwrap_err() {
            Error::KvmPermission { path: told } => assert_eq!(told, path),
            // Root may open anything.
            other => assert!(rustix::process::geteuid().is_root(), "{other}"),
        }
    }

    #[test]
    fn what_is_no_kvm_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("kvm");
        File::create(&file).unwrap();
        for path in [&file, Path::new("/dev/null"), dir.path(), Path::new("/dev/\0")] {
            let error = Host::open(path).unwrap_err().to_string();
            assert!(!error.is_empty(), "{path:?}");
        }
        let error = Host::open(Path::new("/dev/null")).unwrap_err();
        assert!(
            matches!(&error, Error::KvmLacks(what) if what.contains("API version 12")),
            "{error}"
        );
    }

    #[test]
    fn each_missing_capability_is_named() {
        assert!(missing(|_| true).is_empty());
        assert_eq!(missing(|_| false).len(), NEEDED.len());
        for (absent, name) in NEEDED {
            let missing = missing(|cap| cap as u32 != absent as u32);
            assert_eq!(missing, [name]);
        }
    }
}
