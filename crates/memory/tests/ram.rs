//! Guest RAM over every backing: holes, content, page I/O, giving back, and files that others spoil.

#![allow(clippy::unwrap_used)] // A test ends there, and says where.

mod common;

use common::{KINDS, Kind, Ram, Random, all_pages, odd, page, r, ram, skipped};
use machine::{GuestRam, PageKind};
use memory::{Backing, Error, GuestMemory, Presence};
use pages::{Layout, PageRange, PageSet, Pfn};
use std::fs::OpenOptions;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Writes these pages, none of them zero, and returns the set.
fn scatter(memory: &GuestMemory, seed: u64, count: usize) -> PageSet {
    let mut random = Random(seed);
    let mut set = PageSet::empty(memory.layout());
    for _ in 0..count {
        let pfn = random.pfn(memory.layout());
        memory
            .write(pfn.0 * 4096 + random.below(511) * 8, &(random.next() | 1).to_le_bytes())
            .unwrap();
        set.insert(pfn);
    }
    set
}

fn classified(memory: &GuestMemory) -> PageSet {
    let mut data = PageSet::empty(memory.layout());
    for region in memory.layout().regions() {
        let mut at = region.start();
        let mut last = None;
        memory
            .classify(*region, &mut |part, kind| {
                assert_eq!(part.start(), at);
                assert_ne!(last, Some(kind), "stretches of one kind were not merged");
                (at, last) = (part.end(), Some(kind));
                if kind == PageKind::Data {
                    data.insert_range(part);
                }
            })
            .unwrap();
        assert_eq!(at, region.end());
    }
    data
}

fn digest(memory: &GuestMemory) -> u128 {
    let regions = memory.layout().regions().iter();
    regions.fold(0u128, |sum, r| sum.wrapping_add(memory.digest(*r).unwrap()))
}

#[test]
fn the_ways_to_find_holes_agree() {
    let ways = [
        Presence::Auto,
        Presence::PagemapScan,
        Presence::PagemapFile,
        Presence::SeekData,
    ];
    for kind in KINDS {
        let Ram { memory, place: _place } = ram(kind, &odd()).unwrap();
        assert!(memory.present().unwrap().is_empty(), "{kind:?}");
        let written = scatter(&memory, 7, 200);
        for way in ways {
            if kind == Kind::Anonymous && way == Presence::SeekData {
                assert!(memory.present_by(way).is_err());
                continue;
            }
            let found = memory.present_by(way).unwrap();
            assert!(written.is_subset(&found), "{kind:?} {way:?}");
            // Huge pages of anonymous memory, and a disk's large folios, hold more than was written. Never all of it:
            // the odd tails of the regions were left alone.
            let same_as_scan = memory.present_by(Presence::PagemapScan).unwrap();
            match kind {
                Kind::Anonymous => assert_eq!(found, same_as_scan, "{way:?}"),
                Kind::Disk => assert!(same_as_scan.is_subset(&found) || way == Presence::PagemapFile),
                _ => assert_eq!(found, written, "{kind:?} {way:?}"),
            }
        }
    }
}

#[test]
fn reading_memory_that_was_never_touched_allocates_nothing() {
    for kind in KINDS {
        let Ram { memory, place: _place } = ram(kind, &odd()).unwrap();
        memory.write(0, &[1]).unwrap();
        let before = memory.present().unwrap();
        assert_eq!(classified(&memory).count(), 1);
        digest(&memory);
        for region in memory.layout().regions() {
            memory
                .zero(PageRange::between(Pfn(region.start().0 + 512), region.end()))
                .unwrap();
        }
        assert_eq!(memory.present().unwrap(), before, "{kind:?}");
    }
}

/// Everything that is sent of this layout, from one end of a socket to the other.
fn sent(memory: &GuestMemory) -> Vec<u8> {
    let (near, mut far) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let ranges = memory.layout().regions();
            let total = usize::try_from(memory.layout().total_bytes()).unwrap();
            let mut done = 0;
            while done < total {
                let n = memory.write_to(near.as_fd(), &[], ranges, done).unwrap();
                assert!(n > 0);
                done += n;
            }
        });
        let mut got = Vec::new();
        far.read_to_end(&mut got).unwrap();
        got
    })
}

#[test]
fn sending_memory_that_was_never_touched_allocates_nothing() {
    // The last window of a region, and several vectors of zeroes, are short ones.
    let layout = Arc::new(Layout::new(vec![r(0, 10_001), r(20_000, 4097)]).unwrap());
    for kind in [Kind::Anonymous, Kind::Memfd, Kind::Tmpfs, Kind::TmpfsHuge, Kind::Disk] {
        let Some(ram) = ram(kind, &layout) else { continue };
        let memory = &ram.memory;
        assert_eq!(host_bytes(kind, &ram), 0, "{kind:?}");
        let all = sent(memory);
        assert_eq!(all.len() as u64, layout.total_bytes(), "{kind:?}");
        assert!(all.iter().all(|byte| *byte == 0), "{kind:?}");
        assert_eq!(host_bytes(kind, &ram), 0, "{kind:?}: sending a hole filled it");

        // And with pages here and there, some of which only the file has.
        let written = scatter(memory, 11, 3000);
        let mut expected = vec![[0; 4096]; 14_098];
        for run in written.runs() {
            for pfn in run.start().0..run.end().0 {
                let place = if pfn < 20_000 { pfn } else { pfn - 20_000 + 10_001 };
                let into = &mut expected[usize::try_from(place).unwrap()];
                memory.read_page(Pfn(pfn), into).unwrap();
            }
        }
        let before = host_bytes(kind, &ram);
        let got = sent(memory);
        assert!(got.as_chunks::<4096>().0 == expected, "{kind:?}");
        assert_eq!(host_bytes(kind, &ram), before, "{kind:?}: sending a hole filled it");
        if matches!(kind, Kind::Tmpfs | Kind::Disk) {
            let Ram { memory, place } = ram;
            drop(memory);
            let backing = Backing::read_file(place.ram_file());
            let memory = Arc::new(GuestMemory::new(Arc::clone(&layout), &backing).unwrap());
            assert!(sent(&memory).as_chunks::<4096>().0 == expected, "{kind:?}");
            assert_eq!(host_bytes(kind, &Ram { memory, place }), before, "{kind:?}");
        }
    }
}

#[test]
fn holes_are_sent_by_any_ranges_and_any_skip() {
    let layout = odd();
    let Ram { memory, place: _place } = ram(Kind::Memfd, &layout).unwrap();
    scatter(&memory, 12, 400);
    // Of a twin, as reading a memfd's holes one by one fills them.
    let Ram {
        memory: twin,
        place: _twin,
    } = ram(Kind::Memfd, &layout).unwrap();
    scatter(&twin, 12, 400);
    let pages = all_pages(&twin);
    let page_at = |pfn: u64| pages[usize::try_from(if pfn < 5000 { pfn } else { pfn - 5000 + 1027 }).unwrap()];
    let mut random = Random(13);
    for _ in 0..200 {
        // Neighbours, far apart, backwards, twice the same.
        let ranges: Vec<PageRange> = (0..random.below(8) + 1)
            .map(|_| {
                let start = random.pfn(&layout).0;
                let end = if start < 5000 { 1027 } else { 6541 };
                r(start, (random.below(70) + 1).min(end - start))
            })
            .collect();
        let numbers = ranges.iter().flat_map(|range| range.start().0..range.end().0);
        let mut expected = b"head".to_vec();
        numbers.for_each(|pfn| expected.extend(page_at(pfn)));
        let mut file = tempfile::tempfile().unwrap();
        let skip = usize::try_from(random.below(expected.len() as u64 + 1)).unwrap();
        let mut done = skip;
        while done < expected.len() {
            done += memory.write_to(file.as_fd(), b"head", &ranges, done).unwrap();
        }
        let mut got = Vec::new();
        std::io::Seek::rewind(&mut file).unwrap();
        file.read_to_end(&mut got).unwrap();
        assert!(got == expected[skip..], "{ranges:?} from byte {skip}");
    }
}

#[test]
fn what_others_put_into_the_file_is_present() {
    let layout = odd();
    let Ram { memory, place } = ram(Kind::Tmpfs, &layout).unwrap();
    let file = OpenOptions::new().write(true).open(place.ram_file()).unwrap();
    // RAM order is file order: place 1027 is page 5000.
    file.write_all_at(&[9; 4096], 1027 * 4096).unwrap();
    assert!(memory.present_by(Presence::PagemapScan).unwrap().is_empty());
    assert_eq!(memory.present().unwrap().runs().collect::<Vec<_>>(), [page(5000)]);
    assert_eq!(classified(&memory).runs().collect::<Vec<_>>(), [page(5000)]);
    assert_ne!(digest(&memory), 0);
    memory.zero(r(5000, 2)).unwrap();
    assert_eq!(digest(&memory), 0);
}

#[test]
fn content_is_told_apart_on_every_backing() {
    let mut digests = Vec::new();
    for kind in KINDS {
        let Ram { memory, place: _place } = ram(kind, &odd()).unwrap();
        let written = scatter(&memory, 99, 300);
        // Touched, and zero again.
        memory.populate(r(100, 600)).unwrap();
        assert_eq!(classified(&memory), written, "{kind:?}");
        digests.push(digest(&memory));

        let pages = all_pages(&memory);
        let oracle = pages.iter().enumerate().fold(0u128, |sum, (i, content)| {
            let pfn = memory.layout().pfn_at(i as u64).unwrap();
            let term = xxhash_rust::xxh3::xxh3_128_with_seed(content, pfn.0);
            if *content == [0; 4096] {
                sum
            } else {
                sum.wrapping_add(term)
            }
        });
        assert_eq!(*digests.last().unwrap(), oracle, "{kind:?}");
    }
    assert!(digests.windows(2).all(|pair| pair[0] == pair[1]));
}

/// The kernel gathers 512 stretches at a time, and where more are found may say to go on from before what it told last.
#[test]
fn no_page_counts_twice_in_scattered_memory() {
    let layout = Arc::new(Layout::flat(5000).unwrap());
    for kind in KINDS {
        let Ram { memory, place: _place } = ram(kind, &layout).unwrap();
        let mut written = PageSet::empty(&layout);
        let mut sum = 0u128;
        for pfn in (0..4000).step_by(3) {
            let content = [u8::try_from(pfn % 255).unwrap() + 1; 4096];
            memory.write(pfn * 4096, &content).unwrap();
            written.insert(Pfn(pfn));
            sum = sum.wrapping_add(xxhash_rust::xxh3::xxh3_128_with_seed(&content, pfn));
        }
        assert_eq!(classified(&memory), written, "{kind:?}");
        assert_eq!(digest(&memory), sum, "{kind:?}");
    }
}

#[test]
fn a_source_reads_a_file_that_it_has_not_touched() {
    let layout = odd();
    let Ram { memory, place } = ram(Kind::Tmpfs, &layout).unwrap();
    let written = scatter(&memory, 5, 50);
    let sum = digest(&memory);
    drop(memory);
    let backing = Backing::read_file(place.ram_file());
    let source = GuestMemory::new(Arc::clone(&layout), &backing).unwrap();
    let second = GuestMemory::new(Arc::clone(&layout), &backing).unwrap();
    assert_eq!(source.present().unwrap(), written);
    assert_eq!(digest(&source), sum);
    assert_eq!(digest(&second), sum);
    assert!(matches!(source.write(0, &[1]), Err(Error::ReadOnly(_))));
    assert!(matches!(source.discard(r(0, 4)), Err(Error::ReadOnly(_))));
    assert!(source.fill(r(0, 4), 1).is_err() && source.zero(r(0, 4)).is_err());
}

#[test]
fn case_10_vectored_transfer_takes_any_skip_and_any_number_of_ranges() {
    for kind in [Kind::Anonymous, Kind::Tmpfs] {
        let layout = Arc::new(Layout::new(vec![r(0, 5000), r(9000, 3)]).unwrap());
        let Ram {
            memory: from,
            place: _a,
        } = ram(kind, &layout).unwrap();
        let Ram { memory: to, place: _b } = ram(kind, &layout).unwrap();
        scatter(&from, 3, 2000);
        // More ranges than one call takes, across both regions.
        let mut ranges: Vec<PageRange> = (0..1500).map(|i| r(i * 3, 2)).collect();
        ranges.push(r(9000, 3));
        let head = b"a batch's header";
        let pages: u64 = ranges.iter().map(|r| r.count()).sum();
        let total = head.len() + usize::try_from(pages * 4096).unwrap();

        let (near, far) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let (from, ranges) = (&from, &ranges);
            let sender = scope.spawn(move || {
                let mut sent = 0;
                while sent < total {
                    let n = from.write_to(near.as_fd(), head, ranges, sent).unwrap();
                    assert!(n > 0);
                    sent += n;
                }
                assert_eq!(from.write_to(near.as_fd(), head, ranges, total).unwrap(), 0);
            });
            let mut got = [0; 16];
            (&far).read_exact(&mut got).unwrap();
            assert_eq!(&got, head);
            let mut came = head.len();
            while came < total {
                let n = to.read_from(far.as_fd(), ranges, came - head.len()).unwrap();
                assert!(n > 0);
                came += n;
            }
            sender.join().unwrap();
            assert_eq!(
                to.read_from(far.as_fd(), ranges, 0).unwrap(),
                0,
                "the end of the stream"
            );
        });
        for range in &ranges {
            assert_eq!(from.digest(*range).unwrap(), to.digest(*range).unwrap(), "{range}");
        }
    }
}

#[test]
fn zero_and_fill() {
    for kind in KINDS {
        let Ram { memory, place: _place } = ram(kind, &odd()).unwrap();
        for range in [r(0, 1027), r(5000, 1541)] {
            memory.fill(range, 0xAABB_CCDD).unwrap();
        }
        let mut bytes = [0; 8];
        memory.read(6540 * 4096 + 4088, &mut bytes).unwrap();
        assert_eq!(bytes, [0xDD, 0xCC, 0xBB, 0xAA, 0xDD, 0xCC, 0xBB, 0xAA]);
        // A whole huge page in the middle, and parts of two more.
        memory.zero(r(5100, 1300)).unwrap();
        memory.fill(r(3, 2), 0).unwrap();
        let data: Vec<PageRange> = classified(&memory).runs().collect();
        assert_eq!(data, [r(0, 3), r(5, 1022), r(5000, 100), r(6400, 141)], "{kind:?}");
    }
}

/// Bytes of the host that this RAM takes.
fn host_bytes(kind: Kind, ram: &Ram) -> u64 {
    match kind {
        Kind::Tmpfs | Kind::TmpfsHuge | Kind::Disk => {
            let file = OpenOptions::new().read(true).open(ram.place.ram_file()).unwrap();
            file.metadata().unwrap().blocks() * 512
        }
        Kind::Memfd => ram.memory.present_by(Presence::SeekData).unwrap().count() * 4096,
        Kind::Anonymous => {
            use vm_memory::{GuestAddress, GuestMemoryBackend};
            let vm = ram.memory.vm_memory();
            let starts: Vec<String> = ram
                .memory
                .layout()
                .regions()
                .iter()
                .map(|r| {
                    let at = vm.get_host_address(GuestAddress(r.start().0 * 4096)).unwrap();
                    format!("{:x}-", at as usize)
                })
                .collect();
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut bytes = 0;
            let mut ours = false;
            for line in smaps.lines() {
                if !line.split(' ').next().unwrap().ends_with(':') {
                    ours = starts.iter().any(|start| line.starts_with(start.as_str()));
                } else if let Some(kib) = line.strip_prefix("Rss:").filter(|_| ours) {
                    bytes += kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024;
                }
            }
            bytes
        }
    }
}

#[test]
fn case_46_what_is_discarded_is_given_back_and_reads_as_zero() {
    for kind in KINDS {
        let ram = ram(kind, &odd()).unwrap();
        for range in [r(0, 1027), r(5000, 1541)] {
            ram.memory.fill(range, 0x5555_5555).unwrap();
        }
        let full = host_bytes(kind, &ram);
        assert!(full >= 2568 * 4096, "{kind:?}: {full}");
        ram.memory.discard(r(2, 1000)).unwrap();
        ram.memory.discard(r(6540, 1)).unwrap();
        let less = host_bytes(kind, &ram);
        assert!(
            less + 1000 * 4096 <= full,
            "{kind:?}: {full} bytes before, {less} after"
        );
        let data: Vec<PageRange> = classified(&ram.memory).runs().collect();
        assert_eq!(data, [r(0, 2), r(1002, 25), r(5000, 1540)], "{kind:?}");
        let mut page = [1; 4096];
        ram.memory.read_page(Pfn(6540), &mut page).unwrap();
        assert_eq!(page, [0; 4096]);
        assert_eq!(ram.memory.discard_granule_pages(), 1);
    }
}

const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// The pool's size, put back however the test ends.
struct PoolSize(String);

impl Drop for PoolSize {
    fn drop(&mut self) {
        // Where it could not be changed, it cannot be put back either.
        let _ = std::fs::write(POOL, &self.0);
    }
}

#[test]
fn case_45_huge_pages_are_given_back_whole_or_not_at_all() {
    let _before = PoolSize(std::fs::read_to_string(POOL).unwrap_or_default());
    let asked = std::fs::write(POOL, "8");
    let got = std::fs::read_to_string(POOL).unwrap_or_default();
    if asked.is_err() || got.trim().parse::<u32>().unwrap_or(0) < 4 {
        skipped(&format!(
            "case 45: 4 huge pages could not be reserved ({asked:?}, the pool has {})",
            got.trim()
        ));
        return;
    }
    let layout = Arc::new(Layout::new(vec![r(0, 1024), r(2048, 512)]).unwrap());
    let memory = GuestMemory::new(Arc::clone(&layout), &Backing::Hugetlbfs { path: None }).unwrap();
    assert_eq!(memory.discard_granule_pages(), 512);
    assert!(memory.present().unwrap().is_empty());
    memory.fill(r(0, 1024), 3).unwrap();
    assert_eq!(memory.present().unwrap().runs().collect::<Vec<_>>(), [r(0, 1024)]);
    memory.discard(r(0, 511)).unwrap();
    memory.discard(r(1, 1022)).unwrap();
    assert_eq!(classified(&memory).count(), 1024, "nothing whole was inside");
    memory.discard(r(511, 513)).unwrap();
    assert_eq!(classified(&memory).runs().collect::<Vec<_>>(), [r(0, 512)]);
    assert_eq!(memory.present().unwrap().count(), 512);

    hugetlb_tracking(Arc::new(memory));
    let odd = GuestMemory::new(odd(), &Backing::Hugetlbfs { path: None });
    assert!(matches!(odd, Err(Error::NotHuge { .. })));
}

/// One write is the whole huge page's.
fn hugetlb_tracking(memory: Arc<GuestMemory>) {
    use machine::DirtyTracker;
    let mut tracker = memory::trackers::UffdTracker::new(&memory).unwrap();
    tracker.start().unwrap();
    assert!(tracker.harvest().unwrap().is_empty());
    memory.write(5 * 4096, &[1]).unwrap();
    memory.write(2050 * 4096, &[1]).unwrap();
    let dirty: Vec<PageRange> = tracker.harvest().unwrap().runs().collect();
    assert_eq!(dirty, [r(0, 512), r(2048, 512)]);
    memory.discard(r(0, 512)).unwrap();
    assert_eq!(tracker.harvest().unwrap().runs().collect::<Vec<_>>(), [r(0, 512)]);
    assert!(tracker.harvest().unwrap().is_empty());
}

#[test]
fn what_is_no_ram_is_refused() {
    let memory = GuestMemory::new(odd(), &Backing::Anonymous).unwrap();
    for range in [
        r(0, 0),
        r(1026, 2),
        r(2000, 1),
        r(4999, 2),
        r(6540, 2),
        r(u64::MAX - 1, 1),
    ] {
        assert!(memory.classify(range, &mut |_, _| {}).is_err(), "{range}");
        assert!(memory.digest(range).is_err() && memory.zero(range).is_err() && memory.fill(range, 1).is_err());
        assert!(memory.discard(range).is_err() && memory.populate(range).is_err());
        let (near, _far) = UnixStream::pair().unwrap();
        let error = memory.write_to(near.as_fd(), &[], &[range], 0).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    }
    for (address, len) in [(1027 * 4096 - 1, 2), (u64::MAX, 1), (u64::MAX, 2), (5000 * 4096 - 1, 1)] {
        let mut bytes = vec![0; len];
        assert!(memory.read(address, &mut bytes).is_err(), "{address:#x}");
        assert!(memory.write(address, &bytes).is_err());
    }
    memory.write(1027 * 4096 - 1, &[1]).unwrap();
    assert!(memory.read_page(Pfn(u64::MAX), &mut [0; 4096]).is_err());
}

#[test]
fn memory_held_by_rust_vmm_outlives_us() {
    use vm_memory::{Bytes, GuestAddress};
    let memory = GuestMemory::new(odd(), &Backing::Memfd).unwrap();
    let vm = memory.vm_memory();
    vm.write_obj(77u64, GuestAddress(5000 * 4096)).unwrap();
    let mut bytes = [0; 8];
    memory.read(5000 * 4096, &mut bytes).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), 77);
    drop(memory);
    assert_eq!(vm.read_obj::<u64>(GuestAddress(5000 * 4096)).unwrap(), 77);
    vm.write_obj(78u64, GuestAddress(5000 * 4096)).unwrap();
}

#[test]
fn all_of_ram_is_populated() {
    for kind in KINDS {
        let Ram { memory, place: _place } = ram(kind, &odd()).unwrap();
        memory.populate_all().unwrap();
        assert_eq!(memory.present().unwrap(), PageSet::full(memory.layout()), "{kind:?}");
        assert_eq!(classified(&memory).count(), 0);
    }
}

#[test]
fn host_addresses_suit_kvms_large_mappings() {
    use vm_memory::{GuestAddress, GuestMemoryBackend};
    for kind in KINDS {
        let Ram { memory, place: _place } = ram(kind, &odd()).unwrap();
        for region in memory.layout().regions() {
            let address = region.start().0 * 4096;
            let host = memory.vm_memory().get_host_address(GuestAddress(address)).unwrap();
            assert_eq!(host as u64 % (2 << 20), address % (2 << 20), "{kind:?}");
        }
    }
}

#[test]
fn much_memory_is_given_back_by_several_threads_and_each_range_is_told_of_once() {
    const MIB: u64 = 256;
    let ram = memory::GuestMemory::new(Arc::new(Layout::pc(192 * MIB).unwrap()), &Backing::Anonymous).unwrap();
    ram.populate_all().unwrap();
    let range = |start: u64, end: u64| PageRange::between(Pfn(start), Pfn(end));
    // The second reaches past the end of RAM: refused whole or in part, and only that one.
    let ranges = [
        range(3, 60 * MIB),
        range(190 * MIB, 200 * MIB),
        range(70 * MIB, 180 * MIB + 1),
    ];
    let mut told = Vec::new();
    ram.discard_all(&ranges, &mut |range, result| told.push((range, result.is_ok())));
    assert_eq!(told, [(ranges[0], true), (ranges[1], false), (ranges[2], true)]);
    let present = ram.present().unwrap();
    assert_eq!(present.count_range(ranges[0]) + present.count_range(ranges[2]), 0);
    for kept in [range(0, 3), range(60 * MIB, 70 * MIB), range(180 * MIB + 1, 190 * MIB)] {
        assert_eq!(present.count_range(kept), kept.count(), "{kept}");
    }
}

#[test]
fn pages_that_come_singly_take_no_huge_pages_and_those_that_come_in_bulk_do() {
    let ram = GuestMemory::new(Arc::new(Layout::flat(64 << 10).unwrap()), &Backing::Anonymous).unwrap();
    let page = |pfn: u64| PageRange::between(Pfn(pfn), Pfn(pfn + 1));
    let present = || ram.present().unwrap().count();
    ram.copy_in(page(5), &[1; 4096]).unwrap();
    if present() == 1 {
        return skipped("this host gives no transparent huge pages");
    }
    assert_eq!(present(), 512);
    // One page in 64 of 64 MiB, and then 1 MiB of a block.
    let single: Vec<PageRange> = (0..256).map(|i| page(16384 + i * 64)).collect();
    let bulk = [PageRange::between(Pfn(512 * 20), Pfn(512 * 20 + 256))];
    for ranges in [&single[..], &bulk] {
        ram.expect(ranges);
        for range in ranges {
            ram.copy_in(*range, &vec![2; usize::try_from(range.count() << 12).unwrap()])
                .unwrap();
        }
    }
    assert_eq!(present(), 512 + 256 + 512);
    // All of RAM may have huge pages again.
    ram.settle();
    ram.copy_in(page(512 * 100), &[1; 4096]).unwrap();
    let fresh = single[0].start().0 + 3 * 512;
    ram.discard(PageRange::between(Pfn(fresh), Pfn(fresh + 512))).unwrap();
    ram.copy_in(page(fresh), &[1; 4096]).unwrap();
    assert_eq!(present(), 512 + 256 - 8 + 512 + 512 + 512);
}
