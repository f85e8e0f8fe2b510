//! The misc queue of the `bitmap` dialect, as the patches of June 2016 have it: the driver keeps a request buffer of 16
//! bytes posted, and answers a request for free pages with one bitmap a window.
//!
//! It looks at the allocator's free lists and neither allocates nor touches what is free. Faithful down to the quirks
//! ([`Quirks`]): a callback takes one completion; a request is told from a used answer by its length of 16; all windows go
//! through one buffer; the last partial byte of the last bitmap is dropped.

use super::Ports;
use super::page_bitmap::{Bits, CONT, DONE, HEADER_BYTES, Header};
use super::virtqueue::{Buffer, Virtqueue};
use crate::frames::WINDOW_PAGES;
use crate::mm::Mm;
use crate::quirks::Quirks;
use crate::{Error, Result};
use pages::Pfn;
use serde::{Deserialize, Serialize};

const REQUEST_BYTES: u32 = 16;
const GET_FREE_PAGES: u16 = 0;

/// Pages that are added while a request is answered ([`Quirks::memory_grows`]).
const GROWN: u64 = WINDOW_PAGES;

/// The misc queue.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Misc {
    queue: Virtqueue,
}

/// Whether the driver is still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Alive {
    Yes,
    /// It has gone away in the middle of something.
    Gone,
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

    /// Takes interrupts, as many as there were: a callback each, which takes one completion, or all.
    pub(crate) fn interrupts(&mut self, mm: &Mm, ports: &Ports, quirks: &Quirks, raised: u32) -> Result<Alive> {
        let callbacks = if quirks.interrupts_merge { raised.min(1) } else { raised };
        for _ in 0..callbacks {
            while let Some(len) = self.queue.take_used(mm)? {
                if self.completed(mm, ports, quirks, len)? == Alive::Gone {
                    return Ok(Alive::Gone);
                }
                if quirks.takes_one_completion {
                    break;
                }
            }
        }
        Ok(Alive::Yes)
    }

    /// A completion with `len` bytes written: answers it if it is a request.
    fn completed(&mut self, mm: &Mm, ports: &Ports, quirks: &Quirks, len: u32) -> Result<Alive> {
        if len != REQUEST_BYTES {
            return Ok(Alive::Yes);
        }
        let mut request = [0; REQUEST_BYTES as usize];
        mm.ram.read(mm.places.request, &mut request)?;
        if u16::from_le_bytes([request[0], request[1]]) != GET_FREE_PAGES {
            return Ok(Alive::Yes);
        }
        let mut id = [0; 8];
        id.copy_from_slice(&request[8..]);
        let id = if quirks.big_endian {
            u64::from_be_bytes(id)
        } else {
            u64::from_le_bytes(id)
        };
        if self.answer(mm, ports, quirks, id)? == Alive::Gone {
            return Ok(Alive::Gone);
        }
        // An answer of more windows than the queue has entries leaves no room: its buffers come back one a callback. The
        // patch ignores that. The request is then never posted again, and the next question goes unanswered.
        if self.post(mm)? {
            ports.kick(self.queue.index());
        }
        Ok(Alive::Yes)
    }

    fn answer(&mut self, mm: &Mm, ports: &Ports, quirks: &Quirks, id: u64) -> Result<Alive> {
        let max_pfn = mm.frames.end().0;
        let limit = max_pfn.min(WINDOW_PAGES);
        // What the kernel says when it is asked again for each window.
        let max_pfn_now = max_pfn + if quirks.memory_grows { GROWN } else { 0 };
        let (mut start, mut windows) = (0, 0);
        while start < max_pfn {
            if quirks.vanishes_after_windows.is_some_and(|most| windows >= most) {
                return Ok(Alive::Gone);
            }
            let last = start + limit >= max_pfn_now;
            let covered = if last { limit.min(max_pfn - start) } else { limit };
            let len = if quirks.drops_partial_byte {
                covered / 8
            } else {
                covered.div_ceil(8)
            };
            let bits = free_bits(mm, start, covered, quirks)?;
            let header = Header {
                flag: Some(if last { DONE } else { CONT }),
                req_id: id,
                start_pfn: start,
                bmap_len: len,
            };
            header.write(mm)?;
            let bytes = bits.bytes(start, len, quirks.big_endian);
            mm.ram.write(mm.places.bitmap + HEADER_BYTES, &bytes)?;
            // The patch ignores a full queue too.
            self.queue.add(mm, &[header.buffer(mm)])?;
            if !quirks.tears_windows {
                ports.kick_and_wait(self.queue.index());
            }
            start += limit;
            windows += 1;
        }
        if quirks.tears_windows {
            ports.kick_and_wait(self.queue.index());
        }
        // Gone after all of them is gone in the middle too: the request buffer is not posted again.
        Ok(match quirks.vanishes_after_windows {
            Some(_) => Alive::Gone,
            None => Alive::Yes,
        })
    }
}

/// The free pages among `count` from `start` on.
fn free_bits(mm: &Mm, start: u64, count: u64, quirks: &Quirks) -> Result<Bits> {
    let mut bits = Bits::new(start, count);
    mm.buddy.for_each_free(&mm.ram, |frame, order| {
        let pfn = Pfn::of_address(mm.frames.address(frame)?).0;
        if pfn >= start && pfn < start + count {
            bits.insert(pfn, (1 << order).min(start + count - pfn));
        }
        Ok(())
    })?;
    if let Some(lie) = quirks.lies_about {
        bits.insert(lie.start().0, lie.count());
    }
    Ok(bits)
}
