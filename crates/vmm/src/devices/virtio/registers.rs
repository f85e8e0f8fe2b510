//! What a transport remembers of its driver: status, features, queues (virtio 1.3, sections 2.1 and 4.2.2).
//!
//! Invariants, also of what is restored:
//!
//! - status bits come in the order of section 3.1.1, and go only by a reset;
//! - features do not change after FEATURES_OK, queues only between FEATURES_OK and DRIVER_OK;
//! - a queue's size is a power of two within the device's limit.

use super::{Driver, VirtioDevice};
use crate::{Error, Result};
use balloon::QueueConfig;
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED,
    VIRTIO_CONFIG_S_FEATURES_OK,
};
use virtio_bindings::virtio_mmio::{
    VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING, VIRTIO_MMIO_QUEUE_AVAIL_HIGH, VIRTIO_MMIO_QUEUE_AVAIL_LOW,
    VIRTIO_MMIO_QUEUE_DESC_HIGH, VIRTIO_MMIO_QUEUE_DESC_LOW, VIRTIO_MMIO_QUEUE_NUM, VIRTIO_MMIO_QUEUE_READY,
    VIRTIO_MMIO_QUEUE_USED_HIGH, VIRTIO_MMIO_QUEUE_USED_LOW,
};

pub(crate) const ACKNOWLEDGE: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE;
pub(crate) const DRIVER: u32 = VIRTIO_CONFIG_S_DRIVER;
pub(crate) const FEATURES_OK: u32 = VIRTIO_CONFIG_S_FEATURES_OK;
pub(crate) const DRIVER_OK: u32 = VIRTIO_CONFIG_S_DRIVER_OK;
pub(crate) const FAILED: u32 = VIRTIO_CONFIG_S_FAILED;

/// The steps of a driver's start, in order.
pub(crate) const STEPS: [u32; 4] = [ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK];

/// The registers that a driver writes.
#[derive(Clone, Debug)]
pub(super) struct Registers {
    pub(super) status: u32,
    /// The device could not be started at DRIVER_OK.
    pub(super) failed: bool,
    pub(super) device_features_sel: u32,
    pub(super) driver_features_sel: u32,
    pub(super) driver_features: u64,
    pub(super) queue_sel: u32,
    pub(super) queues: Vec<QueueConfig>,
    /// Configuration space when its generation was last read.
    pub(super) seen_config: Vec<u8>,
}

impl Registers {
    /// Those of a device that no driver has touched.
    pub(super) fn new(queue_sizes: &[u16]) -> Self {
        let queue = |size: &u16| QueueConfig {
            size: *size,
            ..QueueConfig::default()
        };
        Registers {
            status: 0,
            failed: false,
            device_features_sel: 0,
            driver_features_sel: 0,
            driver_features: 0,
            queue_sel: 0,
            queues: queue_sizes.iter().map(queue).collect(),
            seen_config: Vec::new(),
        }
    }

    /// The number of the selected queue, where there is one.
    pub(super) fn selected(&self) -> Option<usize> {
        let index = usize::try_from(self.queue_sel).ok()?;
        (index < self.queues.len()).then_some(index)
    }

    /// The driver writes a half of its feature bits. Whether that was taken.
    pub(super) fn set_features(&mut self, value: u32) -> bool {
        let open = self.status & (DRIVER | FEATURES_OK | FAILED) == DRIVER;
        match self.driver_features_sel {
            sel @ (0 | 1) if open => {
                set_half(&mut self.driver_features, sel == 1, value);
                true
            }
            _ => false,
        }
    }

    /// The driver writes a register of the selected queue, `max` entries at most. Whether that was taken.
    pub(super) fn set_queue(&mut self, register: u32, value: u32, max: u16) -> bool {
        let open = self.status & (FEATURES_OK | DRIVER_OK | FAILED) == FEATURES_OK;
        let Some(queue) = self.selected().filter(|_| open).and_then(|i| self.queues.get_mut(i)) else {
            return false;
        };
        if register == VIRTIO_MMIO_QUEUE_READY {
            queue.ready = value == 1;
            return value <= 1;
        }
        if queue.ready {
            return false;
        }
        match register {
            VIRTIO_MMIO_QUEUE_NUM => match u16::try_from(value) {
                Ok(size) if size.is_power_of_two() && size <= max => queue.size = size,
                _ => return false,
            },
            VIRTIO_MMIO_QUEUE_DESC_LOW => set_half(&mut queue.desc, false, value),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => set_half(&mut queue.desc, true, value),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_half(&mut queue.avail, false, value),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_half(&mut queue.avail, true, value),
            VIRTIO_MMIO_QUEUE_USED_LOW => set_half(&mut queue.used, false, value),
            VIRTIO_MMIO_QUEUE_USED_HIGH => set_half(&mut queue.used, true, value),
            _ => return false,
        }
        true
    }
}

fn set_half(of: &mut u64, high: bool, value: u32) {
    let value = u64::from(value);
    *of = if high {
        *of & 0xffff_ffff | value << 32
    } else {
        *of & !0xffff_ffff | value
    };
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueRecord {
    size: u16,
    desc: u64,
    avail: u64,
    used: u64,
    ready: bool,
}

/// A transport, as it is saved.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    device_id: u32,
    status: u32,
    failed: bool,
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
    queues: Vec<QueueRecord>,
    pub(super) interrupt_status: u32,
    pub(super) generation: u32,
}

impl State {
    pub(super) fn of(device_id: u32, registers: &Registers, interrupt_status: u32, generation: u32) -> Self {
        let record = |queue: &QueueConfig| QueueRecord {
            size: queue.size,
            desc: queue.desc,
            avail: queue.avail,
            used: queue.used,
            ready: queue.ready,
        };
        State {
            device_id,
            status: registers.status,
            failed: registers.failed,
            device_features_sel: registers.device_features_sel,
            driver_features_sel: registers.driver_features_sel,
            driver_features: registers.driver_features,
            queue_sel: registers.queue_sel,
            queues: registers.queues.iter().map(record).collect(),
            interrupt_status,
            generation,
        }
    }

    /// The registers that it describes, unless no transport of `device`, which is restored already, could have them.
    pub(super) fn check(&self, name: &str, device: &dyn VirtioDevice) -> Result<Registers> {
        self.inconsistency(device).map_or_else(
            || {
                let queue = |record: &QueueRecord| QueueConfig {
                    size: record.size,
                    desc: record.desc,
                    avail: record.avail,
                    used: record.used,
                    ready: record.ready,
                };
                Ok(Registers {
                    status: self.status,
                    failed: self.failed,
                    device_features_sel: self.device_features_sel,
                    driver_features_sel: self.driver_features_sel,
                    driver_features: self.driver_features,
                    queue_sel: self.queue_sel,
                    queues: self.queues.iter().map(queue).collect(),
                    seen_config: Vec::new(),
                })
            },
            |why| Err(Error::state(name, why)),
        )
    }

    fn inconsistency(&self, device: &dyn VirtioDevice) -> Option<String> {
        let (id, driver) = (device.id(), device.driver());
        if self.device_id != id {
            return Some(format!(
                "it is of virtio device {}, here is device {id}",
                self.device_id
            ));
        }
        self.wrong_status(driver)
            .or_else(|| self.wrong_features(device, driver))
            .or_else(|| self.wrong_queues(device, driver))
    }

    fn wrong_status(&self, driver: Driver) -> Option<String> {
        let steps = self.status & !FAILED;
        let taken = steps.count_ones() as usize;
        let in_order = taken <= STEPS.len() && STEPS[..taken].iter().sum::<u32>() == steps;
        if !in_order {
            return Some(format!("status {:#x} does not come about", self.status));
        }
        let started = self.status & DRIVER_OK != 0;
        if self.failed && !started {
            return Some("it failed to start, but was not started".to_owned());
        }
        if driver.active != (started && !self.failed) {
            let (status, active) = (self.status, driver.active);
            return Some(format!(
                "status {status:#x} does not go with a device whose activity is {active}"
            ));
        }
        let known = VIRTIO_MMIO_INT_VRING | VIRTIO_MMIO_INT_CONFIG;
        if self.interrupt_status & !known != 0 || (self.interrupt_status != 0 && !started) {
            let (interrupts, status) = (self.interrupt_status, self.status);
            return Some(format!(
                "interrupt status {interrupts:#x} does not go with status {status:#x}"
            ));
        }
        None
    }

    fn wrong_features(&self, device: &dyn VirtioDevice, driver: Driver) -> Option<String> {
        let agreed = self.status & FEATURES_OK != 0;
        let offered = device.features();
        if agreed && self.driver_features & !offered != 0 {
            let features = self.driver_features;
            return Some(format!(
                "features {features:#x} were agreed on, {offered:#x} are offered"
            ));
        }
        let expected = if agreed { self.driver_features } else { 0 };
        if driver.features != expected {
            return Some(format!(
                "features {expected:#x} were agreed on, the device has {:#x}",
                driver.features
            ));
        }
        if self.status & DRIVER == 0 && self.driver_features != 0 {
            return Some("it has a driver's features, but no driver".to_owned());
        }
        None
    }

    fn wrong_queues(&self, device: &dyn VirtioDevice, driver: Driver) -> Option<String> {
        let sizes = device.queue_sizes();
        if self.queues.len() != sizes.len() {
            return Some(format!(
                "it has {} queues, the device {}",
                self.queues.len(),
                sizes.len()
            ));
        }
        for (index, (queue, max)) in self.queues.iter().zip(sizes).enumerate() {
            if !queue.size.is_power_of_two() || queue.size > *max {
                return Some(format!("queue {index} of {} entries; {max} at most", queue.size));
            }
            let touched = queue.ready || queue.desc != 0 || queue.avail != 0 || queue.used != 0;
            if touched && self.status & FEATURES_OK == 0 {
                return Some(format!("queue {index} is set up, but there are no features"));
            }
            let told = QueueConfig {
                size: queue.size,
                desc: queue.desc,
                avail: queue.avail,
                used: queue.used,
                ready: queue.ready,
            };
            // The device checked its own: an alignment, and that its rings lie in RAM.
            match device.queue_config(index) {
                Some(used) if used != told => {
                    return Some(format!(
                        "queue {index} was told to be {told:x?}, the device has {used:x?}"
                    ));
                }
                Some(_) if !driver.active => return Some(format!("queue {index} is in use without a driver")),
                _ => {}
            }
        }
        None
    }
}
