//! x
#![allow(clippy::unwrap_used)]
use machine::GuestRam;
use memory::{Backing, GuestMemory};
use pages::{Layout, PageRange, Pfn};
use std::sync::Arc;
fn cpu() -> f64 { let mut t: libc::timespec = unsafe { std::mem::zeroed() }; unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) }; t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9 }
fn main() {
    let m = GuestMemory::new(Arc::new(Layout::flat(65536).unwrap()), &Backing::Anonymous).unwrap();
    let all = PageRange::new(Pfn(0), 65536).unwrap();
    m.fill(all, 0x1234).unwrap();
    let small = PageRange::new(Pfn(0), 64).unwrap();
    for _ in 0..4 {
    let t = cpu(); for _ in 0..4 { std::hint::black_box(m.digest(all).unwrap()); } let d = cpu() - t;
    println!("digest 256M: {:.2} GB/s", 1.073741824 / d);
    let t = cpu(); for _ in 0..4096 { std::hint::black_box(m.digest(small).unwrap()); } let d = cpu() - t;
    println!("digest 256K in cache: {:.2} GB/s", 1.073741824 / d);
    let mut p = [1u8; 4096]; let t = cpu(); for i in 0..262144u64 { p[7] = i as u8; std::hint::black_box(xxhash_rust::xxh3::xxh3_128_with_seed(std::hint::black_box(&p), i)); } let d = cpu() - t;
    println!("xxh3 alone: {:.2} GB/s", 1.073741824 / d);
    let mut b = vec![0u8; 4096]; let t = cpu(); for _ in 0..4 { for i in 0..65536u64 { m.read(i*4096, &mut b).unwrap(); std::hint::black_box(&b); } } let d = cpu() - t;
    println!("copy alone 256M: {:.2} GB/s", 1.073741824 / d);
    }
}
