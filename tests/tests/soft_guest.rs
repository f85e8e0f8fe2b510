//! The built-in guest, moved whole: both dialects, fresh and aged, busy and idle, odd sizes; it proves itself after.
#![allow(clippy::unwrap_used)]

mod common;

use balloon::{Dialect, feature};
use common::{MIB, Moved, block_on, flat, guest_of, migrate, start, verified};
use engine::{Ask, SkipSet};
use machine::GuestRam;
use pageferry::SendOptions;
use pages::{Layout, PageRange, Pfn};
use softguest::{GuestConfig, Quirks, Workload};
use std::sync::Arc;

fn moved(config: GuestConfig, options: SendOptions) -> Moved {
    let soft = start(config);
    let moved = block_on(migrate(guest_of(&soft), options));
    let check = moved.assert_whole();
    assert!(check.pages_checked > 0);
    assert_eq!(moved.source.outcome.report.verified, Some(true));
    moved
}

fn aged(dialect: Dialect) -> GuestConfig {
    GuestConfig {
        used_bytes: 24 * MIB,
        aged_bytes: 256 * MIB,
        ..GuestConfig::new(flat(512 * MIB)).with_balloon(dialect)
    }
}

#[test]
fn an_aged_guest_leaves_its_free_pages_behind_in_both_dialects() {
    for dialect in [Dialect::Standard, Dialect::Bitmap] {
        let moved = moved(aged(dialect), verified());
        let report = &moved.source.outcome.report;
        assert!(report.balloon.asked, "{dialect:?}: {}", report.balloon.why);
        assert_eq!(report.balloon.malformed, 0, "{dialect:?}");
        assert!(
            report.pages.hinted > (400 * MIB) / 4096,
            "{dialect:?}: {:?}",
            report.pages
        );
        assert!(
            report.payload_bytes < 64 * MIB,
            "{dialect:?}: {} bytes crossed",
            report.payload_bytes
        );
    }
}

#[test]
fn without_skipping_every_page_crosses() {
    let mut options = verified();
    options.source.skip = SkipSet::NONE;
    let moved = moved(aged(Dialect::Standard), options);
    let report = &moved.source.outcome.report;
    assert_eq!(report.pages.sent, report.pages.total);
    assert!(!report.balloon.asked);
}

#[test]
fn a_fresh_guest_is_mostly_holes_and_is_not_asked() {
    let config = GuestConfig {
        used_bytes: 24 * MIB,
        ..GuestConfig::new(flat(1024 * MIB))
    };
    let moved = moved(config, verified());
    let report = &moved.source.outcome.report;
    assert!(!report.balloon.asked, "{}", report.balloon.why);
    assert!(report.pages.hole > (900 * MIB) / 4096, "{:?}", report.pages);
}

/// A question to a guest that writes what it hands over costs more than it saves; the report says what was seen.
#[test]
fn a_guest_that_zeroes_what_it_hands_over_is_left_alone_after_a_few_blocks() {
    let moved = moved(
        GuestConfig {
            init_on_alloc: true,
            ..aged(Dialect::Standard)
        },
        verified(),
    );
    let report = &moved.source.outcome.report;
    assert!(report.balloon.asked);
    assert!(report.balloon.why.contains("init_on_alloc"), "{}", report.balloon.why);
    // The driver of the bitmap dialect allocates nothing, so there is nothing to zero.
    let moved = self::moved(
        GuestConfig {
            init_on_alloc: true,
            ..aged(Dialect::Bitmap)
        },
        verified(),
    );
    let report = &moved.source.outcome.report;
    assert!(
        report.pages.hinted > (400 * MIB) / 4096,
        "{:?}: {}",
        report.pages,
        report.balloon.why
    );
}

/// Two windows of 32 GiB. The set of answers counts only once both are here.
#[test]
fn a_bitmap_guest_of_40_gib_answers_in_two_windows() {
    let config = GuestConfig {
        used_bytes: 24 * MIB,
        ..GuestConfig::new(flat(40 << 30)).with_balloon(Dialect::Bitmap)
    };
    let mut options = verified();
    options.source.ask = Ask::Always;
    let moved = moved(config, options);
    let report = &moved.source.outcome.report;
    assert_eq!(report.balloon.answers, 2, "{}", report.balloon.why);
    assert!(report.pages.hinted > (39 << 30) / 4096, "{:?}", report.pages);
}

#[test]
fn case_17_odd_sizes_and_several_regions() {
    let layouts = [
        Layout::flat(65_536 + 3).unwrap(),
        Layout::new(
            [(5, 7), (100, 20_001), (40_000, 1), (1 << 24, 8191)]
                .map(|(start, count)| PageRange::new(Pfn(start), count).unwrap())
                .to_vec(),
        )
        .unwrap(),
    ];
    for layout in layouts {
        for dialect in [Dialect::Standard, Dialect::Bitmap] {
            let config = GuestConfig {
                used_bytes: 8 * MIB,
                scatter: 1.0,
                aged_bytes: 40 * MIB,
                ..GuestConfig::new(Arc::new(layout.clone())).with_balloon(dialect)
            };
            let mut options = verified();
            options.source.ask = Ask::Always;
            options.source.streams = 2;
            moved(config, options);
        }
    }
}

/// Case 26: pages that are taken between the guest's look and its answer, over and over, by a guest that allocates,
/// writes and frees all the time.
#[test]
fn case_26_a_busy_guest_loses_nothing_whatever_it_reuses() {
    for (dialect, streams) in [(Dialect::Standard, 1), (Dialect::Bitmap, 4), (Dialect::Standard, 2)] {
        let config = GuestConfig {
            workload: Workload::Compile,
            vcpus: 2,
            scatter: 0.5,
            ..aged(dialect)
        };
        let mut options = verified();
        options.source.streams = streams;
        options.source.ask = Ask::Always;
        moved(config, options);
    }
}

#[test]
fn case_34_skipped_pages_read_as_poison() {
    let config = GuestConfig {
        poison: Some(0xaa),
        ..aged(Dialect::Standard)
    };
    let mut options = verified();
    options.source.ask = Ask::Always;
    let moved = moved(config, options);
    let pages = moved.source.outcome.report.pages;
    assert!(pages.filled > (400 * MIB) / 4096 && pages.hinted == 0, "{pages:?}");
    // Somewhere in the second half of RAM lie free pages alone.
    let ram = Arc::clone(moved.arrived.as_ref().unwrap().ram());
    let mut page = [0u8; 4096];
    let poisoned = (65_536..131_072u64)
        .filter(|pfn| {
            ram.read_page(Pfn(*pfn), &mut page).unwrap();
            page == [0xaa; 4096]
        })
        .count();
    assert!(poisoned > 60_000, "{poisoned} pages of 65536 read as poison");
}

#[test]
fn case_36_hinting_and_reporting_at_once() {
    let mut config = aged(Dialect::Standard);
    let balloon = config.balloon.as_mut().unwrap();
    balloon.features |= feature::REPORTING;
    let mut options = verified();
    options.source.ask = Ask::Always;
    let moved = moved(config, options);
    assert_eq!(moved.source.outcome.report.balloon.malformed, 0);
}

/// The guest is sent on from where it arrived: state, driver and tracking survive more than one journey.
#[test]
fn a_guest_travels_on_from_where_it_arrived() {
    let soft = start(GuestConfig {
        workload: Workload::Compile,
        ..aged(Dialect::Standard)
    });
    let first = block_on(migrate(guest_of(&soft), verified()));
    first.assert_whole();
    drop(soft);
    let middle = first.arrived.unwrap();
    let second = block_on(migrate(guest_of(&middle), verified()));
    second.assert_whole();
}

/// The guest has put what it does not use into its balloon: it is skipped as that, with no question asked, in every dialect.
/// Pages at multiples of 64 are not believed to be in a balloon that is told of by bitmaps.
#[test]
fn a_ballooned_guest_leaves_its_balloon_behind_in_every_dialect() {
    for dialect in [Dialect::Standard, Dialect::Bitmap, Dialect::BitmapRfc] {
        let soft = start(aged(dialect));
        let device = soft.balloon().unwrap();
        device.lock().set_target(100_000).unwrap();
        while device.lock().actual() != 100_000 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let mut options = verified();
        options.source.ask = Ask::Never;
        let moved = block_on(migrate(guest_of(&soft), options));
        moved.assert_whole();
        let report = &moved.source.outcome.report;
        assert_eq!(report.verified, Some(true));
        let told = if dialect == Dialect::Standard {
            100_000
        } else {
            100_000 / 64 * 63 - 64
        };
        assert!(report.pages.ballooned >= told, "{dialect}: {:?}", report.pages);
        assert!(!report.balloon.asked, "{dialect}: {}", report.balloon.why);
        let there = moved.arrived.unwrap();
        let device = there.balloon().unwrap();
        device.lock().set_target(0).unwrap();
        while device.lock().actual() != 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        there.self_check().unwrap();
    }
}

/// Both ways of finding free pages at once: what is in the balloon, and what the guest answers.
#[test]
fn a_ballooned_bitmap_guest_is_asked_too_with_each_quirk() {
    let quirks = |change: fn(&mut Quirks)| {
        let mut quirks = Quirks::default();
        change(&mut quirks);
        quirks
    };
    for quirks in [
        Quirks::default(),
        Quirks::none(),
        quirks(|q| q.interrupts_merge = true),
        quirks(|q| q.memory_grows = true),
        quirks(|q| q.has_no_bitmap = true),
        quirks(|q| q.vanishes_after_windows = Some(0)),
        quirks(|q| q.vanishes_after_windows = Some(1)),
    ] {
        let soft = start(GuestConfig {
            workload: Workload::Compile,
            quirks: quirks.clone(),
            ..aged(Dialect::Bitmap)
        });
        let device = soft.balloon().unwrap();
        device.lock().set_target(50_000).unwrap();
        while device.lock().actual() != 50_000 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let moved = block_on(migrate(guest_of(&soft), verified()));
        moved.assert_whole();
        assert_eq!(moved.source.outcome.report.verified, Some(true), "{quirks:?}");
    }
}
