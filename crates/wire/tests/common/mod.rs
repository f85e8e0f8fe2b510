//! A message of every kind, and frames made by hand with a right checksum around whatever payload.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use machine::{BalloonConfig, MachineConfig, Section};
use pages::{Layout, PageRange, Pfn};
use std::collections::BTreeMap;
use wire::{
    AbortCause, Accept, Arrived, Commit, ConnectionRole, Digests, Have, Hello, Message, NotRunning, Offer, Preamble,
    Resume, Running, SessionId, Skip, SkipReason, Terms, VersionRange,
};

pub fn range(start: u64, pages: u64) -> PageRange {
    PageRange::new(Pfn(start), pages).unwrap()
}

/// Two regions with a hole between: pages 0..256 and 512..768.
pub fn layout() -> Layout {
    Layout::new(vec![range(0, 256), range(512, 256)]).unwrap()
}

pub fn preamble() -> Preamble {
    Preamble {
        versions: VersionRange { min: 1, max: 1 },
        session: SessionId(*b"0123456789abcdef"),
        role: ConnectionRole::Data { stream: 3 },
    }
}

pub fn hello() -> Hello {
    Hello {
        config: MachineConfig {
            kind: "soft".to_owned(),
            layout: layout(),
            vcpus: 2,
            balloon: BalloonConfig {
                dialect: "standard".to_owned(),
                features: 0x2a,
            },
            extra: BTreeMap::from([("cpu".to_owned(), "none".to_owned())]),
        },
        running: true,
        streams: 4,
        verify: true,
        dry_run: false,
    }
}

/// One of each, in the order of their kinds' numbers.
pub fn messages() -> Vec<Message> {
    vec![
        Message::Hello(hello()),
        Message::Accept(Accept { populated: true }),
        Message::Refuse {
            reasons: vec!["vCPUs: the source has 2, the destination 1".to_owned()],
        },
        Message::Skip(Skip {
            reason: SkipReason::Hinted,
            ranges: vec![range(1, 2), range(512, 256)],
        }),
        Message::RoundEnd { round: 7, last: true },
        Message::RoundReceived { round: 300 },
        Message::Section(Section {
            name: "balloon".to_owned(),
            version: 1,
            data: vec![0xde, 0xad, 0xbe, 0xef],
        }),
        Message::StateEnd { sections: 3 },
        Message::Digests(Digests {
            chunk_pages: 512,
            sums: vec![0, 0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10],
        }),
        Message::Ready {
            verified: true,
            verify_us: 70_000,
        },
        Message::Commit(Commit {
            total_us: 1_000_000,
            downtime_us: 70_000,
            verify_us: 5,
        }),
        Message::Running(Running {
            running: true,
            after_us: 1234,
        }),
        Message::NotRunning(NotRunning {
            reason: "vcpu0 did not start".to_owned(),
        }),
        Message::Abort {
            reason: "interrupted".to_owned(),
            cause: AbortCause::TimedOut,
        },
        Message::Ping,
        Message::Offer(Offer { codecs: 3 }),
        Message::Terms(Terms {
            resume_window_ms: 30_000,
        }),
        Message::Resume(Resume {
            session: *b"0123456789abcdef",
        }),
        Message::Have(Have {
            arrived: Arrived::Zero,
            ranges: vec![range(0x10, 4)],
        }),
        Message::Resumed {
            round: 7,
            wire_bytes: 70_000,
        },
    ]
}

/// A frame with a right checksum around any payload.
pub fn frame_by_hand(kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    frame.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    frame.extend_from_slice(&kind.to_le_bytes());
    frame.extend_from_slice(&0u16.to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&frame), payload);
    frame.extend_from_slice(&crc.to_le_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// Decodes one whole frame by header and payload, as a transport does.
pub fn decode(frame: &[u8]) -> wire::Result<Message> {
    let (head, payload) = frame.split_at(wire::frame::HEADER_BYTES);
    let header = wire::frame::decode_header(head.try_into().unwrap())?;
    wire::frame::decode_payload(&header, payload)
}

/// Header words of a batch made by hand: flags, stream, round, number, runs, payload bytes.
#[derive(Clone, Copy)]
pub struct Raw {
    pub flags: u16,
    pub stream: u16,
    pub round: u32,
    pub seq: u32,
    pub runs: u32,
    pub payload_bytes: u32,
}

/// Header and table with a right checksum around any entries: start, pages, kind, fill.
pub fn batch_by_hand(raw: Raw, entries: &[(u64, u64, u32, u32)]) -> ([u8; 40], Vec<u8>) {
    let mut table = Vec::new();
    for (start, pages, kind, fill) in entries {
        table.extend_from_slice(&start.to_le_bytes());
        table.extend_from_slice(&pages.to_le_bytes());
        table.extend_from_slice(&kind.to_le_bytes());
        table.extend_from_slice(&fill.to_le_bytes());
    }
    let mut head = [0; 40];
    head[..4].copy_from_slice(b"PGBT");
    head[4..6].copy_from_slice(&raw.flags.to_le_bytes());
    head[6..8].copy_from_slice(&raw.stream.to_le_bytes());
    head[8..12].copy_from_slice(&raw.round.to_le_bytes());
    head[12..16].copy_from_slice(&raw.seq.to_le_bytes());
    head[16..20].copy_from_slice(&raw.runs.to_le_bytes());
    head[20..24].copy_from_slice(&raw.payload_bytes.to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&head[..36]), &table);
    head[36..].copy_from_slice(&crc.to_le_bytes());
    (head, table)
}

/// Batch 0 of round 0 on stream 0 with these entries.
pub fn batch(entries: &[(u64, u64, u32, u32)], payload_bytes: u32) -> ([u8; 40], Vec<u8>) {
    let raw = Raw {
        flags: 0,
        stream: 0,
        round: 0,
        seq: 0,
        runs: u32::try_from(entries.len()).unwrap(),
        payload_bytes,
    };
    batch_by_hand(raw, entries)
}
