//! Free page reporting (virtio 1.3, section 5.5.6.5): every so often, large free blocks that were not reported yet are
//! taken out of the allocator, named to the device in one chain of device-writable buffers, and put back once it has
//! used the chain.

use super::virtqueue::{Buffer, Virtqueue};
use super::{Later, Ports};
use crate::buddy::{MAX_ORDER, REPORT_ORDER};
use crate::mm::Mm;
use crate::{Error, Result};
use pages::PAGE_BYTES;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Blocks in a report (`PAGE_REPORTING_CAPACITY`).
const CAPACITY: usize = 32;

/// The reporting queue.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Reporting {
    queue: Virtqueue,
    /// Blocks that the device has: frame and order.
    reported: Vec<(u64, u32)>,
    #[serde(skip)]
    next: Option<Instant>,
}

impl Reporting {
    pub(crate) fn new(index: u16) -> Self {
        Reporting {
            queue: Virtqueue::new(index),
            reported: Vec::new(),
            next: None,
        }
    }

    pub(crate) fn index(&self) -> u16 {
        self.queue.index()
    }

    pub(crate) fn queue(&mut self) -> &mut Virtqueue {
        &mut self.queue
    }

    pub(crate) fn step(&mut self, mm: &mut Mm, ports: &Ports, interval: Duration) -> Result<Later> {
        if !self.reported.is_empty() {
            if self.queue.take_used(mm)?.is_none() {
                return Ok(None);
            }
            self.put_back(mm)?;
        }
        let now = Instant::now();
        let next = *self.next.get_or_insert(now + interval);
        if let Some(wait) = next.checked_duration_since(now).filter(|wait| !wait.is_zero()) {
            return Ok(Some(wait));
        }
        for order in REPORT_ORDER..=MAX_ORDER {
            self.collect(mm, order)?;
        }
        if self.reported.is_empty() {
            self.next = Some(now + interval);
            return Ok(Some(interval));
        }
        let mut chain = Vec::new();
        for (frame, order) in &self.reported {
            chain.push(Buffer {
                address: mm.frames.address(*frame)?,
                len: u32::try_from(PAGE_BYTES << order).unwrap_or(u32::MAX),
                writable: true,
            });
        }
        if !self.queue.add(mm, &chain)? {
            return Err(Error::Corrupt(
                "the reporting queue is full where it should be empty".to_owned(),
            ));
        }
        ports.kick(self.queue.index());
        Ok(None)
    }

    fn collect(&mut self, mm: &mut Mm, order: u32) -> Result<()> {
        let mut from = 0;
        while self.reported.len() < CAPACITY {
            let Some(frame) = mm.buddy.next_free(&mm.ram, from, order)? else {
                break;
            };
            from = frame + (1 << order);
            let mut known = true;
            for block in frame >> REPORT_ORDER..from >> REPORT_ORDER {
                known &= mm.places.trees.reported.contains(&mm.ram, block)?;
            }
            if !known && mm.buddy.take(&mm.ram, frame, order)? {
                self.reported.push((frame, order));
            }
        }
        Ok(())
    }

    /// Straight into the allocator: Linux neither poisons nor zeroes here.
    fn put_back(&mut self, mm: &mut Mm) -> Result<()> {
        for (frame, order) in self.reported.drain(..) {
            for block in frame >> REPORT_ORDER..(frame + (1 << order)) >> REPORT_ORDER {
                mm.places.trees.reported.insert(&mm.ram, block)?;
            }
            mm.buddy.free(&mm.ram, frame, order)?;
        }
        Ok(())
    }

    /// The driver goes: what was on its way is the guest's.
    pub(crate) fn gone(mut self, mm: &mut Mm) -> Result<()> {
        self.put_back(mm)
    }

    pub(crate) fn in_flight(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.reported.iter().copied()
    }

    pub(crate) fn check(&self, mm: &Mm) -> Result<()> {
        let bad = |(frame, order): &(u64, u32)| {
            let fits = (REPORT_ORDER..=MAX_ORDER).contains(order) && frame.trailing_zeros() >= *order;
            let last = frame.saturating_add((1 << order.min(&MAX_ORDER)) - 1);
            !fits || mm.frames.pfn(*frame).is_none() || mm.frames.pfn(last).is_none()
        };
        if self.reported.len() > CAPACITY || self.reported.iter().any(bad) {
            return Err(Error::State(
                "the blocks that are being reported are too many or not RAM".to_owned(),
            ));
        }
        Ok(())
    }
}
