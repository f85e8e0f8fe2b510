//! One suite that every tracker has to pass, over every backing it works on.

#![allow(clippy::unwrap_used)] // A test ends there, and says where.

mod common;

use common::kvm::Guest;
use common::{Kind, Ram, Random, all_pages, odd, page, r, ram};
use machine::{DirtyTracker, GuestRam};
use memory::trackers::{
    BitmapTracker, DirtyMarker, KvmLogTracker, KvmManualTracker, KvmRingTracker, NullTracker, UffdTracker, Unpopulated,
};
use memory::{Backing, GuestMemory};
use pages::{Layout, PageRange, PageSet, Pfn};
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use vm_memory::{Bytes, GuestAddress};

#[derive(Clone, Copy, Debug)]
enum Tracker {
    Bitmap,
    /// What `UffdTracker::new` chooses.
    Uffd,
    /// With markers everywhere.
    UffdProtect,
    /// Of a guest under KVM, whose page tables follow ours.
    UffdKvm,
    KvmLog,
    KvmManual,
    KvmRing,
}

/// A tracker, the memory it watches, and the one who writes it.
struct Rig {
    ram: Ram,
    tracker: Box<dyn DirtyTracker>,
    writer: Writer,
}

/// Writes guest memory as a VMM does: marking what it wrote, if its tracker wants that. Where there is a guest, its vCPU and
/// the VMM's devices take turns.
struct Writer {
    memory: Arc<GuestMemory>,
    marker: Option<DirtyMarker>,
    vcpu: Option<Vcpu>,
    turn: AtomicU64,
}

/// A vCPU for a writer of its own.
struct Vcpu {
    guest: Arc<Guest>,
    index: usize,
    used: Arc<AtomicUsize>,
}

impl Clone for Writer {
    fn clone(&self) -> Self {
        let another = |vcpu: &Vcpu| Vcpu {
            guest: Arc::clone(&vcpu.guest),
            index: vcpu.used.fetch_add(1, Ordering::Relaxed),
            used: Arc::clone(&vcpu.used),
        };
        Writer {
            memory: Arc::clone(&self.memory),
            marker: self.marker.clone(),
            vcpu: self.vcpu.as_ref().map(another),
            turn: AtomicU64::new(0),
        }
    }
}

impl Writer {
    fn write(&self, pfn: Pfn, at: u64, value: u64) {
        let address = pfn.0 * 4096 + at;
        let device = || self.memory.vm_memory().write_obj(value, GuestAddress(address)).unwrap();
        match (&self.vcpu, self.turn.fetch_add(1, Ordering::Relaxed) % 4) {
            (Some(vcpu), 0 | 2) => vcpu.guest.write(vcpu.index, address, value),
            (_, 3) => device(),
            _ => self.memory.write(address, &value.to_le_bytes()).unwrap(),
        }
        self.mark(page(pfn.0));
    }

    fn discard(&self, range: PageRange) {
        self.memory.discard(range).unwrap();
        self.mark(range);
    }

    /// As a device does that reads from a file into guest memory.
    fn read_in(&self, range: PageRange, byte: u8) {
        let (from, mut to) = std::io::pipe().unwrap();
        to.write_all(&[byte; 4096]).unwrap();
        assert_eq!(self.memory.read_from(from.as_fd(), &[range], 0).unwrap(), 4096);
        self.mark(range);
    }

    fn mark(&self, range: PageRange) {
        if let Some(marker) = &self.marker {
            marker.mark(range);
        }
    }
}

impl Rig {
    fn new(kind: Kind, tracker: Tracker, layout: &Arc<Layout>) -> Option<Rig> {
        let ram = ram(kind, layout)?;
        let memory = Arc::clone(&ram.memory);
        let (mut marker, mut vcpu) = (None, None);
        let mut guest = |ring: bool| {
            let guest = Guest::new(&format!("{tracker:?}"), &memory, 3, ring)?;
            vcpu = Some(Vcpu {
                guest: Arc::clone(&guest),
                index: 0,
                used: Arc::new(AtomicUsize::new(1)),
            });
            Some(guest)
        };
        let tracker: Box<dyn DirtyTracker> = match tracker {
            Tracker::Bitmap => {
                let tracker = BitmapTracker::new(layout);
                marker = Some(tracker.marker());
                Box::new(tracker)
            }
            Tracker::Uffd => Box::new(UffdTracker::new(&memory).unwrap()),
            Tracker::UffdProtect => Box::new(UffdTracker::with_unpopulated(&memory, Unpopulated::Protect).unwrap()),
            Tracker::UffdKvm => {
                guest(false)?;
                Box::new(UffdTracker::new(&memory).unwrap())
            }
            Tracker::KvmLog => Box::new(KvmLogTracker::new(&guest(false)?.slots)),
            Tracker::KvmManual => Box::new(KvmManualTracker::new(&guest(false)?.slots).unwrap()),
            Tracker::KvmRing => {
                let guest = guest(true)?;
                Box::new(KvmRingTracker::new(&guest.slots, guest.ring.as_ref()?).unwrap())
            }
        };
        Some(Rig {
            ram,
            tracker,
            writer: Writer {
                memory,
                marker,
                vcpu,
                turn: AtomicU64::new(0),
            },
        })
    }

    fn set(&self, pfns: &[u64]) -> PageSet {
        let mut set = PageSet::empty(self.ram.memory.layout());
        set.extend(pfns.iter().map(|pfn| page(*pfn)));
        set
    }

    /// A harvest that has all of these pages; and, of what was populated before, nothing else.
    #[track_caller]
    fn expect(&mut self, pfns: &[u64]) {
        let wanted = self.set(pfns);
        let got = self.tracker.harvest().unwrap();
        assert!(wanted.is_subset(&got), "wanted {wanted:?}, got {got:?}");
    }

    #[track_caller]
    fn expect_none(&mut self) {
        let got = self.tracker.harvest().unwrap();
        assert!(got.is_empty(), "{got:?}");
    }
}

fn every_write_after_start_is_in_a_harvest(mut rig: Rig) {
    for pfn in [0, 7, 600, 5003] {
        rig.writer.write(Pfn(pfn), 0, 1);
    }
    rig.tracker.start().unwrap();
    rig.expect_none();
    // Populated and not, both regions, first and last pages.
    let written = [0, 7, 8, 600, 900, 1026, 5000, 5003, 5700, 6540];
    for pfn in written {
        rig.writer.write(Pfn(pfn), 4088, 2);
    }
    rig.expect(&written);
    rig.expect_none();
    rig.writer.write(Pfn(600), 0, 3);
    rig.expect(&[600]);
    rig.expect_none();
}

fn case_24_a_racing_writer_loses_nothing(mut rig: Rig) {
    let layout = Arc::clone(rig.ram.memory.layout());
    let done = AtomicBool::new(false);
    let (memory, tracker) = (&rig.ram.memory, &mut rig.tracker);
    let mut copy = std::thread::scope(|scope| {
        for half in [0, 2048] {
            let (writer, layout, done) = (rig.writer.clone(), Arc::clone(&layout), &done);
            scope.spawn(move || {
                let mut random = Random(0x9E37_79B9 + half);
                for counter in 1u64.. {
                    let pfn = random.pfn(&layout);
                    match random.below(512) {
                        0 => writer.discard(page(pfn.0)),
                        _ => writer.write(pfn, half + random.below(256) * 8, counter),
                    }
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        // Whatever fails here, the writers must end.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            tracker.start().unwrap();
            let mut copy = all_pages(memory);
            for _ in 0..300 {
                copy_pages(memory, &tracker.harvest().unwrap(), &mut copy);
            }
            copy
        }));
        done.store(true, Ordering::Relaxed);
        result.unwrap()
    });
    // The guest is paused now: one last harvest.
    copy_pages(&rig.ram.memory, &rig.tracker.harvest().unwrap(), &mut copy);
    let now = all_pages(&rig.ram.memory);
    let lost: Vec<usize> = (0..now.len()).filter(|i| copy[*i] != now[*i]).collect();
    assert!(
        lost.is_empty(),
        "{} pages differ, the first of them {:?}",
        lost.len(),
        lost.first()
    );
}

fn copy_pages(memory: &GuestMemory, dirty: &PageSet, copy: &mut [[u8; 4096]]) {
    for run in dirty.runs() {
        for i in 0..run.count() {
            let pfn = Pfn(run.start().0 + i);
            let index = usize::try_from(memory.layout().index_of(pfn).unwrap()).unwrap();
            memory.read_page(pfn, &mut copy[index]).unwrap();
        }
    }
}

fn case_17_only_the_last_page_of_an_odd_layout(mut rig: Rig) {
    rig.writer.write(Pfn(6540), 0, 1);
    rig.tracker.start().unwrap();
    rig.writer.write(Pfn(6540), 4088, 2);
    let got = rig.tracker.harvest().unwrap();
    assert_eq!(got, rig.set(&[6540]));
}

fn case_1_the_first_regions_last_page_clean_the_second_region_dirty(mut rig: Rig) {
    for pfn in [1026, 5000] {
        rig.writer.write(Pfn(pfn), 0, 1);
    }
    rig.tracker.start().unwrap();
    rig.writer.write(Pfn(5000), 0, 2);
    let got = rig.tracker.harvest().unwrap();
    assert_eq!(got, rig.set(&[5000]));
}

fn what_is_given_back_is_harvested_again(mut rig: Rig) {
    rig.writer.write(Pfn(3), 0, 1);
    rig.tracker.start().unwrap();
    rig.writer.write(Pfn(3), 0, 2);
    rig.expect(&[3]);
    rig.tracker.give_back(&rig.set(&[3, 1026, 5001])).unwrap();
    assert_eq!(rig.tracker.peek(r(1000, 5000)).unwrap(), Some(2));
    rig.expect(&[3, 1026, 5001]);
    rig.expect_none();
    let other = PageSet::full(&Arc::new(Layout::flat(4).unwrap()));
    assert!(rig.tracker.give_back(&other).is_err());
}

fn starting_over_forgets(mut rig: Rig) {
    rig.writer.write(Pfn(3), 0, 1);
    rig.tracker.start().unwrap();
    rig.writer.write(Pfn(3), 0, 2);
    rig.writer.discard(page(4));
    rig.tracker.give_back(&rig.set(&[5])).unwrap();
    rig.tracker.start().unwrap();
    rig.expect_none();
    rig.writer.write(Pfn(3), 0, 3);
    rig.expect(&[3]);
}

fn stop_then_start(mut rig: Rig) {
    rig.tracker.stop().unwrap();
    rig.writer.write(Pfn(3), 0, 1);
    rig.tracker.start().unwrap();
    rig.writer.write(Pfn(3), 0, 2);
    rig.tracker.stop().unwrap();
    rig.tracker.stop().unwrap();
    rig.writer.write(Pfn(3), 0, 3);
    rig.writer.discard(page(4));
    rig.tracker.start().unwrap();
    rig.expect_none();
    rig.writer.write(Pfn(3), 0, 4);
    rig.expect(&[3]);
}

fn case_21_a_system_calls_writes_are_seen(mut rig: Rig) {
    rig.writer.write(Pfn(700), 0, 1);
    rig.tracker.start().unwrap();
    // One page that is there, one that is not.
    rig.writer.read_in(page(700), 7);
    rig.writer.read_in(page(5900), 8);
    rig.expect(&[700, 5900]);
    rig.writer.read_in(page(700), 9);
    rig.expect(&[700]);
}

fn a_discard_is_a_write(mut rig: Rig) {
    for pfn in 20..30 {
        rig.writer.write(Pfn(pfn), 0, 1);
    }
    rig.tracker.start().unwrap();
    rig.writer.discard(r(22, 3));
    rig.expect(&[22, 23, 24]);
    rig.expect_none();
    rig.writer.write(Pfn(23), 0, 2);
    rig.expect(&[23]);
    // Discarded, then read: what the read put there is nobody's write, and no harvest may miss the discard.
    rig.writer.discard(page(25));
    let mut now = [0; 8];
    rig.ram.memory.read(25 * 4096, &mut now).unwrap();
    assert_eq!(now, [0; 8]);
    rig.expect(&[25]);
}

fn peek_does_not_forget(mut rig: Rig) {
    for pfn in [0, 1, 1026, 5000] {
        rig.writer.write(Pfn(pfn), 0, 1);
    }
    rig.tracker.start().unwrap();
    rig.writer.write(Pfn(0), 0, 2);
    rig.writer.write(Pfn(1026), 0, 2);
    rig.writer.write(Pfn(5000), 0, 2);
    for _ in 0..2 {
        assert_eq!(rig.tracker.peek(page(0)).unwrap(), Some(1));
        assert_eq!(rig.tracker.peek(page(1)).unwrap(), Some(0));
        assert_eq!(rig.tracker.peek(r(0, 1_000_000)).unwrap(), Some(3));
    }
    let got = rig.tracker.harvest().unwrap();
    assert_eq!(got, rig.set(&[0, 1026, 5000]));
    assert_eq!(rig.tracker.peek(r(0, 1_000_000)).unwrap(), Some(0));
}

/// Rounds of an idle guest stay small: one write to populated memory is one page, huge pages or not.
fn one_write_is_one_page(mut rig: Rig) {
    rig.ram.memory.populate_all().unwrap();
    rig.tracker.start().unwrap();
    rig.expect_none();
    rig.writer.write(Pfn(700), 8, 2);
    rig.writer.write(Pfn(5900), 8, 2);
    let got = rig.tracker.harvest().unwrap();
    assert_eq!(got, rig.set(&[700, 5900]));
    rig.expect_none();
}

macro_rules! suite {
    ($($name:ident: $kind:expr, $tracker:expr, [$($test:ident),* $(,)?];)*) => { $(
        mod $name {
            use super::{Kind, Rig, Tracker, odd};

            fn rig() -> Option<Rig> {
                Rig::new($kind, $tracker, &odd())
            }

            $(
                #[test]
                fn $test() {
                    if let Some(rig) = rig() {
                        super::$test(rig);
                    }
                }
            )*
        }
    )* };
    ($($name:ident: $kind:expr, $tracker:expr;)*) => {
        suite! { $($name: $kind, $tracker, [
            every_write_after_start_is_in_a_harvest,
            case_24_a_racing_writer_loses_nothing,
            case_17_only_the_last_page_of_an_odd_layout,
            case_1_the_first_regions_last_page_clean_the_second_region_dirty,
            what_is_given_back_is_harvested_again,
            starting_over_forgets,
            stop_then_start,
            case_21_a_system_calls_writes_are_seen,
            a_discard_is_a_write,
            peek_does_not_forget,
            one_write_is_one_page,
        ];)* }
    };
}

suite! {
    bitmap: Kind::Anonymous, Tracker::Bitmap;
    uffd_anonymous: Kind::Anonymous, Tracker::Uffd;
    uffd_memfd: Kind::Memfd, Tracker::Uffd;
    uffd_memfd_protect: Kind::Memfd, Tracker::UffdProtect;
    uffd_tmpfs: Kind::Tmpfs, Tracker::Uffd;
    uffd_disk: Kind::Disk, Tracker::Uffd;
    uffd_kvm: Kind::Anonymous, Tracker::UffdKvm;
    kvm_log: Kind::Anonymous, Tracker::KvmLog;
    kvm_manual: Kind::Anonymous, Tracker::KvmManual;
    kvm_manual_memfd: Kind::Memfd, Tracker::KvmManual;
    kvm_ring: Kind::Anonymous, Tracker::KvmRing;
}

// A file's huge page is mapped whole again after it was split, so a write may count for 512 pages there: the tests that
// ask for exact sets do not apply.
suite! {
    uffd_tmpfs_huge: Kind::TmpfsHuge, Tracker::Uffd, [
        every_write_after_start_is_in_a_harvest,
        case_24_a_racing_writer_loses_nothing,
        starting_over_forgets,
        stop_then_start,
        case_21_a_system_calls_writes_are_seen,
    ];
}

/// Takes our page table's entries for a page away, as reclaim does; the file keeps the page.
fn reclaim(memory: &GuestMemory, range: PageRange) {
    use vm_memory::{GuestAddress, GuestMemoryBackend};
    let at = memory
        .vm_memory()
        .get_host_address(GuestAddress(range.start().0 * 4096))
        .unwrap();
    let bytes = usize::try_from(range.bytes()).unwrap();
    // SAFETY: guest RAM of a shared mapping: its pages come back from the file.
    assert_eq!(unsafe { libc::madvise(at.cast(), bytes, libc::MADV_DONTNEED) }, 0);
}

#[test]
fn a_page_that_was_written_and_then_reclaimed_is_still_dirty() {
    for kind in [Kind::Memfd, Kind::Tmpfs, Kind::TmpfsHuge, Kind::Disk] {
        let Some(mut rig) = Rig::new(kind, Tracker::UffdProtect, &odd()) else {
            continue;
        };
        rig.ram.memory.populate(r(0, 1027)).unwrap();
        rig.tracker.start().unwrap();
        // Reclaim alone is no write.
        reclaim(&rig.ram.memory, r(512, 512));
        rig.expect_none();
        rig.writer.write(Pfn(5), 0, 2);
        rig.writer.write(Pfn(600), 0, 2);
        rig.writer.write(Pfn(5800), 0, 2);
        reclaim(&rig.ram.memory, r(0, 1027));
        reclaim(&rig.ram.memory, r(5000, 1541));
        rig.expect(&[5, 600, 5800]);
        rig.expect_none();
    }
}

#[test]
fn splitting_a_files_huge_page_loses_no_write() {
    let Some(mut rig) = Rig::new(Kind::TmpfsHuge, Tracker::Uffd, &odd()) else {
        return;
    };
    rig.tracker.start().unwrap();
    // Populated after the start, as a huge page that is written as a whole.
    let written: Vec<u64> = (512..1024).collect();
    for pfn in &written {
        rig.writer.write(Pfn(*pfn), 0, 1);
    }
    // A hole in the middle splits it: the entries of all its pages are gone.
    rig.writer.discard(page(700));
    rig.expect(&written);
}

#[test]
fn the_tracker_chooses_by_what_can_be_reclaimed() {
    let disk = Rig::new(Kind::Disk, Tracker::Uffd, &odd()).unwrap();
    disk.writer.write(Pfn(3), 0, 1);
    let mut rig = disk;
    rig.tracker.start().unwrap();
    rig.writer.write(Pfn(3), 0, 2);
    reclaim(&rig.ram.memory, page(3));
    rig.expect(&[3]);
}

#[test]
fn reading_memory_that_was_never_touched_is_no_write() {
    let mut rig = Rig::new(Kind::Anonymous, Tracker::Uffd, &odd()).unwrap();
    rig.writer.write(Pfn(0), 0, 1);
    rig.tracker.start().unwrap();
    let mut into = [0; 8];
    for pfn in [1, 700, 5900] {
        rig.ram.memory.read(pfn * 4096, &mut into).unwrap();
    }
    rig.expect_none();
    rig.writer.write(Pfn(700), 0, 1);
    rig.expect(&[700]);
}

#[test]
fn markers_are_not_presence() {
    for kind in [Kind::Memfd, Kind::Tmpfs, Kind::Disk] {
        let mut rig = Rig::new(kind, Tracker::UffdProtect, &odd()).unwrap();
        rig.writer.write(Pfn(600), 0, 1);
        rig.tracker.start().unwrap();
        for way in [
            memory::Presence::Auto,
            memory::Presence::PagemapScan,
            memory::Presence::PagemapFile,
        ] {
            let present = rig.ram.memory.present_by(way).unwrap();
            assert!(
                present.contains(Pfn(600)) && !present.contains(Pfn(5900)),
                "{kind:?} {way:?}: {present:?}"
            );
        }
    }
}

#[test]
fn two_trackers_of_one_memory_are_refused() {
    let memory = Arc::new(GuestMemory::new(odd(), &Backing::Anonymous).unwrap());
    let mut first = UffdTracker::new(&memory).unwrap();
    let mut second = UffdTracker::new(&memory).unwrap();
    first.start().unwrap();
    let text = second.start().unwrap_err().to_string();
    assert!(text.contains("another tracker"), "{text}");
    first.stop().unwrap();
    second.start().unwrap();
    assert!(first.harvest().is_err());
}

#[test]
fn the_null_tracker_harvests_only_what_it_was_given() {
    let layout = odd();
    let mut tracker = NullTracker::new(&layout);
    tracker.start().unwrap();
    assert!(tracker.harvest().unwrap().is_empty());
    let full = PageSet::full(&layout);
    tracker.give_back(&full).unwrap();
    assert_eq!(tracker.peek(r(0, 10)).unwrap(), Some(10));
    assert_eq!(tracker.harvest().unwrap(), full);
    assert!(tracker.harvest().unwrap().is_empty());
}
