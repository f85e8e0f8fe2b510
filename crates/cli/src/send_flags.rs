//! The flags of a migration, at the sending side, and what they mean together.

use crate::host_flags::{HostFlags, Request};
use crate::units::{parse_bandwidth, parse_duration};
use crate::{BalloonChoice, Error, GuestFlags, GuestKind, SecurityFlags};
use clap::{Args, ValueEnum};
use engine::{Ask, OnTimeout, SkipSet, SourceConfig};
use pageferry::{Address, Compress};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// When to ask the balloon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum AskChoice {
    /// When it can pay
    #[default]
    Auto,
    /// Whenever the guest can be asked
    Always,
    /// Never
    Never,
}

/// What to do when the time-out passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OnTimeoutChoice {
    /// Give up; the guest goes on here
    #[default]
    Cancel,
    /// Pause the guest and finish
    Stop,
}

/// One reason to leave a page behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SkipChoice {
    /// What the guest calls free, and what its balloon holds
    Free,
    /// Pages that read as zero
    Zero,
    /// Pages that were never touched
    Hole,
    /// No page at all
    None,
}

/// How many data streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Streams {
    /// What suits the link and the machine.
    #[default]
    Auto,
    /// So many.
    Count(u16),
}

/// The most data streams.
pub const MAX_STREAMS: u16 = 64;

impl FromStr for Streams {
    type Err = String;

    fn from_str(value: &str) -> Result<Self, String> {
        if value == "auto" {
            return Ok(Streams::Auto);
        }
        match value.parse() {
            Ok(count) if (1..=MAX_STREAMS).contains(&count) => Ok(Streams::Count(count)),
            _ => Err(format!(
                "'{value}' is no number of streams: give 1 to {MAX_STREAMS}, or auto"
            )),
        }
    }
}

impl Streams {
    /// The number of streams. One stream fills a local link, and a second one only takes the processor away from the
    /// receiver; over a network a second one helps where there are processors for it.
    pub fn count(self, local: bool) -> u16 {
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        match self {
            Streams::Count(count) => count,
            Streams::Auto if (local && processors < 8) || processors == 1 => 1,
            Streams::Auto => 2,
        }
    }
}

/// The flags of a migration, at the sending side.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Migration")]
pub struct SendFlags {
    /// Where the receiver listens: tcp:HOST:PORT, unix:PATH or vsock:CID:PORT
    #[arg(long, value_name = "ADDR")]
    pub to: Option<String>,
    /// A running guest to send, or to do something with, in place of one started here: the control socket of its host
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// How long a guest that is started here runs before it is sent; with --send-when: after that [default: 0]
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub send_after: Option<Duration>,
    /// Send a Linux guest that is started here once its console has printed this text, and not before
    #[arg(long, value_name = "TEXT")]
    pub send_when: Option<String>,
    /// Which pages to leave behind: any of free, zero, hole; or none
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "free,zero,hole",
        value_name = "LIST"
    )]
    pub skip: Vec<SkipChoice>,
    /// When to ask the balloon which pages are free
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub ask: AskChoice,
    /// How long the guest's answers may take
    #[arg(long, value_parser = parse_duration, default_value = "500ms", value_name = "TIME")]
    pub hint_timeout: Duration,
    /// Data streams
    #[arg(long, default_value = "auto", value_name = "N|auto")]
    pub streams: Streams,
    /// The most bandwidth to take, as 10Gbit; 0: no limit
    #[arg(long, value_parser = parse_bandwidth, default_value = "0", value_name = "RATE")]
    pub max_bandwidth: u64,
    /// Pack pages on their way: auto (by what pays, where the link is slow), none, lz4, zstd, zstd:LEVEL
    #[arg(long, default_value = "auto", value_name = "HOW")]
    pub compress: Compress,
    /// The downtime to aim at
    #[arg(long, value_parser = parse_duration, default_value = "300ms", value_name = "TIME")]
    pub downtime_limit: Duration,
    /// The most time before the guest is paused; 0: no limit
    #[arg(long, value_parser = parse_duration, default_value = "0", value_name = "TIME")]
    pub timeout: Duration,
    /// What to do when that time has passed
    #[arg(long, value_enum, default_value_t, value_name = "WHAT")]
    pub on_timeout: OnTimeoutChoice,
    /// How long connecting may take
    #[arg(long, value_parser = parse_duration, default_value = "10s", value_name = "TIME")]
    pub connect_timeout: Duration,
    /// Silence after which the receiver is dead
    #[arg(long, value_parser = parse_duration, default_value = "10s", value_name = "TIME")]
    pub peer_timeout: Duration,
    /// How long to try to reach the receiver again after the connection was lost, and go on from what it has; 0: not at all
    #[arg(long, value_parser = parse_duration, default_value = "30s", value_name = "TIME")]
    pub resume_window: Duration,
    /// Digest RAM on both sides while the guest is paused, and compare
    #[arg(long)]
    pub verify: bool,
    /// Send a checksum over the pages of each batch, as they are sent; the receiver uses none before it has compared
    #[arg(long)]
    pub checksum: bool,
    /// Only run both sides' checks: exits 0 if both agree, 3 if one refuses, 4 if no receiver answers
    #[arg(long)]
    pub dry_run: bool,
    /// The name that the receiver's certificate must have [default: the host of --to]
    #[arg(long, value_name = "NAME", help_heading = "Security")]
    pub tls_name: Option<String>,
    /// How what crosses is protected.
    #[command(flatten)]
    pub security: SecurityFlags,
    /// What to do with a running guest beside sending it. Last: its heading would hold for what follows.
    #[command(flatten)]
    pub host: HostFlags,
}

/// What is to be sent, or done.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// A guest that is started here, to this address.
    Here(Address),
    /// The guest of the host at this control socket, to this address.
    Host(PathBuf, Address),
    /// A request to the host at this control socket.
    Request(PathBuf, Request),
}

/// The longest text that a console is searched for, bytes.
const MAX_TEXT_BYTES: usize = 4096;

impl SendFlags {
    /// What is to be done, and with which guest.
    ///
    /// # Errors
    /// [`Error::Usage`] names the flag that is missing, or that does not go with another one.
    pub fn target(&self, guest: &GuestFlags) -> Result<Target, Error> {
        let usage = |text: String| Err(Error::Usage(text));
        let to = self.to.as_ref().map(|to| to.parse::<Address>());
        let to = to.transpose().map_err(|error| Error::Usage(format!("--to: {error}")))?;
        let (flag, request) = self.host.request()?.unzip();
        if let (Some(flag), Some(_)) = (flag, &to) {
            return usage(format!(
                "{flag} goes with --control alone, not with --to: nothing is sent"
            ));
        }
        let Some(control) = self.control.clone() else {
            return match (flag, to) {
                (Some(flag), _) => usage(format!("{flag} asks a host: give --control SOCKET")),
                (None, Some(to)) => Ok(Target::Here(to)),
                (None, None) => usage("where to send the guest is missing: give --to ADDR".to_owned()),
            };
        };
        let of_a_new_guest = guest
            .first_given()
            .or(self.send_after.map(|_| "--send-after"))
            .or(self.send_when.as_ref().map(|_| "--send-when"));
        if let Some(flag) = of_a_new_guest {
            return usage(format!(
                "{flag} is for a guest that is started here: it does not go with --control"
            ));
        }
        match (request, to) {
            (Some(request), _) => Ok(Target::Request(control, request)),
            (None, Some(to)) => Ok(Target::Host(control, as_seen_from_anywhere(to)?)),
            (None, None) => {
                usage("what to do with the guest at --control is missing: give --to ADDR, or --status".to_owned())
            }
        }
    }

    /// Whether the flags go with a guest that these others start.
    ///
    /// # Errors
    /// [`Error::Usage`] names those that do not.
    pub fn check_guest(&self, guest: &GuestFlags) -> Result<(), Error> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        if self.send_after.is_some_and(|time| !time.is_zero()) && guest.kind() == GuestKind::File {
            return usage("--send-after: a guest in a file does not run, so there is nothing to wait for");
        }
        if let Some(text) = &self.send_when {
            if guest.kind() != GuestKind::Linux {
                return usage("--send-when goes with --guest linux: no other guest has a console");
            }
            if text.is_empty() || text.len() > MAX_TEXT_BYTES || text.chars().any(char::is_control) {
                return usage("--send-when: give a text of one line, of 1 to 4096 bytes, that the console will print");
            }
        }
        if self.ask == AskChoice::Always && guest.balloon == Some(BalloonChoice::Off) {
            return usage("--ask always goes with no --balloon off: a guest without a balloon cannot be asked");
        }
        if self.ask == AskChoice::Always && guest.balloon == Some(BalloonChoice::BitmapRfc) {
            return usage("--ask always goes with no --balloon bitmap-rfc: that dialect has no question for the guest");
        }
        Ok(())
    }

    /// What the flags mean to the engine; `local`: the receiver is on this machine.
    ///
    /// # Errors
    /// [`Error::Usage`] where values contradict each other.
    pub fn plan(&self, local: bool) -> Result<SourceConfig, Error> {
        for (flag, value) in [
            ("--peer-timeout", self.peer_timeout),
            ("--connect-timeout", self.connect_timeout),
        ] {
            if value.is_zero() {
                return Err(Error::Usage(format!("{flag} 0: give some time, as 10s")));
            }
        }
        let has = |choice| self.skip.contains(&choice);
        if has(SkipChoice::None) && self.skip.len() > 1 {
            return Err(Error::Usage("--skip: none goes with no other reason".to_owned()));
        }
        Ok(SourceConfig {
            skip: SkipSet {
                free: has(SkipChoice::Free),
                zero: has(SkipChoice::Zero),
                hole: has(SkipChoice::Hole),
            },
            ask: match self.ask {
                AskChoice::Auto => Ask::Auto,
                AskChoice::Always => Ask::Always,
                AskChoice::Never => Ask::Never,
            },
            hint_timeout: self.hint_timeout,
            streams: self.streams.count(local),
            downtime_limit: self.downtime_limit,
            timeout: self.timeout,
            on_timeout: match self.on_timeout {
                OnTimeoutChoice::Cancel => OnTimeout::Cancel,
                OnTimeoutChoice::Stop => OnTimeout::Stop,
            },
            peer_timeout: self.peer_timeout,
            resume_window: self.resume_window,
            verify: self.verify,
            dry_run: self.dry_run,
            ..SourceConfig::default()
        })
    }
}

/// A host has a folder of its own, and would look for the path of a Unix socket there.
fn as_seen_from_anywhere(to: Address) -> Result<Address, Error> {
    match to {
        Address::Unix(path) => std::path::absolute(&path)
            .map(Address::Unix)
            .map_err(|error| Error::Usage(format!("--to unix:{}: {error}", path.display()))),
        Address::Tcp { .. } | Address::Vsock { .. } => Ok(to),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        send: SendFlags,
        #[command(flatten)]
        guest: GuestFlags,
    }

    fn target(line: &str) -> Result<Target, String> {
        let words = std::iter::once("test").chain(line.split_whitespace());
        let line = Line::try_parse_from(words).map_err(|e| e.to_string())?;
        let target = line.send.target(&line.guest).map_err(|e| e.to_string())?;
        if matches!(target, Target::Here(_)) {
            line.send.check_guest(&line.guest).map_err(|e| e.to_string())?;
        }
        Ok(target)
    }

    #[test]
    fn a_guest_is_started_here_or_served_elsewhere() {
        let to: Address = "tcp:h:1".parse().unwrap();
        assert_eq!(target("--to tcp:h:1"), Ok(Target::Here(to.clone())));
        assert_eq!(target("--to tcp:h:1 --control s"), Ok(Target::Host("s".into(), to)));
        // A host may have another folder than its client.
        let here = std::env::current_dir().unwrap().join("s.sock");
        for line in ["--to unix:s.sock --control s", "--to unix:./s.sock --control s"] {
            assert_eq!(target(line), Ok(Target::Host("s".into(), Address::Unix(here.clone()))));
        }
        for (line, method) in [
            ("--control s --status", "status"),
            ("--control s --progress", "progress"),
            ("--control s --cancel", "cancel"),
            ("--control s --set max-bandwidth=1Gbit --set downtime-limit=1s", "set"),
            ("--control s --pause", "pause"),
            ("--control s --resume --force", "resume"),
            ("--control s --balloon-target 1G", "balloon"),
            ("--control s --balloon-stats", "balloon-stats"),
            ("--control s --quit", "quit"),
        ] {
            match target(line) {
                Ok(Target::Request(socket, request)) => {
                    assert_eq!((socket, request.method), (PathBuf::from("s"), method), "{line}");
                }
                other => panic!("{line}: {other:?}"),
            }
        }
        assert!(target("--to tcp:h:1 --guest linux --kernel k --send-when login: --send-after 1s").is_ok());
        assert!(target("--to tcp:h:1 --send-after 1s").is_ok());
    }

    #[test]
    fn settings_that_change_are_told_in_the_hosts_units() {
        let line = "--control s --set max-bandwidth=1Gbit --set downtime-limit=1s --set max-bandwidth=8Mbit";
        let Ok(Target::Request(_, request)) = target(line) else {
            panic!("{line}");
        };
        let told = serde_json::json!({"max_bandwidth_bytes_per_s": 1_000_000, "downtime_limit_ms": 1000.0});
        assert_eq!(request.params, told);
    }

    #[test]
    fn what_does_not_go_together_is_refused_by_name() {
        for (line, word) in [
            ("", "--to ADDR"),
            ("--control s", "--to ADDR, or --status"),
            ("--to there", "tcp:HOST:PORT"),
            ("--status", "--control SOCKET"),
            ("--control s --to tcp:h:1 --quit", "--quit goes with --control alone"),
            ("--control s --status --quit", "--quit"),
            ("--control s --status --force", "--force goes with --resume"),
            ("--control s --balloon-target 4097", "4097"),
            ("--control s --set streams=2", "'streams'"),
            ("--control s --set max-bandwidth=fast", "'fast'"),
            ("--control s --set max-bandwidth", "10Gbit"),
            ("--control s --set max-bandwidth=0 --cancel", "one thing at a time"),
            ("--set max-bandwidth=0", "--control SOCKET"),
            (
                "--control s --to tcp:h:1 --memory 1G",
                "--memory is for a guest that is started here",
            ),
            ("--control s --status --guest soft", "--guest"),
            ("--control s --to tcp:h:1 --send-after 1s", "--send-after"),
            ("--to tcp:h:1 --send-after 1", "'1'"),
            ("--to tcp:h:1 --guest file --ram r --send-after 1s", "does not run"),
            ("--to tcp:h:1 --send-when login:", "--send-when goes with --guest linux"),
            ("--to tcp:h:1 --guest linux --kernel k --send-when=", "--send-when"),
        ] {
            let error = target(line).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
    }

    #[test]
    fn case_32_hints_of_a_guest_without_a_balloon_are_refused() {
        for guest in ["", "--guest linux --kernel k"] {
            for balloon in ["off", "bitmap-rfc"] {
                let line = format!("--to tcp:h:1 --ask always --balloon {balloon} {guest}");
                let error = target(&line).unwrap_err();
                let named = error.contains("--ask always") && error.contains(&format!("--balloon {balloon}"));
                assert!(named, "{error}");
            }
        }
    }

    fn plan(line: &str) -> Result<SourceConfig, String> {
        let words = ["test", "--to", "tcp:localhost:1"]
            .into_iter()
            .chain(line.split_whitespace());
        let line = Line::try_parse_from(words).map_err(|e| e.to_string())?;
        line.send.plan(true).map_err(|e| e.to_string())
    }

    #[test]
    fn defaults_are_the_contract() {
        let source = plan("").unwrap();
        assert_eq!(source.skip, SkipSet::ALL);
        assert_eq!((source.ask, source.on_timeout), (Ask::Auto, OnTimeout::Cancel));
        assert_eq!(source.hint_timeout, Duration::from_millis(500));
        assert_eq!(source.downtime_limit, Duration::from_millis(300));
        assert_eq!(
            (source.timeout, source.peer_timeout),
            (Duration::ZERO, Duration::from_secs(10))
        );
        assert_eq!(source.resume_window, Duration::from_secs(30));
        assert!(!source.verify && !source.dry_run);
        assert!((1..=2).contains(&source.streams));
    }

    #[test]
    fn skip_is_a_list_or_none() {
        assert_eq!(plan("--skip none").unwrap().skip, SkipSet::NONE);
        assert_eq!(
            plan("--skip free").unwrap().skip,
            SkipSet {
                free: true,
                ..SkipSet::NONE
            }
        );
        assert_eq!(
            plan("--skip hole,zero").unwrap().skip,
            SkipSet {
                free: false,
                ..SkipSet::ALL
            }
        );
        assert!(plan("--skip none,free").is_err());
        assert!(plan("--skip all").is_err());
    }

    #[test]
    fn values_out_of_range_are_refused() {
        assert_eq!(plan("--streams 3").unwrap().streams, 3);
        for (line, word) in [
            ("--streams 0", "'0'"),
            ("--streams 65", "'65'"),
            ("--streams many", "'many'"),
            ("--peer-timeout 0", "--peer-timeout"),
            ("--hint-timeout 5", "'5'"),
            ("--max-bandwidth 10", "'10'"),
            ("--compress gzip", "'gzip'"),
            ("--compress zstd:20", "'zstd:20'"),
        ] {
            let error = plan(line).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}
