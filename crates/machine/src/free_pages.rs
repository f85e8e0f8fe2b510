//! The guest's own word on which of its pages are free.

use crate::Result;
use pages::{PageRange, PageSet};
use std::sync::Arc;

/// What a guest said to a question, as it came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// These pages were free when the guest looked. Ranges are clipped to RAM and shrunk to whole pages.
    Free(Vec<PageRange>),
    /// All that the guest has to say about these pages has been said: what of them it did not call free is in use.
    Covered(PageRange),
    /// The guest has said all it had to say.
    Finished,
}

/// Where answers go: called with the session they answer, from whatever thread serves the guest's queue. Must be quick.
pub type AnswerSink = Arc<dyn Fn(u32, Answer) + Send + Sync>;

/// What a guest's balloon counted over its life: counts only grow, and a migration's own are a difference of two
/// ([`BalloonCounts::since`]). What is rejected is counted, not logged one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonCounts {
    /// Buffers that were answers to an open question.
    pub answers: u64,
    /// Answers to no open question: of an earlier one, after the end, said twice, or outside one. Dropped.
    pub late: u64,
    /// Buffers of any queue that failed a check. Dropped, or honoured up to a bound.
    pub malformed: u64,
    /// Of `malformed`: answers and inflate and deflate buffers that should carry a bitmap and whose header failed the
    /// strict check. Arrays of a driver that fell back to them, headers of another byte order, buffers cut short, answers
    /// to a request that was never made.
    pub bad_headers: u64,
    /// Of `malformed`: buffers with a bitmap that changed while they were read.
    pub torn: u64,
    /// Of `malformed`: windows of an answer that were not the one that was due, as they overlap those before or leave some
    /// out. The whole answer is dropped.
    pub stray_windows: u64,
    /// Inflate buffers as compaction sends them, with the bits of the buffer before them or with none at all: nothing in
    /// the balloon was believed from there on, as a page left it without a word.
    pub stale_bitmaps: u64,
    /// Page frame numbers and bits that name no RAM (holes of the layout, past its end). Ignored.
    pub bad_pfns: u64,
    /// Kicks on queues that were not negotiated, not set up, or stopped. Ignored.
    pub ignored_kicks: u64,
    /// Queues that were stopped because their rings are broken.
    pub broken_queues: u64,
    /// Calls that gave memory back to the host.
    pub discards: u64,
    /// Pages given back by those calls.
    pub discarded_pages: u64,
    /// Of `discards`: those that the host refused.
    pub discard_errors: u64,
    /// Pages that the guest reported as free unasked (REPORTING), discarded or not.
    pub reported_pages: u64,
    /// Writes to parts of the configuration space that are not the guest's. Ignored.
    pub ignored_config_writes: u64,
}

impl BalloonCounts {
    /// What was counted since `earlier`, which the same balloon counted before.
    #[must_use]
    pub fn since(self, earlier: BalloonCounts) -> BalloonCounts {
        let less = u64::saturating_sub;
        BalloonCounts {
            answers: less(self.answers, earlier.answers),
            late: less(self.late, earlier.late),
            malformed: less(self.malformed, earlier.malformed),
            bad_headers: less(self.bad_headers, earlier.bad_headers),
            torn: less(self.torn, earlier.torn),
            stray_windows: less(self.stray_windows, earlier.stray_windows),
            stale_bitmaps: less(self.stale_bitmaps, earlier.stale_bitmaps),
            bad_pfns: less(self.bad_pfns, earlier.bad_pfns),
            ignored_kicks: less(self.ignored_kicks, earlier.ignored_kicks),
            broken_queues: less(self.broken_queues, earlier.broken_queues),
            discards: less(self.discards, earlier.discards),
            discarded_pages: less(self.discarded_pages, earlier.discarded_pages),
            discard_errors: less(self.discard_errors, earlier.discard_errors),
            reported_pages: less(self.reported_pages, earlier.reported_pages),
            ignored_config_writes: less(self.ignored_config_writes, earlier.ignored_config_writes),
        }
    }
}

/// What the balloon's statistics queue last said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestMemoryStats {
    /// Pages that no one in the guest uses (`VIRTIO_BALLOON_S_MEMFREE`).
    pub free_pages: u64,
    /// Pages that the guest manages (`VIRTIO_BALLOON_S_MEMTOT`).
    pub total_pages: u64,
}

/// Asks a guest which of its pages are free.
///
/// `begin` is called only after dirty tracking is on. `end` is owed on every way out, and is called before device state
/// is saved; it may be called for a session that has ended by itself.
pub trait FreePages: Send {
    /// The dialect's name for the report: `standard`, `bitmap`, `bitmap-rfc`, `free-map`, `off`.
    fn dialect(&self) -> &'static str;

    /// Whether a guest can be asked now (a driver is there, and it took the feature); else why not.
    fn can_ask(&self) -> std::result::Result<(), String>;

    /// Whether the guest allocates what it hands over, and so may write it (`init_on_alloc`); false where it only looks.
    fn allocates(&self) -> bool;

    /// What the guest last said of its memory; `None` if it never did or the host has no statistics queue.
    fn stats(&mut self) -> Option<GuestMemoryStats>;

    /// The pages that the balloon holds now: theirs is no content worth sending. `None`: it has none, or its guest is not to
    /// be believed about them. Read after tracking is on, and again before each harvest, the last time while the guest is
    /// paused: a page that was there and is there no longer is sent.
    fn ballooned(&mut self) -> Option<PageSet>;

    /// The 32-bit value that the guest fills free pages with, where it said so (PAGE_POISON) and it is not 0.
    fn poison(&self) -> Option<u32> {
        None
    }

    /// Asks, as session `session` (never 0, never used before in this migration). Answers go to `sink` until `end`.
    fn begin(&mut self, session: u32, sink: AnswerSink) -> Result<()>;

    /// Ends the session: nothing goes to its sink once this has returned; what comes later is counted as late. Tells the
    /// guest that it may have its pages back (DONE).
    fn end(&mut self, session: u32) -> Result<()>;

    /// Ends the session as [`FreePages::end`] does, but leaves the guest without the pages that it handed over until
    /// `end` is called: for a guest that writes as it frees them (what it keeps of each page; with poison the pages), which
    /// would make all of that dirty.
    fn hold(&mut self, session: u32) -> Result<()> {
        self.end(session)
    }

    /// What was counted so far, over the balloon's life.
    fn counts(&self) -> BalloonCounts;
}

/// A guest without a balloon, or one that is not asked.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoBalloon;

impl FreePages for NoBalloon {
    fn dialect(&self) -> &'static str {
        "off"
    }

    fn can_ask(&self) -> std::result::Result<(), String> {
        Err("the guest has no balloon".to_owned())
    }

    fn allocates(&self) -> bool {
        false
    }

    fn stats(&mut self) -> Option<GuestMemoryStats> {
        None
    }

    fn ballooned(&mut self) -> Option<PageSet> {
        None
    }

    fn begin(&mut self, _session: u32, _sink: AnswerSink) -> Result<()> {
        Err(crate::Error::Refused("the guest has no balloon to ask".to_owned()))
    }

    fn end(&mut self, _session: u32) -> Result<()> {
        Ok(())
    }

    fn counts(&self) -> BalloonCounts {
        BalloonCounts::default()
    }
}
