//! What the VMM could not do.

use pages::PageRange;
use std::io;
use std::path::PathBuf;

/// What the VMM could not do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no KVM device.
    #[error("there is no {}: this host has no KVM, or its module is not loaded (kvm_intel or kvm_amd)", path.display())]
    NoKvm {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The KVM device may not be opened.
    #[error("no permission to open {}: run as root or as a member of the group kvm", path.display())]
    KvmPermission {
        /// The device.
        path: PathBuf,
    },
    /// KVM lacks something that a guest needs.
    #[error("this host's KVM lacks {0}")]
    KvmLacks(String),
    /// KVM refused.
    #[error("{doing}: {source}")]
    Kvm {
        /// What was being done, with the value it was done to.
        doing: String,
        /// KVM's reason.
        #[source]
        source: io::Error,
    },
    /// This host's KVM met an instruction that it cannot run.
    #[error(
        "this host's KVM cannot run this kernel: on vCPU {vcpu} it could not emulate the instruction at {rip:#x}, bytes {bytes}; use a \
         host with hardware virtualization"
    )]
    Emulation {
        /// The vCPU.
        vcpu: u32,
        /// Guest-virtual address of the instruction.
        rip: u64,
        /// Its bytes in hexadecimal, or why they are not known.
        bytes: String,
    },
    /// A vCPU ended in a way that no guest should: a triple fault, a failed entry.
    #[error("vCPU {vcpu} cannot go on: {why}")]
    Vcpu {
        /// The vCPU.
        vcpu: u32,
        /// What happened.
        why: String,
    },
    /// A configuration that makes no machine.
    #[error("{0}")]
    Config(String),
    /// A file to boot from that does not do.
    #[error("{what} {}: {why}", path.display())]
    File {
        /// `kernel` or `initrd`.
        what: &'static str,
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Guest memory that is not there.
    #[error("guest memory at {address:#x}, {len} bytes: {why}")]
    Address {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        len: u64,
        /// The reason.
        why: String,
    },
    /// Pages that KVM would not take.
    #[error("pages {0} cannot be RAM of this machine: its devices lie there")]
    RamOverDevices(PageRange),
    /// State that does not restore: which section, and why.
    #[error("state of {section}: {why}")]
    State {
        /// The section's name.
        section: String,
        /// What is wrong.
        why: String,
    },
    /// The machine is not in the right condition: a save while it runs, a resume after a failed restore.
    #[error("{0}")]
    Condition(String),
    /// A thread could not be started.
    #[error("starting a thread: {0}")]
    Thread(#[source] io::Error),
    /// Guest RAM.
    #[error(transparent)]
    Memory(#[from] memory::Error),
    /// The balloon.
    #[error(transparent)]
    Balloon(#[from] balloon::Error),
}

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An [`Error::Kvm`].
    pub(crate) fn kvm(doing: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Error::Kvm {
            doing: doing.into(),
            source: source.into(),
        }
    }

    /// An [`Error::State`].
    pub(crate) fn state(section: impl Into<String>, why: impl Into<String>) -> Self {
        Error::State {
            section: section.into(),
            why: why.into(),
        }
    }
}

impl From<Error> for machine::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Kvm { doing, source } => machine::Error::Host { doing, source },
            Error::Memory(error) => error.into(),
            other => machine::Error::Refused(other.to_string()),
        }
    }
}
