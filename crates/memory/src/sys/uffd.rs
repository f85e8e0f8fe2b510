//! userfaultfd in asynchronous write-protect mode (Linux 6.7): the kernel notes a first write by itself and lets the
//! writer go on, so no thread of ours serves faults.
//!
//! See the kernel's `Documentation/admin-guide/mm/userfaultfd.rst`.

use super::check;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const API: u64 = 0xAA;
/// Handles faults of user mode only; no privilege is needed for such a descriptor. Asynchronous write protection never
/// hands a fault to us, so the kernel's own accesses (a system call into guest RAM, KVM) are tracked all the same.
const USER_MODE_ONLY: libc::c_int = 1;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const REGISTER_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;

const fn iowr(number: libc::c_ulong, size: usize) -> libc::c_ulong {
    (3 << 30) | ((size as libc::c_ulong) << 16) | (0xAA << 8) | number
}
const UFFDIO_API: libc::c_ulong = iowr(0x3F, size_of::<Api>());
const UFFDIO_REGISTER: libc::c_ulong = iowr(0x00, size_of::<Register>());
const UFFDIO_WRITEPROTECT: libc::c_ulong = iowr(0x06, size_of::<WriteProtect>());

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct WriteProtect {
    start: u64,
    len: u64,
    mode: u64,
}

/// A userfaultfd. Closing it ends the write protection of everything registered.
#[derive(Debug)]
pub(crate) struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// Opens one in asynchronous write-protect mode.
    pub(crate) fn open() -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
        // SAFETY: userfaultfd takes flags alone.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let fd = check(libc::c_int::try_from(fd).unwrap_or(-1))?;
        // SAFETY: the kernel has just made this descriptor for us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut api = Api {
            api: API,
            features: FEATURE_WP_ASYNC | FEATURE_WP_UNPOPULATED,
            ioctls: 0,
        };
        // SAFETY: `api` is a uffdio_api.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &raw mut api) })?;
        Ok(Uffd { fd })
    }

    /// Puts `len` bytes of guest RAM at `start` under write tracking; nothing is protected yet.
    pub(crate) fn register(&self, start: usize, len: u64) -> io::Result<()> {
        let mut arg = Register {
            start: start as u64,
            len,
            mode: REGISTER_MODE_WP,
            ioctls: 0,
        };
        // SAFETY: `arg` is a uffdio_register; write tracking does not change what memory reads as.
        check(unsafe { libc::ioctl(self.fd.as_raw_fd(), UFFDIO_REGISTER, &raw mut arg) })?;
        Ok(())
    }

    /// Protects all of `len` bytes at `start`, what has no page too (by markers in the page table).
    pub(crate) fn protect(&self, start: usize, len: u64) -> io::Result<()> {
        let mut arg = WriteProtect {
            start: start as u64,
            len,
            mode: WRITEPROTECT_MODE_WP,
        };
        loop {
            // SAFETY: `arg` is a uffdio_writeprotect, for a range registered before.
            match check(unsafe { libc::ioctl(self.fd.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut arg) }) {
                // The kernel gives up when the address space changes meanwhile: try again.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {}
                result => return result.map(drop),
            }
        }
    }
}
