//! The connections to the destination: lost, and taken up again.
//!
//! A connection that is lost is the loss of all of them: whichever broke, the control connection or one stream of many, all
//! are replaced, and the destination says which pages of the open round it has for certain. What was handed to a stream
//! and is not among those is unsent again. There is no second way, for a single stream or for a message that may have
//! been lost.
//!
//! A guest does not wait paused for a link: if it was paused for the last round it goes on here, what the switchover had
//! collected is dropped, and that round becomes one like any other. Nothing is taken up again once the destination
//! restores the machine, or once `Commit` has left.

use super::{PEER, Source, State};
use crate::error::Error;
use crate::faults::Fault;
use crate::timers::Timer;
use crate::{LinkReport, RunKind, SourceAction, Time};
use pages::{Layout, PageSet};
use std::sync::Arc;
use std::time::Duration;
use wire::{Arrived, Have, Message, Terms};

/// Connections that may be lost one after another without a page or a round having got through.
const MAX_FRUITLESS: u32 = 16;

/// What is known of the connections.
#[derive(Debug, Default)]
pub(super) struct Link {
    /// Of the protocol, as agreed on; 1 until that is known.
    version: u16,
    /// They are lost.
    down: Option<Down>,
    /// Losses since something got through, and how many pages of the open round had by the last one.
    fruitless: u32,
    arrived: u64,
    report: LinkReport,
}

/// While they are lost.
#[derive(Debug)]
struct Down {
    since: Time,
    /// What the migration ends for if they stay so.
    error: Error,
    /// Whether new ones were asked for.
    asked: bool,
    /// What the destination has said so far over new ones.
    has: Has,
    /// Bytes that streams have written by now.
    written: u64,
}

/// Pages of the open round that are at the destination.
#[derive(Debug)]
pub(super) struct Has {
    pub(super) data: PageSet,
    pub(super) zero: PageSet,
    pub(super) filled: PageSet,
}

impl Has {
    fn nothing(layout: &Arc<Layout>) -> Self {
        let empty = PageSet::empty(layout);
        Has {
            data: empty.clone(),
            zero: empty.clone(),
            filled: empty,
        }
    }

    /// All of them, by what they became.
    pub(super) fn by_kind(&self) -> [(RunKind, &PageSet); 3] {
        [
            (RunKind::Data, &self.data),
            (RunKind::Zero, &self.zero),
            (RunKind::Fill, &self.filled),
        ]
    }
}

impl Link {
    pub(super) fn is_down(&self) -> bool {
        self.down.is_some()
    }

    /// Whether they are lost and new ones not asked for yet: a guest's action is under way. What still comes over the old
    /// ones would be taken for the answer of the new ones.
    pub(super) fn is_given_up(&self) -> bool {
        self.down.as_ref().is_some_and(|down| !down.asked)
    }

    pub(super) fn report(&self) -> LinkReport {
        self.report
    }

    /// A round is at the destination.
    pub(super) fn got_through(&mut self) {
        (self.fruitless, self.arrived) = (0, 0);
    }
}

impl Source {
    /// The version of the protocol that was agreed on, told before the first message is.
    pub fn speaks(&mut self, version: u16) {
        self.link.version = version;
    }

    /// Whether the receiver takes the machine's state before it has said that the last round is there: one round trip less
    /// of downtime.
    pub(super) fn early_state(&self) -> bool {
        self.link.version >= wire::PACKING_SINCE
    }

    /// The receiver has accepted: tells it for how long it is worth waiting for this side.
    pub(super) fn tell_terms(&mut self) {
        if self.link.version >= wire::RESUMING_SINCE {
            let window = self.config.resume_window.as_millis();
            self.transmit(Message::Terms(Terms {
                resume_window_ms: u64::try_from(window).unwrap_or(u64::MAX),
            }));
        }
    }

    /// A connection is lost, for `error`: new ones are asked for, or the migration ends.
    pub(super) fn link_lost(&mut self, error: Error) {
        if matches!(self.state, State::Undoing | State::Closing | State::Finished) {
            return;
        }
        if let Some(down) = &mut self.link.down {
            // The new ones broke in turn.
            down.asked = false;
            down.has = Has::nothing(&self.layout);
            self.timers.clear(Timer::PeerDead);
            return;
        }
        self.link.fruitless += 1;
        let can = self.link.version >= wire::RESUMING_SINCE
            && !self.config.resume_window.is_zero()
            && !self.done.committed
            && !matches!(self.state, State::Greeting | State::Committing)
            && self.link.fruitless <= MAX_FRUITLESS;
        if !can {
            return self.fail(error);
        }
        tracing::info!(%error, "the connection is lost; trying to reach the receiver again");
        self.actions.retain(SourceAction::is_on_guest);
        for timer in [Timer::PeerDead, Timer::Ping] {
            self.timers.clear(timer);
        }
        let until = self.now.saturating_add(self.config.resume_window);
        self.timers.set(Timer::Relink, until);
        self.link.down = Some(Down {
            since: self.now,
            error,
            asked: false,
            has: Has::nothing(&self.layout),
            written: 0,
        });
        self.rounds.link_lost();
        self.unpause();
    }

    /// The guest that was paused for the last round goes on.
    fn unpause(&mut self) {
        if self.moments.pause.take().is_none() {
            return;
        }
        self.moments.forget_switchover();
        if !self.planted.has(Fault::KeepSavedState) {
            self.switchover.forget();
        }
        if !self.planted.has(Fault::KeepLastRound) {
            self.rounds.no_longer_last();
        }
        if self.running && !self.planted.has(Fault::StayPausedWithoutLink) {
            self.push(SourceAction::Resume);
        }
        if matches!(self.state, State::Completing | State::AwaitingReady) {
            // The last round is at the destination; what the guest writes now makes another one.
            self.harvest();
        }
    }

    /// Asks for new connections, once nothing is under way at the guest: so no state or digest of a switchover that did
    /// not come off is still to come.
    pub(super) fn reconnect_if_idle(&mut self, busy: bool) {
        if let Some(down) = self.link.down.as_mut().filter(|down| !down.asked && !busy) {
            down.asked = true;
            self.push(SourceAction::Reconnect);
        }
    }

    /// New connections are there; what the destination says is awaited.
    pub(super) fn reconnected(&mut self, written: u64) {
        if let Some(down) = &mut self.link.down {
            down.written = written;
            self.heard();
        }
    }

    /// It could not be reached any more.
    pub(super) fn unreachable(&mut self, why: &str) {
        self.not_resumed(|lost| format!("{lost}, and it cannot be reached again: {why}"));
    }

    /// It could not be reached in time.
    pub(super) fn window_passed(&mut self) {
        let window = crate::error::Span(self.config.resume_window).to_string();
        self.not_resumed(|lost| format!("{lost}, and it was not reached again within {window} (--resume-window)"));
    }

    /// It does not take the migration up again.
    pub(super) fn resume_refused(&mut self, why: &str) {
        self.not_resumed(|lost| format!("{lost}, and the {PEER} did not go on with the migration: {why}"));
    }

    fn not_resumed(&mut self, sentence: impl FnOnce(&Error) -> String) {
        if let Some(down) = &self.link.down {
            let error = Error::Lost(sentence(&down.error), down.error.cause());
            self.fail(error);
        }
    }

    /// What the destination has.
    pub(super) fn has(&mut self, have: &Have) {
        let Some(down) = &mut self.link.down else { return };
        let before = [&down.has.data, &down.has.zero, &down.has.filled];
        let wrong = have.ranges.iter().find(|range| {
            self.layout.region_of_range(**range).is_none() || before.iter().any(|set| set.count_range(**range) > 0)
        });
        if let Some(range) = wrong {
            return self.fail(Error::Invalid(
                format!("a Have of pages {range}, which are no RAM or were told before"),
                PEER,
            ));
        }
        let set = match have.arrived {
            Arrived::Data => &mut down.has.data,
            Arrived::Zero => &mut down.has.zero,
            Arrived::Filled => &mut down.has.filled,
        };
        for range in &have.ranges {
            if set.insert_range(*range) < range.count() {
                let what = format!("a Have of pages {range} twice");
                return self.fail(Error::Invalid(what, PEER));
            }
        }
    }

    /// The destination goes on, in round `round`: so does this side.
    pub(super) fn resumed(&mut self, round: u32, arrived: u64) {
        let Some(down) = self.link.down.take() else { return };
        let ours = self.rounds.number();
        let complete = match self.state {
            // This side knows already that it is.
            State::Harvesting => round.checked_sub(1) == Some(ours),
            State::Barrier if round.checked_sub(1) == Some(ours) => true,
            _ => false,
        };
        if !complete && (round != ours || self.state == State::Harvesting) {
            let what = format!("Resumed for round {round} in round {ours}");
            return self.fail(Error::Invalid(what, PEER));
        }
        let passed = self.now.saturating_sub(down.since);
        self.link.report.resumed += 1;
        self.link.report.down_ms += passed.as_secs_f64() * 1e3;
        self.link.report.bytes_again = down.written.saturating_sub(arrived);
        self.timers.clear(Timer::Relink);
        self.rounds.count_without(passed);
        self.keep_alive();
        let taken_up = if complete {
            down.has.none()
        } else {
            self.take_up(&down.has)
        };
        if let Err(what) = taken_up {
            return self.fail(Error::Invalid(what, PEER));
        }
        tracing::info!(round, complete, ?passed, "the migration goes on");
        if complete && self.state == State::Barrier {
            self.round_received();
        }
    }

    /// Goes on in the open round: what was handed to a stream and did not arrive is unsent again.
    fn take_up(&mut self, has: &Has) -> Result<(), String> {
        let arrived: u64 = has.by_kind().iter().map(|(_, set)| set.count()).sum();
        if arrived > self.link.arrived {
            self.link.fruitless = 0;
        }
        self.link.arrived = arrived;
        let forget = self.planted.has(Fault::ForgetInFlight);
        self.rounds.take_up(has, &mut self.fates, forget)?;
        if self.rounds.number() == 0 {
            // The destination has forgotten what would be left out: it is told anew at the round's end.
            self.fates.forget_skips();
        }
        if self.state == State::Barrier {
            self.state = State::Sending;
        }
        Ok(())
    }
}

impl Has {
    /// Nothing of a round that has not begun.
    fn none(&self) -> Result<(), String> {
        match self.by_kind().iter().map(|(_, set)| set.count()).sum::<u64>() {
            0 => Ok(()),
            pages => Err(format!("a Have of {pages} pages of a round that has not begun")),
        }
    }
}

impl super::Moments {
    /// Of a switchover that did not come off.
    fn forget_switchover(&mut self) {
        self.pause = None;
        self.digest_began = None;
        self.state_sent = None;
        self.verify = Duration::ZERO;
    }
}
