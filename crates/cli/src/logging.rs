//! Logs: `tracing` events on stderr, so that stdout stays for the report.
//!
//! A stderr that takes nothing any more must not cost a guest: whatever is said there is said with errors ignored, and not
//! waited for longer than [`STUCK`], once: a pipe that nobody reads would else hold up whoever has something to say.

use clap::{Args, ValueEnum};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use tracing_subscriber::EnvFilter;

/// How long stderr may take nothing before words are lost.
const STUCK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Bytes for which a pipe has room where it says that it has some.
const AT_ONCE: usize = 4096;

/// Says a line on stderr. One that nobody reads, or that has no room, is lost: where else would it be said, and
/// `eprintln!` would panic, and with it throw away a guest.
pub fn say_stderr(line: impl std::fmt::Display) {
    let mut stderr = Stderr;
    // It takes everything.
    let _ = stderr.write_all(format!("{line}\n").as_bytes());
}

/// Stderr as a place that takes everything.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        /// It took nothing when it was last tried: it is not waited for again.
        static IS_STUCK: AtomicBool = AtomicBool::new(false);
        // Held to the end: lines do not mix, and what one thread finds free, another one does not fill.
        let mut stderr = io::stderr().lock();
        for part in bytes.chunks(AT_ONCE) {
            let patience = if IS_STUCK.load(Ordering::Relaxed) {
                Timespec { tv_sec: 0, tv_nsec: 0 }
            } else {
                STUCK
            };
            let stuck = !has_room(&stderr, &patience);
            IS_STUCK.store(stuck, Ordering::Relaxed);
            // As in `say_stderr`: an error has nowhere to go.
            if stuck || stderr.write_all(part).is_err() {
                break;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether something can be written without waiting longer than `patience`. What cannot be told is tried.
fn has_room(to: impl AsFd, patience: &Timespec) -> bool {
    let mut asked = [PollFd::new(&to, PollFlags::OUT)];
    rustix::io::retry_on_intr(|| poll(&mut asked, Some(patience))).map_or(true, |ready| ready > 0)
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::{PipeFlags, pipe_with};

    #[test]
    fn a_pipe_that_nobody_reads_is_found_full_before_it_is_written_to() {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let mut sink = std::fs::File::from(write);
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut written = 0;
        // None of these blocks: a test that hangs here has failed.
        while has_room(&sink, &at_once) {
            sink.write_all(&[b'x'; AT_ONCE]).unwrap();
            written += AT_ONCE;
        }
        assert!(written > 0);
        drop(read);
        assert!(has_room(&sink, &at_once), "an error is no reason to wait");
    }
}
