//! TLS between a socket and whoever uses it, without a socket: bytes in, bytes out.
//!
//! rustls' unbuffered interface, because one connection is awaited on the runtime while it says who it is and belongs to a
//! blocking thread later, and because pages then pass through buffers of ours, which are as large as that pays.
//!
//! Invariants: the buffer for what comes in never grows while the handshake lasts, and is small then; of one record no
//! byte is handed out before it was authenticated as a whole.

use crate::security::{Side, Tls, sentence};
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncryptError, InsufficientSizeError, UnbufferedStatus, WriteTraffic,
};
use std::io;
use std::sync::Arc;

/// Room for what comes in, at first: more than the longest handshake message that rustls takes, in whole records.
const FIRST_BYTES: usize = 96 << 10;

/// The longest record, with its header.
const RECORD_BYTES: usize = 5 + (16 << 10) + 256;

/// What a record adds to at most 16 KiB: header, content type, tag.
const OVERHEAD_BYTES: usize = 5 + 1 + 16;

/// The most that rustls may want to send without anybody having written: answers to changes of keys.
const MAX_UNASKED_BYTES: usize = 1 << 20;

/// Steps without an end in one call: more than any handshake takes, so that a fault is an error and no loop.
const MAX_STEPS: usize = 64;

/// An end of a connection.
enum End {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// Bytes from `start` on, up to `end`, of a buffer that is kept.
#[derive(Default)]
struct Span {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Span {
    fn with_room(bytes: usize) -> Self {
        Span {
            bytes: vec![0; bytes],
            start: 0,
            end: 0,
        }
    }

    fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn consume(&mut self, bytes: usize) {
        self.start += bytes.min(self.end - self.start);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Room of at least `bytes` behind what is there.
    fn room(&mut self, bytes: usize) -> &mut [u8] {
        if self.bytes.len() - self.end < bytes && self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.bytes.len() - self.end < bytes {
            self.bytes.resize(self.end + bytes, 0);
        }
        &mut self.bytes[self.end..]
    }
}

/// What a step came to.
enum Now {
    /// There may be more to do at once.
    Again,
    /// The handshake is over, and nothing else is to be done.
    Ready,
    /// More has to come in.
    Blocked,
    /// The peer ended the connection in good order.
    Closed,
}

/// How far a handshake is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Done; what is outgoing still has to leave.
    Done,
    /// What is outgoing has to leave, then more has to come in.
    Wants,
}

/// One connection's TLS.
pub(super) struct Session {
    end: End,
    side: Side,
    incoming: Span,
    outgoing: Span,
    /// What was decrypted and nobody has taken.
    plain: Span,
    closed: bool,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("side", &self.side)
            .finish_non_exhaustive()
    }
}

impl Session {
    /// The source's end, which the receiver has to prove `name` to.
    pub(super) fn client(tls: &Tls, name: ServerName<'static>) -> Result<Self, rustls::Error> {
        let end = UnbufferedClientConnection::new(Arc::clone(tls.client()), name)?;
        Ok(Session::new(End::Client(end), Side::Source))
    }

    /// The receiver's end.
    pub(super) fn server(tls: &Tls) -> Result<Self, rustls::Error> {
        let end = UnbufferedServerConnection::new(Arc::clone(tls.server()))?;
        Ok(Session::new(End::Server(end), Side::Receiver))
    }

    fn new(end: End, side: Side) -> Self {
        Session {
            end,
            side,
            incoming: Span::with_room(FIRST_BYTES),
            outgoing: Span::default(),
            plain: Span::default(),
            closed: false,
        }
    }

    /// Takes larger bites from now on.
    pub(super) fn grow(&mut self, bytes: usize) {
        if self.incoming.bytes.len() < bytes {
            self.incoming.bytes.resize(bytes, 0);
        }
    }

    /// The peer's certificate, once it was verified.
    pub(super) fn peer(&self) -> Option<Arc<[u8]>> {
        let certificates = match &self.end {
            End::Client(end) => end.peer_certificates(),
            End::Server(end) => end.peer_certificates(),
        };
        certificates.and_then(<[_]>::first).map(|cert| Arc::from(cert.as_ref()))
    }

    /// Whether both sides named this application protocol.
    pub(super) fn speaks_ours(&self) -> bool {
        let protocol = match &self.end {
            End::Client(end) => end.alpn_protocol(),
            End::Server(end) => end.alpn_protocol(),
        };
        protocol == Some(crate::security::ALPN)
    }

    /// Goes on with the handshake. On an error, an alert for the peer may be outgoing.
    pub(super) fn shake(&mut self) -> Result<Progress, rustls::Error> {
        for _ in 0..MAX_STEPS {
            match self.step(None) {
                Ok(Now::Again) => {}
                Ok(Now::Ready) => return Ok(Progress::Done),
                Ok(Now::Blocked) if self.incoming.filled().len() >= FIRST_BYTES => break,
                Ok(Now::Blocked) => return Ok(Progress::Wants),
                Ok(Now::Closed) => return Err(rustls::Error::General("it was closed during the handshake".to_owned())),
                Err(error) => {
                    self.queue_alert();
                    return Err(error);
                }
            }
        }
        Err(rustls::Error::General("the handshake has no end".to_owned()))
    }

    /// After an error: what rustls wants the peer to know of it. What came in stays: rustls remembers places in it.
    fn queue_alert(&mut self) {
        for _ in 0..4 {
            if !matches!(self.step(None), Ok(Now::Again)) {
                return;
            }
        }
    }

    /// One state of rustls: puts what is to be sent into `outgoing`, and hands out what was decrypted; what is not wanted
    /// goes into `plain`.
    fn step(&mut self, taker: Option<&mut Taker<'_>>) -> Result<Now, rustls::Error> {
        let (start, end) = (self.incoming.start, self.incoming.end);
        let incoming = &mut self.incoming.bytes[start..end];
        let mut out = Out {
            outgoing: &mut self.outgoing,
            plain: &mut self.plain,
            taker,
        };
        let (discard, now) = match &mut self.end {
            End::Client(end) => out.take(end.process_tls_records(incoming)),
            End::Server(end) => out.take(end.process_tls_records(incoming)),
        };
        self.incoming.consume(discard);
        now
    }

    /// Decrypted bytes into `into`, as many as are there; `Ok(0)`: more has to come in, unless [`Session::is_closed`].
    pub(super) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        let wanted = into.len();
        self.read_pieces(wanted, &mut |piece| {
            into[done..done + piece.len()].copy_from_slice(piece);
            done += piece.len();
        })
    }

    /// Hands out decrypted bytes, as many as are there but no more than are `wanted`, in the pieces that records make, and
    /// returns how many they were; `Ok(0)`: more has to come in, unless [`Session::is_closed`].
    pub(super) fn read_pieces(&mut self, wanted: usize, take: &mut dyn FnMut(&[u8])) -> io::Result<usize> {
        if self.outgoing.filled().len() > MAX_UNASKED_BYTES {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                format!("the {} asks for new keys over and over", self.side.peer()),
            ));
        }
        let mut taker = Taker { wanted, take };
        let left_over = taker.offer(self.plain.filled());
        self.plain.consume(left_over);
        while taker.wanted > 0 && !self.closed && !self.incoming.filled().is_empty() {
            match self.step(Some(&mut taker)) {
                Ok(Now::Again) => {}
                Ok(Now::Ready | Now::Blocked) => break,
                Ok(Now::Closed) => self.closed = true,
                Err(error) => return Err(self.broken(&error)),
            }
        }
        Ok(wanted - taker.wanted)
    }

    /// Whether the peer said that nothing more comes.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Has `fetch` put encrypted bytes where they belong; returns what it did.
    pub(super) fn fill(&mut self, fetch: impl FnOnce(&mut [u8]) -> io::Result<usize>) -> io::Result<usize> {
        let room = self.incoming.room(RECORD_BYTES);
        let room_bytes = room.len();
        let came = fetch(room)?.min(room_bytes);
        self.incoming.end += came;
        Ok(came)
    }

    /// Encrypts all of `bytes` behind what is outgoing.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut room = bytes.len() + bytes.len().div_ceil(16 << 10) * OVERHEAD_BYTES;
        for _ in 0..MAX_STEPS {
            let (start, end) = (self.incoming.start, self.incoming.end);
            let incoming = &mut self.incoming.bytes[start..end];
            let mut out = Out {
                outgoing: &mut self.outgoing,
                plain: &mut self.plain,
                taker: None,
            };
            let (discard, now) = match &mut self.end {
                End::Client(end) => out.encrypt(end.process_tls_records(incoming), bytes, room),
                End::Server(end) => out.encrypt(end.process_tls_records(incoming), bytes, room),
            };
            self.incoming.consume(discard);
            match now {
                Ok(Encrypted::All) => return Ok(()),
                Ok(Encrypted::NotYet) => {}
                Ok(Encrypted::Needs(bytes)) => room = bytes,
                Err(error) => return Err(self.broken(&error)),
            }
        }
        Err(io::Error::other("TLS does not take what is to be sent"))
    }

    /// What has to leave.
    pub(super) fn outgoing(&self) -> &[u8] {
        self.outgoing.filled()
    }

    /// So much of it has left.
    pub(super) fn left(&mut self, bytes: usize) {
        self.outgoing.consume(bytes);
    }

    /// A connection whose bytes were changed on the way has broken, like one that was cut: nothing of it was believed.
    fn broken(&self, error: &rustls::Error) -> io::Error {
        io::Error::new(io::ErrorKind::ConnectionAborted, sentence(self.side, error))
    }
}

/// What [`Session::write`] came to.
enum Encrypted {
    All,
    NotYet,
    Needs(usize),
}

/// Who takes what is decrypted, up to so many bytes.
struct Taker<'a> {
    wanted: usize,
    take: &'a mut dyn FnMut(&[u8]),
}

impl Taker<'_> {
    /// Takes as many of `bytes` as are wanted, and says how many.
    fn offer(&mut self, bytes: &[u8]) -> usize {
        let taken = &bytes[..bytes.len().min(self.wanted)];
        if !taken.is_empty() {
            (self.take)(taken);
        }
        self.wanted -= taken.len();
        taken.len()
    }
}

/// Where a step puts what it makes.
struct Out<'a, 'b> {
    outgoing: &'a mut Span,
    plain: &'a mut Span,
    taker: Option<&'a mut Taker<'b>>,
}

impl Out<'_, '_> {
    /// How many bytes of what came in are done with, and what is next.
    fn take<Data>(&mut self, status: UnbufferedStatus<'_, '_, Data>) -> (usize, Result<Now, rustls::Error>) {
        let UnbufferedStatus { mut discard, state } = status;
        let now = match state {
            Ok(ConnectionState::WriteTraffic(_)) => Ok(Now::Ready),
            Ok(other) => self.other(other, &mut discard),
            Err(error) => Err(error),
        };
        (discard, now)
    }

    fn other<Data>(&mut self, state: ConnectionState<'_, '_, Data>, discard: &mut usize) -> Result<Now, rustls::Error> {
        match state {
            ConnectionState::ReadTraffic(mut traffic) => {
                while let Some(record) = traffic.next_record() {
                    let record = record?;
                    *discard += record.discard;
                    self.decrypted(record.payload);
                }
                Ok(Now::Again)
            }
            ConnectionState::EncodeTlsData(mut data) => {
                let mut room = RECORD_BYTES;
                loop {
                    match data.encode(self.outgoing.room(room)) {
                        Ok(bytes) => {
                            self.outgoing.end += bytes;
                            return Ok(Now::Again);
                        }
                        Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size })) => {
                            room = required_size;
                        }
                        Err(EncodeError::AlreadyEncoded) => return Ok(Now::Again),
                    }
                }
            }
            ConnectionState::TransmitTlsData(data) => {
                // It is in `outgoing`, ahead of whatever comes.
                data.done();
                Ok(Now::Again)
            }
            ConnectionState::BlockedHandshake => Ok(Now::Blocked),
            ConnectionState::WriteTraffic(_) => Ok(Now::Ready),
            ConnectionState::PeerClosed | ConnectionState::Closed => Ok(Now::Closed),
            other => Err(rustls::Error::General(format!("an unexpected state of TLS: {other:?}"))),
        }
    }

    fn decrypted(&mut self, payload: &[u8]) {
        let taken = self.taker.as_mut().map_or(0, |taker| taker.offer(payload));
        let rest = &payload[taken..];
        if !rest.is_empty() {
            self.plain.room(rest.len())[..rest.len()].copy_from_slice(rest);
            self.plain.end += rest.len();
        }
    }

    fn encrypt<Data>(
        &mut self,
        status: UnbufferedStatus<'_, '_, Data>,
        bytes: &[u8],
        room: usize,
    ) -> (usize, Result<Encrypted, rustls::Error>) {
        let UnbufferedStatus { mut discard, state } = status;
        let done = match state {
            Ok(ConnectionState::WriteTraffic(traffic)) => self.encrypt_into(traffic, bytes, room),
            Ok(ConnectionState::BlockedHandshake) => Err(rustls::Error::HandshakeNotComplete),
            Ok(other) => self.other(other, &mut discard).map(|_| Encrypted::NotYet),
            Err(error) => Err(error),
        };
        (discard, done)
    }

    fn encrypt_into<Data>(
        &mut self,
        mut traffic: WriteTraffic<'_, Data>,
        bytes: &[u8],
        room: usize,
    ) -> Result<Encrypted, rustls::Error> {
        match traffic.encrypt(bytes, self.outgoing.room(room)) {
            Ok(written) => {
                self.outgoing.end += written;
                Ok(Encrypted::All)
            }
            Err(EncryptError::InsufficientSize(InsufficientSizeError { required_size })) => {
                Ok(Encrypted::Needs(required_size))
            }
            Err(EncryptError::EncryptExhausted) => Err(rustls::Error::EncryptError),
        }
    }
}
