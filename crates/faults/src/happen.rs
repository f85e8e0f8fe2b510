//! What may happen in a step, what comes of it, and how long there is nothing but to wait.

use crate::pair::Pair;
use engine::{DestinationAction, DestinationEvent, SourceAction, SourceEvent, Step, Time};
use wire::Message;

/// What may happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Happening {
    ReachDestination,
    ReachSource,
    SourceWorks,
    DestinationWorks,
    Speak,
    Live,
    Send(usize),
    Arrive(usize),
    /// The source hears that a stream broke.
    StreamGone(usize),
    /// A stream's connection has taken nothing for the peer time-out.
    Stalled(usize),
    /// The destination's desk hears a new control connection.
    Knock(usize),
    /// The source's new connections are there, or nobody is.
    Reached,
}

impl Pair {
    /// Whether the source's process does anything now.
    pub(crate) fn source_acts(&self) -> bool {
        !self.at_source.dead && self.now >= self.at_source.frozen_until
    }

    pub(crate) fn destination_acts(&self) -> bool {
        !self.at_destination.dead && self.now >= self.at_destination.frozen_until
    }

    fn silent(&self) -> bool {
        self.mishaps.silence.is_some_and(|from| self.steps >= from)
    }

    /// All that may happen now, each as often as it is likely.
    pub(crate) fn happenings(&mut self) -> Vec<Happening> {
        let mut may = Vec::new();
        let (source_free, destination_free) = self.executors_free();
        if self.source_acts() {
            self.source_happenings(&mut may);
        }
        if self.destination_acts() {
            self.destination_happenings(&mut may);
        }
        // What is done to the guest may take long, while all else goes on.
        let works = [
            (
                source_free && self.source_acts(),
                self.setup.slow_source,
                Happening::SourceWorks,
            ),
            (
                destination_free && self.destination_acts(),
                self.setup.slow_destination,
                Happening::DestinationWorks,
            ),
        ];
        for (free, slow, happening) in works {
            if free && (!slow || may.is_empty() || self.rng.one_in(12)) {
                may.extend([happening; 2]);
            }
        }
        may
    }

    fn source_happenings(&mut self, may: &mut Vec<Happening>) {
        let mut add = |happening, times| may.extend(std::iter::repeat_n(happening, times));
        // What is said after the session's end may come very late: in a later round, or at the pause.
        let pausing = match self.source_work.front() {
            Some(SourceAction::Pause) => true,
            Some(SourceAction::Harvest) => self.done.last() == Some(&Step::Pause),
            _ => false,
        };
        let late = pausing || self.rng.one_in(150);
        if self.guest.has_to_say() && (self.guest.session.is_some() || late) {
            add(Happening::Speak, if pausing { 40 } else { 1 });
        }
        if self.reaching.is_some_and(|at| at <= self.now) && !self.silent() {
            add(Happening::Reached, 1);
        }
        let now = self.now;
        let reads = self.linked && !self.silent();
        let heard_all = !self.links[self.source_link].to_source.readable(now);
        if reads && !heard_all {
            add(Happening::ReachSource, 2);
        }
        for k in 0..self.streams.len() {
            if !reads {
                break;
            }
            let ended = self.links[self.source_link].data[k].ended();
            let (work, room) = (self.streams[k].has_work(), self.has_room(k));
            let stream = &mut self.streams[k];
            if work && room {
                add(Happening::Send(k), 1);
            }
            // A stream's failure is held back until what the peer said last is heard.
            if ended && !stream.told && (heard_all || !self.setup.holds) {
                add(Happening::StreamGone(k), 1);
            }
            stream.blocked = (work && !room && !ended).then(|| stream.blocked.unwrap_or(now));
            if stream
                .blocked
                .is_some_and(|since| now - since >= self.setup.source.peer_timeout)
            {
                add(Happening::Stalled(k), 1);
            }
        }
    }

    fn destination_happenings(&mut self, may: &mut Vec<Happening>) {
        let mut add = |happening, times| may.extend(std::iter::repeat_n(happening, times));
        if self.silent() || self.destination_end.is_some() {
            return;
        }
        let link = &self.links[self.destination_link];
        if link.to_destination.readable(self.now) {
            add(Happening::ReachDestination, 2);
        }
        for k in 0..link.receiving.len() {
            // A stream's end is held back until what the source said last is heard.
            let pipe = &link.data[k];
            let held = self.setup.holds && pipe.is_empty() && link.to_destination.readable(self.now);
            if pipe.readable(self.now) && !held {
                add(Happening::Arrive(k), 1);
            }
        }
        for n in self.destination_link + 1..self.links.len() {
            if self.links[n].to_destination.readable(self.now) {
                add(Happening::Knock(n), 1);
                break;
            }
        }
    }

    /// Whether each side's executor has something to do and is not in the middle of a digest.
    fn executors_free(&mut self) -> (bool, bool) {
        let due = self.now + self.setup.source_digest;
        self.source_digest = match self.source_work.front() {
            Some(SourceAction::Digest { .. }) => self.source_digest.or(Some(due)),
            _ => None,
        };
        let due = self.now + self.setup.destination_digest;
        self.destination_digest = match self.destination_work.front() {
            Some(DestinationAction::Digest { .. }) => self.destination_digest.or(Some(due)),
            _ => None,
        };
        let done = |at: Option<Time>| at.is_none_or(|at| at <= self.now);
        (
            !self.source_work.is_empty() && done(self.source_digest),
            !self.destination_work.is_empty() && done(self.destination_digest),
        )
    }

    pub(crate) fn happen(&mut self, happening: Happening) {
        self.say(|| format!("{happening:?}"));
        match happening {
            Happening::ReachDestination => self.control_arrives(),
            Happening::ReachSource => self.source_hears(),
            Happening::SourceWorks => self.source_works(),
            Happening::DestinationWorks => self.destination_works(),
            Happening::Speak => {
                if let Some((session, answer)) = self.guest.speak(&mut self.rng) {
                    self.source.handle(SourceEvent::Answered { session, answer }, self.now);
                }
            }
            Happening::Live => self.guest.live(&mut self.rng),
            Happening::Send(k) => self.stream_sends(k),
            Happening::Arrive(k) => {
                let most = self.some(self.links[self.destination_link].data[k].len());
                self.stream_arrives(k, most);
            }
            Happening::StreamGone(k) => {
                self.streams[k].told = true;
                let error = format!("data stream {k} was reset");
                self.source.handle(SourceEvent::StreamGone { error }, self.now);
            }
            Happening::Stalled(k) => {
                self.streams[k].blocked = Some(self.now);
                self.source.handle(SourceEvent::Stalled { stream: k as u16 }, self.now);
            }
            Happening::Knock(n) => self.knock(n),
            Happening::Reached => self.reached(),
        }
    }

    /// How many of so many bytes are read at once: all, or some.
    fn some(&mut self, len: usize) -> usize {
        match self.rng.below(3) {
            0 => 1 + self.rng.below(len as u64) as usize,
            _ => len.max(1),
        }
    }

    /// Some bytes of the destination's control connection arrive, or its end.
    fn control_arrives(&mut self) {
        let most = self.some(self.links[self.destination_link].to_destination.len());
        let number = self.destination_link;
        let link = &mut self.links[number];
        let bytes = link.to_destination.read(most);
        if bytes.is_empty() {
            link.to_destination.told = true;
            let error = "the peer closed it".to_owned();
            return self.destination.handle(DestinationEvent::PeerGone { error }, self.now);
        }
        let mut input = &bytes[..];
        self.pinged = true;
        loop {
            match self.links[number].at_destination.push(&mut input) {
                Ok(None) => return,
                Ok(Some(message)) => {
                    self.pinged &= message == Message::Ping;
                    self.destination.handle(DestinationEvent::Message(message), self.now);
                }
                Err(error) => {
                    self.links[number].to_destination.abandon();
                    let (step, error) = (Step::Control, error.to_string());
                    return self
                        .destination
                        .handle(DestinationEvent::Failed { step, error }, self.now);
                }
            }
            self.drive();
            if self.destination_link != number || self.destination_end.is_some() {
                return;
            }
        }
    }

    /// The same at the source.
    fn source_hears(&mut self) {
        let most = self.some(self.links[self.source_link].to_source.len());
        let number = self.source_link;
        let link = &mut self.links[number];
        let bytes = link.to_source.read(most);
        if bytes.is_empty() {
            link.to_source.told = true;
            let error = "the peer closed it".to_owned();
            return self.source.handle(SourceEvent::PeerGone { error }, self.now);
        }
        let mut input = &bytes[..];
        self.pinged = true;
        loop {
            match self.links[number].at_source.push(&mut input) {
                Ok(None) => return,
                Ok(Some(message)) => {
                    self.pinged &= message == Message::Ping;
                    self.laws.source_hears(&message);
                    self.source.handle(SourceEvent::Message(message), self.now);
                }
                Err(error) => {
                    self.links[number].to_source.abandon();
                    let (step, error) = (Step::Control, error.to_string());
                    return self.source.handle(SourceEvent::Failed { step, error }, self.now);
                }
            }
            self.drive();
            if !self.linked || self.source_link != number || self.source_end.is_some() {
                return;
            }
        }
    }

    pub(crate) fn timers(&mut self) {
        if self.source_acts() && self.source.poll_timeout().is_some_and(|at| at <= self.now) {
            self.say(|| "the source's timer".to_owned());
            self.source.handle_timeout(self.now);
        }
        if self.destination_acts() && self.destination.poll_timeout().is_some_and(|at| at <= self.now) {
            self.say(|| "the destination's timer".to_owned());
            self.destination.handle_timeout(self.now);
        }
    }

    /// Nothing but the guest may go on: time passes until something may.
    pub(crate) fn wait(&mut self) {
        let now = self.now;
        let mut due: Vec<Time> = Vec::new();
        if self.at_source.dead {
        } else if now < self.at_source.frozen_until {
            due.push(self.at_source.frozen_until);
        } else {
            due.extend(self.source.poll_timeout());
            due.extend(self.source_digest);
            if !self.silent() {
                due.extend(self.reaching);
                let blocked = self.streams.iter().filter_map(|stream| stream.blocked);
                due.extend(blocked.map(|since| since + self.setup.source.peer_timeout));
            }
        }
        if self.at_destination.dead {
        } else if now < self.at_destination.frozen_until {
            due.push(self.at_destination.frozen_until);
        } else {
            due.extend(self.destination.poll_timeout());
            due.extend(self.destination_digest);
        }
        if !self.silent() {
            due.extend(self.links.iter().filter_map(|link| link.due(now)));
        }
        match due.into_iter().min() {
            Some(at) => self.now = at.max(now),
            None if self.over() => {}
            None => self.breach("nobody has anything to wait for, and it is not over".to_owned()),
        }
    }
}
