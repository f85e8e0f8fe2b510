//! What the commands gave up, as the kernel sees it, of every thread that they have.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::fd::AsRawFd;
use support::Running;

/// The lines of a thread's status that tell.
const INSIDE: [&str; 2] = ["NoNewPrivs:\t1", "Seccomp:\t2"];

/// How many threads of the process have given everything up, and how many have not.
fn threads(pid: rustix::process::Pid) -> (usize, usize) {
    let (mut inside, mut outside) = (0, 0);
    for task in fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).unwrap() {
        // A thread may have ended since.
        let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else {
            continue;
        };
        match INSIDE.iter().all(|line| status.contains(line)) {
            true => inside += 1,
            false => outside += 1,
        }
    }
    (inside, outside)
}

#[track_caller]
fn is_inside(command: &Running) {
    let (inside, outside) = threads(command.pid());
    assert!(
        inside >= 2 && outside == 0,
        "{inside} threads inside, {outside} outside: {}",
        command.said()
    );
}

/// A source that is under way until it is told to end.
const SLOWLY: [&str; 8] = [
    "--memory",
    "64M",
    "--used",
    "48M",
    "--max-bandwidth",
    "8Mbit",
    "--compress",
    "none",
];

#[test]
fn both_sides_have_given_up_what_they_do_not_need_while_they_serve() {
    let folder = tempfile::tempdir().unwrap();
    let receiver = Running::receiver(folder.path(), &[]);
    is_inside(&receiver);
    let source = Running::source(
        folder.path(),
        &receiver.address,
        &[&SLOWLY[..], &["--verbose"]].concat(),
    );
    source.wait_for_stderr("connected");
    is_inside(&source);
    is_inside(&receiver);
    source.signal(rustix::process::Signal::INT);
    source.end().expect(5).unharmed();
    receiver.end().expect(5);
}

#[test]
fn a_host_has_too() {
    let folder = tempfile::tempdir().unwrap();
    let host = Running::host(&folder.path().join("host"), &["--memory", "16M", "--used", "8M"]);
    is_inside(&host);
    host.signal(rustix::process::Signal::TERM);
    host.end().expect(0);
}

#[test]
fn who_is_told_to_keeps_it() {
    let folder = tempfile::tempdir().unwrap();
    let receiver = Running::receiver(folder.path(), &["--no-sandbox"]);
    let (inside, outside) = threads(receiver.pid());
    assert!(inside == 0 && outside >= 2, "{inside} {outside}");
}

/// A VMM's memory is reached by /proc, and no other process is looked into from inside.
#[test]
fn the_memory_of_another_process_is_opened_before() {
    let folder = tempfile::tempdir().unwrap();
    let memory = fs::File::from(rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    memory.set_len(16 << 20).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    let receiver = Running::receiver(folder.path(), &["--after", "exit"]);
    let source = Running::source(
        folder.path(),
        &receiver.address,
        &["--guest", "file", "--ram", &path, "--verify"],
    );
    source.end().expect(0);
    receiver.end().expect(0);
}
