//! A guest that was handed over without an answer: nobody knows where it runs, so the copy here is kept.
#![allow(clippy::unwrap_used)]

mod support;

#[allow(dead_code, unreachable_pub)]
#[path = "../../../crates/pageferry/tests/common/peer.rs"]
mod peer;

use machine::{BalloonConfig, MachineConfig};
use pages::Layout;
use peer::FakeReceiver;
use rustix::process::Signal;
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

#[test]
fn a_guest_that_may_be_the_only_copy_stays_until_a_signal_comes() {
    let folder = tempfile::tempdir().unwrap();
    let (mut fake, address) = FakeReceiver::bind();
    let receiver = std::thread::spawn(move || {
        fake.accept(1);
        fake.hear_until(|m| matches!(m, Message::Hello(_)));
        fake.say(&Message::Accept(Accept { populated: false }));
        let end = |m: &Message| matches!(m, Message::RoundEnd { .. } | Message::StateEnd { .. });
        while let Some(Message::RoundEnd { round, .. }) = fake.hear_until(end) {
            fake.say(&Message::RoundReceived { round });
        }
        fake.say(&Message::Ready {
            verified: false,
            verify_us: 0,
        });
        assert!(fake.hear_until(|m| matches!(m, Message::Commit(_))).is_some());
        fake.die();
    });
    let arguments = ["--memory", "32M", "--used", "8M", "--streams", "1", "--ask", "never"];
    let mut source = Running::source(folder.path(), &address.to_string(), &arguments);
    source.wait_for_stderr("stays paused here until");
    receiver.join().unwrap();
    let report = std::fs::read_to_string(&source.report).unwrap();
    assert!(report.contains("\"unknown\""), "the report does not wait: {report}");
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(source.is_running(), "the guest is lost with its command");
    source.signal(Signal::TERM);
    let ended = source.end();
    ended.expect(7);
    assert_eq!(ended.report()["result"], "unknown");
}
