//! What can be wrong with bytes that a peer sent, or with a message that is to be sent.

use crate::VersionRange;
use pages::{PageRange, Pfn};

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// Why bytes were refused, or why a message cannot be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The connection does not open as ours do.
    #[error("not a pageferry peer: the first bytes are \"{0}\"; is something else listening or connecting there?")]
    NotAPeer(String),
    /// A checksum does not fit its bytes.
    #[error("the checksum of {what} is {said:#010x}, its bytes give {computed:#010x}: damaged on the way")]
    Checksum {
        /// Whose.
        what: &'static str,
        /// What the peer wrote.
        said: u32,
        /// What the bytes give.
        computed: u32,
    },
    /// The payload of a batch is not what was sent.
    #[error(
        "batch {seq} of round {round} on stream {stream}: its payload's checksum is {said:#010x}, its bytes give \
         {computed:#010x}: damaged on the way, and no byte of it was used"
    )]
    PayloadChecksum {
        /// On which stream.
        stream: u16,
        /// Its number there.
        seq: u32,
        /// Of which round.
        round: u32,
        /// What the source wrote.
        said: u32,
        /// What the bytes give.
        computed: u32,
    },
    /// A range of versions without a version.
    #[error("the peer names protocol versions {} to {}, which is no range of versions", .0.min, .0.max)]
    VersionRange(VersionRange),
    /// The two sides have no version in common.
    #[error("no protocol version in common: this side speaks {ours}, the peer {theirs}; upgrade the older one")]
    NoCommonVersion {
        /// Ours.
        ours: VersionRange,
        /// The peer's.
        theirs: VersionRange,
    },
    /// The destination picked a version that was not on offer.
    #[error("the peer picked protocol version {picked}; this side speaks {ours}, the peer says it speaks {theirs}")]
    VersionPicked {
        /// What it picked.
        picked: u16,
        /// What we offered.
        ours: VersionRange,
        /// What it says that it speaks.
        theirs: VersionRange,
    },
    /// A connection for something that this version does not have.
    #[error("the peer opened a connection for role {0}; 1 (control) and 2 (data) are known")]
    Role(u16),
    /// A stream number out of range, or one on a control connection.
    #[error("the peer opened a {role} connection with stream number {stream}; control has 0, data 0 to 63")]
    Stream {
        /// `control` or `data`.
        role: &'static str,
        /// The number.
        stream: u16,
    },
    /// A frame kind that no message has.
    #[error("unknown control frame of kind {0}; kinds 1 to 16 are known")]
    FrameKind(u16),
    /// Bits that this version does not use are set.
    #[error("{what} has reserved bits set ({value:#x}); it is from another version, or damaged")]
    Reserved {
        /// In what.
        what: &'static str,
        /// Which.
        value: u64,
    },
    /// A count or a length over its limit.
    #[error("{what}: {value} is over the limit of {limit}")]
    Limit {
        /// Of what.
        what: &'static str,
        /// How much.
        value: u64,
        /// How much there may be.
        limit: u64,
    },
    /// Fewer or more bytes than the header says.
    #[error("{what} has {given} bytes where its header says {said}")]
    Length {
        /// What.
        what: &'static str,
        /// How many there are.
        given: usize,
        /// How many there have to be.
        said: usize,
    },
    /// The connection ended inside something.
    #[error("the connection ended inside {what}, after {given} bytes")]
    Truncated {
        /// In what.
        what: &'static str,
        /// How much of it had come.
        given: usize,
    },
    /// A payload that does not decode.
    #[error("a {kind} message does not decode: {reason}")]
    Payload {
        /// Of which message.
        kind: &'static str,
        /// Why not.
        reason: String,
    },
    /// Bytes behind a message, inside its frame.
    #[error("a {kind} message is followed by {bytes} more bytes in its frame")]
    Trailing {
        /// Which message.
        kind: &'static str,
        /// How many.
        bytes: usize,
    },
    /// A frame whose header names another message than its payload holds.
    #[error("a frame of kind {kind} holds a {holds} message")]
    KindMismatch {
        /// The header's kind.
        kind: &'static str,
        /// The payload's message.
        holds: &'static str,
    },
    /// A message that could not be written.
    #[error("a {kind} message cannot be encoded: {reason}")]
    Encode {
        /// Which.
        kind: &'static str,
        /// Why not.
        reason: String,
    },
    /// A field of a message has a value that it must not have.
    #[error("a {kind} message is invalid: {reason}")]
    Invalid {
        /// Which message.
        kind: &'static str,
        /// What is wrong, with the value.
        reason: String,
    },
    /// Not a batch at all.
    #[error("page stream out of step: a batch begins with {0:#010x} instead of its magic number")]
    BatchMagic(u32),
    /// An end-of-round marker with pages, or a batch without.
    #[error("a {what} has {runs} runs and {payload_bytes} payload bytes; a marker has none, a batch has runs")]
    BatchShape {
        /// `batch` or `marker`.
        what: &'static str,
        /// Entries in its table.
        runs: u32,
        /// Bytes behind the table.
        payload_bytes: u32,
    },
    /// A run that is empty or wraps around.
    #[error("run {index} of a batch: {pages} pages from frame {start} on is empty or wraps around")]
    RunRange {
        /// Its place in the table.
        index: usize,
        /// Its first page.
        start: Pfn,
        /// How many.
        pages: u64,
    },
    /// A run that is not within one region of guest RAM.
    #[error("run {index} of a batch: pages {range} do not lie within one region of guest RAM")]
    RunOutsideRam {
        /// Its place in the table.
        index: usize,
        /// Its pages.
        range: PageRange,
    },
    /// A run that overlaps or precedes the one before it.
    #[error("run {index} of a batch: pages {range} overlap or precede the run before, which ends at frame {floor}")]
    RunOrder {
        /// Its place in the table.
        index: usize,
        /// Its pages.
        range: PageRange,
        /// Where the run before ends.
        floor: Pfn,
    },
    /// A run of an unknown kind, or with a fill value where none belongs.
    #[error(
        "run {index} of a batch: kind {kind} with fill {fill:#x}; kinds are 0 data, 1 zero, 2 fill (which alone has a value)"
    )]
    RunKind {
        /// Its place in the table.
        index: usize,
        /// Its kind.
        kind: u32,
        /// Its fill value.
        fill: u32,
    },
    /// The data runs and the payload disagree.
    #[error("the data runs of a batch make {runs_bytes} bytes, its header says {payload_bytes}")]
    PayloadBytes {
        /// What the runs make.
        runs_bytes: u64,
        /// What the header says.
        payload_bytes: u32,
    },
    /// Pages packed by something that this version does not have.
    #[error("a batch is packed by codec {0}; 1 (lz4) and 2 (zstd) are known")]
    Codec(u32),
    /// Packed pages that are not smaller than what they hold, or a size where nothing is packed.
    #[error(
        "a batch of {payload_bytes} payload bytes is packed into {packed_bytes} (codec {codec}); packed, they are fewer \
         and not none, else there is no such size"
    )]
    PackedBytes {
        /// The codec's name, or `none`.
        codec: &'static str,
        /// What they are packed into.
        packed_bytes: u32,
        /// What they are.
        payload_bytes: u32,
    },
    /// A batch on the wrong stream, out of turn, or of the wrong round.
    #[error("stream {stream}: {what} is {found}, expected {expected}; a batch was lost, repeated or sent out of order")]
    OutOfOrder {
        /// On which stream.
        stream: u16,
        /// What of the batch.
        what: &'static str,
        /// What it is.
        found: u32,
        /// What it should be.
        expected: u32,
    },
    /// A second marker for a round, or pages for one that has ended.
    #[error("stream {stream}: {what} of round {round}, which that stream has already ended")]
    RoundEnded {
        /// On which stream.
        stream: u16,
        /// `a marker` or `a batch`.
        what: &'static str,
        /// Of which round.
        round: u32,
    },
    /// A counter of a stream has run out.
    #[error("stream {stream}: the {what} is used up at {last}; the migration is far beyond what this protocol carries")]
    Exhausted {
        /// On which stream.
        stream: u16,
        /// Which counter.
        what: &'static str,
        /// Where.
        last: u32,
    },
}
