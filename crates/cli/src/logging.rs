//! Logs: `tracing` events on stderr, so that stdout stays for the report.
//!
//! A stderr that takes nothing any more must not cost a guest: whatever is said there is said with errors ignored.

use clap::{Args, ValueEnum};
use std::io::{self, IsTerminal, Write};
use tracing_subscriber::EnvFilter;

/// Says a line on stderr. One that nobody reads, or that has no room, is lost: where else would it be said, and
/// `eprintln!` would panic, and with it throw away a guest.
pub fn say_stderr(line: impl std::fmt::Display) {
    // As above: the error has nowhere to go.
    let _ = writeln!(io::stderr(), "{line}");
}

/// Stderr as a place that takes everything, for the log.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // As in `say_stderr`.
        let _ = io::stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

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
                say_stderr(format_args!("RUST_LOG '{directives}' is ignored: {error}"));
                EnvFilter::new(level)
            }),
            _ => EnvFilter::new(level),
        };
        let builder = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(|| Stderr)
            // Else it would print to stderr, with a macro that panics, that stderr cannot be written to.
            .log_internal_errors(false)
            .with_ansi(std::io::stderr().is_terminal());
        let started = match self.log_format {
            LogFormat::Text => builder.try_init(),
            LogFormat::Json => builder.json().try_init(),
        };
        if let Err(error) = started {
            say_stderr(format_args!("logging stays as it is: {error}"));
        }
    }
}
