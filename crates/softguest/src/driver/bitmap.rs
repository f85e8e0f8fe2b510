//! The misc queue of the `bitmap` dialect, as the patches of June 2016 have it: the driver keeps a request buffer of 16
//! bytes posted, and answers a request for free pages with one bitmap a window.
//!
//! It looks at the allocator's free lists and neither allocates nor touches what is free. Faithful down to the quirks: a
//! callback takes one completion; a request is told from a used answer by its length of 16; all windows go through one
//! buffer; the last partial byte of the last bitmap is dropped.

use super::Ports;
use super::virtqueue::{Buffer, Virtqueue};
use crate::frames::WINDOW_PAGES;
use crate::mm::Mm;
use crate::{Error, Result};
use pages::Pfn;
use serde::{Deserialize, Serialize};

const REQUEST_BYTES: u32 = 16;
const HEADER_BYTES: u64 = 32;
/// A bit stands for a page of 4 KiB.
const BITMAP_SHIFT: u16 = 12;
const GET_FREE_PAGES: u16 = 0;
const CONT: u16 = 0;
const DONE: u16 = 1;

/// The misc queue.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Misc {
    queue: Virtqueue,
}

impl Misc {
    pub(crate) fn new(index: u16) -> Self {
        Misc {
            queue: Virtqueue::new(index),
        }
    }

    pub(crate) fn index(&self) -> u16 {
        self.queue.index()
    }

    pub(crate) fn queue(&mut self) -> &mut Virtqueue {
        &mut self.queue
    }

    /// Posts the first request buffer; the kick is the caller's.
    pub(crate) fn probe(&mut self, mm: &Mm) -> Result<()> {
        if !self.post(mm)? {
            return Err(Error::Corrupt("the misc queue is full before its first use".to_owned()));
        }
        Ok(())
    }

    /// Posts the request buffer; false where there is no room for it.
    fn post(&mut self, mm: &Mm) -> Result<bool> {
        let buffer = Buffer {
            address: mm.places.request,
            len: REQUEST_BYTES,
            writable: true,
        };
        self.queue.add(mm, &[buffer])
    }

    /// One callback: takes one completion, and answers it if it is a request.
    pub(crate) fn completed(&mut self, mm: &Mm, ports: &Ports) -> Result<()> {
        if self.queue.take_used(mm)? != Some(REQUEST_BYTES) {
            return Ok(());
        }
        let mut request = [0; REQUEST_BYTES as usize];
        mm.ram.read(mm.places.request, &mut request)?;
        if u16::from_le_bytes([request[0], request[1]]) != GET_FREE_PAGES {
            return Ok(());
        }
        let mut id = [0; 8];
        id.copy_from_slice(&request[8..]);
        self.answer(mm, ports, u64::from_le_bytes(id))?;
        // An answer of more windows than the queue has entries leaves no room: its buffers come back one a callback. The
        // patch ignores that. The request is then never posted again, and the next question goes unanswered.
        if self.post(mm)? {
            ports.kick(self.queue.index());
        }
        Ok(())
    }

    fn answer(&mut self, mm: &Mm, ports: &Ports, id: u64) -> Result<()> {
        let max_pfn = mm.frames.end().0;
        let limit = max_pfn.min(WINDOW_PAGES);
        let mut start = 0;
        while start < max_pfn {
            let last = start + limit >= max_pfn;
            let covered = limit.min(max_pfn - start);
            let bitmap = free_bitmap(mm, start, covered)?;
            let len = covered / 8;
            let mut header = Vec::new();
            header.extend(GET_FREE_PAGES.to_le_bytes());
            header.extend(BITMAP_SHIFT.to_le_bytes());
            header.extend(if last { DONE } else { CONT }.to_le_bytes());
            header.extend(0u16.to_le_bytes());
            header.extend(id.to_le_bytes());
            header.extend(start.to_le_bytes());
            header.extend(len.to_le_bytes());
            mm.ram.write(mm.places.bitmap, &header)?;
            mm.ram.write(mm.places.bitmap + HEADER_BYTES, &bitmap)?;
            let buffer = Buffer {
                address: mm.places.bitmap,
                len: u32::try_from(HEADER_BYTES + len).unwrap_or(u32::MAX),
                writable: false,
            };
            // The patch ignores a full queue too.
            self.queue.add(mm, &[buffer])?;
            ports.kick_and_wait(self.queue.index());
            start += limit;
        }
        Ok(())
    }
}

/// The free pages among `count` from `start` on, bit by bit, in whole words.
fn free_bitmap(mm: &Mm, start: u64, count: u64) -> Result<Vec<u8>> {
    let words = usize::try_from(count.div_ceil(64)).unwrap_or(0);
    let mut bits = vec![0u64; words];
    mm.buddy.for_each_free(&mm.ram, |frame, order| {
        let pfn = Pfn::of_address(mm.frames.address(frame)?).0;
        if pfn < start || pfn >= start + count {
            return Ok(());
        }
        let (mut at, end) = (pfn - start, (pfn - start + (1 << order)).min(count));
        while at < end {
            let here = (64 - at % 64).min(end - at);
            let mask = (u64::MAX >> (64 - here)) << (at % 64);
            if let Some(word) = usize::try_from(at / 64).ok().and_then(|i| bits.get_mut(i)) {
                *word |= mask;
            }
            at += here;
        }
        Ok(())
    })?;
    Ok(bits.into_iter().flat_map(u64::to_le_bytes).collect())
}
