//! Giving much memory back at once. The kernel frees 4 KiB pages one by one, at 0.1 to 0.2 us each on one CPU whatever the
//! calls, and several threads of a process can do it side by side.

use crate::{Error, GuestMemory, Result};
use pages::{PageRange, Pfn};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// What one thread takes at a time, pages: 16 MiB, whole huge pages, some 0.5 ms of work.
const PIECE_PAGES: u64 = 1 << 12;

/// From how many pages on more than one thread is worth starting: 128 MiB.
const SHARED_FROM: u64 = 1 << 15;

/// The most threads that work at it, the caller's own among them.
const MOST_THREADS: usize = 4;

impl GuestMemory {
    /// Gives each of `ranges` back to the host, as [`GuestMemory::discard`] does, on several threads where there is much.
    /// `done` hears of each range, in the order of `ranges`, once all was tried; of several errors in one range, of one.
    pub fn discard_all(&self, ranges: &[PageRange], done: &mut dyn FnMut(PageRange, Result<()>)) {
        let pages = ranges.iter().map(|range| range.count()).fold(0, u64::saturating_add);
        if pages < SHARED_FROM {
            return ranges.iter().for_each(|range| done(*range, self.discard(*range)));
        }
        let errors = self.discard_pieces(&pieces(ranges, PIECE_PAGES.max(self.discard_granule_pages())));
        let mut errors = errors.into_iter().peekable();
        for (index, range) in ranges.iter().enumerate() {
            let mut result = Ok(());
            while let Some((_, error)) = errors.next_if(|(at, _)| *at == index) {
                result = Err(error);
            }
            done(*range, result);
        }
    }

    /// Gives pieces back, each with the index of its range. The errors, in the order of the ranges.
    fn discard_pieces(&self, pieces: &[(usize, PageRange)]) -> Vec<(usize, Error)> {
        let (next, errors) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let work = || {
            while let Some((index, piece)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(error) = self.discard(*piece) {
                    errors
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push((*index, error));
                }
            }
        };
        let threads = thread::available_parallelism().map_or(1, |n| n.get().min(MOST_THREADS));
        thread::scope(|scope| {
            for _ in 1..threads {
                let helper = thread::Builder::new().name("discard".to_owned());
                if let Err(error) = helper.spawn_scoped(scope, work) {
                    // Fewer threads do the same work.
                    tracing::debug!(%error, "no further thread to give memory back");
                }
            }
            work();
        });
        let mut errors = errors.into_inner().unwrap_or_else(PoisonError::into_inner);
        errors.sort_by_key(|(index, _)| *index);
        errors
    }
}

/// Cuts ranges at multiples of `most` pages; each piece with the index of its range.
fn pieces(ranges: &[PageRange], most: u64) -> Vec<(usize, PageRange)> {
    let mut pieces = Vec::new();
    for (index, range) in ranges.iter().enumerate() {
        let mut at = range.start();
        while at < range.end() {
            let border = (at.0 / most + 1).saturating_mul(most);
            let piece = PageRange::between(at, Pfn(border.min(range.end().0)));
            pieces.push((index, piece));
            at = piece.end();
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::pieces;
    use pages::{PageRange, Pfn};

    fn range(start: u64, end: u64) -> PageRange {
        PageRange::between(Pfn(start), Pfn(end))
    }

    #[test]
    fn ranges_are_cut_at_multiples_and_nothing_is_lost_or_done_twice() {
        let cut = pieces(&[range(3, 5), range(7, 25), range(30, 30), range(32, 40)], 8);
        let wanted = [(0, 3, 5), (1, 7, 8), (1, 8, 16), (1, 16, 24), (1, 24, 25), (3, 32, 40)];
        assert_eq!(cut, wanted.map(|(index, start, end)| (index, range(start, end))));
        let end = u64::MAX >> 12;
        assert_eq!(pieces(&[range(end - 2, end)], 8).len(), 1);
    }
}
