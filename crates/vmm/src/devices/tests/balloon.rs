//! The balloon over its transport.

use super::*;
use ::balloon::Stats;
use machine::{Answer, FreePages};
use pages::Pfn;

/// Says in which pages memory is used.
fn dirty(ram: &GuestMemory, pfn: u64) {
    ram.write(pfn * 4096, &[1; 64]).unwrap();
}

fn byte(ram: &GuestMemory, pfn: u64) -> u8 {
    let mut byte = [0];
    ram.read(pfn * 4096, &mut byte).unwrap();
    byte[0]
}

/// A statistics buffer that says how many bytes are free.
fn post_stats(rig: &Rig, ring: &mut Ring, queue: u32, free: u64) {
    let mut pair = 4u16.to_le_bytes().to_vec();
    pair.extend(free.to_le_bytes());
    rig.ram.write(BUFFERS, &pair).unwrap();
    ring.add(&rig.ram, &[(BUFFERS, 10, false)]);
    rig.device(0).kick(queue);
    rig.settle();
}

fn free_memory(rig: &Rig) -> Option<u64> {
    let balloon = rig.board.balloon().unwrap();
    let stats: Option<Stats> = balloon.lock().stats();
    stats.and_then(|stats| stats.free_memory)
}

#[test]
fn inflating_gives_memory_back_through_the_doorbell() {
    let rig = Rig::new(standard(0));
    let device = rig.device(0);
    let mut rings = Ring::all(2);
    device.probe(0, &[&rings[0], &rings[1]]);
    dirty(&rig.ram, 2000);
    rig.ram.write(BUFFERS, &2000u32.to_le_bytes()).unwrap();
    rings[0].add(&rig.ram, &[(BUFFERS, 4, false)]);
    device.kick(0);
    rig.settle();
    assert_eq!(rings[0].used(&rig.ram), [0]);
    assert_eq!((device.irqs(), device.interrupt()), (1, VIRTIO_MMIO_INT_VRING));
    assert_eq!(byte(&rig.ram, 2000), 0);
    let balloon = rig.board.balloon().unwrap();
    assert!(balloon.lock().ballooned().contains(Pfn(2000)));
    device.write(VIRTIO_MMIO_CONFIG + 4, 1);
    assert_eq!(balloon.lock().actual(), 1);
    assert_eq!(device.config(4), 1);
    device.write(VIRTIO_MMIO_CONFIG, 77);
    assert_eq!(device.config(0), 0, "the target is the host's");
}

#[test]
fn case_35_each_combination_of_features_has_linux_s_queue_numbers() {
    use feature::{FREE_PAGE_HINT, REPORTING, STATS_VQ};
    for combination in 0..8u64 {
        let features = [STATS_VQ, FREE_PAGE_HINT, REPORTING]
            .into_iter()
            .enumerate()
            .filter(|(bit, _)| combination >> bit & 1 != 0)
            .map(|(_, feature)| feature)
            .sum::<u64>();
        let rig = Rig::new(standard(ALL));
        let (device, mut rings) = (rig.device(0), Ring::all(5));
        let extra = combination.count_ones() as usize;
        let set_up: Vec<&Ring> = rings[..2 + extra].iter().collect();
        device.probe(features, &set_up);
        let mut next = 2u32..;
        if features & STATS_VQ != 0 {
            let queue = next.next().unwrap();
            post_stats(&rig, &mut rings[queue as usize], queue, 4096);
            assert_eq!(free_memory(&rig), Some(4096), "features {features:#x}");
            assert!(rings[queue as usize].used(&rig.ram).is_empty(), "it is held");
        }
        if features & FREE_PAGE_HINT != 0 {
            let queue = next.next().unwrap();
            let ring = &mut rings[queue as usize];
            let answers = Arc::new(Mutex::new(Vec::new()));
            let sink = Arc::clone(&answers);
            let mut balloon = rig.board.balloon().unwrap();
            balloon
                .begin(1, Arc::new(move |_, answer| sink.lock().unwrap().push(answer)))
                .unwrap();
            rig.ram.write(BUFFERS, &device.config(8).to_le_bytes()).unwrap();
            ring.add(&rig.ram, &[(BUFFERS, 4, false)]);
            ring.add(&rig.ram, &[(0x80_0000, 4096, true)]);
            device.kick(queue);
            rig.settle();
            assert_eq!(ring.used(&rig.ram).len(), 2, "features {features:#x}");
            let answers = answers.lock().unwrap();
            assert!(matches!(answers.first(), Some(Answer::Free(ranges)) if ranges.len() == 1));
        }
        if features & REPORTING != 0 {
            let queue = next.next().unwrap();
            dirty(&rig.ram, 3000);
            rings[queue as usize].add(&rig.ram, &[(3000 * 4096, 4096, true)]);
            device.kick(queue);
            rig.settle();
            assert_eq!(rings[queue as usize].used(&rig.ram).len(), 1);
            assert_eq!(byte(&rig.ram, 3000), 0, "features {features:#x}");
        }
        device.kick(next.next().unwrap());
        rig.settle();
        let counters = rig.board.balloon().unwrap().lock().counters();
        let ignored = u64::from(extra < 3);
        assert_eq!(
            (counters.malformed, counters.ignored_kicks),
            (0, ignored),
            "{features:#x}"
        );
    }
}

#[test]
fn case_47_statistics_are_fresh_before_and_after_a_move() {
    let config = standard(feature::STATS_VQ);
    let source = Rig::new(config);
    let mut rings = Ring::all(3);
    source
        .device(0)
        .probe(feature::STATS_VQ, &[&rings[0], &rings[1], &rings[2]]);
    post_stats(&source, &mut rings[2], 2, 1 << 20);
    let ask = |rig: &Rig| rig.board.balloon().unwrap().lock().request_stats();
    assert!(ask(&source));
    assert_eq!(rings[2].used(&source.ram), [0]);
    post_stats(&source, &mut rings[2], 2, 2 << 20);
    assert_eq!(free_memory(&source), Some(2 << 20));

    let state = source.save();
    let arrived = source.restored(config, &state).unwrap();
    drop(source);
    arrived.board.resume().unwrap();
    assert_eq!(free_memory(&arrived), Some(2 << 20));
    arrived.device(0).interrupt();
    arrived.device(0).irqs();
    assert!(ask(&arrived), "the buffer travelled");
    assert_eq!(
        arrived.device(0).interrupt() & VIRTIO_MMIO_INT_VRING,
        VIRTIO_MMIO_INT_VRING
    );
    assert_eq!(arrived.device(0).irqs(), 1);
    assert_eq!(rings[2].used(&arrived.ram), [0]);
    post_stats(&arrived, &mut rings[2], 2, 3 << 20);
    assert_eq!(free_memory(&arrived), Some(3 << 20));
}

#[test]
fn the_bitmap_dialect_is_served_before_the_kick_returns() {
    let config = Some(Config::new(Dialect::Bitmap, feature::MISC_VQ));
    let rig = Rig::new(config);
    let (device, mut rings) = (rig.device(0), Ring::all(4));
    device.probe(feature::MISC_VQ, &rings.iter().collect::<Vec<_>>());
    let mut balloon = rig.board.balloon().unwrap();
    balloon.begin(1, Arc::new(|_, _| {})).unwrap();
    rings[3].add(&rig.ram, &[(BUFFERS, 16, true)]);
    // Not settled: it has to be done already.
    device.kick(3);
    assert_eq!(rings[3].used(&rig.ram), [16]);
    assert_eq!((device.irqs(), device.interrupt()), (1, VIRTIO_MMIO_INT_VRING));
}

#[test]
fn an_open_session_is_ended_before_the_state_is_saved() {
    let rig = Rig::new(standard(ALL));
    let (device, rings) = (rig.device(0), Ring::all(5));
    device.probe(ALL, &rings.iter().collect::<Vec<_>>());
    let mut balloon = rig.board.balloon().unwrap();
    balloon.begin(1, Arc::new(|_, _| {})).unwrap();
    assert!(device.config(8) >= 0x8000_0000);
    device.interrupt();
    let before = device.read(VIRTIO_MMIO_CONFIG_GENERATION);
    let state = rig.save();
    assert_eq!(json(&state, "virtio0")["interrupt_status"], VIRTIO_MMIO_INT_CONFIG);
    let arrived = rig.restored(standard(ALL), &state).unwrap();
    arrived.board.resume().unwrap();
    let device = arrived.device(0);
    assert_eq!(device.config(8), 1, "DONE");
    assert!(device.irqs() > 0);
    assert_eq!(device.interrupt(), VIRTIO_MMIO_INT_CONFIG);
    assert_ne!(device.read(VIRTIO_MMIO_CONFIG_GENERATION), before);
}
