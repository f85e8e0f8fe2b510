//! A stream socket on the tokio runtime, of whatever family, with or without TLS.
//!
//! tokio has no vsock, and its registration of plain descriptors is not safe to call. So every socket is registered as
//! a `TcpStream`: that is a descriptor with an entry in tokio's poll set, and reading, writing and waiting know no
//! family. Nothing that has one (addresses) is asked of it.

use super::tls::{Progress, Session};
use super::{DataSocket, WELCOME};
use crate::security::{Side, Tls, sentence};
use socket2::{SockRef, Socket};
use std::io;
use std::net::Shutdown;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Bytes that are encrypted at once: what a peer that does not read costs.
const PIECE_BYTES: usize = 64 << 10;

/// A socket that does not block. Reading and writing may go on at the same time, from one task each.
#[derive(Debug)]
pub(crate) struct AsyncSocket {
    socket: TcpStream,
    tls: Option<Mutex<Session>>,
}

impl AsyncSocket {
    /// Takes `socket` to the current runtime.
    pub(crate) fn new(socket: impl Into<DataSocket>) -> io::Result<Self> {
        let (socket, tls) = socket.into().into_parts();
        socket.set_nonblocking(true)?;
        Ok(AsyncSocket {
            socket: TcpStream::from_std(socket.into())?,
            tls: tls.map(Mutex::new),
        })
    }

    /// Gives the socket back, blocking again.
    pub(crate) fn into_blocking(self) -> io::Result<DataSocket> {
        let socket = Socket::from(self.socket.into_std()?);
        socket.set_nonblocking(false)?;
        let tls = self
            .tls
            .map(|tls| tls.into_inner().unwrap_or_else(PoisonError::into_inner));
        Ok(DataSocket::from_parts(socket, tls))
    }

    /// The certificate that the peer proved to have.
    pub(crate) fn peer(&self) -> Option<Arc<[u8]>> {
        self.tls.as_ref().and_then(|tls| lock(tls).peer())
    }

    /// The next connection of a listening socket.
    pub(super) async fn accept(&self) -> io::Result<Socket> {
        let accept = || SockRef::from(&self.socket).accept();
        let (socket, _) = self.socket.async_io(Interest::READABLE, accept).await?;
        Ok(socket)
    }

    /// The first byte of a connection, which stays to be read; `None`: there is none.
    pub(crate) async fn peek(&self) -> io::Result<Option<u8>> {
        let mut byte = [0];
        Ok((self.socket.peek(&mut byte).await? > 0).then_some(byte[0]))
    }

    /// The receiver's end of a handshake: afterwards all that is read and written is TLS. A peer that is refused is told
    /// why, as far as an alert can say that. The error is a sentence.
    pub(crate) async fn accept_tls(&mut self, tls: &Tls) -> Result<(), String> {
        let say = |error: &rustls::Error| sentence(Side::Receiver, error);
        let mut session = Session::server(tls).map_err(|e| say(&e))?;
        let broke = |e: io::Error| format!("the connection broke during the TLS handshake: {e}");
        loop {
            let progress = session.shake();
            while !session.outgoing().is_empty() {
                let left = self.write_some(session.outgoing()).await.map_err(broke)?;
                session.left(left);
            }
            match progress.map_err(|e| say(&e))? {
                Progress::Done => break,
                Progress::Wants => {}
            }
            loop {
                self.socket.readable().await.map_err(broke)?;
                match session.fill(|room| self.socket.try_read(room)) {
                    Ok(0) => return Err("the source closed the connection during the TLS handshake".to_owned()),
                    Ok(_) => break,
                    Err(error) if retried(&error) => {}
                    Err(error) => return Err(broke(error)),
                }
            }
        }
        if !session.speaks_ours() {
            return Err("what connected speaks TLS, but not this protocol".to_owned());
        }
        self.tls = Some(Mutex::new(session));
        self.write_all(&[WELCOME]).await.map_err(broke)
    }

    /// Reads what there is; 0 is the end.
    pub(crate) async fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        let Some(tls) = &self.tls else {
            loop {
                self.socket.readable().await?;
                match self.socket.try_read(into) {
                    Err(error) if retried(&error) => {}
                    other => return other,
                }
            }
        };
        loop {
            {
                let mut tls = lock(tls);
                let have = tls.read(into)?;
                if have > 0 || tls.is_closed() || into.is_empty() {
                    return Ok(have);
                }
            }
            self.socket.readable().await?;
            match lock(tls).fill(|room| self.socket.try_read(room)) {
                Ok(0) => return Ok(0),
                Err(error) if !retried(&error) => return Err(error),
                Ok(_) | Err(_) => {}
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
        let Some(tls) = &self.tls else {
            return self.write_plain(bytes).await;
        };
        while !bytes.is_empty() {
            let (piece, rest) = bytes.split_at(bytes.len().min(PIECE_BYTES));
            lock(tls).write(piece)?;
            bytes = rest;
            loop {
                self.socket.writable().await?;
                let mut tls = lock(tls);
                if tls.outgoing().is_empty() {
                    break;
                }
                match self.socket.try_write(tls.outgoing()) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(n) => tls.left(n),
                    Err(error) if retried(&error) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Writes all of `bytes` as they are, below TLS.
    pub(crate) async fn write_plain(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = self.write_some(bytes).await?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    async fn write_some(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            self.socket.writable().await?;
            match self.socket.try_write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Err(error) if retried(&error) => {}
                other => return other,
            }
        }
    }

    /// Tells the peer that nothing more comes. Messages say themselves which is the last, so TLS adds no word of its own.
    pub(crate) fn end_of_writing(&self) {
        if let Err(error) = SockRef::from(&self.socket).shutdown(Shutdown::Write) {
            tracing::trace!(%error, "the control connection was closed already");
        }
    }
}

fn lock(tls: &Mutex<Session>) -> MutexGuard<'_, Session> {
    tls.lock().unwrap_or_else(PoisonError::into_inner)
}

fn retried(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}
