//! Migrations over TLS, and peers that it keeps out.
#![allow(clippy::unwrap_used)]

mod common;

use common::pki::{Ca, tls};
use common::*;
use pageferry::{
    Address, Compress, Ending, Finished, Handle, Migration, ReceiveOptions, Security, SendOptions, TlsPem,
};
use pages::Layout;
use std::io::{Read, Write};
use std::net::TcpStream;

fn sending(security: Security) -> SendOptions {
    SendOptions {
        security,
        ..send_options(2)
    }
}

fn receiving(security: Security) -> ReceiveOptions {
    ReceiveOptions {
        security,
        ..receive_options()
    }
}

fn completed(finished: &Finished) {
    assert_eq!(
        finished.outcome.ending,
        Ending::Completed,
        "{:?}",
        finished.outcome.error
    );
}

/// Sends to `address` as `security` has it, and expects a refusal that leaves the guest unharmed; the sentence.
async fn refused(address: &Address, security: Security) -> String {
    let (guest, probe) = busy_guest(&Layout::flat(50).unwrap(), None);
    let sent = guarded(Migration::send(guest, address, sending(security)).finish()).await;
    let error = sent.outcome.error.unwrap();
    assert_eq!(sent.outcome.ending, Ending::Refused, "{error}");
    assert!(sent.guest.is_some());
    probe.assert_unharmed();
    error
}

/// The right source comes after all: the receiver has gone on listening.
async fn right_source_gets_in(receiver: Handle, address: &Address, security: Security) {
    let (guest, _) = busy_guest(&Layout::flat(50).unwrap(), None);
    let sender = Migration::send(guest, address, sending(security));
    let (source, destination) = guarded(async { tokio::join!(sender.finish(), receiver.finish()) }).await;
    completed(&source);
    completed(&destination);
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_and_state_arrive_over_tls_packed_and_not() {
    let ca = Ca::new();
    for (streams, compress) in [(1, Compress::None), (4, Compress::None), (2, Compress::Lz4)] {
        let (guest, probe) = busy_guest(&Layout::flat(5000).unwrap(), None);
        probe
            .inner
            .large_state
            .store(3 << 20, std::sync::atomic::Ordering::SeqCst);
        let mut options = SendOptions {
            compress,
            security: tls(ca.side(&["there.example", "127.0.0.1"])),
            ..send_options(streams)
        };
        options.source.verify = true;
        let receive = receiving(tls(ca.side(&["127.0.0.1"])));
        let (source, destination, there) = migrate(guest, options, receive).await;
        completed(&source);
        completed(&destination);
        assert_same_ram(&probe, &there.unwrap(), &[]);
        assert_eq!(source.outcome.report.verified, Some(true));
        assert_eq!(source.outcome.report.pages.sent, 2500);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unix_socket_has_no_name_so_one_is_given() {
    let ca = Ca::new();
    let folder = tempfile::tempdir().unwrap();
    let at = format!("unix:{}/s", folder.path().display());
    let (receiver, address, _) = receiver_at(&at, receiving(tls(ca.side(&["b.example"]))), |_| {});
    let error = refused(&address, tls(ca.side(&["a.example"]))).await;
    assert!(error.contains("--tls-name"), "{error}");
    let named = TlsPem {
        name: Some("b.example".to_owned()),
        ..ca.side(&["a.example"])
    };
    right_source_gets_in(receiver, &address, tls(named)).await;
}

/// Each wrong source is told what is wrong, and the right one that comes after it is served by the same receiver.
#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_refuses_wrong_sources_and_goes_on_listening() {
    let (ca, namesake, other) = (Ca::new(), Ca::new(), Ca::named("another CA"));
    let there = TlsPem {
        allow_peers: vec!["a.example".to_owned(), "b.example".to_owned()],
        ..ca.side(&["127.0.0.1"])
    };
    let (receiver, address, _) = receiver(receiving(tls(there)));
    let stranger = TlsPem {
        ca: ca.pem.clone(),
        ..other.side(&["a.example"])
    };
    let by_namesake = TlsPem {
        ca: ca.pem.clone(),
        ..namesake.side(&["a.example"])
    };
    let (cert, key) = ca.sign(&["a.example"], |params| {
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
    });
    let for_servers = TlsPem {
        cert,
        key,
        ca: ca.pem.clone(),
        ..TlsPem::default()
    };
    for (security, word) in [
        (tls(stranger), "--tls-ca did not sign it"),
        (tls(by_namesake), "but another one"),
        (tls(ca.expired(&["a.example"])), "expired"),
        (tls(ca.side(&["c.example"])), "--allow-peer"),
        (tls(for_servers), "clientAuth"),
        (Security::default(), "takes TLS only"),
    ] {
        let error = refused(&address, security).await;
        assert!(error.contains(word), "{word}: {error}");
    }
    right_source_gets_in(receiver, &address, tls(ca.side(&["x.example", "b.example"]))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_refuses_wrong_receivers_by_name_date_and_ca() {
    let (ca, namesake, other) = (Ca::new(), Ca::new(), Ca::named("another CA"));
    let us = || ca.side(&["a.example"]);
    let allows = TlsPem {
        allow_peers: vec!["b.example".to_owned()],
        ..us()
    };
    let named = TlsPem {
        name: Some("b.example".to_owned()),
        ..us()
    };
    for (there, us, words) in [
        (other.side(&["127.0.0.1"]), us(), ["not signed by a CA", "--tls-ca"]),
        (
            namesake.side(&["127.0.0.1"]),
            us(),
            ["signed by a CA of the name", "not by that one"],
        ),
        (
            ca.expired(&["127.0.0.1"]),
            us(),
            ["expired on 2001-02-03", "give it a new one"],
        ),
        (ca.side(&["c.example"]), us(), ["c.example", "not for 127.0.0.1"]),
        (ca.side(&["c.example"]), named, ["c.example", "not for b.example"]),
        (
            ca.side(&["127.0.0.1", "c.example"]),
            allows,
            ["is for c.example", "--allow-peer takes b.example"],
        ),
    ] {
        let there = TlsPem {
            ca: ca.pem.clone(),
            ..there
        };
        let (receiver, address, _) = receiver(receiving(tls(there)));
        let error = refused(&address, tls(us)).await;
        assert!(words.iter().all(|word| error.contains(word)), "{words:?}: {error}");
        receiver.cancel();
        guarded(receiver.finish()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_without_tls_says_so() {
    let ca = Ca::new();
    let (receiver, address, _) = receiver(receive_options());
    let error = refused(&address, tls(ca.side(&["127.0.0.1"]))).await;
    assert!(error.contains("takes no TLS"), "{error}");
    right_source_gets_in(receiver, &address, Security::default()).await;
}

/// Something that speaks TLS but shows no certificate, and something that breaks off: both are dropped.
#[tokio::test(flavor = "multi_thread")]
async fn half_a_handshake_and_garbage_keep_nobody_out() {
    let ca = Ca::new();
    let (receiver, address, _) = receiver(receiving(tls(ca.side(&["127.0.0.1"]))));
    let Address::Tcp { port, .. } = &address else { panic!() };
    let mut held = Vec::new();
    for garbage in [
        &[22u8, 3, 1, 0, 200, 1, 0, 0][..],
        &[22; 600],
        &[0; 10],
        b"PGF",
        b"GET / HTTP/1.1\r\n\r\n",
    ] {
        let mut socket = TcpStream::connect(("127.0.0.1", *port)).unwrap();
        socket.write_all(garbage).unwrap();
        held.push(socket);
    }
    right_source_gets_in(receiver, &address, tls(ca.side(&["a.example"]))).await;
    for mut socket in held {
        let mut rest = Vec::new();
        // It was closed, if not reset; no byte of a guest or a machine was in it.
        if socket.read_to_end(&mut rest).is_ok() {
            assert!(rest.len() < 100, "{rest:?}");
        }
    }
}

/// Plain TCP beyond loopback has to be asked for, at either end.
#[tokio::test(flavor = "multi_thread")]
async fn plain_tcp_beyond_loopback_is_refused() {
    let error = refused(&"tcp:192.0.2.1:9".parse().unwrap(), Security::default()).await;
    assert!(error.contains("--insecure"), "{error}");
    let (receiver, _, _) = receiver_at("tcp:0.0.0.0:0", receive_options(), |_| {});
    let finished = guarded(receiver.finish()).await;
    assert_eq!(finished.outcome.ending, Ending::Refused);
    assert!(finished.outcome.error.unwrap().contains("--insecure"));
    let (receiver, address, _) = receiver_at("tcp:0.0.0.0:0", receiving(Security::insecure()), |_| {});
    let Address::Tcp { port, .. } = address else { panic!() };
    let near = format!("tcp:127.0.0.1:{port}").parse().unwrap();
    right_source_gets_in(receiver, &near, Security::default()).await;
}
