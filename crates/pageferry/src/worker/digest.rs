//! Digesting RAM, over two threads. What is digested: [`wire::Digests`].

use machine::GuestRam;
use pages::{PageRange, PageSet};

/// The most chunks: bounds what a peer's chunk size can make us allocate.
const MAX_CHUNKS: u64 = 1 << 20;

/// A digest for each chunk of `chunk_pages` that `only` names, `excluded` left out.
pub(super) fn digest(
    ram: &dyn GuestRam,
    excluded: &PageSet,
    chunk_pages: u64,
    only: &[u64],
) -> Result<Vec<u128>, String> {
    let mut included = PageSet::full(ram.layout());
    included.subtract(excluded);
    let chunks = chosen(&chunks(ram.layout().regions(), chunk_pages)?, only)?;
    let mut sums = vec![0; chunks.len()];
    // Alternate chunks, as what was touched lies together.
    let (mut even, mut odd) = (Vec::new(), Vec::new());
    for (i, pair) in chunks.iter().zip(sums.iter_mut()).enumerate() {
        if i % 2 == 0 { even.push(pair) } else { odd.push(pair) }
    }
    let of = |part: Vec<(&PageRange, &mut u128)>| {
        part.into_iter().try_for_each(|(chunk, sum)| {
            *sum = digest_chunk(ram, &included, *chunk)?;
            Ok(())
        })
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| of(odd));
        let mine = of(even);
        let others = other
            .join()
            .unwrap_or_else(|_| Err("the digesting thread panicked".to_owned()));
        mine.and(others)
    })?;
    Ok(sums)
}

fn chosen(chunks: &[PageRange], only: &[u64]) -> Result<Vec<PageRange>, String> {
    let one = |index: &u64| {
        let chunk = usize::try_from(*index).ok().and_then(|i| chunks.get(i));
        chunk
            .copied()
            .ok_or_else(|| format!("a digest of chunk {index} was asked for; there are {}", chunks.len()))
    };
    only.iter().map(one).collect()
}

fn chunks(regions: &[PageRange], chunk_pages: u64) -> Result<Vec<PageRange>, String> {
    if chunk_pages == 0 {
        return Err("digests over chunks of 0 pages were asked for".to_owned());
    }
    let count: u64 = regions.iter().map(|r| r.count().div_ceil(chunk_pages)).sum();
    if count > MAX_CHUNKS {
        return Err(format!(
            "digests over chunks of {chunk_pages} pages would be {count}, more than {MAX_CHUNKS}"
        ));
    }
    let mut chunks = Vec::new();
    for region in regions {
        let mut rest = *region;
        while !rest.is_empty() {
            let (chunk, left) = rest.split_at(chunk_pages);
            chunks.push(chunk);
            rest = left;
        }
    }
    Ok(chunks)
}

fn digest_chunk(ram: &dyn GuestRam, included: &PageSet, chunk: PageRange) -> Result<u128, String> {
    let mut sum = 0u128;
    let mut from = chunk.start();
    while let Some(run) = included.next_run(from) {
        let part = run.intersection(chunk);
        if part.is_empty() {
            break;
        }
        let digest = ram.digest(part).map_err(|e| format!("digesting pages {part}: {e}"))?;
        sum = sum.wrapping_add(digest);
        from = part.end();
        if from >= chunk.end() {
            break;
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pages::Pfn;

    #[test]
    fn chunks_end_where_regions_do() {
        let r = |start, count| PageRange::new(Pfn(start), count).unwrap();
        assert_eq!(
            chunks(&[r(0, 5), r(9, 2)], 2).unwrap(),
            [r(0, 2), r(2, 2), r(4, 1), r(9, 2)]
        );
        let all = chunks(&[r(0, 5), r(9, 2)], 2).unwrap();
        assert_eq!(chosen(&all, &[3, 1]).unwrap(), [r(9, 2), r(2, 2)]);
        assert!(chosen(&all, &[4]).unwrap_err().contains("there are 4"));
        assert!(chunks(&[r(0, 5)], 0).is_err());
        assert!(chunks(&[r(0, 1 << 30)], 1).unwrap_err().contains("more than"));
    }
}
