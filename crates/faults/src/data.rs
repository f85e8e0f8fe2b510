//! The data plane as a model: each stream sends its chunks in order, a few pages at a time as they are at that moment,
//! in batches of `wire`; they are read in pieces, and pages are in memory as soon as their bytes are.

use crate::guest::POISON;
use crate::pair::{Pair, kind_of};
use engine::{Chunk, Content, DestinationEvent, ReceivedRun, RunKind, SourceEvent, Step, Time};
use pages::{Layout, PageRange, PageSet, Pfn};
use std::collections::VecDeque;
use wire::batch::{self, BatchBuilder, BatchHeader, HEADER_BYTES, Run, StreamOrder};

/// Pages that a batch has at most.
const BATCH: u64 = 24;
/// Bytes that a page's content takes in the model.
const CONTENT: usize = 8;
/// Bytes on their way that block a stream.
const ROOM: usize = 2048;
/// What free pages are filled with.
const PATTERN: u32 = 0xaaaa_aaaa;

#[derive(Clone, Debug)]
enum Item {
    Chunk(Sending),
    Marker(u32),
}

#[derive(Clone, Debug)]
struct Sending {
    chunk: Chunk,
    rest: VecDeque<PageRange>,
    zero: Vec<PageRange>,
    payload: u64,
    wire: u64,
}

/// One stream at the source: what it has to send.
#[derive(Debug)]
pub(crate) struct Stream {
    outgoing: VecDeque<Item>,
    builder: BatchBuilder,
    /// Since when it could send and its connection takes nothing.
    pub(crate) blocked: Option<Time>,
    /// Whether its end was told to the engine.
    pub(crate) told: bool,
}

impl Stream {
    pub(crate) fn new(number: u16) -> Self {
        Stream {
            outgoing: VecDeque::new(),
            builder: BatchBuilder::new(number),
            blocked: None,
            told: false,
        }
    }

    pub(crate) fn has_work(&self) -> bool {
        !self.outgoing.is_empty()
    }

    pub(crate) fn hand(&mut self, chunk: Chunk) {
        let (Content::Pages(ranges) | Content::Fill { ranges, .. }) = &chunk.content;
        let rest = ranges.iter().copied().collect();
        self.outgoing.push_back(Item::Chunk(Sending {
            chunk,
            rest,
            zero: Vec::new(),
            payload: 0,
            wire: 0,
        }));
    }

    pub(crate) fn end_round(&mut self, round: u32) {
        self.outgoing.push_back(Item::Marker(round));
    }
}

/// One stream at the destination: what came of a batch so far.
#[derive(Debug)]
pub struct Receiving {
    order: StreamOrder,
    buffer: Vec<u8>,
    batch: Option<(BatchHeader, Vec<Run>, usize)>,
    /// Zero pages of round 0 are not written: memory reads as zero.
    leaves_zero: bool,
}

impl Receiving {
    pub(crate) fn new(stream: u16, round: u32, leaves_zero: bool) -> Self {
        Receiving {
            order: StreamOrder::from_round(stream, round),
            buffer: Vec::new(),
            batch: None,
            leaves_zero,
        }
    }
}

impl Pair {
    /// Whether stream `k`'s connection takes something.
    pub(crate) fn has_room(&self, k: usize) -> bool {
        let pipe = &self.links[self.source_link].data[k];
        !pipe.ended() && pipe.len() < ROOM
    }

    /// A stream sends a batch or a marker.
    pub(crate) fn stream_sends(&mut self, k: usize) {
        let now = self.now;
        let Some(item) = self.streams[k].outgoing.pop_front() else {
            return;
        };
        let mut sending = match item {
            Item::Marker(round) => {
                let marker = self.streams[k].builder.marker(round).unwrap();
                return self.enter(k, &marker);
            }
            Item::Chunk(sending) => sending,
        };
        if let Some(range) = sending.rest.pop_front() {
            let (part, later) = range.split_at(1 + self.rng.below(BATCH));
            if !later.is_empty() {
                sending.rest.push_front(later);
            }
            let batch = self.read(k, &mut sending, part);
            self.enter(k, &batch);
        }
        if self.links[self.source_link].data[k].ended() {
            // It broke while it was written to: nothing of it is told as sent.
            return;
        }
        if !sending.rest.is_empty() {
            return self.streams[k].outgoing.push_front(Item::Chunk(sending));
        }
        let event = SourceEvent::Sent {
            stream: k as u16,
            chunk: sending.chunk.id,
            wire_bytes: sending.wire,
            payload_bytes: sending.payload,
            zero: sending.zero,
        };
        self.source.handle(event, now);
    }

    fn enter(&mut self, k: usize, bytes: &[u8]) {
        self.links[self.source_link].data[k].write(bytes, self.now);
    }

    /// Reads pages as they are now: a batch of runs of one kind each, with its content.
    fn read(&mut self, k: usize, sending: &mut Sending, range: PageRange) -> Vec<u8> {
        let skip_zero = self.setup.source.skip.zero;
        let (mut runs, mut content): (Vec<Run>, Vec<u8>) = (Vec::new(), Vec::new());
        if matches!(sending.chunk.content, Content::Fill { .. }) {
            let kind = batch::RunKind::Fill(PATTERN);
            runs.push(Run { range, kind });
        } else {
            for pfn in range.start().0..range.end().0 {
                let index = self.setup.guest.layout.index_of(Pfn(pfn)).unwrap() as usize;
                let version = self.guest.ram[index];
                let one = PageRange::new(Pfn(pfn), 1).unwrap();
                let kind = if kind_of(version, skip_zero) == RunKind::Zero {
                    sending.zero.push(one);
                    batch::RunKind::Zero
                } else {
                    content.extend_from_slice(&version.to_le_bytes());
                    batch::RunKind::Data
                };
                match runs.last_mut() {
                    Some(run) if run.kind == kind => run.range = PageRange::between(run.range.start(), one.end()),
                    _ => runs.push(Run { range: one, kind }),
                }
            }
        }
        let builder = &mut self.streams[k].builder;
        builder.start(sending.chunk.round);
        for run in runs {
            assert!(builder.push(run).unwrap(), "a batch of the model is small");
        }
        let (head, payload) = builder.finish().unwrap();
        sending.wire += (head.len() + payload) as u64;
        sending.payload += payload as u64;
        self.written += (head.len() + payload) as u64;
        let mut bytes = head.to_vec();
        bytes.extend(content);
        bytes
    }

    /// Some bytes of a stream arrive, or its end.
    pub(crate) fn stream_arrives(&mut self, k: usize, most: usize) {
        let link = &mut self.links[self.destination_link];
        let pipe = &mut link.data[k];
        if pipe.is_empty() {
            if pipe.ended() && !pipe.told {
                pipe.told = true;
                let error = format!("data stream {k} ended");
                self.destination
                    .handle(DestinationEvent::StreamGone { error }, self.now);
            }
            return;
        }
        let bytes = pipe.read(most);
        link.receiving[k].buffer.extend(bytes);
        while self.take_batch(k) {}
    }

    /// Takes a step in a batch; false where more bytes are needed.
    fn take_batch(&mut self, k: usize) -> bool {
        let layout = self.setup.guest.layout.clone();
        let link = &mut self.links[self.destination_link];
        let receiving = &mut link.receiving[k];
        let Some((header, runs, done)) = &mut receiving.batch else {
            let Some((head, rest)) = receiving.buffer.split_first_chunk::<HEADER_BYTES>() else {
                return false;
            };
            let header = match batch::decode_header(head) {
                Ok(header) => header,
                Err(error) => return self.malformed(k, &error.to_string()),
            };
            let table = header.table_bytes();
            if rest.len() < table {
                return false;
            }
            let mut runs = Vec::new();
            let read = receiving.order.expect(&header).and_then(|()| match header.is_marker() {
                true => Ok(()),
                false => batch::decode_runs(&header, &rest[..table], &layout, &mut runs),
            });
            if let Err(error) = read {
                return self.malformed(k, &error.to_string());
            }
            receiving.buffer.drain(..HEADER_BYTES + table);
            if header.is_marker() {
                let (stream, round) = (k as u16, header.round());
                self.destination
                    .handle(DestinationEvent::Marker { stream, round }, self.now);
            } else {
                receiving.batch = Some((header, runs, 0));
            }
            return true;
        };
        let pages: Vec<usize> = runs
            .iter()
            .filter(|run| run.kind == batch::RunKind::Data)
            .flat_map(|run| {
                let first = layout.index_of(run.range.start()).unwrap() as usize;
                first..first + run.range.count() as usize
            })
            .collect();
        let (header, runs, done) = (*header, runs.clone(), done);
        // Pages are in memory as soon as their bytes are, whatever becomes of the batch.
        let mut written = Vec::new();
        while *done < pages.len() && receiving.buffer.len() >= CONTENT {
            let content: Vec<u8> = receiving.buffer.drain(..CONTENT).collect();
            written.push((pages[*done], u64::from_le_bytes(content.try_into().unwrap())));
            *done += 1;
        }
        let complete = *done == pages.len();
        let leaves_zero = receiving.leaves_zero;
        let flipped = link.data[k].flipped;
        if complete {
            link.receiving[k].batch = None;
        }
        for (index, version) in written {
            self.copy.ram[index] = version;
            self.content_flipped |= flipped;
        }
        if complete {
            self.batch_is_here(k, &header, &runs, leaves_zero);
        }
        complete
    }

    fn batch_is_here(&mut self, k: usize, header: &BatchHeader, runs: &[Run], leaves_zero: bool) {
        let mut received = Vec::new();
        for run in runs {
            let kind = match run.kind {
                batch::RunKind::Data => RunKind::Data,
                batch::RunKind::Zero => {
                    if header.round() > 0 || !leaves_zero {
                        self.put(run.range, 0);
                    }
                    RunKind::Zero
                }
                batch::RunKind::Fill(_) => {
                    self.put(run.range, POISON);
                    RunKind::Fill
                }
            };
            received.push(ReceivedRun { range: run.range, kind });
        }
        let payload_bytes = header.payload_bytes() as u64;
        let event = DestinationEvent::Received {
            stream: k as u16,
            round: header.round(),
            runs: received,
            wire_bytes: (HEADER_BYTES + header.table_bytes()) as u64 + payload_bytes,
            payload_bytes,
        };
        self.destination.handle(event, self.now);
    }

    /// What came is no batch: nothing more is read.
    fn malformed(&mut self, k: usize, error: &str) -> bool {
        self.links[self.destination_link].data[k].abandon();
        let error = format!("data stream {k}: {error}");
        let step = Step::Receive;
        self.destination
            .handle(DestinationEvent::Failed { step, error }, self.now);
        false
    }

    /// Fills pages of the destination's memory with a version.
    pub(crate) fn put(&mut self, range: PageRange, version: u64) {
        let first = self.setup.guest.layout.index_of(range.start()).unwrap() as usize;
        self.copy.ram[first..first + range.count() as usize].fill(version);
    }
}

/// Digests of versions, cut as `--verify` cuts RAM.
pub(crate) fn digests(ram: &[u64], excluded: &PageSet, chunk_pages: u64, only: &[u64]) -> Vec<u128> {
    let layout: &Layout = excluded.layout();
    let mut sums = Vec::new();
    for region in layout.regions() {
        let mut rest = *region;
        while !rest.is_empty() {
            let (chunk, tail) = rest.split_at(chunk_pages);
            rest = tail;
            let sum = (chunk.start().0..chunk.end().0)
                .filter(|pfn| !excluded.contains(Pfn(*pfn)))
                .fold(0, |sum, pfn| {
                    let version = ram[layout.index_of(Pfn(pfn)).unwrap() as usize];
                    u128::wrapping_add(
                        sum,
                        u128::from(version).wrapping_mul(u128::from(pfn + 1) * 0x1_0000_0001_0000_0001),
                    )
                });
            sums.push(sum);
        }
    }
    only.iter().map(|index| sums[*index as usize]).collect()
}
