//! How the guest numbers its pages, and where in its RAM the kernel keeps its own.
//!
//! Each region of RAM has its own stretch of *frames*: frame and page number are equal modulo the largest block, so a
//! block of frames is a block of pages, and no block spans two regions. Stretches are padded; padding is never free.

use crate::buddy::{MAX_ORDER, Trees};
use crate::{Error, Result};
use pages::{Layout, PAGE_BYTES, PageRange, Pfn};

const BLOCK: u64 = 1 << MAX_ORDER;

/// The numbering of pages.
#[derive(Clone, Debug)]
pub(crate) struct Frames {
    /// Each region and the frame of its first page.
    regions: Vec<(PageRange, u64)>,
    total: u64,
}

impl Frames {
    pub(crate) fn new(layout: &Layout) -> Self {
        let (mut regions, mut base) = (Vec::new(), 0);
        for region in layout.regions() {
            let first = base + region.start().0 % BLOCK;
            regions.push((*region, first));
            base = (first + region.count()).next_multiple_of(BLOCK);
        }
        Frames { regions, total: base }
    }

    /// Frames are below this; a multiple of the largest block.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// One past the highest page.
    pub(crate) fn end(&self) -> Pfn {
        self.regions.last().map_or(Pfn(0), |(range, _)| range.end())
    }

    /// Each region's frames: the first, and how many.
    pub(crate) fn stretches(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.regions.iter().map(|(range, first)| (*first, range.count()))
    }

    /// The page of a frame; `None` in the padding.
    pub(crate) fn pfn(&self, frame: u64) -> Option<Pfn> {
        let i = self.regions.partition_point(|(_, first)| *first <= frame);
        let (range, first) = self.regions.get(i.checked_sub(1)?)?;
        let inside = frame - first;
        (inside < range.count()).then_some(Pfn(range.start().0 + inside))
    }

    /// The frame of a page; `None` where there is no RAM.
    pub(crate) fn frame(&self, pfn: Pfn) -> Option<u64> {
        let i = self.regions.partition_point(|(range, _)| range.end() <= pfn);
        let (range, first) = self.regions.get(i)?;
        range.contains(pfn).then(|| first + (pfn.0 - range.start().0))
    }

    /// The guest-physical address of a frame that a table in RAM named.
    pub(crate) fn address(&self, frame: u64) -> Result<u64> {
        let pfn = self.pfn(frame);
        let pfn = pfn.ok_or_else(|| Error::Corrupt(format!("frame {frame:#x} is named and is not RAM")))?;
        Ok(pfn.0 * PAGE_BYTES)
    }
}

/// Entries of a virtqueue.
pub(crate) const QUEUE_SIZE: u16 = 128;

/// Queues that any dialect has.
pub(crate) const QUEUES: usize = 5;

/// Pages of one free-page window of the `bitmap` dialect: 32 GiB.
pub(crate) const WINDOW_PAGES: u64 = 32 << (30 - 12);

/// Where the kernel keeps its own: the first pages of the first region that is large enough.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// All of it.
    pub(crate) reserved: PageRange,
    /// Descriptor tables; the available ring follows 2 KiB after, the used ring 4 KiB after.
    pub(crate) queues: [u64; QUEUES],
    /// A page each for PFN arrays, statistics, command ids, the misc request.
    pub(crate) inflate: u64,
    pub(crate) deflate: u64,
    pub(crate) stats: u64,
    pub(crate) commands: u64,
    pub(crate) request: u64,
    /// Header and bitmap of the `bitmap` dialect's answers.
    pub(crate) bitmap: u64,
    /// The sets of frames.
    pub(crate) trees: Trees,
    /// Eight bytes a frame: what is expected there.
    pub(crate) table: u64,
}

/// Pages at the start of a region that the kernel leaves alone, as the firmware has them.
const FIRMWARE_PAGES: u64 = 16;

impl Places {
    pub(crate) fn new(layout: &Layout, frames: &Frames) -> Result<Self> {
        let mut wanted = 0;
        for region in layout.regions() {
            let places = Places::at(*region, layout, frames);
            wanted = places.reserved.count();
            if places.reserved.end() <= region.end() {
                return Ok(places);
            }
        }
        Err(Error::Config(format!(
            "no region of guest RAM has the {wanted} pages that the guest needs for its bookkeeping"
        )))
    }

    fn at(region: PageRange, layout: &Layout, frames: &Frames) -> Self {
        let first = (region.start().0 + FIRMWARE_PAGES) * PAGE_BYTES;
        let mut at = first;
        let mut take = |bytes: u64| {
            let here = at;
            at += bytes.next_multiple_of(PAGE_BYTES);
            here
        };
        let queues = std::array::from_fn(|_| take(2 * PAGE_BYTES));
        let [inflate, deflate, stats, commands, request] = std::array::from_fn(|_| take(PAGE_BYTES));
        let bitmap = take(32 + layout.end().0.min(WINDOW_PAGES).div_ceil(64) * 8);
        let (_, bytes) = Trees::new(0, frames.total());
        let (trees, _) = Trees::new(take(bytes), frames.total());
        let table = take(frames.total() * 8);
        Places {
            reserved: PageRange::between(region.start(), Pfn(at / PAGE_BYTES)),
            queues,
            inflate,
            deflate,
            stats,
            commands,
            request,
            bitmap,
            trees,
            table,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(regions: &[(u64, u64)]) -> Layout {
        Layout::new(
            regions
                .iter()
                .map(|(s, n)| PageRange::new(Pfn(*s), *n).unwrap())
                .collect(),
        )
        .unwrap()
    }

    #[test]
    fn frames_and_pages_agree_modulo_the_largest_block() {
        let layout = layout(&[(3, 5), (8, 2000), (1 << 30, 1 << 12)]);
        let frames = Frames::new(&layout);
        let mut seen = 0;
        for frame in 0..frames.total() {
            let Some(pfn) = frames.pfn(frame) else { continue };
            assert_eq!(pfn.0 % BLOCK, frame % BLOCK);
            assert_eq!(frames.frame(pfn), Some(frame));
            seen += 1;
        }
        assert_eq!(seen, layout.total_pages());
        assert_eq!(frames.frame(Pfn(2)), None);
        assert_eq!(frames.pfn(frames.total()), None);
    }

    #[test]
    fn the_kernel_takes_the_first_region_that_is_large_enough() {
        let small_first = layout(&[(0, 40), (256, 8192)]);
        let places = Places::new(&small_first, &Frames::new(&small_first)).unwrap();
        assert_eq!(places.reserved.start(), Pfn(256));
        let none = layout(&[(0, 30), (200, 30)]);
        assert!(Places::new(&none, &Frames::new(&none)).is_err());
    }

    #[test]
    fn bookkeeping_is_small_against_ram() {
        let layout = Layout::flat(16 << 20).unwrap();
        let places = Places::new(&layout, &Frames::new(&layout)).unwrap();
        assert!(
            places.reserved.bytes() < (64 << 30) / 400,
            "{}",
            places.reserved.bytes()
        );
    }
}
