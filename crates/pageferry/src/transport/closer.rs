//! Closing data connections under threads that are blocked on them.

use socket2::Socket;
use std::io;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The data connections of one migration. Once closed, it stays so, and whatever is added later is closed too.
#[derive(Debug, Default)]
pub(crate) struct Closer {
    closed: AtomicBool,
    sockets: Mutex<Vec<Socket>>,
}

impl Closer {
    /// Takes a second handle on `socket`.
    pub(crate) fn add(&self, socket: &Socket) -> io::Result<()> {
        let twin = socket.try_clone()?;
        let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_closed() {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "the migration is over",
            ));
        }
        sockets.push(twin);
        Ok(())
    }

    /// Shuts all of them down in both directions: blocked reads and writes return.
    pub(crate) fn close(&self) {
        let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        self.closed.store(true, Ordering::Release);
        for socket in sockets.drain(..) {
            if let Err(error) = socket.shutdown(Shutdown::Both) {
                // The peer was first.
                tracing::trace!(%error, "a data connection was closed already");
            }
        }
    }

    /// Whether it was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}
