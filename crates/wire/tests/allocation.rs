//! No input makes a decoder allocate beyond its limits: a counting allocator, and the worst payloads there are.
//!
//! A file of its own because the allocator is the whole program's; it counts each thread's memory apart.
#![allow(clippy::unwrap_used)]

mod common;

use common::{batch, batch_by_hand, frame_by_hand};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use wire::batch::{decode_header, decode_runs};
use wire::frame::{Decoder, Kind};

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; the counters are plain thread-local numbers.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(isize::try_from(layout.size()).unwrap_or(isize::MAX));
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-isize::try_from(layout.size()).unwrap_or(isize::MAX));
        // SAFETY: the caller's promises about `pointer` and `layout` are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(change: isize) {
    // A thread that ends frees memory after its counters are gone: nothing is lost by not counting that.
    let _ = HELD.try_with(|held| {
        held.set(held.get().saturating_add(change));
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

/// The most bytes that `work` held at once beyond what was there before.
fn peak_bytes<T>(work: impl FnOnce() -> T) -> (T, isize) {
    let before = HELD.get();
    PEAK.set(before);
    let result = work();
    (result, PEAK.get() - before)
}

/// What a frame may cost: its payload's buffer, with room to grow, and what it decodes to.
const FRAME_BOUND: isize = 12 << 20;

fn refused_within(what: &str, frame: &[u8]) {
    let (result, peak) = peak_bytes(|| Decoder::new().push(&mut &frame[..]).err());
    assert!(result.is_some(), "{what} was taken");
    assert!(peak < FRAME_BOUND, "{what}: {peak} bytes");
}

#[test]
fn the_counter_counts() {
    let (_, peak) = peak_bytes(|| vec![1u8; 3 << 20].len());
    assert!(peak >= 3 << 20, "{peak}");
}

#[test]
fn case_19_no_length_in_a_payload_is_believed() {
    for kind in Kind::ALL {
        let variant = u8::try_from(kind.number() - 1).unwrap();
        for ahead in [&[][..], &[0], &[1], &[1, b'x'], &[1, b'x', 1]] {
            for len in [1u64 << 20, 1 << 31, 1 << 40, u64::MAX] {
                let payload = [&[variant][..], ahead, &[253], &len.to_le_bytes(), &[0; 30]].concat();
                refused_within(kind.name(), &frame_by_hand(kind.number(), &payload));
            }
        }
    }
}

#[test]
fn case_19_a_full_frame_of_the_smallest_elements_stays_bounded() {
    let full = |ahead: &[u8], elements: u32, element: &[u8]| {
        [
            ahead,
            &[252],
            &elements.to_le_bytes(),
            &element.repeat(elements as usize),
        ]
        .concat()
    };
    let reasons = full(&[2], (500 << 10) - 16, &[0]);
    refused_within("half a million empty reasons", &frame_by_hand(3, &reasons));
    let ranges = full(&[3, 0], (500 << 10) - 16, &[0, 1]);
    refused_within("half a million ranges", &frame_by_hand(4, &ranges));
    let sums = full(&[8, 1], (1 << 20) - 16, &[0]);
    refused_within("a million digests", &frame_by_hand(9, &sums));
    let mut extras = vec![0, 1, b'x', 1, 0, 1, 1, 0, 0, 252, 0, 0, 1, 0];
    // Names of three ASCII characters, all different; empty values.
    extras.extend((0..1u32 << 16).flat_map(|i| {
        let [a, b, c, _] = ((i & 0x7f) | (i << 1 & 0x7f00) | (i << 2 & 0x7f_0000)).to_le_bytes();
        [3, a, b, c, 0]
    }));
    refused_within("65536 extras", &frame_by_hand(1, &extras));
    let regions = full(&[0, 1, b'x'], 200_000, &[0, 1]);
    refused_within("200000 regions", &frame_by_hand(1, &regions));
}

#[test]
fn case_19_batch_tables_stay_bounded() {
    let layout = common::layout();
    let raw = common::Raw {
        flags: 0,
        stream: 0,
        round: 0,
        seq: 0,
        runs: u32::MAX,
        payload_bytes: u32::MAX,
    };
    let (head, _) = batch_by_hand(raw, &[]);
    let (result, peak) = peak_bytes(|| decode_header(&head).is_err());
    assert!(result && peak < 1024, "{peak}");

    let entries = vec![(0, 1u64 << 40, 1, 0); 4096];
    let (head, table) = batch(&entries, 0);
    let header = decode_header(&head).unwrap();
    let (result, peak) = peak_bytes(|| decode_runs(&header, &table, &layout, &mut Vec::new()).is_err());
    assert!(result && peak < 256 << 10, "{peak}");
}

#[test]
fn a_decoder_reserves_nothing_for_bytes_that_have_not_come() {
    let mut head = frame_by_hand(7, &[]);
    head[..4].copy_from_slice(&(1u32 << 20).to_le_bytes());
    let (result, peak) = peak_bytes(|| Decoder::new().push(&mut &head[..]));
    assert_eq!(result, Ok(None));
    assert!(peak < 1024, "{peak}");
}

#[test]
fn a_builder_allocates_once() {
    let (mut builder, peak) = peak_bytes(|| wire::batch::BatchBuilder::new(0));
    assert!(peak < 128 << 10, "{peak}");
    let run = |i: u64| wire::batch::Run {
        range: common::range(i * 2, 1),
        kind: wire::batch::RunKind::Zero,
    };
    let (_, peak) = peak_bytes(|| {
        for _ in 0..3 {
            builder.start(0);
            (0..4096).for_each(|i| assert!(builder.push(run(i)).unwrap()));
            assert!(!builder.push(run(4096)).unwrap());
            builder.finish().unwrap();
        }
    });
    assert_eq!(peak, 0);
}
