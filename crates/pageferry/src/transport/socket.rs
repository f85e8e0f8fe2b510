//! A stream socket on the tokio runtime, of whatever family: tokio itself has no vsock.

use socket2::Socket;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A socket that does not block. Reading and writing may go on at the same time, from one task each.
#[derive(Debug)]
pub(crate) struct AsyncSocket(AsyncFd<Socket>);

impl AsyncSocket {
    /// Takes `socket` to the current runtime.
    pub(crate) fn new(socket: Socket) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(AsyncSocket(AsyncFd::register(socket)?))
    }

    /// Gives the socket back, blocking again.
    pub(crate) fn into_blocking(self) -> io::Result<Socket> {
        let socket = self.0.into_inner();
        socket.set_nonblocking(false)?;
        Ok(socket)
    }

    /// The next connection of a listening socket.
    pub(super) async fn accept(&self) -> io::Result<Socket> {
        let (socket, _) = self.0.async_io(Interest::READABLE, |s| s.accept()).await?;
        Ok(socket)
    }

    /// Reads what there is; 0 is the end.
    pub(crate) async fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = |mut s: &Socket| s.read(into);
            match self.0.async_io(Interest::READABLE, read).await {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
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
            let write = |mut s: &Socket| s.write(bytes);
            match self.0.async_io(Interest::WRITABLE, write).await {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => bytes = &bytes[n..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Tells the peer that nothing more comes.
    pub(crate) fn end_of_writing(&self) {
        if let Err(error) = self.0.get_ref().shutdown(Shutdown::Write) {
            tracing::trace!(%error, "the control connection was closed already");
        }
    }
}
