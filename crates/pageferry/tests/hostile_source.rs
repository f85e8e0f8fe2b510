//! A source that speaks the bytes itself and means no good: each wrong thing ends in an abort with its reason, the
//! receiver ends with a sentence, and nothing runs.
#![allow(clippy::unwrap_used)]

mod common;

use common::peer::{hear, hello, open, say};
use common::*;
use pageferry::Ending;
use pages::{Layout, Pfn};
use std::io::Write;
use std::net::TcpStream;
use wire::batch::{BatchBuilder, Run, RunKind, marker};
use wire::{AbortCause, ConnectionRole, Message, Skip, SkipReason};

struct Source {
    control: TcpStream,
    data: TcpStream,
    /// Pages of the layout past the first 99.
    rest: &'static [(u64, u64)],
}

impl Source {
    fn batch(&mut self, builder: &mut BatchBuilder, round: u32, runs: &[Run]) {
        builder.start(round);
        for run in runs {
            assert!(builder.push(*run).unwrap());
        }
        let (head, payload) = builder.finish().unwrap();
        // The receiver hangs up at the first wrong byte.
        let _ = self.data.write_all(head);
        let _ = self.data.write_all(&vec![0x55; payload]);
    }

    /// Sends all of round 0: 99 pages, a skip of the others.
    fn round_0(&mut self, builder: &mut BatchBuilder) {
        self.batch(builder, 0, &[data(0, 99)]);
        say(&mut self.control, &skip(self.rest));
        say(&mut self.control, &Message::RoundEnd { round: 0, last: false });
        self.data.write_all(&builder.marker(0).unwrap()).unwrap();
        assert!(matches!(
            hear(&mut self.control),
            Some(Message::RoundReceived { round: 0 })
        ));
    }
}

fn data(start: u64, pages: u64) -> Run {
    Run {
        range: r(start, pages),
        kind: RunKind::Data,
    }
}

fn skip(ranges: &[(u64, u64)]) -> Message {
    Message::Skip(Skip {
        reason: SkipReason::Hole,
        ranges: ranges.iter().map(|(start, pages)| r(*start, *pages)).collect(),
    })
}

/// A batch's bytes with one field of its only run's entry replaced, and the checksum made to fit.
fn forged(start: u64, pages: u64, kind: u32) -> Vec<u8> {
    let mut builder = BatchBuilder::new(0);
    builder.start(0);
    builder.push(data(0, 1)).unwrap();
    let mut bytes = builder.finish().unwrap().0.to_vec();
    bytes[40..48].copy_from_slice(&start.to_le_bytes());
    bytes[48..56].copy_from_slice(&pages.to_le_bytes());
    bytes[56..60].copy_from_slice(&kind.to_le_bytes());
    let crc = crc32c(&[&bytes[..36], &bytes[40..]].concat());
    bytes[36..40].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg())
        })
    })
}

/// Runs `attack` against a receiver of a guest with two regions: 0..100 and page 200; what it ends with holds `text`.
async fn attack(name: &str, text: &str, attack: impl FnOnce(&mut Source) + Send + 'static) {
    let layout = Layout::new(vec![r(0, 100), r(200, 1)]).unwrap();
    let (receiving, address, made) = receiver(receive_options());
    let source = tokio::task::spawn_blocking(move || {
        let mut control = open(&address, ConnectionRole::Control);
        let data = open(&address, ConnectionRole::Data { stream: 0 });
        say(&mut control, &hello(&layout, 1));
        assert!(matches!(hear(&mut control), Some(Message::Accept(_))));
        let mut source = Source {
            control,
            data,
            rest: &[(99, 1), (200, 1)],
        };
        attack(&mut source);
        loop {
            match hear(&mut source.control) {
                Some(Message::Abort { reason, cause }) => break (reason, cause),
                Some(_) => {}
                None => panic!("no abort came"),
            }
        }
    });
    let finished = guarded(receiving.finish()).await;
    assert_eq!(finished.outcome.ending, Ending::Failed, "{name}");
    let error = finished.outcome.error.unwrap();
    assert!(error.contains(text), "{name}: {error}");
    let (reason, cause) = guarded(source).await.unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(cause == AbortCause::Failed && reason.contains(text), "{name}: {reason}");
    assert!(finished.guest.is_none(), "{name}");
    assert!(made.lock().unwrap().iter().all(|probe| !probe.is_running()), "{name}");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_19_batches() {
    let raw = |bytes: Vec<u8>| {
        move |source: &mut Source| {
            // The receiver hangs up at the first wrong byte.
            let _ = source.data.write_all(&bytes);
        }
    };
    attack("2^40 pages", "do not lie within one region", raw(forged(0, 1 << 40, 0))).await;
    attack("overflow", "wraps around", raw(forged(u64::MAX - 1, 5, 0))).await;
    attack("empty run", "empty or wraps", raw(forged(3, 0, 0))).await;
    attack("in a hole", "do not lie within one region", raw(forged(150, 1, 0))).await;
    attack("over a border", "do not lie within one region", raw(forged(99, 2, 0))).await;
    attack("unknown kind", "kind 7", raw(forged(3, 1, 7))).await;
    attack("more than the payload", "runs of a batch make", raw(forged(3, 2, 0))).await;
    attack("noise", "out of step", raw(vec![0xA5; 4096])).await;
    let mut many = marker(0, 0, 0).to_vec();
    many[4] = 0;
    many[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
    attack("2^32 runs", "over the limit", raw(many)).await;
    let mut damaged = forged(3, 1, 0);
    damaged[44] ^= 1;
    attack("a flipped bit", "checksum", raw(damaged)).await;
    let mut marker_of_another = marker(1, 0, 0).to_vec();
    marker_of_another.extend([0; 40]);
    attack("another stream", "stream", raw(marker_of_another)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_19_order() {
    attack("marker twice", "already ended", |source| {
        let bytes = [marker(0, 0, 0), marker(0, 0, 1)].concat();
        source.data.write_all(&bytes).unwrap();
    })
    .await;
    attack("pages behind the marker", "already ended", |source| {
        let mut builder = BatchBuilder::new(0);
        source.data.write_all(&builder.marker(0).unwrap()).unwrap();
        source.batch(&mut builder, 0, &[data(0, 1)]);
    })
    .await;
    attack("pages before the barrier", "while round 0 was under way", |source| {
        let mut builder = BatchBuilder::new(0);
        source.data.write_all(&builder.marker(0).unwrap()).unwrap();
        source.batch(&mut builder, 1, &[data(0, 1)]);
    })
    .await;
    attack("pages after the last round", "after the last round", |source| {
        let mut builder = BatchBuilder::new(0);
        source.round_0(&mut builder);
        say(&mut source.control, &skip_nothing_last());
        source.data.write_all(&builder.marker(1).unwrap()).unwrap();
        assert!(matches!(
            hear(&mut source.control),
            Some(Message::RoundReceived { round: 1 })
        ));
        source.batch(&mut builder, 2, &[data(0, 1)]);
    })
    .await;
    attack("a batch twice", "number", |source| {
        let mut builder = BatchBuilder::new(0);
        source.batch(&mut builder, 0, &[data(0, 1)]);
        source.batch(&mut BatchBuilder::new(0), 0, &[data(1, 1)]);
    })
    .await;
    attack("overlapping pages", "twice", |source| {
        let mut builder = BatchBuilder::new(0);
        source.batch(&mut builder, 0, &[data(0, 5)]);
        source.batch(&mut builder, 0, &[data(4, 2)]);
    })
    .await;
}

fn skip_nothing_last() -> Message {
    Message::RoundEnd { round: 1, last: true }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_19_control() {
    attack("lost pages", "neither content nor", |source| {
        say(&mut source.control, &Message::RoundEnd { round: 0, last: false });
        source.data.write_all(&marker(0, 0, 0)).unwrap();
    })
    .await;
    attack("skip in a hole", "do not lie within one region", |source| {
        say(&mut source.control, &skip(&[(100, 1)]));
    })
    .await;
    attack("skip twice", "sent or skipped before", |source| {
        say(&mut source.control, &skip(&[(0, 10)]));
        say(&mut source.control, &skip(&[(5, 1)]));
    })
    .await;
    attack("commit at once", "Commit", |source| {
        let commit = wire::Commit {
            total_us: 0,
            downtime_us: 0,
            verify_us: 0,
        };
        say(&mut source.control, &Message::Commit(commit));
    })
    .await;
    attack("Hello twice", "Hello", |source| {
        say(&mut source.control, &hello(&Layout::flat(100).unwrap(), 1));
    })
    .await;
    attack("no message", "kind", |source| {
        source.control.write_all(&[0x11; 64]).unwrap();
    })
    .await;
}

/// Not an attack: the source's machine dies, at each of these points.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_dies_leaves_nothing_running() {
    for point in 0..4 {
        let (receiving, address, made) = receiver(receive_options());
        let dead = tokio::task::spawn_blocking(move || {
            let mut control = open(&address, ConnectionRole::Control);
            let data = open(&address, ConnectionRole::Data { stream: 0 });
            say(&mut control, &hello(&Layout::flat(100).unwrap(), 1));
            if point == 0 {
                return;
            }
            assert!(matches!(hear(&mut control), Some(Message::Accept(_))));
            let mut source = Source {
                control,
                data,
                rest: &[(99, 1)],
            };
            let mut builder = BatchBuilder::new(0);
            match point {
                1 => {}
                2 => source.batch(&mut builder, 0, &[data_of(7)]),
                _ => source.round_0(&mut builder),
            }
        });
        let finished = guarded(receiving.finish()).await;
        dead.await.unwrap();
        assert_eq!(finished.outcome.ending, Ending::Failed, "point {point}");
        assert!(finished.outcome.error.is_some() && finished.guest.is_none());
        assert!(made.lock().unwrap().iter().all(|probe| !probe.is_running()));
    }
}

fn data_of(pages: u64) -> Run {
    Run {
        range: pages::PageRange::between(Pfn(0), Pfn(pages)),
        kind: RunKind::Data,
    }
}
