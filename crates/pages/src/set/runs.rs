//! Runs: the longest stretches of pages that are in the set, in one region each, by ascending address.

use super::PageSet;
use super::block::BLOCK_PAGES;
use crate::{PageRange, Pfn};

impl PageSet {
    /// All runs, by ascending address; a run ends where its region does.
    pub fn runs(&self) -> Runs<'_> {
        Runs {
            set: self,
            from: Pfn(0),
        }
    }

    /// The first run at or after `from`, cut to begin there; `None` where no page at or after `from` is in the set.
    pub fn next_run(&self, from: Pfn) -> Option<PageRange> {
        let regions = self.layout.regions();
        let first = regions.partition_point(|r| r.end() <= from);
        (first..regions.len()).find_map(|i| self.next_run_in(i, from.max(regions[i].start())))
    }

    /// Takes the first run at or after `from` out of the set, `most` pages of it at most.
    pub fn take_run(&mut self, from: Pfn, most: u64) -> Option<PageRange> {
        let run = self.next_run(from)?.split_at(most).0;
        self.remove_range(run);
        (!run.is_empty()).then_some(run)
    }

    fn next_run_in(&self, region: usize, from: Pfn) -> Option<PageRange> {
        let r = self.layout.regions()[region];
        let first = self.find(region, from.0 - r.start().0, true)?;
        let end = self.find(region, first, false).unwrap_or(r.count());
        Some(PageRange::between(Pfn(r.start().0 + first), Pfn(r.start().0 + end)))
    }

    /// The first page of a region, at or after its page `from`, that is in the set (`set`) or is not; the latter may be
    /// the one behind the region's last, whose bit is clear.
    fn find(&self, region: usize, from: u64, set: bool) -> Option<u64> {
        let skipped = from / BLOCK_PAGES;
        let blocks = self.layout.first_block(region)..self.layout.first_block(region + 1);
        let blocks = self.blocks[blocks].get(super::as_index(skipped)..)?;
        let mut at = from;
        for (i, block) in (skipped..).zip(blocks) {
            let base = i * BLOCK_PAGES;
            if let Some(found) = block.find(at.max(base) - base, set) {
                return Some(base + found);
            }
            at = base + BLOCK_PAGES;
        }
        None
    }
}

/// The runs of a set, by ascending address. Made by [`PageSet::runs`].
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    set: &'a PageSet,
    from: Pfn,
}

impl Iterator for Runs<'_> {
    type Item = PageRange;

    fn next(&mut self) -> Option<PageRange> {
        let run = self.set.next_run(self.from)?;
        self.from = run.end();
        Some(run)
    }
}
