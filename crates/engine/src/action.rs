//! What goes into the state machines (events) and what comes out of them (actions). All of it plain data.

use crate::{Outcome, Tuning};
use machine::{Answer, BalloonCounts, GuestMemoryStats, MachineState};
use pages::{PageRange, PageSet};
use wire::{Hello, Message};

/// Names a chunk until it is reported sent.
pub type ChunkId = u64;

/// A piece of a round, for one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Its name.
    pub id: ChunkId,
    /// Its round.
    pub round: u32,
    /// What to send.
    pub content: Content,
}

/// What a chunk sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// These pages, each range within one region, by ascending address.
    Pages(Vec<PageRange>),
    /// Ranges that the receiver fills with a 32-bit pattern.
    Fill {
        /// Which.
        ranges: Vec<PageRange>,
        /// With what.
        value: u32,
    },
}

/// Something that a source's executor does, as named in a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// [`SourceAction::StartTracking`]
    StartTracking,
    /// [`SourceAction::Scan`]
    Scan,
    /// [`SourceAction::BeginHints`]
    BeginHints,
    /// [`SourceAction::Peek`]
    Peek,
    /// [`SourceAction::EndHints`]
    EndHints,
    /// [`SourceAction::Send`] and [`SourceAction::EndRound`]
    Send,
    /// [`SourceAction::Recheck`]
    Recheck,
    /// [`SourceAction::Harvest`]
    Harvest,
    /// [`SourceAction::Pause`]
    Pause,
    /// [`SourceAction::Save`]
    Save,
    /// [`SourceAction::Digest`] and [`DestinationAction::Digest`]
    Digest,
    /// [`SourceAction::GiveBack`]
    GiveBack,
    /// [`SourceAction::StopTracking`]
    StopTracking,
    /// [`SourceAction::Resume`] and [`DestinationAction::Resume`]
    Resume,
    /// [`DestinationAction::Prepare`]
    Prepare,
    /// Receiving pages.
    Receive,
    /// [`DestinationAction::Zero`]
    Zero,
    /// [`DestinationAction::Restore`]
    Restore,
    /// [`DestinationAction::Discard`]
    Discard,
    /// The control connection.
    Control,
}

/// What a source wants done. Actions that touch the guest (all but `Transmit`, `Send`, `EndRound`, `Finished`) are
/// carried out one after another in the order given, each answered by one event. An action that fails is answered by
/// [`SourceEvent::Failed`] in place of its own event.
#[derive(Clone, Debug)]
pub enum SourceAction {
    /// Send a control message. In order; not answered.
    Transmit(Message),
    /// Turn the dirty tracker on. -> `TrackingStarted`
    StartTracking,
    /// Look at RAM and at the balloon. Only after tracking is on: a page touched in between would be lost. -> `Scanned`
    Scan,
    /// Ask the guest. -> `HintsBegun`, then any number of `Answered`
    BeginHints {
        /// Never used before.
        session: u32,
    },
    /// Look how much of these pages was written, without forgetting it. -> `Peeked`
    Peek(PageRange),
    /// End the session. -> `HintsEnded`
    EndHints {
        /// Which.
        session: u32,
        /// Whether the guest has to wait for its pages until the session is ended once more, without this.
        hold: bool,
    },
    /// Hand a chunk to a stream. -> `Sent`, later; chunks of a stream are sent in the order given
    Send {
        /// 0 to streams - 1.
        stream: u16,
        /// What.
        chunk: Chunk,
    },
    /// Send the end-of-round marker on a stream, behind all its chunks. Not answered.
    EndRound {
        /// 0 to streams - 1.
        stream: u16,
        /// Which.
        round: u32,
    },
    /// Look at the balloon again, before each harvest; before the last one the guest is paused. -> `Rechecked`
    Recheck,
    /// Read the dirty log, which destroys it. -> `Harvested`
    Harvest,
    /// Pause the guest and drain its devices. -> `Paused`
    Pause,
    /// Save the paused machine's state. -> `Saved`
    Save,
    /// Digest these chunks of RAM, the guest running or not. -> `Digested`
    Digest {
        /// Left out: their content is nobody's.
        excluded: PageSet,
        /// Pages a digest, see [`wire::Digests`].
        chunk_pages: u64,
        /// The chunks that are digested, by number; regions in order.
        only: Vec<u64>,
    },
    /// Put harvested pages back into the dirty log. -> `GivenBack`
    GiveBack(PageSet),
    /// Turn the dirty tracker off. -> `TrackingStopped`
    StopTracking,
    /// Let the guest go on. -> `Resumed`
    Resume,
    /// The connections are lost: close what is left of them, drop what came and was not told yet, and open new ones, with
    /// a session number of their own and `Resume` as the first message, trying again until that works. -> `Reconnected`,
    /// or `Unreachable`; then `PeerGone` and the like, if those fail in turn
    Reconnect,
    /// Close all connections once what was transmitted has left, and report. The last action.
    Finished(Box<Outcome>),
}

impl SourceAction {
    /// What it is called when it fails.
    pub fn step(&self) -> Step {
        match self {
            SourceAction::Transmit(_) | SourceAction::Reconnect | SourceAction::Finished(_) => Step::Control,
            SourceAction::StartTracking => Step::StartTracking,
            SourceAction::Scan => Step::Scan,
            SourceAction::BeginHints { .. } => Step::BeginHints,
            SourceAction::Peek(_) => Step::Peek,
            SourceAction::EndHints { .. } => Step::EndHints,
            SourceAction::Send { .. } | SourceAction::EndRound { .. } => Step::Send,
            SourceAction::Recheck => Step::Recheck,
            SourceAction::Harvest => Step::Harvest,
            SourceAction::Pause => Step::Pause,
            SourceAction::Save => Step::Save,
            SourceAction::Digest { .. } => Step::Digest,
            SourceAction::GiveBack(_) => Step::GiveBack,
            SourceAction::StopTracking => Step::StopTracking,
            SourceAction::Resume => Step::Resume,
        }
    }

    /// Whether it touches the guest, and so is carried out in order and answered.
    pub fn is_on_guest(&self) -> bool {
        !matches!(self.step(), Step::Control | Step::Send)
    }
}

/// What a look at RAM and balloon found.
#[derive(Clone, Debug)]
pub struct Scanned {
    /// Pages that hold memory of the host (all of RAM where holes are not to be looked for).
    pub present: PageSet,
    /// Pages in the balloon, where it can tell.
    pub ballooned: Option<PageSet>,
    /// The statistics queue's last word.
    pub stats: Option<GuestMemoryStats>,
    /// The dialect's name.
    pub dialect: &'static str,
    /// Whether the guest can be asked, else why not.
    pub can_ask: Result<(), String>,
    /// Whether it allocates what it hands over.
    pub allocates: bool,
    /// Its poison, where negotiated and not 0.
    pub poison: Option<u32>,
    /// What the balloon had counted before: this migration's counts begin here.
    pub counts: BalloonCounts,
}

/// What another look at the balloon found.
#[derive(Clone, Debug)]
pub struct Rechecked {
    /// Pages in the balloon now, where it can tell.
    pub ballooned: Option<PageSet>,
    /// What it has counted so far.
    pub counts: BalloonCounts,
}

/// See [`SourceAction::Peek`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peeked {
    /// Which pages.
    pub range: PageRange,
    /// How many of them were written; `None` if the tracker cannot tell.
    pub written: Option<u64>,
}

/// What happened at a source.
#[derive(Clone, Debug)]
pub enum SourceEvent {
    /// A control message came.
    Message(Message),
    /// See [`SourceAction::StartTracking`].
    TrackingStarted,
    /// See [`SourceAction::Scan`].
    Scanned(Box<Scanned>),
    /// See [`SourceAction::BeginHints`].
    HintsBegun,
    /// The guest answered.
    Answered {
        /// The session that it answers.
        session: u32,
        /// What it said.
        answer: Answer,
    },
    /// See [`SourceAction::Peek`].
    Peeked(Peeked),
    /// See [`SourceAction::EndHints`].
    HintsEnded(BalloonCounts),
    /// A chunk has left.
    Sent {
        /// The stream that sent it.
        stream: u16,
        /// Which chunk.
        chunk: ChunkId,
        /// Of its pages, those that were told as zero, by ascending address.
        zero: Vec<PageRange>,
        /// Bytes on the wire, headers included.
        wire_bytes: u64,
        /// Bytes of page content.
        payload_bytes: u64,
    },
    /// See [`SourceAction::Recheck`].
    Rechecked(Box<Rechecked>),
    /// See [`SourceAction::Harvest`].
    Harvested(PageSet),
    /// See [`SourceAction::Pause`].
    Paused,
    /// See [`SourceAction::Save`].
    Saved(MachineState),
    /// A sum for each chunk that was asked for, in that order. See [`SourceAction::Digest`].
    Digested(Vec<u128>),
    /// See [`SourceAction::GiveBack`].
    GivenBack,
    /// See [`SourceAction::StopTracking`].
    TrackingStopped,
    /// See [`SourceAction::Resume`].
    Resumed,
    /// An action failed, or a connection did.
    Failed {
        /// Which.
        step: Step,
        /// Why: a clause without a full stop.
        error: String,
    },
    /// A data stream had something to write, and the receiver took none of it for the peer time-out. It is dead, though
    /// its control connection may live. Waiting for one's turn under a limit on bandwidth is no stall.
    Stalled {
        /// Which stream.
        stream: u16,
    },
    /// A data stream broke.
    StreamGone {
        /// How it looked: a clause.
        error: String,
    },
    /// The peer closed the control connection, or it broke.
    PeerGone {
        /// How it looked: a clause.
        error: String,
    },
    /// See [`SourceAction::Reconnect`]: the receiver was reached again. What it has, it says in messages.
    Reconnected {
        /// Bytes that all streams have written since the migration began, whether they arrived or not.
        wire_bytes: u64,
    },
    /// See [`SourceAction::Reconnect`]: nobody is there any more to reach, and trying again is of no use.
    Unreachable {
        /// How it looked: a clause.
        error: String,
    },
    /// Somebody changes settings; at any time.
    Tuned(Tuning),
    /// Somebody cancels.
    Cancel,
}

/// What the pages of a received run became.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunKind {
    /// Content came.
    Data,
    /// They are zero.
    Zero,
    /// They were filled.
    Fill,
}

/// A run of a received batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedRun {
    /// Which pages.
    pub range: PageRange,
    /// What they became.
    pub kind: RunKind,
}

/// What a destination wants done. Same rules as for [`SourceAction`].
#[derive(Clone, Debug)]
pub enum DestinationAction {
    /// Send a control message. In order; not answered.
    Transmit(Message),
    /// Make a machine like the source's, and its RAM, and take its data streams. -> `Prepared`, or `Refused`
    Prepare(Box<Hello>),
    /// Make these pages read as zero. -> `Zeroed`. The round's barrier waits for it: a zeroing that lands after a later
    /// round's page would destroy it.
    Zero(Vec<PageRange>),
    /// Digest these chunks of RAM as it is now. -> `Digested`
    Digest {
        /// Left out.
        excluded: PageSet,
        /// Pages a digest.
        chunk_pages: u64,
        /// The chunks that are digested, by number; regions in order.
        only: Vec<u64>,
    },
    /// Restore the machine. -> `Restored`
    Restore(MachineState),
    /// Let the guest run. -> `Resumed`. Where it fails, whatever of the guest was started is stopped first.
    Resume,
    /// The connections are lost: close what is left of them, so that the source finds out too. It may come back, see
    /// [`DestinationEvent::Relinked`]. Not answered.
    Disconnect,
    /// Throw machine and RAM away: this copy never runs again. No vCPU of it runs when it is answered. -> `Discarded`
    Discard,
    /// Close all connections once what was transmitted has left, and report. The last action.
    Finished(Box<Outcome>),
}

impl DestinationAction {
    /// What it is called when it fails.
    pub fn step(&self) -> Step {
        match self {
            DestinationAction::Transmit(_) | DestinationAction::Disconnect | DestinationAction::Finished(_) => {
                Step::Control
            }
            DestinationAction::Prepare(_) => Step::Prepare,
            DestinationAction::Zero(_) => Step::Zero,
            DestinationAction::Digest { .. } => Step::Digest,
            DestinationAction::Restore(_) => Step::Restore,
            DestinationAction::Resume => Step::Resume,
            DestinationAction::Discard => Step::Discard,
        }
    }

    /// Whether it touches the guest, and so is carried out in order and answered.
    pub fn is_on_guest(&self) -> bool {
        self.step() != Step::Control
    }
}

/// What happened at a destination.
#[derive(Clone, Debug)]
pub enum DestinationEvent {
    /// A control message came.
    Message(Message),
    /// A machine like the source's stands ready, paused.
    Prepared {
        /// Its RAM, empty set: the layout that all sets of this migration have.
        layout: std::sync::Arc<pages::Layout>,
        /// Whether its RAM is populated.
        populated: bool,
    },
    /// No such machine can be made here, for these reasons.
    Refused(Vec<String>),
    /// See [`DestinationAction::Zero`].
    Zeroed,
    /// A batch is in memory.
    Received {
        /// Which stream.
        stream: u16,
        /// Its round, as its header said.
        round: u32,
        /// Its runs.
        runs: Vec<ReceivedRun>,
        /// Bytes on the wire.
        wire_bytes: u64,
        /// Bytes of page content.
        payload_bytes: u64,
    },
    /// A stream's end-of-round marker came.
    Marker {
        /// Which stream.
        stream: u16,
        /// Which round.
        round: u32,
    },
    /// A sum for each chunk that was asked for, in that order. See [`DestinationAction::Digest`].
    Digested(Vec<u128>),
    /// See [`DestinationAction::Restore`].
    Restored,
    /// See [`DestinationAction::Resume`].
    Resumed,
    /// See [`DestinationAction::Discard`].
    Discarded,
    /// An action failed, or a data stream did.
    Failed {
        /// Which.
        step: Step,
        /// Why: a clause without a full stop.
        error: String,
    },
    /// A data stream broke.
    StreamGone {
        /// How it looked: a clause.
        error: String,
    },
    /// The peer closed the control connection, or it broke.
    PeerGone {
        /// How it looked: a clause.
        error: String,
    },
    /// The source has come back over new connections, see [`Message::Resume`]; nothing of the old ones is under way any
    /// more, and all that they brought has been told.
    Relinked,
    /// Somebody cancels.
    Cancel,
}
