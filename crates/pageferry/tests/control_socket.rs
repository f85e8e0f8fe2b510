//! A guest at a control socket: what clients may do to it, when, and what they cannot do to each other.
#![allow(clippy::unwrap_used)]

mod common;

use common::peer::FakeReceiver;
use common::*;
use pageferry::control_socket::{
    BalloonState, BalloonStats, ControlClient, ControlListener, GuestControls, Heard, How, MAX_CLIENTS,
    MAX_REQUEST_BYTES, NoControls, Served, Serving, serve,
};
use pageferry::{Ending, Guest};
use pages::Layout;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

struct Stand {
    _folder: tempfile::TempDir,
    path: PathBuf,
    serving: Serving,
    probe: Probe,
}

fn layout() -> Layout {
    Layout::flat(400).unwrap()
}

fn served_with(guest: Guest, probe: Probe, controls: Arc<dyn GuestControls>) -> Stand {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control");
    let serving = serve(ControlListener::bind(&path).unwrap(), guest, controls);
    Stand {
        _folder: folder,
        path,
        serving,
        probe,
    }
}

fn served() -> Stand {
    let (guest, probe) = busy_guest(&layout(), None);
    served_with(guest, probe, Arc::new(NoControls))
}

async fn client(path: &Path) -> ControlClient {
    guarded(ControlClient::connect(path)).await.unwrap()
}

async fn call(client: &mut ControlClient, method: &str, params: Value) -> Result<Value, String> {
    guarded(client.call(method, &params)).await.unwrap()
}

async fn end(mut serving: Serving) -> Served {
    guarded(serving.finish()).await
}

/// What migrates so slowly that a test can do something meanwhile.
fn slow(to: &pageferry::Address) -> Value {
    json!({"to": to.to_string(), "max_bandwidth_bytes_per_s": 200_000, "compress": "none", "skip": []})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_is_handed_over_and_the_client_gets_the_whole_report() {
    let served = served();
    let (receiving, address, made) = receiver(receive_options());
    let mut one = client(&served.path).await;
    assert_eq!(call(&mut one, "version", Value::Null).await.unwrap()["version"], 2);
    let status = call(&mut one, "status", Value::Null).await.unwrap();
    assert_eq!((&status["state"], &status["kind"]), (&json!("running"), &json!("test")));
    assert_eq!(status["memory_bytes"], 400 * 4096);
    assert!(status["balloon"].is_null() && status["last_migration"].is_null());
    let params = json!({"to": address.to_string(), "verify": true});
    let end_of = call(&mut one, "migrate", params).await.unwrap();
    assert_eq!(
        (&end_of["ending"], &end_of["exit_code"]),
        (&json!("completed"), &json!(0))
    );
    assert_eq!(end_of["report"]["verified"], true);
    assert_eq!(end_of["report"]["pages"]["total"], 400);
    let ended = end(served.serving).await;
    assert_eq!(ended.how, How::HandedOver(address));
    assert!(!ended.guest.unwrap().machine.is_running());
    assert_eq!(guarded(receiving.finish()).await.outcome.ending, Ending::Completed);
    assert_same_ram(&served.probe, &made.lock().unwrap()[0], &[]);
    assert!(!served.path.exists(), "the socket's file goes");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_20_what_would_disturb_a_migration_is_refused_with_the_reason() {
    let (guest, probe) = busy_guest(&layout(), None);
    let controls = Arc::new(Knobs::default());
    let served = served_with(guest, probe, controls.clone());
    let (receiving, address, _) = receiver(receive_options());
    let (mut one, mut two) = (client(&served.path).await, client(&served.path).await);
    let id = one.send("migrate", &slow(&address)).await.unwrap();
    wait_for_pages(&served.path).await;
    assert_eq!(
        call(&mut two, "status", Value::Null).await.unwrap()["state"],
        "migrating"
    );
    for (method, params, word) in [
        ("migrate", json!({"to": "tcp:127.0.0.1:1"}), "a second one cannot begin"),
        ("balloon", json!({"pages": 10}), "the balloon's target cannot change"),
        ("balloon-stats", json!({}), "statistics"),
        ("pause", Value::Null, "the guest cannot be paused"),
        ("resume", json!({"force": true}), "the guest cannot be resumed"),
        ("quit", Value::Null, "the host cannot quit"),
    ] {
        let error = call(&mut two, method, params).await.unwrap_err();
        assert!(error.contains(word) && error.contains(&address.to_string()), "{error}");
    }
    // From the client that waits for its migration too.
    let pause = one.send("pause", &Value::Null).await.unwrap();
    let Heard::Answer {
        id: Some(answered),
        result,
    } = guarded(one.next()).await.unwrap()
    else {
        panic!("no answer");
    };
    assert!(answered == pause && result.is_err());
    assert_eq!(controls.calls.load(Ordering::SeqCst), 0, "nobody touched the balloon");
    assert_eq!(served.probe.inner.pauses.load(Ordering::SeqCst), 0);
    let progress = call(&mut two, "progress", Value::Null).await.unwrap();
    assert_eq!(
        (&progress["migrating"], &progress["following"]),
        (&json!(true), &json!(false))
    );
    assert_eq!(progress["progress"]["total_pages"], 400);
    // What is left to do: cancel. The guest goes on, is served on, and can be sent again.
    call(&mut two, "cancel", Value::Null).await.unwrap();
    let Heard::Answer { id: answered, result } = guarded(one.next()).await.unwrap() else {
        panic!("no answer");
    };
    assert_eq!(answered, Some(id));
    assert_eq!(result.unwrap()["ending"], "cancelled");
    served.probe.assert_unharmed();
    guarded(receiving.finish()).await;
    let status = call(&mut two, "status", Value::Null).await.unwrap();
    assert_eq!(
        (&status["state"], &status["last_migration"]["exit_code"]),
        (&json!("running"), &json!(5))
    );
    assert!(
        call(&mut two, "cancel", Value::Null)
            .await
            .unwrap_err()
            .contains("no migration")
    );
    call(&mut two, "balloon", json!({"pages": 10})).await.unwrap();
    let (receiving, address, _) = receiver(receive_options());
    let ended = call(&mut one, "migrate", json!({"to": address.to_string()}))
        .await
        .unwrap();
    assert_eq!(ended["exit_code"], 0);
    guarded(receiving.finish()).await;
}

#[derive(Default)]
struct Knobs {
    calls: AtomicU64,
    target: AtomicU64,
}

impl GuestControls for Knobs {
    fn balloon(&self) -> Option<BalloonState> {
        Some(BalloonState {
            dialect: "test".to_owned(),
            target_pages: self.target.load(Ordering::SeqCst),
            actual_pages: 3,
        })
    }

    fn set_balloon_target(&self, pages: u64) -> Result<(), String> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        if pages > 400 {
            return Err(format!("{pages} pages\nare too many"));
        }
        assert_ne!(pages, 13, "a planted panic");
        self.target.store(pages, Ordering::SeqCst);
        Ok(())
    }

    fn balloon_stats(&self, within: Duration) -> Result<BalloonStats, String> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        Ok(BalloonStats {
            fresh: !within.is_zero(),
            free_pages: Some(9),
            ..BalloonStats::default()
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_balloon_is_set_and_asked() {
    let (guest, probe) = busy_guest(&layout(), None);
    let served = served_with(guest, probe, Arc::new(Knobs::default()));
    let mut one = client(&served.path).await;
    let set = call(&mut one, "balloon", json!({"bytes": 40960})).await.unwrap();
    assert_eq!(set, json!({"target_pages": 10}));
    let status = call(&mut one, "status", Value::Null).await.unwrap();
    assert_eq!(
        status["balloon"],
        json!({"dialect": "test", "target_pages": 10, "actual_pages": 3})
    );
    let error = call(&mut one, "balloon", json!({"pages": 401})).await.unwrap_err();
    assert_eq!(error, "401 pages are too many");
    let error = call(&mut one, "balloon", json!({"pages": 13})).await.unwrap_err();
    assert!(error.contains("panicked"), "{error}");
    let stats = call(&mut one, "balloon-stats", Value::Null).await.unwrap();
    assert_eq!((&stats["fresh"], &stats["free_pages"]), (&json!(true), &json!(9)));
    // A guest that is paused cannot answer, and nobody waits for it.
    call(&mut one, "pause", Value::Null).await.unwrap();
    let stats = call(&mut one, "balloon-stats", Value::Null).await.unwrap();
    assert_eq!(stats["fresh"], false);
    assert!(stats["why"].as_str().unwrap().contains("paused"), "{stats}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_without_a_balloon_says_so() {
    let served = served();
    let mut one = client(&served.path).await;
    for (method, params) in [("balloon", json!({"pages": 1})), ("balloon-stats", json!({}))] {
        let error = call(&mut one, method, params).await.unwrap_err();
        assert!(error.contains("has no balloon"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_06_a_guest_paused_by_its_operator_arrives_paused() {
    let served = served();
    let mut one = client(&served.path).await;
    assert_eq!(
        call(&mut one, "pause", Value::Null).await.unwrap(),
        json!({"running": false})
    );
    assert_eq!(call(&mut one, "status", Value::Null).await.unwrap()["state"], "paused");
    assert_eq!(
        call(&mut one, "resume", Value::Null).await.unwrap(),
        json!({"running": true})
    );
    call(&mut one, "pause", Value::Null).await.unwrap();
    assert!(!served.probe.is_running());
    let (receiving, address, made) = receiver(receive_options());
    call(&mut one, "migrate", json!({"to": address.to_string()}))
        .await
        .unwrap();
    guarded(receiving.finish()).await;
    assert!(!made.lock().unwrap()[0].is_running());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_migration_leaves_the_guest_running_and_served() {
    let served = served();
    let mut one = client(&served.path).await;
    let ended = call(&mut one, "migrate", json!({"to": "tcp:127.0.0.1:1"}))
        .await
        .unwrap();
    assert_eq!((&ended["ending"], &ended["exit_code"]), (&json!("failed"), &json!(4)));
    assert!(
        ended["error"].as_str().unwrap().contains("Connection refused"),
        "{ended}"
    );
    served.probe.assert_unharmed();
    let ended = call(&mut one, "migrate", json!({"to": "tcp:127.0.0.1:1", "streams": 0})).await;
    assert!(ended.unwrap_err().contains("0 data streams"), "it is not begun");
    // A dry run that both sides agree on leaves the guest here too.
    let (receiving, address, _) = receiver(receive_options());
    let params = json!({"to": address.to_string(), "dry_run": true});
    assert_eq!(call(&mut one, "migrate", params).await.unwrap()["exit_code"], 0);
    assert_eq!(call(&mut one, "status", Value::Null).await.unwrap()["state"], "running");
    receiving.cancel();
    guarded(receiving.finish()).await;
}

/// The receiver dies with `Commit` in its hands.
#[tokio::test(flavor = "multi_thread")]
async fn after_an_unknown_end_only_an_operator_who_insists_resumes() {
    use wire::{Accept, Message};
    let (mut fake, address) = FakeReceiver::bind();
    let player = std::thread::spawn(move || {
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
    let served = served();
    let mut one = client(&served.path).await;
    let params = json!({"to": address.to_string(), "peer_timeout_ms": 3000});
    let ended = call(&mut one, "migrate", params).await.unwrap();
    player.join().unwrap();
    assert_eq!((&ended["ending"], &ended["exit_code"]), (&json!("unknown"), &json!(7)));
    assert!(!served.probe.is_running());
    let status = call(&mut one, "status", Value::Null).await.unwrap();
    assert_eq!(
        (&status["state"], &status["to"]),
        (&json!("unknown"), &json!(address.to_string()))
    );
    for (method, params) in [("resume", json!({})), ("migrate", json!({"to": "tcp:127.0.0.1:1"}))] {
        let error = call(&mut one, method, params).await.unwrap_err();
        assert!(error.contains("without an answer"), "{error}");
    }
    assert!(!served.probe.is_running());
    call(&mut one, "resume", json!({"force": true})).await.unwrap();
    assert!(served.probe.is_running());
    assert_eq!(call(&mut one, "status", Value::Null).await.unwrap()["state"], "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_in_the_middle_costs_nothing() {
    let served = served();
    let (receiving, address, made) = receiver(receive_options());
    let mut one = client(&served.path).await;
    let mut params = slow(&address);
    params["max_bandwidth_bytes_per_s"] = json!(2_000_000);
    one.send("migrate", &params).await.unwrap();
    wait_for_pages(&served.path).await;
    drop(one);
    assert_eq!(end(served.serving).await.how, How::HandedOver(address));
    guarded(receiving.finish()).await;
    assert_same_ram(&served.probe, &made.lock().unwrap()[0], &[]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_never_reads_holds_nobody_up() {
    let served = served();
    let (receiving, address, _) = receiver(receive_options());
    // It follows, asks until nothing goes out any more, and reads nothing of it.
    let mut deaf = UnixStream::connect(&served.path).await.unwrap();
    deaf.write_all(b"{\"id\":1,\"method\":\"progress\",\"params\":{\"follow\":true}}\n")
        .await
        .unwrap();
    let status = b"{\"id\":2,\"method\":\"status\"}\n".repeat(1000);
    let stuck = tokio::time::timeout(Duration::from_secs(1), async {
        loop {
            deaf.write_all(&status).await.unwrap();
        }
    });
    assert!(stuck.await.is_err(), "it could write without end");
    let mut one = client(&served.path).await;
    let ended = call(&mut one, "migrate", json!({"to": address.to_string()}))
        .await
        .unwrap();
    assert_eq!(ended["exit_code"], 0);
    assert_eq!(end(served.serving).await.how, How::HandedOver(address));
    guarded(receiving.finish()).await;
}

async fn raw(path: &Path, lines: &[u8], answers: usize) -> Vec<Value> {
    guarded(async {
        let (from, mut to) = UnixStream::connect(path).await.unwrap().into_split();
        let mut from = BufReader::new(from).lines();
        // The host may hang up in the middle of a line that is too long.
        let sent = to.write_all(lines).await;
        let mut heard = Vec::new();
        for _ in 0..answers {
            let line = from.next_line().await.unwrap();
            heard.push(serde_json::from_str(&line.unwrap_or_else(|| panic!("{sent:?}, {heard:?}"))).unwrap());
        }
        heard
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_that_make_no_sense_get_one_sentence_each_and_the_next_is_served() {
    let served = served();
    let lines = b"hello\n\n{\"id\":5,\"method\":\"fly\"}\n\xff\xfe\n{\"id\":6,\"method\":\"status\"}\n";
    let heard = raw(&served.path, lines, 4).await;
    assert!(heard[0]["id"].is_null() && heard[0]["error"].is_string());
    assert_eq!(heard[1]["id"], 5);
    assert!(heard[1]["error"].as_str().unwrap().contains("fly"));
    assert!(heard[2]["error"].is_string());
    assert_eq!(
        (&heard[3]["id"], &heard[3]["result"]["state"]),
        (&json!(6), &json!("running"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_may_have_a_mebibyte_and_not_a_byte_more() {
    let served = served();
    let mut line = b"{\"id\":1,\"method\":\"status\"".to_vec();
    line.resize(MAX_REQUEST_BYTES - 2, b' ');
    line.extend_from_slice(b"}\n");
    assert_eq!(raw(&served.path, &line, 1).await[0]["result"]["state"], "running");
    line.insert(30, b' ');
    let heard = raw(&served.path, &line, 1).await;
    assert!(heard[0]["error"].as_str().unwrap().contains("1048576"), "{heard:?}");
    // The connection has ended, the host has not.
    let mut stream = UnixStream::connect(&served.path).await.unwrap();
    // It hangs up in the middle: that the rest cannot be written is as it should be.
    let _ = stream.write_all(&vec![b'x'; 2 * MAX_REQUEST_BYTES]).await;
    let mut rest = Vec::new();
    let ended = guarded(stream.read_to_end(&mut rest)).await;
    assert!(ended.is_err() || String::from_utf8(rest).unwrap().contains("ends here"));
    let mut one = client(&served.path).await;
    assert_eq!(call(&mut one, "status", Value::Null).await.unwrap()["state"], "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_number_that_is_not_answered_yet_is_not_taken_again() {
    let served = served();
    let (receiving, address, _) = receiver(receive_options());
    let migrate = json!({"id": 3, "method": "migrate", "params": slow(&address)});
    let quit = json!({"id": 3, "method": "quit"});
    let cancel = json!({"id": 4, "method": "cancel"});
    let heard = raw(&served.path, format!("{migrate}\n{quit}\n").as_bytes(), 1).await;
    assert!(
        heard[0]["error"].as_str().unwrap().contains("not answered yet"),
        "{heard:?}"
    );
    // Its client is gone; another one cancels what it began.
    wait_for_pages(&served.path).await;
    let heard = raw(&served.path, format!("{cancel}\n").as_bytes(), 1).await;
    assert_eq!(heard[0]["id"], 4);
    guarded(receiving.finish()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_past_the_limit_are_turned_away_until_one_goes() {
    let served = served();
    let mut clients = Vec::new();
    for _ in 0..MAX_CLIENTS {
        let mut one = client(&served.path).await;
        call(&mut one, "version", Value::Null).await.unwrap();
        clients.push(one);
    }
    let mut late = client(&served.path).await;
    let error = call(&mut late, "version", Value::Null).await.unwrap_err();
    assert!(error.contains("16 clients"), "{error}");
    clients.pop();
    guarded(async {
        while client(&served.path)
            .await
            .call("version", &Value::Null)
            .await
            .is_ok_and(|said| said.is_err())
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_follows_hears_what_happens_and_others_do_not() {
    let served = served();
    let (receiving, address, _) = receiver(receive_options());
    let (mut one, mut two) = (client(&served.path).await, client(&served.path).await);
    let following = call(&mut two, "progress", json!({"follow": true})).await.unwrap();
    assert_eq!(
        (&following["following"], &following["progress"]),
        (&json!(true), &Value::Null)
    );
    let mut params = slow(&address);
    params["max_bandwidth_bytes_per_s"] = json!(2_000_000);
    let id = one.send("migrate", &params).await.unwrap();
    let heard = Mutex::new(Vec::new());
    guarded(async {
        while let Ok(Heard::Event { name, data }) = two.next().await {
            heard.lock().unwrap().push((name, data));
        }
    })
    .await;
    let heard = heard.into_inner().unwrap();
    let names: Vec<&str> = heard.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.first(), Some(&"migration-started"), "{names:?}");
    assert_eq!(names[names.len() - 2..], ["migration-ended", "ended"], "{names:?}");
    assert!(
        names.iter().filter(|name| **name == "progress").count() >= 2,
        "{names:?}"
    );
    let sent: Vec<u64> = heard
        .iter()
        .filter_map(|(_, data)| data["sent_pages"].as_u64())
        .collect();
    assert!(sent.is_sorted() && sent.last() > Some(&0), "{sent:?}");
    // The one that does not follow hears its answer, and then the end.
    assert!(matches!(guarded(one.next()).await.unwrap(), Heard::Answer { id: answered, .. } if answered == Some(id)));
    assert!(guarded(one.next()).await.is_err());
    guarded(receiving.finish()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quit_and_stop_give_the_guest_back() {
    let served = served();
    let mut one = client(&served.path).await;
    call(&mut one, "quit", Value::Null).await.unwrap();
    let ended = end(served.serving).await;
    assert_eq!(ended.how, How::Quit);
    assert!(ended.guest.unwrap().machine.is_running() && ended.outcome.is_none());

    let served = migrating_slowly().await;
    served.0.serving.stop("the power is going");
    let ended = end(served.0.serving).await;
    assert_eq!(ended.how, How::Stopped);
    assert_eq!(ended.outcome.unwrap().ending, Ending::Cancelled);
    assert!(ended.guest.unwrap().machine.is_running());
    guarded(served.1.finish()).await;
}

async fn migrating_slowly() -> (Stand, pageferry::Handle) {
    let served = served();
    let (receiving, address, _) = receiver(receive_options());
    let mut one = client(&served.path).await;
    one.send("migrate", &slow(&address)).await.unwrap();
    wait_for_pages(&served.path).await;
    (served, receiving)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_panics_is_not_lost() {
    let served = served();
    let mut one = client(&served.path).await;
    let (receiving, address, _) = receiver(receive_options());
    served.probe.inner.panic_in_save.store(true, Ordering::SeqCst);
    let ended = call(&mut one, "migrate", json!({"to": address.to_string()}))
        .await
        .unwrap();
    assert_eq!(ended["exit_code"], 4);
    guarded(receiving.finish()).await;
    served.probe.assert_unharmed();
    served.probe.inner.fail_resume.store(true, Ordering::SeqCst);
    let error = call(&mut one, "resume", Value::Null).await.unwrap_err();
    assert!(error.contains("vcpu1 does not start"), "{error}");
    assert!(call(&mut one, "status", Value::Null).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_there_is_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let error = ControlClient::connect(&folder.path().join("none"))
        .await
        .map(drop)
        .unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("/none") && error.contains("is a guest served there?"),
        "{error}"
    );
}
