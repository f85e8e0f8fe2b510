//! An open question to the guest: where its answers go, and how many ranges go there at once.

use crate::inflate::push_joined;
use machine::{Answer, AnswerSink};
use pages::{Layout, PageRange};

/// The most ranges in one [`Answer::Free`]: bounds what a guest can make us hold at once.
const MOST_RANGES: usize = 1 << 16;

/// The answers of one session, on their way to its sink.
pub(crate) struct Outlet {
    session: u32,
    sink: AnswerSink,
    batch: Vec<PageRange>,
    finished: bool,
}

impl Outlet {
    pub(crate) fn new(session: u32, sink: AnswerSink) -> Self {
        Outlet {
            session,
            sink,
            batch: Vec::new(),
            finished: false,
        }
    }

    /// The session, by the number that its asker gave it.
    pub(crate) fn session(&self) -> u32 {
        self.session
    }

    /// Whether the last word was said.
    pub(crate) fn is_finished(&self) -> bool {
        self.finished
    }

    /// Takes the RAM pages of `range` into the batch, joined with the range before where the two touch in one region.
    pub(crate) fn free(&mut self, layout: &Layout, range: PageRange) {
        for part in layout.clip(range) {
            push_joined(&mut self.batch, layout, part);
            if self.batch.len() >= MOST_RANGES {
                self.flush();
            }
        }
    }

    /// Hands the batch over.
    pub(crate) fn flush(&mut self) {
        if !self.batch.is_empty() {
            (self.sink)(self.session, Answer::Free(std::mem::take(&mut self.batch)));
        }
    }

    /// Says of the RAM pages of `range` that all was said.
    pub(crate) fn covered(&mut self, layout: &Layout, range: PageRange) {
        self.flush();
        for part in layout.clip(range) {
            (self.sink)(self.session, Answer::Covered(part));
        }
    }

    /// Drops what was not handed over, and says nothing from here on.
    pub(crate) fn close(&mut self) {
        self.batch.clear();
        self.finished = true;
    }

    /// Says the last word; once only.
    pub(crate) fn finish(&mut self) {
        self.flush();
        if !self.finished {
            self.finished = true;
            (self.sink)(self.session, Answer::Finished);
        }
    }
}
