//! Page batches: what flows on the data connections, from source to destination.
//!
//! A header of [`HEADER_BYTES`], a table of runs of [`RUN_BYTES`] each, then the pages of the data runs, in the table's
//! order, and nothing else: the payload goes from guest memory to guest memory without a copy between. All numbers are
//! little-endian. In version 2 of the protocol a batch's pages may be packed by a [`Codec`]: the header says so, with
//! both sizes, and [`BatchHeader::wire_bytes`] follow the table.
//!
//! | header | | run | |
//! |---|---|---|---|
//! | 0 | magic `PGBT`, u32 | 0 | first page's frame number, u64 |
//! | 4 | flags, u16; bit 0: end-of-round marker, bit 1: checked | 8 | pages, u64 |
//! | 6 | stream, u16 | 16 | kind, u32: 0 data, 1 zero, 2 fill |
//! | 8 | round, u32 | 20 | value to fill with, u32; 0 for the other kinds |
//! | 12 | number of the batch on its stream, u32, from 0 | | |
//! | 16 | runs in the table, u32, at most [`MAX_RUNS`] | | |
//! | 20 | bytes of payload, u32, at most [`MAX_PAYLOAD_BYTES`] | | |
//! | 24 | codec, u32: 0 none, else [`Codec::number`] | | |
//! | 28 | packed bytes that follow the table, u32, fewer than the payload's; 0 with codec 0 | | |
//! | 32 | crc32c over the bytes that follow the table, u32, of a checked batch; else 0 | | |
//! | 36 | crc32c over the 36 bytes before and the table, u32 | | |
//!
//! A marker is a header alone and ends its round on its stream; it has a number like any batch.
//!
//! Invariants that [`decode_runs`] lets nothing past without: each run has a page and lies within one region of the
//! layout; runs ascend and do not overlap; the data runs' pages are the payload, to the byte. In version 3 a batch may be
//! *checked*: its header has a checksum over the payload as it is sent, packed or not. Without, TCP's and `--verify` are
//! what there is.

mod builder;
mod codec;
mod order;

pub use builder::BatchBuilder;
pub use codec::Codec;
pub use order::StreamOrder;

use crate::{Error, MAX_STREAMS, Result};
use bytes::Buf;
use pages::{Layout, PAGE_BYTES, PageRange, Pfn};

/// Bytes ahead of every batch.
pub const HEADER_BYTES: usize = 40;

/// Bytes of a run in the table.
pub const RUN_BYTES: usize = 24;

/// The most runs of a batch.
pub const MAX_RUNS: usize = 4096;

/// The most bytes of pages in a batch: 4 MiB.
pub const MAX_PAYLOAD_BYTES: u32 = 4 << 20;

/// The most bytes of a table of runs.
pub const MAX_TABLE_BYTES: usize = MAX_RUNS * RUN_BYTES;

const MAGIC: u32 = u32::from_le_bytes(*b"PGBT");
const MARKER: u16 = 1;
const CHECKED: u16 = 2;
/// Where a checked batch has the checksum of its payload.
const SUM_AT: usize = 32;
/// Where the header's checksum lies: behind all that it covers of the header.
const CRC_AT: usize = 36;

/// What a run's pages become on the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunKind {
    /// What the payload has.
    Data,
    /// Zeroes.
    Zero,
    /// This 32-bit little-endian pattern, over and over.
    Fill(u32),
}

/// A stretch of pages with the same fate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Which pages.
    pub range: PageRange,
    /// What they become.
    pub kind: RunKind,
}

impl Run {
    /// Bytes of payload that this run makes, saturating.
    fn payload_bytes(self) -> u64 {
        match self.kind {
            RunKind::Data => self.range.bytes(),
            RunKind::Zero | RunKind::Fill(_) => 0,
        }
    }
}

/// A batch's header: its counts are within the limits. Of a batch with a table, the checksum is still to be checked, by
/// [`decode_runs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchHeader {
    marker: bool,
    stream: u16,
    round: u32,
    seq: u32,
    runs: u32,
    payload_bytes: u32,
    codec: Option<Codec>,
    packed_bytes: u32,
    /// Of the payload as it is sent.
    sum: Option<u32>,
    crc: u32,
    /// Of the header's own bytes.
    crc_so_far: u32,
}

impl BatchHeader {
    /// Whether this ends its round on its stream: neither table nor payload follow.
    pub fn is_marker(&self) -> bool {
        self.marker
    }

    /// The stream it says it belongs to.
    pub fn stream(&self) -> u16 {
        self.stream
    }

    /// Its round, counted from 0.
    pub fn round(&self) -> u32 {
        self.round
    }

    /// Its number on its stream, counted from 0.
    pub fn seq(&self) -> u32 {
        self.seq
    }

    /// How many runs the table has: at most [`MAX_RUNS`].
    pub fn run_count(&self) -> usize {
        self.runs as usize
    }

    /// How many bytes of table follow: at most [`MAX_TABLE_BYTES`].
    pub fn table_bytes(&self) -> usize {
        self.run_count() * RUN_BYTES
    }

    /// How many bytes of pages it brings: at most [`MAX_PAYLOAD_BYTES`], and what its data runs make.
    pub fn payload_bytes(&self) -> usize {
        self.payload_bytes as usize
    }

    /// What its pages are packed by; `None`: they follow as they are. In version 1 of the protocol that is all there is.
    pub fn codec(&self) -> Option<Codec> {
        self.codec
    }

    /// Whether [`BatchHeader::check_payload`] has something to go by. Only in version 3 of the protocol and later.
    pub fn is_checked(&self) -> bool {
        self.sum.is_some()
    }

    /// Compares what followed the table, all of [`BatchHeader::wire_bytes`], with the header's checksum. Nothing to say
    /// against it where there is none.
    ///
    /// # Errors
    ///
    /// The payload was changed on the way: stream, batch and round are named.
    pub fn check_payload(&self, payload: &[u8]) -> Result<()> {
        let Some(said) = self.sum else { return Ok(()) };
        let computed = crc32c::crc32c(payload);
        if computed == said {
            return Ok(());
        }
        Err(Error::PayloadChecksum {
            stream: self.stream,
            seq: self.seq,
            round: self.round,
            said,
            computed,
        })
    }

    /// How many bytes follow the table: the pages', or fewer where they are packed.
    pub fn wire_bytes(&self) -> usize {
        match self.codec {
            None => self.payload_bytes(),
            Some(_) => self.packed_bytes as usize,
        }
    }
}

/// Reads and checks a header: whatever it says of what follows, it is bounded. A marker is wholly checked by this.
pub fn decode_header(bytes: &[u8; HEADER_BYTES]) -> Result<BatchHeader> {
    let mut fields = &bytes[..];
    let magic = fields.get_u32_le();
    if magic != MAGIC {
        return Err(Error::BatchMagic(magic));
    }
    let flags = fields.get_u16_le();
    let header = BatchHeader {
        marker: flags & MARKER != 0,
        stream: fields.get_u16_le(),
        round: fields.get_u32_le(),
        seq: fields.get_u32_le(),
        runs: fields.get_u32_le(),
        payload_bytes: fields.get_u32_le(),
        codec: Codec::from_number(fields.get_u32_le())?,
        packed_bytes: fields.get_u32_le(),
        sum: (flags & CHECKED != 0).then(|| (&bytes[SUM_AT..]).get_u32_le()),
        crc: (&bytes[CRC_AT..]).get_u32_le(),
        crc_so_far: crc32c::crc32c(&bytes[..CRC_AT]),
    };
    // A marker has no payload to check.
    let known = if header.marker { MARKER } else { MARKER | CHECKED };
    let unused = if header.sum.is_some() { 0 } else { fields.get_u32_le() };
    let reserved = u64::from(flags & !known) | u64::from(unused);
    if reserved != 0 {
        return Err(Error::Reserved {
            what: "a batch's header",
            value: reserved,
        });
    }
    if header.stream >= MAX_STREAMS {
        return Err(limit("a batch's stream number", header.stream, MAX_STREAMS - 1));
    }
    if header.run_count() > MAX_RUNS {
        return Err(Error::Limit {
            what: "runs of a batch",
            value: u64::from(header.runs),
            limit: MAX_RUNS as u64,
        });
    }
    if header.payload_bytes > MAX_PAYLOAD_BYTES {
        return Err(limit(
            "payload bytes of a batch",
            header.payload_bytes,
            MAX_PAYLOAD_BYTES,
        ));
    }
    check_shape(&header)?;
    check_packing(&header)?;
    if header.marker {
        check_crc(&header, &[])?;
    }
    Ok(header)
}

fn limit(what: &'static str, value: impl Into<u64>, limit: impl Into<u64>) -> Error {
    Error::Limit {
        what,
        value: value.into(),
        limit: limit.into(),
    }
}

/// A marker has nothing behind it, a batch something.
fn check_shape(header: &BatchHeader) -> Result<()> {
    let (what, fits) = if header.marker {
        ("marker", header.runs == 0 && header.payload_bytes == 0)
    } else {
        ("batch", header.runs != 0)
    };
    if fits {
        return Ok(());
    }
    Err(Error::BatchShape {
        what,
        runs: header.runs,
        payload_bytes: header.payload_bytes,
    })
}

/// What is packed is smaller for it; what is not has no second size.
fn check_packing(header: &BatchHeader) -> Result<()> {
    let fits = match header.codec {
        None => header.packed_bytes == 0,
        Some(_) => header.packed_bytes != 0 && header.packed_bytes < header.payload_bytes,
    };
    if fits {
        return Ok(());
    }
    Err(Error::PackedBytes {
        codec: header.codec.map_or("none", Codec::name),
        packed_bytes: header.packed_bytes,
        payload_bytes: header.payload_bytes,
    })
}

fn check_crc(header: &BatchHeader, table: &[u8]) -> Result<()> {
    let computed = crc32c::crc32c_append(header.crc_so_far, table);
    if computed != header.crc {
        return Err(Error::Checksum {
            what: "a page batch",
            said: header.crc,
            computed,
        });
    }
    Ok(())
}

/// Reads and checks the table that follows `header` into `out`, which is emptied first and on an error. Nothing may be
/// written to guest memory before this has passed.
pub fn decode_runs(header: &BatchHeader, table: &[u8], layout: &Layout, out: &mut Vec<Run>) -> Result<()> {
    out.clear();
    let result = read_runs(header, table, layout, out);
    if result.is_err() {
        out.clear();
    }
    result
}

fn read_runs(header: &BatchHeader, table: &[u8], layout: &Layout, out: &mut Vec<Run>) -> Result<()> {
    if table.len() != header.table_bytes() {
        return Err(Error::Length {
            what: "a batch's table",
            given: table.len(),
            said: header.table_bytes(),
        });
    }
    check_crc(header, table)?;
    out.reserve(header.run_count());
    let (mut floor, mut bytes) = (Pfn(0), 0u64);
    for (index, entry) in table.chunks_exact(RUN_BYTES).enumerate() {
        let run = read_run(index, entry)?;
        if run.range.start() < floor {
            return Err(Error::RunOrder {
                index,
                range: run.range,
                floor,
            });
        }
        if layout.region_of_range(run.range).is_none() {
            return Err(Error::RunOutsideRam {
                index,
                range: run.range,
            });
        }
        floor = run.range.end();
        bytes = bytes.saturating_add(run.payload_bytes());
        out.push(run);
    }
    if bytes != u64::from(header.payload_bytes) {
        return Err(Error::PayloadBytes {
            runs_bytes: bytes,
            payload_bytes: header.payload_bytes,
        });
    }
    Ok(())
}

/// One entry, checked for what can be told from itself.
fn read_run(index: usize, mut entry: &[u8]) -> Result<Run> {
    let (start, pages) = (Pfn(entry.get_u64_le()), entry.get_u64_le());
    let (kind, fill) = (entry.get_u32_le(), entry.get_u32_le());
    let range = PageRange::new(start, pages).filter(|range| !range.is_empty());
    let range = range.ok_or(Error::RunRange { index, start, pages })?;
    let kind = match (kind, fill) {
        (0, 0) => RunKind::Data,
        (1, 0) => RunKind::Zero,
        (2, value) => RunKind::Fill(value),
        _ => return Err(Error::RunKind { index, kind, fill }),
    };
    Ok(Run { range, kind })
}

/// An end-of-round marker; [`BatchBuilder::marker`] keeps count of `seq`.
pub fn marker(stream: u16, round: u32, seq: u32) -> [u8; HEADER_BYTES] {
    let mut out = [0; HEADER_BYTES];
    write_header(&mut out, MARKER, stream, [round, seq, 0, 0]);
    let crc = crc32c::crc32c(&out[..CRC_AT]);
    out[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    out
}

/// Writes all of a header but its checksum; `words` are round, number, runs and payload bytes.
fn write_header(out: &mut [u8], flags: u16, stream: u16, words: [u32; 4]) {
    out[..4].copy_from_slice(&MAGIC.to_le_bytes());
    out[4..6].copy_from_slice(&flags.to_le_bytes());
    out[6..8].copy_from_slice(&stream.to_le_bytes());
    for (i, word) in words.iter().enumerate() {
        out[8 + 4 * i..12 + 4 * i].copy_from_slice(&word.to_le_bytes());
    }
    out[24..CRC_AT].fill(0);
}

/// Adds to a header the checksum of its payload.
fn write_sum(out: &mut [u8], sum: u32) {
    let flags = u16::from_le_bytes([out[4], out[5]]) | CHECKED;
    out[4..6].copy_from_slice(&flags.to_le_bytes());
    out[SUM_AT..CRC_AT].copy_from_slice(&sum.to_le_bytes());
}

/// Adds to a header what its pages are packed by, and to how much.
fn write_packing(out: &mut [u8], codec: Codec, packed_bytes: u32) {
    out[24..28].copy_from_slice(&codec.number().to_le_bytes());
    out[28..32].copy_from_slice(&packed_bytes.to_le_bytes());
}
