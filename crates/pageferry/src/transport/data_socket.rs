//! A blocking stream socket, with or without TLS: what a data thread owns, and what a source connects by.

use super::WELCOME;
use super::tls::{Progress, Session};
use crate::Error;
use crate::security::{Side, Tls, refused_by_tls, sentence};
use rustls::pki_types::ServerName;
use socket2::Socket;
use std::io::{self, Read, Write};
use std::ops::Deref;

/// Room for what comes in encrypted, once pages come.
const INCOMING_BYTES: usize = 1 << 20;

/// A socket that blocks, owned by one thread. Dereferences to the socket itself, for its settings and to close it.
#[derive(Debug)]
pub(crate) struct DataSocket {
    socket: Socket,
    tls: Option<Box<Session>>,
}

impl From<Socket> for DataSocket {
    fn from(socket: Socket) -> Self {
        DataSocket { socket, tls: None }
    }
}

impl Deref for DataSocket {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        &self.socket
    }
}

impl DataSocket {
    /// Bytes that are best encrypted at once: the receiver works on the one piece while the next is encrypted.
    pub(crate) const PIECE_BYTES: usize = 256 << 10;

    pub(super) fn from_parts(socket: Socket, tls: Option<Session>) -> Self {
        DataSocket {
            socket,
            tls: tls.map(Box::new),
        }
    }

    pub(super) fn into_parts(self) -> (Socket, Option<Session>) {
        (self.socket, self.tls.map(|tls| *tls))
    }

    /// The socket, if what goes through it goes as it is.
    pub(crate) fn plain(&self) -> Option<&Socket> {
        match self.tls {
            None => Some(&self.socket),
            Some(_) => None,
        }
    }

    /// Whether all that crosses is encrypted here.
    pub(crate) fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Makes ready for many bytes.
    pub(crate) fn expect_pages(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.grow(INCOMING_BYTES);
        }
    }

    /// The source's end of a handshake with a receiver that has to prove `name`. The socket's time-outs hold.
    pub(super) fn connect_tls(&mut self, tls: &Tls, name: ServerName<'static>) -> Result<(), Error> {
        let refused = |error: &rustls::Error| {
            let text = sentence(Side::Source, error);
            match refused_by_tls(error) {
                true => Error::Refused(text),
                false => Error::io("the TLS handshake with the receiver", io::Error::other(text)),
            }
        };
        let broke = |e: io::Error| {
            let silent = matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
            let error = if silent { io::ErrorKind::TimedOut.into() } else { e };
            Error::io("the TLS handshake with the receiver", error)
        };
        let mut session = Session::client(tls, name).map_err(|e| refused(&e))?;
        loop {
            let progress = session.shake();
            while !session.outgoing().is_empty() {
                let left = (&self.socket).write(session.outgoing()).map_err(broke)?;
                session.left(left);
            }
            match progress.map_err(|e| refused(&e))? {
                Progress::Done => break,
                Progress::Wants => {}
            }
            if session.fill(|room| (&self.socket).read(room)).map_err(broke)? == 0 {
                return Err(Error::Refused(
                    "the receiver closed the connection during the TLS handshake: it does not take TLS, or has no place"
                        .to_owned(),
                ));
            }
        }
        if !session.speaks_ours() {
            return Err(Error::Refused(
                "what answers as the receiver speaks TLS, but not this protocol".to_owned(),
            ));
        }
        self.tls = Some(Box::new(session));
        self.welcomed()
    }

    /// In TLS 1.3 a client is through before its certificate was looked at: the receiver's word that it was taken.
    fn welcomed(&mut self) -> Result<(), Error> {
        let mut byte = [0];
        match self.read(&mut byte) {
            Ok(1) if byte[0] == WELCOME => Ok(()),
            Ok(0) => Err(Error::Refused(
                "the receiver closed the connection after it saw this side's certificate".to_owned(),
            )),
            Ok(_) => Err(Error::Refused(
                "what answers as the receiver does not speak this protocol".to_owned(),
            )),
            // An alert, in words.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => Err(Error::Refused(error.to_string())),
            Err(error) => Err(Error::io("the TLS handshake with the receiver", error)),
        }
    }

    /// Writes bytes of `head` and `body` once, leaving out the first `done` of both together.
    pub(crate) fn write_parts(&self, head: &[u8], body: &[u8], done: usize) -> io::Result<usize> {
        let (ahead, behind) = (done.min(head.len()), done.saturating_sub(head.len()));
        let parts = [&head[ahead..], &body[behind.min(body.len())..]].map(io::IoSlice::new);
        (&self.socket).write_vectored(&parts)
    }

    /// Encrypts `bytes`, and has `write_out` write what came of it: all of it, whatever a single write takes. Plain sockets
    /// leave them as they are.
    pub(crate) fn write_encrypted(
        &mut self,
        bytes: &[u8],
        write_out: impl FnOnce(&Socket, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let Some(tls) = &mut self.tls else {
            return write_out(&self.socket, bytes);
        };
        tls.write(bytes)?;
        let outgoing = tls.outgoing().len();
        write_out(&self.socket, tls.outgoing())?;
        tls.left(outgoing);
        Ok(())
    }
}

impl Read for DataSocket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else {
            return (&self.socket).read(into);
        };
        loop {
            let have = tls.read(into)?;
            if have > 0 || tls.is_closed() || into.is_empty() {
                return Ok(have);
            }
            if tls.fill(|room| (&self.socket).read(room))? == 0 {
                return Ok(0);
            }
        }
    }
}

/// All of a few bytes, as greetings are: for pages there is more to it.
impl Write for DataSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_encrypted(bytes, |mut socket, bytes| socket.write_all(bytes))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
