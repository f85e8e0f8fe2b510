//! The system calls of this crate, each wrapped once.

pub(crate) mod barrier;
pub(crate) mod iov;
pub(crate) mod kvm;
pub(crate) mod map;
pub(crate) mod pagemap;
pub(crate) mod uffd;

use std::io;

// Sizes and offsets are u64 here and usize in system calls; on the 64-bit hosts that run KVM guests they are the same.
const _: () = assert!(usize::BITS == 64, "guest RAM is mapped whole: a 64-bit host is needed");

/// A size or offset for a system call.
#[expect(clippy::cast_possible_truncation)]
pub(crate) const fn size(value: u64) -> usize {
    value as usize
}

/// The result of a system call that says -1 for an error.
pub(crate) fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Does a system call again for as long as a signal interrupts it.
pub(crate) fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(done) => return Ok(done),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}
