//! A source driven by hand: what it does at one event, where a run of both sides would hide it.
#![allow(clippy::unwrap_used)]

mod hand;

use engine::{Chunk, Content, Ending, Peeked, SourceConfig, SourceEvent, Step};
use hand::{Hand, config, r};
use machine::{Answer, BalloonCounts, MachineState};
use pages::Pfn;
use std::time::Duration;
use wire::{AbortCause, Accept, Message, NotRunning, Running};

#[test]
fn case_25_a_hint_over_chunk_edges_stays_behind_and_its_neighbours_are_tracked() {
    let mut hand = Hand::asking(config(), 5000, false);
    // The hint lies over the edge of the chunks of 1024 pages and inside what is answered.
    hand.says(Answer::Free(vec![r(1000, 100)]))
        .says(Answer::Covered(r(0, 2500)));
    let mut sent = hand.send_all();
    assert_eq!(sent, hand.set(&[r(0, 1000), r(1100, 1400)]), "only what was answered");
    sent.union_with(&hand.round_0_over());
    assert_eq!(sent, hand.set(&[r(0, 1000), r(1100, 3900)]));
    let Some(Message::Skip(skip)) = hand.messages.iter().find(|m| matches!(m, Message::Skip(_))) else {
        panic!()
    };
    assert_eq!(skip.ranges, [r(1000, 100)]);
    // A later round has the neighbours that were written and a hinted page that was written, nothing else of the hint.
    let dirty = hand.set(&[r(999, 1), r(1050, 1), r(1100, 1)]);
    hand.on(SourceEvent::Harvested(dirty.clone()));
    assert_eq!(hand.steps(), [Step::Pause, Step::Harvest]);
    hand.on(SourceEvent::Paused);
    hand.on(SourceEvent::Harvested(hand.set(&[])));
    assert_eq!(hand.send_all(), dirty);
}

#[test]
fn case_26_a_page_reused_between_look_and_answer_is_sent() {
    let mut hand = Hand::asking(config(), 64, false);
    // The guest looked: page 5 was free. Then it used it: the dirty log has it. Then its answer came.
    hand.says(Answer::Free(vec![r(4, 4)])).says(Answer::Covered(r(0, 64)));
    assert_eq!(hand.send_all(), hand.set(&[r(0, 4), r(8, 56)]));
    hand.round_0_over();
    hand.on(SourceEvent::Harvested(hand.set(&[r(5, 1)])));
    hand.on(SourceEvent::Paused);
    // A late answer has no say over what was harvested.
    hand.says(Answer::Free(vec![r(0, 64)]));
    hand.on(SourceEvent::Harvested(hand.set(&[])));
    assert_eq!(hand.send_all(), hand.set(&[r(5, 1)]));
    hand.on(SourceEvent::Cancel);
    hand.on(SourceEvent::Saved(MachineState::default()));
    let steps = hand.steps();
    assert!(
        steps.starts_with(&[Step::Pause, Step::Harvest, Step::Save, Step::GiveBack]),
        "{steps:?}"
    );
    hand.on(SourceEvent::GivenBack)
        .on(SourceEvent::TrackingStopped)
        .on(SourceEvent::Resumed);
    let report = &hand.end.as_ref().unwrap().report;
    assert_eq!(
        (report.pages.hinted, report.pages.hinted_then_sent, report.balloon.late),
        (3, 1, 1)
    );
}

#[test]
fn answers_of_another_session_and_pages_under_way_are_left_alone() {
    let mut hand = Hand::asking(config(), 64, false);
    hand.on(SourceEvent::Answered {
        session: 2,
        answer: Answer::Free(vec![r(0, 64)]),
    });
    hand.says(Answer::Covered(r(0, 32)));
    hand.says(Answer::Free(vec![r(0, 64), r(1 << 40, 5)]));
    assert_eq!(
        hand.send_all(),
        hand.set(&[r(0, 32)]),
        "handed to a stream before it was called free"
    );
    assert_eq!(hand.round_0_over().count(), 0);
}

#[test]
fn pages_harvested_before_a_failure_are_given_back_even_those_under_way() {
    let mut hand = Hand::asking(config(), 64, false);
    hand.round_0_over();
    hand.on(SourceEvent::Harvested(hand.set(&[r(3, 2)])));
    assert_eq!(hand.steps(), [Step::Pause, Step::Harvest]);
    hand.on(SourceEvent::Paused);
    // The last harvest is under way when somebody cancels: what it returns is owed too.
    hand.on(SourceEvent::Cancel).on(SourceEvent::Cancel);
    assert!(hand.steps().is_empty());
    assert!(
        matches!(
            hand.messages.last(),
            Some(Message::Abort {
                cause: AbortCause::Cancelled,
                ..
            })
        ),
        "told at once"
    );
    hand.on(SourceEvent::Harvested(hand.set(&[r(40, 1)])));
    assert_eq!(hand.undo(), [Step::GiveBack, Step::StopTracking, Step::Resume]);
    assert_eq!(hand.given_back, Some(hand.set(&[r(3, 2), r(40, 1)])));
    assert_eq!(hand.ending(), Ending::Cancelled);
    let aborts = hand
        .messages
        .iter()
        .filter(|m| matches!(m, Message::Abort { .. }))
        .count();
    assert_eq!(aborts, 1);
}

#[test]
fn a_commit_that_was_queued_and_not_handed_out_is_taken_back() {
    let mut hand = Hand::asking(config(), 64, false);
    hand.round_0_over();
    hand.all_received();
    hand.source.handle(
        SourceEvent::Message(Message::Ready {
            verified: false,
            verify_us: 0,
        }),
        hand.now,
    );
    hand.on(SourceEvent::Cancel);
    assert!(!hand.messages.iter().any(|m| matches!(m, Message::Commit(_))));
    assert!(hand.undo().contains(&Step::Resume));
    assert_eq!(hand.ending(), Ending::Cancelled);
}

#[test]
fn after_commit_no_answer_of_any_kind_means_unknown_and_paused() {
    let silence = |hand: &mut Hand| {
        hand.now += Duration::from_secs(11);
        hand.source.handle_timeout(hand.now);
        hand.poll();
    };
    let gone = |hand: &mut Hand| {
        hand.on(SourceEvent::PeerGone {
            error: "reset".to_owned(),
        });
    };
    let malformed = |hand: &mut Hand| {
        hand.on(SourceEvent::Failed {
            step: Step::Control,
            error: "bad checksum".to_owned(),
        });
    };
    let nonsense = |hand: &mut Hand| {
        hand.hears(Message::Ready {
            verified: false,
            verify_us: 0,
        });
    };
    let ways: [fn(&mut Hand); 4] = [silence, gone, malformed, nonsense];
    for way in ways {
        let mut hand = Hand::committed();
        hand.on(SourceEvent::Cancel);
        assert!(hand.end.is_none() && hand.steps().is_empty(), "too late to cancel");
        way(&mut hand);
        // A late answer changes nothing any more.
        hand.hears(Message::Abort {
            reason: String::new(),
            cause: AbortCause::Failed,
        });
        let steps = hand.undo();
        assert!(
            !steps.contains(&Step::Resume) && steps.contains(&Step::StopTracking),
            "{steps:?}"
        );
        assert_eq!(hand.ending(), Ending::Unknown);
        assert!(hand.error().contains("stays paused"), "{}", hand.error());
        assert!(
            matches!(hand.messages.last(), Some(Message::Commit(_) | Message::Ping)),
            "no Abort"
        );
    }
}

#[test]
fn after_commit_the_receivers_word_that_it_will_not_run_gives_the_guest_back() {
    let not_running = Message::NotRunning(NotRunning {
        reason: "vCPU 0 is stuck".to_owned(),
    });
    let crossing = Message::Abort {
        reason: "cancelled".to_owned(),
        cause: AbortCause::Cancelled,
    };
    let late = Message::Abort {
        reason: "no sign of life from the source for 10 s".to_owned(),
        cause: AbortCause::TimedOut,
    };
    let rows = [
        (not_running, Ending::Failed),
        (crossing, Ending::Cancelled),
        (late, Ending::TimedOut),
    ];
    for (message, ending) in rows {
        let mut hand = Hand::committed();
        hand.hears(message);
        assert_eq!(hand.undo(), [Step::GiveBack, Step::StopTracking, Step::Resume]);
        assert_eq!(hand.ending(), ending);
    }
}

#[test]
fn after_commit_running_completes_whatever_follows() {
    let mut hand = Hand::committed();
    hand.hears(Message::Running(Running {
        running: true,
        after_us: 7,
    }));
    assert_eq!(hand.steps(), [Step::StopTracking]);
    hand.on(SourceEvent::PeerGone {
        error: "closed".to_owned(),
    });
    hand.on(SourceEvent::TrackingStopped);
    let outcome = hand.end.as_ref().unwrap();
    assert_eq!((outcome.ending, &outcome.error), (Ending::Completed, &None));
    assert!(outcome.report.pages.adds_up() && outcome.report.downtime_ms > 0.0);
    assert_eq!(outcome.report.rounds.len(), 2);
    assert_eq!(outcome.report.rounds[0].dirty_pages_after, 3);
    assert!(hand.source.poll_timeout().is_none());
}

#[test]
fn messages_out_of_order_are_refused_by_name() {
    let rows: [(Message, &str); 6] = [
        (
            Message::Ready {
                verified: true,
                verify_us: 0,
            },
            "Ready",
        ),
        (Message::RoundReceived { round: 0 }, "RoundReceived"),
        (Message::Accept(Accept { populated: true }), "Accept"),
        (
            Message::Running(Running {
                running: true,
                after_us: 0,
            }),
            "Running",
        ),
        (Message::StateEnd { sections: 0 }, "StateEnd"),
        (Message::Refuse { reasons: Vec::new() }, "Refuse"),
    ];
    for (message, name) in rows {
        let mut hand = Hand::asking(config(), 64, false);
        hand.hears(message);
        assert_eq!(hand.undo(), [Step::EndHints, Step::StopTracking]);
        assert_eq!(hand.ending(), Ending::Failed);
        assert!(hand.error().contains(&format!("sent {name} ")), "{}", hand.error());
        assert!(matches!(
            hand.messages.last(),
            Some(Message::Abort {
                cause: AbortCause::Failed,
                ..
            })
        ));
    }
    let mut hand = Hand::asking(config(), 64, false);
    hand.says(Answer::Finished)
        .on(SourceEvent::HintsEnded(BalloonCounts::default()));
    hand.send_all();
    hand.hears(Message::RoundReceived { round: 3 });
    hand.undo();
    assert!(
        hand.error().contains("RoundReceived for round 3 in round 0"),
        "{}",
        hand.error()
    );
}

#[test]
fn a_receiver_that_did_not_compare_is_not_believed() {
    let mut hand = Hand::asking(
        SourceConfig {
            verify: true,
            ..config()
        },
        64,
        false,
    );
    hand.round_0_over();
    hand.all_received();
    assert_eq!(hand.steps(), [Step::Digest]);
    hand.on(SourceEvent::Digested(vec![1]));
    hand.hears(Message::Ready {
        verified: false,
        verify_us: 0,
    });
    assert!(hand.undo().contains(&Step::Resume));
    assert_eq!(hand.ending(), Ending::Failed);
}

/// What a receiver says of its wait is bounded by the time that passed, and counts where digests were asked for alone.
#[test]
fn a_receivers_wait_for_its_digest_is_believed_within_bounds() {
    for (verify, said, verify_us) in [(true, u64::MAX, 2000), (true, 400, 1400), (false, u64::MAX, 0)] {
        let config = SourceConfig { verify, ..config() };
        let mut hand = Hand::asking(config, 64, false);
        hand.round_0_over();
        hand.all_received();
        if verify {
            hand.on(SourceEvent::Digested(vec![1]));
        }
        hand.hears(Message::Ready {
            verified: verify,
            verify_us: said,
        });
        let Some(Message::Commit(commit)) = hand.messages.last().cloned() else {
            panic!("{:?}", hand.messages.last())
        };
        assert_eq!(commit.verify_us, verify_us, "{said}");
        let paused_ms = if verify { 7 } else { 6 };
        assert_eq!(commit.downtime_us + commit.verify_us, paused_ms * 1000);
    }
}

#[test]
fn unequal_digests_are_reported_as_such() {
    let mut hand = Hand::asking(
        SourceConfig {
            verify: true,
            ..config()
        },
        64,
        false,
    );
    hand.round_0_over();
    hand.all_received();
    hand.on(SourceEvent::Digested(vec![1]));
    assert_eq!(hand.steps(), [Step::Digest]);
    let reason = "verification failed: the digests of pages 0x0..0x40 differ".to_owned();
    hand.hears(Message::Abort {
        reason,
        cause: AbortCause::Failed,
    });
    hand.undo();
    assert_eq!(hand.end.as_ref().unwrap().report.verified, Some(false));
}

#[test]
fn a_quiet_source_says_that_it_is_alive_and_wants_to_hear_the_same() {
    let mut hand = Hand::new(config(), 64);
    let deadline = hand.source.poll_timeout().unwrap();
    assert!(deadline <= Duration::from_secs(1));
    for _ in 0..40 {
        hand.now = hand.source.poll_timeout().unwrap();
        hand.source.handle_timeout(hand.now);
        hand.poll();
        hand.hears(Message::Ping);
    }
    assert!(hand.end.is_none() && hand.messages.iter().filter(|m| **m == Message::Ping).count() > 20);
    while hand.end.is_none() {
        hand.now = hand.source.poll_timeout().unwrap();
        hand.source.handle_timeout(hand.now);
        hand.poll();
    }
    assert_eq!(hand.error(), "no sign of life from the receiver for 10 s");
    assert_eq!(hand.ending(), Ending::TimedOut);
    assert!(matches!(
        hand.messages.last(),
        Some(Message::Abort {
            cause: AbortCause::TimedOut,
            ..
        })
    ));
}

#[test]
fn a_receiver_that_pings_and_does_not_answer_keeps_no_guest_paused() {
    let waited = Duration::from_secs(60);
    // The last round's end: the guest is paused. A save that takes long is our own doing, and no time of the receiver's.
    let mut hand = Hand::asking(config(), 64, false);
    hand.round_0_over();
    hand.on(SourceEvent::Harvested(hand.set(&[r(3, 2)])));
    hand.on(SourceEvent::Paused);
    hand.on(SourceEvent::Harvested(hand.set(&[])));
    hand.send_all();
    assert_eq!(hand.steps(), [Step::Pause, Step::Harvest, Step::Save]);
    for _ in 0..100 {
        hand.now += Duration::from_secs(1);
        hand.source.handle_timeout(hand.now);
        hand.hears(Message::Ping);
    }
    assert!(hand.end.is_none() && hand.steps.is_empty());
    hand.on(SourceEvent::Saved(MachineState::default()));
    assert_eq!(hand.hears_pings_alone(), waited);
    assert_eq!(hand.undo(), [Step::GiveBack, Step::StopTracking, Step::Resume]);
    assert_eq!(hand.ending(), Ending::TimedOut);
    assert_eq!(
        hand.error(),
        "the receiver is alive but gave no answer to the end of a round for 60 s"
    );
    // The state. With digests the receiver may take longer.
    for (verify, waited) in [(false, waited), (true, waited + Duration::from_secs(1))] {
        let mut hand = Hand::asking(SourceConfig { verify, ..config() }, 64, false);
        hand.round_0_over();
        hand.all_received();
        if verify {
            assert_eq!(hand.steps(), [Step::Digest]);
            hand.on(SourceEvent::Digested(vec![1]));
        }
        assert_eq!(hand.hears_pings_alone(), waited);
        assert!(hand.undo().contains(&Step::Resume));
        assert_eq!(hand.ending(), Ending::TimedOut);
        assert!(
            hand.error().contains("no answer to the machine's state for"),
            "{}",
            hand.error()
        );
    }
    // Commit: nobody knows.
    let mut hand = Hand::committed();
    assert_eq!(hand.hears_pings_alone(), waited);
    assert_eq!(
        hand.undo(),
        [Step::GiveBack, Step::StopTracking],
        "the guest stays paused"
    );
    assert_eq!(hand.ending(), Ending::Unknown);
    assert!(
        hand.error().contains("is alive but gave no answer to Commit for 60 s"),
        "{}",
        hand.error()
    );
}

#[test]
fn each_answer_has_a_time_of_its_own() {
    let mut hand = Hand::asking(config(), 64, false);
    hand.round_0_over();
    hand.all_received();
    let answers = [
        Message::Ready {
            verified: false,
            verify_us: 0,
        },
        Message::Running(Running {
            running: true,
            after_us: 7,
        }),
    ];
    for answer in answers {
        for _ in 0..50 {
            hand.now += Duration::from_secs(1);
            hand.source.handle_timeout(hand.now);
            hand.hears(Message::Ping);
        }
        hand.hears(answer);
    }
    hand.on(SourceEvent::TrackingStopped);
    assert_eq!(hand.ending(), Ending::Completed);
}

#[test]
fn a_receiver_that_takes_no_data_is_dead_though_it_speaks() {
    let mut hand = Hand::asking(config(), 64, false);
    hand.says(Answer::Covered(r(0, 64))).hears(Message::Ping);
    hand.on(SourceEvent::Stalled { stream: 0 });
    assert_eq!(hand.undo(), [Step::EndHints, Step::StopTracking]);
    assert_eq!(
        (hand.ending(), hand.error()),
        (Ending::TimedOut, "the receiver took no data for 10 s")
    );
    let mut hand = Hand::asking(config(), 64, false);
    hand.round_0_over();
    hand.all_received();
    hand.on(SourceEvent::Stalled { stream: 0 });
    assert!(hand.end.is_none(), "all pages had arrived");
}

#[test]
fn a_tracker_that_cannot_peek_and_a_balloon_that_cannot_ask_cost_no_migration() {
    let mut hand = Hand::asking(config(), 64, true);
    hand.says(Answer::Free(vec![r(0, 8)]));
    assert_eq!(hand.steps(), [Step::Peek]);
    hand.on(SourceEvent::Failed {
        step: Step::Peek,
        error: "no".to_owned(),
    });
    hand.says(Answer::Free(vec![r(8, 8)]));
    assert!(hand.steps().is_empty() && hand.end.is_none());
    hand.on(SourceEvent::Peeked(Peeked {
        range: r(0, 8),
        written: Some(8),
    }));
    hand.undo();
    assert!(
        hand.error().contains("internal error"),
        "an answer to nothing: {}",
        hand.error()
    );
}

#[test]
fn chunks_go_to_idle_streams_two_at_a_time_by_ascending_address() {
    let mut hand = Hand::asking(SourceConfig { streams: 3, ..config() }, 100_000, false);
    hand.says(Answer::Finished);
    assert_eq!(hand.chunks.len(), 6);
    let pages = |chunk: &Chunk| match &chunk.content {
        Content::Pages(ranges) => ranges.clone(),
        content => panic!("{content:?}"),
    };
    let mut next = Pfn(0);
    for (_, chunk) in &hand.chunks {
        for range in pages(chunk) {
            assert_eq!(range.start(), next);
            assert!(range.count() <= 4096);
            next = range.end();
        }
    }
    let mut per_stream = [0; 3];
    hand.chunks
        .iter()
        .for_each(|(stream, _)| per_stream[usize::from(*stream)] += 1);
    assert_eq!(per_stream, [2, 2, 2]);
    // The stream that is done gets the next one.
    let (_, chunk) = hand.chunks.iter().find(|(stream, _)| *stream == 1).cloned().unwrap();
    hand.on(SourceEvent::Sent {
        stream: 1,
        chunk: chunk.id,
        zero: Vec::new(),
        wire_bytes: 1,
        payload_bytes: 1,
    });
    assert_eq!(hand.chunks.last().unwrap().0, 1);
}

#[test]
fn a_data_stream_that_ends_after_all_pages_have_arrived_is_no_failure() {
    let reset = || SourceEvent::Failed {
        step: Step::Send,
        error: "reset".to_owned(),
    };
    let mut hand = Hand::asking(config(), 64, false);
    hand.round_0_over();
    hand.all_received();
    hand.on(reset());
    hand.hears(Message::Ready {
        verified: false,
        verify_us: 0,
    })
    .on(reset());
    assert!(hand.end.is_none() && hand.steps().is_empty());
    hand.hears(Message::Running(Running {
        running: true,
        after_us: 7,
    }))
    .on(reset());
    hand.on(SourceEvent::TrackingStopped);
    assert_eq!(hand.ending(), Ending::Completed);
}

#[test]
fn the_state_leaves_behind_the_last_pages_where_the_receiver_takes_it_so() {
    let ends = |hand: &Hand| {
        let ends = |message: &&Message| matches!(message, Message::StateEnd { .. });
        hand.messages.iter().filter(ends).count()
    };
    let ready = || Message::Ready {
        verified: false,
        verify_us: 0,
    };
    let last_round = |saved_first: bool| {
        let mut hand = Hand::asking(config(), 64, false);
        hand.source.speaks(2);
        hand.round_0_over();
        hand.on(SourceEvent::Harvested(hand.set(&[])));
        hand.on(SourceEvent::Paused);
        assert_eq!(ends(&hand), 0, "no state before the guest's last pages");
        hand.on(SourceEvent::Harvested(hand.set(&[r(9, 1)])));
        let saved = || SourceEvent::Saved(MachineState::default());
        if saved_first {
            hand.on(saved());
            assert_eq!(ends(&hand), 0, "pages have to leave first");
        }
        hand.send_all();
        if !saved_first {
            assert_eq!(ends(&hand), 0, "it is not saved yet");
            hand.on(saved());
        }
        assert_eq!(ends(&hand), 1);
        assert_eq!(hand.steps(), [Step::Pause, Step::Harvest, Step::Save]);
        hand
    };
    for saved_first in [true, false] {
        let mut hand = last_round(saved_first);
        hand.hears(Message::RoundReceived { round: 1 }).hears(ready());
        assert_eq!(ends(&hand), 1);
        assert!(matches!(hand.messages.last(), Some(Message::Commit(_))));
    }
    // Pages that are not there yet can still be lost.
    let mut hand = last_round(true);
    hand.hears(ready());
    hand.undo();
    assert!(hand.error().contains("instead of RoundReceived"), "{}", hand.error());
    let mut hand = last_round(true);
    hand.on(SourceEvent::Failed {
        step: Step::Send,
        error: "reset".to_owned(),
    });
    assert_eq!(hand.undo(), [Step::GiveBack, Step::StopTracking, Step::Resume]);
}

/// Up to a pause with four chunks of RAM digested ahead of it, `written` meanwhile, page 2048 in the balloon until then.
fn digested_ahead(written: &[pages::PageRange], leaves_balloon: bool) -> Hand {
    let config = SourceConfig {
        verify: true,
        ..config()
    };
    let mut hand = Hand::new(config, 4096);
    hand.ballooned = Some(hand.set(&[r(2048, 1)]));
    let mut hand = hand.with_question(false);
    hand.round_0_over();
    hand.on(SourceEvent::Harvested(hand.set(&[r(3, 2)])));
    assert_eq!(hand.steps(), [Step::Digest, Step::Harvest], "while the guest runs");
    assert_eq!(hand.digests, [vec![0, 1, 2, 3]]);
    hand.on(SourceEvent::Digested(vec![1, 2, 3, 4]));
    hand.on(SourceEvent::Harvested(hand.set(written)));
    assert_eq!(hand.steps(), [Step::Pause, Step::Harvest]);
    hand.on(SourceEvent::Paused);
    if leaves_balloon {
        hand.ballooned = None;
    }
    hand.on(SourceEvent::Harvested(hand.set(written)));
    assert_eq!(hand.steps(), [Step::Save]);
    hand.send_all();
    hand.on(SourceEvent::Saved(MachineState::default()));
    hand.hears(Message::RoundReceived { round: 1 });
    hand
}

fn sums_sent(hand: &Hand) -> Vec<u128> {
    let sums = hand.messages.iter().find_map(|message| match message {
        Message::Digests(digests) => Some(digests.sums.clone()),
        _ => None,
    });
    sums.unwrap()
}

#[test]
fn a_guest_that_rests_is_not_digested_again_while_it_is_paused() {
    let hand = digested_ahead(&[], false);
    assert_eq!(hand.steps, []);
    assert_eq!(sums_sent(&hand), [1, 2, 3, 4]);
}

#[test]
fn a_page_that_was_written_during_the_digest_ahead_is_digested_again() {
    let mut hand = digested_ahead(&[r(1030, 1), r(4095, 1)], false);
    assert_eq!(hand.steps(), [Step::Digest]);
    assert_eq!(hand.digests.last(), Some(&vec![1, 3]));
    hand.on(SourceEvent::Digested(vec![20, 40]));
    assert_eq!(sums_sent(&hand), [1, 20, 3, 40]);
}

#[test]
fn a_page_that_left_the_balloon_unwritten_is_digested_after_all() {
    let mut hand = digested_ahead(&[], true);
    assert_eq!(hand.steps(), [Step::Digest]);
    assert_eq!(hand.digests.last(), Some(&vec![2]));
    hand.on(SourceEvent::Digested(vec![30]));
    assert_eq!(sums_sent(&hand), [1, 2, 30, 4]);
}
