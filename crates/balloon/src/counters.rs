//! What the device counted: rejected things are counted, not logged one by one.

use machine::AnswerCounts;

/// Counts over the life of a device; a reset does not clear them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Buffers that were answers to an open question.
    pub answers: u64,
    /// Buffers on the answer queue that belong to no open question. Ignored.
    pub late: u64,
    /// Buffers of any queue that failed a check. Ignored, or honoured up to a bound.
    pub malformed: u64,
    /// Inflate and deflate buffers (of those in `malformed`) that should carry a bitmap and whose header failed the
    /// strict check: arrays of a driver that fell back to them, headers of another byte order, buffers cut short.
    pub bad_headers: u64,
    /// Inflate and deflate buffers (of those in `malformed`) that changed while they were read.
    pub torn: u64,
    /// Inflate buffers with the bits of the buffer before them, as compaction sends them: the set of ballooned pages was
    /// emptied, as a page left it without a word.
    pub stale_bitmaps: u64,
    /// Kicks on queues that were not negotiated, not set up, or stopped. Ignored.
    pub ignored_kicks: u64,
    /// Page frame numbers, or bits, of inflate and deflate buffers that are not RAM. Ignored.
    pub bad_pfns: u64,
    /// Calls to [`crate::Discard::discard`].
    pub discards: u64,
    /// Pages given back by those calls.
    pub discarded_pages: u64,
    /// Discards that the host refused.
    pub discard_errors: u64,
    /// Pages that the guest reported as free (REPORTING), discarded or not.
    pub reported_pages: u64,
    /// Writes to parts of the configuration space that are not the guest's. Ignored.
    pub ignored_config_writes: u64,
    /// Queues that were stopped because their rings are broken.
    pub broken_queues: u64,
}

/// Counts answers, for the device's life and for the question at once.
pub(crate) struct Tally<'a> {
    /// Over the device's life.
    pub(crate) life: &'a mut Counters,
    /// Since the last question.
    pub(crate) question: &'a mut AnswerCounts,
}

impl Tally<'_> {
    /// A buffer that was an answer.
    pub(crate) fn answer(&mut self) {
        self.life.answers += 1;
        self.question.answers += 1;
    }

    /// A buffer that answers no open question.
    pub(crate) fn late(&mut self, why: &str) {
        tracing::debug!(why, "late answer ignored");
        self.life.late += 1;
        self.question.late += 1;
    }

    /// A buffer that failed a check.
    pub(crate) fn malformed(&mut self, why: &str) {
        tracing::debug!(why, "malformed answer ignored");
        self.life.malformed += 1;
        self.question.malformed += 1;
    }
}
