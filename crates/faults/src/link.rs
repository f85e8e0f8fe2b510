//! Connections as bytes on their way: pipes that stall, flip a byte, or end behind any byte.
//!
//! A link is all connections of one attempt, the control connection's two directions and a pipe a data stream. What is
//! written goes through the encoders of `wire`, and is read through its decoders, in pieces of any size. A page's content
//! is its version, so 8 bytes of it cross in place of 4096.

use crate::data::Receiving;
use engine::Time;
use std::collections::VecDeque;
use wire::frame::Decoder;

/// Which connection of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    ToDestination,
    ToSource,
    Data(u16),
}

/// What befalls a connection once byte `byte` has entered it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// It is reset: nothing that comes later enters it; what is under way may be lost.
    Reset,
    /// That byte arrives as another one.
    Flip,
    /// It carries nothing for so long.
    Stall(Time),
}

/// A harm and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accident {
    /// Of which link: 0 is the first, and each that replaces one is the next.
    pub link: usize,
    pub line: Line,
    pub byte: u64,
    pub harm: Harm,
}

/// One direction of a connection.
#[derive(Clone, Debug, Default)]
pub struct Pipe {
    bytes: VecDeque<u8>,
    entered: u64,
    ended: bool,
    /// Whether its end was told to who reads it.
    pub told: bool,
    held_until: Time,
    harms: Vec<(u64, Harm)>,
    pub flipped: bool,
}

impl Pipe {
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// No more can be written.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Whether who reads it gets something: bytes, or the end.
    pub fn readable(&self, now: Time) -> bool {
        now >= self.held_until && (!self.bytes.is_empty() || (self.ended && !self.told))
    }

    /// When it carries on, where it stalls now and would be read.
    pub fn due(&self, now: Time) -> Option<Time> {
        (self.held_until > now && (!self.bytes.is_empty() || self.ended)).then_some(self.held_until)
    }

    /// Bytes enter, until it ends.
    pub fn write(&mut self, bytes: &[u8], now: Time) {
        for byte in bytes {
            if self.ended {
                return;
            }
            let mut byte = *byte;
            for (at, harm) in &self.harms {
                if *at != self.entered {
                    continue;
                }
                match harm {
                    Harm::Reset => {
                        self.ended = true;
                        return;
                    }
                    Harm::Flip => {
                        byte ^= 1 << (at % 8);
                        self.flipped = true;
                    }
                    Harm::Stall(span) => self.held_until = now + *span,
                }
            }
            self.entered += 1;
            self.bytes.push_back(byte);
        }
    }

    /// Up to `most` bytes leave.
    pub fn read(&mut self, most: usize) -> Vec<u8> {
        let n = most.min(self.bytes.len());
        self.bytes.drain(..n).collect()
    }

    /// Who writes it closes it; `lose` tells how many of the last bytes are lost with it.
    pub fn close(&mut self, lose: usize) {
        self.ended = true;
        let left = self.bytes.len().saturating_sub(lose);
        self.bytes.truncate(left);
    }

    /// Who reads it closes it.
    pub fn abandon(&mut self) {
        self.ended = true;
        self.told = true;
        self.bytes.clear();
    }
}

/// All connections of one attempt.
#[derive(Debug)]
pub struct Link {
    pub to_destination: Pipe,
    pub to_source: Pipe,
    pub data: Vec<Pipe>,
    pub at_destination: Decoder,
    pub at_source: Decoder,
    /// A receiver a stream, once the destination reads them.
    pub receiving: Vec<Receiving>,
}

impl Link {
    pub fn new(number: usize, streams: u16, accidents: &[Accident]) -> Self {
        let pipe = |line| Pipe {
            harms: accidents
                .iter()
                .filter(|a| a.link == number && a.line == line)
                .map(|a| (a.byte, a.harm))
                .collect(),
            ..Pipe::default()
        };
        Link {
            to_destination: pipe(Line::ToDestination),
            to_source: pipe(Line::ToSource),
            data: (0..streams).map(|k| pipe(Line::Data(k))).collect(),
            at_destination: Decoder::new(),
            at_source: Decoder::new(),
            receiving: Vec::new(),
        }
    }

    /// A connection that is reset in one direction is so in the other.
    pub fn settle(&mut self) {
        if self.to_destination.ended || self.to_source.ended {
            self.to_destination.ended = true;
            self.to_source.ended = true;
        }
    }

    /// The source closes all of it; with `lose`, so many bytes under way are lost.
    pub fn leave_source(&mut self, lose: usize) {
        self.to_source.abandon();
        for pipe in self.data.iter_mut().chain([&mut self.to_destination]) {
            pipe.close(lose);
        }
    }

    /// The destination does.
    pub fn leave_destination(&mut self, lose: usize) {
        self.to_source.close(lose);
        for pipe in self.data.iter_mut().chain([&mut self.to_destination]) {
            pipe.abandon();
        }
    }

    /// When a pipe that stalls carries on.
    pub fn due(&self, now: Time) -> Option<Time> {
        let pipes = self.data.iter().chain([&self.to_destination, &self.to_source]);
        pipes.filter_map(|pipe| pipe.due(now)).min()
    }
}
