//! Asking in the `bitmap` dialect: the misc queue of the June 2016 v2 patch set.
//!
//! The guest keeps one device-writable buffer posted. The device writes a request into it (16 bytes: cmd 0, a request
//! id). The guest answers with device-readable buffers, one for each window of guest-physical space: a header of 32
//! bytes, then a bitmap of free pages; CONT, CONT, ..., DONE. Then it posts a request buffer again.
//!
//! What the driver does, and so what this device does:
//!
//! - The driver takes one completion an interrupt, and eats a request that has another cmd or length. So: cmd 0 alone,
//!   16 bytes used for requests and 0 for answers, one interrupt a completion, a request is never sent again. When a
//!   session ends unanswered, the interrupt is raised once more: it frees a request that is stuck behind an answer.
//! - All windows share one guest buffer, which the driver reuses without waiting. A buffer is read once, in whole, and all
//!   of it once more, to see that it was left alone (see [`crate::window`]). A window that is not due makes
//!   the whole answer worthless. So answers are gathered, and handed over only when DONE shows that they are whole.
//! - Memory added meanwhile gives CONT without DONE: the asker's time-out ends it, and nothing of it is used.
//! - Request ids are 1 to 2^32 - 1 (a 32-bit guest truncates) and are never used twice; 0 is what inflate headers say.
//! - A guest of the other byte order echoes the id swapped, and is refused by that.

use super::bitmap::{HEADER, Header};
use crate::counters::{Counters, Tally};
use crate::queue::{Broken, Chain, Fate, Segment, VirtQueue};
use crate::session::Outlet;
use crate::window::{self, MOST_WINDOW};
use crate::{Error, Result};
use machine::AnswerSink;
use pages::{Layout, PageRange, PageSet, Pfn};
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// Bytes of a request.
const REQUEST: usize = 16;

/// More windows follow.
const CONT: u16 = 0;

/// The last window.
const DONE: u16 = 1;

/// A request buffer that the guest keeps posted.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Posted {
    head: u16,
    segments: Vec<Segment>,
}

struct Open {
    id: u32,
    /// Whether the request is in the guest's hands.
    sent: bool,
    /// The first page of the window that is due; all before it was said.
    due: u64,
    /// What was said to be free so far.
    free: PageSet,
    outlet: Outlet,
}

/// The device's side of the misc queue.
pub(crate) struct Misc {
    /// The last request id that was used; persisted.
    issued: u32,
    posted: Option<Posted>,
    open: Option<Open>,
    /// Scratch: the header and the bitmap of one buffer.
    bytes: Vec<u8>,
    bitmap: Vec<u8>,
}

impl Misc {
    /// Nothing was ever asked.
    pub(crate) fn new() -> Self {
        Misc::restored(0)
    }

    /// As saved by another device, no session being open. The request buffer that it held comes by [`Misc::repost`].
    pub(crate) fn restored(issued: u32) -> Self {
        Misc {
            issued,
            posted: None,
            open: None,
            bytes: Vec::new(),
            bitmap: Vec::new(),
        }
    }

    pub(crate) fn issued(&self) -> u32 {
        self.issued
    }

    /// The request buffer that is held, for saving: its head, and where its bytes lie.
    pub(crate) fn posted(&self) -> Option<(u16, Vec<(u64, u32)>)> {
        let posted = self.posted.as_ref()?;
        Some((
            posted.head,
            posted.segments.iter().map(|s| (s.address, s.len)).collect(),
        ))
    }

    /// Holds a request buffer that another device held. It must be one that [`Misc::serve`] would have held.
    pub(crate) fn repost(&mut self, head: u16, segments: &[(u64, u32)]) -> Result<()> {
        let bytes: u64 = segments.iter().map(|(_, len)| u64::from(*len)).sum();
        if segments.len() > REQUEST || bytes != REQUEST as u64 {
            return Err(Error::State(format!(
                "a posted request buffer of {bytes} bytes in {} pieces is not one of {REQUEST} bytes",
                segments.len()
            )));
        }
        let segments = segments.iter().map(|(address, len)| Segment {
            address: *address,
            len: *len,
            writable: true,
        });
        self.posted = Some(Posted {
            head,
            segments: segments.collect(),
        });
        Ok(())
    }

    /// The session that is open.
    pub(crate) fn session(&self) -> Option<u32> {
        self.open.as_ref().map(|open| open.outlet.session())
    }

    /// Opens a session under a fresh id. [`Misc::send`] puts the request into the guest's hands.
    pub(crate) fn begin(&mut self, session: u32, sink: AnswerSink, layout: &Arc<Layout>) -> Result<()> {
        self.issued = self
            .issued
            .checked_add(1)
            .ok_or_else(|| Error::CannotAsk("every request id below 2^32 has been used".to_owned()))?;
        self.open = Some(Open {
            id: self.issued,
            sent: false,
            due: 0,
            free: PageSet::empty(layout),
            outlet: Outlet::new(session, sink),
        });
        Ok(())
    }

    /// Closes the session; what was gathered is dropped. Whether a request was left without its last answer.
    pub(crate) fn end(&mut self) -> bool {
        self.open
            .take()
            .is_some_and(|open| open.sent && !open.outlet.is_finished())
    }

    /// The guest will say no more: its driver is gone, or its queue is broken. So is the buffer that it had posted.
    pub(crate) fn abandon(&mut self) {
        self.posted = None;
        if let Some(open) = &mut self.open {
            open.outlet.finish();
        }
    }

    /// Writes the request where one is due and the guest has a buffer posted. True where a completion was made.
    pub(crate) fn send<M: GuestMemory>(
        &mut self,
        mem: &M,
        queue: &mut VirtQueue,
        tally: &mut Counters,
    ) -> std::result::Result<bool, Broken> {
        let Some(open) = self.open.as_mut().filter(|o| !o.sent && !o.outlet.is_finished()) else {
            return Ok(false);
        };
        let Some(posted) = self.posted.take() else {
            return Ok(false);
        };
        open.sent = true;
        let mut request = [0u8; REQUEST];
        request[8..].copy_from_slice(&u64::from(open.id).to_le_bytes());
        let mut rest = request.as_slice();
        for segment in &posted.segments {
            let (now, later) = rest.split_at(rest.len().min(usize::try_from(segment.len).unwrap_or(usize::MAX)));
            if mem.write_slice(now, GuestAddress(segment.address)).is_err() {
                tally.malformed("the request buffer does not lie in guest memory");
                open.outlet.finish();
                queue.complete(mem, posted.head, 0)?;
                return Ok(true);
            }
            rest = later;
        }
        queue.complete(mem, posted.head, u32::try_from(REQUEST).unwrap_or(0))?;
        Ok(true)
    }

    /// Serves one chain of the misc queue: a request buffer is held, an answer is read and returned.
    pub(crate) fn serve<M: GuestMemory>(&mut self, mem: &M, chain: &Chain, tally: &mut Counters) -> Fate {
        if chain.has_writable() {
            return self.post(chain, tally);
        }
        self.answer(mem, chain, tally);
        Fate::Used(0)
    }

    fn post(&mut self, chain: &Chain, tally: &mut Counters) -> Fate {
        let why = if chain.readable().next().is_some() {
            "a buffer has device-readable and device-writable descriptors"
        } else if self.posted.is_some() {
            "a second request buffer was posted"
        } else {
            // Where the first 16 bytes lie; what is beyond is not needed.
            let mut room = REQUEST;
            let mut segments = Vec::new();
            for segment in chain.writable() {
                let take = room.min(usize::try_from(segment.len).unwrap_or(usize::MAX));
                if take > 0 {
                    segments.push(Segment {
                        len: u32::try_from(take).unwrap_or(segment.len),
                        ..*segment
                    });
                }
                room -= take;
            }
            if room == 0 {
                let head = chain.head;
                self.posted = Some(Posted { head, segments });
                return Fate::Held;
            }
            "a request buffer is shorter than 16 bytes"
        };
        tally.malformed(why);
        Fate::Used(0)
    }

    fn answer<M: GuestMemory>(&mut self, mem: &M, chain: &Chain, tally: &mut Counters) {
        if chain.gather(mem, 0, HEADER, &mut self.bytes).is_err() {
            return tally.malformed("an answer does not lie in guest memory");
        }
        let Some(header) = Header::parse(&self.bytes) else {
            return tally.bad_header("an answer is shorter than its header");
        };
        if let Some(why) = header.fault(chain.readable_bytes() - HEADER as u64) {
            return tally.bad_header(why);
        }
        if header.flag != CONT && header.flag != DONE {
            return tally.bad_header("its flag is neither CONT nor DONE");
        }
        let issued = u64::from(self.issued);
        let Some(open) = self
            .open
            .as_mut()
            .filter(|open| open.sent && !open.outlet.is_finished() && u64::from(open.id) == header.req_id)
        else {
            if (1..=issued).contains(&header.req_id) {
                return tally.late("a bitmap of a request that is not open");
            }
            return tally.bad_header("a bitmap of a request that was never made");
        };
        // The bitmap, once and in whole; then both again, for a window that was overwritten meanwhile.
        let read = chain.gather(mem, HEADER as u64, MOST_WINDOW, &mut self.bitmap);
        let left_alone = window::is_still(mem, chain, HEADER, &self.bitmap)
            && window::is_still(mem, chain, 0, &self.bytes[..HEADER]);
        let torn = read.is_ok() && !left_alone;
        let stray = header.start_pfn != open.due || (header.flag == CONT && header.bmap_len == 0);
        if read.is_err() || torn || stray {
            tally.malformed("a window was overwritten or is not the one that is due: the whole answer is dropped");
            tally.torn += u64::from(torn);
            tally.stray_windows += u64::from(stray && !torn);
            open.outlet.finish();
            return;
        }
        tally.answers += 1;
        let ram = open.free.insert_bitmap(Pfn(header.start_pfn), &self.bitmap);
        tally.bad_pfns += window::ones(&self.bitmap) - ram;
        open.due = header.start_pfn.saturating_add(header.bmap_len * 8);
        if header.flag == DONE {
            open.deliver();
        }
    }
}

impl Open {
    /// Hands over a whole answer.
    fn deliver(&mut self) {
        let layout = Arc::clone(self.free.layout());
        for run in self.free.runs() {
            self.outlet.free(&layout, run);
        }
        self.free.clear();
        self.outlet.covered(&layout, PageRange::between(Pfn(0), Pfn(self.due)));
        self.outlet.finish();
    }
}
