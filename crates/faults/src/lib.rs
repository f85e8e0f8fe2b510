//! A migration in virtual time: source engine, destination engine, what lies between them and a guest, from one seed.
//!
//! [`Pair`] drives both engines over links that delay and interleave by seed, with a model of the guest. One step does
//! one thing, picked by the seed among all that may happen; where nothing but the guest may go on, time jumps to the next
//! timer. [`Mishaps`] says what goes wrong, and when. The laws ([`Pair::verdict`]) say what must hold at every step and at
//! the end, whatever went wrong.
//!
//! With the feature `planted`, faults can be planted in the engine: each must break a law.
// A model: its fields are named for what they are, its page numbers fit anything, and what it was not made for may panic.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]
#![forbid(unsafe_code)]

mod data;
mod guest;
mod happen;
mod laws;
mod link;
mod mishaps;
mod pair;
mod reach;
mod rng;
mod seed;
mod setup;
mod sides;

pub use guest::{GARBAGE, Guest, Make, POISON};
pub use link::{Accident, Harm, Line};
pub use mishaps::{AfterSave, Blow, Mishaps, Party};
pub use pair::{Copy, Pair, Process, set_of, state};
pub use rng::Rng;
#[cfg(feature = "planted")]
pub use seed::{SEEDS, caught};
pub use seed::{Told, run_seed};
pub use setup::{Fault, Setup};
