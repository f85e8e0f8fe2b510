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
    skip: usize,
    alive: std::marker::PhantomData<&'a [u8]>,
}

impl<'a> Vectors<'a> {
    /// An empty list that leaves out the first `skip` bytes of what is pushed.
    pub(crate) fn new(skip: usize) -> Self {
        Vectors {
            list: Vec::new(),
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

/// Copies guest RAM at `addr` out to `into`, in volatile loads: the guest may write meanwhile, the copy may be torn.
///
/// # Safety
/// `into.len()` bytes at `addr` are guest RAM, mapped and readable.
pub(crate) unsafe fn copy_out(addr: usize, into: &mut [u8]) {
    let from: *const u8 = ptr::with_exposed_provenance(addr);
    let (words, tail) = into.as_chunks_mut::<8>();
    let whole = words.len() * 8;
    for (i, word) in words.iter_mut().enumerate() {
        // SAFETY: the caller's promise; the cast pointer is read unaligned-safe below.
        *word = unsafe { read_word(from.add(i * 8)) };
    }
    for (i, byte) in tail.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *byte = unsafe { from.add(whole + i).read_volatile() };
    }
}

/// One volatile load of 8 bytes, or 8 of one where the address is not aligned.
///
/// # Safety
/// 8 bytes at `at` are readable.
unsafe fn read_word(at: *const u8) -> [u8; 8] {
    if at.addr().is_multiple_of(8) {
        // SAFETY: the caller's promise, and the address is aligned.
        unsafe { at.cast::<[u8; 8]>().cast::<u64>().read_volatile() }.to_ne_bytes()
    } else {
        // SAFETY: the caller's promise.
        std::array::from_fn(|i| unsafe { at.add(i).read_volatile() })
    }
}
