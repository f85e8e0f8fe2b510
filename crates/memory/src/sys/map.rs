//! Mappings: made, advised, undone. Nothing is read or written through an address here.

use super::{check, size};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

/// A mapping that starts at a chosen remainder modulo a huge page. Unmapped when dropped, unless it is leaked.
#[derive(Debug)]
pub(crate) struct Mapping {
    addr: usize,
    bytes: u64,
}

/// What a mapping is made from.
pub(crate) enum Source<'a> {
    /// Private memory, nothing reserved.
    Anonymous,
    /// A file, shared, from a byte offset on.
    Shared {
        /// The file.
        file: &'a File,
        /// Where in it, in bytes.
        offset: u64,
        /// Whether it may be written.
        writable: bool,
        /// Whether the pages are set aside now (hugetlbfs), for an error now rather than SIGBUS later.
        reserve: bool,
    },
}

impl Mapping {
    /// Maps `bytes` at an address that equals `phase` modulo `align` (a power of two).
    pub(crate) fn new(bytes: u64, align: u64, phase: u64, source: &Source<'_>) -> io::Result<Mapping> {
        let span = bytes
            .checked_add(align)
            .filter(|span| *span < 1 << 62)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let reserve = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { libc::mmap(ptr::null_mut(), size(span), libc::PROT_NONE, reserve, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = base as usize as u64;
        let shift = (phase % align).wrapping_sub(base) % align;
        let start = base + shift;
        // From here on the reservation is a Mapping, so every early return gives it back.
        let mut whole = Mapping {
            addr: size(base),
            bytes: span,
        };
        let (prot, flags, fd, offset) = match source {
            Source::Anonymous => (libc::PROT_READ | libc::PROT_WRITE, reserve, -1, 0),
            Source::Shared {
                file,
                offset,
                writable,
                reserve,
            } => {
                let write = if *writable { libc::PROT_WRITE } else { 0 };
                let lazy = if *reserve { 0 } else { libc::MAP_NORESERVE };
                (
                    libc::PROT_READ | write,
                    libc::MAP_SHARED | lazy,
                    file.as_raw_fd(),
                    *offset,
                )
            }
        };
        let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: MAP_FIXED replaces a part of the reservation made above, which nobody else knows of.
        let at = unsafe {
            let at = ptr::without_provenance_mut(size(start));
            libc::mmap(at, size(bytes), prot, flags | libc::MAP_FIXED, fd, offset)
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        whole.cut(start, bytes);
        Ok(whole)
    }

    /// The address of the first byte.
    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    /// Gives back what lies before `start` and past `start + bytes`.
    fn cut(&mut self, start: u64, bytes: u64) {
        let end = self.addr as u64 + self.bytes;
        drop(Mapping {
            addr: self.addr,
            bytes: start - self.addr as u64,
        });
        drop(Mapping {
            addr: size(start + bytes),
            bytes: end - (start + bytes),
        });
        self.addr = size(start);
        self.bytes = bytes;
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        // SAFETY: the range is this Mapping's own, and whoever drops it has seen to it that nobody uses it any more.
        let result = unsafe { libc::munmap(ptr::without_provenance_mut(self.addr), size(self.bytes)) };
        if result == -1 {
            tracing::warn!(error = %io::Error::last_os_error(), "unmapping guest RAM");
        }
    }
}

/// `madvise` on `bytes` at `addr`, which the caller knows to be guest RAM.
pub(crate) fn advise(addr: usize, bytes: u64, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: the callers pass ranges of a live guest RAM mapping; guest RAM is only ever reached by raw addresses, for
    // which no advice of this crate (hugepage, populate, discard) breaks an assumption: its content may change anyway.
    check(unsafe { libc::madvise(ptr::without_provenance_mut(addr), size(bytes), advice) })?;
    Ok(())
}

/// Gives `bytes` from `offset` of `file` back to the file system; they read as zero. The length stays.
pub(crate) fn punch_hole(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    loop {
        match fallocate(
            file,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            offset,
            bytes,
        ) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

/// A memfd, on huge pages of the default size if asked.
pub(crate) fn memfd(huge: bool) -> io::Result<File> {
    use rustix::fs::{MemfdFlags, memfd_create};
    let huge = if huge { MemfdFlags::HUGETLB } else { MemfdFlags::empty() };
    Ok(File::from(memfd_create("guest-ram", MemfdFlags::CLOEXEC | huge)?))
}
