//! The two sides' executors: what engines ask for, and what comes of it.

use crate::data::digests;
use crate::laws;
use crate::pair::Pair;
use engine::{DestinationAction, DestinationEvent, SourceAction, SourceEvent, Step};
use machine::MachineState;
use wire::{Message, frame};

impl Pair {
    /// Takes all actions of both sides, as far as their processes do anything.
    pub fn drive(&mut self) {
        while let Some(action) = self.source_acts().then(|| self.source.poll_action()).flatten() {
            if self.source_end.is_some() {
                self.breach(format!("the source wants {action:?} after its end"));
            }
            self.source_wants(action);
        }
        while let Some(action) = self
            .destination_acts()
            .then(|| self.destination.poll_action())
            .flatten()
        {
            if self.destination_end.is_some() {
                self.breach(format!("the destination wants {action:?} after its end"));
            }
            self.destination_wants(action);
        }
    }

    fn source_wants(&mut self, action: SourceAction) {
        match action {
            SourceAction::Transmit(message) => self.carry(&message, true),
            SourceAction::Send { stream, chunk } => {
                let breach = self.laws.chunk(&chunk);
                self.breaches.extend(breach);
                self.say(|| format!("source: {chunk:?}"));
                if let Some(stream) = self.streams.get_mut(usize::from(stream)) {
                    stream.hand(chunk);
                }
            }
            SourceAction::EndRound { stream, round } => {
                if let Some(stream) = self.streams.get_mut(usize::from(stream)) {
                    stream.end_round(round);
                }
            }
            SourceAction::Reconnect => {
                self.say(|| "source: Reconnect".to_owned());
                self.reconnect();
            }
            SourceAction::Finished(outcome) => {
                self.say(|| format!("source: {} ({:?})", outcome.ending, outcome.error));
                self.source_end = Some(*outcome);
                self.reaching = None;
                self.streams.clear();
                if std::mem::take(&mut self.linked) {
                    self.links[self.source_link].leave_source(0);
                }
            }
            action => {
                self.say(|| format!("source: {:?}", action.step()));
                self.source_work.push_back(action);
            }
        }
    }

    fn destination_wants(&mut self, action: DestinationAction) {
        match action {
            DestinationAction::Transmit(message) => {
                let breach = laws::destination_says(&message, &self.copy);
                self.breaches.extend(breach);
                if let Message::Resumed { round, .. } = message {
                    self.read_streams(round);
                }
                self.carry(&message, false);
            }
            DestinationAction::Disconnect => {
                self.say(|| "destination: Disconnect".to_owned());
                self.disconnect();
            }
            DestinationAction::Finished(outcome) => {
                self.say(|| format!("destination: {} ({:?})", outcome.ending, outcome.error));
                self.destination_end = Some(*outcome);
                for link in &mut self.links[self.destination_link..] {
                    link.leave_destination(0);
                }
            }
            action => {
                self.say(|| format!("destination: {:?}", action.step()));
                self.destination_work.push_back(action);
            }
        }
    }

    fn carry(&mut self, message: &Message, to_destination: bool) {
        self.say(|| {
            let who = if to_destination { "source" } else { "destination" };
            format!("{who} says {message:?}")
        });
        let number = if to_destination {
            self.source_link
        } else {
            self.destination_link
        };
        let link = &mut self.links[number];
        if self.mishaps.message == Some(self.messages) {
            link.to_destination.close(0);
            link.to_source.close(0);
        }
        self.messages += 1;
        let pipe = if to_destination {
            &mut link.to_destination
        } else {
            &mut link.to_source
        };
        match frame::encode(message) {
            Ok(bytes) => pipe.write(&bytes, self.now),
            Err(error) => self.breaches.push(format!("a message that no frame takes: {error}")),
        }
        self.links[number].settle();
    }

    /// The source's executor carries one action on the guest out.
    pub(crate) fn source_works(&mut self) {
        self.source_digest = None;
        let Some(action) = self.source_work.pop_front() else {
            return;
        };
        let step = action.step();
        if !self.failed_steps.contains(&Step::EndHints) {
            let breach = laws::source_action(&action, &self.guest);
            self.breaches.extend(breach);
        }
        self.done.push(step);
        let fails = self.mishaps.source_action == Some(self.source_actions);
        self.source_actions += 1;
        self.say(|| format!("{step:?}{}", if fails { " fails" } else { "" }));
        if fails {
            self.failed_steps.push(step);
            let error = "the host said no".to_owned();
            return self.source.handle(SourceEvent::Failed { step, error }, self.now);
        }
        let Some(event) = self.source_event(action) else { return };
        self.source.handle(event, self.now);
    }

    fn source_event(&mut self, action: SourceAction) -> Option<SourceEvent> {
        let guest = &mut self.guest;
        Some(match action {
            SourceAction::StartTracking => {
                guest.start_tracking();
                SourceEvent::TrackingStarted
            }
            SourceAction::Scan => SourceEvent::Scanned(Box::new(guest.scan(self.setup.source.skip.hole))),
            SourceAction::BeginHints { session } => {
                guest.begin(session, &mut self.rng);
                SourceEvent::HintsBegun
            }
            SourceAction::Peek(range) => SourceEvent::Peeked(guest.peek(range)),
            SourceAction::EndHints { hold, .. } => {
                guest.end(hold);
                SourceEvent::HintsEnded(guest.counts)
            }
            SourceAction::Recheck => SourceEvent::Rechecked(Box::new(guest.recheck())),
            SourceAction::Harvest => SourceEvent::Harvested(guest.harvest()),
            SourceAction::Pause => {
                // Devices are drained: a last write of the VMM's own, which the log has.
                if guest.running {
                    guest.write(self.rng.below(guest.ram.len() as u64) as usize);
                }
                guest.running = false;
                guest.find_out();
                SourceEvent::Paused
            }
            SourceAction::Save => {
                self.saves += 1;
                if self.saves == 1 {
                    self.saved_step = self.steps;
                }
                self.saved_ram.clone_from(&guest.ram);
                self.saved_free.clone_from(&guest.free);
                SourceEvent::Saved(self.setup.state(self.saves))
            }
            SourceAction::Digest {
                excluded,
                chunk_pages,
                only,
            } => SourceEvent::Digested(digests(&guest.ram, &excluded, chunk_pages, &only)),
            SourceAction::GiveBack(pages) => {
                guest.log.union_with(&pages);
                SourceEvent::GivenBack
            }
            SourceAction::StopTracking => {
                guest.stop_tracking();
                SourceEvent::TrackingStopped
            }
            SourceAction::Resume => {
                guest.running = true;
                SourceEvent::Resumed
            }
            _ => return None,
        })
    }

    /// The destination's executor carries one action out.
    pub(crate) fn destination_works(&mut self) {
        self.destination_digest = None;
        let Some(action) = self.destination_work.pop_front() else {
            return;
        };
        let step = action.step();
        let fails = step != Step::Discard && self.mishaps.destination_action == Some(self.destination_actions);
        self.destination_actions += usize::from(step != Step::Discard);
        self.say(|| format!("{step:?}{}", if fails { " fails" } else { "" }));
        if fails {
            // The first vCPUs were started before one failed.
            self.copy.running = step == Step::Resume;
            let error = "the host said no".to_owned();
            return self
                .destination
                .handle(DestinationEvent::Failed { step, error }, self.now);
        }
        let event = self.destination_event(action);
        self.destination.handle(event, self.now);
    }

    fn destination_event(&mut self, action: DestinationAction) -> DestinationEvent {
        match action {
            DestinationAction::Prepare(_) if !self.setup.refusals.is_empty() => {
                DestinationEvent::Refused(self.setup.refusals.clone())
            }
            DestinationAction::Prepare(_) => {
                self.copy.made = true;
                DestinationEvent::Prepared {
                    layout: self.setup.guest.layout.clone(),
                    populated: false,
                }
            }
            DestinationAction::Zero(ranges) => {
                for range in ranges {
                    self.put(range, 0);
                }
                DestinationEvent::Zeroed
            }
            DestinationAction::Digest {
                excluded,
                chunk_pages,
                only,
            } => DestinationEvent::Digested(digests(&self.copy.ram, &excluded, chunk_pages, &only)),
            DestinationAction::Restore(state) => {
                self.restoring = true;
                self.check_state(&state);
                self.check_ram();
                self.copy.restored = true;
                DestinationEvent::Restored
            }
            DestinationAction::Resume => {
                if self.copy.discarded || !self.copy.restored {
                    self.breach("the destination resumes a guest that it does not have".to_owned());
                }
                if self.guest.running {
                    self.breach("the destination resumes a guest that runs at the source".to_owned());
                }
                self.check_ram();
                self.copy.running = true;
                DestinationEvent::Resumed
            }
            _ => {
                self.copy.discarded = true;
                self.copy.running = false;
                DestinationEvent::Discarded
            }
        }
    }

    fn check_state(&mut self, state: &MachineState) {
        if *state != self.setup.state(self.saves) {
            self.breach(format!(
                "the state that arrived is not the one that was saved last: {state:?}"
            ));
        }
    }
}
