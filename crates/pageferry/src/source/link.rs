//! A source's connections: opened once, and again each time that they are lost.

use crate::control::Control;
use crate::data::{Command, Pacer, Sender, Totals};
use crate::transport::{self, AsyncSocket, Closer};
use crate::{Address, Error, SendOptions, security};
use engine::{SourceEvent, Step};
use machine::GuestRam;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::mpsc as blocking;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use wire::{ConnectionRole, Message, Preamble, Resume, SessionId};

/// Events that streams may be ahead of the loop.
const AHEAD: usize = 256;

/// The least time after which a receiver may be taken for dead, as the engine has it.
const MIN_PEER_TIMEOUT: Duration = Duration::from_millis(20);

/// Between two attempts to reach a receiver again: after the first, and at most.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A receiver's machine that answers for so long that nobody listens has no receiver any more. (One that serves a
/// migration listens all the time; a link that is cut does not answer at all.)
const REFUSED_FOR: Duration = Duration::from_secs(3);

/// What it takes to reach the receiver.
#[derive(Clone)]
pub(super) struct Route {
    pub(super) to: Address,
    pub(super) options: SendOptions,
    pub(super) ram: Arc<dyn GuestRam>,
    pub(super) pacer: Arc<Pacer>,
    pub(super) totals: Arc<Totals>,
}

/// A control connection that has sent its preamble.
pub(super) struct Opened {
    socket: AsyncSocket,
    session: SessionId,
}

impl Opened {
    /// The session number that its connections have.
    pub(super) fn session(&self) -> SessionId {
        self.session
    }
}

/// The connections of a migration. Dropped, they are closed, and what their threads still say is not heard.
pub(super) struct Link {
    pub(super) control: Control,
    streams: Vec<blocking::Sender<Command>>,
    closer: Arc<Closer>,
    pub(super) events: mpsc::Receiver<SourceEvent>,
}

impl Link {
    /// Starts a thread a stream, none for a dry run; each connects by itself.
    pub(super) fn start(opened: Opened, route: &Route) -> Self {
        let (out, events) = mpsc::channel(AHEAD);
        let closer = Arc::new(Closer::default());
        let source = &route.options.source;
        let streams = if source.dry_run { 0 } else { source.streams };
        let start = |stream| route.start_stream(stream, opened.session, &closer, &out);
        Link {
            streams: (0..streams).map(start).collect(),
            control: Control::start(opened.socket, None),
            closer,
            events,
        }
    }

    /// Hands a command to a stream; a clause, where there is no such stream.
    pub(super) fn command(&self, stream: u16, command: Command) -> Result<(), String> {
        match self.streams.get(usize::from(stream)).map(|s| s.send(command)) {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) => {
                // Its thread has ended, and says why in an event of its own.
                tracing::debug!(stream, "a stream that failed is told to send");
                Ok(())
            }
            None => Err(format!("there is no data stream {stream}")),
        }
    }

    /// Lets go of the connections, which are broken: nobody waits for the peer.
    pub(super) fn abandon(self) -> u64 {
        let bytes = self.control.bytes();
        self.closer.close();
        tokio::spawn(self.control.finish());
        bytes
    }

    /// Lets what was transmitted leave, closes everything, and waits for the threads, for `patience` at most.
    pub(super) async fn finish(self, completed: bool, patience: Duration) -> u64 {
        let Link {
            control,
            streams,
            closer,
            mut events,
        } = self;
        let bytes = control.bytes();
        drop(streams);
        if completed {
            // Nobody has to wait for the receiver to hang up.
            tokio::spawn(control.finish());
        } else {
            control.finish().await;
        }
        closer.close();
        let ended = async { while events.recv().await.is_some() {} };
        if timeout(patience, ended).await.is_err() {
            tracing::warn!("a thread of the migration does not end");
        }
        bytes
    }
}

impl Route {
    /// Opens a control connection, of a session number of its own.
    pub(super) async fn open(&self) -> Result<Opened, Error> {
        let session = SessionId(security::draw("drawing a session number")?);
        let within = self.options.connect_timeout;
        let socket = connect(&self.to, &self.options).await?;
        let preamble = Preamble {
            versions: wire::VERSIONS,
            session,
            role: ConnectionRole::Control,
        };
        let written = timeout(within, socket.write_all(&preamble.encode())).await;
        let written = written.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()));
        written.map_err(|e| Error::io(format!("greeting the receiver at {}", self.to), e))?;
        tracing::info!(%session, "connected");
        Ok(Opened { socket, session })
    }

    /// Reaches the receiver again, trying for as long as it is let, or until nobody listens there any more: then a clause
    /// that says so. `vain`: how often that was done since the receiver last answered.
    pub(super) async fn reach_again(self, first: SessionId, mut vain: u32) -> Result<Link, String> {
        let mut refused = None;
        loop {
            tokio::time::sleep(pause_after(vain)).await;
            vain = vain.saturating_add(1);
            let error = match self.open().await {
                Ok(opened) => {
                    let link = Link::start(opened, &self);
                    let resume = Message::Resume(Resume { session: first.0 });
                    match link.control.transmit(&resume) {
                        Ok(()) => return Ok(link),
                        Err(error) => error,
                    }
                }
                Err(error) => error,
            };
            tracing::debug!(%error, "the receiver is not reached yet");
            if nobody_listens(&error) {
                let since = *refused.get_or_insert_with(Instant::now);
                if since.elapsed() >= REFUSED_FOR {
                    return Err(error.to_string());
                }
            } else {
                refused = None;
            }
        }
    }

    /// Starts a stream's thread. One that cannot be started is a stream that failed.
    fn start_stream(
        &self,
        stream: u16,
        session: SessionId,
        closer: &Arc<Closer>,
        events: &mpsc::Sender<SourceEvent>,
    ) -> blocking::Sender<Command> {
        let (commands, queue) = blocking::channel();
        let options = &self.options;
        let sender = Sender {
            stream,
            to: self.to.clone(),
            security: options.security.clone(),
            session,
            connect_timeout: options.connect_timeout,
            peer_timeout: options.source.peer_timeout.max(MIN_PEER_TIMEOUT),
            buffer_bytes: options.socket_buffer_bytes,
            skip_zero: options.source.skip.zero,
            compress: options.compress,
            checksum: options.checksum,
            streams: options.source.streams,
            totals: Arc::clone(&self.totals),
            ram: Arc::clone(&self.ram),
            pacer: Arc::clone(&self.pacer),
            closer: Arc::clone(closer),
            events: events.clone(),
        };
        let thread = std::thread::Builder::new().name(format!("ferry-send-{stream}"));
        if let Err(error) = thread.spawn(move || sender.run(queue)) {
            let event = SourceEvent::Failed {
                step: Step::Send,
                error: format!("starting the thread of data stream {stream}: {error}"),
            };
            if events.try_send(event).is_err() {
                tracing::warn!(stream, %error, "a data stream's thread could not be started");
            }
        }
        commands
    }
}

/// How long to wait after so many attempts.
fn pause_after(vain: u32) -> Duration {
    match vain {
        0 => Duration::ZERO,
        n => PAUSE.saturating_mul(1 << (n - 1).min(10)).min(LONGEST_PAUSE),
    }
}

/// Whether the machine is there and nobody listens.
fn nobody_listens(error: &Error) -> bool {
    let Error::Connect { source, .. } = error else {
        return false;
    };
    // A Unix socket's file goes with its listener.
    matches!(source.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound)
}

/// Connects on a thread of its own: looking a name up blocks, for as long as the system likes.
async fn connect(to: &Address, options: &SendOptions) -> Result<AsyncSocket, Error> {
    let within = options.connect_timeout;
    let failed = |source| Error::Connect {
        address: to.clone(),
        source,
    };
    let (done, connected) = oneshot::channel();
    let (address, security) = (to.clone(), options.security.clone());
    let thread = std::thread::Builder::new().name("ferry-connect".to_owned());
    thread
        .spawn(move || {
            if done.send(transport::connect(&address, within, &security)).is_err() {
                tracing::debug!("a connection came too late");
            }
        })
        .map_err(failed)?;
    // The thread keeps to the time itself, but for a name that takes longer.
    let socket = match timeout(within + Duration::from_millis(200), connected).await {
        Ok(Ok(socket)) => socket?,
        Ok(Err(_)) => return Err(failed(std::io::Error::other("the connecting thread died"))),
        Err(_) => return Err(failed(ErrorKind::TimedOut.into())),
    };
    AsyncSocket::new(socket).map_err(failed)
}
