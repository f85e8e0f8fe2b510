//! What a machine is made of, and what it boots.

use crate::platform::{MAX_VCPUS, MIN_RAM_BYTES};
use crate::{Error, Result};
use pages::Layout;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

/// How writes of the vCPUs are tracked during a migration. The VMM's own writes are tracked beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tracking {
    /// The best that this host's KVM offers: [`Tracking::ManualProtect`], else [`Tracking::Log`].
    #[default]
    Auto,
    /// `KVM_GET_DIRTY_LOG`, which reads and protects at once.
    Log,
    /// `KVM_GET_DIRTY_LOG` that only reads, `KVM_CLEAR_DIRTY_LOG` that protects what was read, and no protection of
    /// everything when tracking starts.
    ManualProtect,
    /// A ring of page numbers a vCPU.
    Ring,
    /// Write protection by userfaultfd, which KVM's tables follow. Needs Linux 6.7.
    Userfault,
}

/// A machine to be made.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// Where RAM lies; [`pages::Layout::pc`] leaves the hole that the devices need.
    pub layout: Arc<Layout>,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// The balloon; `None`: none.
    pub balloon: Option<balloon::Config>,
    /// How writes are tracked.
    pub tracking: Tracking,
}

impl VmConfig {
    /// Whether such a machine can be.
    pub(crate) fn check(&self) -> Result<()> {
        if self.vcpus == 0 || self.vcpus > MAX_VCPUS {
            return Err(Error::Config(format!(
                "{} vCPUs: a machine has 1 to {MAX_VCPUS}",
                self.vcpus
            )));
        }
        let bytes = self.layout.total_bytes();
        if bytes < MIN_RAM_BYTES {
            return Err(Error::Config(format!(
                "{bytes} bytes of RAM are too few: give at least {} MiB",
                MIN_RAM_BYTES >> 20
            )));
        }
        let pc = Layout::pc(self.layout.total_pages()).map_err(|e| Error::Config(e.to_string()))?;
        if pc != *self.layout {
            return Err(Error::Config(
                "RAM has to lie as in a PC: up to 3 GiB, then from 4 GiB on".to_owned(),
            ));
        }
        Ok(())
    }
}

/// What a machine boots.
#[derive(Clone, Debug, Default)]
pub struct BootFiles {
    /// A bzImage, or an ELF vmlinux.
    pub kernel: PathBuf,
    /// Its initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Its command line.
    pub cmdline: String,
}

/// Where the serial console leads.
pub struct Console {
    /// What is typed: read by a thread of the device, never by more than the guest takes. `None`: nothing is.
    pub input: Option<OwnedFd>,
    /// What the guest prints, written on the thread of the vCPU that prints. It must not block for long: the vCPU stands
    /// still meanwhile, and so does whoever pauses the machine. A write that fails is dropped, with one warning.
    pub output: Box<dyn Write + Send>,
}

impl std::fmt::Debug for Console {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Console")
            .field("input", &self.input)
            .finish_non_exhaustive()
    }
}
