//! What a VMM has to offer to be migrated: four traits and the plain types they speak in, nothing else.
//!
//! | trait | what it stands for | who implements it here |
//! |---|---|---|
//! | [`GuestRam`] | guest memory: its layout, bulk transfer between it and a socket, what was never touched | `memory` |
//! | [`DirtyTracker`] | which pages were written | `memory` |
//! | [`FreePages`] | the guest's own word on which pages are free | `balloon`, `softguest`, `memory`'s free map |
//! | [`Machine`] | vCPUs and devices: pause, resume, save, restore | `softguest`, `vmm` |
//!
//! The library calls `GuestRam` from one thread a stream and the other three from its control side, one call at a time.
//! Every method may block, but not without bound.
#![forbid(unsafe_code)]

mod config;
mod free_pages;
mod ram;
mod state;
mod tracker;

pub use config::{BalloonConfig, MachineConfig, Mismatch};
pub use free_pages::{Answer, AnswerSink, BalloonCounts, FreePages, GuestMemoryStats, NoBalloon};
pub use ram::{GuestRam, PageKind};
pub use state::{MachineState, Section};
pub use tracker::DirtyTracker;

use pages::PageRange;

/// What a VMM's side of a migration could not do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host refused: what was being done, and its reason.
    #[error("{doing}: {source}")]
    Host {
        /// What was being done, with the value it was done to.
        doing: String,
        /// The host's reason.
        #[source]
        source: std::io::Error,
    },
    /// Pages that are not guest RAM, or not within one region of it.
    #[error("pages {0} do not lie within one region of guest RAM")]
    OutsideRam(PageRange),
    /// The machine does not do this, or not now.
    #[error("{0}")]
    Refused(String),
}

impl Error {
    /// A [`Error::Host`] from an I/O error.
    pub fn host(doing: impl Into<String>, source: std::io::Error) -> Self {
        Error::Host {
            doing: doing.into(),
            source,
        }
    }
}

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// vCPUs and devices of one guest.
pub trait Machine: Send {
    /// What the machine is made of.
    fn config(&self) -> MachineConfig;

    /// Whether the guest runs now: a paused guest arrives paused.
    fn is_running(&self) -> bool;

    /// Stops the vCPUs and drains the devices. When it has returned, nothing writes guest RAM any more, and every write
    /// in flight before is in the dirty tracker. Fine to call on a paused machine.
    fn pause(&mut self) -> Result<()>;

    /// Lets the guest go on. Fine to call on a running machine. Whatever fails leaves no vCPU running: those that were
    /// started are stopped before the error is returned, as the guest may be resumed elsewhere because of it. A machine
    /// being moved here is paused once more and then dropped, whatever the pause says; its drop has to end its vCPUs.
    fn resume(&mut self) -> Result<()>;

    /// The state of vCPUs and devices of a paused machine. Must not change the machine: it may have to go on.
    fn save(&mut self) -> Result<MachineState>;

    /// Takes over the state of another machine like this one, whose RAM is already here. The machine stays paused.
    /// Whatever fails leaves a machine that must not be resumed.
    fn restore(&mut self, state: &MachineState) -> Result<()>;
}
