//! A page frame number and a range of them.

use serde::{Deserialize, Serialize};
use std::fmt;

/// log2 of the page size; the balloon's `VIRTIO_BALLOON_PFN_SHIFT` and the migration's unit.
pub const PAGE_SHIFT: u32 = 12;

/// Bytes in a page: 4096, whatever the host's or the guest's own page size.
pub const PAGE_BYTES: u64 = 1 << PAGE_SHIFT;

/// A guest page frame number: a guest-physical address shifted right by [`PAGE_SHIFT`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Pfn(pub u64);

impl Pfn {
    /// The guest-physical address of the page's first byte; `None` where it does not fit in 64 bits.
    pub fn address(self) -> Option<u64> {
        self.0.checked_mul(PAGE_BYTES)
    }

    /// The page that holds the guest-physical address `address`.
    pub fn of_address(address: u64) -> Self {
        Pfn(address >> PAGE_SHIFT)
    }
}

impl fmt::Display for Pfn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// `count` pages from `start` on. May be empty; never wraps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "(u64, u64)", into = "(u64, u64)")]
pub struct PageRange {
    start: Pfn,
    count: u64,
}

impl PageRange {
    /// `count` pages from `start`; `None` where the end does not fit in 64 bits.
    pub fn new(start: Pfn, count: u64) -> Option<Self> {
        start.0.checked_add(count)?;
        Some(PageRange { start, count })
    }

    /// The pages from `start` up to, and without, `end`; empty where `end <= start`.
    pub fn between(start: Pfn, end: Pfn) -> Self {
        PageRange {
            start,
            count: end.0.saturating_sub(start.0),
        }
    }

    /// The whole pages inside `len` bytes from guest-physical `address`: a partial page at either end is left out.
    /// `None` where the end does not fit in 64 bits.
    pub fn inside_bytes(address: u64, len: u64) -> Option<Self> {
        let end = address.checked_add(len)?;
        let first = address.div_ceil(PAGE_BYTES);
        Some(PageRange::between(Pfn(first), Pfn(end >> PAGE_SHIFT)))
    }

    /// The first page.
    pub fn start(self) -> Pfn {
        self.start
    }

    /// One past the last page.
    pub fn end(self) -> Pfn {
        Pfn(self.start.0 + self.count)
    }

    /// How many pages.
    pub fn count(self) -> u64 {
        self.count
    }

    /// How many bytes, saturating at `u64::MAX`.
    pub fn bytes(self) -> u64 {
        self.count.saturating_mul(PAGE_BYTES)
    }

    /// No page at all.
    pub fn is_empty(self) -> bool {
        self.count == 0
    }

    /// Whether `pfn` is one of these pages.
    pub fn contains(self, pfn: Pfn) -> bool {
        self.start <= pfn && pfn < self.end()
    }

    /// The pages that are in both; empty where there are none.
    pub fn intersection(self, other: PageRange) -> PageRange {
        PageRange::between(self.start.max(other.start), self.end().min(other.end()))
    }

    /// The first `count` pages and the rest; `count` is cut to what there is.
    pub fn split_at(self, count: u64) -> (PageRange, PageRange) {
        let head = count.min(self.count);
        let mid = Pfn(self.start.0 + head);
        (
            PageRange {
                start: self.start,
                count: head,
            },
            PageRange {
                start: mid,
                count: self.count - head,
            },
        )
    }
}

impl TryFrom<(u64, u64)> for PageRange {
    type Error = &'static str;

    fn try_from((start, count): (u64, u64)) -> Result<Self, Self::Error> {
        PageRange::new(Pfn(start), count).ok_or("page range wraps around: start + count exceeds 64 bits")
    }
}

impl From<PageRange> for (u64, u64) {
    fn from(range: PageRange) -> Self {
        (range.start.0, range.count)
    }
}

impl fmt::Display for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start.0, self.end().0)
    }
}
