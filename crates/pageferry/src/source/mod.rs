//! A source's control loop: the engine, and everything that it speaks with.

mod link;

use crate::answers::Answers;
use crate::control::Incoming;
use crate::data::{Command, Pacer};
use crate::handle::{Finished, Watch};
use crate::pulse::{Held, Pulse};
use crate::worker::SourceWorker;
use crate::{Address, Guest, SendOptions, report};
use engine::{Ask, Ending, Outcome, Role, Source, SourceAction, SourceEvent, Step, Tuning};
use link::{Link, Opened, Route};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tracing::{Instrument, info_span};
use wire::{Message, SessionId};

/// Events that the guest's thread may be ahead of the loop.
const AHEAD: usize = 16;

/// How long the data threads may take to notice that their sockets were closed.
const THREADS_TIMEOUT: Duration = Duration::from_secs(2);

/// Sends `guest`.
pub(crate) async fn run(guest: Guest, to: Address, options: SendOptions, watch: Watch, started: Instant) -> Finished {
    let span = info_span!("send", %to);
    let sending = async move {
        let may = may_begin(&guest, &options);
        let route = Route {
            to,
            pacer: Arc::new(Pacer::new(options.max_bandwidth)),
            ram: Arc::clone(&guest.ram),
            totals: Arc::default(),
            options,
        };
        let opened = match may {
            Ok(()) => open(&route, &watch).await,
            Err(why) => Err((Ending::Refused, why)),
        };
        let opened = match opened {
            Ok(opened) => opened,
            Err((ending, error)) => {
                tracing::info!(%ending, error, "nothing was sent");
                let mut outcome = report::ended(Role::Source, ending, error, started.elapsed().as_secs_f64() * 1000.0);
                outcome.report.ram_bytes = guest.ram.layout().total_bytes();
                outcome.report.streams = route.options.source.streams;
                outcome.report.balloon.dialect = guest.free_pages.dialect().to_owned();
                return Finished {
                    outcome,
                    guest: Some(guest),
                };
            }
        };
        Sending::start(guest, route, watch, started, opened).await
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

/// Checks the settings and opens the control connection.
async fn open(route: &Route, watch: &Watch) -> Result<Opened, (Ending, String)> {
    let checked = route.options.check();
    checked.map_err(|e| (Ending::Refused, e.to_string()))?;
    tokio::select! {
        biased;
        () = watch.cancelled() => Err((Ending::Cancelled, "cancelled before the receiver was reached".to_owned())),
        opened = route.open() => opened.map_err(|e| match e.is_refusal() {
            true => (Ending::Refused, e.to_string()),
            false => (Ending::Failed, e.to_string()),
        }),
    }
}

/// A source that is connected.
struct Sending {
    engine: Source,
    route: Route,
    /// The session number that the migration began with.
    session: SessionId,
    /// The connections; none while they are lost.
    link: Option<Link>,
    /// New ones, while they are being opened.
    reaching: Option<Reaching>,
    /// How often they were since the receiver last answered.
    vain: u32,
    /// Control bytes of connections that were lost.
    lost_bytes: u64,
    worker: SourceWorker,
    answers: Arc<Answers>,
    /// What the guest's thread says.
    events: mpsc::Receiver<SourceEvent>,
    pulse: Pulse,
    /// Whether the receiver has accepted.
    accepted: bool,
    /// A data stream's failure, held back for a moment: the receiver's own reason may be on its way.
    held: Held<SourceEvent>,
}

impl Sending {
    async fn start(guest: Guest, route: Route, watch: Watch, started: Instant, opened: Opened) -> Finished {
        let (config, layout) = (route.options.source.clone(), Arc::clone(guest.ram.layout()));
        let (machine, running) = (guest.machine.config(), guest.machine.is_running());
        let answers = Answers::new(&layout);
        let (out, events) = mpsc::channel(AHEAD);
        let worker = match SourceWorker::start(guest, config.skip.hole, Arc::clone(&answers), out) {
            Ok(worker) => worker,
            Err((error, guest)) => {
                let error = format!("starting the guest's thread: {error}");
                let outcome = report::failed(Role::Source, error, started.elapsed().as_secs_f64() * 1000.0);
                return Finished { outcome, guest };
            }
        };
        let engine = Source::new(config, machine, layout, running, started.elapsed());
        let mut sending = Sending {
            engine,
            session: opened.session(),
            link: Some(Link::start(opened, &route)),
            route,
            reaching: None,
            vain: 0,
            lost_bytes: 0,
            worker,
            answers,
            events,
            pulse: Pulse::new(watch, started),
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
                tuning = self.pulse.tuned() => self.tune(tuning),
                said = next(&mut self.link) => self.said(said),
                event = self.events.recv() => self.guest_event(event),
                reached = reached(&mut self.reaching) => self.reached(reached),
                () = self.answers.arrived() => self.answers(),
                event = self.held.due() => self.handle(event),
                () = self.pulse.until(deadline) => self.engine.handle_timeout(self.pulse.now()),
            }
        }
    }

    fn handle(&mut self, event: SourceEvent) {
        self.engine.handle(event, self.pulse.now());
    }

    fn tune(&mut self, tuning: Tuning) {
        tracing::info!(?tuning, "settings are changed");
        if let Some(most) = tuning.max_bandwidth {
            self.route.pacer.set(Some(most).filter(|most| *most > 0));
        }
        self.handle(SourceEvent::Tuned(tuning));
    }

    fn said(&mut self, said: Said) {
        match said {
            Said::Control(incoming) => self.incoming(incoming),
            Said::Stream(event @ (SourceEvent::Failed { .. } | SourceEvent::StreamGone { .. })) => {
                tracing::debug!(?event, "a data stream failed");
                self.held.hold(event);
            }
            Said::Stream(event) => self.handle(event),
        }
    }

    fn incoming(&mut self, incoming: Incoming) {
        let totals = &self.route.totals;
        let event = match incoming {
            Incoming::Agreed(version) => {
                totals.speaks(version);
                return self.engine.speaks(version);
            }
            Incoming::Message(Message::Offer(offer)) if !self.accepted => {
                totals.offer(offer.codecs);
                return;
            }
            Incoming::Message(Message::Accept(accept)) => match self.route.options.check_receiver(totals) {
                Ok(()) => {
                    self.accepted = true;
                    SourceEvent::Message(Message::Accept(accept))
                }
                Err(reason) => self.refuse(reason),
            },
            Incoming::Message(message) => {
                if matches!(message, Message::Resumed { .. }) {
                    self.vain = 0;
                }
                SourceEvent::Message(message)
            }
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
        if let Err(error) = self.transmit(&abort) {
            tracing::warn!(%error, "the receiver is not told that it was refused");
        }
        SourceEvent::Message(Message::Refuse { reasons: vec![reason] })
    }

    /// Says something, if there is anybody to say it to.
    fn transmit(&mut self, message: &Message) -> Result<(), crate::Error> {
        match &self.link {
            Some(link) => link.control.transmit(message),
            None => Ok(()),
        }
    }

    fn guest_event(&mut self, event: Option<SourceEvent>) {
        // The worker holds a sender as long as it lives.
        self.handle(event.unwrap_or_else(|| SourceEvent::Failed {
            step: Step::Control,
            error: "the guest's thread died".to_owned(),
        }));
    }

    /// The connections are lost: closes what is left of them, and opens new ones.
    fn reconnect(&mut self) {
        self.let_go();
        let reaching = self.route.clone().reach_again(self.session, self.vain);
        self.vain = self.vain.saturating_add(1);
        self.reaching = Some(Reaching(tokio::spawn(reaching.in_current_span())));
    }

    fn let_go(&mut self) {
        self.held = Held::default();
        self.lost_bytes += self.link.take().map_or(0, Link::abandon);
    }

    fn reached(&mut self, reached: Result<Link, String>) {
        let event = match reached {
            Ok(link) => {
                self.link = Some(link);
                SourceEvent::Reconnected {
                    wire_bytes: self.route.totals.written(),
                }
            }
            Err(error) => SourceEvent::Unreachable { error },
        };
        self.handle(event);
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
                if let Err(error) = self.transmit(&message) {
                    self.failed(Step::Control, error.to_string());
                }
            }
            SourceAction::Send { stream, chunk } => self.command(stream, Command::Chunk(chunk)),
            SourceAction::EndRound { stream, round } => self.command(stream, Command::EndRound(round)),
            SourceAction::Reconnect => self.reconnect(),
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
        let sent = self.link.as_ref().map(|link| link.command(stream, command));
        if let Some(Err(error)) = sent {
            self.failed(Step::Send, error);
        }
    }

    fn failed(&mut self, step: Step, error: String) {
        self.handle(SourceEvent::Failed { step, error });
    }

    /// Closes everything, and collects the guest.
    async fn finish(self, mut outcome: Outcome) -> Finished {
        let Sending {
            link,
            route,
            worker,
            lost_bytes,
            events,
            ..
        } = self;
        let mut control_bytes = lost_bytes;
        if let Some(link) = link {
            let completed = outcome.ending == Ending::Completed;
            control_bytes += link.finish(completed, THREADS_TIMEOUT).await;
        }
        // What the guest's thread still says is of no use, and must not keep it.
        drop(events);
        let guest = tokio::task::spawn_blocking(move || worker.finish()).await;
        // The engine counts what arrived, and what was written in vain apart.
        let in_vain = outcome.report.link.bytes_again;
        report::complete(&mut outcome, control_bytes + in_vain);
        outcome.report.compress = Some(route.totals.report(route.options.compress));
        tracing::info!(ending = %outcome.ending, error = outcome.error, total_ms = outcome.report.total_ms, "finished");
        Finished {
            outcome,
            guest: guest.ok().flatten(),
        }
    }
}

/// New connections while they are being opened. Dropped, nobody goes on trying.
struct Reaching(JoinHandle<Result<Link, String>>);

impl Drop for Reaching {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What came over the connections.
enum Said {
    Control(Incoming),
    Stream(SourceEvent),
}

/// What comes next over them; never returns while there are none.
async fn next(link: &mut Option<Link>) -> Said {
    let Some(link) = link else {
        return std::future::pending().await;
    };
    tokio::select! {
        biased;
        incoming = link.control.next() => Said::Control(incoming),
        Some(event) = link.events.recv() => Said::Stream(event),
        else => std::future::pending().await,
    }
}

/// New connections, once they are there.
async fn reached(reaching: &mut Option<Reaching>) -> Result<Link, String> {
    let Some(task) = reaching else {
        return std::future::pending().await;
    };
    let reached = (&mut task.0).await;
    *reaching = None;
    reached.unwrap_or_else(|error| Err(format!("the connecting task died: {error}")))
}
