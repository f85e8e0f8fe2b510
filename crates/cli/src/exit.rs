//! Exit codes, and the errors of the commands.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 2 | usage |
//! | 3 | refused, by either side's checks; nothing was sent |
//! | 4 | failed; the guest is still the source's |
//! | 5 | cancelled, likewise |
//! | 6 | timed out, likewise |
//! | 7 | outcome unknown: handed over without an answer; the source stays paused |
//! | 8 | done, but the report could not be written to its file |

use crate::say_stderr;
use engine::Ending;
use std::process::ExitCode;

/// What a command could not do. The text is one sentence for the person at the terminal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The command line makes no sense; nothing was begun.
    #[error("{0}")]
    Usage(String),
    /// A check said no before anything was sent.
    #[error("{0}")]
    Refused(String),
    /// Something failed.
    #[error("{0}")]
    Failed(String),
    /// A signal came before the migration began.
    #[error("cancelled by a signal before the migration began")]
    Cancelled,
    /// A second signal came before the guest was handed over, and the end of the first one's cancel was not waited for.
    #[error("ended at once by a second signal, before the guest was handed over: it is the source's")]
    EndedAtOnce,
    /// Nobody here knows where the guest is.
    #[error("{0}")]
    Unknown(String),
}

impl Error {
    /// How the report calls it; `None` for a usage error, which writes no report.
    pub fn ending(&self) -> Option<Ending> {
        match self {
            Error::Usage(_) => None,
            Error::Refused(_) => Some(Ending::Refused),
            Error::Failed(_) => Some(Ending::Failed),
            Error::Cancelled | Error::EndedAtOnce => Some(Ending::Cancelled),
            Error::Unknown(_) => Some(Ending::Unknown),
        }
    }

    /// The code that the command exits with.
    pub fn exit_code(&self) -> u8 {
        self.ending().map_or(2, Ending::exit_code)
    }
}

/// Runs a command to its end: prints the error that it could not help, and gives the code to exit with.
pub fn finish(command: &str, result: Result<u8, Error>) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say_stderr(format_args!("{command}: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_contract() {
        assert_eq!(Error::Usage(String::new()).exit_code(), 2);
        assert_eq!(Error::Refused(String::new()).exit_code(), 3);
        assert_eq!(Error::Failed(String::new()).exit_code(), 4);
        assert_eq!(Error::Cancelled.exit_code(), 5);
        assert_eq!(Error::EndedAtOnce.exit_code(), 5);
        assert_eq!(Error::Unknown(String::new()).exit_code(), 7);
        assert_eq!(Ending::TimedOut.exit_code(), 6);
        assert_eq!(Ending::Unknown.exit_code(), 7);
    }
}
