//! A migration is called off: by either side's signal, at any moment, twice in a row, and over and over at one port.
#![allow(clippy::unwrap_used)]

mod support;

#[allow(dead_code, unreachable_pub)]
#[path = "../../../crates/pageferry/tests/common/peer.rs"]
mod peer;

use machine::{BalloonConfig, MachineConfig};
use pages::Layout;
use peer::FakeReceiver;
use rustix::process::Signal;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use support::Running;
use wire::{Accept, Message};

/// What the fake receiver would say of itself, were it a source.
fn config(layout: &Layout) -> MachineConfig {
    MachineConfig {
        kind: "test".to_owned(),
        layout: layout.clone(),
        vcpus: 1,
        balloon: BalloonConfig {
            dialect: String::new(),
            features: 0,
        },
        extra: [].into(),
    }
}

const SMALL: [&str; 8] = [
    "--memory",
    "32M",
    "--used",
    "24M",
    "--skip",
    "none",
    "--compress",
    "none",
];
const SLOW: [&str; 2] = ["--max-bandwidth", "16Mbit"];

#[test]
fn case_14_a_receiver_that_was_called_off_is_started_again_at_the_same_port_twenty_times() {
    let folder = tempfile::tempdir().unwrap();
    let slow = [&SMALL[..], &SLOW, &["--verbose"]].concat();
    let mut address = "tcp:127.0.0.1:0".to_owned();
    for turn in 0..20 {
        let receiver = Running::receiver(folder.path(), &["--listen", &address]);
        address.clone_from(&receiver.address);
        let signal = if turn % 2 == 0 { Signal::INT } else { Signal::TERM };
        if turn % 5 == 0 {
            // Nobody has come yet.
            receiver.signal(signal);
            receiver.end().expect(5);
            continue;
        }
        let source = Running::source(folder.path(), &address, &slow);
        source.wait_for_stderr("connected");
        // Where in the migration, is a matter of the machine's speed.
        std::thread::sleep(std::time::Duration::from_millis(13 * turn));
        match turn % 3 {
            0 => source.signal(signal),
            _ => receiver.signal(signal),
        }
        source.end().expect(5).unharmed();
        receiver.end().expect(5);
    }
    // Nothing of all that is in the way of a guest.
    let receiver = Running::receiver(folder.path(), &["--listen", &address]);
    Running::source(folder.path(), &address, &[&SMALL[..], &["--verify"]].concat())
        .end()
        .expect(0);
    receiver.end().expect(0);
}

#[test]
fn two_signals_in_a_row_end_either_side_with_the_guest_at_its_source() {
    for at_the_source in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let receiver = Running::receiver(folder.path(), &[]);
        let address = receiver.address.clone();
        let source = Running::source(folder.path(), &address, &[&SMALL[..], &SLOW, &["--verbose"]].concat());
        source.wait_for_stderr("connected");
        let (asked, other) = if at_the_source {
            (source, receiver)
        } else {
            (receiver, source)
        };
        // It hears of nothing, and is waited for.
        other.signal(Signal::STOP);
        asked.signal(Signal::INT);
        asked.wait_for_stderr("another one ends this command at once");
        asked.signal(Signal::TERM);
        let ended = asked.end();
        ended.expect(5);
        assert_eq!(ended.report()["result"], "cancelled");
        other.signal(Signal::CONT);
        let other = other.end();
        if at_the_source {
            assert!(matches!(other.code, Some(4 | 5)), "{other:?}");
        } else {
            assert!(matches!(other.code, Some(4 | 5)), "{other:?}");
            other.unharmed();
        }
    }
}

/// A receiver that takes everything up to Commit, says when that has come, and nothing more until it is told to end.
fn silent_after_commit(mut fake: FakeReceiver, came: Sender<()>, end: Receiver<()>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        fake.accept(1);
        fake.hear_until(|m| matches!(m, Message::Hello(_)));
        fake.say(&Message::Accept(Accept { populated: false }));
        let over = |m: &Message| matches!(m, Message::RoundEnd { .. } | Message::StateEnd { .. });
        while let Some(Message::RoundEnd { round, .. }) = fake.hear_until(over) {
            fake.say(&Message::RoundReceived { round });
        }
        fake.say(&Message::Ready {
            verified: false,
            verify_us: 0,
        });
        assert!(fake.hear_until(|m| matches!(m, Message::Commit(_))).is_some());
        came.send(()).unwrap();
        // Its end is the test's.
        let _ = end.recv();
        fake.die();
    })
}

#[test]
fn past_commit_one_signal_is_too_late_and_a_second_one_says_that_nobody_knows() {
    let folder = tempfile::tempdir().unwrap();
    let (fake, address) = FakeReceiver::bind();
    let ((came, has_come), (end, ends)) = (channel(), channel());
    let receiver = silent_after_commit(fake, came, ends);
    let arguments = ["--memory", "32M", "--used", "8M", "--streams", "1", "--ask", "never"];
    let mut source = Running::source(folder.path(), &address.to_string(), &arguments);
    has_come.recv().unwrap();
    source.signal(Signal::INT);
    source.wait_for_stderr("another one ends this command at once");
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(source.is_running(), "the guest may be here alone: {}", source.said());
    source.signal(Signal::INT);
    let ended = source.end();
    ended.expect(7).says("second signal");
    assert_eq!(ended.report()["result"], "unknown");
    assert!(ended.report()["guest"].is_null(), "it did not run on: {ended:?}");
    drop(end);
    receiver.join().unwrap();
}
