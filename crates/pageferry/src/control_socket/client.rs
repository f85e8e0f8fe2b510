//! A client of a control socket.

use super::lines::{Lines, NoLine};
use crate::Error;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

/// The longest line of a host: a report has an entry a round.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// How long a host may take to accept a client or a request, and to answer, beyond the time that the request gives it.
const WITHIN: Duration = Duration::from_secs(10);

/// The most time that a request gives a host.
const MOST_ASKED_MS: f64 = 10_000.0;

/// Something that a host said.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// An answer.
    Answer {
        /// To which request; `None` where the host could make out none.
        id: Option<u64>,
        /// What came of it, or one sentence on why nothing did.
        result: Result<Value, String>,
    },
    /// An event, by name.
    Event {
        /// Which.
        name: String,
        /// What it says.
        data: Value,
    },
}

/// A connection to a host that serves a guest.
pub struct ControlClient {
    path: PathBuf,
    lines: Lines<OwnedReadHalf>,
    to: OwnedWriteHalf,
    last_id: u64,
}

#[derive(Deserialize)]
struct Line {
    id: Option<u64>,
    #[serde(default, deserialize_with = "given")]
    result: Option<Value>,
    error: Option<String>,
    event: Option<String>,
    #[serde(default)]
    data: Value,
}

/// A result of null is a result.
fn given<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(value).map(Some)
}

impl ControlClient {
    /// Connects.
    ///
    /// # Errors
    /// Nobody serves a guest there.
    pub async fn connect(path: &Path) -> Result<Self, Error> {
        let failed = |why: String| Error::ControlSocket {
            path: path.to_owned(),
            why,
        };
        let stream = match timeout(WITHIN, UnixStream::connect(path)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(failed(format!("{error}; is a guest served there?"))),
            Err(_) => return Err(failed("the host does not accept a connection".to_owned())),
        };
        let (from, to) = stream.into_split();
        Ok(ControlClient {
            path: path.to_owned(),
            lines: Lines::new(from, MAX_ANSWER_BYTES),
            to,
            last_id: 0,
        })
    }

    /// Sends a request; gives its number. `params`: an object, or null for none.
    ///
    /// # Errors
    /// The host is gone, or takes nothing.
    pub async fn send(&mut self, method: &str, params: &Value) -> Result<u64, Error> {
        self.last_id += 1;
        let line = format!("{}\n", json!({"id": self.last_id, "method": method, "params": params}));
        match timeout(WITHIN, self.to.write_all(line.as_bytes())).await {
            Ok(Ok(())) => Ok(self.last_id),
            Ok(Err(error)) => Err(self.failed(error.to_string())),
            Err(_) => Err(self.failed("the host takes no request".to_owned())),
        }
    }

    /// Waits for what the host says next. Cancel-safe.
    ///
    /// # Errors
    /// The host is gone, or what it says makes no sense.
    pub async fn next(&mut self) -> Result<Heard, Error> {
        let why = match self.lines.next().await {
            Ok(line) => match heard(line) {
                Ok(heard) => return Ok(heard),
                Err(why) => why,
            },
            Err(NoLine::End) => "the host has closed the connection".to_owned(),
            Err(NoLine::TooLong) => format!("the host said more than {MAX_ANSWER_BYTES} bytes at once"),
            Err(NoLine::Broken(error)) => error.to_string(),
        };
        Err(self.failed(why))
    }

    /// Sends a request and waits for its answer; events in between are dropped. Only `migrate` is waited for without a
    /// limit: its answer comes at the migration's end.
    ///
    /// # Errors
    /// As [`ControlClient::send`] and [`ControlClient::next`], and that nobody answers. What the host refuses is the inner
    /// error.
    pub async fn call(&mut self, method: &str, params: &Value) -> Result<Result<Value, String>, Error> {
        let Some(within) = answer_within(method, params) else {
            return self.ask(method, params).await;
        };
        match timeout(within, self.ask(method, params)).await {
            Ok(answered) => answered,
            Err(_) => Err(self.failed(format!(
                "nobody answers within {} s: is the host stopped, or busy?",
                within.as_secs_f64()
            ))),
        }
    }

    async fn ask(&mut self, method: &str, params: &Value) -> Result<Result<Value, String>, Error> {
        let sent = self.send(method, params).await;
        loop {
            // A host that turned this client away said why before it closed.
            match self.next().await {
                Ok(Heard::Answer {
                    id: None,
                    result: Err(error),
                }) => return Ok(Err(error)),
                Ok(Heard::Answer { id, result }) if sent.as_ref().ok() == id.as_ref() => return Ok(result),
                Ok(_) => {}
                Err(error) => return Err(sent.err().unwrap_or(error)),
            }
        }
    }

    fn failed(&self, why: String) -> Error {
        Error::ControlSocket {
            path: self.path.clone(),
            why,
        }
    }
}

/// How long a request's answer may take; `None`: as long as it takes.
fn answer_within(method: &str, params: &Value) -> Option<Duration> {
    let asked_ms = match method {
        "migrate" => return None,
        "balloon-stats" => params["timeout_ms"].as_f64().unwrap_or(MOST_ASKED_MS),
        _ => 0.0,
    };
    Some(WITHIN + Duration::from_secs_f64(asked_ms.clamp(0.0, MOST_ASKED_MS) / 1000.0))
}

pub(super) fn heard(line: &[u8]) -> Result<Heard, String> {
    let line: Line =
        serde_json::from_slice(line).map_err(|error| format!("the host's words make no sense: {error}"))?;
    match line {
        Line {
            event: Some(name),
            data,
            ..
        } => Ok(Heard::Event { name, data }),
        Line {
            id, error: Some(error), ..
        } => Ok(Heard::Answer { id, result: Err(error) }),
        Line {
            id,
            result: Some(result),
            ..
        } => Ok(Heard::Answer { id, result: Ok(result) }),
        _ => Err("the host said neither an answer nor an event".to_owned()),
    }
}
