//! A guest that a host serves: asked about, sent on from host to host, and kept when that fails.
#![allow(clippy::unwrap_used)]

#[path = "../../migrate-send/tests/support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use support::{Ended, Running};

const SMALL: [&str; 6] = ["--memory", "64M", "--used", "16M", "--aged", "24M"];

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Folder(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A folder of its own for a command's report.
    fn sub(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    fn receiver(&self, name: &str, arguments: &[&str]) -> (Running, PathBuf) {
        let socket = self.path(&format!("{name}.sock"));
        let all = [
            &[
                "--control",
                socket.to_str().unwrap(),
                "--run-for",
                "0",
                "--listen",
                "tcp:127.0.0.1:0",
            ],
            arguments,
        ]
        .concat();
        (Running::receiver(&self.sub(name), &all), socket)
    }

    fn send(&self, name: &str, socket: &Path, to: &str, arguments: &[&str]) -> Running {
        let all = [&["--control", socket.to_str().unwrap()], arguments].concat();
        Running::source(&self.sub(name), to, &all)
    }
}

fn ask(socket: &Path, arguments: &[&str]) -> Ended {
    let all = [&["--control", socket.to_str().unwrap()], arguments].concat();
    Running::command("migrate-send", &all).end()
}

fn status(socket: &Path) -> Value {
    let ended = ask(socket, &["--status"]);
    ended.expect(0);
    ended.line()
}

fn wait_for_state(socket: &Path, state: &str) {
    for _ in 0..6000 {
        // Before the guest is there nobody answers.
        let ended = ask(socket, &["--status"]);
        if ended.code == Some(0) && ended.line()["state"] == state {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("{}: never {state}", socket.display());
}

/// Waits until pages of the migration that a host is busy with cross.
fn wait_for_pages(socket: &Path) {
    for _ in 0..6000 {
        let ended = ask(socket, &["--progress"]);
        if ended.line()["progress"]["phase"] == "precopy" {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("no page crosses");
}

#[test]
fn a_guest_goes_from_a_to_b_to_c_and_back_to_a() {
    let folder = Folder::new();
    let socket = folder.path("a.sock");
    let mut host = Running::host(
        &socket,
        &[&SMALL[..], &["--workload", "compile", "--vcpus", "2"]].concat(),
    );
    let mut socket = socket;
    for hop in ["b", "c", "a2"] {
        let (receiver, next) = folder.receiver(hop, &[]);
        let sent = folder
            .send("sent", &socket, &receiver.address.clone(), &["--verify"])
            .end();
        sent.expect(0);
        assert_eq!(
            (&sent.report()["role"], &sent.report()["verified"]),
            (&json!("source"), &json!(true))
        );
        // The host it left ends by itself.
        let left = host.end();
        left.expect(0).says("guest: was handed over to tcp:");
        assert!(!socket.exists());
        wait_for_state(&next, "running");
        (host, socket) = (receiver, next);
    }
    host.wait_for_stderr("");
    ask(&socket, &["--quit"]).expect(0);
    let ended = host.end();
    ended.expect(0);
    let guest = &ended.report()["guest"];
    assert_eq!(guest["self_check"], "passed");
    assert!(guest["ticks"].as_u64() > Some(0), "{guest}");
}

#[test]
fn case_20_a_guest_on_its_way_is_left_alone() {
    let folder = Folder::new();
    let socket = folder.path("a.sock");
    let host = Running::host(&socket, &SMALL);
    let (receiver, _) = folder.receiver("b", &[]);
    let to = receiver.address.clone();
    let sending = folder.send(
        "sent",
        &socket,
        &to,
        &["--max-bandwidth", "8Mbit", "--compress", "none", "--skip", "none"],
    );
    wait_for_pages(&socket);
    for request in [
        &["--balloon-target", "16M"][..],
        &["--balloon-stats"],
        &["--pause"],
        &["--resume"],
        &["--quit"],
    ] {
        ask(&socket, request).expect(3).says("is under way").says(&to);
    }
    let second = folder.send("second", &socket, &to, &[]).end();
    second.expect(3).says("a second one cannot begin");
    assert_eq!(second.report()["result"], "refused");
    assert_eq!(status(&socket)["state"], "migrating");
    assert_eq!(
        ask(&socket, &["--progress"]).expect(0).line()["progress"]["total_pages"],
        16384
    );
    ask(&socket, &["--cancel"]).expect(0);
    sending.end().expect(5).says("still its host's");
    receiver.end().expect(5);
    let after = status(&socket);
    assert_eq!(
        (&after["state"], &after["last_migration"]["exit_code"]),
        (&json!("running"), &json!(5))
    );
    ask(&socket, &["--cancel"]).expect(3).says("no migration is under way");
    host.signal(Signal::TERM);
    host.end().expect(0).says("self-check of");
}

#[test]
fn the_balloon_is_steered_and_the_guest_asked() {
    let folder = Folder::new();
    let socket = folder.path("a.sock");
    let host = Running::host(&socket, &SMALL);
    let free = || {
        let ended = ask(&socket, &["--balloon-stats"]);
        let stats = ended.expect(0).line();
        assert_eq!(stats["fresh"], true, "{stats}");
        assert!(stats["age_ms"].as_f64() < Some(60_000.0));
        (
            stats["free_pages"].as_u64().unwrap(),
            stats["actual_pages"].as_u64().unwrap(),
        )
    };
    let before = free().0;
    ask(&socket, &["--balloon-target", "16M"]).expect(0);
    while free().1 != 4096 {}
    assert!(free().0 + 3500 < before, "{before}");
    // What is in the balloon is left behind, and deflated where the guest is then.
    let (receiver, next) = folder.receiver("b", &[]);
    let sent = folder
        .send("sent", &socket, &receiver.address.clone(), &["--ask", "never"])
        .end();
    sent.expect(0);
    assert_eq!(sent.report()["pages"]["ballooned"], 4096);
    host.end().expect(0);
    wait_for_state(&next, "running");
    assert_eq!(status(&next)["balloon"]["target_pages"], 4096);
    ask(&next, &["--balloon-target", "0"]).expect(0);
    while status(&next)["balloon"]["actual_pages"] != 0 {}
    ask(&next, &["--balloon-target", "1T"]).expect(3).says("fit");
    ask(&next, &["--quit"]).expect(0);
    receiver.end().expect(0);
}

#[test]
fn case_06_a_guest_that_was_paused_arrives_paused_and_is_resumed_there() {
    let folder = Folder::new();
    let socket = folder.path("a.sock");
    let host = Running::host(&socket, &SMALL);
    ask(&socket, &["--pause"]).expect(0);
    assert_eq!(status(&socket)["state"], "paused");
    ask(&socket, &["--balloon-stats"])
        .expect(0)
        .says("paused and cannot answer");
    let (receiver, next) = folder.receiver("b", &[]);
    folder
        .send("sent", &socket, &receiver.address.clone(), &[])
        .end()
        .expect(0);
    host.end().expect(0);
    wait_for_state(&next, "paused");
    ask(&next, &["--resume"]).expect(0);
    assert_eq!(status(&next)["state"], "running");
    receiver.signal(Signal::INT);
    receiver.end().expect(0);
}

#[test]
fn a_signal_to_the_client_cancels_and_its_death_does_not() {
    let folder = Folder::new();
    let socket = folder.path("a.sock");
    let host = Running::host(&socket, &SMALL);
    let (receiver, _) = folder.receiver("b", &[]);
    let slow = ["--max-bandwidth", "8Mbit", "--compress", "none", "--skip", "none"];
    let sending = folder.send("sent", &socket, &receiver.address.clone(), &slow);
    wait_for_pages(&socket);
    sending.signal(Signal::INT);
    let ended = sending.end();
    ended.expect(5);
    assert_eq!(ended.report()["result"], "cancelled");
    receiver.end().expect(5);

    let (receiver, next) = folder.receiver("c", &[]);
    let slow = ["--max-bandwidth", "80Mbit", "--compress", "none", "--skip", "none"];
    let sending = folder.send("sent", &socket, &receiver.address.clone(), &slow);
    wait_for_pages(&socket);
    sending.signal(Signal::KILL);
    host.end().expect(0).says("handed over");
    wait_for_state(&next, "running");
    ask(&next, &["--quit"]).expect(0);
    receiver.end().expect(0);
}

#[test]
fn a_signal_to_the_host_cancels_and_ends_it() {
    let folder = Folder::new();
    let socket = folder.path("a.sock");
    let host = Running::host(&socket, &SMALL);
    let (receiver, _) = folder.receiver("b", &[]);
    let slow = ["--max-bandwidth", "8Mbit", "--compress", "none", "--skip", "none"];
    let sending = folder.send("sent", &socket, &receiver.address.clone(), &slow);
    wait_for_pages(&socket);
    host.signal(Signal::TERM);
    host.end().expect(0).says("self-check of");
    let ended = sending.end();
    ended.expect(5).says("which does not answer any more");
    assert!(!ended.out.contains("serves on") && !ended.err.contains("serves on"));
    receiver.end().expect(5);
}

#[test]
fn a_host_that_hangs_holds_no_client_for_good() {
    let folder = Folder::new();
    let socket = folder.path("a.sock");
    let host = Running::host(&socket, &SMALL);
    let (receiver, _) = folder.receiver("b", &["--peer-timeout", "60s"]);
    // As long as this test: none of the two gives up because the host did not run.
    let slow = [
        "--max-bandwidth",
        "8Mbit",
        "--compress",
        "none",
        "--skip",
        "none",
        "--peer-timeout",
        "60s",
    ];
    let sending = folder.send("sent", &socket, &receiver.address.clone(), &slow);
    wait_for_pages(&socket);
    host.signal(Signal::STOP);
    let asking = Running::command("migrate-send", &["--control", socket.to_str().unwrap(), "--status"]);
    sending.signal(Signal::INT);
    sending.wait_for_stderr("asking the host to cancel");
    sending.signal(Signal::INT);
    let ended = sending.end();
    ended.expect(7).says("a second signal came");
    assert_eq!(ended.report()["result"], "unknown");
    asking.end().expect(4).says("nobody answers");
    host.signal(Signal::CONT);
    // A host hears no more of a client that went away, so the first one's word may be lost.
    ask(&socket, &["--cancel"]);
    receiver.end().expect(5);
    wait_for_state(&socket, "running");
    ask(&socket, &["--quit"]).expect(0);
    host.end().expect(0);
}

#[test]
fn what_was_done_is_done_though_nobody_can_be_told() {
    let folder = Folder::new();
    let socket = folder.path("a.sock");
    let host = Running::host(&socket, &SMALL);
    for (request, code, state) in [
        ("--pause", 0, "paused"),
        ("--status", 4, "paused"),
        ("--resume", 0, "running"),
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = std::process::Command::new(support::program("migrate-send"));
        command
            .args(["--control", socket.to_str().unwrap(), request])
            .stdout(full);
        assert_eq!(command.status().unwrap().code(), Some(code), "{request}");
        assert_eq!(status(&socket)["state"], state);
    }
    ask(&socket, &["--quit"]).expect(0);
    host.end().expect(0);
}

#[test]
fn a_host_that_dies_in_the_middle_leaves_its_client_not_knowing() {
    let folder = Folder::new();
    let socket = folder.path("a.sock");
    let host = Running::host(&socket, &SMALL);
    let (receiver, _) = folder.receiver("b", &["--peer-timeout", "3s"]);
    let slow = ["--max-bandwidth", "8Mbit", "--compress", "none", "--skip", "none"];
    let sending = folder.send("sent", &socket, &receiver.address.clone(), &slow);
    wait_for_pages(&socket);
    host.signal(Signal::KILL);
    let ended = sending.end();
    ended.expect(7).says("nobody here knows");
    assert_eq!(ended.report()["result"], "unknown");
    receiver.end().expect(4);
    // The socket that it left is taken over; one that is in use is not.
    host.end();
    assert!(socket.exists());
    let host = Running::host(&socket, &SMALL);
    let late = Running::command(
        "migrate-host",
        &["--control", socket.to_str().unwrap(), "--memory", "64M"],
    )
    .end();
    late.expect(3).says("another process serves a guest there");
    ask(&socket, &["--quit"]).expect(0);
    host.end().expect(0);
}

#[test]
fn a_migration_that_fails_leaves_the_guest_served() {
    let folder = Folder::new();
    let socket = folder.path("a.sock");
    let mut host = Running::host(&socket, &SMALL);
    let failed = folder.send("sent", &socket, "tcp:127.0.0.1:1", &[]).end();
    failed.expect(4).says("Connection refused").says("still its host's");
    let (receiver, _) = folder.receiver("b", &["--max-memory", "32M"]);
    let refused = folder
        .send("sent", &socket, &receiver.address.clone(), &["--dry-run"])
        .end();
    refused.expect(3).says("33554432");
    receiver.signal(Signal::TERM);
    receiver.end().expect(5);
    assert!(host.is_running());
    let (receiver, _) = folder.receiver("c", &[]);
    folder
        .send("sent", &socket, &receiver.address.clone(), &["--dry-run"])
        .end()
        .expect(0);
    assert_eq!(status(&socket)["state"], "running");
    receiver.signal(Signal::TERM);
    receiver.end().expect(5);
    host.signal(Signal::TERM);
    host.end().expect(0).says("self-check of");
}

#[test]
fn nobody_there_is_one_sentence() {
    let folder = Folder::new();
    let ended = ask(&folder.path("none"), &["--status"]);
    ended.expect(4).says("is a guest served there?");
    assert_eq!(ended.err.lines().count(), 1, "{}", ended.err);
    let ended = folder.send("sent", &folder.path("none"), "tcp:127.0.0.1:1", &[]).end();
    ended.expect(4).says("is a guest served there?");
    assert_eq!(ended.report()["result"], "failed");
}

#[test]
fn a_guest_in_a_file_is_served_too() {
    let folder = Folder::new();
    let ram = folder.path("ram");
    std::fs::write(&ram, vec![7; 4 << 20]).unwrap();
    let socket = folder.path("a.sock");
    let host = Running::host(&socket, &["--guest", "file", "--ram", ram.to_str().unwrap()]);
    assert_eq!(status(&socket)["kind"], "file");
    ask(&socket, &["--balloon-stats"]).expect(3).says("no balloon");
    // Case 32: it cannot be asked.
    let (receiver, next) = folder.receiver("b", &[]);
    let to = receiver.address.clone();
    folder
        .send("sent", &socket, &to, &["--ask", "always"])
        .end()
        .expect(3)
        .says("--ask always");
    folder.send("sent", &socket, &to, &["--verify"]).end().expect(0);
    host.end().expect(0);
    wait_for_state(&next, "paused");
    ask(&next, &["--quit"]).expect(0);
    receiver.end().expect(0);
}
