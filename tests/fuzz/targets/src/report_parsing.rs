//! What comes as text: reports, lines of the control socket in both directions, and values of the command line.
//!
//! The oracle: what is taken comes back from what it is written as; an error is one line, and repeats nothing at length.

use crate::json;
use arbitrary::Unstructured;
use cli::{Size, human_bytes, parse_bandwidth, parse_duration, parse_share};
use pageferry::control_socket::{MigrateParams, MigrationEnd, ProgressData, fuzzing};
use pageferry::{Address, Compress, Ending, Report};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::time::Duration;

/// One byte says what the rest is; with its high bit the rest changes what is right.
pub fn report_parsing(input: &[u8]) {
    let Some((what, rest)) = input.split_first() else {
        return;
    };
    let change = |right: &[u8]| match what & 0x80 {
        0 => rest.to_vec(),
        _ => json::change(&mut Unstructured::new(rest), right).unwrap_or_default(),
    };
    match what % 7 {
        0 => comes_back::<Report>(&change(&written(&report()))),
        1 => comes_back::<MigrationEnd>(&change(&written(&end()))),
        2 => progress(&change(br#"{"phase":"precopy","round":1,"pending_pages":2,"sent_pages":3,"total_pages":4,"wire_bytes":5,"dirty_bytes_per_s":6.5,"bandwidth_bytes_per_s":7.0,"expected_downtime_ms":8.0}"#)),
        3 => request(&change(&migrate())),
        4 => request(&change(br#"{"id":1,"method":"balloon-stats","params":{"timeout_ms":10}}"#)),
        5 => answer(&change(br#"{"id":1,"result":{"a":1},"error":null}"#)),
        _ => String::from_utf8_lossy(rest).split('\n').for_each(value),
    }
}

fn written(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("it has a JSON form")
}

fn report() -> Report {
    Report::nothing_sent(engine::Role::Source, Ending::Failed, Some("why".to_owned()), 1.5)
}

fn end() -> MigrationEnd {
    MigrationEnd {
        ending: Ending::Failed,
        exit_code: 4,
        error: Some("why".to_owned()),
        report: report(),
    }
}

fn migrate() -> Vec<u8> {
    let params = MigrateParams {
        to: "tcp:host:1".to_owned(),
        ..MigrateParams::default()
    };
    let params = String::from_utf8(written(&params)).expect("JSON is text");
    format!(r#"{{"id":7,"method":"migrate","params":{params}}}"#).into_bytes()
}

/// What is read and written is read as the same again.
fn comes_back<T: Serialize + DeserializeOwned>(text: &[u8]) {
    if let Ok(value) = serde_json::from_slice::<T>(text) {
        let once = written(&value);
        let again: T = serde_json::from_slice(&once).expect("what was written is read");
        let of = |value: &T| serde_json::to_value(value).expect("it has a JSON form");
        assert!(is_same(&of(&value), &of(&again)), "{}", String::from_utf8_lossy(&once));
    }
}

/// Equal, but for the last digit of large fractions, which `serde_json` reads fast rather than exactly.
fn is_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| is_same(a, b)))
        }
        (Value::Number(x), Value::Number(y)) if x.is_f64() && y.is_f64() => {
            let (x, y) = (x.as_f64().unwrap_or(0.0), y.as_f64().unwrap_or(0.0));
            (x - y).abs() <= x.abs() * 1e-12
        }
        _ => a == b,
    }
}

fn progress(text: &[u8]) {
    comes_back::<ProgressData>(text);
    if let Ok(data) = serde_json::from_slice::<ProgressData>(text) {
        // A phase or a time that makes no sense becomes one that does.
        let progress = data.to_progress();
        assert_eq!(ProgressData::from(&progress).to_progress().phase, progress.phase);
    }
}

fn request(line: &[u8]) {
    if let Err(error) = fuzzing::request(line) {
        assert!(
            !error.is_empty() && error.len() < 4096 && !error.contains('\n'),
            "{error:?}"
        );
    }
}

fn answer(line: &[u8]) {
    if let Err(error) = fuzzing::answer(line) {
        assert!(!error.is_empty());
    }
}

/// A value of the command line.
fn value(text: &str) {
    if let Ok(address) = text.parse::<Address>() {
        assert_eq!(address.to_string().parse::<Address>().ok(), Some(address));
    }
    if let Ok(compress) = text.parse::<Compress>() {
        assert_eq!(compress.to_string().parse(), Ok(compress));
    }
    if let Ok(Size(bytes)) = text.parse() {
        assert_eq!(format!("{bytes}").parse(), Ok(Size(bytes)));
        assert!(!human_bytes(bytes).is_empty());
    }
    if let Ok(time) = parse_duration(text) {
        let us = time.as_micros();
        assert_eq!(
            parse_duration(&format!("{us}us")),
            Ok(Duration::from_micros(u64::try_from(us).unwrap_or(0)))
        );
    }
    if let Ok(rate) = parse_bandwidth(text) {
        assert!(
            rate > 0 || text.starts_with(['0', '.', '+']),
            "{text:?} reads as no limit"
        );
    }
    if let Ok(share) = parse_share(text) {
        assert!((0.0..=1.0).contains(&share));
    }
}
