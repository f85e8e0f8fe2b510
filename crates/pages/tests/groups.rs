//! Regions of several groups of 1 GiB, held against a plain array of a bool a page.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]
use pages::{Layout, PageRange, PageSet, Pfn};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

const GROUP: u64 = 1 << 18;
/// Frame numbers that layouts and ranges may reach.
const END: u64 = 4 * GROUP;

/// One to three regions: a little less or more than one or two groups, or small.
fn layouts() -> impl Strategy<Value = Arc<Layout>> {
    let count = prop_oneof![1u64..100, GROUP - 2..GROUP + 3, 2 * GROUP - 2..2 * GROUP + 70];
    prop::collection::vec((0u64..100, count), 1..4).prop_filter_map("too long", |parts| {
        let mut at = 0;
        let regions: Vec<PageRange> = parts
            .into_iter()
            .map(|(gap, count)| {
                let region = PageRange::new(Pfn(at + gap), count).unwrap();
                at = region.end().0;
                region
            })
            .collect();
        (at <= END).then(|| Arc::new(Layout::new(regions).unwrap()))
    })
}

/// Ranges that begin or end near borders of groups and blocks, short and long.
fn ranges() -> impl Strategy<Value = Vec<(bool, PageRange)>> {
    let near = |step: u64| (0..END / step, 0u64..140).prop_map(move |(i, off)| (i * step + off).saturating_sub(70));
    let start = prop_oneof![near(GROUP), near(4096)];
    let count = prop_oneof![0u64..200, 4000u64..9000, GROUP - 100..GROUP + 100, Just(2 * GROUP)];
    let range = (start, count).prop_map(|(start, count)| PageRange::between(Pfn(start), Pfn((start + count).min(END))));
    prop::collection::vec((any::<bool>(), range), 1..10)
}

/// A set and its array, after these ranges were put in (`true`) or taken out.
fn build(layout: &Arc<Layout>, ranges: &[(bool, PageRange)]) -> (PageSet, Vec<bool>) {
    let (mut set, mut oracle) = (PageSet::empty(layout), vec![false; END as usize]);
    for (put, range) in ranges {
        let mut changed = 0;
        for part in layout.clip(*range) {
            for page in &mut oracle[part.start().0 as usize..part.end().0 as usize] {
                changed += u64::from(*page != *put);
                *page = *put;
            }
        }
        let told = if *put {
            set.insert_range(*range)
        } else {
            set.remove_range(*range)
        };
        assert_eq!(told, changed);
    }
    (set, oracle)
}

fn array_of(set: &PageSet) -> Vec<bool> {
    let mut array = vec![false; END as usize];
    for run in set.runs() {
        array[run.start().0 as usize..run.end().0 as usize].fill(true);
    }
    array
}

fn count(array: &[bool]) -> u64 {
    array.iter().filter(|page| **page).count() as u64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn ranges_runs_and_bitmaps(layout in layouts(), ops in ranges(), asked in ranges()) {
        let (mut set, oracle) = build(&layout, &ops);
        prop_assert!(array_of(&set) == oracle);
        prop_assert_eq!(set.count(), count(&oracle));
        for (_, range) in asked {
            let here = &oracle[range.start().0 as usize..range.end().0 as usize];
            prop_assert_eq!(set.count_range(range), count(here));
            let first = oracle.iter().skip(range.start().0 as usize).position(|page| *page);
            prop_assert_eq!(set.next_run(range.start()).map(|run| run.start().0 - range.start().0), first.map(|i| i as u64));
            prop_assert_eq!(set.contains(range.start()), oracle.get(range.start().0 as usize) == Some(&true));
        }
        prop_assert!(PageSet::from_bitmap(&layout, &set.to_bitmap()).unwrap() == set);
        // However it came about, no page is no page, and all pages are all.
        let mut full = set.clone();
        set.remove_range(PageRange::between(Pfn(0), Pfn(END)));
        prop_assert!(set.is_empty() && set == PageSet::empty(&layout));
        full.insert_range(PageRange::between(Pfn(0), Pfn(END)));
        prop_assert!(full == PageSet::full(&layout));
    }

    #[test]
    fn algebra(layout in layouts(), a in ranges(), b in ranges()) {
        let ((a, oa), (b, ob)) = (build(&layout, &a), build(&layout, &b));
        let zip = |op: fn(bool, bool) -> bool| oa.iter().zip(&ob).map(|(a, b)| op(*a, *b)).collect::<Vec<_>>();
        let (mut union, mut difference, mut both) = (a.clone(), a.clone(), a.clone());
        prop_assert_eq!(union.union_with(&b), count(&zip(|a, b| !a & b)));
        prop_assert!(array_of(&union) == zip(|a, b| a | b));
        prop_assert_eq!(difference.subtract(&b), count(&zip(|a, b| a & b)));
        prop_assert!(array_of(&difference) == zip(|a, b| a & !b));
        prop_assert_eq!(both.intersect_with(&b), count(&zip(|a, b| a & !b)));
        prop_assert!(array_of(&both) == zip(|a, b| a & b));
        prop_assert_eq!(a.intersection_count(&b), both.count());
        let mut none = a.clone();
        none.subtract(&a);
        prop_assert!(none.is_empty() && none == PageSet::empty(&layout));
        // The same pages are the same set, whichever way they were come by.
        difference.union_with(&both);
        prop_assert!(difference == a);
    }
}

/// Frame numbers of a region of 70 groups and a part of one, and of a second that follows after a hole.
const FAR: [(u64, u64); 2] = [(5, 70 * GROUP + 4097), (71 * GROUP, GROUP + 1)];

/// Short ranges at the borders of any group of [`FAR`], where most of its groups have none.
fn far_ranges() -> impl Strategy<Value = Vec<PageRange>> {
    let range = (0u64..73, 0u64..20, 1u64..20)
        .prop_map(|(i, off, count)| PageRange::new(Pfn((i * GROUP + off).saturating_sub(5)), count).unwrap());
    prop::collection::vec(range, 0..12)
}

fn far(ranges: &[PageRange]) -> (PageSet, BTreeSet<u64>) {
    let regions = FAR.map(|(start, count)| PageRange::new(Pfn(start), count).unwrap());
    let layout = Arc::new(Layout::new(regions.to_vec()).unwrap());
    let mut set = PageSet::empty(&layout);
    set.extend(ranges.iter().copied());
    let pages = ranges.iter().flat_map(|r| r.start().0..r.end().0);
    (set, pages.filter(|p| layout.contains(Pfn(*p))).collect())
}

fn pages_of(set: &PageSet) -> BTreeSet<u64> {
    set.runs().flat_map(|run| run.start().0..run.end().0).collect()
}

proptest! {
    #[test]
    fn many_groups_against_a_set_of_numbers(a in far_ranges(), b in far_ranges()) {
        let ((a, oa), (b, ob)) = (far(&a), far(&b));
        prop_assert_eq!(pages_of(&a), oa.clone());
        let (mut union, mut difference) = (a.clone(), a.clone());
        prop_assert_eq!(union.union_with(&b), ob.difference(&oa).count() as u64);
        prop_assert_eq!(pages_of(&union), oa.union(&ob).copied().collect());
        prop_assert_eq!(difference.subtract(&b), oa.intersection(&ob).count() as u64);
        prop_assert_eq!(pages_of(&difference), oa.difference(&ob).copied().collect());
        // All but these, and all but those of what is left.
        let mut rest = PageSet::full(a.layout());
        prop_assert_eq!(rest.subtract(&a), oa.len() as u64);
        prop_assert_eq!(rest.count(), a.layout().total_pages() - oa.len() as u64);
        prop_assert_eq!(rest.intersection_count(&b), ob.difference(&oa).count() as u64);
        rest.union_with(&a);
        prop_assert!(rest == PageSet::full(a.layout()));
        // Taken run by run, to the end.
        let (mut set, mut taken, mut from) = (a, BTreeSet::new(), Pfn(0));
        while let Some(run) = set.take_run(from, 7) {
            taken.extend(run.start().0..run.end().0);
            from = run.end();
        }
        prop_assert_eq!(taken, oa);
        prop_assert!(set.is_empty());
    }
}
