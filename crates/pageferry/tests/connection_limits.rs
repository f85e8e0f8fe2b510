//! Connections by the thousand, and peers that say nothing or next to it: the right source still gets in.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use pageferry::{Address, Ending, Handle, Migration, ReceiveOptions, SendOptions};
use pages::Layout;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

const PATIENT: Duration = Duration::from_secs(40);

fn connect(address: &Address) -> std::io::Result<TcpStream> {
    let Address::Tcp { host, port } = address else {
        panic!("not TCP")
    };
    TcpStream::connect((host.as_str(), *port))
}

/// As many descriptors as this process may have.
fn raise_limit() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).unwrap();
    raised
        .current
        .and_then(|n| usize::try_from(n).ok())
        .unwrap_or(usize::MAX)
}

async fn gets_in(receiver: Handle, address: &Address) {
    let (guest, probe) = busy_guest(&Layout::flat(200).unwrap(), None);
    let options = SendOptions {
        connect_timeout: PATIENT,
        ..send_options(2)
    };
    let sent = guarded(Migration::send(guest, address, options).finish()).await;
    assert_eq!(sent.outcome.ending, Ending::Completed, "{:?}", sent.outcome.error);
    assert!(!probe.is_running());
    assert_eq!(guarded(receiver.finish()).await.outcome.ending, Ending::Completed);
}

fn patient() -> ReceiveOptions {
    ReceiveOptions {
        handshake_timeout: PATIENT,
        ..receive_options()
    }
}

/// Silent, and all open at once where the system lets a process have so many.
#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_connections_do_not_keep_the_right_source_out() {
    const FLOOD: usize = 10_000;
    let held_at_once = FLOOD.min(raise_limit().saturating_sub(1000)) / 4;
    let (receiver, address, _) = receiver(patient());
    let (made, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let flood = |_| {
        let (address, made, stop) = (address.clone(), Arc::clone(&made), Arc::clone(&stop));
        std::thread::spawn(move || {
            let mut held = std::collections::VecDeque::new();
            for _ in 0..FLOOD / 4 {
                if held.len() >= held_at_once {
                    held.pop_front();
                }
                // The receiver closes its port once the guest is there.
                let Ok(socket) = connect(&address) else { break };
                held.push_back(socket);
                made.fetch_add(1, Ordering::SeqCst);
            }
            while !stop.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(10));
            }
        })
    };
    let threads: Vec<_> = (0..4).map(flood).collect();
    // All places are taken, several times over, and the flood goes on.
    while made.load(Ordering::SeqCst) < FLOOD * 9 / 10 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    gets_in(receiver, &address).await;
    stop.store(true, Ordering::SeqCst);
    for thread in threads {
        thread.join().unwrap();
    }
}

/// They wait for as long as they like, but not where others wait for a place.
#[tokio::test(flavor = "multi_thread")]
async fn silent_peers_and_peers_of_a_byte_at_a_time_do_not_keep_the_right_source_out() {
    raise_limit();
    let (receiver, address, _) = receiver(patient());
    let silent: Vec<TcpStream> = (0..400).map(|_| connect(&address).unwrap()).collect();
    let stop = Arc::new(AtomicBool::new(false));
    let (trickling, to) = (Arc::clone(&stop), address.clone());
    let slow = std::thread::spawn(move || {
        let mut sockets: Vec<TcpStream> = (0..200).map(|_| connect(&to).unwrap()).collect();
        for byte in b"PGFERRY\n\x01\x00\x03\x00\x01\x00".iter().cycle() {
            if trickling.load(Ordering::SeqCst) {
                break;
            }
            sockets.retain_mut(|socket| socket.write_all(&[*byte]).is_ok());
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    gets_in(receiver, &address).await;
    stop.store(true, Ordering::SeqCst);
    slow.join().unwrap();
    drop(silent);
}
