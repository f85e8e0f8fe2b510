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
        StreamOrder::from_round(stream, 0)
    }

    /// The same for one that takes a lost one's place: `round` is open, and batches are numbered from 0 again.
    pub fn from_round(stream: u16, round: u32) -> Self {
        StreamOrder {
            stream,
            seq: Some(0),
            round: Some(round),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{BatchBuilder, Run, RunKind, decode_header, marker};
    use pages::{PageRange, Pfn};

    fn end(stream: u16, round: u32, seq: u32) -> BatchHeader {
        decode_header(&marker(stream, round, seq)).unwrap()
    }

    #[test]
    fn what_a_builder_makes_comes_in_order() {
        let (mut builder, mut order) = (BatchBuilder::new(1), StreamOrder::new(1));
        for round in 0..3 {
            builder.start(round);
            for _ in 0..=round {
                let range = PageRange::between(Pfn(0), Pfn(1));
                builder
                    .push(Run {
                        range,
                        kind: RunKind::Zero,
                    })
                    .unwrap();
                let head = builder.finish().unwrap().0;
                assert_eq!(order.round(), Some(round));
                order
                    .expect(&decode_header(head[..40].try_into().unwrap()).unwrap())
                    .unwrap();
            }
            order
                .expect(&decode_header(&builder.marker(round).unwrap()).unwrap())
                .unwrap();
        }
        assert_eq!(order.round(), Some(3));
    }

    #[test]
    fn another_stream_number_and_round_are_refused() {
        let mut order = StreamOrder::new(1);
        order.expect(&end(1, 0, 0)).unwrap();
        for (header, what) in [
            (end(2, 1, 1), "a batch's stream"),
            (end(1, 1, 0), "a batch's number"),
            (end(1, 1, 2), "a batch's number"),
            (end(1, 2, 1), "a batch's round"),
        ] {
            let error = order.expect(&header).unwrap_err();
            assert!(
                matches!(error, Error::OutOfOrder { what: w, .. } if w == what),
                "{what}: {error}"
            );
        }
        // None of these moved it on.
        order.expect(&end(1, 1, 1)).unwrap();
    }

    #[test]
    fn counters_end_rather_than_wrap() {
        let mut order = StreamOrder {
            seq: Some(u32::MAX),
            round: Some(u32::MAX),
            ..StreamOrder::new(0)
        };
        order.expect(&end(0, u32::MAX, u32::MAX)).unwrap();
        assert_eq!(order.round(), None);
        assert!(matches!(order.expect(&end(0, 0, 0)), Err(Error::Exhausted { .. })));
    }
}
