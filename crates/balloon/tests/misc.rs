//! Asking in the `bitmap` dialect.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use balloon::Dialect::Bitmap;
use balloon::feature::*;
use machine::{Answer, FreePages};
use pages::Layout;
use std::sync::Arc;
use support::*;
use vm_memory::{Bytes, GuestAddress};

const MISC: usize = 3;
const CONT: u16 = 0;
const DONE: u16 = 1;
/// Where the guest's request buffer lies.
const REQUEST: u64 = BUFFERS;
/// Where its answers lie.
const ANSWER: u64 = 2 << 20;
/// Pages of a window, in the tests that have several.
const WINDOW: u64 = 4096;

/// A header, by the fields that tests change.
#[derive(Clone, Copy)]
struct Header {
    cmd: u16,
    page_shift: u16,
    flag: u16,
    reserved: u16,
    req_id: u64,
    start_pfn: u64,
    bmap_len: u64,
}

fn header(flag: u16, req_id: u64, start_pfn: u64, bmap_len: u64) -> Header {
    Header {
        cmd: 0,
        page_shift: 12,
        flag,
        reserved: 0,
        req_id,
        start_pfn,
        bmap_len,
    }
}

fn bytes(h: Header, bitmap: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    for half in [h.cmd, h.page_shift, h.flag, h.reserved] {
        all.extend(half.to_le_bytes());
    }
    for long in [h.req_id, h.start_pfn, h.bmap_len] {
        all.extend(long.to_le_bytes());
    }
    all.extend(bitmap);
    all
}

fn rig() -> (Rig, Answers) {
    (Rig::new(Bitmap, MISC_VQ | STATS_VQ), Answers::default())
}

/// Posts a request buffer; what was used.
fn post(rig: &mut Rig) -> Vec<(u32, u32)> {
    rig.send(MISC, &[(REQUEST, 16, true)])
}

/// The request that the device wrote.
fn request(rig: &Rig) -> (u64, u64) {
    let at = GuestAddress(REQUEST);
    let head: u64 = rig.mem.read_obj(at).unwrap();
    let param: u64 = rig.mem.read_obj(GuestAddress(REQUEST + 8)).unwrap();
    (head, param)
}

/// Posts a buffer and opens a session; the id in the guest's hands.
fn ask(rig: &mut Rig, answers: &Answers, session: u32) -> u64 {
    post(rig);
    rig.device.begin(session, answers.sink()).unwrap();
    assert_eq!(rig.rings[MISC].used(&rig.mem).last().unwrap().1, 16);
    request(rig).1
}

/// Sends one answer in one descriptor.
fn answer(rig: &mut Rig, h: Header, bitmap: &[u8]) {
    let all = bytes(h, bitmap);
    rig.write(ANSWER, &all);
    let used = rig.send(MISC, &[(ANSWER, all.len() as u32, false)]);
    assert_eq!(used.len(), 1);
    assert_eq!(used[0].1, 0, "the driver tells answers by used length 0");
}

#[test]
fn a_request_and_its_answer() {
    let (mut rig, answers) = rig();
    assert_eq!(post(&mut rig), [], "the buffer is held");
    rig.device.begin(9, answers.sink()).unwrap();
    assert_eq!(rig.rings[MISC].used(&rig.mem), [(0, 16)]);
    assert_eq!(rig.irqs.take(), [3]);
    let (head, id) = request(&rig);
    assert_eq!((head, id), (0, 1), "cmd 0, reserved 0, an id that is not 0");

    let mut bitmap = vec![0u8; 2048];
    bitmap[0] = 0b1000_0001;
    bitmap[1] = 0xff;
    bitmap[2047] = 0x80;
    answer(&mut rig, header(DONE, id, 0, 2048), &bitmap);
    assert_eq!(rig.irqs.take(), [3], "one completion, one interrupt");
    let free = Answer::Free(vec![range(0, 1), range(7, 9), range(16383, 1)]);
    let expected = [free, Answer::Covered(range(0, 16384)), Answer::Finished];
    assert_eq!(answers.take(), expected.map(|a| (9, a)));
    rig.device.end(9).unwrap();
    assert_eq!(rig.irqs.take(), [0u16; 0], "nothing is stuck");
    let counts = rig.device.counts();
    assert_eq!((counts.answers, counts.late, counts.malformed), (1, 0, 0));
    assert!(!rig.device.allocates());
    assert_eq!(rig.irqs.configs(), 0);
}

#[test]
fn quirk_14_a_request_buffer_from_before_driver_ok_is_found() {
    let mut rig = Rig::cold(Bitmap, MISC_VQ, flat(), 1);
    rig.rings[MISC].add(&rig.mem, &[(REQUEST, 16, true)]);
    rig.drive(MISC_VQ);
    rig.device.begin(1, Answers::default().sink()).unwrap();
    assert_eq!(rig.rings[MISC].used(&rig.mem), [(0, 16)]);
}

#[test]
fn a_question_waits_for_the_request_buffer() {
    let (mut rig, answers) = rig();
    rig.device.begin(1, answers.sink()).unwrap();
    assert_eq!(rig.irqs.take(), [0u16; 0]);
    assert_eq!(post(&mut rig), [(0, 16)]);
    assert_eq!(rig.irqs.take(), [3]);
    // A question that was ended before that is never put.
    rig.device.end(1).unwrap();
    rig.device.begin(2, answers.sink()).unwrap();
    rig.device.end(2).unwrap();
    rig.irqs.take();
    assert_eq!(post(&mut rig), []);
    assert_eq!(rig.irqs.take(), [0u16; 0]);
}

#[test]
fn quirk_01_an_unanswered_end_frees_a_request_that_is_stuck() {
    let (mut rig, answers) = rig();
    ask(&mut rig, &answers, 1);
    rig.irqs.take();
    rig.device.end(1).unwrap();
    assert_eq!(rig.irqs.take(), [3]);
    assert_eq!(rig.rings[MISC].used(&rig.mem), [], "nothing is sent again");
}

#[test]
fn quirk_05_ids_are_never_used_twice_and_late_answers_are_dropped() {
    let (mut rig, answers) = rig();
    let first = ask(&mut rig, &answers, 1);
    rig.device.end(1).unwrap();
    answer(&mut rig, header(DONE, first, 0, 2048), &[0xff; 2048]);
    assert_eq!(rig.device.counts().late, 1);
    let second = ask(&mut rig, &answers, 1);
    assert_eq!((first, second), (1, 2));
    answer(&mut rig, header(DONE, first, 0, 2048), &[0xff; 2048]);
    assert_eq!(rig.device.counts().late, 2, "another request's id");
    assert_eq!(answers.take(), []);
    answer(&mut rig, header(DONE, second, 0, 2048), &[0xff; 2048]);
    answer(&mut rig, header(DONE, second, 0, 2048), &[0xff; 2048]);
    assert_eq!(answers.take().len(), 3);
    assert_eq!(rig.device.counts().late, 3, "said twice");
}

#[test]
fn quirk_06_a_last_partial_byte_and_an_empty_done() {
    let layout = Layout::flat(262_141).unwrap();
    let mut rig = Rig::cold(Bitmap, MISC_VQ, Arc::new(layout), 1);
    rig.drive(MISC_VQ);
    let answers = Answers::default();
    let id = ask(&mut rig, &answers, 1);
    answer(&mut rig, header(DONE, id, 0, 32767), &[0xff; 32767]);
    let free = Answer::Free(vec![range(0, 262_136)]);
    let expected = [free, Answer::Covered(range(0, 262_136)), Answer::Finished];
    assert_eq!(answers.take(), expected.map(|a| (1, a)));
    rig.device.end(1).unwrap();
    let id = ask(&mut rig, &answers, 2);
    answer(&mut rig, header(DONE, id, 0, 0), &[]);
    assert_eq!(answers.take(), [(2, Answer::Finished)]);
    rig.device.end(2).unwrap();
    // Bits past the end of RAM are ignored.
    let id = ask(&mut rig, &answers, 3);
    answer(&mut rig, header(DONE, id, 0, 32768 + 64), &[0xff; 32768 + 64]);
    let free = Answer::Free(vec![range(0, 262_141)]);
    let expected = [free, Answer::Covered(range(0, 262_141)), Answer::Finished];
    assert_eq!(answers.take(), expected.map(|a| (3, a)));
    assert_eq!(rig.device.counts().bad_pfns, 3 + 64 * 8);
}

#[test]
fn several_windows_are_handed_over_once_they_are_whole() {
    let (mut rig, answers) = rig();
    let id = ask(&mut rig, &answers, 1);
    let bitmap = [0xffu8; (WINDOW / 8) as usize];
    for window in 0..3 {
        answer(&mut rig, header(CONT, id, window * WINDOW, WINDOW / 8), &bitmap);
        assert_eq!(answers.take(), [], "nothing before DONE");
    }
    answer(&mut rig, header(DONE, id, 3 * WINDOW, 8), &[0, 1, 0, 0, 0, 0, 0, 0]);
    let free = Answer::Free(vec![range(0, 3 * WINDOW), range(3 * WINDOW + 8, 1)]);
    let expected = [free, Answer::Covered(range(0, 3 * WINDOW + 64)), Answer::Finished];
    assert_eq!(answers.take(), expected.map(|a| (1, a)));
    assert_eq!(rig.device.counts().answers, 4);
}

#[test]
fn quirk_04_a_window_that_is_not_due_makes_the_whole_answer_worthless() {
    // The guest reused its buffer: the first window's completion shows the second one's header, or the second's the
    // last one's; or the first is missing.
    let (cont, bitmap) = (WINDOW / 8, [0xffu8; (WINDOW / 8) as usize]);
    let sequences: [&[(u16, u64, u64)]; 5] = [
        &[(CONT, WINDOW, cont), (CONT, WINDOW, cont), (DONE, 2 * WINDOW, cont)],
        &[(CONT, 0, cont), (DONE, 2 * WINDOW, cont), (DONE, 2 * WINDOW, cont)],
        &[(CONT, 0, cont), (CONT, 0, cont), (DONE, WINDOW, cont)],
        &[(DONE, WINDOW, cont)],
        &[(CONT, 0, 0), (DONE, 0, cont)],
    ];
    for (i, sequence) in sequences.iter().enumerate() {
        let (mut rig, answers) = rig();
        let id = ask(&mut rig, &answers, 1);
        for (flag, start, len) in *sequence {
            answer(&mut rig, header(*flag, id, *start, *len), &bitmap[..*len as usize]);
        }
        assert_eq!(answers.take(), [(1, Answer::Finished)], "sequence {i}");
        let counts = rig.device.counts();
        let counted = (counts.malformed, counts.stray_windows, counts.torn);
        assert_eq!(counted, (1, 1, 0), "sequence {i}");
        rig.device.end(1).unwrap();
        // The next question works.
        let id = ask(&mut rig, &answers, 2);
        answer(&mut rig, header(DONE, id, 0, cont), &bitmap);
        assert_eq!(answers.take().len(), 3, "sequence {i}");
    }
}

#[test]
fn quirk_04_windows_that_are_read_only_when_the_last_was_written_are_dropped() {
    // Three buffers are available at once, and all are the same memory, which holds the last window by now.
    let (mut rig, answers) = rig();
    let id = ask(&mut rig, &answers, 1);
    let all = bytes(header(DONE, id, 2 * WINDOW, WINDOW / 8), &[0xff; (WINDOW / 8) as usize]);
    rig.write(ANSWER, &all);
    for _ in 0..3 {
        rig.rings[MISC].add(&rig.mem, &[(ANSWER, all.len() as u32, false)]);
    }
    rig.irqs.take();
    rig.kick(MISC);
    assert_eq!(answers.take(), [(1, Answer::Finished)]);
    assert_eq!(rig.rings[MISC].used(&rig.mem).len(), 3);
    assert_eq!(rig.irqs.take(), [3, 3, 3], "one interrupt a completion");
}

#[test]
fn quirk_07_cont_without_done_gives_nothing() {
    let (mut rig, answers) = rig();
    let id = ask(&mut rig, &answers, 1);
    answer(
        &mut rig,
        header(CONT, id, 0, WINDOW / 8),
        &[0xff; (WINDOW / 8) as usize],
    );
    post(&mut rig);
    rig.device.end(1).unwrap();
    assert_eq!(answers.take(), []);
    rig.device.begin(2, answers.sink()).unwrap();
    assert_eq!(request(&rig).1, 2);
}

#[test]
fn quirk_12_and_quirk_13_a_header_is_checked_strictly_and_does_no_harm() {
    let (mut rig, answers) = rig();
    let id = ask(&mut rig, &answers, 1);
    let good = header(DONE, id, 0, 2048);
    let bad = [
        Header { cmd: 1, ..good },
        Header { page_shift: 0, ..good },
        Header { page_shift: 13, ..good },
        Header {
            page_shift: 0x0c00,
            ..good
        },
        Header { reserved: 1, ..good },
        Header { flag: 2, ..good },
        Header { bmap_len: 2047, ..good },
        Header { bmap_len: 2049, ..good },
        Header {
            bmap_len: u64::MAX,
            ..good
        },
        Header { start_pfn: 1, ..good },
        Header {
            start_pfn: u64::MAX,
            ..good
        },
        Header { req_id: 0, ..good },
        Header { req_id: id + 1, ..good },
        Header {
            req_id: id.swap_bytes(),
            ..good
        },
        Header {
            req_id: id | 1 << 32,
            ..good
        },
    ];
    for (i, h) in bad.iter().enumerate() {
        answer(&mut rig, *h, &[0xff; 2048]);
        let counts = rig.device.counts();
        let so_far = i as u64 + 1;
        assert_eq!((counts.malformed, counts.bad_headers), (so_far, so_far), "header {i}");
        assert_eq!(answers.take(), []);
    }
    // Too short for a header, an array of page frame numbers, outside memory.
    for (at, len) in [(ANSWER, 0), (ANSWER, 31), (ANSWER, 16), (64 << 20, 4096)] {
        rig.send(MISC, &[(at, len, false)]);
    }
    let counts = rig.device.counts();
    assert_eq!(
        (counts.malformed, counts.bad_headers),
        (19, 18),
        "all but the one outside memory"
    );
    answer(&mut rig, good, &[0; 2048]);
    let expected = [Answer::Covered(range(0, 16384)), Answer::Finished];
    assert_eq!(answers.take(), expected.map(|a| (1, a)), "the session was still open");
}

#[test]
fn quirk_16_the_longest_buffer_is_normal_and_a_longer_one_hostile() {
    let (mut rig, answers) = rig();
    let id = ask(&mut rig, &answers, 1);
    rig.write(ANSWER, &bytes(header(DONE, id, 0, u64::from(u32::MAX) - 32), &[]));
    rig.send(MISC, &[(ANSWER, u32::MAX, false)]);
    rig.write(ANSWER, &bytes(header(DONE, id, 0, (1 << 20) + 8), &[]));
    rig.send(MISC, &[(ANSWER, (1 << 20) + 40, false)]);
    assert_eq!(rig.device.counts().malformed, 2);
    answer(&mut rig, header(DONE, id, 0, 1 << 20), &vec![0xff; 1 << 20]);
    assert_eq!(answers.take()[0], (1, Answer::Free(vec![range(0, 16384)])));
}

#[test]
fn an_answer_over_any_descriptors_is_one_answer() {
    let (mut rig, answers) = rig();
    let id = ask(&mut rig, &answers, 1);
    let mut all = bytes(header(DONE, id, 0, 2048), &[0; 2048]);
    all[32 + 1000] = 1;
    let mut chain = Vec::new();
    let mut from = 0;
    for (i, len) in [5usize, 30, 0, 700, 1345].into_iter().enumerate() {
        let at = ANSWER + i as u64 * 0x4001;
        rig.write(at, &all[from..from + len]);
        chain.push((at, len as u32, false));
        from += len;
    }
    assert_eq!(from, all.len());
    rig.send(MISC, &chain);
    assert_eq!(answers.take()[0], (1, Answer::Free(vec![range(8000, 1)])));
}

#[test]
fn request_buffers_that_cannot_be_used_are_returned() {
    let (mut rig, answers) = rig();
    assert_eq!(rig.send(MISC, &[(REQUEST, 15, true)]).len(), 1);
    assert_eq!(rig.send(MISC, &[(ANSWER, 32, false), (REQUEST, 16, true)]).len(), 1);
    assert_eq!(post(&mut rig), []);
    assert_eq!(post(&mut rig).len(), 1, "a second one");
    assert_eq!(rig.device.lock().counters().malformed, 3);
    rig.device.begin(1, answers.sink()).unwrap();
    assert_eq!(rig.rings[MISC].used(&rig.mem).len(), 1);
    rig.device.end(1).unwrap();
    // One over several descriptors, longer than it has to be.
    rig.send(
        MISC,
        &[(REQUEST, 3, true), (REQUEST + 3, 0, true), (REQUEST + 3, 100, true)],
    );
    rig.device.begin(2, answers.sink()).unwrap();
    assert_eq!(request(&rig), (0, 2));
    rig.device.end(2).unwrap();
    // One outside memory: the question finishes without an answer.
    rig.send(MISC, &[(64 << 20, 16, true)]);
    rig.device.begin(3, answers.sink()).unwrap();
    assert_eq!(answers.take(), [(3, Answer::Finished)]);
}

#[test]
fn quirk_15_a_guest_that_vanishes_in_the_middle() {
    let (mut rig, answers) = rig();
    let id = ask(&mut rig, &answers, 1);
    answer(
        &mut rig,
        header(CONT, id, 0, WINDOW / 8),
        &[0xff; (WINDOW / 8) as usize],
    );
    post(&mut rig);
    rig.device.lock().reset();
    assert_eq!(answers.take(), [(1, Answer::Finished)]);
    rig.device.end(1).unwrap();
    assert!(rig.device.can_ask().is_err());
    // It comes back, with rings at their start; the old request buffer is forgotten.
    rig.rings = (0..4).map(Ring::new).collect();
    for ring in &mut rig.rings {
        ring.set_avail(&rig.mem, 0);
    }
    rig.drive(MISC_VQ);
    rig.irqs.take();
    rig.device.begin(2, answers.sink()).unwrap();
    assert_eq!(rig.irqs.take(), [0u16; 0], "no buffer yet");
    rig.device.end(2).unwrap();
}

#[test]
fn case_33_the_statistics_queue_keeps_its_number_and_stays_silent() {
    let mut rig = Rig::cold(Bitmap, MISC_VQ | STATS_VQ, flat(), 1);
    rig.drive(MISC_VQ);
    assert_eq!(rig.send(2, &[(BUFFERS, 10, false)]), []);
    assert_eq!(rig.device.lock().counters().ignored_kicks, 1);
    assert_eq!(rig.device.stats(), None);
    assert_eq!(post(&mut rig), []);
    rig.device.begin(1, Answers::default().sink()).unwrap();
    assert_eq!(rig.rings[MISC].used(&rig.mem), [(0, 16)]);
}

#[test]
fn without_page_bitmap_inflate_and_deflate_carry_arrays() {
    let (mut rig, _) = rig();
    rig.send_pfns(0, &[5000, 5001]);
    rig.send_pfns(1, &[5000]);
    assert_eq!(rig.ballooned(), [range(5001, 1)]);
    assert_eq!(rig.take_discards(), [], "pages are only marked");
    assert_eq!(rig.device.lock().counters().malformed, 0);
}

#[test]
fn quirk_02_answers_are_returned_with_length_0_and_requests_with_16() {
    let (mut rig, answers) = rig();
    rig.send(MISC, &[(REQUEST, 4096, true)]);
    rig.device.begin(1, answers.sink()).unwrap();
    assert_eq!(
        rig.rings[MISC].used(&rig.mem),
        [(0, 16)],
        "whatever the buffer's length"
    );
    let id = request(&rig).1;
    answer(&mut rig, header(CONT, id, 0, WINDOW / 8), &[0; WINDOW as usize / 8]);
    answer(&mut rig, header(DONE, id, WINDOW, 8), &[0; 8]);
    answer(&mut rig, header(DONE, id, 0, 8), &[0; 8]);
    answer(
        &mut rig,
        Header {
            cmd: 3,
            ..header(DONE, id, 0, 8)
        },
        &[0; 8],
    );
}

#[test]
fn quirk_03_nothing_but_get_free_pages_is_ever_requested() {
    let (mut rig, answers) = rig();
    for session in 1..5 {
        rig.write(REQUEST, &[0xee; 64]);
        let id = ask(&mut rig, &answers, session);
        assert_eq!(request(&rig), (0, id), "cmd 0 and reserved 0");
        let mut past = [0u8; 48];
        rig.mem.read_slice(&mut past, GuestAddress(REQUEST + 16)).unwrap();
        assert_eq!(past, [0xee; 48], "16 bytes, no more");
        rig.device.end(session).unwrap();
    }
}

#[test]
fn done_first_closes_the_question_and_the_rest_is_late() {
    let (mut rig, answers) = rig();
    let id = ask(&mut rig, &answers, 1);
    answer(&mut rig, header(DONE, id, 0, 8), &[1; 8]);
    let free: Vec<_> = (0..8).map(|i| range(i * 8, 1)).collect();
    let expected = [Answer::Free(free), Answer::Covered(range(0, 64)), Answer::Finished];
    assert_eq!(
        answers.take(),
        expected.map(|a| (1, a)),
        "it was whole, as far as it went"
    );
    answer(&mut rig, header(CONT, id, 64, 8), &[0xff; 8]);
    answer(&mut rig, header(DONE, id, 128, 8), &[0xff; 8]);
    assert_eq!(answers.take(), []);
    assert_eq!(rig.device.counts().late, 2);
}

#[test]
fn windows_that_overlap_make_the_answer_worthless() {
    let (mut rig, answers) = rig();
    let id = ask(&mut rig, &answers, 1);
    answer(&mut rig, header(CONT, id, 0, WINDOW / 8), &[0xff; WINDOW as usize / 8]);
    answer(&mut rig, header(DONE, id, WINDOW - 64, 16), &[0xff; 16]);
    assert_eq!(answers.take(), [(1, Answer::Finished)]);
    let counts = rig.device.counts();
    assert_eq!((counts.malformed, counts.stray_windows), (1, 1));
}
