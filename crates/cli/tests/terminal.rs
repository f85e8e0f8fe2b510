//! A terminal is put back when a thread panics, before the panic says why, and when its guard is dropped.
//!
//! The test runs itself once more at a terminal of its own: raw mode is the process's.
#![allow(clippy::unwrap_used)]

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Termios, tcgetattr};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Set in the process at the terminal: what it does there.
const ROLE: &str = "PAGEFERRY_TEST_TERMINAL";

fn is_raw(termios: &Termios) -> bool {
    !termios
        .local_modes
        .intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
}

/// What the process at the terminal does. It tells the test on stdout, which is a pipe.
fn at_the_terminal(role: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let raw = cli::RawTerminal::enter().unwrap();
        println!("raw");
        // The test has seen it.
        std::io::stdin().read_exact(&mut [0]).unwrap();
        match role {
            "drop" => drop(raw),
            "panic" => {
                let thread = std::thread::spawn(|| panic!("a planted panic"));
                assert!(thread.join().is_err());
                // The process lives on, and so does the guard.
                println!("alive");
                std::thread::sleep(Duration::from_secs(60));
                drop(raw);
            }
            "panic-main" => panic!("a planted panic"),
            other => panic!("{other}"),
        }
    });
    println!("over");
    std::thread::sleep(Duration::from_secs(60));
}

struct Kill(Child);

impl Drop for Kill {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_terminal_is_put_back_by_drop_and_by_panic() {
    if let Ok(role) = std::env::var(ROLE) {
        return at_the_terminal(&role);
    }
    for (role, word) in [("drop", "over"), ("panic", "alive"), ("panic-main", "")] {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
        let terminal = File::options().read(true).write(true).open(name).unwrap();
        let before = tcgetattr(&terminal).unwrap();
        assert!(!is_raw(&before));
        let child = Command::new("setsid")
            .arg("--ctty")
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "a_terminal_is_put_back_by_drop_and_by_panic", "--nocapture"])
            .env(ROLE, role)
            .stdin(terminal.try_clone().unwrap())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let Ok(child) = child else {
            println!("SKIPPED: a terminal that is put back: there is no setsid");
            return;
        };
        let mut child = Kill(child);
        let mut out = BufReader::new(child.0.stdout.take().unwrap());
        let mut says = |word: &str| {
            let mut said = String::new();
            while !said.ends_with(&format!("{word}\n")) {
                assert!(out.read_line(&mut said).unwrap() > 0, "{role}: {said}");
            }
        };
        says("raw");
        assert!(is_raw(&tcgetattr(&terminal).unwrap()), "{role}");
        rustix::io::write(&ours, b"x").unwrap();
        if word.is_empty() {
            let mut err = String::new();
            child.0.stderr.take().unwrap().read_to_string(&mut err).unwrap();
            assert!(err.contains("a planted panic"), "{err}");
        } else {
            says(word);
        }
        let after = tcgetattr(&terminal).unwrap();
        assert_eq!(
            (after.local_modes, after.input_modes, after.output_modes),
            (before.local_modes, before.input_modes, before.output_modes),
            "{role}"
        );
    }
}
