//! The balloon over a whole migration: what leaves it after it was skipped, and what it counted.
#![allow(clippy::unwrap_used)]

mod hand;

use engine::{Ending, SourceConfig, SourceEvent, Step};
use hand::{Hand, config, r};
use machine::{BalloonCounts, MachineState};
use pages::PageSet;
use std::time::Duration;
use wire::{Message, Running};

/// A guest of 64 pages with 20 of them in its balloon, up to the first harvest.
fn ballooned() -> Hand {
    let mut hand = Hand::new(
        SourceConfig {
            downtime_limit: Duration::ZERO,
            ..config()
        },
        64,
    );
    hand.ballooned = Some(hand.set(&[r(10, 20)]));
    hand.counts = all(|_| 100);
    let mut hand = hand.with_question(false);
    let sent = hand.round_0_over();
    assert_eq!(sent.count(), 44, "the balloon was left out");
    hand
}

/// The harvest under way finds these pages written; what is sent in the round after it.
fn harvest(hand: &mut Hand, written: &[pages::PageRange]) -> PageSet {
    hand.on(SourceEvent::Harvested(hand.set(written)));
    hand.send_all()
}

/// From the last round's end to the end of all: the report.
fn to_the_end(mut hand: Hand, round: u32) -> engine::Report {
    hand.on(SourceEvent::Saved(MachineState::default()));
    hand.hears(Message::RoundReceived { round });
    hand.hears(Message::Ready {
        verified: false,
        verify_us: 0,
    });
    hand.hears(Message::Running(Running {
        running: true,
        after_us: 1,
    }));
    hand.on(SourceEvent::TrackingStopped);
    assert_eq!(hand.ending(), Ending::Completed);
    hand.end.unwrap().report
}

/// One count after another, numbered from 1.
fn all(number: impl Fn(u64) -> u64) -> BalloonCounts {
    BalloonCounts {
        answers: number(1),
        late: number(2),
        malformed: number(3),
        bad_headers: number(4),
        torn: number(5),
        stray_windows: number(6),
        stale_bitmaps: number(7),
        bad_pfns: number(8),
        ignored_kicks: number(9),
        broken_queues: number(10),
        discards: number(11),
        discarded_pages: number(12),
        discard_errors: number(13),
        reported_pages: number(14),
        ignored_config_writes: number(15),
    }
}

#[test]
fn quirk_11_what_left_the_balloon_is_sent_though_nobody_wrote_it_and_no_longer_counts_as_ballooned() {
    let mut hand = ballooned();
    // Found before the guest is paused: a round of its own, which may still be too long for the pause.
    hand.ballooned = Some(hand.set(&[r(10, 12)]));
    assert_eq!(harvest(&mut hand, &[r(3, 2)]), hand.set(&[r(3, 2), r(22, 8)]));
    hand.hears(Message::RoundReceived { round: 1 });
    assert_eq!(hand.steps(), [Step::Harvest], "the guest runs");
    // Nothing was written, so the guest is paused; meanwhile more of the balloon has gone, and pages have come that count
    // for nothing any more.
    hand.on(SourceEvent::Harvested(hand.set(&[])));
    assert_eq!(hand.steps(), [Step::Pause, Step::Harvest]);
    hand.on(SourceEvent::Paused);
    hand.ballooned = Some(hand.set(&[r(14, 8), r(40, 5)]));
    assert_eq!(harvest(&mut hand, &[r(50, 1)]), hand.set(&[r(10, 4), r(50, 1)]));
    let pages = to_the_end(hand, 2).pages;
    assert!(pages.adds_up(), "{pages:?}");
    assert_eq!((pages.ballooned, pages.sent, pages.resent), (8, 56, 3), "{pages:?}");
}

#[test]
fn a_balloon_that_can_no_longer_tell_holds_nothing() {
    let mut hand = ballooned();
    hand.on(SourceEvent::Harvested(hand.set(&[])));
    assert_eq!(hand.steps(), [Step::Pause, Step::Harvest]);
    hand.on(SourceEvent::Paused);
    // Its driver was unloaded.
    hand.ballooned = None;
    assert_eq!(harvest(&mut hand, &[]), hand.set(&[r(10, 20)]));
    let pages = to_the_end(hand, 1).pages;
    assert_eq!((pages.ballooned, pages.sent), (0, 64));
}

#[test]
fn the_report_has_every_count_of_the_balloon_and_of_this_migration_alone() {
    let mut hand = ballooned();
    hand.on(SourceEvent::Harvested(hand.set(&[])));
    hand.on(SourceEvent::Paused);
    // Also what was counted after the question's end, and where none was asked.
    hand.counts = all(|i| 100 + i);
    harvest(&mut hand, &[]);
    let b = to_the_end(hand, 1).balloon;
    assert_eq!([b.answers, b.late, b.malformed, b.bad_headers, b.torn], [1, 2, 3, 4, 5]);
    assert_eq!([b.stray_windows, b.stale_bitmaps, b.bad_pfns], [6, 7, 8]);
    assert_eq!([b.ignored_kicks, b.broken_queues], [9, 10]);
    assert_eq!([b.discards, b.discarded_pages, b.discard_errors], [11, 12, 13]);
    assert_eq!([b.reported_pages, b.ignored_config_writes], [14, 15]);
}
