//! The MMIO transport, version 2 (virtio 1.3, section 4.2).
//!
//! What a driver writes out of order, in another width than 4 bytes, or to where nothing is, is ignored and logged; such
//! a read gives 0. Configuration space is read and written in any width; past its end it reads as all ones.
//!
//! The state of features and queues is [`Registers`]'; this is what the driver sees of it, and the life cycle.

use super::registers::{DRIVER_OK, FAILED, FEATURES_OK, Registers, STEPS, State};
use super::{Line, VirtioDevice};
use crate::Result;
use crate::devices::bus::BusDevice;
use crate::state::{Incoming, section};
use balloon::Interrupts;
use machine::Section;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;
use virtio_bindings::virtio_mmio::*;

/// `virt`.
const MAGIC: u32 = 0x7472_6976;
const TRANSPORT_VERSION: u32 = 2;
/// `pgfy`.
const VENDOR: u32 = 0x7966_6770;

/// Version of a transport's saved form.
const STATE_VERSION: u32 = 1;

/// Where a kick is written, within the registers.
pub(crate) const NOTIFY_OFFSET: u64 = VIRTIO_MMIO_QUEUE_NOTIFY as u64;
/// Where configuration space starts.
const CONFIG_OFFSET: u64 = VIRTIO_MMIO_CONFIG as u64;

/// One transport and the device behind it.
pub(crate) struct Transport {
    /// `virtio0`, ...: the name of its section.
    name: String,
    registers: Mutex<Registers>,
    line: Arc<Line>,
    device: Arc<dyn VirtioDevice>,
    /// A driver that does it wrong over and over is told of once.
    warned: AtomicBool,
}

impl Transport {
    /// Puts transport `index` before `device`, which raises interrupts on `line`.
    pub(crate) fn new(index: usize, line: Arc<Line>, device: Arc<dyn VirtioDevice>) -> Self {
        Transport {
            name: format!("virtio{index}"),
            registers: Mutex::new(Registers::new(device.queue_sizes())),
            line,
            device,
            warned: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a kick of queue `queue`, whichever way it came. The device knows which of its queues are in use.
    pub(crate) fn kick(&self, queue: u16) {
        if usize::from(queue) < self.device.queue_sizes().len() {
            self.device.kick(queue);
        } else {
            tracing::debug!(device = %self.name, queue, "kick of a queue that does not exist");
        }
    }

    /// From here on the device writes nothing to guest memory by itself.
    pub(crate) fn pause(&self) {
        self.device.pause();
    }

    /// Catches up when the guest is about to run on.
    pub(crate) fn resume(&self) {
        self.device.resume();
        self.line.raise_again();
    }

    /// The device's state, then the transport's: saving a device may still raise an interrupt.
    pub(crate) fn save(&self) -> Result<[Section; 2]> {
        let device = self.device.save()?;
        let registers = self.lock();
        let state = State::of(self.device.id(), &registers, self.line.status(), self.line.generation());
        Ok([section(self.name.as_str(), STATE_VERSION, &state)?, device])
    }

    /// Takes over both.
    pub(crate) fn restore(&self, incoming: &mut Incoming<'_>) -> Result<()> {
        self.device.restore(incoming)?;
        let state: State = incoming.take(&self.name, STATE_VERSION)?;
        *self.lock() = state.check(&self.name, &*self.device)?;
        self.line.set(state.interrupt_status, state.generation);
        Ok(())
    }

    fn ignored(&self, what: &str, offset: u64, width: usize) {
        tracing::debug!(device = %self.name, offset, width, "{what} ignored");
    }

    fn read_register(&self, register: u32) -> Option<u32> {
        // Without the lock: a vCPU that takes an interrupt waits for nobody.
        if register == VIRTIO_MMIO_INTERRUPT_STATUS {
            return Some(self.line.status());
        }
        let mut registers = self.lock();
        Some(match register {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => TRANSPORT_VERSION,
            VIRTIO_MMIO_DEVICE_ID => self.device.id(),
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => half(self.device.features(), registers.device_features_sel),
            VIRTIO_MMIO_QUEUE_NUM_MAX => registers
                .selected()
                .map_or(0, |index| u32::from(self.device.queue_sizes()[index])),
            VIRTIO_MMIO_QUEUE_READY => registers
                .selected()
                .map_or(0, |index| u32::from(registers.queues[index].ready)),
            VIRTIO_MMIO_STATUS => {
                let needs_reset = registers.failed || self.device.driver().needs_reset;
                registers.status | if needs_reset { VIRTIO_CONFIG_S_NEEDS_RESET } else { 0 }
            }
            // No shared memory region exists: its length is all ones.
            VIRTIO_MMIO_SHM_LEN_LOW
            | VIRTIO_MMIO_SHM_LEN_HIGH
            | VIRTIO_MMIO_SHM_BASE_LOW
            | VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            VIRTIO_MMIO_CONFIG_GENERATION => self.generation(&mut registers),
            _ => return None,
        })
    }

    /// A number that differs whenever configuration space does: devices tell of most changes, but not of those before
    /// their driver is at work, nor of the driver's own.
    fn generation(&self, registers: &mut Registers) -> u32 {
        let mut config = vec![0; self.device.config_len()];
        self.device.read_config(0, &mut config);
        if config != registers.seen_config {
            registers.seen_config = config;
            self.line.changed();
        }
        self.line.generation()
    }

    /// Whether the write was one that is to be.
    fn write_register(&self, register: u32, value: u32) -> bool {
        match register {
            VIRTIO_MMIO_INTERRUPT_ACK => {
                self.line.acknowledge(value);
                return true;
            }
            VIRTIO_MMIO_QUEUE_NOTIFY => {
                let queue = u16::try_from(value);
                // Nobody has 65535 queues.
                self.kick(queue.unwrap_or(u16::MAX));
                return queue.is_ok();
            }
            _ => {}
        }
        let mut registers = self.lock();
        match register {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => registers.device_features_sel = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => registers.driver_features_sel = value,
            VIRTIO_MMIO_DRIVER_FEATURES => return registers.set_features(value),
            VIRTIO_MMIO_QUEUE_SEL => registers.queue_sel = value,
            VIRTIO_MMIO_STATUS => return self.set_status(&mut registers, value),
            VIRTIO_MMIO_SHM_SEL => {}
            _ => {
                let max = registers.selected().map_or(0, |index| self.device.queue_sizes()[index]);
                return registers.set_queue(register, value, max);
            }
        }
        true
    }

    /// The driver's next steps, or a reset.
    fn set_status(&self, registers: &mut Registers, value: u32) -> bool {
        if value == 0 {
            self.reset(registers);
            return true;
        }
        // The driver read this bit along with its own.
        let value = value & !VIRTIO_CONFIG_S_NEEDS_RESET;
        if registers.status & !value != 0 || registers.status & FAILED != 0 {
            return false;
        }
        for (index, step) in STEPS.into_iter().enumerate() {
            if value & step == 0 || registers.status & step != 0 {
                continue;
            }
            let before: u32 = STEPS[..index].iter().sum();
            if registers.status & before != before || !self.step(registers, step) {
                return false;
            }
            registers.status |= step;
        }
        registers.status |= value & FAILED;
        value & !(FAILED | STEPS.iter().sum::<u32>()) == 0
    }

    /// Does what a step asks for; false where it is refused.
    fn step(&self, registers: &mut Registers, step: u32) -> bool {
        match step {
            FEATURES_OK => match self.device.ack_features(registers.driver_features) {
                Ok(()) => true,
                Err(error) => {
                    self.warn(&error, "the driver's features are refused");
                    false
                }
            },
            DRIVER_OK => {
                if let Err(error) = self.device.activate(&registers.queues) {
                    self.warn(&error, "the device cannot be started");
                    registers.failed = true;
                    self.line.config();
                }
                true
            }
            _ => true,
        }
    }

    fn warn(&self, error: &::balloon::Error, what: &str) {
        if self.warned.swap(true, Ordering::Relaxed) {
            tracing::debug!(device = %self.name, %error, "{what}");
        } else {
            tracing::warn!(device = %self.name, %error, "{what}");
        }
    }

    /// The device first: it raises no interrupt after that.
    fn reset(&self, registers: &mut Registers) {
        self.device.reset();
        self.line.acknowledge(u32::MAX);
        *registers = Registers::new(self.device.queue_sizes());
    }

    /// The bytes of configuration space that an access means; `None` past its end.
    fn config_offset(&self, offset: u64, width: usize) -> Option<u64> {
        let end = offset.checked_add(width as u64)?;
        (end <= self.device.config_len() as u64).then_some(offset)
    }
}

/// The low or the high half of feature bits; there are no more.
fn half(features: u64, select: u32) -> u32 {
    let bits = match select {
        0 => features,
        1 => features >> 32,
        _ => 0,
    };
    u32::try_from(bits & 0xffff_ffff).unwrap_or(0)
}

/// The register that an access of `width` bytes means.
fn register(offset: u64, width: usize) -> Option<u32> {
    (width == 4 && offset.is_multiple_of(4))
        .then(|| u32::try_from(offset).ok())
        .flatten()
}

impl BusDevice for Transport {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(offset) = offset.checked_sub(CONFIG_OFFSET) {
            match self.config_offset(offset, data.len()) {
                Some(offset) => self.device.read_config(offset, data),
                None => self.ignored("read past configuration space", offset, data.len()),
            }
            return;
        }
        match register(offset, data.len()).and_then(|register| self.read_register(register)) {
            Some(value) => data.copy_from_slice(&value.to_le_bytes()),
            None => {
                self.ignored("read of no register", offset, data.len());
                data.fill(0);
            }
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(offset) = offset.checked_sub(CONFIG_OFFSET) {
            match self.config_offset(offset, data.len()) {
                Some(offset) => self.device.write_config(offset, data),
                None => self.ignored("write past configuration space", offset, data.len()),
            }
            return;
        }
        let taken = match (register(offset, data.len()), <[u8; 4]>::try_from(data)) {
            (Some(register), Ok(bytes)) => self.write_register(register, u32::from_le_bytes(bytes)),
            _ => false,
        };
        if !taken {
            self.ignored("write", offset, data.len());
        }
    }
}
