//! Set algebra at the sizes a migration has: 8 GiB of RAM with 300 MiB in use, whole and in scattered pages.
#![allow(clippy::unwrap_used)]
use criterion::{Criterion, criterion_group, criterion_main};
use pages::{Layout, PageRange, PageSet, Pfn};
use std::hint::black_box;
use std::sync::Arc;

fn sets(c: &mut Criterion) {
    let layout = Arc::new(Layout::pc(8 << 18).unwrap());
    let mut contiguous = PageSet::empty(&layout);
    contiguous.insert_range(PageRange::new(Pfn(4096), 76_800).unwrap());
    let mut scattered = PageSet::empty(&layout);
    for i in 0..57_000u64 {
        scattered.insert(layout.pfn_at(i * 36).unwrap());
    }
    let full = PageSet::full(&layout);
    let bitmap = scattered.to_bitmap();

    let mut group = c.benchmark_group("sets of 8 GiB");
    group.bench_function("union", |b| {
        b.iter(|| black_box(contiguous.clone()).union_with(&scattered))
    });
    group.bench_function("subtract", |b| b.iter(|| black_box(full.clone()).subtract(&scattered)));
    group.bench_function("count", |b| b.iter(|| black_box(&scattered).count()));
    group.bench_function("runs, contiguous", |b| b.iter(|| black_box(&contiguous).runs().count()));
    group.bench_function("runs, 57,000 pages", |b| {
        b.iter(|| black_box(&scattered).runs().count())
    });
    group.bench_function("insert 2048 ranges of 4 MiB", |b| {
        b.iter(|| {
            let mut set = PageSet::empty(&layout);
            for i in 0..2048 {
                set.insert_range(PageRange::new(Pfn(i * 1024), 1024).unwrap());
            }
            set
        });
    });
    group.bench_function("from a bitmap by frame number", |b| {
        b.iter(|| PageSet::empty(&layout).insert_bitmap(Pfn(0), black_box(&bitmap)));
    });
    group.bench_function("to a bitmap", |b| b.iter(|| black_box(&scattered).to_bitmap()));
    group.finish();
}

/// The same 300 MiB of 4 TiB.
fn large_sets(c: &mut Criterion) {
    let layout = Arc::new(Layout::pc(4 << 28).unwrap());
    let full = PageSet::full(&layout);
    let mut used = PageSet::empty(&layout);
    for i in 0..800 {
        used.insert_range(PageRange::new(Pfn(i * 1_000_003), 96).unwrap());
    }
    let mut group = c.benchmark_group("sets of 4 TiB");
    group.bench_function("what is left out: full, subtract, count, runs", |b| {
        b.iter(|| {
            let mut rest = black_box(&full).clone();
            rest.subtract(black_box(&used));
            (rest.count(), rest.runs().count())
        });
    });
    group.bench_function("clone, subtract, union, count, runs", |b| {
        b.iter(|| {
            let mut all = black_box(&full).clone();
            let taken = all.subtract(black_box(&used));
            let put = all.union_with(black_box(&used));
            (taken, put, all.count(), all.runs().count())
        });
    });
    group.bench_function("clone", |b| b.iter(|| black_box(&used).clone()));
    group.bench_function("runs", |b| b.iter(|| black_box(&used).runs().count()));
    group.finish();
}

criterion_group!(benches, sets, large_sets);
criterion_main!(benches);
