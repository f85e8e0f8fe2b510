//! From the decision to pause the guest to `Commit`, and what follows it.

use super::{PEER, Source, State};
use crate::digests::{Sums, chunk_pages};
use crate::error::Error;
use crate::faults::Fault;
use crate::limits::{check_state, pieces};
use crate::{SourceAction, Step, Time};
use machine::MachineState;
use pages::PageSet;
use std::time::Duration;
use wire::{Commit, Digests, Message};

/// What the switchover knows and waits for.
#[derive(Debug, Default)]
pub(super) struct Switchover {
    /// The time-out has passed and the guest is to be paused whatever the downtime.
    pub(super) stop_now: bool,
    /// Whether the harvest under way was asked for after the pause: then no write can follow it.
    pub(super) harvest_is_last: bool,
    /// What the scan found, kept until round 0 ends.
    pub(super) present: Option<PageSet>,
    pub(super) ballooned: Option<PageSet>,
    pub(super) expected_downtime: Option<Duration>,
    /// The machine's state, checked, and how many sections it has.
    state: Option<(MachineState, u32)>,
    /// What was digested ahead of the pause and since. Kept when a switchover is given up: each harvest marks what it makes
    /// stale.
    pub(super) sums: Option<Sums>,
    /// Chunks that are being digested.
    digesting: Option<Vec<u64>>,
    /// The sums hold for RAM as it is now, the guest being paused.
    digested: bool,
}

impl Switchover {
    /// Nothing of it is kept: the guest runs again.
    pub(super) fn forget(&mut self) {
        self.harvest_is_last = false;
        self.state = None;
        self.digested = false;
    }
}

impl Source {
    /// After a harvest: another round, or the pause. There is no number of rounds after which the limit is given up;
    /// a guest that writes too fast ends with the time-out. Where nothing was written, a further round gains nothing.
    pub(super) fn decide(&mut self) {
        let pending = self.rounds.left();
        self.switchover.expected_downtime = self.bandwidth.expected_downtime(pending);
        let fits = self
            .switchover
            .expected_downtime
            .is_some_and(|d| d <= self.config.downtime_limit);
        let pause = self.moments.pause.is_some() || !self.running || pending == 0 || fits || self.switchover.stop_now;
        // No guest waits paused for a link.
        let pause = pause && !self.link.is_down();
        tracing::debug!(pending, expected = ?self.switchover.expected_downtime, pause, "harvested");
        if pause && self.digests_ahead() {
            self.moments.ahead_began = Some(self.now);
            self.digest_stale();
            // Tells what was written meanwhile; then it is decided anew.
            self.harvest();
        } else if pause {
            self.pause();
            self.harvest();
        } else {
            self.begin_next_round(false);
        }
    }

    /// Whether RAM is to be digested before the guest is paused, so that there is little of it to do after: once.
    fn digests_ahead(&self) -> bool {
        let runs = self.running && self.moments.pause.is_none() && !self.switchover.stop_now;
        self.config.verify && runs && self.switchover.sums.is_none()
    }

    /// Digests the chunks whose sum does not hold. Whether there are any.
    fn digest_stale(&mut self) -> bool {
        let excluded = self.fates.nobodys();
        let layout = &self.layout;
        let sums = self
            .switchover
            .sums
            .get_or_insert_with(|| Sums::new(layout, chunk_pages(layout)));
        let only = sums.stale(&excluded);
        if only.is_empty() {
            return false;
        }
        sums.begin(&only, &excluded);
        self.switchover.digesting = Some(only.clone());
        let chunk_pages = sums.chunk_pages();
        self.push(SourceAction::Digest {
            excluded,
            chunk_pages,
            only,
        });
        true
    }

    /// The time-out passed, and the guest is to be paused and the rest sent. The round under way goes on meanwhile.
    pub(super) fn stop_now(&mut self) {
        self.switchover.stop_now = true;
        let under_way = matches!(self.state, State::Sending | State::Barrier | State::Harvesting);
        if under_way && !self.link.is_down() {
            self.pause();
        }
    }

    /// Pauses the guest, once. Downtime counts from the wish: the pause itself takes time.
    fn pause(&mut self) {
        if self.moments.pause.is_none() {
            self.end_hints();
            self.moments.pause = Some(self.now);
            self.push(SourceAction::Pause);
        }
    }

    pub(super) fn saved(&mut self, state: MachineState) {
        // Of a switchover that was given up with its connections.
        if self.moments.pause.is_none() {
            return;
        }
        match check_state(&state.sections) {
            Ok(sections) => self.switchover.state = Some((state, sections)),
            Err(error) => {
                let step = Step::Save;
                return self.fail(Error::Step { step, error });
            }
        }
        if self.state == State::Completing || self.all_sent_early() {
            self.complete();
        }
    }

    /// Whether all pages have left, for a receiver that need not say that they are there before it takes the state.
    fn all_sent_early(&self) -> bool {
        self.early_state() && self.state == State::Barrier && self.rounds.is_last()
    }

    /// All pages have left.
    pub(super) fn all_sent(&mut self) {
        if self.all_sent_early() {
            self.complete();
        }
    }

    pub(super) fn digested(&mut self, sums: Vec<u128>) {
        let chunks = self.switchover.digesting.take().unwrap_or_default();
        let Some(ours) = &mut self.switchover.sums else { return };
        if let Err(what) = ours.done(&chunks, &sums) {
            return self.fail(Error::Internal(what));
        }
        // One from ahead of the pause, or of a switchover that was given up, says nothing of downtime.
        let Some(began) = self.moments.digest_began else {
            if let Some(began) = self.moments.ahead_began.take() {
                self.moments.verify_ahead = self.now.saturating_sub(began);
            }
            self.rounds.harvest_begins(self.now);
            return;
        };
        self.moments.verify = self.now.saturating_sub(began);
        self.switchover.digested = true;
        self.complete();
    }

    /// The receiver has all pages.
    pub(super) fn all_received(&mut self) {
        if self.moments.state_sent.is_some() {
            self.state = State::AwaitingReady;
            return;
        }
        self.state = State::Completing;
        self.complete();
    }

    /// Sends the state, once all of it is there. Digests come last: the receiver makes its own at the same time.
    fn complete(&mut self) {
        let pages = self.fates.report();
        debug_assert!(pages.adds_up(), "fates do not add up: {pages:?}");
        if !pages.adds_up() {
            return self.fail(Error::Internal(format!("the pages' fates do not add up: {pages:?}")));
        }
        if self.switchover.state.is_none() {
            return;
        }
        if self.config.verify && !self.switchover.digested {
            if self.moments.digest_began.is_some() {
                return;
            }
            self.moments.digest_began = Some(self.now);
            if self.digest_stale() {
                return;
            }
            self.switchover.digested = true;
        }
        let Some((state, sections)) = self.switchover.state.take() else {
            return;
        };
        for piece in state.sections.into_iter().flat_map(pieces) {
            self.transmit(Message::Section(piece));
        }
        if let Some(sums) = self.switchover.sums.as_ref().filter(|_| self.config.verify) {
            let digests = Digests {
                chunk_pages: sums.chunk_pages(),
                sums: sums.get().to_vec(),
            };
            self.transmit(Message::Digests(digests));
        }
        self.transmit(Message::StateEnd { sections });
        self.moments.state_sent = Some(self.now);
        if self.state == State::Completing {
            self.state = State::AwaitingReady;
        }
    }

    /// The receiver could run the guest. With `Commit` it may. Its wait for its digest is the verification's and no
    /// downtime; what it says of that is believed as far as so much time has passed.
    pub(super) fn ready(&mut self, verified: bool, verify_us: u64) {
        if self.config.verify && !verified {
            let what = "Ready without having compared digests, which it was asked to".to_owned();
            return self.fail(Error::Invalid(what, PEER));
        }
        if self.config.verify {
            let since = self.moments.state_sent.unwrap_or(self.now);
            let passed = self.now.saturating_sub(since);
            self.moments.verify += Duration::from_micros(verify_us).min(passed);
        }
        self.state = State::Committing;
        let downtime = self.downtime_until(self.now);
        self.transmit(Message::Commit(Commit {
            total_us: micros(self.now),
            downtime_us: micros(downtime),
            verify_us: micros(self.moments.verify),
        }));
    }

    /// The guest is the destination's.
    pub(super) fn runs_there(&mut self) {
        self.moments.running = Some(self.now);
        self.timers.clear_all();
        self.state = State::Closing;
        self.push(SourceAction::StopTracking);
    }

    /// From the pause to `until`, digesting left out.
    pub(super) fn downtime_until(&self, until: Time) -> Duration {
        let since = self
            .moments
            .pause
            .map_or(Duration::ZERO, |from| until.saturating_sub(from));
        since.saturating_sub(self.moments.verify)
    }

    /// Whether the guest may be resumed here although `Commit` has left. Never, but as a planted fault.
    pub(super) fn resumes_after_commit(&self) -> bool {
        self.planted.has(Fault::ResumeAfterCommit)
    }
}

fn micros(time: Time) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
