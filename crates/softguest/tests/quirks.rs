//! Page bitmaps between the guest's driver and the device, in both dialects, and each of the driver's quirks played against
//! it: nothing that the guest uses is ever left behind, and the guest finds itself whole.
#![allow(clippy::unwrap_used)]

mod common;

use balloon::{Dialect, DiscardPolicy, feature};
use common::{Answers, config, migrate, start, wait_until};
use machine::{GuestRam, Machine};
use memory::trackers::UffdTracker;
use pages::{Layout, PAGE_BYTES, PageRange, PageSet, Pfn};
use softguest::{Error, GuestConfig, Quirks, SoftGuest, Workload};
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const IDLE: Workload = Workload::Churn { pages_per_s: 0 };
const DIALECTS: [Dialect; 2] = [Dialect::Bitmap, Dialect::BitmapRfc];

fn quirky(dialect: Dialect, pages: u64, quirks: Quirks) -> GuestConfig {
    GuestConfig {
        quirks,
        ..config(pages).with_balloon(dialect)
    }
}

/// Two windows: space that ends at 40 GiB.
fn two_windows(quirks: Quirks) -> GuestConfig {
    GuestConfig {
        used_bytes: 16 * MIB,
        ..quirky(Dialect::Bitmap, 40 << 18, quirks)
    }
}

fn resize(guest: &SoftGuest, pages: u64) {
    let device = guest.balloon().unwrap();
    device.lock().set_target(pages).unwrap();
    wait_until("the balloon has its size", || device.lock().actual() == pages);
}

fn malformed(guest: &SoftGuest) -> u64 {
    guest.balloon().unwrap().lock().counters().malformed
}

/// Asks and ends; the answer, if one came in time.
fn question(guest: &SoftGuest, session: u32) -> Option<PageSet> {
    let mut free_pages = guest.parts().free_pages;
    let answers = Arc::new(Answers::default());
    free_pages.begin(session, answers.sink()).unwrap();
    let end = std::time::Instant::now() + Duration::from_millis(300);
    while !answers.finished() && std::time::Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    free_pages.end(session).unwrap();
    answers.finished().then(|| answers.free(guest.ram().layout()))
}

/// Every page that the guest uses arrives, and it goes on.
fn moves_whole(guest: &SoftGuest) -> SoftGuest {
    let mut tracker = UffdTracker::new(guest.ram()).unwrap();
    let there = migrate(guest, &mut tracker);
    there.self_check().unwrap();
    there.machine().resume().unwrap();
    there.run_for(Duration::from_millis(20)).unwrap();
    there.self_check().unwrap();
    there
}

#[test]
fn without_quirks_bitmaps_say_exactly_what_is_in_the_balloon() {
    let layout = Layout::new(
        [(5, 7), (100, 9001), (20_000, 1), (30_000, 20_000)]
            .map(|(start, count)| PageRange::new(Pfn(start), count).unwrap())
            .to_vec(),
    );
    let layout = Arc::new(layout.unwrap());
    for dialect in DIALECTS {
        let guest = start(GuestConfig {
            scatter: 0.5,
            quirks: Quirks::none(),
            ..GuestConfig::new(Arc::clone(&layout)).with_balloon(dialect)
        });
        let device = guest.balloon().unwrap();
        assert_ne!(device.lock().driver_features() & feature::PAGE_BITMAP, 0);
        let before = guest.self_check().unwrap();
        for target in [5000, 27_000, 26_999, 26_998, 70, 3, 0] {
            resize(&guest, target);
            let ballooned = device.lock().ballooned().clone();
            assert_eq!(ballooned.count(), target, "{dialect}");
            assert_eq!(ballooned.intersection_count(&guest.used_pages().unwrap()), 0);
            assert_eq!(guest.self_check().unwrap().free_pages, before.free_pages - target);
        }
        assert_eq!((malformed(&guest), device.lock().counters().bad_pfns), (0, 0));
    }
}

#[test]
fn inflating_to_seven_eighths_and_back_by_both_dialects_and_policies() {
    for dialect in DIALECTS {
        for (discard, quirks) in [
            (DiscardPolicy::MarkOnly, Quirks::default()),
            (DiscardPolicy::AtOnce, Quirks::default()),
            (DiscardPolicy::AtOnce, Quirks::none()),
        ] {
            let posts = quirks == Quirks::default();
            let mut config = GuestConfig {
                used_bytes: 8 * MIB,
                aged_bytes: 100 * MIB,
                ..quirky(dialect, 65_536, quirks)
            };
            config.balloon.as_mut().unwrap().discard = discard;
            let guest = start(config);
            let device = guest.balloon().unwrap();
            let before = guest.self_check().unwrap();
            let resident = guest.ram().present().unwrap().count();
            let target = 65_536 / 8 * 7;
            resize(&guest, target);
            let said = device.lock().ballooned().count();
            // The last page is dropped where it is at a multiple of 64.
            assert!((target - u64::from(posts)..=target).contains(&said), "{dialect} {said}");
            let present = guest.ram().present().unwrap().count();
            if discard == DiscardPolicy::AtOnce {
                assert!(present < resident - 80 * MIB / PAGE_BYTES, "{present} of {resident}");
            } else {
                assert!(present >= resident, "{present} of {resident}");
            }
            assert_eq!(guest.self_check().unwrap().free_pages, before.free_pages - target);
            resize(&guest, 0);
            let left = device.lock().ballooned().clone();
            let silent = left.runs().all(|run| run.count() == 1 && run.start().0 % 64 == 0);
            assert!(silent && left.count() <= if posts { 8 } else { 0 }, "{}", left.count());
            assert_eq!(guest.self_check().unwrap().free_pages, before.free_pages);
            assert_eq!(malformed(&guest), 0, "{dialect}");
        }
    }
}

#[test]
fn a_ballooned_guest_moves_whole_and_its_balloon_works_on_in_both_dialects() {
    for dialect in DIALECTS {
        for quirks in [Quirks::default(), Quirks::none()] {
            let guest = start(GuestConfig {
                aged_bytes: 100 * MIB,
                workload: Workload::Compile,
                ..quirky(dialect, 65_536 + 3, quirks)
            });
            resize(&guest, 40_000);
            let there = moves_whole(&guest);
            let device = there.balloon().unwrap();
            assert!(device.lock().ballooned().count() > 39_000);
            for target in [100, 50_000, 0] {
                resize(&there, target);
                there.self_check().unwrap();
            }
            assert_eq!(malformed(&there), 0);
        }
    }
}

/// A target that comes and goes while pages are still being allocated for the last, and a pause in the middle.
#[test]
fn a_guest_that_is_moved_in_the_middle_of_inflating_goes_on_where_it_was() {
    for dialect in DIALECTS {
        let guest = start(quirky(dialect, 131_072, Quirks::default()));
        let device = guest.balloon().unwrap();
        for target in [110_000, 60_000, 110_000, 0, 110_000] {
            device.lock().set_target(target).unwrap();
            guest.run_for(Duration::from_millis(2)).unwrap();
        }
        let there = moves_whole(&guest);
        resize(&there, 110_000);
        assert!(there.balloon().unwrap().lock().ballooned().count() > 109_000);
        moves_whole(&there);
    }
}

/// Two completions of an answer in one interrupt: one is taken, and the next request sticks behind the other until the
/// session's end raises the interrupt again. What is answered then is late.
#[test]
fn quirk_01_a_request_that_sticks_behind_an_answer_is_freed_at_the_end_of_its_session() {
    let guest = start(two_windows(Quirks {
        interrupts_merge: true,
        ..Quirks::default()
    }));
    assert!(question(&guest, 1).is_some(), "the first request has nothing before it");
    let mut unanswered = 0;
    for session in 2..6 {
        unanswered += u32::from(question(&guest, session).is_none());
    }
    assert!(unanswered > 0, "no request stuck");
    let counters = guest.balloon().unwrap().lock().counters();
    assert_eq!(counters.malformed, 0);
    guest.self_check().unwrap();
    // A driver that takes all there is has none of it.
    let guest = start(two_windows(Quirks {
        interrupts_merge: true,
        takes_one_completion: false,
        ..Quirks::default()
    }));
    for session in 1..6 {
        wait_until("the request buffer is back", || {
            guest.parts().free_pages.can_ask().is_ok()
        });
        assert!(question(&guest, session).is_some(), "session {session}");
    }
}

/// All windows in one buffer before the device looks: each header is that of the last.
#[test]
fn quirk_04_a_torn_answer_is_dropped_whole() {
    let guest = start(two_windows(Quirks {
        tears_windows: true,
        ..Quirks::default()
    }));
    for session in 1..4 {
        let free = question(&guest, session).expect("the answer is over");
        assert_eq!(free.count(), 0);
        assert!(guest.parts().free_pages.counts().malformed > 0);
        guest.self_check().unwrap();
    }
}

#[test]
fn quirk_06_the_last_partial_byte_is_dropped_or_not() {
    const PAGES: u64 = 262_141;
    for (drops, unsaid) in [(true, 5), (false, 0)] {
        let guest = start(GuestConfig {
            // Of the last pages, which are the first to be allocated, none.
            used_bytes: 0,
            workload: IDLE,
            ..quirky(
                Dialect::Bitmap,
                PAGES,
                Quirks {
                    drops_partial_byte: drops,
                    ..Quirks::default()
                },
            )
        });
        let free = question(&guest, 1).unwrap();
        assert_eq!(free.count() + unsaid, guest.self_check().unwrap().free_pages);
        assert_eq!(free.contains(Pfn(PAGES - 1)), !drops);
        assert!(free.contains(Pfn(PAGES - 6)));
    }
}

#[test]
fn quirk_07_an_answer_without_an_end_is_not_used() {
    for config in [
        two_windows(Quirks::default()),
        quirky(Dialect::Bitmap, 16_384, Quirks::default()),
    ] {
        let guest = start(GuestConfig {
            quirks: Quirks {
                memory_grows: true,
                ..Quirks::default()
            },
            ..config
        });
        let mut free_pages = guest.parts().free_pages;
        for session in 1..4 {
            let answers = Arc::new(Answers::default());
            free_pages.begin(session, answers.sink()).unwrap();
            guest.run_for(Duration::from_millis(50)).unwrap();
            free_pages.end(session).unwrap();
            assert!(!answers.finished());
            assert!(
                guest.parts().free_pages.counts().answers > 0,
                "a window came, and said CONT"
            );
            assert_eq!(answers.free(guest.ram().layout()).count(), 0);
        }
        guest.self_check().unwrap();
    }
}

/// Pages leave the balloon one by one, so that every page at a multiple of 64 leaves it silently, and are used before
/// anything is tracked.
#[test]
fn quirk_08_what_was_deflated_silently_is_not_left_behind() {
    for dialect in DIALECTS {
        let guest = start(GuestConfig {
            workload: Workload::Compile,
            used_bytes: 16 * MIB,
            ..quirky(dialect, 16_384, Quirks::default())
        });
        let device = guest.balloon().unwrap();
        let from = fill(&guest);
        for target in (from - 300..from).rev() {
            resize(&guest, target);
        }
        let used = |guest: &SoftGuest| {
            let said = device.lock().ballooned().clone();
            said.intersection_count(&guest.used_pages().unwrap())
        };
        wait_until("a page that left silently is in use", || used(&guest) > 0);
        moves_whole(&guest);
    }
}

#[test]
fn quirk_09_no_bitmaps_inflate_a_guest_that_ends_past_32_gib() {
    let guest = start(two_windows(Quirks::default()));
    let device = guest.balloon().unwrap();
    assert_eq!(device.lock().device_features() & feature::PAGE_BITMAP, 0);
    resize(&guest, 3000);
    assert_eq!(device.lock().ballooned().count(), 3000);
    resize(&guest, 0);
    // The RFC's bitmaps name pages by their own numbers, whatever the window.
    let guest = start(GuestConfig {
        used_bytes: 16 * MIB,
        ..quirky(Dialect::BitmapRfc, 40 << 18, Quirks::none())
    });
    resize(&guest, 3000);
    assert_eq!(guest.balloon().unwrap().lock().ballooned().count(), 3000);
}

#[test]
fn quirk_10_naming_every_page_again_or_only_new_ones_comes_to_the_same() {
    for dialect in DIALECTS {
        let balloons = [true, false].map(|again| {
            let guest = start(GuestConfig {
                workload: IDLE,
                ..quirky(
                    dialect,
                    65_536,
                    Quirks {
                        reports_all_again: again,
                        drops_last_page: false,
                        ..Quirks::default()
                    },
                )
            });
            for target in [100, 20_000, 19_000, 50_000] {
                resize(&guest, target);
            }
            assert_eq!(malformed(&guest), 0);
            let device = guest.balloon().unwrap();
            device.lock().ballooned().clone()
        });
        assert!(balloons[0] == balloons[1] && balloons[0].count() == 50_000, "{dialect}");
    }
}

/// Fills the balloon to the last pages, so that any page which leaves it is soon in use.
fn fill(guest: &SoftGuest) -> u64 {
    let device = guest.balloon().unwrap();
    let full = guest.self_check().unwrap().free_pages - 100;
    device.lock().set_target(full).unwrap();
    wait_until("inflated", || device.lock().actual() >= full - 2000);
    let size = device.lock().actual();
    resize(guest, size);
    size
}

/// Pages of the balloon are moved by compaction: the driver sends its last bitmap again on both queues, and no bit says which
/// page left. It is used before anything is tracked.
#[test]
fn quirk_11_compaction_does_no_harm_to_what_the_guest_uses() {
    for dialect in DIALECTS {
        for last_was_deflate in [true, false] {
            let guest = start(GuestConfig {
                workload: Workload::Compile,
                used_bytes: 16 * MIB,
                ..quirky(dialect, 16_384, Quirks::default())
            });
            let size = fill(&guest);
            if last_was_deflate {
                resize(&guest, size - 300);
            }
            let device = guest.balloon().unwrap();
            let before = guest.parts().free_pages.ballooned().unwrap();
            assert!(before.count() > 1000);
            wait_until("a page that compaction moved out is in use", || {
                guest.compact_balloon().unwrap();
                before.intersection_count(&guest.used_pages().unwrap()) > 0
            });
            let believed = guest.parts().free_pages.ballooned().unwrap();
            assert_eq!(believed.intersection_count(&guest.used_pages().unwrap()), 0);
            assert!(device.lock().counters().stale_bitmaps > 0);
            assert_eq!(malformed(&guest), 0);
            guest.self_check().unwrap();
            let there = moves_whole(&guest);
            resize(&there, size - 500);
            there.compact_balloon().unwrap();
            resize(&there, 0);
            there.self_check().unwrap();
        }
    }
}

/// One fill with pages in the first word and in the last, partial one: the driver looks at a second window, finds nothing there,
/// and has forgotten what it sent when compaction sends it again.
#[test]
fn quirk_11_compaction_behind_an_empty_window_empties_the_balloon() {
    // Of three pages less than a multiple of 64, the low ones in a region too small for the kernel.
    let regions = [(0, 64), (128, 16_381 - 128)].map(|(start, count)| PageRange::new(Pfn(start), count).unwrap());
    let layout = Arc::new(Layout::new(regions.to_vec()).unwrap());
    for dialect in DIALECTS {
        for clears in [true, false] {
            let guest = start(GuestConfig {
                workload: IDLE,
                used_bytes: 0,
                quirks: Quirks {
                    clears_for_empty_windows: clears,
                    ..Quirks::default()
                },
                ..GuestConfig::new(Arc::clone(&layout)).with_balloon(dialect)
            });
            let device = guest.balloon().unwrap();
            resize(&guest, guest.self_check().unwrap().free_pages - 10);
            let said = device.lock().ballooned().clone();
            let ends = [(0, 64), (16_320, 61)].map(|(start, count)| PageRange::new(Pfn(start), count).unwrap());
            assert!(
                ends.iter().all(|end| said.count_range(*end) > 0),
                "{dialect}: no such fill"
            );
            guest.compact_balloon().unwrap();
            let counters = device.lock().counters();
            let (refused, stale) = if clears { (2, 0) } else { (0, 1) };
            assert_eq!(
                (counters.bad_headers, counters.stale_bitmaps),
                (refused, stale),
                "{dialect}"
            );
            assert_eq!(
                device.lock().ballooned().count(),
                0,
                "one page left, and nobody said which"
            );
            let there = moves_whole(&guest);
            there.compact_balloon().unwrap();
            resize(&there, 100);
            there.self_check().unwrap();
        }
    }
}

#[test]
fn the_flag_of_the_last_answer_in_an_inflate_bitmap_is_stale_and_harmless() {
    for stale in [true, false] {
        let guest = start(quirky(
            Dialect::Bitmap,
            16_384,
            Quirks {
                leaves_flag_stale: stale,
                drops_last_page: false,
                ..Quirks::default()
            },
        ));
        assert!(question(&guest, 1).is_some());
        // The first inflation after an answer may be the answer's bits, as compaction sends them: the next buffer tells.
        resize(&guest, 2500);
        assert_eq!(guest.balloon().unwrap().lock().ballooned().count(), 0);
        resize(&guest, 5000);
        assert!(question(&guest, 2).is_some());
        resize(&guest, 1000);
        let ballooned = guest.balloon().unwrap().lock().ballooned().count();
        assert_eq!((ballooned, malformed(&guest)), (1000, 0));
    }
}

/// Arrays of page numbers from a driver that acknowledged bitmaps. An array of 256 pages is as long as no header allows.
#[test]
fn quirk_12_arrays_in_place_of_bitmaps_do_no_harm() {
    for dialect in DIALECTS {
        let guest = start(GuestConfig {
            aged_bytes: 30 * MIB,
            ..quirky(
                dialect,
                16_384,
                Quirks {
                    has_no_bitmap: true,
                    ..Quirks::default()
                },
            )
        });
        let device = guest.balloon().unwrap();
        assert_ne!(device.lock().driver_features() & feature::PAGE_BITMAP, 0);
        for target in [3000, 1000, 6000, 5999] {
            resize(&guest, target);
            let used = guest.used_pages().unwrap();
            assert_eq!(device.lock().ballooned().intersection_count(&used), 0);
        }
        assert!(device.lock().counters().bad_headers > 0, "arrays came");
        // It never posts a request buffer: the question is refused, or waits until its time is up.
        if device.lock().can_ask().is_ok() {
            assert!(question(&guest, 1).is_none());
        }
        moves_whole(&guest);
    }
}

#[test]
fn quirk_13_a_big_endian_guest_is_not_believed() {
    let quirks = || Quirks {
        big_endian: true,
        ..Quirks::default()
    };
    let guest = start(quirky(Dialect::Bitmap, 16_384, quirks()));
    for session in 1..4 {
        let free = question(&guest, session).map_or(0, |free| free.count());
        assert_eq!(free, 0);
        assert!(guest.parts().free_pages.counts().malformed > 0);
    }
    let guest = start(quirky(Dialect::BitmapRfc, 16_384, quirks()));
    resize(&guest, 5000);
    let device = guest.balloon().unwrap();
    assert_eq!(device.lock().ballooned().count(), 0);
    assert!(malformed(&guest) > 0);
    moves_whole(&guest);
}

#[test]
fn quirk_14_a_request_buffer_queued_before_or_after_driver_ok_is_found() {
    for early in [true, false] {
        let guest = start(quirky(
            Dialect::Bitmap,
            16_384,
            Quirks {
                queues_before_driver_ok: early,
                ..Quirks::default()
            },
        ));
        wait_until("it can be asked", || guest.parts().free_pages.can_ask().is_ok());
        assert!(question(&guest, 1).is_some());
    }
}

#[test]
fn quirk_15_a_driver_that_vanishes_in_the_middle_of_an_answer_leaves_nothing_and_may_come_again() {
    for windows in [0, 1, 2] {
        let guest = start(two_windows(Quirks {
            vanishes_after_windows: Some(windows),
            ..Quirks::default()
        }));
        resize(&guest, 2000);
        let before = guest.self_check().unwrap().free_pages;
        for session in 1..3 {
            let free = question(&guest, session).expect("the session is over");
            // All windows, DONE among them, are a whole answer whatever became of the driver.
            assert_eq!(free.count() > 0, windows == 2, "{windows} windows: {}", free.count());
            wait_until("the driver is gone", || guest.parts().free_pages.can_ask().is_err());
            let device = guest.balloon().unwrap();
            assert_eq!(device.lock().ballooned().count(), 0);
            wait_until("its pages are free", || {
                guest.self_check().unwrap().free_pages == before + 2000
            });
            guest.load_driver().unwrap();
            wait_until("inflated again", || device.lock().actual() == 2000);
            assert_eq!(device.lock().ballooned().count(), 2000);
        }
        guest.unload_driver().unwrap();
        guest.self_check().unwrap();
    }
}

/// A guest that names pages which it uses, in its answers and in its inflate bitmaps: those it may lose, and no other.
#[test]
fn a_lying_guest_loses_at_most_what_it_lied_about() {
    let honest = start(GuestConfig {
        workload: IDLE,
        ..config(32_768)
    });
    let used: Vec<PageRange> = honest.used_pages().unwrap().runs().collect();
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut below = |limit: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % limit
    };
    let mut lie = || {
        let run = used[usize::try_from(below(used.len() as u64)).unwrap()];
        let first = Pfn(run.start().0 + below(run.count()));
        let count = (1 + below(400)).min(32_768 - first.0);
        // Two pages at least: one at a multiple of 64 alone is never believed to be in a balloon of bitmaps.
        PageRange::between(first, Pfn(first.0 + count.max(2).min(32_768 - first.0)))
    };
    // A question alone, a question with a balloon, a balloon alone.
    for (dialect, size) in [
        (Dialect::Bitmap, 0),
        (Dialect::Bitmap, 20_000),
        (Dialect::BitmapRfc, 20_000),
    ] {
        for lie in [lie(), lie(), lie()] {
            let guest = start(GuestConfig {
                workload: IDLE,
                ..quirky(
                    dialect,
                    32_768,
                    Quirks {
                        lies_about: Some(lie),
                        ..Quirks::default()
                    },
                )
            });
            resize(&guest, size);
            let mut tracker = UffdTracker::new(guest.ram()).unwrap();
            let there = migrate(&guest, &mut tracker);
            let (mut lost, mut here_is, mut there_is) = (0, [0; 4096], [0; 4096]);
            for run in guest.used_pages().unwrap().runs() {
                for pfn in (run.start().0..run.end().0).map(Pfn) {
                    guest.ram().read_page(pfn, &mut here_is).unwrap();
                    there.ram().read_page(pfn, &mut there_is).unwrap();
                    if here_is != there_is {
                        assert!(lie.contains(pfn), "page {pfn} was lost, and was no lie");
                        lost += 1;
                    }
                }
            }
            assert!(
                lost > 0,
                "{dialect} {size}: the lie {lie} was not believed, so nothing was tried"
            );
            let broken = there.self_check();
            assert!(
                matches!(broken, Err(Error::Page { pfn, .. }) if lie.contains(pfn)),
                "{broken:?}"
            );
        }
    }
}
