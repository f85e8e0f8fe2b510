//! Inflating and deflating by page bitmaps, in both dialects that have them: what is honoured. What is refused is in
//! `bitmap_refused.rs`. The quirks' numbers are those of the dialects' documentation; those of the misc queue are in
//! `misc.rs`.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use balloon::Dialect::{self, Bitmap, BitmapRfc};
use balloon::DiscardPolicy::{AtOnce, MarkOnly};
use balloon::{Config, DiscardPolicy, feature::*};
use machine::{Answer, FreePages};
use pages::{Layout, PageRange};
use std::sync::Arc;
use support::bitmaps::*;
use support::*;
use vm_memory::{Bytes, GuestAddress};

#[test]
fn pages_go_in_and_out_by_bitmaps_and_are_only_marked() {
    for dialect in BOTH {
        let mut rig = rig(dialect);
        rig.send_pages(0, &[range(5000, 1000), range(9001, 1)]);
        rig.send_pages(0, &[range(130, 3)]);
        assert_eq!(rig.ballooned(), [range(130, 3), range(5000, 1000), range(9001, 1)]);
        rig.send_pages(1, &[range(131, 1), range(5500, 10)]);
        let left = [
            range(130, 1),
            range(132, 1),
            range(5000, 500),
            range(5510, 490),
            range(9001, 1),
        ];
        assert_eq!(rig.ballooned(), left);
        assert_eq!(rig.take_discards(), [], "mark only");
        assert_eq!(malformed(&rig), (0, 0));
        assert_eq!(rig.device.lock().counters().bad_pfns, 0);
    }
}

#[test]
fn at_once_gives_memory_back_in_one_call_a_run() {
    for dialect in BOTH {
        let mut rig = rig_with(dialect, AtOnce, flat(), 1);
        rig.send_pages(0, &[range(4000, 3000), range(8001, 9)]);
        assert_eq!(rig.take_discards(), [range(4000, 3000), range(8001, 9)]);
        rig.send_pages(0, &[range(3000, 5000), range(8001, 9)]);
        let fresh = [range(3000, 1000), range(7000, 1000)];
        assert_eq!(rig.take_discards(), fresh, "what was given back before is not again");
        rig.send_pages(1, &[range(3500, 7)]);
        assert_eq!(rig.take_discards(), []);
        assert_eq!(rig.device.lock().counters().discards, 4);
    }
}

#[test]
fn the_standard_dialect_can_mark_only_too() {
    let config = Config {
        discard: MarkOnly,
        ..Config::new(Dialect::Standard, 0)
    };
    let mut rig = Rig::configured(config, flat(), 1);
    rig.drive(0);
    rig.send_pfns(0, &[5000, 5001]);
    assert_eq!((rig.ballooned(), rig.take_discards()), (vec![range(5000, 2)], vec![]));
}

#[test]
fn a_bitmap_over_holes_and_past_the_end_of_ram_is_clipped_and_counted() {
    // Two regions that touch, a hole, and an end in the middle of a word.
    let regions = vec![range(0, 1000), range(1000, 1000), range(2500, 777)];
    for dialect in BOTH {
        let layout = Arc::new(Layout::new(regions.clone()).unwrap());
        let mut rig = rig_with(dialect, AtOnce, layout, 1);
        rig.send_bitmap(0, 64, &[0xff; 4096 / 8]);
        let ram = [range(64, 936), range(1000, 1000), range(2500, 777)];
        assert_eq!(rig.ballooned(), ram);
        assert_eq!(rig.take_discards(), ram, "a run ends where its region does");
        assert_eq!(rig.device.lock().counters().bad_pfns, 4096 - 936 - 1777);
        rig.send_bitmap(1, 4096, &[0xff; 8]);
        rig.send_bitmap(1, u64::MAX - 63, &[0xff; 16]);
        assert_eq!(rig.device.lock().counters().bad_pfns, 4096 - 936 - 1777 + 64 + 128);
        assert_eq!(rig.ballooned(), ram);
        rig.send_bitmap(1, 0, &[0xff; 1 << 10]);
        assert_eq!(rig.ballooned(), []);
        assert_eq!(malformed(&rig), (0, 0));
    }
}

#[test]
fn statistics_alone_or_with_misc_keep_their_queue_numbers() {
    for bits in 0..8u64 {
        let on = |bit: u64, feature: u64| if bits >> bit & 1 == 1 { feature } else { 0 };
        let features = on(0, STATS_VQ) | on(1, MISC_VQ) | on(2, PAGE_BITMAP);
        let mut rig = Rig::cold(Bitmap, PAGE_BITMAP | STATS_VQ | MISC_VQ, flat(), 1);
        rig.drive(features);
        rig.write(BUFFERS, &[4, 0, 0, 0x10, 0, 0, 0, 0, 0, 0]);
        assert_eq!(rig.send(2, &[(BUFFERS, 10, false)]), []);
        assert_eq!(rig.device.lock().stats().is_some(), features & STATS_VQ != 0);
        rig.send(3, &[(BUFFERS, 16, true)]);
        assert_eq!(rig.device.can_ask().is_ok(), features & MISC_VQ != 0);
        let ignored = u64::from(features & STATS_VQ == 0) + u64::from(features & MISC_VQ == 0);
        assert_eq!(rig.device.lock().counters().ignored_kicks, ignored);
        if features & PAGE_BITMAP == 0 {
            rig.send_pfns(0, &[5000]);
        } else {
            rig.send_pages(0, &[range(5000, 1)]);
        }
        assert_eq!(rig.ballooned(), [range(5000, 1)], "features {features:#x}");
    }
    // The RFC's numbers are mainline's of that time.
    let mut rfc = rig(BitmapRfc);
    assert_eq!(rfc.send(2, &[(BUFFERS, 10, false)]), []);
    assert!(rfc.device.lock().stats().is_some());
    assert_eq!(rfc.rings.len(), 3);
    let why = rfc.device.can_ask().unwrap_err();
    assert!(why.contains("bitmap-rfc") && why.contains("no way to ask"), "{why}");
    assert!(rfc.device.begin(1, Answers::default().sink()).is_err());
    rfc.device.hold(1).unwrap();
    rfc.device.end(1).unwrap();
}

#[test]
fn quirk_02_inflate_and_deflate_bitmaps_are_returned_with_length_0() {
    for dialect in BOTH {
        let mut rig = rig(dialect);
        for queue in [0, 1] {
            assert_eq!(rig.send_bitmap(queue, 0, &[0xff; 64]), [(0, 0)]);
            assert_eq!(rig.send(queue, &[(BUFFERS, 3, false)])[0].1, 0, "a bad one too");
        }
        assert_eq!(rig.irqs.take(), [0, 0, 1, 1], "each with an interrupt");
    }
}

#[test]
fn quirk_08_a_silent_deflate_makes_no_page_skippable() {
    for dialect in BOTH {
        let mut rig = rig(dialect);
        // The driver's inflate drops its last page where that is at a multiple of 64.
        rig.send_pages(0, &[range(6400, 129)]);
        assert_eq!(rig.ballooned(), [range(6400, 128)]);
        // Page 6464 alone is taken back without a word, and then 6400 with two before it, of which the last is dropped.
        rig.send_pages(1, &[range(6464, 1)]);
        assert_eq!(rig.ballooned(), [range(6400, 128)], "nothing was heard of it");
        rig.send_pages(0, &[range(6398, 66)]);
        rig.send_pages(1, &[range(6398, 3)]);
        assert_eq!(rig.ballooned(), [range(6400, 128)]);
        // What a migration is told does not have the pages that may be in use.
        let skippable: Vec<PageRange> = rig.device.ballooned().unwrap().runs().collect();
        assert_eq!(skippable, [range(6401, 63), range(6465, 63)]);
        // `actual` is what the driver writes, whatever the bits say.
        assert_eq!(rig.device.lock().actual(), 0);
        rig.device.lock().write_config(4, &125u32.to_le_bytes());
        assert_eq!(rig.device.lock().actual(), 125);
    }
}

#[test]
fn quirk_08_ballooned_pages_are_believed_of_a_guest_that_tells_before_it_takes() {
    for dialect in BOTH {
        for tells in [false, true] {
            let features = PAGE_BITMAP | if tells { MUST_TELL_HOST } else { 0 };
            let mut rig = Rig::cold(dialect, PAGE_BITMAP | MUST_TELL_HOST, flat(), 1);
            rig.drive(features);
            rig.send_pages(0, &[range(6401, 63)]);
            let told: Option<Vec<PageRange>> = rig.device.ballooned().map(|set| set.runs().collect());
            assert_eq!(told, tells.then(|| vec![range(6401, 63)]));
        }
    }
    // Arrays name every page: there, pages at multiples of 64 count too. Layouts that start anywhere are no matter.
    let layout = Layout::new(vec![range(5, 1000), range(9_000_000, 1000)]).unwrap();
    for page_bitmap in [0, PAGE_BITMAP] {
        let mut rig = Rig::cold(BitmapRfc, PAGE_BITMAP | MUST_TELL_HOST, Arc::new(layout.clone()), 1);
        rig.drive(MUST_TELL_HOST | page_bitmap);
        if page_bitmap == 0 {
            rig.send_pfns(0, &[63, 64, 65, 9_000_000]);
        } else {
            rig.send_bitmap(0, 0, &bits(0, 16, &[range(63, 3)]));
            rig.send_bitmap(0, 9_000_000, &[0xff; 16]);
        }
        let told: Vec<PageRange> = rig.device.ballooned().unwrap().runs().collect();
        let expected = if page_bitmap == 0 {
            vec![range(63, 3), range(9_000_000, 1)]
        } else {
            vec![range(63, 1), range(65, 1), range(9_000_001, 63), range(9_000_065, 63)]
        };
        assert_eq!(told, expected);
    }
}

#[test]
fn quirk_09_page_bitmap_is_not_offered_above_one_window() {
    let make = |dialect, features, pages| {
        let rig = Rig::new(Bitmap, 0);
        balloon::Balloon::new(
            Config::new(dialect, features),
            Arc::new(Layout::flat(pages).unwrap()),
            Arc::clone(&rig.mem),
            Arc::clone(&rig.irqs) as Arc<dyn balloon::Interrupts>,
            Arc::clone(&rig.discards) as Arc<dyn balloon::Discard>,
        )
    };
    assert!(make(Bitmap, PAGE_BITMAP, 32 << 18).is_ok());
    let Err(refused) = make(Bitmap, PAGE_BITMAP, (32 << 18) + 1) else {
        panic!("a guest of more than a window was offered PAGE_BITMAP");
    };
    let why = refused.to_string();
    assert!(why.contains("0x800001000") && why.contains("32 GiB"), "{why}");
    assert!(make(Bitmap, MISC_VQ, 512 << 18).is_ok(), "the misc queue has windows");
    assert!(make(BitmapRfc, PAGE_BITMAP, 512 << 18).is_ok(), "the RFC has none");
}

#[test]
fn a_bitmap_of_the_rfc_spans_any_guest() {
    let layout = Arc::new(Layout::flat(64 << 18).unwrap());
    let mut rig = rig_with(BitmapRfc, AtOnce, layout, 1);
    let mut all = vec![0u8; 2 << 20];
    all[0] = 2;
    all[(2 << 20) - 1] = 0x80;
    rig.send_bitmap(0, 0, &all);
    assert_eq!(rig.take_discards(), [range(1, 1), range((64 << 18) - 1, 1)]);
    rig.send_bitmap(0, 0, &vec![0xff; (2 << 20) + 8]);
    assert_eq!(malformed(&rig), (1, 1), "longer than all there is");
}

#[test]
fn quirk_10_naming_every_ballooned_page_again_is_idempotent() {
    for dialect in BOTH {
        for discard in [MarkOnly, AtOnce] {
            let mut rig = rig_with(dialect, discard, flat(), 1);
            let mut all = Vec::new();
            let mut given = 0;
            for i in 0..10 {
                all.push(range(5000 + i * 100, 50));
                rig.send_pages(0, &all);
                given += rig.take_discards().iter().map(|r| r.count()).sum::<u64>();
            }
            assert_eq!(rig.ballooned(), all);
            assert_eq!(given, if discard == AtOnce { 500 } else { 0 });
        }
    }
}

#[test]
fn quirk_11_stale_bits_discard_nothing_and_nothing_in_the_balloon_is_believed_after() {
    for dialect in BOTH {
        for discard in [MarkOnly, AtOnce] {
            for last_was_deflate in [true, false] {
                let mut rig = rig_with(dialect, discard, flat(), 1);
                rig.send_pages(0, &[range(5001, 500)]);
                if last_was_deflate {
                    rig.send_pages(1, &[range(5001, 100)]);
                }
                rig.take_discards();
                // Compaction moves one page out of the balloon: the driver sends what its bitmap still holds on the inflate
                // queue and then on the deflate queue. Which page it was, nobody says; it is in use.
                let stale = range(5001, if last_was_deflate { 100 } else { 500 });
                for queue in [0, 1, 0, 1] {
                    rig.send_pages(queue, &[stale]);
                    assert_eq!(rig.take_discards(), []);
                    assert_eq!(rig.ballooned(), []);
                }
                assert_eq!(rig.device.lock().counters().stale_bitmaps, 2);
                // The next inflation names all of the balloon again (quirk 10).
                rig.send_pages(0, &[range(5101, 900)]);
                assert_eq!(rig.ballooned(), [range(5101, 900)]);
            }
        }
    }
    let default = Config::new(Bitmap, 0).discard;
    assert_eq!((default, DiscardPolicy::default()), (MarkOnly, MarkOnly));
}

#[test]
fn quirk_08_a_granule_goes_back_only_where_the_buffer_names_its_pages_at_multiples_of_64() {
    for dialect in BOTH {
        let mut rig = rig_with(dialect, AtOnce, flat(), 512);
        rig.send_pages(0, &[range(1024, 512)]);
        assert_eq!(rig.take_discards(), [range(1024, 512)]);
        // Pages 1060 to 1088 come out, of which the driver drops the last. It is in use from there on.
        rig.send_pages(1, &[range(1060, 29)]);
        rig.send_pages(0, &[range(1060, 28), range(1089, 447)]);
        assert_eq!(rig.take_discards(), [], "page 1088 is in use");
        // It goes in again, and the driver names all from there on; then the whole granule.
        rig.send_pages(0, &[range(1088, 448)]);
        assert_eq!(rig.take_discards(), [], "of page 1024 nothing was said this time");
        rig.send_pages(0, &[range(1000, 536)]);
        assert_eq!(rig.take_discards(), [range(1024, 512)]);
        // Page by page nothing changes: what goes back is what was named and was not in.
        let mut rig = rig_with(dialect, AtOnce, flat(), 1);
        rig.send_pages(0, &[range(1024, 512)]);
        rig.take_discards();
        rig.send_pages(1, &[range(1060, 29)]);
        rig.send_pages(0, &[range(1060, 28), range(1089, 447)]);
        assert_eq!(rig.take_discards(), [range(1060, 28)]);
        assert_eq!(rig.ballooned(), [range(1024, 512)]);
    }
}

/// Inflates, has the driver's bitmap overwritten by what is no inflation, and inflates more: that may be compaction's.
fn suspect(discard: DiscardPolicy) -> Rig {
    let mut rig = rig_with(Bitmap, discard, flat(), 1);
    rig.send_pages(0, &[range(5001, 500)]);
    rig.send_bitmap(3, 0, &[0xff; 8]);
    let given = rig.take_discards();
    assert_eq!(
        given,
        if discard == AtOnce {
            vec![range(5001, 500)]
        } else {
            vec![]
        }
    );
    rig.send_pages(0, &[range(6001, 60)]);
    assert_eq!(
        (rig.ballooned(), rig.take_discards()),
        (vec![], vec![]),
        "not known yet"
    );
    rig
}

/// A driver that names new blocks alone, each once: what it inflates after an answer is not lost.
#[test]
fn quirk_11_an_inflation_after_an_answer_counts_once_the_next_buffer_shows_what_it_was() {
    let mut rig = suspect(MarkOnly);
    rig.send_pages(0, &[range(7001, 5)]);
    assert_eq!(rig.ballooned(), [range(5001, 500), range(6001, 60), range(7001, 5)]);
    let mut rig = suspect(MarkOnly);
    rig.send_pages(1, &[range(6002, 5)]);
    assert_eq!(rig.ballooned(), [range(5001, 500), range(6001, 1), range(6007, 54)]);
    // Memory goes back then, but for what the guest takes out by now, or may have taken out without a word: page 6016.
    let mut rig = suspect(AtOnce);
    rig.send_pages(0, &[range(7001, 5)]);
    let there = [range(6001, 15), range(6017, 44), range(7001, 5)];
    assert_eq!(rig.take_discards(), there);
    assert_eq!(rig.ballooned(), [&[range(5001, 500)], &there[..]].concat());
    let mut rig = suspect(AtOnce);
    rig.send_pages(1, &[range(6002, 5)]);
    assert_eq!(rig.take_discards(), [range(6001, 1), range(6007, 9), range(6017, 44)]);
    assert_eq!(rig.device.lock().counters().stale_bitmaps, 0);
}

#[test]
fn quirk_11_an_inflation_after_an_answer_is_dropped_with_all_there_was_where_it_was_compaction_s() {
    type Next = fn(&mut Rig);
    let nexts: [(Next, u64); 4] = [
        (|rig| rig.send_pages(1, &[range(6001, 60)]), 1),
        // Refused; all clear; a queue that stops.
        (|rig| drop(rig.send_bitmap(1, 1, &[0xff; 8])), 0),
        (|rig| drop(rig.send_bitmap(0, 0, &[0; 8])), 1),
        (
            |rig| {
                rig.rings[1].set_avail(&rig.mem, SIZE + 1);
                rig.kick(1);
            },
            0,
        ),
    ];
    for discard in [MarkOnly, AtOnce] {
        for (i, (next, stale)) in nexts.iter().enumerate() {
            let mut rig = suspect(discard);
            next(&mut rig);
            assert_eq!((rig.ballooned(), rig.take_discards()), (vec![], vec![]), "{i}");
            assert_eq!(rig.device.lock().counters().stale_bitmaps, *stale, "{i}");
            rig.send_pages(0, &[range(8001, 5)]);
            let there = if i == 3 { vec![] } else { vec![range(8001, 5)] };
            assert_eq!(rig.ballooned(), there, "{i}");
        }
    }
}

#[test]
fn quirk_15_a_guest_that_vanishes_leaves_an_empty_balloon() {
    for dialect in BOTH {
        let mut rig = rig(dialect);
        let features = rig.device.lock().driver_features() & !VERSION_1;
        rig.send_pages(0, &[range(5001, 63)]);
        rig.device.lock().reset();
        assert_eq!(rig.ballooned(), []);
        assert_eq!(rig.device.ballooned(), None, "nobody who tells is there");
        // The next driver took no PAGE_BITMAP: it is served arrays.
        rig.rings = (0..rig.rings.len() as u64).map(Ring::new).collect();
        for ring in &mut rig.rings {
            ring.set_avail(&rig.mem, 0);
        }
        rig.drive(features & !PAGE_BITMAP);
        rig.send_pfns(0, &[5000]);
        assert_eq!((rig.ballooned(), malformed(&rig)), (vec![range(5000, 1)], (0, 0)));
    }
}

#[test]
fn case_38_a_bitmap_over_any_descriptors_is_one_bitmap() {
    for dialect in BOTH {
        let pages = [range(4097, 5), range(4200, 1), range(4500, 100)];
        let all = bitmap_buffer(dialect, 4096, &bits(4096, 128, &pages));
        // One descriptor a field, as the RFC's driver has it; one byte each; cut in the middle of everything.
        let cuts: [Vec<usize>; 3] = [
            match dialect {
                Bitmap => vec![2, 2, 2, 2, 8, 8, 8],
                _ => vec![8, 8, 4, 8],
            },
            vec![1; 40],
            vec![3, 0, 7, 0, 0, 11, 20, 50],
        ];
        for cut in cuts {
            let mut rig = rig(dialect);
            let (mut chain, mut from) = (Vec::new(), 0);
            let rest = all.len() - cut.iter().sum::<usize>();
            for (i, len) in cut.into_iter().chain([rest]).enumerate() {
                let at = BUFFERS + i as u64 * 0x1003;
                rig.write(at, &all[from..from + len]);
                chain.push((at, len as u32, false));
                from += len;
            }
            rig.send(0, &chain);
            assert_eq!((rig.ballooned(), malformed(&rig)), (pages.to_vec(), (0, 0)));
        }
    }
}

#[test]
fn case_42_the_used_length_of_bitmaps_and_statistics_is_0() {
    for dialect in BOTH {
        let mut rig = rig(dialect);
        assert_eq!(rig.send_bitmap(0, 0, &[0xff; 64]), [(0, 0)]);
        assert_eq!(rig.send_bitmap(1, 0, &[0xff; 64]), [(0, 0)]);
        assert_eq!(rig.send(2, &[(BUFFERS, 10, false)]), []);
        assert!(rig.device.lock().request_stats());
        assert_eq!(rig.rings[2].used(&rig.mem), [(0, 0)]);
    }
}

#[test]
fn case_45_511_of_512_pages_discard_nothing_and_the_last_one_discards_once() {
    for dialect in BOTH {
        let mut rig = rig_with(dialect, AtOnce, flat(), 512);
        rig.send_bitmap(0, 1024, &bits(1024, 64, &[range(1024, 300)]));
        rig.send_bitmap(0, 1024, &bits(1024, 64, &[range(1024, 511)]));
        assert_eq!(rig.take_discards(), []);
        rig.send_bitmap(0, 1024, &bits(1024, 64, &[range(1024, 512)]));
        assert_eq!(rig.take_discards(), [range(1024, 512)]);
        rig.send_bitmap(0, 1024, &bits(1024, 64, &[range(1024, 511)]));
        assert_eq!(rig.take_discards(), [], "already given back");
        rig.send_bitmap(1, 1024, &bits(1024, 64, &[range(1200, 1)]));
        rig.send_bitmap(0, 1024, &bits(1024, 64, &[range(1024, 512)]));
        assert_eq!(rig.take_discards(), [range(1024, 512)], "taken and given up again");
        // Three granules and two ends, in one call; then the ends' other halves.
        rig.send_bitmap(0, 1984, &bits(1984, 256, &[range(2000, 1700)]));
        assert_eq!(rig.take_discards(), [range(2048, 1536)]);
        rig.send_bitmap(0, 1536, &bits(1536, 512, &[range(1536, 464), range(3584, 512)]));
        assert_eq!(rig.take_discards(), [range(1536, 512), range(3584, 512)]);
        assert_eq!(rig.device.lock().counters().discards, 5);
    }
}

#[test]
fn inflating_while_the_guest_is_asked_disturbs_no_answer() {
    let mut rig = rig(Bitmap);
    let answers = Answers::default();
    rig.send(3, &[(BUFFERS + 0x10_0000, 16, true)]);
    rig.device.begin(1, answers.sink()).unwrap();
    let id: u64 = rig.mem.read_obj(GuestAddress(BUFFERS + 0x10_0008)).unwrap();
    rig.send_pages(0, &[range(5001, 63)]);
    // The one buffer that the driver has: what lies in it now is no answer, and an answer is no inflation.
    let len = rig.device.lock().counters().answers;
    rig.send(3, &[(BUFFERS, 40, false)]);
    assert_eq!((rig.device.counts().malformed, len), (1, 0));
    let mut answer = bitmap_buffer(Bitmap, 0, &[0xf0; 8]);
    answer[4] = 1;
    answer[8..16].copy_from_slice(&id.to_le_bytes());
    rig.write(BUFFERS, &answer);
    rig.send(0, &[(BUFFERS, 40, false)]);
    assert_eq!((rig.ballooned(), malformed(&rig).0), (vec![], 2));
    rig.send(3, &[(BUFFERS, 40, false)]);
    let said = answers.take();
    assert_eq!(said.last(), Some(&(1, Answer::Finished)));
    assert_eq!(said.len(), 3);
}
