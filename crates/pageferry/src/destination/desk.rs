//! Where connections say who they are before anybody believes them.
//!
//! A connection gets a short while to send a preamble of ours, and a control connection to send its first message. What
//! does neither (a port scan, an HTTP client, another version) is told so where that can be, logged and dropped: it
//! must not keep a real source out, nor end the receiver. Bounded: connections that have not said who they are, data
//! connections whose control connection has not come, and how long either may last.

use crate::control::{Incoming, read_message};
use crate::transport::{Acceptor, AsyncSocket};
use crate::{Error, Listener, ReceiveOptions};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use wire::{AbortCause, ConnectionRole, Message, Preamble, PreambleReply, SessionId, frame};

/// The most connections that have not said who they are.
const MAX_STRANGERS: usize = 128;

/// The most data connections without a control connection.
const MAX_WAITING: usize = 128;

/// How long a few last words may take.
const LAST_WORDS_TIMEOUT: Duration = Duration::from_millis(500);

/// How long to wait after the system would not accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A connection that said who it is.
pub(super) enum Arrival {
    /// A source.
    Control(Arrived),
    /// One of a source's streams.
    Data(DataConnection),
}

/// A control connection and its first message.
pub(super) struct Arrived {
    pub(super) session: SessionId,
    /// Of the protocol, as agreed on.
    pub(super) version: u16,
    pub(super) socket: AsyncSocket,
    pub(super) first: Message,
}

impl Arrived {
    /// Whether it wants checks only.
    pub(super) fn only_asks(&self) -> bool {
        matches!(&self.first, Message::Hello(hello) if hello.dry_run)
    }

    /// Data streams that it will open.
    pub(super) fn streams(&self) -> u16 {
        match &self.first {
            Message::Hello(hello) if !hello.dry_run => hello.streams,
            _ => 0,
        }
    }
}

/// A data connection.
pub(super) struct DataConnection {
    pub(super) session: SessionId,
    pub(super) stream: u16,
    /// Of the protocol, as agreed on.
    pub(super) version: u16,
    pub(super) socket: AsyncSocket,
    since: Instant,
}

/// The desk.
pub(super) struct Desk {
    arrivals: mpsc::Receiver<Arrival>,
    task: JoinHandle<()>,
    /// Data connections that were faster than their control connection.
    waiting: Vec<DataConnection>,
    patience: Duration,
}

impl Desk {
    pub(super) fn open(listener: &Listener, options: &ReceiveOptions) -> Result<Self, Error> {
        let acceptor = listener.accepting(options.socket_buffer_bytes)?;
        let (out, arrivals) = mpsc::channel(MAX_STRANGERS);
        let patience = options.handshake_timeout;
        Ok(Desk {
            arrivals,
            task: tokio::spawn(accept(acceptor, patience, out)),
            waiting: Vec::new(),
            patience,
        })
    }

    /// The next connection that said who it is.
    pub(super) async fn next(&mut self) -> Arrival {
        match self.arrivals.recv().await {
            Some(arrival) => arrival,
            // The accepting task never ends by itself.
            None => std::future::pending().await,
        }
    }

    /// Keeps a data connection for a control connection that is still to come.
    pub(super) fn keep(&mut self, data: DataConnection) {
        let patience = self.patience;
        self.waiting.retain(|waiting| waiting.since.elapsed() < patience);
        if self.waiting.len() >= MAX_WAITING {
            tracing::warn!("too many data connections of no known migration: the oldest is dropped");
            self.waiting.remove(0);
        }
        self.waiting.push(data);
    }

    /// The data connections of `session` that were kept; all others are dropped, as their sources are not served.
    pub(super) fn take_waiting(&mut self, session: SessionId) -> Vec<DataConnection> {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|data| data.session == session);
        waiting
    }

    /// Accepts no more.
    pub(super) fn close(self) {
        self.task.abort();
    }
}

/// Tells a source that is not served now why that is.
pub(super) fn turn_away(arrived: Arrived, why: &'static str) {
    tracing::warn!(session = %arrived.session, why, "a source is turned away");
    tokio::spawn(async move {
        let reasons = vec![why.to_owned()];
        last_words(&arrived.socket, &Message::Refuse { reasons }).await;
    });
}

/// Sends a message before a connection is dropped, and waits a moment for the peer to have read it.
async fn last_words(socket: &AsyncSocket, message: &Message) {
    let talk = async {
        if let Ok(bytes) = frame::encode(message)
            && socket.write_all(&bytes).await.is_ok()
        {
            socket.end_of_writing();
            let mut rest = [0; 4096];
            while matches!(socket.read(&mut rest).await, Ok(n) if n > 0) {}
        }
    };
    if timeout(LAST_WORDS_TIMEOUT, talk).await.is_err() {
        tracing::debug!("a connection that is dropped does not close");
    }
}

async fn accept(acceptor: Acceptor, patience: Duration, out: mpsc::Sender<Arrival>) {
    let strangers = Arc::new(Semaphore::new(MAX_STRANGERS));
    loop {
        let Ok(place) = Arc::clone(&strangers).acquire_owned().await else {
            return;
        };
        let socket = match acceptor.accept().await {
            Ok(socket) => socket,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let out = out.clone();
        tokio::spawn(async move {
            match timeout(patience, introduce(socket)).await {
                Ok(Ok(arrival)) => {
                    if out.send(arrival).await.is_err() {
                        tracing::debug!("a connection came after the end");
                    }
                }
                Ok(Err(why)) => tracing::warn!(why, "a connection is dropped"),
                Err(_) => tracing::warn!("a connection that did not say who it is, is dropped"),
            }
            drop(place);
        });
    }
}

/// Reads who a connection is.
async fn introduce(socket: AsyncSocket) -> Result<Arrival, String> {
    let preamble = read_preamble(&socket).await?;
    let reply = PreambleReply::answer(wire::VERSIONS, preamble.versions);
    let replied = socket.write_all(&reply.encode()).await;
    replied.map_err(|e| format!("answering a connection: {e}"))?;
    if reply.version == 0 {
        return Err(format!(
            "a source speaks protocol versions {}, we speak {}; upgrade the older one",
            preamble.versions, reply.ours
        ));
    }
    let session = preamble.session;
    match preamble.role {
        ConnectionRole::Data { stream } => Ok(Arrival::Data(DataConnection {
            session,
            stream,
            version: reply.version,
            socket,
            since: Instant::now(),
        })),
        ConnectionRole::Control => match read_message(&socket, reply.version, &AtomicU64::new(0)).await {
            Ok(first) => Ok(Arrival::Control(Arrived {
                session,
                version: reply.version,
                socket,
                first,
            })),
            Err(Incoming::Malformed(reason)) => {
                let abort = Message::Abort {
                    reason: format!("the first message: {reason}"),
                    cause: AbortCause::Failed,
                };
                last_words(&socket, &abort).await;
                Err(format!("a source's first message: {reason}"))
            }
            Err(other) => Err(format!("a source sent no first message: {other:?}")),
        },
    }
}

async fn read_preamble(socket: &AsyncSocket) -> Result<Preamble, String> {
    let mut buffer = [0; wire::PREAMBLE_BYTES];
    let mut have = 0;
    while have < buffer.len() {
        match socket.read(&mut buffer[have..]).await {
            Ok(0) => return Err(format!("it was closed after {have} bytes")),
            Ok(n) => have += n,
            Err(error) => return Err(format!("it broke: {error}")),
        }
        wire::check_magic(&buffer[..have]).map_err(|e| e.to_string())?;
    }
    Preamble::decode(&buffer).map_err(|e| e.to_string())
}
