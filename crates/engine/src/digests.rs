//! How RAM is cut for `--verify`, which pages a digest stands for, and which digests taken ahead of the pause still hold.

use pages::{Layout, PageRange, PageSet, Pfn};
use std::sync::Arc;

/// The most sums that are aimed at: they have to fit in one control frame.
const MAX_SUMS: u64 = 16_384;
/// A chunk is not smaller than 4 MiB.
const MIN_CHUNK_PAGES: u64 = 1024;

/// Pages a digest. Both sides come to the same figure, so the destination can begin before the source's sums are here.
pub(crate) fn chunk_pages(layout: &Layout) -> u64 {
    layout
        .total_pages()
        .div_ceil(MAX_SUMS)
        .next_multiple_of(64)
        .max(MIN_CHUNK_PAGES)
}

/// How many sums RAM has, cut so.
pub(crate) fn count(layout: &Layout, chunk_pages: u64) -> u64 {
    layout
        .regions()
        .iter()
        .map(|r| r.count().div_ceil(chunk_pages.max(1)))
        .sum()
}

/// The pages that sum number `index` stands for.
pub(crate) fn pages_of(layout: &Layout, chunk_pages: u64, mut index: u64) -> PageRange {
    let chunk_pages = chunk_pages.max(1);
    for region in layout.regions() {
        let chunks = region.count().div_ceil(chunk_pages);
        if index < chunks {
            let rest = region.split_at(index.saturating_mul(chunk_pages)).1;
            return rest.split_at(chunk_pages).0;
        }
        index -= chunks;
    }
    PageRange::between(Pfn(0), Pfn(0))
}

/// The sums of RAM so far, and what they no longer hold for. A sum holds while no page of its chunk was touched since the
/// digest began and the chunk's pages that are left out are the same ones.
#[derive(Debug)]
pub(crate) struct Sums {
    chunk_pages: u64,
    sums: Vec<u128>,
    /// Pages of chunks that were never digested, and pages touched since theirs was.
    touched: PageSet,
    /// What each chunk's digest left out.
    excluded: PageSet,
}

impl Sums {
    /// Nothing is digested yet.
    pub(crate) fn new(layout: &Arc<Layout>, chunk_pages: u64) -> Self {
        let chunks = usize::try_from(count(layout, chunk_pages)).unwrap_or(usize::MAX);
        Sums {
            chunk_pages,
            sums: vec![0; chunks],
            touched: PageSet::full(layout),
            excluded: PageSet::empty(layout),
        }
    }

    pub(crate) fn chunk_pages(&self) -> u64 {
        self.chunk_pages
    }

    pub(crate) fn touch(&mut self, range: PageRange) {
        self.touched.insert_range(range);
    }

    pub(crate) fn touch_all(&mut self, pages: &PageSet) {
        self.touched.union_with(pages);
    }

    /// The chunks whose sum does not hold where `excluded` is left out, by ascending address.
    pub(crate) fn stale(&self, excluded: &PageSet) -> Vec<u64> {
        let (mut more, mut less) = (excluded.clone(), self.excluded.clone());
        more.subtract(&self.excluded);
        less.subtract(excluded);
        let mut changed = self.touched.clone();
        changed.union_with(&more);
        changed.union_with(&less);
        let layout = changed.layout();
        let mut stale = Vec::new();
        let mut before = 0;
        for region in layout.regions() {
            let mut from = region.start();
            while let Some(run) = changed.next_run(from).map(|run| run.intersection(*region)) {
                if run.is_empty() {
                    break;
                }
                let index = (run.start().0 - region.start().0) / self.chunk_pages.max(1);
                stale.push(before + index);
                from = pages_of(layout, self.chunk_pages, before + index).end();
            }
            before += region.count().div_ceil(self.chunk_pages.max(1));
        }
        stale
    }

    /// These chunks are about to be digested, with `excluded` left out. What is touched from here on is stale again.
    pub(crate) fn begin(&mut self, chunks: &[u64], excluded: &PageSet) {
        let layout = Arc::clone(self.touched.layout());
        for index in chunks {
            let chunk = pages_of(&layout, self.chunk_pages, *index);
            self.touched.remove_range(chunk);
            self.excluded.remove_range(chunk);
            let mut from = chunk.start();
            while let Some(run) = excluded.next_run(from).map(|run| run.intersection(chunk)) {
                if run.is_empty() {
                    break;
                }
                self.excluded.insert_range(run);
                from = run.end();
            }
        }
    }

    /// What came out for these chunks.
    pub(crate) fn done(&mut self, chunks: &[u64], sums: &[u128]) -> Result<(), String> {
        if chunks.len() != sums.len() {
            return Err(format!("{} digests of {} chunks", sums.len(), chunks.len()));
        }
        for (index, sum) in chunks.iter().zip(sums) {
            if let Some(at) = usize::try_from(*index).ok().and_then(|i| self.sums.get_mut(i)) {
                *at = *sum;
            }
        }
        Ok(())
    }

    pub(crate) fn get(&self) -> &[u128] {
        &self.sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_fit_in_a_frame_and_name_their_pages() {
        let layout = Layout::pc(8 << 18).unwrap();
        let chunk = chunk_pages(&layout);
        assert_eq!((chunk, count(&layout, chunk)), (1024, 2048));
        assert_eq!(pages_of(&layout, chunk, 767).end(), Pfn(3 << 18));
        assert_eq!(pages_of(&layout, chunk, 768).start(), Pfn(4 << 18));
        assert!(pages_of(&layout, chunk, 2048).is_empty());
        let odd = Layout::flat(4097).unwrap();
        assert_eq!(pages_of(&odd, 4096, 1).count(), 1);
        let large = Layout::flat(pages::MAX_PAGES).unwrap();
        assert!(count(&large, chunk_pages(&large)) <= MAX_SUMS);
        assert_eq!(count(&odd, u64::MAX), 1);
    }

    fn sums_of(pages: u64) -> (Sums, PageSet) {
        let layout = Arc::new(Layout::flat(pages).unwrap());
        let mut sums = Sums::new(&layout, 4);
        let none = PageSet::empty(&layout);
        let all = sums.stale(&none);
        sums.begin(&all, &none);
        let values: Vec<u128> = (1..).take(all.len()).collect();
        sums.done(&all, &values).unwrap();
        (sums, none)
    }

    #[test]
    fn a_sum_holds_until_a_page_of_its_chunk_is_touched() {
        let (mut sums, none) = sums_of(10);
        assert_eq!(sums.get(), [1, 2, 3]);
        assert!(sums.stale(&none).is_empty());
        sums.touch(PageRange::new(Pfn(7), 2).unwrap());
        assert_eq!(sums.stale(&none), [1, 2]);
        sums.begin(&[1], &none);
        // Touched while it is being digested: stale once more.
        sums.touch(PageRange::new(Pfn(4), 1).unwrap());
        sums.done(&[1], &[9]).unwrap();
        assert_eq!(sums.stale(&none), [1, 2]);
        assert_eq!(sums.get(), [1, 9, 3]);
    }

    #[test]
    fn a_sum_holds_for_the_pages_that_it_left_out() {
        let (mut sums, none) = sums_of(10);
        let mut free = none.clone();
        free.insert(Pfn(5));
        assert_eq!(sums.stale(&free), [1]);
        sums.begin(&[1], &free);
        assert!(sums.stale(&free).is_empty());
        // Back again: the page counts once more.
        assert_eq!(sums.stale(&none), [1]);
        assert!(sums.done(&[1], &[]).is_err());
    }

    #[test]
    fn every_region_begins_a_chunk_of_its_own() {
        let layout = Arc::new(Layout::pc(8 << 18).unwrap());
        let mut sums = Sums::new(&layout, 1024);
        let none = PageSet::empty(&layout);
        let all = sums.stale(&none);
        assert_eq!(all, (0..2048).collect::<Vec<u64>>());
        sums.begin(&all, &none);
        sums.touch(PageRange::new(Pfn((3 << 18) - 1), 1).unwrap());
        sums.touch(PageRange::new(Pfn(4 << 18), 1).unwrap());
        assert_eq!(sums.stale(&none), [767, 768]);
    }
}
