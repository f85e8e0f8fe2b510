//! Union, difference, intersection: node by node, and word by word only where both sets have words.
//!
//! Sets of different layouts do not mix: that is a fault of the caller, not of any input, so it is asserted.

use super::PageSet;
use super::node::Bits;
use std::sync::Arc;

impl PageSet {
    /// Puts every page of `other` in; how many were new.
    pub fn union_with(&mut self, other: &PageSet) -> u64 {
        self.combine(other, |mine, theirs| mine | theirs)
    }

    /// Takes every page of `other` out; how many were in.
    pub fn subtract(&mut self, other: &PageSet) -> u64 {
        self.combine(other, |mine, theirs| mine & !theirs)
    }

    /// Keeps only what is in `other` too; how many pages went.
    pub fn intersect_with(&mut self, other: &PageSet) -> u64 {
        self.combine(other, |mine, theirs| mine & theirs)
    }

    /// How many pages are in both.
    pub fn intersection_count(&self, other: &PageSet) -> u64 {
        self.same_layout(other);
        let pairs = self.groups.iter().zip(&other.groups).zip(self.layout.group_pages());
        pairs.map(|((mine, theirs), valid)| mine.common(theirs, valid)).sum()
    }

    /// Whether every page of this set is in `other`.
    pub fn is_subset(&self, other: &PageSet) -> bool {
        self.intersection_count(other) == self.count()
    }

    fn combine(&mut self, other: &PageSet, op: impl Fn(u64, u64) -> u64 + Copy) -> u64 {
        self.same_layout(other);
        let pairs = self.groups.iter_mut().zip(&other.groups).zip(self.layout.group_pages());
        pairs
            .map(|((mine, theirs), valid)| mine.combine(theirs, valid, op))
            .sum()
    }

    fn same_layout(&self, other: &PageSet) {
        assert!(
            Arc::ptr_eq(&self.layout, &other.layout) || self.layout == other.layout,
            "page sets of two different RAM layouts were combined"
        );
    }
}
