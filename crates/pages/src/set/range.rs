//! Whole ranges at a time: what a hint, a batch and a harvest speak in.

use super::block::{BLOCK_PAGES, Block, bits_between};
use super::{PageSet, as_index, valid_of};
use crate::PageRange;
use std::sync::Arc;

/// The part of a range that lies in one block.
struct Part {
    block: usize,
    /// Pages of the block.
    valid: u64,
    /// The part, counted in pages from the block's start.
    from: u64,
    to: u64,
}

impl Part {
    fn is_whole(&self) -> bool {
        self.from == 0 && self.to == self.valid
    }

    /// The words that the part touches, and its bits of each.
    fn masks(&self) -> impl Iterator<Item = (usize, u64)> + use<> {
        let (from, to) = (self.from, self.to);
        // A block has 64 words.
        (from / 64..to.div_ceil(64)).map(move |word| {
            let base = word * 64;
            (as_index(word), bits_between(from.saturating_sub(base), to - base))
        })
    }
}

impl PageSet {
    /// Puts the RAM pages of `range` in; how many were new.
    pub fn insert_range(&mut self, range: PageRange) -> u64 {
        let mut new = 0;
        for part in self.parts(range) {
            let block = &mut self.blocks[part.block];
            if part.is_whole() {
                new += part.valid - block.count(part.valid);
                *block = Block::Full;
            } else if !matches!(block, Block::Full) {
                let words = block.words_mut(part.valid);
                for (i, mask) in part.masks() {
                    new += u64::from((mask & !words[i]).count_ones());
                    words[i] |= mask;
                }
            }
        }
        new
    }

    /// Takes the pages of `range` out; how many were in.
    pub fn remove_range(&mut self, range: PageRange) -> u64 {
        let mut old = 0;
        for part in self.parts(range) {
            let block = &mut self.blocks[part.block];
            if part.is_whole() {
                old += block.count(part.valid);
                *block = Block::Empty;
            } else if !matches!(block, Block::Empty) {
                let words = block.words_mut(part.valid);
                for (i, mask) in part.masks() {
                    old += u64::from((mask & words[i]).count_ones());
                    words[i] &= !mask;
                }
            }
        }
        old
    }

    /// How many pages of `range` are in the set.
    pub fn count_range(&self, range: PageRange) -> u64 {
        let count = |part: Part| match &self.blocks[part.block] {
            Block::Empty => 0,
            Block::Full => part.to - part.from,
            Block::Mixed(words) => part
                .masks()
                .map(|(i, mask)| u64::from((mask & words[i]).count_ones()))
                .sum(),
        };
        self.parts(range).map(count).sum()
    }

    /// The RAM pages of `range`, block by block.
    fn parts(&self, range: PageRange) -> impl Iterator<Item = Part> + use<> {
        let layout = Arc::clone(&self.layout);
        let first = layout.regions().partition_point(|r| r.end() <= range.start());
        let of_region = move |i: usize| {
            let region = *layout.regions().get(i)?;
            let inside = region.intersection(range);
            if region.start() >= range.end() || inside.is_empty() {
                return None;
            }
            let (from, to) = (inside.start().0 - region.start().0, inside.end().0 - region.start().0);
            let base = layout.first_block(i);
            let part = move |block: u64| {
                let valid = valid_of(region.count(), block);
                let start = block * BLOCK_PAGES;
                Part {
                    block: base + as_index(block),
                    valid,
                    from: from.saturating_sub(start),
                    to: (to - start).min(valid),
                }
            };
            Some((from / BLOCK_PAGES..to.div_ceil(BLOCK_PAGES)).map(part))
        };
        (first..).map_while(of_region).flatten()
    }
}
