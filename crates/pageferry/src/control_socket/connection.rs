//! A client's connection: one task that reads requests, one that writes answers and events.
//!
//! A client waits for its answer before its next request is read, but for `migrate`, whose answer comes at the
//! migration's end. What it does not read fills its own bounded queue and nobody else's: events are left out then, and a
//! client that takes no answer for [`WRITE_WITHIN`] is dropped.

use super::host::{Command, Shared};
use super::lines::{Lines, NoLine};
use super::protocol::{self, Malformed, Method, Operation, Request};
use super::{CONTROL_VERSION, MAX_CLIENTS, MAX_REQUEST_BYTES};
use serde_json::{Value, json};
use std::os::unix::net::UnixListener as BlockingListener;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

/// How long a client may leave an answer unread.
const WRITE_WITHIN: Duration = Duration::from_secs(10);

/// How long what a client said before it hung up may take to be read.
const LAST_WORDS_WITHIN: Duration = Duration::from_secs(1);

/// Answers that a client may leave unread.
const ANSWERS: usize = 16;

/// After a connection could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// What connections need of the host.
#[derive(Clone)]
pub(super) struct Service {
    pub(super) shared: Arc<Shared>,
    pub(super) commands: mpsc::Sender<Command>,
}

/// Accepts clients until all is over, then waits until each has got its last answers.
pub(super) async fn accept(socket: BlockingListener, service: Service, mut over: watch::Receiver<bool>) {
    let listener = match socket
        .set_nonblocking(true)
        .and_then(|()| UnixListener::from_std(socket))
    {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!("the control socket cannot be served: {error}");
            // The guest goes on without.
            let _ = over.wait_for(|over| *over).await;
            return;
        }
    };
    let places = Arc::new(Semaphore::new(MAX_CLIENTS));
    let mut clients = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            // An error says that the host is gone, which is as much an end.
            _ = over.wait_for(|over| *over) => break,
            Some(_) = clients.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => match Arc::clone(&places).try_acquire_owned() {
                Ok(place) => {
                    let (service, over) = (service.clone(), over.clone());
                    clients.spawn(async move {
                        converse(stream, service, over).await;
                        drop(place);
                    });
                }
                Err(_) => turn_away(&stream),
            },
            Err(error) => {
                tracing::warn!("a control client could not be accepted: {error}");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
    drop((listener, service));
    while clients.join_next().await.is_some() {}
}

/// Says that there are too many; at once, or not at all.
fn turn_away(stream: &UnixStream) {
    let error = format!("{MAX_CLIENTS} clients are connected already: try again when one has gone");
    let line = protocol::answer(None, &Err(error));
    if let Err(error) = stream.try_write(line.as_bytes()) {
        tracing::debug!("a client too many is not told: {error}");
    }
}

/// Serves a client until it goes, or all is over.
async fn converse(stream: UnixStream, service: Service, over: watch::Receiver<bool>) {
    let (from, to) = stream.into_split();
    let (answers, queue) = mpsc::channel(ANSWERS);
    let (following, follow) = watch::channel(false);
    let writer = tokio::spawn(write(to, queue, follow, Arc::clone(&service.shared)));
    let mut client = Client {
        service,
        answers,
        following,
        migrating: None,
    };
    client.read(from, over).await;
    let Client { answers, migrating, .. } = client;
    if let Some((_, answering)) = migrating {
        // The migration goes on; its answer goes out, or is lost with the client.
        if let Err(died) = answering.await {
            tracing::warn!("an answer's task died: {died}");
        }
    }
    drop(answers);
    if let Err(died) = writer.await {
        tracing::warn!("a control client's task died: {died}");
    }
}

struct Client {
    service: Service,
    answers: mpsc::Sender<String>,
    following: watch::Sender<bool>,
    /// The number of a `migrate` that is not answered yet, and who will.
    migrating: Option<(u64, JoinHandle<()>)>,
}

impl Client {
    /// Serves requests until the client has gone, or all is over.
    async fn read(&mut self, from: OwnedReadHalf, over: watch::Receiver<bool>) {
        let mut lines = Lines::new(from, MAX_REQUEST_BYTES);
        self.serve_all(&mut lines, over).await;
        if self.answers.is_closed() && timeout(LAST_WORDS_WITHIN, self.last_words(&mut lines)).await.is_err() {
            tracing::debug!("a control client reads no answers and goes on asking: it is dropped");
        }
    }

    /// Whoever hung up without waiting for answers may have said `cancel` before, which is not lost for that. Nothing else
    /// is done for one who does not hear what came of it.
    async fn last_words(&self, lines: &mut Lines<OwnedReadHalf>) {
        while let Ok(line) = lines.next().await {
            if let Ok(Request {
                method: Method::Cancel, ..
            }) = protocol::parse(line)
                && let Err(error) = self.service.shared.cancel()
            {
                tracing::debug!(error, "a cancel came too late");
            }
        }
    }

    async fn serve_all(&mut self, lines: &mut Lines<OwnedReadHalf>, mut over: watch::Receiver<bool>) {
        loop {
            let line = tokio::select! {
                biased;
                _ = over.wait_for(|over| *over) => return,
                () = self.answers.closed() => return,
                line = lines.next() => line,
            };
            let request = match line {
                Ok(line) if line.iter().all(u8::is_ascii_whitespace) => continue,
                Ok(line) => protocol::parse(line),
                Err(NoLine::End) => return,
                Err(NoLine::Broken(error)) => {
                    tracing::debug!("a control client is gone: {error}");
                    return;
                }
                Err(NoLine::TooLong) => {
                    let error = format!("a request has {MAX_REQUEST_BYTES} bytes at most; this connection ends here");
                    self.say(None, &Err(error)).await;
                    return;
                }
            };
            let said = match request {
                Ok(request) => self.serve(request).await,
                Err(Malformed { id, error }) => self.say(id, &Err(error)).await,
            };
            if !said {
                return;
            }
        }
    }

    /// Answers a request; `false` if the client does not take answers.
    async fn serve(&mut self, Request { id, method }: Request) -> bool {
        let shared = &self.service.shared;
        let result = match method {
            Method::Version => Ok(json!({
                "version": CONTROL_VERSION,
                "program": format!("pageferry {}", env!("CARGO_PKG_VERSION")),
            })),
            Method::Status => Ok(shared.status()),
            Method::Progress { follow } => {
                if let Some(follow) = follow {
                    self.following.send_replace(follow);
                }
                let mut progress = shared.progress();
                progress["following"] = (*self.following.borrow()).into();
                Ok(progress)
            }
            Method::Cancel => shared.cancel(),
            Method::Set(tuning) => shared.set(tuning),
            Method::Guest(operation) => return self.operate(id, operation).await,
        };
        self.say(id, &result).await
    }

    /// Has something done to the guest.
    async fn operate(&mut self, id: u64, operation: Operation) -> bool {
        let migrates = matches!(operation, Operation::Migrate(_));
        if let Some((open, answering)) = &self.migrating
            && !answering.is_finished()
            && *open == id
        {
            let error = format!("request {id} is not answered yet: give another number");
            return self.say(Some(id), &Err(error)).await;
        }
        let (reply, replied) = oneshot::channel();
        if self.service.commands.send(Command { operation, reply }).await.is_err() {
            return self.say(id, &gone()).await;
        }
        let first = self
            .migrating
            .as_ref()
            .is_none_or(|(_, answering)| answering.is_finished());
        if migrates && first {
            let answers = self.answers.clone();
            let answering = tokio::spawn(async move {
                let result = replied.await.unwrap_or_else(|_| gone());
                say(&answers, Some(id), &result).await;
            });
            self.migrating = Some((id, answering));
            return true;
        }
        let result = replied.await.unwrap_or_else(|_| gone());
        self.say(id, &result).await
    }

    async fn say(&self, id: impl Into<Option<u64>>, result: &Result<Value, String>) -> bool {
        say(&self.answers, id.into(), result).await
    }
}

fn gone() -> Result<Value, String> {
    Err("the guest is no longer here".to_owned())
}

/// Queues an answer; `false` if the client does not take answers.
async fn say(answers: &mpsc::Sender<String>, id: Option<u64>, result: &Result<Value, String>) -> bool {
    let line = protocol::answer(id, result);
    matches!(timeout(WRITE_WITHIN, answers.send(line)).await, Ok(Ok(())))
}

/// Writes answers, and events while they are wanted, until no answer can come any more or the client takes none.
async fn write(
    mut to: OwnedWriteHalf,
    mut answers: mpsc::Receiver<String>,
    mut follow: watch::Receiver<bool>,
    shared: Arc<Shared>,
) {
    let mut events: Option<broadcast::Receiver<Arc<str>>> = None;
    loop {
        let line: Arc<str> = tokio::select! {
            biased;
            // Before the answer that says so: nothing that happens after it is missed.
            Ok(()) = follow.changed() => {
                events = follow.borrow_and_update().then(|| shared.follow());
                continue;
            }
            answer = answers.recv() => match answer {
                Some(line) => line.into(),
                None => break,
            },
            event = next(&mut events) => event,
        };
        if !matches!(timeout(WRITE_WITHIN, to.write_all(line.as_bytes())).await, Ok(Ok(()))) {
            tracing::debug!("a control client does not read: it is dropped");
            return;
        }
    }
    // What happened last, if it fits: nobody waits for it.
    while let Some(line) = events.as_mut().and_then(|events| events.try_recv().ok()) {
        if to.try_write(line.as_bytes()).is_err() {
            break;
        }
    }
}

/// The next event; for ever where none is wanted. What a slow client missed, it missed.
async fn next(events: &mut Option<broadcast::Receiver<Arc<str>>>) -> Arc<str> {
    loop {
        match events {
            None => return std::future::pending().await,
            Some(following) => match following.recv().await {
                Ok(line) => return line,
                Err(RecvError::Lagged(missed)) => tracing::debug!(missed, "a control client is slow"),
                Err(RecvError::Closed) => *events = None,
            },
        }
    }
}
