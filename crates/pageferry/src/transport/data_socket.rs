//! A blocking stream socket, with or without TLS: what a data thread owns, and what a source connects by.

use super::WELCOME;
use super::tls::{Progress, Session};
use crate::Error;
use crate::security::{Side, Tls, refused_by_tls, sentence};
use rustls::pki_types::ServerName;
use socket2::Socket;
use std::io::{self, Read, Write};
use std::ops::Deref;

/// Room for what comes in encrypted, once pages come: it is written, decrypted and read again while it is in a core's own
/// cache.
const INCOMING_BYTES: usize = 256 << 10;

/// Encrypted bytes that leave at once: the receiver works on these while the next are made, in a core's own cache too.
const OUTGOING_BYTES: usize = 128 << 10;

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
    pub(super) fn from_parts(socket: Socket, tls: Option<Session>) -> Self {
        DataSocket {
            socket,
            tls: tls.map(Box::new),
        }
    }

    pub(super) fn into_parts(self) -> (Socket, Option<Session>) {
        (self.socket, self.tls.map(|tls| *tls))
    }

    /// The connection, if what goes through it is encrypted here.
    pub(crate) fn encrypted(&mut self) -> Option<Encrypted<'_>> {
        let tls = self.tls.as_mut()?;
        Some(Encrypted {
            socket: &self.socket,
            tls,
        })
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
}

/// A connection that encrypts what goes through it.
pub(crate) struct Encrypted<'a> {
    socket: &'a Socket,
    tls: &'a mut Session,
}

impl Encrypted<'_> {
    /// Bytes of a record that is full: pages that are written by so many at a time come out by whole pages.
    pub(crate) const RECORD_BYTES: usize = 16 << 10;

    /// Encrypts `bytes`, and has `write_out` write what came of all that was encrypted, once it is enough to be worth it:
    /// all of it, whatever a single write takes.
    pub(crate) fn write(
        &mut self,
        bytes: &[u8],
        write_out: &mut dyn FnMut(&Socket, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        for piece in bytes.chunks(OUTGOING_BYTES) {
            self.tls.write(piece)?;
            if self.tls.outgoing().len() >= OUTGOING_BYTES {
                self.flush(write_out)?;
            }
        }
        Ok(())
    }

    /// Has `write_out` write what is left.
    pub(crate) fn flush(&mut self, write_out: &mut dyn FnMut(&Socket, &[u8]) -> io::Result<()>) -> io::Result<()> {
        let outgoing = self.tls.outgoing().len();
        if outgoing > 0 {
            write_out(self.socket, self.tls.outgoing())?;
            self.tls.left(outgoing);
        }
        Ok(())
    }

    /// Hands out the next bytes, no more than are `wanted`, in the pieces that records make, and returns how many they
    /// were: 0 is the end of the stream.
    pub(crate) fn read_pieces(&mut self, wanted: usize, take: &mut dyn FnMut(&[u8])) -> io::Result<usize> {
        loop {
            let have = self.tls.read_pieces(wanted, take)?;
            if have > 0 || self.tls.is_closed() || wanted == 0 {
                return Ok(have);
            }
            if self.tls.fill(|room| (&*self.socket).read(room))? == 0 {
                return Ok(0);
            }
        }
    }
}

impl Read for DataSocket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(mut encrypted) = self.encrypted() else {
            return (&self.socket).read(into);
        };
        let (wanted, mut done) = (into.len(), 0);
        encrypted.read_pieces(wanted, &mut |piece| {
            into[done..done + piece.len()].copy_from_slice(piece);
            done += piece.len();
        })
    }
}

/// All of a few bytes, as greetings are: for pages there is more to it.
impl Write for DataSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut write_out = |mut socket: &Socket, bytes: &[u8]| socket.write_all(bytes);
        match self.encrypted() {
            None => write_out(&self.socket, bytes)?,
            Some(mut encrypted) => {
                encrypted.write(bytes, &mut write_out)?;
                encrypted.flush(&mut write_out)?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
