//! What the device counted, over its life; a reset does not clear it. Rejected things are counted, not logged one by one.

pub use machine::BalloonCounts as Counters;

/// Counting buffers of the queue that carries answers, each with the reason for the log.
pub(crate) trait Tally {
    /// A buffer that answers no open question.
    fn late(&mut self, why: &str);

    /// A buffer that failed a check.
    fn malformed(&mut self, why: &str);

    /// A buffer whose header failed the strict check.
    fn bad_header(&mut self, why: &str);
}

impl Tally for Counters {
    fn late(&mut self, why: &str) {
        tracing::debug!(why, "late answer ignored");
        self.late += 1;
    }

    fn malformed(&mut self, why: &str) {
        tracing::debug!(why, "malformed answer ignored");
        self.malformed += 1;
    }

    fn bad_header(&mut self, why: &str) {
        self.malformed(why);
        self.bad_headers += 1;
    }
}
