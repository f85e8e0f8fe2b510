//! Makes a stream's batches, in one buffer that is used over and over.

use super::{
    CRC_AT, Codec, HEADER_BYTES, MAX_PAYLOAD_BYTES, MAX_RUNS, MAX_TABLE_BYTES, PAGE_BYTES, RUN_BYTES, Run, RunKind,
};
use crate::{Error, Result};
use pages::Pfn;

/// Builds header and table of one batch after another. Allocates once, when it is made.
///
/// ```
/// use pages::{PageRange, Pfn};
/// use wire::batch::{BatchBuilder, Run, RunKind};
///
/// let mut builder = BatchBuilder::new(0);
/// builder.start(0);
/// let range = PageRange::between(Pfn(16), Pfn(20));
/// assert!(builder.push(Run { range, kind: RunKind::Data })?);
/// let (head, payload_bytes) = builder.finish()?;
/// assert_eq!((head.len(), payload_bytes), (40 + 24, 4 * 4096));
/// // ... write `head`, then the four pages; at the round's end:
/// let marker = builder.marker(0)?;
/// # Ok::<(), wire::Error>(())
/// ```
#[derive(Debug)]
pub struct BatchBuilder {
    stream: u16,
    round: u32,
    /// The next batch's number; `None` once they are used up.
    seq: Option<u32>,
    /// Header and table.
    head: Vec<u8>,
    runs: u32,
    payload_bytes: u32,
    /// Where the last run ends.
    floor: Pfn,
    /// The batch was finished: the next push starts another.
    finished: bool,
    /// Of the payload of the batch that is finished next.
    sum: Option<u32>,
}

impl BatchBuilder {
    /// For stream `stream`, which has sent nothing yet.
    pub fn new(stream: u16) -> Self {
        let mut head = Vec::with_capacity(HEADER_BYTES + MAX_TABLE_BYTES);
        head.resize(HEADER_BYTES, 0);
        BatchBuilder {
            stream,
            round: 0,
            seq: Some(0),
            head,
            runs: 0,
            payload_bytes: 0,
            floor: Pfn(0),
            finished: false,
            sum: None,
        }
    }

    /// Starts a batch of round `round`; what was pushed and not finished is dropped.
    pub fn start(&mut self, round: u32) {
        self.round = round;
        self.clear();
    }

    /// Adds a run. `false` if it does not fit any more: finish this batch, and push it again into the next one.
    ///
    /// # Errors
    ///
    /// The run is empty, starts before the end of the run before, or has more data than any batch may have.
    pub fn push(&mut self, run: Run) -> Result<bool> {
        if self.finished {
            self.clear();
        }
        let index = self.runs as usize;
        if run.range.is_empty() {
            return Err(Error::RunRange {
                index,
                start: run.range.start(),
                pages: 0,
            });
        }
        if run.range.start() < self.floor {
            return Err(Error::RunOrder {
                index,
                range: run.range,
                floor: self.floor,
            });
        }
        let bytes = u32::try_from(run.payload_bytes()).unwrap_or(u32::MAX);
        if bytes > MAX_PAYLOAD_BYTES {
            return Err(Error::Limit {
                what: "payload bytes of a run",
                value: run.payload_bytes(),
                limit: u64::from(MAX_PAYLOAD_BYTES),
            });
        }
        if index >= MAX_RUNS || bytes > MAX_PAYLOAD_BYTES - self.payload_bytes {
            return Ok(false);
        }
        self.append(run);
        self.payload_bytes += bytes;
        Ok(true)
    }

    /// How many pages of data still fit.
    pub fn room_pages(&self) -> u64 {
        let taken = if self.finished { 0 } else { self.payload_bytes };
        u64::from(MAX_PAYLOAD_BYTES - taken) / PAGE_BYTES
    }

    /// Bytes of payload so far.
    pub fn payload_bytes(&self) -> usize {
        if self.finished { 0 } else { self.payload_bytes as usize }
    }

    /// Whether no run was pushed since the batch was started.
    pub fn is_empty(&self) -> bool {
        self.finished || self.runs == 0
    }

    /// Completes the batch: the bytes of header and table, and how many bytes of pages have to follow them. The next
    /// push starts the next batch, of the same round.
    ///
    /// # Errors
    ///
    /// No run was pushed, or the stream has used up its numbers.
    pub fn finish(&mut self) -> Result<(&[u8], usize)> {
        self.seal(None)?;
        Ok((&self.head, self.payload_bytes as usize))
    }

    /// Completes the batch, whose pages were packed into `packed_bytes` by `codec`: the bytes of header and table, which
    /// the packed ones have to follow. Only where both sides speak version 2.
    ///
    /// # Errors
    ///
    /// As [`BatchBuilder::finish`], or the pages did not become smaller.
    pub fn finish_packed(&mut self, codec: Codec, packed_bytes: usize) -> Result<&[u8]> {
        let packed = u32::try_from(packed_bytes).unwrap_or(u32::MAX);
        if packed == 0 || packed >= self.payload_bytes {
            return Err(Error::PackedBytes {
                codec: codec.name(),
                packed_bytes: packed,
                payload_bytes: self.payload_bytes,
            });
        }
        self.seal(Some((codec, packed)))?;
        Ok(&self.head)
    }

    /// Has the batch that is finished next say the checksum of `payload`, what follows its table. Only where both sides
    /// speak version 3.
    pub fn check(&mut self, payload: &[u8]) {
        self.sum = Some(crc32c::crc32c(payload));
    }

    fn seal(&mut self, packing: Option<(Codec, u32)>) -> Result<()> {
        if self.is_empty() {
            return Err(Error::BatchShape {
                what: "batch",
                runs: 0,
                payload_bytes: 0,
            });
        }
        let seq = self.take_seq()?;
        let words = [self.round, seq, self.runs, self.payload_bytes];
        super::write_header(&mut self.head, 0, self.stream, words);
        if let Some((codec, packed_bytes)) = packing {
            super::write_packing(&mut self.head, codec, packed_bytes);
        }
        if let Some(sum) = self.sum.take() {
            super::write_sum(&mut self.head, sum);
        }
        let crc = crc32c::crc32c_append(crc32c::crc32c(&self.head[..CRC_AT]), &self.head[HEADER_BYTES..]);
        self.head[CRC_AT..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
        self.finished = true;
        Ok(())
    }

    /// The marker that ends round `round` on this stream. What was pushed and not finished is dropped.
    ///
    /// # Errors
    ///
    /// The stream has used up its numbers.
    pub fn marker(&mut self, round: u32) -> Result<[u8; HEADER_BYTES]> {
        self.clear();
        Ok(super::marker(self.stream, round, self.take_seq()?))
    }

    fn append(&mut self, run: Run) {
        let (kind, fill) = match run.kind {
            RunKind::Data => (0u32, 0),
            RunKind::Zero => (1, 0),
            RunKind::Fill(value) => (2, value),
        };
        let mut entry = [0; RUN_BYTES];
        entry[..8].copy_from_slice(&run.range.start().0.to_le_bytes());
        entry[8..16].copy_from_slice(&run.range.count().to_le_bytes());
        entry[16..20].copy_from_slice(&kind.to_le_bytes());
        entry[20..].copy_from_slice(&fill.to_le_bytes());
        self.head.extend_from_slice(&entry);
        self.runs += 1;
        self.floor = run.range.end();
    }

    fn take_seq(&mut self) -> Result<u32> {
        let seq = self.seq.ok_or(Error::Exhausted {
            stream: self.stream,
            what: "numbering of batches",
            last: u32::MAX,
        })?;
        self.seq = seq.checked_add(1);
        Ok(seq)
    }

    fn clear(&mut self) {
        self.head.truncate(HEADER_BYTES);
        self.runs = 0;
        self.payload_bytes = 0;
        self.floor = Pfn(0);
        self.finished = false;
        self.sum = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{decode_header, decode_runs};
    use pages::{Layout, PageRange};

    fn run(start: u64, pages: u64, kind: RunKind) -> Run {
        Run {
            range: PageRange::between(Pfn(start), Pfn(start + pages)),
            kind,
        }
    }

    fn read(head: &[u8]) -> (u32, u32, Vec<Run>) {
        let header = decode_header(head[..HEADER_BYTES].try_into().unwrap()).unwrap();
        let mut out = Vec::new();
        decode_runs(
            &header,
            &head[HEADER_BYTES..],
            &Layout::flat(1 << 20).unwrap(),
            &mut out,
        )
        .unwrap();
        (header.round(), header.seq(), out)
    }

    #[test]
    fn a_batch_is_full_by_bytes_and_by_runs() {
        let mut builder = BatchBuilder::new(0);
        assert_eq!(builder.room_pages(), 1024);
        assert!(builder.push(run(0, 1023, RunKind::Data)).unwrap());
        assert!(!builder.push(run(2000, 2, RunKind::Data)).unwrap());
        assert!(builder.push(run(2000, 1, RunKind::Data)).unwrap());
        assert_eq!((builder.room_pages(), builder.payload_bytes()), (0, 4 << 20));
        assert!(builder.push(run(3000, 5000, RunKind::Zero)).unwrap());
        assert_eq!(builder.finish().unwrap().1, 4 << 20);
        for i in 0..MAX_RUNS as u64 {
            assert!(builder.push(run(i, 1, RunKind::Zero)).unwrap());
        }
        assert!(!builder.push(run(5000, 1, RunKind::Zero)).unwrap());
        assert_eq!(read(builder.finish().unwrap().0).2.len(), MAX_RUNS);
    }

    #[test]
    fn a_packed_batch_says_both_sizes() {
        let mut builder = BatchBuilder::new(3);
        builder.push(run(8, 2, RunKind::Data)).unwrap();
        for wrong in [0, 8192, 1 << 40] {
            let error = builder.finish_packed(Codec::Lz4, wrong).unwrap_err();
            assert!(matches!(error, Error::PackedBytes { .. }), "{error}");
        }
        for codec in Codec::ALL {
            builder.start(0);
            builder.push(run(8, 2, RunKind::Data)).unwrap();
            let head = builder.finish_packed(codec, 8191).unwrap().to_vec();
            let header = decode_header(head[..HEADER_BYTES].try_into().unwrap()).unwrap();
            let sizes = (header.payload_bytes(), header.wire_bytes());
            assert_eq!((header.codec(), sizes), (Some(codec), (8192, 8191)));
            assert_eq!(read(&head).2, vec![run(8, 2, RunKind::Data)]);
        }
        // The next one is not packed again.
        builder.push(run(8, 2, RunKind::Data)).unwrap();
        let head = builder.finish().unwrap().0.to_vec();
        let header = decode_header(head[..HEADER_BYTES].try_into().unwrap()).unwrap();
        assert_eq!((header.codec(), header.wire_bytes()), (None, 8192));
    }

    #[test]
    fn one_batch_leaves_nothing_to_the_next() {
        let mut builder = BatchBuilder::new(0);
        builder.start(4);
        let (first, second) = (run(100, 3, RunKind::Data), run(7, 1, RunKind::Fill(9)));
        builder.push(first).unwrap();
        assert_eq!(read(builder.finish().unwrap().0), (4, 0, vec![first]));
        assert!(builder.is_empty());
        // Lower pages again: another batch of the same round.
        builder.push(second).unwrap();
        assert_eq!(read(builder.finish().unwrap().0), (4, 1, vec![second]));
        let marker = decode_header(&builder.marker(4).unwrap()).unwrap();
        assert_eq!((marker.is_marker(), marker.round(), marker.seq()), (true, 4, 2));
        builder.push(first).unwrap();
        builder.start(5);
        builder.push(second).unwrap();
        assert_eq!(read(builder.finish().unwrap().0), (5, 3, vec![second]));
    }

    #[test]
    fn what_the_receiver_would_refuse_is_refused() {
        let mut builder = BatchBuilder::new(0);
        assert!(matches!(builder.finish(), Err(Error::BatchShape { .. })));
        let error = builder.push(run(5, 0, RunKind::Zero)).unwrap_err();
        assert_eq!(
            error,
            Error::RunRange {
                index: 0,
                start: Pfn(5),
                pages: 0
            }
        );
        assert!(matches!(
            builder.push(run(0, 1025, RunKind::Data)),
            Err(Error::Limit { .. })
        ));
        assert!(matches!(
            builder.push(run(0, 1 << 52, RunKind::Data)),
            Err(Error::Limit { .. })
        ));
        builder.push(run(5, 5, RunKind::Zero)).unwrap();
        let error = builder.push(run(9, 5, RunKind::Zero)).unwrap_err();
        assert!(
            matches!(
                error,
                Error::RunOrder {
                    index: 1,
                    floor: Pfn(10),
                    ..
                }
            ),
            "{error}"
        );
        // The batch is still good.
        assert_eq!(read(builder.finish().unwrap().0).2.len(), 1);
    }

    #[test]
    fn batch_numbers_end_rather_than_wrap() {
        let mut builder = BatchBuilder::new(2);
        builder.seq = Some(u32::MAX);
        builder.push(run(0, 1, RunKind::Zero)).unwrap();
        assert_eq!(read(builder.finish().unwrap().0).1, u32::MAX);
        builder.push(run(0, 1, RunKind::Zero)).unwrap();
        assert!(matches!(builder.finish(), Err(Error::Exhausted { stream: 2, .. })));
        assert!(matches!(builder.marker(0), Err(Error::Exhausted { stream: 2, .. })));
    }
}
