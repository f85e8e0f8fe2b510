//! Pausing, saving and restoring a guest; and that it notices what a migration may break.
#![allow(clippy::unwrap_used)]

mod common;

use balloon::Dialect;
use common::{ask, config, copy, migrate, start, wait_until};
use machine::{DirtyTracker, FreePages, GuestRam, Machine, MachineState};
use memory::trackers::UffdTracker;
use memory::{Backing, GuestMemory};
use pages::{Layout, PAGE_BYTES, PageRange, PageSet, Pfn};
use softguest::{Error, GuestConfig, SoftGuest, Workload};
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const IDLE: Workload = Workload::Churn { pages_per_s: 0 };

/// Lets the guest run until its clock has ticked so often more.
fn work(guest: &SoftGuest, ticks: u64) {
    let end = guest.self_check().unwrap().ticks + ticks;
    wait_until("the guest works", || guest.self_check().unwrap().ticks >= end);
}

#[test]
fn guests_of_any_size_boot_run_and_are_sound() {
    let layouts = [
        Layout::flat(4096).unwrap(),
        Layout::flat((256 << 10) + 3).unwrap(),
        Layout::pc((3 << 18) + 1001).unwrap(),
        Layout::new(
            [(5, 7), (100, 9001), (20_000, 1), (1 << 30, 3)]
                .map(|(start, count)| PageRange::new(Pfn(start), count).unwrap())
                .to_vec(),
        )
        .unwrap(),
    ];
    for layout in layouts {
        let guest = start(GuestConfig {
            used_bytes: 8 * MIB,
            scatter: 1.0,
            workload: Workload::Compile,
            vcpus: 2,
            ..GuestConfig::new(Arc::new(layout))
        });
        wait_until("the clock ticks", || guest.self_check().unwrap().ticks > 20);
    }
}

#[test]
fn a_guest_that_is_to_use_more_than_there_is_says_so() {
    let refused = SoftGuest::start(
        GuestConfig {
            used_bytes: 16 * MIB,
            ..config(4096)
        },
        &Backing::Anonymous,
    );
    assert!(matches!(refused, Err(Error::OutOfMemory { .. })));
}

#[test]
fn a_flipped_byte_anywhere_is_noticed() {
    let guest = start(GuestConfig {
        workload: IDLE,
        ..config(4096)
    });
    let first = guest.used_page().unwrap();
    for pfn in (first.0..first.0 + 60).map(Pfn) {
        guest.self_check().unwrap();
        guest.flip_byte(pfn).unwrap();
        let broken = guest.self_check();
        assert!(
            matches!(broken, Err(Error::Page { pfn: at, .. }) if at == pfn),
            "{pfn}: {broken:?}"
        );
        guest.flip_byte(pfn).unwrap();
    }
    assert!(guest.flip_byte(Pfn(u64::MAX)).is_err());
}

/// Any page that the guest has written, set back to what it was a moment ago, is noticed: its own, its table's, its
/// allocator's.
#[test]
fn a_stale_page_is_noticed_whatever_it_holds() {
    let guest = start(GuestConfig {
        workload: Workload::Compile,
        ..config(8192)
    });
    let mut parts = guest.parts();
    let layout = Arc::clone(parts.ram.layout());
    parts.machine.pause().unwrap();
    let old = GuestMemory::new(Arc::clone(&layout), &Backing::Anonymous).unwrap();
    copy(&parts.ram, &old, &parts.ram.present().unwrap());
    let mut tracker = UffdTracker::new(&parts.ram).unwrap();
    tracker.start().unwrap();
    parts.machine.resume().unwrap();
    work(&guest, 100);
    parts.machine.pause().unwrap();
    guest.self_check().unwrap();
    let dirty = tracker.harvest().unwrap();
    tracker.stop().unwrap();
    let (mut noticed, mut unnoticed) = (0, Vec::new());
    let (mut was, mut is) = ([0; 4096], [0; 4096]);
    for pfn in dirty.runs().flat_map(|run| (run.start().0..run.end().0).map(Pfn)) {
        old.read_page(pfn, &mut was).unwrap();
        parts.ram.read_page(pfn, &mut is).unwrap();
        if was == is {
            continue;
        }
        parts.ram.write(pfn.0 * PAGE_BYTES, &was).unwrap();
        match guest.self_check() {
            Ok(_) => unnoticed.push(pfn),
            Err(_) => noticed += 1,
        }
        parts.ram.write(pfn.0 * PAGE_BYTES, &is).unwrap();
    }
    guest.self_check().unwrap();
    // Pages that were freed meanwhile hold what nobody cares for, and buffers of the driver are read by the device alone.
    let mut in_use = 0;
    for pfn in &unnoticed {
        guest.flip_byte(*pfn).unwrap();
        in_use += u64::from(guest.self_check().is_err());
        guest.flip_byte(*pfn).unwrap();
    }
    assert_eq!(in_use, 0, "pages in use went unnoticed, of {unnoticed:?}");
    assert!(noticed > 100, "only {noticed} stale pages were noticed");
}

/// All of RAM as it was a moment ago: every page agrees with every other, and only what travels outside RAM does not.
#[test]
fn ram_of_an_older_moment_is_noticed_though_it_agrees_with_itself() {
    let guest = start(GuestConfig {
        workload: Workload::Churn { pages_per_s: 10_000 },
        ..config(8192)
    });
    let mut parts = guest.parts();
    let layout = Arc::clone(parts.ram.layout());
    // The statistics of the start are out of the way: what follows writes pages and nothing else.
    wait_until("first numbers", || parts.free_pages.stats().is_some());
    let copies: Vec<GuestMemory> = (0..2)
        .map(|_| {
            work(&guest, 30);
            parts.machine.pause().unwrap();
            let old = GuestMemory::new(Arc::clone(&layout), &Backing::Anonymous).unwrap();
            copy(&parts.ram, &old, &parts.ram.present().unwrap());
            parts.machine.resume().unwrap();
            old
        })
        .collect();
    parts.machine.pause().unwrap();
    let now = GuestMemory::new(Arc::clone(&layout), &Backing::Anonymous).unwrap();
    copy(&parts.ram, &now, &parts.ram.present().unwrap());
    copy(&copies[0], &parts.ram, &copies[0].present().unwrap());
    let broken = guest.self_check().unwrap_err().to_string();
    assert!(broken.contains("older moment"), "{broken}");
    copy(&now, &parts.ram, &now.present().unwrap());
    guest.self_check().unwrap();
}

/// An interrupt that no vCPU has taken when the guest pauses is taken at the destination: the `bitmap` driver's request
/// would stick there otherwise, for good.
#[test]
fn a_request_that_the_guest_has_not_seen_at_the_pause_is_answered_at_the_destination() {
    let guest = start(GuestConfig {
        ..config(8192).with_balloon(Dialect::Bitmap)
    });
    let mut parts = guest.parts();
    let layout = Arc::clone(parts.ram.layout());
    let target = Arc::new(GuestMemory::new(Arc::clone(&layout), &Backing::Anonymous).unwrap());
    let there = SoftGuest::new_for_restore(&parts.machine.config(), Arc::clone(&target)).unwrap();
    parts.machine.pause().unwrap();
    parts.free_pages.begin(1, Arc::new(|_, _| {})).unwrap();
    let state = parts.machine.save().unwrap();
    copy(&parts.ram, &target, &parts.ram.present().unwrap());
    there.machine().restore(&state).unwrap();
    there.machine().resume().unwrap();
    let mut free_pages = there.balloon().unwrap();
    wait_until("it can be asked again", || free_pages.can_ask().is_ok());
    assert!(ask(&mut free_pages, 2, &layout).count() > 1024);
    free_pages.end(2).unwrap();
}

#[test]
fn case_15_a_thousand_pauses_do_not_hang() {
    let guest = start(GuestConfig {
        workload: Workload::Churn { pages_per_s: 50_000 },
        vcpus: 4,
        ..config(8192)
    });
    let mut machine = guest.machine();
    let mut free_pages = guest.balloon().unwrap();
    let layout = Arc::clone(guest.ram().layout());
    for cycle in 0..1000u32 {
        if cycle % 100 == 50 {
            ask(&mut free_pages, cycle, &layout);
            free_pages.end(cycle).unwrap();
        }
        machine.pause().unwrap();
        assert!(!machine.is_running());
        machine.pause().unwrap();
        machine.resume().unwrap();
        machine.resume().unwrap();
        assert!(machine.is_running());
    }
    work(&guest, 10);
}

#[test]
fn case_16_a_driver_that_comes_in_the_middle_of_a_migration_is_served() {
    for dialect in [Dialect::Standard, Dialect::Bitmap] {
        let guest = start(GuestConfig {
            driver: false,
            workload: IDLE,
            ..config(8192).with_balloon(dialect)
        });
        let mut parts = guest.parts();
        let layout = Arc::clone(parts.ram.layout());
        let target = Arc::new(GuestMemory::new(Arc::clone(&layout), &Backing::Anonymous).unwrap());
        let there = SoftGuest::new_for_restore(&parts.machine.config(), Arc::clone(&target)).unwrap();
        let mut tracker = UffdTracker::new(&parts.ram).unwrap();
        tracker.start().unwrap();
        copy(&parts.ram, &target, &parts.ram.present().unwrap());
        assert!(parts.free_pages.can_ask().is_err());
        guest.load_driver().unwrap();
        parts.free_pages.can_ask().unwrap();
        ask(&mut *parts.free_pages, 1, &layout);
        parts.free_pages.end(1).unwrap();
        parts.machine.pause().unwrap();
        copy(&parts.ram, &target, &tracker.harvest().unwrap());
        there.machine().restore(&parts.machine.save().unwrap()).unwrap();
        there.machine().resume().unwrap();
        there.self_check().unwrap();
        let mut free_pages = there.balloon().unwrap();
        wait_until("it can be asked again", || free_pages.can_ask().is_ok());
        ask(&mut free_pages, 2, &layout);
        free_pages.end(2).unwrap();
        assert!(guest.load_driver().is_err(), "a paused guest loads nothing");
    }
}

#[test]
fn case_21_what_the_device_alone_writes_is_in_the_dirty_log() {
    let guest = start(GuestConfig {
        workload: IDLE,
        ..config(8192)
    });
    let device = guest.balloon().unwrap();
    let ram = Arc::clone(guest.ram());
    wait_until("first numbers", || device.lock().stats().is_some());
    let mut machine = guest.machine();
    machine.pause().unwrap();
    let mut tracker = UffdTracker::new(&ram).unwrap();
    tracker.start().unwrap();
    assert!(tracker.harvest().unwrap().is_empty());
    let before = image(&ram);
    // The guest does not run: the used ring is the device's writing.
    assert!(device.lock().request_stats());
    let dirty = tracker.harvest().unwrap();
    let mut changed = PageSet::empty(ram.layout());
    for (pfn, (was, is)) in before.iter().zip(image(&ram)).enumerate() {
        if *was != is {
            changed.insert(Pfn(pfn as u64));
        }
    }
    assert_eq!(changed.count(), 1);
    assert!(changed.is_subset(&dirty));
    tracker.stop().unwrap();
}

fn image(ram: &GuestMemory) -> Vec<[u8; 4096]> {
    let mut page = [0; 4096];
    (0..ram.layout().total_pages())
        .map(|pfn| {
            ram.read_page(Pfn(pfn), &mut page).unwrap();
            page
        })
        .collect()
}

#[test]
fn case_29_when_pausing_returns_nobody_writes_any_more() {
    let guest = start(GuestConfig {
        workload: Workload::Compile,
        vcpus: 2,
        used_bytes: 4 * MIB,
        init_on_alloc: true,
        ..config(8192)
    });
    let mut parts = guest.parts();
    let device = guest.balloon().unwrap();
    let mut tracker = UffdTracker::new(&parts.ram).unwrap();
    for cycle in 1..40u32 {
        // Rings under way in every queue at the moment of the pause.
        parts.free_pages.begin(cycle, Arc::new(|_, _| {})).unwrap();
        device.lock().set_target(u64::from(cycle % 2) * 2000).unwrap();
        device.lock().request_stats();
        std::thread::sleep(Duration::from_micros(u64::from(cycle) * 50));
        parts.machine.pause().unwrap();
        tracker.start().unwrap();
        let state = parts.machine.save().unwrap();
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(tracker.harvest().unwrap().count(), 0, "cycle {cycle}");
        assert_eq!(state.sections.len(), 2);
        tracker.stop().unwrap();
        guest.self_check().unwrap();
        parts.machine.resume().unwrap();
        parts.free_pages.end(cycle).unwrap();
    }
}

/// The whole way, with every workload and both dialects; the memory that the balloon called free does not travel.
#[test]
fn a_guest_arrives_whole_and_goes_on() {
    let runs = [
        (Dialect::Standard, Workload::Idle, false),
        (Dialect::Standard, Workload::Compile, true),
        (Dialect::Bitmap, Workload::Churn { pages_per_s: 20_000 }, false),
        (Dialect::Bitmap, Workload::Compile, true),
    ];
    for (dialect, workload, init_on_alloc) in runs {
        let guest = start(GuestConfig {
            workload,
            init_on_alloc,
            vcpus: 2,
            scatter: 0.3,
            used_bytes: 12 * MIB,
            aged_bytes: 24 * MIB,
            ..config(16384 + 3).with_balloon(dialect)
        });
        let mut tracker = UffdTracker::new(guest.ram()).unwrap();
        let there = migrate(&guest, &mut tracker);
        let left = guest.self_check().unwrap();
        let came = there.self_check().unwrap();
        assert_eq!(left, came, "{dialect} {workload}");
        assert!(!there.machine().is_running());
        let flipped = there.used_page().unwrap();
        there.flip_byte(flipped).unwrap();
        assert!(there.self_check().is_err());
        there.flip_byte(flipped).unwrap();
        there.machine().resume().unwrap();
        wait_until("it goes on", || there.self_check().unwrap().ticks > came.ticks + 10);
        // Held blocks come back: DONE was published before the state was saved.
        let device = there.balloon().unwrap();
        device.lock().set_target(100).unwrap();
        wait_until("its driver goes on", || device.lock().actual() == 100);
        there.self_check().unwrap();
    }
}

#[test]
fn case_46_ballooned_memory_is_given_back_and_reads_as_zero() {
    let guest = start(GuestConfig {
        aged_bytes: 40 * MIB,
        workload: IDLE,
        ..config(16384)
    });
    let device = guest.balloon().unwrap();
    let resident = guest.ram().present().unwrap().count();
    device.lock().set_target(10_000).unwrap();
    wait_until("inflated", || device.lock().actual() == 10_000);
    let after = guest.ram().present().unwrap();
    assert!(
        after.count() < resident - 9000,
        "{} of {resident} pages are still there",
        after.count()
    );
    let ballooned = device.lock().ballooned().clone();
    assert_eq!(after.intersection_count(&ballooned), 0);
    assert!(ballooned.runs().all(|run| common::is_zero(guest.ram(), run)));
}

#[test]
fn case_47_statistics_are_fresh_before_and_after() {
    let guest = start(GuestConfig {
        workload: IDLE,
        ..config(8192)
    });
    let fresh = |guest: &SoftGuest, target: u64| {
        let device = guest.balloon().unwrap();
        device.lock().set_target(target).unwrap();
        wait_until("inflated", || device.lock().actual() == target);
        let free = guest.self_check().unwrap().free_pages;
        wait_until("fresh numbers", || {
            let mut free_pages = guest.balloon().unwrap();
            free_pages.stats().is_some_and(|stats| stats.free_pages == free)
        });
    };
    fresh(&guest, 500);
    let mut tracker = UffdTracker::new(guest.ram()).unwrap();
    let there = migrate(&guest, &mut tracker);
    there.machine().resume().unwrap();
    assert_eq!(there.balloon().unwrap().lock().ballooned().count(), 500);
    fresh(&there, 900);
    fresh(&there, 0);
}

#[test]
fn hint_blocks_that_are_held_at_switchover_are_freed_at_the_destination() {
    let guest = start(config(16384));
    let before = guest.self_check().unwrap().free_pages;
    let mut parts = guest.parts();
    let layout = Arc::clone(parts.ram.layout());
    ask(&mut *parts.free_pages, 1, &layout);
    parts.machine.pause().unwrap();
    // Nobody has ended the session: saving does.
    let state = parts.machine.save().unwrap();
    assert!(guest.self_check().unwrap().free_pages < 1024);
    let target = Arc::new(GuestMemory::new(Arc::clone(&layout), &Backing::Anonymous).unwrap());
    let there = SoftGuest::new_for_restore(&parts.machine.config(), Arc::clone(&target)).unwrap();
    copy(&parts.ram, &target, &parts.ram.present().unwrap());
    there.machine().restore(&state).unwrap();
    for guest in [&guest, &there] {
        guest.machine().resume().unwrap();
        wait_until("the blocks are back", || {
            guest.self_check().unwrap().free_pages == before
        });
    }
}

#[test]
fn state_that_was_tampered_with_is_refused_or_caught_and_never_panics() {
    let guest = start(config(4096));
    let mut parts = guest.parts();
    parts.machine.pause().unwrap();
    let good = parts.machine.save().unwrap();
    let layout = Arc::clone(parts.ram.layout());
    let target = Arc::new(GuestMemory::new(Arc::clone(&layout), &Backing::Anonymous).unwrap());
    copy(&parts.ram, &target, &parts.ram.present().unwrap());
    let there = SoftGuest::new_for_restore(&parts.machine.config(), target).unwrap();
    let mut machine = there.machine();
    assert!(machine.resume().is_err(), "there is no guest yet");
    assert!(matches!(there.self_check(), Err(Error::NotRestored)));
    let mut swapped = good.clone();
    swapped.sections.swap(0, 1);
    let mut newer = good.clone();
    newer.sections[0].version = 2;
    let mut huge = good.clone();
    huge.sections[0].data.resize(2 << 20, b' ');
    for bad in [MachineState::default(), swapped, newer, huge] {
        assert!(machine.restore(&bad).is_err());
        assert!(machine.resume().is_err(), "a refused guest does not run");
    }
    let text = String::from_utf8(good.sections[0].data.clone()).unwrap();
    for (from, to) in [
        ("\"used_pages\":", "\"used_pages\":9"),
        ("\"balloon_pages\":0", "\"balloon_pages\":18446744073709551615"),
        ("\"held_blocks\":0", "\"held_blocks\":18446744073709551615"),
        ("\"avail\":", "\"avail\":9"),
        ("\"index\":0", "\"index\":9"),
        ("\"features\":", "\"features\":9"),
        ("\"fingerprint\":", "\"fingerprint\":0"),
        ("{", ""),
    ] {
        let mut bad = good.clone();
        bad.sections[0].data = text.replacen(from, to, 1).into_bytes();
        assert_ne!(bad, good, "{from}");
        let refused = machine.restore(&bad).is_err();
        assert!(refused || there.self_check().is_err(), "{to} was believed");
    }
    // One byte at a time: whatever is believed must not bring anything down.
    for at in (0..text.len()).step_by(7) {
        let mut bad = good.clone();
        bad.sections[0].data[at] ^= 1;
        if machine.restore(&bad).is_ok() {
            machine.resume().unwrap();
            // Broken or not: it must only come back.
            let _ = there.self_check();
            machine.pause().unwrap();
        }
    }
    machine.restore(&good).unwrap();
}

#[test]
fn a_running_guest_is_neither_saved_nor_replaced() {
    let guest = start(config(4096));
    let mut machine = guest.machine();
    assert!(machine.save().is_err());
    assert!(machine.restore(&MachineState::default()).is_err());
    guest.self_check().unwrap();
}

/// A guest whose memory is broken under it stops; the host goes on.
#[test]
fn a_broken_allocator_stops_the_guest_and_not_the_host() {
    let guest = start(GuestConfig {
        workload: Workload::Compile,
        ..config(4096)
    });
    let mut parts = guest.parts();
    parts.machine.pause().unwrap();
    // All of the kernel's own memory: the first pages up to the first page in use.
    let end = guest.used_page().unwrap().0;
    for pfn in 0..end {
        parts.ram.write(pfn * PAGE_BYTES, &[0x5a; 4096]).unwrap();
    }
    assert!(guest.self_check().is_err());
    parts.machine.resume().unwrap();
    wait_until("the guest stops", || guest.run_for(Duration::from_millis(1)).is_err());
    parts.machine.pause().unwrap();
    assert!(parts.machine.save().is_err());
}

#[test]
fn a_destination_with_other_ram_is_refused() {
    let guest = start(config(4096));
    let layout = Arc::new(Layout::flat(4097).unwrap());
    let ram = Arc::new(GuestMemory::new(layout, &Backing::Anonymous).unwrap());
    assert!(matches!(
        SoftGuest::new_for_restore(&guest.machine_config(), ram),
        Err(Error::Config(_))
    ));
}
