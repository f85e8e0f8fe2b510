//! What only trackers by KVM have to get right: vCPUs that write at full speed, slots of odd sizes, calls that fail.

#![allow(clippy::unwrap_used)] // A test ends there, and says where.

mod common;

use common::kvm::{Guest, vm};
use common::{Random, all_pages, odd, page, r, skipped};
use kvm_bindings::kvm_userspace_memory_region;
use machine::{DirtyTracker, GuestRam};
use memory::kvm::{KvmRing, KvmSlots, capabilities};
use memory::trackers::{KvmLogTracker, KvmManualTracker, KvmRingTracker};
use memory::{Backing, GuestMemory};
use pages::{Layout, PageSet, Pfn};
use std::io::{Cursor, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Log,
    Manual,
    Ring,
}

const WAYS: [Way; 3] = [Way::Log, Way::Manual, Way::Ring];

struct Rig {
    memory: Arc<GuestMemory>,
    guest: Arc<Guest>,
    tracker: Box<dyn DirtyTracker>,
}

fn rig(test: &str, way: Way, layout: &Arc<Layout>, vcpus: u64) -> Option<Rig> {
    let memory = Arc::new(GuestMemory::new(Arc::clone(layout), &Backing::Anonymous).unwrap());
    let guest = Guest::new(test, &memory, vcpus, way == Way::Ring)?;
    let tracker: Box<dyn DirtyTracker> = match way {
        Way::Log => Box::new(KvmLogTracker::new(&guest.slots)),
        Way::Manual => Box::new(KvmManualTracker::new(&guest.slots).unwrap()),
        Way::Ring => Box::new(KvmRingTracker::new(&guest.slots, guest.ring.as_ref()?).unwrap()),
    };
    Some(Rig { memory, guest, tracker })
}

fn set(layout: &Arc<Layout>, pfns: &[u64]) -> PageSet {
    let mut set = PageSet::empty(layout);
    set.extend(pfns.iter().map(|pfn| page(*pfn)));
    set
}

/// Regions of 64n + 3 pages, two of which touch.
fn sixty_fours_and_three() -> Arc<Layout> {
    Arc::new(Layout::new(vec![r(0, 131), r(131, 67), r(1000, 20_035)]).unwrap())
}

fn copy_pages(memory: &GuestMemory, dirty: &PageSet, copy: &mut [[u8; 4096]]) {
    for pfn in dirty.runs().flat_map(|run| run.start().0..run.end().0) {
        let index = usize::try_from(memory.layout().index_of(Pfn(pfn)).unwrap()).unwrap();
        memory.read_page(Pfn(pfn), &mut copy[index]).unwrap();
    }
}

/// Each vCPU writes a word of its own in page after page, without a pause; a copy that follows the harvests ends up equal.
/// Without `harvests`, nobody but the vCPUs themselves empties a ring before they are paused.
fn race(mut rig: Rig, harvests: bool) {
    const PASSES: u32 = 12;
    let layout = Arc::clone(rig.memory.layout());
    let done = AtomicBool::new(false);
    let (memory, guest, tracker) = (&rig.memory, &rig.guest, &mut rig.tracker);
    let passes: Vec<AtomicU32> = guest.vcpus.iter().map(|_| AtomicU32::new(0)).collect();
    let write = |vcpu: usize| {
        let mut random = Random(0x9E37_79B9 + vcpu as u64);
        while !done.load(Ordering::Relaxed) {
            let counter = passes[vcpu].fetch_add(1, Ordering::Relaxed);
            let region = layout.regions()[usize::try_from(random.below(2)).unwrap()];
            let from = random.below(region.count());
            let count = 1 + random.below(region.count() - from);
            let at = (region.start().0 + from) * 4096 + vcpu as u64 * 8;
            guest.write_all(vcpu, at, count, counter + 1);
        }
    };
    let mut copy = std::thread::scope(|scope| {
        let write = &write;
        let vcpus: Vec<_> = (0..passes.len()).map(|i| scope.spawn(move || write(i))).collect();
        // Whatever fails here, the vCPUs must come to an end; and what fails there, ends this.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            tracker.start().unwrap();
            let mut copy = all_pages(memory);
            let start: Vec<u32> = passes.iter().map(|passes| passes.load(Ordering::Relaxed)).collect();
            let ran = |(i, passes): (usize, &AtomicU32)| passes.load(Ordering::Relaxed) >= start[i] + PASSES;
            while !passes.iter().enumerate().all(ran) && !vcpus.iter().any(|vcpu| vcpu.is_finished()) {
                if harvests {
                    copy_pages(memory, &tracker.harvest().unwrap(), &mut copy);
                } else {
                    std::thread::yield_now();
                }
            }
            copy
        }));
        done.store(true, Ordering::Relaxed);
        for vcpu in vcpus {
            vcpu.join().unwrap();
        }
        result.unwrap()
    });
    copy_pages(memory, &tracker.harvest().unwrap(), &mut copy);
    let now = all_pages(memory);
    let lost: Vec<usize> = (0..now.len()).filter(|i| copy[*i] != now[*i]).collect();
    assert!(
        lost.is_empty(),
        "{} pages differ, the first is {:?}",
        lost.len(),
        lost.first()
    );
}

#[test]
fn case_24_vcpus_at_full_speed_against_a_tight_harvest_loop() {
    for way in WAYS {
        if let Some(rig) = rig("case_24", way, &odd(), 2) {
            race(rig, true);
        }
    }
}

#[test]
fn case_27_the_smallest_ring_with_four_writing_vcpus() {
    for harvests in [false, true] {
        let Some(rig) = rig("case_27", Way::Ring, &odd(), 4) else {
            return;
        };
        let guest = Arc::clone(&rig.guest);
        race(rig, harvests);
        assert!(
            harvests || guest.full.load(Ordering::Relaxed) > 8,
            "no ring was ever full"
        );
    }
}

#[test]
fn case_21_what_only_the_vmm_writes_is_harvested() {
    let layout = sixty_fours_and_three();
    for way in WAYS {
        let Some(mut rig) = rig("case_21", way, &layout, 1) else {
            return;
        };
        let memory = Arc::clone(&rig.memory);
        memory.populate_all().unwrap();
        rig.tracker.start().unwrap();
        assert!(rig.tracker.harvest().unwrap().is_empty(), "{way:?}");
        // Devices, through vm-memory: over a border of pages, an object, an index, a read from a file.
        let vm = memory.vm_memory();
        vm.write_slice(&[7; 8192], GuestAddress(4 * 4096 + 1)).unwrap();
        vm.write_obj(7u32, GuestAddress(130 * 4096 + 8)).unwrap();
        vm.store(7u16, GuestAddress(131 * 4096), Ordering::Release).unwrap();
        vm.read_exact_volatile_from(GuestAddress(1001 * 4096), &mut Cursor::new([9; 4097]), 4097)
            .unwrap();
        // And what the memory does itself.
        memory.write(1010 * 4096 + 4095, &[7, 7]).unwrap();
        memory.fill(r(1020, 2), 0xAAAA_AAAA).unwrap();
        memory.zero(r(1030, 3)).unwrap();
        memory.discard(page(21_034)).unwrap();
        let (from, mut to) = std::io::pipe().unwrap();
        to.write_all(&[7; 5000]).unwrap();
        let ranges = [r(1040, 1), r(1050, 3)];
        assert_eq!(memory.read_from(from.as_fd(), &ranges, 4096 + 8).unwrap(), 5000);
        let expected = [
            4, 5, 6, 130, 131, 1001, 1002, 1010, 1011, 1020, 1021, 1030, 1031, 1032, 1050, 1051, 21_034,
        ];
        assert_eq!(rig.tracker.harvest().unwrap(), set(&layout, &expected), "{way:?}");
        // Reading is no write.
        let _: u64 = vm.read_obj(GuestAddress(0)).unwrap();
        memory.read(4096, &mut [0; 8]).unwrap();
        assert!(rig.tracker.harvest().unwrap().is_empty(), "{way:?}");
        rig.tracker.stop().unwrap();
        vm.write_obj(7u64, GuestAddress(0)).unwrap();
        assert_eq!(rig.tracker.peek(r(0, 10)).unwrap(), Some(0), "{way:?}: noted while off");
    }
}

#[test]
fn every_page_of_slots_of_odd_sizes_is_tracked_to_the_last() {
    let layout = sixty_fours_and_three();
    for way in WAYS {
        let Some(mut rig) = rig("odd slots", way, &layout, 1) else {
            return;
        };
        rig.tracker.start().unwrap();
        for round in 1..3 {
            for region in layout.regions() {
                rig.guest.write_all(0, region.start().0 * 4096, region.count(), round);
            }
            assert_eq!(rig.tracker.peek(r(1000, 50_000)).unwrap(), Some(20_035), "{way:?}");
            assert_eq!(rig.tracker.harvest().unwrap(), PageSet::full(&layout), "{way:?}");
            assert!(rig.tracker.harvest().unwrap().is_empty(), "{way:?}");
        }
        // Around every border: of a word, of a chunk that is cleared by one call, of a slot.
        for pfn in [
            0,
            63,
            64,
            128,
            130,
            131,
            197,
            1000,
            1000 + 16_383,
            1000 + 16_384,
            1000 + 19_968,
            21_034,
        ] {
            rig.guest.write(0, pfn * 4096 + 4088, pfn);
            assert_eq!(rig.tracker.harvest().unwrap(), set(&layout, &[pfn]), "{way:?}");
        }
    }
}

#[test]
fn what_was_given_back_is_kept_until_the_stop() {
    for way in WAYS {
        let Some(mut rig) = rig("give back", way, &odd(), 1) else {
            return;
        };
        rig.tracker.start().unwrap();
        rig.guest.write(0, 3 * 4096, 1);
        let harvested = rig.tracker.harvest().unwrap();
        assert_eq!(harvested, set(&odd(), &[3]));
        rig.tracker.give_back(&harvested).unwrap();
        rig.guest.write(0, 6540 * 4096, 1);
        assert_eq!(rig.tracker.harvest().unwrap(), set(&odd(), &[3, 6540]), "{way:?}");
        rig.tracker.give_back(&harvested).unwrap();
        rig.tracker.stop().unwrap();
        assert!(rig.tracker.harvest().is_err(), "{way:?}: harvested while off");
        rig.tracker.start().unwrap();
        assert!(rig.tracker.harvest().unwrap().is_empty(), "{way:?}");
    }
}

#[test]
fn starting_over_forgets_what_vcpus_wrote() {
    for way in WAYS {
        let Some(mut rig) = rig("starting over", way, &odd(), 1) else {
            return;
        };
        rig.tracker.start().unwrap();
        rig.guest.write(0, 3 * 4096, 1);
        rig.tracker.start().unwrap();
        assert!(rig.tracker.harvest().unwrap().is_empty(), "{way:?}");
        rig.guest.write(0, 4 * 4096, 1);
        rig.tracker.stop().unwrap();
        rig.guest.write(0, 5 * 4096, 1);
        rig.tracker.start().unwrap();
        assert!(rig.tracker.harvest().unwrap().is_empty(), "{way:?}");
        rig.guest.write(0, 6 * 4096, 1);
        assert_eq!(rig.tracker.harvest().unwrap(), set(&odd(), &[6]), "{way:?}");
    }
}

/// Whether KVM logs writes to a slot: the log of one that it does not log cannot be read.
fn logs(slots: &KvmSlots, slot: u32) -> bool {
    slots.vm().get_dirty_log(slot, 64 << 20).is_ok()
}

/// Deletes a slot behind the back of whoever made it, or makes it again as it was.
fn set_slot(rig: &Rig, slot: u32, of: usize, there: bool, log: bool) {
    let region = rig.memory.layout().regions()[of];
    let address = region.start().0 * 4096;
    let region = kvm_userspace_memory_region {
        slot,
        guest_phys_addr: address,
        memory_size: if there { region.bytes() } else { 0 },
        userspace_addr: rig.memory.vm_memory().get_host_address(GuestAddress(address)).unwrap() as u64,
        flags: u32::from(log),
    };
    // SAFETY: guest RAM, which lives as long as the rig, and no vCPU runs.
    unsafe { rig.guest.slots.vm().set_user_memory_region(region) }.unwrap();
}

#[test]
fn a_harvest_that_fails_halfway_loses_nothing() {
    for way in [Way::Log, Way::Manual] {
        let Some(mut rig) = rig("a failing harvest", way, &odd(), 1) else {
            return;
        };
        rig.tracker.start().unwrap();
        for pfn in [3, 1026] {
            rig.guest.write(0, pfn * 4096, 1);
        }
        rig.memory.write(5001 * 4096, &[1]).unwrap();
        set_slot(&rig, 1, 1, false, false);
        let text = rig.tracker.harvest().unwrap_err().to_string();
        assert!(text.contains("slot 1"), "{text}");
        if way == Way::Log {
            assert!(rig.tracker.peek(page(3)).is_err());
        }
        set_slot(&rig, 1, 1, true, true);
        let got = rig.tracker.harvest().unwrap();
        assert!(set(&odd(), &[3, 1026, 5001]).is_subset(&got), "{way:?}: {got:?}");
        rig.guest.write(0, 4 * 4096, 1);
        assert_eq!(rig.tracker.harvest().unwrap(), set(&odd(), &[4]), "{way:?}");
    }
}

#[test]
fn the_log_goes_off_for_every_slot_even_when_one_fails() {
    for way in [Way::Log, Way::Manual] {
        let Some(mut rig) = rig("a failing stop", way, &odd(), 1) else {
            return;
        };
        // Another slot in the place of one, which so cannot be changed any more.
        let block = |rig: &Rig, of: usize| {
            set_slot(rig, of.try_into().unwrap(), of, false, false);
            set_slot(rig, 9, of, true, false);
        };
        block(&rig, 1);
        let text = rig.tracker.start().unwrap_err().to_string();
        assert!(text.contains("slot 1"), "{text}");
        assert!(!logs(&rig.guest.slots, 0), "{way:?}: a start that failed left a log on");
        assert!(rig.tracker.harvest().is_err());
        set_slot(&rig, 9, 1, false, false);
        set_slot(&rig, 1, 1, true, false);

        rig.tracker.start().unwrap();
        assert!(logs(&rig.guest.slots, 0) && logs(&rig.guest.slots, 1));
        block(&rig, 0);
        let text = rig.tracker.stop().unwrap_err().to_string();
        assert!(text.contains("slot 0"), "{text}");
        assert!(!logs(&rig.guest.slots, 1), "{way:?}: slot 1 is still logged");
        rig.tracker.stop().unwrap();
    }
}

#[test]
fn one_tracker_at_a_time_and_none_leaves_the_log_on() {
    let Some(mut rig) = rig("two trackers", Way::Log, &odd(), 1) else {
        return;
    };
    let mut second = KvmManualTracker::new(&rig.guest.slots).unwrap();
    rig.tracker.start().unwrap();
    let text = second.start().unwrap_err().to_string();
    assert!(text.contains("another tracker"), "{text}");
    assert!(logs(&rig.guest.slots, 0));
    // Dropped while it is on.
    drop(rig.tracker);
    assert!(!logs(&rig.guest.slots, 0) && !logs(&rig.guest.slots, 1));
    // Each has the log in its own way, one after the other.
    second.start().unwrap();
    assert!(second.harvest().unwrap().is_empty());
    rig.guest.write(0, 7 * 4096, 1);
    assert_eq!(second.harvest().unwrap(), set(&odd(), &[7]));
    second.stop().unwrap();
    let mut third = KvmLogTracker::new(&rig.guest.slots);
    third.start().unwrap();
    assert!(third.harvest().unwrap().is_empty());
    rig.guest.write(0, 8 * 4096, 1);
    assert_eq!(third.harvest().unwrap(), set(&odd(), &[8]));
    assert!(third.harvest().unwrap().is_empty());
}

#[test]
fn ram_is_taken_from_the_vm_before_it_goes() {
    let Some(vm) = vm("slots") else { return };
    let memory = Arc::new(GuestMemory::new(odd(), &Backing::Anonymous).unwrap());
    let slots = KvmSlots::register(&vm, &memory).unwrap();
    assert_eq!((slots.count(), Arc::strong_count(&memory)), (2, 2));
    let mut tracker = KvmLogTracker::new(&slots);
    tracker.start().unwrap();
    // Other memory over the same addresses is refused, and what is there stays.
    let other = Arc::new(GuestMemory::new(odd(), &Backing::Anonymous).unwrap());
    let text = KvmSlots::register(&vm, &other).unwrap_err().to_string();
    assert!(
        text.contains("slot 0") && text.contains(&r(0, 1027).to_string()),
        "{text}"
    );
    assert_eq!(Arc::strong_count(&other), 1);
    assert!(logs(&slots, 0) && logs(&slots, 1));
    drop((slots, tracker));
    assert_eq!(Arc::strong_count(&memory), 1);
    KvmSlots::register(&vm, &other).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ram");
    drop(GuestMemory::new(odd(), &Backing::create_file(&file)).unwrap());
    let read_only = Arc::new(GuestMemory::new(odd(), &Backing::read_file(&file)).unwrap());
    assert!(
        KvmSlots::register(&vm, &read_only).is_err(),
        "memory that cannot be written"
    );
}

#[test]
fn rings_that_cannot_be_are_refused_with_a_reason() {
    let Some(first) = vm("rings") else { return };
    let most = capabilities(&first).ring_entries;
    if most == 0 {
        skipped("rings: this host's KVM has no dirty ring");
        return;
    }
    for entries in [0, 1, 128, 1000, most * 2] {
        let text = KvmRing::enable(&first, entries).unwrap_err().to_string();
        assert!(text.contains(&entries.to_string()), "{text}");
    }
    let ring = KvmRing::enable(&first, most).unwrap();
    assert!(KvmRing::enable(&first, most).is_err(), "twice");
    let vcpu = first.create_vcpu(0).unwrap();
    ring.add_vcpu(0, &vcpu).unwrap();
    assert!(ring.add_vcpu(0, &vcpu).is_err(), "twice");
    ring.on_full().unwrap();

    let second = vm("rings").unwrap();
    let memory = Arc::new(GuestMemory::new(odd(), &Backing::Anonymous).unwrap());
    let slots = KvmSlots::register(&second, &memory).unwrap();
    assert!(KvmRingTracker::new(&slots, &ring).is_err(), "rings of another VM");
    let vcpu = second.create_vcpu(0).unwrap();
    assert!(KvmRing::enable(&second, most).is_err(), "there is a vCPU already");
    drop(vcpu);
    // A VM with rings has no other log: found out when it is switched on, not when it is needed.
    let slots = KvmSlots::register(&first, &memory).unwrap();
    let mut tracker = KvmLogTracker::new(&slots);
    assert!(tracker.start().is_err());
    let mut tracker = KvmRingTracker::new(&slots, &ring).unwrap();
    tracker.start().unwrap();
}
