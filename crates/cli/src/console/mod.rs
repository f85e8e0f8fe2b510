//! A Linux guest's console: the line between its serial port and this command's terminal, or a file.
//!
//! - What the guest prints goes to stdout, or to the file of `--console`, as raw bytes: [`output`].
//! - What is typed goes to the guest, while [`ConsoleLine::attach`] is in force: [`input`]. A terminal is in raw mode for
//!   that time ([`terminal`]), so Ctrl-C is the guest's; Ctrl-A x ends the command.
//!
//! Invariants: a reader of stdout that is gone or slow costs output and never the guest; a terminal is as it was when the
//! command ends, unless a signal ends it that no process can act on (SIGKILL), or that this one does not (SIGSEGV and its
//! like).

mod input;
mod output;
mod terminal;

pub use terminal::RawTerminal;

use crate::{Error, say_stderr};
use input::{Input, Pump};
use output::Output;
use rustix::fd::OwnedFd;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long the last output may take to leave.
const DRAIN_WITHIN: Duration = Duration::from_secs(5);

/// The line. Clones share it.
#[derive(Clone, Debug)]
pub struct ConsoleLine(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    output: Output,
    input: Input,
    /// The file that output goes to.
    file: Option<PathBuf>,
    /// Where what is typed goes, of the guest that was made last.
    to_guest: Mutex<Option<OwnedFd>>,
}

impl ConsoleLine {
    /// Makes ready: opens the file, looks at stdin. `wanted`: what [`ConsoleLine::has_printed`] waits for.
    ///
    /// # Errors
    /// [`Error::Usage`] names a file that cannot be written.
    pub fn new(file: Option<&Path>, wanted: Option<&str>) -> Result<Self, Error> {
        let (sink, name, input) = match file {
            Some(path) => {
                let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
                let sink =
                    opened.map_err(|error| Error::Usage(format!("--console: opening {}: {error}", path.display())))?;
                (sink, path.display().to_string(), Input::None)
            }
            None => {
                let stdout = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3);
                let stdout = stdout.map_err(|error| Error::Failed(format!("duplicating stdout: {error}")))?;
                (stdout.into(), "stdout".to_owned(), Input::of_stdin())
            }
        };
        Ok(ConsoleLine(Arc::new(Inner {
            output: Output::new(sink, name, wanted),
            input,
            file: file.map(Path::to_owned),
            to_guest: Mutex::new(None),
        })))
    }

    /// The guest's end of the line. A guest made before loses its own.
    pub(crate) fn guest_end(&self) -> io::Result<vmm::Console> {
        self.0.output.begin(self.0.file.as_deref())?;
        let input = match self.0.input {
            Input::None => None,
            Input::Terminal | Input::Other => {
                let (ours, theirs) = input::line()?;
                *self.to_guest() = Some(ours);
                Some(theirs)
            }
        };
        Ok(vmm::Console {
            input,
            output: Box::new(self.0.output.clone()),
        })
    }

    /// An end that leads nowhere, for a guest that is only tried out.
    pub(crate) fn nowhere() -> vmm::Console {
        vmm::Console {
            input: None,
            output: Box::new(io::sink()),
        }
    }

    fn to_guest(&self) -> std::sync::MutexGuard<'_, Option<OwnedFd>> {
        self.0.to_guest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on what is typed goes to the guest, until what this returns is dropped. Needs a tokio runtime. `quiet`: does
    /// not say how to get out.
    ///
    /// # Errors
    /// [`Error::Failed`] where the terminal does not let itself be set.
    pub fn attach(&self, quiet: bool) -> Result<Attached, Error> {
        let Some(to) = self.to_guest().take() else {
            return Ok(Attached { pump: None, raw: None });
        };
        let terminal = matches!(self.0.input, Input::Terminal);
        let raw = match terminal {
            true => {
                if !quiet {
                    say_stderr("console: Ctrl-A x ends the command, Ctrl-A Ctrl-A sends one Ctrl-A to the guest");
                }
                Some(RawTerminal::enter().map_err(|error| Error::Failed(format!("setting the terminal: {error}")))?)
            }
            false => None,
        };
        let pump = Pump::start(to, terminal)
            .map_err(|error| Error::Failed(format!("starting the console's thread: {error}")))?;
        Ok(Attached { pump: Some(pump), raw })
    }

    /// Whether the guest prints to stdout: a report has to wait, then, until it has ended.
    pub fn is_stdout(&self) -> bool {
        self.0.file.is_none()
    }

    /// Waits until the guest has printed the text that was given to [`ConsoleLine::new`]; for ever without one.
    pub async fn has_printed(&self) {
        self.0.output.has_printed().await;
    }

    /// Waits, for a bounded time, until what the guest has printed is out. Says so where it is not.
    pub fn drain(&self) {
        if !self.0.output.drain(DRAIN_WITHIN) {
            say_stderr("warning: some of the guest's console output is lost: nobody took it");
        }
    }
}

/// While this lives, what is typed goes to the guest.
#[derive(Debug)]
pub struct Attached {
    /// Ends first: what is typed after that is the shell's.
    pump: Option<Pump>,
    raw: Option<RawTerminal>,
}

impl Attached {
    /// Whether a terminal is in raw mode for it.
    pub fn is_terminal(&self) -> bool {
        self.raw.is_some()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        drop(self.pump.take());
        drop(self.raw.take());
    }
}
