//! What the answers of an idle 8 GiB guest cost the device, in both dialects: about 7.7 GiB free, in the blocks of
//! 4 MiB that Linux hands over, or in one bitmap.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

#[path = "../tests/support/mod.rs"]
mod support;

use balloon::Dialect::{Bitmap, Standard};
use balloon::feature::{FREE_PAGE_HINT, MISC_VQ};
use criterion::{Criterion, criterion_group, criterion_main};
use machine::FreePages;
use pages::Layout;
use std::sync::Arc;
use support::{Answers, BUFFERS, Rig};

/// The answer to the one question of an 8 GiB guest, with a device that is made for it.
fn rig(dialect: balloon::Dialect, features: u64) -> (Rig, Answers) {
    let rig = Rig::cold(dialect, features, Arc::new(Layout::flat(8 << 18).unwrap()), 1);
    rig.drive(features);
    (rig, Answers::default())
}

fn standard(c: &mut Criterion) {
    let (mut rig, answers) = rig(Standard, FREE_PAGE_HINT);
    let mut session = 0;
    c.bench_function("8 GiB of hints, standard", |b| {
        b.iter(|| {
            session += 1;
            rig.device.begin(session, answers.sink()).unwrap();
            let id = rig.config_u32(8);
            rig.command(2, id);
            for block in (0..1971u64).collect::<Vec<_>>().chunks(32) {
                for i in block {
                    rig.rings[2].add(&rig.mem, &[((i + 77) << 22, 4 << 20, true)]);
                }
                rig.kick(2);
            }
            rig.command(2, 0);
            rig.device.end(session).unwrap();
            answers.take()
        });
    });
}

fn bitmap(c: &mut Criterion) {
    // Used pages in 600 runs, as in a guest that has run for a while.
    let mut bits = vec![0xffu8; 1 << 18];
    bits[..9856].fill(0);
    for i in 0..600 {
        bits[10_000 + i * 400..][..8].fill(0);
    }
    let mut header = vec![0, 0, 12, 0, 1, 0, 0, 0];
    header.resize(24, 0);
    header.extend((bits.len() as u64).to_le_bytes());
    let (mut rig, answers) = rig(Bitmap, MISC_VQ);
    rig.write(2 << 20, &header);
    rig.write((2 << 20) + 32, &bits);
    let mut session = 0u32;
    c.bench_function("8 GiB of hints, bitmap", |b| {
        b.iter(|| {
            session += 1;
            rig.send(3, &[(BUFFERS, 16, true)]);
            rig.device.begin(session, answers.sink()).unwrap();
            rig.write((2 << 20) + 8, &u64::from(session).to_le_bytes());
            rig.send(3, &[(2 << 20, 32 + (1 << 18), false)]);
            rig.device.end(session).unwrap();
            let all = answers.take();
            assert!(all.len() >= 3);
            all
        });
    });
}

criterion_group!(benches, standard, bitmap);
criterion_main!(benches);
