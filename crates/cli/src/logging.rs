//! Logs: `tracing` events on stderr, so that stdout stays for the report.

use clap::{Args, ValueEnum};
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A line for a person.
    #[default]
    Text,
    /// A JSON object a line.
    Json,
}

/// The flags that say where a report goes, and how much a command tells besides.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Output")]
pub struct OutputFlags {
    /// Write the report (JSON) to this file; `-` or nothing: to stdout
    #[arg(long, value_name = "FILE")]
    pub report: Option<String>,
    /// How much it tells.
    #[command(flatten)]
    pub log: LogFlags,
}

/// The flags that say how much a command tells.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Output")]
pub struct LogFlags {
    /// Say nothing but errors
    #[arg(long, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Log what is being done
    #[arg(long)]
    pub verbose: bool,
    /// How log lines on stderr look; RUST_LOG says which there are
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub log_format: LogFormat,
}

impl LogFlags {
    /// Turns logging on. Call once, first of all.
    pub fn start(&self) {
        let level = match (self.quiet, self.verbose) {
            (true, _) => "error",
            (_, true) => "debug",
            _ => "warn",
        };
        // A RUST_LOG that cannot be read is worth a word, but no reason not to migrate.
        let filter = match std::env::var("RUST_LOG") {
            Ok(directives) if !directives.is_empty() => EnvFilter::try_new(&directives).unwrap_or_else(|error| {
                eprintln!("RUST_LOG '{directives}' is ignored: {error}");
                EnvFilter::new(level)
            }),
            _ => EnvFilter::new(level),
        };
        let builder = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal());
        let started = match self.log_format {
            LogFormat::Text => builder.try_init(),
            LogFormat::Json => builder.json().try_init(),
        };
        if let Err(error) = started {
            eprintln!("logging stays as it is: {error}");
        }
    }
}
