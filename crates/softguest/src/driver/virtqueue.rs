//! The driver's side of a split virtqueue (virtio 1.3, section 2.7), without indirect descriptors and event indices.
//!
//! Invariant: a descriptor is either free or part of exactly one chain in flight.

use crate::frames::{QUEUE_SIZE, QUEUES};
use crate::mm::Mm;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Where the available and the used ring lie behind the descriptor table, bytes.
pub(crate) const AVAIL: u64 = 2048;
pub(crate) const USED: u64 = 4096;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A stretch of guest memory to hand to the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    pub(crate) address: u64,
    pub(crate) len: u32,
    /// Whether the device writes it.
    pub(crate) writable: bool,
}

/// Sets the rings of queue `index` to what a device expects that starts: another driver may have been there.
pub(crate) fn clear(mm: &Mm, index: u16) -> Result<()> {
    let base = mm.places.queues[usize::from(index) % QUEUES];
    for ring in [base + AVAIL, base + USED] {
        // Written only where it is not so: the rings of a guest that boots are untouched memory.
        if mm.ram.load_u16(ring + 2)? != 0 {
            mm.ram.store_u16(ring + 2, 0)?;
        }
    }
    Ok(())
}

/// One queue.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Virtqueue {
    index: u16,
    /// Chains made available so far, and completions taken, both wrapping.
    avail: u16,
    used: u16,
    /// By head, the descriptors of each chain that the device has.
    in_flight: BTreeMap<u16, Vec<u16>>,
    #[serde(skip)]
    busy: u128,
}

impl Virtqueue {
    pub(crate) fn new(index: u16) -> Self {
        Virtqueue {
            index,
            avail: 0,
            used: 0,
            in_flight: BTreeMap::new(),
            busy: 0,
        }
    }

    pub(crate) fn index(&self) -> u16 {
        self.index
    }

    /// Descriptors that are free.
    pub(crate) fn room(&self) -> u32 {
        self.busy.count_zeros()
    }

    fn base(&self, mm: &Mm) -> u64 {
        mm.places.queues[usize::from(self.index) % QUEUES]
    }

    /// Makes a chain of `buffers` available; false, and nothing done, where there is no room. The kick is the caller's.
    pub(crate) fn add(&mut self, mm: &Mm, buffers: &[Buffer]) -> Result<bool> {
        if buffers.is_empty() || buffers.len() > self.room() as usize {
            return Ok(false);
        }
        let mut chain = Vec::with_capacity(buffers.len());
        for _ in buffers {
            let free = self.busy.trailing_ones();
            self.busy |= 1 << free;
            chain.push(u16::try_from(free).unwrap_or(0));
        }
        let base = self.base(mm);
        for (i, (buffer, id)) in buffers.iter().zip(&chain).enumerate() {
            let next = chain.get(i + 1);
            let flags = if buffer.writable { WRITE } else { 0 } | if next.is_some() { NEXT } else { 0 };
            let mut descriptor = [0; 16];
            descriptor[..8].copy_from_slice(&buffer.address.to_le_bytes());
            descriptor[8..12].copy_from_slice(&buffer.len.to_le_bytes());
            descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
            descriptor[14..].copy_from_slice(&next.copied().unwrap_or(0).to_le_bytes());
            mm.ram.write(base + u64::from(*id) * 16, &descriptor)?;
        }
        let head = chain[0];
        let slot = u64::from(self.avail % QUEUE_SIZE);
        mm.ram.write(base + AVAIL + 4 + slot * 2, &head.to_le_bytes())?;
        self.avail = self.avail.wrapping_add(1);
        self.in_flight.insert(head, chain);
        mm.ram.store_u16(base + AVAIL + 2, self.avail)?;
        Ok(true)
    }

    /// Takes the next completion: how many bytes the device says that it wrote.
    pub(crate) fn take_used(&mut self, mm: &Mm) -> Result<Option<u32>> {
        let ring = self.base(mm) + USED;
        if mm.ram.load_u16(ring + 2)? == self.used {
            return Ok(None);
        }
        let slot = u64::from(self.used % QUEUE_SIZE);
        let entry = mm.ram.read_u64(ring + 4 + slot * 8)?;
        let id = u16::try_from(entry & 0xffff_ffff).ok();
        let chain = id.and_then(|head| self.in_flight.remove(&head));
        let chain = chain.ok_or_else(|| {
            let (id, queue) = (entry & 0xffff_ffff, self.index);
            Error::Corrupt(format!(
                "the device used chain {id} of balloon queue {queue}, which it does not have"
            ))
        })?;
        for id in chain {
            self.busy &= !(1 << id);
        }
        self.used = self.used.wrapping_add(1);
        Ok(Some(u32::try_from(entry >> 32).unwrap_or(u32::MAX)))
    }

    /// Checks a restored queue and works out which descriptors are free.
    pub(crate) fn check(&mut self) -> Result<()> {
        let bad = |what: &str| Err(Error::State(format!("balloon queue {}: {what}", self.index)));
        if usize::from(self.index) >= QUEUES {
            return bad("there is no such queue");
        }
        if self.in_flight.len() > usize::from(QUEUE_SIZE) {
            return bad("more chains are in flight than it has entries");
        }
        let mut busy = 0u128;
        for (head, chain) in &self.in_flight {
            if chain.first() != Some(head) {
                return bad("a chain does not start at its head");
            }
            for id in chain {
                if *id >= QUEUE_SIZE || busy >> id & 1 == 1 {
                    return bad("a descriptor is out of range or in two chains");
                }
                busy |= 1 << id;
            }
        }
        if usize::from(self.avail.wrapping_sub(self.used)) != self.in_flight.len() {
            return bad("its indices do not agree with the chains in flight");
        }
        self.busy = busy;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(avail: u16, used: u16, in_flight: &[(u16, &[u16])]) -> Virtqueue {
        Virtqueue {
            index: 1,
            avail,
            used,
            in_flight: in_flight.iter().map(|(head, chain)| (*head, chain.to_vec())).collect(),
            busy: 0,
        }
    }

    #[test]
    fn restored_queues_are_checked() {
        let mut good = queue(1, u16::MAX, &[(3, &[3, 4]), (7, &[7])]);
        good.check().unwrap();
        assert_eq!(good.room(), 125);
        for mut bad in [
            queue(1, 1, &[(3, &[3])]),
            queue(1, 0, &[(3, &[4])]),
            queue(1, 0, &[(3, &[])]),
            queue(1, 0, &[(128, &[128])]),
            queue(2, 0, &[(3, &[3, 4]), (4, &[4])]),
            queue(1, 0, &[(3, &[3, 3])]),
        ] {
            assert!(matches!(bad.check(), Err(Error::State(_))), "{bad:?}");
        }
        let mut no_queue = Virtqueue::new(5);
        assert!(no_queue.check().is_err());
    }
}
