//! The statistics queue (virtio 1.3, section 5.5.6.3): the device holds a buffer of (tag u16, value u64) pairs, packed;
//! getting it back is the request for fresh ones.

use super::Ports;
use super::virtqueue::{Buffer, Virtqueue};
use crate::Result;
use crate::mm::Mm;
use balloon::feature;
use pages::PAGE_BYTES;
use serde::{Deserialize, Serialize};

/// The statistics queue.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Statistics {
    queue: Virtqueue,
}

impl Statistics {
    pub(crate) fn new(index: u16) -> Self {
        Statistics {
            queue: Virtqueue::new(index),
        }
    }

    pub(crate) fn index(&self) -> u16 {
        self.queue.index()
    }

    pub(crate) fn queue(&mut self) -> &mut Virtqueue {
        &mut self.queue
    }

    /// Answers a request, if there is one.
    pub(crate) fn completed(&mut self, mm: &mut Mm, features: u64, ports: &Ports) -> Result<()> {
        if self.queue.take_used(mm)?.is_some() {
            self.post(mm, features, ports)?;
        }
        Ok(())
    }

    /// Hands over numbers as they are now.
    pub(crate) fn post(&mut self, mm: &mut Mm, features: u64, ports: &Ports) -> Result<()> {
        let ram_pages: u64 = mm.frames.stretches().map(|(_, count)| count).sum();
        // Without DEFLATE_ON_OOM Linux takes what is in the balloon out of what it manages.
        let lent = if features & feature::DEFLATE_ON_OOM == 0 {
            mm.balloon_pages
        } else {
            0
        };
        let free = mm.buddy.free_pages();
        let values: [u64; 16] = [
            0, // swap in
            0, // swap out
            0, // major faults
            mm.used_pages,
            free * PAGE_BYTES,
            (ram_pages - mm.places.reserved.count()).saturating_sub(lent) * PAGE_BYTES,
            free * PAGE_BYTES,
            0, // disk caches
            0, // huge pages allocated
            0, // and not
            0, // OOM kills
            0, // stalls
            0, // scans and reclaims
            0,
            0,
            0,
        ];
        let mut bytes = Vec::with_capacity(values.len() * 10);
        for (tag, value) in (0u16..).zip(values) {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(value.to_le_bytes());
        }
        mm.ram.write(mm.places.stats, &bytes)?;
        let buffer = Buffer {
            address: mm.places.stats,
            len: u32::try_from(bytes.len()).unwrap_or(0),
            writable: false,
        };
        if self.queue.add(mm, &[buffer])? {
            ports.kick(self.queue.index());
        }
        Ok(())
    }
}
