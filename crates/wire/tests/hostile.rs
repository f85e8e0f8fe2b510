//! What a peer could send that is wrong: each is refused, with an error that says what.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Raw, batch, batch_by_hand, decode, frame_by_hand, layout, messages, range};
use machine::Section;
use pages::Pfn;
use wire::batch::{Run, RunKind, StreamOrder, decode_header, decode_runs};
use wire::frame::{Decoder, Kind};
use wire::{Digests, Error, Message, Skip, SkipReason};

fn runs_of(entries: &[(u64, u64, u32, u32)], payload_bytes: u32) -> wire::Result<Vec<Run>> {
    let (head, table) = batch(entries, payload_bytes);
    let header = decode_header(&head)?;
    let mut out = vec![
        Run {
            range: range(9, 9),
            kind: RunKind::Data
        };
        3
    ];
    let result = decode_runs(&header, &table, &layout(), &mut out);
    assert!(result.is_ok() || out.is_empty(), "runs are left over after {result:?}");
    result.map(|()| out)
}

#[test]
fn a_table_that_is_right_is_taken() {
    let entries = [(0, 2, 0, 0), (2, 3, 1, 0), (250, 6, 2, 0xaa), (512, 256, 0, 0)];
    let runs = runs_of(&entries, 258 * 4096).unwrap();
    assert_eq!(runs[2].kind, RunKind::Fill(0xaa));
    assert_eq!(runs[3].range, range(512, 256));
    assert_eq!(runs.len(), 4);
}

#[test]
fn case_19_counts_of_two_to_the_forty_in_a_run() {
    for kind in [0, 1] {
        let error = runs_of(&[(0, 1 << 40, kind, 0)], 4096).unwrap_err();
        assert_eq!(
            error,
            Error::RunOutsideRam {
                index: 0,
                range: range(0, 1 << 40)
            }
        );
    }
}

#[test]
fn case_19_overlap_and_order_of_runs() {
    for second in [1, 0] {
        let error = runs_of(&[(0, 2, 1, 0), (second, 2, 1, 0)], 0).unwrap_err();
        let range = range(second, 2);
        assert_eq!(
            error,
            Error::RunOrder {
                index: 1,
                range,
                floor: Pfn(2)
            }
        );
    }
    assert!(runs_of(&[(0, 2, 1, 0), (2, 2, 1, 0)], 0).is_ok(), "runs may touch");
}

#[test]
fn case_19_overflow_of_start_and_length() {
    let error = runs_of(&[(u64::MAX - 1, 2, 0, 0)], 8192).unwrap_err();
    assert_eq!(
        error,
        Error::RunRange {
            index: 0,
            start: Pfn(u64::MAX - 1),
            pages: 2
        }
    );
    // Bytes that overflow 64 bits, and 32 bits only.
    assert!(runs_of(&[(0, 1 << 52, 0, 0)], 0).is_err());
    assert!(runs_of(&[(0, 1 << 20, 0, 0)], 0).is_err());
}

#[test]
fn case_19_a_page_in_a_hole_and_a_run_across_it() {
    for (start, pages) in [(256, 1), (255, 2), (511, 2), (255, 258), (768, 1), (400, 10)] {
        let error = runs_of(&[(start, pages, 1, 0)], 0).unwrap_err();
        assert_eq!(
            error,
            Error::RunOutsideRam {
                index: 0,
                range: range(start, pages)
            }
        );
    }
}

#[test]
fn case_19_counts_in_a_batch_header() {
    let raw = Raw {
        flags: 0,
        stream: 0,
        round: 0,
        seq: 0,
        runs: 1,
        payload_bytes: 0,
    };
    let refused = |raw: Raw| decode_header(&batch_by_hand(raw, &[]).0).unwrap_err();
    for runs in [4097, u32::MAX] {
        let error = refused(Raw { runs, ..raw });
        let what = "runs of a batch";
        assert_eq!(
            error,
            Error::Limit {
                what,
                value: runs.into(),
                limit: 4096
            }
        );
    }
    for payload_bytes in [(4 << 20) + 1, u32::MAX] {
        let error = refused(Raw { payload_bytes, ..raw });
        let what = "payload bytes of a batch";
        assert_eq!(
            error,
            Error::Limit {
                what,
                value: payload_bytes.into(),
                limit: 4 << 20
            }
        );
    }
    assert!(matches!(
        refused(Raw { stream: 64, ..raw }),
        Error::Limit {
            value: 64,
            limit: 63,
            ..
        }
    ));
    assert!(matches!(
        refused(Raw { flags: 4, ..raw }),
        Error::Reserved { value: 4, .. }
    ));
    assert!(matches!(
        refused(Raw { runs: 0, ..raw }),
        Error::BatchShape { what: "batch", .. }
    ));
    for (runs, payload_bytes) in [(1, 0), (0, 4096)] {
        let error = refused(Raw {
            flags: 1,
            runs,
            payload_bytes,
            ..raw
        });
        assert_eq!(
            error,
            Error::BatchShape {
                what: "marker",
                runs,
                payload_bytes
            }
        );
    }
}

#[test]
fn case_19_end_twice_and_pages_after_the_end() {
    let marker = decode_header(&wire::batch::marker(0, 0, 0)).unwrap();
    let again = decode_header(&wire::batch::marker(0, 0, 1)).unwrap();
    let mut order = StreamOrder::new(0);
    order.expect(&marker).unwrap();
    let error = order.expect(&again).unwrap_err();
    assert_eq!(
        error,
        Error::RoundEnded {
            stream: 0,
            what: "a marker",
            round: 0
        }
    );

    let raw = Raw {
        flags: 0,
        stream: 0,
        round: 0,
        seq: 1,
        runs: 1,
        payload_bytes: 0,
    };
    let late = decode_header(&batch_by_hand(raw, &[]).0).unwrap();
    let error = order.expect(&late).unwrap_err();
    assert_eq!(
        error,
        Error::RoundEnded {
            stream: 0,
            what: "a batch",
            round: 0
        }
    );
}

#[test]
fn runs_of_unknown_kinds_and_stray_fill_values_are_refused() {
    for (kind, fill) in [(0, 1), (1, 1), (3, 0), (u32::MAX, 0)] {
        let error = runs_of(&[(0, 1, kind, fill)], 4096).unwrap_err();
        assert_eq!(error, Error::RunKind { index: 0, kind, fill });
    }
    let empty = runs_of(&[(5, 0, 0, 0)], 0).unwrap_err();
    assert_eq!(
        empty,
        Error::RunRange {
            index: 0,
            start: Pfn(5),
            pages: 0
        }
    );
}

#[test]
fn payload_and_data_runs_must_agree() {
    for payload_bytes in [0, 4096, 3 * 4096, 8191] {
        let error = runs_of(&[(0, 2, 0, 0), (2, 1, 1, 0)], payload_bytes).unwrap_err();
        assert_eq!(
            error,
            Error::PayloadBytes {
                runs_bytes: 8192,
                payload_bytes
            }
        );
    }
}

#[test]
fn a_table_of_another_length_than_the_header_says_is_refused() {
    let (head, mut table) = batch(&[(0, 1, 1, 0), (1, 1, 1, 0)], 0);
    let header = decode_header(&head).unwrap();
    table.pop();
    let mut out = Vec::new();
    let error = decode_runs(&header, &table, &layout(), &mut out).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Length {
                given: 47,
                said: 48,
                ..
            }
        ),
        "{error}"
    );
}

/// A length of 2^40 as bincode writes it.
fn two_to_the_forty() -> Vec<u8> {
    let mut bytes = vec![253];
    bytes.extend_from_slice(&(1u64 << 40).to_le_bytes());
    bytes
}

#[test]
fn case_19_lengths_of_two_to_the_forty_inside_a_payload() {
    // Variant, then whatever fields come ahead of the length.
    let ahead: [(Kind, &[u8]); 9] = [
        (Kind::Hello, &[0]),                            // the machine's kind
        (Kind::Hello, &[0, 1, b'x']),                   // its regions
        (Kind::Hello, &[0, 1, b'x', 1, 0, 1, 1, 0, 0]), // its extras
        (Kind::Refuse, &[2]),                           // reasons
        (Kind::Refuse, &[2, 1]),                        // the first reason
        (Kind::Skip, &[3, 0]),                          // ranges
        (Kind::Section, &[6]),                          // name
        (Kind::Section, &[6, 1, b'x', 1]),              // data
        (Kind::Digests, &[8, 1]),                       // sums
    ];
    for (kind, ahead) in ahead {
        for behind in [0usize, 1000] {
            let payload = [ahead, &two_to_the_forty(), &vec![0; behind]].concat();
            let error = decode(&frame_by_hand(kind.number(), &payload)).unwrap_err();
            assert!(
                matches!(error, Error::Payload { .. }),
                "{kind:?} with {behind} bytes behind: {error}"
            );
        }
    }
}

#[test]
fn case_19_frames_longer_than_their_kind_allows() {
    for kind in Kind::ALL {
        for len in [kind.max_payload_bytes() + 1, u32::MAX as usize] {
            let mut head = [0; 12];
            head[..4].copy_from_slice(&u32::try_from(len).unwrap().to_le_bytes());
            head[4..6].copy_from_slice(&kind.number().to_le_bytes());
            let error = wire::frame::decode_header(&head).unwrap_err();
            let (value, limit) = (len as u64, kind.max_payload_bytes() as u64);
            assert_eq!(
                error,
                Error::Limit {
                    what: kind.name(),
                    value,
                    limit
                }
            );
        }
    }
}

#[test]
fn case_12_unknown_frame_kinds_are_named() {
    for kind in [0, 21, 0x5054, u16::MAX] {
        let error = decode(&frame_by_hand(kind, &[])).unwrap_err();
        assert_eq!(error, Error::FrameKind(kind));
        assert!(error.to_string().contains(&kind.to_string()), "{error}");
    }
}

#[test]
fn a_kind_must_match_its_message() {
    let ping = wire::frame::encode(&Message::Ping).unwrap();
    let error = decode(&frame_by_hand(Kind::Ready.number(), &ping[12..])).unwrap_err();
    assert_eq!(
        error,
        Error::KindMismatch {
            kind: "Ready",
            holds: "Ping"
        }
    );
    let error = decode(&frame_by_hand(Kind::Ping.number(), &[99])).unwrap_err();
    assert!(matches!(error, Error::Payload { kind: "Ping", .. }), "{error}");
}

#[test]
fn bytes_behind_a_message_and_reserved_bits_are_refused() {
    for message in messages() {
        let frame = wire::frame::encode(&message).unwrap();
        let kind = Kind::of(&message);
        let error = decode(&frame_by_hand(kind.number(), &[&frame[12..], &[0]].concat())).unwrap_err();
        assert_eq!(
            error,
            Error::Trailing {
                kind: kind.name(),
                bytes: 1
            }
        );
        let mut reserved = frame.to_vec();
        reserved[6] = 1;
        assert!(matches!(decode(&reserved), Err(Error::Reserved { value: 1, .. })));
        let error = decode(&frame_by_hand(kind.number(), &frame[12..frame.len() - 1])).unwrap_err();
        assert!(matches!(error, Error::Payload { .. }), "cut short: {error}");
    }
}

/// A batch of one page with this codec, packed size and reserved field.
fn packed_by(codec: u32, packed_bytes: u32, reserved: u32) -> wire::Result<usize> {
    let (mut head, table) = batch(&[(0, 1, 0, 0)], 4096);
    for (at, word) in [(24, codec), (28, packed_bytes), (32, reserved)] {
        head[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
    let crc = crc32c::crc32c_append(crc32c::crc32c(&head[..36]), &table);
    head[36..].copy_from_slice(&crc.to_le_bytes());
    let header = decode_header(&head)?;
    decode_runs(&header, &table, &layout(), &mut Vec::new())?;
    Ok(header.wire_bytes())
}

#[test]
fn case_19_codecs_and_packed_sizes() {
    assert_eq!(packed_by(0, 0, 0), Ok(4096));
    assert_eq!(packed_by(1, 1, 0), Ok(1));
    assert_eq!(packed_by(2, 4095, 0), Ok(4095));
    for codec in [3, 4, u32::MAX] {
        assert_eq!(packed_by(codec, 100, 0), Err(Error::Codec(codec)));
    }
    for (codec, packed_bytes) in [(0, 100), (1, 0), (1, 4096), (2, 4097), (2, u32::MAX)] {
        let error = packed_by(codec, packed_bytes, 0).unwrap_err();
        assert!(
            matches!(
                error,
                Error::PackedBytes {
                    payload_bytes: 4096,
                    ..
                }
            ),
            "{error}"
        );
    }
    assert!(matches!(packed_by(1, 100, 8), Err(Error::Reserved { value: 8, .. })));
    let error = decode(&smuggle(&Message::Offer(wire::Offer { codecs: 7 }))).unwrap_err();
    assert!(error.to_string().contains("unknown codecs 0x4"), "{error}");
}

/// Puts a message that [`wire::frame::encode`] refuses into a frame all the same.
fn smuggle(message: &Message) -> Vec<u8> {
    let payload = bincode::serde::encode_to_vec(message, bincode::config::standard()).unwrap();
    frame_by_hand(Kind::of(message).number(), &payload)
}

#[test]
fn messages_over_their_limits_are_refused_both_ways() {
    let hello = |change: &dyn Fn(&mut wire::Hello)| {
        let mut hello = common::hello();
        change(&mut hello);
        Message::Hello(hello)
    };
    let skip = |ranges| {
        Message::Skip(Skip {
            reason: SkipReason::Hole,
            ranges,
        })
    };
    let section = |name: &str, bytes| {
        Message::Section(Section {
            name: name.to_owned(),
            version: 1,
            data: vec![1; bytes],
        })
    };
    let long = |n| "x".repeat(n);
    let bad = [
        hello(&|h| h.streams = 0),
        hello(&|h| h.streams = 65),
        hello(&|h| h.config.kind = long(65)),
        hello(&|h| h.config.kind = "so\x1b[2Jft".to_owned()),
        hello(&|h| h.config.balloon.dialect = long(65)),
        hello(&|h| h.config.extra = (0..257).map(|i| (format!("{i}"), String::new())).collect()),
        hello(&|h| h.config.extra = [(long(65), String::new())].into()),
        hello(&|h| h.config.extra = [("x".to_owned(), long(1025))].into()),
        skip(vec![]),
        skip(vec![range(0, 1), range(7, 0)]),
        skip(vec![range(0, 1); wire::MAX_SKIP_RANGES + 1]),
        section("", 1),
        section(&long(65), 1),
        section("x", wire::MAX_SECTION_BYTES + 1),
        Message::StateEnd {
            sections: wire::MAX_SECTIONS + 1,
        },
        Message::Digests(Digests {
            chunk_pages: 0,
            sums: vec![],
        }),
        Message::Digests(Digests {
            chunk_pages: 1,
            sums: vec![1; wire::MAX_DIGEST_SUMS + 1],
        }),
    ];
    for message in bad {
        let kind = Kind::of(&message);
        for error in [
            wire::frame::encode(&message).unwrap_err(),
            decode(&smuggle(&message)).unwrap_err(),
        ] {
            assert!(
                matches!(error, Error::Limit { .. } | Error::Invalid { .. }),
                "{kind:?}: {error}"
            );
        }
    }
}

#[test]
fn reasons_over_their_limits_are_refused_when_they_come_in() {
    let long = "x".repeat(wire::MAX_REASON_BYTES + 1);
    let bad = [
        Message::Refuse {
            reasons: vec![String::new(); wire::MAX_REASONS + 1],
        },
        Message::Refuse {
            reasons: vec![long.clone()],
        },
        Message::Abort {
            reason: long.clone(),
            cause: wire::AbortCause::Failed,
        },
        Message::NotRunning(wire::NotRunning { reason: long }),
        Message::Abort {
            reason: "\x1b]0;owned\x07".to_owned(),
            cause: wire::AbortCause::Failed,
        },
    ];
    for message in bad {
        let error = decode(&smuggle(&message)).unwrap_err();
        assert!(matches!(error, Error::Limit { .. } | Error::Invalid { .. }), "{error}");
    }
}

#[test]
fn a_layout_inside_hello_is_checked() {
    // As Hello's layout lies in the payload: variant, kind "x", two regions, the second inside the first.
    let payload = [0, 1, b'x', 2, 0, 4, 3, 1, 2, 1, b'y', 0, 0, 1, 1, 0, 0];
    let error = decode(&frame_by_hand(Kind::Hello.number(), &payload)).unwrap_err();
    assert!(error.to_string().contains("overlaps or precedes"), "{error}");
    // The same with the second region behind the first is fine: it was the overlap.
    let payload = [0, 1, b'x', 2, 0, 4, 4, 1, 2, 1, b'y', 0, 0, 1, 1, 0, 0];
    assert!(matches!(
        decode(&frame_by_hand(Kind::Hello.number(), &payload)),
        Ok(Message::Hello(_))
    ));
}

#[test]
fn a_range_that_wraps_inside_skip_is_refused() {
    let mut payload = vec![3, 0, 1, 253];
    payload.extend_from_slice(&u64::MAX.to_le_bytes());
    payload.push(1);
    let error = decode(&frame_by_hand(Kind::Skip.number(), &payload)).unwrap_err();
    assert!(error.to_string().contains("wraps around"), "{error}");
}

#[test]
fn a_decoder_that_has_failed_stays_failed() {
    let mut decoder = Decoder::new();
    let good = wire::frame::encode(&Message::Ping).unwrap();
    let error = decoder.push(&mut &frame_by_hand(99, &[])[..]).unwrap_err();
    assert_eq!(decoder.push(&mut &good[..]).unwrap_err(), error);
    assert_eq!(decoder.finish().unwrap_err(), error);
}

#[test]
fn a_connection_that_ends_inside_a_frame_is_told_apart() {
    let frame = wire::frame::encode(&messages()[0]).unwrap();
    for cut in 0..=frame.len() {
        let mut decoder = Decoder::new();
        let whole = decoder.push(&mut &frame[..cut]).unwrap().is_some();
        assert_eq!(whole, cut == frame.len());
        let expected = Err(Error::Truncated {
            what: "a control frame",
            given: cut,
        });
        let border = cut == 0 || whole;
        assert_eq!(decoder.finish(), if border { Ok(()) } else { expected });
    }
}
