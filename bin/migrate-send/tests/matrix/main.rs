//! The commands, as processes, over a link that fails: every harm at the end of every phase of a migration.
//!
//! Whatever fails, one copy of the guest runs, or, where the source cannot know, none until somebody has looked: never two.
//! A test is a harm; it prints a row a cell. Some phases are tried here, all of them with `PAGEFERRY_MATRIX=all`, as
//! `scripts/matrix` does, which prints the table.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cell;
mod faults;
mod host;
mod phases;
mod proxy;
#[path = "../support/mod.rs"]
mod support;

use cell::Cell;
use faults::{Blow, Harm, Side};
use phases::Phase;
use proxy::Way;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

/// Cells at a time, of one test: most of a cell is waiting.
const AT_ONCE: usize = 2;

/// Tries `harm` at the end of `phases`, or of all.
fn matrix(harm: Harm, phases: &[Phase]) {
    let window = "0s";
    let all = std::env::var("PAGEFERRY_MATRIX").is_ok_and(|which| which == "all");
    let phases = if all { &Phase::ALL[..] } else { phases };
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
                    let found = catch_unwind(AssertUnwindSafe(|| Cell { phase, harm, window }.run()));
                    let row = match found {
                        Ok(found) => found.row(harm).join(" | "),
                        Err(_) => {
                            failed.lock().unwrap().push(phase);
                            "FAILED".to_owned()
                        }
                    };
                    println!("cell: {} | {phase:?} | {window} | {row}", harm.name());
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{} at the end of {failed:?}: see above", harm.name());
}

use Phase::*;

#[test]
fn the_source_is_killed() {
    matrix(
        Harm::Process(Blow::Killed(Side::Source)),
        &[FirstPages, LastRoundEnd, Ready, CommitHeld, Commit],
    );
}

#[test]
fn the_receiver_is_killed() {
    matrix(
        Harm::Process(Blow::Killed(Side::Receiver)),
        &[Accept, LaterRound, Ready, CommitHeld, Commit],
    );
}

#[test]
fn the_source_is_stopped_for_longer_than_the_time_out() {
    matrix(
        Harm::Process(Blow::Stopped(Side::Source)),
        &[Hints, StateEnd, Ready, CommitHeld, Commit],
    );
}

#[test]
fn the_receiver_is_stopped_for_longer_than_the_time_out() {
    matrix(
        Harm::Process(Blow::Stopped(Side::Receiver)),
        &[Hello, RoundReceived0, Ready, CommitHeld, Commit],
    );
}

#[test]
fn the_link_is_cut() {
    matrix(
        Harm::Cut,
        &[Connected, FirstPages, LaterRound, Ready, CommitHeld, Commit],
    );
}

#[test]
fn the_link_is_reset() {
    matrix(Harm::Reset, &[Hello, RoundEnd0, Section, Commit, Running]);
}

#[test]
fn the_way_to_the_receiver_is_closed() {
    matrix(Harm::HalfClosed(Way::Up), &[FirstPages, StateEnd, CommitHeld, Commit]);
}

#[test]
fn the_way_to_the_source_is_closed() {
    matrix(Harm::HalfClosed(Way::Down), &[Accept, RoundEnd0, CommitHeld, Commit]);
}

#[test]
fn nothing_crosses_any_more() {
    matrix(
        Harm::Blackhole,
        &[Connected, FirstPages, LastRoundEnd, CommitHeld, Commit],
    );
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
