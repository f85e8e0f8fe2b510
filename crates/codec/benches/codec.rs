//! What packing and unpacking a batch of 1 MiB costs a core: pages of a kernel-like mix (a third random, a third text, a
//! third sparse), and random ones.
#![allow(clippy::unwrap_used)]

use codec::{Packer, Unpacker};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use wire::batch::Codec;

const BYTES: usize = 1 << 20;

fn mixed() -> Vec<u8> {
    let random = random();
    let words: Vec<&[u8]> = vec![
        b"inode ",
        b"page ",
        b"dentry ",
        b"slab ",
        b"\0\0\0\0\xff\xff\xff\x81",
        b"task ",
    ];
    let mut out = Vec::with_capacity(BYTES);
    for (i, page) in random.chunks(4096).enumerate() {
        let start = out.len();
        match i % 3 {
            0 => out.extend_from_slice(page),
            1 => page
                .iter()
                .for_each(|b| out.extend_from_slice(words[usize::from(*b) % words.len()])),
            _ => page.chunks(128).for_each(|part| {
                out.extend_from_slice(&part[..12]);
                out.extend_from_slice(&[0; 116]);
            }),
        }
        out.truncate(start + 4096);
    }
    out
}

fn random() -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..BYTES / 8).flat_map(|_| next()).collect()
}

fn batches(c: &mut Criterion) {
    for (name, raw) in [("mixed", mixed()), ("random", random())] {
        let mut group = c.benchmark_group(format!("1 MiB, {name}"));
        group.throughput(Throughput::Bytes(BYTES as u64));
        for (codec, level) in [(Codec::Lz4, 1), (Codec::Zstd, 1), (Codec::Zstd, 3)] {
            let mut packer = Packer::default();
            group.bench_function(format!("pack, {codec}:{level}"), |b| {
                b.iter(|| packer.pack(codec, level, black_box(&raw)).unwrap().map(<[u8]>::len));
            });
            let Some(packed) = packer.pack(codec, level, &raw).unwrap().map(<[u8]>::to_vec) else {
                continue;
            };
            let (mut unpacker, mut out) = (Unpacker::default(), vec![0; BYTES]);
            group.bench_function(format!("unpack, {codec}:{level}"), |b| {
                b.iter(|| unpacker.unpack(codec, black_box(&packed), &mut out).unwrap());
            });
        }
        group.finish();
    }
}

criterion_group!(benches, batches);
criterion_main!(benches);
