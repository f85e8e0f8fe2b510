//! The flags of a migration, at the sending side, and what they mean together.

use crate::units::{parse_bandwidth, parse_duration};
use clap::{Args, ValueEnum};
use engine::{Ask, OnTimeout, SkipSet, SourceConfig};
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
    pub to: String,
    /// A running guest to send in place of one started here
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
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
    /// Digest RAM on both sides while the guest is paused, and compare
    #[arg(long)]
    pub verify: bool,
    /// Only run both sides' checks: exits 0 if both agree, 3 if one refuses, 4 if no receiver answers
    #[arg(long)]
    pub dry_run: bool,
}

impl SendFlags {
    /// What the flags mean to the engine; `local`: the receiver is on this machine.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] where values contradict each other.
    pub fn plan(&self, local: bool) -> Result<SourceConfig, crate::Error> {
        if self.control.is_some() {
            return Err(crate::control_is_not_there_yet());
        }
        for (flag, value) in [
            ("--peer-timeout", self.peer_timeout),
            ("--connect-timeout", self.connect_timeout),
        ] {
            if value.is_zero() {
                return Err(crate::Error::Usage(format!("{flag} 0: give some time, as 10s")));
            }
        }
        let has = |choice| self.skip.contains(&choice);
        if has(SkipChoice::None) && self.skip.len() > 1 {
            return Err(crate::Error::Usage("--skip: none goes with no other reason".to_owned()));
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
            verify: self.verify,
            dry_run: self.dry_run,
            ..SourceConfig::default()
        })
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
            ("--control /run/guest", "--control"),
        ] {
            let error = plan(line).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}
