//! Faults that others have met, by the number of their report, as runs of both sides.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

use engine::{Ask, Ending, OnTimeout, Phase, SkipSet, Step, Tuning};
use faults::{Mishaps, Pair, Setup};
use pages::{Layout, PageRange, Pfn};
use std::sync::Arc;
use std::time::Duration;

const MOST_STEPS: usize = 60_000;

fn finish(pair: &mut Pair) {
    pair.run(MOST_STEPS);
    if let Err(broken) = pair.verdict() {
        panic!("{broken}");
    }
}

/// Steps until `done`.
fn until(pair: &mut Pair, done: impl Fn(&Pair) -> bool) {
    pair.drive();
    while !done(pair) {
        assert!(
            pair.steps < MOST_STEPS && !pair.over(),
            "it never came to that; ends: {:?}",
            pair.ends()
        );
        pair.step();
    }
}

/// A guest that does nothing by itself.
fn quiet(seed: u64, layout: Layout) -> Setup {
    let mut setup = Setup::plain(seed, 1);
    setup.guest.layout = Arc::new(layout);
    setup.guest.writes = 0;
    setup
}

#[test]
fn case_1_first_regions_last_page_clean_and_the_seconds_dirty() {
    for seed in 0..50 {
        let regions = [
            PageRange::between(Pfn(0), Pfn(65)),
            PageRange::between(Pfn(65), Pfn(131)),
        ];
        let mut pair = Pair::new(quiet(seed, Layout::new(regions.to_vec()).unwrap()));
        until(&mut pair, |p| p.count(Step::EndHints) > 0);
        for page in 65..131 {
            pair.guest.write(page);
        }
        finish(&mut pair);
        assert_eq!(pair.ends().0, Some(Ending::Completed));
        assert_eq!(pair.guest.ram[65..], pair.copy.ram[65..]);
    }
}

#[test]
fn case_5_the_receiver_rejects_state_after_the_stop_and_a_second_migration_works() {
    for seed in 0..50 {
        let setup = Setup::plain(seed, 130);
        let restore = { Pair::new(setup.clone()).run(MOST_STEPS).destination_actions } - 2;
        let mut pair = Pair::new(setup.clone());
        pair.mishaps = Mishaps {
            destination_action: Some(restore),
            ..Mishaps::default()
        };
        finish(&mut pair);
        assert_eq!(pair.ends(), (Some(Ending::Failed), Some(Ending::Failed)));
        let error = pair.source_error();
        assert!(
            error.contains("restoring the machine's state failed: the host said no"),
            "{error}"
        );
        assert!(pair.guest.running && !pair.guest.tracking && pair.guest.whole_at_stop == Some(true));
        assert_eq!(pair.count(Step::Resume), 1);

        let mut again = Pair::new(setup);
        again.guest = pair.guest.clone();
        again.guest.new_sink();
        finish(&mut again);
        assert_eq!(again.ends().0, Some(Ending::Completed));
    }
}

#[test]
fn case_6_a_paused_guest_arrives_paused_or_stays_paused() {
    let mut setup = Setup::plain(6, 90);
    setup.guest.running = false;
    let mut pair = Pair::new(setup.clone());
    finish(&mut pair);
    assert_eq!(pair.ends(), (Some(Ending::Completed), Some(Ending::Completed)));
    assert!(!pair.copy.running && pair.copy.restored && !pair.guest.running);
    assert!(pair.count(Step::Harvest) >= 1, "its log is read all the same");

    for message in 0..pair.messages {
        let mut pair = Pair::new(setup.clone());
        pair.mishaps = Mishaps {
            message: Some(message),
            ..Mishaps::default()
        };
        finish(&mut pair);
        assert!(!pair.guest.running && pair.count(Step::Resume) == 0);
    }
}

#[test]
fn case_11_the_sender_prints_the_receivers_reasons() {
    let mut setup = Setup::plain(11, 64);
    setup.refusals = vec![
        "vCPUs: the source has 4, the destination 2".to_owned(),
        "no room\u{7}".to_owned(),
    ];
    let mut pair = Pair::new(setup);
    finish(&mut pair);
    assert_eq!(pair.ends(), (Some(Ending::Refused), Some(Ending::Refused)));
    let expected = "the receiver refused: vCPUs: the source has 4, the destination 2; no room ";
    assert_eq!(pair.source_error(), expected);
    let here = "vCPUs: the source has 4, the destination 2; no room ";
    assert_eq!(pair.destination_error(), here, "that it refused is its result");
    assert!(pair.done.is_empty(), "the guest was not touched: {:?}", pair.done);
}

/// A guest that writes all the time, all over the place.
fn restless(seed: u64) -> Setup {
    let mut setup = Setup::plain(seed, 300);
    setup.guest.writes = u64::MAX;
    setup.writes_weight = 12;
    setup.source.downtime_limit = Duration::from_micros(100);
    setup.source.verify = false;
    setup
}

#[test]
fn case_13_a_fast_writer_is_never_paused_while_the_limit_cannot_be_kept() {
    let mut pair = Pair::new(restless(13));
    pair.run(30_000);
    let progress = pair.source.progress();
    assert!(progress.round > 10 && progress.phase == Phase::Precopy, "{progress:?}");
    assert_eq!(pair.count(Step::Pause), 0);
    assert!(
        progress.expected_downtime.unwrap() > Duration::from_micros(100),
        "{progress:?}"
    );
}

#[test]
fn case_13_on_time_out_it_gives_up_and_the_guest_runs_on() {
    let mut setup = restless(14);
    setup.source.timeout = Duration::from_millis(100);
    let mut pair = Pair::new(setup);
    finish(&mut pair);
    assert_eq!(pair.ends(), (Some(Ending::TimedOut), Some(Ending::TimedOut)));
    assert!(pair.guest.running && pair.count(Step::Pause) == 0);
    assert!(pair.source_error().contains("100 ms"), "{}", pair.source_error());
    assert!(
        pair.destination_error().contains("time-out"),
        "{}",
        pair.destination_error()
    );
}

#[test]
fn case_13_on_time_out_it_stops_the_guest_and_finishes() {
    for seed in 0..30 {
        let mut setup = restless(seed);
        setup.source.timeout = Duration::from_millis(seed * 3);
        setup.source.on_timeout = OnTimeout::Stop;
        setup.source.timeout += Duration::from_micros(1);
        let mut pair = Pair::new(setup.clone());
        finish(&mut pair);
        assert_eq!(
            pair.ends().0,
            Some(Ending::Completed),
            "seed {seed}: {}",
            pair.source_error()
        );
        let report = &pair.source_end.as_ref().unwrap().report;
        assert!(
            report.total_ms - report.downtime_ms >= setup.source.timeout.as_secs_f64() * 1e3 - 0.1,
            "{report:?}"
        );
    }
}

/// The operator lets a guest that is too fast go, or keeps one that would have fitted from being paused for a link that he has
/// just made slower.
#[test]
fn settings_that_change_while_it_runs_decide_when_to_pause() {
    let mut pair = Pair::new(restless(13));
    pair.run(30_000);
    assert_eq!(pair.count(Step::Pause), 0);
    let patient = Tuning {
        downtime_limit: Some(Duration::from_secs(10)),
        ..Tuning::default()
    };
    pair.source.handle(engine::SourceEvent::Tuned(patient), pair.now);
    finish(&mut pair);
    assert_eq!(pair.ends(), (Some(Ending::Completed), Some(Ending::Completed)));

    let mut setup = restless(13);
    setup.source.downtime_limit = Duration::from_secs(10);
    let mut pair = Pair::new(setup);
    let crawling = Tuning {
        max_bandwidth: Some(1),
        ..Tuning::default()
    };
    pair.source.handle(engine::SourceEvent::Tuned(crawling), pair.now);
    pair.run(30_000);
    assert_eq!(pair.count(Step::Pause), 0);
    let free = Tuning {
        max_bandwidth: Some(0),
        ..Tuning::default()
    };
    pair.source.handle(engine::SourceEvent::Tuned(free), pair.now);
    finish(&mut pair);
    assert_eq!(pair.ends(), (Some(Ending::Completed), Some(Ending::Completed)));
}

#[test]
fn case_14_cancel_right_after_a_round_boundary_frees_the_receiver_at_once() {
    for round in 1..4 {
        let mut pair = Pair::new(restless(14));
        until(&mut pair, |p| p.source.progress().round == round);
        let asked = pair.now;
        pair.source.handle(engine::SourceEvent::Cancel, pair.now);
        finish(&mut pair);
        assert_eq!(pair.ends(), (Some(Ending::Cancelled), Some(Ending::Cancelled)));
        assert!(
            pair.now - asked < Duration::from_secs(1),
            "nobody waited for a time-out"
        );
        assert_eq!(pair.destination_error(), "the source gave up: cancelled");
    }
}

#[test]
fn case_17_odd_page_counts_and_only_the_last_page_dirty() {
    for pages in [1, 2, 63, 64, 65, 127, 129, 261] {
        for streams in [1, 3] {
            let mut setup = quiet(pages, Layout::flat(pages).unwrap());
            setup.source.streams = streams;
            let mut pair = Pair::new(setup);
            until(&mut pair, |p| p.count(Step::Harvest) > 0);
            pair.guest.write(pages as usize - 1);
            let first_harvest = pair.source.progress().round;
            finish(&mut pair);
            assert_eq!(pair.ends().0, Some(Ending::Completed));
            assert_eq!(pair.copy.ram[pages as usize - 1], pair.guest.ram[pages as usize - 1]);
            assert!(pair.source_end.as_ref().unwrap().report.rounds.len() as u32 > first_harvest);
        }
    }
}

#[test]
fn case_30_the_session_is_ended_on_every_way_out() {
    let mut setup = Setup::plain(30, 400);
    setup.guest.finishes = false;
    let begun = |p: &Pair| p.count(Step::BeginHints) == 1;
    // Time-out of the hints, then success.
    let mut pair = Pair::new(setup.clone());
    finish(&mut pair);
    let report = &pair.source_end.as_ref().unwrap().report;
    assert!(
        report.balloon.timed_out && report.balloon.why.contains("time-out of 200 ms"),
        "{:?}",
        report.balloon
    );
    assert_eq!(
        (pair.ends().0, pair.count(Step::EndHints)),
        (Some(Ending::Completed), 1)
    );
    // Cancel, loss of the connection, silence, failure of a stream.
    type Way = fn(&mut Pair);
    let ways: [Way; 4] = [
        |p| p.source.handle(engine::SourceEvent::Cancel, p.now),
        Pair::break_link,
        |p| p.mishaps.silence = Some(p.steps),
        |p| {
            p.source.handle(
                engine::SourceEvent::Failed {
                    step: Step::Send,
                    error: "reset".to_owned(),
                },
                p.now,
            )
        },
    ];
    for way in ways {
        let mut setup = setup.clone();
        setup.source.hint_timeout = Duration::from_secs(3600);
        let mut pair = Pair::new(setup);
        until(&mut pair, begun);
        way(&mut pair);
        finish(&mut pair);
        assert_eq!((pair.count(Step::EndHints), pair.guest.session), (1, None));
        assert!(pair.guest.running && !pair.guest.tracking);
    }
}

#[test]
fn case_32_hints_where_they_cannot_be_used_are_refused() {
    let mut setup = Setup::plain(32, 64);
    setup.source.skip = SkipSet {
        free: false,
        ..SkipSet::ALL
    };
    let mut pair = Pair::new(setup.clone());
    finish(&mut pair);
    assert_eq!(pair.ends().0, Some(Ending::Refused));
    assert!(pair.source_error().contains("--ask always"), "{}", pair.source_error());
    assert!(pair.done.is_empty());

    setup.source.ask = Ask::Auto;
    let mut pair = Pair::new(setup);
    finish(&mut pair);
    let balloon = &pair.source_end.as_ref().unwrap().report.balloon;
    assert!(!balloon.asked && balloon.why.contains("--skip"), "{balloon:?}");
}

#[test]
fn a_guest_that_allocated_what_it_handed_over_has_it_back_when_it_is_paused() {
    let mut setup = Setup::plain(33, 400);
    setup.guest.allocates = true;
    let mut pair = Pair::new(setup);
    until(&mut pair, |p| p.count(Step::EndHints) == 1);
    assert!(pair.guest.waits && pair.guest.running);
    until(&mut pair, |p| p.count(Step::EndHints) == 2);
    assert!(!pair.guest.waits && !pair.guest.running);
    finish(&mut pair);
    assert_eq!(pair.ends().0, Some(Ending::Completed));
}

#[test]
fn a_guest_that_zeroes_what_it_hands_over_is_asked_no_longer() {
    for (ask, early) in [(Ask::Auto, true), (Ask::Always, false)] {
        let mut setup = quiet(5, Layout::flat(64 << 10).unwrap());
        setup.guest.allocates = true;
        setup.guest.init_on_alloc = true;
        setup.guest.stats = false;
        setup.source.ask = ask;
        setup.source.streams = 4;
        let mut pair = Pair::new(setup);
        pair.run(MOST_STEPS * 10);
        pair.verdict().unwrap();
        let report = &pair.source_end.as_ref().unwrap().report;
        assert!(
            report.balloon.asked && report.balloon.why.contains("init_on_alloc"),
            "{:?}",
            report.balloon
        );
        assert_eq!(
            report.balloon.why.contains("ended early"),
            early,
            "{:?}",
            report.balloon
        );
    }
}

#[test]
fn case_34_poison_is_filled_costs_no_content_and_is_not_written_by_us_asking() {
    let mut setup = quiet(34, Layout::flat(2000).unwrap());
    setup.guest.poison = true;
    let mut pair = Pair::new(setup);
    finish(&mut pair);
    let pages = pair.source_end.as_ref().unwrap().report.pages;
    assert!(pages.filled > 100 && pages.hinted == 0, "{pages:?}");
    assert!(pair.copy.ram.contains(&faults::POISON));
}

#[test]
fn free_pages_stay_behind_and_the_account_is_whole() {
    let mut pair = Pair::new(quiet(4, Layout::flat(2000).unwrap()));
    let free = pair.guest.free.iter().filter(|f| **f).count() as u64;
    finish(&mut pair);
    let pages = pair.source_end.as_ref().unwrap().report.pages;
    // The pause itself makes the VMM write a page.
    assert_eq!(pages.hinted + pages.hinted_then_sent, free, "{pages:?}");
    assert_eq!(pages.sent + pages.zero + pages.hinted, 2000, "{pages:?}");
}

#[test]
fn without_asking_the_balloons_pages_and_holes_stay_behind() {
    let mut setup = quiet(4, Layout::flat(2000).unwrap());
    setup.source.ask = Ask::Never;
    let mut pair = Pair::new(setup);
    let ballooned = pair.guest.ballooned.as_ref().unwrap().count();
    finish(&mut pair);
    let pages = pair.source_end.as_ref().unwrap().report.pages;
    assert!(
        ballooned > 100 && ballooned - pages.ballooned <= 1,
        "{ballooned}, {pages:?}"
    );
    assert!(pages.hole > 100 && pages.hinted == 0, "{pages:?}");
}

#[test]
fn a_dry_run_touches_nothing() {
    let mut setup = Setup::plain(1, 64);
    setup.source.dry_run = true;
    let mut pair = Pair::new(setup);
    finish(&mut pair);
    assert_eq!(pair.ends(), (Some(Ending::Completed), Some(Ending::Completed)));
    assert!(pair.done.is_empty() && pair.copy.discarded);
    for report in [&pair.source_end, &pair.destination_end].map(|end| &end.as_ref().unwrap().report) {
        assert!(report.pages.adds_up() && report.pages.total == 0, "{:?}", report.pages);
        assert_eq!(report.ram_bytes, 64 << 12);
    }
}

/// Both sides digest at the same time; whoever is slower, the other one's wait is no downtime.
#[test]
fn a_slow_digest_on_either_side_is_verification_and_no_downtime_for_both() {
    let mut waited = 0;
    for (at_source, at_destination) in [(0, 0), (0, 1300), (1300, 0), (700, 1300), (1300, 700)] {
        for seed in 0..10 {
            let mut setup = Setup::plain(seed, 200);
            setup.source_digest = Duration::from_millis(at_source);
            setup.destination_digest = Duration::from_millis(at_destination);
            let mut pair = Pair::new(setup);
            finish(&mut pair);
            assert_eq!(pair.ends(), (Some(Ending::Completed), Some(Ending::Completed)));
            let reports = [&pair.source_end, &pair.destination_end].map(|end| &end.as_ref().unwrap().report);
            let slower = at_source.max(at_destination) as f64;
            let [source, destination] = reports.map(|r| r.downtime_ms);
            for report in reports {
                // What was digested ahead of the pause took no time of it, but for a piece that was under way.
                let most = at_source.max(2 * at_destination) as f64 + 5.0;
                assert!(
                    (0.0..most).contains(&report.verify_ms),
                    "{at_source}, {at_destination}: {report:?}"
                );
                assert!(report.downtime_ms < 20.0, "{at_source}, {at_destination}: {report:?}");
            }
            assert!((source - destination).abs() < 5.0, "{source} and {destination} ms");
            let [at_source_ms, ahead] = [at_source as f64, reports[0].verify_ahead_ms];
            assert!(
                (at_source_ms..at_source_ms + 5.0).contains(&ahead),
                "{ahead} ms ahead of the pause"
            );
            waited += u32::from(slower > 0.0 && reports[0].verify_ms > slower - 5.0);
        }
    }
    assert!(waited > 0, "no digest was waited for");
}

/// The balloon of a large guest has more to save than a control frame holds. The model refuses messages that no frame
/// takes, and state that is not what was saved.
#[test]
fn a_section_larger_than_a_control_frame_crosses_whole() {
    let mut setup = Setup::plain(8, 70);
    setup.more_state = vec![("balloon1", 3 << 20), ("empty", 0), ("clock", (1 << 20) + 1)];
    let mut pair = Pair::new(setup);
    finish(&mut pair);
    assert_eq!(pair.ends(), (Some(Ending::Completed), Some(Ending::Completed)));
    assert!(pair.copy.restored);
}

#[test]
fn two_sections_of_one_name_are_refused_and_the_guest_runs_on() {
    let mut setup = Setup::plain(8, 70);
    setup.more_state = vec![("serial", 10), ("clock", 5), ("serial", 10)];
    let mut pair = Pair::new(setup);
    finish(&mut pair);
    assert_eq!(pair.ends(), (Some(Ending::Failed), Some(Ending::Failed)));
    assert_eq!(
        pair.source_error(),
        "saving the machine's state failed: two of its sections are named \"serial\"; each vCPU and device needs a name \
         of its own"
    );
    assert!(pair.guest.running && !pair.guest.tracking);
}
