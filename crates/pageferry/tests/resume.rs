//! Connections that are lost before the hand-over: the migration goes on over new ones, from what the receiver has.
#![allow(clippy::unwrap_used)]

mod common;

use common::cutter::{Cutter, Rule};
use common::peer::{dial, hear, preamble, say};
use common::*;
use pageferry::{Ending, Finished, Migration, ReceiveOptions, SendOptions};
use pages::Layout;
use std::io::{Read, Write};
use std::sync::atomic::Ordering;
use std::time::Duration;
use wire::{ConnectionRole, Message, Preamble, REPLY_BYTES, Resume};

fn layout() -> Layout {
    Layout::flat(20_000).unwrap()
}

fn options(streams: u16, window: Duration) -> (SendOptions, ReceiveOptions) {
    let (mut send, mut receive) = (send_options(streams), receive_options());
    send.source.resume_window = window;
    send.source.verify = true;
    receive.destination.resume_window = window;
    (send, receive)
}

const LONG: Duration = Duration::from_secs(30);

async fn over(rule: Rule, streams: u16) -> (Finished, Finished, u64, u64) {
    let (guest, source) = busy_guest(&layout(), None);
    let (send, receive) = options(streams, LONG);
    let (receiving, address, made) = receiver(receive);
    let cutter = Cutter::start(&address, rule);
    let sending = Migration::send(guest, &cutter.address, send);
    // The guest goes on writing.
    let writes = source.clone();
    let writer = std::thread::spawn(move || {
        let mut wrote = 0;
        for i in 0..400u64 {
            wrote += u64::from(writes.guest_writes(i * 37 % 20_000, (i % 251) as u8));
            std::thread::sleep(Duration::from_millis(1));
        }
        wrote
    });
    let (sent, received) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    let wrote = writer.join().unwrap();
    assert_eq!(sent.outcome.ending, Ending::Completed, "{:?}", sent.outcome.error);
    assert_eq!(
        received.outcome.ending,
        Ending::Completed,
        "{:?}",
        received.outcome.error
    );
    assert_eq!(sent.outcome.report.verified, Some(true));
    let arrived = made.lock().unwrap().pop().unwrap();
    assert!(
        arrived.is_running() && !source.is_running(),
        "the guest runs twice, or not at all"
    );
    assert_same_ram(&source, &arrived, &[]);
    let pages = sent.outcome.report.pages;
    assert!(pages.adds_up(), "{pages:?}");
    assert_eq!(
        (pages.sent, pages.zero),
        (received.outcome.report.pages.sent, received.outcome.report.pages.zero)
    );
    let cuts = cutter.cuts.load(Ordering::SeqCst);
    // The receiver's word may have been lost with another connection.
    assert!(received.outcome.report.link.resumed >= sent.outcome.report.link.resumed);
    (sent, received, cuts, wrote)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_is_cut_five_times_costs_what_was_in_flight() {
    for streams in [1, 3] {
        let every = 5 << 20;
        let (sent, _, cuts, _) = over(Rule::Bytes([every; 5].into()), streams).await;
        let report = sent.outcome.report;
        assert_eq!((cuts, report.link.resumed), (5, 5), "{:?}", report.link);
        // Each cut loses what the sockets held, at both ends of the proxy, and not what the receiver has.
        let most = 5 * (30 << 20);
        assert!((1..most).contains(&report.link.bytes_again), "{:?}", report.link);
        println!(
            "{} streams, {} bytes in all: {:?}",
            streams, report.wire_bytes, report.link
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_four_that_dies_is_replaced() {
    let (sent, _, cuts, _) = over(Rule::OneStream(2 << 20), 4).await;
    assert_eq!((cuts, sent.outcome.report.link.resumed), (1, 1));
}

/// At each message, either way: what it said counts as not said.
#[tokio::test(flavor = "multi_thread")]
async fn a_link_is_cut_before_each_message_of_a_migration() {
    type Asked = fn(&Message) -> bool;
    let messages: [(&str, Asked); 8] = [
        ("Terms", |m| matches!(m, Message::Skip(_))),
        ("RoundEnd 0", |m| matches!(m, Message::RoundEnd { round: 0, .. })),
        ("RoundReceived 0", |m| matches!(m, Message::RoundReceived { round: 0 })),
        ("the last RoundEnd", |m| {
            matches!(m, Message::RoundEnd { last: true, .. })
        }),
        ("a section", |m| matches!(m, Message::Section(_))),
        ("digests", |m| matches!(m, Message::Digests(_))),
        ("StateEnd", |m| matches!(m, Message::StateEnd { .. })),
        ("Resumed", |m| matches!(m, Message::Resumed { .. })),
    ];
    for (what, asked) in messages {
        let mut left = 1;
        let rule = Rule::Before(Box::new(move |message| {
            // `Resumed` follows a first cut.
            let first = what == "Resumed" && left == 1 && matches!(message, Message::RoundEnd { .. });
            if first {
                left = 2;
                return true;
            }
            let now = asked(message) && left > 0;
            if now {
                left = 0;
            }
            now
        }));
        let (sent, _, cuts, _) = over(rule, 2).await;
        let link = sent.outcome.report.link;
        assert!(cuts >= 1 && link.resumed >= 1, "{what}: {cuts} cuts, {link:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn past_ready_nothing_is_taken_up_again() {
    for (what, ending) in [("Ready", Ending::Failed), ("Commit", Ending::Unknown)] {
        let (guest, source) = busy_guest(&layout(), None);
        let (send, receive) = options(1, Duration::from_secs(3));
        let (receiving, address, made) = receiver(receive);
        let rule = Rule::Before(Box::new(move |m| match what {
            "Ready" => matches!(m, Message::Ready { .. }),
            _ => matches!(m, Message::Commit(_)),
        }));
        let cutter = Cutter::start(&address, rule);
        let sending = Migration::send(guest, &cutter.address, send);
        let (sent, received) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
        assert_eq!(sent.outcome.ending, ending, "{what}: {:?}", sent.outcome.error);
        assert_ne!(received.outcome.ending, Ending::Completed);
        assert!(received.guest.is_none());
        assert!(!made.lock().unwrap().pop().unwrap().is_running());
        if ending == Ending::Failed {
            source.assert_unharmed();
        } else {
            assert!(!source.is_running(), "a source that has committed runs");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_stays_dead_ends_both_sides_after_the_window() {
    let (guest, source) = busy_guest(&layout(), None);
    let (mut send, mut receive) = options(2, Duration::from_millis(700));
    send.source.peer_timeout = Duration::from_secs(1);
    receive.destination.peer_timeout = Duration::from_secs(1);
    send.max_bandwidth = Some(20 << 20);
    let (receiving, address, _) = receiver(receive);
    let cutter = Cutter::start(&address, Rule::Bytes([].into()));
    let sending = Migration::send(guest, &cutter.address, send);
    tokio::time::sleep(Duration::from_millis(400)).await;
    cutter.cut(true);
    let (sent, received) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(sent.outcome.ending, Ending::Failed, "{:?}", sent.outcome.error);
    let error = sent.outcome.error.unwrap();
    assert!(error.contains("not reached again within 700 ms"), "{error}");
    let error = received.outcome.error.unwrap();
    assert!(error.contains("did not come back within 1700 ms"), "{error}");
    source.assert_unharmed();
}

/// Nobody listens there any more: that is told apart from a link that does not answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_is_gone_is_not_waited_for_to_the_windows_end() {
    let (guest, source) = busy_guest(&layout(), None);
    let (mut send, receive) = options(1, Duration::from_secs(3600));
    send.max_bandwidth = Some(20 << 20);
    let (receiving, address, _) = receiver(receive);
    let sending = Migration::send(guest, &address, send);
    tokio::time::sleep(Duration::from_millis(300)).await;
    // It says so before it goes, which ends the source; a cut right before keeps the word from it.
    receiving.cancel();
    let received = guarded(receiving.finish()).await;
    assert_eq!(received.outcome.ending, Ending::Cancelled);
    let sent = guarded(sending.finish()).await;
    assert!(
        matches!(sent.outcome.ending, Ending::Cancelled | Ending::Failed),
        "{:?}",
        sent.outcome
    );
    source.assert_unharmed();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_runs_while_its_link_is_down_though_it_was_paused() {
    let (guest, source) = busy_guest(&layout(), None);
    let (send, receive) = options(1, LONG);
    let (receiving, address, _) = receiver(receive);
    let mut left = 1;
    let cutter = Cutter::start(
        &address,
        Rule::Before(Box::new(move |m| {
            matches!(m, Message::StateEnd { .. }) && std::mem::replace(&mut left, 0) == 1
        })),
    );
    let sending = Migration::send(guest, &cutter.address, send);
    let (sent, received) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(sent.outcome.ending, Ending::Completed, "{:?}", sent.outcome.error);
    assert_eq!(received.outcome.ending, Ending::Completed);
    let (pauses, resumes) = (&source.inner.pauses, &source.inner.resumes);
    assert_eq!((pauses.load(Ordering::SeqCst), resumes.load(Ordering::SeqCst)), (2, 1));
}

/// Says that it takes up a migration; returns what it is told.
fn says_resume(address: &pageferry::Address) -> Option<Message> {
    let mut stranger = dial(address);
    let opening = Preamble {
        versions: wire::VERSIONS,
        ..preamble(ConnectionRole::Control)
    };
    stranger.write_all(&opening.encode()).unwrap();
    say(&mut stranger, &Message::Resume(Resume { session: [7; 16] }));
    stranger.read_exact(&mut [0; REPLY_BYTES]).unwrap();
    hear(&mut stranger)
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_that_resume_what_is_not_theirs_are_turned_away() {
    let (guest, source) = busy_guest(&layout(), None);
    let (mut send, receive) = options(2, LONG);
    send.max_bandwidth = Some(40 << 20);
    let (receiving, address, made) = receiver(receive);
    // Before a source has come, and during its migration.
    assert!(matches!(says_resume(&address), Some(Message::Refuse { .. })));
    let sending = Migration::send(guest, &address, send);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let told = says_resume(&address);
    assert!(
        matches!(&told, Some(Message::Refuse { reasons }) if reasons[0].contains("busy")),
        "{told:?}"
    );
    let (sent, received) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(sent.outcome.ending, Ending::Completed, "{:?}", sent.outcome.error);
    assert_eq!(received.outcome.ending, Ending::Completed);
    assert_eq!(sent.outcome.report.link.resumed, 0);
    assert_same_ram(&source, &made.lock().unwrap()[0], &[]);
}
