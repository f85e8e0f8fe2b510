//! Whole ranges at a time: what a hint, a batch and a harvest speak in.

use super::PageSet;
use crate::PageRange;

impl PageSet {
    /// Puts the RAM pages of `range` in; how many were new.
    pub fn insert_range(&mut self, range: PageRange) -> u64 {
        self.change_range(range, |word, mask| {
            let new = mask & !*word;
            *word |= mask;
            new
        })
    }

    /// Takes the pages of `range` out; how many were in.
    pub fn remove_range(&mut self, range: PageRange) -> u64 {
        self.change_range(range, |word, mask| {
            let old = mask & *word;
            *word &= !mask;
            old
        })
    }

    /// How many pages of `range` are in the set.
    pub fn count_range(&self, range: PageRange) -> u64 {
        let mut count = 0;
        for part in self.layout.clip(range) {
            self.each_mask(part, |i, mask| count += u64::from((self.words[i] & mask).count_ones()));
        }
        count
    }

    fn change_range(&mut self, range: PageRange, mut change: impl FnMut(&mut u64, u64) -> u64) -> u64 {
        let layout = std::sync::Arc::clone(&self.layout);
        let mut changed = 0;
        for part in layout.clip(range) {
            let mut words = std::mem::take(&mut self.words);
            self.each_mask(part, |i, mask| {
                changed += u64::from(change(&mut words[i], mask).count_ones())
            });
            self.words = words;
        }
        changed
    }

    /// Calls `each` with every word that `part` touches and the bits of it that are `part`'s. `part` lies in one region.
    fn each_mask(&self, part: PageRange, mut each: impl FnMut(usize, u64)) {
        let Some(region) = self.layout.region_of_range(part) else {
            return;
        };
        let (first, low) = self.place_in(region, part.start());
        let (last, high) = self.place_in(region, part.end());
        let (from_low, below_high) = (u64::MAX << low, (1u64 << high) - 1);
        if first == last {
            each(first, from_low & below_high);
            return;
        }
        each(first, from_low);
        for word in first + 1..last {
            each(word, u64::MAX);
        }
        if high > 0 {
            each(last, below_high);
        }
    }
}
