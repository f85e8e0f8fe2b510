//! What a guest's balloon driver does wrong while the guest is moved stands in the report, and the guest arrives whole.
#![allow(clippy::unwrap_used)]

mod common;

use balloon::{Dialect, DiscardPolicy};
use common::{MIB, Moved, block_on, guest_with, migrate, start, verified};
use engine::Ask;
use machine::DirtyTracker;
use memory::trackers::UffdTracker;
use pages::{Layout, PageRange, PageSet, Pfn};
use softguest::{GuestConfig, Quirks, SoftGuest, Workload};
use std::sync::Arc;
use std::time::{Duration, Instant};

type During = Box<dyn FnOnce(&SoftGuest) + Send>;

/// A tracker that lets something happen to the guest once: in the middle of the migration, before the first harvest, when
/// the question is over and the guest still runs.
struct Meddling {
    inner: UffdTracker,
    guest: Arc<SoftGuest>,
    during: Option<During>,
}

impl DirtyTracker for Meddling {
    fn start(&mut self) -> machine::Result<()> {
        self.inner.start()
    }

    fn harvest(&mut self) -> machine::Result<PageSet> {
        if let Some(during) = self.during.take() {
            during(&self.guest);
        }
        self.inner.harvest()
    }

    fn give_back(&mut self, pages: &PageSet) -> machine::Result<()> {
        self.inner.give_back(pages)
    }

    fn peek(&mut self, range: PageRange) -> machine::Result<Option<u64>> {
        self.inner.peek(range)
    }

    fn stop(&mut self) -> machine::Result<()> {
        self.inner.stop()
    }
}

fn quirky(dialect: Dialect, quirks: Quirks) -> GuestConfig {
    GuestConfig {
        used_bytes: 16 * MIB,
        workload: Workload::Churn { pages_per_s: 0 },
        quirks,
        ..GuestConfig::new(common::flat(128 * MIB)).with_balloon(dialect)
    }
}

/// Moves the guest, with something happening to it on the way; the guest has to be whole.
fn moved(guest: SoftGuest, ask: Ask, during: impl FnOnce(&SoftGuest) + Send + 'static) -> Moved {
    let guest = Arc::new(guest);
    let mut options = verified();
    options.source.ask = ask;
    options.source.hint_timeout = Duration::from_millis(400);
    let tracker = Meddling {
        inner: UffdTracker::new(guest.ram()).unwrap(),
        guest: Arc::clone(&guest),
        during: Some(Box::new(during)),
    };
    let moved = block_on(migrate(guest_with(&guest, Box::new(tracker)), options));
    moved.assert_whole();
    assert_eq!(moved.source.outcome.report.verified, Some(true));
    moved
}

/// What the report says under `balloon.KEY`.
fn key(moved: &Moved, key: &str) -> u64 {
    let report = serde_json::to_value(&moved.source.outcome.report).unwrap();
    let value = &report["balloon"][key];
    value.as_u64().unwrap_or_else(|| panic!("balloon.{key} is {value}"))
}

fn timed_out(moved: &Moved) -> bool {
    moved.source.outcome.report.balloon.timed_out
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn counted(guest: &SoftGuest, of: impl Fn(balloon::Counters) -> u64) -> u64 {
    of(guest.balloon().unwrap().lock().counters())
}

fn resize(guest: &SoftGuest, pages: u64) {
    let device = guest.balloon().unwrap();
    device.lock().set_target(pages).unwrap();
    wait_until("the balloon has its size", || device.lock().actual() == pages);
}

#[test]
fn a_guest_that_does_all_right_has_nothing_counted_against_it() {
    for dialect in [Dialect::Standard, Dialect::Bitmap] {
        let guest = start(quirky(dialect, Quirks::none()));
        // What was counted before this migration is not its own.
        guest.balloon().unwrap().lock().notify(9);
        let moved = moved(guest, Ask::Always, move |guest| {
            // A guest that handed its free pages over has them back only when it is paused, and has none to inflate with.
            if dialect == Dialect::Bitmap {
                resize(guest, 1000);
            }
        });
        assert!(key(&moved, "answers") > 0);
        for wrong in [
            "late",
            "malformed",
            "bad_headers",
            "torn",
            "stray_windows",
            "bad_pfns",
            "ignored_kicks",
            "broken_queues",
            "discard_errors",
            "reported_pages",
            "ignored_config_writes",
        ] {
            assert_eq!(key(&moved, wrong), 0, "{dialect}: {wrong}");
        }
        assert!(!timed_out(&moved));
    }
}

#[test]
fn quirk_04_overlapping_windows_are_in_the_report() {
    let quirks = Quirks {
        tears_windows: true,
        ..Quirks::default()
    };
    let moved = moved(
        start(GuestConfig {
            quirks: quirks.clone(),
            used_bytes: 16 * MIB,
            workload: Workload::Churn { pages_per_s: 0 },
            ..GuestConfig::new(Arc::new(Layout::flat(40 << 18).unwrap())).with_balloon(Dialect::Bitmap)
        }),
        Ask::Always,
        |_| {},
    );
    assert_eq!((key(&moved, "answers"), key(&moved, "stray_windows")), (0, 1));
    assert!(key(&moved, "malformed") >= 1);
}

#[test]
fn quirk_05_an_answer_to_another_request_is_in_the_report() {
    let moved = moved(
        start(quirky(Dialect::Bitmap, Quirks::default())),
        Ask::Always,
        |guest| {
            // Another asks and does not wait: the guest answers a request that is over.
            let mut session = 100;
            wait_until("an answer came late", || {
                let mut free_pages = guest.parts().free_pages;
                if free_pages.can_ask().is_ok() && free_pages.begin(session, Arc::new(|_, _| {})).is_ok() {
                    free_pages.end(session).unwrap();
                    session += 1;
                }
                counted(guest, |c| c.late) > 0
            });
        },
    );
    assert!(key(&moved, "late") >= 1);
}

#[test]
fn quirk_07_a_guest_that_never_ends_its_answer_is_in_the_report() {
    let quirks = Quirks {
        memory_grows: true,
        ..Quirks::default()
    };
    let moved = moved(start(quirky(Dialect::Bitmap, quirks)), Ask::Always, |_| {});
    assert!(timed_out(&moved));
    assert_eq!(moved.source.outcome.report.pages.hinted, 0);
}

/// The balloon is in no set that the migration could believe once compaction has moved one of its pages: all of it is sent.
#[test]
fn quirk_11_a_page_that_leaves_the_balloon_without_a_word_is_in_the_report_and_the_balloon_is_sent() {
    for dialect in [Dialect::Bitmap, Dialect::BitmapRfc] {
        let guest = start(quirky(dialect, Quirks::default()));
        resize(&guest, 8000);
        let skipped = guest.parts().free_pages.ballooned().unwrap().count();
        assert!(skipped > 7500, "{skipped}");
        let moved = moved(guest, Ask::Never, |guest| {
            guest.compact_balloon().unwrap();
            assert_eq!(guest.parts().free_pages.ballooned().unwrap().count(), 0);
        });
        assert!(key(&moved, "stale_bitmaps") >= 1);
        assert_eq!(moved.source.outcome.report.pages.ballooned, 0, "{dialect}");
    }
}

#[test]
fn quirk_12_arrays_in_place_of_bitmaps_are_in_the_report() {
    let quirks = Quirks {
        has_no_bitmap: true,
        ..Quirks::default()
    };
    for dialect in [Dialect::Bitmap, Dialect::BitmapRfc] {
        let moved = moved(start(quirky(dialect, quirks.clone())), Ask::Never, |guest| {
            resize(guest, 5000);
        });
        assert!(key(&moved, "bad_headers") >= 5000 / 256);
        assert!(key(&moved, "malformed") >= key(&moved, "bad_headers"));
    }
}

#[test]
fn quirk_13_a_big_endian_guest_is_in_the_report() {
    let quirks = Quirks {
        big_endian: true,
        ..Quirks::default()
    };
    let moved = moved(start(quirky(Dialect::Bitmap, quirks)), Ask::Always, |_| {});
    assert!(key(&moved, "bad_headers") >= 1);
    assert_eq!(moved.source.outcome.report.pages.hinted, 0);
}

#[test]
fn bits_in_a_hole_of_the_layout_are_in_the_report() {
    let range = |start, count| PageRange::new(Pfn(start), count).unwrap();
    let layout = Layout::new(vec![range(0, 16_384), range(20_000, 16_384)]).unwrap();
    let quirks = Quirks {
        lies_about: Some(range(17_000, 100)),
        ..Quirks::default()
    };
    let guest = start(GuestConfig {
        quirks: quirks.clone(),
        used_bytes: 16 * MIB,
        workload: Workload::Churn { pages_per_s: 0 },
        ..GuestConfig::new(Arc::new(layout)).with_balloon(Dialect::Bitmap)
    });
    let moved = moved(guest, Ask::Always, |guest| resize(guest, 20_000));
    assert!(key(&moved, "bad_pfns") >= 100, "{}", key(&moved, "bad_pfns"));
}

#[test]
fn what_is_given_back_at_inflation_is_in_the_report() {
    let mut config = quirky(Dialect::Bitmap, Quirks::none());
    config.balloon.as_mut().unwrap().discard = DiscardPolicy::AtOnce;
    let moved = moved(start(config), Ask::Never, |guest| resize(guest, 4000));
    assert!(key(&moved, "discards") >= 1);
    assert_eq!(key(&moved, "discarded_pages"), 4000);
}
