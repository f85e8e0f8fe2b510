//! The laws: what must hold at every step, and at the end.

use crate::guest::{GARBAGE, Guest, POISON};
use crate::pair::{Copy, Pair};
use engine::{Chunk, Content, Ending, SourceAction, Step, Time};
use pages::{Layout, PageSet};
use std::sync::Arc;
use wire::Message;

/// What the laws remember.
#[derive(Debug)]
pub(crate) struct Laws {
    /// The round that chunks are of, and the pages that were handed out in it.
    round: u32,
    handed: PageSet,
    received: Option<u32>,
    /// Pages of the open round that the destination says it has, while the source takes the migration up again.
    has: PageSet,
}

impl Laws {
    pub(crate) fn new(layout: &Arc<Layout>) -> Self {
        Laws {
            round: 0,
            handed: PageSet::empty(layout),
            received: None,
            has: PageSet::empty(layout),
        }
    }

    pub(crate) fn source_hears(&mut self, message: &Message) {
        match message {
            Message::RoundReceived { round } => self.received = Some(*round),
            Message::Have(have) => {
                for range in &have.ranges {
                    self.has.insert_range(*range);
                }
            }
            Message::Resumed { round, .. } if *round == self.round => {
                self.handed.clone_from(&self.has);
                self.has.clear();
            }
            Message::Resumed { round, .. } => self.received = round.checked_sub(1),
            _ => {}
        }
    }

    /// A page once in a round; a round only after the destination has the one before.
    pub(crate) fn chunk(&mut self, chunk: &Chunk) -> Option<String> {
        if chunk.round != self.round {
            // A round may have been empty.
            if chunk.round < self.round || self.received != chunk.round.checked_sub(1) {
                return Some(format!(
                    "a chunk of round {} while {:?} was received",
                    chunk.round, self.received
                ));
            }
            self.round = chunk.round;
            self.handed.clear();
        }
        let (Content::Pages(ranges) | Content::Fill { ranges, .. }) = &chunk.content;
        for range in ranges {
            if self.handed.insert_range(*range) != range.count() {
                return Some(format!("pages of {range} twice in round {}", chunk.round));
            }
        }
        None
    }
}

/// The safe order of free-page skipping.
pub(crate) fn source_action(action: &SourceAction, guest: &Guest) -> Option<String> {
    match action {
        SourceAction::Scan if !guest.tracking => Some("a scan before tracking was on".to_owned()),
        SourceAction::BeginHints { .. } if !guest.tracking => Some("the guest asked before tracking".to_owned()),
        SourceAction::BeginHints { session } if *session == 0 || guest.sessions.contains(session) => {
            Some(format!("session {session} used twice, or 0"))
        }
        SourceAction::Harvest | SourceAction::Pause | SourceAction::Save if guest.session.is_some() => {
            Some(format!("{action:?} while a session is open"))
        }
        SourceAction::Save if guest.waits => Some("state saved while the guest waits for its pages".to_owned()),
        SourceAction::Save if guest.running => Some("state saved of a guest that runs".to_owned()),
        _ => None,
    }
}

impl Pair {
    pub(crate) fn check_step(&mut self) {
        if self.guest.running && self.copy.running {
            self.breach("both copies run".to_owned());
        }
    }

    /// Who waits, waits for a bounded time.
    pub(crate) fn check_progress(&mut self) {
        let waited = self.now.saturating_sub(self.progress_at);
        let (source, destination) = (&self.setup.source, &self.setup.destination);
        let frozen = self.at_source.frozen_until.max(self.at_destination.frozen_until);
        let longest = source.answer_timeout.max(destination.answer_timeout) + Time::from_secs(1);
        let windows = source.resume_window + destination.resume_window;
        let silence = 4 * (source.peer_timeout + destination.peer_timeout);
        let digests = self.setup.source_digest + self.setup.destination_digest;
        let bound = longest + windows + silence + digests + Time::from_secs(120);
        if waited > bound && self.now > frozen + bound {
            self.breach(format!("nobody did anything but wait for {waited:?}"));
        }
    }

    /// The destination's RAM is the source's at the pause, but for pages that the guest itself calls free; those are clean.
    /// Content that was damaged on its way is found by digests alone.
    pub(crate) fn check_ram(&mut self) {
        if self.content_flipped && !self.setup.source.verify {
            return;
        }
        for i in 0..self.copy.ram.len() {
            let (here, there) = (self.saved_ram[i], self.copy.ram[i]);
            if !self.saved_free[i] && here != there {
                return self.breach(format!(
                    "page {i} in use: version {here} at the source, {there} at the destination"
                ));
            }
            if there == GARBAGE || (there == POISON && !self.setup.guest.poison) {
                return self.breach(format!(
                    "page {i}: the destination's old memory, or poison, shows through"
                ));
            }
        }
    }

    /// Whether every law was kept; else which was broken, with the seed.
    pub fn verdict(&self) -> Result<(), String> {
        let broken = self.breaches.first().cloned().or_else(|| self.end_breach());
        broken.map_or(Ok(()), |what| {
            let ends = (self.ends(), self.source_error(), self.destination_error());
            Err(format!(
                "seed {}, step {}: {what}\n  mishaps: {:?}\n  ends: {ends:?}\n  done: {:?}",
                self.setup.seed, self.steps, self.mishaps, self.done
            ))
        })
    }

    fn end_breach(&self) -> Option<String> {
        let (source, destination) = (&self.source_end, &self.destination_end);
        let ended = (source.is_some() || self.at_source.dead) && (destination.is_some() || self.at_destination.dead);
        if !ended {
            return Some(format!("no end after {} steps", self.steps));
        }
        if source.as_ref().is_some_and(|s| s.report.balloon.why.is_empty()) {
            return Some("no reason why the guest was asked or not".to_owned());
        }
        for outcome in source.iter().chain(destination) {
            if !outcome.report.pages.adds_up() {
                return Some(format!("fates that do not add up: {:?}", outcome.report.pages));
            }
            if let Some(accused) = outcome.error.as_deref().and_then(|error| self.accused(error)) {
                return Some(accused);
            }
        }
        let arrived = destination.as_ref().map(|d| d.ending == Ending::Completed);
        let Some(source) = source else {
            let runs = self.copy.running && arrived != Some(true);
            return runs.then(|| "the destination runs a guest and has not completed".to_owned());
        };
        if self.copy.running && arrived != Some(true) {
            return Some("the guest runs at a destination that did not complete".to_owned());
        }
        match source.ending {
            Ending::Completed if arrived == Some(false) && !self.setup.source.dry_run => {
                return Some("the source completed and the destination did not".to_owned());
            }
            Ending::Completed if !self.setup.source.dry_run && arrived.is_some() => return self.completed_breach(),
            Ending::Unknown if self.guest.running => return Some("resumed after Commit without an answer".to_owned()),
            Ending::Completed | Ending::Unknown => return None,
            _ => {}
        }
        if arrived == Some(true) {
            return Some("the guest runs at the destination although the source kept it".to_owned());
        }
        self.kept_breach()
    }

    /// Two sides that speak the same protocol find no fault with each other, unless bytes were changed on the way.
    fn accused(&self, error: &str) -> Option<String> {
        let changed = self.links.iter().any(|link| {
            let pipes = link.data.iter().chain([&link.to_destination, &link.to_source]);
            pipes.into_iter().any(|pipe| pipe.flipped)
        });
        let words = [
            "the source sent ",
            "the receiver sent ",
            "internal error",
            "checksum",
            "verification failed",
        ];
        let accused = !changed && words.iter().any(|word| error.contains(word));
        accused.then(|| format!("a side finds fault with the other, or with itself: {error}"))
    }

    /// After success: both sides tell the same.
    fn completed_breach(&self) -> Option<String> {
        let (source, destination) = (
            &self.source_end.as_ref()?.report,
            &self.destination_end.as_ref()?.report,
        );
        let all = self.setup.guest.layout.total_pages();
        // What was lost with connections and sent again, the source alone knows of.
        let mut told = source.pages;
        if self.links.len() > 1 && told.resent >= destination.pages.resent {
            told.resent = destination.pages.resent;
        }
        if told.total != all || told != destination.pages {
            return Some(format!(
                "unlike accounts: {:?} and {:?}",
                source.pages, destination.pages
            ));
        }
        let there = self.guest.ballooned.as_ref().map_or(0, PageSet::count);
        if source.pages.ballooned > there {
            return Some(format!(
                "{} pages are counted as ballooned, and {there} lie in the balloon",
                source.pages.ballooned
            ));
        }
        let counted = &source.balloon;
        let answers = 7 * self.guest.sessions.len() as u64;
        if (counted.answers, counted.malformed) != (answers, 0) {
            return Some(format!("not this migration's counts: {counted:?}"));
        }
        let verify = self.setup.source.verify.then_some(true);
        if source.verified != verify || destination.verified != verify {
            return Some("verified is not what was asked for".to_owned());
        }
        // What digesting took is told in whole microseconds.
        if (source.verify_ms - destination.verify_ms).abs() > 0.002 {
            return Some(format!(
                "verification took {} ms for the source, {} ms for the destination",
                source.verify_ms, destination.verify_ms
            ));
        }
        let runs = self.setup.guest.running && !self.setup.destination.stay_paused;
        if self.copy.running != runs || self.guest.running {
            return Some("the guest runs where it should not, or does not where it should".to_owned());
        }
        let tracking = self.guest.tracking && !self.failed_steps.contains(&Step::StopTracking);
        (tracking || self.guest.session.is_some()).then(|| "tracking or a session is left on".to_owned())
    }

    /// After a failure before Commit: the guest is as it was.
    fn kept_breach(&self) -> Option<String> {
        let failed = |step| self.failed_steps.contains(&step);
        if self.guest.running != self.setup.guest.running && !failed(Step::Resume) {
            return Some("the guest is not as it was".to_owned());
        }
        if self.guest.tracking && !failed(Step::StopTracking) {
            return Some("tracking is left on".to_owned());
        }
        if self.guest.session.is_some() && !failed(Step::EndHints) {
            return Some("a session is left open".to_owned());
        }
        if self.guest.waits && !failed(Step::EndHints) && !failed(Step::BeginHints) {
            return Some("the guest still waits for the pages that it handed over".to_owned());
        }
        if self.guest.whole_at_stop == Some(false) && !failed(Step::GiveBack) {
            return Some("harvested pages were not given back".to_owned());
        }
        let made = self.copy.made && !self.copy.discarded && !self.at_destination.dead;
        made.then(|| "the destination kept its copy".to_owned())
    }
}

/// Whoever hears that the guest does not run here resumes it: by then no part of this copy may.
pub(crate) fn destination_says(message: &Message, copy: &Copy) -> Option<String> {
    let early = matches!(message, Message::NotRunning(_)) && !copy.discarded;
    early.then(|| "NotRunning before the destination's copy was gone".to_owned())
}
