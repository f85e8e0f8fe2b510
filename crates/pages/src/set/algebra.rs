//! Union, difference, intersection, word by word.
//!
//! Sets of different layouts do not mix: that is a fault of the caller, not of any input, so it is asserted.

use super::PageSet;
use std::sync::Arc;

impl PageSet {
    /// Puts every page of `other` in; how many were new.
    pub fn union_with(&mut self, other: &PageSet) -> u64 {
        self.combine(other, |mine, theirs| (mine | theirs, theirs & !mine))
    }

    /// Takes every page of `other` out; how many were in.
    pub fn subtract(&mut self, other: &PageSet) -> u64 {
        self.combine(other, |mine, theirs| (mine & !theirs, mine & theirs))
    }

    /// Keeps only what is in `other` too; how many pages went.
    pub fn intersect_with(&mut self, other: &PageSet) -> u64 {
        self.combine(other, |mine, theirs| (mine & theirs, mine & !theirs))
    }

    /// How many pages are in both.
    pub fn intersection_count(&self, other: &PageSet) -> u64 {
        self.same_layout(other);
        self.words
            .iter()
            .zip(&other.words)
            .map(|(a, b)| u64::from((a & b).count_ones()))
            .sum()
    }

    /// Whether every page of this set is in `other`.
    pub fn is_subset(&self, other: &PageSet) -> bool {
        self.same_layout(other);
        self.words.iter().zip(&other.words).all(|(a, b)| a & !b == 0)
    }

    fn combine(&mut self, other: &PageSet, op: impl Fn(u64, u64) -> (u64, u64)) -> u64 {
        self.same_layout(other);
        let mut changed = 0;
        for (mine, theirs) in self.words.iter_mut().zip(&other.words) {
            let (new, diff) = op(*mine, *theirs);
            *mine = new;
            changed += u64::from(diff.count_ones());
        }
        changed
    }

    fn same_layout(&self, other: &PageSet) {
        assert!(
            Arc::ptr_eq(&self.layout, &other.layout) || self.layout == other.layout,
            "page sets of two different RAM layouts were combined"
        );
    }
}
