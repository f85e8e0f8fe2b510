//! Failures and cancels: before the hand-over the guest goes on at the source as if nothing had been; after it, the
//! source never resumes by itself.
#![allow(clippy::unwrap_used)]

mod common;

use common::peer::FakeReceiver;
use common::*;
use pageferry::{Abandoned, Ask, Ending, Finished, Migration};
use pages::Layout;
use std::sync::atomic::Ordering;
use wire::{Accept, Message, NotRunning};

fn layout() -> Layout {
    Layout::flat(20_000).unwrap()
}

fn free() -> Option<Free> {
    Some(Free {
        ranges: vec![r(5000, 10_000)],
        poison: None,
        ballooned: vec![],
        silent: false,
    })
}

/// Where a receiver dies.
#[derive(Clone, Copy, Debug)]
enum Death {
    AtHello,
    AfterAccept,
    BeforeRoundReceived,
    AtState,
    BeforeReady,
    AtCommit,
    RefusesToRun,
}

/// Plays a receiver up to its death.
fn play(mut fake: FakeReceiver, streams: usize, death: Death) {
    fake.accept(streams);
    assert!(matches!(fake.hear(), Some(Message::Hello(_))));
    if matches!(death, Death::AtHello) {
        return fake.die();
    }
    fake.say(&Message::Accept(Accept { populated: false }));
    if matches!(death, Death::AfterAccept) {
        return fake.die();
    }
    loop {
        let end = fake.hear_until(|m| matches!(m, Message::RoundEnd { .. }));
        let Some(Message::RoundEnd { round, last }) = end else {
            panic!("{end:?}")
        };
        if matches!(death, Death::BeforeRoundReceived) {
            return fake.die();
        }
        fake.say(&Message::RoundReceived { round });
        if last {
            break;
        }
    }
    if matches!(death, Death::AtState) {
        fake.hear_until(|m| matches!(m, Message::Section(_)));
        return fake.die();
    }
    fake.hear_until(|m| matches!(m, Message::StateEnd { .. }));
    if matches!(death, Death::BeforeReady) {
        return fake.die();
    }
    fake.say(&Message::Ready {
        verified: false,
        verify_us: 0,
    });
    assert!(fake.hear_until(|m| matches!(m, Message::Commit(_))).is_some());
    if matches!(death, Death::RefusesToRun) {
        let reason = "vcpu1 does not start".to_owned();
        fake.say(&Message::NotRunning(NotRunning { reason }));
        fake.hear_until(|_| false);
    }
    fake.die();
}

async fn send_to_dying(death: Death) -> (Finished, Probe) {
    let (fake, address) = FakeReceiver::bind();
    let player = std::thread::spawn(move || play(fake, 2, death));
    let (guest, probe) = busy_guest(&layout(), free());
    let mut options = send_options(2);
    options.source.ask = Ask::Always;
    let finished = guarded(Migration::send(guest, &address, options).finish()).await;
    player.join().unwrap();
    (finished, probe)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_dies_before_the_hand_over() {
    use Death::*;
    for death in [AtHello, AfterAccept, BeforeRoundReceived, AtState, BeforeReady] {
        let (finished, probe) = send_to_dying(death).await;
        assert_eq!(finished.outcome.ending, Ending::Failed, "{death:?}");
        let error = finished.outcome.error.unwrap();
        assert!(
            error.contains("control connection") || error.contains("data stream"),
            "{death:?}: {error}"
        );
        assert!(finished.guest.is_some());
        probe.assert_unharmed();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_dies_after_the_hand_over() {
    let (finished, probe) = send_to_dying(Death::AtCommit).await;
    assert_eq!(finished.outcome.ending, Ending::Unknown);
    assert!(!probe.is_running(), "the source resumed by itself");
    assert_eq!(probe.inner.resumes.load(Ordering::SeqCst), 0);
    assert!(!finished.guest.unwrap().machine.is_running());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_cannot_run_the_guest_gives_it_back() {
    let (finished, probe) = send_to_dying(Death::RefusesToRun).await;
    assert_eq!(finished.outcome.ending, Ending::Failed);
    assert!(finished.outcome.error.unwrap().contains("vcpu1 does not start"));
    probe.assert_unharmed();
}

#[tokio::test(flavor = "multi_thread")]
async fn case_05_the_receiver_rejects_the_state() {
    let plant = |inner: &Inner| inner.refuse_restore.store(true, Ordering::SeqCst);
    let (receiving, address, made) = receiver_at("tcp:127.0.0.1:0", receive_options(), plant);
    let (guest, probe) = busy_guest(&layout(), free());
    let sending = Migration::send(guest, &address, send_options(2));
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    for finished in [&source, &destination] {
        assert_eq!(finished.outcome.ending, Ending::Failed);
        let error = finished.outcome.error.as_ref().unwrap();
        assert!(error.contains("unknown register 0x4242"), "{error}");
    }
    assert!(destination.guest.is_none() && !made.lock().unwrap()[0].is_running());
    assert_eq!(probe.inner.pauses.load(Ordering::SeqCst), 1);
    probe.assert_unharmed();
    // And a second migration of the same guest works.
    let (source, _, there) = migrate(source.guest.unwrap(), send_options(2), receive_options()).await;
    assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
    assert_same_ram(&probe, &there.unwrap(), &free().unwrap().ranges);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resume_that_failed_half_way_is_stopped_before_the_source_resumes() {
    let plant = |inner: &Inner| inner.fail_resume.store(true, Ordering::SeqCst);
    let (receiving, address, made) = receiver_at("tcp:127.0.0.1:0", receive_options(), plant);
    let (guest, probe) = busy_guest(&layout(), free());
    let sending = Migration::send(guest, &address, send_options(2));
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    for finished in [&source, &destination] {
        assert_eq!(finished.outcome.ending, Ending::Failed);
        let error = finished.outcome.error.as_ref().unwrap();
        assert!(error.contains("vcpu1 does not start"), "{error}");
    }
    let there = &made.lock().unwrap()[0];
    assert!(destination.guest.is_none() && !there.is_running(), "two copies run");
    assert_eq!(there.inner.pauses.load(Ordering::SeqCst), 1);
    probe.assert_unharmed();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_whose_state_cannot_be_saved_and_one_that_panics() {
    for panics in [false, true] {
        let (guest, probe) = busy_guest(&layout(), None);
        probe.inner.refuse_save.store(true, Ordering::SeqCst);
        probe.inner.panic_in_save.store(panics, Ordering::SeqCst);
        let text = if panics {
            "a planted panic"
        } else {
            "vcpu0 does not let go"
        };
        let (source, destination, _) = migrate(guest, send_options(1), receive_options()).await;
        for finished in [&source, &destination] {
            assert_eq!(finished.outcome.ending, Ending::Failed);
            let error = finished.outcome.error.as_ref().unwrap();
            assert!(error.contains(text), "{error}");
        }
        assert!(source.guest.is_some() && destination.guest.is_none());
        probe.assert_unharmed();
    }
}

/// Cancels once some pages have crossed a slow link.
#[tokio::test(flavor = "multi_thread")]
async fn cancel_from_either_side() {
    for by_source in [true, false] {
        let (receiving, address, made) = receiver(receive_options());
        let (guest, probe) = busy_guest(&layout(), None);
        let mut options = send_options(2);
        options.max_bandwidth = Some(4 << 20);
        let sending = Migration::send(guest, &address, options);
        guarded(async {
            while receiving.progress().wire_bytes == 0 {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        })
        .await;
        if by_source {
            sending.cancel()
        } else {
            receiving.cancel()
        }
        let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
        assert_eq!(source.outcome.ending, Ending::Cancelled, "{:?}", source.outcome.error);
        assert_eq!(
            destination.outcome.ending,
            Ending::Cancelled,
            "{:?}",
            destination.outcome.error
        );
        assert!(destination.guest.is_none() && source.guest.is_some());
        assert!(!made.lock().unwrap()[0].is_running());
        probe.assert_unharmed();
    }
}

/// Neither does Commit leave a source that was abandoned, nor does a destination act on one.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_abandoned_is_not_handed_over() {
    for by_source in [true, false] {
        let (receiving, address, made) = receiver(receive_options());
        let (guest, _probe) = busy_guest(&layout(), None);
        let sending = Migration::send(guest, &address, send_options(1));
        let abandon = || {
            if by_source {
                sending.abandoner()()
            } else {
                receiving.abandoner()()
            }
        };
        assert_eq!((abandon(), abandon()), (Abandoned::Before, Abandoned::Before));
        let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
        assert_ne!(source.outcome.ending, Ending::Completed);
        assert_ne!(destination.outcome.ending, Ending::Completed);
        assert!(destination.guest.is_none() && source.guest.is_some());
        assert!(!made.lock().unwrap()[0].is_running(), "it was handed over");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_before_anybody_came() {
    let (receiving, _, _) = receiver(receive_options());
    receiving.cancel();
    let finished = guarded(receiving.finish()).await;
    assert_eq!(finished.outcome.ending, Ending::Cancelled);
}

/// Case 30: the session is ended on the way out, though the guest never said a word.
#[tokio::test(flavor = "multi_thread")]
async fn case_30_cancel_in_the_middle_of_hinting() {
    let (receiving, address, _) = receiver(receive_options());
    let silent = Free {
        silent: true,
        ..free().unwrap()
    };
    let (guest, probe) = busy_guest(&layout(), Some(silent));
    let mut options = send_options(1);
    options.source.ask = Ask::Always;
    options.source.hint_timeout = std::time::Duration::from_secs(50);
    let sending = Migration::send(guest, &address, options);
    guarded(async {
        while probe.inner.begun.load(Ordering::SeqCst) == 0 {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    })
    .await;
    sending.cancel();
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_eq!(source.outcome.ending, Ending::Cancelled);
    assert_eq!(destination.outcome.ending, Ending::Cancelled);
    assert_eq!(probe.inner.ended.load(Ordering::SeqCst), 1);
    probe.assert_unharmed();
}

/// The fake source of a receiver that was just told of a whole round says that it gives up.
#[tokio::test(flavor = "multi_thread")]
async fn case_14_cancel_right_after_a_round_boundary() {
    use common::peer::{hear, hello, open, say};
    use std::io::Write;
    let (receiving, address, made) = receiver(receive_options());
    let source = tokio::task::spawn_blocking(move || {
        let mut control = open(&address, wire::ConnectionRole::Control);
        let mut data = open(&address, wire::ConnectionRole::Data { stream: 0 });
        say(&mut control, &hello(&Layout::flat(10).unwrap(), 1));
        assert!(matches!(hear(&mut control), Some(Message::Accept(_))));
        let skip = wire::Skip {
            reason: wire::SkipReason::Hole,
            ranges: vec![r(0, 10)],
        };
        say(&mut control, &Message::Skip(skip));
        say(&mut control, &Message::RoundEnd { round: 0, last: false });
        data.write_all(&wire::batch::marker(0, 0, 0)).unwrap();
        assert!(matches!(hear(&mut control), Some(Message::RoundReceived { round: 0 })));
        let abort = Message::Abort {
            reason: "the operator changed their mind".to_owned(),
            cause: wire::AbortCause::Cancelled,
        };
        say(&mut control, &abort);
        // Neither connection is closed: the receiver leaves by itself.
        assert!(hear(&mut control).is_none());
        drop(data);
    });
    let finished = guarded(receiving.finish()).await;
    assert_eq!(finished.outcome.ending, Ending::Cancelled);
    assert!(finished.outcome.error.unwrap().contains("changed their mind"));
    assert!(!made.lock().unwrap()[0].is_running());
    guarded(source).await.unwrap();
}
