//! The phases of a migration as somebody sees them who stands between its two sides.

use wire::{Message, SkipReason};

/// A phase, named by what ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// The reply to the control connection's preamble has passed.
    Connected,
    /// `Hello` has passed.
    Hello,
    /// `Accept` has passed.
    Accept,
    /// Some of the pages of round 0 have passed, the last of them not.
    FirstPages,
    /// `Skip` with what the guest called free has passed.
    Hints,
    /// `RoundEnd` of round 0 has passed.
    RoundEnd0,
    /// `RoundReceived` of round 0 has passed.
    RoundReceived0,
    /// The first batch of round 1 has passed.
    LaterRound,
    /// The last `RoundEnd` has passed: the guest is paused.
    LastRoundEnd,
    /// A section of the machine's state has passed.
    Section,
    /// `StateEnd` has passed.
    StateEnd,
    /// `Ready` has passed.
    Ready,
    /// `Commit` has come from the source, and is not passed on.
    CommitHeld,
    /// `Commit` has passed.
    Commit,
    /// `Running` has passed.
    Running,
}

impl Phase {
    pub(crate) const ALL: [Phase; 15] = [
        Phase::Connected,
        Phase::Hello,
        Phase::Accept,
        Phase::FirstPages,
        Phase::Hints,
        Phase::RoundEnd0,
        Phase::RoundReceived0,
        Phase::LaterRound,
        Phase::LastRoundEnd,
        Phase::Section,
        Phase::StateEnd,
        Phase::Ready,
        Phase::CommitHeld,
        Phase::Commit,
        Phase::Running,
    ];

    pub(crate) fn is_over(self, seen: &Seen) -> bool {
        match self {
            Phase::Connected => seen.connected,
            Phase::Hello => seen.hello,
            Phase::Accept => seen.accept,
            Phase::FirstPages => seen.pages,
            Phase::Hints => seen.hinted,
            Phase::RoundEnd0 => seen.round_end_0,
            Phase::RoundReceived0 => seen.round_received_0,
            Phase::LaterRound => seen.later_batch,
            Phase::LastRoundEnd => seen.last_round_end,
            Phase::Section => seen.section,
            Phase::StateEnd => seen.state_end,
            Phase::Ready => seen.ready,
            Phase::CommitHeld => false,
            Phase::Commit => seen.commit_passed,
            Phase::Running => seen.running,
        }
    }
}

/// What has passed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) connected: bool,
    pub(crate) commit_passed: bool,
    hello: bool,
    accept: bool,
    pages: bool,
    hinted: bool,
    round_end_0: bool,
    round_received_0: bool,
    later_batch: bool,
    last_round_end: bool,
    section: bool,
    state_end: bool,
    ready: bool,
    running: bool,
}

impl Seen {
    /// A control message has passed; `harmed`: not as it was, or not at all.
    pub(crate) fn message(&mut self, message: &Message, harmed: bool) {
        match message {
            Message::Hello(_) => self.hello = true,
            Message::Accept(_) => self.accept = true,
            Message::Skip(skip) => self.hinted |= skip.reason == SkipReason::Hinted,
            Message::RoundEnd { round, last } => {
                self.round_end_0 |= *round == 0;
                self.last_round_end |= *last;
            }
            Message::RoundReceived { round } => self.round_received_0 |= *round == 0,
            Message::Section(_) => self.section = true,
            Message::StateEnd { .. } => self.state_end = true,
            Message::Ready { .. } => self.ready = true,
            Message::Commit(_) => self.commit_passed |= !harmed,
            Message::Running(_) => self.running = true,
            _ => {}
        }
    }

    /// Some pages of a batch have passed.
    pub(crate) fn pages(&mut self) {
        self.pages = true;
    }

    /// A whole batch has passed, or a marker.
    pub(crate) fn batch(&mut self, round: u32, marker: bool) {
        self.later_batch |= round > 0 && !marker;
    }
}
