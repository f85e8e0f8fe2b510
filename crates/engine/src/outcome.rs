//! How a migration ended.

use crate::Report;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How it ended; the report's `result`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ending {
    /// The guest is the destination's.
    Completed,
    /// Either side's checks said no; no page was sent.
    Refused,
    /// Something failed; the guest is still the source's.
    Failed,
    /// Somebody cancelled; the guest is still the source's.
    Cancelled,
    /// A time-out passed; the guest is still the source's.
    TimedOut,
    /// Handed over without an answer: the source's copy stays paused, and nobody knows whether the other one runs.
    Unknown,
}

impl Ending {
    /// The exit code of a command that ended so.
    pub fn exit_code(self) -> u8 {
        match self {
            Ending::Completed => 0,
            Ending::Refused => 3,
            Ending::Failed => 4,
            Ending::Cancelled => 5,
            Ending::TimedOut => 6,
            Ending::Unknown => 7,
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Ending::Completed => "completed",
            Ending::Refused => "refused",
            Ending::Failed => "failed",
            Ending::Cancelled => "cancelled",
            Ending::TimedOut => "timed-out",
            Ending::Unknown => "unknown",
        })
    }
}

/// The end of a migration: how, why, and its figures.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// How.
    pub ending: Ending,
    /// Why, unless it completed: one sentence, with the peer's reason where it gave one.
    pub error: Option<String>,
    /// The figures.
    pub report: Report,
}
