//! A source and a receiver as an operator starts them: arrival, refusal, failure, cancelling, time-outs.
#![allow(clippy::unwrap_used)]

mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::time::Duration;
use support::{Ended, Running};

/// A small guest that was in use before.
const SMALL: [&str; 6] = ["--memory", "64M", "--used", "16M", "--aged", "24M"];
/// What makes a migration of the small guest last some seconds.
const SLOW: [&str; 4] = ["--max-bandwidth", "24Mbit", "--compress", "none"];

fn run(receiver: &[&str], source: &[&str]) -> (Ended, Ended) {
    let folder = tempfile::tempdir().unwrap();
    let receiving = Running::receiver(folder.path(), receiver);
    let sent = Running::source(folder.path(), &receiving.address.clone(), source).end();
    (sent, receiving.end())
}

fn with<'a>(parts: &[&[&'a str]]) -> Vec<&'a str> {
    parts.concat()
}

fn fates_add_up(report: &Value) {
    let pages = &report["pages"];
    let sum: u64 = ["sent", "zero", "hole", "hinted", "ballooned", "filled"]
        .iter()
        .map(|f| pages[f].as_u64().unwrap())
        .sum();
    assert_eq!(Some(sum), pages["total"].as_u64(), "{pages}");
}

#[test]
fn a_soft_guest_arrives_and_runs_on() {
    for balloon in ["standard", "bitmap", "off"] {
        let (sent, received) = run(&[], &with(&[&SMALL, &["--balloon", balloon, "--verify"]]));
        sent.expect(0);
        received.expect(0).says("guest: runs on; self-check of");
        for report in [sent.report(), received.report()] {
            assert_eq!(
                (&report["result"], &report["verified"]),
                (&"completed".into(), &true.into()),
                "{report}"
            );
            fates_add_up(report);
        }
        assert_eq!(sent.report()["pages"], received.report()["pages"]);
        let guest = &received.report()["guest"];
        assert_eq!(guest["self_check"], "passed");
        assert!(
            guest["pages_checked"].as_u64() >= Some(4096) && guest["ticks"].as_u64() > Some(0),
            "{guest}"
        );
    }
}

#[test]
fn what_the_guest_calls_free_stays_behind() {
    let always = ["--ask", "always"];
    let (sent, received) = run(&[], &with(&[&SMALL, &always]));
    sent.expect(0);
    received.expect(0);
    let (all, received) = run(&[], &with(&[&SMALL, &["--skip", "none"]]));
    all.expect(0);
    received.expect(0);
    let pages = |ended: &Ended, fate: &str| ended.report()["pages"][fate].as_u64().unwrap();
    assert_eq!(pages(&all, "sent"), 16384);
    // 24 MiB of it were used and freed before.
    assert!(
        pages(&sent, "hinted") >= 6144 && pages(&sent, "sent") < 6144,
        "{}",
        sent.report()["pages"]
    );
}

#[test]
fn an_odd_number_of_pages_over_two_streams_and_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", folder.path().join("socket").display());
    let receiving = Running::receiver(folder.path(), &["--listen", &socket]);
    // 64 MiB and 3 pages.
    let guest = [
        "--memory",
        "67121152",
        "--used",
        "16M",
        "--streams",
        "2",
        "--verify",
        "--scatter",
        "0.5",
    ];
    let sent = Running::source(folder.path(), &receiving.address.clone(), &guest).end();
    sent.expect(0);
    receiving.end().expect(0);
    assert_eq!(sent.report()["pages"]["total"], 16387);
    assert_eq!(sent.report()["streams"], 2);
}

#[test]
fn case_11_the_source_prints_the_receivers_reason() {
    let (sent, _received) = run(&["--max-memory", "32M", "--peer-timeout", "2s"], &SMALL);
    sent.expect(3).unharmed();
    let error = sent.report()["error"].as_str().unwrap().to_owned();
    assert!(sent.err.contains(&error), "{error}: {}", sent.err);
    assert!(
        error.contains("33554432") || error.contains("32"),
        "it names the limit: {error}"
    );
    assert_eq!(sent.report()["pages"]["sent"], 0);
}

#[test]
fn a_dry_run_asks_both_sides_and_the_receiver_waits_on() {
    let folder = tempfile::tempdir().unwrap();
    let receiving = Running::receiver(folder.path(), &[]);
    let to = receiving.address.clone();
    let asked = Running::source(folder.path(), &to, &with(&[&SMALL, &["--dry-run"]])).end();
    asked.expect(0);
    assert_eq!(asked.report()["pages"]["sent"], 0);
    Running::source(folder.path(), &to, &SMALL).end().expect(0);
    receiving.end().expect(0);
}

#[test]
fn a_page_that_was_corrupted_on_its_way_is_caught_by_verify() {
    let (sent, received) = run(&["--corrupt-page", "before-verify"], &with(&[&SMALL, &["--verify"]]));
    sent.expect(4).unharmed();
    received.expect(4).says("verif");
    assert_eq!(received.report()["verified"], false);
}

#[test]
fn a_page_that_was_corrupted_after_that_is_caught_by_the_guest_itself() {
    let (sent, received) = run(&["--corrupt-page", "after-verify"], &with(&[&SMALL, &["--verify"]]));
    sent.expect(0);
    received.expect(4).says("the guest came to harm");
    assert_eq!(received.report()["guest"]["self_check"], "failed");
}

/// Waits until pages cross: the receiver's RAM file is there, and not empty.
fn wait_for_pages(file: &std::path::Path) {
    use std::os::unix::fs::MetadataExt;
    for _ in 0..6000 {
        if std::fs::metadata(file).is_ok_and(|meta| meta.blocks() > 0) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("no page came within a minute");
}

/// Starts a slow migration, does `what` to its two sides once pages cross, and gives both ends.
fn in_the_middle(what: impl FnOnce(&Running, &Running)) -> (Ended, Ended) {
    let folder = tempfile::tempdir().unwrap();
    let ram = folder.path().join("ram");
    let receiving = Running::receiver(folder.path(), &["--ram", ram.to_str().unwrap(), "--peer-timeout", "3s"]);
    let to = receiving.address.clone();
    let slow = with(&[&SMALL, &SLOW, &["--peer-timeout", "3s", "--skip", "none"]]);
    let sending = Running::source(folder.path(), &to, &slow);
    wait_for_pages(&ram);
    what(&sending, &receiving);
    let ends = (sending.end(), receiving.end());
    assert!(!ram.exists(), "the unfinished RAM file goes");
    ends
}

#[test]
fn a_cancelled_source_cancels_both_and_keeps_its_guest() {
    for signal in [Signal::INT, Signal::TERM] {
        let (sent, received) = in_the_middle(|source, _| source.signal(signal));
        sent.expect(5).unharmed();
        received.expect(5);
        assert_eq!(received.report()["result"], "cancelled");
    }
}

#[test]
fn a_cancelled_receiver_cancels_both_and_the_source_keeps_its_guest() {
    let (sent, received) = in_the_middle(|_, receiver| receiver.signal(Signal::TERM));
    sent.expect(5).unharmed();
    received.expect(5);
}

#[test]
fn a_receiver_that_dies_costs_the_source_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let ram = folder.path().join("ram");
    let receiving = Running::receiver(folder.path(), &["--ram", ram.to_str().unwrap()]);
    let slow = with(&[&SMALL, &SLOW, &["--skip", "none"]]);
    let sending = Running::source(folder.path(), &receiving.address.clone(), &slow);
    wait_for_pages(&ram);
    receiving.signal(Signal::KILL);
    sending.end().expect(4).unharmed();
}

#[test]
fn a_source_that_dies_leaves_a_receiver_that_says_so() {
    let (_, received) = in_the_middle(|source, _| source.signal(Signal::KILL));
    received.expect(4);
    assert_eq!(received.report()["result"], "failed");
}

#[test]
fn case_13_a_guest_that_is_too_fast_obeys_the_time_out() {
    let fast = [
        "--memory",
        "64M",
        "--used",
        "16M",
        "--workload",
        "churn:20000",
        "--downtime-limit",
        "1ms",
    ];
    let limits = ["--max-bandwidth", "64Mbit", "--compress", "none", "--timeout", "2s"];
    let (sent, received) = run(&[], &with(&[&fast, &limits]));
    sent.expect(6).unharmed();
    // The receiver is told the cause, and ends in the same way.
    received.expect(6).says("time-out of 2 s");
    let (sent, received) = run(&[], &with(&[&fast, &limits, &["--on-timeout", "stop"]]));
    sent.expect(0);
    received.expect(0);
}

#[test]
fn reports_go_to_stdout_without_a_file() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_migrate-send"))
        .args(["--to", "tcp:127.0.0.1:1", "--memory", "16M", "--used", "1M", "--quiet"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["result"], "failed");
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains(report["error"].as_str().unwrap())
    );
}
