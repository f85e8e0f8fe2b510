//! One cell of the matrix: a migration, a harm at the end of a phase, and a look at everything that is left.
//!
//! The guest lives at a `migrate-host`, `migrate-send` has it sent through the proxy, and `migrate-recv` serves it once it
//! is there: so both sides can be asked who runs it. What stays at the source is sent once more, to a receiver at the same
//! port and without a proxy.

use crate::faults::{Blow, Harm, Left, Outcome, Runs, Side};
use crate::host::{answers, ask, runs_at, state};
use crate::phases::Phase;
use crate::proxy::{Proxy, poll};
use crate::support::{Ended, Running};
use rustix::process::{Signal, kill_process};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A small guest that was in use before, and writes enough for some rounds at the bandwidth that it gets.
pub(crate) const GUEST: [&str; 8] = [
    "--memory",
    "64M",
    "--used",
    "16M",
    "--aged",
    "24M",
    "--workload",
    "churn:2500",
];
/// How it is sent: slowly, in several rounds, asked for its free pages, compared at the end.
pub(crate) const SLOWLY: [&str; 15] = [
    "--max-bandwidth",
    "200Mbit",
    "--compress",
    "none",
    "--streams",
    "2",
    "--ask",
    "always",
    "--downtime-limit",
    "20ms",
    "--timeout",
    "10s",
    "--on-timeout",
    "stop",
    "--verify",
];
/// Silence after which either side is dead. The machine may be busy.
const PEER_TIMEOUT: Duration = Duration::from_secs(2);
pub(crate) const TIMES: [&str; 2] = ["--peer-timeout", "2s"];
/// The receiver's RAM file, in a cell's folder.
const RAM: &str = "ram";
/// How long a paused guest's RAM is watched. One that runs writes hundreds of pages.
const MOMENT: Duration = Duration::from_millis(200);
/// No migration is taken up again.
pub(crate) const NO_WINDOW: &str = "0s";
/// A hang is a failure.
pub(crate) const HANG: Duration = Duration::from_secs(120);

/// A harm at the end of a phase.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell {
    pub(crate) phase: Phase,
    pub(crate) harm: Harm,
    /// How long a migration whose connections were lost can be taken up again: both sides' `--resume-window`.
    pub(crate) window: &'static str,
}

/// What became of a cell.
#[derive(Debug)]
pub(crate) struct Found {
    outcome: Outcome,
    /// What was compared of the guest's RAM.
    ram: String,
}

/// The processes of a cell.
struct Stage {
    folder: tempfile::TempDir,
    host: Option<Running>,
    host_socket: PathBuf,
    receiver: Option<Running>,
    receiver_socket: PathBuf,
    proxy: Proxy,
    /// Whether the receiver's guest wrote to its RAM before the receiver could know that it is to run.
    ran_early: Arc<AtomicBool>,
    sending: Option<Running>,
}

impl Cell {
    /// Runs it; panics with what went wrong.
    pub(crate) fn run(self) -> Found {
        let mut stage = self.begin();
        let sending = stage.sending.as_mut().unwrap();
        let done = poll(HANG, || match stage.proxy.wait_until_done(Duration::ZERO) {
            true => Some(true),
            false => (!sending.is_running()).then_some(false),
        });
        if done != Some(true) {
            panic!(
                "the migration never came so far: {:#?}",
                stage.sending.take().unwrap().end()
            );
        }
        self.wake(&mut stage);
        self.look(stage)
    }

    fn begin(self) -> Stage {
        let folder = tempfile::tempdir().unwrap();
        let (host_socket, receiver_socket) = (folder.path().join("host.sock"), folder.path().join("there.sock"));
        let host = Running::host(&host_socket, &GUEST);
        let receiver = receiver(
            &folder.path().join("first"),
            &receiver_socket,
            "tcp:127.0.0.1:0",
            self.window,
        );
        let (source_pid, receiver_pid) = (host.pid(), receiver.pid());
        let pid = move |side| match side {
            Side::Source => source_pid,
            Side::Receiver => receiver_pid,
        };
        let (ram, ran_early) = (folder.path().join(RAM), Arc::new(AtomicBool::new(false)));
        let early = Arc::clone(&ran_early);
        let act = move || {
            if self.phase == Phase::CommitHeld {
                early.store(is_written(&ram), Ordering::SeqCst);
            }
            match self.harm {
                Harm::Process(Blow::Killed(side)) => kill_process(pid(side), Signal::KILL).unwrap(),
                Harm::Process(Blow::Stopped(side)) => kill_process(pid(side), Signal::STOP).unwrap(),
                _ => {}
            }
        };
        let proxy = Proxy::start(&receiver.address, self.phase, self.harm, act);
        let sending = send(
            folder.path(),
            &host_socket,
            &proxy.address,
            &[&SLOWLY[..], &["--resume-window", self.window]].concat(),
        );
        Stage {
            folder,
            host: Some(host),
            host_socket,
            receiver: Some(receiver),
            receiver_socket,
            proxy,
            ran_early,
            sending: Some(sending),
        }
    }

    /// Lets a process that was stopped go on, once the other side has done without it.
    fn wake(self, stage: &mut Stage) {
        let Harm::Process(Blow::Stopped(side)) = self.harm else {
            return;
        };
        // With a window it sleeps for longer than the time-out, and not for so long that it is given up.
        let given_up = !self.resumes() || self.phase >= Phase::CommitHeld;
        match side {
            Side::Source => {
                // A receiver that waits for a source does so without end.
                let given_up = given_up && !self.may_wait();
                let patience = if given_up { HANG } else { PEER_TIMEOUT * 3 / 2 };
                let receiver = stage.receiver.as_mut().unwrap();
                let gave_up = poll(patience, || settled(receiver, &stage.receiver_socket));
                assert!(
                    gave_up.is_some() || !given_up,
                    "the receiver waits for a source that sleeps"
                );
                stage.host.as_ref().unwrap().signal(Signal::CONT);
            }
            Side::Receiver => {
                let sending = stage.sending.as_mut().unwrap();
                let patience = if given_up { HANG } else { PEER_TIMEOUT * 3 / 2 };
                let gave_up = poll(patience, || (!sending.is_running()).then_some(()));
                assert!(
                    gave_up.is_some() || !given_up,
                    "the source waits for a receiver that sleeps"
                );
                stage.receiver.as_ref().unwrap().signal(Signal::CONT);
            }
        }
    }

    /// Whether a migration that lost its connections can be taken up again.
    pub(crate) fn resumes(self) -> bool {
        self.window != NO_WINDOW
    }

    /// Whether the receiver may not have believed yet that a source was there.
    fn may_wait(self) -> bool {
        self.phase <= Phase::Hello
    }

    /// Finds out who runs the guest, and whether all of it is there.
    fn look(self, mut stage: Stage) -> Found {
        let sent = stage.sending.take().unwrap().end();
        let code = sent.code.expect("nobody killed it");
        let left = self.left(stage.receiver.as_mut().unwrap(), &stage.receiver_socket);
        let source = self.source(stage.host.as_mut().unwrap(), &stage.host_socket, code);
        let there = left == Left::Guest;
        let runs = match (source, there) {
            (Runs::Source, true) => panic!("BOTH run the guest: {sent:#?}"),
            (_, true) => Runs::Receiver,
            (source, false) => source,
        };
        let outcome = (code, left, runs);
        if let Some(confused) = stage.proxy.confused() {
            panic!("the proxy saw nonsense: {confused}; {outcome:?}");
        }
        let ran_early = stage.ran_early.load(Ordering::SeqCst);
        assert!(
            !ran_early,
            "the guest at the receiver runs before the receiver was told to run it"
        );
        let allowed = self
            .harm
            .outcomes(self.phase, self.resumes(), stage.proxy.has_passed_commit());
        assert!(
            allowed.contains(&outcome),
            "{outcome:?} is none of {allowed:?}: {sent:#?} {:#?}",
            self.words(stage.receiver.take(), left)
        );
        assert!(
            !there || stage.proxy.has_passed_commit(),
            "it runs at the receiver, which was never told to run it"
        );
        if code == 7 && stage.host.as_mut().is_some_and(Running::is_running) {
            assert_eq!(state(&stage.host_socket).as_deref(), Some("unknown"));
            assert!(
                !runs_at(&stage.host_socket),
                "the guest at the source runs, handed over as it is"
            );
            let resume = ask(&stage.host_socket, "resume", &json!({})).expect("the host answers");
            resume.expect_err("the source runs on without being forced to");
        }
        let ram = self.compare(stage, outcome, &sent);
        Found { outcome, ram }
    }

    fn left(self, receiver: &mut Running, socket: &Path) -> Left {
        if self.harm == Harm::Process(Blow::Killed(Side::Receiver)) {
            poll(HANG, || (!receiver.is_running()).then_some(())).unwrap();
            return Left::Killed;
        }
        let patience = if self.may_wait() { 3 * PEER_TIMEOUT } else { HANG };
        match poll(patience, || settled(receiver, socket)) {
            Some(left) => left,
            None if self.may_wait() => Left::Waits,
            None => panic!("the receiver hangs"),
        }
    }

    /// What the source's host says of its guest.
    fn source(self, host: &mut Running, socket: &Path, code: i32) -> Runs {
        if self.harm == Harm::Process(Blow::Killed(Side::Source)) {
            poll(HANG, || (!host.is_running()).then_some(())).unwrap();
            return Runs::Nobody;
        }
        if code == 0 {
            // A host whose guest was handed over ends.
            poll(HANG, || (!host.is_running()).then_some(())).expect("a host without a guest goes on");
            return Runs::Nobody;
        }
        match state(socket).as_deref() {
            Some("running") => Runs::Source,
            Some("unknown") => Runs::PausedAtSource,
            other => panic!("the host's guest is {other:?}"),
        }
    }

    /// What a receiver that ended has said.
    fn words(self, receiver: Option<Running>, left: Left) -> Option<Ended> {
        receiver.filter(|_| matches!(left, Left::Code(_))).map(Running::end)
    }

    /// What a migration that was taken up again says of that; one whose connections were closed must have been.
    fn resumed(self, sent: &Ended) -> String {
        let link = &sent.report()["link"];
        let times = link["resumed"].as_u64().unwrap_or(0);
        let was_closed = !matches!(self.harm, Harm::Process(_)) && self.harm.is_of_the_link();
        if self.resumes() && was_closed && self.phase < Phase::LastRoundEnd {
            assert!(times > 0, "it was not taken up again: {sent:#?}");
        }
        match times {
            0 => String::new(),
            times => format!(
                "; resumed {times}x, {} KiB again",
                link["bytes_again"].as_u64().unwrap() >> 10
            ),
        }
    }

    /// Has the guest, wherever it is, say that it is whole; one that stayed is sent once more before.
    fn compare(self, mut stage: Stage, outcome: Outcome, sent: &Ended) -> String {
        let (code, left, runs) = outcome;
        let receiver = stage.receiver.take().unwrap();
        if runs == Runs::Receiver {
            let verified = code != 0 || sent.report()["verified"] == true;
            assert!(verified, "{sent:#?}");
            let link = self.resumed(sent);
            return format!("equal, {}{link}", unharmed(receiver, &stage.receiver_socket));
        }
        let address = receiver.address.clone();
        let waiting = match left {
            Left::Waits => Some(receiver),
            _ => {
                drop(receiver);
                None
            }
        };
        let host = stage.host.take().unwrap();
        let socket = stage.folder.path().join("again.sock");
        // A receiver that waits has its socket already.
        let socket = if waiting.is_some() {
            stage.receiver_socket.clone()
        } else {
            socket
        };
        let mut again = waiting.unwrap_or_else(|| receiver_again(stage.folder.path(), &socket, &address));
        match runs {
            Runs::Source => assert!(answers(&stage.host_socket), "the guest at the source does nothing"),
            Runs::PausedAtSource => {
                let forced = ask(&stage.host_socket, "resume", &json!({"force": true}));
                forced
                    .expect("the host answers")
                    .expect("an operator may say where it runs");
                assert!(answers(&stage.host_socket), "the guest at the source does nothing");
            }
            Runs::Nobody => return "none left".to_owned(),
            Runs::Receiver => unreachable!(),
        }
        let busy = 3;
        let sent = poll(HANG, || {
            let sent = send(
                &stage.folder.path().join("again"),
                &stage.host_socket,
                &address,
                &["--verify"],
            )
            .end();
            // One that waits may still be busy with what it believes to be a source.
            if sent.code == Some(busy) && again.is_running() {
                None
            } else {
                Some(sent)
            }
        });
        let sent = sent.expect("the receiver takes no source any more");
        sent.expect(0);
        assert_eq!(sent.report()["verified"], true);
        host.end().expect(0);
        format!("again: equal, {}", unharmed(again, &socket))
    }
}

/// What a table's row says of a cell: the exit codes of source and receiver, who runs the guest, what was compared of its RAM.
pub(crate) struct Row(pub(crate) [String; 4]);

impl Found {
    pub(crate) fn row(&self, harm: Harm) -> Row {
        let source_lives = harm != Harm::Process(Blow::Killed(Side::Source));
        let (code, left, runs) = self.outcome;
        let runs = match runs {
            Runs::Source => "source",
            Runs::Receiver if code == 7 && source_lives => "receiver (source paused)",
            Runs::Receiver => "receiver",
            Runs::PausedAtSource => "none: source paused",
            Runs::Nobody => "none: its host was killed",
        };
        Row([code.to_string(), left.to_string(), runs.to_owned(), self.ram.clone()])
    }
}

/// Has the host at `socket` send its guest.
pub(crate) fn send(folder: &Path, socket: &Path, to: &str, how: &[&str]) -> Running {
    std::fs::create_dir_all(folder).unwrap();
    let control = ["--control", socket.to_str().unwrap(), "--connect-timeout", "2s"];
    Running::source(folder, to, &[&control[..], &TIMES, how].concat())
}

/// A receiver that serves its guest at `socket`, once it is there, until it is told to quit.
pub(crate) fn receiver(folder: &Path, socket: &Path, listen: &str, window: &str) -> Running {
    std::fs::create_dir_all(folder).unwrap();
    let serve = ["--control", socket.to_str().unwrap(), "--run-for", "0"];
    let ram = folder.with_file_name(RAM);
    let ram = ["--ram", ram.to_str().unwrap()];
    // A link between name spaces is beyond loopback.
    let listen = ["--listen", listen, "--insecure", "--resume-window", window];
    Running::receiver(folder, &[&serve[..], &ram, &listen, &TIMES].concat())
}

/// Another one where one was before: its port is free at once.
fn receiver_again(folder: &Path, socket: &Path, address: &str) -> Running {
    receiver(&folder.join("second"), socket, address, NO_WINDOW)
}

/// Whether somebody writes to the RAM in this file, in a moment in which a guest that runs would.
fn is_written(ram: &Path) -> bool {
    let before = std::fs::read(ram).unwrap();
    std::thread::sleep(MOMENT);
    before != std::fs::read(ram).unwrap()
}

/// What has become of a receiver, once something has.
pub(crate) fn settled(receiver: &mut Running, socket: &Path) -> Option<Left> {
    if let Some(code) = receiver.code() {
        return Some(Left::Code(code));
    }
    (state(socket).as_deref() == Some("running")).then_some(Left::Guest)
}

/// Checks that the guest at a receiver runs and is whole; says how much of it was looked at.
pub(crate) fn unharmed(receiver: Running, socket: &Path) -> String {
    poll(HANG, || (state(socket).as_deref() == Some("running")).then_some(())).expect("it runs there");
    assert!(answers(socket), "the guest at the receiver does nothing");
    ask(socket, "quit", &json!({})).expect("the receiver answers").unwrap();
    let ended = receiver.end();
    ended.expect(0);
    let report = ended.report();
    assert_eq!(
        (&report["result"], &report["verified"]),
        (&json!("completed"), &json!(true)),
        "{report}"
    );
    let guest = &report["guest"];
    assert_eq!(guest["self_check"], "passed", "{report}");
    assert!(guest["ticks"].as_u64() > Some(0), "{report}");
    format!("{} pages self-checked", guest["pages_checked"])
}
