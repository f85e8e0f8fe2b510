//! State, digests, `Ready`, `Commit`: how the guest becomes this side's.

use super::{Destination, PEER, State};
use crate::digests::{self, Sums, chunk_pages};
use crate::error::Error;
use crate::faults::Fault;
use crate::limits::Joined;
use crate::timers::Timer;
use crate::{DestinationAction, Ending, Time};
use machine::{MachineState, Section};
use pages::PageRange;
use std::collections::VecDeque;
use std::time::Duration;
use wire::{Commit, Digests, Message, Running};

/// The most chunks of one digest ahead of the pause: nothing that a guest or a source waits for stands behind more.
const PIECE: usize = 16;

/// What the switchover has collected.
#[derive(Debug, Default)]
pub(super) struct Handover {
    sections: Joined,
    /// All sections are here, since when.
    state_end: Option<Time>,
    /// The source's digests.
    theirs: Option<Digests>,
    /// RAM as it was digested here.
    ours: Option<Sums>,
    /// Chunks that are yet to be digested ahead of the pause.
    ahead: VecDeque<u64>,
    /// Digests under way, in order: the chunks of each. Those of sums that were dropped are not looked at.
    digesting: VecDeque<Vec<u64>>,
    dropped: usize,
    pub(super) verified: Option<bool>,
    /// How long the restore had to wait for digests.
    pub(super) verify_wait: Duration,
    pub(super) commit: Option<Commit>,
    /// Why the guest that was handed over does not run here, while its copy is thrown away.
    not_running: Option<String>,
}

impl Handover {
    /// The source takes the migration up again: it runs its guest, and will say all this anew.
    pub(super) fn forget(&mut self) {
        *self = Handover {
            // Their answers are still to come.
            dropped: self.dropped + self.digesting.len(),
            ..Handover::default()
        };
    }
}

impl Destination {
    fn verifies(&self) -> bool {
        self.terms.as_ref().is_some_and(|terms| terms.verify)
    }

    /// All pages are here. Digests RAM, cut as the source cuts it, or is bound to; or it is the restore's turn.
    pub(super) fn begin_digest(&mut self) {
        // A state that came while pages did has not waited for digests yet.
        self.handover.state_end = self.handover.state_end.and(Some(self.now));
        let told = self.handover.theirs.as_ref().map(|theirs| theirs.chunk_pages);
        if !self.verifies() {
            return self.restore_if_complete();
        }
        self.handover.ahead.clear();
        self.digest_stale(told);
        self.restore_if_complete();
    }

    /// A round is here, and more follow: digests now what would otherwise be left for the pause. Once all of RAM, and later
    /// what little has changed.
    pub(super) fn digest_ahead(&mut self) {
        if !self.verifies() || !self.handover.ahead.is_empty() {
            return;
        }
        let Some(rounds) = &self.rounds else { return };
        let layout = rounds.layout();
        let first = self.handover.ours.is_none();
        let ours = self
            .handover
            .ours
            .get_or_insert_with(|| Sums::new(layout, chunk_pages(layout)));
        let stale = ours.stale(&rounds.fates.nobodys());
        if first || stale.len() <= ours.get().len() / 4 {
            self.handover.ahead = stale.into();
            self.digest_next_piece();
        }
    }

    fn digest_next_piece(&mut self) {
        if !self.handover.digesting.is_empty() || self.handover.ahead.is_empty() {
            return;
        }
        let most = PIECE.min(self.handover.ahead.len());
        let only = self.handover.ahead.drain(..most).collect();
        self.digest(only);
    }

    /// Digests all chunks whose sum does not hold, cut by `told` or as before.
    fn digest_stale(&mut self, told: Option<u64>) {
        let Some(rounds) = &self.rounds else { return };
        let layout = rounds.layout();
        let before = self.handover.ours.as_ref().map(Sums::chunk_pages);
        let cut = told.or(before).unwrap_or_else(|| chunk_pages(layout));
        if before != Some(cut) {
            self.handover.dropped += self.handover.digesting.len();
            self.handover.digesting.clear();
            self.handover.ours = Some(Sums::new(layout, cut));
        }
        let excluded = rounds.fates.nobodys();
        let stale = self.handover.ours.as_ref().map(|ours| ours.stale(&excluded));
        if let Some(only) = stale.filter(|only| !only.is_empty()) {
            self.digest(only);
        }
    }

    fn digest(&mut self, only: Vec<u64>) {
        let (Some(rounds), Some(ours)) = (&self.rounds, &mut self.handover.ours) else {
            return;
        };
        let excluded = rounds.fates.nobodys();
        ours.begin(&only, &excluded);
        let chunk_pages = ours.chunk_pages();
        self.handover.digesting.push_back(only.clone());
        self.push(DestinationAction::Digest {
            excluded,
            chunk_pages,
            only,
        });
    }

    /// A page came, or is being zeroed.
    pub(super) fn touched(&mut self, range: PageRange) {
        if let Some(ours) = &mut self.handover.ours {
            ours.touch(range);
        }
    }

    pub(super) fn section(&mut self, section: Section) {
        if self.handover.state_end.is_some() {
            return self.invalid("a Section after StateEnd".to_owned());
        }
        if let Err(what) = self.handover.sections.push(section) {
            self.invalid(what);
        }
    }

    pub(super) fn digests(&mut self, theirs: Digests) {
        let verifies = self.verifies();
        let Some(rounds) = &self.rounds else { return };
        if !verifies || self.handover.theirs.is_some() || self.handover.state_end.is_some() {
            return self.invalid("Digests unasked".to_owned());
        }
        let expected = digests::count(rounds.layout(), theirs.chunk_pages);
        if theirs.chunk_pages == 0 || theirs.sums.len() as u64 != expected {
            let what = format!(
                "{} digests of {} pages each; RAM has {expected} of them",
                theirs.sums.len(),
                theirs.chunk_pages
            );
            return self.invalid(what);
        }
        // A source that cuts RAM in another way than ours does: once more, its way.
        let cut = self.handover.ours.as_ref().map(Sums::chunk_pages);
        if self.state == State::Collecting && cut != Some(theirs.chunk_pages) {
            self.digest_stale(Some(theirs.chunk_pages));
        }
        self.handover.theirs = Some(theirs);
    }

    pub(super) fn state_end(&mut self, sections: u32) {
        let came = self.handover.sections.count();
        if sections as usize != came {
            return self.invalid(format!("StateEnd for {sections} sections after {came} of them"));
        }
        if self.handover.state_end.is_some() {
            return self.invalid("StateEnd twice".to_owned());
        }
        if self.verifies() && self.handover.theirs.is_none() {
            return self.invalid("StateEnd without the Digests that it had announced".to_owned());
        }
        self.handover.state_end = Some(self.now);
        self.restore_if_complete();
    }

    pub(super) fn digested(&mut self, sums: Vec<u128>) {
        if let Some(fewer) = self.handover.dropped.checked_sub(1) {
            self.handover.dropped = fewer;
            // What waited for its turn behind those.
            return self.digest_next_piece();
        }
        let chunks = self.handover.digesting.pop_front().unwrap_or_default();
        if let Some(ours) = &mut self.handover.ours
            && let Err(what) = ours.done(&chunks, &sums)
        {
            return self.fail(Error::Internal(what));
        }
        match self.state {
            State::Receiving => self.digest_next_piece(),
            _ => self.restore_if_complete(),
        }
    }

    /// Not while the source is waited for: it runs its guest meanwhile.
    fn restores_now(&self) -> bool {
        self.state == State::Collecting && !self.link.is_down()
    }

    /// Restores the machine once its state and, with `verify`, equal digests are here.
    fn restore_if_complete(&mut self) {
        let Some(since) = self.handover.state_end.filter(|_| self.restores_now()) else {
            return;
        };
        if let Some(theirs) = &self.handover.theirs {
            let Some(ours) = self
                .handover
                .ours
                .as_ref()
                .filter(|_| self.handover.digesting.is_empty())
            else {
                return;
            };
            let ours = ours.get();
            self.handover.verify_wait = self.now.saturating_sub(since);
            let Some(rounds) = &self.rounds else { return };
            let unequal = (0u64..)
                .zip(&theirs.sums)
                .find(|(i, sum)| usize::try_from(*i).ok().and_then(|i| ours.get(i)) != Some(sum));
            self.handover.verified = Some(unequal.is_none());
            if let Some((index, _)) = unequal {
                let pages = digests::pages_of(rounds.layout(), theirs.chunk_pages, index);
                return self.fail(Error::Verify(pages));
            }
        }
        self.state = State::Restoring;
        let sections = self.handover.sections.take();
        self.push(DestinationAction::Restore(MachineState { sections }));
    }

    /// RAM and state are here.
    /// A source that pings and does not commit is not waited for without end: this copy takes a host's memory.
    pub(super) fn restored(&mut self) {
        self.state = State::Ready;
        let due = self.now.saturating_add(self.config.answer_timeout);
        self.timers.set(Timer::Answer, due);
        self.transmit(Message::Ready {
            verified: self.handover.verified == Some(true),
            verify_us: u64::try_from(self.handover.verify_wait.as_micros()).unwrap_or(u64::MAX),
        });
        if self.planted.has(Fault::ResumeBeforeCommit) {
            self.push(DestinationAction::Resume);
        }
    }

    /// The guest is this side's from here on.
    pub(super) fn commit(&mut self, commit: Commit) {
        self.moments.commit = Some(self.now);
        self.handover.commit = Some(commit);
        self.timers.clear_all();
        // The source's silence means nothing any more, but ours still does: resuming may take long.
        self.ping_later();
        self.state = State::Resuming;
        let runs = self.terms.as_ref().is_some_and(|terms| terms.running) && !self.config.stay_paused;
        if runs {
            self.push(DestinationAction::Resume);
        } else {
            self.runs(false);
        }
    }

    /// The guest is here, and runs unless it was paused or is to stay so.
    pub(super) fn runs(&mut self, running: bool) {
        if self.planted.has(Fault::ResumeBeforeCommit) && !self.committed() {
            return;
        }
        self.moments.running = Some(self.now);
        let since = self
            .moments
            .commit
            .map_or(Duration::ZERO, |at| self.now.saturating_sub(at));
        let after_us = u64::try_from(since.as_micros()).unwrap_or(u64::MAX);
        self.push(DestinationAction::Transmit(Message::Running(Running {
            running,
            after_us,
        })));
        self.finish(Ending::Completed, None);
    }

    /// The guest was handed over and cannot be run. The resume that failed may have started a part of it: the source is
    /// told only once this copy is gone.
    pub(super) fn does_not_run(&mut self, error: &Error) {
        self.handover.not_running = Some(error.to_string());
        self.state = State::Returning;
        if self.planted.has(Fault::AnswerBeforeDiscard) {
            self.push(DestinationAction::Transmit(Message::NotRunning(wire::NotRunning {
                reason: error.to_string(),
            })));
        }
        self.push(DestinationAction::Discard);
    }

    /// This copy is gone and never runs: the source may resume its own.
    pub(super) fn discarded(&mut self) {
        let Some(reason) = self.handover.not_running.take() else {
            return;
        };
        self.push(DestinationAction::Transmit(Message::NotRunning(wire::NotRunning {
            reason: reason.clone(),
        })));
        self.finish(
            Ending::Failed,
            Some(format!("the guest went back to the {PEER}: {reason}")),
        );
    }

    /// Nobody knows what of this copy runs: the source must not be told that nothing does.
    pub(super) fn cannot_discard(&mut self, error: &str) {
        let reason = self.handover.not_running.take().unwrap_or_default();
        let text = format!(
            "{reason}; then throwing this copy away failed: {error}: the {PEER} keeps its copy paused; make sure that this \
             process has ended, then resume the guest there"
        );
        self.finish(Ending::Unknown, Some(text));
    }
}
