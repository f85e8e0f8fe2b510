//! Thousands of seeds, each with its own guest, links and mishaps: every law holds. `scripts/test --soak` runs 100,000.
#![allow(clippy::unwrap_used)]

use faults::{Fault, caught, run_seed};

#[test]
fn two_thousand_seeds_keep_every_law() {
    let mut replaced = 0;
    for seed in 0..2000 {
        match run_seed(seed, None, false) {
            Ok(told) => replaced += told.resumed,
            Err(law) => panic!("{law}"),
        }
    }
    assert!(replaced > 200, "links are lost and replaced in these seeds: {replaced}");
}

/// The table of docs/faults.md: `cargo run -p faults --features planted -- --table`.
#[test]
fn every_planted_fault_is_caught_within_two_thousand_seeds() {
    let missed: Vec<_> = Fault::ALL
        .into_iter()
        .filter(|fault| caught(*fault).is_none())
        .collect();
    assert!(missed.is_empty(), "not caught: {missed:?}");
}

#[test]
fn a_seed_replays_to_the_same_end_and_its_law_names_the_command() {
    let told = |seed| format!("{:?}", run_seed(seed, None, false));
    for seed in [3, 17, 754] {
        assert_eq!(told(seed), told(seed));
    }
    let broken = run_seed(9, Some(Fault::WaitWithoutEnd), false).unwrap_err();
    let command = "cargo run -p faults --features planted -- --seed 9 --planted WaitWithoutEnd --trace";
    assert!(broken.ends_with(command), "{broken}");
}
