//! What crosses the network: a preamble on every connection, control frames on one of them, page batches on the others.
//!
//! ```text
//!  source                                                        destination
//!    | control:  Preamble, Hello ----------------------------------> |   prepares a machine
//!    | <---------------------- PreambleReply, [Offer], Accept|Refuse |
//!    | data 1..n: Preamble ----------------------------------------> |
//!    | data:      batches of round 0, end-of-round marker ---------> |
//!    | control:   Skip* , RoundEnd{0} -----------------------------> |   all markers and RoundEnd are here:
//!    | <------------------------------------------ RoundReceived{0}  |   the round's barrier
//!    |            ... rounds 1..k, the last with the guest paused    |
//!    | control:   Section*, [Digests], StateEnd -------------------> |   restores, compares digests
//!    | <---------------------------------------------------- Ready   |
//!    | control:   Commit ------------------------------------------> |   resumes the guest
//!    | <---------------------------------------------------- Running |
//! ```
//!
//! Rule for versions: a peer names the lowest and the highest version it speaks; the destination picks the highest that
//! both do. A message may get new variants only with a new version; nothing is reinterpreted.
//!
//! Nothing that comes in is trusted: every length is checked against a limit before anything is allocated, and every
//! range against the layout before anything is written.
#![forbid(unsafe_code)]

pub mod batch;
mod error;
pub mod frame;
mod limits;
mod message;
mod preamble;

pub use error::{Error, Result};
pub use limits::{
    MAX_DIGEST_SUMS, MAX_EXTRA_VALUE_BYTES, MAX_EXTRAS, MAX_NAME_BYTES, MAX_REASONS, MAX_SECTION_BYTES, MAX_SECTIONS,
    MAX_STREAMS, validate,
};
pub use message::{
    AbortCause, Accept, Arrived, Commit, Digests, Have, Hello, MAX_REASON_BYTES, MAX_SKIP_RANGES, Message, NotRunning,
    Offer, Resume, Running, Skip, SkipReason, Terms,
};
pub use preamble::{
    CHECKSUM_SINCE, ConnectionRole, MAGIC, PACKING_SINCE, PREAMBLE_BYTES, Preamble, PreambleReply, REPLY_BYTES,
    RESUMING_SINCE, SessionId, VERSIONS, VersionRange, check_magic, negotiate,
};
