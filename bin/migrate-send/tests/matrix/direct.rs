//! A guest that `migrate-send` has started itself: the source is the command, which is killed and stopped with it.

use crate::cell::{Cell, GUEST, HANG, Row, SLOWLY, TIMES, receiver, settled, unharmed};
use crate::faults::{Blow, Harm, Left, Side};
use crate::proxy::{Proxy, poll};
use crate::support::{Ended, Running};
use rustix::process::{Pid, Signal, kill_process};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// What it says when it keeps a guest that it handed over without an answer.
const KEEPS: &str = "stays paused here until";

impl Cell {
    /// Runs it with a guest of the command's own; panics with what went wrong.
    pub(crate) fn run_directly(self) -> Row {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("there.sock");
        let mut receiver = receiver(&folder.path().join("first"), &socket, "tcp:127.0.0.1:0", self.window);
        let source_pid: Arc<OnceLock<Pid>> = Arc::default();
        let (late, receiver_pid) = (Arc::clone(&source_pid), receiver.pid());
        let act = move || {
            let pid = |side| match side {
                Side::Source => *late.wait(),
                Side::Receiver => receiver_pid,
            };
            match self.harm {
                Harm::Process(Blow::Killed(side)) => kill_process(pid(side), Signal::KILL).unwrap(),
                Harm::Process(Blow::Stopped(side)) => kill_process(pid(side), Signal::STOP).unwrap(),
                _ => {}
            }
        };
        let proxy = Proxy::start(&receiver.address, self.phase, self.harm, act);
        let how = ["--connect-timeout", "2s", "--resume-window", self.window];
        let how = [&GUEST[..], &SLOWLY, &TIMES, &how].concat();
        let mut source = Running::source(folder.path(), &proxy.address, &how);
        source_pid.set(source.pid()).unwrap();
        let done = poll(HANG, || match proxy.wait_until_done(Duration::ZERO) {
            true => Some(true),
            false => (!source.is_running()).then_some(false),
        });
        assert_eq!(done, Some(true), "the migration never came so far");
        if self.harm == Harm::Process(Blow::Stopped(Side::Source)) {
            poll(HANG, || settled(&mut receiver, &socket)).expect("the receiver waits for a source that sleeps");
            source.signal(Signal::CONT);
        }
        if self.harm == Harm::Process(Blow::Stopped(Side::Receiver)) {
            poll(HANG, || over(&mut source)).expect("the source waits for a receiver that sleeps");
            receiver.signal(Signal::CONT);
        }
        let (sent, paused) = end(source);
        let left = match self.harm {
            Harm::Process(Blow::Killed(Side::Receiver)) => Left::Killed,
            _ => poll(HANG, || settled(&mut receiver, &socket)).expect("the receiver hangs"),
        };
        self.judge(&sent, paused, left, proxy.has_passed_commit());
        let ram = match left {
            Left::Guest => format!("equal, {}", unharmed(receiver, &socket)),
            _ if matches!(sent.code, Some(4 | 6)) => {
                sent.unharmed();
                "self-checked".to_owned()
            }
            _ => "-".to_owned(),
        };
        let source = sent.code.map_or("killed".to_owned(), |code| code.to_string());
        let runs = match (left, sent.code) {
            (Left::Guest, _) => "receiver",
            (_, Some(4 | 6)) => "source",
            (_, Some(7)) => "none: source paused",
            _ => "none: its host was killed",
        };
        Row([source, left.to_string(), runs.to_owned(), ram])
    }

    /// Holds what became of it against what may.
    fn judge(self, sent: &Ended, paused: bool, left: Left, commit_passed: bool) {
        let killed = self.harm == Harm::Process(Blow::Killed(Side::Source));
        assert_eq!(sent.code.is_none(), killed, "{sent:#?}");
        assert_eq!(sent.code == Some(7), paused, "{sent:#?}");
        // Of a host that was killed, its client says that it does not know.
        let code = sent.code.unwrap_or(7);
        let allowed = self.harm.outcomes(self.phase, self.resumes(), commit_passed);
        let found = allowed.iter().any(|&(c, l, _)| (c, l) == (code, left));
        assert!(found, "{code} and {left:?} are none of {allowed:?}: {sent:#?}");
        let both = left == Left::Guest && matches!(sent.code, Some(4..=6));
        assert!(!both, "BOTH run the guest: {sent:#?}");
    }
}

/// Whether a command has done what it does by itself.
fn over(source: &mut Running) -> Option<()> {
    (source.said().contains(KEEPS) || !source.is_running()).then_some(())
}

/// Waits for its end; one that keeps a paused guest is told to end, as only that ends it.
fn end(mut source: Running) -> (Ended, bool) {
    poll(HANG, || over(&mut source)).expect("the source hangs");
    let keeps = source.is_running() && source.said().contains(KEEPS);
    if keeps {
        source.signal(Signal::TERM);
    }
    (source.end(), keeps)
}
