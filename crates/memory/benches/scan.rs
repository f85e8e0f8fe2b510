//! What finding holes, looking for zeroes, tracking writes and populating cost on this host.
//!
//! Memory is an 8 GiB guest with 300 MiB in use. Everything is allocated anew where a first touch is what is measured.

#![allow(missing_docs, clippy::unwrap_used)] // The macros of criterion make undocumented functions.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use machine::{DirtyTracker, GuestRam, PageKind};
use memory::trackers::{UffdTracker, Unpopulated};
use memory::{Backing, GuestMemory, Presence};
use pages::{Layout, PageRange, Pfn};
use std::hint::black_box;
use std::os::fd::AsFd;
use std::sync::Arc;

const USED_PAGES: u64 = (300 << 20) / 4096;

fn r(start: u64, count: u64) -> PageRange {
    PageRange::new(Pfn(start), count).unwrap()
}

/// An 8 GiB PC; 300 MiB in use from 64 MiB on, or a page here and there.
fn guest(backing: &Backing, scattered: bool) -> Arc<GuestMemory> {
    let layout = Arc::new(Layout::pc(8 << 18).unwrap());
    let memory = GuestMemory::new(layout, backing).unwrap();
    if scattered {
        // Every 27th page of what lies below 3 GiB and above 4 GiB.
        for i in 0..USED_PAGES {
            let pfn = memory.layout().pfn_at(i * 27).unwrap();
            memory.write(pfn.0 * 4096, &[1]).unwrap();
        }
    } else {
        memory.fill(r(1 << 14, USED_PAGES), 0x1234_5678).unwrap();
    }
    Arc::new(memory)
}

fn backings() -> [(&'static str, Backing); 2] {
    [("anonymous", Backing::Anonymous), ("memfd", Backing::Memfd)]
}

fn holes(c: &mut Criterion) {
    let mut group = c.benchmark_group("present");
    group.sample_size(20);
    for (name, backing) in backings() {
        let memory = guest(&backing, false);
        group.bench_function(format!("{name}/300M of 8G"), |b| {
            b.iter(|| black_box(memory.present().unwrap()))
        });
        if backing == Backing::Memfd {
            let seek = || memory.present_by(Presence::SeekData).unwrap();
            group.bench_function(format!("{name}/300M of 8G, SEEK_DATA"), |b| {
                b.iter(|| black_box(seek()))
            });
            let memory = guest(&backing, true);
            group.bench_function(format!("{name}/300M of 8G, scattered"), |b| {
                b.iter(|| black_box(memory.present().unwrap()));
            });
        }
    }
}

fn zeroes(c: &mut Criterion) {
    let mut group = c.benchmark_group("content");
    for (name, backing) in backings() {
        let memory = guest(&backing, false);
        // Zero pages are read to their ends; data is found at once.
        let zero = r(1 << 19 << 1, 65536);
        memory.populate(zero).unwrap();
        let batches = || (0..256).map(|i| r(zero.start().0 + i * 256, 256));
        group.throughput(Throughput::Bytes(zero.bytes()));
        group.bench_function(format!("{name}/classify 256M of zeroes, by 1M"), |b| {
            b.iter(|| {
                batches().for_each(|part| memory.classify(part, &mut |_, k| assert!(k == PageKind::Zero)).unwrap())
            });
        });
        // A round's scan: the pages in use, a megabyte a call.
        let used = r(1 << 14, USED_PAGES);
        group.throughput(Throughput::Bytes(used.bytes()));
        group.bench_function(format!("{name}/classify 300M of data, by 1M"), |b| {
            let batches = || (0..USED_PAGES / 256).map(|i| r(used.start().0 + i * 256, 256));
            b.iter(|| {
                batches().for_each(|part| memory.classify(part, &mut |_, k| assert!(k == PageKind::Data)).unwrap())
            });
        });
        group.bench_function(format!("{name}/classify 300M of data, by 64K"), |b| {
            let batches = || (0..USED_PAGES / 16).map(|i| r(used.start().0 + i * 16, 16));
            b.iter(|| {
                batches().for_each(|part| memory.classify(part, &mut |_, k| assert!(k == PageKind::Data)).unwrap())
            });
        });
        let used = r(1 << 14, 65536);
        group.throughput(Throughput::Bytes(used.bytes()));
        group.bench_function(format!("{name}/digest 256M"), |b| {
            b.iter(|| black_box(memory.digest(used).unwrap()))
        });
    }
}

/// What sending costs besides the copy: the null device takes everything and reads nothing.
fn sending(c: &mut Criterion) {
    let mut group = c.benchmark_group("send");
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
    for (name, backing) in backings() {
        let memory = guest(&backing, false);
        for (shape, ranges) in [
            ("1M in one", vec![r(1 << 14, 256)]),
            (
                "1M, every other page",
                (0..256).map(|i| r((1 << 14) + i * 2, 1)).collect(),
            ),
            (
                "1M, pages far apart",
                (0..256).map(|i| r((1 << 14) + i * 300, 1)).collect(),
            ),
            ("1M, a hole", vec![r(1 << 19, 256)]),
        ] {
            group.bench_function(format!("{name}/{shape}"), |b| {
                b.iter(|| memory.write_to(null.as_fd(), &[1; 64], &ranges, 0).unwrap());
            });
        }
    }
}

fn tracking(c: &mut Criterion) {
    let mut group = c.benchmark_group("uffd");
    group.sample_size(20);
    for (name, backing, unpopulated) in [
        ("anonymous", Backing::Anonymous, Unpopulated::Leave),
        ("memfd", Backing::Memfd, Unpopulated::Leave),
        ("memfd with markers", Backing::Memfd, Unpopulated::Protect),
    ] {
        let memory = guest(&backing, false);
        let mut tracker = UffdTracker::with_unpopulated(&memory, unpopulated).unwrap();
        group.bench_function(format!("{name}/start and stop, 300M of 8G"), |b| {
            b.iter(|| {
                tracker.start().unwrap();
                tracker.stop().unwrap();
            });
        });
        tracker.start().unwrap();
        group.bench_function(format!("{name}/harvest of nothing"), |b| {
            b.iter(|| tracker.harvest().unwrap())
        });
        let write = || (0..500).for_each(|i| memory.write(((1 << 14) + i * 151) * 4096, &[1]).unwrap());
        group.bench_function(format!("{name}/500 first writes"), |b| {
            b.iter_batched(|| tracker.harvest().unwrap(), |_| write(), BatchSize::PerIteration);
        });
        group.bench_function(format!("{name}/harvest of 500 pages"), |b| {
            b.iter_batched(
                write,
                |()| assert!(tracker.harvest().unwrap().count() >= 500),
                BatchSize::PerIteration,
            );
        });
    }
}

fn touching(c: &mut Criterion) {
    let mut group = c.benchmark_group("touch");
    group.sample_size(10);
    let used = r(0, 65536);
    for (name, backing) in backings() {
        let new = || GuestMemory::new(Arc::new(Layout::flat(used.count()).unwrap()), &backing).unwrap();
        group.throughput(Throughput::Elements(used.count()));
        group.bench_function(format!("{name}/fill 256M, cold"), |b| {
            b.iter_batched(
                new,
                |memory| memory.fill(used, 7).map(|()| memory),
                BatchSize::PerIteration,
            );
        });
        group.bench_function(format!("{name}/fill 256M, populated"), |b| {
            let populated = || {
                let memory = new();
                memory.populate_all().unwrap();
                memory
            };
            b.iter_batched(
                populated,
                |memory| memory.fill(used, 7).map(|()| memory),
                BatchSize::PerIteration,
            );
        });
        group.bench_function(format!("{name}/populate 256M"), |b| {
            b.iter_batched(
                new,
                |memory| memory.populate_all().map(|()| memory),
                BatchSize::PerIteration,
            );
        });
    }
}

criterion_group!(benches, holes, zeroes, sending, tracking, touching);
criterion_main!(benches);
