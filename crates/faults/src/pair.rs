//! Both sides and all between; see the crate's documentation.

use crate::data::{self, Stream};
use crate::guest::{GARBAGE, Guest};
use crate::laws;
use crate::rng::Rng;
use crate::setup::Setup;
use engine::{
    Destination, DestinationAction, DestinationEvent, Outcome, RunKind, Source, SourceAction, SourceEvent, Step, Time,
};
use machine::{MachineState, Section};
use pages::PageSet;
use std::collections::VecDeque;
use wire::Message;

/// What crosses the control connection.
#[derive(Clone, Debug)]
pub enum Control {
    Message(Message),
    Gone,
}

/// What goes wrong, and when.
#[derive(Clone, Debug, Default)]
pub struct Mishaps {
    /// The source's action on the guest of this number fails (counted from 0).
    pub source_action: Option<usize>,
    /// The destination's.
    pub destination_action: Option<usize>,
    /// The connection breaks in place of the message of this number, counted in both directions together.
    pub message: Option<usize>,
    /// Somebody cancels at the source, at the destination, before this step.
    pub cancel_source: Option<usize>,
    pub cancel_destination: Option<usize>,
    /// From this step on nothing is carried in either direction, and nobody is told.
    pub silence: Option<usize>,
}

/// The destination's machine.
#[derive(Clone, Debug, Default)]
pub struct Copy {
    pub ram: Vec<u64>,
    pub made: bool,
    pub restored: bool,
    pub discarded: bool,
    pub running: bool,
}

/// Both sides and all between.
pub struct Pair {
    pub setup: Setup,
    pub rng: Rng,
    pub now: Time,
    pub steps: usize,
    pub source: Source,
    pub destination: Destination,
    pub guest: Guest,
    pub copy: Copy,
    pub to_destination: VecDeque<Control>,
    pub to_source: VecDeque<Control>,
    source_work: VecDeque<SourceAction>,
    destination_work: VecDeque<DestinationAction>,
    /// When the digests under way are done.
    source_digest: Option<Time>,
    destination_digest: Option<Time>,
    pub(crate) streams: Vec<Stream>,
    pub source_end: Option<Outcome>,
    pub destination_end: Option<Outcome>,
    pub mishaps: Mishaps,
    /// How many of each there were.
    pub source_actions: usize,
    pub destination_actions: usize,
    pub messages: usize,
    /// What the source did on the guest, and which step of it failed.
    pub done: Vec<Step>,
    pub failed_steps: Vec<Step>,
    cut: bool,
    pub(crate) laws: laws::Laws,
    pub breaches: Vec<String>,
}

impl Pair {
    pub fn new(setup: Setup) -> Self {
        let mut rng = Rng::new(setup.seed);
        let guest = Guest::new(setup.guest.clone(), &mut rng);
        let layout = &setup.guest.layout;
        let total = layout.total_pages() as usize;
        let blank = if setup.destination.memory_is_zero { 0 } else { GARBAGE };
        let now = Time::ZERO;
        let mut source = Source::new(
            setup.source.clone(),
            setup.machine(),
            layout.clone(),
            setup.guest.running,
            now,
        );
        if setup.early_state {
            source.speaks(2);
        }
        let mut pair = Pair {
            rng,
            now,
            steps: 0,
            source,
            destination: Destination::new(setup.destination.clone(), now),
            guest,
            copy: Copy {
                ram: vec![blank; total],
                ..Copy::default()
            },
            to_destination: VecDeque::new(),
            to_source: VecDeque::new(),
            source_work: VecDeque::new(),
            destination_work: VecDeque::new(),
            source_digest: None,
            destination_digest: None,
            streams: vec![Stream::default(); usize::from(setup.source.streams)],
            source_end: None,
            destination_end: None,
            mishaps: Mishaps::default(),
            source_actions: 0,
            destination_actions: 0,
            messages: 0,
            done: Vec::new(),
            failed_steps: Vec::new(),
            cut: false,
            laws: laws::Laws::new(layout),
            breaches: Vec::new(),
            setup,
        };
        #[cfg(feature = "planted")]
        if let Some(fault) = pair.setup.fault {
            pair.source.plant(fault);
            pair.destination.plant(fault);
        }
        pair
    }

    /// Runs to both ends, or for so many steps.
    pub fn run(&mut self, most: usize) -> &mut Self {
        self.drive();
        while !self.over() && self.steps < most && self.breaches.is_empty() {
            self.step();
        }
        self
    }

    pub fn over(&self) -> bool {
        self.source_end.is_some()
            && self.destination_end.is_some()
            && self.source_work.is_empty()
            && self.destination_work.is_empty()
    }

    /// One thing happens.
    pub fn step(&mut self) {
        self.steps += 1;
        self.now += Time::from_micros(1 + self.rng.below(40));
        if self.mishaps.cancel_source == Some(self.steps) {
            self.source.handle(SourceEvent::Cancel, self.now);
        }
        if self.mishaps.cancel_destination == Some(self.steps) {
            self.destination.handle(DestinationEvent::Cancel, self.now);
        }
        let silent = self.mishaps.silence.is_some_and(|from| self.steps >= from);
        // What is said after the session's end may come very late: in a later round, or at the pause.
        let pausing = match self.source_work.front() {
            Some(SourceAction::Pause) => true,
            Some(SourceAction::Harvest) => self.done.last() == Some(&Step::Pause),
            _ => false,
        };
        let late = pausing || self.rng.one_in(150);
        let speaks = self.guest.has_to_say() && (self.guest.session.is_some() || late);
        let (source_free, destination_free) = self.executors_free();
        let mut may: Vec<u64> = Vec::new();
        if !silent {
            may.extend(std::iter::repeat_n(0, 2 * usize::from(!self.to_destination.is_empty())));
            may.extend(std::iter::repeat_n(1, 2 * usize::from(!self.to_source.is_empty())));
            for (k, stream) in self.streams.iter().enumerate() {
                may.extend(std::iter::repeat_n(10 + k as u64, usize::from(stream.may_send())));
                may.extend(std::iter::repeat_n(100 + k as u64, usize::from(stream.may_arrive())));
            }
        }
        may.extend(std::iter::repeat_n(2, 2 * usize::from(source_free)));
        may.extend(std::iter::repeat_n(3, 2 * usize::from(destination_free)));
        may.extend(std::iter::repeat_n(
            4,
            usize::from(speaks) * if pausing { 40 } else { 1 },
        ));
        let idle = may.is_empty();
        if self.guest.running && self.guest.make.writes > 0 {
            may.extend(std::iter::repeat_n(5, self.setup.writes_weight));
        }
        if !may.is_empty() {
            let pick = may[self.rng.below(may.len() as u64) as usize];
            self.happen(pick);
        }
        if idle {
            let next = self
                .source
                .poll_timeout()
                .into_iter()
                .chain(self.destination.poll_timeout())
                .chain(self.source_digest)
                .chain(self.destination_digest)
                .min();
            self.now = next.map_or(self.now, |at| at.max(self.now));
        }
        self.timers();
        self.drive();
        self.check_step();
    }

    /// Whether each side's executor has something to do and is not in the middle of a digest.
    fn executors_free(&mut self) -> (bool, bool) {
        let due = self.now + self.setup.source_digest;
        self.source_digest = match self.source_work.front() {
            Some(SourceAction::Digest { .. }) => self.source_digest.or(Some(due)),
            _ => None,
        };
        let due = self.now + self.setup.destination_digest;
        self.destination_digest = match self.destination_work.front() {
            Some(DestinationAction::Digest { .. }) => self.destination_digest.or(Some(due)),
            _ => None,
        };
        let done = |at: Option<Time>| at.is_none_or(|at| at <= self.now);
        (
            !self.source_work.is_empty() && done(self.source_digest),
            !self.destination_work.is_empty() && done(self.destination_digest),
        )
    }

    fn happen(&mut self, pick: u64) {
        match pick {
            0 => match self.to_destination.pop_front() {
                Some(Control::Message(m)) => self.destination.handle(DestinationEvent::Message(m), self.now),
                Some(Control::Gone) => {
                    let error = "the peer closed it".to_owned();
                    self.destination.handle(DestinationEvent::PeerGone { error }, self.now);
                }
                None => {}
            },
            1 => match self.to_source.pop_front() {
                Some(Control::Message(m)) => {
                    self.laws.source_hears(&m);
                    self.source.handle(SourceEvent::Message(m), self.now);
                }
                Some(Control::Gone) => {
                    let error = "the peer closed it".to_owned();
                    self.source.handle(SourceEvent::PeerGone { error }, self.now);
                }
                None => {}
            },
            2 => self.source_works(),
            3 => self.destination_works(),
            4 => {
                if let Some((session, answer)) = self.guest.speak(&mut self.rng) {
                    self.source.handle(SourceEvent::Answered { session, answer }, self.now);
                }
            }
            5 => self.guest.live(&mut self.rng),
            k if k < 100 => self.stream_sends(k as usize - 10),
            k => self.stream_arrives(k as usize - 100),
        }
    }

    fn timers(&mut self) {
        if self.source.poll_timeout().is_some_and(|at| at <= self.now) {
            self.source.handle_timeout(self.now);
        }
        if self.destination.poll_timeout().is_some_and(|at| at <= self.now) {
            self.destination.handle_timeout(self.now);
        }
    }

    /// Takes all actions of both sides.
    pub fn drive(&mut self) {
        while let Some(action) = self.source.poll_action() {
            if self.source_end.is_some() {
                self.breach(format!("the source wants {action:?} after its end"));
            }
            match action {
                SourceAction::Transmit(message) => self.carry(message, true),
                SourceAction::Send { stream, chunk } => {
                    let breach = self.laws.chunk(&chunk);
                    self.breaches.extend(breach);
                    self.streams[usize::from(stream)].hand(chunk);
                }
                SourceAction::EndRound { stream, round } => self.streams[usize::from(stream)].end_round(round),
                SourceAction::Finished(outcome) => {
                    self.source_end = Some(*outcome);
                    self.to_destination.push_back(Control::Gone);
                }
                action => self.source_work.push_back(action),
            }
        }
        while let Some(action) = self.destination.poll_action() {
            if self.destination_end.is_some() {
                self.breach(format!("the destination wants {action:?} after its end"));
            }
            match action {
                DestinationAction::Transmit(message) => {
                    let breach = laws::destination_says(&message, &self.copy);
                    self.breaches.extend(breach);
                    self.carry(message, false);
                }
                DestinationAction::Finished(outcome) => {
                    self.destination_end = Some(*outcome);
                    self.to_source.push_back(Control::Gone);
                }
                DestinationAction::Disconnect => self.to_source.push_back(Control::Gone),
                action => self.destination_work.push_back(action),
            }
        }
    }

    fn carry(&mut self, message: Message, to_destination: bool) {
        if self.mishaps.message == Some(self.messages) {
            self.cut = true;
            self.to_destination.push_back(Control::Gone);
            self.to_source.push_back(Control::Gone);
        }
        self.messages += 1;
        if let Err(error) = wire::validate(&message) {
            self.breach(format!("a message that no frame takes: {error}"));
        }
        if self.cut {
            return;
        }
        let link = if to_destination {
            &mut self.to_destination
        } else {
            &mut self.to_source
        };
        link.push_back(Control::Message(message));
    }

    /// The source's executor carries one action on the guest out.
    fn source_works(&mut self) {
        self.source_digest = None;
        let Some(action) = self.source_work.pop_front() else {
            return;
        };
        let step = action.step();
        if !self.failed_steps.contains(&Step::EndHints) {
            let breach = self.laws.source_action(&action, &self.guest, &self.done);
            self.breaches.extend(breach);
        }
        self.done.push(step);
        let fails = self.mishaps.source_action == Some(self.source_actions);
        self.source_actions += 1;
        if fails {
            self.failed_steps.push(step);
            let error = "the host said no".to_owned();
            return self.source.handle(SourceEvent::Failed { step, error }, self.now);
        }
        let guest = &mut self.guest;
        let event = match action {
            SourceAction::StartTracking => {
                guest.start_tracking();
                SourceEvent::TrackingStarted
            }
            SourceAction::Scan => SourceEvent::Scanned(Box::new(guest.scan(self.setup.source.skip.hole))),
            SourceAction::BeginHints { session } => {
                guest.begin(session, &mut self.rng);
                SourceEvent::HintsBegun
            }
            SourceAction::Peek(range) => SourceEvent::Peeked(guest.peek(range)),
            SourceAction::EndHints { hold, .. } => {
                guest.end(hold);
                SourceEvent::HintsEnded(guest.counts)
            }
            SourceAction::Recheck => SourceEvent::Rechecked(Box::new(guest.recheck())),
            SourceAction::Harvest => SourceEvent::Harvested(guest.harvest()),
            SourceAction::Pause => {
                // Devices are drained: a last write of the VMM's own, which the log has.
                if guest.running {
                    guest.write(self.rng.below(guest.ram.len() as u64) as usize);
                }
                guest.running = false;
                guest.find_out();
                SourceEvent::Paused
            }
            SourceAction::Save => SourceEvent::Saved(self.setup.state()),
            SourceAction::Digest { excluded, chunk_pages } => {
                SourceEvent::Digested(data::digests(&guest.ram, &excluded, chunk_pages))
            }
            SourceAction::GiveBack(pages) => {
                guest.log.union_with(&pages);
                SourceEvent::GivenBack
            }
            SourceAction::StopTracking => {
                guest.stop_tracking();
                SourceEvent::TrackingStopped
            }
            SourceAction::Resume => {
                guest.running = true;
                SourceEvent::Resumed
            }
            _ => return,
        };
        self.source.handle(event, self.now);
    }

    /// The destination's executor carries one action out.
    fn destination_works(&mut self) {
        self.destination_digest = None;
        let Some(action) = self.destination_work.pop_front() else {
            return;
        };
        let step = action.step();
        if step != Step::Discard {
            let fails = self.mishaps.destination_action == Some(self.destination_actions);
            self.destination_actions += 1;
            if fails {
                // The first vCPUs were started before one failed.
                self.copy.running = step == Step::Resume;
                let error = "the host said no".to_owned();
                return self
                    .destination
                    .handle(DestinationEvent::Failed { step, error }, self.now);
            }
        }
        let event = match action {
            DestinationAction::Prepare(_) if !self.setup.refusals.is_empty() => {
                DestinationEvent::Refused(self.setup.refusals.clone())
            }
            DestinationAction::Prepare(_) => {
                self.copy.made = true;
                DestinationEvent::Prepared {
                    layout: self.setup.guest.layout.clone(),
                    populated: false,
                }
            }
            DestinationAction::Zero(ranges) => {
                for range in ranges {
                    self.put(range, |_| 0);
                }
                DestinationEvent::Zeroed
            }
            DestinationAction::Digest { excluded, chunk_pages } => {
                DestinationEvent::Digested(data::digests(&self.copy.ram, &excluded, chunk_pages))
            }
            DestinationAction::Restore(state) => {
                self.check_state(&state);
                self.check_ram();
                self.copy.restored = true;
                DestinationEvent::Restored
            }
            DestinationAction::Resume => {
                if self.copy.discarded || !self.copy.restored {
                    self.breach("the destination resumes a guest that it does not have".to_owned());
                }
                self.copy.running = true;
                DestinationEvent::Resumed
            }
            _ => {
                self.copy.discarded = true;
                self.copy.running = false;
                DestinationEvent::Discarded
            }
        };
        self.destination.handle(event, self.now);
    }

    fn check_state(&mut self, state: &MachineState) {
        if *state != self.setup.state() {
            self.breach(format!(
                "the state that arrived is not the one that was saved: {state:?}"
            ));
        }
    }

    pub fn breach(&mut self, what: String) {
        self.breaches.push(what);
    }

    /// Ends of both sides, for a test's assertions.
    pub fn ends(&self) -> (Option<engine::Ending>, Option<engine::Ending>) {
        (
            self.source_end.as_ref().map(|o| o.ending),
            self.destination_end.as_ref().map(|o| o.ending),
        )
    }

    pub fn source_error(&self) -> &str {
        self.source_end.as_ref().and_then(|o| o.error.as_deref()).unwrap_or("")
    }

    pub fn destination_error(&self) -> &str {
        self.destination_end
            .as_ref()
            .and_then(|o| o.error.as_deref())
            .unwrap_or("")
    }

    /// How often the source did a step.
    pub fn count(&self, step: Step) -> usize {
        self.done.iter().filter(|s| **s == step).count()
    }
}

/// Saved state, the same in all runs.
pub fn state() -> MachineState {
    let section = |name: &str, bytes| Section {
        name: name.to_owned(),
        version: 1,
        data: vec![7; bytes],
    };
    MachineState {
        sections: vec![section("vcpu0", 40), section("balloon", 3)],
    }
}

/// A set of these pages, by number in RAM order.
pub fn set_of(layout: &std::sync::Arc<pages::Layout>, indices: &[u64]) -> PageSet {
    let mut set = PageSet::empty(layout);
    for i in indices {
        set.insert(layout.pfn_at(*i).unwrap());
    }
    set
}

/// The kinds of a run as the model sends them.
pub(crate) fn kind_of(version: u64, skip_zero: bool) -> RunKind {
    if version == 0 && skip_zero {
        RunKind::Zero
    } else {
        RunKind::Data
    }
}
