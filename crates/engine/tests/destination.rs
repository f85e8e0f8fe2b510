//! A destination driven by hand, mostly by a source that breaks the rules.
#![allow(clippy::unwrap_used)]

use engine::{
    Destination, DestinationAction, DestinationConfig, DestinationEvent, Ending, Outcome, ReceivedRun, RunKind, Step,
    Time,
};
use machine::{BalloonConfig, MachineConfig, Section};
use pages::{Layout, PageRange, Pfn};
use std::sync::Arc;
use std::time::Duration;
use wire::{AbortCause, Commit, Digests, Hello, Message, Skip, SkipReason};

struct Hand {
    destination: Destination,
    layout: Arc<Layout>,
    now: Time,
    messages: Vec<Message>,
    steps: Vec<Step>,
    /// The chunks of each digest.
    digests: Vec<Vec<u64>>,
    discarded: bool,
    end: Option<Outcome>,
}

fn r(start: u64, count: u64) -> PageRange {
    PageRange::new(Pfn(start), count).unwrap()
}

impl Hand {
    fn new(config: DestinationConfig) -> Self {
        // Two regions with a hole of the layout between them.
        let layout = Arc::new(Layout::new(vec![r(0, 100), r(200, 28)]).unwrap());
        Hand {
            destination: Destination::new(config, Time::ZERO),
            layout,
            now: Time::ZERO,
            messages: Vec::new(),
            steps: Vec::new(),
            digests: Vec::new(),
            discarded: false,
            end: None,
        }
    }

    fn hello(&self) -> Hello {
        Hello {
            config: MachineConfig {
                kind: "model".to_owned(),
                layout: (*self.layout).clone(),
                vcpus: 1,
                balloon: BalloonConfig {
                    dialect: "standard".to_owned(),
                    features: 0,
                },
                extra: Default::default(),
            },
            running: true,
            streams: 2,
            verify: false,
            dry_run: false,
        }
    }

    /// Accepted, in round 0.
    fn receiving(config: DestinationConfig, verify: bool) -> Self {
        let mut hand = Hand::new(config);
        let hello = Hello { verify, ..hand.hello() };
        hand.hears(Message::Hello(hello));
        assert_eq!(hand.steps, [Step::Prepare]);
        let layout = Arc::clone(&hand.layout);
        hand.on(DestinationEvent::Prepared {
            layout,
            populated: false,
        });
        assert!(matches!(hand.messages[..], [Message::Accept(_)]));
        hand
    }

    /// All pages of round 0, the last round, have come.
    fn received(verify: bool) -> Self {
        let mut hand = Hand::receiving(DestinationConfig::default(), verify);
        hand.pages(0, 0, r(0, 100)).pages(1, 0, r(200, 28));
        hand.marker(0, 0)
            .marker(1, 0)
            .hears(Message::RoundEnd { round: 0, last: true });
        assert_eq!(hand.messages.last(), Some(&Message::RoundReceived { round: 0 }));
        hand
    }

    fn poll(&mut self) {
        while let Some(action) = self.destination.poll_action() {
            match action {
                DestinationAction::Transmit(message) => self.messages.push(message),
                DestinationAction::Finished(outcome) => self.end = Some(*outcome),
                // Answered by the tests that wait for it.
                DestinationAction::Discard => self.discarded = true,
                action => {
                    self.steps.push(action.step());
                    if let DestinationAction::Digest { only, .. } = action {
                        self.digests.push(only);
                    }
                }
            }
        }
    }

    fn on(&mut self, event: DestinationEvent) -> &mut Self {
        self.now += Duration::from_millis(1);
        self.destination.handle(event, self.now);
        self.poll();
        self
    }

    fn hears(&mut self, message: Message) -> &mut Self {
        self.on(DestinationEvent::Message(message))
    }

    fn pages(&mut self, stream: u16, round: u32, range: PageRange) -> &mut Self {
        let runs = vec![ReceivedRun {
            range,
            kind: RunKind::Data,
        }];
        self.on(DestinationEvent::Received {
            stream,
            round,
            runs,
            wire_bytes: 100,
            payload_bytes: 90,
        })
    }

    fn marker(&mut self, stream: u16, round: u32) -> &mut Self {
        self.on(DestinationEvent::Marker { stream, round })
    }

    fn skips(&mut self, reason: SkipReason, ranges: &[PageRange]) -> &mut Self {
        self.hears(Message::Skip(Skip {
            reason,
            ranges: ranges.to_vec(),
        }))
    }

    /// It gave up, told the source why, and threw its copy away.
    fn gave_up(&self, because: &str) {
        self.ended(because, Ending::Failed, AbortCause::Failed);
    }

    fn ended(&self, because: &str, ending: Ending, cause: AbortCause) {
        let outcome = self
            .end
            .as_ref()
            .unwrap_or_else(|| panic!("it goes on; it should not: {because}"));
        assert_eq!(outcome.ending, ending);
        let error = outcome.error.as_deref().unwrap();
        assert!(error.contains(because), "{error}");
        assert!(self.discarded && !self.steps.contains(&Step::Resume));
        assert_eq!(
            self.messages.last(),
            Some(&Message::Abort {
                reason: error.to_owned(),
                cause
            })
        );
    }
}

#[test]
fn case_19_bad_ranges_and_rounds_are_refused() {
    type Bad = fn(&mut Hand) -> &mut Hand;
    let rows: [(Bad, &str); 17] = [
        (
            |h| h.skips(SkipReason::Hole, &[r(0, 1 << 40)]),
            "do not lie within one region",
        ),
        (
            |h| h.skips(SkipReason::Hole, &[r(90, 20)]),
            "do not lie within one region",
        ),
        (
            |h| h.skips(SkipReason::Hole, &[r(150, 1)]),
            "do not lie within one region",
        ),
        (
            |h| h.skips(SkipReason::Hole, &[r(5, 0)]),
            "do not lie within one region",
        ),
        (
            |h| h.skips(SkipReason::Hole, &[r(0, 9), r(8, 2)]),
            "sent or skipped before",
        ),
        (
            |h| {
                h.skips(SkipReason::Hole, &[r(0, 9)])
                    .skips(SkipReason::Hinted, &[r(8, 1)])
            },
            "sent or skipped before",
        ),
        (
            |h| h.pages(0, 0, r(0, 9)).skips(SkipReason::Hinted, &[r(8, 1)]),
            "sent or skipped before",
        ),
        (
            |h| h.skips(SkipReason::Ballooned, &[r(8, 1)]).pages(0, 0, r(0, 9)),
            "said it would skip",
        ),
        (
            |h| {
                h.hears(Message::RoundEnd { round: 0, last: false })
                    .skips(SkipReason::Hole, &[r(0, 1)])
            },
            "Skip after the end of round 0",
        ),
        (|h| h.pages(0, 0, r(0, 9)).pages(1, 0, r(8, 1)), "twice in round 0"),
        (|h| h.pages(0, 0, r(99, 2)), "do not lie within one region"),
        (|h| h.pages(2, 0, r(0, 1)), "stream 2; there are 2"),
        (|h| h.pages(0, 1, r(0, 1)), "round 1 on stream 0 in round 0"),
        (|h| h.marker(0, 0).marker(0, 0), "behind that round's marker"),
        (|h| h.marker(0, 0).pages(0, 0, r(0, 1)), "behind that round's marker"),
        (|h| h.marker(9, 0), "stream 9; there are 2"),
        (
            |h| {
                let end = Message::RoundEnd { round: 0, last: false };
                h.hears(end.clone()).hears(end)
            },
            "or twice",
        ),
    ];
    for (bad, because) in rows {
        let mut hand = Hand::receiving(DestinationConfig::default(), false);
        bad(&mut hand);
        hand.gave_up(because);
    }
}

#[test]
fn case_19_a_source_that_lost_pages_is_refused() {
    let mut hand = Hand::receiving(DestinationConfig::default(), false);
    hand.pages(0, 0, r(0, 100)).skips(SkipReason::Hole, &[r(200, 27)]);
    hand.marker(0, 0)
        .marker(1, 0)
        .hears(Message::RoundEnd { round: 0, last: false });
    hand.gave_up("neither content nor a reason to skip for 1 pages");
}

#[test]
fn case_19_the_state_has_to_be_what_was_announced() {
    let section = || {
        Message::Section(Section {
            name: "vcpu0".to_owned(),
            version: 1,
            data: vec![0; 20 << 20],
        })
    };
    let end = |sections| Message::StateEnd { sections };
    let rows: [(Vec<Message>, bool, &str); 7] = [
        (vec![section(), end(2)], false, "StateEnd for 2 sections after 1"),
        (vec![end(u32::MAX)], false, "after 0 of them"),
        (
            vec![section(), section(), section(), section()],
            false,
            "more machine state than",
        ),
        (vec![end(0)], true, "without the Digests"),
        (
            vec![Message::Digests(Digests {
                chunk_pages: 4096,
                sums: vec![1, 2],
            })],
            false,
            "Digests unasked",
        ),
        (
            vec![Message::Digests(Digests {
                chunk_pages: 4096,
                sums: vec![1],
            })],
            true,
            "RAM has 2 of them",
        ),
        (
            vec![Message::Digests(Digests {
                chunk_pages: 0,
                sums: vec![1, 2],
            })],
            true,
            "of 0 pages each",
        ),
    ];
    for (messages, verify, because) in rows {
        let mut hand = Hand::received(verify);
        for message in messages {
            hand.hears(message);
        }
        hand.gave_up(because);
    }
    // State before all of the last round was sent.
    for round_end in [None, Some(Message::RoundEnd { round: 0, last: false })] {
        let mut hand = Hand::receiving(DestinationConfig::default(), false);
        if let Some(round_end) = round_end {
            hand.hears(round_end);
        }
        hand.hears(end(0));
        hand.gave_up("StateEnd before the last round was sent");
    }
}

#[test]
fn a_state_that_comes_while_pages_do_waits_for_them() {
    for verify in [false, true] {
        let mut hand = Hand::receiving(DestinationConfig::default(), verify);
        hand.pages(0, 0, r(0, 100)).marker(0, 0);
        hand.hears(Message::RoundEnd { round: 0, last: true });
        if verify {
            hand.hears(Message::Digests(Digests {
                chunk_pages: 50,
                sums: vec![4, 5, 6],
            }));
        }
        hand.hears(Message::StateEnd { sections: 0 });
        assert_eq!(hand.steps, [Step::Prepare], "pages are missing");
        hand.pages(1, 0, r(200, 28)).marker(1, 0);
        assert_eq!(hand.messages.last(), Some(&Message::RoundReceived { round: 0 }));
        if verify {
            assert_eq!(
                hand.steps,
                [Step::Prepare, Step::Digest],
                "once, cut as the source does"
            );
            hand.on(DestinationEvent::Digested(vec![4, 5, 6]));
        }
        assert_eq!(hand.steps.last(), Some(&Step::Restore));
        hand.on(DestinationEvent::Restored);
        // A millisecond an event: what it waited for pages is not the digest's.
        let ready = Message::Ready {
            verified: verify,
            verify_us: if verify { 1000 } else { 0 },
        };
        assert_eq!(hand.messages.last(), Some(&ready));
    }
}

#[test]
fn something_else_than_hello_is_refused() {
    let mut hand = Hand::new(DestinationConfig::default());
    hand.hears(Message::Ping);
    assert_eq!(
        hand.end.as_ref().unwrap().error.as_deref(),
        Some("the source sent Ping instead of Hello: it does not follow the protocol")
    );
    assert!(!hand.discarded, "there is nothing to throw away");
}

#[test]
fn a_round_is_received_when_all_of_it_is() {
    let mut hand = Hand::receiving(DestinationConfig::default(), false);
    let received = |hand: &Hand| hand.messages.contains(&Message::RoundReceived { round: 0 });
    hand.pages(0, 0, r(0, 100)).pages(1, 0, r(200, 28)).marker(1, 0);
    hand.hears(Message::RoundEnd { round: 0, last: false });
    assert!(!received(&hand), "a marker is missing");
    hand.marker(0, 0);
    assert!(received(&hand) && hand.end.is_none());
    hand.pages(1, 1, r(3, 1));
    assert!(hand.end.is_none());
}

#[test]
fn skipped_pages_of_memory_that_is_not_zero_are_zeroed_before_the_round_is_received() {
    let mut hand = Hand::receiving(
        DestinationConfig {
            memory_is_zero: false,
            ..DestinationConfig::default()
        },
        false,
    );
    hand.pages(0, 0, r(0, 100)).skips(SkipReason::Hinted, &[r(200, 28)]);
    assert_eq!(hand.steps, [Step::Prepare, Step::Zero]);
    hand.marker(0, 0)
        .marker(1, 0)
        .hears(Message::RoundEnd { round: 0, last: false });
    assert_eq!(hand.messages.len(), 1, "a later round's page could land first");
    hand.on(DestinationEvent::Zeroed);
    assert_eq!(hand.messages.last(), Some(&Message::RoundReceived { round: 0 }));
}

/// Up to `Ready`.
fn ready(config: DestinationConfig) -> Hand {
    let mut hand = Hand::receiving(config, false);
    hand.pages(0, 0, r(0, 100)).pages(1, 0, r(200, 28));
    hand.marker(0, 0)
        .marker(1, 0)
        .hears(Message::RoundEnd { round: 0, last: true });
    hand.hears(Message::StateEnd { sections: 0 })
        .on(DestinationEvent::Restored);
    assert_eq!(
        hand.messages.last(),
        Some(&Message::Ready {
            verified: false,
            verify_us: 0
        })
    );
    assert!(!hand.steps.contains(&Step::Resume));
    hand
}

fn commit() -> Message {
    Message::Commit(Commit {
        total_us: 900_000,
        downtime_us: 30_000,
        verify_us: 5000,
    })
}

#[test]
fn it_runs_on_commit_and_reports_the_sources_times_and_its_own() {
    let mut hand = ready(DestinationConfig::default());
    hand.hears(commit());
    assert_eq!(hand.steps.last(), Some(&Step::Resume));
    // The guest is here: what becomes of the source matters no more.
    hand.on(DestinationEvent::PeerGone {
        error: "reset".to_owned(),
    })
    .on(DestinationEvent::Cancel);
    hand.hears(Message::Abort {
        reason: String::new(),
        cause: AbortCause::Failed,
    });
    hand.on(DestinationEvent::Failed {
        step: Step::Receive,
        error: "reset".to_owned(),
    });
    assert!(hand.end.is_none());
    hand.on(DestinationEvent::Resumed);
    let outcome = hand.end.as_ref().unwrap();
    assert_eq!(outcome.ending, Ending::Completed);
    assert!((outcome.report.total_ms - 905.0).abs() < 0.1, "{:?}", outcome.report);
    assert!((outcome.report.downtime_ms - 35.0).abs() < 0.1 && (outcome.report.verify_ms - 5.0).abs() < 0.1);
    assert!(matches!(hand.messages.last(), Some(Message::Running(running)) if running.running));
}

#[test]
fn a_guest_that_does_not_resume_goes_back() {
    let mut hand = ready(DestinationConfig::default());
    hand.hears(commit()).on(DestinationEvent::Failed {
        step: Step::Resume,
        error: "no vCPU".to_owned(),
    });
    assert!(hand.discarded && hand.end.is_none());
    assert!(
        matches!(hand.messages.last(), Some(Message::Ready { .. })),
        "a vCPU may run here until the copy is gone"
    );
    hand.on(DestinationEvent::PeerGone {
        error: "reset".to_owned(),
    })
    .on(DestinationEvent::Discarded);
    assert!(matches!(hand.messages.last(), Some(Message::NotRunning(not)) if not.reason.contains("no vCPU")));
    assert!(hand.end.as_ref().unwrap().ending == Ending::Failed);
}

#[test]
fn a_copy_that_cannot_be_thrown_away_is_not_said_to_be_gone() {
    let mut hand = ready(DestinationConfig::default());
    for step in [Step::Resume, Step::Discard] {
        if step == Step::Resume {
            hand.hears(commit());
        }
        hand.on(DestinationEvent::Failed {
            step,
            error: "a vCPU is stuck".to_owned(),
        });
    }
    assert!(matches!(hand.messages.last(), Some(Message::Ready { .. })));
    assert_eq!(hand.end.as_ref().unwrap().ending, Ending::Unknown);
}

#[test]
fn it_may_stay_paused() {
    let mut hand = ready(DestinationConfig {
        stay_paused: true,
        ..DestinationConfig::default()
    });
    hand.hears(commit());
    assert!(!hand.steps.contains(&Step::Resume));
    assert!(matches!(hand.messages.last(), Some(Message::Running(running)) if !running.running));
}

#[test]
fn case_14_an_abort_or_a_lost_source_ends_it_at_once_and_nothing_runs() {
    let endings: [fn(&mut Hand) -> &mut Hand; 3] = [
        |h| {
            h.hears(Message::Abort {
                reason: "no".to_owned(),
                cause: AbortCause::Cancelled,
            })
        },
        |h| {
            h.on(DestinationEvent::PeerGone {
                error: "reset".to_owned(),
            })
        },
        |h| h.on(DestinationEvent::Cancel),
    ];
    for end in endings {
        for mut hand in [Hand::received(false), ready(DestinationConfig::default())] {
            end(&mut hand);
            assert!(hand.discarded && hand.end.is_some() && !hand.steps.contains(&Step::Resume));
            hand.hears(commit());
            assert!(!hand.steps.contains(&Step::Resume));
        }
    }
}

#[test]
fn unequal_digests_name_their_pages() {
    let mut hand = Hand::received(true);
    assert_eq!(
        hand.steps.last(),
        Some(&Step::Digest),
        "while the source digests its own"
    );
    hand.on(DestinationEvent::Digested(vec![1, 2]));
    hand.hears(Message::Digests(Digests {
        chunk_pages: 1024,
        sums: vec![1, 3],
    }));
    hand.hears(Message::StateEnd { sections: 0 });
    hand.gave_up("verification failed: the digests of pages 0xc8..0xe4 differ");
    assert_eq!(hand.end.as_ref().unwrap().report.verified, Some(false));
}

#[test]
fn a_source_that_cuts_ram_in_another_way_is_digested_its_way() {
    let mut hand = Hand::received(true);
    hand.on(DestinationEvent::Digested(vec![1, 2]));
    hand.hears(Message::Digests(Digests {
        chunk_pages: 50,
        sums: vec![4, 5, 6],
    }));
    hand.hears(Message::StateEnd { sections: 0 });
    assert_eq!(hand.steps.last(), Some(&Step::Digest));
    // A millisecond an event: the wait ends with the comparison, restoring is not in it.
    hand.on(DestinationEvent::Digested(vec![4, 5, 6]))
        .on(DestinationEvent::Restored);
    let ready = Message::Ready {
        verified: true,
        verify_us: 1000,
    };
    assert_eq!(hand.messages.last(), Some(&ready));
}

#[test]
fn a_silent_source_is_dead_after_a_while_and_a_slow_preparation_is_not_silence() {
    let mut hand = Hand::new(DestinationConfig::default());
    hand.hears(Message::Hello(hand.hello()));
    while hand.end.is_none() {
        hand.now = hand.destination.poll_timeout().unwrap();
        hand.destination.handle_timeout(hand.now);
        hand.poll();
    }
    let silent = "no sign of life from the source for 10 s";
    hand.ended(silent, Ending::TimedOut, AbortCause::TimedOut);
    assert!(hand.messages.iter().filter(|m| **m == Message::Ping).count() >= 9);
}

#[test]
fn a_source_that_pings_and_does_not_commit_is_given_up() {
    let mut hand = ready(DestinationConfig::default());
    let since = hand.now;
    while hand.end.is_none() {
        assert!(hand.now < since + Duration::from_secs(600), "it waits for ever");
        hand.now = hand.destination.poll_timeout().unwrap();
        hand.destination.handle_timeout(hand.now);
        hand.poll();
        let ping = DestinationEvent::Message(Message::Ping);
        hand.destination.handle(ping, hand.now);
    }
    assert_eq!(hand.now - since, Duration::from_secs(60));
    let alive = "the source is alive but gave no answer to Ready for 60 s";
    hand.ended(alive, Ending::TimedOut, AbortCause::TimedOut);
}

#[test]
fn a_ready_that_was_queued_and_not_handed_out_is_taken_back() {
    let mut hand = Hand::received(false);
    hand.hears(Message::StateEnd { sections: 0 });
    hand.destination.handle(DestinationEvent::Restored, hand.now);
    hand.on(DestinationEvent::Cancel);
    assert!(!hand.messages.contains(&Message::Ready {
        verified: false,
        verify_us: 0
    }));
    assert!(matches!(
        hand.messages.last(),
        Some(Message::Abort {
            cause: AbortCause::Cancelled,
            ..
        })
    ));
}

#[test]
fn a_long_resume_is_no_silence() {
    let mut hand = ready(DestinationConfig::default());
    hand.hears(commit());
    for _ in 0..20 {
        let due = hand.destination.poll_timeout().unwrap();
        assert!(due <= hand.now + Duration::from_secs(1));
        hand.now = due;
        hand.destination.handle_timeout(due);
        hand.poll();
        assert_eq!(hand.messages.last(), Some(&Message::Ping));
    }
    hand.on(DestinationEvent::Resumed);
    assert!(matches!(hand.messages.last(), Some(Message::Running(_))));
    assert!(hand.destination.poll_timeout().is_none());
}

/// Round 0 is here and more follow: both chunks are being digested ahead of the pause.
fn digesting_ahead() -> Hand {
    let mut hand = Hand::receiving(DestinationConfig::default(), true);
    hand.destination.speaks(3);
    hand.pages(0, 0, r(0, 100)).pages(1, 0, r(200, 28));
    assert_eq!(hand.digests, [[0u64; 0]; 0]);
    hand.marker(0, 0).marker(1, 0);
    hand.hears(Message::RoundEnd { round: 0, last: false });
    assert_eq!(hand.messages.last(), Some(&Message::RoundReceived { round: 0 }));
    assert_eq!(hand.digests, [[0, 1]]);
    hand
}

fn last_round(hand: &mut Hand, round: u32) {
    hand.marker(0, round).marker(1, round);
    hand.hears(Message::RoundEnd { round, last: true });
}

fn equal_sums(hand: &mut Hand, sums: Vec<u128>) {
    let chunk_pages = 1024;
    hand.hears(Message::Digests(Digests { chunk_pages, sums }));
    hand.hears(Message::StateEnd { sections: 0 });
}

#[test]
fn what_was_digested_ahead_and_rests_is_not_digested_again() {
    let mut hand = digesting_ahead();
    hand.on(DestinationEvent::Digested(vec![1, 2]));
    last_round(&mut hand, 1);
    equal_sums(&mut hand, vec![1, 2]);
    assert_eq!(hand.digests.len(), 1);
    assert_eq!(hand.steps.last(), Some(&Step::Restore));
}

#[test]
fn a_page_that_comes_during_the_digest_ahead_is_digested_again() {
    let mut hand = digesting_ahead();
    hand.pages(1, 1, r(210, 1));
    last_round(&mut hand, 1);
    assert_eq!(hand.digests.last(), Some(&vec![1]));
    equal_sums(&mut hand, vec![1, 20]);
    hand.on(DestinationEvent::Digested(vec![1, 2]));
    assert_eq!(hand.steps.last(), Some(&Step::Digest), "the second one is to come");
    hand.on(DestinationEvent::Digested(vec![20]));
    assert_eq!(hand.steps.last(), Some(&Step::Restore));
}

/// A batch that was torn with its connection leaves pages in memory that nobody told of.
#[test]
fn what_was_digested_over_lost_connections_is_dropped() {
    let mut hand = digesting_ahead();
    let error = "reset".to_owned();
    hand.on(DestinationEvent::PeerGone { error });
    hand.on(DestinationEvent::Relinked);
    assert_eq!(
        hand.messages
            .last()
            .map(|m| matches!(m, Message::Resumed { round: 1, .. })),
        Some(true)
    );
    last_round(&mut hand, 1);
    assert_eq!(hand.digests, [[0, 1], [0, 1]]);
    equal_sums(&mut hand, vec![10, 20]);
    // The first answer is that of the dropped digest.
    hand.on(DestinationEvent::Digested(vec![1, 2]));
    assert_eq!(hand.steps.last(), Some(&Step::Digest));
    hand.on(DestinationEvent::Digested(vec![10, 20]));
    assert_eq!(hand.steps.last(), Some(&Step::Restore));
}
