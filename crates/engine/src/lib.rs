//! The two sides of a migration as state machines: no I/O, no clock, no threads, no page content.
//!
//! [`Source`] and [`Destination`] are driven alike, in this order:
//!
//! 1. `handle(event, now)` with what happened: a message came, an action was carried out or failed, an operator cancels;
//! 2. `poll_action()` until it returns `None`, carrying each action out in the order given;
//! 3. `poll_timeout()`: when to call `handle_timeout(now)` if nothing happens before.
//!
//! Time is a [`Time`]: a duration since an origin of the caller's choice. So a test drives both sides through any
//! interleaving and any failure, in virtual time, from a seed.
#![forbid(unsafe_code)]

mod action;
mod ask;
mod bandwidth;
mod config;
mod destination;
mod digests;
mod error;
mod fates;
mod faults;
mod limits;
mod outcome;
mod progress;
mod report;
mod source;
mod timers;

pub use action::{
    Chunk, ChunkId, Content, DestinationAction, DestinationEvent, Peeked, ReceivedRun, Rechecked, RunKind, Scanned,
    SourceAction, SourceEvent, Step,
};
pub use config::{Ask, DestinationConfig, OnTimeout, SkipSet, SourceConfig, Tuning};
pub use destination::Destination;
#[cfg(feature = "planted-faults")]
pub use faults::Fault;
pub use outcome::{Ending, Outcome};
pub use progress::{Phase, Progress};
pub use report::{BalloonReport, CompressReport, LinkReport, PagesReport, Report, Role, RoundReport};
pub use source::Source;

/// A point in time: a duration since an origin that the caller chose and keeps. A source's origin is the command to
/// migrate: `total_ms` counts from it.
pub type Time = std::time::Duration;
