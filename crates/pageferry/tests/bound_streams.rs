//! Every connection of a migration is the same peer's: one that has a certificate of the same CA, but another one, gets no
//! part in it.
#![allow(clippy::unwrap_used)]

mod common;

use common::peer::{dial, hear, hello, preamble, say};
use common::pki::{Ca, tls};
use common::*;
use pageferry::{Address, ReceiveOptions, TlsPem};
use pages::Layout;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;
use wire::{ConnectionRole, Message, Preamble, REPLY_BYTES, Resume, Terms};

/// How long either side would wait for the other to come back.
const WINDOW: Duration = Duration::from_secs(20);

type Peer = StreamOwned<ClientConnection, TcpStream>;

/// A TLS connection by hand, as whoever has this certificate, for an application protocol or for none.
fn shake_hands(address: &Address, us: &TlsPem, protocol: Option<&str>) -> Peer {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(us.ca.as_bytes()).unwrap())
        .unwrap();
    let cert = CertificateDer::from_pem_slice(us.cert.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(us.key.as_bytes()).unwrap();
    let mut config = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![cert], key)
        .unwrap();
    config.alpn_protocols = protocol.into_iter().map(|name| name.as_bytes().to_vec()).collect();
    let client = ClientConnection::new(Arc::new(config), "127.0.0.1".try_into().unwrap()).unwrap();
    StreamOwned::new(client, dial(address))
}

/// A source's connection, up to the answer to its preamble.
fn open(address: &Address, us: &TlsPem, role: ConnectionRole) -> Peer {
    let mut peer = shake_hands(address, us, Some("pageferry"));
    // The receiver's word that the certificate was taken.
    peer.read_exact(&mut [0]).unwrap();
    let opening = Preamble {
        versions: wire::VERSIONS,
        ..preamble(role)
    };
    peer.write_all(&opening.encode()).unwrap();
    peer.read_exact(&mut [0; REPLY_BYTES]).unwrap();
    peer
}

/// Whether the receiver keeps a connection on which nothing is said.
fn is_kept(peer: &mut Peer) -> bool {
    peer.sock.set_read_timeout(Some(Duration::from_millis(700))).unwrap();
    let read = peer.read_exact(&mut [0]);
    read.is_err_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
}

/// The control connection of a migration of one stream.
fn begun(address: &Address, us: &TlsPem) -> Peer {
    let mut control = open(address, us, ConnectionRole::Control);
    say(&mut control, &hello(&Layout::flat(50).unwrap(), 1));
    control
}

/// Waits until the migration was accepted, for which its stream has to be there.
fn is_accepted(control: &mut Peer) {
    loop {
        match hear(control) {
            Some(Message::Accept(_)) => return,
            Some(Message::Offer(_)) => {}
            other => panic!("{other:?}"),
        }
    }
}

fn receiving(ca: &Ca) -> ReceiveOptions {
    let mut options = ReceiveOptions {
        security: tls(ca.side(&["127.0.0.1"])),
        ..receive_options()
    };
    options.destination.resume_window = WINDOW;
    options
}

#[tokio::test(flavor = "multi_thread")]
async fn a_data_stream_of_another_certificate_is_dropped_and_leaves_its_place_free() {
    let ca = Ca::new();
    let (us, another) = (ca.side(&["a.example"]), ca.side(&["a.example"]));
    let (receiver, address, _) = receiver(receiving(&ca));
    let play = tokio::task::spawn_blocking(move || {
        let _control = begun(&address, &us);
        let stream = ConnectionRole::Data { stream: 0 };
        let kept = [&another, &us, &us]
            .map(|who| open(&address, who, stream))
            .map(|mut it| is_kept(&mut it));
        // The third was opened twice.
        assert_eq!(kept, [false, true, false]);
    });
    guarded(play).await.unwrap();
    receiver.cancel();
    guarded(receiver.finish()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_is_taken_up_again_by_the_certificate_that_began_it_alone() {
    let ca = Ca::new();
    let (us, another) = (ca.side(&["a.example"]), ca.side(&["a.example"]));
    let (receiver, address, _) = receiver(receiving(&ca));
    let play = tokio::task::spawn_blocking(move || {
        let mut control = begun(&address, &us);
        let _data = open(&address, &us, ConnectionRole::Data { stream: 0 });
        is_accepted(&mut control);
        let resume_window_ms = u64::try_from(WINDOW.as_millis()).unwrap();
        say(&mut control, &Message::Terms(Terms { resume_window_ms }));
        let resume = Message::Resume(Resume {
            session: preamble(ConnectionRole::Control).session.0,
        });
        let mut thief = open(&address, &another, ConnectionRole::Control);
        say(&mut thief, &resume);
        let told = hear(&mut thief);
        assert!(
            matches!(&told, Some(Message::Refuse { reasons }) if reasons[0].contains("busy")),
            "{told:?}"
        );
        assert!(is_kept(&mut control), "the thief broke the connection that there is");
        let mut again = open(&address, &us, ConnectionRole::Control);
        say(&mut again, &resume);
        let _data = open(&address, &us, ConnectionRole::Data { stream: 0 });
        let told = hear(&mut again);
        assert!(matches!(told, Some(Message::Resumed { round: 0, .. })), "{told:?}");
    });
    guarded(play).await.unwrap();
    receiver.cancel();
    guarded(receiver.finish()).await;
}

/// Whoever speaks TLS with a good certificate, but for another protocol or for none that it names, is no source.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_another_protocol_is_not_welcome() {
    let ca = Ca::new();
    let us = ca.side(&["a.example"]);
    let (receiver, address, _) = receiver(receiving(&ca));
    let play = tokio::task::spawn_blocking(move || {
        for protocol in [None, Some("h2")] {
            let mut peer = shake_hands(&address, &us, protocol);
            let welcome = peer.read_exact(&mut [0]);
            assert!(welcome.is_err(), "{protocol:?} was let in");
        }
        // The right one is.
        open(&address, &us, ConnectionRole::Control);
    });
    guarded(play).await.unwrap();
    receiver.cancel();
    guarded(receiver.finish()).await;
}
