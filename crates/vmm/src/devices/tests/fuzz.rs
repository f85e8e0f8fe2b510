//! Whatever a guest does at registers and in rings, and whatever comes as state: no panic, no hang, and every state that
//! a guest can bring about saves and restores.

use super::*;
use crate::Ended;
use crate::platform::{ACPI_RESET, I8042_COMMAND, SERIAL_PORT};

/// A small generator of our own: a run is told by its seed.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        // xorshift64*.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.below(all.len() as u64)).unwrap()]
    }

    fn data(&mut self) -> Vec<u8> {
        let width = self.of(&[1usize, 2, 4, 4, 4, 4, 8, 3]);
        let value = match self.below(4) {
            0 => self.next(),
            1 => self.below(8),
            2 => self.of(&[
                0,
                1,
                3,
                7,
                11,
                15,
                0x8f,
                64,
                0x10_0000,
                0x10_2000,
                0x10_4000,
                0xffff_ffff,
            ]),
            _ => 1 << self.below(40),
        };
        value.to_le_bytes().iter().cycle().take(width).copied().collect()
    }
}

/// A driver that does nearly what it should, so that the dice find a device at work.
fn bring_up(rig: &Rig, dice: &mut Dice) {
    let device = rig.device(usize::try_from(dice.below(2)).unwrap());
    let features = feature::VERSION_1 | (dice.next() & device.offered());
    if device.negotiate(features) {
        for index in 0..u32::try_from(dice.below(6)).unwrap() {
            device.write(VIRTIO_MMIO_QUEUE_SEL, index);
            if device.read(VIRTIO_MMIO_QUEUE_NUM_MAX) > 0 {
                device.set_up(index, &Ring::new(u64::from(index)).config);
            }
        }
        device.driver_ok();
    }
}

fn act(rig: &Rig, dice: &mut Dice) {
    match dice.below(16) {
        0 => bring_up(rig, dice),
        1 => {
            // Rings and descriptors full of anything.
            let at = 0x10_0000 + dice.below(6 * 0x8000);
            let bytes = dice.data();
            rig.ram.write(at, &bytes).unwrap();
        }
        2 => {
            // A few more chains are available.
            let ring = Ring::new(dice.below(6)).config;
            let mut index = [0; 2];
            rig.ram.read(ring.avail + 2, &mut index).unwrap();
            let more = u16::try_from(dice.below(4)).unwrap();
            let index = u16::from_le_bytes(index).wrapping_add(more);
            rig.ram.write(ring.avail + 2, &index.to_le_bytes()).unwrap();
        }
        3 => {
            let balloon = rig.board.balloon().unwrap();
            let mut balloon = balloon.lock();
            let _ = balloon.set_target(dice.below(RAM_PAGES));
            balloon.request_stats();
        }
        4 | 5 => {
            let port = SERIAL_PORT + u16::try_from(dice.below(9)).unwrap();
            let data = dice.data();
            rig.exits.port_write(port, &data);
            rig.exits.port_read(port, &mut data.clone());
        }
        6 => {
            let port = dice.of(&[0x60, I8042_COMMAND, 0x600, 0x601, ACPI_RESET, 0x603, 0xffff]);
            let data = dice.data();
            rig.exits.port_write(port, &data);
            rig.exits.port_read(port, &mut data.clone());
        }
        _ => {
            let offset = dice.of(&[
                0x14, 0x20, 0x24, 0x30, 0x38, 0x44, 0x50, 0x64, 0x70, 0x80, 0x90, 0xa0, 0xa4, 0xfc, 0x104,
            ]);
            let offset = if dice.below(4) == 0 { dice.below(0x2004) } else { offset };
            let address = VIRTIO_MMIO_BASE + dice.below(2) * VIRTIO_MMIO_BYTES + offset;
            let data = dice.data();
            match <[u8; 4]>::try_from(data.as_slice()) {
                Ok(bytes) => rig.write32(address, u32::from_le_bytes(bytes)),
                Err(_) => rig.exits.memory_write(address, &data),
            }
            rig.exits.memory_read(address, &mut data.clone());
        }
    }
}

fn start() -> u64 {
    std::env::var("PAGEFERRY_SEED").map_or(1, |seed| seed.parse().unwrap())
}

#[test]
fn any_accesses_in_any_order_leave_a_board_that_saves_and_restores() {
    for seed in start()..start() + 24 {
        println!("seed {seed}");
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut rig = Rig::new(standard(ALL));
        for _ in 0..20 {
            for _ in 0..300 {
                act(&rig, &mut dice);
            }
            let state = rig.save();
            let next = rig.restored(standard(ALL), &state);
            let next = next.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            next.board.resume().unwrap();
            let panicked = rig.ending.get().is_some_and(|how| matches!(how, Ended::Failed(_)));
            assert!(!panicked, "seed {seed}");
            rig = next;
        }
    }
}

#[test]
fn state_with_any_byte_changed_is_taken_or_refused_and_never_panics() {
    let rig = Rig::new(standard(ALL));
    let rings = Ring::all(6);
    rig.device(0).probe(ALL, &rings[..5].iter().collect::<Vec<_>>());
    rig.device(1).probe(0, &[&rings[5]]);
    let state = rig.save();
    let mut dice = Dice(start());
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..1500 {
        let mut bad = state.clone();
        let section = usize::try_from(dice.below(bad.sections.len() as u64)).unwrap();
        let data = &mut bad.sections[section].data;
        let at = usize::try_from(dice.below(data.len() as u64)).unwrap();
        match dice.below(3) {
            0 => data.truncate(at),
            1 => data[at] = b'0' + u8::try_from(dice.below(10)).unwrap(),
            _ => data[at] ^= 1 << dice.below(8),
        }
        let other = Rig::parked(&rig.ram, standard(ALL), None);
        match other.restore(&bad) {
            Err(_) => refused += 1,
            Ok(()) => {
                taken += 1;
                other.board.resume().unwrap();
                other.board.pause().unwrap();
                other.board.save().unwrap();
            }
        }
    }
    assert!(taken > 0 && refused > 1000, "{taken} taken, {refused} refused");
}
