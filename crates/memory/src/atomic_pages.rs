//! A set of pages that many threads add to and one takes from. Only the first page of each 16 MiB may wait, for the memory
//! that its bit lies in; so the set costs what was added, not the size of RAM.
//!
//! Order of memory: whoever changed a page adds it *after* the change, with release; whoever takes it does so with
//! acquire and reads the page after. So a page whose change the taker missed is still in the set, or comes into it.

use pages::{Layout, PageRange, PageSet, Pfn};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Words of a block: 4096 pages.
const BLOCK_WORDS: usize = 64;

/// A block's bits; none where no page of it was ever added.
type Block = OnceLock<Box<[AtomicU64; BLOCK_WORDS]>>;

/// The set. One bit a page, each region from a block of its own.
#[derive(Debug)]
pub(crate) struct AtomicPages {
    layout: Arc<Layout>,
    regions: Vec<Box<[Block]>>,
}

impl AtomicPages {
    pub(crate) fn new(layout: &Arc<Layout>) -> Self {
        let blocks = |r: &PageRange| {
            (0..r.count().div_ceil(64 * BLOCK_WORDS as u64))
                .map(|_| Block::new())
                .collect()
        };
        AtomicPages {
            layout: Arc::clone(layout),
            regions: layout.regions().iter().map(blocks).collect(),
        }
    }

    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Adds the RAM pages of `range`, which were changed before.
    pub(crate) fn insert(&self, range: PageRange) {
        self.each_word(range, |_, block, word, mask| {
            let word = &block.get_or_init(|| Box::new([const { AtomicU64::new(0) }; BLOCK_WORDS]))[word];
            // A bit that is set already needs no write, but its order still counts: hence no look before.
            word.fetch_or(mask, Ordering::Release);
        });
    }

    /// How many pages of `range` are in.
    pub(crate) fn count(&self, range: PageRange) -> u64 {
        let mut count = 0;
        self.each_word(range, |_, block, word, mask| {
            let bits = block.get().map_or(0, |words| words[word].load(Ordering::Relaxed));
            count += u64::from((bits & mask).count_ones());
        });
        count
    }

    /// Takes all pages out and puts them into `into`.
    pub(crate) fn take(&self, into: &mut PageSet) {
        self.each_nonzero(|start, word| {
            // swap, not load and store: what is added in between must stay.
            into.insert_bitmap(start, &word.swap(0, Ordering::Acquire).to_le_bytes());
        });
    }

    /// Puts the pages of `range` into `into`, and keeps them.
    pub(crate) fn copy(&self, range: PageRange, into: &mut PageSet) {
        self.each_word(range, |start, block, word, mask| {
            let bits = block.get().map_or(0, |words| words[word].load(Ordering::Relaxed)) & mask;
            if bits != 0 {
                into.insert_bitmap(start, &bits.to_le_bytes());
            }
        });
    }

    /// Takes all pages out.
    pub(crate) fn clear(&self) {
        self.each_nonzero(|_, word| word.store(0, Ordering::Relaxed));
    }

    fn each_nonzero(&self, mut each: impl FnMut(Pfn, &AtomicU64)) {
        for (region, blocks) in self.layout.regions().iter().zip(&self.regions) {
            for (i, block) in blocks.iter().enumerate() {
                let words = block.get().into_iter().flat_map(|words| words.iter());
                for (word, at) in words.zip((i * BLOCK_WORDS..).map(|index| index as u64 * 64)) {
                    if word.load(Ordering::Relaxed) != 0 {
                        each(Pfn(region.start().0 + at), word);
                    }
                }
            }
        }
    }

    /// Calls `each` with every word that `range` touches: the page of its lowest bit, its block and its place there, and
    /// the bits that are `range`'s.
    fn each_word(&self, range: PageRange, mut each: impl FnMut(Pfn, &Block, usize, u64)) {
        for part in self.layout.clip(range) {
            let Some(region) = self.layout.region_of(part.start()) else {
                continue;
            };
            let base = self.layout.regions()[region].start().0;
            let (mut at, end) = (part.start().0 - base, part.end().0 - base);
            while at < end {
                let bit = at % 64;
                let room = (64 - bit).min(end - at);
                let mask = (u64::MAX >> (64 - room)) << bit;
                let index = crate::sys::size(at / 64);
                let block = &self.regions[region][index / BLOCK_WORDS];
                each(Pfn(base + at - bit), block, index % BLOCK_WORDS, mask);
                at += room;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each page is added once a round, so one that a racing take loses is missing for good.
    #[test]
    fn case_24_no_page_is_lost_between_adding_and_taking() {
        const PAGES: u64 = 4096;
        let layout = Arc::new(Layout::flat(PAGES).unwrap());
        let set = AtomicPages::new(&layout);
        for _ in 0..500 {
            let mut taken = PageSet::empty(&layout);
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| {
                    for i in 0..PAGES {
                        let pfn = i * 67 % PAGES;
                        set.insert(PageRange::between(Pfn(pfn), Pfn(pfn + 1)));
                    }
                });
                while !writer.is_finished() {
                    set.take(&mut taken);
                }
            });
            set.take(&mut taken);
            assert_eq!(taken.count(), PAGES);
        }
    }

    #[test]
    fn ranges_over_word_and_region_borders() {
        let r = |start, count| PageRange::new(Pfn(start), count).unwrap();
        let layout = Arc::new(Layout::new(vec![r(3, 130), r(200, 65)]).unwrap());
        let set = AtomicPages::new(&layout);
        set.insert(r(60, 145));
        assert_eq!(set.count(r(0, 1000)), 73 + 5);
        assert_eq!(set.count(r(66, 2)), 2);
        let mut copy = PageSet::empty(&layout);
        set.copy(r(100, 102), &mut copy);
        assert_eq!(copy.runs().collect::<Vec<_>>(), [r(100, 33), r(200, 2)]);
        let mut taken = PageSet::empty(&layout);
        set.take(&mut taken);
        assert_eq!(taken.runs().collect::<Vec<_>>(), [r(60, 73), r(200, 5)]);
        assert_eq!(set.count(r(0, 1000)), 0);
    }
}
