//! The guest's balloon driver against the device, over real queues in guest RAM.
#![allow(clippy::unwrap_used)]

mod common;

use balloon::{Dialect, feature};
use common::{Answers, ask, config, is_zero, start, wait_until};
use pages::{Layout, PAGE_BYTES, PageRange, Pfn};
use softguest::{GuestConfig, Workload};
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;

fn of_dialect(dialect: Dialect, pages: u64) -> GuestConfig {
    config(pages).with_balloon(dialect)
}

fn with_features(features: u64, pages: u64) -> GuestConfig {
    GuestConfig {
        balloon: Some(balloon::Config::new(Dialect::Standard, features)),
        ..config(pages)
    }
}

#[test]
fn the_balloon_follows_the_target_up_and_down_in_both_dialects() {
    for dialect in [Dialect::Standard, Dialect::Bitmap] {
        let guest = start(GuestConfig {
            aged_bytes: 32 * MIB,
            ..of_dialect(dialect, 16384)
        });
        let device = guest.balloon().unwrap();
        let before = guest.self_check().unwrap();
        for target in [5000, 10_000, 3, 0] {
            device.lock().set_target(target).unwrap();
            wait_until("the balloon has its size", || device.lock().actual() == target);
            assert_eq!(device.lock().ballooned().count(), target, "{dialect}");
            let now = guest.self_check().unwrap();
            assert_eq!(now.free_pages, before.free_pages - target);
        }
        assert_eq!(device.lock().counters().malformed, 0);
    }
}

#[test]
fn a_balloon_larger_than_what_is_free_takes_what_there_is_and_lets_go_again() {
    let guest = start(config(8192));
    let device = guest.balloon().unwrap();
    let free = guest.self_check().unwrap().free_pages;
    device.lock().set_target(8192).unwrap();
    wait_until("all that is free is in the balloon", || device.lock().actual() == free);
    assert_eq!(guest.self_check().unwrap().free_pages, 0);
    device.lock().set_target(0).unwrap();
    wait_until("the balloon is empty", || device.lock().actual() == 0);
    assert_eq!(guest.self_check().unwrap().free_pages, free);
}

#[test]
fn statistics_are_the_guests_own_numbers_and_fresh_when_asked_for() {
    for dialect in [Dialect::Standard, Dialect::Bitmap] {
        let guest = start(of_dialect(dialect, 8192));
        let device = guest.balloon().unwrap();
        let free = guest.self_check().unwrap().free_pages;
        wait_until("first numbers", || device.lock().stats().is_some());
        let stats = device.lock().stats().unwrap();
        assert_eq!(stats.free_memory, Some(free * PAGE_BYTES));
        assert!(stats.total_memory.unwrap() <= 8192 * PAGE_BYTES);
        assert!(stats.total_memory.unwrap() > stats.free_memory.unwrap());
        device.lock().set_target(1000).unwrap();
        wait_until("inflated", || device.lock().actual() == 1000);
        wait_until("fresh numbers", || {
            device.lock().request_stats();
            device.lock().stats().unwrap().free_memory == Some((free - 1000) * PAGE_BYTES)
        });
    }
}

/// Whatever a guest calls free can be overwritten without it noticing.
#[test]
fn what_is_called_free_is_free_in_both_dialects() {
    for dialect in [Dialect::Standard, Dialect::Bitmap] {
        let layout = Arc::new(
            Layout::new(vec![
                PageRange::new(Pfn(0), 16384 + 3).unwrap(),
                PageRange::new(Pfn(20_000), 10_001).unwrap(),
            ])
            .unwrap(),
        );
        let guest = start(GuestConfig {
            used_bytes: 20 * MIB,
            // A few single pages: more of them, and no block of the largest order is free.
            scatter: 0.002,
            aged_bytes: 16 * MIB,
            ..GuestConfig::new(Arc::clone(&layout)).with_balloon(dialect)
        });
        let mut parts = guest.parts();
        let before = guest.self_check().unwrap();
        let free = ask(&mut *parts.free_pages, 1, &layout);
        for run in free.runs() {
            for pfn in run.start().0..run.end().0 {
                parts.ram.write(pfn * PAGE_BYTES, &[0xdb; 4096]).unwrap();
            }
        }
        let after = guest.self_check().unwrap();
        assert_eq!(after.pages_checked, 20 * MIB / PAGE_BYTES);
        if dialect == Dialect::Bitmap {
            // The last page's bit lies in a partial byte and is dropped.
            let said = free.count();
            assert!(
                (before.free_pages - 7..=before.free_pages).contains(&said),
                "{said} of {before:?}"
            );
            assert_eq!(after.free_pages, before.free_pages);
        } else {
            assert!(free.count() >= 1024, "no block at all was free: {}", free.count());
            assert_eq!(free.count() % 1024, 0);
            assert_eq!(after.free_pages, before.free_pages - free.count());
        }
        let last = Pfn(layout.end().0 - 1);
        assert!(dialect == Dialect::Standard || !free.contains(last));
        parts.free_pages.end(1).unwrap();
        wait_until("the blocks are back", || {
            guest.self_check().unwrap().free_pages == before.free_pages
        });
        let counts = parts.free_pages.counts();
        assert_eq!((counts.late, counts.malformed), (0, 0));
    }
}

#[test]
fn every_session_is_answered_and_the_request_buffer_comes_back() {
    for dialect in [Dialect::Standard, Dialect::Bitmap] {
        let guest = start(of_dialect(dialect, 16384));
        let mut parts = guest.parts();
        let layout = Arc::clone(guest.ram().layout());
        let before = guest.self_check().unwrap().free_pages;
        let first = ask(&mut *parts.free_pages, 1, &layout).count();
        parts.free_pages.end(1).unwrap();
        for session in 2..20 {
            // As in Linux: a guest that never saw DONE, for the next id came too soon, still holds the blocks.
            wait_until("it has seen DONE", || guest.self_check().unwrap().free_pages == before);
            wait_until("it can be asked", || parts.free_pages.can_ask().is_ok());
            let free = ask(&mut *parts.free_pages, session, &layout);
            parts.free_pages.end(session).unwrap();
            assert!(free.count() == first, "session {session}: {}", free.count());
        }
    }
}

#[test]
fn a_new_session_in_the_middle_of_one_ends_it_and_done_frees_the_blocks_of_both() {
    let guest = start(GuestConfig {
        init_on_alloc: true,
        ..config(128 << 10)
    });
    let before = guest.self_check().unwrap().free_pages;
    let mut parts = guest.parts();
    let layout = Arc::clone(guest.ram().layout());
    let dropped = Arc::new(common::Answers::default());
    parts.free_pages.begin(1, dropped.sink()).unwrap();
    wait_until("the guest is in the middle", || dropped.free(&layout).count() > 0);
    parts.free_pages.end(1).unwrap();
    ask(&mut *parts.free_pages, 2, &layout);
    parts.free_pages.end(2).unwrap();
    wait_until("all blocks are back", || {
        guest.self_check().unwrap().free_pages == before
    });
}

/// With init_on_alloc a guest writes what it hands over, and nothing else that is free.
#[test]
fn init_on_alloc_zeroes_exactly_what_is_handed_over() {
    for init_on_alloc in [false, true] {
        let guest = start(GuestConfig {
            init_on_alloc,
            aged_bytes: 40 * MIB,
            ..config(16384)
        });
        let mut parts = guest.parts();
        let layout = Arc::clone(guest.ram().layout());
        let free = ask(&mut *parts.free_pages, 1, &layout);
        assert!(free.count() >= 8 * 1024);
        let dirty = free.runs().filter(|run| !is_zero(&parts.ram, *run)).count();
        assert_eq!(dirty == 0, init_on_alloc);
        // What was aged and not handed over, for it is in smaller blocks, still has its old content.
        guest.self_check().unwrap();
        parts.free_pages.end(1).unwrap();
    }
}

#[test]
fn case_34_a_guest_that_poisons_says_so_and_finds_its_poison() {
    let guest = start(GuestConfig {
        poison: Some(0xaa),
        ..config(8192)
    });
    let mut parts = guest.parts();
    let layout = Arc::clone(guest.ram().layout());
    assert_eq!(parts.free_pages.poison(), Some(0xaaaa_aaaa));
    let free = ask(&mut *parts.free_pages, 1, &layout);
    parts.free_pages.end(1).unwrap();
    let pfn = free.runs().next().unwrap().start();
    wait_until("the blocks are back", || guest.self_check().unwrap().free_pages > 1024);
    let mut page = [0; 4096];
    parts.ram.read(pfn.0 * PAGE_BYTES, &mut page).unwrap();
    assert_eq!(page, [0xaa; 4096]);
    parts.machine.pause().unwrap();
    parts.ram.write(pfn.0 * PAGE_BYTES + 77, &[0]).unwrap();
    let broken = guest.self_check().unwrap_err().to_string();
    assert!(broken.contains("byte 77"), "{broken}");
}

/// Every page that is freed is poisoned, and the allocator finds the poison when it hands the page out again.
#[test]
fn case_34_a_busy_guest_poisons_what_it_frees() {
    let guest = start(GuestConfig {
        poison: Some(0xaa),
        workload: Workload::Compile,
        ..config(8192)
    });
    let device = guest.balloon().unwrap();
    device.lock().set_target(700).unwrap();
    wait_until("inflated", || device.lock().actual() == 700);
    device.lock().set_target(0).unwrap();
    wait_until("deflated", || device.lock().actual() == 0);
    wait_until("it has worked", || guest.self_check().unwrap().ticks > 200);
}

#[test]
fn without_poison_the_driver_does_not_take_the_feature() {
    let guest = start(config(8192));
    let device = guest.balloon().unwrap();
    assert_eq!(device.lock().driver_features() & feature::PAGE_POISON, 0);
    assert_eq!(device.lock().poison(), None);
}

#[test]
fn reported_blocks_are_given_back_to_the_host_and_stay_free() {
    let guest = start(GuestConfig {
        aged_bytes: 40 * MIB,
        report_interval: Duration::from_millis(5),
        ..with_features(feature::REPORTING | feature::STATS_VQ, 16384)
    });
    let device = guest.balloon().unwrap();
    let (before, resident) = (guest.self_check().unwrap().free_pages, present(&guest));
    assert!(resident > 40 * MIB / PAGE_BYTES);
    wait_until("aged memory is given back", || present(&guest) < resident - 8192);
    wait_until("nothing is on its way", || {
        guest.self_check().unwrap().free_pages == before
    });
    let discards = device.lock().counters().discards;
    guest.run_for(Duration::from_millis(50)).unwrap();
    assert_eq!(device.lock().counters().discards, discards, "blocks are reported once");
}

fn present(guest: &softguest::SoftGuest) -> u64 {
    machine::GuestRam::present(&**guest.ram()).unwrap().count()
}

#[test]
fn hinting_reporting_and_a_busy_guest_at_once() {
    let guest = start(GuestConfig {
        workload: Workload::Compile,
        vcpus: 3,
        used_bytes: 16 * MIB,
        report_interval: Duration::from_millis(1),
        ..with_features(
            feature::REPORTING | feature::STATS_VQ | feature::FREE_PAGE_HINT | feature::DEFLATE_ON_OOM,
            16384,
        )
    });
    let mut parts = guest.parts();
    let device = guest.balloon().unwrap();
    let layout = Arc::clone(guest.ram().layout());
    for session in 1..10 {
        device.lock().set_target(u64::from(session) * 37).unwrap();
        ask(&mut *parts.free_pages, session, &layout);
        guest.self_check().unwrap();
        parts.free_pages.end(session).unwrap();
    }
    parts.machine.pause().unwrap();
    guest.self_check().unwrap();
}

/// Under pressure the kernel takes hinted blocks back before DONE, as the specification lets it.
#[test]
fn a_guest_short_of_memory_takes_hinted_blocks_back_early() {
    let guest = start(GuestConfig {
        workload: Workload::Compile,
        used_bytes: 22 * MIB,
        ..config(8192)
    });
    let mut parts = guest.parts();
    let layout = Arc::clone(guest.ram().layout());
    ask(&mut *parts.free_pages, 1, &layout);
    guest.run_for(Duration::from_millis(300)).unwrap();
    guest.self_check().unwrap();
    parts.free_pages.end(1).unwrap();
    guest.self_check().unwrap();
}

/// Space that ends at 40 GiB is answered in two windows, through one buffer.
#[test]
fn forty_gib_are_answered_in_two_windows() {
    let layout = Arc::new(Layout::flat(40 << 18).unwrap());
    let guest = start(GuestConfig {
        used_bytes: 16 * MIB,
        ..GuestConfig::new(Arc::clone(&layout)).with_balloon(Dialect::Bitmap)
    });
    let mut parts = guest.parts();
    for session in 1..4 {
        let free = ask(&mut *parts.free_pages, session, &layout);
        assert_eq!(free.count(), guest.self_check().unwrap().free_pages);
        assert!(free.contains(Pfn((40 << 18) - 1)) && free.contains(Pfn(33 << 18)));
        parts.free_pages.end(session).unwrap();
        let counts = parts.free_pages.counts();
        assert_eq!((counts.answers, counts.malformed), (2 * u64::from(session), 0));
    }
}

/// Space that ends above 4 TiB has more windows than the misc queue has entries: the answer never ends, and no later
/// question is answered. The guest lives on.
#[test]
fn an_answer_of_more_windows_than_the_queue_holds_does_not_harm_the_guest() {
    let range = |start, pages| PageRange::new(Pfn(start), pages).unwrap();
    let layout = Arc::new(Layout::new(vec![range(0, 16_384), range(1 << 30, 8192)]).unwrap());
    let guest = start(GuestConfig {
        workload: Workload::Churn { pages_per_s: 20_000 },
        ..GuestConfig::new(layout).with_balloon(Dialect::Bitmap)
    });
    let mut parts = guest.parts();
    let answers = Arc::new(Answers::default());
    parts.free_pages.begin(1, answers.sink()).unwrap();
    wait_until("all windows that fit are answered", || {
        parts.free_pages.counts().answers == 128
    });
    guest.run_for(Duration::from_millis(50)).unwrap();
    guest.self_check().unwrap();
    assert!(!answers.finished());
    parts.free_pages.end(1).unwrap();
    // The request was never posted again.
    let answers = Arc::new(Answers::default());
    parts.free_pages.begin(2, answers.sink()).unwrap();
    guest.run_for(Duration::from_millis(50)).unwrap();
    assert_eq!(parts.free_pages.counts().answers, 128);
    parts.free_pages.end(2).unwrap();
    guest.self_check().unwrap();
}

#[test]
fn a_guest_without_a_balloon_is_not_asked() {
    let guest = start(GuestConfig {
        balloon: None,
        ..config(4096)
    });
    let parts = guest.parts();
    assert_eq!(parts.free_pages.dialect(), "off");
    assert!(parts.free_pages.can_ask().is_err());
    assert!(guest.load_driver().is_err());
}
