//! The control messages: what a control frame's payload decodes to.

use machine::{MachineConfig, Section};
use pages::PageRange;
use serde::{Deserialize, Serialize};

/// The most ranges in one [`Skip`]: keeps its frame well below the limit. More go into further messages.
pub const MAX_SKIP_RANGES: usize = 32_768;

/// The most bytes of a reason that a peer gives; longer ones are cut by the sender and refused by the receiver.
pub const MAX_REASON_BYTES: usize = 4096;

/// A control message. Which side sends it is said beside each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Source, first: what is to be migrated, and how.
    Hello(Hello),
    /// Destination: it is prepared, send.
    Accept(Accept),
    /// Destination: it will not take this guest, for these reasons, one a mismatch. Ends the connection.
    Refuse {
        /// Why, each a sentence that stands alone.
        reasons: Vec<String>,
    },
    /// Source, in round 0, before its `RoundEnd`: pages that are not sent, and why.
    Skip(Skip),
    /// Source: everything of this round has been handed to the streams.
    RoundEnd {
        /// Counted from 0.
        round: u32,
        /// Whether the guest was paused when the round's pages were harvested: no round follows.
        last: bool,
    },
    /// Destination: every stream's marker of this round and its `RoundEnd` have come, and all its pages are in memory.
    RoundReceived {
        /// Counted from 0.
        round: u32,
    },
    /// Source, guest paused: one vCPU's or device's state, or a piece of it. Pieces of one section have its name and
    /// version and follow each other; no two sections have the same name.
    Section(Section),
    /// Source: all sections have been sent.
    StateEnd {
        /// How many there were, each counted once in however many pieces it came.
        sections: u32,
    },
    /// Source, with `verify`, guest paused, before `StateEnd`: what its RAM digests to.
    Digests(Digests),
    /// Destination: RAM and state are here, restored and (with `verify`) equal. It runs on `Commit` and not before.
    Ready {
        /// Whether digests were compared.
        verified: bool,
        /// Microseconds that it waited for its own digest and the comparison when all else was there (`StateEnd` had
        /// come). They are the verification's and not the downtime's.
        verify_us: u64,
    },
    /// Source: the guest is the destination's from here on. After this has left, the source never resumes by itself.
    Commit(Commit),
    /// Destination: the guest runs (or stays paused, as it was).
    Running(Running),
    /// Destination, in answer to `Commit`: it could not run the guest and never will. The source may resume it.
    NotRunning(NotRunning),
    /// Either side: it gives up. Ends the connection. Not sent by a source after `Commit`.
    Abort {
        /// Why: a sentence that the other side prints.
        reason: String,
        /// What kind of reason that is: the other side's migration ends in the same way.
        cause: AbortCause,
    },
    /// Either side, when it has been silent for a while: it is alive.
    Ping,
    /// Destination, ahead of `Accept`, from version 2 on: what it can do beyond what it must.
    Offer(Offer),
    /// Source, right after `Accept`, from version 3 on: what is agreed on beyond `Hello`.
    Terms(Terms),
    /// Source, in place of `Hello` on a new control connection, from version 3 on: takes up a migration whose
    /// connections were lost. The new connections have a session number of their own.
    Resume(Resume),
    /// Destination, in answer to `Resume`, any number of times: pages of the open round that are in its memory for certain.
    Have(Have),
    /// Destination, behind the last `Have`: it goes on.
    Resumed {
        /// The open round: all before it are complete. Of this one everything but the pages that `Have` named comes
        /// again, `Skip`, markers and `RoundEnd` included.
        round: u32,
        /// Bytes of batches that have arrived whole since the migration began.
        wire_bytes: u64,
    },
}

/// See [`Message::Hello`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// What the machine is made of.
    pub config: MachineConfig,
    /// Whether the guest runs; a paused one arrives paused.
    pub running: bool,
    /// Data streams that the source opens, 1 to 64.
    pub streams: u16,
    /// Whether both sides digest RAM and compare before the hand-over.
    pub verify: bool,
    /// Only checks: the destination answers `Accept` or `Refuse`, and waits for the next source.
    pub dry_run: bool,
}

/// See [`Message::Accept`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accept {
    /// Whether the destination's RAM is populated ahead of time.
    pub populated: bool,
}

/// See [`Message::Offer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The codecs whose batches it takes: [`crate::batch::Codec::bit`] of each. No other bit is set.
    pub codecs: u32,
}

/// See [`Message::Terms`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// Milliseconds for which the source will try to take the migration up again after its connections were lost; 0: not
    /// at all.
    pub resume_window_ms: u64,
}

/// See [`Message::Resume`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// The session number that the migration began with.
    pub session: [u8; 16],
}

/// What a page became at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Arrived {
    /// Its content came.
    Data,
    /// It came as zero.
    Zero,
    /// It was filled.
    Filled,
}

/// See [`Message::Have`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Have {
    /// What these pages became.
    pub arrived: Arrived,
    /// Which, each within one region, at most [`MAX_SKIP_RANGES`]; a page is in one `Have` at most.
    pub ranges: Vec<PageRange>,
}

/// Why a page was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SkipReason {
    /// Never touched: it reads as zero.
    Hole,
    /// The guest called it free.
    Hinted,
    /// The balloon holds it.
    Ballooned,
}

/// See [`Message::Skip`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skip {
    /// Why these were skipped.
    pub reason: SkipReason,
    /// Which, each within one region, at most [`MAX_SKIP_RANGES`]; a page is in one `Skip` at most.
    pub ranges: Vec<PageRange>,
}

/// See [`Message::Digests`]. RAM is cut, region by region, into chunks of `chunk_pages` (a region's last is shorter);
/// each gets the digest of its pages (see `machine::GuestRam::digest`), those left out whose content is nobody's:
/// hinted, ballooned or filled, and not sent since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digests {
    /// Pages in a chunk, never 0.
    pub chunk_pages: u64,
    /// A digest a chunk, regions in order.
    pub sums: Vec<u128>,
}

/// See [`Message::Commit`]. The times let the destination report downtime and total without a common clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// Microseconds since the command to migrate.
    pub total_us: u64,
    /// Microseconds since the guest was paused, `verify_us` left out.
    pub downtime_us: u64,
    /// Microseconds that digesting added, on both sides.
    pub verify_us: u64,
}

/// See [`Message::Running`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// Whether it runs; false where it arrived paused or was asked to stay so.
    pub running: bool,
    /// Microseconds from `Commit`'s arrival to the guest running.
    pub after_us: u64,
}

/// See [`Message::Abort`]: what the other side's migration ends as, without reading the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum AbortCause {
    /// Something failed.
    Failed,
    /// Somebody asked for it: an operator's cancel.
    Cancelled,
    /// A time-out passed: the migration's own, or that for a sign of life from the other side.
    TimedOut,
}

/// See [`Message::NotRunning`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotRunning {
    /// Why.
    pub reason: String,
}
