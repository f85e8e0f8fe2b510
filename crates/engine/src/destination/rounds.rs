//! Rounds as they arrive: pages over the streams, what was left out over the control connection, and the barrier.

use super::{Destination, State};
use crate::bandwidth;
use crate::error::Error;
use crate::fates::Fates;
use crate::faults::Fault;
use crate::{DestinationAction, Phase, Progress, ReceivedRun, RoundReport, Time};
use pages::{Layout, PageRange, PageSet};
use std::sync::Arc;
use wire::{Arrived, Message, Skip};

/// Rounds that are reported: the first and the last ones, when there are more.
const MAX_ROUND_REPORTS: usize = 1024;

/// The open round and those before.
#[derive(Debug)]
pub(super) struct Rounds {
    layout: Arc<Layout>,
    pub(super) fates: Fates,
    /// The open round.
    number: u32,
    /// Pages that came in it.
    seen: PageSet,
    /// Streams whose marker of it has come.
    markers: Vec<bool>,
    /// `RoundEnd` has come, and whether it said that no round follows.
    end: Option<bool>,
    /// Zeroings under way.
    zeroing: usize,
    /// No round is open any more.
    closed: bool,
    began: Time,
    pub(super) first_page: Option<Time>,
    pub(super) last_round_began: Time,
    current: RoundReport,
    reports: Vec<RoundReport>,
    sent_pages: u64,
    pub(super) wire_bytes: u64,
    pub(super) payload_bytes: u64,
    dirty_bytes_per_s: f64,
}

impl Rounds {
    pub(super) fn new(layout: &Arc<Layout>, streams: u16, now: Time) -> Self {
        Rounds {
            layout: Arc::clone(layout),
            fates: Fates::new(layout),
            number: 0,
            seen: PageSet::empty(layout),
            markers: vec![false; usize::from(streams)],
            end: None,
            zeroing: 0,
            closed: false,
            began: now,
            first_page: None,
            last_round_began: now,
            current: RoundReport::default(),
            reports: Vec::new(),
            sent_pages: 0,
            wire_bytes: 0,
            payload_bytes: 0,
            dirty_bytes_per_s: 0.0,
        }
    }

    pub(super) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    pub(super) fn is_last(&self) -> bool {
        self.closed || self.end == Some(true)
    }

    pub(super) fn reports(&self) -> Vec<RoundReport> {
        self.reports.clone()
    }

    pub(super) fn progress(&self, phase: Phase) -> Progress {
        let known = self.fates.report();
        Progress {
            phase,
            round: self.number,
            pending_pages: known.total.saturating_sub(known.fates()),
            sent_pages: self.sent_pages,
            total_pages: known.total,
            wire_bytes: self.wire_bytes,
            dirty_bytes_per_s: self.dirty_bytes_per_s,
            bandwidth_bytes_per_s: None,
            expected_downtime: None,
        }
    }

    /// Whether something of round `round` may come over `stream` now, else why not.
    fn expects(&self, stream: u16, round: u32, what: &str) -> Result<(), String> {
        let Some(marked) = self.markers.get(usize::from(stream)) else {
            return Err(format!("{what} on stream {stream}; there are {}", self.markers.len()));
        };
        if self.closed {
            return Err(format!("{what} of round {round} after the last round was received"));
        }
        if round != self.number {
            return Err(format!(
                "{what} of round {round} on stream {stream} in round {}",
                self.number
            ));
        }
        if *marked {
            return Err(format!(
                "{what} of round {round} on stream {stream} behind that round's marker"
            ));
        }
        Ok(())
    }

    /// Takes a run in.
    fn run(&mut self, run: &ReceivedRun) -> Result<(), String> {
        let range = run.range;
        self.in_ram(range)?;
        // In round 0 a page that was skipped must not come too; in any round none may come twice.
        if self.seen.count_range(range) > 0 {
            return Err(format!("pages of {range} twice in round {}", self.number));
        }
        if self.number == 0 && self.fates.known_in(range) > 0 {
            return Err(format!("pages of {range} that it had said it would skip"));
        }
        self.seen.insert_range(range);
        self.fates.told(range, run.kind);
        self.sent_pages += range.count();
        self.current.sent_pages += range.count();
        Ok(())
    }

    fn in_ram(&self, range: PageRange) -> Result<(), String> {
        match self.layout.region_of_range(range) {
            Some(_) => Ok(()),
            None => Err(format!("pages {range}, which do not lie within one region of RAM")),
        }
    }

    /// Whether the open round is complete.
    fn complete(&self, zeroed: bool) -> bool {
        self.end.is_some() && zeroed && self.markers.iter().all(|m| *m)
    }

    /// Closes the open round; whether it was the last. `None` where there are no more numbers.
    fn close(&mut self, now: Time) -> Option<bool> {
        let took = now.saturating_sub(self.began);
        self.current.ms = took.as_secs_f64() * 1e3;
        self.current.pending_pages = self.current.sent_pages;
        // What comes in a round is what the guest wrote during the one before.
        if let Some(before) = self.reports.last_mut() {
            before.dirty_pages_after = self.current.sent_pages;
            let span = Time::try_from_secs_f64(before.ms / 1e3).unwrap_or(Time::MAX);
            before.dirty_bytes_per_s = bandwidth::rate(self.current.sent_pages, span);
            self.dirty_bytes_per_s = before.dirty_bytes_per_s;
        }
        if self.reports.len() == MAX_ROUND_REPORTS {
            self.reports.remove(MAX_ROUND_REPORTS / 2);
        }
        self.reports.push(std::mem::take(&mut self.current));
        let last = self.end.take() == Some(true);
        self.seen.clear();
        if last {
            self.closed = true;
            return Some(true);
        }
        self.markers.fill(false);
        self.began = now;
        self.last_round_began = now;
        self.number = self.number.checked_add(1)?;
        Some(false)
    }
}

impl Rounds {
    /// The source goes on over new connections. A last round that was closed is one like any other now; of an open one
    /// only the pages count that are here. Returns the open round's number and those pages; `None` where there are no
    /// more numbers.
    pub(super) fn reopen(&mut self, now: Time, keep_skips: bool) -> Option<(u32, [(Arrived, PageSet); 3])> {
        if std::mem::take(&mut self.closed) {
            self.number = self.number.checked_add(1)?;
            (self.began, self.last_round_began) = (now, now);
        }
        self.end = None;
        self.markers.fill(false);
        if self.number == 0 && !keep_skips {
            self.fates.forget_skips();
        }
        Some((self.number, self.fates.told_among(&self.seen)))
    }
}

impl Destination {
    /// A batch is in memory.
    pub(super) fn received(&mut self, stream: u16, round: u32, runs: &[ReceivedRun], wire: u64, payload: u64) {
        let now = self.now;
        let Some(rounds) = &mut self.rounds else {
            return self.invalid("pages before Hello was accepted".to_owned());
        };
        rounds.wire_bytes += wire;
        rounds.payload_bytes += payload;
        rounds.current.wire_bytes += wire;
        rounds.first_page.get_or_insert(now);
        let taken = rounds
            .expects(stream, round, "pages")
            .and_then(|()| runs.iter().try_for_each(|run| rounds.run(run)));
        if let Err(what) = taken {
            return self.invalid(what);
        }
        for run in runs {
            self.touched(run.range);
        }
    }

    /// A stream's end of a round.
    pub(super) fn marker(&mut self, stream: u16, round: u32) {
        let Some(rounds) = &mut self.rounds else {
            return self.invalid("an end-of-round marker before Hello was accepted".to_owned());
        };
        if let Err(what) = rounds.expects(stream, round, "an end-of-round marker") {
            return self.invalid(what);
        }
        rounds.markers[usize::from(stream)] = true;
        self.close_round_if_complete();
    }

    /// Pages that are not sent.
    pub(super) fn skip(&mut self, skip: &Skip) {
        let memory_is_zero = self.config.memory_is_zero;
        let Some(rounds) = &mut self.rounds else { return };
        if rounds.number != 0 || rounds.end.is_some() {
            return self.invalid("Skip after the end of round 0".to_owned());
        }
        for range in &skip.ranges {
            let new = rounds
                .in_ram(*range)
                .and_then(|()| match rounds.fates.known_in(*range) {
                    0 => Ok(()),
                    known => Err(format!(
                        "a Skip of pages {range}, {known} of which it had sent or skipped before"
                    )),
                });
            if let Err(what) = new {
                return self.invalid(what);
            }
            rounds.fates.skipped(*range, skip.reason);
        }
        if !memory_is_zero && !skip.ranges.is_empty() {
            rounds.zeroing += 1;
            self.push(DestinationAction::Zero(skip.ranges.clone()));
        }
    }

    pub(super) fn zeroed(&mut self) {
        if let Some(rounds) = &mut self.rounds {
            rounds.zeroing = rounds.zeroing.saturating_sub(1);
        }
        self.close_round_if_complete();
    }

    /// The source has handed all of a round to the streams.
    pub(super) fn round_end(&mut self, round: u32, last: bool) {
        let Some(rounds) = &mut self.rounds else { return };
        if round != rounds.number || rounds.end.is_some() {
            let what = format!("RoundEnd for round {round} in round {}, or twice", rounds.number);
            return self.invalid(what);
        }
        rounds.end = Some(last);
        self.close_round_if_complete();
    }

    /// The barrier: says that the round is here, when all of it is.
    fn close_round_if_complete(&mut self) {
        let now = self.now;
        let anyway = self.planted.has(Fault::CloseBeforeZeroed);
        let Some(rounds) = self
            .rounds
            .as_mut()
            .filter(|r| self.state == State::Receiving && r.complete(anyway || r.zeroing == 0))
        else {
            return;
        };
        let round = rounds.number;
        if round == 0 {
            let lost = rounds.layout.total_pages() - rounds.fates.known().count();
            if lost > 0 {
                return self.invalid(format!("neither content nor a reason to skip for {lost} pages of RAM"));
            }
        }
        let Some(last) = rounds.close(now) else {
            return self.fail(Error::Invalid("more rounds than 32 bits count".to_owned(), super::PEER));
        };
        self.transmit(Message::RoundReceived { round });
        if last {
            self.state = State::Collecting;
            self.begin_digest();
        } else {
            self.digest_ahead();
        }
    }
}
