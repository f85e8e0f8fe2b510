//! A guest that lies about its free pages loses at most pages that it lied about: whatever it sends, no page reaches a
//! migration, the host's discards or the balloon that none of its buffers named. And a guest that writes its buffers
//! while they are read.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use balloon::Config;
use balloon::Dialect::{self, Bitmap, BitmapRfc};
use balloon::DiscardPolicy::{AtOnce, MarkOnly};
use balloon::feature::*;
use machine::{Answer, FreePages};
use pages::{Layout, PageRange};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::*;
use vm_memory::{Bytes, GuestAddress};

/// Two regions that touch, a hole, and an end in the middle of a word.
fn layout() -> Arc<Layout> {
    Arc::new(Layout::new(vec![range(0, 1000), range(1000, 1000), range(2500, 777)]).unwrap())
}

fn rig(dialect: Dialect) -> Rig {
    let misc = if dialect == Bitmap { MISC_VQ } else { 0 };
    let features = PAGE_BITMAP | MUST_TELL_HOST | misc;
    let config = Config {
        discard: AtOnce,
        ..Config::new(dialect, features)
    };
    let rig = Rig::configured(config, layout(), 1);
    rig.drive(features);
    rig
}

/// The pages of RAM that a buffer names, whatever else is wrong with it: bit by bit, as a person would read it.
fn named(dialect: Dialect, buffer: &[u8]) -> BTreeSet<u64> {
    let (at, header) = if dialect == Bitmap { (16, 32) } else { (8, 28) };
    let layout = layout();
    let mut all = BTreeSet::new();
    let Some(start) = buffer.get(at..at + 8) else {
        return all;
    };
    let start = u64::from_le_bytes(start.try_into().unwrap());
    for (i, byte) in buffer.iter().skip(header).enumerate() {
        for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
            let page = start.checked_add(i as u64 * 8 + bit);
            all.extend(page.filter(|p| layout.contains(pages::Pfn(*p))));
        }
    }
    all
}

fn pages_of(ranges: impl IntoIterator<Item = PageRange>) -> BTreeSet<u64> {
    ranges.into_iter().flat_map(|r| r.start().0..r.end().0).collect()
}

/// One buffer: where its window starts, its bitmap, and bytes of it that are not what they should be.
#[derive(Clone, Debug)]
struct Lie {
    start: u64,
    bitmap: Vec<u8>,
    wrong: Vec<(usize, u8)>,
    split: usize,
}

fn lie() -> impl Strategy<Value = Lie> {
    let start = prop_oneof![
        8 => (0u64..60).prop_map(|word| word * 64),
        1 => Just(u64::MAX - 63),
        1 => any::<u64>(),
    ];
    let byte = prop_oneof![Just(0u8), Just(0xff), any::<u8>()];
    let wrong = prop_oneof![
        3 => Just(Vec::new()),
        1 => prop::collection::vec((0usize..40, prop_oneof![Just(0u8), Just(1), Just(64), any::<u8>()]), 1..3),
    ];
    (start, prop::collection::vec(byte, 0..200), wrong, 1usize..100).prop_map(|(start, bitmap, wrong, split)| Lie {
        start,
        bitmap,
        wrong,
        split,
    })
}

/// Sends a buffer in two descriptors.
fn tell(rig: &mut Rig, queue: usize, buffer: &[u8], split: usize) {
    let (one, two) = buffer.split_at(split.min(buffer.len()));
    rig.write(BUFFERS, one);
    rig.write(2 * BUFFERS, two);
    let chain = [
        (BUFFERS, one.len() as u32, false),
        (2 * BUFFERS, two.len() as u32, false),
    ];
    assert_eq!(rig.send(queue, &chain).len(), 1);
}

fn spoil(buffer: &mut [u8], wrong: &[(usize, u8)]) {
    for (at, byte) in wrong {
        if let Some(there) = buffer.get_mut(*at) {
            *there = *byte;
        }
    }
}

/// Each buffer goes in or comes out; some are the one before, again.
fn inflating(dialect: Dialect, lies: &[(bool, bool, Lie)]) {
    let mut rig = rig(dialect);
    let silent = |page: &u64| !page.is_multiple_of(64);
    let minus = |a: &BTreeSet<u64>, b: &BTreeSet<u64>| -> BTreeSet<u64> { a.difference(b).copied().collect() };
    let mut model = BTreeSet::new();
    let mut aside: Option<(BTreeSet<u64>, BTreeSet<u64>)> = None;
    let mut last: Option<Vec<u8>> = None;
    let mut said: Option<(bool, Vec<u8>)> = None;
    for (i, (inflate, again, lie)) in lies.iter().enumerate() {
        let mut buffer = bitmap_buffer(dialect, lie.start, &lie.bitmap);
        spoil(&mut buffer, &lie.wrong);
        let fresh_one = (lie.wrong.is_empty() && lie.start.is_multiple_of(64), buffer);
        let (honest, buffer) = said.take().filter(|_| *again).unwrap_or(fresh_one);
        said = Some((honest, buffer.clone()));
        let named = named(dialect, &buffer);
        let before = rig.device.lock().counters();
        tell(&mut rig, usize::from(!inflate), &buffer, lie.split);
        let after = rig.device.lock().counters();
        let refused = after.malformed > before.malformed;
        assert!(!refused || !honest, "buffer {i} was refused");
        let mut fresh = BTreeSet::new();
        let same = last.as_ref() == Some(&buffer);
        if refused || (*inflate && named.is_empty()) || (!inflate && same && aside.is_some()) {
            (model, aside) = (BTreeSet::new(), None);
        } else {
            if let Some((there, suspect)) = aside.take() {
                let out = if *inflate { BTreeSet::new() } else { named.clone() };
                let back: BTreeSet<u64> = minus(&suspect, &out).into_iter().filter(silent).collect();
                fresh.extend(minus(&back, &there));
                model = there.union(&back).copied().collect();
            }
            if *inflate && same {
                aside = Some((std::mem::take(&mut model), named));
            } else if *inflate {
                fresh.extend(minus(&named, &model));
                model.extend(named);
            } else {
                model = minus(&model, &named);
            }
        }
        if !refused {
            last = Some(buffer);
        }
        assert_eq!(pages_of(rig.ballooned()), model, "buffer {i}");
        let given = pages_of(rig.take_discards());
        assert_eq!(given, fresh, "buffer {i}: what is given back is what was put in");
        let skippable = pages_of(rig.device.ballooned().unwrap().runs());
        let expected: BTreeSet<u64> = model.iter().copied().filter(silent).collect();
        assert_eq!(skippable, expected, "buffer {i}");
    }
}

/// How many answers named pages as free.
fn answering(lies: &[(u16, u64, Lie)]) -> u64 {
    let mut said = 0;
    let mut rig = rig(Bitmap);
    let answers = Answers::default();
    let request = 3 * BUFFERS;
    for session in 1..4u32 {
        rig.send(3, &[(request, 16, true)]);
        rig.device.begin(session, answers.sink()).unwrap();
        let id: u64 = rig.mem.read_obj(GuestAddress(request + 8)).unwrap();
        assert_eq!(rig.rings[3].used(&rig.mem).len(), 1);
        assert_eq!(id, u64::from(session));
        let mut claimed = BTreeSet::new();
        let mut due = 0;
        for (flag, off, lie) in lies {
            // Mostly the window that is due, mostly of this request.
            let start = if off % 4 == 0 { lie.start } else { due };
            let mut buffer = bitmap_buffer(Bitmap, start, &lie.bitmap);
            buffer[4..6].copy_from_slice(&flag.to_le_bytes());
            let echo = if off % 7 == 0 { off / 7 } else { id };
            buffer[8..16].copy_from_slice(&echo.to_le_bytes());
            spoil(&mut buffer, &lie.wrong);
            due = start.saturating_add(lie.bitmap.len() as u64 * 8);
            claimed.extend(named(Bitmap, &buffer));
            let before = rig.device.counts();
            tell(&mut rig, 3, &buffer, lie.split);
            let after = rig.device.counts();
            let counted = |c: machine::BalloonCounts| c.answers + c.late + c.malformed;
            assert_eq!(counted(after), counted(before) + 1, "each buffer is counted once");
            for (of, answer) in answers.take() {
                assert_eq!(of, session);
                if let Answer::Free(ranges) = answer {
                    let free = pages_of(ranges);
                    said += u64::from(!free.is_empty());
                    assert!(free.is_subset(&claimed), "{free:?} of {claimed:?}");
                }
            }
        }
        rig.device.end(session).unwrap();
        assert_eq!(rig.ballooned(), [], "answers do not inflate");
    }
    said
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn pages_that_no_buffer_named_are_never_ballooned(
        lies in prop::collection::vec((any::<bool>(), prop::bool::weighted(0.4), lie()), 1..12),
    ) {
        inflating(Bitmap, &lies);
        inflating(BitmapRfc, &lies);
    }
}

#[test]
fn pages_that_no_answer_named_are_never_free() {
    let flag = prop::sample::select(vec![0u16, 0, 0, 1, 2]);
    let lies = prop::collection::vec((flag, 1u64..30, lie()), 1..8);
    let said = AtomicU64::new(0);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(300));
    let run = runner.run(&lies, |lies| {
        said.fetch_add(answering(&lies), Ordering::Relaxed);
        Ok(())
    });
    run.unwrap();
    let said = said.into_inner();
    assert!(
        said > 30,
        "hardly any answer was believed ({said}), so nothing was tried"
    );
}

/// Runs `write` over and over in a thread of its own while `read` does, until `read` says that it has seen enough.
fn while_written(write: impl Fn(u64) + Send + 'static, mut read: impl FnMut() -> bool) {
    let stop = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            for i in 0.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                write(i);
            }
        }
    });
    let hung = Instant::now() + Duration::from_secs(120);
    let mut enough = false;
    while !enough && Instant::now() < hung {
        enough = read();
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    assert!(
        enough,
        "no buffer was ever overwritten, or none ever left alone, while it was read"
    );
}

#[test]
fn a_bitmap_that_is_overwritten_while_it_is_read_is_counted_and_does_nothing() {
    for dialect in [Bitmap, BitmapRfc] {
        let features = PAGE_BITMAP;
        let mut rig = Rig::configured(
            Config {
                discard: MarkOnly,
                ..Config::new(dialect, features)
            },
            flat(),
            1,
        );
        rig.drive(features);
        // Two good buffers in turn, of two windows: 512 KiB of bitmap, of which what is RAM is set.
        let len = 512 << 10;
        let mut bitmap = vec![0u8; len];
        bitmap[..64].fill(0xff);
        let buffer = bitmap_buffer(dialect, 4096, &bitmap);
        rig.write(BUFFERS, &buffer);
        let start_at = if dialect == Bitmap { 16 } else { 8 };
        let starts = [4096u64, 8192];
        let mem = Arc::clone(&rig.mem);
        let mut sent = 0u64;
        while_written(
            // One store of 8 bytes: the header is always one of the two.
            move |i| {
                mem.write_obj(starts[i as usize % 2], GuestAddress(BUFFERS + start_at))
                    .unwrap()
            },
            || {
                sent += 1;
                let used = rig.send(0, &[(BUFFERS, buffer.len() as u32, false)]);
                assert_eq!(used.len(), 1);
                let counters = rig.device.lock().counters();
                assert_eq!(counters.malformed, counters.torn, "each header is a good one");
                for run in rig.ballooned() {
                    assert!(run == range(4096, 512) || run == range(8192, 512), "{run}");
                }
                counters.torn > 2 && counters.torn + 2 < sent && rig.ballooned().len() == 2
            },
        );
    }
}

#[test]
fn an_answer_that_is_overwritten_while_it_is_read_is_dropped_whole() {
    let mut rig = Rig::new(Bitmap, MISC_VQ);
    let answers = Answers::default();
    let request = 3 * BUFFERS;
    let mut bitmap = vec![0u8; 512 << 10];
    bitmap[..64].fill(0xff);
    let mut buffer = bitmap_buffer(Bitmap, 0, &bitmap);
    buffer[4] = 1;
    rig.write(BUFFERS, &buffer);
    let id = Arc::new(AtomicU64::new(0));
    let (mem, echo) = (Arc::clone(&rig.mem), Arc::clone(&id));
    let (mut session, mut whole, mut dropped) = (0, 0, 0);
    while_written(
        // The next thing in the driver's one buffer is an inflation: its request id is 0.
        move |i| {
            let id = if i % 2 == 0 { echo.load(Ordering::Relaxed) } else { 0 };
            mem.write_obj(id, GuestAddress(BUFFERS + 8)).unwrap();
        },
        || {
            session += 1;
            rig.send(3, &[(request, 16, true)]);
            let before = rig.device.counts();
            rig.device.begin(session, answers.sink()).unwrap();
            id.store(u64::from(session), Ordering::Relaxed);
            rig.send(3, &[(BUFFERS, buffer.len() as u32, false)]);
            let counts = rig.device.counts().since(before);
            assert_eq!(counts.answers + counts.malformed + counts.late, 1);
            match answers.take().as_slice() {
                [(_, Answer::Free(free)), (_, Answer::Covered(_)), (_, Answer::Finished)] => {
                    assert_eq!((free.as_slice(), counts.answers), ([range(0, 512)].as_slice(), 1));
                    whole += 1;
                }
                // Overwritten in the middle, and so the whole answer is dropped.
                [(_, Answer::Finished)] => {
                    assert_eq!((counts.malformed, counts.torn), (1, 1));
                    dropped += 1;
                }
                // Overwritten before: it is no answer.
                [] => assert_eq!(counts.answers, 0),
                other => panic!("{other:?}"),
            }
            rig.device.end(session).unwrap();
            whole > 2 && dropped > 2
        },
    );
}

/// The driver writes its bitmap first and its header last: a rewrite that has begun shows in the bitmap alone.
#[test]
fn quirk_04_a_bitmap_that_changes_behind_an_unchanged_header_is_torn() {
    for dialect in [Bitmap, BitmapRfc] {
        let mut rig = Rig::new(dialect, PAGE_BITMAP);
        let len = 512 << 10;
        let buffer = bitmap_buffer(dialect, 0, &vec![0u8; len]);
        rig.write(BUFFERS, &buffer);
        let last = BUFFERS + buffer.len() as u64 - 8;
        let mem = Arc::clone(&rig.mem);
        while_written(
            move |i| mem.write_obj(i, GuestAddress(last)).unwrap(),
            || {
                rig.send(0, &[(BUFFERS, buffer.len() as u32, false)]);
                let counters = rig.device.lock().counters();
                assert_eq!(counters.malformed, counters.torn, "the header is a good one");
                counters.torn > 2
            },
        );
    }
    let mut rig = Rig::new(Bitmap, MISC_VQ);
    let answers = Answers::default();
    let mut buffer = bitmap_buffer(Bitmap, 0, &vec![0u8; 512 << 10]);
    buffer[4] = 1;
    rig.write(BUFFERS, &buffer);
    let last = BUFFERS + buffer.len() as u64 - 8;
    let mem = Arc::clone(&rig.mem);
    let mut session = 0;
    while_written(
        move |i| mem.write_obj(i, GuestAddress(last)).unwrap(),
        || {
            session += 1;
            rig.send(3, &[(3 * BUFFERS, 16, true)]);
            rig.device.begin(session, answers.sink()).unwrap();
            rig.write(BUFFERS + 8, &u64::from(session).to_le_bytes());
            rig.send(3, &[(BUFFERS, buffer.len() as u32, false)]);
            rig.device.end(session).unwrap();
            rig.device.counts().torn > 2
        },
    );
}
