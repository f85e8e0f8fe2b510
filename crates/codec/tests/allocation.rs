//! Unpacking makes no room for what a peer claims, and a stream's codecs make theirs once.
//!
//! A file of its own because the allocator is the whole program's; it counts each thread's memory apart. What zstd's C
//! code takes is not in it: that is a context of a fixed size, as pages are unpacked in one go and without a window.
#![allow(clippy::unwrap_used)]

use codec::{Packer, Unpacker};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use wire::batch::Codec;

thread_local! {
    static TAKEN: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; the counter is a plain thread-local number.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends allocates after its counter is gone: nothing is lost by not counting that.
        let _ = TAKEN.try_with(|taken| taken.set(taken.get().saturating_add(layout.size())));
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises about `pointer` and `layout` are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The bytes that `work` allocated, freed or not.
fn taken_by(work: impl FnOnce()) -> usize {
    let before = TAKEN.get();
    work();
    TAKEN.get() - before
}

#[test]
fn a_stream_allocates_once() {
    let raw = vec![7; 1 << 20];
    for codec in Codec::ALL {
        let (mut packer, mut unpacker) = (Packer::default(), Unpacker::default());
        let mut out = vec![0; raw.len()];
        let mut round = || {
            let packed = packer.pack(codec, 1, &raw).unwrap().unwrap();
            unpacker.unpack(codec, packed, &mut out).unwrap();
        };
        let first = taken_by(&mut round);
        assert!((1 << 20..2 << 20).contains(&first), "{codec}: {first} bytes");
        assert_eq!(taken_by(&mut round), 0, "{codec}");
    }
}

#[test]
fn case_19_a_bomb_makes_no_room() {
    for codec in Codec::ALL {
        let bomb = Packer::default()
            .pack(codec, 1, &vec![0; 64 << 20])
            .unwrap()
            .unwrap()
            .to_vec();
        let mut claims = vec![0x28, 0xB5, 0x2F, 0xFD, 0xE0];
        claims.extend((1u64 << 40).to_le_bytes());
        claims.extend([0x01, 0, 0]);
        for packed in [&bomb[..], &claims, &[0xFF; 3000]] {
            let mut page = [0; 4096];
            let taken = taken_by(|| assert!(Unpacker::default().unpack(codec, packed, &mut page).is_err()));
            assert!(taken < 16 << 10, "{codec}: {taken} bytes");
        }
    }
}
