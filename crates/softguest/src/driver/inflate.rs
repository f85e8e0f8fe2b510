//! Inflating and deflating to the host's target (virtio 1.3, section 5.5.6.1).
//!
//! By arrays of page numbers as in Linux: 256 pages a buffer, one buffer at a time, and pages come out of the balloon only
//! once the device has used the buffer that names them. By bitmaps as in the posts of 2016 ([`Manner`]): all pages at
//! once, a bitmap a window, and the driver waits for the device at each.

use super::page_bitmap::{Bits, CONT, HEADER_BYTES, Header, covered, rfc_chain};
use super::virtqueue::{Buffer, Virtqueue};
use super::{ACTUAL, Later, NUM_PAGES, Ports};
use crate::frames::WINDOW_PAGES;
use crate::hooks::Work;
use crate::mm::Mm;
use crate::quirks::Quirks;
use crate::{Error, Result};
use balloon::{Dialect, feature};
use pages::{PageRange, Pfn};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Page numbers in a buffer (`VIRTIO_BALLOON_ARRAY_PFNS_MAX`).
const ARRAY: u64 = 256;

/// Pages that go in or out before other work gets its turn, where bitmaps name them.
const CHUNK: u64 = 1 << 14;

/// How long Linux waits where it found no page for the balloon.
const RETRY: Duration = Duration::from_millis(200);

/// How pages are named to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Manner {
    /// Arrays of page numbers.
    Arrays,
    /// Header and bitmap in one buffer.
    Bitmap,
    /// The fields and the bitmap as a chain.
    Rfc,
}

impl Manner {
    /// What a driver does that has these features.
    pub(crate) fn new(dialect: Dialect, features: u64) -> Self {
        match dialect {
            Dialect::Bitmap if features & feature::PAGE_BITMAP != 0 => Manner::Bitmap,
            Dialect::BitmapRfc if features & feature::PAGE_BITMAP != 0 => Manner::Rfc,
            _ => Manner::Arrays,
        }
    }
}

/// What the device has of ours.
#[derive(Debug, Serialize, Deserialize)]
enum Busy {
    Inflating,
    /// These frames, which are on no list.
    Deflating(Vec<u64>),
}

/// Which of the two queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    In,
    Out,
}

/// The lowest page and the highest of some.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Span {
    low: u64,
    high: u64,
}

impl Span {
    fn of(pfns: &[u64]) -> Option<Self> {
        Some(Span {
            low: *pfns.iter().min()?,
            high: *pfns.iter().max()?,
        })
    }

    fn with(self, other: Option<Span>) -> Span {
        other.map_or(self, |other| Span {
            low: self.low.min(other.low),
            high: self.high.max(other.high),
        })
    }
}

/// Inflate and deflate queues.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Transfer {
    inflate: Virtqueue,
    deflate: Virtqueue,
    manner: Manner,
    target: u32,
    busy: Option<Busy>,
    /// Pages that are in the balloon and that the device was not told of yet.
    filling: Option<Span>,
    /// What the last bitmap covered: compaction sends it again.
    last: PageRange,
    #[serde(skip)]
    retry_at: Option<Instant>,
}

impl Transfer {
    pub(crate) fn new(manner: Manner) -> Self {
        Transfer {
            inflate: Virtqueue::new(0),
            deflate: Virtqueue::new(1),
            manner,
            target: 0,
            busy: None,
            filling: None,
            last: PageRange::between(Pfn(0), Pfn(0)),
            retry_at: None,
        }
    }

    /// The host may want another size.
    pub(crate) fn configured(&mut self, ports: &Ports) {
        self.target = ports.config(NUM_PAGES);
        self.retry_at = None;
    }

    pub(crate) fn step(&mut self, mm: &mut Mm, ports: &Ports, quirks: &Quirks) -> Result<Later> {
        if !self.settle(mm, ports)? {
            return Ok(None);
        }
        let (target, have) = (u64::from(self.target), mm.balloon_pages);
        let (more, less) = (target.saturating_sub(have), have.saturating_sub(target));
        match self.manner {
            Manner::Arrays if more > 0 => self.fill(mm, ports, more.min(ARRAY)),
            Manner::Arrays if less > 0 => self.leak(mm, ports, less.min(ARRAY)),
            Manner::Arrays => Ok(None),
            _ if more > 0 || self.filling.is_some() => self.fill_bitmap(mm, ports, quirks, more),
            _ if less > 0 => self.leak_bitmap(mm, ports, quirks, less),
            _ => Ok(None),
        }
    }

    /// Whether the device has nothing of ours any more.
    fn settle(&mut self, mm: &mut Mm, ports: &Ports) -> Result<bool> {
        let queue = match &self.busy {
            None => return Ok(true),
            Some(Busy::Inflating) => &mut self.inflate,
            Some(Busy::Deflating(_)) => &mut self.deflate,
        };
        if queue.take_used(mm)?.is_none() {
            return Ok(false);
        }
        self.done(mm, ports)?;
        Ok(true)
    }

    /// The device has used what it had of ours.
    fn done(&mut self, mm: &mut Mm, ports: &Ports) -> Result<()> {
        if let Some(Busy::Deflating(frames)) = self.busy.take() {
            ports.timed(Work::Free, || free_all(mm, &frames))?;
        }
        ports.set_config(ACTUAL, u32::try_from(mm.balloon_pages).unwrap_or(u32::MAX));
        Ok(())
    }

    /// How long is still to be waited for memory.
    fn retry_in(&self) -> Later {
        self.retry_at?.checked_duration_since(Instant::now())
    }

    fn fill(&mut self, mm: &mut Mm, ports: &Ports, count: u64) -> Result<Later> {
        if let Some(wait) = self.retry_in() {
            return Ok(Some(wait));
        }
        let pfns = ports.timed(Work::Allocate, || take_pages(mm, count))?;
        if pfns.is_empty() {
            self.retry_at = Some(Instant::now() + RETRY);
            return Ok(Some(RETRY));
        }
        tell(&mut self.inflate, mm, ports, mm.places.inflate, &pfns)?;
        self.busy = Some(Busy::Inflating);
        Ok(None)
    }

    fn leak(&mut self, mm: &mut Mm, ports: &Ports, count: u64) -> Result<Later> {
        let (pfns, frames) = ports.timed(Work::Free, || give_pages(mm, count))?;
        tell(&mut self.deflate, mm, ports, mm.places.deflate, &pfns)?;
        self.busy = Some(Busy::Deflating(frames));
        Ok(None)
    }

    fn fill_bitmap(&mut self, mm: &mut Mm, ports: &Ports, quirks: &Quirks, wanted: u64) -> Result<Later> {
        if let Some(wait) = self.retry_in().filter(|_| self.filling.is_none()) {
            return Ok(Some(wait));
        }
        let fresh = ports.timed(Work::Allocate, || take_pages(mm, wanted.min(CHUNK)))?;
        let short = (fresh.len() as u64) < wanted.min(CHUNK);
        let more = wanted > CHUNK && !short;
        let before = self.filling.take();
        let span = Span::of(&fresh).map_or(before, |span| Some(span.with(before)));
        if short {
            self.retry_at = Some(Instant::now() + RETRY);
        }
        let Some(span) = span else {
            return Ok(short.then_some(RETRY));
        };
        // As in the patch, all of it is allocated before the device hears of any. A driver that names new pages alone has to
        // remember which they are, so it tells them chunk by chunk.
        if more && quirks.reports_all_again {
            self.filling = Some(span);
            return Ok(Some(Duration::ZERO));
        }
        let lie = quirks.lies_about.filter(|lie| !lie.is_empty()).map(|lie| Span {
            low: lie.start().0,
            high: lie.end().0 - 1,
        });
        let told = self.tell_span(mm, ports, quirks, Way::In, span.with(lie), |bits| {
            if let Some(lie) = quirks.lies_about {
                bits.insert(lie.start().0, lie.count());
            }
            if quirks.reports_all_again {
                return balloon_bits(mm, bits);
            }
            fresh.iter().for_each(|pfn| bits.insert(*pfn, 1));
            Ok(())
        })?;
        self.busy = Some(Busy::Inflating);
        if told {
            self.done(mm, ports)?;
        }
        Ok(if more {
            Some(Duration::ZERO)
        } else {
            short.then_some(RETRY)
        })
    }

    fn leak_bitmap(&mut self, mm: &mut Mm, ports: &Ports, quirks: &Quirks, count: u64) -> Result<Later> {
        let (pfns, frames) = ports.timed(Work::Free, || give_pages(mm, count.min(CHUNK)))?;
        let Some(span) = Span::of(&pfns) else {
            return Err(Error::Corrupt("the balloon is emptier than is counted".to_owned()));
        };
        let told = self.tell_span(mm, ports, quirks, Way::Out, span, |bits| {
            pfns.iter().for_each(|pfn| bits.insert(*pfn, 1));
            Ok(())
        })?;
        self.busy = Some(Busy::Deflating(frames));
        if told {
            self.done(mm, ports)?;
        }
        Ok((count > CHUNK).then_some(Duration::ZERO))
    }

    /// Tells pages from `span` on, window by window; `collect` puts them into the windows. Whether the device has used all of
    /// it.
    fn tell_span(
        &mut self,
        mm: &Mm,
        ports: &Ports,
        quirks: &Quirks,
        way: Way,
        span: Span,
        mut collect: impl FnMut(&mut Bits) -> Result<()>,
    ) -> Result<bool> {
        let max_pfn = mm.frames.end().0;
        let limit = max_pfn.min(WINDOW_PAGES);
        let all = covered(span.low, span.high, quirks);
        let mut pfn = all.start().0;
        while pfn < all.end().0 {
            let mut bits = Bits::new(pfn, limit.min(max_pfn.saturating_sub(pfn)));
            collect(&mut bits)?;
            if let Some((low, high)) = bits.span {
                self.last = covered(low, high, quirks);
                let bytes = bits.bytes(self.last.start().0, self.last.count() / 8, quirks.big_endian);
                mm.ram.write(mm.places.bitmap + HEADER_BYTES, &bytes)?;
                if !self.send_last(mm, ports, quirks, way)? {
                    return Ok(false);
                }
            } else if quirks.clears_for_empty_windows {
                // As in the patch, where the end then lies before the start and the length is that of all its bitmap.
                let start = pfn + limit;
                self.last = PageRange::between(Pfn(start), Pfn(start + limit.next_multiple_of(64)));
                let clear = vec![0; usize::try_from(self.last.count() / 8).unwrap_or(0)];
                mm.ram.write(mm.places.bitmap + HEADER_BYTES, &clear)?;
            }
            pfn += limit;
        }
        Ok(true)
    }

    /// Sends what the shared buffer holds, as a bitmap of what was covered last, and waits for the device. Whether it has
    /// used it.
    fn send_last(&mut self, mm: &Mm, ports: &Ports, quirks: &Quirks, way: Way) -> Result<bool> {
        let (start_pfn, bmap_len) = (self.last.start().0, self.last.count() / 8);
        let (queue, fields) = match way {
            Way::In => (&mut self.inflate, mm.places.inflate),
            Way::Out => (&mut self.deflate, mm.places.deflate),
        };
        let chain = if self.manner == Manner::Rfc {
            rfc_chain(mm, fields, start_pfn, bmap_len, quirks.big_endian)?
        } else {
            let header = Header {
                flag: (!quirks.leaves_flag_stale).then_some(CONT),
                req_id: 0,
                start_pfn,
                bmap_len,
            };
            header.write(mm)?;
            vec![header.buffer(mm)]
        };
        add(queue, mm, &chain)?;
        ports.kick_and_wait(queue.index());
        Ok(queue.take_used(mm)?.is_some())
    }

    /// The kernel moves a page of the balloon elsewhere (memory compaction): the new page goes in, the old one comes out. The
    /// driver of the posts sends its last bitmap again on both queues, whatever the buffer holds by now (quirk 11); the one
    /// that tells by arrays names the two pages.
    ///
    /// # Errors
    /// A device that still has something of ours, or does not use what it gets.
    pub(crate) fn compact(&mut self, mm: &mut Mm, ports: &Ports, quirks: &Quirks) -> Result<()> {
        if self.busy.is_some() {
            return Err(Error::Config(
                "the balloon device has not used what the driver sent".to_owned(),
            ));
        }
        let Some(new) = mm.alloc_noretry(0)? else {
            return Ok(());
        };
        let Some(old) = mm.leave_balloon()? else {
            return mm.free(new, 0);
        };
        mm.enter_balloon(new)?;
        for (way, frame) in [(Way::In, new), (Way::Out, old)] {
            let used = if self.manner == Manner::Arrays {
                let pfn = Pfn::of_address(mm.frames.address(frame)?).0;
                let (queue, place) = match way {
                    Way::In => (&mut self.inflate, mm.places.inflate),
                    Way::Out => (&mut self.deflate, mm.places.deflate),
                };
                tell(queue, mm, ports, place, &[pfn])?;
                ports.kick_and_wait(queue.index());
                queue.take_used(mm)?.is_some()
            } else {
                self.send_last(mm, ports, quirks, way)?
            };
            if !used {
                return Err(Error::Config(format!(
                    "the balloon device did not use what was sent for frame {frame:#x}"
                )));
            }
        }
        mm.free(old, 0)
    }

    /// The driver goes, and the device was reset: every page of the balloon is the guest's again.
    pub(crate) fn gone(self, mm: &mut Mm) -> Result<()> {
        if let Some(Busy::Deflating(frames)) = self.busy {
            for frame in frames {
                mm.free(frame, 0)?;
            }
        }
        while let Some(frame) = mm.leave_balloon()? {
            mm.free(frame, 0)?;
        }
        Ok(())
    }

    pub(crate) fn in_flight(&self) -> Vec<(u64, u32)> {
        match &self.busy {
            Some(Busy::Deflating(frames)) => frames.iter().map(|frame| (*frame, 0)).collect(),
            _ => Vec::new(),
        }
    }

    pub(crate) fn check(&mut self, mm: &Mm, manner: Manner) -> Result<()> {
        if (self.inflate.index(), self.deflate.index()) != (0, 1) {
            return Err(Error::State(
                "inflate and deflate queues are not queues 0 and 1".to_owned(),
            ));
        }
        if self.manner != manner {
            return Err(Error::State(format!(
                "the driver names pages by {:?}, its features give {manner:?}",
                self.manner
            )));
        }
        let max_pfn = mm.frames.end().0;
        let end = self.last.start().0.checked_add(self.last.count());
        // An empty window in the last partial word leaves twice the limit and a word more as its start.
        let most = max_pfn.next_multiple_of(64).saturating_mul(3);
        let beyond = end.is_none_or(|end| end > most)
            || self.last.count() > WINDOW_PAGES
            || self
                .filling
                .is_some_and(|span| span.low > span.high || span.high >= max_pfn);
        if beyond {
            return Err(Error::State("what it tells of the balloon is not RAM".to_owned()));
        }
        self.inflate.check()?;
        self.deflate.check()?;
        let Some(Busy::Deflating(frames)) = &self.busy else {
            return Ok(());
        };
        let outside = frames.iter().any(|frame| mm.frames.pfn(*frame).is_none());
        if outside || frames.len() as u64 > CHUNK {
            return Err(Error::State(
                "the pages on their way out of the balloon are too many or not RAM".to_owned(),
            ));
        }
        Ok(())
    }
}

/// Allocates up to `count` pages for the balloon; which.
fn take_pages(mm: &mut Mm, count: u64) -> Result<Vec<u64>> {
    let mut pfns = Vec::new();
    while let Some((frame, order)) = mm.alloc_some_noretry(count - pfns.len() as u64)? {
        mm.enter_balloon_block(frame, order)?;
        let first = Pfn::of_address(mm.frames.address(frame)?).0;
        pfns.extend(first..first + (1 << order));
    }
    Ok(pfns)
}

/// Frees pages that came out of the balloon.
fn free_all(mm: &mut Mm, frames: &[u64]) -> Result<()> {
    let mut runs = frames.chunk_by(|frame, next| frame.checked_add(1) == Some(*next));
    runs.try_for_each(|run| mm.free_run(run[0], run.len() as u64))
}

/// Takes up to `count` pages out of the balloon, still allocated; which, as pages and as frames.
fn give_pages(mm: &mut Mm, count: u64) -> Result<(Vec<u64>, Vec<u64>)> {
    let (mut pfns, mut frames) = (Vec::new(), Vec::new());
    while (frames.len() as u64) < count {
        let Some((first, word)) = mm.leave_balloon_some(count - frames.len() as u64)? else {
            break;
        };
        let bits = (0..64).filter(|bit| word >> bit & 1 == 1);
        for frame in bits.map(|bit| first + bit) {
            pfns.push(Pfn::of_address(mm.frames.address(frame)?).0);
            frames.push(frame);
        }
    }
    Ok((pfns, frames))
}

/// Every page of the balloon that is in the window.
fn balloon_bits(mm: &Mm, bits: &mut Bits) -> Result<()> {
    mm.places.trees.balloon.for_each_word(&mm.ram, |frame, word| {
        // The word may begin in the padding before a region: its first member says which page it is about.
        let first = u64::from(word.trailing_zeros());
        let pfn = Pfn::of_address(mm.frames.address(frame + first)?).0;
        bits.insert_word(pfn, word >> first);
        Ok(())
    })
}

fn tell(queue: &mut Virtqueue, mm: &Mm, ports: &Ports, address: u64, pfns: &[u64]) -> Result<()> {
    let mut array = Vec::with_capacity(pfns.len() * 4);
    for pfn in pfns {
        let pfn = u32::try_from(*pfn).map_err(|_| Error::Corrupt(format!("page {pfn:#x} does not fit 32 bits")))?;
        array.extend(pfn.to_le_bytes());
    }
    mm.ram.write(address, &array)?;
    let buffer = Buffer {
        address,
        len: u32::try_from(array.len()).unwrap_or(0),
        writable: false,
    };
    add(queue, mm, &[buffer])?;
    ports.kick(queue.index());
    Ok(())
}

fn add(queue: &mut Virtqueue, mm: &Mm, chain: &[Buffer]) -> Result<()> {
    if queue.add(mm, chain)? {
        return Ok(());
    }
    Err(Error::Corrupt(format!(
        "balloon queue {} is full where it should be empty",
        queue.index()
    )))
}
