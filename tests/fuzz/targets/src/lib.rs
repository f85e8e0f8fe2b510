//! What is fuzzed: a function a target. Each takes bytes of any kind, plays the hostile side with them, and panics where
//! our side does what it must not.
//!
//! libFuzzer calls them (`scripts/fuzz`, on nightly), and so does `tests/replay.rs` with the committed inputs, on every
//! test run. A target is the same on every machine: no clock, no random numbers, no threads that race.
#![forbid(unsafe_code)]
#![expect(clippy::expect_used, reason = "a panic is how a target tells of a finding")]

mod balloon;
mod device_state;
mod engine;
mod json;
mod layout_and_free_map;
mod report_parsing;
mod unpack;
mod wire_decode;

pub use self::balloon::{balloon_bitmap, balloon_bitmap_rfc, balloon_standard};
pub use self::engine::{destination_engine, source_engine};
pub use device_state::device_state;
pub use layout_and_free_map::layout_and_free_map;
pub use report_parsing::report_parsing;
pub use unpack::unpack;
pub use wire_decode::wire_decode;

/// A target: its name, which is also that of its folder in the corpus, and what is called with each input.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: &[Target] = &[
    ("balloon_bitmap", balloon_bitmap),
    ("balloon_bitmap_rfc", balloon_bitmap_rfc),
    ("balloon_standard", balloon_standard),
    ("destination_engine", destination_engine),
    ("device_state", device_state),
    ("layout_and_free_map", layout_and_free_map),
    ("report_parsing", report_parsing),
    ("source_engine", source_engine),
    ("unpack", unpack),
    ("wire_decode", wire_decode),
];
