//! The tests are tested: each planted fault must be caught by the laws that `invariants.rs` holds every run to.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

use engine::Ending;
use std::time::Duration;

use faults::{Fault, Mishaps, Pair, Rng, Setup};

/// Runs seeds with the fault planted until one breaks a law; which law.
fn caught(fault: Fault, mishaps: impl Fn(&mut Rng) -> Mishaps) -> String {
    for seed in 0..1000 {
        let mut setup = Setup::random(seed);
        setup.fault = Some(fault);
        setup.source.timeout = Duration::ZERO;
        if fault == Fault::AcceptLateHint {
            // Answers that are late, and a guest that uses what it called free.
            setup.source.hint_timeout = Duration::from_micros(400);
            setup.source.downtime_limit = Duration::from_secs(1);
            (setup.guest.writes, setup.writes_weight) = (400, 3);
        }
        let mishaps = mishaps(&mut Rng::new(seed));
        let clean = format!("{mishaps:?}") == format!("{:?}", Mishaps::default());
        let mut pair = Pair::new(setup);
        pair.mishaps = mishaps;
        pair.run(60_000);
        if let Err(broken) = pair.verdict() {
            return broken;
        }
        if clean && pair.ends().0 != Some(Ending::Completed) {
            return format!("did not complete: {}", pair.source_error());
        }
    }
    panic!("{fault:?} was not caught in 1000 runs");
}

fn none(_: &mut Rng) -> Mishaps {
    Mishaps::default()
}

fn message_lost(rng: &mut Rng) -> Mishaps {
    Mishaps {
        message: Some(4 + rng.below(25) as usize),
        ..Mishaps::default()
    }
}

#[test]
fn planted_accept_late_hint() {
    let broken = caught(Fault::AcceptLateHint, none);
    assert!(broken.contains("in use"), "{broken}");
}

#[test]
fn planted_forget_give_back() {
    let broken = caught(Fault::ForgetGiveBack, message_lost);
    assert!(broken.contains("not given back"), "{broken}");
}

#[test]
fn planted_ask_before_tracking() {
    let broken = caught(Fault::AskBeforeTracking, none);
    assert!(broken.contains("before tracking"), "{broken}");
}

#[test]
fn planted_skip_barrier() {
    let broken = caught(Fault::SkipBarrier, none);
    assert!(broken.contains("was received"), "{broken}");
}

#[test]
fn planted_forget_end_hints() {
    let broken = caught(Fault::ForgetEndHints, none);
    assert!(broken.contains("while a session is open"), "{broken}");
}

#[test]
fn planted_forget_harvest() {
    let broken = caught(Fault::ForgetHarvest, none);
    assert!(
        broken.contains("in use") || broken.contains("verification failed"),
        "{broken}"
    );
}

#[test]
fn planted_forget_recheck() {
    let broken = caught(Fault::ForgetRecheck, none);
    assert!(
        broken.contains("in use") || broken.contains("counted as ballooned"),
        "{broken}"
    );
}

#[test]
fn planted_resume_after_commit() {
    let broken = caught(Fault::ResumeAfterCommit, message_lost);
    assert!(
        broken.contains("both copies run") || broken.contains("resumed after Commit"),
        "{broken}"
    );
}

#[test]
fn planted_resume_before_commit() {
    let cancel = |rng: &mut Rng| Mishaps {
        cancel_source: Some(rng.below(900) as usize),
        ..Mishaps::default()
    };
    let broken = caught(Fault::ResumeBeforeCommit, cancel);
    assert!(broken.contains("run"), "{broken}");
}

#[test]
fn planted_answer_before_discard() {
    let resume_fails = |rng: &mut Rng| Mishaps {
        destination_action: Some(1 + rng.below(4) as usize),
        ..Mishaps::default()
    };
    let broken = caught(Fault::AnswerBeforeDiscard, resume_fails);
    assert!(broken.contains("before the destination's copy was gone"), "{broken}");
}

#[test]
fn planted_forget_stop_tracking() {
    let broken = caught(Fault::ForgetStopTracking, message_lost);
    assert!(broken.contains("tracking is left on"), "{broken}");
}
