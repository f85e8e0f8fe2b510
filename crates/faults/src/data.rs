//! The data plane as a model: each stream sends its chunks in order, a few pages at a time as they are at that moment,
//! and delivers them in order some time later.

use crate::guest::POISON;
use crate::pair::{Control, Pair, kind_of};
use engine::{Chunk, Content, DestinationEvent, ReceivedRun, RunKind, SourceEvent, Step};
use pages::{Layout, PageRange, PageSet, Pfn};
use std::collections::VecDeque;

/// Pages that a batch has at most.
const BATCH: u64 = 24;

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
    pages: u64,
    payload: u64,
}

#[derive(Clone, Debug)]
enum Parcel {
    Batch {
        round: u32,
        runs: Vec<(ReceivedRun, Vec<u64>)>,
    },
    Marker(u32),
}

/// One stream: what it has to send, and what is on its way.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stream {
    outgoing: VecDeque<Item>,
    link: VecDeque<Parcel>,
    broken: bool,
}

impl Stream {
    pub(crate) fn may_send(&self) -> bool {
        !self.outgoing.is_empty() && !self.broken
    }

    pub(crate) fn may_arrive(&self) -> bool {
        !self.link.is_empty()
    }

    pub(crate) fn hand(&mut self, chunk: Chunk) {
        let (Content::Pages(ranges) | Content::Fill { ranges, .. }) = &chunk.content;
        let rest = ranges.iter().copied().collect();
        self.outgoing.push_back(Item::Chunk(Sending {
            chunk,
            rest,
            zero: Vec::new(),
            pages: 0,
            payload: 0,
        }));
    }

    pub(crate) fn end_round(&mut self, round: u32) {
        self.outgoing.push_back(Item::Marker(round));
    }
}

impl Pair {
    /// A stream sends a batch or a marker.
    pub(crate) fn stream_sends(&mut self, k: usize) {
        if self.destination_end.is_some() && self.to_source.iter().any(|c| matches!(c, Control::Gone)) {
            // The peer has closed: the stream notices before or after the control connection does.
            self.streams[k].broken = true;
            if self.setup.holds {
                return;
            }
            let error = "the peer closed it".to_owned();
            return self.source.handle(
                SourceEvent::Failed {
                    step: Step::Send,
                    error,
                },
                self.now,
            );
        }
        let Some(item) = self.streams[k].outgoing.pop_front() else {
            return;
        };
        let mut sending = match item {
            Item::Marker(round) => return self.streams[k].link.push_back(Parcel::Marker(round)),
            Item::Chunk(sending) => sending,
        };
        if let Some(range) = sending.rest.pop_front() {
            let (now, later) = range.split_at(1 + self.rng.below(BATCH));
            if !later.is_empty() {
                sending.rest.push_front(later);
            }
            let runs = self.read(&mut sending, now);
            self.streams[k].link.push_back(Parcel::Batch {
                round: sending.chunk.round,
                runs,
            });
        }
        if !sending.rest.is_empty() {
            return self.streams[k].outgoing.push_front(Item::Chunk(sending));
        }
        let event = SourceEvent::Sent {
            stream: k as u16,
            chunk: sending.chunk.id,
            wire_bytes: 64 + sending.payload,
            payload_bytes: sending.payload,
            zero: sending.zero,
        };
        self.source.handle(event, self.now);
    }

    /// Reads pages as they are now, in runs of one kind.
    fn read(&mut self, sending: &mut Sending, range: PageRange) -> Vec<(ReceivedRun, Vec<u64>)> {
        let skip_zero = self.setup.source.skip.zero;
        if matches!(sending.chunk.content, Content::Fill { .. }) {
            let poison = vec![POISON; range.count() as usize];
            return vec![(
                ReceivedRun {
                    range,
                    kind: RunKind::Fill,
                },
                poison,
            )];
        }
        let mut runs: Vec<(ReceivedRun, Vec<u64>)> = Vec::new();
        for pfn in range.start().0..range.end().0 {
            let index = self.setup.guest.layout.index_of(Pfn(pfn)).unwrap() as usize;
            let version = self.guest.ram[index];
            let kind = kind_of(version, skip_zero);
            let one = PageRange::new(Pfn(pfn), 1).unwrap();
            sending.pages += 1;
            if kind == RunKind::Zero {
                sending.zero.push(one);
            } else {
                sending.payload += 4096;
            }
            match runs.last_mut() {
                Some((run, versions)) if run.kind == kind => {
                    run.range = PageRange::between(run.range.start(), one.end());
                    versions.push(version);
                }
                _ => runs.push((ReceivedRun { range: one, kind }, vec![version])),
            }
        }
        runs
    }

    /// A stream delivers: the pages are in memory, then the engine is told.
    pub(crate) fn stream_arrives(&mut self, k: usize) {
        let Some(parcel) = self.streams[k].link.pop_front() else {
            return;
        };
        let stream = k as u16;
        let event = match parcel {
            Parcel::Marker(round) => DestinationEvent::Marker { stream, round },
            Parcel::Batch { round, runs } => {
                for (run, versions) in &runs {
                    self.put(run.range, |i| versions[i]);
                }
                let payload_bytes = 4096 * runs.iter().map(|(run, _)| run.range.count()).sum::<u64>();
                let runs = runs.into_iter().map(|(run, _)| run).collect();
                DestinationEvent::Received {
                    stream,
                    round,
                    runs,
                    wire_bytes: 64 + payload_bytes,
                    payload_bytes,
                }
            }
        };
        self.destination.handle(event, self.now);
    }

    /// Puts versions into the destination's memory.
    pub(crate) fn put(&mut self, range: PageRange, version: impl Fn(usize) -> u64) {
        let first = self.setup.guest.layout.index_of(range.start()).unwrap() as usize;
        for i in 0..range.count() as usize {
            self.copy.ram[first + i] = version(i);
        }
    }
}

/// Digests of versions, cut as `--verify` cuts RAM.
pub(crate) fn digests(ram: &[u64], excluded: &PageSet, chunk_pages: u64) -> Vec<u128> {
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
                    u128::wrapping_add(sum, u128::from(version) * u128::from(pfn + 1) * 0x1_0000_0001_0000_0001)
                });
            sums.push(sum);
        }
    }
    sums
}
