//! The flags of a receiver, and what they mean together.

use crate::units::{Size, parse_duration};
use crate::{DirtyTrackerChoice, Error, SecurityFlags};
use clap::{Args, ValueEnum};
use pages::PAGE_BYTES;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// What to do with the guest once it is here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum After {
    /// Let it run
    #[default]
    Run,
    /// Keep it paused until a signal comes
    Pause,
    /// Leave the RAM file and exit
    Exit,
}

/// Where to corrupt a page: a hook for tests of the checks themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corrupt {
    /// After the pages came, before RAM is digested.
    BeforeVerify,
    /// After RAM was digested and compared.
    AfterVerify,
}

impl FromStr for Corrupt {
    type Err = String;

    fn from_str(value: &str) -> Result<Self, String> {
        match value {
            "before-verify" => Ok(Corrupt::BeforeVerify),
            "after-verify" => Ok(Corrupt::AfterVerify),
            _ => Err(format!("'{value}': give before-verify or after-verify")),
        }
    }
}

/// The flags of a receiver.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Receiving")]
pub struct RecvFlags {
    /// Where to listen: tcp:HOST:PORT (port 0: any; it is printed), unix:PATH or vsock:CID:PORT
    #[arg(long, value_name = "ADDR")]
    pub listen: String,
    /// Rebuild RAM in this file in place of anonymous memory
    #[arg(long, value_name = "FILE")]
    pub ram: Option<PathBuf>,
    /// Populate guest memory before a source comes: --max-memory of it, or 8G. A Linux guest of more than 3 GiB has a gap in
    /// its memory, so --prealloc=linux is for it
    #[arg(long, value_enum, value_name = "KIND", num_args = 0..=1, require_equals = true, default_missing_value = "soft")]
    pub prealloc: Option<PreallocFor>,
    /// The most RAM that a guest may have [default: as much as fits; what stays untouched takes none]
    #[arg(long, value_name = "SIZE")]
    pub max_memory: Option<Size>,
    /// What to do with the guest once it is here
    #[arg(long, value_enum, default_value_t, value_name = "WHAT")]
    pub after: After,
    /// How long the built-in guest runs on: being a demonstration, it powers off by itself so long after it has arrived
    /// and checked itself; 0: it runs until SIGINT or SIGTERM (default: 1s; with --control: 0). A Linux guest runs until it
    /// powers off, a signal comes or a client says quit
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub run_for: Option<Duration>,
    /// Serve the guest at this Unix socket once it is here: it can be sent on from there, among other things
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// How the writes of a Linux guest are tracked when it is sent on (default: auto)
    #[arg(long, value_enum, value_name = "WAY")]
    pub dirty_tracker: Option<DirtyTrackerChoice>,
    /// Write what a Linux guest's console prints to this file, and let it take no input (default: its console is this
    /// terminal, or stdin and stdout: Ctrl-A x ends the command then, Ctrl-A Ctrl-A sends a Ctrl-A)
    #[arg(long, value_name = "FILE")]
    pub console: Option<PathBuf>,
    /// Silence after which the source is dead
    #[arg(long, value_parser = parse_duration, default_value = "10s", value_name = "TIME")]
    pub peer_timeout: Duration,
    /// The longest to wait for a source that lost its connection and may come back; 0: not at all
    #[arg(long, value_parser = parse_duration, default_value = "30s", value_name = "TIME")]
    pub resume_window: Duration,
    /// For tests of the checks: flip a byte of a page that came
    #[arg(long, hide = true, value_name = "WHEN")]
    pub corrupt_page: Option<Corrupt>,
    /// For tests: a Linux guest's state refuses to be restored, or to be saved again
    #[arg(long, hide = true, value_name = "WHAT")]
    pub refuse_state: Option<RefuseState>,
    /// Who may send a guest. Last: its heading would hold for what follows.
    #[command(flatten)]
    pub security: SecurityFlags,
}

/// What `--prealloc` populates for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PreallocFor {
    /// A guest whose RAM is one region from address 0
    Soft,
    /// A guest whose RAM leaves the last GiB below 4 GiB to devices
    Linux,
}

/// What a guest's state refuses: a hook for tests of failing migrations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RefuseState {
    /// To be restored here
    Restore,
    /// To be saved here, when the guest is sent on
    Save,
}

impl RecvFlags {
    /// How long the built-in guest runs on; zero: until something ends it.
    pub fn runs_for(&self) -> Duration {
        let default = if self.control.is_some() { 0 } else { 1 };
        self.run_for.unwrap_or(Duration::from_secs(default))
    }

    /// Whether the flags make sense together.
    ///
    /// # Errors
    /// [`Error::Usage`] names the flags that do not.
    pub fn check(&self) -> Result<(), Error> {
        if self.peer_timeout.is_zero() {
            return Err(Error::Usage("--peer-timeout 0: give some time, as 10s".to_owned()));
        }
        if let (After::Exit, Some(_)) = (self.after, &self.control) {
            return Err(Error::Usage(
                "--control goes with --after run or pause: with exit there is no guest left to serve".to_owned(),
            ));
        }
        if self.after == After::Exit && self.ram.is_none() {
            tracing::warn!("--after exit without --ram FILE: nothing will be left of the guest");
        }
        match self.max_memory {
            Some(Size(bytes)) if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) => Err(Error::Usage(format!(
                "--max-memory: {bytes} bytes are not a whole number of 4 KiB pages above 0"
            ))),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        recv: RecvFlags,
    }

    fn check(line: &str) -> Result<RecvFlags, String> {
        let words = ["test", "--listen", "tcp:127.0.0.1:0"]
            .into_iter()
            .chain(line.split_whitespace());
        let flags = Line::try_parse_from(words).map_err(|e| e.to_string())?.recv;
        flags.check().map_err(|e| e.to_string())?;
        Ok(flags)
    }

    #[test]
    fn defaults_are_the_contract() {
        let flags = check("").unwrap();
        assert_eq!((flags.after, flags.runs_for()), (After::Run, Duration::from_secs(1)));
        assert_eq!(check("--control s").unwrap().runs_for(), Duration::ZERO);
        assert_eq!(
            check("--control s --run-for 3s").unwrap().runs_for(),
            Duration::from_secs(3)
        );
        assert_eq!(flags.prealloc, None);
        assert_eq!(check("--prealloc").unwrap().prealloc, Some(PreallocFor::Soft));
        assert_eq!(check("--prealloc=linux").unwrap().prealloc, Some(PreallocFor::Linux));
        assert_eq!((flags.max_memory, flags.corrupt_page), (None, None));
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (line, word) in [
            ("--max-memory 1", "1 bytes"),
            ("--control s --after exit", "--control"),
            ("--prealloc=file", "file"),
            ("--dirty-tracker magic", "magic"),
            ("--peer-timeout 0", "--peer-timeout"),
            ("--after stop", "stop"),
        ] {
            let error = check(line).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
        assert!(check("--prealloc --max-memory 1G").is_ok());
        assert!(check("--after exit --ram /tmp/ram").is_ok());
    }
}
