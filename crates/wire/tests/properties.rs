//! What holds for any input: what was encoded decodes to itself, damage is found, and no bytes make a decoder panic.
#![allow(clippy::unwrap_used)]

mod common;

use common::{batch_by_hand, frame_by_hand, layout, messages, range};
use proptest::prelude::*;
use wire::batch::{BatchBuilder, Run, RunKind, decode_header, decode_runs};
use wire::frame::{Decoder, Kind};
use wire::{ConnectionRole, Message, PREAMBLE_BYTES, Preamble, PreambleReply, REPLY_BYTES, SessionId, VersionRange};

/// Takes messages out of `bytes`, handed over in pieces of `piece` bytes; the error or the end of the connection last.
fn feed(bytes: &[u8], piece: usize) -> (Vec<Message>, wire::Result<()>) {
    let (mut decoder, mut got) = (Decoder::new(), Vec::new());
    for mut piece in bytes.chunks(piece.max(1)) {
        loop {
            match decoder.push(&mut piece) {
                Ok(Some(message)) => got.push(message),
                Ok(None) => break,
                Err(error) => return (got, Err(error)),
            }
        }
    }
    (got, decoder.finish())
}

fn any_text(max: usize) -> impl Strategy<Value = String> {
    proptest::collection::vec(proptest::char::range(' ', '~'), 0..max).prop_map(String::from_iter)
}

fn any_message() -> impl Strategy<Value = Message> {
    let ranges = proptest::collection::vec((0u64..1 << 62, 1u64..1 << 62).prop_map(|(s, n)| range(s, n)), 1..50);
    let reason = prop_oneof![
        Just(wire::SkipReason::Hole),
        Just(wire::SkipReason::Hinted),
        Just(wire::SkipReason::Ballooned)
    ];
    let cause = prop_oneof![
        Just(wire::AbortCause::Failed),
        Just(wire::AbortCause::Cancelled),
        Just(wire::AbortCause::TimedOut)
    ];
    prop_oneof![
        (any_text(64), any::<u32>(), any::<[bool; 3]>(), 1u16..=64, any::<u64>()).prop_map(
            |(kind, vcpus, flags, streams, features)| {
                let mut hello = common::hello();
                hello.config.kind = kind;
                hello.config.vcpus = vcpus;
                hello.config.balloon.features = features;
                (hello.running, hello.verify, hello.dry_run) = (flags[0], flags[1], flags[2]);
                hello.streams = streams;
                Message::Hello(hello)
            }
        ),
        proptest::collection::vec(any_text(80), 0..5).prop_map(|reasons| Message::Refuse { reasons }),
        (reason, ranges).prop_map(|(reason, ranges)| Message::Skip(wire::Skip { reason, ranges })),
        any::<(u32, bool)>().prop_map(|(round, last)| Message::RoundEnd { round, last }),
        (
            any_text(60),
            any::<u32>(),
            proptest::collection::vec(any::<u8>(), 0..300)
        )
            .prop_map(|(name, version, data)| Message::Section(machine::Section {
                name: format!("x{name}"),
                version,
                data
            })),
        (1u64.., proptest::collection::vec(any::<u128>(), 0..40))
            .prop_map(|(chunk_pages, sums)| Message::Digests(wire::Digests { chunk_pages, sums })),
        any::<(u64, u64, u64)>().prop_map(|(total_us, downtime_us, verify_us)| Message::Commit(wire::Commit {
            total_us,
            downtime_us,
            verify_us
        })),
        (any_text(200), cause).prop_map(|(reason, cause)| Message::Abort { reason, cause }),
        proptest::sample::select(messages()),
    ]
}

/// Runs that ascend and lie within [`layout`]'s regions, as gaps, lengths and kinds; at most 512 pages of data.
fn any_runs() -> impl Strategy<Value = Vec<Run>> {
    let kind = prop_oneof![
        Just(RunKind::Data),
        Just(RunKind::Zero),
        any::<u32>().prop_map(RunKind::Fill)
    ];
    proptest::collection::vec((0u64..20, 1u64..20, kind), 1..60).prop_map(|parts| {
        let (layout, mut at, mut runs) = (layout(), 0, Vec::new());
        for (gap, pages, kind) in parts {
            let wanted = range(at + gap, pages);
            // The hole lies at 256..512; a run that would touch it starts behind it.
            let wanted = if layout.region_of_range(wanted).is_none() && at < 512 {
                range(512, pages)
            } else {
                wanted
            };
            if layout.region_of_range(wanted).is_none() {
                break;
            }
            at = wanted.end().0;
            runs.push(Run { range: wanted, kind });
        }
        runs
    })
}

fn data_bytes(runs: &[Run]) -> usize {
    let data = runs.iter().filter(|r| r.kind == RunKind::Data);
    usize::try_from(data.map(|r| r.range.bytes()).sum::<u64>()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn preambles_and_replies_come_back(min in 1u16..9, more in 0u16..9, session: [u8; 16], stream in 0u16..64, control: bool, version: u16) {
        let versions = VersionRange { min, max: min + more };
        let role = if control { ConnectionRole::Control } else { ConnectionRole::Data { stream } };
        let preamble = Preamble { versions, session: SessionId(session), role };
        prop_assert_eq!(Preamble::decode(&preamble.encode()), Ok(preamble));
        let reply = PreambleReply { version, ours: versions };
        prop_assert_eq!(PreambleReply::decode(&reply.encode()), Ok(reply));
    }

    #[test]
    fn case_10_messages_come_back_in_pieces_of_any_size(sent in proptest::collection::vec(any_message(), 1..8), piece in 1usize..200) {
        let bytes: Vec<u8> = sent.iter().flat_map(|m| wire::frame::encode(m).unwrap()).collect();
        prop_assert_eq!(feed(&bytes, piece), (sent, Ok(())));
    }

    #[test]
    fn batches_come_back(runs in any_runs(), stream in 0u16..64, round: u32) {
        let mut builder = BatchBuilder::new(stream);
        builder.start(round);
        for run in &runs {
            prop_assert!(builder.push(*run).unwrap());
        }
        let (head, payload_bytes) = builder.finish().unwrap();
        prop_assert_eq!(payload_bytes, data_bytes(&runs));
        let header = decode_header(head[..40].try_into().unwrap()).unwrap();
        prop_assert_eq!((header.stream(), header.round(), header.seq()), (stream, round, 0));
        prop_assert_eq!((header.is_marker(), header.payload_bytes()), (false, payload_bytes));
        let mut out = Vec::new();
        decode_runs(&header, &head[40..], &layout(), &mut out).unwrap();
        prop_assert_eq!(out, runs);
    }

    #[test]
    fn a_flipped_bit_in_a_frame_is_found(message in any_message(), bit: prop::sample::Index) {
        let mut frame = wire::frame::encode(&message).unwrap().to_vec();
        let bit = bit.index(frame.len() * 8);
        frame[bit / 8] ^= 1 << (bit % 8);
        // A longer length leaves the decoder waiting: then the connection's end is the error.
        let (got, end) = feed(&frame, frame.len());
        prop_assert!(got.is_empty() && end.is_err(), "bit {} went through: {:?}", bit, got);
    }

    #[test]
    fn a_flipped_bit_in_a_batch_is_found(runs in any_runs(), bit: prop::sample::Index) {
        let mut builder = BatchBuilder::new(0);
        for run in &runs {
            builder.push(*run).unwrap();
        }
        let (head, payload_bytes) = builder.finish().unwrap();
        let mut stream = head.to_vec();
        let bit = bit.index(stream.len() * 8);
        stream[bit / 8] ^= 1 << (bit % 8);
        stream.resize(head.len() + payload_bytes + wire::batch::MAX_TABLE_BYTES, 0x5a);
        let mut out = Vec::new();
        let found = decode_header(stream[..40].try_into().unwrap())
            .and_then(|header| decode_runs(&header, &stream[40..40 + header.table_bytes()], &layout(), &mut out));
        prop_assert!(found.is_err(), "bit {} went through: {:?}", bit, out);
    }

    #[test]
    fn case_12_random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), piece in 1usize..50, kind in 0u16..18) {
        let (got, _) = feed(&bytes, piece);
        prop_assert!(got.is_empty(), "random bytes made {:?}", got);
        // The same as the payload of a frame with a right checksum: what decodes must encode to a message again.
        let (got, _) = feed(&frame_by_hand(kind, &bytes), piece);
        for message in got {
            let again = wire::frame::encode(&message).unwrap();
            prop_assert_eq!(feed(&again, piece), (vec![message], Ok(())));
        }
        if let Some(start) = bytes.first_chunk::<PREAMBLE_BYTES>() {
            prop_assert!(Preamble::decode(start).is_err());
        }
        if let Some(start) = bytes.first_chunk::<REPLY_BYTES>() {
            prop_assert!(PreambleReply::decode(start).is_err());
        }
        if let Some(start) = bytes.first_chunk::<40>() {
            prop_assert!(decode_header(start).is_err());
        }
    }

    #[test]
    fn a_damaged_payload_with_a_right_checksum_never_panics(message in any_message(), damage in proptest::collection::vec(any::<(prop::sample::Index, u8)>(), 1..6), cut in 0usize..4) {
        let kind = Kind::of(&message).number();
        let mut payload = wire::frame::encode(&message).unwrap()[12..].to_vec();
        for (at, value) in damage {
            let at = at.index(payload.len());
            payload[at] = value;
        }
        payload.truncate(payload.len() - cut.min(payload.len()));
        let (got, end) = feed(&frame_by_hand(kind, &payload), usize::MAX);
        prop_assert_eq!(got.len(), usize::from(end.is_ok()));
        prop_assert!(got.iter().all(|m| wire::validate(m).is_ok() && Kind::of(m).number() == kind));
    }

    /// Whatever a table says, what comes through is ascending, within RAM, and makes the payload.
    #[test]
    fn case_19_no_table_gets_a_bad_run_through(entries in proptest::collection::vec((0u64..800, 0u64..40, 0u32..4, 0u32..2), 1..6), exact: bool) {
        let data: u64 = entries.iter().filter(|e| e.2 == 0).map(|e| e.1 * 4096).sum();
        let payload_bytes = if exact { u32::try_from(data).unwrap() } else { 4096 };
        let raw = common::Raw { flags: 0, stream: 0, round: 0, seq: 0, runs: u32::try_from(entries.len()).unwrap(), payload_bytes };
        let (head, table) = batch_by_hand(raw, &entries);
        let (layout, mut out) = (layout(), Vec::new());
        let header = decode_header(&head).unwrap();
        let expected = entries.iter().all(|&(start, pages, kind, fill)| {
            let region = layout.regions().iter().any(|r| r.start().0 <= start && start + pages <= r.end().0);
            pages > 0 && region && (kind == 2 || (kind < 2 && fill == 0))
        });
        let ascending = entries.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0);
        let expected = expected && ascending && data == u64::from(payload_bytes);
        prop_assert_eq!(decode_runs(&header, &table, &layout, &mut out).is_ok(), expected);
        prop_assert_eq!(out.len(), if expected { entries.len() } else { 0 });
    }
}

#[test]
fn every_bit_of_a_preamble_a_reply_and_a_marker_counts() {
    let (preamble, reply) = (
        common::preamble(),
        PreambleReply::answer(wire::VERSIONS, wire::VERSIONS),
    );
    for bit in 0..PREAMBLE_BYTES * 8 {
        let mut bytes = preamble.encode();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(Preamble::decode(&bytes).is_err(), "bit {bit}");
    }
    for bit in 0..REPLY_BYTES * 8 {
        let mut bytes = reply.encode();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(PreambleReply::decode(&bytes).is_err(), "bit {bit}");
    }
    for bit in 0..320 {
        let mut bytes = wire::batch::marker(5, 6, 7);
        bytes[bit / 8] ^= 1 << (bit % 8);
        // With the marker's own bit cleared it is a batch without runs.
        assert!(decode_header(&bytes).is_err(), "bit {bit}");
    }
}
