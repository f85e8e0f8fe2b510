//! Pages that are packed on their way: by every codec, by what pays, and by a source that means no good.
#![allow(clippy::unwrap_used)]

mod common;

use codec::Packer;
use common::peer::{FakeReceiver, hear, hello, open_as, say};
use common::stingy::Stingy;
use common::*;
use pageferry::{Compress, Ending, Listener, Migration, Report, SendOptions};
use pages::{Layout, PAGE_BYTES};
use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use wire::batch::{BatchBuilder, Codec, Run, RunKind};
use wire::{Accept, ConnectionRole, Message, Offer};

fn compressed(compress: Compress) -> SendOptions {
    let mut options = send_options(2);
    options.compress = compress;
    options.source.verify = true;
    options
}

fn figures(report: &Report) -> (&str, u64, u64) {
    let compress = report.compress.as_ref().unwrap();
    (&compress.used, compress.raw_bytes, compress.wire_bytes)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_codec_brings_every_byte() {
    for (compress, name) in [
        (Compress::None, "none"),
        (Compress::Lz4, "lz4"),
        (Compress::Zstd(1), "zstd:1"),
        (Compress::Zstd(7), "zstd:7"),
    ] {
        // Two regions, and batches that end within both.
        let layout = Layout::new(vec![r(0, 3000), r(5000, 2000)]).unwrap();
        let (guest, probe) = busy_guest(&layout, None);
        let (source, destination, there) = migrate(guest, compressed(compress), receive_options()).await;
        assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
        assert_eq!(destination.outcome.ending, Ending::Completed);
        assert_same_ram(&probe, &there.unwrap(), &[]);
        let report = &source.outcome.report;
        assert_eq!(report.verified, Some(true), "{name}");
        let (used, raw, wire) = figures(report);
        assert_eq!((used, raw), (name, report.payload_bytes));
        assert_eq!(raw, 2500 * PAGE_BYTES);
        assert!(
            if name == "none" { wire == raw } else { wire < raw / 10 },
            "{name}: {wire} of {raw}"
        );
        let there = &destination.outcome.report;
        assert!(there.compress.is_none() && there.payload_bytes == raw);
        assert!(
            there.wire_bytes.abs_diff(report.wire_bytes) < 64 << 10,
            "both count what crossed"
        );
    }
}

/// A link far slower than any processor packs, and said to be so: the first batch is packed already.
#[tokio::test(flavor = "multi_thread")]
async fn auto_packs_for_a_limited_bandwidth() {
    let (guest, probe) = busy_guest(&Layout::flat(4000).unwrap(), None);
    let mut options = compressed(Compress::Auto);
    options.max_bandwidth = Some(4_000_000);
    let (source, _, there) = migrate(guest, options, receive_options()).await;
    assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
    assert_same_ram(&probe, &there.unwrap(), &[]);
    let (used, raw, wire) = figures(&source.outcome.report);
    assert!(used != "none" && wire < raw / 10, "{used}: {wire} of {raw}");
    let why = &source.outcome.report.compress.as_ref().unwrap().why;
    assert!(
        why.contains("the link takes 2.0 MB/s"),
        "each of two streams has half: {why}"
    );
}

/// Random pages: what does not shrink goes as it is, whatever was asked for.
#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_shrink_goes_as_it_is() {
    let (guest, probe) = blank_guest(&Layout::flat(1000).unwrap(), None);
    let mut state = 1u64;
    for page in 0..1000 {
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        };
        let content: Vec<u8> = (0..512).flat_map(|_| next()).collect();
        probe.memory.write(page * PAGE_BYTES, &content).unwrap();
    }
    let (source, _, there) = migrate(guest, compressed(Compress::Zstd(1)), receive_options()).await;
    assert_eq!(source.outcome.report.verified, Some(true), "{:?}", source.outcome.error);
    assert_same_ram(&probe, &there.unwrap(), &[]);
    assert_eq!(
        figures(&source.outcome.report),
        ("none", 1000 * PAGE_BYTES, 1000 * PAGE_BYTES)
    );
}

/// A receiver of version 1, and one that offers the other codec.
#[tokio::test(flavor = "multi_thread")]
async fn case_12_a_codec_that_the_receiver_does_not_take_is_refused() {
    for offer in [None, Some(Codec::Zstd.bit())] {
        let (mut fake, address) = FakeReceiver::bind();
        let player = std::thread::spawn(move || {
            if offer.is_some() {
                fake.accept_as(2, 2);
            } else {
                fake.accept(2);
            }
            assert!(matches!(fake.hear(), Some(Message::Hello(_))));
            if let Some(codecs) = offer {
                fake.say(&Message::Offer(Offer { codecs }));
            }
            fake.say(&Message::Accept(Accept { populated: false }));
            fake.hear_until(|message| matches!(message, Message::Abort { .. }))
        });
        let (guest, probe) = busy_guest(&Layout::flat(1000).unwrap(), None);
        let sending = Migration::send(guest, &address, compressed(Compress::Lz4));
        let finished = guarded(sending.finish()).await;
        assert_eq!(finished.outcome.ending, Ending::Refused);
        let error = finished.outcome.error.unwrap();
        assert!(error.contains("--compress lz4") && error.contains("older"), "{error}");
        let Some(Message::Abort { reason, .. }) = player.join().unwrap() else {
            panic!("the receiver was not told");
        };
        assert!(reason.contains("--compress lz4"), "{reason}");
        probe.assert_unharmed();
    }
}

/// What version 1 does not have is not taken from a receiver that speaks it.
#[tokio::test(flavor = "multi_thread")]
async fn case_12_an_offer_of_version_1_is_refused() {
    let (mut fake, address) = FakeReceiver::bind();
    let player = std::thread::spawn(move || {
        fake.accept(2);
        fake.say(&Message::Offer(Offer { codecs: 3 }));
        fake
    });
    let (guest, probe) = busy_guest(&Layout::flat(1000).unwrap(), None);
    let finished = guarded(Migration::send(guest, &address, compressed(Compress::Auto)).finish()).await;
    assert_eq!(finished.outcome.ending, Ending::Failed);
    let error = finished.outcome.error.unwrap();
    assert!(error.contains("Offer") && error.contains("version 2"), "{error}");
    probe.assert_unharmed();
    drop(player.join().unwrap());
}

/// Memory that can only be read into from a socket: nothing is offered, and auto does without.
#[tokio::test(flavor = "multi_thread")]
async fn auto_falls_back_where_the_receiver_takes_nothing_packed() {
    let layout = Layout::flat(600).unwrap();
    let (guest, probe) = busy_guest(&layout, None);
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_address().clone();
    let (out, made) = std::sync::mpsc::channel();
    let receiving = Migration::receive(listener, receive_options(), move |incoming| {
        let (mut guest, probe) = blank_guest(&incoming.config.layout, None);
        guest.ram = Arc::new(Stingy {
            memory: Arc::clone(&probe.memory),
            calls: AtomicUsize::new(0),
        });
        out.send(probe).unwrap();
        Ok(guest)
    });
    let mut options = compressed(Compress::Auto);
    options.max_bandwidth = Some(4_000_000);
    let sending = Migration::send(guest, &address, options);
    let (source, _) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
    assert_same_ram(&probe, &made.recv().unwrap(), &[]);
    assert_eq!(figures(&source.outcome.report).0, "none");
    let why = &source.outcome.report.compress.as_ref().unwrap().why;
    assert!(why.contains("takes no packed pages"), "{why}");
}

/// A batch of 8 pages packed by `codec`, with `bytes` in the place of its packed pages, of which `said` are announced.
fn batch(codec: Codec, bytes: &[u8], said: usize) -> Vec<u8> {
    let mut builder = BatchBuilder::new(0);
    let run = Run {
        range: r(8, 8),
        kind: RunKind::Data,
    };
    assert!(builder.push(run).unwrap());
    let mut out = builder.finish_packed(codec, said).unwrap().to_vec();
    out.extend_from_slice(bytes);
    out
}

/// Sends `bytes` as a source that speaks `version`, then closes the stream: the receiver's word on it holds `text`.
async fn attack(name: &str, version: u16, bytes: Vec<u8>, text: &str) {
    let layout = Layout::flat(100).unwrap();
    let (receiving, address, made) = receiver(receive_options());
    let source = tokio::task::spawn_blocking(move || {
        let mut control = open_as(&address, ConnectionRole::Control, version);
        let mut data: TcpStream = open_as(&address, ConnectionRole::Data { stream: 0 }, version);
        say(&mut control, &hello(&layout, 1));
        if version > 1 {
            assert_eq!(hear(&mut control), Some(Message::Offer(Offer { codecs: 3 })));
        }
        assert!(matches!(hear(&mut control), Some(Message::Accept(_))));
        // The receiver hangs up at the first wrong byte.
        let _ = data.write_all(&bytes);
        let _ = data.shutdown(std::net::Shutdown::Write);
        loop {
            match hear(&mut control) {
                Some(Message::Abort { reason, .. }) => break reason,
                Some(_) => {}
                None => panic!("no abort came"),
            }
        }
    });
    let finished = guarded(receiving.finish()).await;
    assert_eq!(finished.outcome.ending, Ending::Failed, "{name}");
    let error = finished.outcome.error.unwrap();
    assert!(error.contains(text), "{name}: {error}");
    let reason = guarded(source).await.unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(reason.contains(text), "{name}: {reason}");
    assert!(made.lock().unwrap().iter().all(|probe| !probe.is_running()), "{name}");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_19_packed_batches() {
    let pack = |codec, bytes: usize| {
        let content = vec![0x55; bytes];
        Packer::default().pack(codec, 1, &content).unwrap().unwrap().to_vec()
    };
    for codec in Codec::ALL {
        let name = codec.name();
        let bomb = pack(codec, 4 << 20);
        attack(
            "a bomb",
            2,
            batch(codec, &bomb, bomb.len()),
            "32768 bytes that their batch has",
        )
        .await;
        let short = pack(codec, 28_672);
        let text = format!("packed by {name} make 28672 bytes, their batch has 32768");
        attack("too few", 2, batch(codec, &short, short.len()), &text).await;
        let good = pack(codec, 32_768);
        let cut = batch(codec, &good[..good.len() - 1], good.len());
        attack("cut off", 2, cut, "in the middle of a batch").await;
        attack(
            "noise",
            2,
            batch(codec, &[0xA5; 999], 999),
            &format!("packed by {name} do not unpack"),
        )
        .await;
        let text = format!("packed by {name}, which version 1 of the protocol does not have");
        attack("version 1", 1, batch(codec, &good, good.len()), &text).await;
    }
    let mut unknown = batch(Codec::Lz4, &[1; 9], 9);
    unknown[24] = 7;
    attack("an unknown codec", 2, unknown, "packed by codec 7").await;
    let mut large = batch(Codec::Lz4, &[1; 9], 9);
    large[28..32].copy_from_slice(&u32::MAX.to_le_bytes());
    attack("packed to more", 2, large, "is packed into 4294967295").await;
}
