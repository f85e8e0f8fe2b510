//! RAM that a guest has not touched takes nothing from the host.
#![allow(clippy::unwrap_used)]

mod common;

use common::{config, start};
use machine::GuestRam;
use pages::PAGE_BYTES;
use softguest::GuestConfig;
use std::time::Duration;

const MIB: u64 = 1 << 20;

#[test]
fn an_idle_fresh_guest_holds_little_more_than_it_uses_whatever_its_size() {
    for gib in [8, 64] {
        let guest = start(GuestConfig {
            used_bytes: 300 * MIB,
            ..config(gib << 18)
        });
        guest.run_for(Duration::from_millis(200)).unwrap();
        assert_eq!(guest.self_check().unwrap().pages_checked, 300 * MIB / PAGE_BYTES);
        let present = guest.ram().present().unwrap().count() * PAGE_BYTES;
        println!("{gib} GiB guest that uses 300 MiB: {} MiB present", present / MIB);
        assert!(present >= 240 * MIB, "{present}");
        assert!(present <= 330 * MIB, "{gib} GiB: {} MiB are present", present / MIB);
    }
}

#[test]
fn asking_a_guest_of_the_bitmap_dialect_touches_none_of_its_free_memory() {
    let guest = start(GuestConfig {
        used_bytes: 16 * MIB,
        ..config(8 << 18).with_balloon(balloon::Dialect::Bitmap)
    });
    let mut parts = guest.parts();
    let before = parts.ram.present().unwrap().count();
    let layout = std::sync::Arc::clone(parts.ram.layout());
    let free = common::ask(&mut *parts.free_pages, 1, &layout);
    assert!(free.count() > 7 << 18);
    let after = parts.ram.present().unwrap().count();
    assert!(after < before + 1024, "{before} pages were present, now {after}");
}
