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

/// What a source is told that comes during another's migration.
const BUSY: &str = "this receiver is busy with another migration; try again after it";

/// A source that is being served.
pub(super) struct Session<'a> {
    /// The session number that the migration began with.
    id: SessionId,
    /// That of the connections as they are now.
    link: SessionId,
    /// The source's certificate, under TLS: that of its data connections too.
    peer: Option<Arc<[u8]>>,
    /// Of the protocol, as agreed on.
    version: u16,
    /// The codecs that the machine's RAM takes, as bits.
    codecs: u32,
    engine: Destination,
    first: Option<Message>,
    /// None where the source was lost in the middle of coming back.
    control: Option<Control>,
    /// Control bytes of connections that were lost.
    lost_bytes: u64,
    options: &'a ReceiveOptions,
    worker: &'a mut DestinationWorker,
    desk: &'a mut Desk,
    pulse: Pulse,
    /// Data connections by stream, until all of them are here and their threads start.
    connections: Vec<Option<DataConnection>>,
    /// The machine's RAM, once it is made, until the threads start; and by when they must.
    made: Option<(Arc<dyn GuestRam>, tokio::time::Instant)>,
    /// The same RAM, for as long as the migration lasts.
    ram: Option<Arc<dyn GuestRam>>,
    /// The source has come back, and by when its streams must be here.
    back: Option<tokio::time::Instant>,
    gate: Arc<Gate>,
    closer: Arc<Closer>,
    /// What streams say; without `out` no further stream starts, and once the last has ended all is `told`.
    out: Option<mpsc::Sender<DestinationEvent>>,
    events: mpsc::Receiver<DestinationEvent>,
    told: bool,
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
        let mut engine = Destination::new(options.destination.clone(), started.elapsed());
        engine.speaks(arrived.version);
        let mut connections = Vec::new();
        connections.resize_with(usize::from(arrived.streams()), || None);
        Session {
            peer: arrived.socket.peer(),
            id: arrived.session,
            link: arrived.session,
            version: arrived.version,
            codecs: 0,
            engine,
            first: Some(arrived.first),
            control: Some(Control::start(arrived.socket, Some(arrived.version))),
            lost_bytes: 0,
            options,
            worker,
            desk,
            pulse: Pulse::new(watch.clone(), started),
            connections,
            made: None,
            ram: None,
            back: None,
            gate: Arc::default(),
            closer: Arc::default(),
            out: Some(out),
            events,
            told: false,
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
            let streams_due = self.made.as_ref().map(|(_, due)| *due).or(self.back);
            tokio::select! {
                biased;
                () = self.pulse.cancelled() => self.handle(DestinationEvent::Cancel),
                incoming = next(&mut self.control) => self.incoming(incoming),
                said = self.worker.next() => self.said(said),
                event = self.events.recv(), if !self.told => self.event(event),
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
            // Only receivers answer preambles.
            Incoming::Agreed(_) => return,
        };
        self.handle(event);
    }

    fn event(&mut self, event: Option<DestinationEvent>) {
        match event {
            // The connection's end is known already.
            Some(DestinationEvent::StreamGone { .. }) if self.out.is_none() => {}
            Some(event @ (DestinationEvent::Failed { .. } | DestinationEvent::StreamGone { .. })) => {
                tracing::debug!(?event, "a data stream failed");
                self.held.hold(event);
            }
            Some(event) => self.handle(event),
            None => {
                self.told = true;
                self.go_on_if_complete();
            }
        }
    }

    fn said(&mut self, said: Said) {
        match said {
            Said::Event(event) => self.handle(event),
            Said::Discarded => self.handle(DestinationEvent::Discarded),
            Said::Made(ram) if self.peer.is_some() && !ram.copies_in() => {
                let reason = "the receiver's guest memory cannot be copied to, which encrypted pages need".to_owned();
                self.handle(DestinationEvent::Refused(vec![reason]));
            }
            Said::Made(ram) => {
                let due = tokio::time::Instant::now() + self.options.handshake_timeout;
                self.ram = Some(Arc::clone(&ram));
                self.made = Some((ram, due));
                self.begin_if_complete();
            }
        }
    }

    fn arrival(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Data(data) if data.session == self.link => {
                self.connect(data);
                self.begin_if_complete();
                self.go_on_if_complete();
            }
            // The control connection may be behind it.
            Arrival::Data(data) => self.desk.keep(data),
            Arrival::Control(arrived) => match &arrived.first {
                Message::Resume(resume)
                    if SessionId(resume.session) == self.id && arrived.socket.peer() == self.peer =>
                {
                    self.comes_back(arrived);
                }
                _ => turn_away(arrived, BUSY),
            },
        }
    }

    /// The source has opened new connections. What is left of the old ones is closed, and what came over them is told to
    /// the engine first: nothing may still be on its way into memory when the source hears what is there.
    fn comes_back(&mut self, arrived: Arrived) {
        if !self.engine.may_be_resumed() || arrived.version != self.version {
            return turn_away(
                arrived,
                "the migration cannot be taken up again here: it is being handed over",
            );
        }
        tracing::info!(session = %arrived.session, "the source comes back");
        self.handle(DestinationEvent::PeerGone {
            error: "the source came back over a new connection".to_owned(),
        });
        self.let_go();
        self.out = None;
        self.link = arrived.session;
        self.control = Some(Control::start(arrived.socket, Some(arrived.version)));
        self.back = Some(tokio::time::Instant::now() + self.options.handshake_timeout);
        let streams = usize::from(self.engine.streams().unwrap_or(0));
        self.connections = Vec::new();
        self.connections.resize_with(streams, || None);
        for data in self.desk.take_waiting(self.link) {
            self.connect(data);
        }
        self.go_on_if_complete();
    }

    /// Closes the connections, without waiting for the peer.
    fn let_go(&mut self) {
        self.held = Held::default();
        if let Some(control) = self.control.take() {
            self.lost_bytes += control.bytes();
            tokio::spawn(control.finish());
        }
        std::mem::take(&mut self.closer).close();
    }

    /// Once all has been told that came over the old connections, and all new streams are here.
    fn go_on_if_complete(&mut self) {
        let complete = self.told && self.connections.iter().all(Option::is_some);
        if !complete || self.back.take().is_none() {
            return;
        }
        let (out, events) = mpsc::channel(AHEAD);
        (self.out, self.events, self.told) = (Some(out), events, false);
        self.handle(DestinationEvent::Relinked);
    }

    /// The engine goes on in `round`: so do the streams.
    fn reopen(&mut self, round: u32) {
        self.last_round = false;
        self.gate.open(round);
        if let Some(ram) = self.ram.clone() {
            // A connection that was lost may have left a part of a batch.
            self.start_streams(&ram, round, false);
        }
    }

    fn connect(&mut self, data: DataConnection) {
        if data.socket.peer() != self.peer {
            tracing::warn!(
                stream = data.stream,
                "a data stream by another certificate than the control connection's is dropped"
            );
            return;
        }
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
        if self.start_streams(&ram, 0, self.options.destination.memory_is_zero) {
            self.handle(DestinationEvent::Prepared {
                layout: Arc::clone(ram.layout()),
                populated: ram.is_populated(),
            });
        }
    }

    /// Starts a thread a stream; whether that worked.
    fn start_streams(&mut self, ram: &Arc<dyn GuestRam>, round: u32, memory_is_zero: bool) -> bool {
        let Some(out) = self.out.clone() else { return false };
        for data in std::mem::take(&mut self.connections).into_iter().flatten() {
            let stream = data.stream;
            if let Err(error) = self.start_stream(data, ram, (round, memory_is_zero), out.clone()) {
                self.failed(Step::Prepare, format!("starting data stream {stream}: {error}"));
                return false;
            }
        }
        true
    }

    fn start_stream(
        &self,
        data: DataConnection,
        ram: &Arc<dyn GuestRam>,
        (round, memory_is_zero): (u32, bool),
        out: mpsc::Sender<DestinationEvent>,
    ) -> std::io::Result<()> {
        let socket = data.socket.into_blocking()?;
        self.closer.add(&socket)?;
        let receiver = Receiver {
            stream: data.stream,
            version: data.version,
            socket,
            ram: Arc::clone(ram),
            memory_is_zero,
            round,
            headroom: Headroom::new(if ram.is_populated() {
                0
            } else {
                self.options.host_reserve_bytes
            }),
            gate: Arc::clone(&self.gate),
            closer: Arc::clone(&self.closer),
            events: out,
        };
        let thread = std::thread::Builder::new().name(format!("ferry-recv-{}", data.stream));
        thread.spawn(move || receiver.run())?;
        Ok(())
    }

    fn streams_missing(&mut self) {
        if self.back.take().is_some() {
            tracing::warn!("the source came back without all of its streams, or the old ones do not end");
            return self.let_go();
        }
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
                    self.transmit(&offer);
                }
                if let Message::Resumed { round, .. } = message {
                    self.reopen(round);
                }
                if let Message::RoundReceived { round } = message {
                    tracing::info!(round, last = self.last_round, "a round was received");
                    match round.checked_add(1) {
                        Some(next) if !self.last_round => self.gate.open(next),
                        _ => self.gate.shut(),
                    }
                }
                self.transmit(&message);
            }
            DestinationAction::Disconnect => {
                // Unless the source has new ones already.
                if self.back.is_none() {
                    self.let_go();
                    self.out = None;
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

    /// Says something, if there is anybody to say it to.
    fn transmit(&mut self, message: &Message) {
        let sent = self.control.as_ref().map(|control| control.transmit(message));
        if let Some(Err(error)) = sent {
            self.failed(Step::Control, error.to_string());
        }
    }

    /// Closes everything of this source.
    async fn finish(self, mut outcome: Outcome) -> Outcome {
        let Session {
            control,
            lost_bytes,
            closer,
            out,
            mut events,
            ..
        } = self;
        let mut control_bytes = lost_bytes;
        if let Some(control) = control {
            control_bytes += control.bytes();
            if outcome.ending == Ending::Completed {
                // The guest is here: its VMM must not wait for the source to hang up.
                tokio::spawn(control.finish());
            } else {
                control.finish().await;
            }
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

/// What the source does next; never returns while it is lost.
async fn next(control: &mut Option<Control>) -> Incoming {
    match control {
        Some(control) => control.next().await,
        None => std::future::pending().await,
    }
}

async fn until(due: Option<tokio::time::Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}
