//! Union, difference, intersection: block by block, and word by word where both blocks have words.
//!
//! Sets of different layouts do not mix: that is a fault of the caller, not of any input, so it is asserted.

use super::PageSet;
use super::block::{BLOCK_PAGES, BLOCK_WORDS, Block};
use std::sync::Arc;

impl PageSet {
    /// Puts every page of `other` in; how many were new.
    pub fn union_with(&mut self, other: &PageSet) -> u64 {
        self.combine(other, |mine, theirs, valid| match (&*mine, theirs) {
            (_, Block::Empty) | (Block::Full, _) => 0,
            (Block::Empty, _) => replace(mine, theirs.clone(), valid),
            (_, Block::Full) => replace(mine, Block::Full, valid),
            (Block::Mixed(_), Block::Mixed(_)) => by_words(mine, theirs, valid, |a, b| a | b),
        })
    }

    /// Takes every page of `other` out; how many were in.
    pub fn subtract(&mut self, other: &PageSet) -> u64 {
        self.combine(other, |mine, theirs, valid| match (&*mine, theirs) {
            (Block::Empty, _) | (_, Block::Empty) => 0,
            (_, Block::Full) => replace(mine, Block::Empty, valid),
            (_, Block::Mixed(_)) => by_words(mine, theirs, valid, |a, b| a & !b),
        })
    }

    /// Keeps only what is in `other` too; how many pages went.
    pub fn intersect_with(&mut self, other: &PageSet) -> u64 {
        self.combine(other, |mine, theirs, valid| match (&*mine, theirs) {
            (Block::Empty, _) | (_, Block::Full) => 0,
            (_, Block::Empty) => replace(mine, Block::Empty, valid),
            (Block::Full, Block::Mixed(_)) => replace(mine, theirs.clone(), valid),
            (Block::Mixed(_), Block::Mixed(_)) => by_words(mine, theirs, valid, |a, b| a & b),
        })
    }

    /// How many pages are in both.
    pub fn intersection_count(&self, other: &PageSet) -> u64 {
        self.same_layout(other);
        let both = |(a, b): (&Block, &Block)| match (a, b) {
            (Block::Empty, _) | (_, Block::Empty) => 0,
            (Block::Full, block) | (block, Block::Full) => block.count(BLOCK_PAGES),
            (Block::Mixed(a), Block::Mixed(b)) => a
                .iter()
                .zip(b.iter())
                .map(|(a, b)| u64::from((a & b).count_ones()))
                .sum(),
        };
        let of_region = |region: usize| {
            let blocks = self.layout.first_block(region)..self.layout.first_block(region + 1);
            let (mine, theirs) = (&self.blocks[blocks.clone()], &other.blocks[blocks]);
            let full = matches!((mine.last(), theirs.last()), (Some(Block::Full), Some(Block::Full)));
            mine.iter().zip(theirs).map(both).sum::<u64>() - self.surplus(region, full)
        };
        (0..self.layout.regions().len()).map(of_region).sum()
    }

    /// Whether every page of this set is in `other`.
    pub fn is_subset(&self, other: &PageSet) -> bool {
        self.intersection_count(other) == self.count()
    }

    fn combine(&mut self, other: &PageSet, op: impl Fn(&mut Block, &Block, u64) -> u64) -> u64 {
        self.same_layout(other);
        let layout = Arc::clone(&self.layout);
        let mut changed = 0;
        for (i, region) in layout.regions().iter().enumerate() {
            let blocks = layout.first_block(i)..layout.first_block(i + 1);
            let pairs = self.blocks[blocks.clone()].iter_mut().zip(&other.blocks[blocks]);
            for (block, (mine, theirs)) in (0..).zip(pairs) {
                changed += op(mine, theirs, super::valid_of(region.count(), block));
            }
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

/// Puts `new` in the place of a block that it contains, or that contains it; by how many pages they differ.
fn replace(mine: &mut Block, new: Block, valid: u64) -> u64 {
    let changed = new.count(valid).abs_diff(mine.count(valid));
    *mine = new;
    changed
}

/// Combines two blocks word by word; how many pages changed.
fn by_words(mine: &mut Block, theirs: &Block, valid: u64, op: impl Fn(u64, u64) -> u64) -> u64 {
    let mut changed = 0;
    let words: [u64; BLOCK_WORDS] = std::array::from_fn(|i| {
        let old = mine.word(i, valid);
        let new = op(old, theirs.word(i, valid));
        changed += u64::from((old ^ new).count_ones());
        new
    });
    if changed > 0 {
        *mine = Block::of(Box::new(words), valid);
    }
    changed
}
