//! Populating guest RAM ahead of its use: a first touch costs more than the copy that it waits for.

use crate::cgroup;
use crate::error::{Error, Result};
use crate::presence::Presence;
use crate::ram::GuestMemory;
use crate::sys::map;
use pages::{PAGE_BYTES, PageRange, PageSet};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Pages populated by one call: 32 MiB, so that a signal or an error does not wait for all of RAM.
const CHUNK_PAGES: u64 = (32 << 20) / PAGE_BYTES;
/// Threads that populate: more only fight over the kernel's zone lock.
const THREADS: usize = 2;

impl GuestMemory {
    /// Populates all of RAM, from two threads.
    ///
    /// # Errors
    /// [`Error::NotEnoughMemory`] ahead of populating, rather than the kernel's killer in the middle of it.
    pub fn populate_all(&self) -> Result<()> {
        let needed = self.layout.total_bytes();
        // Huge pages were set aside when they were mapped; a disk's pages can be written back.
        if self.storage.in_ram && !self.storage.is_huge() {
            check_memory(needed)?;
        }
        let chunks: Vec<PageRange> = self.layout.regions().iter().flat_map(|r| chunks(*r)).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.populate(*chunk)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..THREADS).map(|_| scope.spawn(work)).collect();
            let mine: Result<()> = work();
            let theirs = others.into_iter().map(|t| {
                let lost = |_| Error::sys("populating guest RAM", io::Error::other("a thread panicked"));
                t.join().map_err(lost).and_then(|result| result)
            });
            theirs.fold(mine, Result::and)
        })?;
        self.populated.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Populates `range`, of one region, for writing. Its content stays.
    pub fn populate(&self, range: PageRange) -> Result<()> {
        self.check_writable(range)?;
        let place = self.place(range)?;
        self.check_length(range, place)?;
        self.populate_by(range, libc::MADV_POPULATE_WRITE)
    }

    /// Maps what a RAM file holds, as the memory of a guest that runs is mapped: whoever reads it later meets no page
    /// faults. Holes stay holes. Of a file that is not in memory, the pages of `unread` are left on the disk.
    ///
    /// # Errors
    /// What the file holds cannot be found out, or cannot be read.
    pub fn map_present(&self, unread: &PageSet) -> Result<()> {
        let mut pages = self.present_by(Presence::Auto)?;
        if !self.storage.in_ram {
            pages.subtract(unread);
        }
        for run in pages.runs() {
            self.check_length(run, self.place(run)?)?;
            self.populate_by(run, libc::MADV_POPULATE_READ)?;
        }
        Ok(())
    }

    fn populate_by(&self, range: PageRange, advice: libc::c_int) -> Result<()> {
        for chunk in chunks(range) {
            let addr = self.place(chunk)?.addr;
            loop {
                match map::advise(addr, chunk.bytes(), advice) {
                    Ok(()) => break,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    // A kernel older than 5.14: pages then come one by one, as they are used.
                    Err(e) if e.raw_os_error() == Some(libc::EINVAL) => return Ok(()),
                    Err(e) => return Err(Error::sys(format!("populating pages {chunk} of guest RAM"), e)),
                }
            }
        }
        Ok(())
    }
}

fn chunks(range: PageRange) -> impl Iterator<Item = PageRange> {
    let mut rest = range;
    std::iter::from_fn(move || {
        let (chunk, tail) = rest.split_at(CHUNK_PAGES);
        rest = tail;
        (!chunk.is_empty()).then_some(chunk)
    })
}

fn check_memory(needed: u64) -> Result<()> {
    match available_bytes()? {
        Some(available) if available < needed => Err(Error::NotEnoughMemory { needed, available }),
        _ => Ok(()),
    }
}

/// The memory that the host could give without swapping (`MemAvailable`), or what the control groups of this process leave
/// it, whichever is less, bytes; `None` where neither says.
///
/// # Errors
/// `/proc/meminfo` cannot be read.
pub fn available_bytes() -> Result<Option<u64>> {
    let text = std::fs::read_to_string("/proc/meminfo").map_err(|e| Error::sys("reading /proc/meminfo", e))?;
    let host = mem_field(&text, "MemAvailable:");
    Ok(host.into_iter().chain(cgroup::available_bytes()).min())
}

/// A field of `/proc/meminfo`, in bytes.
pub(crate) fn mem_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:       24684032 kB\nMemAvailable:   12 kB\nSwapTotal:             0 kB\n";
        assert_eq!(mem_field(text, "MemAvailable:"), Some(12 << 10));
        assert_eq!(mem_field(text, "SwapTotal:"), Some(0));
        assert_eq!(mem_field(text, "Nothing:"), None);
    }

    #[test]
    fn more_than_the_host_has_is_refused() {
        assert!(matches!(check_memory(1 << 50), Err(Error::NotEnoughMemory { .. })));
        check_memory(4096).unwrap();
        assert!(available_bytes().unwrap().is_some_and(|bytes| bytes > 1 << 20));
    }
}
