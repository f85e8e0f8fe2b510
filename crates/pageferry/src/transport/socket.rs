//! A stream socket on the tokio runtime, of whatever family.
//!
//! tokio has no vsock, and its registration of plain descriptors is not safe to call. So every socket is registered as
//! a `TcpStream`: that is a descriptor with an entry in tokio's poll set, and reading, writing and waiting know no
//! family. Nothing that has one (addresses) is asked of it.

use socket2::{SockRef, Socket};
use std::io;
use std::net::Shutdown;
use tokio::io::Interest;
use tokio::net::TcpStream;

/// A socket that does not block. Reading and writing may go on at the same time, from one task each.
#[derive(Debug)]
pub(crate) struct AsyncSocket(TcpStream);

impl AsyncSocket {
    /// Takes `socket` to the current runtime.
    pub(crate) fn new(socket: Socket) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(AsyncSocket(TcpStream::from_std(socket.into())?))
    }

    /// Gives the socket back, blocking again.
    pub(crate) fn into_blocking(self) -> io::Result<Socket> {
        let socket = Socket::from(self.0.into_std()?);
        socket.set_nonblocking(false)?;
        Ok(socket)
    }

    /// The next connection of a listening socket.
    pub(super) async fn accept(&self) -> io::Result<Socket> {
        let accept = || SockRef::from(&self.0).accept();
        let (socket, _) = self.0.async_io(Interest::READABLE, accept).await?;
        Ok(socket)
    }

    /// Reads what there is; 0 is the end.
    pub(crate) async fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            self.0.readable().await?;
            match self.0.try_read(into) {
                Err(error) if retried(&error) => {}
                other => return other,
            }
        }
    }

    /// Fills `into`; returns how much of it came before the end of the stream.
    pub(crate) async fn read_full(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < into.len() {
            match self.read(&mut into[done..]).await? {
                0 => break,
                n => done += n,
            }
        }
        Ok(done)
    }

    /// Writes all of `bytes`.
    pub(crate) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.0.writable().await?;
            match self.0.try_write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => bytes = &bytes[n..],
                Err(error) if retried(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Tells the peer that nothing more comes.
    pub(crate) fn end_of_writing(&self) {
        if let Err(error) = SockRef::from(&self.0).shutdown(Shutdown::Write) {
            tracing::trace!(%error, "the control connection was closed already");
        }
    }
}

fn retried(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}
