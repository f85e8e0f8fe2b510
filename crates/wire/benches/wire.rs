//! What the wire format costs: a batch of 256 pages in one run and in 256, and control frames small and large.
#![allow(clippy::unwrap_used)]

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use pages::{Layout, PageRange, Pfn};
use std::hint::black_box;
use wire::batch::{BatchBuilder, Run, RunKind, decode_header, decode_runs};
use wire::{Message, Skip, SkipReason, frame};

const PAGES: u64 = 256;

/// 256 pages of data in `count` runs, with a gap behind each.
fn runs(count: u64) -> Vec<Run> {
    let pages = PAGES / count;
    let run = |i| Run {
        range: PageRange::between(Pfn(i * (pages + 1)), Pfn(i * (pages + 1) + pages)),
        kind: RunKind::Data,
    };
    (0..count).map(run).collect()
}

fn batches(c: &mut Criterion) {
    let layout = Layout::flat(8 << 18).unwrap();
    let mut group = c.benchmark_group("batch of 256 pages");
    group.throughput(Throughput::Elements(PAGES));
    for count in [1, PAGES] {
        let runs = runs(count);
        let mut builder = BatchBuilder::new(0);
        let encode = |builder: &mut BatchBuilder| {
            builder.start(0);
            for run in &runs {
                builder.push(*run).unwrap();
            }
            black_box(builder.finish().unwrap().1);
        };
        group.bench_function(format!("encode, {count} runs"), |b| b.iter(|| encode(&mut builder)));
        let mut builder = BatchBuilder::new(0);
        for run in &runs {
            builder.push(*run).unwrap();
        }
        let head = builder.finish().unwrap().0.to_vec();
        let mut out = Vec::new();
        group.bench_function(format!("decode, {count} runs"), |b| {
            b.iter(|| {
                let header = decode_header(head[..40].try_into().unwrap()).unwrap();
                decode_runs(&header, black_box(&head[40..]), &layout, &mut out).unwrap();
            });
        });
    }
}

fn frames(c: &mut Criterion) {
    let range = |i: u64| PageRange::between(Pfn(3 * i), Pfn(3 * i + 2));
    let skip = Message::Skip(Skip {
        reason: SkipReason::Hinted,
        ranges: (0..32_768).map(range).collect(),
    });
    let section = Message::Section(machine::Section {
        name: "vcpu0".to_owned(),
        version: 1,
        data: vec![0x5a; 64 << 10],
    });
    let end = Message::RoundEnd { round: 3, last: false };
    let mut group = c.benchmark_group("frame");
    for (name, message) in [
        ("RoundEnd", end),
        ("Skip of 32768", skip),
        ("Section of 64 KiB", section),
    ] {
        let bytes = frame::encode(&message).unwrap();
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function(format!("encode {name}"), |b| {
            b.iter(|| frame::encode(black_box(&message)).unwrap())
        });
        group.bench_function(format!("decode {name}"), |b| {
            b.iter_batched_ref(
                frame::Decoder::new,
                |decoder| decoder.push(&mut &bytes[..]).unwrap().unwrap(),
                BatchSize::SmallInput,
            );
        });
    }
}

criterion_group!(benches, batches, frames);
criterion_main!(benches);
