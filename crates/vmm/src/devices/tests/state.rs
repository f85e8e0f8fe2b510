//! Saved state: what a board takes over, and what it refuses.

use super::*;
use serde_json::{Value, json as value};

/// A balloon and an entropy device at work, and their state.
fn working() -> (Rig, MachineState) {
    let rig = Rig::new(standard(ALL));
    let rings = Ring::all(6);
    rig.device(0).probe(ALL, &rings[..5].iter().collect::<Vec<_>>());
    rig.device(1).probe(0, &[&rings[5]]);
    let state = rig.save();
    (rig, state)
}

#[test]
fn a_board_that_took_over_saves_the_same() {
    let (rig, state) = working();
    let names: Vec<_> = state.sections.iter().map(|section| section.name.as_str()).collect();
    assert_eq!(names, ["serial", "i8042", "virtio0", "balloon", "virtio1", "rng"]);
    let arrived = rig.restored(standard(ALL), &state).unwrap();
    assert_eq!(arrived.save(), state);
    assert_eq!(rig.save(), state, "saving changes nothing");
}

#[test]
fn sections_that_are_missing_or_too_many_are_refused_by_name() {
    let (rig, state) = working();
    for index in 0..state.sections.len() {
        let mut less = state.clone();
        let gone = less.sections.remove(index);
        let error = rig.restored(standard(ALL), &less).err().unwrap().to_string();
        assert!(error.contains(&gone.name), "{error}");
        let mut newer = state.clone();
        newer.sections[index].version += 1;
        let error = rig.restored(standard(ALL), &newer).err().unwrap().to_string();
        assert!(error.contains(&gone.name), "{error}");
    }
    let error = rig.restored(None, &state).err().unwrap().to_string();
    assert!(error.contains("virtio0") || error.contains("balloon"), "{error}");
    let unlike = rig.restored(standard(0), &state).err().unwrap().to_string();
    assert!(unlike.contains("features"), "case 37: {unlike}");
}

/// Each change alone has to be refused.
fn refused(state: &MachineState, rig: &Rig, section: &str, path: &str, change: Value) {
    let mut data = json(state, section);
    *data.pointer_mut(path).unwrap_or_else(|| panic!("{section}{path}")) = change.clone();
    let error = rig.restored(standard(ALL), &with(state, section, &data)).err();
    let error = error.unwrap_or_else(|| panic!("{section}{path} = {change} was taken"));
    assert!(
        error.to_string().contains(section) || error.to_string().contains("balloon"),
        "{error}"
    );
}

#[test]
fn a_transport_that_could_not_be_so_is_refused() {
    let (rig, state) = working();
    for (section, other) in [("virtio0", 4), ("virtio1", 5)] {
        for (path, change) in [
            ("/device_id", value!(other)),
            // Not in order; not started, but the device is; bits that there are not.
            ("/status", value!(5)),
            ("/status", value!(0)),
            ("/status", value!(11)),
            ("/status", value!(0x4f)),
            ("/status", value!(0x1_0000_000fu64)),
            ("/failed", value!(true)),
            ("/driver_features", value!(1u64 << 32 | 1 << 40)),
            ("/driver_features", value!(0)),
            ("/interrupt_status", value!(4)),
            ("/queues", value!([])),
            ("/queues/0/size", value!(0)),
            ("/queues/0/size", value!(48)),
            ("/queues/0/size", value!(1024)),
            ("/queues/0/size", value!(32)),
            ("/queues/0/ready", value!(false)),
            ("/queues/0/desc", value!(0x10_0010)),
            ("/queues/0/used", value!(u64::MAX)),
        ] {
            refused(&state, &rig, section, path, change);
        }
    }
    let mut more = json(&state, "virtio0");
    more["unknown"] = value!(1);
    assert!(rig.restored(standard(ALL), &with(&state, "virtio0", &more)).is_err());
}

#[test]
fn an_untouched_transport_has_nothing_set_up() {
    let rig = Rig::new(standard(ALL));
    let state = rig.save();
    for (path, change) in [
        ("/interrupt_status", value!(1)),
        ("/driver_features", value!(1)),
        ("/queues/0/ready", value!(true)),
        ("/queues/0/desc", value!(0x1000)),
        // The device has no features.
        ("/status", value!(0x0f)),
    ] {
        refused(&state, &rig, "virtio0", path, change.clone());
        refused(&state, &rig, "virtio1", path, change);
    }
}

#[test]
fn an_entropy_device_that_could_not_be_so_is_refused() {
    let (rig, state) = working();
    for (path, change) in [
        ("/features", value!(0)),
        ("/features", value!(3u64 << 32)),
        ("/active", value!(false)),
        ("/needs_reset", value!(true)),
        ("/queue/size", value!(0)),
        ("/queue/size", value!(128)),
        ("/queue/size", value!(3)),
        ("/queue/desc", value!(0x1008)),
        ("/queue/desc", value!(RAM_PAGES * 4096)),
        ("/queue/avail", value!(0)),
        ("/queue/avail", value!(u64::MAX - 1)),
        ("/queue/used", value!(0x1002)),
        ("/queue/next_avail", value!(65)),
        ("/queue/next_used", value!(1)),
        ("/queue/next_used", value!(70000)),
    ] {
        refused(&state, &rig, "rng", path, change);
    }
}

#[test]
fn restored_kinds_that_do_not_fit_their_transports_are_refused() {
    // Each section is fine, but they are not of one moment.
    let (rig, state) = working();
    let fresh = Rig::new(standard(ALL)).save();
    for section in ["virtio0", "balloon", "virtio1", "rng"] {
        let mixed = with(&state, section, &json(&fresh, section));
        assert!(rig.restored(standard(ALL), &mixed).is_err(), "{section}");
    }
}
