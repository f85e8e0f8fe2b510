//! Clients of a control socket that do not wait: for their answers, or for each other.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use pageferry::Ending;
use pageferry::control_socket::{
    BalloonStats, ControlClient, ControlListener, GuestControls, How, NoControls, Serving, serve,
};
use pages::Layout;
use serde_json::{Value, json};
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn served(controls: Arc<dyn GuestControls>) -> (tempfile::TempDir, PathBuf, Serving) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control");
    let (guest, _) = busy_guest(&Layout::flat(400).unwrap(), None);
    let serving = serve(ControlListener::bind(&path).unwrap(), guest, controls);
    (folder, path, serving)
}

/// It takes no answers, so that none of its requests is answered; the last one is heard all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_of_a_client_that_hangs_up_at_once_counts() {
    let (_folder, path, serving) = served(Arc::new(NoControls));
    let (receiving, address, _) = receiver(receive_options());
    let mut one = guarded(ControlClient::connect(&path)).await.unwrap();
    let slow = json!({"to": address.to_string(), "max_bandwidth_bytes_per_s": 1000, "compress": "none", "skip": []});
    one.send("migrate", &slow).await.unwrap();
    wait_for_pages(&path).await;
    let mut hasty = UnixStream::connect(&path).unwrap();
    hasty.shutdown(Shutdown::Read).unwrap();
    let mut lines: String = (0..100)
        .map(|id| format!("{}\n", json!({"id": id, "method": "status"})))
        .collect();
    lines += &format!("{}\n", json!({"id": 100, "method": "cancel"}));
    hasty.write_all(lines.as_bytes()).unwrap();
    drop(hasty);
    assert_eq!(guarded(receiving.finish()).await.outcome.ending, Ending::Cancelled);
    serving.stop("the test is over");
}

/// Statistics that do not come until the test says so.
struct Hangs {
    asked: tokio::sync::mpsc::UnboundedSender<()>,
    go_on: Mutex<std::sync::mpsc::Receiver<()>>,
}

impl GuestControls for Hangs {
    fn balloon_stats(&self, _: Duration) -> Result<BalloonStats, String> {
        self.asked.send(()).unwrap();
        // Ends with the test at the latest.
        let _ = self.go_on.lock().unwrap().recv();
        Ok(BalloonStats::default())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_for_the_statistics_that_somebody_else_asked_for() {
    let (asked, mut is_asked) = tokio::sync::mpsc::unbounded_channel();
    let (release, go_on) = std::sync::mpsc::channel();
    let go_on = Mutex::new(go_on);
    let (_folder, path, serving) = served(Arc::new(Hangs { asked, go_on }));
    let mut one = guarded(ControlClient::connect(&path)).await.unwrap();
    let mut two = guarded(ControlClient::connect(&path)).await.unwrap();
    let stats = one.send("balloon-stats", &json!({"timeout_ms": 10_000})).await.unwrap();
    guarded(is_asked.recv()).await.unwrap();
    for (method, running) in [("pause", false), ("resume", true)] {
        let done = guarded(two.call(method, &Value::Null)).await.unwrap().unwrap();
        assert_eq!(done["running"], running);
    }
    release.send(()).unwrap();
    let answer = guarded(one.next()).await.unwrap();
    let pageferry::control_socket::Heard::Answer { id, result } = answer else {
        panic!("{answer:?}");
    };
    assert!(id == Some(stats) && result.is_ok(), "{result:?}");
    serving.stop("the test is over");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_does_not_wait_for_what_hangs() {
    let (asked, mut is_asked) = tokio::sync::mpsc::unbounded_channel();
    let (release, go_on) = std::sync::mpsc::channel();
    let hangs = Hangs {
        asked,
        go_on: Mutex::new(go_on),
    };
    let (_folder, path, mut serving) = served(Arc::new(hangs));
    let mut one = guarded(ControlClient::connect(&path)).await.unwrap();
    one.send("balloon-stats", &json!({"timeout_ms": 10_000})).await.unwrap();
    guarded(is_asked.recv()).await.unwrap();
    serving.stop("the power is going");
    let ended = guarded(serving.finish()).await;
    assert_eq!(ended.how, How::Stopped);
    assert!(ended.guest.unwrap().machine.is_running());
    drop(release);
}
