//! Ways out: success, and the undoing of everything that was done to the guest.
//!
//! Before `Commit` has left, every failure ends with the session ended, harvested pages given back, tracking off and the
//! guest as it was. After `Commit` has left and no answer came, nobody knows whether the guest runs at the destination:
//! it stays paused here, and is never resumed by this machine.

use super::{Source, State};
use crate::error::{Error, VERIFY_FAILED, plain};
use crate::faults::Fault;
use crate::{Ending, Outcome, Report, Role, SourceAction, Step, Time};
use wire::Message;

/// An undoing under way.
#[derive(Debug)]
pub(super) struct Undo {
    ending: Ending,
    /// The cause, and what failed while undoing.
    error: String,
    /// Whether the guest is surely this side's.
    ours: bool,
    /// Whether the steps are queued already.
    queued: bool,
    /// Digests were found unequal.
    unequal: bool,
}

impl Source {
    /// Ends the migration for `error`. The first cause counts; later ones are ignored.
    pub(super) fn fail(&mut self, error: Error) {
        if matches!(self.state, State::Undoing | State::Finished | State::Closing) {
            return;
        }
        if self.done.committed {
            let text = format!(
                "the guest was handed over and no answer came ({error}): it stays paused here; find out whether the \
                 receiver runs it before resuming either copy"
            );
            let ours = self.resumes_after_commit();
            return self.undo(Ending::Unknown, text, ours, None, false);
        }
        let reason = error.peer_listens().then(|| plain(&error.to_string()));
        let abort = reason.map(|reason| Message::Abort {
            reason,
            cause: error.cause(),
        });
        let unequal = matches!(&error, Error::Aborted { reason, .. } if reason.starts_with(VERIFY_FAILED));
        self.undo(error.ending(), error.to_string(), true, abort, unequal);
    }

    /// The receiver gave up. It never runs a guest after it has said so, not even when a `Commit` crossed its word on
    /// the way: the guest is this side's.
    pub(super) fn peer_aborted(&mut self, error: Error) {
        self.done.committed = false;
        self.fail(error);
    }

    fn undo(&mut self, ending: Ending, error: String, ours: bool, abort: Option<Message>, unequal: bool) {
        tracing::debug!(%ending, error, "undoing");
        // What was queued and not handed out never happens; what is owed is derived from what was.
        self.actions.clear();
        self.timers.clear_all();
        if let Some(abort) = abort {
            self.push(SourceAction::Transmit(abort));
        }
        self.hints.open = None;
        if let Some(session) = self.done.session.filter(|_| !self.planted.has(Fault::ForgetEndHints)) {
            self.push(SourceAction::EndHints { session, hold: false });
        }
        self.undo = Some(Undo {
            ending,
            error,
            ours,
            queued: false,
            unequal,
        });
        self.state = State::Undoing;
        self.undo_next();
    }

    /// Queues what is owed once nothing is under way at the guest (a harvest that is, is owed back too), and the end
    /// once all that is done.
    pub(super) fn undo_next(&mut self) {
        let busy = self.is_busy();
        let Some(undo) = self.undo.as_mut().filter(|_| !busy) else {
            return;
        };
        if undo.queued {
            let (ending, error) = (undo.ending, undo.error.clone());
            return self.finish(ending, Some(error));
        }
        undo.queued = true;
        let resumes = self.running || self.planted.has(Fault::ResumePausedGuest);
        let resume = undo.ours && resumes && self.done.paused;
        if self.done.tracking {
            if !self.harvested.is_empty() && !self.planted.has(Fault::ForgetGiveBack) {
                self.push(SourceAction::GiveBack(self.harvested.clone()));
            }
            if !self.planted.has(Fault::ForgetStopTracking) {
                self.push(SourceAction::StopTracking);
            }
        }
        if resume {
            self.push(SourceAction::Resume);
        }
        self.undo_next_if_idle();
    }

    fn undo_next_if_idle(&mut self) {
        if !self.actions.iter().any(SourceAction::is_on_guest) {
            self.undo_next();
        }
    }

    /// A step failed while things are being undone. The rest goes on; the operator is told.
    pub(super) fn undo_failed(&mut self, on_guest: bool, step: Step, error: &str) {
        let Some(undo) = self.undo.as_mut().filter(|_| on_guest) else {
            return;
        };
        let undoing = matches!(
            step,
            Step::EndHints | Step::GiveBack | Step::StopTracking | Step::Resume
        );
        if undoing {
            undo.error.push_str(&format!("; then {step} failed: {error}"));
        }
    }

    /// Reports. The last action.
    pub(super) fn finish(&mut self, ending: Ending, error: Option<String>) {
        self.timers.clear_all();
        self.state = State::Finished;
        let report = self.report(ending, error.clone());
        self.push(SourceAction::Finished(Box::new(Outcome { ending, error, report })));
    }

    fn report(&self, ending: Ending, error: Option<String>) -> Report {
        let ms = |t: Time| t.as_secs_f64() * 1e3;
        let end = self.moments.running.unwrap_or(self.now);
        let precopy_end = self.moments.pause.unwrap_or(end);
        let unequal = self.undo.as_ref().is_some_and(|undo| undo.unequal);
        let verified = (ending == Ending::Completed && self.config.verify && !self.config.dry_run).then_some(true);
        let link = self.link.report();
        let wire_bytes = self.rounds.wire_bytes();
        Report {
            version: 1,
            role: Role::Source,
            result: ending,
            error,
            total_ms: ms(end),
            setup_ms: ms(self.moments.tracking_on.unwrap_or(end)),
            hint_ms: ms(self.hints.took(end)),
            precopy_ms: ms(self
                .moments
                .first_chunk
                .map_or(Time::ZERO, |from| precopy_end.saturating_sub(from))),
            downtime_ms: ms(self.downtime_until(end)),
            verify_ms: ms(self.moments.verify),
            verify_ahead_ms: ms(self.moments.verify_ahead),
            guest_stall_ms: 0.0,
            ram_bytes: self.layout.total_bytes(),
            wire_bytes,
            payload_bytes: self.rounds.payload_bytes(),
            throughput_bytes_per_s: if end.is_zero() {
                0.0
            } else {
                wire_bytes as f64 / end.as_secs_f64()
            },
            streams: self.config.streams,
            link,
            pages: self.fates.report().told(),
            balloon: self.hints.report(),
            rounds: self.rounds.reports(),
            compress: None,
            verified: if unequal { Some(false) } else { verified },
            peak_rss_bytes: 0,
        }
    }
}
