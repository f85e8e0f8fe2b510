//! Links that take and give little at a time.
#![allow(clippy::unwrap_used)]

mod common;

use common::stingy::Stingy;
use common::*;
use pageferry::{Address, Ending, Listener, Migration};
use pages::Layout;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// Copies from one socket to the other, `piece` bytes at a time at most.
fn trickle(mut from: TcpStream, mut to: TcpStream, piece: usize) {
    let mut buffer = vec![0; piece];
    while let Ok(n) = from.read(&mut buffer) {
        if n == 0 || to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    // The peer may have closed it first.
    let _ = to.shutdown(std::net::Shutdown::Write);
}

/// A relay to `target` whose every connection passes `piece` bytes at a time.
fn relay(target: &Address, piece: usize) -> Address {
    let Address::Tcp { host, port } = target.clone() else {
        panic!("not TCP")
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:127.0.0.1:{}", listener.local_addr().unwrap().port());
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let near = near.unwrap();
            let Ok(far) = TcpStream::connect((host.as_str(), port)) else {
                return;
            };
            far.set_nodelay(true).unwrap();
            near.set_nodelay(true).unwrap();
            let (near_twin, far_twin) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || trickle(near, far, piece));
            std::thread::spawn(move || trickle(far_twin, near_twin, piece));
        }
    });
    address.parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn case_10_a_byte_at_a_time() {
    let layout = Layout::flat(13).unwrap();
    let (guest, probe) = busy_guest(&layout, None);
    let (receiving, address, made) = receiver(receive_options());
    let sending = Migration::send(guest, &relay(&address, 1), send_options(2));
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
    assert_eq!(destination.outcome.ending, Ending::Completed);
    assert_same_ram(&probe, &made.lock().unwrap()[0], &[]);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_10_odd_pieces() {
    let layout = Layout::flat(1200).unwrap();
    let (guest, probe) = busy_guest(&layout, None);
    let (receiving, address, made) = receiver(receive_options());
    let sending = Migration::send(guest, &relay(&address, 1237), send_options(1));
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
    assert_eq!(destination.outcome.ending, Ending::Completed);
    assert_same_ram(&probe, &made.lock().unwrap()[0], &[]);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_10_tiny_socket_buffers() {
    let dir = tempfile::tempdir().unwrap();
    let unix = format!("unix:{}", dir.path().join("s").display());
    for address in ["tcp:127.0.0.1:0", unix.as_str()] {
        let layout = Layout::flat(1500).unwrap();
        let (guest, probe) = busy_guest(&layout, None);
        let (mut send, mut receive) = (send_options(2), receive_options());
        (send.socket_buffer_bytes, receive.socket_buffer_bytes) = (4 << 10, 4 << 10);
        send.source.verify = true;
        let (receiving, address, made) = receiver_at(address, receive, |_| {});
        let sending = Migration::send(guest, &address, send);
        let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
        assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
        assert_eq!(destination.outcome.ending, Ending::Completed);
        assert_same_ram(&probe, &made.lock().unwrap()[0], &[]);
    }
}

/// A blocking socket takes all that it is given; a signal or a bound on vectors makes it take less.
#[tokio::test(flavor = "multi_thread")]
async fn case_10_short_reads_and_writes_and_interrupts() {
    let layout = Layout::flat(1500).unwrap();
    let stingy = |probe: &Probe| {
        Arc::new(Stingy {
            memory: Arc::clone(&probe.memory),
            calls: AtomicUsize::new(0),
        })
    };
    let (mut guest, probe) = busy_guest(&layout, None);
    guest.ram = stingy(&probe);
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_address().clone();
    let made = Made::default();
    let makes = Arc::clone(&made);
    let receiving = Migration::receive(listener, receive_options(), move |config| {
        let (mut guest, probe) = blank_guest(&config.layout, None);
        guest.ram = stingy(&probe);
        makes.lock().unwrap().push(probe);
        Ok(guest)
    });
    let sending = Migration::send(guest, &address, send_options(2));
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
    assert_eq!(destination.outcome.ending, Ending::Completed);
    assert_same_ram(&probe, &made.lock().unwrap()[0], &[]);
}
