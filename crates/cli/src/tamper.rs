//! Corrupting a guest on purpose: what shows that the checks check. Behind a hidden flag of the receiver.
//!
//! The flip has to fall between the last page's arrival and the check that is put to the test. The library calls
//! [`GuestRam::digest`] first of all for `--verify`, and [`Machine::restore`] right after the digests were compared; so
//! those two calls are where it is done.

use machine::{GuestRam, Machine, MachineConfig, MachineState, PageKind, Result};
use memory::GuestMemory;
use pages::{Layout, PageRange, PageSet, Pfn};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Once, PoisonError};

/// Guest memory that flips a byte of a page that came, right before it is digested for the first time.
#[derive(Debug)]
pub(crate) struct TamperedRam {
    inner: Arc<GuestMemory>,
    came: Mutex<Option<PageRange>>,
    once: Once,
}

impl TamperedRam {
    pub(crate) fn new(inner: Arc<GuestMemory>) -> Self {
        TamperedRam {
            inner,
            came: Mutex::new(None),
            once: Once::new(),
        }
    }

    fn tamper(&self) {
        let came = *self.came.lock().unwrap_or_else(PoisonError::into_inner);
        match came.map(|range| flip(&self.inner, range.start())) {
            None => tracing::warn!("no page came that could be corrupted"),
            Some(Ok(())) => tracing::warn!("a page was corrupted, as --corrupt-page says"),
            Some(Err(error)) => tracing::warn!("no page was corrupted: {error}"),
        }
    }
}

/// Flips a bit in the middle of a page.
fn flip(ram: &GuestMemory, pfn: Pfn) -> memory::Result<()> {
    let address = pfn.address().unwrap_or(0) + 2000;
    let mut byte = [0];
    ram.read(address, &mut byte)?;
    byte[0] ^= 0x10;
    ram.write(address, &byte)
}

impl GuestRam for TamperedRam {
    fn layout(&self) -> &Arc<Layout> {
        self.inner.layout()
    }

    fn present(&self) -> Result<PageSet> {
        self.inner.present()
    }

    fn absent_reads_zero(&self) -> bool {
        self.inner.absent_reads_zero()
    }

    fn classify(&self, range: PageRange, each: &mut dyn FnMut(PageRange, PageKind)) -> Result<()> {
        self.inner.classify(range, each)
    }

    fn write_to(&self, to: BorrowedFd<'_>, head: &[u8], ranges: &[PageRange], skip: usize) -> io::Result<usize> {
        self.inner.write_to(to, head, ranges, skip)
    }

    fn read_from(&self, from: BorrowedFd<'_>, ranges: &[PageRange], skip: usize) -> io::Result<usize> {
        *self.came.lock().unwrap_or_else(PoisonError::into_inner) = ranges.last().copied();
        self.inner.read_from(from, ranges, skip)
    }

    fn zero(&self, range: PageRange) -> Result<()> {
        self.inner.zero(range)
    }

    fn fill(&self, range: PageRange, value: u32) -> Result<()> {
        self.inner.fill(range, value)
    }

    fn expect(&self, ranges: &[PageRange]) {
        self.inner.expect(ranges);
    }

    fn settle(&self) {
        self.inner.settle();
    }

    fn digest(&self, range: PageRange) -> Result<u128> {
        self.once.call_once(|| self.tamper());
        self.inner.digest(range)
    }

    fn host_available(&self) -> Option<u64> {
        self.inner.host_available()
    }

    fn copies_in(&self) -> bool {
        self.inner.copies_in()
    }

    fn copy_in(&self, range: PageRange, from: &[u8]) -> Result<()> {
        *self.came.lock().unwrap_or_else(PoisonError::into_inner) = Some(range);
        GuestRam::copy_in(&*self.inner, range, from)
    }

    fn read_page(&self, pfn: Pfn, into: &mut [u8; 4096]) -> Result<()> {
        self.inner.read_page(pfn, into)
    }
}

/// A machine that does something wicked once it has been restored.
pub(crate) struct TamperedMachine {
    pub(crate) inner: Box<dyn Machine>,
    pub(crate) then: Box<dyn FnMut() -> Result<()> + Send>,
}

impl Machine for TamperedMachine {
    fn config(&self) -> MachineConfig {
        self.inner.config()
    }

    fn is_running(&self) -> bool {
        self.inner.is_running()
    }

    fn pause(&mut self) -> Result<()> {
        self.inner.pause()
    }

    fn resume(&mut self) -> Result<()> {
        self.inner.resume()
    }

    fn save(&mut self) -> Result<MachineState> {
        self.inner.save()
    }

    fn restore(&mut self, state: &MachineState) -> Result<()> {
        self.inner.restore(state)?;
        (self.then)()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::Backing;
    use std::io::Write;
    use std::os::fd::AsFd;

    #[test]
    fn a_page_that_came_is_flipped_before_it_is_digested() {
        let ram = || Arc::new(GuestMemory::new(Arc::new(Layout::flat(16).unwrap()), &Backing::Anonymous).unwrap());
        let (honest, tampered) = (ram(), TamperedRam::new(ram()));
        let page = PageRange::new(Pfn(5), 1).unwrap();
        honest.fill(page, 0x0102_0304).unwrap();
        let mut sent = [0; 4096];
        honest.read_page(Pfn(5), &mut sent).unwrap();
        let (from, mut to) = std::os::unix::net::UnixStream::pair().unwrap();
        to.write_all(&sent).unwrap();
        assert_eq!(tampered.read_from(from.as_fd(), &[page], 0).unwrap(), 4096);
        let all = PageRange::new(Pfn(0), 16).unwrap();
        let digest = tampered.digest(all).unwrap();
        assert_ne!(digest, honest.digest(all).unwrap());
        assert_eq!(tampered.digest(all).unwrap(), digest, "flipped once, not back again");
    }
}
