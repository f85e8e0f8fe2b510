//! Which pages hold memory of the host, found without reading any.
//!
//! For private memory our page table tells all: an entry stays until it is discarded, swapped out or not. For shared
//! memory it does not: what was reclaimed, split off a huge page, or put into the file by others has no entry, so every
//! gap is looked up in the file (`SEEK_DATA`). A gap costs a system call, a resident stretch none.
//!
//! A kernel older than 6.7 has no `PAGEMAP_SCAN`: then the words of `/proc/self/pagemap` are read, 8 bytes a page of RAM. They
//! do not tell the zero page from memory of its own, so what was only ever read counts as present, too.

use crate::error::{Error, Result};
use crate::ram::GuestMemory;
use crate::sys::pagemap::{FILE, PFNZERO, PRESENT, Pagemap, SWAPPED, Wanted};
use crate::sys::size;
use pages::{PAGE_BYTES, PageRange, PageSet, Pfn};
use std::io;

/// How to find the pages that are present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// The best way that is right for the backing.
    #[default]
    Auto,
    /// The `PAGEMAP_SCAN` ioctl alone: what our page table has.
    PagemapScan,
    /// `/proc/self/pagemap` read whole: the same, slower. Counts the zero page as present.
    PagemapFile,
    /// The file's data and holes. For files only.
    SeekData,
}

/// Words of `/proc/self/pagemap` read at a time: 2 MiB.
const WORDS: usize = 1 << 18;

impl GuestMemory {
    /// The pages that hold memory of the host, found in the given way; a superset with the coarser ways. All but
    /// [`Presence::Auto`] are for tests and measurements.
    pub fn present_by(&self, way: Presence) -> Result<PageSet> {
        let scanned = match way {
            Presence::SeekData => {
                if self.storage.file.is_none() {
                    let error = io::Error::from(io::ErrorKind::Unsupported);
                    return Err(Error::sys(
                        "finding data of anonymous memory, which is in no file",
                        error,
                    ));
                }
                None
            }
            Presence::PagemapScan => return self.by_scan(),
            Presence::PagemapFile => return self.by_words(),
            Presence::Auto => match self.by_scan().or_else(|_| self.by_words()) {
                Ok(found) => Some(found),
                Err(e) if self.storage.file.is_none() => {
                    tracing::warn!(error = %e, "holes cannot be found: all of guest RAM counts as present");
                    Some(PageSet::full(&self.layout))
                }
                Err(_) => None,
            },
        };
        match scanned {
            Some(found) if self.storage.page_table_is_truth() => Ok(found),
            Some(found) => self.with_file_data(&found),
            None => self.with_file_data(&PageSet::empty(&self.layout)),
        }
    }

    /// The runs of `range` (of one region) that our page table has; `None` if that cannot be told.
    pub(crate) fn present_in(&self, range: PageRange) -> Result<Option<Vec<PageRange>>> {
        let Some(pagemap) = &self.pagemap else {
            return Ok(None);
        };
        let mut runs = Vec::new();
        if self
            .scan(pagemap, range, self.wanted(), &mut |run| runs.push(run))
            .is_ok()
        {
            return Ok(Some(runs));
        }
        // An old kernel lacks the ioctl: not an error. What a file has is asked of the file.
        if self.storage.file.is_some() {
            return Ok(None);
        }
        runs.clear();
        Ok(self
            .words_in(pagemap, range, &mut |run| runs.push(run))
            .is_ok()
            .then_some(runs))
    }

    /// Scans `range` (of one region), in page frame numbers.
    pub(crate) fn scan(
        &self,
        pagemap: &Pagemap,
        range: PageRange,
        wanted: Wanted,
        each: &mut dyn FnMut(PageRange),
    ) -> Result<()> {
        let base = self.place(range)?.addr as u64;
        let pfn = |addr: u64| Pfn(range.start().0 + (addr - base) / PAGE_BYTES);
        pagemap
            .scan(size(base), range.bytes(), wanted, &mut |s| {
                each(PageRange::between(pfn(s.start), pfn(s.end)));
            })
            .map_err(|e| Error::sys(format!("scanning the page table of pages {range}"), e))
    }

    fn wanted(&self) -> Wanted {
        let (none, any) = match (&self.storage.file, self.storage.page_table_is_truth()) {
            (None, _) => (PFNZERO, PRESENT | SWAPPED),
            // A shared mapping may have markers in place of pages (of a tracker), which count as swapped but not as a
            // file's; a page in migration counts as both.
            (Some(_), true) => (0, PRESENT | FILE),
            // Whatever else there is will be found in the file, and asking for FILE costs a look at every page.
            (Some(_), false) => (0, PRESENT),
        };
        Wanted {
            all: 0,
            none,
            any,
            protect: false,
        }
    }

    fn pagemap(&self) -> Result<&Pagemap> {
        self.pagemap.as_ref().ok_or_else(|| {
            let error = io::Error::from(io::ErrorKind::NotFound);
            Error::sys("opening /proc/self/pagemap; is /proc mounted?", error)
        })
    }

    fn by_scan(&self) -> Result<PageSet> {
        let pagemap = self.pagemap()?;
        let mut found = PageSet::empty(&self.layout);
        for region in self.layout.regions() {
            self.scan(pagemap, *region, self.wanted(), &mut |run| {
                found.insert_range(run);
            })?;
        }
        Ok(found)
    }

    fn by_words(&self) -> Result<PageSet> {
        let pagemap = self.pagemap()?;
        let mut found = PageSet::empty(&self.layout);
        for region in self.layout.regions() {
            self.words_in(pagemap, *region, &mut |run| {
                found.insert_range(run);
            })?;
        }
        Ok(found)
    }

    /// Calls `each` with the runs of `range` (of one region) that our page table has by its words, ascending.
    fn words_in(&self, pagemap: &Pagemap, range: PageRange, each: &mut dyn FnMut(PageRange)) -> Result<()> {
        /// Present; swapped.
        const HAS_PAGE: u64 = 1 << 63 | 1 << 62;
        /// Of a file or shared memory. A marker is "swapped", but not this.
        const OF_FILE: u64 = 1 << 61;
        let mut words = vec![0u64; size(range.count()).min(WORDS)];
        let mut open: Option<Pfn> = None;
        let mut rest = range;
        while !rest.is_empty() {
            let (part, tail) = rest.split_at(WORDS as u64);
            let words = &mut words[..size(part.count())];
            let addr = self.place(part)?.addr;
            pagemap
                .words(addr, words)
                .map_err(|e| Error::sys(format!("reading /proc/self/pagemap for pages {part}"), e))?;
            for (at, word) in (part.start().0..).map(Pfn).zip(words.iter()) {
                let marker = self.storage.file.is_some() && word & OF_FILE == 0;
                if word & HAS_PAGE != 0 && !marker {
                    open.get_or_insert(at);
                } else if let Some(start) = open.take() {
                    each(PageRange::between(start, at));
                }
            }
            rest = tail;
        }
        if let Some(start) = open {
            each(PageRange::between(start, range.end()));
        }
        Ok(())
    }

    /// Adds what the file has in the gaps of `found`.
    fn with_file_data(&self, found: &PageSet) -> Result<PageSet> {
        let mut all = found.clone();
        for region in self.layout.regions() {
            let mut at = region.start();
            while at < region.end() {
                let run = found.next_run(at).filter(|run| run.start() < region.end());
                let gap = PageRange::between(at, run.map_or(region.end(), PageRange::start));
                if !gap.is_empty() {
                    self.file_data_in(gap, &mut all)?;
                }
                at = run.map_or(region.end(), PageRange::end);
            }
        }
        Ok(all)
    }

    /// The runs of `range` (of one region) that hold memory of the host, in no order; all of it if that is not known.
    pub(crate) fn present_runs(&self, range: PageRange) -> Result<Vec<PageRange>> {
        let known = self.present_in(range)?;
        if self.storage.page_table_is_truth() {
            return Ok(known.unwrap_or_else(|| vec![range]));
        }
        let mut runs = known.unwrap_or_default();
        let (mut at, scanned) = (range.start(), runs.len());
        for i in 0..=scanned {
            let run = if i < scanned {
                runs[i]
            } else {
                PageRange::between(range.end(), range.end())
            };
            let gap = PageRange::between(at, run.start());
            if !gap.is_empty() {
                self.file_data_in(gap, &mut runs)?;
            }
            at = run.end();
        }
        Ok(runs)
    }

    /// The runs of `range` (of one region) that hold no memory of the host, ascending; none that are not known to.
    pub(crate) fn holes_in(&self, range: PageRange) -> Result<Vec<PageRange>> {
        let truth = self.storage.page_table_is_truth();
        // The opposite of what is wanted otherwise, so that nothing is found in the usual case. The zero page counts as
        // memory here: it is there to be read.
        let none = match &self.storage.file {
            None => PRESENT | SWAPPED,
            Some(_) if truth => PRESENT | FILE,
            Some(_) => PRESENT,
        };
        let lacking = Wanted {
            all: 0,
            none,
            any: 0,
            protect: false,
        };
        let mut gaps = Vec::new();
        let known = match &self.pagemap {
            Some(pagemap) => self.scan(pagemap, range, lacking, &mut |gap| gaps.push(gap)).is_ok(),
            None => false,
        };
        match (truth, known) {
            (true, true) => return Ok(gaps),
            (true, false) => return Ok(self.lacking_words_in(range)),
            (false, true) => {}
            // An old kernel: all of it is looked up in the file.
            (false, false) => gaps = vec![range],
        }
        let mut holes = Vec::new();
        for gap in gaps {
            let mut data = Vec::new();
            self.file_data_in(gap, &mut data)?;
            let mut at = gap.start();
            for run in data.into_iter().chain([PageRange::between(gap.end(), gap.end())]) {
                holes.extend(Some(PageRange::between(at, run.start())).filter(|hole| !hole.is_empty()));
                at = run.end();
            }
        }
        Ok(holes)
    }

    /// The runs of `range` that our page table lacks by its words; none where it cannot be read.
    fn lacking_words_in(&self, range: PageRange) -> Vec<PageRange> {
        let (mut gaps, mut at) = (Vec::new(), range.start());
        let mut add = |run: PageRange| {
            gaps.extend(Some(PageRange::between(at, run.start())).filter(|gap| !gap.is_empty()));
            at = run.end();
        };
        let read = self
            .pagemap()
            .and_then(|pagemap| self.words_in(pagemap, range, &mut add));
        add(PageRange::between(range.end(), range.end()));
        if read.is_ok() { gaps } else { Vec::new() }
    }

    fn file_data_in(&self, gap: PageRange, all: &mut impl Extend<PageRange>) -> Result<()> {
        let place = self.place(gap)?;
        self.check_length(gap, place)?;
        let (mut at, end) = (place.offset, place.offset + gap.bytes());
        while at < end {
            let (data, hole) = self.next_data(gap, at, end)?;
            let pfn = |offset: u64| Pfn(gap.start().0 + (offset - place.offset) / PAGE_BYTES);
            all.extend(Some(PageRange::between(pfn(data), pfn(hole))).filter(|data| !data.is_empty()));
            at = hole;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backing;
    use machine::{GuestRam, PageKind};
    use pages::Layout;
    use std::sync::Arc;

    fn r(start: u64, count: u64) -> PageRange {
        PageRange::new(Pfn(start), count).unwrap()
    }

    /// Runs of data, as classified; the digest; the runs with memory and the holes.
    fn looked_at(memory: &GuestMemory) -> (Vec<PageRange>, u128, Vec<PageRange>, Vec<PageRange>) {
        let (mut data, mut digest) = (Vec::new(), 0u128);
        let (mut runs, mut holes) = (Vec::new(), Vec::new());
        for region in memory.layout().regions() {
            memory
                .classify(*region, &mut |run, kind| {
                    data.extend(Some(run).filter(|_| kind == PageKind::Data))
                })
                .unwrap();
            digest = digest.wrapping_add(memory.digest(*region).unwrap());
            runs.extend(memory.present_runs(*region).unwrap());
            holes.extend(memory.holes_in(*region).unwrap());
        }
        (data, digest, runs, holes)
    }

    /// A load from a hole leaves the zero page there, which the words count as present.
    #[test]
    fn a_kernel_without_pagemap_scan_does_not_read_what_was_never_touched() {
        // More than is looked up at a time, and ends that are no multiples of anything.
        let layout = Arc::new(Layout::new(vec![r(3, 300_003), r(400_000, 1541)]).unwrap());
        for backing in [Backing::Anonymous, Backing::Memfd] {
            let memory = GuestMemory::new(layout.clone(), &backing).unwrap();
            // No huge pages, for exact sets: the first and last pages, and those about a border of what is read at a time.
            for region in layout.regions() {
                let place = memory.place(*region).unwrap();
                crate::sys::map::advise(place.addr, region.bytes(), libc::MADV_NOHUGEPAGE).unwrap();
            }
            let written = [3, 4, 262_146, 262_147, 300_005, 400_000, 401_540];
            for pfn in written {
                memory.write(pfn * 4096, &[1]).unwrap();
            }
            let with_scan = looked_at(&memory);
            let expected = [r(3, 2), r(262_146, 2), r(300_005, 1), r(400_000, 1), r(401_540, 1)];
            assert_eq!(with_scan.0, expected);
            memory.pagemap.as_ref().unwrap().without_scan();
            assert!(memory.present_by(Presence::PagemapScan).is_err());
            assert_eq!(looked_at(&memory), with_scan, "{backing:?}");
            memory.zero(r(1000, 10_000)).unwrap();
            assert_eq!(
                memory.present().unwrap().runs().collect::<Vec<_>>(),
                expected,
                "{backing:?}"
            );
            assert_eq!(
                memory.present_by(Presence::PagemapFile).unwrap().count(),
                7,
                "{backing:?}"
            );
        }
    }
}
