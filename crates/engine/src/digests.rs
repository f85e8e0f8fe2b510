//! How RAM is cut for `--verify`, and which pages a digest stands for.

use pages::{Layout, PageRange, Pfn};

/// The most sums that are aimed at: they have to fit in one control frame.
const MAX_SUMS: u64 = 16_384;
/// A chunk is not smaller than 16 MiB.
const MIN_CHUNK_PAGES: u64 = 4096;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_fit_in_a_frame_and_name_their_pages() {
        let layout = Layout::pc(8 << 18).unwrap();
        let chunk = chunk_pages(&layout);
        assert_eq!((chunk, count(&layout, chunk)), (4096, 512));
        assert_eq!(pages_of(&layout, chunk, 191).end(), Pfn(3 << 18));
        assert_eq!(pages_of(&layout, chunk, 192).start(), Pfn(4 << 18));
        assert!(pages_of(&layout, chunk, 512).is_empty());
        let odd = Layout::flat(4097).unwrap();
        assert_eq!(pages_of(&odd, 4096, 1).count(), 1);
        let large = Layout::flat(pages::MAX_PAGES).unwrap();
        assert!(count(&large, chunk_pages(&large)) <= MAX_SUMS);
        assert_eq!(count(&odd, u64::MAX), 1);
    }
}
