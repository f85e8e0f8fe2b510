//! A virtqueue and the chains on it (virtio 1.3, section 2.7), each read with a bound and a check.
//!
//! Descriptors and rings lie in guest memory, so every number in them is the guest's. A chain that does not end as the
//! specification says (a loop, a next index past the table, more descriptors than the queue has) cannot be returned
//! safely: such a ring is broken, and its queue is stopped. A chain that ends well but holds nonsense is the device's
//! to skip.
//!
//! Kicks are never suppressed: every buffer that a driver adds comes with a kick of its own, so one pass over the ring a
//! kick is enough and no pass is longer than the ring.
//!
//! Public because any device of a VMM can serve its queues this way; the balloon is only the first of them.

use crate::{Error, QueueConfig, Result};
use std::ops::Deref;
use virtio_queue::{Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// One descriptor of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address.
    pub address: u64,
    /// Bytes.
    pub len: u32,
    /// Whether the device may write it; else it may read it.
    pub writable: bool,
}

/// A chain, its descriptors read once.
#[derive(Debug, Default)]
pub struct Chain {
    /// The number of its first descriptor, by which it is returned.
    pub head: u16,
    /// Its descriptors in order.
    pub segments: Vec<Segment>,
}

impl Chain {
    /// Bytes of all descriptors that the device may read.
    pub fn readable_bytes(&self) -> u64 {
        self.readable().map(|s| u64::from(s.len)).sum()
    }

    /// The descriptors that the device may read, in order.
    pub fn readable(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().filter(|s| !s.writable)
    }

    /// The descriptors that the device may write, in order.
    pub fn writable(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().filter(|s| s.writable)
    }

    /// Whether the device may write any of it.
    pub fn has_writable(&self) -> bool {
        self.writable().next().is_some()
    }

    /// Reads the device-readable bytes from `skip` on, in order whatever the descriptor boundaries, `limit` at most, in
    /// place of what `into` held.
    ///
    /// # Errors
    /// A byte to read is not in guest memory.
    pub fn gather<M: GuestMemory>(
        &self,
        mem: &M,
        skip: u64,
        limit: usize,
        into: &mut Vec<u8>,
    ) -> std::result::Result<(), vm_memory::GuestMemoryError> {
        into.clear();
        let mut skip = skip;
        for segment in self.readable() {
            let skipped = skip.min(u64::from(segment.len));
            skip -= skipped;
            let there = usize::try_from(u64::from(segment.len) - skipped).unwrap_or(usize::MAX);
            let take = there.min(limit - into.len());
            if take == 0 {
                continue;
            }
            let address = segment
                .address
                .checked_add(skipped)
                .ok_or(vm_memory::GuestMemoryError::GuestAddressOverflow)?;
            let start = into.len();
            into.resize(start + take, 0);
            mem.read_slice(&mut into[start..], GuestAddress(address))?;
        }
        Ok(())
    }
}

/// What becomes of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is returned, with this many bytes written.
    Used(u32),
    /// The device keeps it for now.
    Held,
}

/// A queue that a driver set up.
#[derive(Debug)]
pub struct VirtQueue {
    queue: Queue,
    chain: Chain,
}

/// Why a ring is broken.
pub type Broken = virtio_queue::Error;

impl VirtQueue {
    /// Takes a queue as the driver told the transport, `index` for messages. Rings must lie in guest memory.
    ///
    /// # Errors
    /// [`Error::QueueSetup`].
    pub fn new<M: GuestMemory>(mem: &M, index: usize, max_size: u16, config: &QueueConfig) -> Result<Self> {
        VirtQueue::resume(mem, index, max_size, config, 0, 0)
    }

    /// The same, with the ring positions of a queue that was in use.
    ///
    /// # Errors
    /// [`Error::QueueSetup`], also for positions that no queue of this size can have.
    pub fn resume<M: GuestMemory>(
        mem: &M,
        index: usize,
        max_size: u16,
        config: &QueueConfig,
        next_avail: u16,
        next_used: u16,
    ) -> Result<Self> {
        let refuse = |why: String| Error::QueueSetup { index, why };
        let queue = Queue::try_from(QueueState {
            max_size,
            next_avail,
            next_used,
            event_idx_enabled: false,
            size: config.size,
            ready: config.ready,
            desc_table: config.desc,
            avail_ring: config.avail,
            used_ring: config.used,
        })
        .map_err(|e| refuse(format!("{e} (size {}, rings {config:x?})", config.size)))?;
        // Address 0 is how the queue type tells that there is no ring, and it must be enabled.
        if config.avail == 0 || !queue.is_valid(mem) {
            return Err(refuse(format!(
                "it is not enabled or its rings do not lie in guest memory: {config:x?}"
            )));
        }
        if next_avail.wrapping_sub(next_used) > config.size {
            return Err(refuse(format!(
                "more chains are in flight (available {next_avail}, used {next_used}) than its {} entries",
                config.size
            )));
        }
        Ok(VirtQueue {
            queue,
            chain: Chain::default(),
        })
    }

    /// Where the driver put it.
    pub fn config(&self) -> QueueConfig {
        QueueConfig {
            size: self.queue.size(),
            desc: self.queue.desc_table(),
            avail: self.queue.avail_ring(),
            used: self.queue.used_ring(),
            ready: self.queue.ready(),
        }
    }

    /// The next positions in the available and in the used ring.
    pub fn positions(&self) -> (u16, u16) {
        (self.queue.next_avail(), self.queue.next_used())
    }

    /// Calls `each` with every chain that is available, a ring's worth at most, and returns what it does not hold;
    /// `used` is called after each that was returned.
    ///
    /// # Errors
    /// The ring is broken: it must not be served again.
    pub fn drain<M: Deref + Clone>(
        &mut self,
        mem: &M,
        mut each: impl FnMut(&M::Target, &mut Self, &Chain) -> std::result::Result<Fate, Broken>,
        mut used: impl FnMut(),
    ) -> std::result::Result<(), Broken>
    where
        M::Target: GuestMemory + Sized,
    {
        for _ in 0..self.queue.size() {
            let mut chain = std::mem::take(&mut self.chain);
            let more = self.pop(mem, &mut chain)?;
            if more && let Fate::Used(len) = each(mem, self, &chain)? {
                self.queue.add_used(&**mem, chain.head, len)?;
                used();
            }
            self.chain = chain;
            if !more {
                break;
            }
        }
        Ok(())
    }

    /// Returns the chain with head `head`, `len` bytes of it written.
    ///
    /// # Errors
    /// The ring is broken: it must not be served again.
    pub fn complete<M: GuestMemory>(&mut self, mem: &M, head: u16, len: u32) -> std::result::Result<(), Broken> {
        self.queue.add_used(mem, head, len)
    }

    /// Reads the next available chain; false where there is none.
    fn pop<M: Deref + Clone>(&mut self, mem: &M, chain: &mut Chain) -> std::result::Result<bool, Broken>
    where
        M::Target: GuestMemory + Sized,
    {
        chain.segments.clear();
        let most = usize::from(self.queue.size());
        // The iterator refuses an available index that runs ahead of the ring.
        let Some(descriptors) = self.queue.iter(mem.clone())?.next() else {
            return Ok(false);
        };
        chain.head = descriptors.head_index();
        let mut whole = false;
        for descriptor in descriptors {
            if chain.segments.len() == most {
                return Err(Broken::InvalidChain);
            }
            chain.segments.push(Segment {
                address: descriptor.addr().0,
                len: descriptor.len(),
                writable: descriptor.is_write_only(),
            });
            whole = !descriptor.has_next();
        }
        // A chain that stops at a descriptor which names a next one is a loop, or leaves the table or guest memory.
        if whole { Ok(true) } else { Err(Broken::InvalidChain) }
    }
}
