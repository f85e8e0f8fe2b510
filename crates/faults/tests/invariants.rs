//! What must hold in every run: thousands of runs by seed, and a failure at every place where one can happen.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

use engine::{Ending, OnTimeout, Step};
use faults::{Mishaps, Pair, Rng, Setup};

const MOST_STEPS: usize = 60_000;

fn run(setup: Setup, mishaps: Mishaps) -> Pair {
    let mut pair = Pair::new(setup);
    pair.mishaps = mishaps;
    pair.run(MOST_STEPS);
    if let Err(broken) = pair.verdict() {
        panic!("{broken}\n  {:?}", pair.setup);
    }
    pair
}

/// Small guests with everything on, of different kinds: for failures at every single place.
fn small_setups() -> Vec<Setup> {
    let mut setups: Vec<Setup> = (0..4).map(|seed| Setup::plain(seed, 70 + seed * 31)).collect();
    for setup in &mut setups {
        setup.guest.writes = 60;
        setup.source.streams = 2;
        setup.source.downtime_limit = std::time::Duration::from_micros(300);
    }
    setups[1].guest.allocates = true;
    setups[1].guest.poison = true;
    setups[2].guest.running = false;
    setups[2].source.verify = false;
    setups[3].destination.memory_is_zero = false;
    setups[3].destination.stay_paused = true;
    setups
}

#[test]
fn every_run_without_a_mishap_completes_with_equal_ram() {
    for seed in 0..3000 {
        let pair = run(Setup::random(seed), Mishaps::default());
        let source = &pair.setup.source;
        if !source.timeout.is_zero()
            && source.on_timeout == OnTimeout::Cancel
            && pair.ends().0 == Some(Ending::TimedOut)
        {
            continue;
        }
        let both = (Some(Ending::Completed), Some(Ending::Completed));
        assert_eq!(
            pair.ends(),
            both,
            "seed {seed}: {}, {:?}",
            pair.source_error(),
            pair.setup
        );
    }
}

#[test]
fn random_mishaps_leave_one_guest() {
    for seed in 0..3000 {
        let mut rng = Rng::new(seed ^ 0x77);
        let mut draw = |n: u64, most: u64| rng.one_in(n).then(|| rng.below(most) as usize);
        let mishaps = Mishaps {
            source_action: draw(3, 20),
            destination_action: draw(5, 5),
            message: draw(3, 30),
            cancel_source: draw(5, 800),
            cancel_destination: draw(5, 800),
            silence: draw(6, 1000),
            ..Mishaps::default()
        };
        run(Setup::random(seed), mishaps);
    }
}

#[test]
fn a_failure_at_every_action_of_the_source_leaves_the_guest_as_it_was() {
    let mut steps = std::collections::HashSet::new();
    for setup in small_setups() {
        let actions = run(setup.clone(), Mishaps::default()).source_actions;
        for n in 0..actions {
            let pair = run(
                setup.clone(),
                Mishaps {
                    source_action: Some(n),
                    ..Mishaps::default()
                },
            );
            let step = pair.failed_steps[0];
            steps.insert(step);
            // Asking and peeking are not worth a migration; tracking goes off after the hand-over.
            let goes_on = matches!(step, Step::BeginHints | Step::Peek | Step::StopTracking);
            let expected = if goes_on { Ending::Completed } else { Ending::Failed };
            assert_eq!(
                pair.ends().0,
                Some(expected),
                "action {n}, {step:?}, {}",
                pair.source_error()
            );
        }
    }
    assert!(steps.len() >= 9, "{steps:?}");
}

#[test]
fn a_failure_at_every_action_of_the_undoing_is_told_and_the_rest_goes_on() {
    let mut steps = std::collections::HashSet::new();
    for setup in small_setups() {
        let messages = run(setup.clone(), Mishaps::default()).messages;
        let lost = (0..messages).map(|n| Mishaps {
            message: Some(n),
            ..Mishaps::default()
        });
        let cancelled = (1..60).map(|n| Mishaps {
            cancel_source: Some(n),
            ..Mishaps::default()
        });
        for lost in lost.chain(cancelled) {
            let actions = run(setup.clone(), lost.clone()).source_actions;
            for n in 0..actions {
                let pair = run(
                    setup.clone(),
                    Mishaps {
                        source_action: Some(n),
                        ..lost.clone()
                    },
                );
                let step = pair.failed_steps[0];
                let undoing = pair.source_error().contains("; then ");
                assert!(
                    undoing || !matches!(step, Step::GiveBack | Step::Resume),
                    "{}",
                    pair.source_error()
                );
                if undoing {
                    steps.insert(step);
                }
            }
        }
    }
    assert_eq!(
        steps.len(),
        4,
        "ending hints, giving back, tracking off, resuming: {steps:?}"
    );
}

#[test]
fn a_failure_at_every_action_of_the_destination_leaves_the_guest_at_the_source() {
    for setup in small_setups() {
        let actions = run(setup.clone(), Mishaps::default()).destination_actions;
        assert!(actions >= 2);
        for n in 0..actions {
            let pair = run(
                setup.clone(),
                Mishaps {
                    destination_action: Some(n),
                    ..Mishaps::default()
                },
            );
            assert_eq!(pair.ends(), (Some(Ending::Failed), Some(Ending::Failed)), "action {n}");
            assert!(
                pair.source_error().contains("the host said no"),
                "the cause of the other side: {}",
                pair.source_error()
            );
        }
    }
}

#[test]
fn a_connection_lost_at_every_message_leaves_one_guest_or_an_unknown_outcome() {
    let mut unknown = 0;
    for setup in small_setups() {
        let messages = run(setup.clone(), Mishaps::default()).messages;
        for n in 0..messages {
            let pair = run(
                setup.clone(),
                Mishaps {
                    message: Some(n),
                    ..Mishaps::default()
                },
            );
            match pair.ends() {
                // The loss of Commit, or of the answer to it.
                (Some(Ending::Unknown), _) => unknown += 1,
                (Some(Ending::Failed), Some(Ending::Failed)) => {}
                ends => panic!("message {n}: {ends:?}"),
            }
        }
    }
    assert_eq!(unknown, 2 * small_setups().len());
}

#[test]
fn a_cancel_at_every_step_of_either_side_leaves_one_guest() {
    for setup in small_setups() {
        let steps = run(setup.clone(), Mishaps::default()).steps;
        for n in 1..steps {
            let pair = run(
                setup.clone(),
                Mishaps {
                    cancel_source: Some(n),
                    ..Mishaps::default()
                },
            );
            let (source, _) = pair.ends();
            assert!(
                matches!(source, Some(Ending::Cancelled | Ending::Completed)),
                "step {n}: {source:?}"
            );
            let pair = run(
                setup.clone(),
                Mishaps {
                    cancel_destination: Some(n),
                    ..Mishaps::default()
                },
            );
            let (source, destination) = pair.ends();
            assert!(
                matches!(source, Some(Ending::Cancelled | Ending::Completed | Ending::Failed)),
                "step {n}: {source:?}, {}",
                pair.source_error()
            );
            assert_eq!(
                source == Some(Ending::Completed),
                destination == Some(Ending::Completed),
                "step {n}"
            );
        }
    }
}

#[test]
fn silence_from_every_step_on_ends_both_sides() {
    for setup in small_setups() {
        let steps = run(setup.clone(), Mishaps::default()).steps;
        for n in 1..steps {
            let pair = run(
                setup.clone(),
                Mishaps {
                    silence: Some(n),
                    ..Mishaps::default()
                },
            );
            let (source, destination) = pair.ends();
            assert!(
                matches!(source, Some(Ending::TimedOut | Ending::Unknown | Ending::Completed)),
                "{source:?}"
            );
            if source == Some(Ending::TimedOut) {
                assert!(
                    pair.source_error()
                        .contains("no sign of life from the receiver for 2 s")
                );
                assert_eq!(destination, Some(Ending::TimedOut));
            }
        }
    }
}

#[test]
fn a_seed_replays_to_the_same_end() {
    for seed in [3, 17, 99] {
        let runs: Vec<(usize, String)> = (0..2)
            .map(|_| {
                let pair = run(Setup::random(seed), Mishaps::default());
                (
                    pair.steps,
                    format!("{:?}", pair.source_end.as_ref().unwrap().report.pages),
                )
            })
            .collect();
        assert_eq!(runs[0], runs[1]);
    }
}
