//! A set of guest pages: one bit a page, in groups of 1 GiB, each empty, full, or an array of blocks of 16 MiB, each again
//! empty, full, or an array of 64-bit words.
//!
//! What a migration handles is mostly nothing or everything: the holes of a guest that never used most of its RAM, the
//! free memory of an idle one. A group that is alike costs 16 bytes, and algebra passes over it at once, so what a set
//! costs, in memory and in time, follows the pages that are told apart, not the size of RAM.
//!
//! Each region's groups are its own, so a region may start and end anywhere, runs end at region borders (as they do in
//! host memory), and holes of the layout cost nothing.

mod algebra;
mod bitmap;
mod node;
mod range;
mod runs;

pub use bitmap::BitmapError;
pub(crate) use node::GROUP_PAGES;
pub use runs::Runs;

use crate::{Layout, PageRange, Pfn};
use node::{Bits, Group};
use std::fmt;
use std::sync::Arc;

/// A set of pages of one [`Layout`].
#[derive(Clone)]
pub struct PageSet {
    layout: Arc<Layout>,
    groups: Vec<Group>,
}

/// Where a page is.
#[derive(Clone, Copy)]
struct Place {
    group: usize,
    /// Counted in pages from the group's start.
    at: u64,
    /// Pages of the group.
    valid: u64,
}

impl PageSet {
    /// No page.
    pub fn empty(layout: &Arc<Layout>) -> Self {
        PageSet {
            layout: Arc::clone(layout),
            groups: vec![Group::Empty; layout.groups()],
        }
    }

    /// Every page of RAM.
    pub fn full(layout: &Arc<Layout>) -> Self {
        PageSet {
            layout: Arc::clone(layout),
            groups: vec![Group::Full; layout.groups()],
        }
    }

    /// The layout whose pages these are.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Whether `pfn` is in the set; a page that is not RAM is in none.
    pub fn contains(&self, pfn: Pfn) -> bool {
        self.place(pfn)
            .is_some_and(|p| self.groups[p.group].count_range(p.at, p.at + 1) == 1)
    }

    /// Puts `pfn` in; whether it was new. A page that is not RAM is ignored.
    pub fn insert(&mut self, pfn: Pfn) -> bool {
        self.set(pfn, true)
    }

    /// Takes `pfn` out; whether it was in.
    pub fn remove(&mut self, pfn: Pfn) -> bool {
        self.set(pfn, false)
    }

    fn set(&mut self, pfn: Pfn, value: bool) -> bool {
        self.place(pfn)
            .is_some_and(|p| self.groups[p.group].set(value, p.at, p.at + 1, p.valid) == 1)
    }

    /// How many pages are in the set.
    pub fn count(&self) -> u64 {
        let groups = self.groups.iter().zip(self.layout.group_pages());
        groups.map(|(group, valid)| group.count(valid)).sum()
    }

    /// Whether the set has no page.
    pub fn is_empty(&self) -> bool {
        self.groups.iter().all(|group| matches!(group, Group::Empty))
    }

    /// Takes every page out.
    pub fn clear(&mut self) {
        self.groups.fill(Group::Empty);
    }

    fn place(&self, pfn: Pfn) -> Option<Place> {
        let i = self.layout.region_of(pfn)?;
        let region = self.layout.regions()[i];
        let offset = pfn.0 - region.start().0;
        let group = offset / GROUP_PAGES;
        Some(Place {
            group: self.layout.first_group(i) + as_index(group),
            at: offset % GROUP_PAGES,
            valid: (region.count() - group * GROUP_PAGES).min(GROUP_PAGES),
        })
    }
}

/// A number of groups or their parts, as an index. All that there are fit: a layout has at most `MAX_PAGES`.
fn as_index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl PartialEq for PageSet {
    fn eq(&self, other: &Self) -> bool {
        (Arc::ptr_eq(&self.layout, &other.layout) || self.layout == other.layout) && self.groups == other.groups
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
