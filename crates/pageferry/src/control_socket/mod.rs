//! The control socket: how an operator steers a guest that runs (schema: `docs/control.md`).
//!
//! A Unix stream socket of mode 0600. A request is a JSON object on a line, `{"id":1,"method":"status"}`; its answer is
//! `{"id":1,"result":{..}}` or `{"id":1,"error":"one sentence"}`; a client that asked to follow gets events besides,
//! `{"event":"progress","data":{..}}`.
//!
//! ```text
//!   client --- connection ---+                     version, status, progress, cancel: answered at once
//!   client --- connection ---+--> host ---> Guest  migrate, pause, resume, balloon, balloon-stats, quit: one at a time
//! ```
//!
//! A VMM makes a [`ControlListener`], and gives it with its [`Guest`](crate::Guest) to [`serve`]; what its guest can do
//! beside being migrated it offers as [`GuestControls`]. The [`Serving`] ends when the guest was handed over, when a
//! client says `quit`, or when the VMM stops it, and gives the guest back.
//!
//! Invariants:
//!
//! - no client holds a migration up: nobody waits for a client that does not read, and one that went away is missed by
//!   nobody (a migration that it began goes on);
//! - nothing is done to a guest that a migration owns: a second migration, a pause, a balloon's new target and a question
//!   to its driver (which would write guest memory after the last harvest) are refused with the reason (case 20);
//! - after a migration whose end is unknown the guest stays paused, and only an operator who insists lets it run;
//! - what a client sends is bounded: a line to 1 MiB, clients to 16, requests under way to two a client.

mod client;
mod connection;
mod controls;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod host;
mod lines;
mod listener;
mod params;
mod protocol;

pub use client::{ControlClient, Heard};
pub use controls::{BalloonState, BalloonStats, GuestControls, NoControls};
pub use host::{How, Served, Serving, serve};
pub use listener::{ClaimedSocket, ControlListener};
pub use params::{AskWord, MigrateParams, OnTimeoutWord, SetParams, SkipWord};
pub use protocol::{MigrationEnd, ProgressData};

/// The version of what is spoken on the socket.
pub const CONTROL_VERSION: u32 = 2;

/// The longest line of a client, bytes, its end included.
pub const MAX_REQUEST_BYTES: usize = 1 << 20;

/// The most clients at a time.
pub const MAX_CLIENTS: usize = 16;
