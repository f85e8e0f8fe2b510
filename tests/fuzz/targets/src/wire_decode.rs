//! All that a peer's bytes are decoded by. Checksums are made right where a mutation would never find them, so that what
//! lies behind them is reached; the first byte of an input says what the rest is.

use arbitrary::{Result, Unstructured};
use pages::{Layout, PageRange, Pfn};
use wire::batch::{self, BatchBuilder, Run, RunKind, StreamOrder};
use wire::frame::{self, Decoder, Kind};
use wire::{Message, PREAMBLE_BYTES, Preamble, PreambleReply, REPLY_BYTES, VERSIONS};

/// Preamble, reply, control frames of all kinds, batches with their tables and their order.
pub fn wire_decode(input: &[u8]) {
    let Some((mode, rest)) = input.split_first() else {
        return;
    };
    match mode % 5 {
        0 => stream(rest),
        1 => sealed_frames(rest),
        2 => openings(rest),
        // An input that ends early has said all it had to say.
        3 => batches(&mut Unstructured::new(rest)).unwrap_or(()),
        _ => raw_batch(rest),
    }
}

/// Bytes as they are, in pieces.
fn stream(rest: &[u8]) {
    let (size, bytes) = rest.split_first().unwrap_or((&0, &[]));
    let (pieces, end) = feed(bytes, usize::from(*size) + 1);
    let (whole, whole_end) = feed(bytes, usize::MAX);
    assert_eq!(pieces, whole, "messages depend on how bytes come");
    assert_eq!(end, whole_end, "errors depend on how bytes come");
    pieces.iter().for_each(comes_back);
}

/// Frames with a right checksum around any payload: kind, two bytes of length, the payload; over and over.
fn sealed_frames(mut rest: &[u8]) {
    let mut bytes = Vec::new();
    while let Some((head, more)) = rest.split_first_chunk::<3>() {
        let len = usize::from(u16::from_le_bytes([head[1], head[2]])).min(more.len());
        let (payload, after) = more.split_at(len);
        seal_frame(u16::from(head[0]), payload, &mut bytes);
        rest = after;
    }
    let (messages, _) = feed(&bytes, 4096);
    messages.iter().for_each(comes_back);
}

fn seal_frame(kind: u16, payload: &[u8], out: &mut Vec<u8>) {
    let start = out.len();
    out.extend(u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend(0u16.to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&out[start..]), payload);
    out.extend(crc.to_le_bytes());
    out.extend(payload);
}

fn feed(bytes: &[u8], piece: usize) -> (Vec<Message>, wire::Result<()>) {
    let (mut decoder, mut messages) = (Decoder::new(), Vec::new());
    for mut piece in bytes.chunks(piece) {
        loop {
            match decoder.push(&mut piece) {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(decoder.push(&mut piece), Err(error.clone()), "an error is forgotten");
                    return (messages, Err(error));
                }
            }
        }
    }
    (messages, decoder.finish())
}

/// What was taken is within the limits, and goes out and in again as it is.
fn comes_back(message: &Message) {
    wire::validate(message).expect("a decoded message is within the limits");
    let again = frame::encode(message).expect("a decoded message can be sent");
    assert!(again.len() <= frame::HEADER_BYTES + Kind::of(message).max_payload_bytes());
    assert_eq!(feed(&again, usize::MAX), (vec![message.clone()], Ok(())));
}

/// The first bytes of a connection, both ways.
fn openings(rest: &[u8]) {
    // Whatever it says of a prefix, it does not say less of what begins so.
    if wire::check_magic(&rest[..rest.len().min(3)]).is_err() {
        assert!(wire::check_magic(rest).is_err());
    }
    if let Some(bytes) = rest.first_chunk::<PREAMBLE_BYTES>() {
        let mut sealed = *bytes;
        seal(&mut sealed);
        for bytes in [bytes, &sealed] {
            if let Ok(preamble) = Preamble::decode(bytes) {
                assert_eq!(&preamble.encode(), bytes);
                let reply = PreambleReply::answer(VERSIONS, preamble.versions);
                let agreed = reply.agreed(preamble.versions);
                assert_eq!(agreed.is_ok(), reply.version != 0);
            }
        }
    }
    if let Some(bytes) = rest.first_chunk::<REPLY_BYTES>() {
        let mut sealed = *bytes;
        seal(&mut sealed);
        for bytes in [bytes, &sealed] {
            if let Ok(reply) = PreambleReply::decode(bytes) {
                assert_eq!(&reply.encode(), bytes);
                if let Ok(version) = reply.agreed(VERSIONS) {
                    assert!(VERSIONS.contains(version) && reply.ours.contains(version));
                }
            }
        }
    }
}

/// The magic, and the checksum at the end.
fn seal(bytes: &mut [u8]) {
    bytes[..8].copy_from_slice(&wire::MAGIC);
    let at = bytes.len() - 4;
    let crc = crc32c::crc32c(&bytes[..at]);
    bytes[at..].copy_from_slice(&crc.to_le_bytes());
}

/// Two regions, a hole between.
fn layout() -> Layout {
    let range = |start, pages| PageRange::new(Pfn(start), pages).expect("a small range");
    Layout::new(vec![range(0, 256), range(512, 256)]).expect("a layout")
}

/// A header and a table as they are, but for the checksum.
fn raw_batch(rest: &[u8]) {
    let Some((head, table)) = rest.split_first_chunk::<{ batch::HEADER_BYTES }>() else {
        return;
    };
    drop(take(head, table));
    let mut sealed = *head;
    sealed[..4].copy_from_slice(b"PGBT");
    let runs = table.len() / batch::RUN_BYTES;
    let table = &table[..runs * batch::RUN_BYTES];
    let crc = crc32c::crc32c_append(crc32c::crc32c(&sealed[..batch::HEADER_BYTES - 4]), table);
    sealed[batch::HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    drop(take(&sealed, table));
}

/// What is taken of a batch holds what the crate promises.
fn take(head: &[u8; batch::HEADER_BYTES], table: &[u8]) -> wire::Result<(batch::BatchHeader, Vec<Run>)> {
    let header = batch::decode_header(head)?;
    assert!(header.run_count() <= batch::MAX_RUNS && header.table_bytes() <= batch::MAX_TABLE_BYTES);
    assert!(
        header.payload_bytes() <= batch::MAX_PAYLOAD_BYTES as usize && header.wire_bytes() <= header.payload_bytes()
    );
    assert!(header.stream() < wire::MAX_STREAMS);
    let (layout, mut runs) = (layout(), Vec::new());
    if header.is_marker() {
        assert_eq!((header.run_count(), header.wire_bytes()), (0, 0));
        return Ok((header, runs));
    }
    if let Err(error) = batch::decode_runs(&header, table, &layout, &mut runs) {
        assert!(runs.is_empty(), "runs are left over after {error}");
        return Err(error);
    }
    let (mut floor, mut data_bytes) = (Pfn(0), 0);
    for run in &runs {
        assert!(
            run.range.start() >= floor && layout.region_of_range(run.range).is_some(),
            "{run:?}"
        );
        floor = run.range.end();
        data_bytes += if run.kind == RunKind::Data {
            run.range.bytes()
        } else {
            0
        };
    }
    assert_eq!(
        (runs.len(), data_bytes),
        (header.run_count(), header.payload_bytes() as u64)
    );
    Ok((header, runs))
}

/// Batches that are nearly right, in an order that is nearly right; what is right is taken.
fn batches(u: &mut Unstructured<'_>) -> Result<()> {
    let mut order = StreamOrder::new(0);
    let mut builder = BatchBuilder::new(0);
    let (mut round, mut broken) = (0, false);
    while !u.is_empty() {
        let (head, table, sound) = match u.int_in_range(0..=3)? {
            0 => (builder.marker(round).expect("few batches"), Vec::new(), true),
            1 => {
                builder.start(round);
                let sound = push_runs(u, &mut builder)?;
                let Ok((bytes, _)) = builder.finish() else { continue };
                let (head, table) = bytes.split_first_chunk().expect("a header");
                (*head, table.to_vec(), sound)
            }
            2 => {
                let marker = batch::marker(u.int_in_range(0..=65)?, u.int_in_range(0..=3)?, u.int_in_range(0..=9)?);
                (marker, Vec::new(), false)
            }
            _ => {
                let mut bytes = batch::marker(0, round, 0);
                let at = u.int_in_range(0..=bytes.len() - 5)?;
                bytes[at] = u.arbitrary()?;
                let crc = crc32c::crc32c(&bytes[..batch::HEADER_BYTES - 4]);
                bytes[batch::HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
                (bytes, Vec::new(), false)
            }
        };
        let taken = take(&head, &table);
        assert!(!sound || taken.is_ok(), "what the builder made is refused: {taken:?}");
        if let Ok((header, _)) = taken {
            let ours = order.round();
            match order.expect(&header) {
                Ok(()) => assert!(Some(header.round()) == ours && header.stream() == 0),
                Err(_) => broken = true,
            }
            assert!(!sound || broken || Some(header.round()) == ours);
        }
        if broken {
            return Ok(());
        }
        round = order.round().expect("few rounds");
    }
    Ok(())
}

/// Pushes some runs; whether all of them lie in RAM as a table must have them.
fn push_runs(u: &mut Unstructured<'_>, builder: &mut BatchBuilder) -> Result<bool> {
    let (layout, mut sound) = (layout(), true);
    for _ in 0..u.int_in_range(1..=6)? {
        let (start, pages) = (u.int_in_range(0..=800u64)?, u.int_in_range(0..=40u64)?);
        let kind = match u.int_in_range(0..=2)? {
            0 => RunKind::Data,
            1 => RunKind::Zero,
            _ => RunKind::Fill(u.arbitrary()?),
        };
        let range = PageRange::new(Pfn(start), pages).expect("a small range");
        let pushed = builder.push(Run { range, kind });
        sound &= !matches!(pushed, Ok(true)) || layout.region_of_range(range).is_some();
    }
    Ok(sound)
}
