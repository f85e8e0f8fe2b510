//! What is refused, and what is printed then: by the side that the operator looks at.
#![allow(clippy::unwrap_used)]

mod common;

use common::peer::{FakeReceiver, dial, hear, hello, open, preamble, say};
use common::*;
use pageferry::{Ask, Ending, Listener, Migration};
use pages::Layout;
use std::io::{Read, Write};
use wire::{Accept, ConnectionRole, Message, PreambleReply, VersionRange};

fn small() -> Layout {
    Layout::flat(100).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn case_11_the_sender_prints_the_receivers_reason() {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_address().clone();
    let receiving = Migration::receive(listener, receive_options(), |_| {
        Ok(blank_guest(&Layout::flat(99).unwrap(), None).0)
    });
    let (guest, probe) = busy_guest(&small(), None);
    let sending = Migration::send(guest, &address, send_options(2));
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    for finished in [&source, &destination] {
        assert_eq!(finished.outcome.ending, Ending::Refused);
        let error = finished.outcome.error.as_ref().unwrap();
        assert!(error.contains("RAM layout") && error.contains("99 pages"), "{error}");
    }
    assert!(destination.guest.is_none());
    probe.assert_unharmed();
    assert_eq!(source.outcome.report.pages.sent, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_32_a_guest_that_cannot_be_asked_and_is_to_be_is_refused() {
    let (receiving, address, made) = receiver(receive_options());
    let (guest, probe) = busy_guest(&small(), None);
    let mut options = send_options(1);
    options.source.ask = Ask::Always;
    let source = guarded(Migration::send(guest, &address, options.clone()).finish()).await;
    assert_eq!(source.outcome.ending, Ending::Refused);
    let error = source.outcome.error.unwrap();
    assert!(
        error.contains("--ask always") && error.contains("has no driver"),
        "{error}"
    );
    probe.assert_unharmed();
    assert!(made.lock().unwrap().is_empty(), "the receiver was not troubled");
    // It waits on, for one that is asked only if it can be.
    options.source.ask = Ask::Auto;
    let sending = Migration::send(source.guest.unwrap(), &address, options);
    let (source, _) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(source.outcome.ending, Ending::Completed);
    assert!(source.outcome.report.balloon.why.contains("has no driver"));
}

#[tokio::test(flavor = "multi_thread")]
async fn prepares_own_reasons_and_too_much_memory_reach_the_sender() {
    let (guest, probe) = busy_guest(&small(), None);
    let mut options = receive_options();
    options.max_memory = Some(4096 * 99);
    let (source, destination, made) = migrate(guest, send_options(1), options).await;
    assert_eq!(source.outcome.ending, Ending::Refused);
    assert_eq!(destination.outcome.ending, Ending::Refused);
    let error = source.outcome.error.unwrap();
    assert!(error.contains("409600 bytes") && error.contains("405504"), "{error}");
    assert!(made.is_none());
    probe.assert_unharmed();

    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_address().clone();
    let receiving = Migration::receive(listener, receive_options(), |_| Err(vec!["no KVM here".to_owned()]));
    let sending = Migration::send(source.guest.unwrap(), &address, send_options(1));
    let (source, _) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(source.outcome.ending, Ending::Refused);
    assert!(source.outcome.error.unwrap().contains("no KVM here"));
}

/// Strangers come, each is dropped, and a real source is served after them.
#[tokio::test(flavor = "multi_thread")]
async fn case_12_strangers_do_not_take_the_receiver_down() {
    let (receiving, address, made) = receiver(receive_options());
    let there = address.clone();
    let strangers = tokio::task::spawn_blocking(move || {
        let mut rest = Vec::new();
        let mut http = dial(&there);
        http.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        // A reset is an answer too.
        let _ = http.read_to_end(&mut rest);
        assert_eq!(rest, b"");

        let mut noise = dial(&there);
        let bytes: Vec<u8> = (0..5000u32)
            .map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()[3])
            .collect();
        noise.write_all(&bytes).unwrap();
        let _ = noise.read_to_end(&mut rest);
        assert_eq!(rest, b"");

        let mut newer = dial(&there);
        let mut hello = preamble(ConnectionRole::Control);
        hello.versions = VersionRange { min: 4, max: 9 };
        newer.write_all(&hello.encode()).unwrap();
        newer.read_to_end(&mut rest).unwrap();
        let reply = PreambleReply::decode(rest.as_slice().try_into().unwrap()).unwrap();
        assert_eq!((reply.version, reply.ours), (0, wire::VERSIONS));

        // An unknown frame type as the first message.
        let mut unknown = open(&there, ConnectionRole::Control);
        let mut bytes = wire::frame::encode(&Message::Ping).unwrap().to_vec();
        bytes[4..6].copy_from_slice(&999u16.to_le_bytes());
        unknown.write_all(&bytes).unwrap();
        match hear(&mut unknown) {
            Some(Message::Abort { reason, .. }) => assert!(reason.contains("999"), "{reason}"),
            other => panic!("{other:?}"),
        }
        // One that says nothing stays open all the while.
        dial(&there)
    });
    let silent = guarded(strangers).await.unwrap();
    let (guest, probe) = busy_guest(&small(), None);
    let sending = Migration::send(guest, &address, send_options(1));
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
    assert_eq!(destination.outcome.ending, Ending::Completed);
    assert_same_ram(&probe, &made.lock().unwrap()[0], &[]);
    drop(silent);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_12_a_receiver_of_another_version_and_one_that_is_none() {
    let answers: [(&'static [u8], Ending, &str); 2] = [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            Ending::Failed,
            "not a pageferry peer",
        ),
        (
            b"",
            Ending::Refused,
            "the receiver speaks protocol versions 4 to 9, we speak 1 to 3",
        ),
    ];
    for (answer, ending, text) in answers {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp:127.0.0.1:{}", listener.local_addr().unwrap().port());
        std::thread::spawn(move || {
            let reply = PreambleReply {
                version: 0,
                ours: VersionRange { min: 4, max: 9 },
            };
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                std::thread::spawn(move || {
                    let bytes = if answer.is_empty() {
                        reply.encode().to_vec()
                    } else {
                        answer.to_vec()
                    };
                    // The source may hang up at the first byte.
                    let _ = stream.write_all(&bytes);
                    let _ = stream.read_to_end(&mut Vec::new());
                });
            }
        });
        let (guest, probe) = busy_guest(&small(), None);
        let finished = guarded(Migration::send(guest, &address.parse().unwrap(), send_options(2)).finish()).await;
        assert_eq!(finished.outcome.ending, ending);
        let error = finished.outcome.error.unwrap();
        assert!(error.contains(text), "{error}");
        probe.assert_unharmed();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_listens() {
    let address = {
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        listener.local_address().clone()
    };
    let (guest, probe) = busy_guest(&small(), None);
    let finished = guarded(Migration::send(guest, &address, send_options(1)).finish()).await;
    assert_eq!(finished.outcome.ending, Ending::Failed);
    let error = finished.outcome.error.unwrap();
    assert!(
        error.contains(&address.to_string()) && error.contains("refused"),
        "{error}"
    );
    assert!(finished.guest.is_some());
    probe.assert_unharmed();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_port_is_taken() {
    let first = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let error = Listener::bind(first.local_address()).unwrap_err().to_string();
    assert!(
        error.contains("in use") && error.contains(&first.local_address().to_string()),
        "{error}"
    );
    let dir = tempfile::tempdir().unwrap();
    let path: pageferry::Address = format!("unix:{}", dir.path().join("s").display()).parse().unwrap();
    let _first = Listener::bind(&path).unwrap();
    assert!(Listener::bind(&path).unwrap_err().to_string().contains("in use"));
    std::fs::write(dir.path().join("file"), "precious").unwrap();
    let file = format!("unix:{}", dir.path().join("file").display());
    assert!(Listener::bind(&file.parse().unwrap()).is_err());
    assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"precious");
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_cannot_work() {
    let address: pageferry::Address = "tcp:127.0.0.1:1".parse().unwrap();
    for (streams, bandwidth, text) in [
        (0, None, "0 data streams"),
        (65, None, "65"),
        (1, Some(0), "bandwidth of 0"),
    ] {
        let mut options = send_options(streams);
        options.max_bandwidth = bandwidth;
        let (guest, probe) = busy_guest(&small(), None);
        let finished = guarded(Migration::send(guest, &address, options).finish()).await;
        assert_eq!(finished.outcome.ending, Ending::Refused);
        assert!(finished.outcome.error.unwrap().contains(text));
        probe.assert_unharmed();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_checks_and_the_receiver_waits_on() {
    let (receiving, address, made) = receiver(receive_options());
    let (guest, probe) = busy_guest(&small(), None);
    let mut options = send_options(2);
    options.source.dry_run = true;
    let finished = guarded(Migration::send(guest, &address, options).finish()).await;
    assert_eq!(
        finished.outcome.ending,
        Ending::Completed,
        "{:?}",
        finished.outcome.error
    );
    probe.assert_unharmed();
    assert_eq!(probe.inner.pauses.load(std::sync::atomic::Ordering::SeqCst), 0);
    let sending = Migration::send(finished.guest.unwrap(), &address, send_options(2));
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
    assert_eq!(destination.outcome.ending, Ending::Completed);
    assert_eq!(made.lock().unwrap().len(), 2);
    assert_same_ram(&probe, &made.lock().unwrap()[1], &[]);
}

/// What is said of the memory is what it is, not what it was to be: a pool that was populated ahead may not fit.
#[tokio::test(flavor = "multi_thread")]
async fn the_memory_of_the_guest_that_was_made_says_whether_it_is_populated() {
    for populated in [false, true] {
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_address().clone();
        let receiving = Migration::receive(listener, receive_options(), move |incoming| {
            let (guest, probe) = blank_guest(&incoming.config.layout, None);
            if populated {
                probe.memory.populate_all().unwrap();
            }
            Ok(guest)
        });
        let accepted = tokio::task::spawn_blocking(move || {
            let mut control = open(&address, ConnectionRole::Control);
            let _data = open(&address, ConnectionRole::Data { stream: 0 });
            say(&mut control, &hello(&small(), 1));
            hear(&mut control)
        });
        let accepted = guarded(accepted).await.unwrap();
        assert_eq!(accepted, Some(Message::Accept(Accept { populated })));
        guarded(receiving.finish()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_20_a_second_source_during_a_migration() {
    let (receiving, address, _made) = receiver(receive_options());
    let there = address.clone();
    let first = tokio::task::spawn_blocking(move || {
        let mut control = open(&there, ConnectionRole::Control);
        let data = open(&there, ConnectionRole::Data { stream: 0 });
        say(&mut control, &hello(&small(), 1));
        assert!(matches!(hear(&mut control), Some(Message::Accept(_))));
        (control, data)
    });
    let first = guarded(first).await.unwrap();
    let (guest, probe) = busy_guest(&small(), None);
    let second = guarded(Migration::send(guest, &address, send_options(1)).finish()).await;
    assert_eq!(second.outcome.ending, Ending::Refused, "{:?}", second.outcome.error);
    assert!(second.outcome.error.unwrap().contains("busy"));
    probe.assert_unharmed();
    drop(first);
    let destination = guarded(receiving.finish()).await;
    assert_eq!(destination.outcome.ending, Ending::Failed);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_do_not_come() {
    let mut options = receive_options();
    options.handshake_timeout = std::time::Duration::from_millis(300);
    let (receiving, address, _made) = receiver(options);
    let source = tokio::task::spawn_blocking(move || {
        let mut control = open(&address, ConnectionRole::Control);
        let _data = open(&address, ConnectionRole::Data { stream: 1 });
        say(&mut control, &hello(&small(), 3));
        hear(&mut control)
    });
    let destination = guarded(receiving.finish()).await;
    assert_eq!(destination.outcome.ending, Ending::Failed);
    let error = destination.outcome.error.unwrap();
    assert!(error.contains("1 of the 3 data streams"), "{error}");
    assert!(matches!(source.await.unwrap(), Some(Message::Abort { .. })));
}

/// A receiver that takes connections and then says nothing is dead after a while, and the guest runs on.
#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_says_nothing() {
    let (mut fake, address) = FakeReceiver::bind();
    let silent = std::thread::spawn(move || {
        fake.accept(1);
        fake.hear_until(|_| false);
    });
    let (guest, probe) = busy_guest(&small(), None);
    let mut options = send_options(1);
    options.source.peer_timeout = std::time::Duration::from_millis(400);
    let finished = guarded(Migration::send(guest, &address, options).finish()).await;
    assert_eq!(finished.outcome.ending, Ending::TimedOut);
    let error = finished.outcome.error.unwrap();
    assert!(error.contains("no sign of life"), "{error}");
    probe.assert_unharmed();
    silent.join().unwrap();
}
