//! The entropy device (virtio 1.3, section 5.4): one queue of buffers that the device fills from the host's random number
//! generator.
//!
//! Bounds: a chain gets at most [`CHAIN_BYTES`], a kick serves at most one ring's worth of chains, so a kick costs at most
//! [`QUEUE_SIZE`] times that. A chain that does not check (one that the device should read, one outside RAM, an empty one)
//! is returned with nothing in it; a broken ring stops the queue until the driver resets the device.

use super::{Driver, Line, VirtioDevice};
use crate::state::{Incoming, section};
use crate::{Error, Result};
use balloon::queue::{Chain, Fate, VirtQueue};
use balloon::{Interrupts, QueueConfig, feature};
use machine::Section;
use memory::{DeviceMemory, VmMemory};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend};

const NAME: &str = "rng";
const VERSION: u32 = 1;

/// Entries of its queue, at most.
pub(crate) const QUEUE_SIZE: u16 = 64;
/// Bytes that a chain gets, at most.
pub(crate) const CHAIN_BYTES: u32 = 64 << 10;
/// Bytes that are fetched at a time.
const STEP: u32 = 4096;

#[derive(Default)]
struct Inner {
    features: u64,
    active: bool,
    needs_reset: bool,
    queue: Option<VirtQueue>,
}

/// The device.
pub(crate) struct Rng {
    memory: DeviceMemory,
    line: Arc<Line>,
    inner: Mutex<Inner>,
    /// A driver that breaks its rings over and over is told of once.
    warned: AtomicBool,
}

impl Rng {
    pub(crate) fn new(memory: DeviceMemory, line: Arc<Line>) -> Self {
        Rng {
            memory,
            line,
            inner: Mutex::default(),
            warned: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fills what is available.
    fn serve(&self, inner: &mut Inner) {
        let Some(queue) = &mut inner.queue else {
            tracing::debug!("kick on an entropy queue that is not in use");
            return;
        };
        let mut used = false;
        let done = queue.drain(
            &self.memory.memory(),
            |memory, _, chain| Ok(Fate::Used(fill(memory, chain))),
            || used = true,
        );
        if used {
            self.line.queue(0);
        }
        if let Err(error) = done {
            if self.warned.swap(true, Ordering::Relaxed) {
                tracing::debug!(%error, "entropy queue stopped: its rings are broken");
            } else {
                tracing::warn!(%error, "entropy queue stopped: its rings are broken");
            }
            inner.queue = None;
            inner.needs_reset = true;
            self.line.config();
        }
    }
}

/// Fills a chain; how many bytes it got.
fn fill(memory: &VmMemory, chain: &Chain) -> u32 {
    let mut parts = Vec::with_capacity(chain.segments.len());
    let mut left = CHAIN_BYTES;
    for segment in &chain.segments {
        let len = segment.len.min(left);
        let there = memory.check_range(GuestAddress(segment.address), segment.len as usize);
        if !segment.writable || !there {
            tracing::debug!(?segment, "an entropy buffer that is not to be written");
            return 0;
        }
        parts.push((segment.address, len));
        left -= len;
    }
    let mut filled = 0;
    let mut bytes = [0; STEP as usize];
    for (address, len) in parts {
        let mut done = 0;
        while done < len {
            let step = (len - done).min(STEP);
            let bytes = &mut bytes[..step as usize];
            let to = GuestAddress(address + u64::from(done));
            if !random(bytes) || memory.write_slice(bytes, to).is_err() {
                return filled;
            }
            done += step;
            filled += step;
        }
    }
    filled
}

/// Fills `bytes` from the host's generator; false where it has none.
fn random(bytes: &mut [u8]) -> bool {
    let mut done = 0;
    while done < bytes.len() {
        match getrandom(&mut bytes[done..], GetRandomFlags::empty()) {
            Ok(n) => done += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::warn!(%error, "the host gives no random numbers");
                return false;
            }
        }
    }
    true
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueRecord {
    size: u16,
    desc: u64,
    avail: u64,
    used: u64,
    next_avail: u16,
    next_used: u16,
}

/// The device, as it is saved.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    features: u64,
    active: bool,
    needs_reset: bool,
    queue: Option<QueueRecord>,
}

/// Refuses features that no driver of this device has.
fn check_features(features: u64) -> balloon::Result<()> {
    let offered = feature::VERSION_1;
    let extra = features & !offered;
    if extra != 0 {
        return Err(balloon::Error::NotOffered { extra, offered });
    }
    if features != offered {
        return Err(balloon::Error::Legacy);
    }
    Ok(())
}

impl State {
    fn check(&self, memory: &VmMemory) -> Result<Inner> {
        let refuse = |why: String| Err(Error::state(NAME, why));
        if (self.active || self.features != 0)
            && let Err(error) = check_features(self.features)
        {
            return refuse(error.to_string());
        }
        if !self.active && (self.queue.is_some() || self.needs_reset) {
            return refuse("it has a queue but no driver".to_owned());
        }
        if self.needs_reset && self.queue.is_some() {
            return refuse("it wants a reset, but its queue is whole".to_owned());
        }
        let queue = self.queue.as_ref().map(|record| {
            let config = QueueConfig {
                size: record.size,
                desc: record.desc,
                avail: record.avail,
                used: record.used,
                ready: true,
            };
            VirtQueue::resume(memory, 0, QUEUE_SIZE, &config, record.next_avail, record.next_used)
        });
        Ok(Inner {
            features: self.features,
            active: self.active,
            needs_reset: self.needs_reset,
            queue: queue.transpose().map_err(|e| Error::state(NAME, e.to_string()))?,
        })
    }
}

impl VirtioDevice for Rng {
    fn id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn features(&self) -> u64 {
        feature::VERSION_1
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn ack_features(&self, features: u64) -> balloon::Result<()> {
        check_features(features)?;
        self.lock().features = features;
        Ok(())
    }

    fn activate(&self, queues: &[QueueConfig]) -> balloon::Result<()> {
        let mut inner = self.lock();
        let memory = self.memory.memory();
        let ready = queues.first().filter(|queue| queue.ready);
        inner.queue = ready
            .map(|config| VirtQueue::new(&*memory, 0, QUEUE_SIZE, config))
            .transpose()?;
        inner.active = true;
        if inner.queue.is_some() {
            self.serve(&mut inner);
        }
        Ok(())
    }

    fn kick(&self, _queue: u16) {
        self.serve(&mut self.lock());
    }

    fn reset(&self) {
        *self.lock() = Inner::default();
    }

    fn driver(&self) -> Driver {
        let inner = self.lock();
        Driver {
            active: inner.active,
            needs_reset: inner.needs_reset,
            features: inner.features,
        }
    }

    fn queue_config(&self, index: usize) -> Option<QueueConfig> {
        let inner = self.lock();
        inner.queue.as_ref().filter(|_| index == 0).map(VirtQueue::config)
    }

    fn resume(&self) {
        let mut inner = self.lock();
        if inner.queue.is_some() {
            self.serve(&mut inner);
        }
    }

    fn save(&self) -> Result<Section> {
        let inner = self.lock();
        let record = |queue: &VirtQueue| {
            let config = queue.config();
            let (next_avail, next_used) = queue.positions();
            QueueRecord {
                size: config.size,
                desc: config.desc,
                avail: config.avail,
                used: config.used,
                next_avail,
                next_used,
            }
        };
        let state = State {
            features: inner.features,
            active: inner.active,
            needs_reset: inner.needs_reset,
            queue: inner.queue.as_ref().map(record),
        };
        section(NAME, VERSION, &state)
    }

    fn restore(&self, incoming: &mut Incoming<'_>) -> Result<()> {
        let state: State = incoming.take(NAME, VERSION)?;
        *self.lock() = state.check(&self.memory.memory())?;
        Ok(())
    }
}
