//! Runs: the longest stretches of pages that are in the set, in one region each, by ascending address.

use super::PageSet;
use super::node::{Bits, GROUP_PAGES};
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
        let end = self.find(region, first, false).unwrap_or(r.count()).min(r.count());
        Some(PageRange::between(Pfn(r.start().0 + first), Pfn(r.start().0 + end)))
    }

    /// The first page of a region, at or after its page `from`, that is in the set (`value`) or is not; the latter may be
    /// one behind the region's last.
    fn find(&self, region: usize, from: u64, value: bool) -> Option<u64> {
        let skipped = from / GROUP_PAGES;
        let groups = self.layout.first_group(region)..self.layout.first_group(region + 1);
        let groups = self.groups[groups].get(super::as_index(skipped)..)?;
        (skipped..).zip(groups).find_map(|(i, group)| {
            let start = i * GROUP_PAGES;
            Some(start + group.find(value, from.saturating_sub(start))?)
        })
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
