//! A hostile source against [`engine::Destination`].
//!
//! The oracle: the guest is let run after `Commit` alone, and never once its copy was thrown away or the source told that
//! it does not run; what is restored has every page of RAM told; an end comes within the time-outs, and is the last.

use super::{MOST_STEPS, any_message, any_range, any_text, any_time, layout};
use ::engine::{
    Destination, DestinationAction, DestinationConfig, DestinationEvent, Ending, Outcome, ReceivedRun, RunKind, Step,
    Time,
};
use arbitrary::{Result, Unstructured};
use machine::{BalloonConfig, MachineConfig, Section};
use pages::{Layout, PageRange, PageSet};
use std::collections::VecDeque;
use std::sync::Arc;
use wire::{Hello, Message, Skip, SkipReason};

/// Any sequence of messages, batches, markers, failures and time.
pub fn destination_engine(input: &[u8]) {
    let mut u = Unstructured::new(input);
    let Ok(mut rig) = Rig::new(&mut u) else { return };
    for _ in 0..MOST_STEPS {
        // An input that ends early has said all it had to say.
        if u.is_empty() || rig.step(&mut u).is_err() {
            break;
        }
    }
    rig.come_to_an_end();
}

/// What a good source would know, and what must not happen.
struct Rig {
    destination: Destination,
    now: Time,
    stay_paused: bool,
    layout: Arc<Layout>,
    /// Actions on the guest, not answered yet.
    under_way: VecDeque<DestinationAction>,
    round: u32,
    streams: u16,
    verify: bool,
    /// Told in round 0 by batches and `Skip`.
    told: PageSet,
    /// What the open round's `RoundEnd` said.
    last_said: Option<bool>,
    last_closed: bool,
    restored: bool,
    ready: bool,
    committed: bool,
    resumed: bool,
    runs: bool,
    discarding: bool,
    discarded: bool,
    end: Option<Outcome>,
}

impl Rig {
    fn new(u: &mut Unstructured<'_>) -> Result<Self> {
        let stay_paused = u.ratio(1, 8)?;
        let config = DestinationConfig {
            stay_paused,
            memory_is_zero: u.arbitrary()?,
            ..DestinationConfig::default()
        };
        let layout = layout();
        Ok(Rig {
            destination: Destination::new(config, Time::ZERO),
            now: Time::ZERO,
            stay_paused,
            under_way: VecDeque::new(),
            round: 0,
            streams: 1,
            verify: false,
            told: PageSet::empty(&layout),
            last_said: None,
            last_closed: false,
            restored: false,
            ready: false,
            committed: false,
            resumed: false,
            runs: false,
            discarding: false,
            discarded: false,
            end: None,
            layout,
        })
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.int_in_range(0..=15)? {
            0..=2 => self.answer(),
            3 | 4 => {
                let message = any_message(u, self.round)?;
                self.hears(message);
            }
            5 => {
                let hello = self.hello(u)?;
                self.hears(Message::Hello(hello));
            }
            6 => {
                let ranges = [any_range(u)?, any_range(u)?];
                let reason = *u.choose(&[SkipReason::Hole, SkipReason::Hinted, SkipReason::Ballooned])?;
                // `wire` lets no empty range past.
                let ranges = ranges.into_iter().filter(|range| !range.is_empty()).collect();
                self.hears(Message::Skip(Skip { reason, ranges }));
            }
            7 | 8 => self.batch(u)?,
            9 => {
                let (stream, round) = self.place(u)?;
                self.event(DestinationEvent::Marker { stream, round });
            }
            10 => {
                let (name, len) = (any_text(u)?, u.int_in_range(0..=20)?);
                self.hears(Message::Section(Section {
                    name: if name.is_empty() { "vcpu0".to_owned() } else { name },
                    version: u.int_in_range(0..=2)?,
                    data: u.bytes(len)?.to_vec(),
                }));
            }
            11 => self.finish_round(u.arbitrary()?),
            12 => self.hand_over(),
            13 => {
                let step = any_time(u)?;
                self.time(step);
            }
            14 => self.mishap(u)?,
            _ => self.fail_front(u.int_in_range(0..=2)?),
        }
        Ok(())
    }

    fn hello(&mut self, u: &mut Unstructured<'_>) -> Result<Hello> {
        let layout = match u.int_in_range(0..=5)? {
            0 => Layout::flat(u.int_in_range(1..=1 << 32)?).unwrap_or((*self.layout).clone()),
            _ => (*self.layout).clone(),
        };
        Ok(Hello {
            config: MachineConfig {
                kind: any_text(u)?,
                layout,
                vcpus: u.arbitrary()?,
                balloon: BalloonConfig {
                    dialect: any_text(u)?,
                    features: u.arbitrary()?,
                },
                extra: Default::default(),
            },
            running: u.ratio(7, 8)?,
            // `wire` refuses the rest.
            streams: u.int_in_range(1..=3)?,
            verify: u.ratio(1, 4)?,
            dry_run: u.ratio(1, 16)?,
        })
    }

    /// A stream and a round: mostly right ones.
    fn place(&self, u: &mut Unstructured<'_>) -> Result<(u16, u32)> {
        let stream = u.int_in_range(0..=3)?;
        let round = if u.ratio(7, 8)? { self.round } else { u.arbitrary()? };
        Ok((stream, round))
    }

    fn batch(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let (stream, round) = self.place(u)?;
        let mut runs = Vec::new();
        for _ in 0..u.int_in_range(0..=3)? {
            let kind = *u.choose(&[RunKind::Data, RunKind::Zero, RunKind::Fill])?;
            runs.push(ReceivedRun {
                range: any_range(u)?,
                kind,
            });
        }
        self.received(stream, round, runs, u.int_in_range(0..=4 << 20)?);
        Ok(())
    }

    fn received(&mut self, stream: u16, round: u32, runs: Vec<ReceivedRun>, payload_bytes: u64) {
        for run in &runs {
            self.tell(run.range);
        }
        self.event(DestinationEvent::Received {
            stream,
            round,
            runs,
            wire_bytes: payload_bytes + 64,
            payload_bytes,
        });
    }

    fn tell(&mut self, range: PageRange) {
        for part in self.layout.clip(range) {
            self.told.insert_range(part);
        }
    }

    /// All that a good source would still send of the round.
    fn finish_round(&mut self, last: bool) {
        let round = self.round;
        let mut left = PageSet::full(&self.layout);
        left.subtract(&self.told);
        let runs = left.runs().map(|range| ReceivedRun {
            range,
            kind: RunKind::Data,
        });
        let runs: Vec<ReceivedRun> = runs.collect();
        if !runs.is_empty() {
            self.received(0, round, runs, 4096);
        }
        for stream in 0..self.streams {
            self.event(DestinationEvent::Marker { stream, round });
        }
        self.hears(Message::RoundEnd { round, last });
    }

    /// The state, as a good source sends it.
    fn hand_over(&mut self) {
        let section = Section {
            name: "balloon".to_owned(),
            version: 1,
            data: vec![1; 8],
        };
        self.hears(Message::Section(section));
        if self.verify {
            let (chunk_pages, sums) = (512, vec![7; 2]);
            self.hears(Message::Digests(wire::Digests { chunk_pages, sums }));
        }
        self.hears(Message::StateEnd { sections: 1 });
    }

    fn hears(&mut self, message: Message) {
        match &message {
            Message::Hello(hello) if self.under_way.is_empty() && self.round == 0 => {
                (self.streams, self.verify) = (hello.streams, hello.verify);
            }
            Message::Skip(skip) => skip.ranges.iter().for_each(|range| self.tell(*range)),
            Message::RoundEnd { round, last } if *round == self.round => {
                self.last_said.get_or_insert(*last);
            }
            Message::Commit(_) => self.committed |= self.ready && self.end.is_none(),
            _ => {}
        }
        self.event(DestinationEvent::Message(message));
    }

    fn event(&mut self, event: DestinationEvent) {
        self.destination.handle(event, self.now);
        self.poll();
    }

    fn time(&mut self, step: Time) {
        self.now = self.now.saturating_add(step);
        self.destination.handle_timeout(self.now);
        self.poll();
    }

    /// The oldest action on the guest is done.
    fn answer(&mut self) {
        let Some(action) = self.under_way.pop_front() else {
            return;
        };
        let event = match action {
            // A host has only so much memory.
            DestinationAction::Prepare(hello) if hello.config.layout.total_pages() > 1 << 20 => {
                DestinationEvent::Refused(vec!["too large".to_owned()])
            }
            DestinationAction::Prepare(hello) => {
                self.layout = Arc::new(hello.config.layout);
                self.told = PageSet::empty(&self.layout);
                DestinationEvent::Prepared {
                    layout: Arc::clone(&self.layout),
                    populated: false,
                }
            }
            DestinationAction::Zero(_) => DestinationEvent::Zeroed,
            DestinationAction::Digest { only, .. } => DestinationEvent::Digested(vec![7; only.len()]),
            DestinationAction::Restore(_) => {
                self.restored = true;
                DestinationEvent::Restored
            }
            DestinationAction::Resume => {
                self.runs = true;
                DestinationEvent::Resumed
            }
            DestinationAction::Discard => {
                self.discarded = true;
                DestinationEvent::Discarded
            }
            DestinationAction::Transmit(_) | DestinationAction::Disconnect | DestinationAction::Finished(_) => return,
        };
        self.event(event);
    }

    fn fail_front(&mut self, mercy: u8) {
        if mercy > 0 {
            return self.answer();
        }
        if let Some(action) = self.under_way.pop_front() {
            self.fails(action.step());
        }
    }

    fn fails(&mut self, step: Step) {
        let error = "it broke".to_owned();
        self.event(DestinationEvent::Failed { step, error });
    }

    fn mishap(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.int_in_range(0..=7)? {
            0 => self.event(DestinationEvent::PeerGone { error: any_text(u)? }),
            1 => self.event(DestinationEvent::Cancel),
            2 => self.fails(Step::Receive),
            3 => self.fails(Step::Control),
            4 => self.time(Time::from_secs(11)),
            _ => {}
        }
        Ok(())
    }

    fn poll(&mut self) {
        while let Some(action) = self.destination.poll_action() {
            assert!(self.end.is_none(), "{action:?} after the end");
            self.look_at(&action);
            if action.is_on_guest() {
                self.under_way.push_back(action);
            }
        }
        assert!(self.under_way.len() <= 1 << 10, "actions pile up");
        let progress = self.destination.progress();
        assert!(progress.pending_pages <= progress.total_pages);
    }

    /// The laws.
    fn look_at(&mut self, action: &DestinationAction) {
        match action {
            DestinationAction::Transmit(message) => {
                wire::validate(message).expect("what is sent is within the limits");
                self.look_at_message(message);
            }
            DestinationAction::Restore(state) => {
                let lost = self.layout.total_pages() - self.told.count();
                assert!(self.last_closed && lost == 0, "restored while {lost} pages are missing");
                let bytes: usize = state.sections.iter().map(|s| s.data.len() + s.name.len()).sum();
                assert!(bytes <= 64 << 20 && state.sections.len() <= wire::MAX_SECTIONS as usize);
            }
            DestinationAction::Resume => {
                assert!(
                    self.committed && !self.stay_paused,
                    "resumed before Commit, or uninvited"
                );
                assert!(
                    !self.discarding && !self.resumed,
                    "resumed after it was thrown away, or twice"
                );
                self.resumed = true;
            }
            DestinationAction::Discard => {
                assert!(!self.runs, "a guest that runs is thrown away");
                self.discarding = true;
            }
            DestinationAction::Finished(outcome) => self.finished(outcome),
            DestinationAction::Prepare(_)
            | DestinationAction::Zero(_)
            | DestinationAction::Digest { .. }
            | DestinationAction::Disconnect => {}
        }
    }

    fn look_at_message(&mut self, message: &Message) {
        match message {
            Message::RoundReceived { round } => {
                assert!(*round == self.round && !self.last_closed);
                if *round == 0 {
                    assert_eq!(
                        self.told.count(),
                        self.layout.total_pages(),
                        "round 0 without all pages"
                    );
                }
                self.last_closed = self.last_said.take().expect("RoundReceived after RoundEnd");
                self.round = round.wrapping_add(1);
            }
            Message::Ready { .. } => {
                assert!(self.restored, "Ready before the machine was restored");
                self.ready = true;
            }
            Message::Running(running) => {
                assert!(self.committed && running.running == self.runs && !self.discarding);
            }
            Message::NotRunning(_) => assert!(self.discarded && !self.runs, "NotRunning of a copy that is not gone"),
            Message::Abort { .. } | Message::Refuse { .. } => assert!(!self.committed, "given up after Commit"),
            _ => {}
        }
    }

    fn finished(&mut self, outcome: &Outcome) {
        assert!(outcome.report.pages.adds_up(), "{:?}", outcome.report.pages);
        assert_eq!(outcome.ending == Ending::Completed, outcome.error.is_none());
        if outcome.ending == Ending::Completed {
            assert!(
                self.committed || self.discarding,
                "completed without Commit, and not a dry run"
            );
        } else {
            assert!(!self.runs, "the guest runs, and the migration {}", outcome.ending);
        }
        self.end = Some(outcome.clone());
    }

    /// The peer says no more. Answers come, timers run out, and there is an end.
    fn come_to_an_end(&mut self) {
        for _ in 0..1 << 12 {
            while !self.under_way.is_empty() {
                self.answer();
            }
            if self.end.is_some() {
                assert_eq!(self.destination.poll_timeout(), None, "a timer runs after the end");
                return;
            }
            let next = self
                .destination
                .poll_timeout()
                .expect("something is waited for, and no timer runs");
            self.now = self.now.max(next);
            self.destination.handle_timeout(self.now);
            self.poll();
        }
        panic!("no end although the source is silent");
    }
}
