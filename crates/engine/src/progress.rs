//! How far a migration is, for a progress bar and for an operator who asks.

/// Where in its course a migration is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Waiting for the peer's answer to `Hello` (source), or for `Hello` and its preparation (destination).
    #[default]
    Connecting,
    /// Tracking is being turned on, RAM is being looked at.
    Setup,
    /// A round is under way while the guest runs (or was paused all along).
    Precopy,
    /// The guest is paused for the switchover: last round, state, digests.
    Switchover,
    /// `Commit` has left (source) or has come (destination).
    Committed,
    /// It failed, and what it did to the guest is being undone.
    Undoing,
    /// Over.
    Finished,
}

/// A snapshot of a migration under way.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Where it is.
    pub phase: Phase,
    /// The round under way, from 0.
    pub round: u32,
    /// Pages of this round that are still to be sent; at a destination, pages of RAM that nothing is known of yet.
    pub pending_pages: u64,
    /// Pages sent so far, in all rounds, with content or as zero or fill.
    pub sent_pages: u64,
    /// Pages of guest RAM.
    pub total_pages: u64,
    /// Bytes that crossed on the data streams.
    pub wire_bytes: u64,
    /// The rate at which the guest wrote, bytes a second, from the last harvest.
    pub dirty_bytes_per_s: f64,
    /// The measured bandwidth of all data streams, bytes on the wire a second, as [`Progress::wire_bytes`] counts them:
    /// of pages it is more where they are packed. `None` before the first round is over.
    pub bandwidth_bytes_per_s: Option<f64>,
    /// The downtime to expect if the guest were paused at the last harvest; `None` where nothing was measured yet.
    pub expected_downtime: Option<std::time::Duration>,
}
