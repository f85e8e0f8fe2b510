//! A process that may open few files only.
#![allow(clippy::unwrap_used)]

mod support;

use std::net::TcpStream;
use std::process::{Command, Output, Stdio};
use support::{Ended, Running, program};

/// Runs a command under a limit that `ulimit` is given.
fn limited(limit: &str, name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let line = format!("ulimit {limit} && exec \"$0\" \"$@\"");
    command.args(["-c", &line]).arg(program(name)).args(arguments);
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

#[track_caller]
fn refused(output: &Output, files: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    let named = said.contains(&format!("may have {files} files open")) && said.contains("ulimit -n");
    assert!(
        output.status.code() == Some(3) && named && said.lines().count() == 1,
        "{output:?}"
    );
}

#[test]
fn a_command_that_may_open_too_few_files_says_so_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}/s", folder.path().display());
    // At some of these, what a runtime cannot open would be a panic.
    for files in ["8", "12", "14", "16", "18", "20", "24", "63"] {
        let limit = format!("-n {files}");
        refused(
            &limited(&limit, "migrate-recv", &["--listen", &socket])
                .output()
                .unwrap(),
            files,
        );
        let source = limited(&limit, "migrate-send", &["--to", &socket, "--memory", "16M"]);
        refused(&{ source }.output().unwrap(), files);
        let control = folder.path().join("c");
        let host = limited(
            &limit,
            "migrate-host",
            &["--memory", "16M", "--control", control.to_str().unwrap()],
        );
        refused(&{ host }.output().unwrap(), files);
    }
}

/// A soft limit is raised; and under the least hard one, more silent peers than there are files keep nobody out.
#[test]
fn a_receiver_that_runs_out_of_files_serves_the_right_source_nevertheless() {
    for limit in ["-S -n 16", "-n 64"] {
        let folder = tempfile::tempdir().unwrap();
        let arguments = ["--listen", "tcp:127.0.0.1:0", "--run-for", "200ms"];
        let receiver = Running::receiver_of(limited(limit, "migrate-recv", &arguments), folder.path());
        let at = receiver.address.strip_prefix("tcp:").unwrap();
        let silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(at).unwrap()).collect();
        let source = Running::source(folder.path(), &receiver.address, &["--memory", "16M", "--verify"]).end();
        let receiver: Ended = receiver.end();
        assert_eq!(
            (source.code, receiver.code),
            (Some(0), Some(0)),
            "{limit}: {source:?} {receiver:?}"
        );
        drop(silent);
    }
}
