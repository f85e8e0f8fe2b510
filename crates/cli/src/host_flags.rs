//! What an operator asks a host that serves a guest, beside to send it.

use crate::Error;
use crate::units::{Size, UnitError, parse_bandwidth, parse_duration};
use clap::Args;
use pageferry::control_socket::SetParams;
use pages::PAGE_BYTES;
use serde_json::{Value, json};
use std::str::FromStr;
use std::time::Duration;

/// The flags. At most one of them, and it needs --control.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "With --control, in place of --to; the answer is a line of JSON")]
#[group(multiple = true)]
pub struct HostFlags {
    /// Say what the guest does
    #[arg(long)]
    pub status: bool,
    /// Say how far the migration under way is
    #[arg(long)]
    pub progress: bool,
    /// Cancel the migration under way: the guest goes on there
    #[arg(long)]
    pub cancel: bool,
    /// Change a setting of the migration under way: max-bandwidth=RATE (0: no limit) or downtime-limit=TIME. Repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<Setting>,
    /// Pause the guest
    #[arg(long)]
    pub pause: bool,
    /// Let the guest go on
    #[arg(long)]
    pub resume: bool,
    /// With --resume: also after a migration whose end is unknown. Make sure first that the guest does not run elsewhere
    #[arg(long)]
    pub force: bool,
    /// Ask the guest for a balloon of this size
    #[arg(long, value_name = "SIZE")]
    pub balloon_target: Option<Size>,
    /// Ask the guest for fresh statistics on its memory
    #[arg(long)]
    pub balloon_stats: bool,
    /// End the guest and its host
    #[arg(long)]
    pub quit: bool,
}

/// A setting of a migration that can change while it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Setting {
    /// Bytes a second; 0: no limit.
    MaxBandwidth(u64),
    /// The downtime to aim at.
    DowntimeLimit(Duration),
}

impl FromStr for Setting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        let wrong = |error: UnitError| format!("{key}: {error}");
        match key {
            "max-bandwidth" => parse_bandwidth(value).map(Setting::MaxBandwidth).map_err(wrong),
            "downtime-limit" => parse_duration(value).map(Setting::DowntimeLimit).map_err(wrong),
            _ => Err(format!(
                "'{key}' is no setting that can change: give max-bandwidth=RATE or downtime-limit=TIME"
            )),
        }
    }
}

/// What the host is told of them; the last of a kind counts.
fn settings(given: &[Setting]) -> Value {
    let mut params = SetParams::default();
    for setting in given {
        match setting {
            Setting::MaxBandwidth(rate) => params.max_bandwidth_bytes_per_s = Some(*rate),
            Setting::DowntimeLimit(time) => params.downtime_limit_ms = Some(time.as_secs_f64() * 1e3),
        }
    }
    json!(params)
}

/// A request to a host.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Which.
    pub method: &'static str,
    /// Its parameters.
    pub params: Value,
}

impl HostFlags {
    /// The request that was asked for, if any, and by which flag.
    pub(crate) fn request(&self) -> Result<Option<(&'static str, Request)>, Error> {
        let request = |method, params| Request { method, params };
        let mut given = Vec::new();
        for (is_given, flag, method) in [
            (self.status, "--status", "status"),
            (self.progress, "--progress", "progress"),
            (self.cancel, "--cancel", "cancel"),
            (self.pause, "--pause", "pause"),
            (self.balloon_stats, "--balloon-stats", "balloon-stats"),
            (self.quit, "--quit", "quit"),
        ] {
            if is_given {
                given.push((flag, request(method, Value::Null)));
            }
        }
        if !self.set.is_empty() {
            given.push(("--set", request("set", settings(&self.set))));
        }
        if self.resume {
            given.push(("--resume", request("resume", json!({"force": self.force}))));
        } else if self.force {
            return Err(Error::Usage("--force goes with --resume".to_owned()));
        }
        if let Some(Size(bytes)) = self.balloon_target {
            if !bytes.is_multiple_of(PAGE_BYTES) {
                return Err(Error::Usage(format!(
                    "--balloon-target: {bytes} bytes are not a whole number of 4 KiB pages"
                )));
            }
            given.push(("--balloon-target", request("balloon", json!({"bytes": bytes}))));
        }
        let second = given.get(1).map(|(flag, _)| *flag);
        if let (Some((first, _)), Some(second)) = (given.first(), second) {
            return Err(Error::Usage(format!(
                "{first} and {second}: ask for one thing at a time"
            )));
        }
        Ok(given.pop())
    }
}
