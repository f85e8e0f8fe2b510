//! The device apart from its questions: queues, inflating, statistics, reporting, configuration.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use balloon::Dialect::{Bitmap, Standard};
use balloon::{Error, QueueConfig, feature::*};
use machine::FreePages;
use pages::Layout;
use std::sync::Arc;
use support::*;

#[test]
fn case_33_a_kick_on_a_queue_that_was_not_negotiated_is_ignored() {
    let rig = Rig::cold(Standard, STATS_VQ | FREE_PAGE_HINT | REPORTING, flat(), 1);
    rig.kick(0);
    rig.drive(0);
    for queue in [2, 3, 4, 5, 0xffff] {
        rig.kick(queue);
    }
    let device = rig.device.lock();
    assert_eq!(device.counters().ignored_kicks, 6);
    assert!(!device.needs_reset());
    assert!(rig.irqs.take().is_empty());
}

#[test]
fn case_34_a_negotiated_poison_value_is_told_and_nothing_reported_is_discarded() {
    let mut rig = Rig::cold(Standard, PAGE_POISON | REPORTING, flat(), 1);
    rig.device
        .lock()
        .ack_features(PAGE_POISON | REPORTING | VERSION_1)
        .unwrap();
    rig.device.lock().write_config(12, &0xAAAA_AAAAu32.to_le_bytes());
    rig.drive(PAGE_POISON | REPORTING);
    assert_eq!(rig.device.poison(), Some(0xAAAA_AAAA));
    rig.send(2, &[(8 << 20, 2 << 20, true)]);
    assert_eq!(rig.take_discards(), []);
    assert_eq!(rig.device.lock().counters().reported_pages, 512);

    rig.device.lock().write_config(12, &[0; 4]);
    assert_eq!(rig.device.poison(), None);
    rig.send(2, &[(8 << 20, 2 << 20, true)]);
    assert_eq!(rig.take_discards(), [range(2048, 512)]);

    let rig = Rig::cold(Standard, PAGE_POISON, flat(), 1);
    rig.drive(0);
    rig.device.lock().write_config(12, &0xAAu32.to_le_bytes());
    assert_eq!(rig.device.poison(), None, "not negotiated");
    assert_eq!(rig.device.lock().counters().ignored_config_writes, 1);
}

/// Kicks every queue with a buffer of its own kind; tells by what happened which role it has.
fn roles_seen(features: u64) -> Vec<&'static str> {
    let mut rig = Rig::cold(Standard, STATS_VQ | FREE_PAGE_HINT | REPORTING, flat(), 1);
    rig.drive(features);
    let mut seen = Vec::new();
    for queue in 0..rig.rings.len() {
        rig.take_discards();
        let before = rig.device.lock().counters();
        let mut bytes = Vec::from(4u16.to_le_bytes());
        bytes.extend(7u64.to_le_bytes());
        bytes.extend([4, 0]);
        rig.write(BUFFERS, &bytes);
        // Ten bytes: a statistics pair, or an array of page frame numbers that is cut short.
        let held = rig.send(queue, &[(BUFFERS, 10, false)]).is_empty();
        rig.send(queue, &[(8 << 20, 4096, true)]);
        let after = rig.device.lock().counters();
        let discarded = !rig.take_discards().is_empty();
        seen.push(if after.ignored_kicks > before.ignored_kicks {
            "none"
        } else if held {
            "stats"
        } else if discarded {
            "report"
        } else if after.late > before.late {
            "hint"
        } else {
            "pages"
        });
    }
    seen
}

#[test]
fn case_35_every_combination_of_features_has_the_queue_numbers_of_linux() {
    for mask in 0..8 {
        let optional = [(STATS_VQ, "stats"), (FREE_PAGE_HINT, "hint"), (REPORTING, "report")];
        let in_use = optional.iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1);
        let (features, names): (Vec<u64>, Vec<&str>) = in_use.map(|(_, pair)| *pair).unzip();
        let mut expected = vec!["pages", "pages"];
        expected.extend(names);
        expected.resize(5, "none");
        assert_eq!(roles_seen(features.iter().sum()), expected, "features {features:?}");
    }
}

#[test]
fn case_36_hinting_and_reporting_reach_each_its_own_handler() {
    let mut rig = Rig::new(Standard, FREE_PAGE_HINT | REPORTING);
    let answers = Answers::default();
    rig.device.begin(1, answers.sink()).unwrap();
    let id = rig.config_u32(8);
    rig.command(2, id);
    rig.send(2, &[(8 << 20, 4 << 20, true)]);
    rig.send(3, &[(16 << 20, 4 << 20, true)]);
    assert_eq!(rig.take_discards(), [range(4096, 1024)]);
    assert_eq!(answers.take(), [(1, machine::Answer::Free(vec![range(2048, 1024)]))]);
}

#[test]
fn case_37_unlike_configuration_spaces_read_as_long_as_they_are() {
    let short = Rig::cold(Standard, STATS_VQ, flat(), 1);
    short.device.lock().set_target(5).unwrap();
    assert_eq!(short.device.lock().config_len(), 8);
    let mut all = [0xff; 16];
    short.device.lock().read_config(0, &mut all);
    assert_eq!(all, [5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(
        Rig::cold(Standard, FREE_PAGE_HINT, flat(), 1)
            .device
            .lock()
            .config_len(),
        12
    );
    assert_eq!(
        Rig::cold(Standard, PAGE_POISON, flat(), 1).device.lock().config_len(),
        16
    );
    assert_eq!(Rig::cold(Bitmap, MISC_VQ, flat(), 1).device.lock().config_len(), 8);
}

#[test]
fn case_38_an_array_split_in_the_middle_of_an_entry_is_honoured_whole() {
    let mut rig = Rig::new(Standard, 0);
    let pfns: Vec<u32> = (5000..5009).collect();
    let bytes: Vec<u8> = pfns.iter().flat_map(|p| p.to_le_bytes()).collect();
    let (one, two) = (BUFFERS, BUFFERS + 0x10001);
    let three = BUFFERS + 0x20003;
    rig.write(one, &bytes[..7]);
    rig.write(two, &bytes[7..18]);
    rig.write(three, &bytes[18..]);
    let used = rig.send(0, &[(one, 7, false), (two, 11, false), (three, 18, false)]);
    assert_eq!(used.len(), 1);
    assert_eq!(rig.ballooned(), [range(5000, 9)]);
    assert_eq!(rig.take_discards(), [range(5000, 9)]);
    assert_eq!(rig.device.lock().counters().malformed, 0);
}

#[test]
fn case_39_bad_chains_are_counted_and_the_next_works_and_a_bad_deflate_empties_the_balloon() {
    for queue in [0, 1] {
        let mut rig = Rig::new(Standard, 0);
        rig.send_pfns(0, &[5000, 5001, 5002, 6000]);
        rig.write(BUFFERS, &[0x88, 0x13, 0, 0, 0x70, 0x17]);
        let mut bad = vec![
            vec![(BUFFERS, 4, true)],
            vec![(BUFFERS, 4, false), (BUFFERS, 4, true)],
            vec![(BUFFERS, 6, false)],
            vec![(64 << 20, 4, false)],
            vec![((64 << 20) - 2, 4, false)],
            vec![(u64::MAX - 1, 4, false)],
        ];
        let many = bad.len() as u64;
        for chain in bad.drain(..) {
            rig.send_pfns(0, &[5000, 5001, 5002, 6000]);
            rig.write(BUFFERS, &[0x88, 0x13, 0, 0, 0x70, 0x17]);
            assert_eq!(rig.send(queue, &chain).len(), 1, "returned: {chain:x?}");
        }
        assert_eq!(rig.device.lock().counters().malformed, many);
        let kept = [vec![range(5000, 3), range(6000, 1)], vec![]];
        assert_eq!(
            rig.ballooned(),
            kept[queue],
            "a deflation that is refused may have named any page"
        );
        rig.send_pfns(0, &[5000, 5001, 5002, 6000]);
        // A number that is not RAM costs only itself.
        rig.send_pfns(queue, &[16384, 5001, 7000]);
        assert_eq!(rig.device.lock().counters().bad_pfns, 1);
        let expected = if queue == 0 {
            vec![range(5000, 3), range(6000, 1), range(7000, 1)]
        } else {
            vec![range(5000, 1), range(5002, 1), range(6000, 1)]
        };
        assert_eq!(rig.ballooned(), expected);
        assert!(!rig.device.lock().needs_reset());
    }
}

#[test]
fn case_39_an_array_that_is_too_long_is_honoured_up_to_the_bound() {
    let mut rig = Rig::new(Standard, 0);
    let bytes: Vec<u8> = (0u32..(1 << 16) + 9).flat_map(|i| (i % 16384).to_le_bytes()).collect();
    rig.write(BUFFERS, &bytes);
    rig.write(BUFFERS + (1 << 18), &12u32.to_le_bytes());
    rig.send(1, &[(BUFFERS, bytes.len() as u32, false)]);
    rig.send(0, &[(BUFFERS, bytes.len() as u32, false)]);
    let device = rig.device.lock();
    assert_eq!((device.counters().malformed, device.counters().bad_pfns), (2, 0));
    assert_eq!(device.ballooned().count(), 16384);
}

#[test]
fn case_39_a_deflate_array_that_is_cut_empties_the_balloon() {
    let mut rig = Rig::new(Standard, 0);
    rig.send_pfns(0, &[5000, 5001]);
    let mut pfns = vec![1; 1 << 16];
    rig.send_pfns(1, &pfns);
    assert_eq!(rig.ballooned(), [range(5000, 2)], "as long as is honoured");
    pfns.push(5001);
    rig.send_pfns(1, &pfns);
    assert_eq!((rig.ballooned(), rig.device.lock().counters().malformed), (vec![], 1));
}

#[test]
fn case_42_the_used_length_of_what_the_device_reads_is_0() {
    let mut rig = Rig::new(Standard, STATS_VQ | FREE_PAGE_HINT | REPORTING);
    assert_eq!(rig.send_pfns(0, &[5000]), [(0, 0)]);
    assert_eq!(rig.send_pfns(1, &[5000]), [(0, 0)]);
    assert_eq!(rig.command(3, 7), [(0, 0)]);
    assert_eq!(rig.send(2, &[(BUFFERS, 10, false)]), []);
    assert!(rig.device.lock().request_stats());
    assert_eq!(rig.rings[2].used(&rig.mem), [(0, 0)]);
    assert_eq!(rig.irqs.take(), [0, 1, 3, 2], "each with an interrupt");
}

#[test]
fn a_paused_guest_s_memory_is_left_alone_whatever_the_host_asks_for() {
    let mut rig = Rig::new(Standard, STATS_VQ | FREE_PAGE_HINT);
    assert_eq!(rig.send(2, &[(BUFFERS, 10, false)]), []);
    rig.device.lock().park();
    assert!(!rig.device.lock().request_stats());
    assert_eq!(rig.rings[2].used(&rig.mem), [], "the ring is as it was");
    assert!(rig.device.lock().can_ask().unwrap_err().contains("paused"));
    rig.device.lock().resume();
    assert!(rig.device.lock().can_ask().is_ok());
    assert!(rig.device.lock().request_stats());
    assert_eq!(rig.rings[2].used(&rig.mem), [(0, 0)]);
}

#[test]
fn a_guest_that_reports_the_same_block_over_and_over_has_all_of_ram_given_back_once_a_kick() {
    let mut rig = Rig::new(Standard, REPORTING);
    let all = (0, 16384 * 4096, true);
    let chain = [all, (4096, 4096, true), all, all];
    rig.send(2, &chain);
    let given: u64 = rig.take_discards().iter().map(|range| range.count()).sum();
    assert_eq!(given, 16384);
    rig.send(2, &[(8 << 20, 4 << 20, true)]);
    assert_eq!(rig.take_discards(), [range(2048, 1024)], "the next kick has its own");
}

#[test]
fn case_43_actual_saturates_at_ram() {
    let rig = Rig::new(Standard, 0);
    rig.device.lock().write_config(4, &u32::MAX.to_le_bytes());
    assert_eq!(rig.device.lock().actual(), 16384);
    assert_eq!(rig.config_u32(4), u32::MAX);
}

#[test]
fn case_44_frame_numbers_at_the_ends_of_32_bits_are_out_of_range() {
    let mut rig = Rig::new(Standard, 0);
    let bad = [0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0xffff_fffe];
    rig.send_pfns(0, &bad);
    assert_eq!(rig.device.lock().counters().bad_pfns, 4);
    assert_eq!(rig.ballooned(), []);
    rig.send_pfns(1, &bad);
    assert_eq!(rig.device.lock().counters().bad_pfns, 8);
    assert_eq!(rig.take_discards(), []);
}

#[test]
fn case_45_511_of_512_pages_discard_nothing_and_the_last_one_discards_once() {
    let mut rig = Rig::cold(Standard, 0, flat(), 512);
    rig.drive(0);
    let most: Vec<u32> = (1024..1535).collect();
    rig.send_pfns(0, &most[..300]);
    rig.send_pfns(0, &most[300..]);
    rig.send_pfns(0, &most);
    assert_eq!(rig.take_discards(), []);
    rig.send_pfns(0, &[1535]);
    assert_eq!(rig.take_discards(), [range(1024, 512)]);
    rig.send_pfns(0, &most);
    rig.send_pfns(0, &[1535]);
    assert_eq!(rig.take_discards(), [], "already given back");
    rig.send_pfns(1, &[1200]);
    rig.send_pfns(0, &[1200]);
    assert_eq!(rig.take_discards(), [range(1024, 512)], "taken and given up again");
    // Three granules and two ends, in one call.
    let long: Vec<u32> = (2000..3700).collect();
    rig.send_pfns(0, &long);
    assert_eq!(rig.take_discards(), [range(2048, 1536)]);
    assert_eq!(rig.device.lock().counters().discards, 3);
}

#[test]
fn a_granule_is_given_back_within_one_region_only() {
    // Two regions that touch in the middle of a granule, and an end in the middle of another.
    let layout = Layout::new(vec![range(0, 1280), range(1280, 1000)]).unwrap();
    let mut rig = Rig::cold(Standard, 0, Arc::new(layout), 512);
    rig.drive(0);
    let all: Vec<u32> = (512..2280).collect();
    rig.send_pfns(0, &all);
    assert_eq!(rig.take_discards(), [range(512, 512), range(1536, 512)]);

    let mut rig = Rig::cold(Standard, 0, Arc::clone(&rig.layout), 1);
    rig.drive(0);
    let over_the_border: Vec<u32> = (1270..1290).collect();
    rig.send_pfns(0, &over_the_border);
    assert_eq!(rig.take_discards(), [range(1270, 10), range(1280, 10)]);
}

#[test]
fn runs_of_unsorted_numbers_are_given_back_in_bulk() {
    let mut rig = Rig::new(Standard, 0);
    rig.send_pfns(0, &[5003, 5001, 9000, 5002, 5001, 5000]);
    assert_eq!(rig.take_discards(), [range(5000, 4), range(9000, 1)]);
}

#[test]
fn case_48_a_second_statistics_buffer_returns_the_first_and_a_huge_one_is_bounded() {
    let mut rig = Rig::new(Standard, STATS_VQ);
    let mut bytes = Vec::new();
    for (tag, value) in [(4u16, 1u64 << 30), (5, 2 << 30)] {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(value.to_le_bytes());
    }
    rig.write(BUFFERS, &bytes);
    let first = rig.rings[2].add(&rig.mem, &[(BUFFERS, 20, false)]);
    let second = rig.rings[2].add(&rig.mem, &[(BUFFERS, u32::MAX, false)]);
    rig.kick(2);
    assert_eq!(rig.rings[2].used(&rig.mem), [(u32::from(first), 0)]);
    assert_eq!(rig.irqs.take(), [2]);
    // The bound lies within guest memory, so what is below it was read.
    let stats = rig.device.stats().unwrap();
    assert_eq!((stats.free_pages, stats.total_pages), (1 << 18, 2 << 18));
    assert_eq!(rig.rings[2].used(&rig.mem), [(u32::from(second), 0)]);
    assert!(!rig.device.lock().request_stats(), "nothing is held");
    assert!(rig.device.lock().counters().malformed > 0);
    rig.send(2, &[(64 << 20, u32::MAX, false)]);
    assert!(rig.device.lock().request_stats(), "one outside memory is returned too");
}

#[test]
fn case_49_an_available_index_that_runs_ahead_stops_that_queue_alone() {
    let mut rig = Rig::new(Standard, 0);
    rig.rings[0].set_avail(&rig.mem, SIZE + 1);
    rig.kick(0);
    assert!(rig.device.lock().needs_reset());
    assert_eq!(rig.irqs.configs(), 1);
    rig.kick(0);
    assert_eq!(rig.device.lock().counters().ignored_kicks, 1);
    assert_eq!(rig.device.lock().counters().broken_queues, 1);
    assert_eq!(rig.send_pfns(1, &[5000]).len(), 1, "the other queue goes on");
    rig.device.lock().reset();
    // A deflate queue that is heard no more: what goes in is not known to stay.
    let mut rig = Rig::new(Standard, 0);
    rig.send_pfns(0, &[5000]);
    rig.rings[1].set_avail(&rig.mem, SIZE + 1);
    rig.kick(1);
    assert_eq!(rig.ballooned(), []);
    rig.take_discards();
    assert_eq!(rig.send_pfns(0, &[5001]).len(), 1, "the other queue goes on");
    assert_eq!((rig.ballooned(), rig.take_discards()), (vec![], vec![]));
    rig.device.lock().reset();
    assert!(!rig.device.lock().needs_reset());
}

#[test]
fn case_49_a_chain_that_does_not_end_stops_its_queue() {
    // A loop, a loop of one, a next index past the table, a head past the table, an indirect table, one longer than
    // the queue.
    type Plant = fn(&mut Rig);
    let plants: [Plant; 6] = [
        |rig| {
            rig.rings[0].raw_desc(&rig.mem, 0, BUFFERS, 4, 1, 1);
            rig.rings[0].raw_desc(&rig.mem, 1, BUFFERS, 4, 1, 0);
            rig.rings[0].push(&rig.mem, 0);
        },
        |rig| {
            rig.rings[0].raw_desc(&rig.mem, 3, BUFFERS, 4, 1, 3);
            rig.rings[0].push(&rig.mem, 3);
        },
        |rig| {
            rig.rings[0].raw_desc(&rig.mem, 0, BUFFERS, 4, 1, SIZE);
            rig.rings[0].push(&rig.mem, 0);
        },
        |rig| rig.rings[0].push(&rig.mem, SIZE),
        |rig| {
            rig.rings[0].raw_desc(&rig.mem, 0, BUFFERS, 17, 4, 0);
            rig.rings[0].push(&rig.mem, 0);
        },
        |rig| {
            for i in 0..1000u16 {
                let mut desc = [0u8; 16];
                desc[8] = 4;
                // The last one ends the chain: but for its length it is a good one.
                desc[12] = u8::from(i < 999);
                desc[14..].copy_from_slice(&(i + 1).to_le_bytes());
                rig.write(BUFFERS + u64::from(i) * 16, &desc);
            }
            rig.rings[0].raw_desc(&rig.mem, 0, BUFFERS, 16000, 4, 0);
            rig.rings[0].push(&rig.mem, 0);
        },
    ];
    for (i, plant) in plants.iter().enumerate() {
        let mut rig = Rig::new(Standard, 0);
        plant(&mut rig);
        rig.kick(0);
        assert!(rig.device.lock().needs_reset(), "plant {i}");
        assert_eq!(rig.ballooned(), [], "plant {i}");
    }
}

#[test]
fn case_51_ten_thousand_targets_without_a_driver() {
    let rig = Rig::cold(Standard, 0, flat(), 1);
    for pages in 0..10_000 {
        rig.device.lock().set_target(pages).unwrap();
    }
    assert_eq!(rig.irqs.configs(), 0);
    assert_eq!(rig.config_u32(0), 9_999);
    rig.drive(0);
    rig.device.lock().set_target(3).unwrap();
    rig.device.lock().set_target(3).unwrap();
    assert_eq!(rig.irqs.configs(), 1, "told once");
}

#[test]
fn case_52_targets_past_ram_are_an_error() {
    let rig = Rig::new(Standard, 0);
    let mut device = rig.device.lock();
    assert!(device.set_target(16384).is_ok());
    for pages in [16385, 1 << 32, (1 << 32) + 5, u64::MAX] {
        assert!(matches!(device.set_target(pages), Err(Error::Target { .. })), "{pages}");
    }
    assert_eq!(device.target(), 16384);
}

#[test]
fn features_are_checked_and_frozen() {
    let rig = Rig::cold(Standard, STATS_VQ, flat(), 1);
    let mut device = rig.device.lock();
    assert_eq!(device.device_features(), STATS_VQ | VERSION_1);
    let refused = device.ack_features(STATS_VQ | REPORTING | VERSION_1);
    assert!(matches!(refused, Err(Error::NotOffered { extra: REPORTING, .. })));
    assert!(matches!(device.ack_features(STATS_VQ), Err(Error::Legacy)));
    assert!(
        matches!(device.activate(&[]), Err(Error::Legacy)),
        "nothing was acknowledged"
    );
    assert_eq!(device.driver_features(), 0);
    device.ack_features(VERSION_1).unwrap();
    device.activate(&[]).unwrap();
    assert!(matches!(device.ack_features(VERSION_1), Err(Error::Active(_))));
    assert!(matches!(device.activate(&[]), Err(Error::Active(_))));
}

#[test]
fn queues_that_cannot_be_are_refused_at_activation() {
    let good = Ring::new(0).config;
    let bad = [
        QueueConfig { size: 0, ..good },
        QueueConfig { size: 48, ..good },
        QueueConfig { size: 512, ..good },
        QueueConfig { desc: 8, ..good },
        QueueConfig { avail: 0x3001, ..good },
        QueueConfig { avail: 0, ..good },
        QueueConfig { used: 0x3002, ..good },
        QueueConfig { desc: 64 << 20, ..good },
        QueueConfig {
            used: (64 << 20) - 16,
            ..good
        },
        QueueConfig {
            avail: u64::MAX - 1,
            ..good
        },
    ];
    for config in bad {
        let rig = Rig::cold(Standard, 0, flat(), 1);
        let mut device = rig.device.lock();
        device.ack_features(VERSION_1).unwrap();
        let refused = device.activate(&[good, config]);
        assert!(
            matches!(refused, Err(Error::QueueSetup { index: 1, .. })),
            "{config:x?}"
        );
        assert!(!device.is_active());
    }
}

#[test]
fn buffers_from_before_driver_ok_are_found() {
    let mut rig = Rig::cold(Standard, 0, flat(), 1);
    rig.write(BUFFERS, &5000u32.to_le_bytes());
    rig.rings[0].add(&rig.mem, &[(BUFFERS, 4, false)]);
    rig.drive(0);
    assert_eq!(rig.ballooned(), [range(5000, 1)]);
}

#[test]
fn a_reset_empties_the_balloon_and_keeps_the_target() {
    let mut rig = Rig::new(Standard, STATS_VQ);
    rig.send_pfns(0, &[5000]);
    rig.device.lock().write_config(4, &1u32.to_le_bytes());
    rig.device.lock().set_target(9).unwrap();
    rig.device.lock().reset();
    let device = rig.device.lock();
    assert_eq!(
        (device.target(), device.actual(), device.ballooned().count()),
        (9, 0, 0)
    );
    assert!(!device.is_active() && device.stats().is_none());
}

#[test]
fn reported_blocks_are_given_back_by_whole_granules() {
    let mut rig = Rig::cold(Standard, REPORTING, flat(), 512);
    rig.drive(REPORTING);
    // Two blocks that touch, one without a whole granule, one outside RAM, one past the address space.
    let used = rig.send(
        2,
        &[
            (4 << 20, 2 << 20, true),
            (6 << 20, 2 << 20, true),
            ((10 << 20) + 4096, 2 << 20, true),
            (64 << 20, 2 << 20, true),
            (u64::MAX - 4095, 8192, true),
        ],
    );
    assert_eq!(used, [(0, 0)]);
    assert_eq!(rig.take_discards(), [range(1024, 1024)]);
    assert_eq!(rig.ballooned(), [], "free is not ballooned");
    rig.write(BUFFERS, &[0; 4]);
    rig.send(2, &[(BUFFERS, 4, false), (4 << 20, 2 << 20, true)]);
    assert_eq!(rig.take_discards(), []);
    assert_eq!(rig.device.lock().counters().malformed, 2);
}

/// Without MUST_TELL_HOST a guest may use a page again before it says so: what the balloon holds is then no reason to
/// leave a page behind.
#[test]
fn only_a_guest_that_tells_first_is_believed_about_its_balloon() {
    for (features, believed) in [(0, false), (MUST_TELL_HOST, true)] {
        let mut rig = Rig::new(Standard, features);
        rig.write(BUFFERS, &5000u32.to_le_bytes());
        rig.send(0, &[(BUFFERS, 4, false)]);
        assert_eq!(rig.ballooned(), [range(5000, 1)]);
        let told = machine::FreePages::ballooned(&mut rig.device);
        assert_eq!(told.map(|pages| pages.count()), believed.then_some(1));
    }
}
