//! What describes a Linux guest, and what a VMM's refusal means for a command.

use crate::Error;
use balloon::{Dialect, feature};
use clap::ValueEnum;
use std::path::PathBuf;
use vmm::Tracking;

/// The kernel's command line unless another is given.
pub(crate) const DEFAULT_CMDLINE: &str = "console=ttyS0";

/// How a Linux guest's writes are tracked during a migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DirtyTrackerChoice {
    /// The best that this host's KVM offers
    #[default]
    Auto,
    /// KVM's dirty log, read and cleared at once
    Log,
    /// KVM's dirty log, cleared page by page when it was read
    ManualProtect,
    /// KVM's dirty ring, one a vCPU
    Ring,
    /// Write protection by userfaultfd (Linux 6.7)
    Userfault,
}

impl DirtyTrackerChoice {
    /// As the VMM has it.
    pub fn tracking(self) -> Tracking {
        match self {
            DirtyTrackerChoice::Auto => Tracking::Auto,
            DirtyTrackerChoice::Log => Tracking::Log,
            DirtyTrackerChoice::ManualProtect => Tracking::ManualProtect,
            DirtyTrackerChoice::Ring => Tracking::Ring,
            DirtyTrackerChoice::Userfault => Tracking::Userfault,
        }
    }
}

/// A Linux guest.
#[derive(Clone, Debug, PartialEq)]
pub struct LinuxPlan {
    /// Guest RAM, a whole number of pages.
    pub memory_bytes: u64,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Its balloon.
    pub balloon: Option<balloon::Config>,
    /// The kernel.
    pub kernel: PathBuf,
    /// Its initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Its command line.
    pub cmdline: String,
    /// How its writes are tracked.
    pub tracking: Tracking,
    /// The file that its console goes to; `None`: the terminal.
    pub console: Option<PathBuf>,
    /// For tests: its state refuses to be saved.
    pub refuse_save: bool,
}

/// Lets a Linux guest report its free pages where that was asked for. It is off otherwise: it makes the guest give free
/// memory back all the time, and what is given back has to be found again when the guest wants it.
pub(crate) fn add_reporting(balloon: Option<&mut balloon::Config>, reporting: bool) -> Result<(), Error> {
    match balloon {
        _ if !reporting => Ok(()),
        Some(config) if config.dialect == Dialect::Standard => {
            config.features |= feature::REPORTING;
            Ok(())
        }
        _ => Err(Error::Usage(
            "--free-page-reporting goes with --balloon standard only".to_owned(),
        )),
    }
}

/// A VMM's error as the command's: what the host or a file lacks is a check that said no, before anything was sent; a vCPU
/// that cannot go on is a guest that failed.
pub(crate) fn vmm_error(error: &vmm::Error) -> Error {
    match error {
        vmm::Error::Emulation { .. } | vmm::Error::Vcpu { .. } => Error::Failed(error.to_string()),
        _ => Error::Refused(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn what_the_host_lacks_is_refused_and_a_guest_that_fails_has_failed() {
        let path = PathBuf::from("/dev/kvm");
        for (error, code, word) in [
            (vmm::Error::NoKvm { path: path.clone() }, 3, "there is no /dev/kvm"),
            (vmm::Error::KvmPermission { path }, 3, "no permission to open /dev/kvm"),
            (
                vmm::Error::KvmLacks("KVM_CAP_IRQFD".to_owned()),
                3,
                "KVM lacks KVM_CAP_IRQFD",
            ),
            (
                vmm::Error::Kvm {
                    doing: "creating a VM".to_owned(),
                    source: io::ErrorKind::OutOfMemory.into(),
                },
                3,
                "creating a VM",
            ),
            (
                vmm::Error::File {
                    what: "kernel",
                    path: "k".into(),
                    why: "it is neither a bzImage nor an ELF file".to_owned(),
                },
                3,
                "kernel k: it is neither",
            ),
            (
                vmm::Error::Emulation {
                    vcpu: 0,
                    rip: 0x1000,
                    bytes: "f3 0f b8 c0".to_owned(),
                },
                4,
                "could not emulate the instruction at 0x1000, bytes f3 0f b8 c0",
            ),
            (
                vmm::Error::Vcpu {
                    vcpu: 1,
                    why: "a triple fault at 0x10".to_owned(),
                },
                4,
                "vCPU 1 cannot go on",
            ),
        ] {
            let error = vmm_error(&error);
            assert_eq!(error.exit_code(), code, "{error}");
            assert!(error.to_string().contains(word), "{word}: {error}");
        }
    }

    #[test]
    fn reporting_is_on_request_and_the_standard_balloons_alone() {
        let mut standard = balloon::Config::new(Dialect::Standard, 0x1f);
        add_reporting(Some(&mut standard), false).unwrap();
        assert_eq!(standard.features, 0x1f);
        add_reporting(Some(&mut standard), true).unwrap();
        assert_eq!(standard.features, 0x3f);
        let mut bitmap = balloon::Config::new(Dialect::Bitmap, 0x1f);
        add_reporting(Some(&mut bitmap), false).unwrap();
        add_reporting(None, false).unwrap();
        for refused in [add_reporting(Some(&mut bitmap), true), add_reporting(None, true)] {
            let error = refused.unwrap_err();
            let named = error.to_string().contains("--free-page-reporting");
            assert!(error.exit_code() == 2 && named, "{error}");
        }
    }
}
