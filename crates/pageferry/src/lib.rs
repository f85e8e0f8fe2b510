//! Live migration of KVM guests that leaves free pages behind: the library that a VMM embeds.
//!
//! A VMM offers its guest as the four traits of the `machine` crate, bundled in a [`Guest`], and calls
//! [`Migration::send`] or [`Migration::receive`]. Both return a [`Handle`] at once: `progress()`, `cancel()` and
//! `finish()`, which hands the guest back. What is decided, the `engine` decides; this crate carries its actions out:
//!
//! - one control loop on the caller's tokio runtime ([`Migration`]), which owns the engine;
//! - one thread a data stream, with blocking sockets, which moves pages straight between guest memory and the socket;
//! - one worker thread, which calls the guest's traits, one call at a time, in the order that the engine gives.
//!
//! Invariants: no page content passes through the control loop; a guest is called from the worker alone, but for
//! [`machine::GuestRam`]; whatever the peer sends is checked before it is believed; every wait has a bound; cancelling
//! unblocks every thread, by `shutdown(2)` on the sockets.
#![forbid(unsafe_code)]

mod address;
mod answers;
mod control;
pub mod control_socket;
mod data;
mod destination;
pub mod docs;
mod error;
mod handle;
mod options;
mod pulse;
mod report;
mod security;
mod source;
mod transport;
mod worker;

pub use address::Address;
pub use engine::{Ask, DestinationConfig, Ending, OnTimeout, Outcome, Progress, Report, SkipSet, SourceConfig, Tuning};
pub use error::Error;
pub use handle::{Abandoned, Finished, Handle, Migration};
pub use options::{Compress, Guest, Incoming, ReceiveOptions, SendOptions};
pub use security::{Security, Tls, TlsFiles, TlsPem, Token};
pub use transport::Listener;
