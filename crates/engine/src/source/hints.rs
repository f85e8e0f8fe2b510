//! The question to the guest, in round 0.
//!
//! An answer may take pages out of round 0's unsent pages, of the open session, and nothing else: never out of what a
//! harvest returned. So a page that was written since tracking began is sent, however early the guest reclaims it. The
//! session ends when the guest has said all, when it takes too long, when it costs more than it saves, and in any case
//! before the next harvest and before the pause.

use super::{Source, State};
use crate::ask::CostWatch;
use crate::faults::Fault;
use crate::timers::Timer;
use crate::{Ask, BalloonReport, Peeked, SourceAction, Time};
use machine::{Answer, BalloonCounts};
use pages::{Layout, PageSet};
use std::sync::Arc;
use std::time::Duration;

/// The session and what came of it.
#[derive(Debug)]
pub(super) struct Hints {
    /// The open session.
    pub(super) open: Option<u32>,
    /// Sessions that were used; ids go up from 1 and none is used twice.
    used: u32,
    /// Every page that an answer of an open session called free.
    pub(super) named: PageSet,
    /// What the guest fills free pages with.
    pub(super) poison: Option<u32>,
    pub(super) watch: CostWatch,
    asked_at: Option<Time>,
    ended_at: Option<Time>,
    /// Answers that came after their session had ended, as counted here.
    late: u64,
    /// What the balloon had counted before this migration, and has by now.
    counts_before: BalloonCounts,
    counts_now: BalloonCounts,
    pub(super) report: BalloonReport,
}

impl Hints {
    pub(super) fn new(layout: &Arc<Layout>) -> Self {
        Hints {
            open: None,
            used: 0,
            named: PageSet::empty(layout),
            poison: None,
            watch: CostWatch::new(false),
            asked_at: None,
            ended_at: None,
            late: 0,
            counts_before: BalloonCounts::default(),
            counts_now: BalloonCounts::default(),
            report: BalloonReport::default(),
        }
    }

    /// From the question to the end of its session, or until `now`.
    pub(super) fn took(&self, now: Time) -> Duration {
        let end = self.ended_at.unwrap_or(now);
        self.asked_at.map_or(Duration::ZERO, |from| end.saturating_sub(from))
    }

    /// The report, with what was counted here and what the balloon counted.
    pub(super) fn report(&self) -> BalloonReport {
        let mut report = self.report.clone();
        report.count(self.counts_now.since(self.counts_before));
        report.late += self.late;
        report
    }

    /// What the balloon had counted when this migration first looked.
    pub(super) fn count_from(&mut self, counts: BalloonCounts) {
        (self.counts_before, self.counts_now) = (counts, counts);
    }

    /// What it has counted by now.
    pub(super) fn counted(&mut self, counts: BalloonCounts) {
        self.counts_now = counts;
    }
}

impl Source {
    /// Asks. Nothing is sent until the guest has spoken about it.
    pub(super) fn begin_hints(&mut self) {
        self.hints.used += 1;
        let session = self.hints.used;
        self.hints.open = Some(session);
        self.hints.asked_at = Some(self.now);
        self.hints.report.asked = true;
        self.rounds.close_gate();
        self.timers
            .set(Timer::Hints, self.now.saturating_add(self.config.hint_timeout));
        self.push(SourceAction::BeginHints { session });
    }

    /// Ends the session, if one is open. From here on its answers are late, and all that is unsent may be sent.
    pub(super) fn end_hints(&mut self) {
        let Some(session) = self.hints.open.take() else {
            return;
        };
        self.timers.clear(Timer::Hints);
        self.hints.ended_at = Some(self.now);
        if !self.planted.has(Fault::ForgetEndHints) {
            // To free a page is to write: its `struct page` at least, with poison the page itself. A guest that has to free
            // all that it handed over would do so now, while writes are tracked and cost most, and all of it would be sent
            // again. It gets its pages back at the destination, or when this fails.
            let hold = self.hints.watch.allocates() || self.hints.poison.is_some();
            self.push(SourceAction::EndHints { session, hold });
        }
        self.rounds.open_gate();
        if self.hints.poison.is_some() {
            let mut fill = self.hints.named.clone();
            fill.subtract(&self.fates.known());
            self.rounds.fill(fill, self.planted.has(Fault::FillInFlight));
        }
    }

    /// The guest answered.
    pub(super) fn answered(&mut self, session: u32, answer: &Answer) {
        let round_0 = self.state == State::Sending && self.rounds.number() == 0;
        if self.planted.has(Fault::AcceptLateHint) && !round_0 {
            if let Answer::Free(ranges) = answer {
                self.rounds.leave_out(ranges);
            }
            return;
        }
        if self.hints.open != Some(session) {
            self.hints.late += 1;
            return;
        }
        match answer {
            Answer::Free(ranges) => {
                self.rounds.leave_out(ranges);
                for range in ranges {
                    self.hints.named.insert_range(*range);
                    let part = self.layout.clip(*range).next();
                    if let Some(peek) = part.and_then(|part| self.hints.watch.peek(part)) {
                        self.push(SourceAction::Peek(peek));
                    }
                }
            }
            Answer::Covered(range) => self.rounds.covered(*range),
            Answer::Finished => self.end_hints(),
        }
    }

    /// What of the first answers was written came in.
    pub(super) fn peeked(&mut self, peeked: &Peeked) {
        let Some(why) = self.hints.watch.peeked(peeked) else {
            return;
        };
        if self.config.ask == Ask::Auto && self.hints.open.is_some() {
            self.hints.report.why = format!("ended early: {why}; before that: {}", self.hints.report.why);
            self.end_hints();
        } else {
            self.add_reason(&why);
        }
    }

    /// The tracker cannot tell what was written: the session goes on unwatched.
    pub(super) fn cannot_peek(&mut self) {
        self.hints.watch = CostWatch::new(false);
    }

    /// The question could not be asked: the migration goes on without an answer.
    pub(super) fn cannot_ask(&mut self, error: &str) {
        self.add_reason(&format!("asking failed: {error}"));
        self.end_hints();
    }

    /// The guest took too long. What it said so far stays valid.
    pub(super) fn hints_timed_out(&mut self) {
        if self.hints.open.is_some() {
            self.hints.report.timed_out = true;
            let after = crate::error::Span(self.config.hint_timeout).to_string();
            self.add_reason(&format!("ended by the hint time-out of {after}"));
            self.end_hints();
        }
    }

    fn add_reason(&mut self, why: &str) {
        let report = &mut self.hints.report.why;
        report.push_str("; ");
        report.push_str(why);
    }
}
