//! The virtio-balloon device (virtio 1.3, section 5.5), in its dialects.
//!
//! A [`Balloon`] is the device alone: it knows nothing of MMIO or PCI, of vCPUs or of a VMM's event loop. A VMM gives it
//! guest memory, a way to raise interrupts ([`Interrupts`]) and a way to give memory back ([`Discard`]); it forwards
//! configuration accesses, feature bits, queue addresses and kicks. For a migration, [`SharedBalloon`] is the
//! [`machine::FreePages`] of the machine.
//!
//! A device speaks exactly one [`Dialect`], chosen by configuration: their feature bits collide, so they cannot be told
//! apart at run time.
//!
//! Invariants:
//!
//! - nothing that a guest writes makes the device panic, spin, or allocate more than a bound that the queue size sets;
//! - a buffer that fails a check is returned unused and counted; a ring that fails one stops that queue alone, sets
//!   [`Balloon::needs_reset`] and leaves the other queues going;
//! - answers of free pages reach the sink of an open session only, and only answers to that session's own request;
//! - a session that was begun is ended towards the guest (DONE) before device state is saved;
//! - no page is ballooned, discarded or called free that no buffer of the guest named.
//!
//! # When memory goes back to the host
//!
//! Inflating gives memory back at once, or only marks it for a migration to skip: [`DiscardPolicy`]. The bitmap dialects
//! mark only, unless told otherwise. Their drivers (of 2016) send bits again that are no longer true: compaction, which
//! moves a page of the balloon, resends the last bitmap as it then stands on the inflate queue and on the deflate queue.
//! A discard in between would empty pages that the guest uses; a mark is taken away again. Choose at-once for a driver
//! without compaction. That such a driver may drop a page at a multiple of 64 from what it takes back is no matter: with
//! larger granules than a page, those count only where the buffer that makes the granule whole names them.
//!
//! What the guest says on its way out of the balloon must be understood: a buffer of the bitmap dialects that is refused,
//! and an array of a deflation that is refused or cut, empties the set of ballooned pages. So does a stopped inflate or
//! deflate queue, for good, until the device is reset. An inflation that may be compaction's (the bitmap that
//! came last, or any first one after an answer) empties it until the next buffer shows what it was: the same bitmap on
//! the deflate queue, and all of it stays out; anything else, and all of it is back, memory being given back then.
//!
//! A page that is dirty is never treated as ballooned: a migration takes ballooned pages out of what it sends first,
//! after tracking of writes began, and out of nothing that is found written later. What was written before that has to be
//! known to the device, which is why [`machine::FreePages::ballooned`] of a [`SharedBalloon`] leaves out pages that the
//! guest may have taken back without a word ([`Balloon::may_deflate_silently`]), and answers nothing of a guest that did
//! not take MUST_TELL_HOST.
//!
//! # Locks and threads
//!
//! [`Interrupts`], [`Discard`] and the sink of a session are called from within the device's methods, so under the lock
//! of a [`SharedBalloon`]: they must be quick and must not call back into the device.
//!
//! The drivers of the bitmap dialects have one guest buffer for all bitmaps, of inflations, deflations and answers, and
//! reuse it without waiting. In those dialects [`Balloon::notify`] must therefore always be called before the vCPU that
//! kicked runs on, however small the guest; from there the buffer is read at once and in whole. A buffer that changes
//! while it is read is refused, but a rewrite that stands still meanwhile cannot be seen.
#![forbid(unsafe_code)]

mod ask;
mod config;
mod counters;
mod device;
mod dialect;
mod inflate;
pub mod queue;
mod session;
mod shared;
mod state;
mod stats;
mod window;

pub use config::{Config, DiscardPolicy, QueueConfig, feature};
pub use counters::Counters;
pub use device::{Balloon, Discard, Interrupts, QUEUE_MAX_SIZE};
pub use dialect::Dialect;
pub use shared::SharedBalloon;
pub use stats::Stats;

/// What the balloon device could not do, or would not.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A dialect that nobody knows.
    #[error("balloon dialect {0:?} is unknown; choose standard, bitmap or bitmap-rfc")]
    UnknownDialect(String),
    /// A policy for discarding that nobody knows.
    #[error("balloon discard policy {0:?} is unknown; choose mark or at-once")]
    UnknownDiscard(String),
    /// PAGE_BITMAP was configured for a guest that is too large for the `bitmap` dialect's windows.
    #[error(
        "the bitmap balloon cannot offer PAGE_BITMAP (bit 3) to a guest whose physical address space ends at \
         {end_bytes:#x}: its bitmaps reach to 32 GiB (0x800000000); leave the bit out"
    )]
    Space {
        /// Where guest-physical space ends.
        end_bytes: u64,
    },
    /// PAGE_BITMAP was configured for the `bitmap` dialect on a host that can run a big-endian guest.
    #[error(
        "the bitmap balloon cannot offer PAGE_BITMAP (bit 3) on this host: a big-endian guest could run here, whose bitmaps \
         name pages that it did not give up, and nothing shows it; leave the bit out, or choose the bitmap-rfc dialect"
    )]
    ByteOrder,
    /// Feature bits were configured that the dialect does not have.
    #[error("the {dialect} balloon cannot offer feature bits {bits:#x}; it can offer {possible:#x}")]
    Unofferable {
        /// The dialect.
        dialect: Dialect,
        /// The bits that are too many.
        bits: u64,
        /// The bits that may be offered.
        possible: u64,
    },
    /// The driver acknowledged bits that were not offered.
    #[error("the driver acknowledged feature bits {extra:#x} that the device did not offer (it offered {offered:#x})")]
    NotOffered {
        /// The bits that are too many.
        extra: u64,
        /// What was offered.
        offered: u64,
    },
    /// The driver is one for devices from before virtio 1.
    #[error("the driver did not acknowledge VIRTIO_F_VERSION_1 (bit 32); only virtio 1 drivers are served")]
    Legacy,
    /// The device is active; what was asked for comes before that, or after a reset.
    #[error("{0} while the balloon device is active: reset it first")]
    Active(&'static str),
    /// A queue that the driver set up wrongly.
    #[error("virtqueue {index} cannot be used: {why}")]
    QueueSetup {
        /// Number of the queue on the transport.
        index: usize,
        /// What is wrong with it.
        why: String,
    },
    /// More pages were asked for than the guest has.
    #[error("a balloon of {pages} pages does not fit a guest of {ram_pages} pages; ask for at most that many")]
    Target {
        /// The pages asked for.
        pages: u64,
        /// Pages of guest RAM.
        ram_pages: u64,
    },
    /// Saved state that cannot be taken over.
    #[error("saved balloon state was refused: {0}")]
    State(String),
    /// The guest cannot be asked for its free pages.
    #[error("the guest cannot be asked for its free pages: {0}")]
    CannotAsk(String),
}

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

impl From<Error> for machine::Error {
    fn from(error: Error) -> Self {
        machine::Error::Refused(error.to_string())
    }
}
