//! Writes of the VMM itself, told to the trackers that would not see them otherwise.
//!
//! KVM's dirty log has what vCPUs write. What devices write (used rings, buffers, statistics), and what a discard changes,
//! is in no page table of KVM's: whoever does it says so here, *after* the write, and every attached log notes the pages.
//! A tracker that watches our own page table needs to hear of discards alone.
//!
//! While no log wants them, a write costs one load. What makes that right is a barrier in all threads when a log begins
//! to listen: a writer whose load came before it has its write before it, too.

use crate::atomic_pages::AtomicPages;
use crate::error::{Error, Result};
use pages::{Layout, PAGE_BYTES, PageRange, Pfn};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, compiler_fence};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};

/// All logs of one guest's memory.
#[derive(Debug, Default)]
pub(crate) struct WriteLogs {
    /// How many of them want every write now.
    listening: AtomicUsize,
    logs: RwLock<Vec<Weak<Log>>>,
}

#[derive(Debug)]
struct Log {
    /// Whether it wants every write, or discards alone.
    writes: AtomicBool,
    pages: AtomicPages,
}

impl WriteLogs {
    /// Notes that `range` was written through our mapping. Called after the write.
    pub(crate) fn wrote(&self, range: PageRange) {
        // Nothing of the write may come after the load; the rest is the barrier of whoever begins to listen.
        compiler_fence(Ordering::SeqCst);
        if self.listening.load(Ordering::Relaxed) > 0 {
            self.tell(range, |log| log.writes.load(Ordering::Relaxed));
        }
    }

    /// Notes that `range` was given back, and reads otherwise now. Called after it was: a harvest in between must not
    /// clear it.
    pub(crate) fn discarded(&self, range: PageRange) {
        self.tell(range, |_| true);
    }

    fn tell(&self, range: PageRange, wants: impl Fn(&Log) -> bool) {
        let logs = self.logs.read().unwrap_or_else(PoisonError::into_inner);
        for log in logs.iter().filter_map(Weak::upgrade).filter(|log| wants(log)) {
            log.pages.insert(range);
        }
    }

    fn contains(&self, pfn: Pfn) -> bool {
        let range = PageRange::between(pfn, Pfn(pfn.0 + 1));
        let logs = self.logs.read().unwrap_or_else(PoisonError::into_inner);
        logs.iter()
            .filter_map(Weak::upgrade)
            .any(|log| log.pages.count(range) > 0)
    }
}

/// A tracker's log of what the page tables that it reads do not show. Hears of every discard for as long as it lives, and
/// of every write while it listens.
#[derive(Debug)]
pub(crate) struct WriteLog {
    log: Arc<Log>,
    all: Arc<WriteLogs>,
}

impl WriteLog {
    /// A log of the memory whose logs are `all`.
    pub(crate) fn attach(all: &Arc<WriteLogs>, layout: &Arc<Layout>) -> Self {
        let log = Arc::new(Log {
            writes: AtomicBool::new(false),
            pages: AtomicPages::new(layout),
        });
        let mut logs = all.logs.write().unwrap_or_else(PoisonError::into_inner);
        logs.retain(|old| old.strong_count() > 0);
        logs.push(Arc::downgrade(&log));
        drop(logs);
        WriteLog {
            log,
            all: Arc::clone(all),
        }
    }

    /// What was noted.
    pub(crate) fn pages(&self) -> &AtomicPages {
        &self.log.pages
    }

    /// Begins to note every write: when this has returned, a write that is not noted can be read by everybody.
    ///
    /// # Errors
    /// The kernel refuses `membarrier(2)`.
    pub(crate) fn listen(&self) -> Result<()> {
        if !self.log.writes.swap(true, Ordering::SeqCst) {
            self.all.listening.fetch_add(1, Ordering::SeqCst);
        }
        crate::sys::barrier::in_all_threads().map_err(|e| {
            self.ignore();
            Error::sys("ordering the writes of other threads (membarrier)", e)
        })
    }

    /// Goes back to noting discards alone. What was noted stays.
    pub(crate) fn ignore(&self) {
        if self.log.writes.swap(false, Ordering::SeqCst) {
            self.all.listening.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Drop for WriteLog {
    fn drop(&mut self) {
        self.ignore();
    }
}

/// What vm-memory tells of writes to a region: see [`crate::VmMemory`].
#[derive(Debug)]
pub struct WriteMarks {
    logs: Arc<WriteLogs>,
    region: PageRange,
}

impl WriteMarks {
    pub(crate) fn new(logs: &Arc<WriteLogs>, region: PageRange) -> Self {
        WriteMarks {
            logs: Arc::clone(logs),
            region,
        }
    }

    fn at(&self, offset: usize) -> MarksFrom<'_> {
        MarksFrom {
            marks: self,
            base: offset as u64,
        }
    }
}

/// The marks of a region from some byte of it on.
#[derive(Clone, Copy, Debug)]
pub struct MarksFrom<'a> {
    marks: &'a WriteMarks,
    /// In bytes from the region's start.
    base: u64,
}

impl MarksFrom<'_> {
    fn page(&self, offset: u64) -> Pfn {
        let inside = self.base.saturating_add(offset) / PAGE_BYTES;
        Pfn(self.marks.region.start().0.saturating_add(inside))
    }
}

impl<'a> WithBitmapSlice<'a> for WriteMarks {
    type S = MarksFrom<'a>;
}

impl Bitmap for WriteMarks {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.at(0).mark_dirty(offset, len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.at(0).dirty_at(offset)
    }

    fn slice_at(&self, offset: usize) -> MarksFrom<'_> {
        self.at(offset)
    }
}

impl<'m> WithBitmapSlice<'_> for MarksFrom<'m> {
    type S = MarksFrom<'m>;
}

impl BitmapSlice for MarksFrom<'_> {}

impl<'m> Bitmap for MarksFrom<'m> {
    fn mark_dirty(&self, offset: usize, len: usize) {
        let Some(last) = len.checked_sub(1) else { return };
        let (first, last) = (offset as u64, (offset as u64).saturating_add(last as u64));
        let range = PageRange::between(self.page(first), Pfn(self.page(last).0.saturating_add(1)));
        self.marks.logs.wrote(range.intersection(self.marks.region));
    }

    /// Whether a log has noted the page of this byte.
    fn dirty_at(&self, offset: usize) -> bool {
        let pfn = self.page(offset as u64);
        self.marks.region.contains(pfn) && self.marks.logs.contains(pfn)
    }

    fn slice_at(&self, offset: usize) -> MarksFrom<'m> {
        MarksFrom {
            marks: self.marks,
            base: self.base.saturating_add(offset as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, GuestMemory};
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, VolatileMemory};

    fn r(start: u64, count: u64) -> PageRange {
        PageRange::new(Pfn(start), count).unwrap()
    }

    fn memory() -> GuestMemory {
        let layout = Arc::new(Layout::new(vec![r(0, 67), r(100, 67)]).unwrap());
        GuestMemory::new(layout, &Backing::Anonymous).unwrap()
    }

    fn noted(log: &WriteLog) -> Vec<PageRange> {
        let mut pages = pages::PageSet::empty(log.pages().layout());
        log.pages().take(&mut pages);
        pages.runs().collect()
    }

    #[test]
    fn case_21_every_write_through_vm_memory_is_noted_where_it_lands() {
        let memory = memory();
        let log = memory.write_log();
        log.listen().unwrap();
        let vm = memory.vm_memory();
        vm.write_slice(&[1; 2], GuestAddress(3 * 4096 + 4095)).unwrap();
        vm.write_obj(1u64, GuestAddress(66 * 4096 + 4088)).unwrap();
        assert_eq!(noted(&log), [r(3, 2), r(66, 1)]);
        // By a slice of a slice of the second region, up to its last byte.
        let region = vm.find_region(GuestAddress(100 * 4096)).unwrap();
        let slice = region.as_volatile_slice().unwrap();
        let part = slice.subslice(65 * 4096, 2 * 4096).unwrap();
        part.get_ref::<u8>(4096 + 4095).unwrap().store(1);
        part.offset(4096 - 8).unwrap().copy_from(&[1u8; 8]);
        assert_eq!(noted(&log), [r(165, 2)]);
        assert!(!region.bitmap().dirty_at(0));
        region.bitmap().mark_dirty(0, 1);
        region.bitmap().slice_at(4096).mark_dirty(4095, 0);
        assert!(region.bitmap().dirty_at(4095) && region.bitmap().slice_at(100).dirty_at(0));
        assert!(!region.bitmap().dirty_at(4096));
        assert_eq!(noted(&log), [r(100, 1)]);
        // What is told of past the region's end is not the next one's, nor anybody's.
        vm.find_region(GuestAddress(0))
            .unwrap()
            .bitmap()
            .mark_dirty(66 * 4096, usize::MAX);
        assert_eq!(noted(&log), [r(66, 1)]);
    }

    #[test]
    fn each_log_hears_what_it_wants() {
        let memory = memory();
        let (discards, writes) = (memory.write_log(), memory.write_log());
        writes.listen().unwrap();
        writes.listen().unwrap();
        memory.write(0, &[1]).unwrap();
        memory.discard(r(5, 1)).unwrap();
        assert_eq!(
            (noted(&discards), noted(&writes)),
            (vec![r(5, 1)], vec![r(0, 1), r(5, 1)])
        );
        writes.ignore();
        writes.ignore();
        memory.write(0, &[1]).unwrap();
        memory.discard(r(5, 1)).unwrap();
        assert_eq!((noted(&discards), noted(&writes)), (vec![r(5, 1)], vec![r(5, 1)]));
        // One that is gone while it listened leaves nobody listening.
        writes.listen().unwrap();
        drop(writes);
        assert_eq!(memory.logs.listening.load(Ordering::Relaxed), 0);
        memory.discard(r(6, 1)).unwrap();
        assert_eq!(noted(&discards), [r(6, 1)]);
    }
}
