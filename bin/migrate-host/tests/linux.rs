//! Guests under this machine's KVM, as an operator starts, watches and moves them: payloads of a few dozen bytes, in the
//! place of a kernel.
#![allow(clippy::unwrap_used)]

#[path = "../../migrate-send/tests/support/mod.rs"]
mod support;

use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{Running, program};

/// Where the ELF's one segment lies, and is entered.
const ENTRY: u64 = 1 << 20;

const COM1: [u8; 5] = [0xba, 0xf8, 0x03, 0x00, 0x00]; // mov edx, 0x3f8

/// Echoes what is typed; at a `q` it switches its power off.
#[rustfmt::skip]
const ECHO: [u8; 21] = [
    0xba, 0xfd, 0x03, 0x00, 0x00, // mov edx, 0x3fd
    0xec,                         // in al, dx
    0xa8, 0x01,                   // test al, 1
    0x74, 0xf6,                   // jz the start
    0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
    0xec,                         // in al, dx
    0xee,                         // out dx, al
    0x3c, 0x71,                   // cmp al, 'q'
    0x75, 0xeb,                   // jne the start
];

#[rustfmt::skip]
const POWER_OFF: [u8; 10] = [
    0xba, 0x00, 0x06, 0x00, 0x00, // mov edx, 0x600
    0xb0, 0x34,                   // mov al, sleep type 5 | enable
    0xee,                         // out dx, al
    0xeb, 0xfe,                   // jmp $
];

/// Writes a generation to 64 pages over and over, and looks first whether each holds the one before: `X` says that one did
/// not, `.` that a sweep is done. After 32,768 turns of a loop in between, so that consoles stay short.
#[rustfmt::skip]
const SWEEPS: [u8; 73] = [
    0xbb, 0x00, 0x00, 0x40, 0x00,             // mov ebx, 0x400000
    0xb9, 0x01, 0x00, 0x00, 0x00,             // mov ecx, 1
    0x48, 0x89, 0xdf,                         // sweep: mov rdi, rbx
    0xbe, 0x40, 0x00, 0x00, 0x00,             // mov esi, 64
    0x48, 0x89, 0xc8,                         // page: mov rax, rcx
    0x48, 0xff, 0xc8,                         // dec rax
    0x48, 0x39, 0x07,                         // cmp [rdi], rax
    0x74, 0x08,                               // je ok
    0xba, 0xf8, 0x03, 0x00, 0x00,             // mov edx, 0x3f8
    0xb0, 0x58,                               // mov al, 'X'
    0xee,                                     // out dx, al
    0x48, 0x89, 0x0f,                         // ok: mov [rdi], rcx
    0x48, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add rdi, 4096
    0xff, 0xce,                               // dec esi
    0x75, 0xdf,                               // jnz page
    0x48, 0xff, 0xc1,                         // inc rcx
    0xba, 0xf8, 0x03, 0x00, 0x00,             // mov edx, 0x3f8
    0xb0, 0x2e,                               // mov al, '.'
    0xee,                                     // out dx, al
    0xb8, 0x00, 0x80, 0x00, 0x00,             // mov eax, 32768
    0xff, 0xc8,                               // wait: dec eax
    0x75, 0xfc,                               // jnz wait
    0xeb, 0xc1,                               // jmp sweep
];

/// Prints a text.
fn prints(text: &str) -> Vec<u8> {
    let chars = text.bytes().flat_map(|byte| [0xb0, byte, 0xee]);
    COM1.into_iter().chain(chars).collect()
}

/// An ELF kernel of one segment, as a file in `folder`.
fn kernel(folder: &Path, parts: &[&[u8]]) -> String {
    let code = parts.concat();
    let mut image = vec![0u8; 0x1000];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01\x01");
    put(16, &[2, 0, 62, 0, 1]);
    put(24, &ENTRY.to_le_bytes());
    put(32, &64u64.to_le_bytes());
    put(52, &[64, 0, 56, 0, 1, 0]);
    put(64, &1u32.to_le_bytes());
    let len = code.len() as u64;
    for (at, value) in [
        (72, 0x1000),
        (80, ENTRY),
        (88, ENTRY),
        (96, len),
        (104, len),
        (112, 0x1000),
    ] {
        put(at, &u64::to_le_bytes(value));
    }
    image.extend_from_slice(&code);
    let path = folder.join("kernel");
    std::fs::write(&path, image).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Whether guests can be run here; says so, loudly, where they cannot.
fn no_kvm(test: &str) -> bool {
    let missing = !Path::new("/dev/kvm").exists();
    if missing {
        println!("SKIPPED: {test}: there is no /dev/kvm");
    }
    missing
}

fn linux(kernel: &str) -> [&str; 6] {
    ["--guest", "linux", "--memory", "64M", "--kernel", kernel]
}

fn with<'a>(parts: &[&[&'a str]]) -> Vec<&'a str> {
    parts.concat()
}

/// The report at the end of a stdout that a console went to as well.
#[track_caller]
fn report_after_console(out: &str) -> (String, Value) {
    let at = out.find("{\n").unwrap_or_else(|| panic!("no report: {out}"));
    (out[..at].to_owned(), serde_json::from_str(&out[at..]).unwrap())
}

#[test]
fn files_that_are_no_kernel_are_refused_by_name() {
    if no_kvm("files that are no kernel") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("notes.txt");
    std::fs::write(&text, "remember the milk\n".repeat(1000)).unwrap();
    let good = kernel(folder.path(), &[&ECHO, &POWER_OFF]);
    let run = |arguments: &[&str]| Running::command("migrate-host", arguments).end();
    for name in [
        "/nowhere/vmlinuz",
        text.to_str().unwrap(),
        folder.path().to_str().unwrap(),
    ] {
        let ended = run(&linux(name));
        ended.expect(3).says(name).says("kernel");
        assert_eq!(ended.err.lines().count(), 1, "{}", ended.err);
    }
    run(&with(&[&linux(&good), &["--initrd", "/nowhere/initrd"]]))
        .expect(3)
        .says("/nowhere/initrd");
    run(&["--guest", "linux", "--kernel", &good, "--memory", "1M"])
        .expect(3)
        .says("too few");
}

#[test]
fn a_guest_that_cannot_go_on_ends_the_command_with_the_sentence() {
    if no_kvm("guests that cannot go on") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // An undefined instruction without anybody to handle it.
    let triple = kernel(folder.path(), &[&[0x0f, 0x0b]]);
    Running::command("migrate-host", &linux(&triple))
        .end()
        .expect(4)
        .says("vCPU 0 cannot go on");
    let popcnt = kernel(folder.path(), &[&[0xf3, 0x48, 0x0f, 0xb8, 0xc0], &POWER_OFF]);
    let ended = Running::command("migrate-host", &linux(&popcnt)).end();
    if ended.code == Some(0) {
        println!("SKIPPED: an instruction that KVM cannot emulate: this machine's KVM runs it");
        return;
    }
    ended
        .expect(4)
        .says("cannot run this kernel")
        .says("0x100000")
        .says("f3");
}

#[test]
fn the_console_leads_in_and_out_and_a_guest_that_powers_off_is_no_failure() {
    if no_kvm("a console") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let kernel = kernel(folder.path(), &[&prints("ready\r\n"), &ECHO, &POWER_OFF]);
    let (host, mut stdin) = Running::typed("migrate-host", &linux(&kernel));
    host.wait_for("ready");
    // Raw bytes, the ones that a terminal would take for itself too.
    stdin.write_all(b"hello\x03\x04\x01x\r\n").unwrap();
    host.wait_for("hello\x03\x04\x01x\r\n");
    stdin.write_all(b"q").unwrap();
    let ended = host.end();
    ended.expect(0).says("guest: ended: it switched its power off");
    assert_eq!(
        ended.out, "ready\r\nhello\x03\x04\x01x\r\nq",
        "stdout is the guest's alone"
    );
}

#[test]
fn a_stdout_that_is_gone_costs_a_warning_and_not_the_guest() {
    if no_kvm("a console that nobody reads") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let kernel = kernel(folder.path(), &[&prints("ready"), &ECHO, &POWER_OFF]);
    let mut child = Command::new(program("migrate-host"))
        .args(linux(&kernel))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"hello q").unwrap();
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(
        err.contains("cannot be written to stdout") && err.contains("power off"),
        "{err}"
    );
}

/// Sweeps on a console; a page that was lost on the way is an error.
#[track_caller]
fn sweeps(console: &Path) -> usize {
    let printed = std::fs::read_to_string(console).unwrap_or_default();
    assert!(!printed.contains('X'), "a page does not hold what the guest wrote");
    printed.matches('.').count()
}

#[track_caller]
fn wait_for_sweeps(console: &Path, more: usize) {
    let (from, began) = (sweeps(console), Instant::now());
    while sweeps(console) < from + more {
        assert!(began.elapsed() < Duration::from_secs(100), "the guest stands still");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn ask(socket: &Path, arguments: &[&str]) -> support::Ended {
    Running::command(
        "migrate-send",
        &with(&[&["--control", socket.to_str().unwrap()], arguments]),
    )
    .end()
}

struct Hop {
    socket: PathBuf,
    console: PathBuf,
    folder: PathBuf,
}

impl Hop {
    fn new(folder: &Path, name: &str) -> Hop {
        let folder = folder.join(name);
        std::fs::create_dir(&folder).unwrap();
        Hop {
            socket: folder.join("sock"),
            console: folder.join("console"),
            folder,
        }
    }

    fn receive(&self, arguments: &[&str]) -> Running {
        let own = [
            "--control",
            self.socket.to_str().unwrap(),
            "--console",
            self.console.to_str().unwrap(),
        ];
        Running::receiver(&self.folder, &with(&[&own, arguments]))
    }

    fn send_to(&self, to: &str, arguments: &[&str]) -> support::Ended {
        let own = ["--control", self.socket.to_str().unwrap()];
        Running::source(&self.folder, to, &with(&[&own, arguments])).end()
    }
}

#[test]
fn a_linux_guest_goes_from_a_to_b_to_c_by_their_sockets() {
    if no_kvm("a Linux guest from host to host") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let kernel = kernel(folder.path(), &[&SWEEPS]);
    let mut at = Hop::new(folder.path(), "a");
    let console = ["--console", at.console.to_str().unwrap()];
    let mut host = Running::host(
        &at.socket,
        &with(&[&linux(&kernel), &console, &["--dirty-tracker", "log"]]),
    );
    wait_for_sweeps(&at.console, 3);
    // Case 32: nobody in there knows of a balloon.
    at.send_to("tcp:127.0.0.1:1", &["--ask", "always"])
        .expect(3)
        .says("driver");
    for (name, tracker) in [("b", "ring"), ("c", "auto")] {
        let next = Hop::new(folder.path(), name);
        let receiver = next.receive(&["--dirty-tracker", tracker]);
        let sent = at.send_to(&receiver.address, &["--verify"]);
        sent.expect(0);
        assert_eq!(sent.report()["verified"], true);
        host.end().expect(0).says("was handed over");
        wait_for_sweeps(&next.console, 3);
        let there = ask(&next.socket, &["--status"]).expect(0).line();
        assert_eq!((&there["state"], &there["kind"]), (&"running".into(), &"linux".into()));
        (host, at) = (receiver, next);
    }
    ask(&at.socket, &["--quit"]).expect(0);
    let ended = host.end();
    ended.expect(0);
    assert_eq!(ended.report()["result"], "completed");
}

#[test]
fn case_05_a_device_that_refuses_leaves_the_guest_where_it_was() {
    if no_kvm("devices that refuse") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let kernel = kernel(folder.path(), &[&SWEEPS]);
    let at = Hop::new(folder.path(), "a");
    let console = ["--console", at.console.to_str().unwrap()];
    let host = Running::host(&at.socket, &with(&[&linux(&kernel), &console]));
    wait_for_sweeps(&at.console, 2);
    let there = Hop::new(folder.path(), "b");
    let receiver = there.receive(&["--refuse-state", "restore"]);
    at.send_to(&receiver.address, &[]).expect(4);
    receiver.end().expect(4);
    wait_for_sweeps(&at.console, 2);
    // The second try is taken, by a receiver whose guest cannot leave again.
    let there = Hop::new(folder.path(), "c");
    let receiver = there.receive(&["--refuse-state", "save"]);
    at.send_to(&receiver.address, &[]).expect(0);
    host.end().expect(0);
    wait_for_sweeps(&there.console, 2);
    let last = Hop::new(folder.path(), "d");
    let refused = last.receive(&[]);
    there.send_to(&refused.address, &[]).expect(4);
    refused.end().expect(4);
    wait_for_sweeps(&there.console, 2);
    receiver.signal(Signal::TERM);
    receiver.end().expect(0);
}

#[test]
fn a_guest_is_sent_when_its_console_says_so_and_reports_come_after_the_console() {
    if no_kvm("a guest that is sent when it is ready") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let kernel = kernel(folder.path(), &[&prints("booting\r\nready\r\n"), &ECHO, &POWER_OFF]);
    let (receiver, mut typing) = Running::typed("migrate-recv", &["--listen", "tcp:127.0.0.1:0"]);
    let to = receiver.wait_for_address();
    let send = with(&[
        &["--to", &to],
        &linux(&kernel)[..],
        &["--send-when", "ready", "--send-after", "10ms"],
    ]);
    let sent = Running::command("migrate-send", &send).end();
    sent.expect(0);
    let (console, report) = report_after_console(&sent.out);
    assert_eq!(
        (console.as_str(), &report["result"]),
        ("booting\r\nready\r\n", &"completed".into())
    );
    typing.write_all(b"here q").unwrap();
    let received = receiver.end();
    received.expect(0).says("guest: ended: it switched its power off");
    let (console, report) = report_after_console(&received.out);
    assert_eq!(console.split_once('\n').unwrap().1, "here q");
    assert_eq!(report["role"], "receiver");
}

#[test]
fn a_guest_that_ends_before_it_is_sent_ends_the_command() {
    if no_kvm("a guest that ends early") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let off = kernel(folder.path(), &[&POWER_OFF]);
    let send = |kernel: &str, more: &[&str]| {
        let all = with(&[&["--to", "tcp:127.0.0.1:1"], &linux(kernel)[..], more]);
        Running::command("migrate-send", &all).end()
    };
    for when in [["--send-after", "1h"], ["--send-when", "login:"]] {
        let ended = send(&off, &when);
        ended
            .expect(4)
            .says("the guest ended before it was sent: it switched its power off");
        assert_eq!(report_after_console(&ended.out).1["result"], "failed");
    }
    let triple = kernel(folder.path(), &[&[0x0f, 0x0b]]);
    send(&triple, &["--send-after", "1h"])
        .expect(4)
        .says("vCPU 0 cannot go on");
}

#[test]
fn a_guest_that_could_not_be_sent_goes_on_here() {
    if no_kvm("a guest that could not be sent") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let kernel = kernel(folder.path(), &[&prints("ready"), &ECHO, &POWER_OFF]);
    let arguments = with(&[&["--to", "tcp:127.0.0.1:1"], &linux(&kernel)[..]]);
    let (sending, mut typing) = Running::typed("migrate-send", &arguments);
    sending.wait_for("guest: goes on here");
    typing.write_all(b"q").unwrap();
    let ended = sending.end();
    ended.expect(4).says("Connection refused").says("power off");
    assert_eq!(report_after_console(&ended.out).1["result"], "failed");
    let asked = Running::command("migrate-send", &with(&[&arguments, &["--dry-run"]])).end();
    asked.expect(4);
}

/// How a command at a terminal is brought to its end.
type Way = Box<dyn Fn(&mut AtTerminal)>;

/// A command at a terminal of its own.
struct AtTerminal {
    child: std::process::Child,
    ours: File,
    theirs: File,
    shown: String,
}

impl AtTerminal {
    /// `None` where setsid, which gives a command its terminal, is missing.
    fn start(arguments: &[&str]) -> Option<AtTerminal> {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
        let theirs = File::options().read(true).write(true).open(name).unwrap();
        let child = Command::new("setsid")
            .arg("--ctty")
            .arg(program("migrate-host"))
            .args(arguments)
            .stdin(theirs.try_clone().unwrap())
            .stdout(theirs.try_clone().unwrap())
            .stderr(theirs.try_clone().unwrap())
            .spawn();
        let Ok(child) = child else {
            println!("SKIPPED: a guest at a terminal: there is no setsid");
            return None;
        };
        Some(AtTerminal {
            child,
            ours: ours.into(),
            theirs,
            shown: String::new(),
        })
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(&self.theirs)
            .unwrap()
            .local_modes
            .contains(LocalModes::ICANON)
    }

    /// Reads until the terminal shows something.
    fn shows(&mut self, words: &str) {
        let mut bytes = [0; 4096];
        while !self.shown.contains(words) {
            let fd = rustix::event::PollFd::new(&self.ours, rustix::event::PollFlags::IN);
            let within = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
            let ready = rustix::event::poll(&mut [fd], Some(&within)).unwrap();
            assert!(ready > 0, "nothing of '{words}': {}", self.shown);
            let read = self.ours.read(&mut bytes).unwrap();
            self.shown.push_str(&String::from_utf8_lossy(&bytes[..read]));
        }
    }

    fn end(mut self) -> Option<i32> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(!self.is_raw(), "the terminal was left raw: {}", self.shown);
                return status.code();
            }
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "it does not end: {}",
                self.shown
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for AtTerminal {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }
    }
}

#[test]
fn a_terminal_is_raw_while_the_guest_runs_and_as_it_was_however_that_ends() {
    if no_kvm("a guest at a terminal") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // It says nothing by itself, which could fall between the command's own words.
    let kernel = kernel(folder.path(), &[&ECHO, &POWER_OFF]);
    let signal = |signal| {
        move |at: &mut AtTerminal| {
            rustix::process::kill_process(rustix::process::Pid::from_child(&at.child), signal).unwrap();
        }
    };
    let types = |bytes: &'static [u8]| move |at: &mut AtTerminal| at.ours.write_all(bytes).unwrap();
    let ways: [(&str, Way); 6] = [
        ("power off", Box::new(types(b"q"))),
        ("Ctrl-A x", Box::new(types(b"\x01x"))),
        ("SIGTERM", Box::new(signal(Signal::TERM))),
        ("SIGINT", Box::new(signal(Signal::INT))),
        ("SIGHUP", Box::new(signal(Signal::HUP))),
        ("SIGQUIT", Box::new(signal(Signal::QUIT))),
    ];
    for (name, way) in ways {
        let Some(mut at) = AtTerminal::start(&linux(&kernel)) else {
            return;
        };
        at.shows("Ctrl-A x ends the command");
        let began = Instant::now();
        while !at.is_raw() {
            assert!(began.elapsed() < Duration::from_secs(60), "never raw: {}", at.shown);
        }
        // Ctrl-C, Ctrl-Z and Ctrl-backslash are the guest's, and so is every second Ctrl-A.
        at.ours.write_all(b"abc\x03\x1a\x1c\x01\x01d").unwrap();
        at.shows("abc\x03\x1a\x1c\x01d");
        way(&mut at);
        assert_eq!(at.end(), Some(0), "{name}");
    }
}
