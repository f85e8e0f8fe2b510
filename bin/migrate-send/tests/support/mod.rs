//! Running the two commands for a test: every wait is bounded, and nothing outlives its test.

// Each test binary uses its own part of this.
#![allow(dead_code)]

use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A hang is a failure; nothing here takes a tenth of that.
const HANG: Duration = Duration::from_secs(120);

/// The command of this name, beside the one that Cargo built for the test.
pub(crate) fn program(name: &str) -> PathBuf {
    let built = option_env!("CARGO_BIN_EXE_migrate-send")
        .or(option_env!("CARGO_BIN_EXE_migrate-recv"))
        .or(option_env!("CARGO_BIN_EXE_migrate-host"))
        .unwrap();
    let path = Path::new(built).with_file_name(name);
    assert!(
        path.exists(),
        "{} is not built: run the tests with --workspace",
        path.display()
    );
    path
}

/// A command under way.
pub(crate) struct Running {
    child: Child,
    out: Option<JoinHandle<String>>,
    err: Option<JoinHandle<String>>,
    /// What stderr has said so far.
    heard: Arc<Mutex<String>>,
    /// What stdout has said so far, of a plain command.
    printed: Arc<Mutex<String>>,
    /// Where it listens, for a receiver.
    pub(crate) address: String,
    /// Its report's file.
    pub(crate) report: PathBuf,
}

/// What a command left.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
    pub(crate) report: Option<Value>,
}

impl Running {
    fn start(name: &str, arguments: &[&str], report: PathBuf) -> (Child, PathBuf) {
        Running::start_with(name, arguments, report, Stdio::null())
    }

    fn start_with(name: &str, arguments: &[&str], report: PathBuf, stdin: Stdio) -> (Child, PathBuf) {
        let mut command = Command::new(program(name));
        command.args(arguments).env_remove("RUST_LOG").stdin(stdin);
        if !report.as_os_str().is_empty() {
            command.arg("--report").arg(&report);
        }
        (
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap(),
            report,
        )
    }

    /// Starts a receiver and waits until it listens.
    pub(crate) fn receiver(folder: &Path, arguments: &[&str]) -> Running {
        let (mut running, out) = Running::listening(folder, arguments);
        running.out = Some(gather(out, Arc::default()));
        running
    }

    /// Like `receiver`, of a command line of the test's own, which is given a report.
    pub(crate) fn receiver_of(mut command: Command, folder: &Path) -> Running {
        let report = folder.join("receiver.json");
        command
            .arg("--report")
            .arg(&report)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let (mut running, out) = Running::first_line(command.spawn().unwrap(), report);
        running.out = Some(gather(out, Arc::default()));
        running
    }

    /// Like `receiver`, but nobody reads its stdout after the first line.
    pub(crate) fn unread_receiver(folder: &Path, arguments: &[&str]) -> Running {
        Running::listening(folder, arguments).0
    }

    /// Like `receiver`, but nobody reads its stderr.
    pub(crate) fn unheard_receiver(folder: &Path, arguments: &[&str]) -> Running {
        let (mut child, report) = Running::start("migrate-recv", arguments, folder.join("receiver.json"));
        drop(child.stderr.take());
        let (mut running, out) = Running::first_line(child, report);
        running.out = Some(gather(out, Arc::default()));
        running
    }

    /// Like `source`, but nobody reads its stderr.
    pub(crate) fn unheard_source(folder: &Path, to: &str, arguments: &[&str]) -> Running {
        let all = [&["--to", to], arguments].concat();
        let (mut child, report) = Running::start("migrate-send", &all, folder.join("source.json"));
        drop(child.stderr.take());
        let out = child.stdout.take().unwrap();
        let mut running = Running::watch(child, report);
        running.out = Some(gather(out, Arc::default()));
        running
    }

    fn listening(folder: &Path, arguments: &[&str]) -> (Running, BufReader<ChildStdout>) {
        let mut all = arguments.to_vec();
        for (flag, value) in [("--listen", "tcp:127.0.0.1:0"), ("--run-for", "200ms")] {
            if !all.contains(&flag) {
                all.extend([flag, value]);
            }
        }
        let (child, report) = Running::start("migrate-recv", &all, folder.join("receiver.json"));
        Running::first_line(child, report)
    }

    fn first_line(mut child: Child, report: PathBuf) -> (Running, BufReader<ChildStdout>) {
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut first = String::new();
        out.read_line(&mut first).unwrap();
        let address = first.trim().strip_prefix("listening on ").map(str::to_owned);
        let mut running = Running::watch(child, report);
        running.address = address.unwrap_or_else(|| panic!("the first line is {first:?}"));
        (running, out)
    }

    /// Starts a receiver that is not expected to listen.
    pub(crate) fn refused_receiver(folder: &Path, arguments: &[&str]) -> Ended {
        let (mut child, report) = Running::start("migrate-recv", arguments, folder.join("receiver.json"));
        let out = child.stdout.take().unwrap();
        let mut running = Running::watch(child, report);
        running.out = Some(gather(out, Arc::default()));
        running.end()
    }

    /// Starts a command of any kind, which is given no report.
    pub(crate) fn command(name: &str, arguments: &[&str]) -> Running {
        let (mut child, report) = Running::start(name, arguments, PathBuf::new());
        let out = child.stdout.take().unwrap();
        let mut running = Running::watch(child, report);
        running.out = Some(gather(out, Arc::clone(&running.printed)));
        running
    }

    /// Starts a command whose stdin is the test's to write, and whose report goes to stdout.
    pub(crate) fn typed(name: &str, arguments: &[&str]) -> (Running, ChildStdin) {
        let (mut child, report) = Running::start_with(name, arguments, PathBuf::new(), Stdio::piped());
        let (out, stdin) = (child.stdout.take().unwrap(), child.stdin.take().unwrap());
        let mut running = Running::watch(child, report);
        running.out = Some(gather(out, Arc::clone(&running.printed)));
        (running, stdin)
    }

    /// The address that a receiver which was started as a plain command says that it listens on.
    pub(crate) fn wait_for_address(&self) -> String {
        self.wait_for("\n");
        let said = self.said();
        let line = said.lines().next().unwrap();
        line.strip_prefix("listening on ")
            .unwrap_or_else(|| panic!("{said}"))
            .to_owned()
    }

    /// Starts a host that serves a guest at `socket`, and waits until it does.
    pub(crate) fn host(socket: &Path, arguments: &[&str]) -> Running {
        let all = [&["--control", socket.to_str().unwrap()], arguments].concat();
        let running = Running::command("migrate-host", &all);
        running.wait_for("it is served at");
        running
    }

    /// Waits until it has said something, on stdout or stderr.
    pub(crate) fn wait_for(&self, words: &str) {
        let began = Instant::now();
        while !self.said().contains(words) {
            assert!(began.elapsed() < HANG, "nothing of '{words}': {}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What it has said so far.
    pub(crate) fn said(&self) -> String {
        format!("{}{}", self.printed.lock().unwrap(), self.heard.lock().unwrap())
    }

    /// Whether it is still there.
    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Starts a source.
    pub(crate) fn source(folder: &Path, to: &str, arguments: &[&str]) -> Running {
        let mut all = vec!["--to", to];
        all.extend(arguments);
        let (mut child, report) = Running::start("migrate-send", &all, folder.join("source.json"));
        let out = child.stdout.take().unwrap();
        let mut running = Running::watch(child, report);
        running.out = Some(gather(out, Arc::default()));
        running
    }

    fn watch(mut child: Child, report: PathBuf) -> Running {
        let heard = Arc::default();
        let err = child.stderr.take().map(|err| gather(err, Arc::clone(&heard)));
        Running {
            child,
            out: None,
            err,
            heard,
            printed: Arc::default(),
            address: String::new(),
            report,
        }
    }

    /// Its exit code, once it has ended by itself.
    pub(crate) fn code(&mut self) -> Option<i32> {
        self.child.try_wait().unwrap()?.code()
    }

    /// Its process.
    pub(crate) fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits until its stderr says something.
    pub(crate) fn wait_for_stderr(&self, words: &str) {
        let began = Instant::now();
        while !self.heard.lock().unwrap().contains(words) {
            assert!(
                began.elapsed() < HANG,
                "nothing of '{words}': {}",
                self.heard.lock().unwrap()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its end.
    pub(crate) fn end(mut self) -> Ended {
        let began = Instant::now();
        let code = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status.code();
            }
            assert!(began.elapsed() < HANG, "{} hangs", self.report.display());
            std::thread::sleep(Duration::from_millis(5));
        };
        let text = |thread: &mut Option<JoinHandle<String>>| {
            thread.take().map_or_else(String::new, |thread| thread.join().unwrap())
        };
        let report = std::fs::read(&self.report)
            .ok()
            .map(|bytes| serde_json::from_slice(&bytes).unwrap());
        Ended {
            code,
            out: text(&mut self.out),
            err: text(&mut self.err),
            report,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }
    }
}

impl Ended {
    /// The report, which must be there.
    pub(crate) fn report(&self) -> &Value {
        self.report.as_ref().unwrap_or_else(|| panic!("no report: {self:?}"))
    }

    /// Checks the exit code; shows everything if it is another.
    #[track_caller]
    pub(crate) fn expect(&self, code: i32) -> &Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }

    /// The line of JSON on its stdout.
    #[track_caller]
    pub(crate) fn line(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }

    /// Checks that stderr or stdout says something.
    #[track_caller]
    pub(crate) fn says(&self, words: &str) -> &Self {
        assert!(
            self.err.contains(words) || self.out.contains(words),
            "nothing of '{words}': {self:#?}"
        );
        self
    }

    /// Checks that a source's guest is still there and well.
    #[track_caller]
    pub(crate) fn unharmed(&self) -> &Self {
        assert_eq!(self.report()["guest"]["self_check"], "passed", "{self:#?}");
        assert!(
            self.report()["guest"]["ticks"].as_u64().unwrap() > 0,
            "it does not run on: {self:#?}"
        );
        self.says("the guest is unharmed")
    }
}

/// Reads until the end; what came so far is in `heard`.
fn gather(from: impl Read + Send + 'static, heard: Arc<Mutex<String>>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut from = from;
        let mut bytes = [0; 4096];
        loop {
            let read = from.read(&mut bytes).unwrap();
            if read == 0 {
                return heard.lock().unwrap().clone();
            }
            heard.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..read]));
        }
    })
}
