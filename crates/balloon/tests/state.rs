//! Saving a device and taking a saved one over.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use balloon::Dialect::{self, Bitmap, BitmapRfc, Standard};
use balloon::feature::*;
use balloon::{Balloon, Config, Discard, DiscardPolicy, Interrupts, SharedBalloon};
use machine::{Answer, FreePages, Section};
use pages::Layout;
use serde_json::Value;
use std::sync::Arc;
use support::*;

const ALL: u64 = STATS_VQ | FREE_PAGE_HINT | PAGE_POISON | REPORTING;

/// The same guest behind a fresh device.
fn moved(rig: Rig, section: &Section) -> balloon::Result<Rig> {
    let config = rig.device.lock().config();
    let device = fresh(&rig, config);
    device.lock().restore(section)?;
    Ok(Rig { device, ..rig })
}

fn fresh(rig: &Rig, config: Config) -> SharedBalloon<Mem> {
    let device = Balloon::new(
        config,
        Arc::clone(&rig.layout),
        Arc::clone(&rig.mem),
        Arc::clone(&rig.irqs) as Arc<dyn Interrupts>,
        Arc::clone(&rig.discards) as Arc<dyn Discard>,
    );
    SharedBalloon::new(device.unwrap())
}

#[test]
fn a_device_goes_on_where_it_was() {
    let mut rig = Rig::new(Standard, ALL);
    rig.send_pfns(0, &[5000, 5001, 9000]);
    rig.device.lock().set_target(77).unwrap();
    rig.device.lock().write_config(4, &3u32.to_le_bytes());
    rig.device.lock().write_config(12, &0xAAu32.to_le_bytes());
    rig.send(2, &[(BUFFERS, 10, false)]);
    let section = rig.device.lock().save();
    let mut rig = moved(rig, &section).unwrap();
    {
        let device = rig.device.lock();
        assert!(device.is_active());
        assert_eq!((device.target(), device.actual()), (77, 3));
        assert_eq!(device.poison(), Some(0xAA));
        assert_eq!(device.driver_features(), ALL | VERSION_1);
    }
    assert_eq!(rig.ballooned(), [range(5000, 2), range(9000, 1)]);
    assert_eq!(rig.send_pfns(1, &[5001]).len(), 1, "the rings go on");
    assert_eq!(rig.ballooned(), [range(5000, 1), range(9000, 1)]);
}

#[test]
fn case_47_statistics_are_fresh_before_and_after() {
    let mut rig = Rig::new(Standard, STATS_VQ);
    let say = |rig: &mut Rig, free: u64| {
        let mut bytes = Vec::new();
        for (tag, value) in [(4u16, free), (5, 64 << 20)] {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(value.to_le_bytes());
        }
        rig.write(BUFFERS, &bytes);
        rig.send(2, &[(BUFFERS, 20, false)]);
    };
    say(&mut rig, 10 << 12);
    assert_eq!(rig.device.stats().unwrap().free_pages, 10);
    say(&mut rig, 20 << 12);
    let section = rig.device.lock().save();
    let mut rig = moved(rig, &section).unwrap();
    rig.rings[2].used(&rig.mem);
    assert_eq!(rig.device.stats().unwrap().free_pages, 20, "what it said before");
    assert_eq!(rig.rings[2].used(&rig.mem).len(), 1, "and is asked again");
    say(&mut rig, 30 << 12);
    assert_eq!(rig.device.stats().unwrap().free_pages, 30);
}

#[test]
fn case_30_a_session_is_ended_before_state_is_saved() {
    let mut rig = Rig::new(Standard, FREE_PAGE_HINT);
    let answers = Answers::default();
    rig.device.begin(1, answers.sink()).unwrap();
    let id = rig.config_u32(8);
    rig.command(2, id);
    let before = rig.irqs.configs();
    let section = rig.device.lock().save();
    assert_eq!((rig.config_u32(8), rig.irqs.configs()), (1, before + 1));
    rig.send(2, &[(8 << 20, 4096, true)]);
    assert_eq!(answers.take(), []);

    let mut rig = moved(rig, &section).unwrap();
    assert_eq!(rig.config_u32(8), 1, "the destination's guest finds DONE");
    rig.device.lock().resume();
    assert_eq!(rig.irqs.configs(), before + 2, "and is told to look");
    // The chain that the old device took is in flight no more; ids go on.
    rig.device.begin(1, answers.sink()).unwrap();
    assert_eq!(rig.config_u32(8), id + 1);
    rig.command(2, id);
    assert!(rig.device.counts().late > 0, "an id of before the migration");
}

#[test]
fn a_posted_request_buffer_goes_along() {
    let mut rig = Rig::new(Bitmap, MISC_VQ);
    let answers = Answers::default();
    rig.send(3, &[(BUFFERS, 16, true)]);
    rig.device.begin(1, answers.sink()).unwrap();
    rig.device.end(1).unwrap();
    rig.send(3, &[(BUFFERS, 7, true), (BUFFERS + 7, 9, true)]);
    rig.rings[3].used(&rig.mem);
    let section = rig.device.lock().save();
    let mut rig = moved(rig, &section).unwrap();
    rig.device.begin(1, answers.sink()).unwrap();
    assert_eq!(rig.rings[3].used(&rig.mem), [(1, 16)]);
    let mut done = vec![0, 0, 12, 0, 1, 0, 0, 0, 2];
    done.resize(32, 0);
    rig.write(BUFFERS, &done);
    rig.send(3, &[(BUFFERS, 32, false)]);
    assert_eq!(answers.take(), [(1, Answer::Finished)], "id 2: they go on");
}

#[test]
fn a_balloon_of_bitmaps_goes_along_and_goes_on() {
    for dialect in [Bitmap, BitmapRfc] {
        let features = PAGE_BITMAP | MUST_TELL_HOST | STATS_VQ;
        let mut rig = Rig::new(dialect, features);
        rig.send_pages(0, &[range(5001, 500), range(9001, 63)]);
        rig.send(2, &[(BUFFERS, 10, false)]);
        // More runs than a list of them is good for.
        rig.send_bitmap(0, 12288, &[0x55; 256]);
        let section = rig.device.lock().save();
        let before = rig.ballooned();
        // What is discarded, and when, is each host's own affair.
        let config = Config {
            discard: DiscardPolicy::AtOnce,
            ..rig.device.lock().config()
        };
        let device = fresh(&rig, config);
        device.lock().restore(&section).unwrap();
        let mut rig = Rig { device, ..rig };
        rig.device.lock().resume();
        assert_eq!(rig.ballooned(), before);
        assert!(rig.device.ballooned().is_some());
        assert!(rig.device.lock().may_deflate_silently(), "buffers carry bitmaps still");
        rig.send_pages(1, &[range(5001, 500)]);
        rig.send_bitmap(1, 12288, &[0xff; 256]);
        assert_eq!(rig.ballooned(), [range(9001, 63)]);
        rig.send_pages(0, &[range(9001, 70)]);
        assert_eq!(rig.take_discards(), [range(9064, 7)]);
        rig.send_pfns(0, &[6000]);
        assert_eq!(rig.device.lock().counters().bad_headers, 1);
        assert!(rig.device.lock().request_stats());
    }
}

/// `section`, but where the rings are by now.
fn at_rings_of(rig: &Rig, section: &Section) -> Section {
    let now: Value = serde_json::from_slice(&rig.device.lock().save().data).unwrap();
    let mut state: Value = serde_json::from_slice(&section.data).unwrap();
    state["queues"] = now["queues"].clone();
    let data = serde_json::to_vec(&state).unwrap();
    Section {
        data,
        ..section.clone()
    }
}

#[test]
fn quirk_11_what_the_driver_s_bitmap_held_last_goes_along() {
    for dialect in [Bitmap, BitmapRfc] {
        let mut rig = Rig::new(dialect, PAGE_BITMAP | MUST_TELL_HOST);
        rig.send_pages(0, &[range(5001, 500)]);
        let section = rig.device.lock().save();
        let mut rig = moved(rig, &section).unwrap();
        assert_eq!(rig.ballooned(), [range(5001, 500)]);
        rig.send_pages(0, &[range(5001, 500)]);
        assert_eq!(
            rig.ballooned(),
            [],
            "perhaps compaction, though the first time was before the migration"
        );
        // Which it was, the device that takes over finds out.
        let section = rig.device.lock().save();
        for (queue, page_count, believed) in [
            (1, 500, vec![]),
            (1, 100, vec![range(5101, 400)]),
            (0, 501, vec![range(5001, 501)]),
        ] {
            let device = fresh(&rig, rig.device.lock().config());
            device.lock().restore(&at_rings_of(&rig, &section)).unwrap();
            rig.device = device;
            assert_eq!(rig.ballooned(), []);
            rig.send_pages(queue, &[range(5001, page_count)]);
            assert_eq!(rig.ballooned(), believed);
            let compaction = u64::from(page_count == 500);
            assert_eq!(rig.device.lock().counters().stale_bitmaps, compaction);
        }
        // A section of the version before has nothing aside.
        let section = at_rings_of(&rig, &section);
        let mut state: Value = serde_json::from_slice(&section.data).unwrap();
        assert!(state.as_object_mut().unwrap().remove("aside").unwrap().is_object());
        let data = serde_json::to_vec(&state).unwrap();
        let version = 2;
        rig.device
            .lock()
            .restore(&Section {
                data,
                version,
                ..section
            })
            .unwrap();
        rig.send_pages(1, &[range(5001, 100)]);
        assert_eq!(rig.ballooned(), []);
    }
    // An answer in between: what is in the driver's one bitmap is not what it inflated.
    let mut rig = Rig::new(Bitmap, PAGE_BITMAP | MUST_TELL_HOST | MISC_VQ);
    rig.send_pages(0, &[range(5001, 500)]);
    rig.send(3, &[(2 * BUFFERS, 16, true)]);
    rig.device.begin(1, Answers::default().sink()).unwrap();
    let mut answer = bitmap_buffer(Bitmap, 0, &[0xff; 8]);
    answer[4] = 1;
    answer[8] = 1;
    rig.write(BUFFERS, &answer);
    rig.send(3, &[(BUFFERS, answer.len() as u32, false)]);
    assert_eq!(rig.device.counts().answers, 1);
    let section = rig.device.lock().save();
    let mut rig = moved(rig, &section).unwrap();
    rig.send_pages(0, &[range(1, 63)]);
    assert_eq!(rig.ballooned(), [], "these may be the answer's bits");
}

#[test]
fn kicks_that_were_lost_on_the_way_are_caught_up_with() {
    let mut rig = Rig::new(Standard, 0);
    rig.write(BUFFERS, &5000u32.to_le_bytes());
    rig.rings[0].add(&rig.mem, &[(BUFFERS, 4, false)]);
    let section = rig.device.lock().save();
    let rig = moved(rig, &section).unwrap();
    assert_eq!(rig.ballooned(), []);
    rig.device.lock().resume();
    assert_eq!(rig.ballooned(), [range(5000, 1)]);
}

#[test]
fn scattered_pages_are_saved_as_a_bitmap() {
    let mut rig = Rig::new(Standard, 0);
    let scattered: Vec<u32> = (1000..16384).step_by(3).collect();
    rig.send_pfns(0, &scattered);
    let section = rig.device.lock().save();
    assert!(section.data.len() < 16384 / 4 + 1000, "{} bytes", section.data.len());
    let before = rig.ballooned();
    let rig = moved(rig, &section).unwrap();
    assert_eq!(rig.ballooned(), before);
}

#[test]
fn a_broken_queue_stays_broken() {
    let mut rig = Rig::new(Standard, 0);
    rig.rings[0].set_avail(&rig.mem, SIZE + 1);
    rig.kick(0);
    let section = rig.device.lock().save();
    let mut rig = moved(rig, &section).unwrap();
    assert!(rig.device.lock().needs_reset());
    rig.kick(0);
    assert_eq!(rig.device.lock().counters().ignored_kicks, 1);
    assert_eq!(rig.send_pfns(1, &[5000]).len(), 1);
}

#[test]
fn case_37_a_device_that_is_unlike_is_refused_by_name() {
    let rig = Rig::new(Standard, STATS_VQ | FREE_PAGE_HINT);
    let section = rig.device.lock().save();
    let refuse = |dialect, features| {
        let other = fresh(&rig, Config::new(dialect, features));
        other.lock().restore(&section).unwrap_err().to_string()
    };
    let why = refuse(Standard, STATS_VQ);
    assert!(why.contains("0x10000000a") && why.contains("0x100000002"), "{why}");
    let why = refuse(Bitmap, STATS_VQ);
    assert!(why.contains("standard") && why.contains("bitmap"), "{why}");
}

/// The saved state of a device with all there is, with one value changed.
fn tampered(dialect: Dialect, pointer: &str, value: Value) -> String {
    let features = match dialect {
        Standard => ALL,
        Bitmap => MISC_VQ | STATS_VQ,
        BitmapRfc => PAGE_BITMAP | STATS_VQ,
    };
    let mut rig = Rig::new(dialect, features);
    rig.send_pfns(0, &[5000]);
    rig.send(2, &[(BUFFERS, 10, false)]);
    if dialect == Bitmap {
        rig.send(3, &[(BUFFERS, 16, true)]);
    }
    let mut section = rig.device.lock().save();
    let mut state: Value = serde_json::from_slice(&section.data).unwrap();
    *state.pointer_mut(pointer).unwrap() = value;
    section.data = serde_json::to_vec(&state).unwrap();
    let config = rig.device.lock().config();
    let other = fresh(&rig, config);
    let refused = other.lock().restore(&section);
    let untouched = !other.lock().is_active() && other.lock().ballooned().is_empty();
    assert!(untouched, "{pointer}: a refused state changes nothing");
    assert!(refused.is_err(), "{pointer} was taken over");
    refused.unwrap_err().to_string()
}

#[test]
fn state_that_no_device_could_have_saved_is_refused() {
    use serde_json::json;
    let standard: [(&str, Value); 22] = [
        ("/dialect", json!("bitmap")),
        ("/offered", json!(0)),
        ("/acked", json!(1u64 << 40)),
        ("/acked", json!(0)),
        ("/active", json!(false)),
        ("/num_pages", json!(16385)),
        ("/issued", json!(0x8000_0001u32)),
        ("/queues/0/size", json!(0)),
        ("/queues/0/size", json!(63)),
        ("/queues/0/size", json!(512)),
        ("/queues/0/desc", json!(8)),
        ("/queues/0/desc", json!(u64::MAX - 15)),
        ("/queues/1/avail", json!(64u64 << 20)),
        ("/queues/1/used", json!((64u64 << 20) - 64)),
        ("/queues/0/next_avail", json!(SIZE + 2)),
        ("/queues/0/next_used", json!(2)),
        ("/queues", json!([null, null, null, null, null, null])),
        ("/held_stats", json!(SIZE)),
        ("/queues/2", json!(null)),
        ("/posted", json!([0, [[4096, 16]]])),
        ("/ballooned", json!({"Runs": [[16383, 2]]})),
        ("/ballooned", json!({"Bitmap": "ff"})),
    ];
    for (pointer, value) in standard {
        let shown = value.to_string();
        let why = tampered(Standard, pointer, value);
        assert!(
            why.starts_with("saved balloon state was refused"),
            "{pointer} {shown}: {why}"
        );
    }
    let bitmap: [(&str, Value); 6] = [
        ("/posted", json!([64, [[4096, 16]]])),
        ("/posted", json!([0, [[4096, 15]]])),
        ("/posted", json!([0, []])),
        ("/posted", json!([0, [[0, 4294967295u32], [0, 4294967295u32]]])),
        ("/queues/3", json!(null)),
        ("/ballooned", json!({"Bitmap": "0g"})),
    ];
    for (pointer, value) in bitmap {
        tampered(Bitmap, pointer, value);
    }
    let rfc: [(&str, Value); 5] = [
        ("/dialect", json!("bitmap")),
        ("/issued", json!(1)),
        ("/posted", json!([0, [[4096, 16]]])),
        ("/acked", json!(1u64 << 32 | MISC_VQ)),
        ("/queues", json!([null, null, null, null])),
    ];
    for (pointer, value) in rfc {
        tampered(BitmapRfc, pointer, value);
    }
}

#[test]
fn sections_of_others_and_bytes_that_are_no_state_are_refused() {
    let rig = Rig::new(Standard, 0);
    let section = rig.device.lock().save();
    let good = |s: &Section| fresh(&rig, rig.device.lock().config()).lock().restore(s).is_ok();
    assert!(good(&section));
    let name = "vcpu0".to_owned();
    assert!(!good(&Section {
        name,
        ..section.clone()
    }));
    assert!(!good(&Section {
        version: 4,
        ..section.clone()
    }));
    assert!(!good(&Section {
        version: 1,
        ..section.clone()
    }));
    for len in 0..section.data.len() {
        let data = section.data[..len].to_vec();
        assert!(
            !good(&Section {
                data,
                ..section.clone()
            }),
            "cut to {len} bytes"
        );
    }
}

#[test]
fn a_layout_with_less_ram_refuses_the_balloon_of_a_larger_one() {
    let mut rig = Rig::new(Standard, 0);
    rig.send_pfns(0, &[16000]);
    let section = rig.device.lock().save();
    rig.layout = Arc::new(Layout::flat(15_000).unwrap());
    assert!(moved(rig, &section).is_err());
}
