//! Links: how they are made, lost and replaced, and what befalls the two processes.

use crate::data::{Receiving, Stream};
use crate::link::Link;
use crate::mishaps::Party;
use crate::pair::Pair;
use engine::{DestinationEvent, SourceEvent, Time};
use wire::{Message, Resume, frame};

/// The session number that a migration begins with.
const SESSION: [u8; 16] = [7; 16];
/// How long a machine that refuses connections is asked.
const REFUSING: Time = Time::from_secs(3);

impl Pair {
    /// A new link for the source.
    pub(crate) fn open_link(&mut self) {
        let streams = self.setup.source.streams;
        self.source_link = self.links.len();
        self.links
            .push(Link::new(self.source_link, streams, &self.mishaps.accidents));
        self.streams = (0..streams).map(Stream::new).collect();
        self.linked = true;
    }

    /// The destination reads the streams of its link, in round `round`.
    pub(crate) fn read_streams(&mut self, round: u32) {
        let leaves_zero = self.destination_link == 0 && self.setup.destination.memory_is_zero;
        self.links[self.destination_link].receiving = (0..self.setup.source.streams)
            .map(|k| Receiving::new(k, round, leaves_zero))
            .collect();
    }

    /// The source drops its connections and looks for new ones.
    pub(crate) fn reconnect(&mut self) {
        if self.setup.guest.running && !self.guest.running {
            self.breach("the guest waits paused for a link".to_owned());
        }
        let lose = self.lost_bytes();
        self.links[self.source_link].leave_source(lose);
        self.linked = false;
        self.streams.clear();
        let outage = self.mishaps.outages.get(self.links.len() - 1);
        let takes = outage.copied().unwrap_or(Time::from_millis(1));
        self.reaching = Some(self.now + takes);
    }

    /// How much of what is under way goes down with a connection.
    fn lost_bytes(&mut self) -> usize {
        match self.rng.below(3) {
            0 => 0,
            1 => self.rng.below(300) as usize,
            _ => usize::MAX,
        }
    }

    /// New connections are there, or nobody takes them.
    pub(crate) fn reached(&mut self) {
        if self.at_destination.dead || self.destination_end.is_some() {
            if self.reaching.is_some_and(|since| self.now < since + REFUSING) {
                self.now += REFUSING;
            }
            self.reaching = None;
            let error = "connection refused".to_owned();
            return self.source.handle(SourceEvent::Unreachable { error }, self.now);
        }
        self.reaching = None;
        self.open_link();
        let stranger = self.mishaps.strangers > 0;
        if stranger {
            // Somebody else comes first, who does not know the session.
            self.mishaps.strangers -= 1;
            self.say_on_link([9; 16]);
            let lose = self.lost_bytes();
            self.links[self.source_link].leave_source(lose);
            self.open_link();
        }
        self.say_on_link(SESSION);
        let wire_bytes = self.written;
        self.source.handle(SourceEvent::Reconnected { wire_bytes }, self.now);
    }

    fn say_on_link(&mut self, session: [u8; 16]) {
        let frame = frame::encode(&Message::Resume(Resume { session })).unwrap();
        let link = &mut self.links[self.source_link];
        link.to_destination.write(&frame, self.now);
        link.settle();
    }

    /// The destination's desk hears the first words on a new control connection.
    pub(crate) fn knock(&mut self, n: usize) {
        let link = &mut self.links[n];
        let mut first = None;
        while first.is_none() {
            // One by one: what follows is the session's to read.
            let byte = link.to_destination.read(1);
            if byte.is_empty() {
                break;
            }
            match link.at_destination.push(&mut &byte[..]) {
                Ok(message) => first = message,
                Err(_) => break,
            }
        }
        match first {
            Some(Message::Resume(resume)) if resume.session == SESSION && self.destination.may_be_resumed() => {
                self.comes_back(n);
            }
            Some(_) => {
                let reasons = vec!["it serves another migration, or hands this one over".to_owned()];
                let frame = frame::encode(&Message::Refuse { reasons }).unwrap();
                let now = self.now;
                let link = &mut self.links[n];
                link.to_source.write(&frame, now);
                link.leave_destination(0);
            }
            // It ended, or is none of ours; or more bytes are to come.
            None if self.links[n].to_destination.ended() || self.links[n].to_destination.flipped => {
                self.links[n].leave_destination(0);
            }
            None => {}
        }
    }

    /// The source is back: the old connections are closed, what came over them is told first.
    fn comes_back(&mut self, n: usize) {
        let error = "the source came back over a new connection".to_owned();
        self.destination.handle(DestinationEvent::PeerGone { error }, self.now);
        self.drive();
        self.disconnect();
        self.drive();
        if self.destination_end.is_some() {
            return self.links[n].leave_destination(0);
        }
        self.destination_link = n;
        self.destination.handle(DestinationEvent::Relinked, self.now);
    }

    /// The destination closes its connections; what had come over them may be in memory, and is told then.
    pub(crate) fn disconnect(&mut self) {
        let all = self.rng.one_in(2);
        for k in 0..self.links[self.destination_link].receiving.len() {
            let came = self.links[self.destination_link].data[k].len();
            if all && came > 0 {
                self.stream_arrives(k, came);
            }
        }
        self.links[self.destination_link].leave_destination(0);
    }

    /// What befalls a process at this step.
    pub(crate) fn befall(&mut self) {
        if self.mishaps.cancel_source == Some(self.steps) && self.source_acts() {
            self.source.handle(SourceEvent::Cancel, self.now);
        }
        if self.mishaps.cancel_destination == Some(self.steps) && self.destination_acts() {
            self.destination.handle(DestinationEvent::Cancel, self.now);
        }
        let due = self.mishaps.after_save.as_ref().filter(|_| self.saves > 0);
        if due.is_some_and(|after| self.steps >= self.saved_step + after.steps) {
            let after = self.mishaps.after_save.take();
            self.say(|| format!("{after:?}"));
            match after.and_then(|after| after.frozen) {
                Some(span) => self.at_source.frozen_until = self.now + span,
                None if self.linked => self.break_link(),
                None => {}
            }
        }
        let blows = self.mishaps.blows.iter().filter(|blow| blow.step == self.steps);
        for blow in blows.cloned().collect::<Vec<_>>() {
            self.say(|| format!("{blow:?}"));
            match (blow.party, blow.frozen) {
                (Party::Source, Some(span)) => self.at_source.frozen_until = self.now + span,
                (Party::Destination, Some(span)) => self.at_destination.frozen_until = self.now + span,
                (Party::Source, None) => self.kill_source(),
                (Party::Destination, None) => self.kill_destination(),
            }
        }
        self.drive();
    }

    fn kill_source(&mut self) {
        if self.source_end.is_some() {
            return;
        }
        self.at_source.dead = true;
        self.guest.running = false;
        self.source_work.clear();
        self.reaching = None;
        let lose = self.lost_bytes();
        if self.linked {
            self.links[self.source_link].leave_source(lose);
        }
        self.linked = false;
        self.streams.clear();
    }

    fn kill_destination(&mut self) {
        if self.destination_end.is_some() {
            return;
        }
        self.at_destination.dead = true;
        self.copy.running = false;
        self.destination_work.clear();
        let lose = self.lost_bytes();
        for link in &mut self.links[self.destination_link..] {
            link.leave_destination(lose);
        }
    }

    /// The connections between both sides break, and both notice.
    pub fn break_link(&mut self) {
        let link = &mut self.links[self.source_link];
        link.to_destination.close(0);
        link.to_source.close(0);
    }
}
