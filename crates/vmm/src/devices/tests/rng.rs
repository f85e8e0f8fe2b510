//! The entropy device over its transport.

use super::*;
use crate::devices::virtio::rng::CHAIN_BYTES;
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;

/// Without a balloon the device is the first one.
fn rig() -> (Rig, Ring) {
    let (rig, ring) = (Rig::new(None), Ring::new(0));
    rig.device(0).probe(0, &[&ring]);
    (rig, ring)
}

fn bytes(rig: &Rig, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rig.ram.read(address, &mut bytes).unwrap();
    bytes
}

/// Adds a chain, kicks, and gives back the lengths used.
fn ask(rig: &Rig, ring: &mut Ring, chain: &[Desc]) -> Vec<u32> {
    ring.add(&rig.ram, chain);
    rig.device(0).kick(0);
    rig.settle();
    ring.used(&rig.ram)
}

#[test]
fn buffers_are_filled_over_all_their_descriptors_and_no_further() {
    let (rig, mut ring) = rig();
    let chain = [(BUFFERS, 300, true), (BUFFERS + 4096, 5000, true)];
    assert_eq!(ask(&rig, &mut ring, &chain), [5300]);
    assert_eq!(
        (rig.device(0).irqs(), rig.device(0).interrupt()),
        (1, VIRTIO_MMIO_INT_VRING)
    );
    let all = bytes(&rig, BUFFERS, 4096 + 5000 + 100);
    assert!(all[..300].iter().any(|b| *b != 0));
    assert!(all[300..4096].iter().all(|b| *b == 0), "between the descriptors");
    assert!(all[4096 + 4900..4096 + 5000].iter().any(|b| *b != 0), "to the last");
    assert!(all[4096 + 5000..].iter().all(|b| *b == 0), "past the end");
    assert_eq!(ask(&rig, &mut ring, &[(BUFFERS, 300, true)]), [300]);
    assert_ne!(bytes(&rig, BUFFERS, 300), all[..300], "something new each time");
}

#[test]
fn a_chain_gets_a_bounded_number_of_bytes() {
    let (rig, mut ring) = rig();
    assert_eq!(ask(&rig, &mut ring, &[(BUFFERS, 1 << 20, true)]), [CHAIN_BYTES]);
    let end = BUFFERS + u64::from(CHAIN_BYTES);
    assert!(bytes(&rig, end, 4096).iter().all(|b| *b == 0));
}

#[test]
fn buffers_that_do_not_check_come_back_empty_and_the_next_one_works() {
    let (rig, mut ring) = rig();
    let end = RAM_PAGES * 4096;
    let wrong: [&[Desc]; 6] = [
        &[(BUFFERS, 64, false)],
        &[(BUFFERS, 64, true), (BUFFERS + 64, 64, false)],
        &[(BUFFERS, 64, true), (end, 64, true)],
        &[(end - 32, 64, true)],
        &[(u64::MAX - 8, 64, true)],
        &[(BUFFERS, u32::MAX, true)],
    ];
    for chain in wrong {
        assert_eq!(ask(&rig, &mut ring, chain), [0], "{chain:x?}");
        assert!(bytes(&rig, BUFFERS, 128).iter().all(|b| *b == 0), "{chain:x?}");
    }
    assert_eq!(ask(&rig, &mut ring, &[(BUFFERS, 0, true)]), [0]);
    assert_eq!(ask(&rig, &mut ring, &[(end - 64, 64, true)]), [64]);
    assert_eq!(rig.device(0).status() & VIRTIO_CONFIG_S_NEEDS_RESET, 0);
}

#[test]
fn case_49_broken_rings_want_a_reset_and_nothing_spins() {
    let breaks: [fn(&Rig, &mut Ring); 3] = [
        // An available index that runs ahead of the ring.
        |rig, ring| ring.set_avail(&rig.ram, SIZE + 1),
        // A chain that is a loop.
        |rig, ring| {
            ring.raw_desc(&rig.ram, 0, (BUFFERS, 8, true), Some(1));
            ring.raw_desc(&rig.ram, 1, (BUFFERS, 8, true), Some(0));
            ring.push(&rig.ram, 0);
        },
        // One that leaves the table.
        |rig, ring| {
            ring.raw_desc(&rig.ram, 0, (BUFFERS, 8, true), Some(SIZE));
            ring.push(&rig.ram, 0);
        },
    ];
    for (number, break_it) in breaks.into_iter().enumerate() {
        let (rig, mut ring) = rig();
        let device = rig.device(0);
        break_it(&rig, &mut ring);
        device.kick(0);
        rig.settle();
        assert_ne!(device.status() & VIRTIO_CONFIG_S_NEEDS_RESET, 0, "break {number}");
        assert_eq!(device.interrupt() & VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_CONFIG);
        assert!(ring.used(&rig.ram).is_empty());
        // It stays so, here and elsewhere, until the driver resets it.
        device.kick(0);
        let state = rig.save();
        let other = rig.restored(None, &state).unwrap();
        other.board.resume().unwrap();
        assert_ne!(other.device(0).status() & VIRTIO_CONFIG_S_NEEDS_RESET, 0);
        let mut fresh = Ring::new(1);
        other.device(0).probe(0, &[&fresh]);
        assert_eq!(ask(&other, &mut fresh, &[(BUFFERS, 8, true)]), [8]);
    }
}

#[test]
fn a_driver_that_is_there_already_goes_on_after_a_move() {
    let (source, mut ring) = rig();
    for _ in 0..100 {
        assert_eq!(ask(&source, &mut ring, &[(BUFFERS, 8, true)]), [8]);
    }
    let state = source.save();
    let arrived = source.restored(None, &state).unwrap();
    drop(source);
    // Put there in the last moment, its kick lost on the way.
    ring.add(&arrived.ram, &[(BUFFERS, 16, true)]);
    assert!(ring.used(&arrived.ram).is_empty());
    arrived.board.resume().unwrap();
    assert_eq!(ring.used(&arrived.ram), [16], "looked at when it runs on");
    assert_eq!(arrived.device(0).interrupt(), VIRTIO_MMIO_INT_VRING);
    assert_eq!(ask(&arrived, &mut ring, &[(BUFFERS, 8, true)]), [8]);
}
