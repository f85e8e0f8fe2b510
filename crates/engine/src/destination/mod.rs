//! The destination's state machine: from a control connection to a guest that runs here, or to nothing left of it.
//!
//! ```text
//! Greeting -> Preparing -> Receiving (rounds 0..n) -> Collecting (state, digests) -> Restoring -> Ready
//!    -> (Commit) -> Resuming -> Finished
//!                      | the guest cannot be run
//!                      +-> Returning (Discard) -> NotRunning, Finished
//! any of them before Commit has come -> Abort, Discard, Finished
//! ```
//!
//! Beside that the connections are there or lost ([`link`]).
//!
//! Invariants:
//!
//! - the guest is resumed after `Commit` has come and never before; after this side has given up it is never resumed,
//!   which is what lets the source resume its copy when it is told so. A resume that failed may have started a vCPU:
//!   the source is told only once that copy is gone;
//! - before `Ready` every page of RAM has a fate: a source that lost pages is refused;
//! - a page is told once in a round, and a round is closed only when every stream's marker and the source's `RoundEnd`
//!   have come and what had to be zeroed is zeroed.
//!
//! Nothing that the source says is trusted: each message has a place, each range is checked against the layout, each
//! count against a limit.

mod ending;
mod handover;
mod link;
mod rounds;

use crate::error::{Error, name_of, plain};
#[cfg(feature = "planted-faults")]
use crate::faults::Fault;
use crate::faults::Planted;
use crate::timers::{Timer, Timers};
use crate::{DestinationAction, DestinationConfig, DestinationEvent, Ending, Phase, Progress, Step, Time};
use handover::Handover;
use link::Link;
use pages::Layout;
use rounds::Rounds;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use wire::{Accept, Hello, Message};

/// The peer, in a destination's sentences.
const PEER: &str = "source";

/// The most data streams.
const MAX_STREAMS: u16 = 64;
/// The least time after which a peer may be taken for dead.
const MIN_PEER_TIMEOUT: Duration = Duration::from_millis(20);
/// The longest silence on our side, whatever the peer's time-out is.
const MAX_SILENCE: Duration = Duration::from_secs(1);

/// Where a destination is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Greeting,
    Preparing,
    Receiving,
    Collecting,
    Restoring,
    Ready,
    Resuming,
    /// The guest could not be run: its copy is being thrown away, and then the source may have it back.
    Returning,
    Finished,
}

/// What was settled by `Hello`.
#[derive(Clone, Debug)]
struct Terms {
    layout: Layout,
    dialect: String,
    running: bool,
    streams: u16,
    verify: bool,
    dry_run: bool,
}

/// When things happened.
#[derive(Clone, Copy, Debug, Default)]
struct Moments {
    began: Time,
    accepted: Option<Time>,
    commit: Option<Time>,
    running: Option<Time>,
}

/// The destination of a migration, from an open control connection to the end. See the crate's documentation for how to
/// drive it.
#[derive(Debug)]
pub struct Destination {
    config: DestinationConfig,
    now: Time,
    state: State,
    actions: VecDeque<DestinationAction>,
    /// Actions that were handed out and not answered yet, in order.
    awaiting: VecDeque<Step>,
    /// Whether a machine was asked for, and has to be thrown away on failure.
    made: bool,
    timers: Timers,
    moments: Moments,
    terms: Option<Terms>,
    /// There once the machine is.
    rounds: Option<Rounds>,
    handover: Handover,
    link: Link,
    planted: Planted,
}

impl Destination {
    /// A control connection has come: waits for `Hello`. A peer time-out below 20 ms is taken for 20 ms.
    pub fn new(mut config: DestinationConfig, now: Time) -> Self {
        config.peer_timeout = config.peer_timeout.max(MIN_PEER_TIMEOUT);
        let mut destination = Destination {
            config,
            now,
            state: State::Greeting,
            actions: VecDeque::new(),
            awaiting: VecDeque::new(),
            made: false,
            timers: Timers::default(),
            moments: Moments {
                began: now,
                ..Moments::default()
            },
            terms: None,
            rounds: None,
            handover: Handover::default(),
            link: Link::default(),
            planted: Planted::default(),
        };
        destination.heard();
        destination
    }

    /// Plants a fault, for tests of the tests.
    #[cfg(feature = "planted-faults")]
    pub fn plant(&mut self, fault: Fault) {
        self.planted.plant(fault);
    }

    /// Something happened. Events after the end are ignored.
    pub fn handle(&mut self, event: DestinationEvent, now: Time) {
        self.now = self.now.max(now);
        if self.state == State::Finished {
            return;
        }
        match event {
            DestinationEvent::Message(message) => self.message(message),
            DestinationEvent::Received {
                stream,
                round,
                runs,
                wire_bytes,
                payload_bytes,
            } => {
                self.heard();
                self.received(stream, round, &runs, wire_bytes, payload_bytes);
            }
            DestinationEvent::Marker { stream, round } => {
                self.heard();
                self.marker(stream, round);
            }
            DestinationEvent::Failed { step, error } => self.failed(step, &error),
            DestinationEvent::StreamGone { error } => self.stream_gone(&error),
            DestinationEvent::PeerGone { error } => self.link_lost(Error::Gone {
                peer: PEER,
                error: plain(&error),
            }),
            DestinationEvent::Relinked => self.relinked(),
            DestinationEvent::Cancel => self.fail(Error::Cancelled),
            event => self.answer(event),
        }
    }

    /// The time that [`Destination::poll_timeout`] named has come. Harmless when called early.
    pub fn handle_timeout(&mut self, now: Time) {
        self.now = self.now.max(now);
        while let Some(timer) = self.timers.expire(self.now) {
            match timer {
                Timer::Relink => self.window_passed(),
                Timer::PeerDead => self.link_lost(Error::Silent {
                    peer: PEER,
                    after: self.config.peer_timeout,
                }),
                Timer::Ping => self.transmit(Message::Ping),
                Timer::Answer => self.fail(Error::NoAnswer {
                    peer: PEER,
                    to: "Ready",
                    after: self.config.answer_timeout,
                }),
                Timer::Hints | Timer::Migration => {}
            }
        }
    }

    /// What to do next; `None` where there is nothing to do but wait.
    pub fn poll_action(&mut self) -> Option<DestinationAction> {
        let action = self.actions.pop_front()?;
        self.made |= matches!(action, DestinationAction::Prepare(_));
        if action.is_on_guest() {
            self.awaiting.push_back(action.step());
        }
        Some(action)
    }

    /// When to call [`Destination::handle_timeout`]; `None` where there is nothing to wait for but answers to actions.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.timers.next()
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        let phase = match self.state {
            State::Greeting => Phase::Connecting,
            State::Preparing => Phase::Setup,
            State::Receiving if self.rounds.as_ref().is_some_and(Rounds::is_last) => Phase::Switchover,
            State::Receiving => Phase::Precopy,
            State::Collecting | State::Restoring | State::Ready => Phase::Switchover,
            State::Resuming => Phase::Committed,
            State::Returning => Phase::Undoing,
            State::Finished => Phase::Finished,
        };
        self.rounds.as_ref().map_or(
            Progress {
                phase,
                ..Progress::default()
            },
            |rounds| rounds.progress(phase),
        )
    }

    fn push(&mut self, action: DestinationAction) {
        self.actions.push_back(action);
    }

    /// While the connections are lost, nothing is said.
    fn transmit(&mut self, message: Message) {
        if self.link.is_down() {
            return;
        }
        self.ping_later();
        self.push(DestinationAction::Transmit(message));
    }

    fn ping_later(&mut self) {
        let silence = (self.config.peer_timeout / 4).min(MAX_SILENCE);
        self.timers.set(Timer::Ping, self.now.saturating_add(silence));
    }

    /// A sign of life. Once the guest is this side's, the source's are no longer waited for; nor while the connections are
    /// lost, when the last that came over them is still being told.
    fn heard(&mut self) {
        if !self.committed() && !self.link.is_down() {
            self.timers
                .set(Timer::PeerDead, self.now.saturating_add(self.config.peer_timeout));
        }
    }

    /// Whether `Commit` has come.
    fn committed(&self) -> bool {
        self.moments.commit.is_some()
    }

    fn message(&mut self, message: Message) {
        if self.committed() {
            // The guest is this side's, whatever the source says now.
            return;
        }
        self.heard();
        match (self.state, message) {
            (State::Greeting, Message::Hello(hello)) => self.hello(hello),
            (_, Message::Abort { reason, cause }) => {
                self.fail(Error::Aborted {
                    peer: PEER,
                    reason: plain(&reason),
                    cause,
                });
            }
            (State::Greeting, message) => self.unexpected(&message, "instead of Hello"),
            (_, Message::Ping) => {}
            (State::Receiving, Message::Terms(terms)) => self.terms(terms),
            (State::Receiving, Message::Skip(skip)) => self.skip(&skip),
            (State::Receiving, Message::RoundEnd { round, last }) => self.round_end(round, last),
            (_, Message::Section(section)) if self.takes_state() => self.section(section),
            (_, Message::Digests(digests)) if self.takes_state() => self.digests(digests),
            (_, Message::StateEnd { sections }) if self.takes_state() => self.state_end(sections),
            (State::Ready, Message::Commit(commit)) => self.commit(commit),
            (State::Receiving, message) => self.unexpected(&message, "before the last round was sent"),
            (State::Ready, message) => self.unexpected(&message, "instead of Commit"),
            (_, message) => self.unexpected(&message, "unasked"),
        }
    }

    /// Whether the machine's state may come: while the last pages are under way, or once all are here.
    fn takes_state(&self) -> bool {
        match self.state {
            State::Receiving => self.rounds.as_ref().is_some_and(Rounds::is_last),
            state => state == State::Collecting,
        }
    }

    fn unexpected(&mut self, message: &Message, when: &str) {
        self.fail(Error::Unexpected {
            peer: PEER,
            message: name_of(message),
            when: when.to_owned(),
        });
    }

    fn invalid(&mut self, what: String) {
        self.fail(Error::Invalid(what, PEER));
    }

    fn hello(&mut self, hello: Hello) {
        if hello.streams == 0 || hello.streams > MAX_STREAMS {
            return self.invalid(format!(
                "a Hello for {} data streams; 1 to {MAX_STREAMS} are possible",
                hello.streams
            ));
        }
        self.terms = Some(Terms {
            layout: hello.config.layout.clone(),
            dialect: plain(&hello.config.balloon.dialect),
            running: hello.running,
            streams: hello.streams,
            verify: hello.verify,
            dry_run: hello.dry_run,
        });
        self.state = State::Preparing;
        // Preparing may take long: populating RAM does.
        self.ping_later();
        self.push(DestinationAction::Prepare(Box::new(hello)));
    }

    /// An answer to an action.
    fn answer(&mut self, event: DestinationEvent) {
        let step = match &event {
            DestinationEvent::Prepared { .. } | DestinationEvent::Refused(_) => Step::Prepare,
            DestinationEvent::Zeroed => Step::Zero,
            DestinationEvent::Digested(_) => Step::Digest,
            DestinationEvent::Restored => Step::Restore,
            DestinationEvent::Resumed => Step::Resume,
            DestinationEvent::Discarded => Step::Discard,
            _ => return,
        };
        if self.awaiting.front() != Some(&step) {
            return self.fail(Error::Internal(format!(
                "{step} was reported done while it was not under way"
            )));
        }
        self.awaiting.pop_front();
        match event {
            DestinationEvent::Prepared { layout, populated } => self.prepared(&layout, populated),
            DestinationEvent::Refused(reasons) => self.refuse(reasons),
            DestinationEvent::Zeroed => self.zeroed(),
            DestinationEvent::Digested(sums) => self.digested(sums),
            DestinationEvent::Restored => self.restored(),
            DestinationEvent::Resumed => self.runs(true),
            DestinationEvent::Discarded => self.discarded(),
            _ => {}
        }
    }

    /// A machine like the source's stands ready.
    fn prepared(&mut self, layout: &Arc<Layout>, populated: bool) {
        let Some(terms) = &self.terms else { return };
        if **layout != terms.layout {
            let why = "the prepared machine's RAM layout is not the source's".to_owned();
            return self.fail(Error::Internal(why));
        }
        let dry_run = terms.dry_run;
        self.rounds = Some(Rounds::new(layout, terms.streams, self.now));
        self.moments.accepted = Some(self.now);
        self.state = State::Receiving;
        self.transmit(Message::Accept(Accept { populated }));
        if dry_run {
            self.push(DestinationAction::Discard);
            self.finish(Ending::Completed, None);
        }
    }

    /// An action failed, or a data stream did.
    fn failed(&mut self, step: Step, error: &str) {
        let error = plain(error);
        let on_guest = self.awaiting.front() == Some(&step);
        if on_guest {
            self.awaiting.pop_front();
        }
        if self.committed() {
            match step {
                Step::Resume if on_guest => self.does_not_run(&Error::Step { step, error }),
                Step::Discard if on_guest => self.cannot_discard(&error),
                _ => {}
            }
            return;
        }
        if step != Step::Receive || self.takes_pages() {
            self.fail(Error::Step { step, error });
        }
    }

    fn stream_gone(&mut self, error: &str) {
        if self.takes_pages() {
            let (step, error) = (Step::Receive, plain(error));
            self.link_lost(Error::Step { step, error });
        }
    }

    /// Once all pages are here the source may close the data streams.
    fn takes_pages(&self) -> bool {
        matches!(self.state, State::Preparing | State::Receiving)
    }
}
