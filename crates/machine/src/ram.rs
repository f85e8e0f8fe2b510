//! Guest memory, as the data threads need it.

use crate::Result;
use pages::{Layout, PageRange, PageSet, Pfn};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// What a page was found to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// Zeroes only.
    Zero,
    /// Anything else.
    Data,
}

/// Guest memory: where it lies, and bulk transfer between it and a file descriptor.
///
/// The guest may write any page at any time, so no reference to guest memory ever leaves an implementation: transfer is
/// by system calls that take addresses, reads are copies. A page that is written while it is read is torn; the dirty
/// tracker knows of it, and it is sent again.
///
/// Every `PageRange` must lie within one region of the layout; [`crate::Error::OutsideRam`] or an
/// [`io::ErrorKind::InvalidInput`] otherwise. Methods are called from several threads at once, on disjoint ranges.
pub trait GuestRam: Send + Sync {
    /// Where RAM lies. Constant for the life of the migration.
    fn layout(&self) -> &Arc<Layout>;

    /// The pages that hold memory of the host, resident or swapped out: all but those that were never touched. Must not
    /// read guest memory, which would allocate it. `full` is a valid answer, a slow one.
    fn present(&self) -> Result<PageSet>;

    /// Whether the pages that [`GuestRam::present`] leaves out are known to read as zero (they are, in fresh memory).
    fn absent_reads_zero(&self) -> bool {
        true
    }

    /// Reads `range` and calls `each` with the stretches of equal kind, in order, covering it wholly. A page that is
    /// not present is `Zero`, and is not read if the implementation can tell.
    fn classify(&self, range: PageRange, each: &mut dyn FnMut(PageRange, PageKind)) -> Result<()>;

    /// Writes bytes to `to` by one vectored write: first `head`, then the pages of `ranges` in order, leaving out the
    /// first `skip` bytes of all that (they were written before). Returns how many bytes were taken, as `writev(2)`
    /// does; may be fewer than there are, also because an implementation bounds the number of vectors. `to` blocks; its
    /// socket may have a time-out, and the [`io::ErrorKind::WouldBlock`] of that is the caller's to handle.
    fn write_to(&self, to: BorrowedFd<'_>, head: &[u8], ranges: &[PageRange], skip: usize) -> io::Result<usize>;

    /// Reads bytes from `from` by one vectored read into the pages of `ranges`, in order, leaving out the first `skip`
    /// bytes. Returns how many came, as `readv(2)` does: 0 is the end of the stream.
    fn read_from(&self, from: BorrowedFd<'_>, ranges: &[PageRange], skip: usize) -> io::Result<usize>;

    /// Makes `range` read as zero, by giving memory back where that is cheaper than writing.
    fn zero(&self, range: PageRange) -> Result<()>;

    /// Fills `range` with the 32-bit little-endian pattern `value`, over and over (the balloon's `poison_val`).
    fn fill(&self, range: PageRange, value: u32) -> Result<()>;

    /// The content of `ranges`, the data of one batch, is about to be written: the place to find memory of the host for
    /// them. A hint, which peers decide about; doing nothing is valid.
    fn expect(&self, ranges: &[PageRange]) {
        let _ = ranges;
    }

    /// All that a source sends is there, and the guest runs: what [`GuestRam::expect`] did for the time being may end.
    fn settle(&self) {}

    /// The sum, with wrap-around, over the pages of `range` that are not all zero, of a 128-bit digest of the page's
    /// number and content. The order of pages does not matter, a zero page adds nothing, and a page that is not present
    /// is not read. Both sides of a migration must use the same digest: xxh3-128 of the 4096 bytes with the page frame
    /// number as the seed, low half first.
    fn digest(&self, range: PageRange) -> Result<u128>;

    /// Whether all of it holds memory of the host already: nothing has to be found for pages that come.
    fn is_populated(&self) -> bool {
        false
    }

    /// Bytes of memory that the host could still give without swapping; `None` where nobody needs to look, because
    /// memory was set aside before, or where it cannot be told. A destination asks while pages come.
    fn host_available(&self) -> Option<u64> {
        None
    }

    /// Whether [`GuestRam::copy_in`] is there: a destination without it takes no packed pages.
    fn copies_in(&self) -> bool {
        false
    }

    /// Copies `from`, which is as long, into `range`. Called only where [`GuestRam::copies_in`].
    fn copy_in(&self, range: PageRange, from: &[u8]) -> Result<()> {
        let _ = from;
        Err(crate::Error::Refused(format!("pages {range} cannot be copied to here")))
    }

    /// Copies one page out.
    fn read_page(&self, pfn: Pfn, into: &mut [u8; 4096]) -> Result<()>;
}
