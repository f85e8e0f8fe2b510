//! The table of the decision to ask, row by row.

use super::*;
use machine::GuestMemoryStats;
use pages::{PageSet, Pfn};
use std::sync::Arc;

fn layout() -> Arc<Layout> {
    Arc::new(Layout::flat(8192 * MIB_PAGES).unwrap())
}

fn scanned(present_mib: u64, used_mib: Option<u64>, allocates: bool) -> Scanned {
    let layout = layout();
    let mut present = PageSet::empty(&layout);
    present.insert_range(PageRange::new(Pfn(0), present_mib * MIB_PAGES).unwrap());
    Scanned {
        present,
        ballooned: None,
        stats: used_mib.map(|used| GuestMemoryStats {
            free_pages: (8000 - used) * MIB_PAGES,
            total_pages: 8000 * MIB_PAGES,
        }),
        dialect: "standard",
        can_ask: Ok(()),
        allocates,
        poison: None,
        counts: machine::BalloonCounts::default(),
    }
}

fn auto(present_mib: u64, used_mib: Option<u64>, allocates: bool) -> Decision {
    decide(Ask::Auto, true, &scanned(present_mib, used_mib, allocates), &layout())
}

#[test]
fn auto_follows_the_table() {
    let rows = [
        // present, used, allocates -> asked
        (305, Some(298), false, false),
        (305, Some(298), true, false),
        (330, Some(298), false, true),
        (330, Some(298), true, false),
        (370, Some(298), true, true),
        (6144, Some(298), true, true),
        // 100 MiB of 1000 present: above 64 MiB, below an eighth.
        (1000, Some(900), true, false),
        (1000, Some(900), false, true),
        (200, Some(900), true, false),
        (64, None, false, true),
        (63, None, false, false),
        (4096, None, true, true),
        (4095, None, true, false),
    ];
    for (present, used, allocates, ask) in rows {
        let decision = auto(present, used, allocates);
        assert_eq!(decision.ask, ask, "{present} {used:?} {allocates}: {decision:?}");
        assert!(decision.why.contains(&format!("{present} MiB")), "{decision:?}");
    }
}

#[test]
fn the_reason_gives_the_numbers() {
    assert_eq!(
        auto(305, Some(298), true).why,
        "the guest uses 298 MiB and 305 MiB of its memory is present: nothing to gain"
    );
}

#[test]
fn case_32_what_cannot_be_used_is_not_asked_for() {
    let mut found = scanned(6144, Some(298), false);
    let decision = decide(Ask::Always, false, &found, &layout());
    assert!(!decision.ask && decision.why.contains("--skip"), "{decision:?}");
    found.can_ask = Err("the guest has no balloon".to_owned());
    for ask in [Ask::Always, Ask::Auto] {
        let decision = decide(ask, true, &found, &layout());
        assert!(
            !decision.ask && decision.why.contains("the guest has no balloon"),
            "{decision:?}"
        );
    }
}

#[test]
fn never_and_always_are_obeyed() {
    assert!(!decide(Ask::Never, true, &scanned(6144, None, false), &layout()).ask);
    assert!(decide(Ask::Always, true, &scanned(1, Some(1), true), &layout()).ask);
}

#[test]
fn statistics_beyond_belief_do_no_harm() {
    let mut found = scanned(305, Some(0), true);
    found.stats = Some(GuestMemoryStats {
        free_pages: u64::MAX,
        total_pages: 0,
    });
    assert!(decide(Ask::Auto, true, &found, &layout()).ask);
    found.stats = Some(GuestMemoryStats {
        free_pages: 0,
        total_pages: u64::MAX,
    });
    assert!(!decide(Ask::Auto, true, &found, &layout()).ask);
}

#[test]
fn pages_in_the_balloon_are_nothing_to_gain() {
    let mut found = scanned(370, Some(298), false);
    let mut ballooned = PageSet::empty(&layout());
    ballooned.insert_range(PageRange::new(Pfn(0), 70 * MIB_PAGES).unwrap());
    found.ballooned = Some(ballooned);
    assert!(!decide(Ask::Auto, true, &found, &layout()).ask);
}

fn peeked(count: u64, written: Option<u64>) -> Peeked {
    Peeked {
        range: PageRange::new(Pfn(0), count).unwrap(),
        written,
    }
}

#[test]
fn a_guest_that_zeroes_what_it_hands_over_is_found_out() {
    let mut watch = CostWatch::new(true);
    assert_eq!(
        watch.peek(PageRange::new(Pfn(8), 5000).unwrap()).unwrap().count(),
        PAGES_TO_JUDGE
    );
    let why = watch.peeked(&peeked(1024, Some(1020))).unwrap();
    assert!(why.contains("init_on_alloc"), "{why}");
    assert_eq!(watch.peeked(&peeked(1024, Some(1024))), None, "said once");
}

#[test]
fn small_answers_are_judged_after_two() {
    let mut watch = CostWatch::new(true);
    let range = PageRange::new(Pfn(0), 100).unwrap();
    assert!(watch.peek(range).is_some() && watch.peek(range).is_some() && watch.peek(range).is_none());
    assert_eq!(watch.peeked(&peeked(100, Some(100))), None);
    assert_eq!(
        watch.peeked(&peeked(150, Some(10))),
        None,
        "110 of 250 written: not most"
    );
    assert_eq!(watch.peek(range), None);
}

#[test]
fn a_guest_that_looks_and_a_tracker_that_cannot_tell_are_not_watched() {
    assert_eq!(CostWatch::new(false).peek(PageRange::new(Pfn(0), 9).unwrap()), None);
    let mut watch = CostWatch::new(true);
    assert_eq!(watch.peeked(&peeked(2048, None)), None);
    assert_eq!(watch.peek(PageRange::new(Pfn(0), 9).unwrap()), None);
}
