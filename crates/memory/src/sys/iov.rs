//! Vectored I/O and copies between guest memory and ourselves, by system calls that answer EFAULT where a load would
//! raise SIGBUS.

use super::retry;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

/// The most vectors of one call: Linux's `UIO_MAXIOV`.
pub(crate) const MAX_VECTORS: usize = 1024;

/// A list of stretches of memory for one `readv` or `writev`, `MAX_VECTORS` at most.
///
/// Invariant: every entry lies within memory that outlives `'a` (guest RAM that stays mapped, or a slice).
pub(crate) struct Vectors<'a> {
    list: Vec<libc::iovec>,
    bytes: usize,
    skip: usize,
    alive: std::marker::PhantomData<&'a [u8]>,
}

impl<'a> Vectors<'a> {
    /// An empty list that leaves out the first `skip` bytes of what is pushed.
    pub(crate) fn new(skip: usize) -> Self {
        Vectors {
            list: Vec::new(),
            bytes: 0,
            skip,
            alive: std::marker::PhantomData,
        }
    }

    /// Adds bytes of our own, to be written from.
    pub(crate) fn push_slice(&mut self, bytes: &'a [u8]) {
        self.push(bytes.as_ptr() as usize, bytes.len());
    }

    /// Adds `bytes` of guest RAM at `addr`; the caller holds the mapping for `'a`.
    pub(crate) fn push_guest(&mut self, addr: usize, bytes: usize) {
        self.push(addr, bytes);
    }

    /// Whether no more can be added.
    pub(crate) fn is_full(&self) -> bool {
        self.list.len() >= MAX_VECTORS
    }

    /// How many bytes there are to move.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Leaves out the next `bytes` if all of them are to be skipped; whether it did.
    pub(crate) fn skip_whole(&mut self, bytes: usize) -> bool {
        let whole = bytes <= self.skip;
        if whole {
            self.skip -= bytes;
        }
        whole
    }

    /// Whether there is nothing to move.
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    fn push(&mut self, addr: usize, bytes: usize) {
        let left_out = self.skip.min(bytes);
        self.skip -= left_out;
        if left_out < bytes && !self.is_full() {
            self.list.push(libc::iovec {
                iov_base: ptr::with_exposed_provenance_mut(addr + left_out),
                iov_len: bytes - left_out,
            });
            self.bytes += bytes - left_out;
        }
    }

    fn count(&self) -> libc::c_int {
        // At most MAX_VECTORS, so it always fits.
        libc::c_int::try_from(self.list.len()).unwrap_or(libc::c_int::MAX)
    }

    /// `writev(2)`.
    pub(crate) fn write_to(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        // SAFETY: every vector lies in live memory (the invariant), which the kernel only reads.
        retry(|| unsafe { libc::writev(fd.as_raw_fd(), self.list.as_ptr(), self.count()) })
    }

    /// `readv(2)`. Only guest RAM may have been pushed.
    pub(crate) fn read_from(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        // SAFETY: every vector lies in guest RAM (the callers push nothing else), which no Rust reference ever covers.
        retry(|| unsafe { libc::readv(fd.as_raw_fd(), self.list.as_ptr(), self.count()) })
    }
}

/// Copies `from` to guest RAM at `addr` through the kernel: a page that a file has lost is an EFAULT, not a SIGBUS.
pub(crate) fn copy_in_checked(addr: usize, from: &[u8]) -> io::Result<()> {
    let mut done = 0;
    while done < from.len() {
        let local = libc::iovec {
            iov_base: from[done..].as_ptr().cast_mut().cast(),
            iov_len: from.len() - done,
        };
        let remote = libc::iovec {
            iov_base: ptr::with_exposed_provenance_mut(addr + done),
            iov_len: from.len() - done,
        };
        // SAFETY: the local side is a live slice that is only read; the remote side is guest RAM of this process.
        done += match retry(|| unsafe { libc::process_vm_writev(libc::getpid(), &local, 1, &remote, 1, 0) })? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            some => some,
        };
    }
    Ok(())
}

/// Copies `from` to guest RAM at `addr`.
///
/// # Safety
/// `from.len()` bytes at `addr` are guest RAM, mapped for writing.
pub(crate) unsafe fn copy_in(addr: usize, from: &[u8]) {
    let to: *mut u8 = ptr::with_exposed_provenance_mut(addr);
    // SAFETY: the caller's promise. The guest may access the bytes meanwhile; vm-memory accesses guest RAM likewise.
    unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
}

/// Sets `bytes` of guest RAM at `addr` to zero.
///
/// # Safety
/// `bytes` at `addr` are guest RAM, mapped for writing.
pub(crate) unsafe fn clear(addr: usize, bytes: usize) {
    let to: *mut u8 = ptr::with_exposed_provenance_mut(addr);
    // SAFETY: the caller's promise.
    unsafe { ptr::write_bytes(to, 0, bytes) }
}

/// What a copy loads at a time: the widest that every processor of the architecture has.
#[cfg(target_arch = "x86_64")]
type Wide = std::arch::x86_64::__m128i;
#[cfg(not(target_arch = "x86_64"))]
type Wide = u64;

/// Copies guest RAM at `addr` out to `into`, in volatile loads: the guest may write meanwhile, the copy may be torn, but
/// it is read once.
///
/// # Safety
/// `into.len()` bytes at `addr` are guest RAM, mapped and readable.
pub(crate) unsafe fn copy_out(addr: usize, into: &mut [u8]) {
    let from: *const u8 = ptr::with_exposed_provenance(addr);
    let mut done = 0;
    if addr.is_multiple_of(align_of::<Wide>()) {
        let to: *mut Wide = into.as_mut_ptr().cast();
        let whole = into.len() / size_of::<Wide>();
        for i in 0..whole {
            if i.is_multiple_of(LINE_BYTES / size_of::<Wide>()) {
                prefetch_line(addr.wrapping_add(i * size_of::<Wide>() + AHEAD_BYTES));
            }
            // SAFETY: the caller's promise for the load, which is aligned; i is below what fits into `into`. A Wide is
            // plain bits.
            unsafe { to.add(i).write_unaligned(from.cast::<Wide>().add(i).read_volatile()) };
        }
        done = whole * size_of::<Wide>();
    }
    for (i, byte) in into.iter_mut().enumerate().skip(done) {
        // SAFETY: the caller's promise.
        *byte = unsafe { from.add(i).read_volatile() };
    }
}

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// How far ahead of a copy the processor is asked for what comes next: a page, which is mostly the next to be copied.
const AHEAD_BYTES: usize = 4096;

/// Asks the processor for the page at `addr`, of any memory or none, ahead of its being read. Its own prefetcher stops at
/// the end of a page.
pub(crate) fn prefetch_page(addr: usize) {
    for line in (0..4096).step_by(LINE_BYTES) {
        prefetch_line(addr.wrapping_add(line));
    }
}

/// Asks it for a line.
#[inline]
fn prefetch_line(addr: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch is a hint: it reads nothing that a program can see, and cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(ptr::without_provenance(addr)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = addr; // No hint that stable Rust can give.
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_out_start_and_end_anywhere() {
        let from: Vec<u8> = (0..=255).collect();
        for start in 0..40 {
            for len in [0, 1, 7, 8, 15, 16, 17, 33, 64, 200] {
                let mut into = vec![0xEE; len + 1];
                // SAFETY: bytes of our own.
                unsafe { copy_out(from.as_ptr().expose_provenance() + start, &mut into[..len]) };
                assert_eq!(into[..len], from[start..start + len]);
                assert_eq!(into[len], 0xEE, "wrote too far");
            }
        }
    }
}
