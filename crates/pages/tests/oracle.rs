//! Every operation of a page set, held against a `BTreeSet` of frame numbers.
#![allow(clippy::unwrap_used)]
use pages::{Layout, PageRange, PageSet, Pfn};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Layouts of one to four regions, of odd sizes, some touching, some with holes between; half of them with regions of
/// several blocks of 4096 pages.
fn layouts() -> impl Strategy<Value = Arc<Layout>> {
    let size = prop_oneof![1u64..200, 4000u64..4200, 8191u64..8194, 1u64..13_000];
    prop::collection::vec((0u64..200, size), 1..5).prop_map(|parts| {
        let mut at = 0;
        let regions = parts.into_iter().map(|(gap, count)| {
            let region = PageRange::new(Pfn(at + gap), count).unwrap();
            at = region.end().0;
            region
        });
        Arc::new(Layout::new(regions.collect()).unwrap())
    })
}

fn ranges() -> impl Strategy<Value = Vec<PageRange>> {
    let range = prop_oneof![
        (0u64..1000, 0u64..300),
        (0u64..30_000, 0u64..9000),
        (0u64..30_000, 0u64..300)
    ];
    prop::collection::vec(range, 0..12)
        .prop_map(|v| v.into_iter().map(|(s, c)| PageRange::new(Pfn(s), c).unwrap()).collect())
}

/// Bitmaps: of any bytes, and long ones that are mostly all ones or all zero.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let long = prop::collection::vec(
        prop_oneof![Just((0xff, 600)), Just((0, 600)), (any::<u8>(), 1usize..20)],
        0..6,
    );
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..80),
        long.prop_map(|parts| parts.into_iter().flat_map(|(byte, count)| vec![byte; count]).collect()),
    ]
}

fn oracle_of(set: &PageSet) -> BTreeSet<u64> {
    (0..60_000).filter(|p| set.contains(Pfn(*p))).collect()
}

fn build(layout: &Arc<Layout>, ranges: &[PageRange]) -> (PageSet, BTreeSet<u64>) {
    let (mut set, mut oracle) = (PageSet::empty(layout), BTreeSet::new());
    for range in ranges {
        let before = oracle.len();
        oracle.extend((range.start().0..range.end().0).filter(|p| layout.contains(Pfn(*p))));
        assert_eq!(set.insert_range(*range), (oracle.len() - before) as u64);
    }
    (set, oracle)
}

proptest! {
    #[test]
    fn ranges_count_and_runs(layout in layouts(), add in ranges(), cut in ranges()) {
        let (mut set, mut oracle) = build(&layout, &add);
        for range in cut {
            prop_assert_eq!(set.count_range(range), oracle.iter().filter(|p| range.contains(Pfn(**p))).count() as u64);
            let before = oracle.len();
            oracle.retain(|p| !range.contains(Pfn(*p)));
            prop_assert_eq!(set.remove_range(range), (before - oracle.len()) as u64);
        }
        prop_assert_eq!(oracle_of(&set), oracle.clone());
        prop_assert_eq!(set.count(), oracle.len() as u64);
        prop_assert_eq!(set.is_empty(), oracle.is_empty());
        let from_runs: Vec<u64> = set.runs().flat_map(|r| r.start().0..r.end().0).collect();
        prop_assert_eq!(from_runs, oracle.iter().copied().collect::<Vec<_>>());
        // A run is as long as it can be within its region, and lies in one region.
        for run in set.runs() {
            prop_assert!(layout.region_of_range(run).is_some());
            let region = layout.regions()[layout.region_of(run.start()).unwrap()];
            prop_assert!(run.start() == region.start() || !oracle.contains(&(run.start().0 - 1)));
            prop_assert!(run.end() == region.end() || !oracle.contains(&run.end().0));
        }
    }

    #[test]
    fn algebra(layout in layouts(), a in ranges(), b in ranges()) {
        let ((a, oa), (b, ob)) = (build(&layout, &a), build(&layout, &b));
        let mut union = a.clone();
        prop_assert_eq!(union.union_with(&b), ob.difference(&oa).count() as u64);
        prop_assert_eq!(oracle_of(&union), oa.union(&ob).copied().collect());
        let mut difference = a.clone();
        prop_assert_eq!(difference.subtract(&b), oa.intersection(&ob).count() as u64);
        prop_assert_eq!(oracle_of(&difference), oa.difference(&ob).copied().collect());
        let mut both = a.clone();
        prop_assert_eq!(both.intersect_with(&b), oa.difference(&ob).count() as u64);
        prop_assert_eq!(oracle_of(&both), oa.intersection(&ob).copied().collect());
        prop_assert_eq!(a.intersection_count(&b), oa.intersection(&ob).count() as u64);
        prop_assert_eq!(a.is_subset(&b), oa.is_subset(&ob));
        prop_assert_eq!(a == b, oa == ob);
    }

    #[test]
    fn next_run_and_take_run(layout in layouts(), add in ranges(), from in 0u64..40_000, most in 1u64..6000) {
        let (mut set, mut oracle) = build(&layout, &add);
        let run = set.next_run(Pfn(from));
        prop_assert_eq!(run.map(|r| r.start().0), oracle.range(from..).next().copied());
        if let Some(taken) = set.take_run(Pfn(from), most) {
            prop_assert!(taken.count() <= most);
            prop_assert_eq!(taken.start(), run.unwrap().start());
            oracle.retain(|p| !taken.contains(Pfn(*p)));
        }
        prop_assert_eq!(oracle_of(&set), oracle);
    }

    #[test]
    fn bitmaps_in_ram_order(layout in layouts(), add in ranges(), junk in any::<u8>()) {
        let (set, _) = build(&layout, &add);
        let mut bitmap = set.to_bitmap();
        prop_assert_eq!(bitmap.iter().map(|b| u64::from(b.count_ones())).sum::<u64>(), set.count());
        // Case 28: bits past the last page are ignored.
        let odd = layout.total_pages() % 8;
        if odd != 0 {
            *bitmap.last_mut().unwrap() |= junk << odd;
        }
        prop_assert_eq!(PageSet::from_bitmap(&layout, &bitmap).unwrap(), set);
    }

    #[test]
    fn bitmaps_by_frame_number(layout in layouts(), start in 0u64..9000, bytes in bytes()) {
        let mut set = PageSet::empty(&layout);
        let new = set.insert_bitmap(Pfn(start), &bytes);
        let oracle: BTreeSet<u64> = (0..bytes.len() as u64 * 8)
            .filter(|i| bytes[(i / 8) as usize] >> (i % 8) & 1 == 1)
            .map(|i| start + i)
            .filter(|p| layout.contains(Pfn(*p)))
            .collect();
        prop_assert_eq!(new, oracle.len() as u64);
        prop_assert_eq!(oracle_of(&set), oracle);
    }

    #[test]
    fn single_pages(layout in layouts(), ops in prop::collection::vec((any::<bool>(), 0u64..9000), 0..60)) {
        let (mut set, mut oracle) = (PageSet::empty(&layout), BTreeSet::new());
        for (put, pfn) in ops {
            if put {
                prop_assert_eq!(set.insert(Pfn(pfn)), layout.contains(Pfn(pfn)) && oracle.insert(pfn));
            } else {
                prop_assert_eq!(set.remove(Pfn(pfn)), oracle.remove(&pfn));
            }
        }
        prop_assert_eq!(oracle_of(&set), oracle);
    }
}

#[test]
fn case_28_a_bitmap_of_the_wrong_length_is_an_error() {
    let layout = Arc::new(Layout::flat(67).unwrap());
    for bytes in [0, 8, 10] {
        let error = PageSet::from_bitmap(&layout, &vec![0; bytes]).unwrap_err();
        assert_eq!((error.expected, error.got), (9, bytes as u64));
    }
    assert!(PageSet::from_bitmap(&layout, &[0xff; 9]).unwrap() == PageSet::full(&layout));
}

#[test]
fn case_17_only_the_last_page_of_an_odd_layout() {
    let layout = Arc::new(Layout::flat(64 * 3 + 3).unwrap());
    let mut set = PageSet::empty(&layout);
    assert!(set.insert(Pfn(194)) && !set.insert(Pfn(195)));
    assert_eq!(set.runs().collect::<Vec<_>>(), [PageRange::new(Pfn(194), 1).unwrap()]);
}
