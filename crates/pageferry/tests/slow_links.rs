//! Links that take and give little at a time.
#![allow(clippy::unwrap_used)]

mod common;

use common::peer::FakeReceiver;
use common::stingy::Stingy;
use common::*;
use pageferry::{Address, Ending, Listener, Migration};
use pages::Layout;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use wire::{AbortCause, Accept, Message};

/// Copies from one socket to the other, `piece` bytes at a time at most, with a pause after each.
fn trickle(mut from: TcpStream, mut to: TcpStream, piece: usize, pause: Duration) {
    let mut buffer = vec![0; piece];
    while let Ok(n) = from.read(&mut buffer) {
        if n == 0 || to.write_all(&buffer[..n]).is_err() {
            break;
        }
        std::thread::sleep(pause);
    }
    // The peer may have closed it first.
    let _ = to.shutdown(std::net::Shutdown::Write);
}

/// A relay to `target` whose every connection passes `piece` bytes at a time.
fn relay(target: &Address, piece: usize) -> Address {
    slow_relay(target, piece, Duration::ZERO)
}

fn slow_relay(target: &Address, piece: usize, pause: Duration) -> Address {
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
            std::thread::spawn(move || trickle(near, far, piece, pause));
            std::thread::spawn(move || trickle(far_twin, near_twin, piece, pause));
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
    let receiving = Migration::receive(listener, receive_options(), move |incoming| {
        let (mut guest, probe) = blank_guest(&incoming.config.layout, None);
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

/// It pings, so its control connection is alive; but it reads no page. Without a time-out of its own the migration would
/// hang for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_pings_and_reads_no_data_is_dead_after_the_peer_timeout() {
    let (mut fake, address) = FakeReceiver::bind();
    let stalled = std::thread::spawn(move || {
        fake.accept_unread(2);
        fake.hear();
        fake.say(&Message::Accept(Accept { populated: false }));
        fake.ping_until_abort()
    });
    let (guest, probe) = busy_guest(&Layout::flat(20_000).unwrap(), None);
    let mut options = send_options(2);
    options.source.peer_timeout = Duration::from_millis(700);
    options.socket_buffer_bytes = 64 << 10;
    let finished = guarded(Migration::send(guest, &address, options).finish()).await;
    let because = "the receiver took no data for 700 ms";
    assert_eq!(finished.outcome.error.as_deref(), Some(because));
    assert_eq!(finished.outcome.ending, Ending::TimedOut);
    let abort = Message::Abort {
        reason: because.to_owned(),
        cause: AbortCause::TimedOut,
    };
    assert_eq!(stalled.join().unwrap(), Some(abort));
    probe.assert_unharmed();
}

/// A batch takes longer than the peer time-out on this link, but bytes flow all the time.
#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_is_slow_is_not_taken_for_a_dead_one() {
    let (guest, probe) = busy_guest(&Layout::flat(1200).unwrap(), None);
    let (mut send, mut receive) = (send_options(1), receive_options());
    send.source.peer_timeout = Duration::from_millis(1000);
    receive.destination.peer_timeout = Duration::from_millis(1000);
    send.socket_buffer_bytes = 64 << 10;
    let (receiving, address, made) = receiver(receive);
    let slow = slow_relay(&address, 8 << 10, Duration::from_millis(12));
    let sending = Migration::send(guest, &slow, send);
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
    assert_eq!(destination.outcome.ending, Ending::Completed);
    assert_same_ram(&probe, &made.lock().unwrap()[0], &[]);
}

/// Waiting for one's turn under `--max-bandwidth` is no stall, however long it is.
#[tokio::test(flavor = "multi_thread")]
async fn pacing_is_not_taken_for_a_dead_receiver() {
    let (guest, probe) = busy_guest(&Layout::flat(8).unwrap(), None);
    let (mut send, mut receive) = (send_options(1), receive_options());
    send.source.peer_timeout = Duration::from_millis(300);
    receive.destination.peer_timeout = Duration::from_millis(300);
    // A page takes half a second.
    send.max_bandwidth = Some(8 << 10);
    let (receiving, address, made) = receiver(receive);
    let sending = Migration::send(guest, &address, send);
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
    assert_eq!(destination.outcome.ending, Ending::Completed);
    assert_same_ram(&probe, &made.lock().unwrap()[0], &[]);
}
