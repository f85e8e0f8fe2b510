//! Both sides and all between; see the crate's documentation.

use crate::data::Stream;
use crate::guest::{GARBAGE, Guest};
use crate::happen::Happening;
use crate::laws::Laws;
use crate::link::Link;
use crate::mishaps::Mishaps;
use crate::rng::Rng;
use crate::setup::Setup;
use engine::{Destination, DestinationAction, Outcome, RunKind, Source, SourceAction, Step, Time};
use machine::{MachineState, Section};
use pages::PageSet;
use std::collections::VecDeque;

/// The destination's machine.
#[derive(Clone, Debug, Default)]
pub struct Copy {
    pub ram: Vec<u64>,
    pub made: bool,
    pub restored: bool,
    pub discarded: bool,
    pub running: bool,
}

/// How a process is, beside what its engine knows.
#[derive(Clone, Debug, Default)]
pub struct Process {
    /// Killed: it does nothing any more, and its guest is gone with it.
    pub dead: bool,
    /// Stopped until then: its clock runs, and it does nothing.
    pub frozen_until: Time,
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
    pub at_source: Process,
    pub at_destination: Process,
    pub source_end: Option<Outcome>,
    pub destination_end: Option<Outcome>,
    pub links: Vec<Link>,
    /// The links that each side uses, and whether the source does not look for another.
    pub source_link: usize,
    pub destination_link: usize,
    pub linked: bool,
    /// When the source's attempt to reach the destination again comes to something.
    pub reaching: Option<Time>,
    pub(crate) source_work: VecDeque<SourceAction>,
    pub(crate) destination_work: VecDeque<DestinationAction>,
    /// When the digests under way are done.
    pub(crate) source_digest: Option<Time>,
    pub(crate) destination_digest: Option<Time>,
    pub(crate) streams: Vec<Stream>,
    pub mishaps: Mishaps,
    /// How many of each there were.
    pub source_actions: usize,
    pub destination_actions: usize,
    pub messages: usize,
    /// What the source did on the guest, and which step of it failed.
    pub done: Vec<Step>,
    pub failed_steps: Vec<Step>,
    /// The destination has begun to take the machine's state over.
    pub(crate) restoring: bool,
    /// RAM when the machine was saved, and how often it was.
    pub saved_ram: Vec<u64>,
    pub saved_free: Vec<bool>,
    pub saves: usize,
    /// The step in which it was first.
    pub(crate) saved_step: usize,
    /// Bytes that streams have written.
    pub(crate) written: u64,
    pub content_flipped: bool,
    /// When something other than a ping happened last.
    pub(crate) progress_at: Time,
    /// Whether this step carried nothing but pings.
    pub(crate) pinged: bool,
    pub(crate) laws: Laws,
    pub breaches: Vec<String>,
    /// Whether each step is printed.
    pub trace: bool,
}

impl Pair {
    pub fn new(setup: Setup) -> Self {
        let guest = Guest::new(setup.guest.clone(), &mut Rng::new(setup.seed));
        Pair::with_guest(setup, guest, Mishaps::default())
    }

    /// The same of a guest that was there before, and with mishaps.
    pub fn with_guest(setup: Setup, guest: Guest, mishaps: Mishaps) -> Self {
        let layout = &setup.guest.layout;
        let total = layout.total_pages() as usize;
        let blank = if setup.destination.memory_is_zero { 0 } else { GARBAGE };
        let now = Time::ZERO;
        let source = Source::new(
            setup.source.clone(),
            setup.machine(),
            layout.clone(),
            setup.guest.running,
            now,
        );
        let mut pair = Pair {
            rng: Rng::new(setup.seed ^ 0x5eed),
            now,
            steps: 0,
            source,
            destination: Destination::new(setup.destination.clone(), now),
            guest,
            copy: Copy {
                ram: vec![blank; total],
                ..Copy::default()
            },
            at_source: Process::default(),
            at_destination: Process::default(),
            source_end: None,
            destination_end: None,
            links: Vec::new(),
            source_link: 0,
            destination_link: 0,
            linked: true,
            reaching: None,
            source_work: VecDeque::new(),
            destination_work: VecDeque::new(),
            source_digest: None,
            destination_digest: None,
            streams: Vec::new(),
            mishaps,
            source_actions: 0,
            destination_actions: 0,
            messages: 0,
            done: Vec::new(),
            failed_steps: Vec::new(),
            restoring: false,
            saved_ram: Vec::new(),
            saved_free: Vec::new(),
            saves: 0,
            saved_step: 0,
            written: 0,
            content_flipped: false,
            progress_at: now,
            pinged: false,
            laws: Laws::new(layout),
            breaches: Vec::new(),
            trace: false,
            setup,
        };
        pair.source.speaks(pair.setup.version);
        pair.destination.speaks(pair.setup.version);
        pair.open_link();
        pair.read_streams(0);
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
        (self.at_source.dead || self.source_end.is_some())
            && (self.at_destination.dead || self.destination_end.is_some())
            && self.source_work.is_empty()
            && self.destination_work.is_empty()
    }

    pub(crate) fn say(&self, what: impl FnOnce() -> String) {
        if self.trace {
            println!("{:>8} {:>12.6} s  {}", self.steps, self.now.as_secs_f64(), what());
        }
    }

    /// One thing happens.
    pub fn step(&mut self) {
        self.steps += 1;
        self.now += Time::from_micros(1 + self.rng.below(40));
        self.befall();
        let may = self.happenings();
        let idle = may.is_empty();
        let lives = self.guest.running && self.guest.make.writes > 0 && self.source_acts();
        let weight = if lives { self.setup.writes_weight as u64 } else { 0 };
        let pick = self.rng.below(may.len() as u64 + weight);
        if let Some(happening) = may.get(pick as usize) {
            self.happen(*happening);
        } else if weight > 0 {
            self.happen(Happening::Live);
        }
        if idle && weight > 0 && self.rng.one_in(2) {
            // The guest alone goes on for a moment.
        } else if idle {
            self.wait();
        } else if !std::mem::take(&mut self.pinged) {
            self.progress_at = self.now;
        }
        self.timers();
        self.drive();
        self.check_step();
        self.check_progress();
    }
}

impl Pair {
    pub fn breach(&mut self, what: String) {
        self.say(|| format!("BREACH: {what}"));
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

/// Saved state, the same in all runs but for how often it was saved.
pub fn state(saves: usize) -> MachineState {
    let section = |name: &str, bytes| Section {
        name: name.to_owned(),
        version: 1,
        data: vec![saves as u8; bytes],
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
