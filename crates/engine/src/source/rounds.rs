//! Rounds: what is to be sent, in chunks, over the streams; the barrier at a round's end; the harvest after it.
//!
//! Chunks go to the stream that has the fewest in flight, at most two, so a slow stream takes fewer. They are taken by
//! ascending address. What was handed to a stream is gone from the unsent pages: a hint cannot take it back, and no
//! page is sent twice in a round.

use super::link::Has;
use super::{Source, State};
use crate::ask::{CostWatch, Decision};
use crate::bandwidth;
use crate::error::Error;
use crate::fates::Fates;
use crate::faults::Fault;
use crate::{Chunk, ChunkId, Content, Rechecked, RoundReport, RunKind, Scanned, SourceAction, Time};
use pages::{Layout, PageRange, PageSet, Pfn};
use std::collections::HashMap;
use std::sync::Arc;
use wire::{MAX_SKIP_RANGES, Message, Skip, SkipReason};

/// The most pages of a chunk while the guest may still call some of them free, and after.
const CHUNK_PAGES_ASKING: u64 = 1024;
const CHUNK_PAGES: u64 = 4096;
/// The least pages that a chunk is cut down to when few are left, so that all streams have some.
const CHUNK_PAGES_MIN: u64 = 256;
/// The most ranges and pages of a fill: it has no content.
const FILL_RANGES: usize = 1024;
const FILL_PAGES: u64 = 1 << 18;
/// Chunks that a stream may have in flight.
const IN_FLIGHT: usize = 2;
/// Rounds that are reported: the first and the last ones, when there are more. Bounds the report of a guest that never
/// rests.
const MAX_ROUND_REPORTS: usize = 1024;

/// A chunk that a stream has.
#[derive(Debug)]
struct InFlight {
    stream: u16,
    content: Content,
}

/// The round under way and those before.
#[derive(Debug)]
pub(super) struct Rounds {
    /// Pages of this round that no stream has yet.
    unsent: PageSet,
    /// How many they are.
    left: u64,
    /// While the guest is being asked: those of `unsent` about which it has said all. Only these are sent.
    gate: Option<PageSet>,
    /// Free pages that are to be filled.
    fill: PageSet,
    cursor: Pfn,
    /// Pages of this round that a stream was given, and those of them that were to be filled.
    handed: PageSet,
    handed_fill: PageSet,
    /// Of them, those in flight when the connections were lost.
    limbo: PageSet,
    in_flight: HashMap<ChunkId, InFlight>,
    by_stream: Vec<usize>,
    next_chunk: ChunkId,
    number: u32,
    last: bool,
    began: Option<Time>,
    /// When its first chunk was handed out: waiting for the guest's answers before that says nothing of the link.
    first_send: Option<Time>,
    ended: Time,
    current: RoundReport,
    /// Of the current round: bytes of pages, which may be packed on the wire.
    current_payload: u64,
    reports: Vec<RoundReport>,
    writes_from: Time,
    harvest_from: Time,
    sent_pages: u64,
    wire_bytes: u64,
    payload_bytes: u64,
    dirty_bytes_per_s: f64,
}

impl Rounds {
    pub(super) fn new(layout: &Arc<Layout>, streams: u16) -> Self {
        let empty = PageSet::empty(layout);
        Rounds {
            unsent: empty.clone(),
            left: 0,
            gate: None,
            fill: empty.clone(),
            handed: empty.clone(),
            handed_fill: empty.clone(),
            limbo: empty,
            cursor: Pfn(0),
            in_flight: HashMap::new(),
            by_stream: vec![0; usize::from(streams)],
            next_chunk: 0,
            number: 0,
            last: false,
            began: None,
            first_send: None,
            ended: Time::ZERO,
            current: RoundReport::default(),
            current_payload: 0,
            reports: Vec::new(),
            writes_from: Time::ZERO,
            harvest_from: Time::ZERO,
            sent_pages: 0,
            wire_bytes: 0,
            payload_bytes: 0,
            dirty_bytes_per_s: 0.0,
        }
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    pub(super) fn is_last(&self) -> bool {
        self.last
    }

    pub(super) fn left(&self) -> u64 {
        self.left
    }

    pub(super) fn sent_pages(&self) -> u64 {
        self.sent_pages
    }

    pub(super) fn wire_bytes(&self) -> u64 {
        self.wire_bytes
    }

    pub(super) fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    pub(super) fn dirty_bytes_per_s(&self) -> f64 {
        self.dirty_bytes_per_s
    }

    /// The rounds so far, the one under way included if it sent anything.
    pub(super) fn reports(&self) -> Vec<RoundReport> {
        let mut reports = self.reports.clone();
        if self.began.is_some() {
            reports.push(self.current);
        }
        reports
    }

    pub(super) fn count_writes_from(&mut self, now: Time) {
        self.writes_from = now;
    }

    /// Only pages that the guest has spoken about are sent from here on.
    pub(super) fn close_gate(&mut self) {
        self.gate = Some(PageSet::empty(self.unsent.layout()));
    }

    /// The harvest's turn has come: what was ahead of it in the queue is done.
    pub(super) fn harvest_begins(&mut self, now: Time) {
        self.harvest_from = now;
    }

    /// All that is unsent may be sent.
    pub(super) fn open_gate(&mut self) {
        self.gate = None;
        self.cursor = Pfn(0);
    }

    /// The guest has said all about `range`.
    pub(super) fn covered(&mut self, range: PageRange) {
        let Some(gate) = &mut self.gate else {
            return;
        };
        let mut from = range.start();
        while let Some(run) = self.unsent.next_run(from) {
            let part = run.intersection(range);
            if part.is_empty() {
                return;
            }
            gate.insert_range(part);
            from = run.end();
        }
    }

    /// Takes pages out of those that are unsent.
    pub(super) fn leave_out(&mut self, ranges: &[PageRange]) {
        for range in ranges {
            self.left -= self.unsent.remove_range(*range);
            if let Some(gate) = &mut self.gate {
                gate.remove_range(*range);
            }
        }
    }

    /// These free pages are to be filled, those left out that a stream was given: they may be at the destination, though
    /// nobody here knows.
    pub(super) fn fill(&mut self, mut pages: PageSet, given_too: bool) {
        if !given_too {
            pages.subtract(&self.handed);
        }
        self.fill = pages;
    }

    /// The connections are lost, and with them perhaps what was in flight.
    pub(super) fn link_lost(&mut self) {
        for chunk in self.in_flight.values() {
            for range in ranges_of(&chunk.content) {
                self.limbo.insert_range(*range);
            }
        }
        self.in_flight.clear();
        self.by_stream.fill(0);
    }

    /// The guest goes on: another round follows.
    pub(super) fn no_longer_last(&mut self) {
        self.last = false;
    }

    /// A time in which nothing was sent is not the link's speed.
    pub(super) fn count_without(&mut self, outage: Time) {
        self.first_send = self.first_send.map(|at| at.saturating_add(outage));
    }

    /// Goes on in the open round, of which the destination `has` these pages. What else was handed to a stream is unsent
    /// again.
    pub(super) fn take_up(&mut self, has: &Has, fates: &mut Fates, forget: bool) -> Result<(), String> {
        let mut lost = self.handed.clone();
        if forget {
            lost.subtract(&self.limbo);
        }
        for (kind, set) in has.by_kind() {
            if set.intersection_count(&self.handed) < set.count() {
                return Err("a Have of pages that it was not sent in this round".to_owned());
            }
            lost.subtract(set);
            // These arrived, though nobody here knew.
            let mut unknown = set.clone();
            unknown.intersect_with(&self.limbo);
            for range in unknown.runs() {
                fates.told(range, kind);
            }
            self.sent_pages += unknown.count();
            self.current.sent_pages += unknown.count();
        }
        self.limbo.clear();
        fates.lost(&lost);
        self.handed.subtract(&lost);
        let mut refill = lost.clone();
        refill.intersect_with(&self.handed_fill);
        self.handed_fill.subtract(&refill);
        lost.subtract(&refill);
        self.fill.union_with(&refill);
        self.left += self.unsent.union_with(&lost);
        if let Some(gate) = &mut self.gate {
            // The guest had spoken about them.
            gate.union_with(&lost);
        }
        Ok(())
    }

    fn done(&self) -> bool {
        self.left == 0 && self.in_flight.is_empty() && self.gate.is_none() && self.fill.is_empty()
    }

    /// A stream gets these.
    fn handed(&mut self, content: &Content) {
        for range in ranges_of(content) {
            self.handed.insert_range(*range);
            if let Content::Fill { .. } = content {
                self.handed_fill.insert_range(*range);
            }
        }
    }

    /// Cuts the next chunk off; `None` where nothing may be sent now.
    fn cut(&mut self, poison: Option<u32>) -> Option<Content> {
        let ranges = if self.gate.is_some() {
            self.cut_pages(CHUNK_PAGES_ASKING)
        } else {
            self.cut_pages(CHUNK_PAGES)
        };
        if !ranges.is_empty() {
            return Some(Content::Pages(ranges));
        }
        let value = poison?;
        let mut pages = 0;
        let mut ranges = Vec::new();
        while ranges.len() < FILL_RANGES && pages < FILL_PAGES {
            let Some(run) = self.fill.take_run(Pfn(0), FILL_PAGES - pages) else {
                break;
            };
            pages += run.count();
            ranges.push(run);
        }
        (!ranges.is_empty()).then_some(Content::Fill { ranges, value })
    }

    /// Takes up to `most` pages out of those that may be sent, by ascending address from where the last chunk ended.
    fn cut_pages(&mut self, most: u64) -> Vec<PageRange> {
        let share = self.left / (self.by_stream.len() * IN_FLIGHT) as u64;
        let mut room = share.clamp(CHUNK_PAGES_MIN, most);
        let mut ranges: Vec<PageRange> = Vec::new();
        while room > 0 {
            let from = self.gate.as_mut().unwrap_or(&mut self.unsent);
            let Some(run) = from.take_run(self.cursor, room) else {
                // Wraps around once a chunk, and only between chunks: a chunk is by ascending address.
                if self.cursor == Pfn(0) || !ranges.is_empty() {
                    break;
                }
                self.cursor = Pfn(0);
                continue;
            };
            if self.gate.is_some() {
                self.unsent.remove_range(run);
            }
            self.cursor = run.end();
            self.left -= run.count();
            room -= run.count();
            ranges.push(run);
        }
        ranges
    }

    /// The stream with the fewest chunks in flight, if it may have another.
    fn idle_stream(&self) -> Option<u16> {
        let (stream, chunks) = self.by_stream.iter().enumerate().min_by_key(|(_, chunks)| **chunks)?;
        (*chunks < IN_FLIGHT).then(|| u16::try_from(stream).ok()).flatten()
    }

    /// Closes the books on the round.
    fn close(&mut self, now: Time) {
        let began = self.began.take().unwrap_or(self.ended);
        self.current.ms = now.saturating_sub(began).as_secs_f64() * 1e3;
        if self.reports.len() == MAX_ROUND_REPORTS {
            self.reports.remove(MAX_ROUND_REPORTS / 2);
        }
        self.reports.push(std::mem::take(&mut self.current));
    }
}

fn ranges_of(content: &Content) -> &[PageRange] {
    match content {
        Content::Pages(ranges) | Content::Fill { ranges, .. } => ranges,
    }
}

impl Source {
    /// Round 0: all pages that exist, those left out that were never touched or lie in the balloon.
    pub(super) fn begin_round_0(&mut self, scanned: Scanned, decision: Decision) {
        let mut pending = PageSet::full(&self.layout);
        if self.config.skip.hole {
            pending.intersect_with(&scanned.present);
        }
        self.switchover.present = Some(scanned.present);
        if let (true, Some(ballooned)) = (self.config.skip.free, scanned.ballooned) {
            pending.subtract(&ballooned);
            self.switchover.ballooned = Some(ballooned);
        }
        self.hints.report.dialect = scanned.dialect.to_owned();
        self.hints.report.why = decision.why;
        self.hints.count_from(scanned.counts);
        self.hints.poison = scanned.poison;
        self.hints.watch = CostWatch::new(scanned.allocates);
        self.begin_round(pending);
        if decision.ask {
            self.begin_hints();
        }
        if self.switchover.stop_now {
            self.stop_now();
        }
    }

    /// Begins the round whose number is set.
    fn begin_round(&mut self, pending: PageSet) {
        let rounds = &mut self.rounds;
        rounds.left = pending.count();
        rounds.unsent = pending;
        rounds.handed.clear();
        rounds.handed_fill.clear();
        rounds.limbo.clear();
        rounds.cursor = Pfn(0);
        rounds.current = RoundReport {
            pending_pages: rounds.left,
            ..RoundReport::default()
        };
        rounds.current_payload = 0;
        rounds.began = Some(self.now);
        rounds.first_send = None;
        self.moments.first_chunk.get_or_insert(self.now);
        self.state = State::Sending;
    }

    /// Begins another round with what was harvested. Rounds are counted in 32 bits; a guest that never rests would take
    /// years to use them up, and then its numbers stay at the last, which the receiver refuses.
    pub(super) fn begin_next_round(&mut self, last: bool) {
        self.rounds.number = self.rounds.number.saturating_add(1);
        self.rounds.last = last;
        let pending = std::mem::replace(&mut self.rounds.unsent, PageSet::empty(&self.layout));
        self.begin_round(pending);
    }

    /// Hands chunks to streams that may have more, and ends the round when all has been sent.
    pub(super) fn feed_streams(&mut self) {
        while let Some(stream) = self.rounds.idle_stream() {
            let Some(content) = self.rounds.cut(self.hints.poison) else {
                break;
            };
            let id = self.rounds.next_chunk;
            self.rounds.next_chunk += 1;
            self.rounds.first_send.get_or_insert(self.now);
            self.rounds.by_stream[usize::from(stream)] += 1;
            self.rounds.handed(&content);
            self.rounds.in_flight.insert(
                id,
                InFlight {
                    stream,
                    content: content.clone(),
                },
            );
            self.push(SourceAction::Send {
                stream,
                chunk: Chunk {
                    id,
                    round: self.rounds.number,
                    content,
                },
            });
        }
        if self.rounds.done() {
            self.end_round();
        }
    }

    /// A chunk has left.
    pub(super) fn sent(&mut self, stream: u16, id: ChunkId, zero: &[PageRange], wire_bytes: u64, payload_bytes: u64) {
        if self.link.is_down() && !self.planted.has(Fault::CountSentWithoutLink) {
            return;
        }
        let rounds = &mut self.rounds;
        rounds.wire_bytes += wire_bytes;
        rounds.payload_bytes += payload_bytes;
        rounds.current.wire_bytes += wire_bytes;
        rounds.current_payload += payload_bytes;
        let Some(chunk) = rounds.in_flight.remove(&id).filter(|chunk| chunk.stream == stream) else {
            return self.fail(Error::Internal(format!(
                "stream {stream} sent chunk {id}, which it was not given"
            )));
        };
        rounds.by_stream[usize::from(stream)] -= 1;
        let kind = if matches!(chunk.content, Content::Pages(_)) {
            RunKind::Data
        } else {
            RunKind::Fill
        };
        for range in ranges_of(&chunk.content) {
            rounds.sent_pages += range.count();
            rounds.current.sent_pages += range.count();
            self.fates.told(*range, kind);
        }
        self.fates.told_zero_among_data(zero);
    }

    /// All of the round has been sent: tells the receiver so, and in round 0 what was left out.
    fn end_round(&mut self) {
        let round = self.rounds.number;
        if round == 0
            && let Err(error) = self.tell_skipped()
        {
            return self.fail(error);
        }
        for stream in 0..self.config.streams {
            self.push(SourceAction::EndRound { stream, round });
        }
        self.rounds.ended = self.now;
        self.transmit(Message::RoundEnd {
            round,
            last: self.rounds.last,
        });
        self.state = State::Barrier;
        self.all_sent();
        if self.planted.has(Fault::SkipBarrier) && !self.rounds.last {
            self.round_received();
        }
    }

    /// Tells what is left out. A page that was skipped for several reasons counts as hinted before ballooned, as
    /// ballooned before never touched.
    fn tell_skipped(&mut self) -> Result<(), Error> {
        let mut rest = PageSet::full(&self.layout);
        rest.subtract(&self.fates.known());
        self.skip(&mut rest, Some(self.hints.named.clone()), SkipReason::Hinted);
        // Kept until the round is there: it may have to be told again over new connections.
        let ballooned = self.switchover.ballooned.clone();
        self.skip(&mut rest, ballooned, SkipReason::Ballooned);
        let holes = self.switchover.present.as_ref().map(|present| {
            let mut holes = PageSet::full(&self.layout);
            holes.subtract(present);
            holes
        });
        self.skip(&mut rest, holes, SkipReason::Hole);
        match rest.count() {
            0 => Ok(()),
            lost => Err(Error::Internal(format!("{lost} pages were neither sent nor skipped"))),
        }
    }

    fn skip(&mut self, rest: &mut PageSet, skipped: Option<PageSet>, reason: SkipReason) {
        let Some(mut skipped) = skipped else {
            return;
        };
        skipped.intersect_with(rest);
        rest.subtract(&skipped);
        let ranges: Vec<PageRange> = skipped.runs().collect();
        for ranges in ranges.chunks(MAX_SKIP_RANGES) {
            for range in ranges {
                self.fates.skipped(*range, reason);
            }
            self.transmit(Message::Skip(Skip {
                reason,
                ranges: ranges.to_vec(),
            }));
        }
    }

    /// The receiver has all of the round.
    pub(super) fn round_received(&mut self) {
        self.link.got_through();
        (self.switchover.present, self.switchover.ballooned) = (None, None);
        let rounds = &mut self.rounds;
        let began = rounds.first_send.unwrap_or(rounds.ended);
        let wire_bytes = rounds.current.wire_bytes;
        self.bandwidth.round(wire_bytes, self.now.saturating_sub(began));
        if rounds.number > 0 {
            self.bandwidth.rewritten(wire_bytes, rounds.current_payload);
        }
        self.bandwidth.barrier(self.now.saturating_sub(rounds.ended));
        rounds.close(self.now);
        if rounds.last {
            self.all_received();
        } else {
            self.harvest();
        }
    }

    /// Reads the dirty log. No session is open here: one that were would lose what the guest writes next.
    pub(super) fn harvest(&mut self) {
        self.end_hints();
        self.switchover.harvest_is_last = self.moments.pause.is_some();
        self.rounds.harvest_from = self.now;
        self.state = State::Harvesting;
        self.push(SourceAction::Recheck);
        self.push(SourceAction::Harvest);
    }

    /// The balloon was looked at again. A page that was skipped because it lay in it, and that does so no longer, is sent
    /// whether it was written or not: a guest may have taken it back before tracking began and been found out only since.
    pub(super) fn rechecked(&mut self, rechecked: &Rechecked) {
        self.hints.counted(rechecked.counts);
        if self.state != State::Harvesting {
            return;
        }
        if rechecked.ballooned.as_ref().is_some_and(|set| !self.fits(set)) {
            return self.fail(Error::Internal(
                "the balloon's pages are of another RAM layout".to_owned(),
            ));
        }
        if self.planted.has(Fault::ForgetRecheck) {
            return;
        }
        let mut left = self.fates.ballooned().clone();
        if let Some(still) = &rechecked.ballooned {
            left.subtract(still);
        }
        self.rounds.left += self.rounds.unsent.union_with(&left);
    }

    /// The dirty log was read, and with that destroyed: from here on only this side knows these pages.
    pub(super) fn harvested(&mut self, pages: PageSet) {
        if !self.fits(&pages) {
            return self.fail(Error::Internal("the dirty log is of another RAM layout".to_owned()));
        }
        self.harvested.union_with(&pages);
        if let Some(sums) = &mut self.switchover.sums {
            sums.touch_all(&pages);
        }
        if self.state != State::Harvesting {
            return;
        }
        let written = pages.count();
        let rounds = &mut self.rounds;
        self.bandwidth.harvest(self.now.saturating_sub(rounds.harvest_from));
        if self.planted.has(Fault::ForgetHarvest) && self.switchover.harvest_is_last {
            rounds.unsent.clear();
        }
        rounds.left += rounds.unsent.union_with(&pages);
        rounds.dirty_bytes_per_s = bandwidth::rate(written, self.now.saturating_sub(rounds.writes_from));
        rounds.writes_from = self.now;
        if let Some(report) = rounds.reports.last_mut() {
            report.dirty_pages_after += written;
            if !self.switchover.harvest_is_last || report.dirty_bytes_per_s == 0.0 {
                report.dirty_bytes_per_s = rounds.dirty_bytes_per_s;
            }
        }
        if self.switchover.harvest_is_last {
            // The machine is saved while the last pages are under way.
            self.begin_next_round(true);
            // DONE is part of the state that is saved: the destination's guest has to find it.
            if let Some(session) = self.done.session {
                self.push(SourceAction::EndHints { session, hold: false });
            }
            self.push(SourceAction::Save);
        } else {
            self.decide();
        }
    }
}
