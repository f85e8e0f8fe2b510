//! Walking over the content of guest RAM without allocating what is absent and without SIGBUS.
//!
//! Memory that nobody else can shrink is looked at in place. Other files may lose their end at any moment, so their pages
//! are read by `pread`, which answers with an error.

use crate::error::{Error, Result};
use crate::ram::{GuestMemory, Place, length_of};
use crate::sys::{pagemap, size};
use pages::{PAGE_BYTES, PageRange, Pfn};

/// Bytes read from a file at a time: half of a usual L2 cache.
const CHUNK_BYTES: u64 = 256 << 10;

/// A page's worth of memory of our own, aligned for the widest loads.
#[repr(C, align(4096))]
#[derive(Clone, Copy)]
pub(crate) struct Frame(pub(crate) [u8; 4096]);

/// Where the content of a stretch of pages can be had.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Content {
    /// Nowhere: it reads as zero, and must not be read.
    Absent,
    /// At this address, page-aligned, readable for the whole stretch: guest RAM itself, or a copy of it.
    At(usize),
}

impl GuestMemory {
    /// Calls `each` with stretches that cover `range` (of one region), in order.
    pub(crate) fn walk(&self, range: PageRange, each: &mut dyn FnMut(PageRange, Content) -> Result<()>) -> Result<()> {
        let place = self.place(range)?;
        self.check_length(range, place)?;
        if self.storage.may_shrink {
            return self.walk_file(range, place, each);
        }
        let Some(present) = self.present_in(range)? else {
            return match &self.storage.file {
                None => each(range, Content::At(place.addr)),
                Some(_) => self.walk_file(range, place, each),
            };
        };
        let mut at = range.start();
        for run in present {
            self.walk_gap(PageRange::between(at, run.start()), each)?;
            each(run, Content::At(self.place(run)?.addr))?;
            at = run.end();
        }
        self.walk_gap(PageRange::between(at, range.end()), each)
    }

    /// A stretch that our page table does not have: absent, unless a file has it.
    fn walk_gap(&self, gap: PageRange, each: &mut dyn FnMut(PageRange, Content) -> Result<()>) -> Result<()> {
        if gap.is_empty() {
            return Ok(());
        }
        if self.storage.page_table_is_truth() {
            return each(gap, Content::Absent);
        }
        self.walk_file(gap, self.place(gap)?, each)
    }

    /// Reads a stretch of the file, its holes left out.
    fn walk_file(
        &self,
        range: PageRange,
        place: Place,
        each: &mut dyn FnMut(PageRange, Content) -> Result<()>,
    ) -> Result<()> {
        let Some(file) = &self.storage.file else {
            return Err(Error::OutsideRam(range));
        };
        let mut frames: Vec<Frame> = Vec::new();
        let end = place.offset + range.bytes();
        let pages = |from: u64, to: u64| {
            let pfn = |offset: u64| Pfn(range.start().0 + (offset - place.offset) / PAGE_BYTES);
            PageRange::between(pfn(from), pfn(to))
        };
        let mut at = place.offset;
        while at < end {
            // Where the data ends is not asked: that takes as long as there is data, whatever the range. Holes in it read as
            // zeroes, and stay holes.
            let data = self.data_from(range, at, end)?;
            if data > at {
                each(pages(at, data), Content::Absent)?;
            }
            at = data;
            if at < end {
                let upto = end.min(at + CHUNK_BYTES);
                let part = pages(at, upto);
                frames.resize(size(part.count()), Frame([0; 4096]));
                pagemap::pread(file, as_bytes(&mut frames), at).map_err(|e| self.read_error(file, part, e))?;
                each(part, Content::At(frames.as_ptr().expose_provenance()))?;
                at = upto;
            }
        }
        Ok(())
    }

    /// Where the file's next data at or after `at` starts, in whole pages: `end` if there is none before. `range` is what
    /// is being looked at, and ends at `end`.
    fn data_from(&self, range: PageRange, at: u64, end: u64) -> Result<u64> {
        let Some(file) = &self.storage.file else {
            return Ok(end);
        };
        let Some(data) = pagemap::next_data(file, at).map_err(seeking)? else {
            // No data from here on: a hole to the end of the file, unless the end has come nearer since it was checked.
            let got = length_of(file)?;
            return if got < end {
                Err(Error::Truncated { range, got })
            } else {
                Ok(end)
            };
        };
        // Blocks of a disk's file system may be smaller than a page.
        Ok((data / PAGE_BYTES * PAGE_BYTES).clamp(at, end))
    }

    /// The next data of the file at or after `at`, in whole pages and cut to `end`: where it starts and where it ends.
    pub(crate) fn next_data(&self, range: PageRange, at: u64, end: u64) -> Result<(u64, u64)> {
        let data = self.data_from(range, at, end)?;
        let Some(file) = self.storage.file.as_ref().filter(|_| data < end) else {
            return Ok((end, end));
        };
        let hole = pagemap::next_hole(file, data).map_err(seeking)?;
        Ok((data, hole.next_multiple_of(PAGE_BYTES).clamp(data + PAGE_BYTES, end)))
    }
}

fn seeking(error: std::io::Error) -> Error {
    Error::sys("looking for data in the RAM file", error)
}

fn as_bytes(frames: &mut [Frame]) -> &mut [u8] {
    let bytes = size_of_val(frames);
    // SAFETY: a Frame is an array of bytes without padding; the slice covers exactly these frames and borrows them.
    unsafe { std::slice::from_raw_parts_mut(frames.as_mut_ptr().cast(), bytes) }
}
