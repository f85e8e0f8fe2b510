//! Which memory the bytes of a page are sent from.
//!
//! A load from a hole of a file that is mapped shared allocates the page: a source that sends all of a sparse RAM file
//! through its mapping fills it up. So holes are looked up first and sent from zeroes of our own. Where everything is
//! resident that costs one system call a window.
//!
//! A page that comes to be after it was looked up is sent as the zeroes that it was: whoever wrote it is in the dirty
//! log, and it is sent again.

use crate::error::{Error, Result};
use crate::ram::GuestMemory;
use crate::sys::iov::Vectors;
use crate::sys::size;
use pages::PageRange;
use std::io;

/// What holes are sent from, over and over: small enough for a usual L2 cache.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// Pages looked up at a time: 16 MiB.
const WINDOW_PAGES: u64 = 4096;
/// Ranges at most this far apart are looked up together: a page between them costs about 10 ns, a second system call 500.
const NEAR_PAGES: u64 = 48;
/// No more than this is looked up for one call: what the socket does not take is looked up again.
const MOST_BYTES: usize = 64 << 20;

impl GuestMemory {
    /// Adds the content of `ranges` for as long as there is room, holes as zeroes.
    pub(crate) fn push_content<'a>(&'a self, vectors: &mut Vectors<'a>, ranges: &[PageRange]) -> io::Result<()> {
        let mut window = Window::default();
        for (i, range) in ranges.iter().enumerate() {
            self.place(*range).map_err(Error::into_io)?;
            let mut rest = *range;
            while !rest.is_empty() {
                if vectors.is_full() || vectors.bytes() >= MOST_BYTES {
                    return Ok(());
                }
                let (part, tail) = rest.split_at(WINDOW_PAGES);
                rest = tail;
                if vectors.skip_whole(size(part.bytes())) {
                    continue;
                }
                if !window.covers(part) {
                    let next = if rest.is_empty() { &ranges[i + 1..] } else { &[] };
                    window = self.look(part, next).map_err(Error::into_io)?;
                }
                self.push_part(vectors, part, &window).map_err(Error::into_io)?;
            }
        }
        Ok(())
    }

    /// Looks up `part`, and with it as many of the ranges after it as lie near.
    fn look(&self, part: PageRange, next: &[PageRange]) -> Result<Window> {
        let mut all = part;
        for range in next {
            let joined = PageRange::between(part.start(), range.end());
            let near = range.start() >= all.end() && range.start().0 - all.end().0 <= NEAR_PAGES;
            if !near || joined.count() > WINDOW_PAGES || self.layout.region_of_range(joined).is_none() {
                break;
            }
            all = joined;
        }
        self.check_length(all, self.place(all)?)?;
        Ok(Window {
            holes: self.holes_in(all)?,
            range: Some(all),
        })
    }

    fn push_part<'a>(&'a self, vectors: &mut Vectors<'a>, part: PageRange, window: &Window) -> Result<()> {
        let mut at = part.start();
        let first = window.holes.partition_point(|hole| hole.end() <= part.start());
        for hole in &window.holes[first..] {
            if hole.start() >= part.end() || vectors.is_full() {
                break;
            }
            let (from, to) = (hole.start().max(at), hole.end().min(part.end()));
            self.push_present(vectors, PageRange::between(at, from))?;
            let mut bytes = size(PageRange::between(from, to).bytes());
            while bytes > 0 && !vectors.is_full() {
                let some = bytes.min(ZEROES.len());
                vectors.push_slice(&ZEROES[..some]);
                bytes -= some;
            }
            at = to;
        }
        self.push_present(vectors, PageRange::between(at, part.end()))
    }

    fn push_present<'a>(&'a self, vectors: &mut Vectors<'a>, range: PageRange) -> Result<()> {
        if !range.is_empty() {
            vectors.push_guest(self.place(range)?.addr, size(range.bytes()));
        }
        Ok(())
    }
}

/// Pages that were looked up.
#[derive(Default)]
struct Window {
    range: Option<PageRange>,
    /// What of them has no memory, ascending.
    holes: Vec<PageRange>,
}

impl Window {
    fn covers(&self, part: PageRange) -> bool {
        let inside = |range: PageRange| range.start() <= part.start() && part.end() <= range.end();
        self.range.is_some_and(inside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, Presence};
    use machine::GuestRam;
    use pages::{Layout, Pfn};
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    /// Where the host has switched the huge zero page off, a load from a hole of anonymous memory allocates too.
    #[test]
    fn holes_of_anonymous_memory_are_not_read_where_that_allocates() {
        let layout = Arc::new(Layout::flat(4096).unwrap());
        let mut memory = GuestMemory::new(layout, &Backing::Anonymous).unwrap();
        memory.storage.reads_allocate = true;
        memory.write(4096 * 700, &[1; 4096]).unwrap();
        let before = memory.present_by(Presence::PagemapFile).unwrap();
        let range = PageRange::new(Pfn(0), 4096).unwrap();
        let (near, mut far) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let memory = &memory;
            scope.spawn(move || {
                let (total, mut done) = (size(range.bytes()), 0);
                while done < total {
                    done += memory.write_to(near.as_fd(), &[], &[range], done).unwrap();
                }
            });
            let mut got = Vec::new();
            far.read_to_end(&mut got).unwrap();
            let pages = got.as_chunks::<4096>().0;
            assert_eq!(pages.len(), 4096);
            let written = |i: usize| if i == 700 { [1; 4096] } else { [0; 4096] };
            assert!(pages.iter().enumerate().all(|(i, page)| *page == written(i)));
        });
        // This way counts the zero page too.
        assert_eq!(memory.present_by(Presence::PagemapFile).unwrap(), before);
    }
}
