//! The commands, as processes, over a link that fails: every harm at the end of every phase of a migration.
//!
//! Whatever fails, one copy of the guest runs, or, where the source cannot know, none until somebody has looked: never two.
//! A test is a harm; it prints a row a cell. Some phases are tried here, all of them with `PAGEFERRY_MATRIX=all`, as
//! `scripts/matrix` does, which prints the table.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cell;
mod cuts;
mod direct;
mod faults;
mod host;
mod links;
mod phases;
mod proxy;
#[path = "../support/mod.rs"]
mod support;

use cell::{Cell, NO_WINDOW, Row};
use faults::{Blow, Harm, Side};
use phases::Phase;
use proxy::Way;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

/// Time enough to reach a peer again on a machine that is busy.
const WINDOW: &str = "8s";
/// Cells at a time, of one test: most of a cell is waiting.
const AT_ONCE: usize = 2;

/// Tries `harm` at the end of `phases`, or of all, with a guest that a host serves.
fn matrix(harm: Harm, phases: &[Phase]) {
    cells(harm, phases, &Phase::ALL, (harm.name(), NO_WINDOW), |cell| {
        cell.run().row(harm)
    });
}

/// The same with a window in which the migration can be taken up again.
fn resumed(harm: Harm, phases: &[Phase]) {
    let every = [
        Accept,
        FirstPages,
        Hints,
        RoundEnd0,
        RoundReceived0,
        LaterRound,
        LastRoundEnd,
        Section,
        StateEnd,
        Ready,
    ];
    cells(harm, phases, &every, (harm.name(), WINDOW), |cell| cell.run().row(harm));
}

/// The same with a guest that the source's command has started itself.
fn directly(harm: Harm, phases: &[Phase]) {
    let all = &Phase::ALL[2..];
    let name = format!("{}, no host", harm.name());
    cells(harm, phases, all, (&name, NO_WINDOW), Cell::run_directly);
}

fn cells(
    harm: Harm,
    phases: &[Phase],
    every: &[Phase],
    (name, window): (&str, &'static str),
    run: impl Fn(Cell) -> Row + Sync,
) {
    let all = std::env::var("PAGEFERRY_MATRIX").is_ok_and(|which| which == "all");
    let phases = if all { every } else { phases };
    let sensible = phases.iter().filter(|phase| harm.makes_sense_at(**phase));
    let left: Mutex<Vec<Phase>> = Mutex::new(sensible.rev().copied().collect());
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some(phase) = left.lock().unwrap().pop() else {
                        return;
                    };
                    let found = catch_unwind(AssertUnwindSafe(|| run(Cell { phase, harm, window })));
                    let row = match found {
                        Ok(Row(found)) => found.join(" | "),
                        Err(_) => {
                            failed.lock().unwrap().push(phase);
                            "FAILED".to_owned()
                        }
                    };
                    println!("cell: {name} | {phase:?} | {window} | {row}");
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{name} at the end of {failed:?}: see above");
}

use Phase::*;

#[test]
fn the_source_is_killed() {
    matrix(
        Harm::Process(Blow::Killed(Side::Source)),
        &[FirstPages, LastRoundEnd, Ready, CommitHeld, Commit],
    );
    resumed(Harm::Process(Blow::Killed(Side::Source)), &[LaterRound]);
}

#[test]
fn the_receiver_is_killed() {
    matrix(
        Harm::Process(Blow::Killed(Side::Receiver)),
        &[Accept, LaterRound, Ready, CommitHeld, Commit],
    );
    resumed(Harm::Process(Blow::Killed(Side::Receiver)), &[LaterRound]);
}

#[test]
fn the_source_is_stopped_for_longer_than_the_time_out() {
    matrix(
        Harm::Process(Blow::Stopped(Side::Source)),
        &[Hints, StateEnd, Ready, CommitHeld, Commit],
    );
    resumed(Harm::Process(Blow::Stopped(Side::Source)), &[Hints, LastRoundEnd]);
}

#[test]
fn the_receiver_is_stopped_for_longer_than_the_time_out() {
    matrix(
        Harm::Process(Blow::Stopped(Side::Receiver)),
        &[Hello, RoundReceived0, Ready, CommitHeld, Commit],
    );
    resumed(Harm::Process(Blow::Stopped(Side::Receiver)), &[LaterRound, Section]);
}

#[test]
fn the_link_is_cut() {
    matrix(
        Harm::Cut,
        &[Connected, FirstPages, LaterRound, Ready, CommitHeld, Commit],
    );
    resumed(
        Harm::Cut,
        &[Accept, FirstPages, RoundEnd0, LaterRound, LastRoundEnd, Ready],
    );
}

#[test]
fn the_link_is_reset() {
    matrix(Harm::Reset, &[Hello, RoundEnd0, Section, Commit, Running]);
    resumed(Harm::Reset, &[FirstPages, RoundReceived0, StateEnd]);
}

#[test]
fn the_way_to_the_receiver_is_closed() {
    matrix(Harm::HalfClosed(Way::Up), &[FirstPages, StateEnd, CommitHeld, Commit]);
    resumed(Harm::HalfClosed(Way::Up), &[Hints, LaterRound]);
}

#[test]
fn the_way_to_the_source_is_closed() {
    matrix(Harm::HalfClosed(Way::Down), &[Accept, RoundEnd0, CommitHeld, Commit]);
    resumed(Harm::HalfClosed(Way::Down), &[FirstPages, RoundEnd0]);
}

#[test]
fn nothing_crosses_any_more() {
    matrix(
        Harm::Blackhole,
        &[Connected, FirstPages, LastRoundEnd, CommitHeld, Commit],
    );
    resumed(Harm::Blackhole, &[FirstPages, RoundReceived0, LastRoundEnd]);
}

#[test]
fn the_link_crawls() {
    matrix(Harm::Trickle, &[Connected, FirstPages, Section, Commit]);
}

#[test]
fn a_frame_to_the_receiver_is_damaged() {
    let harm = |at_length| Harm::Frame {
        way: Way::Up,
        at_length,
    };
    matrix(harm(false), &[Connected, RoundReceived0, LastRoundEnd, Ready]);
    matrix(harm(true), &[Ready]);
}

#[test]
fn a_frame_to_the_source_is_damaged() {
    let harm = |at_length| Harm::Frame {
        way: Way::Down,
        at_length,
    };
    matrix(harm(false), &[Hello, RoundEnd0, StateEnd, Commit]);
    matrix(harm(true), &[Commit]);
}

#[test]
fn a_batch_header_is_damaged() {
    matrix(Harm::Batch, &[Accept, FirstPages, RoundReceived0]);
}

#[test]
fn a_source_with_a_guest_of_its_own() {
    directly(Harm::Process(Blow::Killed(Side::Source)), &[LaterRound, Commit]);
    directly(Harm::Process(Blow::Killed(Side::Receiver)), &[StateEnd, CommitHeld]);
    directly(Harm::Process(Blow::Stopped(Side::Source)), &[RoundEnd0]);
    directly(Harm::Cut, &[FirstPages, Commit]);
}

/// A cell of another kind: over a link between two namespaces, if there can be one.
fn over(kind: links::Kind, harm: &str, window: &str, cross: impl FnOnce(links::Ends<'_>) -> String) {
    match links::Link::make(kind) {
        Ok(link) => {
            let row = cross(links::Ends::new(&link, window));
            println!("cell: {harm} | - | {window} | {row}");
        }
        Err(why) => println!("SKIPPED: {harm}: {why}"),
    }
}

#[test]
fn a_link_of_100_mbit_per_s() {
    over(links::Kind::Slow, "100 Mbit/s", "0s", |ends| ends.cross());
}

#[test]
fn a_link_with_delay_that_loses_packets() {
    over(links::Kind::Lossy, "40 ms, 1 of 200 lost", "0s", |ends| ends.cross());
}

#[test]
fn a_link_that_is_down_for_3_s() {
    let gap = std::time::Duration::from_secs(3);
    over(links::Kind::Slow, "down for 3 s", "0s", |ends| {
        ends.cross_with_a_gap(gap, "0s")
    });
}

#[test]
fn a_link_that_is_down_for_3_s_and_taken_up_again() {
    let gap = std::time::Duration::from_secs(3);
    over(links::Kind::Slow, "down for 3 s", WINDOW, |ends| {
        ends.cross_with_a_gap(gap, WINDOW)
    });
}

/// A guest of 256 MiB, or of so many as `PAGEFERRY_CUTS_BYTES` says.
#[test]
fn a_link_that_is_cut_five_times() {
    let memory_bytes = std::env::var("PAGEFERRY_CUTS_BYTES").map_or(256 << 20, |bytes| bytes.parse().unwrap());
    let row = cuts::cut_five_times(memory_bytes, WINDOW);
    println!(
        "cell: cut five times, {} MiB | - | {WINDOW} | {row}",
        memory_bytes >> 20
    );
}
