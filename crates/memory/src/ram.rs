//! Guest RAM, mapped.

use crate::backing::{Backing, Storage};
use crate::device_memory::VmMemory;
use crate::error::{Error, Result};
use crate::sparse::Sparse;
use crate::sys::map::{self, Mapping, Source};
use crate::sys::pagemap::Pagemap;
use crate::sys::{iov, pagemap, size};
use crate::write_log::{WriteLog, WriteLogs, WriteMarks};
use pages::{Layout, PAGE_BYTES, PageRange, Pfn};
use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

/// Where transparent huge pages and KVM's large mappings start.
const HUGE_BYTES: u64 = 2 << 20;

/// Guest RAM.
///
/// Each region of the layout is a mapping of its own, at a host address that equals the guest-physical one modulo 2 MiB,
/// as KVM needs it for large mappings. Share it as `Arc<GuestMemory>`.
pub struct GuestMemory {
    pub(crate) layout: Arc<Layout>,
    pub(crate) storage: Storage,
    /// `None` where `/proc` is not mounted; then other ways are taken.
    pub(crate) pagemap: Option<Pagemap>,
    regions: Vec<RegionMap>,
    /// `None` only while dropping.
    vm: Option<Arc<VmMemory>>,
    /// All of it was populated, and nothing was given back since.
    pub(crate) populated: AtomicBool,
    /// The trackers' logs of writes that they would not see.
    pub(crate) logs: Arc<WriteLogs>,
    /// What arrives singly takes no huge pages.
    pub(crate) sparse: Sparse,
}

/// The mapping of one region.
struct RegionMap {
    range: PageRange,
    addr: usize,
    /// Where the region starts in the file, in bytes.
    offset: u64,
    /// Both `None` only while dropping.
    mapping: Option<Mapping>,
    vm: Option<Arc<MmapRegion<WriteMarks>>>,
}

/// Where a range lies, in our address space and in the file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) addr: usize,
    pub(crate) offset: u64,
}

impl GuestMemory {
    /// Makes RAM of `layout`, all zero unless it is an existing file. Nothing is populated.
    ///
    /// # Errors
    /// Whatever [`Error`] says of files: in use, too short, not a file, no space; and what the kernel refuses to map.
    pub fn new(layout: Arc<Layout>, backing: &Backing) -> Result<GuestMemory> {
        let storage = Storage::open(backing, &layout)?;
        let logs = Arc::new(WriteLogs::default());
        let mut regions = Vec::new();
        let mut vm_regions = Vec::new();
        let mut offset = 0;
        for range in layout.regions() {
            let region = RegionMap::new(*range, offset, &storage, &logs)?;
            let vm = region.vm.clone().and_then(|mmap| {
                let address = range.start().address()?;
                GuestRegionMmap::with_arc(mmap, GuestAddress(address)).map(Arc::new)
            });
            vm_regions.push(vm.ok_or(Error::OutsideRam(*range))?);
            regions.push(region);
            offset += range.bytes();
        }
        let vm = VmMemory::from_arc_regions(vm_regions)
            .map_err(|e| Error::sys("putting RAM regions together", io::Error::other(e)))?;
        let pagemap = Pagemap::open()
            .inspect_err(|e| tracing::warn!(error = %e, "no /proc/self/pagemap: holes are found by slower ways"))
            .ok();
        let sparse = Sparse::new(layout.end());
        Ok(GuestMemory {
            layout,
            storage,
            pagemap,
            regions,
            vm: Some(Arc::new(vm)),
            populated: AtomicBool::new(false),
            logs,
            sparse,
        })
    }

    /// The same memory for rust-vmm crates. A mapping that is still held there when this `GuestMemory` goes stays mapped
    /// until the process ends.
    ///
    /// # Panics
    /// Never: the map is there until `drop`.
    pub fn vm_memory(&self) -> Arc<VmMemory> {
        #[expect(clippy::expect_used, reason = "None only inside drop")]
        Arc::clone(self.vm.as_ref().expect("mapped until dropped"))
    }

    /// Where RAM lies.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// How many 4 KiB pages are given back at a time: 1, or a huge page's worth on hugetlbfs, where less cannot be.
    pub fn discard_granule_pages(&self) -> u64 {
        self.storage.page_bytes / PAGE_BYTES
    }

    /// Gives `range` back to the host; it reads as zero after. On hugetlbfs only the whole huge pages inside `range` are
    /// given back, the rest stays as it is. Attached trackers see a write to every page that was given back.
    pub fn discard(&self, range: PageRange) -> Result<()> {
        self.place(range)?;
        self.check_writable(range)?;
        let granule = self.discard_granule_pages();
        let first = range.start().0.next_multiple_of(granule);
        let end = range.end().0 / granule * granule;
        let whole = PageRange::between(Pfn(first), Pfn(end));
        if whole.is_empty() {
            return Ok(());
        }
        let place = self.place(whole)?;
        self.populated.store(false, Ordering::Relaxed);
        match &self.storage.file {
            None => map::advise(place.addr, whole.bytes(), libc::MADV_DONTNEED),
            Some(file) => map::punch_hole(file, place.offset, whole.bytes()),
        }
        .map_err(|e| Error::sys(format!("giving pages {whole} back to the host"), e))?;
        self.logs.discarded(whole);
        Ok(())
    }

    /// Copies guest memory out. The bytes must lie within one region; what the guest writes meanwhile may be torn.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        let (place, range) = self.place_bytes(address, into.len() as u64)?;
        if let (Some(file), true) = (&self.storage.file, self.storage.may_shrink) {
            return pagemap::pread(file, into, place.offset).map_err(|e| self.read_error(file, range, e));
        }
        // SAFETY: place_bytes checked that the bytes are guest RAM; the mapping lives as long as self. The file behind
        // it, if any, is a memfd that only we can shorten.
        unsafe { iov::copy_out(place.addr, into) };
        Ok(())
    }

    /// Copies `from` into guest memory. The bytes must lie within one region.
    pub fn write(&self, address: u64, from: &[u8]) -> Result<()> {
        let (place, range) = self.place_bytes(address, from.len() as u64)?;
        self.check_writable(range)?;
        self.copy_in(place, range, from)
    }

    /// Copies into guest RAM, and notes that `range` was written; the caller checked the place.
    pub(crate) fn copy_in(&self, place: Place, range: PageRange, from: &[u8]) -> Result<()> {
        let result = match &self.storage.file {
            Some(file) if self.storage.may_shrink => {
                // Not pwrite: trackers watch the mapping, not the file.
                iov::copy_in_checked(place.addr, from).map_err(|e| self.read_error(file, range, e))
            }
            _ => {
                // SAFETY: the caller checked that the bytes are guest RAM that can be written; no file can shrink.
                unsafe { iov::copy_in(place.addr, from) };
                Ok(())
            }
        };
        // Part of it may be written where it failed.
        self.wrote(range);
        result
    }

    /// Where `range` lies; it must be within one region.
    pub(crate) fn place(&self, range: PageRange) -> Result<Place> {
        let i = self.layout.region_of_range(range).ok_or(Error::OutsideRam(range))?;
        let region = &self.regions[i];
        let inside = (range.start().0 - region.range.start().0) * PAGE_BYTES;
        Ok(Place {
            addr: region.addr + size(inside),
            offset: region.offset + inside,
        })
    }

    fn place_bytes(&self, address: u64, len: u64) -> Result<(Place, PageRange)> {
        let outside = Error::BytesOutsideRam { address, len };
        let Some(last) = address.checked_add(len.max(1) - 1) else {
            return Err(outside);
        };
        let range = PageRange::between(Pfn::of_address(address), Pfn(Pfn::of_address(last).0 + 1));
        let Ok(place) = self.place(range) else {
            return Err(outside);
        };
        let inside = address % PAGE_BYTES;
        let place = Place {
            addr: place.addr + size(inside),
            offset: place.offset + inside,
        };
        Ok((place, range))
    }

    pub(crate) fn check_writable(&self, range: PageRange) -> Result<()> {
        if self.storage.writable {
            Ok(())
        } else {
            Err(Error::ReadOnly(range))
        }
    }

    /// Refuses to touch a file that has become too short for `range`. What is cut off after this check is met by system
    /// calls that answer with an error.
    pub(crate) fn check_length(&self, range: PageRange, place: Place) -> Result<()> {
        let Some(file) = self.storage.file.as_ref().filter(|_| self.storage.may_shrink) else {
            return Ok(());
        };
        let got = length_of(file)?;
        if place.offset + range.bytes() > got {
            return Err(Error::Truncated { range, got });
        }
        Ok(())
    }

    /// What an error of reading or writing pages of a file means: that the file shrank, if it did, or that its file system
    /// has no room for a page that was not there.
    pub(crate) fn read_error(&self, file: &File, range: PageRange, error: io::Error) -> Error {
        let expected = self.layout.total_bytes();
        match length_of(file) {
            Ok(got) if got < expected => Error::Truncated { range, got },
            _ if self.storage.writable && error.raw_os_error() == Some(libc::EFAULT) => Error::sys(
                format!("reaching pages {range} of the RAM file; is its file system full?"),
                error,
            ),
            _ => Error::sys(format!("reaching pages {range} of the RAM file"), error),
        }
    }

    /// A new log of what the page tables of vCPUs, or ours, do not show.
    pub(crate) fn write_log(&self) -> WriteLog {
        WriteLog::attach(&self.logs, &self.layout)
    }

    /// Notes that `range` was written through our mapping, after it was.
    pub(crate) fn wrote(&self, range: PageRange) {
        self.logs.wrote(range);
    }
}

pub(crate) fn length_of(file: &File) -> Result<u64> {
    let meta = file
        .metadata()
        .map_err(|e| Error::sys("asking for the RAM file's length", e))?;
    Ok(meta.len())
}

impl RegionMap {
    fn new(range: PageRange, offset: u64, storage: &Storage, logs: &Arc<WriteLogs>) -> Result<RegionMap> {
        let bytes = range.bytes();
        let doing = || format!("mapping {bytes} bytes of guest RAM at pages {range}");
        let source = match &storage.file {
            None => Source::Anonymous,
            Some(file) => Source::Shared {
                file,
                offset,
                writable: storage.writable,
                // Reserved now, or a pool that runs dry would end in SIGBUS.
                reserve: storage.is_huge(),
            },
        };
        let phase = range.start().0.wrapping_mul(PAGE_BYTES);
        let align = HUGE_BYTES.max(storage.page_bytes);
        let mapping = Mapping::new(bytes, align, phase, &source).map_err(|e| Error::sys(doing(), e))?;
        let addr = mapping.addr();
        if storage.file.is_none() {
            // A kernel without transparent huge pages says EINVAL: then there are none.
            if let Err(e) = map::advise(addr, bytes, libc::MADV_HUGEPAGE) {
                tracing::debug!(error = %e, "no transparent huge pages");
            }
        }
        let write = if storage.writable { libc::PROT_WRITE } else { 0 };
        let flags = if storage.file.is_some() {
            libc::MAP_SHARED
        } else {
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS
        };
        let at = std::ptr::with_exposed_provenance_mut(addr);
        let builder = MmapRegionBuilder::new_with_bitmap(size(bytes), WriteMarks::new(logs, range))
            .with_mmap_prot(libc::PROT_READ | write)
            .with_mmap_flags(flags | libc::MAP_NORESERVE);
        // SAFETY: the mapping just made; it stays until no one holds the MmapRegion any more (see drop).
        let builder = unsafe { builder.with_raw_mmap_pointer(at) };
        let vm = builder.build().map_err(|e| Error::sys(doing(), io::Error::other(e)))?;
        Ok(RegionMap {
            range,
            addr,
            offset,
            mapping: Some(mapping),
            vm: Some(Arc::new(vm)),
        })
    }
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        self.vm = None;
        for region in &mut self.regions {
            // Unmapped only if ours was the last reference to the region: somebody who still holds one must not find
            // the address reused for something else.
            if region.vm.take().and_then(Arc::into_inner).is_none() {
                tracing::warn!(range = %region.range, "guest RAM is still in use elsewhere: it stays mapped");
                std::mem::forget(region.mapping.take());
            }
        }
    }
}

impl fmt::Debug for GuestMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestMemory")
            .field("layout", &self.layout)
            .field("storage", &self.storage)
            .finish_non_exhaustive()
    }
}
