//! The source's state machine: from an open control connection to the guest running at the destination, or to the guest
//! as it was.
//!
//! ```text
//! Greeting -> Starting -> Scanning -> Sending <-> Barrier -> Harvesting -> Sending ...
//!                                       |                       | expected downtime fits
//!                                       |                       v
//!                                       +---- last round ---- (paused)
//!                                       v
//!                          Barrier (last) -> Completing -> AwaitingReady -> Committing -> Closing -> Finished
//! any of them before Commit has left -> Undoing -> Finished
//! ```
//!
//! Beside that the connections are there or lost ([`link`]): while they are lost nothing is sent, and the guest runs.
//!
//! Invariants, in the order in which breaking them would hurt:
//!
//! - the guest is resumed here only while no `Commit` has left, or after the destination said that it will not run it;
//! - what a harvest returned is given back on every way out but success, because reading a dirty log destroys it;
//! - a page that was skipped because it lay in the balloon is sent once it does not lie there any more, the last look
//!   being taken while the guest is paused;
//! - the guest is asked only after tracking is on, an answer takes pages out of round 0's unsent pages alone, and the
//!   session is ended before the next harvest and before the pause: so a page written since tracking began is sent;
//! - a page is handed to a stream once in a round at most, and a round begins only after the destination has all of the
//!   one before: so an older copy of a page never lands over a newer one.
//!
//! What was done to the guest (tracking, session, pause, `Commit`) is noted when [`Source::poll_action`] hands the
//! action out, not when it is queued: a failure in between finds a queue that it may throw away.

mod ending;
mod handover;
mod hints;
mod link;
mod rounds;

use crate::ask;
use crate::bandwidth::Bandwidth;
use crate::error::{Error, name_of, plain};
use crate::fates::Fates;
use crate::faults::{Fault, Planted};
use crate::timers::{Timer, Timers};
use crate::{
    Ask, Ending, OnTimeout, Phase, Progress, Scanned, SourceAction, SourceConfig, SourceEvent, Step, Time, Tuning,
};
use ending::Undo;
use handover::Switchover;
use hints::Hints;
use link::Link;
use machine::MachineConfig;
use pages::{Layout, PageSet};
use rounds::Rounds;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use wire::{Hello, Message};

/// The peer, in a source's sentences.
const PEER: &str = "receiver";

/// The most data streams; also a bound on what is in flight.
const MAX_STREAMS: u16 = 64;

/// The least time after which a peer may be taken for dead.
const MIN_PEER_TIMEOUT: Duration = Duration::from_millis(20);

/// The longest silence on our side, whatever the peer's time-out is.
const MAX_SILENCE: Duration = Duration::from_secs(1);

/// Where a source is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// `Hello` has been sent.
    Greeting,
    /// Tracking is being turned on.
    Starting,
    /// RAM is being looked at.
    Scanning,
    /// Chunks of a round are being sent.
    Sending,
    /// A round's end was sent; the receiver's word for it is missing.
    Barrier,
    /// The dirty log is being read.
    Harvesting,
    /// The last round was received: state and digests are being collected.
    Completing,
    /// The state was sent; the receiver has not said that it is ready.
    AwaitingReady,
    /// `Commit` is queued or has left.
    Committing,
    /// The guest runs at the destination; tracking is being turned off.
    Closing,
    /// Something went wrong, and is being undone.
    Undoing,
    /// Over.
    Finished,
}

impl State {
    /// What a message that does not fit came in the middle of.
    fn waits_for(self) -> &'static str {
        match self {
            State::Greeting => "instead of Accept or Refuse",
            State::Barrier => "instead of RoundReceived",
            State::AwaitingReady => "instead of Ready",
            State::Committing => "instead of Running or NotRunning",
            _ => "unasked",
        }
    }

    /// What the receiver owes an answer to.
    fn owed(self) -> Option<&'static str> {
        match self {
            State::Barrier => Some("the end of a round"),
            State::AwaitingReady => Some("the machine's state"),
            State::Committing => Some("Commit"),
            _ => None,
        }
    }
}

/// What was done to the guest so far, as of the actions handed out.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    tracking: bool,
    session: Option<u32>,
    paused: bool,
    committed: bool,
}

/// When things happened.
#[derive(Clone, Copy, Debug, Default)]
struct Moments {
    tracking_on: Option<Time>,
    first_chunk: Option<Time>,
    /// When the pause was asked for: a little before it was there.
    pause: Option<Time>,
    running: Option<Time>,
    digest_began: Option<Time>,
    /// The same for the digest ahead of the pause, and what it took.
    ahead_began: Option<Time>,
    verify_ahead: Duration,
    state_sent: Option<Time>,
    /// What verification added: our digest, and the receiver's wait for its own.
    verify: Duration,
}

/// The source of a migration, from an open control connection to the end. See the crate's documentation for how to
/// drive it.
#[derive(Debug)]
pub struct Source {
    config: SourceConfig,
    layout: Arc<Layout>,
    /// Whether the guest ran before.
    running: bool,
    now: Time,
    state: State,
    actions: VecDeque<SourceAction>,
    /// Actions on the guest that were handed out and not answered yet, in order.
    awaiting: VecDeque<Step>,
    done: Done,
    timers: Timers,
    /// The answer that the running timer is for.
    owed: Option<&'static str>,
    moments: Moments,
    hints: Hints,
    rounds: Rounds,
    fates: Fates,
    bandwidth: Bandwidth,
    /// All that was harvested since tracking began: owed back if this fails.
    harvested: PageSet,
    switchover: Switchover,
    undo: Option<Undo>,
    link: Link,
    planted: Planted,
}

impl Source {
    /// The control connection is up: greets the destination. `machine` is what the guest is made of, `layout` the
    /// layout that all page sets of this migration will have, `running` whether the guest runs now. Settings out of
    /// their range are brought into it (streams: 1 to 64; peer time-out: at least 20 ms).
    pub fn new(
        mut config: SourceConfig,
        machine: MachineConfig,
        layout: Arc<Layout>,
        running: bool,
        now: Time,
    ) -> Self {
        config.streams = config.streams.clamp(1, MAX_STREAMS);
        config.peer_timeout = config.peer_timeout.max(MIN_PEER_TIMEOUT);
        let mut source = Source {
            running,
            now,
            state: State::Greeting,
            actions: VecDeque::new(),
            awaiting: VecDeque::new(),
            done: Done::default(),
            timers: Timers::default(),
            owed: None,
            moments: Moments::default(),
            hints: Hints::new(&layout),
            rounds: Rounds::new(&layout, config.streams),
            fates: Fates::new(&layout),
            bandwidth: Bandwidth::default(),
            harvested: PageSet::empty(&layout),
            switchover: Switchover::default(),
            undo: None,
            link: Link::default(),
            planted: Planted::default(),
            layout,
            config,
        };
        source.hints.report.dialect.clone_from(&machine.balloon.dialect);
        source.hints.report.why = "the migration ended before that was decided".to_owned();
        source.greet(machine);
        source
    }

    fn greet(&mut self, machine: MachineConfig) {
        if self.config.ask == Ask::Always && !self.config.skip.free {
            let why = "the guest is to be asked for its free pages (--ask always) and free pages are not to be skipped \
                       (--skip): add free to --skip, or leave --ask out";
            return self.fail(Error::RefusedHere(why.to_owned()));
        }
        if machine.layout != *self.layout {
            let why = "the machine's RAM layout is not the one that its memory has";
            return self.fail(Error::Internal(why.to_owned()));
        }
        self.heard();
        if !self.config.timeout.is_zero() {
            self.timers
                .set(Timer::Migration, self.now.saturating_add(self.config.timeout));
        }
        self.transmit(Message::Hello(Hello {
            config: machine,
            running: self.running,
            streams: self.config.streams,
            verify: self.config.verify,
            dry_run: self.config.dry_run,
        }));
    }

    /// Plants a fault, for tests of the tests.
    #[cfg(feature = "planted-faults")]
    pub fn plant(&mut self, fault: Fault) {
        self.planted.plant(fault);
    }

    /// Something happened. Events after the end are ignored.
    pub fn handle(&mut self, event: SourceEvent, now: Time) {
        self.now = self.now.max(now);
        if self.state == State::Finished {
            return;
        }
        match event {
            SourceEvent::Message(message) => self.message(message),
            SourceEvent::Answered { session, answer } => self.answered(session, &answer),
            SourceEvent::Sent {
                stream,
                chunk,
                zero,
                wire_bytes,
                payload_bytes,
            } => {
                self.sent(stream, chunk, &zero, wire_bytes, payload_bytes);
            }
            SourceEvent::Failed { step, error } => self.failed(step, &error),
            SourceEvent::Stalled { stream } => self.stalled(stream),
            SourceEvent::StreamGone { error } => self.stream_gone(&error),
            SourceEvent::PeerGone { error } => self.peer_gone(&error),
            SourceEvent::Reconnected { wire_bytes } => self.reconnected(wire_bytes),
            SourceEvent::Unreachable { error } => self.unreachable(&plain(&error)),
            SourceEvent::Tuned(tuning) => self.tuned(tuning),
            SourceEvent::Cancel => self.cancel(),
            event => self.guest_answer(event),
        }
        self.go_on();
    }

    /// The time that [`Source::poll_timeout`] named has come. Harmless when called early.
    pub fn handle_timeout(&mut self, now: Time) {
        self.now = self.now.max(now);
        while let Some(timer) = self.timers.expire(self.now) {
            match timer {
                Timer::PeerDead => {
                    self.link_lost(Error::Silent {
                        peer: PEER,
                        after: self.config.peer_timeout,
                    });
                }
                Timer::Relink => self.window_passed(),
                Timer::Ping => self.transmit(Message::Ping),
                Timer::Hints => self.hints_timed_out(),
                Timer::Migration => self.timed_out(),
                Timer::Answer => self.no_answer(),
            }
        }
        self.go_on();
    }

    /// What to do next; `None` where there is nothing to do but wait.
    pub fn poll_action(&mut self) -> Option<SourceAction> {
        let action = self.actions.pop_front()?;
        if action.is_on_guest() {
            self.awaiting.push_back(action.step());
        }
        match &action {
            SourceAction::Transmit(Message::Commit(_)) => self.done.committed = true,
            SourceAction::StartTracking => self.done.tracking = true,
            SourceAction::StopTracking => self.done.tracking = false,
            SourceAction::BeginHints { session } => self.done.session = Some(*session),
            SourceAction::EndHints { hold: false, .. } => self.done.session = None,
            SourceAction::Pause => self.done.paused = true,
            SourceAction::Resume => self.done.paused = false,
            _ => {}
        }
        Some(action)
    }

    /// When to call [`Source::handle_timeout`]; `None` where there is nothing to wait for but answers to actions.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.timers.next()
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        let phase = match self.state {
            State::Greeting => Phase::Connecting,
            State::Starting | State::Scanning => Phase::Setup,
            State::Undoing => Phase::Undoing,
            State::Finished => Phase::Finished,
            State::Committing if self.done.committed => Phase::Committed,
            State::Closing => Phase::Committed,
            _ if self.moments.pause.is_some() => Phase::Switchover,
            _ => Phase::Precopy,
        };
        Progress {
            phase,
            round: self.rounds.number(),
            pending_pages: self.rounds.left(),
            sent_pages: self.rounds.sent_pages(),
            total_pages: self.layout.total_pages(),
            wire_bytes: self.rounds.wire_bytes(),
            dirty_bytes_per_s: self.rounds.dirty_bytes_per_s(),
            bandwidth_bytes_per_s: self.bandwidth.bytes_per_s(),
            expected_downtime: self.switchover.expected_downtime,
        }
    }

    /// Whatever the last event made possible.
    fn go_on(&mut self) {
        match self.state {
            State::Sending if !self.link.is_down() => self.feed_streams(),
            State::Undoing => self.undo_next(),
            State::Finished => {}
            _ => self.reconnect_if_idle(self.is_busy()),
        }
        self.watch_answer();
    }

    /// Whether something is under way at the guest, or will be.
    fn is_busy(&self) -> bool {
        !self.awaiting.is_empty() || self.actions.iter().any(SourceAction::is_on_guest)
    }

    /// Bounds the wait for an answer of a receiver that is alive: its pings keep a guest paused no longer than that. The
    /// time runs from when this side has nothing else to do, anew for each answer.
    fn watch_answer(&mut self) {
        let waits = !self.is_busy() && !self.link.is_down();
        let owed = self.state.owed().filter(|_| waits);
        if owed == self.owed {
            return;
        }
        self.owed = owed;
        match owed {
            Some(_) => {
                let at = self.now.saturating_add(self.answer_timeout());
                self.timers.set(Timer::Answer, at);
            }
            None => self.timers.clear(Timer::Answer),
        }
    }

    fn answer_timeout(&self) -> Duration {
        let digest = match self.config.verify {
            true => Duration::from_secs(self.layout.total_bytes().div_ceil(1 << 30)),
            false => Duration::ZERO,
        };
        self.config.answer_timeout.saturating_add(digest)
    }

    fn no_answer(&mut self) {
        if let Some(to) = self.owed {
            self.fail(Error::NoAnswer {
                peer: PEER,
                to,
                after: self.answer_timeout(),
            });
        }
    }

    fn push(&mut self, action: SourceAction) {
        self.actions.push_back(action);
    }

    /// While the connections are lost, nothing is said.
    fn transmit(&mut self, message: Message) {
        if self.link.is_down() {
            return;
        }
        self.ping_later();
        self.push(SourceAction::Transmit(message));
    }

    fn ping_later(&mut self) {
        let silence = (self.config.peer_timeout / 4).min(MAX_SILENCE);
        self.timers.set(Timer::Ping, self.now.saturating_add(silence));
    }

    /// The receiver has just been heard, and has just heard us.
    fn keep_alive(&mut self) {
        self.heard();
        self.ping_later();
    }

    fn heard(&mut self) {
        if self.planted.has(Fault::NoPeerTimeout) {
            return;
        }
        self.timers
            .set(Timer::PeerDead, self.now.saturating_add(self.config.peer_timeout));
    }

    fn message(&mut self, message: Message) {
        if matches!(self.state, State::Undoing | State::Closing) {
            return;
        }
        self.heard();
        match (self.state, message) {
            (_, Message::Ping) => {}
            (_, Message::Abort { reason, .. }) if self.link.is_down() => self.resume_refused(&plain(&reason)),
            // The last words over connections that are given up.
            _ if self.link.is_given_up() && !self.planted.has(Fault::HearOldWords) => {}
            (_, Message::Have(have)) if self.link.is_down() => self.has(&have),
            (_, Message::Resumed { round, wire_bytes }) if self.link.is_down() => self.resumed(round, wire_bytes),
            (_, Message::Refuse { reasons }) if self.link.is_down() => {
                self.resume_refused(&plain(&reasons.join("; ")));
            }
            (_, Message::Abort { reason, cause }) => {
                self.peer_aborted(Error::Aborted {
                    peer: PEER,
                    reason: plain(&reason),
                    cause,
                });
            }
            (State::Greeting, Message::Accept(_)) => self.accepted(),
            (State::Greeting, Message::Refuse { reasons }) => {
                let reasons: Vec<String> = reasons.iter().take(64).map(|r| plain(r)).collect();
                self.fail(Error::Refused(reasons.join("; ")));
            }
            (State::Barrier, Message::RoundReceived { round }) if round == self.rounds.number() => {
                self.round_received()
            }
            (State::AwaitingReady, Message::Ready { verified, verify_us }) => self.ready(verified, verify_us),
            (State::Committing, Message::Running(_)) if self.done.committed => self.runs_there(),
            (State::Committing, Message::NotRunning(not)) if self.done.committed => {
                self.peer_aborted(Error::NotRunning(plain(&not.reason)));
            }
            (_, Message::RoundReceived { .. }) if self.planted.has(Fault::SkipBarrier) => {}
            (state, message) => {
                let message_name = name_of(&message);
                let mut when = state.waits_for().to_owned();
                if let Message::RoundReceived { round } = message {
                    when = format!("for round {round} in round {}", self.rounds.number());
                }
                self.fail(Error::Unexpected {
                    peer: PEER,
                    message: message_name,
                    when,
                });
            }
        }
    }

    fn accepted(&mut self) {
        if self.config.dry_run {
            "it was a dry run: nothing was asked".clone_into(&mut self.hints.report.why);
            return self.finish(Ending::Completed, None);
        }
        self.tell_terms();
        self.state = State::Starting;
        if self.planted.has(Fault::AskBeforeTracking) {
            self.push(SourceAction::Scan);
        }
        self.push(SourceAction::StartTracking);
    }

    /// An answer to an action on the guest.
    fn guest_answer(&mut self, event: SourceEvent) {
        let Some(step) = step_answered(&event) else {
            return;
        };
        if self.awaiting.front() != Some(&step) {
            return self.fail(Error::Internal(format!(
                "{step} was reported done while it was not under way"
            )));
        }
        self.awaiting.pop_front();
        match event {
            // These count even while things are being undone.
            SourceEvent::Harvested(pages) => return self.harvested(pages),
            SourceEvent::HintsEnded(counts) => return self.hints.counted(counts),
            SourceEvent::Rechecked(rechecked) => return self.rechecked(&rechecked),
            _ if self.state == State::Undoing => return,
            _ => {}
        }
        match event {
            SourceEvent::TrackingStarted => self.tracking_started(),
            SourceEvent::Scanned(scanned) => self.scanned(*scanned),
            SourceEvent::Peeked(peeked) => self.peeked(&peeked),
            SourceEvent::Saved(state) => self.saved(state),
            SourceEvent::Digested(sums) => self.digested(sums),
            SourceEvent::TrackingStopped if self.state == State::Closing => self.finish(Ending::Completed, None),
            _ => {}
        }
    }

    fn tracking_started(&mut self) {
        self.moments.tracking_on = Some(self.now);
        self.rounds.count_writes_from(self.now);
        self.state = State::Scanning;
        if !self.planted.has(Fault::AskBeforeTracking) {
            self.push(SourceAction::Scan);
        }
    }

    /// RAM was looked at: decides whether to ask, and begins round 0.
    fn scanned(&mut self, scanned: Scanned) {
        let sets = [Some(&scanned.present), scanned.ballooned.as_ref()];
        if sets.into_iter().flatten().any(|set| !self.fits(set)) {
            return self.fail(Error::Internal("the scan's pages are of another RAM layout".to_owned()));
        }
        let mut decision = ask::decide(self.config.ask, self.config.skip.free, &scanned, &self.layout);
        if decision.ask && self.moments.pause.is_none() && self.switchover.stop_now {
            decision = ask::Decision {
                ask: false,
                why: "the time-out had passed".to_owned(),
            };
        }
        self.begin_round_0(scanned, decision);
    }

    /// An action failed, or a connection did.
    fn failed(&mut self, step: Step, error: &str) {
        let on_guest = self.awaiting.front() == Some(&step);
        if on_guest {
            self.awaiting.pop_front();
        }
        let error = plain(error);
        match (self.state, step) {
            (State::Undoing, _) => self.undo_failed(on_guest, step, &error),
            // The migration itself has succeeded: a log that stays on here costs a guest that no longer runs nothing.
            (State::Closing, _) if on_guest => {
                tracing::warn!("the guest runs at the destination, but {step} failed: {error}");
                self.finish(Ending::Completed, None);
            }
            (State::Closing, _) => {}
            // Once all pages have arrived the receiver may close the data streams.
            (State::Completing | State::AwaitingReady | State::Committing, Step::Send) => {}
            // The guest is still paused: the undoing tries once more.
            (_, Step::Resume) if on_guest => {
                self.done.paused = true;
                self.fail(Error::Step { step, error });
            }
            (_, Step::Peek) if on_guest => self.cannot_peek(),
            (_, Step::BeginHints) if on_guest => self.cannot_ask(&error),
            _ => self.fail(Error::Step { step, error }),
        }
    }

    fn peer_gone(&mut self, error: &str) {
        self.link_lost(Error::Gone {
            peer: PEER,
            error: plain(error),
        });
    }

    fn stream_gone(&mut self, error: &str) {
        // Once all pages have arrived the receiver may close the data streams.
        if !matches!(self.state, State::Completing | State::AwaitingReady | State::Committing) {
            let (step, error) = (Step::Send, plain(error));
            self.link_lost(Error::Step { step, error });
        }
    }

    /// A receiver that takes no pages. Once all have arrived there are none to take.
    fn stalled(&mut self, stream: u16) {
        let sending = !matches!(
            self.state,
            State::Completing | State::AwaitingReady | State::Committing | State::Closing
        );
        tracing::debug!(stream, sending, "a data stream stalls");
        if sending {
            self.link_lost(Error::Stalled(self.config.peer_timeout));
        }
    }

    fn tuned(&mut self, tuning: Tuning) {
        self.config.downtime_limit = tuning.downtime_limit.unwrap_or(self.config.downtime_limit);
        if let Some(most) = tuning.max_bandwidth {
            self.bandwidth.limit(most);
        }
    }

    fn cancel(&mut self) {
        // After Commit it is too late: the guest is the destination's.
        if !self.done.committed {
            self.fail(Error::Cancelled);
        }
    }

    /// The migration's own time-out. Once the pause was asked for, it has no say.
    fn timed_out(&mut self) {
        if self.moments.pause.is_some() {
            return;
        }
        match self.config.on_timeout {
            OnTimeout::Cancel => self.fail(Error::TimedOut(self.config.timeout)),
            OnTimeout::Stop => self.stop_now(),
        }
    }

    /// Whether a set has this migration's layout: sets of two layouts do not mix.
    fn fits(&self, set: &PageSet) -> bool {
        Arc::ptr_eq(set.layout(), &self.layout) || **set.layout() == *self.layout
    }
}

/// The step that an event answers.
fn step_answered(event: &SourceEvent) -> Option<Step> {
    Some(match event {
        SourceEvent::TrackingStarted => Step::StartTracking,
        SourceEvent::Scanned(_) => Step::Scan,
        SourceEvent::HintsBegun => Step::BeginHints,
        SourceEvent::Peeked(_) => Step::Peek,
        SourceEvent::HintsEnded(_) => Step::EndHints,
        SourceEvent::Rechecked(_) => Step::Recheck,
        SourceEvent::Harvested(_) => Step::Harvest,
        SourceEvent::Paused => Step::Pause,
        SourceEvent::Saved(_) => Step::Save,
        SourceEvent::Digested(_) => Step::Digest,
        SourceEvent::GivenBack => Step::GiveBack,
        SourceEvent::TrackingStopped => Step::StopTracking,
        SourceEvent::Resumed => Step::Resume,
        SourceEvent::Message(_)
        | SourceEvent::Answered { .. }
        | SourceEvent::Sent { .. }
        | SourceEvent::Failed { .. }
        | SourceEvent::Stalled { .. }
        | SourceEvent::StreamGone { .. }
        | SourceEvent::PeerGone { .. }
        | SourceEvent::Reconnected { .. }
        | SourceEvent::Unreachable { .. }
        | SourceEvent::Tuned(_)
        | SourceEvent::Cancel => return None,
    })
}
