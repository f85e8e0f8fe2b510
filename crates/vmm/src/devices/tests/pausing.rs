//! Pausing and running on.

use super::*;
use crate::devices::doorbells::{DeviceThread, Doorbell, eventfd};
use crate::devices::virtio::mmio::Transport;
use crate::devices::virtio::{Driver, Line, VirtioDevice};
use kvm_ioctls::Kvm;
use machine::DirtyTracker;
use memory::kvm::KvmSlots;
use memory::trackers::KvmLogTracker;
use pages::{PageSet, Pfn};

#[test]
fn case_29_what_was_rung_before_a_pause_is_served_when_it_returns() {
    let rig = Rig::new(None);
    let (device, mut ring) = (rig.device(0), Ring::new(0));
    device.probe(0, &[&ring]);
    for round in 0..1000 {
        ring.add(&rig.ram, &[(BUFFERS, 8, true)]);
        device.kick(0);
        rig.board.pause().unwrap();
        assert_eq!(ring.used(&rig.ram), [8], "round {round}");
        rig.board.resume().unwrap();
    }
}

#[test]
fn case_29_nothing_is_served_between_pause_and_resume() {
    let rig = Rig::new(None);
    let (device, mut ring) = (rig.device(0), Ring::new(0));
    device.probe(0, &[&ring]);
    rig.board.pause().unwrap();
    rig.board.pause().unwrap();
    ring.add(&rig.ram, &[(BUFFERS, 8, true)]);
    device.kick(0);
    // Long enough for a thread that is not parked to come by; one that is cannot fail this.
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(ring.used(&rig.ram).is_empty());
    rig.board.resume().unwrap();
    rig.board.resume().unwrap();
    assert_eq!(ring.used(&rig.ram), [8]);
}

#[test]
fn case_16_a_driver_that_comes_in_the_middle_of_a_migration_is_served_at_both_ends() {
    let config = standard(ALL);
    let source = Rig::new(config);
    // A migration has begun: somebody already wants to ask, and is told why not.
    let balloon = source.board.balloon().unwrap();
    assert!(balloon.lock().can_ask().is_err());
    // Half of the driver's way is done here, ...
    let device = source.device(0);
    assert!(device.negotiate(ALL | feature::VERSION_1));
    let rings = Ring::all(5);
    device.set_up(0, &rings[0].config);
    device.set_up(1, &rings[1].config);
    device.write(VIRTIO_MMIO_QUEUE_SEL, 2);
    device.write(VIRTIO_MMIO_QUEUE_NUM, u32::from(SIZE));
    device.write(VIRTIO_MMIO_QUEUE_DESC_LOW, u32::try_from(rings[2].config.desc).unwrap());
    let state = source.save();
    let arrived = source.restored(config, &state).unwrap();
    drop(source);
    arrived.board.resume().unwrap();
    // ... the other half there.
    let device = arrived.device(0);
    device.write(
        VIRTIO_MMIO_QUEUE_AVAIL_LOW,
        u32::try_from(rings[2].config.avail).unwrap(),
    );
    device.write(VIRTIO_MMIO_QUEUE_USED_LOW, u32::try_from(rings[2].config.used).unwrap());
    device.write(VIRTIO_MMIO_QUEUE_READY, 1);
    device.set_up(3, &rings[3].config);
    device.set_up(4, &rings[4].config);
    device.driver_ok();
    let balloon = arrived.board.balloon().unwrap();
    assert!(balloon.lock().is_active());
    assert!(balloon.lock().can_ask().is_ok());
    assert_eq!(balloon.lock().queue_config(2), Some(rings[2].config));
}

#[test]
fn interrupts_that_are_pending_are_raised_again() {
    let rig = Rig::new(None);
    let (device, mut ring) = (rig.device(0), Ring::new(0));
    device.probe(0, &[&ring]);
    ring.add(&rig.ram, &[(BUFFERS, 8, true)]);
    device.kick(0);
    rig.settle();
    assert_eq!(device.irqs(), 1);
    // Its edge went to a VM that is gone.
    let state = rig.save();
    let arrived = rig.restored(None, &state).unwrap();
    let device = arrived.device(0);
    assert_eq!(device.irqs(), 0);
    arrived.board.resume().unwrap();
    assert_eq!((device.irqs(), device.interrupt()), (1, VIRTIO_MMIO_INT_VRING));
    arrived.board.pause().unwrap();
    arrived.board.resume().unwrap();
    assert_eq!(device.irqs(), 0, "nothing is pending");
}

#[test]
fn a_running_board_is_neither_saved_nor_restored() {
    let rig = Rig::new(None);
    assert!(rig.board.save().unwrap_err().to_string().contains("pause"));
    let state = rig.save();
    rig.board.resume().unwrap();
    assert!(rig.restore(&state).unwrap_err().to_string().contains("pause"));
}

/// A device with a bug.
struct Panicking;

impl VirtioDevice for Panicking {
    fn id(&self) -> u32 {
        0
    }
    fn features(&self) -> u64 {
        0
    }
    fn queue_sizes(&self) -> &[u16] {
        &[1]
    }
    fn ack_features(&self, _: u64) -> ::balloon::Result<()> {
        Ok(())
    }
    fn activate(&self, _: &[QueueConfig]) -> ::balloon::Result<()> {
        Ok(())
    }
    fn kick(&self, _: u16) {
        panic!("as this test wants it");
    }
    fn reset(&self) {}
    fn driver(&self) -> Driver {
        Driver::default()
    }
    fn queue_config(&self, _: usize) -> Option<QueueConfig> {
        None
    }
    fn resume(&self) {}
    fn save(&self) -> Result<Section> {
        Err(Error::Condition("it is only for a test".to_owned()))
    }
    fn restore(&self, _: &mut Incoming<'_>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_device_thread_that_panicked_ends_the_guest_and_nobody_waits() {
    let line = Arc::new(Line::new(eventfd().unwrap()));
    let (bell, ending) = (eventfd().unwrap(), Ending::default());
    let ring = bell.try_clone().unwrap();
    let doorbell = Doorbell {
        bell,
        device: Arc::new(Transport::new(0, line, Arc::new(Panicking))),
        queue: 0,
    };
    let thread = DeviceThread::spawn(vec![doorbell], ending.clone()).unwrap();
    thread.run();
    ring.write(1).unwrap();
    assert!(thread.pause().is_err());
    assert!(ending.get().unwrap().to_string().contains("panicked"));
}

#[test]
fn case_21_what_only_a_device_writes_is_in_the_dirty_log() {
    let name = "case_21_what_only_a_device_writes_is_in_the_dirty_log";
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            eprintln!("SKIPPED: {name}: no /dev/kvm: {error}");
            return;
        }
    };
    let rig = Rig::new(standard(feature::STATS_VQ));
    let vm = Arc::new(kvm.create_vm().unwrap());
    let slots = KvmSlots::register(&vm, &rig.ram).unwrap();
    let mut tracker = KvmLogTracker::new(&slots);
    let (rng, mut rng_ring) = (rig.device(1), Ring::new(5));
    rng.probe(0, &[&rng_ring]);
    let mut rings = Ring::all(3);
    rig.device(0)
        .probe(feature::STATS_VQ, &[&rings[0], &rings[1], &rings[2]]);
    rings[2].add(&rig.ram, &[(BUFFERS, 10, false)]);
    rig.device(0).kick(2);
    rng_ring.add(&rig.ram, &[(BUFFERS + 0x10_000, 5000, true)]);
    rig.settle();

    tracker.start().unwrap();
    drop(tracker.harvest().unwrap());
    let mut expected = PageSet::empty(rig.ram.layout());
    let mut page = |address: u64| expected.insert(Pfn::of_address(address));
    // The guest is idle: the host asks for statistics, and serves a buffer that was there before.
    assert!(rig.board.balloon().unwrap().lock().request_stats());
    page(rings[2].config.used);
    rng.kick(0);
    rig.settle();
    page(rng_ring.config.used);
    page(BUFFERS + 0x10_000);
    page(BUFFERS + 0x11_000);
    assert_eq!(
        (rings[2].used(&rig.ram), rng_ring.used(&rig.ram)),
        (vec![0], vec![5000])
    );
    let dirty: Vec<_> = tracker.harvest().unwrap().runs().collect();
    assert_eq!(dirty, expected.runs().collect::<Vec<_>>());
    tracker.stop().unwrap();
}
