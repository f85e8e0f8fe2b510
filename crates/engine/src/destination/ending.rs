//! Ways out of a destination.

use super::{Destination, State};
use crate::error::{Error, plain};
use crate::{BalloonReport, DestinationAction, Ending, Outcome, PagesReport, Report, Role, Time};
use wire::Message;

/// The most reasons of a refusal.
const MAX_REASONS: usize = 64;

impl Destination {
    /// Gives up, for `error`. Once `Commit` has come nothing is given up any more: the guest is this side's.
    pub(super) fn fail(&mut self, error: Error) {
        if self.state == State::Finished || self.committed() {
            return;
        }
        // What was queued and not handed out never happens.
        self.actions.clear();
        if error.peer_listens() {
            let reason = plain(&error.to_string());
            self.push(DestinationAction::Transmit(Message::Abort {
                reason,
                cause: error.cause(),
            }));
        }
        if self.made {
            self.push(DestinationAction::Discard);
        }
        self.finish(error.ending(), Some(error.to_string()));
    }

    /// No such machine can be made here.
    pub(super) fn refuse(&mut self, mut reasons: Vec<String>) {
        reasons.truncate(MAX_REASONS);
        let mut reasons: Vec<String> = reasons.iter().map(|r| plain(r)).collect();
        if reasons.is_empty() {
            reasons.push("this receiver does not take the guest and gave no reason".to_owned());
        }
        // What ended it is told beside its reasons: the result is `refused`.
        let error = reasons.join("; ");
        self.push(DestinationAction::Transmit(Message::Refuse { reasons }));
        self.finish(Ending::Refused, Some(error));
    }

    /// Reports. The last action.
    pub(super) fn finish(&mut self, ending: Ending, error: Option<String>) {
        self.timers.clear_all();
        self.state = State::Finished;
        let report = self.report(ending, error.clone());
        self.push(DestinationAction::Finished(Box::new(Outcome { ending, error, report })));
    }

    fn report(&self, ending: Ending, error: Option<String>) -> Report {
        let ms = |t: Time| t.as_secs_f64() * 1e3;
        let from_us = |us: u64| us as f64 / 1e3;
        let end = self.moments.running.unwrap_or(self.now);
        let mine = ms(end.saturating_sub(self.moments.began));
        // The source's clock up to Commit, ours from there on: no common clock is needed. Our wait for digests was told
        // with Ready, and is accounted for there.
        let after = self.moments.commit.map_or(0.0, |at| ms(end.saturating_sub(at)));
        let wait = ms(self.handover.verify_wait);
        let (total, downtime, verify) = match &self.handover.commit {
            Some(c) => (
                from_us(c.total_us) + after,
                from_us(c.downtime_us) + after,
                from_us(c.verify_us),
            ),
            None => (mine, 0.0, wait),
        };
        let rounds = self.rounds.as_ref();
        let wire_bytes = rounds.map_or(0, |r| r.wire_bytes);
        let setup = self.moments.accepted.unwrap_or(end).saturating_sub(self.moments.began);
        let precopy = rounds
            .and_then(|r| Some(r.last_round_began.saturating_sub(r.first_page?)))
            .unwrap_or(Time::ZERO);
        Report {
            version: 1,
            role: Role::Receiver,
            result: ending,
            error,
            total_ms: total,
            setup_ms: ms(setup),
            hint_ms: 0.0,
            precopy_ms: ms(precopy),
            downtime_ms: downtime,
            verify_ms: verify,
            verify_ahead_ms: 0.0,
            guest_stall_ms: 0.0,
            ram_bytes: self.terms.as_ref().map_or(0, |terms| terms.layout.total_bytes()),
            wire_bytes,
            payload_bytes: rounds.map_or(0, |r| r.payload_bytes),
            throughput_bytes_per_s: if total > 0.0 {
                wire_bytes as f64 * 1e3 / total
            } else {
                0.0
            },
            streams: self.terms.as_ref().map_or(0, |terms| terms.streams),
            link: self.link.report(),
            pages: rounds.map_or_else(PagesReport::default, |r| r.fates.report().told()),
            balloon: BalloonReport {
                dialect: self
                    .terms
                    .as_ref()
                    .map_or_else(String::new, |terms| terms.dialect.clone()),
                why: "the source asks, and its report tells".to_owned(),
                ..BalloonReport::default()
            },
            rounds: rounds.map_or_else(Vec::new, super::rounds::Rounds::reports),
            compress: None,
            verified: self.handover.verified,
            peak_rss_bytes: 0,
        }
    }
}
