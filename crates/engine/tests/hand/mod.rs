//! A source's executor, by hand: carries out nothing by itself, and remembers what it was told.
// Each test file uses a part of this.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub, missing_docs)]

use engine::{
    Ask, Chunk, Content, Ending, Outcome, Rechecked, Scanned, Source, SourceAction, SourceConfig, SourceEvent, Step,
    Time,
};
use machine::{Answer, BalloonConfig, BalloonCounts, MachineConfig, MachineState};
use pages::{Layout, PageRange, PageSet, Pfn};
use std::sync::Arc;
use std::time::Duration;
use wire::{Accept, Message};

pub struct Hand {
    pub source: Source,
    pub layout: Arc<Layout>,
    pub now: Time,
    pub chunks: Vec<(u16, Chunk)>,
    pub messages: Vec<Message>,
    pub steps: Vec<Step>,
    pub end: Option<Outcome>,
    pub given_back: Option<PageSet>,
    /// The chunks of each digest.
    pub digests: Vec<Vec<u64>>,
    /// What the balloon holds and has counted, for each look at it.
    pub ballooned: Option<PageSet>,
    pub counts: BalloonCounts,
    /// Looks that are owed, each before the harvest that it comes with.
    rechecks: usize,
}

pub fn r(start: u64, count: u64) -> PageRange {
    PageRange::new(Pfn(start), count).unwrap()
}

pub fn config() -> SourceConfig {
    SourceConfig {
        ask: Ask::Always,
        peer_timeout: Duration::from_secs(10),
        ..SourceConfig::default()
    }
}

impl Hand {
    pub fn new(config: SourceConfig, pages: u64) -> Self {
        let layout = Arc::new(Layout::flat(pages).unwrap());
        let machine = MachineConfig {
            kind: "model".to_owned(),
            layout: (*layout).clone(),
            vcpus: 1,
            balloon: BalloonConfig {
                dialect: "standard".to_owned(),
                features: 8,
            },
            extra: Default::default(),
        };
        let source = Source::new(config, machine, Arc::clone(&layout), true, Time::ZERO);
        let mut hand = Hand {
            source,
            layout,
            now: Time::ZERO,
            chunks: Vec::new(),
            messages: Vec::new(),
            steps: Vec::new(),
            end: None,
            given_back: None,
            digests: Vec::new(),
            ballooned: None,
            counts: BalloonCounts::default(),
            rechecks: 0,
        };
        hand.poll();
        hand
    }

    /// Carries out nothing: notes what is wanted.
    pub fn poll(&mut self) {
        while let Some(action) = self.source.poll_action() {
            match action.step() {
                Step::Recheck => self.rechecks += 1,
                step if action.is_on_guest() => self.steps.push(step),
                _ => {}
            }
            match action {
                SourceAction::Transmit(message) => self.messages.push(message),
                SourceAction::Send { stream, chunk } => self.chunks.push((stream, chunk)),
                SourceAction::Finished(outcome) => self.end = Some(*outcome),
                SourceAction::Digest { only, .. } => self.digests.push(only),
                SourceAction::GiveBack(pages) => self.given_back = Some(pages),
                _ => {}
            }
        }
    }

    pub fn on(&mut self, event: SourceEvent) -> &mut Self {
        self.now += Duration::from_millis(1);
        let harvest = Step::Harvest;
        if matches!(&event, SourceEvent::Harvested(_))
            || matches!(&event, SourceEvent::Failed { step, .. } if *step == harvest)
        {
            self.rechecks -= 1;
            let rechecked = Rechecked {
                ballooned: self.ballooned.clone(),
                counts: self.counts,
            };
            self.source
                .handle(SourceEvent::Rechecked(Box::new(rechecked)), self.now);
        }
        self.source.handle(event, self.now);
        self.poll();
        self
    }

    pub fn hears(&mut self, message: Message) -> &mut Self {
        self.on(SourceEvent::Message(message))
    }

    pub fn steps(&mut self) -> Vec<Step> {
        std::mem::take(&mut self.steps)
    }

    /// All chunks that were handed out are sent; which pages they had.
    pub fn send_all(&mut self) -> PageSet {
        let mut pages = PageSet::empty(&self.layout);
        while !self.chunks.is_empty() {
            let (stream, chunk) = self.chunks.remove(0);
            if let Content::Pages(ranges) = &chunk.content {
                pages.extend(ranges.iter().copied());
            }
            let (wire_bytes, payload_bytes) = (5 << 20, 4 << 20);
            self.on(SourceEvent::Sent {
                stream,
                chunk: chunk.id,
                zero: Vec::new(),
                wire_bytes,
                payload_bytes,
            });
        }
        pages
    }

    pub fn set(&self, ranges: &[PageRange]) -> PageSet {
        let mut set = PageSet::empty(&self.layout);
        set.extend(ranges.iter().copied());
        set
    }

    /// Up to round 0 with the guest being asked.
    pub fn asking(config: SourceConfig, pages: u64, allocates: bool) -> Self {
        Hand::new(config, pages).with_question(allocates)
    }

    pub fn with_question(self, allocates: bool) -> Self {
        let mut hand = self;
        hand.hears(Message::Accept(Accept { populated: false }));
        assert_eq!(hand.steps(), [Step::StartTracking]);
        hand.on(SourceEvent::TrackingStarted);
        assert_eq!(hand.steps(), [Step::Scan], "tracking first");
        let scanned = Scanned {
            present: PageSet::full(&hand.layout),
            ballooned: hand.ballooned.clone(),
            stats: None,
            dialect: "standard",
            can_ask: Ok(()),
            allocates,
            poison: None,
            counts: hand.counts,
        };
        hand.on(SourceEvent::Scanned(Box::new(scanned)));
        assert_eq!(hand.steps(), [Step::BeginHints]);
        hand.on(SourceEvent::HintsBegun);
        hand
    }

    pub fn says(&mut self, answer: Answer) -> &mut Self {
        self.on(SourceEvent::Answered { session: 1, answer })
    }

    /// Round 0 sent and received; the harvest is under way.
    pub fn round_0_over(&mut self) -> PageSet {
        self.says(Answer::Finished);
        assert_eq!(self.steps(), [Step::EndHints]);
        self.on(SourceEvent::HintsEnded(BalloonCounts::default()));
        let sent = self.send_all();
        self.hears(Message::RoundReceived { round: 0 });
        assert_eq!(self.steps(), [Step::Harvest]);
        sent
    }

    /// On to the last round, with these pages dirty, and all received and saved.
    pub fn all_received(&mut self) {
        self.on(SourceEvent::Harvested(self.set(&[r(3, 2)])));
        if self.steps == [Step::Digest, Step::Harvest] {
            self.steps();
            self.on(SourceEvent::Digested(vec![1]));
            self.on(SourceEvent::Harvested(self.set(&[])));
        }
        assert_eq!(self.steps(), [Step::Pause, Step::Harvest]);
        self.on(SourceEvent::Paused);
        self.on(SourceEvent::Harvested(self.set(&[r(9, 1)])));
        assert_eq!(self.steps(), [Step::Save]);
        assert_eq!(self.send_all().count(), 3);
        self.on(SourceEvent::Saved(MachineState::default()));
        self.hears(Message::RoundReceived { round: 1 });
    }

    /// On to a guest that was handed over, without an answer.
    pub fn committed() -> Self {
        let mut hand = Hand::asking(config(), 64, false);
        hand.round_0_over();
        hand.all_received();
        hand.hears(Message::Ready {
            verified: false,
            verify_us: 0,
        });
        assert!(matches!(hand.messages.last(), Some(Message::Commit(_))));
        hand
    }

    /// Answers what undoing asks for.
    pub fn undo(&mut self) -> Vec<Step> {
        let mut all = Vec::new();
        loop {
            let steps = self.steps();
            if steps.is_empty() {
                return all;
            }
            for step in &steps {
                self.on(match step {
                    Step::EndHints => SourceEvent::HintsEnded(BalloonCounts::default()),
                    Step::GiveBack => SourceEvent::GivenBack,
                    Step::StopTracking => SourceEvent::TrackingStopped,
                    Step::Resume => SourceEvent::Resumed,
                    step => panic!("{step:?} while undoing"),
                });
            }
            all.extend(steps);
        }
    }

    pub fn ending(&self) -> Ending {
        self.end.as_ref().unwrap().ending
    }

    pub fn error(&self) -> &str {
        self.end.as_ref().unwrap().error.as_deref().unwrap()
    }
}

impl Hand {
    /// The receiver pings whenever the source's timers come, and says nothing else, until that is enough.
    pub fn hears_pings_alone(&mut self) -> Time {
        let since = self.now;
        while self.messages.last().is_none_or(|m| !matches!(m, Message::Abort { .. }))
            && self.end.is_none()
            && self.steps.is_empty()
        {
            assert!(self.now < since + Duration::from_secs(600), "it waits for ever");
            self.now = self.source.poll_timeout().unwrap();
            self.source.handle_timeout(self.now);
            self.poll();
            self.source.handle(SourceEvent::Message(Message::Ping), self.now);
            self.poll();
        }
        self.now - since
    }
}
