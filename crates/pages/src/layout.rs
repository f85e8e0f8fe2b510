//! Where guest RAM lies in guest-physical space.

use crate::set::GROUP_PAGES;
use crate::{PAGE_BYTES, PageRange, Pfn};
use serde::{Deserialize, Serialize};

/// The most regions a layout may have; KVM's own limit on x86 is 509 user memory slots.
pub const MAX_REGIONS: usize = 512;

/// The most pages a layout may have: 16 TiB, as far as the balloon's 32-bit frame numbers reach. Bounds what a peer can
/// make us allocate for page sets: 264 KiB for one that is empty (16 bytes a group).
pub const MAX_PAGES: u64 = 1 << 32;

/// One stretch of RAM: `pages` pages from guest frame `start` on.
pub type Region = PageRange;

/// Why a list of regions is no layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// No region, or too many of them.
    #[error("guest RAM has {0} regions; a layout has 1 to {MAX_REGIONS}")]
    RegionCount(usize),
    /// A region without a page.
    #[error("RAM region {0} (at frame {1}) is empty")]
    Empty(usize, Pfn),
    /// A region starts before the one ahead of it ends.
    #[error("RAM region {0} ({1}) overlaps or precedes the one before it; list regions by ascending address")]
    Order(usize, PageRange),
    /// A region ends past the last address of 64 bits.
    #[error("RAM region {0} ({1}) ends past the 64-bit address space")]
    Address(usize, PageRange),
    /// More RAM than this program handles.
    #[error("guest RAM has {0} pages, more than the {MAX_PAGES} that are supported")]
    TooLarge(u64),
}

/// The regions of guest RAM, sorted, without overlap; between them lie holes (a PC's below 4 GiB, for one).
///
/// *RAM order* is the order of pages over all regions with the holes left out: the order of bytes in a RAM file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Region>", into = "Vec<Region>")]
pub struct Layout {
    regions: Vec<Region>,
    /// For each region, the RAM-order index of its first page.
    first_index: Vec<u64>,
    /// For each region, the first of its groups in a page set; one more at the end for the total.
    first_group: Vec<usize>,
    total: u64,
}

impl Layout {
    /// Checks and takes a list of regions.
    pub fn new(regions: Vec<Region>) -> Result<Self, LayoutError> {
        if regions.is_empty() || regions.len() > MAX_REGIONS {
            return Err(LayoutError::RegionCount(regions.len()));
        }
        let (mut first_index, mut first_group) = (Vec::new(), vec![0]);
        let (mut total, mut groups, mut floor) = (0u64, 0usize, Pfn(0));
        for (i, region) in regions.iter().enumerate() {
            if region.is_empty() {
                return Err(LayoutError::Empty(i, region.start()));
            }
            if i > 0 && region.start() < floor {
                return Err(LayoutError::Order(i, *region));
            }
            if region.end().0 > u64::MAX / PAGE_BYTES {
                return Err(LayoutError::Address(i, *region));
            }
            floor = region.end();
            first_index.push(total);
            total = total.saturating_add(region.count());
            if total > MAX_PAGES {
                return Err(LayoutError::TooLarge(total));
            }
            groups +=
                usize::try_from(region.count().div_ceil(GROUP_PAGES)).map_err(|_| LayoutError::TooLarge(total))?;
            first_group.push(groups);
        }
        Ok(Layout {
            regions,
            first_index,
            first_group,
            total,
        })
    }

    /// One region of `pages` pages from address 0.
    pub fn flat(pages: u64) -> Result<Self, LayoutError> {
        Layout::new(vec![PageRange::between(Pfn(0), Pfn(pages))])
    }

    /// The layout of a PC: RAM up to 3 GiB, a hole up to 4 GiB, the rest of RAM above it.
    pub fn pc(pages: u64) -> Result<Self, LayoutError> {
        const BELOW: u64 = 3 << (30 - 12);
        const ABOVE: u64 = 4 << (30 - 12);
        if pages <= BELOW {
            return Layout::flat(pages);
        }
        let high = PageRange::new(Pfn(ABOVE), pages - BELOW).ok_or(LayoutError::TooLarge(pages))?;
        Layout::new(vec![PageRange::between(Pfn(0), Pfn(BELOW)), high])
    }

    /// The regions, by ascending address.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Pages in all regions together.
    pub fn total_pages(&self) -> u64 {
        self.total
    }

    /// Bytes in all regions together.
    pub fn total_bytes(&self) -> u64 {
        self.total * PAGE_BYTES
    }

    /// One past the highest page.
    pub fn end(&self) -> Pfn {
        self.regions.last().map_or(Pfn(0), |r| r.end())
    }

    /// The index of the region that holds `pfn`.
    pub fn region_of(&self, pfn: Pfn) -> Option<usize> {
        let i = self.regions.partition_point(|r| r.end() <= pfn);
        self.regions.get(i).is_some_and(|r| r.contains(pfn)).then_some(i)
    }

    /// Whether `pfn` is RAM.
    pub fn contains(&self, pfn: Pfn) -> bool {
        self.region_of(pfn).is_some()
    }

    /// The index of the one region that holds the whole of `range`; `None` for an empty range, for one with a page
    /// that is not RAM, and for one that crosses from a region into the next.
    pub fn region_of_range(&self, range: PageRange) -> Option<usize> {
        let i = self.region_of(range.start())?;
        (!range.is_empty() && range.end() <= self.regions[i].end()).then_some(i)
    }

    /// The parts of `range` that are RAM, cut at region borders, by ascending address.
    pub fn clip(&self, range: PageRange) -> impl Iterator<Item = PageRange> + '_ {
        let first = self.regions.partition_point(|r| r.end() <= range.start());
        self.regions[first..]
            .iter()
            .take_while(move |r| r.start() < range.end())
            .map(move |r| r.intersection(range))
            .filter(|r| !r.is_empty())
    }

    /// The place of `pfn` in RAM order, counted in pages from 0.
    pub fn index_of(&self, pfn: Pfn) -> Option<u64> {
        let i = self.region_of(pfn)?;
        Some(self.first_index[i] + (pfn.0 - self.regions[i].start().0))
    }

    /// The page at place `index` of RAM order.
    pub fn pfn_at(&self, index: u64) -> Option<Pfn> {
        if index >= self.total {
            return None;
        }
        let i = self.first_index.partition_point(|&f| f <= index) - 1;
        Some(Pfn(self.regions[i].start().0 + (index - self.first_index[i])))
    }

    /// Groups that a set of these pages has, those of each region by themselves.
    pub(crate) fn groups(&self) -> usize {
        self.first_group.last().copied().unwrap_or(0)
    }

    /// For each group, in order, how many pages it has.
    pub(crate) fn group_pages(&self) -> impl Iterator<Item = u64> + '_ {
        self.regions.iter().flat_map(|region| {
            let (whole, rest) = (region.count() / GROUP_PAGES, region.count() % GROUP_PAGES);
            (0..whole).map(|_| GROUP_PAGES).chain((rest > 0).then_some(rest))
        })
    }

    /// Index of the first group of region `i`, which may be one past the last region.
    pub(crate) fn first_group(&self, i: usize) -> usize {
        self.first_group[i]
    }
}

impl TryFrom<Vec<Region>> for Layout {
    type Error = LayoutError;

    fn try_from(regions: Vec<Region>) -> Result<Self, LayoutError> {
        Layout::new(regions)
    }
}

impl From<Layout> for Vec<Region> {
    fn from(layout: Layout) -> Self {
        layout.regions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn r(start: u64, count: u64) -> PageRange {
        PageRange::new(Pfn(start), count).unwrap()
    }

    #[test]
    fn a_pc_has_a_hole_below_four_gib() {
        let layout = Layout::pc(8 << 18).unwrap();
        assert_eq!(layout.regions(), [r(0, 3 << 18), r(4 << 18, 5 << 18)]);
        assert!(!layout.contains(Pfn(3 << 18)));
        assert_eq!(layout.index_of(Pfn(4 << 18)), Some(3 << 18));
        assert_eq!(layout.pfn_at(3 << 18), Some(Pfn(4 << 18)));
        assert_eq!(layout.pfn_at(8 << 18), None);
        assert_eq!(layout.region_of_range(r((3 << 18) - 1, 2)), None);
        assert_eq!(
            layout.clip(r((3 << 18) - 1, (1 << 18) + 3)).collect::<Vec<_>>(),
            [r((3 << 18) - 1, 1), r(4 << 18, 2)]
        );
    }

    #[test]
    fn bad_region_lists_are_refused_by_name() {
        assert_eq!(Layout::new(vec![]), Err(LayoutError::RegionCount(0)));
        assert_eq!(Layout::new(vec![r(5, 0)]), Err(LayoutError::Empty(0, Pfn(5))));
        assert_eq!(Layout::new(vec![r(0, 4), r(3, 1)]), Err(LayoutError::Order(1, r(3, 1))));
        assert_eq!(Layout::new(vec![r(4, 4), r(0, 1)]), Err(LayoutError::Order(1, r(0, 1))));
        assert!(matches!(
            Layout::new(vec![r(0, MAX_PAGES + 1)]),
            Err(LayoutError::TooLarge(_))
        ));
        assert!(matches!(
            Layout::new(vec![r(u64::MAX - 4, 4)]),
            Err(LayoutError::Address(..))
        ));
    }

    #[test]
    fn regions_that_touch_stay_apart() {
        let layout = Layout::new(vec![r(0, 3), r(3, 3)]).unwrap();
        assert_eq!(layout.region_of_range(r(2, 2)), None);
        assert_eq!(layout.clip(r(0, 6)).collect::<Vec<_>>(), [r(0, 3), r(3, 3)]);
    }
}
