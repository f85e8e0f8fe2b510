//! The order in which a stream's batches have to come.

use super::BatchHeader;
use crate::{Error, Result};

/// Follows one stream on the receiving side: each batch has the stream's number and the next number in turn, and is of
/// the stream's open round; a marker ends that round and opens the next. Rounds are barriers across streams, so
/// a batch of a later round must not even come before the round is open: that is the engine's to check, with
/// [`StreamOrder::round`].
#[derive(Clone, Debug)]
pub struct StreamOrder {
    stream: u16,
    /// The next batch's number; `None` once they are used up.
    seq: Option<u32>,
    /// The open round; `None` once they are used up.
    round: Option<u32>,
}

impl StreamOrder {
    /// A stream on which nothing has come yet.
    pub fn new(stream: u16) -> Self {
        StreamOrder {
            stream,
            seq: Some(0),
            round: Some(0),
        }
    }

    /// The open round: that of the next batch; `None` where no further round can follow.
    pub fn round(&self) -> Option<u32> {
        self.round
    }

    /// Checks that `header` is what comes next, and moves on. After an error, nothing more may be taken from the stream.
    pub fn expect(&mut self, header: &BatchHeader) -> Result<()> {
        let stream = self.stream;
        if header.stream() != stream {
            return Err(self.out_of_order("a batch's stream", header.stream().into(), stream.into()));
        }
        let exhausted = |what| Error::Exhausted {
            stream,
            what,
            last: u32::MAX,
        };
        let seq = self.seq.ok_or_else(|| exhausted("numbering of batches"))?;
        if header.seq() != seq {
            return Err(self.out_of_order("a batch's number", header.seq(), seq));
        }
        let round = self.round.ok_or_else(|| exhausted("numbering of rounds"))?;
        if header.round() < round {
            return Err(Error::RoundEnded {
                stream,
                what: if header.is_marker() { "a marker" } else { "a batch" },
                round: header.round(),
            });
        }
        if header.round() > round {
            return Err(self.out_of_order("a batch's round", header.round(), round));
        }
        self.seq = seq.checked_add(1);
        if header.is_marker() {
            self.round = round.checked_add(1);
        }
        Ok(())
    }

    fn out_of_order(&self, what: &'static str, found: u32, expected: u32) -> Error {
        Error::OutOfOrder {
            stream: self.stream,
            what,
            found,
            expected,
        }
    }
}
