//! A source's control loop: the engine, and everything that it speaks with.

use crate::answers::Answers;
use crate::control::{Control, Incoming};
use crate::data::{Command, Pacer, Sender, Totals};
use crate::handle::{Finished, Watch};
use crate::pulse::{Held, Pulse};
use crate::transport::{self, AsyncSocket, Closer};
use crate::worker::SourceWorker;
use crate::{Address, Compress, Error, Guest, SendOptions, report};
use engine::{Ask, Ending, Outcome, Role, Source, SourceAction, SourceEvent, Step};
use std::sync::Arc;
use std::sync::mpsc as blocking;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tracing::{Instrument, info_span};
use wire::{ConnectionRole, Message, Preamble, SessionId};

/// Events that threads may be ahead of the loop.
const AHEAD: usize = 256;

/// The least time after which a receiver may be taken for dead, as the engine has it.
const MIN_PEER_TIMEOUT: Duration = Duration::from_millis(20);

/// How long the data threads may take to notice that their sockets were closed.
const THREADS_TIMEOUT: Duration = Duration::from_secs(2);

/// Sends `guest`.
pub(crate) async fn run(guest: Guest, to: Address, options: SendOptions, watch: Watch, started: Instant) -> Finished {
    let span = info_span!("send", %to);
    let sending = async move {
        let opened = match may_begin(&guest, &options) {
            Ok(()) => open(&to, &options, &watch).await,
            Err(why) => Err((Ending::Refused, why)),
        };
        let control = match opened {
            Ok(control) => control,
            Err((ending, error)) => {
                tracing::info!(%ending, error, "nothing was sent");
                let mut outcome = report::ended(Role::Source, ending, error, started.elapsed().as_secs_f64() * 1000.0);
                outcome.report.ram_bytes = guest.ram.layout().total_bytes();
                outcome.report.streams = options.source.streams;
                outcome.report.balloon.dialect = guest.free_pages.dialect().to_owned();
                return Finished {
                    outcome,
                    guest: Some(guest),
                };
            }
        };
        Sending::start(guest, to, options, watch, started, control).await
    };
    sending.instrument(span).await
}

/// Refuses what cannot be done with this guest, before anybody is troubled: hints asked for of one that cannot give any
/// (case 32). What `--ask auto` makes of such a guest, the engine decides.
fn may_begin(guest: &Guest, options: &SendOptions) -> Result<(), String> {
    if options.source.ask != Ask::Always || !options.source.skip.free {
        return Ok(());
    }
    guest.free_pages.can_ask().map_err(|reason| {
        format!("the guest is to be asked for its free pages (--ask always), and cannot be: {reason}; leave --ask out")
    })
}

/// A control connection that has sent its preamble.
struct Opened {
    control: Control,
    session: SessionId,
}

/// Checks the settings and opens the control connection.
async fn open(to: &Address, options: &SendOptions, watch: &Watch) -> Result<Opened, (Ending, String)> {
    let failed = |e: Error| (Ending::Failed, e.to_string());
    options.check().map_err(|e| (Ending::Refused, e.to_string()))?;
    let session = draw_session().map_err(failed)?;
    let socket = tokio::select! {
        biased;
        () = watch.cancelled() => return Err((Ending::Cancelled, "cancelled before the receiver was reached".to_owned())),
        socket = connect(to, options.connect_timeout) => socket.map_err(failed)?,
    };
    let preamble = Preamble {
        versions: wire::VERSIONS,
        session,
        role: ConnectionRole::Control,
    };
    let written = timeout(options.connect_timeout, socket.write_all(&preamble.encode())).await;
    let written = written.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
    written.map_err(|e| failed(Error::io(format!("greeting the receiver at {to}"), e)))?;
    tracing::info!(%session, "connected");
    Ok(Opened {
        control: Control::start(socket, true),
        session,
    })
}

fn draw_session() -> Result<SessionId, Error> {
    let mut id = [0; 16];
    let drawn = rustix::rand::getrandom(&mut id[..], rustix::rand::GetRandomFlags::empty());
    match drawn {
        Ok(16) => Ok(SessionId(id)),
        Ok(_) => Err(Error::io(
            "drawing a session number",
            std::io::ErrorKind::UnexpectedEof.into(),
        )),
        Err(error) => Err(Error::io("drawing a session number", error.into())),
    }
}

/// Connects on a thread of its own: looking a name up blocks, for as long as the system likes.
async fn connect(to: &Address, within: Duration) -> Result<AsyncSocket, Error> {
    let failed = |source| Error::Connect {
        address: to.clone(),
        source,
    };
    let (done, connected) = oneshot::channel();
    let address = to.clone();
    let thread = std::thread::Builder::new().name("ferry-connect".to_owned());
    thread
        .spawn(move || {
            if done.send(transport::connect(&address, within, None)).is_err() {
                tracing::debug!("a connection came too late");
            }
        })
        .map_err(failed)?;
    // The thread keeps to the time itself, but for a name that takes longer.
    let socket = match timeout(within + Duration::from_millis(200), connected).await {
        Ok(Ok(socket)) => socket?,
        Ok(Err(_)) => return Err(failed(std::io::Error::other("the connecting thread died"))),
        Err(_) => return Err(failed(std::io::ErrorKind::TimedOut.into())),
    };
    AsyncSocket::new(socket).map_err(failed)
}

/// A source that is connected.
struct Sending {
    engine: Source,
    control: Control,
    worker: SourceWorker,
    streams: Vec<blocking::Sender<Command>>,
    closer: Arc<Closer>,
    answers: Arc<Answers>,
    events: mpsc::Receiver<SourceEvent>,
    pulse: Pulse,
    compress: Compress,
    /// What the streams pack, and may.
    totals: Arc<Totals>,
    /// Whether the receiver has accepted.
    accepted: bool,
    /// A data stream's failure, held back for a moment: the receiver's own reason may be on its way.
    held: Held<SourceEvent>,
}

impl Sending {
    async fn start(
        guest: Guest,
        to: Address,
        options: SendOptions,
        watch: Watch,
        started: Instant,
        opened: Opened,
    ) -> Finished {
        let (config, layout) = (options.source.clone(), Arc::clone(guest.ram.layout()));
        let (machine, running) = (guest.machine.config(), guest.machine.is_running());
        let answers = Answers::new(&layout);
        let (out, events) = mpsc::channel(AHEAD);
        let closer = Arc::new(Closer::default());
        let totals = Arc::new(Totals::default());
        let streams = if config.dry_run {
            Vec::new()
        } else {
            start_streams(&guest, &to, &options, opened.session, (&closer, &totals), &out)
        };
        let worker = match SourceWorker::start(guest, config.skip.hole, Arc::clone(&answers), out) {
            Ok(worker) => worker,
            Err((error, guest)) => {
                closer.close();
                let error = format!("starting the guest's thread: {error}");
                let outcome = report::failed(Role::Source, error, started.elapsed().as_secs_f64() * 1000.0);
                return Finished { outcome, guest };
            }
        };
        let engine = Source::new(config, machine, layout, running, started.elapsed());
        let mut sending = Sending {
            engine,
            control: opened.control,
            worker,
            streams,
            closer,
            answers,
            events,
            pulse: Pulse::new(watch, started),
            compress: options.compress,
            totals,
            accepted: false,
            held: Held::default(),
        };
        let outcome = sending.drive().await;
        sending.finish(outcome).await
    }

    /// Drives the engine until it has finished.
    async fn drive(&mut self) -> Outcome {
        loop {
            while let Some(action) = self.engine.poll_action() {
                if let Some(outcome) = self.carry_out(action) {
                    self.pulse.publish(self.engine.progress());
                    return *outcome;
                }
            }
            self.pulse.tick(|| self.engine.progress());
            let deadline = self.engine.poll_timeout();
            tokio::select! {
                biased;
                () = self.pulse.cancelled() => self.handle(SourceEvent::Cancel),
                incoming = self.control.next() => self.incoming(incoming),
                event = self.events.recv() => self.event(event),
                () = self.answers.arrived() => self.answers(),
                event = self.held.due() => self.handle(event),
                () = self.pulse.until(deadline) => self.engine.handle_timeout(self.pulse.now()),
            }
        }
    }

    fn handle(&mut self, event: SourceEvent) {
        self.engine.handle(event, self.pulse.now());
    }

    fn incoming(&mut self, incoming: Incoming) {
        let event = match incoming {
            Incoming::Message(Message::Offer(offer)) if !self.accepted => {
                self.totals.offer(offer.codecs);
                // Whoever makes offers speaks version 2.
                self.engine.may_send_state_early();
                return;
            }
            Incoming::Message(Message::Accept(accept)) => match self.totals.check(self.compress) {
                Ok(()) => {
                    self.accepted = true;
                    SourceEvent::Message(Message::Accept(accept))
                }
                Err(reason) => self.refuse(reason),
            },
            Incoming::Message(message) => SourceEvent::Message(message),
            // It refuses us, though it cannot say so in a message that we both know.
            Incoming::Version(reason) => SourceEvent::Message(Message::Refuse { reasons: vec![reason] }),
            Incoming::Malformed(error) => SourceEvent::Failed {
                step: Step::Control,
                error,
            },
            Incoming::Gone(error) => SourceEvent::PeerGone { error },
        };
        self.handle(event);
    }

    /// This side refuses what the receiver would take: tells it, and ends as if it had refused.
    fn refuse(&mut self, reason: String) -> SourceEvent {
        let abort = Message::Abort {
            reason: reason.clone(),
            cause: wire::AbortCause::Failed,
        };
        if let Err(error) = self.control.transmit(&abort) {
            tracing::warn!(%error, "the receiver is not told that it was refused");
        }
        SourceEvent::Message(Message::Refuse { reasons: vec![reason] })
    }

    fn event(&mut self, event: Option<SourceEvent>) {
        match event {
            Some(event @ (SourceEvent::Failed { step: Step::Send, .. } | SourceEvent::StreamGone { .. })) => {
                tracing::debug!(?event, "a data stream failed");
                self.held.hold(event);
            }
            Some(event) => self.handle(event),
            // The worker holds a sender as long as it lives.
            None => self.handle(SourceEvent::Failed {
                step: Step::Control,
                error: "the guest's thread died".to_owned(),
            }),
        }
    }

    fn answers(&mut self) {
        let (session, answers) = self.answers.take_out();
        for answer in answers {
            self.handle(SourceEvent::Answered { session, answer });
        }
    }

    /// Carries an action out, or has it carried out; returns the outcome of the last one.
    fn carry_out(&mut self, action: SourceAction) -> Option<Box<Outcome>> {
        match action {
            SourceAction::Transmit(message) => {
                if matches!(message, Message::Commit(_)) {
                    if !self.pulse.may_commit() {
                        self.failed(Step::Control, "abandoned before the guest was handed over".to_owned());
                        return None;
                    }
                    tracing::info!("the guest is handed over");
                }
                if let Err(error) = self.control.transmit(&message) {
                    self.failed(Step::Control, error.to_string());
                }
            }
            SourceAction::Send { stream, chunk } => self.command(stream, Command::Chunk(chunk)),
            SourceAction::EndRound { stream, round } => self.command(stream, Command::EndRound(round)),
            SourceAction::Finished(outcome) => return Some(outcome),
            action => {
                let step = action.step();
                tracing::info!(?step, at_ms = self.pulse.now().as_secs_f64() * 1000.0, "on the guest");
                if !self.worker.carry_out(action) {
                    self.failed(step, "the guest's thread died".to_owned());
                }
            }
        }
        None
    }

    fn command(&mut self, stream: u16, command: Command) {
        let taken = self.streams.get(usize::from(stream)).map(|s| s.send(command).is_ok());
        match taken {
            Some(true) => {}
            // Its thread has ended, and says why in an event of its own.
            Some(false) => tracing::debug!(stream, "a stream that failed is told to send"),
            None => self.failed(Step::Send, format!("there is no data stream {stream}")),
        }
    }

    fn failed(&mut self, step: Step, error: String) {
        self.handle(SourceEvent::Failed { step, error });
    }

    /// Closes everything, and collects the guest.
    async fn finish(self, mut outcome: Outcome) -> Finished {
        let Sending {
            control,
            worker,
            streams,
            closer,
            mut events,
            totals,
            compress,
            ..
        } = self;
        let control_bytes = control.bytes();
        drop(streams);
        if outcome.ending == Ending::Completed {
            // Nobody has to wait for the receiver to hang up.
            tokio::spawn(control.finish());
        } else {
            control.finish().await;
        }
        closer.close();
        let guest = tokio::task::spawn_blocking(move || worker.finish());
        let ended = async { while events.recv().await.is_some() {} };
        if timeout(THREADS_TIMEOUT, ended).await.is_err() {
            tracing::warn!("a thread of the migration does not end");
        }
        drop(events);
        let guest = guest.await.ok().flatten();
        report::complete(&mut outcome, control_bytes);
        outcome.report.compress = Some(totals.report(compress));
        tracing::info!(ending = %outcome.ending, error = outcome.error, total_ms = outcome.report.total_ms, "finished");
        Finished { outcome, guest }
    }
}

/// Starts a thread a stream; each connects by itself. A thread that cannot be started is a stream that failed.
fn start_streams(
    guest: &Guest,
    to: &Address,
    options: &SendOptions,
    session: SessionId,
    (closer, totals): (&Arc<Closer>, &Arc<Totals>),
    events: &mpsc::Sender<SourceEvent>,
) -> Vec<blocking::Sender<Command>> {
    let pacer = Arc::new(Pacer::new(options.max_bandwidth));
    let start = |stream| {
        let (commands, queue) = blocking::channel();
        let sender = Sender {
            stream,
            to: to.clone(),
            session,
            connect_timeout: options.connect_timeout,
            peer_timeout: options.source.peer_timeout.max(MIN_PEER_TIMEOUT),
            buffer_bytes: options.socket_buffer_bytes,
            skip_zero: options.source.skip.zero,
            compress: options.compress,
            streams: options.source.streams,
            totals: Arc::clone(totals),
            ram: Arc::clone(&guest.ram),
            pacer: Arc::clone(&pacer),
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
    };
    (0..options.source.streams).map(start).collect()
}
