//! A destination's stream: reads batches straight into guest memory; those that are packed or encrypted, by way of a
//! buffer.
//!
//! Nothing is written to guest memory before the batch's table has passed every check, and nothing after the round's
//! end: a batch of a round that is not open (see [`Gate`]) ends the migration, so no peer can write into a guest whose
//! RAM was digested or that runs.

use super::sealing::Placing;
use super::{Broken, Headroom};
use crate::transport::{Closer, DataSocket, Encrypted};
use codec::Unpacker;
use engine::{DestinationEvent, ReceivedRun, Step};
use machine::GuestRam;
use pages::PageRange;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use tokio::sync::mpsc;
use wire::batch::{self, BatchHeader, Codec, Run, RunKind, StreamOrder};

/// The round that streams may deliver now. A source sends nothing of the next round before it was told that this one
/// is received, so whatever is early is wrong, and nobody has to wait here.
#[derive(Debug, Default)]
pub(crate) struct Gate(AtomicU32);

impl Gate {
    /// No round.
    const SHUT: u32 = u32::MAX;

    /// Opens `round`, and closes the one before.
    pub(crate) fn open(&self, round: u32) {
        self.0.store(round, Ordering::Release);
    }

    /// Closes the last round.
    pub(crate) fn shut(&self) {
        self.open(Gate::SHUT);
    }

    fn check(&self, round: u32) -> Result<(), String> {
        match self.0.load(Ordering::Acquire) {
            open if open == round => Ok(()),
            Gate::SHUT => Err(format!("pages of round {round} came after the last round was received")),
            open => Err(format!("pages of round {round} came while round {open} was under way")),
        }
    }

    fn is_shut(&self) -> bool {
        self.0.load(Ordering::Acquire) == Gate::SHUT
    }
}

/// All that a stream's thread needs.
pub(crate) struct Receiver {
    pub(crate) stream: u16,
    /// Of the protocol, as agreed on.
    pub(crate) version: u16,
    pub(crate) socket: DataSocket,
    pub(crate) ram: Arc<dyn GuestRam>,
    /// Whether nobody has written to the memory yet.
    pub(crate) memory_is_zero: bool,
    /// The open round: that of the first batch.
    pub(crate) round: u32,
    pub(crate) headroom: Headroom,
    pub(crate) gate: Arc<Gate>,
    pub(crate) closer: Arc<Closer>,
    pub(crate) events: mpsc::Sender<DestinationEvent>,
}

impl Receiver {
    /// The thread: reads until the stream ends, or something is wrong with it.
    pub(crate) fn run(mut self) {
        let Err(broken) = self.serve() else { return };
        if self.closer.is_closed() {
            // We closed it ourselves.
            return;
        }
        let event = match broken {
            Broken::Link(error) => DestinationEvent::StreamGone { error },
            Broken::Stalled => return,
            Broken::Failed(step, error) => DestinationEvent::Failed { step, error },
        };
        if self.events.blocking_send(event).is_err() {
            tracing::trace!("a stream failed after the migration was over");
        }
    }

    fn serve(&mut self) -> Result<(), Broken> {
        self.socket.expect_pages();
        let stream = self.stream;
        let wrong = |e: wire::Error| failed(format!("data stream {stream}: {e}"));
        let mut order = StreamOrder::from_round(stream, self.round);
        let (mut table, mut runs, mut data) = (Vec::new(), Vec::new(), Vec::new());
        let mut headroom = self.headroom;
        let mut unpacking = Unpacking::default();
        while let Some(header) = self.read_header()? {
            order.expect(&header).map_err(wrong)?;
            // A source may lose its streams after the last round; it may not use them for more pages.
            self.gate
                .check(header.round())
                .map_err(|error| Broken::Failed(Step::Control, error))?;
            let event = if header.is_marker() {
                DestinationEvent::Marker {
                    stream,
                    round: header.round(),
                }
            } else {
                table.resize(header.table_bytes(), 0);
                self.read_exact(&mut table)?;
                batch::decode_runs(&header, &table, self.ram.layout(), &mut runs).map_err(wrong)?;
                headroom
                    .take(written_bytes(&runs), || self.ram.host_available())
                    .map_err(failed)?;
                self.take(&header, &runs, &mut data, &mut unpacking)?;
                received(&header, &runs)
            };
            if self.events.blocking_send(event).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The next header; `None` where the stream has ended and nothing was owed.
    fn read_header(&mut self) -> Result<Option<BatchHeader>, Broken> {
        let mut header = [0; batch::HEADER_BYTES];
        let have = self.read_some(&mut header)?;
        if have == 0 {
            if self.gate.is_shut() {
                return Ok(None);
            }
            return Err(Broken::Link(format!(
                "the source closed data stream {} in the middle of a round",
                self.stream
            )));
        }
        if have < header.len() {
            return Err(cut_off(self.stream));
        }
        let header = batch::decode_header(&header);
        header
            .map(Some)
            .map_err(|e| failed(format!("data stream {}: {e}", self.stream)))
    }

    /// Carries a batch out.
    fn take(
        &mut self,
        header: &BatchHeader,
        runs: &[Run],
        data: &mut Vec<PageRange>,
        unpacking: &mut Unpacking,
    ) -> Result<(), Broken> {
        data.clear();
        for run in runs {
            match run.kind {
                RunKind::Data => data.push(run.range),
                // In round 0 each page comes once, and into memory that nobody has written. (A connection that was lost
                // may have left a part of a batch: then `memory_is_zero` is off.)
                RunKind::Zero if self.memory_is_zero && header.round() == 0 => {}
                RunKind::Zero => self
                    .ram
                    .zero(run.range)
                    .map_err(|e| failed(format!("zeroing pages {}: {e}", run.range)))?,
                RunKind::Fill(value) => {
                    let filled = self.ram.fill(run.range, value);
                    filled.map_err(|e| failed(format!("filling pages {}: {e}", run.range)))?;
                }
            }
        }
        self.ram.expect(data);
        if header.is_checked() && self.version < wire::CHECKSUM_SINCE {
            return Err(failed(format!(
                "data stream {}: a batch has a checksum, which version {} of the protocol does not have",
                self.stream, self.version
            )));
        }
        if let Some(codec) = header.codec() {
            return self.unpack(codec, header, data, unpacking);
        }
        if header.is_checked() {
            let raw = sized(&mut unpacking.raw, header.payload_bytes());
            self.read_exact(raw)?;
            header.check_payload(raw).map_err(failed_check)?;
            return self.copy_in(data, raw);
        }
        if let Some(encrypted) = self.socket.encrypted() {
            let placing = Placing::new(&*self.ram, data);
            return decrypt(self.stream, encrypted, header.payload_bytes(), placing);
        }
        let socket = self.socket.as_fd();
        let (mut done, total) = (0, header.payload_bytes());
        while done < total {
            match self.ram.read_from(socket, data, done) {
                Ok(0) => return Err(cut_off(self.stream)),
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Broken::by(self.stream, Step::Receive, "pages were received", &error)),
            }
        }
        Ok(())
    }

    /// Takes the pages of a batch that are packed. What they may become is what the batch's own runs make, which was
    /// checked: nothing that the packed bytes say of their size is believed, and no page of theirs is written unless all
    /// are there.
    fn unpack(
        &mut self,
        codec: Codec,
        header: &BatchHeader,
        data: &[PageRange],
        unpacking: &mut Unpacking,
    ) -> Result<(), Broken> {
        let stream = self.stream;
        if self.version < wire::PACKING_SINCE {
            let version = self.version;
            return Err(failed(format!(
                "data stream {stream}: a batch is packed by {codec}, which version {version} of the protocol does not have"
            )));
        }
        let Unpacking { unpacker, packed, raw } = unpacking;
        let packed = sized(packed, header.wire_bytes());
        self.read_exact(packed)?;
        header.check_payload(packed).map_err(failed_check)?;
        let raw = sized(raw, header.payload_bytes());
        let unpacked = unpacker.unpack(codec, packed, raw);
        unpacked.map_err(|e| failed(format!("data stream {stream}: {e}")))?;
        self.copy_in(data, raw)
    }

    /// Copies the pages of a batch, which are all there, to their places.
    fn copy_in(&self, data: &[PageRange], pages: &[u8]) -> Result<(), Broken> {
        let placed = Placing::new(&*self.ram, data).take(pages);
        placed.map_err(|e| not_placed(self.stream, &e))
    }

    fn read_exact(&mut self, into: &mut [u8]) -> Result<(), Broken> {
        let have = self.read_some(into)?;
        if have < into.len() {
            Err(cut_off(self.stream))
        } else {
            Ok(())
        }
    }

    /// Fills `into` unless the stream ends before; returns how much came.
    fn read_some(&mut self, into: &mut [u8]) -> Result<usize, Broken> {
        let mut done = 0;
        while done < into.len() {
            match self.socket.read(&mut into[done..]) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Broken::by(self.stream, Step::Receive, "a batch was awaited", &error)),
            }
        }
        Ok(done)
    }
}

/// Takes the pages of a batch of `bytes` as they are decrypted. Of a record no byte comes before all of it was authenticated;
/// of a batch that breaks off pages may be in memory, as where they are read straight into it.
fn decrypt(stream: u16, mut encrypted: Encrypted<'_>, bytes: usize, mut placing: Placing<'_>) -> Result<(), Broken> {
    let mut done = 0;
    while done < bytes {
        let mut placed = Ok(());
        let came = encrypted.read_pieces(bytes - done, &mut |piece| {
            if placed.is_ok() {
                placed = placing.take(piece);
            }
        });
        placed.map_err(|e| not_placed(stream, &e))?;
        match came {
            Ok(0) => return Err(cut_off(stream)),
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Broken::by(stream, Step::Receive, "pages were received", &error)),
        }
    }
    Ok(())
}

fn cut_off(stream: u16) -> Broken {
    Broken::Link(format!(
        "the source closed data stream {stream} in the middle of a batch"
    ))
}

fn not_placed(stream: u16, error: &str) -> Broken {
    failed(format!("data stream {stream}: {error}"))
}

/// A failure that has nothing to do with the connection.
fn failed(error: String) -> Broken {
    Broken::Failed(Step::Receive, error)
}

/// The payload is not what was sent.
fn failed_check(error: wire::Error) -> Broken {
    failed(error.to_string())
}

/// What a stream unpacks with: its buffers are made once, as large as the largest batch that came.
#[derive(Debug, Default)]
struct Unpacking {
    unpacker: Unpacker,
    packed: Vec<u8>,
    raw: Vec<u8>,
}

/// The first `bytes` of a buffer, which grows to that; they are within a batch's limits.
fn sized(buffer: &mut Vec<u8>, bytes: usize) -> &mut [u8] {
    if buffer.len() < bytes {
        buffer.resize(bytes, 0);
    }
    &mut buffer[..bytes]
}

/// Bytes of guest memory that a batch fills.
fn written_bytes(runs: &[Run]) -> u64 {
    let fills = runs.iter().filter(|run| run.kind != RunKind::Zero);
    fills.fold(0, |sum: u64, run| sum.saturating_add(run.range.bytes()))
}

fn received(header: &BatchHeader, runs: &[Run]) -> DestinationEvent {
    let run = |run: &Run| ReceivedRun {
        range: run.range,
        kind: match run.kind {
            RunKind::Data => engine::RunKind::Data,
            RunKind::Zero => engine::RunKind::Zero,
            RunKind::Fill(_) => engine::RunKind::Fill,
        },
    };
    DestinationEvent::Received {
        stream: header.stream(),
        round: header.round(),
        runs: runs.iter().map(run).collect(),
        wire_bytes: (batch::HEADER_BYTES + header.table_bytes() + header.wire_bytes()) as u64,
        payload_bytes: header.payload_bytes() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_open_round_passes_the_gate() {
        let gate = Gate::default();
        assert!(gate.check(0).is_ok());
        assert!(gate.check(1).unwrap_err().contains("round 1 came while round 0"));
        gate.open(1);
        assert!(gate.check(0).is_err());
        gate.shut();
        assert!(gate.check(1).unwrap_err().contains("after the last round"));
        assert!(gate.is_shut());
    }
}
