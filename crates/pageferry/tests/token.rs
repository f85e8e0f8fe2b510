//! A token that both sides know, on every connection.
#![allow(clippy::unwrap_used)]

mod common;

use common::pki::{Ca, tls};
use common::*;
use pageferry::{Address, Ending, Migration, ReceiveOptions, Security, SendOptions, Token};
use pages::Layout;
use std::io::{Read, Write};
use std::net::TcpStream;
use wire::{ConnectionRole, Preamble, SessionId, VERSIONS};

fn token(text: &str) -> Security {
    Security {
        token: Some(Token::new(text.as_bytes()).unwrap()),
        ..Security::default()
    }
}

fn receiving(security: Security) -> ReceiveOptions {
    ReceiveOptions {
        security,
        ..receive_options()
    }
}

async fn send(address: &Address, security: Security) -> (Ending, String) {
    let (guest, probe) = busy_guest(&Layout::flat(50).unwrap(), None);
    let options = SendOptions {
        security,
        ..send_options(2)
    };
    let sent = guarded(Migration::send(guest, address, options).finish()).await;
    if sent.outcome.ending != Ending::Completed {
        probe.assert_unharmed();
    }
    (sent.outcome.ending, sent.outcome.error.unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_right_token_gets_in_after_wrong_ones_and_none() {
    let (receiver, address, _) = receiver(receiving(token("the right token!\n")));
    for (security, word) in [
        (token("the wrong token!"), "another token"),
        (token("the right token! "), "another token"),
        (Security::default(), "asks for a token"),
    ] {
        let (ending, error) = send(&address, security).await;
        assert!(ending == Ending::Refused && error.contains(word), "{ending}: {error}");
    }
    // The newline at the end is none of it.
    let (ending, error) = send(&address, token("the right token!\r\n")).await;
    assert_eq!(ending, Ending::Completed, "{error}");
    assert_eq!(guarded(receiver.finish()).await.outcome.ending, Ending::Completed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_without_a_token_says_so() {
    let (receiver, address, _) = receiver(receive_options());
    let (ending, error) = send(&address, token("0123456789abcdef")).await;
    assert!(
        ending == Ending::Refused && error.contains("without --token-file"),
        "{ending}: {error}"
    );
    let (ending, _) = send(&address, Security::default()).await;
    assert_eq!(ending, Ending::Completed);
    guarded(receiver.finish()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn token_and_tls_go_together_and_each_is_missed() {
    let ca = Ca::new();
    let with = |text: &str, name: &str| Security {
        token: token(text).token,
        ..tls(ca.side(&[name]))
    };
    let (receiver, address, _) = receiver(receiving(with("0123456789abcdef", "127.0.0.1")));
    for (security, word) in [
        (token("0123456789abcdef"), "takes TLS only"),
        (tls(ca.side(&["a.example"])), "asks for a token"),
        (with("0123456789abcdeF", "a.example"), "another token"),
    ] {
        let (ending, error) = send(&address, security).await;
        assert!(ending == Ending::Refused && error.contains(word), "{ending}: {error}");
    }
    let (ending, error) = send(&address, with("0123456789abcdef", "a.example")).await;
    assert_eq!(ending, Ending::Completed, "{error}");
    guarded(receiver.finish()).await;
}

/// A data connection by itself, of whatever session, proves itself too.
#[tokio::test(flavor = "multi_thread")]
async fn a_data_connection_without_the_token_is_dropped() {
    let (receiver, address, _) = receiver(receiving(token("0123456789abcdef")));
    let Address::Tcp { port, .. } = &address else { panic!() };
    let mut socket = TcpStream::connect(("127.0.0.1", *port)).unwrap();
    let preamble = Preamble {
        versions: VERSIONS,
        session: SessionId([1; 16]),
        role: ConnectionRole::Data { stream: 0 },
    };
    socket.write_all(&preamble.encode()).unwrap();
    let mut rest = Vec::new();
    // Its preamble is answered, and then it is closed; kept, it would hang here.
    socket.read_to_end(&mut rest).unwrap();
    assert_eq!(rest.len(), wire::REPLY_BYTES);
    receiver.cancel();
    guarded(receiver.finish()).await;
}

/// A receiver that does not know the token, but says that it is good, gets no guest.
#[tokio::test(flavor = "multi_thread")]
async fn an_impostor_proves_nothing() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap()).parse().unwrap();
    let impostor = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut hello = [0; 40];
        socket.read_exact(&mut hello).unwrap();
        let mut reply = [0; 41];
        reply[..8].copy_from_slice(b"PGTOKEN\n");
        // The source's own nonce, and then its own proof, come back.
        reply[9..].copy_from_slice(&hello[8..]);
        socket.write_all(&reply).unwrap();
        let mut proof = [0; 32];
        socket.read_exact(&mut proof).unwrap();
        socket.write_all(&[0]).unwrap();
        socket.write_all(&proof).unwrap();
        let mut rest = Vec::new();
        socket.read_to_end(&mut rest).unwrap();
        rest.len()
    });
    let (ending, error) = send(&address, token("0123456789abcdef")).await;
    assert!(
        ending == Ending::Refused && error.contains("does not know the token"),
        "{ending}: {error}"
    );
    assert_eq!(impostor.join().unwrap(), 0, "not even a preamble");
}
