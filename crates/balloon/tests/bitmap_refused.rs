//! Buffers of the bitmap dialects that are not believed: each is counted and puts nothing in. It may have been the driver's
//! word on a page that left, so nothing in the balloon is believed after it; the next buffer works. The quirks' numbers
//! are those of the dialects' documentation.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use balloon::Dialect::{self, Bitmap, BitmapRfc};
use balloon::DiscardPolicy::MarkOnly;
use balloon::feature::*;
use pages::Layout;
use std::sync::Arc;
use support::bitmaps::*;
use support::*;

#[test]
fn quirk_12_arrays_of_a_driver_that_fell_back_are_counted_and_empty_the_balloon() {
    for dialect in BOTH {
        let mut rig = rig(dialect);
        let arrays: [Vec<u32>; 5] = [
            (6000..6256).collect(),
            (6000..6256).rev().collect(),
            vec![5001],
            // As much like a header as an array can be: 786432 is how `cmd 0, page_shift 12` reads.
            vec![786_432, 0, 0, 0, 64, 0, 0, 0],
            (5001..5010).collect(),
        ];
        let mut refused = 0;
        for (i, array) in arrays.iter().enumerate() {
            for queue in [0, 1] {
                rig.send_pages(0, &[range(5001, 10 + 2 * i as u64 + queue as u64)]);
                assert_ne!(rig.ballooned(), []);
                rig.send_pfns(queue, array);
                // That one is an empty bitmap to the one dialect: an inflation that names nothing, a deflation of nothing.
                let empty = dialect == Bitmap && i == 3;
                refused += u64::from(!empty);
                assert_eq!(malformed(&rig), (refused, refused), "{dialect} array {i}");
                assert_eq!(rig.ballooned().is_empty(), !empty || queue == 0, "{dialect} array {i}");
            }
        }
    }
}

/// The fields of a header, one wrong at a time: offset and bytes.
fn wrong(dialect: Dialect) -> Vec<(usize, Vec<u8>)> {
    let start = if dialect == Bitmap { 16 } else { 8 };
    let len = if dialect == Bitmap { 24 } else { 20 };
    let mut all = vec![
        (start, vec![1]),
        (start, vec![32]),
        (len, vec![63]),
        (len, vec![65]),
        (len, vec![0]),
        (len + 7, vec![0x80]),
    ];
    if dialect == Bitmap {
        // cmd, shift, reserved, request id.
        all.extend([
            (0, vec![1]),
            (2, vec![13]),
            (2, vec![0]),
            (2, vec![0, 12]),
            (6, vec![1]),
            (8, vec![1]),
            (15, vec![1]),
        ]);
    } else {
        // flags, shift.
        all.extend([(0, vec![1]), (7, vec![1]), (16, vec![13]), (16, vec![0]), (17, vec![1])]);
    }
    all
}

#[test]
fn quirk_12_a_header_is_checked_strictly_before_it_is_believed() {
    for dialect in BOTH {
        let mut rig = rig(dialect);
        let mut bad = 0;
        for (at, bytes) in wrong(dialect) {
            let mut all = bitmap_buffer(dialect, 4096, &[0xff; 64]);
            all[at..at + bytes.len()].copy_from_slice(&bytes);
            rig.write(BUFFERS, &all);
            for queue in [0, 1] {
                rig.send(queue, &[(BUFFERS, all.len() as u32, false)]);
                bad += 1;
                assert_eq!(malformed(&rig), (bad, bad), "{dialect}: {bytes:?} at {at}");
            }
        }
        assert_eq!(rig.ballooned(), []);
        // The flag is stale: anything may stand there.
        let mut all = bitmap_buffer(dialect, 4096, &[0xff; 64]);
        if dialect == Bitmap {
            all[4..6].copy_from_slice(&[1, 7]);
        }
        rig.write(BUFFERS, &all);
        rig.send(0, &[(BUFFERS, all.len() as u32, false)]);
        assert_eq!(rig.ballooned(), [range(4096, 512)]);
    }
}

/// A driver of 16384 pages less three, its first fill having pages in the first word and in the last: it looks for more in a
/// second window, finds none, and leaves an all-clear bitmap behind, which compaction then sends.
#[test]
fn quirk_11_what_an_empty_window_left_behind_empties_the_balloon() {
    for dialect in BOTH {
        // Where such a window starts, and for another guest: no multiple of 64.
        for (start, refused) in [(32_768, 0), (32_762, 2)] {
            let mut rig = rig(dialect);
            rig.send_pages(0, &[range(5, 16_370)]);
            for queue in [0, 1] {
                rig.send_bitmap(queue, start, &[0; 2064]);
                assert_eq!(
                    rig.ballooned(),
                    [],
                    "{dialect} from {start}: some page left, and it is in use"
                );
            }
            assert_eq!(malformed(&rig).1, refused);
            assert_eq!(rig.device.lock().counters().stale_bitmaps, u64::from(refused == 0));
        }
    }
}

/// What a big-endian guest of virtio 1 sends in the `bitmap` dialect: the header goes through its conversions, the bitmap is its
/// own words. Nothing can tell that from a good one, which is why PAGE_BITMAP is not offered where such a guest can run.
#[test]
fn quirk_13_words_of_another_byte_order_behind_a_good_header_are_believed_and_wrong() {
    let mut rig = rig(Bitmap);
    let mut bitmap = bits(4992, 16, &[range(4993, 3)]);
    bitmap.chunks_mut(8).for_each(<[u8]>::reverse);
    rig.send_bitmap(0, 4992, &bitmap);
    assert_eq!(malformed(&rig), (0, 0));
    assert_eq!(rig.ballooned(), [range(4992 + 57, 3)], "not what the guest gave up");
}

#[test]
fn quirk_13_what_another_byte_order_sends_is_refused() {
    for dialect in BOTH {
        let mut rig = rig(dialect);
        let mut all = bitmap_buffer(dialect, 4096, &[0xff; 64]);
        let fields: &[(usize, usize)] = match dialect {
            Bitmap => &[(0, 2), (2, 2), (4, 2), (6, 2), (8, 8), (16, 8), (24, 8)],
            _ => &[(0, 8), (8, 8), (16, 4), (20, 8)],
        };
        for (at, len) in fields {
            all[*at..at + len].reverse();
        }
        rig.write(BUFFERS, &all);
        for queue in [0, 1] {
            rig.send(queue, &[(BUFFERS, all.len() as u32, false)]);
        }
        assert_eq!((malformed(&rig), rig.ballooned()), ((2, 2), vec![]));
    }
    // A guest of 32 bits speaks another RFC: 4 bytes a word.
    let mut rfc = rig(BitmapRfc);
    let mut short = vec![0u8; 4];
    for field in [4096u32, 12, 64] {
        short.extend(field.to_le_bytes());
    }
    short.extend([0xff; 64]);
    rfc.write(BUFFERS, &short);
    rfc.send(0, &[(BUFFERS, short.len() as u32, false)]);
    assert_eq!((malformed(&rfc), rfc.ballooned()), ((1, 1), vec![]));
}

#[test]
fn quirk_16_the_longest_descriptor_is_normal_and_a_longer_one_hostile() {
    for dialect in BOTH {
        let mut rig = rig_with(dialect, MarkOnly, Arc::new(Layout::flat(32 << 18).unwrap()), 1);
        rig.send_bitmap(0, 0, &vec![0xff; 1 << 20]);
        assert_eq!(rig.ballooned(), [range(0, 32 << 18)]);
        let header = bitmap_buffer(dialect, 0, &[]).len() as u64;
        for len in [(1 << 20) + 8, u64::from(u32::MAX) - header] {
            let mut all = bitmap_buffer(dialect, 0, &[]);
            let at = all.len() - 8;
            all[at..].copy_from_slice(&len.to_le_bytes());
            rig.write(BUFFERS, &all);
            rig.send(1, &[(BUFFERS, (header + len) as u32, false)]);
        }
        assert_eq!((malformed(&rig), rig.ballooned()), ((2, 2), vec![]));
        // More bytes than a chain may have: that ring is broken.
        rig.send(1, &[(BUFFERS, u32::MAX, false); 4]);
        assert!(rig.device.lock().needs_reset());
    }
}

#[test]
fn case_39_bad_chains_are_counted_and_empty_the_balloon_and_the_next_works() {
    for dialect in BOTH {
        for queue in [0, 1] {
            let mut rig = rig(dialect);
            let good = bitmap_buffer(dialect, 4992, &[0xff; 8]);
            let len = good.len() as u32;
            rig.write(BUFFERS, &good);
            rig.write((64 << 20) - 8, &good[..8]);
            let bad: [&[Desc]; 8] = [
                &[(BUFFERS, len, true)],
                &[(BUFFERS, len, false), (BUFFERS, 4, true)],
                &[(BUFFERS, len - 1, false)],
                &[(BUFFERS, 0, false)],
                &[(BUFFERS, 20, false)],
                &[(64 << 20, len, false)],
                &[((64 << 20) - 8, len, false)],
                &[(BUFFERS, 28, false), (u64::MAX - 1, len - 28, false)],
            ];
            for (i, chain) in bad.iter().enumerate() {
                rig.write(2 * BUFFERS, &bitmap_buffer(dialect, 9024, &[i as u8 + 1; 8]));
                rig.send(0, &[(2 * BUFFERS, len, false)]);
                assert_ne!(rig.ballooned(), []);
                assert_eq!(rig.send(queue, chain).len(), 1, "returned: {chain:x?}");
                assert_eq!(malformed(&rig).0, i as u64 + 1);
                assert_eq!(rig.ballooned(), [], "it may have been the word on a page that left");
            }
            assert_eq!(malformed(&rig).1, 3, "the others have no header to check");
            rig.send_bitmap(0, 4992, &[0xff; 8]);
            assert_eq!(rig.ballooned(), [range(4992, 64)]);
            assert!(!rig.device.lock().needs_reset());
        }
    }
}

#[test]
fn case_48_a_second_statistics_buffer_returns_the_first_and_a_huge_one_is_bounded() {
    for dialect in BOTH {
        let mut rig = rig(dialect);
        assert_eq!(rig.send(2, &[(BUFFERS, 20, false)]), []);
        assert_eq!(rig.send(2, &[(BUFFERS, u32::MAX, false)]), [(0, 0)]);
        assert!(rig.device.lock().request_stats());
        assert_eq!(rig.rings[2].used(&rig.mem), [(1, 0)]);
        assert!(malformed(&rig).0 > 0);
        rig.send_pages(0, &[range(5001, 1)]);
        assert_eq!(rig.ballooned(), [range(5001, 1)], "the other queues go on");
    }
}

#[test]
fn case_49_broken_rings_stop_their_queue_alone_and_the_balloon_is_not_believed_until_a_reset() {
    for dialect in BOTH {
        for queue in [0, 1] {
            let mut rig = rig(dialect);
            rig.send_pages(0, &[range(5001, 63)]);
            if queue == 0 {
                let ahead = rig.rings[0].avail.wrapping_add(SIZE + 1);
                rig.rings[0].set_avail(&rig.mem, ahead);
            } else {
                rig.rings[1].raw_desc(&rig.mem, 0, BUFFERS, 64, 1, 1);
                rig.rings[1].raw_desc(&rig.mem, 1, BUFFERS, 64, 1, 0);
                rig.rings[1].push(&rig.mem, 0);
            }
            rig.kick(queue);
            assert!(rig.device.lock().needs_reset());
            assert_eq!(rig.device.lock().counters().broken_queues, 1);
            assert_eq!(rig.ballooned(), [], "half of what the guest says is not heard");
            let all = bitmap_buffer(dialect, 4992, &[0xff; 8]);
            rig.write(BUFFERS, &all);
            let used = rig.send(1 - queue, &[(BUFFERS, all.len() as u32, false)]);
            assert_eq!((used.len(), rig.ballooned()), (1, vec![]), "the other queue goes on");
            // So it is behind a device that takes over.
            let section = rig.device.lock().save();
            rig.device.lock().restore(&section).unwrap();
            rig.send_bitmap(1 - queue, 4992, &[0x7f; 8]);
            assert_eq!(rig.ballooned(), []);
            let features = rig.device.lock().driver_features() & !VERSION_1;
            rig.device.lock().reset();
            rig.rings = (0..rig.rings.len() as u64).map(Ring::new).collect();
            rig.rings.iter_mut().for_each(|ring| ring.set_avail(&rig.mem, 0));
            rig.drive(features);
            rig.send_bitmap(0, 4992, &[0xff; 8]);
            assert_eq!(rig.ballooned(), [range(4992, 64)]);
        }
    }
}
