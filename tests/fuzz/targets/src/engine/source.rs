//! A hostile receiver against [`engine::Source`], whose guest is honest and whose own steps may fail.
//!
//! The oracle: once `Commit` has left, the guest is resumed only after the receiver said that it will not run it; at
//! `Commit` every page in use is there as it was at the pause; on every other way out the guest runs as it did, its log
//! has all that a harvest took, tracking is off and no session is open; an end comes within the time-outs, and is the last.

use super::model::Guest;
use super::{MOST_STEPS, any_message, any_text, any_time, layout, range};
use ::engine::{
    Ask, Chunk, Content, Ending, OnTimeout, Outcome, Peeked, SkipSet, Source, SourceAction, SourceConfig, SourceEvent,
    Step, Time,
};
use arbitrary::{Result, Unstructured};
use machine::{Answer, BalloonConfig, BalloonCounts, MachineConfig, MachineState, Section};
use pages::{Layout, PageSet};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use wire::{Accept, Message, Running};

/// Any sequence of messages, failures and time, while the guest writes and frees.
pub fn source_engine(input: &[u8]) {
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

struct Rig {
    source: Source,
    now: Time,
    layout: Arc<Layout>,
    guest: Guest,
    /// Whether the guest ran before.
    running: bool,
    dry_run: bool,
    can_ask: bool,
    allocates: bool,
    poison: Option<u32>,
    /// Actions on the guest, not answered yet.
    under_way: VecDeque<SourceAction>,
    chunks: VecDeque<(u16, Chunk)>,
    /// All that harvests took.
    harvested: PageSet,
    failed: Vec<Step>,
    round: u32,
    greeted: bool,
    /// `StateEnd` was sent.
    state_sent: bool,
    committed: bool,
    /// After `Commit` the receiver said that it will not run the guest, or that it runs.
    declined: bool,
    said_running: bool,
    end: Option<Outcome>,
}

impl Rig {
    fn new(u: &mut Unstructured<'_>) -> Result<Self> {
        let layout = layout();
        let (running, dry_run) = (u.ratio(7, 8)?, u.ratio(1, 16)?);
        let config = SourceConfig {
            skip: SkipSet {
                free: u.ratio(3, 4)?,
                zero: true,
                hole: u.arbitrary()?,
            },
            ask: *u.choose(&[Ask::Auto, Ask::Always, Ask::Never])?,
            streams: u.int_in_range(1..=3)?,
            timeout: Duration::from_millis(*u.choose(&[0, 1, 5000])?),
            on_timeout: *u.choose(&[OnTimeout::Cancel, OnTimeout::Stop])?,
            downtime_limit: Duration::from_millis(*u.choose(&[0, 300])?),
            verify: u.ratio(1, 4)?,
            dry_run,
            ..SourceConfig::default()
        };
        let machine = MachineConfig {
            kind: "fuzzed".to_owned(),
            layout: (*layout).clone(),
            vcpus: 1,
            balloon: BalloonConfig {
                dialect: "standard".to_owned(),
                features: 8,
            },
            extra: Default::default(),
        };
        let mut source = Source::new(config, machine, Arc::clone(&layout), running, Time::ZERO);
        if u.arbitrary()? {
            source.speaks(2);
        }
        let mut guest = Guest::new(&layout);
        guest.paused = !running;
        let mut rig = Rig {
            source,
            now: Time::ZERO,
            guest,
            running,
            dry_run,
            can_ask: u.ratio(3, 4)?,
            allocates: u.arbitrary()?,
            poison: u.arbitrary::<bool>()?.then_some(0xaaaa_aaaa),
            under_way: VecDeque::new(),
            chunks: VecDeque::new(),
            harvested: PageSet::empty(&layout),
            failed: Vec::new(),
            round: 0,
            greeted: false,
            state_sent: false,
            committed: false,
            declined: false,
            said_running: false,
            end: None,
            layout,
        };
        rig.poll();
        Ok(rig)
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.int_in_range(0..=15)? {
            0..=3 => self.answer(),
            4 | 5 => self.send(),
            6 | 7 => self.next_word(),
            8 => {
                let message = any_message(u, self.round)?;
                self.hears(message);
            }
            9 | 10 => self.guest.write(u.int_in_range(0..=99)?),
            11 => self.guest.free(u.int_in_range(0..=99)?),
            12 => self.guest_says(u)?,
            13 => {
                let step = any_time(u)?;
                self.time(step);
            }
            14 => self.mishap(u)?,
            _ => {
                if u.ratio(1, 4)?
                    && let Some(action) = self.under_way.pop_front()
                {
                    self.fails(action.step());
                }
            }
        }
        Ok(())
    }

    /// What a good receiver would say next.
    fn next_word(&mut self) {
        let message = if !self.greeted {
            self.greeted = true;
            Message::Accept(Accept { populated: false })
        } else if self.committed {
            Message::Running(Running {
                running: self.running,
                after_us: 3,
            })
        } else if self.state_sent {
            Message::Ready {
                verified: true,
                verify_us: 5,
            }
        } else {
            Message::RoundReceived { round: self.round }
        };
        self.hears(message);
    }

    fn hears(&mut self, message: Message) {
        if self.committed {
            self.declined |= matches!(message, Message::NotRunning(_) | Message::Abort { .. });
            self.said_running |= matches!(message, Message::Running(_));
        }
        self.event(SourceEvent::Message(message));
    }

    fn event(&mut self, event: SourceEvent) {
        self.source.handle(event, self.now);
        self.poll();
    }

    fn time(&mut self, step: Time) {
        self.now = self.now.saturating_add(step);
        self.source.handle_timeout(self.now);
        self.poll();
    }

    fn fails(&mut self, step: Step) {
        self.failed.push(step);
        let error = "it broke".to_owned();
        self.event(SourceEvent::Failed { step, error });
    }

    fn mishap(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.int_in_range(0..=11)? {
            0 => self.event(SourceEvent::PeerGone { error: any_text(u)? }),
            1 => self.event(SourceEvent::Cancel),
            2 => self.event(SourceEvent::Stalled {
                stream: u.int_in_range(0..=3)?,
            }),
            3 => self.fails(Step::Send),
            4 => self.fails(Step::Control),
            _ => {}
        }
        Ok(())
    }

    /// What the guest answers, of the session that is open or of one that is not.
    fn guest_says(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let session = match self.guest.session {
            Some(session) if u.ratio(7, 8)? => session,
            _ => u.int_in_range(0..=3)?,
        };
        // What it says of a window it says at once: free pages of it, then that this was all.
        let window = *u.choose(&[range(0, 30), range(30, 40), range(0, 70), range(100, 30)])?;
        if self.guest.session == Some(session) && !self.guest.paused {
            let free = Answer::Free(self.guest.free_in(window));
            self.event(SourceEvent::Answered { session, answer: free });
            let answer = Answer::Covered(window);
            self.event(SourceEvent::Answered { session, answer });
        }
        if u.ratio(1, 3)? {
            let answer = Answer::Finished;
            self.event(SourceEvent::Answered { session, answer });
        }
        Ok(())
    }

    /// A stream sends its oldest chunk.
    fn send(&mut self) {
        let Some((stream, chunk)) = self.chunks.pop_front() else {
            return;
        };
        let mut zero = Vec::new();
        match &chunk.content {
            Content::Pages(ranges) => {
                self.guest.sent(ranges);
                zero = self.guest.zero_in(ranges);
            }
            Content::Fill { ranges, .. } => self.guest.filled(ranges),
        }
        self.event(SourceEvent::Sent {
            stream,
            chunk: chunk.id,
            zero,
            wire_bytes: 5000,
            payload_bytes: 4096,
        });
    }

    /// The oldest action on the guest is done.
    fn answer(&mut self) {
        let Some(action) = self.under_way.pop_front() else {
            return;
        };
        let event = match action {
            SourceAction::StartTracking => {
                self.guest.start_tracking();
                SourceEvent::TrackingStarted
            }
            SourceAction::Scan => {
                assert!(self.guest.tracking, "a scan before tracking");
                let scanned = self.guest.scan(self.can_ask, self.allocates, self.poison);
                SourceEvent::Scanned(Box::new(scanned))
            }
            SourceAction::BeginHints { session } => {
                assert!(self.guest.tracking, "the guest is asked before tracking");
                self.guest.session = Some(session);
                self.guest.waits = true;
                SourceEvent::HintsBegun
            }
            SourceAction::Peek(range) => SourceEvent::Peeked(Peeked {
                range,
                written: Some(self.guest.written(range)),
            }),
            SourceAction::EndHints { hold, .. } => {
                self.guest.session = None;
                self.guest.waits = hold;
                SourceEvent::HintsEnded(BalloonCounts::default())
            }
            SourceAction::Recheck => SourceEvent::Rechecked(Box::new(self.guest.recheck())),
            SourceAction::Harvest => {
                let pages = self.guest.harvest();
                self.harvested.union_with(&pages);
                SourceEvent::Harvested(pages)
            }
            SourceAction::Pause => {
                self.guest.paused = true;
                SourceEvent::Paused
            }
            SourceAction::Save if self.guest.waits && !self.failed.contains(&Step::EndHints) => {
                panic!("saved while the guest waits for its pages")
            }
            SourceAction::Save => SourceEvent::Saved(MachineState {
                sections: vec![Section {
                    name: "balloon".to_owned(),
                    version: 1,
                    data: vec![1; 9],
                }],
            }),
            SourceAction::Digest { only, .. } => SourceEvent::Digested(vec![7; only.len()]),
            SourceAction::GiveBack(pages) => {
                self.guest.give_back(&pages);
                SourceEvent::GivenBack
            }
            SourceAction::StopTracking => {
                self.stop_tracking();
                SourceEvent::TrackingStopped
            }
            SourceAction::Resume => {
                self.guest.paused = false;
                SourceEvent::Resumed
            }
            _ => return,
        };
        self.event(event);
    }

    fn stop_tracking(&mut self) {
        let kept = !self.said_running && !self.failed.contains(&Step::GiveBack);
        if kept {
            assert!(
                self.guest.logged(&self.harvested),
                "harvested pages were not given back"
            );
        }
        self.guest.tracking = false;
    }

    fn poll(&mut self) {
        while let Some(action) = self.source.poll_action() {
            assert!(self.end.is_none(), "{action:?} after the end");
            self.look_at(&action);
            match action {
                SourceAction::Send { stream, chunk } => {
                    let (Content::Pages(ranges) | Content::Fill { ranges, .. }) = &chunk.content;
                    assert!(ranges.iter().all(|r| self.layout.region_of_range(*r).is_some()));
                    self.chunks.push_back((stream, chunk));
                }
                action if action.is_on_guest() => self.under_way.push_back(action),
                _ => {}
            }
        }
        assert!(self.under_way.len() < 64 && self.chunks.len() < 64, "actions pile up");
    }

    /// The laws.
    fn look_at(&mut self, action: &SourceAction) {
        match action {
            SourceAction::Transmit(message) => {
                wire::validate(message).expect("what is sent is within the limits");
                match message {
                    Message::Commit(_) => self.commit(),
                    Message::RoundEnd { round, .. } => {
                        assert!(self.chunks.is_empty(), "the end of a round before its pages");
                        self.round = *round;
                    }
                    Message::StateEnd { .. } => self.state_sent = true,
                    Message::Abort { .. } => assert!(!self.committed, "Abort after Commit"),
                    _ => {}
                }
            }
            SourceAction::Resume => {
                assert!(!self.committed || self.declined, "resumed after Commit, uninvited");
                assert!(self.running, "a guest that was paused is resumed");
            }
            SourceAction::Finished(outcome) => self.finished(outcome),
            _ => {}
        }
    }

    fn commit(&mut self) {
        assert!(!self.committed && self.state_sent && self.guest.paused && self.guest.session.is_none());
        assert_eq!(self.guest.lost(), None, "a page in use is not there at Commit");
        self.committed = true;
    }

    fn finished(&mut self, outcome: &Outcome) {
        assert!(outcome.report.pages.adds_up(), "{:?}", outcome.report.pages);
        assert_eq!(outcome.ending == Ending::Completed, outcome.error.is_none());
        match outcome.ending {
            Ending::Completed => assert!(self.dry_run || self.said_running, "completed without a word"),
            Ending::Unknown => assert!(self.committed && self.guest.paused, "unknown, and it runs here"),
            _ => {
                assert!(!self.committed || self.declined, "{} after Commit", outcome.ending);
                let failed = |step| self.failed.contains(&step);
                assert!(failed(Step::Resume) || failed(Step::Pause) || self.guest.paused != self.running);
                assert!(
                    failed(Step::StopTracking) || !self.guest.tracking,
                    "tracking is left on"
                );
                assert!(
                    failed(Step::EndHints) || self.guest.session.is_none(),
                    "a session is left open"
                );
            }
        }
        self.end = Some(outcome.clone());
    }

    /// The peer says no more. What is under way succeeds, timers run out, and there is an end.
    fn come_to_an_end(&mut self) {
        for _ in 0..1 << 12 {
            while !self.under_way.is_empty() || !self.chunks.is_empty() {
                self.answer();
                self.send();
            }
            if self.end.is_some() {
                assert_eq!(self.source.poll_timeout(), None, "a timer runs after the end");
                return;
            }
            let next = self
                .source
                .poll_timeout()
                .expect("something is waited for, and no timer runs");
            self.now = self.now.max(next);
            self.source.handle_timeout(self.now);
            self.poll();
        }
        panic!("no end although the receiver is silent");
    }
}
