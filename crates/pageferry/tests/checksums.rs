//! Checksums over the pages of each batch, on a link that changes a byte.
#![allow(clippy::unwrap_used)]

mod common;

use common::peer::FakeReceiver;
use common::*;
use pageferry::{Address, Compress, Ending, Finished, Migration, SendOptions};
use pages::Layout;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use wire::{Accept, Message, Offer};

/// Of a data connection, the byte that is changed: in the pages of the first batch, as they are and packed.
const AT: usize = 200_000;
const AT_PACKED: usize = 9_000;

/// Carries connections to `to`; changes this byte of each data connection.
fn link(to: &Address, damage: Option<usize>) -> Address {
    let Address::Tcp { port, .. } = *to else {
        panic!("not TCP")
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap()).parse().unwrap();
    std::thread::spawn(move || {
        while let Ok((near, _)) = listener.accept() {
            let far = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || carry(near, far, damage));
            std::thread::spawn(move || carry(far_too, near_too, None));
        }
    });
    address
}

fn carry(mut from: TcpStream, mut to: TcpStream, damage: Option<usize>) {
    let (mut seen, mut is_data) = (0, false);
    let mut buffer = vec![0; 64 << 10];
    while let Ok(n) = from.read(&mut buffer) {
        if n == 0 {
            break;
        }
        let bytes = &mut buffer[..n];
        // The preamble's role: 2 is data.
        is_data |= seen == 0 && n > 12 && bytes[12] == 2;
        if let Some(at) = damage.filter(|at| is_data && (seen..seen + n).contains(at)) {
            bytes[at - seen] ^= 0x10;
        }
        seen += n;
        if to.write_all(bytes).is_err() {
            break;
        }
    }
    // Either may be gone.
    let _ = to.shutdown(Shutdown::Write);
}

async fn over(damage: Option<usize>, checksum: bool, compress: Compress) -> (Finished, Finished, Probe, Probe) {
    let (guest, probe) = busy_guest(&Layout::flat(5000).unwrap(), None);
    let (receiving, address, made) = receiver(receive_options());
    let options = SendOptions {
        checksum,
        compress,
        ..send_options(1)
    };
    let sending = Migration::send(guest, &link(&address, damage), options);
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    let there = made.lock().unwrap().pop().unwrap();
    (source, destination, probe, there)
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_with_checksums_arrive() {
    for compress in [Compress::None, Compress::Lz4] {
        let (source, destination, here, there) = over(None, true, compress).await;
        assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
        assert_eq!(destination.outcome.ending, Ending::Completed);
        assert_same_ram(&here, &there, &[]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_byte_that_changed_on_the_way_is_found_before_it_is_used() {
    for (at, compress) in [(AT, Compress::None), (AT_PACKED, Compress::Lz4)] {
        let (source, destination, here, there) = over(Some(at), true, compress).await;
        for error in [source.outcome.error.unwrap(), destination.outcome.error.unwrap()] {
            let found = error.contains("batch 0 of round 0 on stream 0") && error.contains("its payload's checksum");
            assert!(found, "{compress}: {error}");
        }
        assert_eq!(source.outcome.ending, Ending::Failed);
        here.assert_unharmed();
        assert!(!there.is_running());
    }
    // The link does what it is there for: without checksums the byte gets in.
    let (source, _, here, there) = over(Some(AT), false, Compress::None).await;
    assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
    let differs = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| assert_same_ram(&here, &there, &[])));
    assert!(differs.is_err(), "no byte was changed");
}

/// A receiver of version 2 knows no checksums, and one of ours that cannot copy pages in has no place to check them in: both
/// are told so, and nothing is sent without.
#[tokio::test(flavor = "multi_thread")]
async fn checksums_that_a_receiver_cannot_check_are_refused_and_not_left_out() {
    for (version, codecs, word) in [
        (2, 1, "speaks version 2"),
        (wire::VERSIONS.max, 0, "before it uses them"),
    ] {
        let (mut fake, address) = FakeReceiver::bind();
        let player = std::thread::spawn(move || {
            fake.accept_as(2, version);
            assert!(matches!(fake.hear(), Some(Message::Hello(_))));
            fake.say(&Message::Offer(Offer { codecs }));
            fake.say(&Message::Accept(Accept { populated: false }));
            fake.hear_until(|message| matches!(message, Message::Abort { .. }))
        });
        let (guest, probe) = busy_guest(&Layout::flat(1000).unwrap(), None);
        let options = SendOptions {
            checksum: true,
            ..send_options(2)
        };
        let finished = guarded(Migration::send(guest, &address, options).finish()).await;
        assert_eq!(finished.outcome.ending, Ending::Refused);
        let error = finished.outcome.error.unwrap();
        assert!(error.contains("--checksum") && error.contains(word), "{error}");
        let Some(Message::Abort { reason, .. }) = player.join().unwrap() else {
            panic!("the receiver was not told");
        };
        assert!(reason.contains("--checksum"), "{reason}");
        probe.assert_unharmed();
    }
}
