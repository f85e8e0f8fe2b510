//! `PAGEMAP_SCAN` (Linux 6.7) and `/proc/self/pagemap` for our own address space.
//!
//! See the kernel's `Documentation/admin-guide/mm/pagemap.rst`.

use super::{retry, size};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

/// Not write-protected by userfaultfd.
pub(crate) const WRITTEN: u64 = 1 << 1;
/// Of a file or shared memory.
pub(crate) const FILE: u64 = 1 << 2;
/// Resident.
pub(crate) const PRESENT: u64 = 1 << 3;
/// Swapped out, in migration, or a marker without a page.
pub(crate) const SWAPPED: u64 = 1 << 4;
/// The shared zero page.
pub(crate) const PFNZERO: u64 = 1 << 5;

const WP_MATCHING: u64 = 1 << 0;
/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = (3 << 30) | ((size_of::<ScanArg>() as libc::c_ulong) << 16) | (0x66 << 8) | 16;
/// Stretches a call returns at most: 96 KiB of buffer.
const STRETCHES: usize = 4096;
/// The same for small ranges, which are looked at often: 1.5 KiB, on the stack.
const FEW_STRETCHES: usize = 64;
/// Pages of a small range: it takes three calls where every other page is wanted, one as a rule.
const SMALL_PAGES: u64 = 256;

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`: a stretch of addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stretch {
    pub(crate) start: u64,
    pub(crate) end: u64,
    categories: u64,
}

/// Which pages a scan is for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// All of these.
    pub(crate) all: u64,
    /// And none of these.
    pub(crate) none: u64,
    /// And, unless 0, at least one of these.
    pub(crate) any: u64,
    /// Write-protect what was found, in the same pass.
    pub(crate) protect: bool,
}

/// An open `/proc/self/pagemap`.
#[derive(Debug)]
pub(crate) struct Pagemap {
    file: File,
    /// Whether the kernel has `PAGEMAP_SCAN`, as far as is known.
    scans: AtomicBool,
}

impl Pagemap {
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Pagemap {
            file: File::open("/proc/self/pagemap")?,
            scans: AtomicBool::new(true),
        })
    }

    /// Does as if the kernel had no `PAGEMAP_SCAN`.
    #[cfg(test)]
    pub(crate) fn without_scan(&self) {
        self.scans.store(false, Ordering::Relaxed);
    }

    /// Calls `each` with every stretch of wanted pages among `bytes` at `addr`, ascending. A scan that protects may tell
    /// a page twice, and then not in order.
    pub(crate) fn scan(
        &self,
        addr: usize,
        bytes: u64,
        wanted: Wanted,
        each: &mut dyn FnMut(Stretch),
    ) -> io::Result<()> {
        if !self.scans.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if bytes >> 12 <= SMALL_PAGES {
            return self.scan_into(&mut [Stretch::default(); FEW_STRETCHES], addr, bytes, wanted, each);
        }
        let most = usize::try_from(bytes >> 12).unwrap_or(STRETCHES).min(STRETCHES);
        self.scan_into(&mut vec![Stretch::default(); most], addr, bytes, wanted, each)
    }

    /// The same, with `found` for what a call returns.
    fn scan_into(
        &self,
        found: &mut [Stretch],
        addr: usize,
        bytes: u64,
        wanted: Wanted,
        each: &mut dyn FnMut(Stretch),
    ) -> io::Result<()> {
        let end = addr as u64 + bytes;
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            flags: if wanted.protect { WP_MATCHING } else { 0 },
            start: addr as u64,
            end,
            vec: found.as_mut_ptr() as u64,
            vec_len: found.len() as u64,
            category_inverted: wanted.none,
            category_mask: wanted.all | wanted.none,
            category_anyof_mask: wanted.any,
            // Which categories are told apart in the answer: one that all wanted pages share, so stretches merge.
            return_mask: if wanted.all == 0 { PFNZERO } else { wanted.all },
            ..ScanArg::default()
        };
        // Linux 6.18 was seen to answer a walk_end that lies before what it told: where it had to empty its own buffer
        // of 512 stretches on the way. What is told again is left out, unless it was protected again: that was written.
        let mut told = 0;
        while arg.start < end {
            // SAFETY: `arg` is a pm_scan_arg whose `vec` has room for `vec_len` entries. Write protection only changes
            // how later writes are noted, and the range is guest RAM.
            let got = retry(|| unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) } as isize)
                .inspect_err(|e| {
                    if e.raw_os_error() == Some(libc::ENOTTY) {
                        self.scans.store(false, Ordering::Relaxed);
                    }
                })?;
            for stretch in found.iter().take(got) {
                let start = if wanted.protect {
                    stretch.start
                } else {
                    stretch.start.max(told)
                };
                if start < stretch.end {
                    each(Stretch { start, ..*stretch });
                }
                told = told.max(stretch.end);
            }
            if arg.walk_end <= arg.start {
                return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
            }
            arg.start = arg.walk_end;
        }
        Ok(())
    }

    /// The words of `/proc/self/pagemap` for the pages from `addr` on.
    pub(crate) fn words(&self, addr: usize, words: &mut [u64]) -> io::Result<()> {
        let mut bytes = vec![0u8; words.len() * 8];
        self.file.read_exact_at(&mut bytes, (addr as u64 >> 12) * 8)?;
        for (word, raw) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_ne_bytes(*raw);
        }
        Ok(())
    }
}

/// The next data at or after `offset` of a file, and where it ends; `None` past the last.
pub(crate) fn next_data(file: &File, offset: u64) -> io::Result<Option<u64>> {
    use rustix::fs::{SeekFrom, seek};
    match seek(file, SeekFrom::Data(offset)) {
        Ok(at) => Ok(Some(at)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The next hole at or after `offset` of a file; its end counts as one.
pub(crate) fn next_hole(file: &File, offset: u64) -> io::Result<u64> {
    use rustix::fs::{SeekFrom, seek};
    Ok(seek(file, SeekFrom::Hole(offset))?)
}

/// Reads `into.len()` bytes at `offset`; whatever lies past the end of the file is an error.
pub(crate) fn pread(file: &File, into: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(into, offset)
}

const _: () = assert!(size_of::<Stretch>() == 24 && size(4096) == 4096);
