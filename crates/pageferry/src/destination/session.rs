//! One source's migration: the destination's control loop.

use super::desk::{Arrival, Arrived, DataConnection, Desk, turn_away};
use crate::control::{Control, Incoming};
use crate::data::{Gate, Headroom, Receiver};
use crate::handle::Watch;
use crate::pulse::{Held, Pulse};
use crate::transport::Closer;
use crate::worker::{DestinationWorker, Said};
use crate::{ReceiveOptions, report};
use engine::{Destination, DestinationAction, DestinationEvent, Ending, Outcome, Step};
use machine::GuestRam;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::timeout;
use wire::batch::Codec;
use wire::{Message, Offer, SessionId};

/// Batches that data threads may be ahead of the loop.
const AHEAD: usize = 256;

/// How long the data threads may take to notice that their sockets were closed.
const THREADS_TIMEOUT: Duration = Duration::from_secs(2);

/// A source that is being served.
pub(super) struct Session<'a> {
    id: SessionId,
    /// Of the protocol, as agreed on.
    version: u16,
    /// The codecs that the machine's RAM takes, as bits.
    codecs: u32,
    engine: Destination,
    first: Option<Message>,
    control: Control,
    options: &'a ReceiveOptions,
    worker: &'a mut DestinationWorker,
    desk: &'a mut Desk,
    pulse: Pulse,
    /// Data connections by stream, until all of them are here and their threads start.
    connections: Vec<Option<DataConnection>>,
    /// The machine's RAM, once it is made, until the threads start; and by when they must.
    made: Option<(Arc<dyn GuestRam>, tokio::time::Instant)>,
    gate: Arc<Gate>,
    closer: Arc<Closer>,
    out: mpsc::Sender<DestinationEvent>,
    events: mpsc::Receiver<DestinationEvent>,
    /// Whether the source said that the open round is its last.
    last_round: bool,
    /// A data stream's failure, held back for a moment: the source's own reason may be on its way.
    held: Held<DestinationEvent>,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        arrived: Arrived,
        options: &'a ReceiveOptions,
        watch: &Watch,
        worker: &'a mut DestinationWorker,
        desk: &'a mut Desk,
    ) -> Self {
        let started = Instant::now();
        let (out, events) = mpsc::channel(AHEAD);
        let mut connections = Vec::new();
        connections.resize_with(usize::from(arrived.streams()), || None);
        Session {
            id: arrived.session,
            version: arrived.version,
            codecs: 0,
            engine: Destination::new(options.destination.clone(), started.elapsed()),
            first: Some(arrived.first),
            control: Control::start(arrived.socket, false),
            options,
            worker,
            desk,
            pulse: Pulse::new(watch.clone(), started),
            connections,
            made: None,
            gate: Arc::default(),
            closer: Arc::default(),
            out,
            events,
            last_round: false,
            held: Held::default(),
        }
    }

    /// Serves it to the end.
    pub(super) async fn run(mut self) -> Outcome {
        tracing::info!(session = %self.id, streams = self.connections.len(), "a source came");
        for data in self.desk.take_waiting(self.id) {
            self.connect(data);
        }
        if let Some(first) = self.first.take() {
            self.handle(DestinationEvent::Message(first));
        }
        let outcome = self.drive().await;
        self.finish(outcome).await
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
            let streams_due = self.made.as_ref().map(|(_, due)| *due);
            tokio::select! {
                biased;
                () = self.pulse.cancelled() => self.handle(DestinationEvent::Cancel),
                incoming = self.control.next() => self.incoming(incoming),
                said = self.worker.next() => self.said(said),
                Some(event) = self.events.recv() => self.event(event),
                arrival = self.desk.next() => self.arrival(arrival),
                event = self.held.due() => self.handle(event),
                () = until(streams_due) => self.streams_missing(),
                () = self.pulse.until(deadline) => self.engine.handle_timeout(self.pulse.now()),
            }
        }
    }

    fn handle(&mut self, event: DestinationEvent) {
        self.engine.handle(event, self.pulse.now());
    }

    fn failed(&mut self, step: Step, error: String) {
        self.handle(DestinationEvent::Failed { step, error });
    }

    fn incoming(&mut self, incoming: Incoming) {
        let event = match incoming {
            Incoming::Message(Message::Commit(_)) if !self.pulse.may_commit() => DestinationEvent::Cancel,
            Incoming::Message(message) => {
                if let Message::RoundEnd { last, .. } = message {
                    self.last_round = last;
                }
                DestinationEvent::Message(message)
            }
            Incoming::Malformed(error) | Incoming::Version(error) => DestinationEvent::Failed {
                step: Step::Control,
                error,
            },
            Incoming::Gone(error) => DestinationEvent::PeerGone { error },
        };
        self.handle(event);
    }

    fn event(&mut self, event: DestinationEvent) {
        if let DestinationEvent::Failed { .. } | DestinationEvent::StreamGone { .. } = event {
            tracing::debug!(?event, "a data stream failed");
            self.held.hold(event);
        } else {
            self.handle(event);
        }
    }

    fn said(&mut self, said: Said) {
        match said {
            Said::Event(event) => self.handle(event),
            Said::Discarded => self.handle(DestinationEvent::Discarded),
            Said::Made(ram) => {
                let due = tokio::time::Instant::now() + self.options.handshake_timeout;
                self.made = Some((ram, due));
                self.begin_if_complete();
            }
        }
    }

    fn arrival(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Data(data) if data.session == self.id => {
                self.connect(data);
                self.begin_if_complete();
            }
            Arrival::Data(data) => tracing::warn!(session = %data.session, "a data connection of no migration here"),
            Arrival::Control(arrived) => turn_away(arrived),
        }
    }

    fn connect(&mut self, data: DataConnection) {
        match self.connections.get_mut(usize::from(data.stream)) {
            Some(place @ None) => *place = Some(data),
            Some(Some(_)) => tracing::warn!(
                stream = data.stream,
                "a data stream was opened twice: the second is dropped"
            ),
            None => tracing::warn!(stream = data.stream, "a data stream that was not announced is dropped"),
        }
    }

    /// Once machine and streams are here: starts a thread a stream, and tells the engine.
    fn begin_if_complete(&mut self) {
        if self.connections.iter().any(Option::is_none) {
            return;
        }
        let Some((ram, _)) = self.made.take() else { return };
        self.codecs = if ram.copies_in() { Codec::ALL_BITS } else { 0 };
        for data in std::mem::take(&mut self.connections).into_iter().flatten() {
            let stream = data.stream;
            if let Err(error) = self.start_stream(data, &ram) {
                self.failed(Step::Prepare, format!("starting data stream {stream}: {error}"));
                return;
            }
        }
        self.handle(DestinationEvent::Prepared {
            layout: Arc::clone(ram.layout()),
            populated: ram.is_populated(),
        });
    }

    fn start_stream(&self, data: DataConnection, ram: &Arc<dyn GuestRam>) -> std::io::Result<()> {
        let socket = data.socket.into_blocking()?;
        self.closer.add(&socket)?;
        let receiver = Receiver {
            stream: data.stream,
            version: data.version,
            socket,
            ram: Arc::clone(ram),
            memory_is_zero: self.options.destination.memory_is_zero,
            round: 0,
            headroom: Headroom::new(if ram.is_populated() {
                0
            } else {
                self.options.host_reserve_bytes
            }),
            gate: Arc::clone(&self.gate),
            closer: Arc::clone(&self.closer),
            events: self.out.clone(),
        };
        let thread = std::thread::Builder::new().name(format!("ferry-recv-{}", data.stream));
        thread.spawn(move || receiver.run())?;
        Ok(())
    }

    fn streams_missing(&mut self) {
        self.made = None;
        let here = self.connections.iter().flatten().count();
        let error = format!(
            "{here} of the {} data streams came within {:?}",
            self.connections.len(),
            self.options.handshake_timeout
        );
        self.failed(Step::Prepare, error);
    }

    /// Carries an action out, or has it carried out; returns the outcome of the last one.
    fn carry_out(&mut self, action: DestinationAction) -> Option<Box<Outcome>> {
        match action {
            DestinationAction::Transmit(message) => {
                if matches!(message, Message::Accept(_)) && self.version >= wire::PACKING_SINCE {
                    let offer = Message::Offer(Offer { codecs: self.codecs });
                    if let Err(error) = self.control.transmit(&offer) {
                        self.failed(Step::Control, error.to_string());
                    }
                }
                if let Message::RoundReceived { round } = message {
                    tracing::info!(round, last = self.last_round, "a round was received");
                    match round.checked_add(1) {
                        Some(next) if !self.last_round => self.gate.open(next),
                        _ => self.gate.shut(),
                    }
                }
                if let Err(error) = self.control.transmit(&message) {
                    self.failed(Step::Control, error.to_string());
                }
            }
            DestinationAction::Finished(outcome) => return Some(outcome),
            action => {
                let step = action.step();
                if step != Step::Zero {
                    tracing::info!(?step, "on the guest");
                }
                if !self.worker.carry_out(action) {
                    self.failed(step, "the guest's thread died".to_owned());
                }
            }
        }
        None
    }

    /// Closes everything of this source.
    async fn finish(self, mut outcome: Outcome) -> Outcome {
        let Session {
            control,
            closer,
            out,
            mut events,
            ..
        } = self;
        let control_bytes = control.bytes();
        if outcome.ending == Ending::Completed {
            // The guest is here: its VMM must not wait for the source to hang up.
            tokio::spawn(control.finish());
        } else {
            control.finish().await;
        }
        closer.close();
        drop(out);
        let ended = async { while events.recv().await.is_some() {} };
        if timeout(THREADS_TIMEOUT, ended).await.is_err() {
            tracing::warn!("a thread of the migration does not end");
        }
        report::complete(&mut outcome, control_bytes);
        outcome
    }
}

async fn until(due: Option<tokio::time::Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}
