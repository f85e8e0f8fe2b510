//! [`GuestRam`] for [`GuestMemory`].

use crate::content::{Content, Frame};
use crate::error::{Error, Result};
use crate::presence::Presence;
use crate::ram::GuestMemory;
use crate::sys::iov::{self, Vectors};
use crate::sys::size;
use crate::zero_scan;
use machine::{GuestRam, PageKind};
use pages::{Layout, PAGE_BYTES, PageRange, PageSet, Pfn};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Populated stretches from this many pages on are given back rather than overwritten: a huge page. Below that, writing
/// zeroes costs less than the next first touch.
const GIVE_BACK_PAGES: u64 = 512;
/// Pages filled by one copy.
const FILL_PAGES: u64 = 16;

impl GuestRam for GuestMemory {
    fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    fn present(&self) -> machine::Result<PageSet> {
        Ok(self.present_by(Presence::Auto)?)
    }

    fn classify(&self, range: PageRange, each: &mut dyn FnMut(PageRange, PageKind)) -> machine::Result<()> {
        let mut open = (PageKind::Zero, range.start(), range.start());
        let mut add = |part: PageRange, kind: PageKind| {
            let (last, from, to) = open;
            if last != kind {
                if from < to {
                    each(PageRange::between(from, to), last);
                }
                open = (kind, part.start(), part.end());
            } else {
                open = (kind, from, part.end());
            }
        };
        self.walk(range, &mut |part, content| {
            let Content::At(addr) = content else {
                add(part, PageKind::Zero);
                return Ok(());
            };
            for i in 0..part.count() {
                // SAFETY: walk promises `part.bytes()` readable bytes at the page-aligned `addr`.
                let zero = unsafe { zero_scan::is_zero(addr + size(i * PAGE_BYTES)) };
                let kind = if zero { PageKind::Zero } else { PageKind::Data };
                let pfn = Pfn(part.start().0 + i);
                add(PageRange::between(pfn, Pfn(pfn.0 + 1)), kind);
            }
            Ok(())
        })?;
        let (kind, from, to) = open;
        if from < to {
            each(PageRange::between(from, to), kind);
        }
        Ok(())
    }

    fn write_to(&self, to: BorrowedFd<'_>, head: &[u8], ranges: &[PageRange], skip: usize) -> io::Result<usize> {
        let mut vectors = Vectors::new(skip);
        vectors.push_slice(head);
        if self.storage.reads_allocate {
            self.push_content(&mut vectors, ranges)?;
        } else {
            self.push_ranges(&mut vectors, ranges)?;
        }
        if vectors.is_empty() {
            return Ok(0);
        }
        vectors.write_to(to).map_err(|e| self.moving_error(e, ranges))
    }

    fn read_from(&self, from: BorrowedFd<'_>, ranges: &[PageRange], skip: usize) -> io::Result<usize> {
        let mut vectors = Vectors::new(skip);
        for range in ranges {
            self.check_writable(*range).map_err(Error::into_io)?;
        }
        self.push_ranges(&mut vectors, ranges)?;
        if vectors.is_empty() {
            return Ok(0);
        }
        let result = vectors.read_from(from);
        // What of it was written before an error is not known: all of it counts.
        let bytes = result.as_ref().map_or(u64::MAX, |bytes| *bytes as u64);
        self.wrote_bytes(ranges, skip as u64, bytes);
        result.map_err(|e| self.moving_error(e, ranges))
    }

    fn zero(&self, range: PageRange) -> machine::Result<()> {
        self.place(range)?;
        self.check_writable(range)?;
        for run in self.present_runs(range)? {
            self.zero_present(run)?;
        }
        Ok(())
    }

    fn fill(&self, range: PageRange, value: u32) -> machine::Result<()> {
        self.place(range)?;
        self.check_writable(range)?;
        if value == 0 {
            return self.zero(range);
        }
        let pattern = value.to_le_bytes().repeat(size(FILL_PAGES * PAGE_BYTES / 4));
        let mut rest = range;
        while !rest.is_empty() {
            let (part, tail) = rest.split_at(FILL_PAGES);
            let place = self.place(part)?;
            self.check_length(part, place)?;
            self.copy_in(place, part, &pattern[..size(part.bytes())])?;
            rest = tail;
        }
        Ok(())
    }

    fn expect(&self, ranges: &[PageRange]) {
        self.expect_content(ranges);
    }

    fn settle(&self) {
        self.content_is_there();
    }

    fn digest(&self, range: PageRange) -> machine::Result<u128> {
        let mut sum = 0u128;
        let mut frame = Frame([0; 4096]);
        let page = &mut frame.0;
        self.walk(range, &mut |part, content| {
            let Content::At(addr) = content else { return Ok(()) };
            for i in 0..part.count() {
                let at = addr + size(i * PAGE_BYTES);
                // Looked at and hashed as one copy: a page must not turn zero in between.
                // SAFETY: walk promises `part.bytes()` readable bytes at `addr`.
                unsafe { iov::copy_out(at, page) };
                if i + 1 < part.count() {
                    // It arrives while this one is hashed.
                    iov::prefetch_page(at + size(PAGE_BYTES));
                }
                if !zero_scan::is_zero_page(page) {
                    sum = sum.wrapping_add(xxh3_128_with_seed(page, part.start().0 + i));
                }
            }
            Ok(())
        })?;
        Ok(sum)
    }

    fn is_populated(&self) -> bool {
        self.populated.load(std::sync::atomic::Ordering::Relaxed)
    }

    fn host_available(&self) -> Option<u64> {
        // A host that does not say is one that is not watched.
        crate::populate::available_bytes().unwrap_or_default()
    }

    fn copies_in(&self) -> bool {
        true
    }

    fn copy_in(&self, range: PageRange, from: &[u8]) -> machine::Result<()> {
        let place = self.place(range)?;
        if from.len() as u64 != range.bytes() {
            let (given, bytes) = (from.len(), range.bytes());
            let reason = format!("{given} bytes are no content for the {bytes} of pages {range}");
            return Err(machine::Error::Refused(reason));
        }
        self.check_writable(range)?;
        self.check_length(range, place)?;
        Ok(GuestMemory::copy_in(self, place, range, from)?)
    }

    fn read_page(&self, pfn: Pfn, into: &mut [u8; 4096]) -> machine::Result<()> {
        let range = PageRange::new(pfn, 1).ok_or(Error::BytesOutsideRam {
            address: u64::MAX,
            len: PAGE_BYTES,
        })?;
        let address = self
            .place(range)
            .and(Ok(pfn.0 * PAGE_BYTES))
            .map_err(machine::Error::from)?;
        Ok(self.read(address, into)?)
    }
}

impl GuestMemory {
    /// Adds the pages of `ranges` for as long as there is room.
    fn push_ranges<'a>(&'a self, vectors: &mut Vectors<'a>, ranges: &[PageRange]) -> io::Result<()> {
        for range in ranges {
            if vectors.is_full() {
                break;
            }
            let place = self.place(*range).map_err(Error::into_io)?;
            self.check_length(*range, place).map_err(Error::into_io)?;
            vectors.push_guest(place.addr, size(range.bytes()));
        }
        Ok(())
    }

    /// Notes that of the bytes of `ranges`, one after the other, `bytes` after the first `skip` were written.
    fn wrote_bytes(&self, ranges: &[PageRange], skip: u64, bytes: u64) {
        let (mut at, end) = (0u64, skip.saturating_add(bytes));
        for range in ranges {
            let (from, to) = (skip.max(at), end.min(at.saturating_add(range.bytes())));
            if from < to {
                let first = Pfn(range.start().0 + (from - at) / PAGE_BYTES);
                let past = Pfn(range.start().0 + (to - at).div_ceil(PAGE_BYTES));
                self.wrote(PageRange::between(first, past));
            }
            at = at.saturating_add(range.bytes());
        }
    }

    /// EFAULT means that the file has lost these pages since their length was checked; the rest is the peer's.
    fn moving_error(&self, error: io::Error, ranges: &[PageRange]) -> io::Error {
        match (&self.storage.file, ranges.first()) {
            (Some(file), Some(range)) if error.raw_os_error() == Some(libc::EFAULT) => {
                self.read_error(file, *range, error).into_io()
            }
            _ => error,
        }
    }

    /// Zeroes a run of pages that are there: whole huge pages of it by giving them back.
    fn zero_present(&self, run: PageRange) -> Result<()> {
        let unit = GIVE_BACK_PAGES.max(self.discard_granule_pages());
        let first = run.start().0.next_multiple_of(unit);
        let end = run.end().0 / unit * unit;
        if first >= end {
            return self.clear(run);
        }
        self.clear(PageRange::between(run.start(), Pfn(first)))?;
        self.discard(PageRange::between(Pfn(first), Pfn(end)))?;
        self.clear(PageRange::between(Pfn(end), run.end()))
    }

    fn clear(&self, range: PageRange) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let place = self.place(range)?;
        if !self.storage.may_shrink {
            // SAFETY: place checked that `range` is guest RAM; the caller that it can be written; no file can shrink.
            unsafe { iov::clear(place.addr, size(range.bytes())) };
            self.wrote(range);
            return Ok(());
        }
        let zeroes = [0u8; 4096];
        for i in 0..range.count() {
            let page = PageRange::between(Pfn(range.start().0 + i), Pfn(range.start().0 + i + 1));
            self.copy_in(self.place(page)?, page, &zeroes)?;
        }
        Ok(())
    }
}
