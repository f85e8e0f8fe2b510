//! The connections to the source: lost, and taken up again by the source. See `source/link.rs` for the other side.
//!
//! What arrived stays; the source is waited for as long as it said that it would try, and told which pages of the open
//! round are here. What else it had said of that round, or of the machine's state, counts as not said. Once the machine
//! is being restored it is too late: the source has its guest, and this copy is thrown away.

use super::{Destination, State};
use crate::error::{Error, Span};
use crate::faults::Fault;
use crate::timers::Timer;
use crate::{LinkReport, Time};
use std::time::Duration;
use wire::{Have, MAX_SKIP_RANGES, Message, Terms};

/// What is known of the connections.
#[derive(Debug, Default)]
pub(super) struct Link {
    /// Of the protocol, as agreed on; 1 until that is known.
    version: u16,
    /// How long the source would try, once it has said so. Its word may be lost with the first connection.
    told: Option<Duration>,
    /// Since when they are lost, and what the migration ends for if they stay so.
    down: Option<(Time, Error)>,
    report: LinkReport,
}

impl Link {
    pub(super) fn is_down(&self) -> bool {
        self.down.is_some()
    }

    pub(super) fn report(&self) -> LinkReport {
        self.report
    }
}

impl Destination {
    /// What the source said beyond `Hello`.
    pub(super) fn terms(&mut self, terms: Terms) {
        let window = Duration::from_millis(terms.resume_window_ms);
        if self.link.told.replace(window).is_some() {
            self.invalid("Terms twice".to_owned());
        }
    }

    /// The version of the protocol that was agreed on, told before the first message is.
    pub fn speaks(&mut self, version: u16) {
        self.link.version = version;
    }

    /// How long a source is waited for that lost its connections.
    fn window(&self) -> Duration {
        let may = self.link.version >= wire::RESUMING_SINCE;
        let window = self.config.resume_window.min(self.link.told.unwrap_or(Duration::MAX));
        if may { window } else { Duration::ZERO }
    }

    /// Whether the source may take the migration up again now, over new connections.
    pub fn may_be_resumed(&self) -> bool {
        !self.window().is_zero() && matches!(self.state, State::Receiving | State::Collecting)
    }

    /// How many data streams a migration that is taken up again has; `None` before `Hello` was accepted.
    pub fn streams(&self) -> Option<u16> {
        self.terms.as_ref().map(|terms| terms.streams)
    }

    /// A connection is lost, for `error`: new ones are waited for, or the migration ends.
    pub(super) fn link_lost(&mut self, error: Error) {
        if self.link.is_down() {
            return;
        }
        if self.committed() || !self.may_be_resumed() {
            return self.fail(error);
        }
        tracing::info!(%error, "the connection is lost; waiting for the source to come back");
        self.actions.retain(crate::DestinationAction::is_on_guest);
        for timer in [Timer::PeerDead, Timer::Ping] {
            self.timers.clear(timer);
        }
        self.link.down = Some((self.now, error));
        if !self.planted.has(Fault::WaitWithoutEnd) {
            self.timers.set(Timer::Relink, self.now.saturating_add(self.patience()));
        }
        self.push(crate::DestinationAction::Disconnect);
    }

    /// The source may find out later than this side.
    fn patience(&self) -> Duration {
        self.window().saturating_add(self.config.peer_timeout)
    }

    /// The source did not come back.
    pub(super) fn window_passed(&mut self) {
        if let Some((_, error)) = self.link.down.take() {
            let text = format!("{error}, and it did not come back within {}", Span(self.patience()));
            self.fail(Error::Lost(text, error.cause()));
        }
    }

    /// The source is back, and nothing of the old connections is under way any more.
    pub(super) fn relinked(&mut self) {
        if self.committed() {
            return;
        }
        if !self.may_be_resumed() {
            let why = "the migration cannot be taken up again: the machine's state had come, and is being restored";
            return self.fail(Error::RefusedHere(why.to_owned()));
        }
        // The old connections are gone; these must not be closed for them.
        self.actions.retain(crate::DestinationAction::is_on_guest);
        let since = self.link.down.take().map_or(self.now, |(since, _)| since);
        let passed = self.now.saturating_sub(since);
        self.link.report.resumed += 1;
        self.link.report.down_ms += passed.as_secs_f64() * 1e3;
        self.timers.clear(Timer::Relink);
        self.heard();
        self.state = State::Receiving;
        if !self.planted.has(Fault::KeepHandover) {
            self.handover.forget();
        }
        let keep_skips = self.planted.has(Fault::KeepSkips);
        let Some(rounds) = &mut self.rounds else { return };
        let Some((round, here)) = rounds.reopen(self.now, keep_skips) else {
            return self.invalid("more rounds than 32 bits count".to_owned());
        };
        let wire_bytes = rounds.wire_bytes;
        for (arrived, pages) in here {
            let ranges: Vec<_> = pages.runs().collect();
            for ranges in ranges.chunks(MAX_SKIP_RANGES) {
                let ranges = ranges.to_vec();
                self.transmit(Message::Have(Have { arrived, ranges }));
            }
        }
        self.transmit(Message::Resumed { round, wire_bytes });
        tracing::info!(round, ?passed, "the source is back");
    }
}
