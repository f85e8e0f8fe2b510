//! virtio devices on the MMIO transport (virtio 1.3, section 4.2).
//!
//! | | file |
//! |---|---|
//! | what a driver reads and writes, interrupts, life cycle | [`mmio`] |
//! | what the transport remembers, and its saved form | [`registers`] |
//! | device 5, memory balloon | [`balloon`] |
//! | device 4, entropy | [`rng`] |
//!
//! Locks: the transport's, then the device's, never the other way. A device raises interrupts under its own lock, so
//! [`Line`] has none.

pub(crate) mod balloon;
pub(crate) mod mmio;
pub(crate) mod registers;
pub(crate) mod rng;

use crate::Result;
use crate::state::Incoming;
use ::balloon::QueueConfig;
use machine::Section;
use std::sync::atomic::{AtomicU32, Ordering};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};
use vmm_sys_util::eventfd::EventFd;

/// A device behind a transport. Its methods lock it for themselves.
pub(crate) trait VirtioDevice: Send + Sync {
    /// The device id (virtio 1.3, section 5).
    fn id(&self) -> u32;
    /// The feature bits that it offers.
    fn features(&self) -> u64;
    /// The most entries of each of its queues.
    fn queue_sizes(&self) -> &[u16];
    /// Whether a kick has to be served before the vCPU that kicked runs on; then its queues have no doorbell.
    fn serves_on_vcpu(&self) -> bool {
        false
    }
    /// Takes the driver's feature bits. An error leaves everything as it was.
    fn ack_features(&self, features: u64) -> ::balloon::Result<()>;
    /// Starts it with the queues by their numbers. An error leaves it inactive.
    fn activate(&self, queues: &[QueueConfig]) -> ::balloon::Result<()>;
    /// Serves a kick; one on a queue that is not in use does nothing.
    fn kick(&self, queue: u16);
    /// Back to before a driver came.
    fn reset(&self);
    /// Bytes of its configuration space.
    fn config_len(&self) -> usize {
        0
    }
    /// Reads configuration space. `into` lies within it.
    fn read_config(&self, _offset: u64, _into: &mut [u8]) {}
    /// Writes configuration space, as far as it is the driver's to write.
    fn write_config(&self, _offset: u64, _data: &[u8]) {}
    /// Whether it is active, and with which of the driver's features.
    fn driver(&self) -> Driver;
    /// Where queue `index` lies, as the device has it; `None` where it does not use it.
    fn queue_config(&self, index: usize) -> Option<QueueConfig>;
    /// The machine is paused: the device writes no guest memory for whatever the host asks of it.
    fn pause(&self) {}
    /// Catches up when the guest is about to run on: looks at every queue.
    fn resume(&self);
    /// Its own state.
    fn save(&self) -> Result<Section>;
    /// Takes over the state of another device like it.
    fn restore(&self, incoming: &mut Incoming<'_>) -> Result<()>;
}

/// What a device knows of its driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Driver {
    /// It was started.
    pub(crate) active: bool,
    /// A ring was found broken; it wants a reset.
    pub(crate) needs_reset: bool,
    /// What the driver acknowledged.
    pub(crate) features: u64,
}

/// The interrupt of a transport: its status bits, then an edge. Also counts the changes of configuration space.
pub(crate) struct Line {
    irq: EventFd,
    status: AtomicU32,
    generation: AtomicU32,
}

impl Line {
    pub(crate) fn new(irq: EventFd) -> Self {
        Line {
            irq,
            status: AtomicU32::new(0),
            generation: AtomicU32::new(0),
        }
    }

    /// The bits of InterruptStatus.
    pub(crate) fn status(&self) -> u32 {
        self.status.load(Ordering::SeqCst)
    }

    /// The driver has seen these.
    pub(crate) fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::SeqCst);
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Configuration space has changed.
    pub(crate) fn changed(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn set(&self, status: u32, generation: u32) {
        self.status.store(status, Ordering::SeqCst);
        self.generation.store(generation, Ordering::SeqCst);
    }

    /// Raises the interrupt again if it is pending: its edge may have been lost.
    pub(crate) fn raise_again(&self) {
        if self.status() != 0 {
            self.edge();
        }
    }

    fn raise(&self, bit: u32) {
        self.status.fetch_or(bit, Ordering::SeqCst);
        self.edge();
    }

    fn edge(&self) {
        if let Err(error) = self.irq.write(1) {
            tracing::error!(%error, "a virtio device's interrupt could not be raised");
        }
    }
}

impl ::balloon::Interrupts for Line {
    fn queue(&self, _index: u16) {
        self.raise(VIRTIO_MMIO_INT_VRING);
    }

    fn config(&self) {
        self.changed();
        self.raise(VIRTIO_MMIO_INT_CONFIG);
    }
}
