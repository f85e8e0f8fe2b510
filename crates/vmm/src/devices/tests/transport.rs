//! The MMIO transport as a driver finds it.

use super::*;
use virtio_bindings::virtio_config::{VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_NEEDS_RESET};

const RUNNING: u32 = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;

#[test]
fn devices_lie_where_acpi_says_and_tell_what_they_are() {
    let with = Rig::new(standard(ALL));
    assert_eq!(with.board.virtio_places(), [virtio_place(0), virtio_place(1)]);
    assert_eq!(with.device(0).read(VIRTIO_MMIO_DEVICE_ID), 5);
    assert_eq!(with.device(1).read(VIRTIO_MMIO_DEVICE_ID), 4);
    assert_eq!(
        with.device(2).read(VIRTIO_MMIO_MAGIC_VALUE),
        u32::MAX,
        "nothing is there"
    );
    let without = Rig::new(None);
    assert_eq!(without.device(0).read(VIRTIO_MMIO_DEVICE_ID), 4);
    assert!(without.board.balloon().is_none());
    assert_eq!(with.device(0).offered(), ALL | feature::VERSION_1);
    assert_eq!(with.device(1).offered(), feature::VERSION_1);
    with.device(0).write(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 2);
    assert_eq!(with.device(0).read(VIRTIO_MMIO_DEVICE_FEATURES), 0);
    assert_eq!(with.device(0).read(VIRTIO_MMIO_SHM_LEN_LOW), u32::MAX);
    assert_eq!(with.device(0).read(VIRTIO_MMIO_SHM_BASE_HIGH), u32::MAX);
}

#[test]
fn every_queue_has_a_doorbell_but_in_the_bitmap_dialect() {
    let rig = Rig::new(standard(0));
    let bells: Vec<_> = rig.wires.bells.lock().unwrap().keys().copied().collect();
    let notify = |index| virtio_place(index).address + 0x50;
    let mut expected: Vec<_> = (0..5).map(|queue| (notify(0), queue)).collect();
    expected.push((notify(1), 0));
    assert_eq!(bells, expected);
    let bitmap = Rig::new(Some(Config::new(Dialect::Bitmap, feature::MISC_VQ)));
    let bells: Vec<_> = bitmap.wires.bells.lock().unwrap().keys().copied().collect();
    assert_eq!(bells, [(notify(1), 0)], "served before the vCPU runs on");
}

#[test]
fn features_are_refused_without_version_1_or_beyond_the_offer() {
    let rig = Rig::new(standard(feature::STATS_VQ));
    for index in [0, 1] {
        let device = rig.device(index);
        assert!(!device.negotiate(0));
        assert!(!device.negotiate(feature::VERSION_1 | feature::REPORTING));
        assert_eq!(device.status(), ACKNOWLEDGE | DRIVER);
        // A driver may try again with less.
        device.write(VIRTIO_MMIO_DRIVER_FEATURES_SEL, 0);
        device.write(VIRTIO_MMIO_DRIVER_FEATURES, 0);
        device.write(VIRTIO_MMIO_STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_eq!(device.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK);
        // They are fixed from here on.
        device.write(VIRTIO_MMIO_DRIVER_FEATURES, 0xff);
        device.driver_ok();
        assert_eq!(device.status(), RUNNING);
    }
}

#[test]
fn status_goes_by_its_steps_and_back_only_by_a_reset() {
    let rig = Rig::new(standard(0));
    let device = rig.device(0);
    device.write(VIRTIO_MMIO_STATUS, DRIVER);
    assert_eq!(device.status(), 0, "not before ACKNOWLEDGE");
    device.write(VIRTIO_MMIO_STATUS, ACKNOWLEDGE);
    device.write(VIRTIO_MMIO_STATUS, ACKNOWLEDGE | DRIVER_OK);
    assert_eq!(device.status(), ACKNOWLEDGE, "not before FEATURES_OK");
    assert!(!rig.board.balloon().unwrap().lock().is_active());
    device.write(VIRTIO_MMIO_STATUS, ACKNOWLEDGE | DRIVER);
    device.write(VIRTIO_MMIO_STATUS, DRIVER);
    device.write(VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_FAILED);
    assert_eq!(device.status(), ACKNOWLEDGE | DRIVER, "no bit is taken back");
    device.write(VIRTIO_MMIO_STATUS, ACKNOWLEDGE | DRIVER | VIRTIO_CONFIG_S_FAILED);
    device.write(
        VIRTIO_MMIO_STATUS,
        ACKNOWLEDGE | DRIVER | VIRTIO_CONFIG_S_FAILED | FEATURES_OK,
    );
    assert_eq!(
        device.status(),
        ACKNOWLEDGE | DRIVER | VIRTIO_CONFIG_S_FAILED,
        "it gave up"
    );
    let (a, b) = (Ring::new(0), Ring::new(1));
    device.probe(0, &[&a, &b]);
    assert!(rig.board.balloon().unwrap().lock().is_active());
    device.write(VIRTIO_MMIO_STATUS, 0);
    assert_eq!(device.status(), 0);
    assert!(!rig.board.balloon().unwrap().lock().is_active());
    device.write(VIRTIO_MMIO_QUEUE_SEL, 1);
    assert_eq!(device.read(VIRTIO_MMIO_QUEUE_READY), 0);
}

#[test]
fn queues_are_set_up_within_bounds_and_only_in_their_time() {
    let rig = Rig::new(standard(0));
    let device = rig.device(0);
    let ring = Ring::new(0);
    // Too early: nothing sticks.
    device.write(VIRTIO_MMIO_QUEUE_READY, 1);
    assert_eq!(device.read(VIRTIO_MMIO_QUEUE_READY), 0);
    assert!(device.negotiate(feature::VERSION_1));
    device.write(VIRTIO_MMIO_QUEUE_SEL, 5);
    assert_eq!(device.read(VIRTIO_MMIO_QUEUE_NUM_MAX), 0, "there is no such queue");
    device.write(VIRTIO_MMIO_QUEUE_READY, 1);
    assert_eq!(device.read(VIRTIO_MMIO_QUEUE_READY), 0);
    device.write(VIRTIO_MMIO_QUEUE_SEL, u32::MAX);
    device.write(VIRTIO_MMIO_QUEUE_NUM, 4);
    device.set_up(0, &ring.config);
    for size in [0, 3, 512, 0x1_0040] {
        // Also too late: the queue is ready.
        device.write(VIRTIO_MMIO_QUEUE_NUM, size);
    }
    device.write(VIRTIO_MMIO_QUEUE_DESC_LOW, 0xdead_0000);
    device.set_up(1, &Ring::new(1).config);
    device.driver_ok();
    let balloon = rig.board.balloon().unwrap();
    assert_eq!(balloon.lock().queue_config(0), Some(ring.config));
    device.write(VIRTIO_MMIO_QUEUE_READY, 0);
    assert_eq!(
        device.read(VIRTIO_MMIO_QUEUE_READY),
        1,
        "a queue in use is given up by a reset alone"
    );
}

#[test]
fn sizes_that_no_queue_can_have_are_ignored() {
    let rig = Rig::new(None);
    let device = rig.device(0);
    assert!(device.negotiate(feature::VERSION_1));
    for size in [0, 3, 65, 128, 0x1_0040, u32::MAX] {
        device.write(VIRTIO_MMIO_QUEUE_NUM, size);
    }
    let state = rig.save();
    assert_eq!(json(&state, "virtio0")["queues"][0]["size"], 64);
}

#[test]
fn a_failed_start_wants_a_reset_and_says_so_by_interrupt() {
    let rig = Rig::new(standard(0));
    for index in [0, 1] {
        let device = rig.device(index);
        let mut bad = Ring::new(0).config;
        bad.avail = RAM_PAGES * 4096;
        assert!(device.negotiate(feature::VERSION_1));
        device.set_up(0, &bad);
        device.driver_ok();
        assert_eq!(device.status(), RUNNING | VIRTIO_CONFIG_S_NEEDS_RESET);
        assert_eq!((device.irqs(), device.interrupt()), (1, VIRTIO_MMIO_INT_CONFIG));
        // Such a device saves and restores as what it is.
        let state = rig.save();
        let other = rig.restored(standard(0), &state).unwrap();
        assert_eq!(other.device(index).status(), RUNNING | VIRTIO_CONFIG_S_NEEDS_RESET);
        rig.board.resume().unwrap();
        // And is fine after a reset.
        device.probe(0, &[&Ring::new(0), &Ring::new(1)][..2 - index]);
        device.write(VIRTIO_MMIO_STATUS, 0);
    }
}

#[test]
fn wrong_widths_and_unknown_registers_do_nothing() {
    let rig = Rig::new(standard(0));
    let device = rig.device(0);
    rig.exits.memory_write(device.base + 0x70, &[1]);
    rig.exits.memory_write(device.base + 0x70, &[1, 0, 0, 0, 0, 0, 0, 0]);
    rig.exits.memory_write(device.base + 0x6f, &[0, 1, 0, 0]);
    assert_eq!(device.status(), 0);
    let mut two = [7; 2];
    rig.exits.memory_read(device.base, &mut two);
    assert_eq!(two, [0; 2]);
    for register in [0x14, 0x30, 0x40, 0x50, 0x64, 0x80, 0xc0, 0xf0] {
        assert_eq!(device.read(register), 0, "{register:#x} is not to be read");
        device.write(register, 1);
    }
    let mut across = [0; 8];
    rig.exits.memory_read(device.base + VIRTIO_MMIO_BYTES - 4, &mut across);
    assert_eq!(across, [0xff; 8], "it leaves the device");
    rig.exits.memory_read(VIRTIO_MMIO_BASE - 2, &mut across[..4]);
    assert_eq!(across, [0xff; 8]);
}

#[test]
fn case_37_configuration_space_ends_where_the_offered_features_say() {
    use feature::*;
    for (features, len) in [
        (0, 8),
        (STATS_VQ | DEFLATE_ON_OOM | REPORTING, 8),
        (FREE_PAGE_HINT, 12),
        (PAGE_POISON, 16),
        (FREE_PAGE_HINT | PAGE_POISON, 16),
    ] {
        let rig = Rig::new(standard(features));
        let device = rig.device(0);
        for offset in (0..24).step_by(4) {
            let expected = if offset < len { 0 } else { u32::MAX };
            assert_eq!(
                device.config(offset),
                expected,
                "features {features:#x}, offset {offset}"
            );
        }
        let mut bytes = [0; 2];
        let end = device.base + 0x100 + u64::from(len);
        rig.exits.memory_read(end - 1, &mut bytes);
        assert_eq!(bytes, [0xff; 2], "across its end");
        rig.exits.memory_read(end - 2, &mut bytes);
        assert_eq!(bytes, [0; 2], "any width up to it");
    }
    assert_eq!(Rig::new(None).device(0).config(0), u32::MAX);
}

#[test]
fn the_generation_changes_with_configuration_space() {
    let rig = Rig::new(standard(0));
    let (device, balloon) = (rig.device(0), rig.board.balloon().unwrap());
    let generation = || device.read(VIRTIO_MMIO_CONFIG_GENERATION);
    let first = generation();
    assert_eq!(generation(), first);
    // Without a driver the device tells nobody, but whoever looks has to see it.
    balloon.lock().set_target(5).unwrap();
    assert_eq!(device.irqs(), 0);
    assert_ne!(generation(), first);
    device.probe(0, &[&Ring::new(0), &Ring::new(1)]);
    let second = generation();
    // There and back is a change too.
    balloon.lock().set_target(6).unwrap();
    balloon.lock().set_target(5).unwrap();
    assert_ne!(generation(), second);
    assert_eq!((device.irqs(), device.interrupt()), (2, VIRTIO_MMIO_INT_CONFIG));
    assert_eq!(device.interrupt(), 0);
}

#[test]
fn acknowledging_takes_the_bits_that_are_named() {
    let rig = Rig::new(standard(0));
    let device = rig.device(0);
    let rings = Ring::all(2);
    device.probe(0, &[&rings[0], &rings[1]]);
    let mut inflate = Ring::new(0);
    inflate.add(&rig.ram, &[(BUFFERS, 4, false)]);
    device.kick(0);
    rig.settle();
    rig.board.balloon().unwrap().lock().set_target(3).unwrap();
    assert_eq!(device.read(VIRTIO_MMIO_INTERRUPT_STATUS), 3);
    device.write(VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_INT_VRING);
    assert_eq!(device.read(VIRTIO_MMIO_INTERRUPT_STATUS), VIRTIO_MMIO_INT_CONFIG);
    device.write(VIRTIO_MMIO_STATUS, 0);
    assert_eq!(device.read(VIRTIO_MMIO_INTERRUPT_STATUS), 0, "a reset takes them all");
}

#[test]
fn case_33_a_kick_on_a_queue_that_is_not_set_up_is_ignored() {
    let rig = Rig::new(standard(ALL));
    let device = rig.device(0);
    let balloon = rig.board.balloon().unwrap();
    for queue in 0..5 {
        device.kick(queue);
    }
    rig.device(1).kick(0);
    rig.settle();
    device.probe(0, &[&Ring::new(0), &Ring::new(1)]);
    for queue in [2, 3, 4, 5, 0xffff, 0x1_0000, u32::MAX] {
        device.kick(queue);
    }
    rig.settle();
    assert_eq!(balloon.lock().counters().ignored_kicks, 8);
    assert_eq!((device.irqs(), rig.device(1).irqs()), (0, 0));
    assert_eq!(device.status(), RUNNING);
}
