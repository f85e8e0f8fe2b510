//! Asking in the `standard` dialect.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use balloon::Dialect::Standard;
use balloon::feature::*;
use machine::{Answer, FreePages};
use pages::Layout;
use std::sync::Arc;
use support::*;

const HINTS: usize = 2;
const STOP: u32 = 0;
const DONE: u32 = 1;

fn rig() -> (Rig, Answers) {
    (Rig::new(Standard, FREE_PAGE_HINT), Answers::default())
}

/// Opens session `session` and sends its start.
fn start(rig: &mut Rig, answers: &Answers, session: u32) -> u32 {
    rig.device.begin(session, answers.sink()).unwrap();
    let id = rig.config_u32(8);
    assert_eq!(rig.command(HINTS, id).len(), 1);
    id
}

#[test]
fn a_session_from_start_to_done() {
    let (mut rig, answers) = rig();
    assert_eq!(rig.config_u32(8), STOP);
    let id = start(&mut rig, &answers, 7);
    assert_eq!(id, 0x8000_0000);
    assert_eq!(rig.irqs.configs(), 1);
    // One kick, several chains, several descriptors: one answer of joined ranges.
    rig.rings[HINTS].add(&rig.mem, &[(8 << 20, 4 << 20, true), (12 << 20, 4 << 20, true)]);
    rig.rings[HINTS].add(&rig.mem, &[(32 << 20, 4, true), (40 << 20, 4 << 20, true)]);
    rig.kick(HINTS);
    assert_eq!(
        answers.take(),
        [(7, Answer::Free(vec![range(2048, 2048), range(10240, 1024)]))]
    );
    rig.command(HINTS, STOP);
    let covered = Answer::Covered(range(0, 16384));
    assert_eq!(answers.take(), [(7, covered), (7, Answer::Finished)]);
    assert_eq!(rig.config_u32(8), id, "DONE comes with the end only");
    rig.device.end(7).unwrap();
    assert_eq!((rig.config_u32(8), rig.irqs.configs()), (DONE, 2));
    let counts = rig.device.counts();
    assert_eq!((counts.answers, counts.late, counts.malformed), (2, 0, 0));
}

#[test]
fn every_region_is_covered() {
    let layout = Layout::new(vec![range(0, 8192), range(1 << 20, 100)]).unwrap();
    let mut rig = Rig::cold(Standard, FREE_PAGE_HINT, Arc::new(layout), 1);
    rig.drive(FREE_PAGE_HINT);
    let answers = Answers::default();
    start(&mut rig, &answers, 1);
    // A block over the first region's end and one over the whole of the second.
    rig.send(HINTS, &[(31 << 20, 4 << 20, true), ((1 << 32) - 4096, 4 << 20, true)]);
    rig.command(HINTS, STOP);
    let expected = [
        Answer::Free(vec![range(7936, 256), range(1 << 20, 100)]),
        Answer::Covered(range(0, 8192)),
        Answer::Covered(range(1 << 20, 100)),
        Answer::Finished,
    ];
    assert_eq!(answers.take(), expected.map(|answer| (1, answer)));
}

#[test]
fn blocks_are_shrunk_inward_and_clipped_to_ram() {
    let (mut rig, answers) = rig();
    start(&mut rig, &answers, 1);
    rig.send(
        HINTS,
        &[
            ((8 << 20) + 1, 3 * 4096, true),
            (9 << 20, 4095, true),
            (9 << 20, 0, true),
            ((64 << 20) - 4096, 1 << 20, true),
            (64 << 20, 1 << 20, true),
            (u64::MAX - 4095, 8192, true),
        ],
    );
    assert_eq!(
        answers.take(),
        [(1, Answer::Free(vec![range(2049, 2), range(16383, 1)]))]
    );
    assert_eq!(rig.device.counts().malformed, 1, "the one past the address space");
}

#[test]
fn case_30_done_and_a_config_interrupt_on_every_way_out() {
    type Way = (&'static str, fn(&mut Rig));
    let ends: [Way; 6] = [
        ("before the guest came", |_| {}),
        ("after the start", |rig| {
            let id = rig.config_u32(8);
            rig.command(HINTS, id);
        }),
        ("in the middle", |rig| {
            let id = rig.config_u32(8);
            rig.command(HINTS, id);
            rig.send(HINTS, &[(8 << 20, 4096, true)]);
        }),
        ("after the stop", |rig| {
            let id = rig.config_u32(8);
            rig.command(HINTS, id);
            rig.command(HINTS, STOP);
        }),
        ("after a malformed command", |rig| {
            rig.send(HINTS, &[(BUFFERS, 3, false)]);
        }),
        ("with a broken queue", |rig| {
            rig.rings[HINTS].set_avail(&rig.mem, 999);
            rig.kick(HINTS);
        }),
    ];
    for (when, act) in ends {
        let (mut rig, answers) = rig();
        rig.device.begin(1, answers.sink()).unwrap();
        act(&mut rig);
        let before = rig.irqs.configs();
        rig.device.end(1).unwrap();
        assert_eq!(rig.config_u32(8), DONE, "{when}");
        assert_eq!(rig.irqs.configs(), before + 1, "{when}");
        rig.device.end(1).unwrap();
        rig.device.end(2).unwrap();
        assert_eq!(rig.irqs.configs(), before + 1, "{when}: once is enough");
        answers.take();
        rig.send(HINTS, &[(8 << 20, 4096, true)]);
        rig.command(HINTS, STOP);
        assert_eq!(answers.take(), [], "{when}: nothing after the end");
    }
}

#[test]
fn a_stale_or_replayed_start_and_blocks_outside_a_session_are_late() {
    let (mut rig, answers) = rig();
    let block = [(8 << 20, 4096, true)];
    rig.send(HINTS, &block);
    assert_eq!(rig.device.counts().late, 1, "no session at all");

    let first = start(&mut rig, &answers, 1);
    rig.device.end(1).unwrap();
    rig.send(HINTS, &block);
    assert_eq!(rig.device.counts().late, 2, "after the end");
    rig.command(HINTS, STOP);
    assert_eq!(rig.device.counts().late, 3);

    rig.device.begin(2, answers.sink()).unwrap();
    let second = rig.config_u32(8);
    assert_eq!(second, first + 1);
    assert_eq!(rig.device.counts().late, 3, "counted over the device's life");
    rig.send(HINTS, &block);
    rig.command(HINTS, first);
    rig.command(HINTS, STOP);
    rig.send(HINTS, &block);
    assert_eq!(rig.device.counts().late, 7, "of the session before");
    rig.command(HINTS, second);
    rig.command(HINTS, second);
    assert_eq!(rig.device.counts().late, 8, "a start while sending");
    rig.send(HINTS, &block);
    rig.command(HINTS, STOP);
    assert_eq!(answers.take().len(), 3);
    rig.command(HINTS, second);
    rig.send(HINTS, &block);
    rig.command(HINTS, STOP);
    assert_eq!(rig.device.counts().late, 11, "after the stop");
    assert_eq!(answers.take(), []);
}

#[test]
fn direction_tells_commands_from_blocks() {
    let (mut rig, answers) = rig();
    let id = start(&mut rig, &answers, 1);
    // Device-writable buffers of 4 bytes, one of which holds STOP, are blocks (without a whole page).
    rig.write(BUFFERS, &STOP.to_le_bytes());
    rig.send(HINTS, &[(BUFFERS, 4, true)]);
    assert_eq!(answers.take(), []);
    // Device-readable buffers of the length of a block are no blocks.
    rig.send(HINTS, &[(8 << 20, 4 << 20, false)]);
    rig.send(HINTS, &[(BUFFERS, 0, false)]);
    rig.send(HINTS, &[(64 << 20, 4, false)]);
    assert_eq!(rig.device.counts().malformed, 3);
    assert_eq!(answers.take(), []);
    // A command over two descriptors.
    rig.write(BUFFERS, &STOP.to_le_bytes());
    rig.send(HINTS, &[(BUFFERS, 1, false), (BUFFERS, 3, false)]);
    assert_eq!(answers.take().last(), Some(&(1, Answer::Finished)));
    assert_eq!(rig.config_u32(8), id);
}

#[test]
fn case_16_a_driver_that_comes_in_the_middle_can_be_asked_from_then_on() {
    let rig = Rig::cold(Standard, FREE_PAGE_HINT | STATS_VQ, flat(), 1);
    let (answers, mut free_pages) = (Answers::default(), rig.device.clone());
    let why = free_pages.can_ask().unwrap_err();
    assert!(why.contains("no balloon driver"), "{why}");
    assert!(free_pages.begin(1, answers.sink()).is_err());
    rig.drive(FREE_PAGE_HINT);
    free_pages.can_ask().unwrap();
    free_pages.begin(1, answers.sink()).unwrap();
    let why = free_pages.begin(2, answers.sink()).unwrap_err().to_string();
    assert!(why.contains("session 1 is still open"), "{why}");
    free_pages.end(1).unwrap();
    assert!(free_pages.begin(0, answers.sink()).is_err(), "session 0 is none");
}

#[test]
fn case_32_who_cannot_be_asked_says_why() {
    let unoffered = Rig::new(Standard, STATS_VQ);
    assert!(
        unoffered
            .device
            .can_ask()
            .unwrap_err()
            .contains("does not offer FREE_PAGE_HINT")
    );
    let untaken = Rig::cold(Standard, FREE_PAGE_HINT, flat(), 1);
    untaken.drive(0);
    assert!(
        untaken
            .device
            .can_ask()
            .unwrap_err()
            .contains("did not take FREE_PAGE_HINT")
    );
    let mut broken = Rig::new(Standard, FREE_PAGE_HINT);
    broken.rings[HINTS].set_avail(&broken.mem, 999);
    broken.kick(HINTS);
    assert!(broken.device.can_ask().unwrap_err().contains("broken"));
    assert!(broken.device.allocates());
    assert_eq!(broken.device.dialect(), "standard");
}

#[test]
fn a_guest_that_vanishes_finishes_its_session_and_done_is_still_owed() {
    let (mut rig, answers) = rig();
    start(&mut rig, &answers, 1);
    rig.send(HINTS, &[(8 << 20, 4096, true)]);
    answers.take();
    rig.device.lock().reset();
    assert_eq!(
        answers.take(),
        [(1, Answer::Finished)],
        "without a word on what is covered"
    );
    rig.device.end(1).unwrap();
    assert_eq!(rig.config_u32(8), DONE);
    // One that had said its last word says it once.
    rig.rings = (0..5).map(Ring::new).collect();
    rig.rings.iter_mut().for_each(|ring| ring.set_avail(&rig.mem, 0));
    rig.drive(FREE_PAGE_HINT);
    start(&mut rig, &answers, 2);
    rig.command(HINTS, STOP);
    assert_eq!(answers.take().len(), 2);
    rig.device.lock().reset();
    assert_eq!(answers.take(), []);
}

/// A guest that poisons what it frees is left without its blocks until the pause: STOP first, DONE later.
#[test]
fn case_34_a_held_session_publishes_stop_and_done_follows() {
    let (mut rig, answers) = rig();
    let id = start(&mut rig, &answers, 7);
    rig.send(HINTS, &[(8 << 20, 4 << 20, true)]);
    answers.take();
    rig.device.hold(7).unwrap();
    assert_eq!((rig.config_u32(8), rig.irqs.configs()), (STOP, 2));
    // What was on its way is late, and nobody hears of it.
    rig.send(HINTS, &[(16 << 20, 4 << 20, true)]);
    rig.command(HINTS, STOP);
    assert_eq!((answers.take(), rig.device.counts().late), (vec![], 2));
    assert!(rig.device.can_ask().unwrap_err().contains("session 7"));
    rig.device.end(7).unwrap();
    assert_eq!((rig.config_u32(8), rig.irqs.configs()), (DONE, 3));
    // Whoever saves the device meanwhile finds DONE too; and a next session has a fresh id.
    assert_ne!(start(&mut rig, &answers, 8), id);
    rig.device.hold(8).unwrap();
    rig.device.lock().save();
    assert_eq!(rig.config_u32(8), DONE);
}
