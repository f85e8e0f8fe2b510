//! A guest that writes anything anywhere: no panic, no spin, no answer that is not one.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use balloon::Dialect::{self, Bitmap, BitmapRfc, Standard};
use balloon::feature::*;
use balloon::{Config, DiscardPolicy};
use machine::{Answer, FreePages};
use pages::Layout;
use proptest::prelude::*;
use serde_json::Value;
use std::sync::Arc;
use support::*;
use vm_memory::{Bytes, GuestAddress};

/// Something that a guest or its host does.
#[derive(Clone, Debug)]
enum Act {
    Desc(usize, u16, u64, u32, u16, u16),
    Chain(usize, Vec<Desc>),
    Push(usize, u16),
    Avail(usize, u16),
    Bytes(u64, Vec<u8>),
    Config(u64, Vec<u8>),
    Kick(usize),
    /// A start, or a window of an answer, as a driver would send it to the open question.
    Honest(u16, u64, u64),
    /// An inflate or deflate buffer that carries a bitmap.
    Bitmap(usize, u64, Vec<u8>),
    Begin,
    End,
    Stats,
    Target(u64),
    Move,
    Reset,
}

fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => (0u64..16384).prop_map(|p| p * 4096),
        4 => BUFFERS..BUFFERS + 64,
        2 => 0x10000u64..0x40000,
        1 => (63u64 << 20)..(66 << 20),
        1 => any::<u64>(),
    ]
}

fn len() -> impl Strategy<Value = u32> {
    prop_oneof![
        3 => prop::sample::select(vec![0u32, 1, 3, 4, 10, 16, 31, 32, 40, 4096, 2 << 20, 4 << 20, (1 << 20) + 32, u32::MAX]),
        1 => any::<u32>(),
        2 => 0u32..5000,
    ]
}

fn act() -> impl Strategy<Value = Act> {
    let queue = || 0usize..6;
    prop_oneof![
        2 => (0usize..5, 0u16..70, address(), len(), 0u16..8, 0u16..70).prop_map(|(q, i, a, l, f, n)| Act::Desc(q, i, a, l, f, n)),
        8 => (0usize..5, prop::collection::vec((address(), len(), any::<bool>()), 1..5)).prop_map(|(q, c)| Act::Chain(q, c)),
        2 => (0usize..5, 0u16..70).prop_map(|(q, h)| Act::Push(q, h)),
        1 => (0usize..5, any::<u16>()).prop_map(|(q, i)| Act::Avail(q, i)),
        3 => (address(), prop::collection::vec(any::<u8>(), 0..64)).prop_map(|(a, b)| Act::Bytes(a, b)),
        1 => (0u64..20, prop::collection::vec(any::<u8>(), 0..8)).prop_map(|(o, b)| Act::Config(o, b)),
        8 => queue().prop_map(Act::Kick),
        4 => (0u16..3, 0u64..4, 0u64..2100).prop_map(|(f, w, l)| Act::Honest(f, w, l)),
        3 => (0usize..2, 0u64..260, prop::collection::vec(any::<u8>(), 0..600)).prop_map(|(q, w, b)| Act::Bitmap(q, w * 64, b)),
        3 => Just(Act::Begin),
        2 => Just(Act::End),
        1 => Just(Act::Stats),
        1 => (0u64..20_000).prop_map(Act::Target),
        1 => Just(Act::Move),
        1 => Just(Act::Reset),
    ]
}

struct World {
    rig: Rig,
    features: u64,
    answers: Answers,
    open: Option<u32>,
    sessions: u32,
}

impl World {
    fn new(dialect: Dialect, features: u64, granule: u64) -> Self {
        let layout = Layout::new(vec![range(0, 9000), range(9000, 3000), range(13000, 3384)]).unwrap();
        let config = Config {
            discard: DiscardPolicy::AtOnce,
            ..Config::new(dialect, features)
        };
        let rig = Rig::configured(config, Arc::new(layout), granule);
        rig.drive(features);
        World {
            rig,
            features,
            answers: Answers::default(),
            open: None,
            sessions: 0,
        }
    }

    fn act(&mut self, act: Act) {
        let Rig { mem, rings, device, .. } = &mut self.rig;
        let count = rings.len();
        match act {
            Act::Desc(q, i, a, l, f, n) => rings[q % count].raw_desc(mem, i, a, l, f, n),
            Act::Chain(q, chain) => {
                rings[q % count].add(mem, &chain);
            }
            Act::Push(q, head) => rings[q % count].push(mem, head),
            Act::Avail(q, index) => rings[q % count].set_avail(mem, index),
            // Past the end of memory nothing is written.
            Act::Bytes(at, bytes) => drop(mem.write_slice(&bytes, GuestAddress(at))),
            Act::Config(offset, bytes) => device.lock().write_config(offset, &bytes),
            Act::Kick(q) => device.lock().notify(q as u16),
            Act::Honest(flag, window, len) => self.honest(flag, window, len),
            Act::Bitmap(q, start, bitmap) => drop(self.rig.send_bitmap(q, start, &bitmap)),
            Act::Begin => {
                let session = self.sessions + 1;
                if device.begin(session, self.answers.sink()).is_ok() {
                    self.sessions = session;
                    self.open = Some(session);
                }
            }
            Act::End => {
                if let Some(session) = self.open.take() {
                    device.end(session).unwrap();
                }
            }
            Act::Stats => drop(device.stats()),
            Act::Target(pages) => drop(device.lock().set_target(pages)),
            Act::Move => {
                self.open = None;
                let section = device.lock().save();
                // The guest may have put its rings into any state, but the device cannot have taken it over.
                device.lock().restore(&section).unwrap();
                device.lock().resume();
            }
            Act::Reset => {
                device.lock().reset();
                for (i, ring) in rings.iter_mut().enumerate() {
                    *ring = Ring::new(i as u64);
                    ring.set_avail(mem, 0);
                }
                self.rig.drive(self.features);
            }
        }
        self.check();
    }

    /// What a driver would send: a request buffer, a start, a stop, or a window.
    fn honest(&mut self, flag: u16, window: u64, len: u64) {
        let rig = &mut self.rig;
        if rig.device.dialect() == "standard" {
            let id = if flag == 0 { rig.config_u32(8) } else { 0 };
            rig.write(BUFFERS, &id.to_le_bytes());
            rig.rings[3].add(&rig.mem, &[(BUFFERS, 4, false)]);
            rig.kick(3);
            return;
        }
        if rig.rings.len() < 4 {
            return;
        }
        if flag == 2 {
            rig.rings[3].add(&rig.mem, &[(BUFFERS, 16, true)]);
            rig.kick(3);
            return;
        }
        let id: u64 = rig.mem.read_obj(GuestAddress(BUFFERS + 8)).unwrap();
        let mut bytes = vec![0; 32];
        bytes[2] = 12;
        bytes[4] = flag as u8;
        bytes[8..16].copy_from_slice(&id.to_le_bytes());
        bytes[16..24].copy_from_slice(&(window * 4096).to_le_bytes());
        let len = if window.is_multiple_of(2) { 512 } else { len };
        bytes[24..32].copy_from_slice(&len.to_le_bytes());
        rig.write(2 << 20, &bytes);
        rig.rings[3].add(&rig.mem, &[(2 << 20, 32 + len as u32, false)]);
        rig.kick(3);
    }

    fn check(&mut self) {
        let layout = &self.rig.layout;
        for (session, answer) in self.answers.take() {
            assert_eq!(Some(session), self.open, "an answer to no open question");
            match answer {
                Answer::Free(ranges) => {
                    assert!(!ranges.is_empty() && ranges.len() <= 1 << 16);
                    for r in ranges {
                        assert!(layout.region_of_range(r).is_some(), "{r} is not RAM");
                    }
                }
                Answer::Covered(r) => assert!(layout.region_of_range(r).is_some(), "{r} is not RAM"),
                Answer::Finished => {}
            }
        }
        let granule = self.rig.discards.granule;
        for r in self.rig.take_discards() {
            assert!(layout.region_of_range(r).is_some(), "{r} is not RAM");
            assert!(
                r.start().0.is_multiple_of(granule) && r.count().is_multiple_of(granule),
                "{r}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn a_hostile_standard_guest(acts in prop::collection::vec(act(), 1..80), features in 0u64..64, huge in any::<bool>()) {
        // Mostly with all queues, so that the hint queue has the number that honest acts use.
        let features = if features.is_multiple_of(4) { features } else { STATS_VQ | FREE_PAGE_HINT | PAGE_POISON | REPORTING };
        let mut world = World::new(Standard, features, if huge { 512 } else { 1 });
        for act in acts {
            world.act(act);
        }
    }

    #[test]
    fn a_hostile_bitmap_guest(acts in prop::collection::vec(act(), 1..80), bitmaps in any::<bool>(), huge in any::<bool>()) {
        let bitmaps = if bitmaps { PAGE_BITMAP } else { 0 };
        let mut world = World::new(Bitmap, MISC_VQ | STATS_VQ | bitmaps, if huge { 512 } else { 1 });
        for act in acts {
            world.act(act);
        }
    }

    #[test]
    fn a_hostile_bitmap_rfc_guest(acts in prop::collection::vec(act(), 1..80), huge in any::<bool>()) {
        let mut world = World::new(BitmapRfc, STATS_VQ | PAGE_BITMAP, if huge { 512 } else { 1 });
        for act in acts {
            world.act(act);
        }
    }

    #[test]
    fn state_of_random_bytes(data in prop::collection::vec(any::<u8>(), 0..200)) {
        let (rig, section) = saved(Standard);
        let refused = rig.device.lock().restore(&machine::Section { data, ..section });
        prop_assert!(refused.is_err());
    }

    #[test]
    fn state_that_was_changed_on_its_way(
        dialect in prop::sample::select(vec![Standard, Bitmap, BitmapRfc]),
        numbers in prop::collection::vec((any::<prop::sample::Index>(), number()), 0..3),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
    ) {
        let (rig, mut section) = saved(dialect);
        let untouched = numbers.is_empty() && flips.is_empty();
        let mut state: Value = serde_json::from_slice(&section.data).unwrap();
        for (index, number) in numbers {
            let mut all = Vec::new();
            numbers_in(&mut state, &mut all);
            let which = index.index(all.len());
            *all[which] = number.into();
        }
        section.data = serde_json::to_vec(&state).unwrap();
        for (index, byte) in flips {
            let at = index.index(section.data.len());
            section.data[at] = byte;
        }
        let mut device = rig.device.lock();
        device.reset();
        if device.restore(&section).is_err() {
            prop_assert!(!untouched, "what was saved is taken over");
            prop_assert!(!device.is_active() && device.ballooned().is_empty());
            return Ok(());
        }
        // Whatever it says, it is the state of a device: that goes on, and can be saved again.
        prop_assert!(device.target() <= rig.layout.total_pages());
        device.resume();
        for queue in 0..5 {
            device.notify(queue);
        }
        let again = device.save();
        device.restore(&again).unwrap();
    }
}

/// The saved state of a device with all there is: pages in the balloon, a bitmap that was the last, buffers that are held.
fn saved(dialect: Dialect) -> (Rig, machine::Section) {
    let features = match dialect {
        Standard => STATS_VQ | FREE_PAGE_HINT | PAGE_POISON | REPORTING,
        Bitmap => PAGE_BITMAP | STATS_VQ | MISC_VQ,
        BitmapRfc => PAGE_BITMAP | STATS_VQ,
    };
    let mut rig = Rig::new(dialect, features);
    if dialect == Standard {
        rig.send_pfns(0, &[5000, 5001, 7000]);
    } else {
        rig.send_pages(0, &[range(5001, 50), range(7001, 3)]);
    }
    rig.send(2, &[(BUFFERS, 10, false)]);
    if dialect == Bitmap {
        rig.send(3, &[(BUFFERS, 16, true)]);
    }
    let section = rig.device.lock().save();
    (rig, section)
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..70,
        16_380u64..16_390,
        (0u64..64).prop_map(|bit| 1 << bit),
        any::<u64>()
    ]
}

/// Every number in `value`.
fn numbers_in<'a>(value: &'a mut Value, all: &mut Vec<&'a mut Value>) {
    match value {
        Value::Number(_) => all.push(value),
        Value::Array(values) => values.iter_mut().for_each(|value| numbers_in(value, all)),
        Value::Object(fields) => fields.values_mut().for_each(|value| numbers_in(value, all)),
        _ => {}
    }
}
