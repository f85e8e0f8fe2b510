//! Huge pages for what comes in bulk, small ones for pages that come singly.
//!
//! Guest RAM asks for transparent huge pages. The first touch of any page of a block of 2 MiB then takes, and zeroes, all of
//! it: a guest of which one page in 64 is used would take all of its RAM, and twenty times as long. So before a batch is
//! written, blocks of which it holds little are taken out of that for as long as content arrives; after it, all of RAM is
//! as it was, and the kernel may put such blocks together if they fill up.

use crate::GuestMemory;
use crate::sys::map;
use pages::{PageRange, Pfn};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Pages of a block.
const BLOCK: u64 = 512;

/// So many pages of a block in one batch, or in one run, are worth a huge page: zeroing 2 MiB costs what 100 to 200 first
/// touches of 4 KiB do.
const DENSE: u64 = 128;

/// Runs from this many pages on are populated by a call of their own, which costs a third less than a fault a page.
const WORTH_A_CALL: u64 = 8;

/// Stretches of blocks that are taken out at most. Each costs the kernel two mappings, of which a process may have 65,530.
const MOST_STRETCHES: usize = 16 << 10;

/// Which blocks had their first batch, and how many stretches of them take no huge pages.
#[derive(Debug)]
pub(crate) struct Sparse {
    seen: Vec<AtomicU64>,
    stretches: AtomicUsize,
}

impl Sparse {
    /// For RAM that ends at `end`.
    pub(crate) fn new(end: Pfn) -> Self {
        let words = end.0.div_ceil(BLOCK).div_ceil(64);
        let mut seen = Vec::new();
        seen.resize_with(usize::try_from(words).unwrap_or(usize::MAX), AtomicU64::default);
        Sparse {
            seen,
            stretches: AtomicUsize::new(0),
        }
    }

    /// Whether this is the first that is heard of a block.
    fn is_new(&self, block: u64) -> bool {
        let bit = 1 << (block % 64);
        let word = usize::try_from(block / 64).ok().and_then(|word| self.seen.get(word));
        word.is_some_and(|word| word.fetch_or(bit, Ordering::Relaxed) & bit == 0)
    }

    /// The stretches of blocks that are new, and of which `ranges`, ascending, hold little.
    fn sparse(&self, ranges: &[PageRange]) -> Vec<PageRange> {
        let mut found = Vec::new();
        let mut open: Option<(u64, u64)> = None;
        let mut close = |block: u64, pages: u64| {
            if self.is_new(block) && pages < DENSE {
                add_block(&mut found, block);
            }
        };
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let (first, last) = (range.start().0 / BLOCK, (range.end().0 - 1) / BLOCK);
            for block in first..=last {
                let start = Pfn(block * BLOCK);
                let here = range
                    .intersection(PageRange::between(start, Pfn(start.0 + BLOCK)))
                    .count();
                // A long run goes on in the next batch, or came from the last one.
                let here = if range.count() >= DENSE { DENSE } else { here };
                open = match open {
                    Some((at, pages)) if at == block => Some((at, pages + here)),
                    Some((at, pages)) => {
                        close(at, pages);
                        Some((block, here))
                    }
                    None => Some((block, here)),
                };
            }
        }
        if let Some((at, pages)) = open {
            close(at, pages);
        }
        found
    }
}

/// Adds a block to the stretch before it, or as a new one.
fn add_block(stretches: &mut Vec<PageRange>, block: u64) {
    let start = Pfn(block * BLOCK);
    let end = Pfn(start.0 + BLOCK);
    match stretches.last_mut() {
        Some(last) if last.end() == start => *last = PageRange::between(last.start(), end),
        _ => stretches.push(PageRange::between(start, end)),
    }
}

impl GuestMemory {
    /// The content of `ranges`, ascending, is about to be written, and of their blocks more may follow: populates them.
    pub(crate) fn expect_content(&self, ranges: &[PageRange]) {
        if self.storage.file.is_some() || self.populated.load(Ordering::Relaxed) {
            return;
        }
        for stretch in self.sparse.sparse(ranges) {
            if self.sparse.stretches.fetch_add(1, Ordering::Relaxed) >= MOST_STRETCHES {
                return;
            }
            self.advise_all(stretch, libc::MADV_NOHUGEPAGE);
        }
        for run in ranges.iter().filter(|run| run.count() >= WORTH_A_CALL) {
            self.advise_all(*run, libc::MADV_POPULATE_WRITE);
        }
    }

    /// All content is there.
    pub(crate) fn content_is_there(&self) {
        if self.sparse.stretches.swap(0, Ordering::Relaxed) > 0 {
            let all = PageRange::between(Pfn(0), self.layout.end());
            self.advise_all(all, libc::MADV_HUGEPAGE);
        }
    }

    fn advise_all(&self, range: PageRange, advice: libc::c_int) {
        for part in self.layout.clip(range) {
            let advised = self
                .place(part)
                .map(|place| map::advise(place.addr, part.bytes(), advice));
            // What the kernel cannot do here costs memory or time, and nothing else.
            if !matches!(advised, Ok(Ok(()))) {
                tracing::debug!(%part, advice, ?advised, "huge pages stay as they are");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn r(start: u64, count: u64) -> PageRange {
        PageRange::between(Pfn(start), Pfn(start + count))
    }

    #[test]
    fn blocks_of_which_a_batch_holds_little_are_found_once() {
        let sparse = Sparse::new(Pfn(100 * BLOCK));
        let singles: Vec<PageRange> = (0..64).map(|i| r(3 * BLOCK + i * 64, 1)).collect();
        assert_eq!(sparse.sparse(&singles), [r(3 * BLOCK, 8 * BLOCK)]);
        assert_eq!(sparse.sparse(&singles), []);
        // Many short runs, and the ends of a long one, are dense.
        let short: Vec<PageRange> = (0..32).map(|i| r(20 * BLOCK + i * 16, 4)).collect();
        assert_eq!(sparse.sparse(&short), []);
        assert_eq!(sparse.sparse(&[r(31 * BLOCK - 3, 200)]), []);
        assert_eq!(
            sparse.sparse(&[r(40 * BLOCK - 3, 6), r(42 * BLOCK, 127)]),
            [r(39 * BLOCK, 2 * BLOCK), r(42 * BLOCK, BLOCK)]
        );
        // Out of order, out of RAM: nothing.
        assert_eq!(sparse.sparse(&[r(200 * BLOCK, 1), r(5 * BLOCK, 1)]), []);
    }
}
