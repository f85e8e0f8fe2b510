//! Guest memory whose transfers are short, odd and interrupted.

use machine::{GuestRam, PageKind};
use memory::GuestMemory;
use pages::{Layout, PAGE_BYTES, PageRange, PageSet, Pfn};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Takes and gives at most 1777 bytes a call, and nothing at all every third time.
pub struct Stingy {
    pub memory: Arc<GuestMemory>,
    pub calls: AtomicUsize,
}

impl Stingy {
    fn most(&self) -> io::Result<usize> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if call % 3 == 2 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(1 + call * 61 % 1777)
    }

    /// Where byte `at` of `ranges` lies, and how many follow it in its page.
    fn place(ranges: &[PageRange], mut at: usize) -> Option<(u64, usize)> {
        for range in ranges {
            let bytes = range.bytes() as usize;
            if at < bytes {
                let left = PAGE_BYTES as usize - at % PAGE_BYTES as usize;
                return Some((range.start().0 * PAGE_BYTES + at as u64, left));
            }
            at -= bytes;
        }
        None
    }
}

impl GuestRam for Stingy {
    fn layout(&self) -> &Arc<Layout> {
        self.memory.layout()
    }

    fn present(&self) -> machine::Result<PageSet> {
        self.memory.present()
    }

    fn classify(&self, range: PageRange, each: &mut dyn FnMut(PageRange, PageKind)) -> machine::Result<()> {
        self.memory.classify(range, each)
    }

    fn write_to(&self, to: BorrowedFd<'_>, head: &[u8], ranges: &[PageRange], skip: usize) -> io::Result<usize> {
        let most = self.most()?;
        if skip < head.len() {
            let part = &head[skip..head.len().min(skip + most)];
            return Ok(rustix::io::write(to, part)?);
        }
        let Some((address, left)) = Stingy::place(ranges, skip - head.len()) else {
            return Ok(0);
        };
        let mut bytes = vec![0; left.min(most)];
        self.memory.read(address, &mut bytes).map_err(io::Error::other)?;
        Ok(rustix::io::write(to, &bytes)?)
    }

    fn read_from(&self, from: BorrowedFd<'_>, ranges: &[PageRange], skip: usize) -> io::Result<usize> {
        let most = self.most()?;
        let Some((address, left)) = Stingy::place(ranges, skip) else {
            return Ok(0);
        };
        let mut bytes = vec![0; left.min(most)];
        let n = rustix::io::read(from, &mut bytes)?;
        self.memory.write(address, &bytes[..n]).map_err(io::Error::other)?;
        Ok(n)
    }

    fn zero(&self, range: PageRange) -> machine::Result<()> {
        self.memory.zero(range)
    }

    fn fill(&self, range: PageRange, value: u32) -> machine::Result<()> {
        self.memory.fill(range, value)
    }

    fn digest(&self, range: PageRange) -> machine::Result<u128> {
        self.memory.digest(range)
    }

    fn read_page(&self, pfn: Pfn, into: &mut [u8; 4096]) -> machine::Result<()> {
        self.memory.read_page(pfn, into)
    }
}
