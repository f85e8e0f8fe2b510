//! Every committed input goes through its target again: what was found once stays mended, on stable and without libFuzzer.
#![allow(clippy::unwrap_used)]

use fuzz_targets::TARGETS;
use std::path::{Path, PathBuf};

/// The inputs of one target, in the order of their names.
fn inputs(target: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus").join(target);
    let listed = std::fs::read_dir(&folder);
    let mut inputs: Vec<PathBuf> = listed
        .map(|entries| entries.map(|entry| entry.unwrap().path()).collect())
        .unwrap_or_default();
    inputs.sort();
    inputs
}

fn replay(name: &str) {
    let (_, target) = TARGETS.iter().find(|(of, _)| *of == name).unwrap();
    let inputs = inputs(name);
    assert!(
        !inputs.is_empty(),
        "no input of {name} is committed: tests/fuzz/corpus/{name}"
    );
    for input in &inputs {
        let bytes = std::fs::read(input).unwrap();
        let panicked = std::panic::catch_unwind(|| target(&bytes)).is_err();
        assert!(
            !panicked,
            "{} is a finding (see above): cargo test -p fuzz-targets {name}",
            input.display()
        );
    }
    println!("{name}: {} inputs replayed", inputs.len());
}

macro_rules! replayed {
    ($($target:ident)*) => {
        $(#[test]
        fn $target() {
            replay(stringify!($target));
        })*

        #[test]
        fn every_target_is_replayed_and_can_be_fuzzed() {
            let mut replayed = [$(stringify!($target)),*];
            replayed.sort_unstable();
            let mut all: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
            all.sort_unstable();
            assert_eq!(all, replayed);
            let fuzzed = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml")).unwrap();
            for name in all {
                assert!(fuzzed.contains(&format!("name = \"{name}\"")), "tests/fuzz/Cargo.toml has no {name}");
            }
        }
    };
}

replayed! {
    balloon_bitmap
    balloon_bitmap_rfc
    balloon_standard
    destination_engine
    device_state
    layout_and_free_map
    report_parsing
    source_engine
    unpack
    wire_decode
}
