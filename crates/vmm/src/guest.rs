//! All of it put together, as a migration takes it.

use crate::{BootFiles, Console, Error, Result, Tracking, VmConfig};
use machine::{DirtyTracker, FreePages, Machine, MachineConfig};
use memory::GuestMemory;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// How a guest ended by itself.
#[derive(Clone, Debug)]
pub enum Ended {
    /// It switched its power off.
    PowerOff,
    /// It asked for a reset, which ends it here: there is nothing to boot from again.
    Reset,
    /// It cannot go on.
    Failed(Arc<Error>),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ended::PowerOff => write!(f, "it switched its power off"),
            Ended::Reset => write!(f, "it asked for a reset"),
            Ended::Failed(error) => write!(f, "{error}"),
        }
    }
}

/// A guest as a migration takes it.
pub struct Parts {
    /// Its RAM.
    pub ram: Arc<GuestMemory>,
    /// Which of its pages are written.
    pub tracker: Box<dyn DirtyTracker>,
    /// Its balloon.
    pub free_pages: Box<dyn FreePages>,
    /// Its vCPUs and devices.
    pub machine: Box<dyn Machine>,
}

/// A Linux guest under KVM. Clones are handles to the same one; it is switched off when the last of them, and the last
/// machine that came from [`LinuxGuest::parts`], is gone.
#[derive(Clone)]
pub struct LinuxGuest {}

impl LinuxGuest {
    /// Boots a kernel in new memory, and lets it run.
    ///
    /// # Errors
    /// No KVM, or one that lacks something; files that are no kernel or too large; memory that cannot be had.
    pub fn boot(config: VmConfig, files: &BootFiles, console: Console) -> Result<LinuxGuest> {
        let _ = (config, files, console);
        Err(Error::Condition("not built yet".to_owned()))
    }

    /// A machine like the one that `config` describes, paused and empty: its RAM comes into `ram`, then
    /// [`Machine::restore`] brings it to life. `config` comes from a peer and is checked against this host.
    ///
    /// # Errors
    /// Every reason why this host cannot run it, each by name.
    pub fn new_for_restore(
        config: &MachineConfig,
        ram: Arc<GuestMemory>,
        tracking: Tracking,
        console: Console,
    ) -> std::result::Result<LinuxGuest, Vec<String>> {
        let _ = (config, ram, tracking, console);
        Err(vec!["not built yet".to_owned()])
    }

    /// The guest as a migration takes it.
    ///
    /// # Errors
    /// A host that does not track writes in the way that was asked for.
    pub fn parts(&self) -> Result<Parts> {
        Err(Error::Condition("not built yet".to_owned()))
    }

    /// Its balloon device, for the host's side of it: targets, statistics.
    pub fn balloon(&self) -> Option<balloon::SharedBalloon<memory::DeviceMemory>> {
        None
    }

    /// Whether its vCPUs run.
    pub fn is_running(&self) -> bool {
        false
    }

    /// How it ended by itself, if it has within `time`.
    pub fn ended(&self, time: Duration) -> Option<Ended> {
        let _ = time;
        None
    }
}
