//! What a receiver checks before a source comes, and how it ends without one.
#![allow(clippy::unwrap_used)]

#[path = "../../migrate-send/tests/support/mod.rs"]
mod support;

use rustix::process::Signal;
use std::fs::File;
use std::path::Path;
use support::Running;

const ANY: [&str; 2] = ["--listen", "tcp:127.0.0.1:0"];

#[test]
fn a_port_that_is_taken_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", taken.local_addr().unwrap());
    let ended = Running::refused_receiver(folder.path(), &["--listen", &address]);
    ended.expect(4).says(&address);
    assert_eq!(ended.report()["result"], "failed");
    assert_eq!(ended.report()["role"], "receiver");
}

#[test]
fn nonsense_is_a_usage_error() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, word) in [
        (&["--control", "/run/guest", "--after", "exit"][..], "--control"),
        (&["--console", "/nowhere/console"], "/nowhere/console"),
        (&["--after", "sleep"], "'sleep'"),
        (&["--max-memory", "5000"], "5000"),
    ] {
        Running::refused_receiver(folder.path(), &[&ANY, arguments].concat())
            .expect(2)
            .says(word);
    }
    Running::refused_receiver(folder.path(), &["--listen", "tcp:::1:5"])
        .expect(2)
        .says("brackets");
    Running::refused_receiver(folder.path(), &[]).expect(2).says("--listen");
}

#[test]
fn a_control_socket_that_cannot_be_is_refused_before_a_source_comes() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let arguments = [&ANY[..], &["--control", file.to_str().unwrap()]].concat();
    let ended = Running::refused_receiver(folder.path(), &arguments);
    ended.expect(3).says("something else than a socket lies there");
    assert_eq!(ended.report()["result"], "refused");
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
}

#[test]
fn a_control_socket_is_taken_before_a_source_comes() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let control = ["--control", socket.to_str().unwrap()];
    let first = Running::receiver(folder.path(), &control);
    let late = tempfile::tempdir().unwrap();
    let ended = Running::refused_receiver(late.path(), &[&ANY[..], &control].concat());
    ended
        .expect(3)
        .says("another process serves a guest there, or is about to");
    let asked = Running::command("migrate-send", &[&control[..], &["--status"]].concat()).end();
    asked.expect(4).says("is a guest served there?");
    first.signal(Signal::TERM);
    first.end().expect(5);
    assert!(!socket.exists() && !folder.path().join("s.lock").exists());
}

#[test]
fn a_first_line_that_nobody_can_read_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report.json");
    let mut command = std::process::Command::new(support::program("migrate-recv"));
    command.args(ANY).arg("--report").arg(&report);
    command.stdout(std::fs::File::options().write(true).open("/dev/full").unwrap());
    assert_eq!(command.status().unwrap().code(), Some(4));
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
    assert_eq!(report["result"], "failed");
    assert!(report["error"].as_str().unwrap().contains("stdout"), "{report}");
}

#[test]
fn a_report_that_cannot_be_written_is_refused_before_a_source_comes() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("receiver.json")).unwrap();
    let ended = Running::refused_receiver(folder.path(), &ANY);
    ended.expect(2).says("is a folder");
    assert_eq!(ended.out, "", "it did not listen");
}

#[test]
fn a_guest_that_arrived_outlives_a_stdout_that_nobody_reads() {
    let folder = tempfile::tempdir().unwrap();
    let receiving = Running::unread_receiver(folder.path(), &["--run-for", "0"]);
    Running::source(folder.path(), &receiving.address.clone(), &GUEST)
        .end()
        .expect(0);
    // The sentence about its first check cannot be printed; it runs on until it is told to end.
    receiving.wait_for_stderr("warning: writing to stdout");
    receiving.signal(Signal::TERM);
    let ended = receiving.end();
    ended.expect(0);
    let guest = &ended.report()["guest"];
    assert_eq!(guest["self_check"], "passed");
    assert!(guest["ticks"].as_u64() > Some(0), "{guest}");
}

#[test]
fn a_stderr_that_nobody_reads_costs_no_guest() {
    let folder = tempfile::tempdir().unwrap();
    // The log speaks all the way; a failure is told on stderr alone.
    for format in ["text", "json"] {
        let log = ["--verbose", "--log-format", format];
        let receiving = Running::unheard_receiver(folder.path(), &[&ANY[..], &log, &["--run-for", "200ms"]].concat());
        let address = receiving.address.clone();
        let arguments = [&GUEST[..], &log].concat();
        let sent = Running::unheard_source(folder.path(), &address, &arguments).end();
        sent.expect(0);
        receiving.end().expect(0);
        let failed = Running::unheard_source(folder.path(), &address, &arguments).end();
        failed.expect(4).unharmed();
    }
}

#[test]
fn a_guest_that_arrived_outlives_a_report_that_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let receiving = Running::receiver(folder.path(), &["--run-for", "0"]);
    // It comes in the report's way after the check.
    std::fs::create_dir(folder.path().join("receiver.json")).unwrap();
    Running::source(folder.path(), &receiving.address.clone(), &GUEST)
        .end()
        .expect(0);
    receiving.wait_for_stderr("warning: writing the report");
    receiving.signal(Signal::TERM);
    // The guest counts; that its report is missing, the code says.
    receiving.end().expect(8);
}

#[test]
fn a_signal_ends_the_wait() {
    let folder = tempfile::tempdir().unwrap();
    for signal in [Signal::INT, Signal::TERM] {
        let receiving = Running::receiver(folder.path(), &["--ram", folder.path().join("ram").to_str().unwrap()]);
        receiving.signal(signal);
        let ended = receiving.end();
        ended.expect(5);
        assert_eq!(ended.report()["result"], "cancelled");
        assert!(!folder.path().join("ram").exists());
    }
}

#[test]
fn more_than_the_host_has_is_not_populated() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = [&ANY[..], &["--prealloc", "--max-memory", "4T"]].concat();
    Running::refused_receiver(folder.path(), &arguments)
        .expect(3)
        .says("--prealloc");
}

const GUEST: [&str; 4] = ["--memory", "32M", "--used", "4M"];

/// Sends a small guest to a receiver that rebuilds it in `ram`; gives what the source left.
fn send_to_file(folder: &Path, ram: &Path) -> support::Ended {
    let receiving = Running::receiver(folder, &["--ram", ram.to_str().unwrap(), "--peer-timeout", "2s"]);
    Running::source(folder, &receiving.address.clone(), &GUEST).end()
}

#[test]
fn a_ram_file_in_use_is_refused_and_the_source_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let ram = folder.path().join("ram");
    let held = File::create(&ram).unwrap();
    held.lock().unwrap();
    send_to_file(folder.path(), &ram)
        .expect(3)
        .says("in use by another process")
        .unharmed();
}

#[test]
fn a_ram_file_outlives_a_source_that_only_asks() {
    let folder = tempfile::tempdir().unwrap();
    let ram = folder.path().join("ram");
    std::fs::write(&ram, [7; 1 << 20]).unwrap();
    let receiving = Running::receiver(folder.path(), &["--ram", ram.to_str().unwrap()]);
    let asking = [&GUEST[..], &["--dry-run"]].concat();
    Running::source(folder.path(), &receiving.address.clone(), &asking)
        .end()
        .expect(0);
    assert!(std::fs::read(&ram).unwrap() == [7; 1 << 20], "the file was touched");
    Running::source(folder.path(), &receiving.address.clone(), &GUEST)
        .end()
        .expect(0);
    receiving.end().expect(0);
    assert_eq!(std::fs::metadata(&ram).unwrap().len(), 32 << 20);
}

#[test]
fn a_full_disk_is_refused_and_the_source_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let mount = |command: &str, arguments: &[&str]| {
        std::process::Command::new(command)
            .args(arguments)
            .arg(&disk)
            .status()
            .is_ok_and(|status| status.success())
    };
    if !mount("mount", &["-t", "tmpfs", "-o", "size=1M", "tmpfs"]) {
        println!("SKIPPED: a RAM file on a full disk: a small tmpfs cannot be mounted here (needs root)");
        return;
    }
    let sent = send_to_file(folder.path(), &disk.join("ram"));
    assert!(mount("umount", &[]));
    sent.expect(3).says("its file system has").unharmed();
}

#[test]
fn a_populated_pool_takes_the_guest_that_fits() {
    let folder = tempfile::tempdir().unwrap();
    let receiving = Running::receiver(folder.path(), &["--prealloc", "--max-memory", "32M"]);
    Running::source(
        folder.path(),
        &receiving.address.clone(),
        &[&GUEST[..], &["--verify"]].concat(),
    )
    .end()
    .expect(0);
    receiving.end().expect(0).says("self-check");
}

#[test]
fn a_guest_that_is_to_stay_paused_does_until_a_signal_comes() {
    let folder = tempfile::tempdir().unwrap();
    let receiving = Running::receiver(folder.path(), &["--after", "pause"]);
    Running::source(folder.path(), &receiving.address.clone(), &GUEST)
        .end()
        .expect(0);
    receiving.signal(Signal::TERM);
    let ended = receiving.end();
    ended.expect(0).says("is here, paused");
    assert_eq!(ended.report()["guest"]["self_check"], "passed");
    assert_eq!(ended.report()["guest"]["ticks"], 0);
}
