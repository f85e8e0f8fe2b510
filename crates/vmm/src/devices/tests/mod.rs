//! The board as a guest sees it: by ports and registers, over real guest RAM, with KVM's part played by [`Wires`].

mod balloon;
mod fuzz;
mod pausing;
mod rng;
mod serial;
mod state;
mod transport;

use super::Board;
use super::virtio::registers::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK};
use crate::platform::{VIRTIO_MMIO_BASE, VIRTIO_MMIO_BYTES, virtio_place};
use crate::state::Incoming;
use crate::wiring::{Ending, Exits, Wiring};
use crate::{Console, Error, Result};
use ::balloon::{Config, Dialect, QueueConfig, feature};
use machine::{MachineState, Section};
use memory::{Backing, DeviceMemory, GuestMemory};
use pages::Layout;
use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use virtio_bindings::virtio_mmio::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Entries of each ring of these tests.
const SIZE: u16 = 64;
/// Where buffers lie; rings are below.
const BUFFERS: u64 = 4 << 20;
/// Pages of RAM.
const RAM_PAGES: u64 = 4096;

/// All features of the mainline balloon.
const ALL: u64 = 0x3f;

/// KVM's part: interrupts are counted, doorbells are rung in place of an exit.
#[derive(Default)]
struct Wires {
    irqs: Mutex<BTreeMap<u32, EventFd>>,
    bells: Mutex<BTreeMap<(u64, u32), EventFd>>,
}

impl Wiring for Wires {
    fn irq(&self, gsi: u32) -> Result<EventFd> {
        let ours = EventFd::new(EFD_NONBLOCK).unwrap();
        let theirs = ours.try_clone().unwrap();
        assert!(
            self.irqs.lock().unwrap().insert(gsi, ours).is_none(),
            "interrupt {gsi} twice"
        );
        Ok(theirs)
    }

    fn doorbell(&self, bell: &EventFd, address: u64, value: u32) -> Result<()> {
        let bell = bell.try_clone().map_err(|e| Error::kvm("a doorbell", e))?;
        let before = self.bells.lock().unwrap().insert((address, value), bell);
        assert!(before.is_none(), "two doorbells at {address:#x}, {value}");
        Ok(())
    }
}

/// Console output that a test reads.
#[derive(Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Screen {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn layout() -> Arc<Layout> {
    Arc::new(Layout::flat(RAM_PAGES).unwrap())
}

fn ram() -> Arc<GuestMemory> {
    Arc::new(GuestMemory::new(layout(), &Backing::Anonymous).unwrap())
}

fn standard(features: u64) -> Option<Config> {
    Some(Config::new(Dialect::Standard, features))
}

/// A board, what it is wired to, and the guest's hand.
struct Rig {
    ram: Arc<GuestMemory>,
    wires: Wires,
    screen: Screen,
    ending: Ending,
    board: Board,
    exits: Arc<dyn Exits>,
}

impl Rig {
    /// A board with a balloon of `config`, parked.
    fn parked(ram: &Arc<GuestMemory>, config: Option<Config>, input: Option<OwnedFd>) -> Self {
        let (wires, screen, ending) = (Wires::default(), Screen::default(), Ending::default());
        let console = Console {
            input,
            output: Box::new(screen.clone()),
        };
        let memory = DeviceMemory::new(ram);
        let board = Board::new(&wires, &memory, ram.layout(), config, console, ending.clone()).unwrap();
        Rig {
            ram: Arc::clone(ram),
            wires,
            screen,
            ending,
            exits: board.exits(),
            board,
        }
    }

    /// The same over new RAM, running.
    fn new(config: Option<Config>) -> Self {
        let rig = Rig::parked(&ram(), config, None);
        rig.board.start().unwrap();
        rig
    }

    fn write32(&self, address: u64, value: u32) {
        match self.wires.bells.lock().unwrap().get(&(address, value)) {
            Some(bell) => bell.write(1).unwrap(),
            None => self.exits.memory_write(address, &value.to_le_bytes()),
        }
    }

    fn read32(&self, address: u64) -> u32 {
        let mut bytes = [0; 4];
        self.exits.memory_read(address, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// How often interrupt `gsi` was raised since the last look.
    fn irqs(&self, gsi: u32) -> u64 {
        // Not raised is an error that says so.
        self.wires.irqs.lock().unwrap()[&gsi].read().unwrap_or(0)
    }

    /// Waits until the device thread has served what was rung.
    fn settle(&self) {
        self.board.thread.pause().unwrap();
        self.board.thread.run();
    }

    /// The state of this board, which pauses for it.
    fn save(&self) -> MachineState {
        self.board.pause().unwrap();
        MachineState {
            sections: self.board.save().unwrap(),
        }
    }

    /// A board over the same RAM that took over `state`, still parked.
    fn restored(&self, config: Option<Config>, state: &MachineState) -> Result<Rig> {
        let rig = Rig::parked(&self.ram, config, None);
        rig.restore(state)?;
        Ok(rig)
    }

    fn restore(&self, state: &MachineState) -> Result<()> {
        let mut incoming = Incoming::new(state);
        self.board.restore(&mut incoming)?;
        incoming.finish()
    }

    fn device(&self, index: usize) -> Device<'_> {
        Device {
            rig: self,
            base: virtio_place(index).address,
            gsi: virtio_place(index).gsi,
        }
    }
}

/// Register access to one virtio device.
#[derive(Clone, Copy)]
struct Device<'a> {
    rig: &'a Rig,
    base: u64,
    gsi: u32,
}

impl Device<'_> {
    fn read(&self, register: u32) -> u32 {
        self.rig.read32(self.base + u64::from(register))
    }

    fn write(&self, register: u32, value: u32) {
        self.rig.write32(self.base + u64::from(register), value);
    }

    fn irqs(&self) -> u64 {
        self.rig.irqs(self.gsi)
    }

    fn status(&self) -> u32 {
        self.read(VIRTIO_MMIO_STATUS)
    }

    fn config(&self, offset: u32) -> u32 {
        self.read(VIRTIO_MMIO_CONFIG + offset)
    }

    fn offered(&self) -> u64 {
        self.write(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
        let high = u64::from(self.read(VIRTIO_MMIO_DEVICE_FEATURES));
        self.write(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 0);
        high << 32 | u64::from(self.read(VIRTIO_MMIO_DEVICE_FEATURES))
    }

    /// Up to FEATURES_OK; whether the device took the features.
    fn negotiate(&self, features: u64) -> bool {
        self.write(VIRTIO_MMIO_STATUS, 0);
        assert_eq!(self.status(), 0);
        self.write(VIRTIO_MMIO_STATUS, ACKNOWLEDGE);
        self.write(VIRTIO_MMIO_STATUS, ACKNOWLEDGE | DRIVER);
        for (select, bits) in [(1, features >> 32), (0, features & 0xffff_ffff)] {
            self.write(VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            self.write(VIRTIO_MMIO_DRIVER_FEATURES, u32::try_from(bits).unwrap());
        }
        self.write(VIRTIO_MMIO_STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        self.status() & FEATURES_OK != 0
    }

    fn set_up(&self, index: u32, queue: &QueueConfig) {
        self.write(VIRTIO_MMIO_QUEUE_SEL, index);
        assert_eq!(self.read(VIRTIO_MMIO_QUEUE_READY), 0);
        assert!(self.read(VIRTIO_MMIO_QUEUE_NUM_MAX) >= u32::from(queue.size));
        self.write(VIRTIO_MMIO_QUEUE_NUM, u32::from(queue.size));
        for (register, address) in [
            (VIRTIO_MMIO_QUEUE_DESC_LOW, queue.desc),
            (VIRTIO_MMIO_QUEUE_AVAIL_LOW, queue.avail),
            (VIRTIO_MMIO_QUEUE_USED_LOW, queue.used),
        ] {
            self.write(register, u32::try_from(address & 0xffff_ffff).unwrap());
            self.write(register + 4, u32::try_from(address >> 32).unwrap());
        }
        self.write(VIRTIO_MMIO_QUEUE_READY, 1);
        assert_eq!(self.read(VIRTIO_MMIO_QUEUE_READY), 1);
    }

    fn driver_ok(&self) {
        self.write(VIRTIO_MMIO_STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    }

    /// As Linux does it: `features` of what is offered, and `queues`.
    fn probe(&self, features: u64, queues: &[&Ring]) {
        assert_eq!(self.read(VIRTIO_MMIO_MAGIC_VALUE).to_le_bytes(), *b"virt");
        assert_eq!(self.read(VIRTIO_MMIO_VERSION), 2);
        assert!(self.negotiate(features & self.offered() | feature::VERSION_1));
        for (index, ring) in (0..).zip(queues) {
            self.set_up(index, &ring.config);
        }
        self.driver_ok();
        assert_eq!(self.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    }

    fn kick(&self, queue: u32) {
        self.write(VIRTIO_MMIO_QUEUE_NOTIFY, queue);
    }

    /// Takes the interrupt: its status bits, acknowledged.
    fn interrupt(&self) -> u32 {
        let bits = self.read(VIRTIO_MMIO_INTERRUPT_STATUS);
        self.write(VIRTIO_MMIO_INTERRUPT_ACK, bits);
        bits
    }
}

/// A descriptor: address, bytes, device-writable.
type Desc = (u64, u32, bool);

/// The driver's side of one queue.
struct Ring {
    config: QueueConfig,
    next_desc: u16,
    avail: u16,
    seen: u16,
}

impl Ring {
    /// A ring in a place of its own.
    fn new(number: u64) -> Self {
        let base = 0x10_0000 + number * 0x8000;
        Ring {
            config: QueueConfig {
                size: SIZE,
                desc: base,
                avail: base + 0x2000,
                used: base + 0x4000,
                ready: true,
            },
            next_desc: 0,
            avail: 0,
            seen: 0,
        }
    }

    fn all(count: u64) -> Vec<Ring> {
        (0..count).map(Ring::new).collect()
    }

    /// Writes one descriptor as it is told.
    fn raw_desc(&self, ram: &GuestMemory, index: u16, desc: Desc, next: Option<u16>) {
        let (address, len, writable) = desc;
        let flags = u16::from(next.is_some()) | u16::from(writable) << 1;
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.unwrap_or(0).to_le_bytes());
        ram.write(self.config.desc + u64::from(index) * 16, &bytes).unwrap();
    }

    /// Says that chains up to `index` are available.
    fn set_avail(&mut self, ram: &GuestMemory, index: u16) {
        self.avail = index;
        ram.write(self.config.avail + 2, &index.to_le_bytes()).unwrap();
    }

    /// Makes the chain that starts at `head` available.
    fn push(&mut self, ram: &GuestMemory, head: u16) {
        let slot = u64::from(self.avail % self.config.size);
        ram.write(self.config.avail + 4 + slot * 2, &head.to_le_bytes())
            .unwrap();
        self.set_avail(ram, self.avail.wrapping_add(1));
    }

    /// Adds a chain.
    fn add(&mut self, ram: &GuestMemory, chain: &[Desc]) {
        let head = self.next_desc;
        for (i, desc) in chain.iter().enumerate() {
            let index = self.next_desc;
            self.next_desc = (index + 1) % self.config.size;
            let more = i + 1 < chain.len();
            self.raw_desc(ram, index, *desc, more.then_some(self.next_desc));
        }
        self.push(ram, head);
    }

    /// The lengths of what was used since the last look.
    fn used(&mut self, ram: &GuestMemory) -> Vec<u32> {
        let mut two = [0; 2];
        ram.read(self.config.used + 2, &mut two).unwrap();
        let mut all = Vec::new();
        while self.seen != u16::from_le_bytes(two) {
            let slot = u64::from(self.seen % self.config.size);
            let mut four = [0; 4];
            ram.read(self.config.used + 4 + slot * 8 + 4, &mut four).unwrap();
            all.push(u32::from_le_bytes(four));
            self.seen = self.seen.wrapping_add(1);
        }
        all
    }
}

/// The data of the section `name` as JSON, to look at and to change.
fn json(state: &MachineState, name: &str) -> serde_json::Value {
    let section = state.sections.iter().find(|section| section.name == name).unwrap();
    serde_json::from_slice(&section.data).unwrap()
}

/// `state` with the data of section `name` replaced.
fn with(state: &MachineState, name: &str, data: &serde_json::Value) -> MachineState {
    let sections = state.sections.iter().map(|section| Section {
        data: if section.name == name {
            serde_json::to_vec(data).unwrap()
        } else {
            section.data.clone()
        },
        ..section.clone()
    });
    MachineState {
        sections: sections.collect(),
    }
}
