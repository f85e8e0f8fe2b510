//! What a VMM's guest can do beside being migrated.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// A balloon, as the host sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonState {
    /// `standard`, `bitmap` or an embedding VMM's own.
    pub dialect: String,
    /// Pages that the host wants in it.
    pub target_pages: u64,
    /// Pages that the guest says are in it.
    pub actual_pages: u64,
}

/// What a guest says of its memory. Pages of 4 KiB.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BalloonStats {
    /// Whether the guest said it in answer to this question; else it is what it said last.
    pub fresh: bool,
    /// Why it is not fresh.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// How long ago it said so; null where it never did, or before anybody looked.
    pub age_ms: Option<f64>,
    /// Pages that no one in the guest uses.
    pub free_pages: Option<u64>,
    /// Pages that the guest manages.
    pub total_pages: Option<u64>,
    /// Pages that could be had without swapping.
    pub available_pages: Option<u64>,
    /// Pages that the host wants in the balloon.
    pub target_pages: u64,
    /// Pages that the guest says are in it.
    pub actual_pages: u64,
    /// Whatever else it said, by name.
    #[serde(default)]
    pub others: BTreeMap<String, u64>,
}

const NO_BALLOON: &str = "the guest has no balloon";

/// A guest's knobs. Called from several threads. Implementations take their locks briefly: a migration needs them too.
pub trait GuestControls: Send + Sync {
    /// Its balloon, if it has one. Must not block, and must not write guest memory: it is asked during migrations too.
    fn balloon(&self) -> Option<BalloonState> {
        None
    }

    /// Asks the guest for a balloon of `pages` pages; does not wait for it.
    ///
    /// # Errors
    /// One sentence: no balloon, or more pages than the guest has.
    fn set_balloon_target(&self, pages: u64) -> Result<(), String> {
        let _ = pages;
        Err(NO_BALLOON.to_owned())
    }

    /// Asks the guest for statistics, and waits for its answer, for `within` at most. Never called while a migration owns
    /// the guest, and has stopped asking when it returns. May block.
    ///
    /// # Errors
    /// One sentence: no balloon, no driver, no statistics queue.
    fn balloon_stats(&self, within: Duration) -> Result<BalloonStats, String> {
        let _ = within;
        Err(NO_BALLOON.to_owned())
    }
}

/// A guest without knobs.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoControls;

impl GuestControls for NoControls {}
