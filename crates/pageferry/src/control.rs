//! The control connection: frames in, frames out, a task for each direction. Specification: the `wire` crate.
//!
//! Reading is a task of its own because a frame that was half read when something else happened must not be lost.
//! Writing is one because a peer that does not read must not stop the control loop. What waits to be written is bounded
//! by what the engine has to say in one migration.

use crate::Error;
use crate::transport::AsyncSocket;
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use wire::{Message, PreambleReply, frame};

/// Messages that are decoded ahead of the loop.
const AHEAD: usize = 16;

/// How long what was transmitted may take to leave, at the end.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the peer may take to close its side, at the end: whoever closes a socket with something unread in it
/// resets the connection, and the peer may lose the last words.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);

/// What the peer did.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// A receiver has picked this version of the protocol: comes once, first.
    Agreed(u16),
    /// It sent a message.
    Message(Message),
    /// It speaks no version of the protocol that we do: a sentence.
    Version(String),
    /// It sent what is no message: a clause.
    Malformed(String),
    /// It closed the connection, or that broke: a clause.
    Gone(String),
}

/// A control connection.
#[derive(Debug)]
pub(crate) struct Control {
    outgoing: mpsc::UnboundedSender<Bytes>,
    incoming: mpsc::Receiver<Incoming>,
    writer: JoinHandle<()>,
    reader: JoinHandle<()>,
    bytes: Arc<AtomicU64>,
}

impl Control {
    /// Takes a connection over, of a `version` of the protocol that was agreed on. `None`: of a source, which has sent its
    /// preamble and awaits the answer to it first.
    pub(crate) fn start(socket: AsyncSocket, version: Option<u16>) -> Self {
        let socket = Arc::new(socket);
        let bytes = Arc::new(AtomicU64::new(0));
        let (outgoing, queue) = mpsc::unbounded_channel();
        let (out, incoming) = mpsc::channel(AHEAD);
        let reader = tokio::spawn(read(Arc::clone(&socket), version, out, Arc::clone(&bytes)));
        let writer = tokio::spawn(write(socket, queue, Arc::clone(&bytes)));
        Control {
            outgoing,
            incoming,
            writer,
            reader,
            bytes,
        }
    }

    /// Queues a message.
    pub(crate) fn transmit(&self, message: &Message) -> Result<(), Error> {
        let bytes = frame::encode(message)?;
        if self.outgoing.send(bytes).is_err() {
            // The reader finds the broken connection too, and says so to the loop.
            tracing::debug!("a message for a peer that is gone is dropped");
        }
        Ok(())
    }

    /// What the peer did next. After `Gone`, `Malformed` and `Version` nothing comes any more: it waits for ever then.
    pub(crate) async fn next(&mut self) -> Incoming {
        match self.incoming.recv().await {
            Some(incoming) => incoming,
            None => std::future::pending().await,
        }
    }

    /// Bytes that crossed, both ways.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Lets what was transmitted leave, ends the connection, and waits for the peer to do the same: all that for a
    /// short while.
    pub(crate) async fn finish(self) {
        let Control {
            outgoing,
            mut incoming,
            mut writer,
            reader,
            ..
        } = self;
        drop(outgoing);
        if timeout(FLUSH_TIMEOUT, &mut writer).await.is_err() {
            tracing::debug!("the peer does not take the last control messages");
            writer.abort();
        }
        let until_closed = async { while incoming.recv().await.is_some() {} };
        if timeout(LINGER_TIMEOUT, until_closed).await.is_err() {
            tracing::debug!("the peer does not close its control connection");
        }
        reader.abort();
    }
}

async fn write(socket: Arc<AsyncSocket>, mut queue: mpsc::UnboundedReceiver<Bytes>, bytes: Arc<AtomicU64>) {
    while let Some(frame) = queue.recv().await {
        if let Err(error) = socket.write_all(&frame).await {
            tracing::debug!(%error, "the control connection does not take messages any more");
            return;
        }
        bytes.fetch_add(frame.len() as u64, Ordering::Relaxed);
    }
    socket.end_of_writing();
}

async fn read(socket: Arc<AsyncSocket>, version: Option<u16>, out: mpsc::Sender<Incoming>, bytes: Arc<AtomicU64>) {
    let version = match version {
        Some(version) => version,
        None => match read_reply(&socket).await {
            Ok(agreed) => {
                send(&out, Incoming::Agreed(agreed)).await;
                agreed
            }
            Err(last) => {
                send(&out, last).await;
                return;
            }
        },
    };
    loop {
        match read_message(&socket, version, &bytes).await {
            Ok(message) => {
                if !send(&out, Incoming::Message(message)).await {
                    return;
                }
            }
            Err(last) => {
                send(&out, last).await;
                return;
            }
        }
    }
}

async fn send(out: &mpsc::Sender<Incoming>, incoming: Incoming) -> bool {
    out.send(incoming).await.is_ok()
}

async fn read_reply(socket: &AsyncSocket) -> Result<u16, Incoming> {
    let mut buffer = [0; wire::REPLY_BYTES];
    let mut have = 0;
    while have < buffer.len() {
        match socket.read(&mut buffer[have..]).await {
            Ok(0) => return Err(gone("before it said that it speaks this protocol")),
            Ok(n) => have += n,
            Err(error) => return Err(broken(&error)),
        }
        wire::check_magic(&buffer[..have]).map_err(|e| Incoming::Malformed(e.to_string()))?;
    }
    let reply = PreambleReply::decode(&buffer).map_err(|e| Incoming::Malformed(e.to_string()))?;
    let version = reply.agreed(wire::VERSIONS).map_err(|_| {
        Incoming::Version(format!(
            "the receiver speaks protocol versions {}, we speak {}; upgrade the older one",
            reply.ours,
            wire::VERSIONS
        ))
    })?;
    tracing::debug!(version, "the receiver answers");
    Ok(version)
}

/// Reads one message of this version of the protocol.
pub(crate) async fn read_message(socket: &AsyncSocket, version: u16, bytes: &AtomicU64) -> Result<Message, Incoming> {
    let mut header = [0; frame::HEADER_BYTES];
    match socket.read_full(&mut header).await {
        Ok(0) => return Err(gone("")),
        Ok(n) if n < header.len() => return Err(gone("inside a control message")),
        Ok(_) => {}
        Err(error) => return Err(broken(&error)),
    }
    let header = frame::decode_header(&header).map_err(|e| Incoming::Malformed(e.to_string()))?;
    let kind = header.kind();
    if kind.since() > version {
        return Err(Incoming::Malformed(format!(
            "{}, which only peers of protocol version {} or later send",
            kind.name(),
            kind.since()
        )));
    }
    let mut payload = vec![0; header.payload_bytes()];
    match socket.read_full(&mut payload).await {
        Ok(n) if n < payload.len() => return Err(gone("inside a control message")),
        Ok(_) => {}
        Err(error) => return Err(broken(&error)),
    }
    bytes.fetch_add((frame::HEADER_BYTES + payload.len()) as u64, Ordering::Relaxed);
    frame::decode_payload(&header, &payload).map_err(|e| Incoming::Malformed(e.to_string()))
}

fn gone(place: &str) -> Incoming {
    let place = if place.is_empty() {
        String::new()
    } else {
        format!(" {place}")
    };
    Incoming::Gone(format!("it closed the control connection{place}"))
}

fn broken(error: &std::io::Error) -> Incoming {
    Incoming::Gone(format!("the control connection broke: {error}"))
}
