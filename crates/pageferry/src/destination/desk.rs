//! Where connections say who they are before anybody believes them.
//!
//! A connection gets a short while to come in by the [`door`](super::door). What does not (a port scan, an HTTP client,
//! another version, a peer without the right certificate) is told so where that can be, logged and dropped: it must not
//! keep a real source out, nor end the receiver. Bounded: connections that have not said who they are, of which the oldest
//! makes room when all places are taken; data connections whose control connection has not come; and how long either may
//! last.

use super::door::{introduce, last_words};
use crate::transport::{Acceptor, AsyncSocket};
use crate::{Error, Listener, ReceiveOptions, Security};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::timeout;
use wire::{Message, SessionId};

/// The most connections that have not said who they are. All the streams of a migration may come at once.
const MAX_STRANGERS: usize = 256;

/// How long a connection that has not said who it is keeps its place while others wait for one.
const MIN_AGE: Duration = Duration::from_millis(200);

/// The most data connections without a control connection.
const MAX_WAITING: usize = 128;

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
    pub(super) since: Instant,
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
        listener.check(&options.security)?;
        let acceptor = listener.accepting(options.socket_buffer_bytes)?;
        let (out, arrivals) = mpsc::channel(MAX_STRANGERS);
        let patience = options.handshake_timeout;
        Ok(Desk {
            arrivals,
            task: tokio::spawn(accept(acceptor, patience, options.security.clone(), out)),
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

/// A connection that has not said who it is.
struct Stranger {
    since: Instant,
    task: AbortHandle,
}

/// Connections that have not said who they are, oldest first.
#[derive(Default)]
struct Strangers(VecDeque<Stranger>);

impl Strangers {
    /// Drops the oldest one, unless it is too young for that: then how long until it is not.
    fn drop_oldest(&mut self) -> Option<Duration> {
        let oldest = self.0.front()?;
        let left = MIN_AGE.saturating_sub(oldest.since.elapsed());
        if !left.is_zero() {
            return Some(left);
        }
        oldest.task.abort();
        self.0.pop_front();
        None
    }

    /// Waits until there is a place. Who comes in numbers can keep a place for [`MIN_AGE`] only, in which a peer that has
    /// something to say has said it.
    async fn make_room(&mut self) {
        loop {
            self.0.retain(|stranger| !stranger.task.is_finished());
            if self.0.len() < MAX_STRANGERS {
                return;
            }
            if let Some(left) = self.drop_oldest() {
                tokio::time::sleep(left).await;
            }
        }
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        for stranger in &self.0 {
            stranger.task.abort();
        }
    }
}

async fn accept(acceptor: Acceptor, patience: Duration, security: Security, out: mpsc::Sender<Arrival>) {
    let security = Arc::new(security);
    let mut strangers = Strangers::default();
    loop {
        strangers.make_room().await;
        let socket = match acceptor.accept().await {
            Ok(socket) => socket,
            Err(error) => {
                // Descriptors may be used up: strangers who have had their time are the least loss.
                tracing::warn!(%error, "a connection could not be accepted");
                while !strangers.0.is_empty() && strangers.drop_oldest().is_none() {}
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (out, security) = (out.clone(), Arc::clone(&security));
        let task = tokio::spawn(async move {
            match timeout(patience, introduce(socket, &security)).await {
                Ok(Ok(arrival)) => {
                    if out.send(arrival).await.is_err() {
                        tracing::debug!("a connection came after the end");
                    }
                }
                Ok(Err(why)) => tracing::warn!(why, "a connection is dropped"),
                Err(_) => tracing::warn!("a connection that did not say who it is, is dropped"),
            }
        });
        strangers.0.push_back(Stranger {
            since: Instant::now(),
            task: task.abort_handle(),
        });
    }
}
