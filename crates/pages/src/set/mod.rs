//! A set of guest pages: one bit a page, in blocks of 4096 pages, each empty, full, or an array of 64-bit words.
//!
//! What a migration handles is mostly nothing or everything: the holes of a guest that never used most of its RAM, the
//! free memory of an idle one. Blocks without words cost 16 bytes, and algebra passes over them at once, so what a set
//! costs, in memory and in time, follows the pages that are told apart, not the size of RAM.
//!
//! Each region's blocks are its own, so a region may start and end anywhere, runs end at region borders (as they do in
//! host memory), and holes of the layout cost nothing.

mod algebra;
mod bitmap;
mod block;
mod range;
mod runs;

pub use bitmap::BitmapError;
pub(crate) use block::BLOCK_PAGES;
pub use runs::Runs;

use crate::{Layout, PageRange, Pfn};
use block::Block;
use std::fmt;
use std::sync::Arc;

/// A set of pages of one [`Layout`].
#[derive(Clone)]
pub struct PageSet {
    layout: Arc<Layout>,
    blocks: Vec<Block>,
}

/// Where a page's bit is.
#[derive(Clone, Copy)]
struct Place {
    block: usize,
    word: usize,
    bit: u32,
    /// Pages of the block.
    valid: u64,
}

impl PageSet {
    /// No page.
    pub fn empty(layout: &Arc<Layout>) -> Self {
        PageSet {
            layout: Arc::clone(layout),
            blocks: vec![Block::Empty; layout.blocks()],
        }
    }

    /// Every page of RAM.
    pub fn full(layout: &Arc<Layout>) -> Self {
        PageSet {
            layout: Arc::clone(layout),
            blocks: vec![Block::Full; layout.blocks()],
        }
    }

    /// The layout whose pages these are.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Whether `pfn` is in the set; a page that is not RAM is in none.
    pub fn contains(&self, pfn: Pfn) -> bool {
        self.place(pfn)
            .is_some_and(|at| self.blocks[at.block].word(at.word, at.valid) >> at.bit & 1 == 1)
    }

    /// Puts `pfn` in; whether it was new. A page that is not RAM is ignored.
    pub fn insert(&mut self, pfn: Pfn) -> bool {
        let Some(at) = self.place(pfn).filter(|_| !self.contains(pfn)) else {
            return false;
        };
        self.blocks[at.block].words_mut(at.valid)[at.word] |= 1 << at.bit;
        true
    }

    /// Takes `pfn` out; whether it was in.
    pub fn remove(&mut self, pfn: Pfn) -> bool {
        let Some(at) = self.place(pfn).filter(|_| self.contains(pfn)) else {
            return false;
        };
        self.blocks[at.block].words_mut(at.valid)[at.word] &= !(1 << at.bit);
        true
    }

    /// How many pages are in the set.
    pub fn count(&self) -> u64 {
        let pages = |region: usize| {
            let blocks = &self.blocks[self.layout.first_block(region)..self.layout.first_block(region + 1)];
            let all: u64 = blocks.iter().map(|block| block.count(BLOCK_PAGES)).sum();
            all - self.surplus(region, matches!(blocks.last(), Some(Block::Full)))
        };
        (0..self.layout.regions().len()).map(pages).sum()
    }

    /// By how much a region's last block was counted too high, if it is full and counted as long as the others. (To ask each
    /// block how long it is takes most of the time of counting a large and mostly empty set.)
    fn surplus(&self, region: usize, last_is_full: bool) -> u64 {
        let pages = self.layout.regions()[region].count();
        if last_is_full {
            pages.next_multiple_of(BLOCK_PAGES) - pages
        } else {
            0
        }
    }

    /// Whether the set has no page.
    pub fn is_empty(&self) -> bool {
        self.blocks.iter().all(|block| match block {
            Block::Empty => true,
            Block::Full => false,
            Block::Mixed(words) => words.iter().all(|word| *word == 0),
        })
    }

    /// Takes every page out.
    pub fn clear(&mut self) {
        self.blocks.fill(Block::Empty);
    }

    /// For each block, in order, how many pages it has.
    fn valids(&self) -> impl Iterator<Item = u64> + '_ {
        self.layout.regions().iter().flat_map(|region| {
            let whole = region.count() / BLOCK_PAGES;
            let rest = region.count() % BLOCK_PAGES;
            (0..whole).map(|_| BLOCK_PAGES).chain((rest > 0).then_some(rest))
        })
    }

    /// Where the bit of `pfn` is.
    fn place(&self, pfn: Pfn) -> Option<Place> {
        let i = self.layout.region_of(pfn)?;
        let region = self.layout.regions()[i];
        let offset = pfn.0 - region.start().0;
        let block = offset / BLOCK_PAGES;
        Some(Place {
            block: self.layout.first_block(i) + as_index(block),
            word: as_index(offset % BLOCK_PAGES / 64),
            bit: (offset % 64) as u32,
            valid: valid_of(region.count(), block),
        })
    }
}

/// A number of blocks or words, as an index. All that there are fit: a layout has at most `MAX_PAGES`.
fn as_index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Pages of block `block` of a region of `pages` pages.
fn valid_of(pages: u64, block: u64) -> u64 {
    (pages - block * BLOCK_PAGES).min(BLOCK_PAGES)
}

impl PartialEq for PageSet {
    fn eq(&self, other: &Self) -> bool {
        let same = |(valid, (a, b)): (u64, (&Block, &Block))| {
            (0..block::BLOCK_WORDS).all(|word| a.word(word, valid) == b.word(word, valid))
        };
        (Arc::ptr_eq(&self.layout, &other.layout) || self.layout == other.layout)
            && self.valids().zip(self.blocks.iter().zip(&other.blocks)).all(same)
    }
}

impl Eq for PageSet {}

impl fmt::Debug for PageSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageSet({} of {}: ", self.count(), self.layout.total_pages())?;
        f.debug_list()
            .entries(self.runs().take(16).map(|r| r.to_string()))
            .finish()?;
        f.write_str(")")
    }
}

impl Extend<PageRange> for PageSet {
    fn extend<I: IntoIterator<Item = PageRange>>(&mut self, ranges: I) {
        for range in ranges {
            self.insert_range(range);
        }
    }
}
