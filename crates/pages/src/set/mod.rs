//! A set of guest pages as arrays of 64-bit words, one array a region.
//!
//! Each region's bits start at a word of their own, so a region may start and end anywhere, runs end at region borders
//! (as they do in host memory), and holes of the layout cost nothing. Bits past a region's last page are always clear:
//! that is the invariant that lets algebra go word by word.

mod algebra;
mod bitmap;
mod range;
mod runs;

pub use bitmap::BitmapError;
pub use runs::Runs;

use crate::{Layout, PageRange, Pfn};
use std::fmt;
use std::sync::Arc;

/// A set of pages of one [`Layout`]. One bit a page.
#[derive(Clone)]
pub struct PageSet {
    layout: Arc<Layout>,
    words: Vec<u64>,
}

impl PageSet {
    /// No page.
    pub fn empty(layout: &Arc<Layout>) -> Self {
        PageSet {
            layout: Arc::clone(layout),
            words: vec![0; layout.words()],
        }
    }

    /// Every page of RAM.
    pub fn full(layout: &Arc<Layout>) -> Self {
        let mut set = PageSet::empty(layout);
        for region in layout.regions() {
            set.insert_range(*region);
        }
        set
    }

    /// The layout whose pages these are.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Whether `pfn` is in the set; a page that is not RAM is in none.
    pub fn contains(&self, pfn: Pfn) -> bool {
        self.place(pfn)
            .is_some_and(|(word, bit)| self.words[word] >> bit & 1 == 1)
    }

    /// Puts `pfn` in; whether it was new. A page that is not RAM is ignored.
    pub fn insert(&mut self, pfn: Pfn) -> bool {
        self.place(pfn).is_some_and(|(word, bit)| {
            let new = self.words[word] >> bit & 1 == 0;
            self.words[word] |= 1 << bit;
            new
        })
    }

    /// Takes `pfn` out; whether it was in.
    pub fn remove(&mut self, pfn: Pfn) -> bool {
        self.place(pfn).is_some_and(|(word, bit)| {
            let old = self.words[word] >> bit & 1 == 1;
            self.words[word] &= !(1 << bit);
            old
        })
    }

    /// How many pages are in the set.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    /// Whether the set has no page.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|w| *w == 0)
    }

    /// Takes every page out.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// The word and the bit that stand for `pfn`.
    fn place(&self, pfn: Pfn) -> Option<(usize, u32)> {
        let region = self.layout.region_of(pfn)?;
        Some(self.place_in(region, pfn))
    }

    /// The word and the bit of `pfn`, known to lie in region `region` (or one past its end).
    fn place_in(&self, region: usize, pfn: Pfn) -> (usize, u32) {
        let offset = pfn.0 - self.layout.regions()[region].start().0;
        // Both fit: the offset is below MAX_PAGES, which the layout checked, and the remainder below 64.
        (
            self.layout.first_word(region) + (offset / 64) as usize,
            (offset % 64) as u32,
        )
    }
}

impl PartialEq for PageSet {
    fn eq(&self, other: &Self) -> bool {
        (Arc::ptr_eq(&self.layout, &other.layout) || self.layout == other.layout) && self.words == other.words
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
