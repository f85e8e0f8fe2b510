//! The bytes of versions 1 and 2, pinned: written down by a second implementation from `docs/protocol.md`, not by this one.
//!
//! A change that breaks one of these needs a new version of the protocol.
#![allow(clippy::unwrap_used)]

mod common;

use common::{decode, messages, preamble, range};
use wire::batch::{BatchBuilder, Codec, Run, RunKind, decode_header, decode_runs};
use wire::frame::Kind;
use wire::{ConnectionRole, Preamble, PreambleReply, VersionRange};

/// A frame of each kind, as [`messages`] has them.
#[rustfmt::skip]
const FRAMES: [(&str, &str); 20] = [
    (
        "Hello",
        concat!(
            "2a00000001000000f22d274e0004736f66740200fb0001fb0002fb000102087374616e646172642a0103637075046e6f",
            "6e6501040100"
        ),
    ),
    (
        "Accept",
        "020000000200000067cad84a0101",
    ),
    (
        "Refuse",
        concat!(
            "2d000000030000007b5ae4bd02012a76435055733a2074686520736f757263652068617320322c207468652064657374",
            "696e6174696f6e2031"
        ),
    ),
    (
        "Skip",
        "0b00000004000000c75978790301020102fb0002fb0001",
    ),
    (
        "RoundEnd",
        "03000000050000000fdf94cd040701",
    ),
    (
        "RoundReceived",
        "0400000006000000224b00aa05fb2c01",
    ),
    (
        "Section",
        "0f000000070000008639562e060762616c6c6f6f6e0104deadbeef",
    ),
    (
        "StateEnd",
        "02000000080000007e53a6790703",
    ),
    (
        "Digests",
        "1700000009000000e24e29d908fb00020200fe100f0e0d0c0b0a090807060504030201",
    ),
    (
        "Ready",
        "070000000a0000005e4498950901fc70110100",
    ),
    (
        "Commit",
        "0c0000000b000000f3f7b51b0afc40420f00fc7011010005",
    ),
    (
        "Running",
        "050000000c00000053b879ad0b01fbd204",
    ),
    (
        "NotRunning",
        "150000000d000000b72226200c13766370753020646964206e6f74207374617274",
    ),
    (
        "Abort",
        "0e0000000e000000605b8f3b0d0b696e74657272757074656402",
    ),
    (
        "Ping",
        "010000000f0000001904b28e0e",
    ),
    (
        "Offer",
        "0200000010000000e7b8b8440f03",
    ),
    (
        "Terms",
        "040000001100000013fd75c110fb3075",
    ),
    (
        "Resume",
        "1100000012000000cb3af5a21130313233343536373839616263646566",
    ),
    (
        "Have",
        "050000001300000030033e5c1201011004",
    ),
    (
        "Resumed",
        "0700000014000000bffe2f721307fc70110100",
    ),
];

#[rustfmt::skip]
const PREAMBLE: &str = "504746455252590a0100010002000300303132333435363738396162636465661a20969d";
#[rustfmt::skip]
const PREAMBLE_CONTROL: &str = "504746455252590a010001000100000030313233343536373839616263646566a03ee9d5";
#[rustfmt::skip]
const REPLY: &str = "504746455252590a010001000100c08b02c6";
#[rustfmt::skip]
const REPLY_NONE_IN_COMMON: &str = "504746455252590a000001000100d9e03229";
#[rustfmt::skip]
const BATCH: &str = concat!(
            "504742540000030002000000000000000300000000400000000000000000000000000000e58785e91000000000000000",
            "040000000000000000000000000000002000000000000000010000000000000001000000000000000002000000000000",
            "000100000000000002000000aa000000"
        );
/// Four pages that zstd has packed into 700 bytes.
#[rustfmt::skip]
const PACKED: &str = concat!(
            "50474254000003000200000000000000010000000040000002000000bc020000000000008ec49b641000000000000000",
            "04000000000000000000000000000000"
        );
/// The same, with a checksum over those 700 bytes, of which number i is 7 * i.
#[rustfmt::skip]
const CHECKED: &str = concat!(
            "50474254020003000200000000000000010000000040000002000000bc020000412e3630192cb0921000000000000000",
            "04000000000000000000000000000000"
        );
#[rustfmt::skip]
const MARKER: &str = "504742540100030002000000010000000000000000000000000000000000000000000000f8c59878";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits = (0..hex.len()).step_by(2);
    digits
        .map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap())
        .collect()
}

#[test]
fn preambles() {
    assert_eq!(hex(&preamble().encode()), PREAMBLE);
    assert_eq!(Preamble::decode(&bytes(PREAMBLE).try_into().unwrap()), Ok(preamble()));
    let control = Preamble {
        role: ConnectionRole::Control,
        ..preamble()
    };
    assert_eq!(hex(&control.encode()), PREAMBLE_CONTROL);
    assert_eq!(
        Preamble::decode(&bytes(PREAMBLE_CONTROL).try_into().unwrap()),
        Ok(control)
    );
}

#[test]
fn replies() {
    let newer = VersionRange { min: 2, max: 5 };
    for (theirs, golden) in [(preamble().versions, REPLY), (newer, REPLY_NONE_IN_COMMON)] {
        let reply = PreambleReply::answer(VersionRange { min: 1, max: 1 }, theirs);
        assert_eq!(hex(&reply.encode()), golden);
        assert_eq!(PreambleReply::decode(&bytes(golden).try_into().unwrap()), Ok(reply));
    }
}

#[test]
fn frames() {
    for ((name, golden), message) in FRAMES.iter().zip(messages()) {
        assert_eq!(Kind::of(&message).name(), *name);
        assert_eq!(hex(&wire::frame::encode(&message).unwrap()), *golden, "{name}");
        assert_eq!(decode(&bytes(golden)), Ok(message));
    }
    assert_eq!(messages().len(), Kind::ALL.len());
}

#[test]
fn batch_and_marker() {
    let runs = [
        (range(0x10, 4), RunKind::Data),
        (range(0x20, 1), RunKind::Zero),
        (range(0x200, 0x100), RunKind::Fill(0xaa)),
    ];
    let runs = runs.map(|(range, kind)| Run { range, kind });
    let mut builder = BatchBuilder::new(3);
    builder.start(2);
    for run in runs {
        assert!(builder.push(run).unwrap());
    }
    let (head, payload_bytes) = builder.finish().unwrap();
    assert_eq!((hex(head).as_str(), payload_bytes), (BATCH, 16384));
    assert_eq!(hex(&builder.marker(2).unwrap()), MARKER);

    let golden = bytes(BATCH);
    let header = decode_header(golden[..40].try_into().unwrap()).unwrap();
    let mut out = Vec::new();
    decode_runs(&header, &golden[40..], &common::layout(), &mut out).unwrap();
    assert_eq!(out, runs);
    let header = decode_header(&bytes(MARKER).try_into().unwrap()).unwrap();
    assert!(header.is_marker());
    assert_eq!(
        (header.stream(), header.round(), header.seq(), header.run_count()),
        (3, 2, 1, 0)
    );
}

#[test]
fn checked_batches() {
    let payload: Vec<u8> = (0..700u32).map(|i| (7 * i).to_le_bytes()[0]).collect();
    let mut builder = BatchBuilder::new(3);
    builder.start(2);
    let run = Run {
        range: range(16, 4),
        kind: RunKind::Data,
    };
    assert!(builder.push(run).unwrap());
    builder.check(&payload);
    assert_eq!(hex(builder.finish_packed(Codec::Zstd, 700).unwrap()), CHECKED);
    let golden = bytes(CHECKED);
    let header = decode_header(golden[..40].try_into().unwrap()).unwrap();
    assert!(header.is_checked());
    assert_eq!(header.check_payload(&payload), Ok(()));
    // The next one has none unless it is asked for again.
    assert!(builder.push(run).unwrap());
    assert_eq!(builder.finish_packed(Codec::Zstd, 700).unwrap()[4..6], [0, 0]);
}

#[test]
fn packed_batches() {
    let mut builder = BatchBuilder::new(3);
    builder.start(2);
    let run = Run {
        range: range(16, 4),
        kind: RunKind::Data,
    };
    assert!(builder.push(run).unwrap());
    assert_eq!(hex(builder.finish_packed(Codec::Zstd, 700).unwrap()), PACKED);
    let golden = bytes(PACKED);
    let header = decode_header(golden[..40].try_into().unwrap()).unwrap();
    assert_eq!(
        (header.codec(), header.payload_bytes(), header.wire_bytes()),
        (Some(Codec::Zstd), 16_384, 700)
    );
    let mut runs = Vec::new();
    decode_runs(&header, &golden[40..], &common::layout(), &mut runs).unwrap();
    assert_eq!(runs, [run]);
}
