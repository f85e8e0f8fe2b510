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

/// What was wrong with answers, counted since the question.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerCounts {
    /// Buffers that were answers to this question.
    pub answers: u64,
    /// Answers to no open question: of an earlier session, after the end, or outside one. Dropped.
    pub late: u64,
    /// Answers that failed a check. Dropped.
    pub malformed: u64,
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

    /// The pages that the balloon holds now: theirs is no content worth sending.
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

    /// Counts since the last `begin`.
    fn counts(&self) -> AnswerCounts;
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

    fn counts(&self) -> AnswerCounts {
        AnswerCounts::default()
    }
}
