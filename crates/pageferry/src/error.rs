//! What the library could not do.

use crate::Address;
use std::io;
use std::path::PathBuf;

/// What could not be done, before the engine had a say or beside it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Text that is no address.
    #[error("{text:?} is no address: {why}; write tcp:HOST:PORT, unix:PATH or vsock:CID:PORT")]
    Address {
        /// What was given.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// No socket can listen there.
    #[error("cannot listen on {address}: {source}; is something else listening there?")]
    Listen {
        /// Where.
        address: Address,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The receiver cannot be reached.
    #[error("cannot connect to {address}: {source}; is a receiver listening there?")]
    Connect {
        /// Where.
        address: Address,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A connection broke.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A control socket that cannot be, or that nobody answers at.
    #[error("control socket {}: {why}", path.display())]
    ControlSocket {
        /// Its path.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// Bytes of a peer that make no sense.
    #[error(transparent)]
    Wire(#[from] wire::Error),
    /// Settings that cannot work.
    #[error("{0}")]
    Options(String),
    /// One of the two sides does not take the other: what is wrong, in a sentence.
    #[error("{0}")]
    Refused(String),
}

impl Error {
    /// Whether somebody said no, rather than something having failed.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Error::Refused(_) | Error::Options(_))
    }

    pub(crate) fn io(doing: impl Into<String>, source: io::Error) -> Self {
        Error::Io {
            doing: doing.into(),
            source,
        }
    }
}
