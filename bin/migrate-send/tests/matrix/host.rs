//! A client of a control socket: what the matrix asks hosts, a connection a question. See `docs/control.md`.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A host that was asked, and does not answer for so long, hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Asks the host at `socket`; `None` where nobody answers, an error where it refuses.
pub(crate) fn ask(socket: &Path, method: &str, params: &Value) -> Option<Result<Value, String>> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = json!({"id": 1, "method": method, "params": params});
    writeln!(stream, "{request}").ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    let answer: Value = serde_json::from_str(&line).ok()?;
    // Before a guest is there, whoever comes is told so, without the number of a question.
    if answer["id"].is_null() {
        return None;
    }
    Some(match answer["error"].as_str() {
        Some(error) => Err(error.to_owned()),
        None => Ok(answer["result"].clone()),
    })
}

/// Its guest's state: `running`, `paused`, `migrating`, `unknown` or `ended`.
pub(crate) fn state(socket: &Path) -> Option<String> {
    let status = ask(socket, "status", &json!({}))?.ok()?;
    Some(status["state"].as_str()?.to_owned())
}

/// Whether its guest does something: its driver answers.
pub(crate) fn answers(socket: &Path) -> bool {
    let stats = ask(socket, "balloon-stats", &json!({"timeout_ms": 10_000}));
    matches!(stats, Some(Ok(stats)) if stats["fresh"] == true)
}

/// Whether its guest runs: by its machine's word, or by its driver's.
pub(crate) fn runs_at(socket: &Path) -> bool {
    let status = ask(socket, "status", &json!({}));
    let stats = ask(socket, "balloon-stats", &json!({"timeout_ms": 300}));
    matches!(status, Some(Ok(status)) if status["running"] == true)
        || matches!(stats, Some(Ok(stats)) if stats["fresh"] == true)
}
