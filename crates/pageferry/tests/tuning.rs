//! Settings that change while a migration runs.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use pageferry::control_socket::{ControlClient, ControlListener, Heard, NoControls, serve};
use pageferry::{Compress, Ending, Migration, SendOptions, Tuning};
use pages::Layout;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// At this rate a test's guest would take a day.
const CRAWL: u64 = 16;

/// One whose first batch is on its way in spite of that, and the rest not.
const NO_LIMIT: Tuning = Tuning {
    max_bandwidth: Some(0),
    downtime_limit: None,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_bandwidth_that_is_set_frees_streams_that_wait() {
    for (streams, changes) in [(1, 1), (4, 3)] {
        let (guest, probe) = busy_guest(&Layout::flat(400).unwrap(), None);
        let (receiving, address, made) = receiver(receive_options());
        let options = SendOptions {
            max_bandwidth: Some(CRAWL),
            compress: Compress::None,
            ..send_options(streams)
        };
        let sending = Migration::send(guest, &address, options);
        let tune = sending.tuner();
        let slow = tokio::spawn(async move {
            // Each voids what streams have booked so far.
            for _ in 1..changes {
                tokio::time::sleep(Duration::from_millis(50)).await;
                tune(Tuning {
                    max_bandwidth: Some(CRAWL + 1),
                    ..Tuning::default()
                });
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
            tune(NO_LIMIT);
        });
        let (sent, received) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
        guarded(slow).await.unwrap();
        assert_eq!(sent.outcome.ending, Ending::Completed, "{:?}", sent.outcome.error);
        assert_eq!(received.outcome.ending, Ending::Completed);
        assert!(sent.outcome.report.total_ms > 150.0, "nothing kept it back");
        assert_same_ram(&probe, &made.lock().unwrap()[0], &[]);
    }
}

async fn call(client: &mut ControlClient, method: &str, params: Value) -> Result<Value, String> {
    guarded(client.call(method, &params)).await.unwrap()
}

/// One client migrates, a second one follows, a third one changes the settings half-way: all hear of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_changes_settings_that_another_one_gave() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control");
    let (guest, _) = busy_guest(&Layout::flat(400).unwrap(), None);
    let mut serving = serve(ControlListener::bind(&path).unwrap(), guest, Arc::new(NoControls));
    let (receiving, address, _) = receiver(receive_options());
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(guarded(ControlClient::connect(&path)).await.unwrap());
    }
    let [one, two, three] = &mut clients[..] else { panic!() };
    let early = call(three, "set", json!({"downtime_limit_ms": 5})).await.unwrap_err();
    assert!(early.contains("no migration is under way"), "{early}");
    call(two, "progress", json!({"follow": true})).await.unwrap();
    let params = json!({
        "to": address.to_string(), "compress": "none", "max_bandwidth_bytes_per_s": CRAWL, "downtime_limit_ms": 70,
    });
    one.send("migrate", &params).await.unwrap();
    let set = guarded(async {
        loop {
            match three.call("set", &json!({"downtime_limit_ms": 80})).await.unwrap() {
                Ok(set) => return set,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    });
    let set = set.await;
    assert_eq!(
        set,
        json!({"max_bandwidth_bytes_per_s": CRAWL, "downtime_limit_ms": 80.0})
    );
    let refused = call(three, "set", json!({"streams": 3})).await.unwrap_err();
    assert!(refused.contains("\"streams\" cannot change"), "{refused}");
    let set = call(three, "set", json!({"max_bandwidth_bytes_per_s": 0}))
        .await
        .unwrap();
    assert_eq!(set, json!({"max_bandwidth_bytes_per_s": 0, "downtime_limit_ms": 80.0}));
    let mut heard = Vec::new();
    guarded(async {
        while let Ok(Heard::Event { name, data }) = two.next().await {
            if name == "set" {
                heard.push(data);
            } else if name == "migration-ended" {
                assert_eq!(data["ending"], "completed");
                break;
            }
        }
    })
    .await;
    let limits: Vec<_> = heard.iter().map(|set| &set["max_bandwidth_bytes_per_s"]).collect();
    assert_eq!(limits, [&json!(CRAWL), &json!(0)]);
    guarded(serving.finish()).await;
    assert_eq!(guarded(receiving.finish()).await.outcome.ending, Ending::Completed);
}
