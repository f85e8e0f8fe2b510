//! Requests, answers and events as lines of JSON.
//!
//! What a client sends is untrusted: a request is parsed here as a whole, or answered with one sentence that says what is
//! wrong with it. Nothing of it is repeated at length.

use super::params::{MigrateParams, SetParams, duration, ms};
use engine::{Ending, Outcome, Phase, Progress, Report, Tuning};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::Duration;

/// The most characters of an error.
const MAX_ERROR_CHARS: usize = 600;

/// How long `balloon-stats` waits for the guest unless told otherwise, and at most.
const STATS_WITHIN: Duration = Duration::from_secs(1);
const MAX_STATS_WITHIN: Duration = Duration::from_secs(10);

/// What a client asks for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Method {
    /// Who answers.
    Version,
    /// What the guest does.
    Status,
    /// How far the migration is; `follow` turns events to this client on or off.
    Progress { follow: Option<bool> },
    /// Ends the migration under way.
    Cancel,
    /// Changes its settings.
    Set(Tuning),
    /// Something that is done to the guest.
    Guest(Operation),
}

/// What is done to a guest, one at a time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operation {
    Migrate(Box<MigrateParams>),
    Pause,
    /// `force`: though nobody knows whether the guest runs elsewhere.
    Resume {
        force: bool,
    },
    Balloon {
        pages: u64,
    },
    BalloonStats {
        within: Duration,
    },
    Quit,
}

/// The methods by name.
const METHODS: &str = "version, status, migrate, progress, cancel, set, pause, resume, balloon, balloon-stats, quit";

/// A request that makes sense.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) method: Method,
}

/// A request that does not: its number, where it has one, and one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Malformed {
    pub(crate) id: Option<u64>,
    pub(crate) error: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRequest {
    id: u64,
    method: String,
    #[serde(default)]
    params: Value,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ProgressParams {
    follow: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ResumeParams {
    force: bool,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct BalloonParams {
    pages: Option<u64>,
    bytes: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct StatsParams {
    timeout_ms: Option<f64>,
}

/// Reads a line.
pub(crate) fn parse(line: &[u8]) -> Result<Request, Malformed> {
    let malformed = |id, error: String| Malformed {
        id,
        error: shortened(&error),
    };
    let value: Value = serde_json::from_slice(line).map_err(|e| malformed(None, format!("this is no JSON: {e}")))?;
    let id = value.get("id").and_then(Value::as_u64);
    let raw: RawRequest = serde_json::from_value(value).map_err(|e| {
        let form = "a request is {\"id\":1,\"method\":\"status\",\"params\":{}}";
        malformed(id, format!("{form}: {e}"))
    })?;
    let method = method(&raw.method, raw.params).map_err(|error| malformed(id, error))?;
    Ok(Request { id: raw.id, method })
}

fn method(name: &str, params: Value) -> Result<Method, String> {
    Ok(match name {
        "version" => none(name, params, Method::Version)?,
        "status" => none(name, params, Method::Status)?,
        "cancel" => none(name, params, Method::Cancel)?,
        "set" => Method::Set(read::<SetParams>(name, params)?.tuning()?),
        "progress" => {
            let ProgressParams { follow } = read(name, params)?;
            Method::Progress { follow }
        }
        _ => Method::Guest(operation(name, params)?),
    })
}

fn operation(name: &str, params: Value) -> Result<Operation, String> {
    Ok(match name {
        "migrate" => Operation::Migrate(Box::new(read(name, params)?)),
        "pause" => none(name, params, Operation::Pause)?,
        "resume" => {
            let ResumeParams { force } = read(name, params)?;
            Operation::Resume { force }
        }
        "balloon" => Operation::Balloon {
            pages: balloon_pages(&read(name, params)?)?,
        },
        "balloon-stats" => {
            let StatsParams { timeout_ms } = read(name, params)?;
            let within = timeout_ms.map_or(Ok(STATS_WITHIN), |ms| duration("timeout_ms", ms))?;
            if within > MAX_STATS_WITHIN {
                let most = ms(MAX_STATS_WITHIN);
                return Err(format!(
                    "balloon-stats: \"timeout_ms\": give {most:.0} milliseconds at most"
                ));
            }
            Operation::BalloonStats { within }
        }
        "quit" => none(name, params, Operation::Quit)?,
        _ => {
            return Err(format!(
                "there is no method {:?}: give one of {METHODS}",
                shortened(name)
            ));
        }
    })
}

fn balloon_pages(params: &BalloonParams) -> Result<u64, String> {
    match (params.pages, params.bytes) {
        (Some(pages), None) => Ok(pages),
        (None, Some(bytes)) if bytes.is_multiple_of(pages::PAGE_BYTES) => Ok(bytes / pages::PAGE_BYTES),
        (None, Some(bytes)) => Err(format!("balloon: {bytes} bytes are not a whole number of 4 KiB pages")),
        _ => Err("balloon needs one of \"pages\" and \"bytes\"".to_owned()),
    }
}

/// Reads parameters; none at all are an empty object.
fn read<T: Default + for<'a> Deserialize<'a>>(name: &str, params: Value) -> Result<T, String> {
    match params {
        Value::Null => Ok(T::default()),
        params => serde_json::from_value(params).map_err(|error| format!("{name}: {error}")),
    }
}

fn none<T>(name: &str, params: Value, method: T) -> Result<T, String> {
    read::<Nothing>(name, params).map(|Nothing {}| method)
}

/// One line, of a bounded length.
pub(crate) fn shortened(text: &str) -> String {
    let line: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_ERROR_CHARS)
        .collect();
    if text.chars().nth(MAX_ERROR_CHARS).is_some() {
        return format!("{line}...");
    }
    line
}

/// An answer as a line.
pub(crate) fn answer(id: Option<u64>, result: &Result<Value, String>) -> String {
    let value = match result {
        Ok(result) => json!({"id": id, "result": result}),
        Err(error) => json!({"id": id, "error": error}),
    };
    format!("{value}\n")
}

/// An event as a line.
pub(crate) fn event(name: &str, data: &Value) -> String {
    format!("{}\n", json!({"event": name, "data": data}))
}

/// How far a migration is, as it crosses the socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProgressData {
    /// `connecting`, `setup`, `precopy`, `switchover`, `committed`, `undoing` or `finished`.
    pub phase: String,
    /// The round under way, from 0.
    pub round: u32,
    /// Pages of it that are still to be sent.
    pub pending_pages: u64,
    /// Pages sent so far, in all rounds.
    pub sent_pages: u64,
    /// Pages of guest RAM.
    pub total_pages: u64,
    /// Bytes that crossed on the data streams.
    pub wire_bytes: u64,
    /// The rate at which the guest wrote.
    pub dirty_bytes_per_s: f64,
    /// The measured bandwidth, of bytes on the wire; null before the first round is over.
    pub bandwidth_bytes_per_s: Option<f64>,
    /// The downtime to expect if the guest were paused now; null before anything was measured.
    pub expected_downtime_ms: Option<f64>,
}

const PHASES: [(Phase, &str); 7] = [
    (Phase::Connecting, "connecting"),
    (Phase::Setup, "setup"),
    (Phase::Precopy, "precopy"),
    (Phase::Switchover, "switchover"),
    (Phase::Committed, "committed"),
    (Phase::Undoing, "undoing"),
    (Phase::Finished, "finished"),
];

impl From<&Progress> for ProgressData {
    fn from(progress: &Progress) -> Self {
        let phase = PHASES.iter().find(|(phase, _)| *phase == progress.phase);
        ProgressData {
            phase: phase.map_or("", |(_, name)| name).to_owned(),
            round: progress.round,
            pending_pages: progress.pending_pages,
            sent_pages: progress.sent_pages,
            total_pages: progress.total_pages,
            wire_bytes: progress.wire_bytes,
            dirty_bytes_per_s: progress.dirty_bytes_per_s,
            bandwidth_bytes_per_s: progress.bandwidth_bytes_per_s,
            expected_downtime_ms: progress.expected_downtime.map(ms),
        }
    }
}

impl ProgressData {
    /// As the library has it; a phase that this program does not know counts as precopy.
    pub fn to_progress(&self) -> Progress {
        let phase = PHASES.iter().find(|(_, name)| *name == self.phase);
        let expected = self.expected_downtime_ms.and_then(|ms| duration("", ms).ok());
        Progress {
            phase: phase.map_or(Phase::Precopy, |(phase, _)| *phase),
            round: self.round,
            pending_pages: self.pending_pages,
            sent_pages: self.sent_pages,
            total_pages: self.total_pages,
            wire_bytes: self.wire_bytes,
            dirty_bytes_per_s: self.dirty_bytes_per_s,
            bandwidth_bytes_per_s: self.bandwidth_bytes_per_s,
            expected_downtime: expected,
        }
    }
}

/// The result of `migrate`: how it ended. An error in its place says that it was not begun.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MigrationEnd {
    /// How.
    pub ending: Ending,
    /// What `migrate-send` exits with.
    pub exit_code: u8,
    /// Why, unless it completed.
    pub error: Option<String>,
    /// The source's figures.
    pub report: Report,
}

impl From<&Outcome> for MigrationEnd {
    fn from(outcome: &Outcome) -> Self {
        MigrationEnd {
            ending: outcome.ending,
            exit_code: outcome.ending.exit_code(),
            error: outcome.error.clone(),
            report: outcome.report.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(line: &str) -> Malformed {
        parse(line.as_bytes()).unwrap_err()
    }

    #[test]
    fn every_method_is_read() {
        let method = |text: &str| parse(text.as_bytes()).unwrap().method;
        assert_eq!(method(r#"{"id":1,"method":"status"}"#), Method::Status);
        assert_eq!(method(r#"{"id":1,"method":"version","params":null}"#), Method::Version);
        assert_eq!(
            method(r#"{"id":1,"method":"progress","params":{"follow":true}}"#),
            Method::Progress { follow: Some(true) }
        );
        assert_eq!(
            method(r#"{"id":1,"method":"balloon","params":{"bytes":8192}}"#),
            Method::Guest(Operation::Balloon { pages: 2 })
        );
        assert_eq!(
            method(r#"{"id":1,"method":"balloon-stats"}"#),
            Method::Guest(Operation::BalloonStats { within: STATS_WITHIN })
        );
        for name in METHODS.split(", ") {
            let params = match name {
                "balloon" => json!({"pages": 1}),
                "set" => json!({"downtime_limit_ms": 1}),
                "migrate" => json!({"to": "unix:/x"}),
                _ => json!({}),
            };
            let line = json!({"id": 7, "method": name, "params": params}).to_string();
            assert_eq!(parse(line.as_bytes()).unwrap().id, 7, "{name}");
        }
    }

    #[test]
    fn the_documentation_speaks_the_protocol() {
        let text = include_str!("../../../../docs/control.md");
        let (mut asked, mut said) = (Vec::new(), 0);
        for line in text.lines() {
            if let Some(request) = line.strip_prefix("-> ") {
                match parse(request.as_bytes()) {
                    Ok(Request { id, .. }) => asked.push(id),
                    Err(Malformed { error, .. }) => assert!(error.contains("no method \"fly\""), "{line}: {error}"),
                }
            } else if let Some(answer) = line.strip_prefix("<- ") {
                let value: Value = serde_json::from_str(answer).unwrap_or_else(|error| panic!("{line}: {error}"));
                assert!(value["id"].is_u64() || value["event"].is_string(), "{line}");
                said += 1;
            }
        }
        assert!(asked.len() >= 10 && said > asked.len());
        for name in METHODS.split(", ") {
            assert!(text.contains(&format!("\"method\":\"{name}\"")), "{name} is not there");
        }
        let params = serde_json::to_value(MigrateParams::default()).unwrap();
        for name in params.as_object().unwrap().keys() {
            assert!(text.contains(&format!("| `{name}` |")), "{name} is not there");
        }
    }

    #[test]
    fn what_makes_no_sense_is_named_with_its_number() {
        for (line, id, word) in [
            ("", None, "no JSON"),
            ("hello", None, "no JSON"),
            ("[1,2]", None, "a request is"),
            (r#"{"method":"status"}"#, None, "`id`"),
            (r#"{"id":-1,"method":"status"}"#, None, "a request is"),
            (r#"{"id":3}"#, Some(3), "`method`"),
            (r#"{"id":3,"method":"fly"}"#, Some(3), "balloon-stats"),
            (r#"{"id":3,"method":"status","params":{"a":1}}"#, Some(3), "`a`"),
            (r#"{"id":3,"method":"status","params":7}"#, Some(3), "status"),
            (r#"{"id":3,"method":"status","more":7}"#, Some(3), "`more`"),
            (r#"{"id":3,"method":"balloon"}"#, Some(3), "one of"),
            (
                r#"{"id":3,"method":"balloon","params":{"pages":1,"bytes":4096}}"#,
                Some(3),
                "one of",
            ),
            (
                r#"{"id":3,"method":"balloon","params":{"bytes":4097}}"#,
                Some(3),
                "4097",
            ),
            (
                r#"{"id":3,"method":"balloon","params":{"pages":1e9}}"#,
                Some(3),
                "balloon",
            ),
            (
                r#"{"id":3,"method":"balloon-stats","params":{"timeout_ms":1e7}}"#,
                Some(3),
                "10000",
            ),
            (r#"{"id":3,"method":"migrate","params":{"tto":"x"}}"#, Some(3), "`tto`"),
            (r#"{"id":3,"method":"set"}"#, Some(3), "downtime_limit_ms"),
            (r#"{"id":3,"method":"set","params":{"speed":1}}"#, Some(3), "`speed`"),
            (r#"{"id":3,"method":"set","params":{"streams":2}}"#, Some(3), "streams"),
            (
                r#"{"id":3,"method":"set","params":{"downtime_limit_ms":-1}}"#,
                Some(3),
                "downtime_limit_ms",
            ),
            (
                r#"{"id":3,"method":"set","params":{"max_bandwidth_bytes_per_s":1.5}}"#,
                Some(3),
                "set",
            ),
        ] {
            let refused = refused(line);
            assert_eq!(refused.id, id, "{line}");
            assert!(refused.error.contains(word), "{line}: {}", refused.error);
        }
    }

    #[test]
    fn an_error_repeats_nothing_at_length_and_stays_on_its_line() {
        let long = "x\n".repeat(100_000);
        let line = json!({"id": 1, "method": long}).to_string();
        let error = refused(&line).error;
        assert!(
            error.len() < 2 * MAX_ERROR_CHARS && !error.contains('\n'),
            "{}",
            error.len()
        );
        // JSON that is nested a million deep is no reason to run out of stack.
        assert!(refused(&"[".repeat(1 << 20)).error.contains("no JSON"));
        let answer = answer(None, &Err("two\nlines".to_owned()));
        assert_eq!(answer.matches('\n').count(), 1);
    }

    #[test]
    fn progress_goes_there_and_comes_back() {
        let progress = Progress {
            phase: Phase::Switchover,
            round: 3,
            pending_pages: 1,
            expected_downtime: Some(Duration::from_millis(12)),
            ..Progress::default()
        };
        let text = serde_json::to_string(&ProgressData::from(&progress)).unwrap();
        let back: ProgressData = serde_json::from_str(&text).unwrap();
        assert_eq!(back.to_progress(), progress);
    }
}
