//! Runs: the longest stretches of pages that are in the set, in one region each, by ascending address.

use super::PageSet;
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
        let last_word = self.layout.first_word(region + 1);
        let base = self.layout.first_word(region);
        let pfn_of = |word: usize, bit: u32| Pfn(r.start().0 + (word - base) as u64 * 64 + u64::from(bit));

        let (mut word, bit) = self.place_in(region, from);
        let mut bits = self.words[word] & (u64::MAX << bit);
        while bits == 0 {
            word += 1;
            if word == last_word {
                return None;
            }
            bits = self.words[word];
        }
        let low = bits.trailing_zeros();
        let start = pfn_of(word, low);

        let mut clear = !self.words[word] & (u64::MAX << low);
        while clear == 0 {
            word += 1;
            if word == last_word {
                return Some(PageRange::between(start, r.end()));
            }
            clear = !self.words[word];
        }
        let end = pfn_of(word, clear.trailing_zeros()).min(r.end());
        Some(PageRange::between(start, end))
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
