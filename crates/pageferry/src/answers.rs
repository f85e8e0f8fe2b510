//! The guest's answers on their way from its queue's thread to the control loop.
//!
//! A hostile guest can answer without end, so answers are not queued but merged: two page sets and a flag, whatever the
//! guest says. Merging keeps the order that matters: what is free is delivered ahead of what is covered, so that
//! no page is taken for "in use" that the guest had called free.

use machine::{Answer, AnswerSink};
use pages::{Layout, PageRange, PageSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Notify;

/// The most ranges in one event for the engine.
const MAX_RANGES: usize = 4096;

struct Merged {
    /// The open session; 0 for none.
    session: u32,
    free: PageSet,
    covered: PageSet,
    finished: bool,
    news: bool,
}

/// Where answers meet.
pub(crate) struct Answers {
    merged: Mutex<Merged>,
    arrived: Notify,
    late: AtomicU64,
}

impl Answers {
    /// With no session open.
    pub(crate) fn new(layout: &Arc<Layout>) -> Arc<Self> {
        Arc::new(Answers {
            merged: Mutex::new(Merged {
                session: 0,
                free: PageSet::empty(layout),
                covered: PageSet::empty(layout),
                finished: false,
                news: false,
            }),
            arrived: Notify::new(),
            late: AtomicU64::new(0),
        })
    }

    /// Opens `session` and returns where its answers go.
    pub(crate) fn open(self: &Arc<Self>, session: u32) -> AnswerSink {
        self.reset(session);
        self.late.store(0, Ordering::Relaxed);
        let answers = Arc::clone(self);
        Arc::new(move |session, answer| answers.take_in(session, answer))
    }

    /// Closes the session: what was not taken out yet is dropped, and what still comes is late.
    pub(crate) fn close(&self) {
        self.reset(0);
    }

    /// Answers that came to no open session, since the last one was opened.
    pub(crate) fn late(&self) -> u64 {
        self.late.load(Ordering::Relaxed)
    }

    /// Returns once there is something to take out.
    pub(crate) async fn arrived(&self) {
        self.arrived.notified().await;
    }

    /// Takes out all there is, with the session that it answers.
    pub(crate) fn take_out(&self) -> (u32, Vec<Answer>) {
        let mut merged = self.lock();
        let mut out = Vec::new();
        if !std::mem::take(&mut merged.news) {
            return (merged.session, out);
        }
        let free: Vec<PageRange> = merged.free.runs().collect();
        out.extend(free.chunks(MAX_RANGES).map(|part| Answer::Free(part.to_vec())));
        out.extend(merged.covered.runs().map(Answer::Covered));
        if std::mem::take(&mut merged.finished) {
            out.push(Answer::Finished);
        }
        merged.free.clear();
        merged.covered.clear();
        (merged.session, out)
    }

    fn take_in(&self, session: u32, answer: Answer) {
        let mut merged = self.lock();
        if session == 0 || session != merged.session {
            self.late.fetch_add(1, Ordering::Relaxed);
            return;
        }
        match answer {
            Answer::Free(ranges) => {
                for range in ranges {
                    merged.free.insert_range(range);
                }
            }
            Answer::Covered(range) => {
                merged.covered.insert_range(range);
            }
            Answer::Finished => merged.finished = true,
        }
        merged.news = true;
        drop(merged);
        self.arrived.notify_one();
    }

    fn reset(&self, session: u32) {
        let mut merged = self.lock();
        merged.session = session;
        merged.free.clear();
        merged.covered.clear();
        merged.finished = false;
        merged.news = false;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Merged> {
        self.merged.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pages::Pfn;

    fn r(start: u64, count: u64) -> PageRange {
        PageRange::new(Pfn(start), count).unwrap()
    }

    #[test]
    fn answers_merge_free_ahead_of_covered_ahead_of_finished() {
        let layout = Arc::new(Layout::flat(100).unwrap());
        let answers = Answers::new(&layout);
        let sink = answers.open(3);
        sink(3, Answer::Covered(r(0, 50)));
        sink(3, Answer::Finished);
        sink(3, Answer::Free(vec![r(2, 2), r(4, 1)]));
        sink(3, Answer::Covered(r(50, 50)));
        let expected = vec![
            Answer::Free(vec![r(2, 3)]),
            Answer::Covered(r(0, 100)),
            Answer::Finished,
        ];
        assert_eq!(answers.take_out(), (3, expected));
        assert_eq!(answers.take_out(), (3, vec![]));
    }

    #[test]
    fn other_sessions_and_closed_ones_count_as_late() {
        let layout = Arc::new(Layout::flat(100).unwrap());
        let answers = Answers::new(&layout);
        let sink = answers.open(3);
        sink(2, Answer::Free(vec![r(0, 1)]));
        sink(0, Answer::Finished);
        sink(3, Answer::Free(vec![r(9, 1)]));
        answers.close();
        sink(3, Answer::Finished);
        assert_eq!(answers.take_out(), (0, vec![]));
        assert_eq!(answers.late(), 3);
    }

    #[test]
    fn a_flood_takes_no_more_memory_than_the_sets() {
        let layout = Arc::new(Layout::flat(10_000).unwrap());
        let answers = Answers::new(&layout);
        let sink = answers.open(1);
        for i in 0..100_000u64 {
            sink(1, Answer::Free(vec![r(i % 10_000, 1), r(u64::MAX - 9, 9)]));
        }
        let (_, out) = answers.take_out();
        assert_eq!(out, [Answer::Free(vec![r(0, 10_000)])]);
    }
}
