//! A source's stream: takes chunks, looks for zero pages, sends batches.
//!
//! A batch is looked through right before it is written, so that the write finds its pages in the cache.

use super::judge::{Path, Took};
use super::packing::{Packing, Totals, raw_bytes};
use super::sealing::Sealing;
use super::{Broken, Pacer};
use crate::transport::{self, Closer, DataSocket};
use crate::{Address, Compress, Security};
use engine::{Chunk, Content, SourceEvent, Step};
use machine::{GuestRam, PageKind};
use pages::PageRange;
use socket2::Socket;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use wire::batch::{BatchBuilder, Run, RunKind};
use wire::{ConnectionRole, Preamble, PreambleReply, SessionId};

/// Pages of content in a batch: 1 MiB, the fastest size (see `docs/architecture.md`).
const BATCH_PAGES: u64 = 256;

/// Writes that are given up and tried again before a receiver that takes nothing is dead. A blocked write wakes up only
/// once a good part of a large socket buffer is free, which takes long on a slow link; a write that is tried anew finds
/// whatever is free by then. So a link that is merely slow is not taken for a dead one.
const TRIES: u32 = 16;

/// A write to another machine waits while so much has not left. What is under way does not count, so no link is slower for
/// it; but one that is slower than the cores shows after this much, not after a whole socket buffer.
const UNSENT_BYTES: u32 = 512 << 10;

/// What a stream is told to do.
#[derive(Debug)]
pub(crate) enum Command {
    /// Send this.
    Chunk(Chunk),
    /// Send the end-of-round marker.
    EndRound(u32),
}

/// All that a stream's thread needs.
pub(crate) struct Sender {
    pub(crate) stream: u16,
    pub(crate) to: Address,
    pub(crate) security: Security,
    pub(crate) session: SessionId,
    pub(crate) connect_timeout: Duration,
    /// A receiver that takes no byte for so long is dead.
    pub(crate) peer_timeout: Duration,
    pub(crate) buffer_bytes: usize,
    pub(crate) skip_zero: bool,
    pub(crate) compress: Compress,
    /// Whether batches say the checksum of their payload.
    pub(crate) checksum: bool,
    /// Data streams of the migration.
    pub(crate) streams: u16,
    pub(crate) totals: Arc<Totals>,
    pub(crate) ram: Arc<dyn GuestRam>,
    pub(crate) pacer: Arc<Pacer>,
    pub(crate) closer: Arc<Closer>,
    pub(crate) events: mpsc::Sender<SourceEvent>,
}

impl Sender {
    /// The thread: connects, then does as told until nobody is left to tell.
    pub(crate) fn run(self, commands: std::sync::mpsc::Receiver<Command>) {
        let events = self.events.clone();
        let stream = self.stream;
        if let Err(broken) = self.serve(commands) {
            let event = match broken {
                Broken::Stalled => SourceEvent::Stalled { stream },
                Broken::Link(error) => SourceEvent::StreamGone { error },
                Broken::Failed(step, error) => SourceEvent::Failed { step, error },
            };
            if events.blocking_send(event).is_err() {
                tracing::trace!("a stream failed after the migration was over");
            }
        }
    }

    fn serve(self, commands: std::sync::mpsc::Receiver<Command>) -> Result<(), Broken> {
        let (socket, version) = self.connect()?;
        let (events, totals) = (self.events.clone(), Arc::clone(&self.totals));
        // Nothing is told to be sent before the receiver has accepted, and said what it takes.
        let Ok(first) = commands.recv() else { return Ok(()) };
        if self.checksum && version < wire::CHECKSUM_SINCE {
            return Err(failed(format!(
                "data stream {} speaks version {version} of the protocol, which has no checksums over pages (--checksum), \
                 though the control connection has them: are there two receivers at this address?",
                self.stream
            )));
        }
        let packing = self
            .packing(&socket, version >= wire::PACKING_SINCE, &totals)
            .map_err(failed)?;
        let mut sending = Sending {
            batch_pages: self.pacer.batch_pages(BATCH_PAGES),
            builder: BatchBuilder::new(self.stream),
            data: Vec::new(),
            data_pages: 0,
            zero: Vec::new(),
            wire_bytes: 0,
            payload_bytes: 0,
            socket,
            packing,
            sender: self,
        };
        for command in std::iter::once(first).chain(commands) {
            match command {
                Command::Chunk(chunk) => {
                    let event = sending.send_chunk(chunk)?;
                    if events.blocking_send(event).is_err() {
                        return Ok(());
                    }
                }
                Command::EndRound(round) => sending.send_marker(round)?,
            }
        }
        Ok(())
    }

    fn packing<'a>(&self, socket: &Socket, packs: bool, totals: &'a Totals) -> Result<Packing<'a>, String> {
        let limit = self.pacer.bytes_per_s();
        let local = is_local(socket);
        if !local && let Err(error) = socket.set_tcp_notsent_lowat(UNSENT_BYTES) {
            tracing::debug!(%error, "the link's speed will show later");
        }
        let path = Path {
            local,
            limit: limit.map(|rate| rate_of(rate / u64::from(self.streams.max(1)))),
            streams: self.streams,
        };
        Packing::new(self.stream, self.compress, packs, path, self.skip_zero, totals)
    }

    /// What [`write_out`] ended with.
    pub(super) fn broken_off(&self, doing: &str, error: &io::Error) -> Broken {
        match error.kind() {
            io::ErrorKind::TimedOut => Broken::Stalled,
            _ => Broken::by(self.stream, Step::Send, doing, error),
        }
    }

    /// The connection, and the version of the protocol that was agreed on.
    fn connect(&self) -> Result<(DataSocket, u16), Broken> {
        let (stream, patience) = (self.stream, self.connect_timeout);
        let opening = |e: crate::Error| {
            let text = format!("opening data stream {stream}: {e}");
            match e.is_refusal() {
                true => failed(text),
                false => Broken::Link(text),
            }
        };
        let dialled = transport::dial(&self.to, patience, Some(self.buffer_bytes), &self.security);
        let socket = dialled.map_err(opening)?;
        let doing = |e: io::Error| Broken::by(stream, Step::Send, "it was opened", &e);
        self.closer.add(&socket).map_err(doing)?;
        let secured = transport::secure(socket, &self.to, patience, &self.security);
        let mut socket = secured.map_err(opening)?;
        socket.set_read_timeout(Some(self.connect_timeout)).map_err(doing)?;
        let preamble = Preamble {
            versions: wire::VERSIONS,
            session: self.session,
            role: ConnectionRole::Data { stream },
        };
        socket.write_all(&preamble.encode()).map_err(doing)?;
        let mut reply = [0; wire::REPLY_BYTES];
        socket.read_exact(&mut reply).map_err(doing)?;
        let agreed = PreambleReply::decode(&reply).and_then(|reply| reply.agreed(wire::VERSIONS));
        let version = agreed.map_err(|e| failed(format!("opening data stream {stream}: {e}")))?;
        // The engine takes less than 20 ms for 20 ms; a time-out of 0 would be none.
        let patience = (self.peer_timeout / TRIES).max(Duration::from_millis(1));
        socket.set_write_timeout(Some(patience)).map_err(doing)?;
        Ok((socket, version))
    }
}

/// A stream that is connected.
struct Sending<'a> {
    sender: Sender,
    packing: Packing<'a>,
    socket: DataSocket,
    builder: BatchBuilder,
    batch_pages: u64,
    /// The data runs of the batch that is being made, and their pages.
    data: Vec<PageRange>,
    data_pages: u64,
    /// Of the chunk: pages that were told as zero, and bytes.
    zero: Vec<PageRange>,
    wire_bytes: u64,
    payload_bytes: u64,
}

impl Sending<'_> {
    fn send_chunk(&mut self, chunk: Chunk) -> Result<SourceEvent, Broken> {
        self.builder.start(chunk.round);
        self.batch_pages = self.sender.pacer.batch_pages(BATCH_PAGES);
        self.zero = Vec::new();
        (self.wire_bytes, self.payload_bytes) = (0, 0);
        match chunk.content {
            Content::Pages(ranges) => {
                for range in ranges {
                    self.add_pages(range)?;
                }
            }
            Content::Fill { ranges, value } => {
                for range in ranges {
                    self.add(range, RunKind::Fill(value))?;
                }
            }
        }
        self.flush()?;
        Ok(SourceEvent::Sent {
            stream: self.sender.stream,
            chunk: chunk.id,
            zero: std::mem::take(&mut self.zero),
            wire_bytes: self.wire_bytes,
            payload_bytes: self.payload_bytes,
        })
    }

    fn add_pages(&mut self, mut range: PageRange) -> Result<(), Broken> {
        if !self.sender.skip_zero {
            return self.add(range, RunKind::Data);
        }
        let ram = Arc::clone(&self.sender.ram);
        let mut kinds: Vec<(PageRange, PageKind)> = Vec::new();
        while !range.is_empty() {
            // No more than this batch takes: the rest is looked at when it is its turn.
            let (part, rest) = range.split_at(self.batch_pages - self.data_pages);
            range = rest;
            kinds.clear();
            ram.classify(part, &mut |range, kind| kinds.push((range, kind)))
                .map_err(|e| failed(format!("reading pages {part}: {e}")))?;
            for (range, kind) in &kinds {
                match kind {
                    PageKind::Data => self.add(*range, RunKind::Data)?,
                    PageKind::Zero => {
                        extend(&mut self.zero, *range);
                        self.add(*range, RunKind::Zero)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, mut range: PageRange, kind: RunKind) -> Result<(), Broken> {
        while !range.is_empty() {
            let room = match kind {
                RunKind::Data => self.batch_pages - self.data_pages,
                RunKind::Zero | RunKind::Fill(_) => u64::MAX,
            };
            let (part, rest) = range.split_at(room);
            if !self.builder.push(Run { range: part, kind }).map_err(failed)? {
                self.flush()?;
                continue;
            }
            range = rest;
            if kind == RunKind::Data {
                self.data.push(part);
                self.data_pages += part.count();
            }
            if self.data_pages == self.batch_pages {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Sends the batch as it is.
    fn flush(&mut self) -> Result<(), Broken> {
        if self.builder.is_empty() {
            return Ok(());
        }
        let sender = &self.sender;
        let batch = self
            .packing
            .pack(&*sender.ram, &self.data, sender.checksum)
            .map_err(failed)?;
        let raw = raw_bytes(self.data_pages);
        let (codec, pack_ns) = (batch.codec, batch.pack_ns);
        if let Some(bytes) = batch.bytes.filter(|_| sender.checksum) {
            // Of the copy that is sent: the guest may have written since.
            self.builder.check(bytes);
        }
        let (head, payload_bytes) = match (codec, batch.bytes) {
            (Some(codec), Some(bytes)) => {
                let head = self.builder.finish_packed(codec, bytes.len());
                (head.map_err(failed)?, bytes.len())
            }
            _ => self.builder.finish().map_err(failed)?,
        };
        let total = head.len() + payload_bytes;
        let from = Instant::now();
        sender.pacer.wait(total as u64, &sender.closer);
        // The time starts here: waiting for one's turn on the link is no stall.
        let patience = sender.peer_timeout;
        let (totals, doing) = (&sender.totals, "pages were sent");
        match (batch.bytes, self.socket.encrypted()) {
            (None, None) => write_out(total, patience, |done| {
                let wrote = sender.ram.write_to(self.socket.as_fd(), head, &self.data, done);
                wrote.inspect(|n| totals.wrote(*n))
            })
            .map_err(|e| sender.broken_off(doing, &e))?,
            (Some(bytes), None) => write_out(total, patience, |done| {
                let wrote = self.socket.write_parts(head, bytes, done);
                wrote.inspect(|n| totals.wrote(*n))
            })
            .map_err(|e| sender.broken_off(doing, &e))?,
            (bytes, Some(encrypted)) => {
                let mut sealing = Sealing::new(encrypted, sender, doing);
                sealing.put(head)?;
                match bytes {
                    Some(bytes) => sealing.put(bytes)?,
                    None => sealing.put_pages(&self.data, |range, into| {
                        self.packing.copy_out(&*sender.ram, range, into)
                    })?,
                }
                sealing.end()?;
            }
        }
        let link_ns = from.elapsed().as_secs_f64() * 1e9;
        let wire = payload_bytes as u64;
        self.packing.sent(
            codec,
            Took {
                raw,
                wire,
                pack_ns,
                link_ns,
            },
        );
        self.wire_bytes += total as u64;
        self.payload_bytes += raw;
        self.data.clear();
        self.data_pages = 0;
        self.batch_pages = sender.pacer.batch_pages(BATCH_PAGES);
        Ok(())
    }

    fn send_marker(&mut self, round: u32) -> Result<(), Broken> {
        let marker = self.builder.marker(round).map_err(failed)?;
        let (sender, doing) = (&self.sender, "the end of a round was sent");
        if let Some(encrypted) = self.socket.encrypted() {
            let mut sealing = Sealing::new(encrypted, sender, doing);
            sealing.put(&marker)?;
            return sealing.end();
        }
        let written = write_out(marker.len(), sender.peer_timeout, |done| {
            let wrote = self.socket.write_parts(&marker, &[], done);
            wrote.inspect(|n| sender.totals.wrote(*n))
        });
        written.map_err(|e| sender.broken_off(doing, &e))
    }
}

/// Whether the receiver is on this machine, as far as the socket tells.
fn is_local(socket: &Socket) -> bool {
    let ends = |end: io::Result<socket2::SockAddr>| end.ok().and_then(|end| end.as_socket());
    match (ends(socket.local_addr()), ends(socket.peer_addr())) {
        (Some(here), Some(there)) => there.ip().is_loopback() || here.ip() == there.ip(),
        // A Unix socket, or vsock, ends where it began.
        _ => true,
    }
}

#[expect(clippy::cast_precision_loss, reason = "a rate to decide by")]
fn rate_of(bytes_per_s: u64) -> f64 {
    bytes_per_s as f64
}

/// A failure that has nothing to do with the connection.
pub(super) fn failed(error: impl ToString) -> Broken {
    Broken::Failed(Step::Send, error.to_string())
}

/// Writes `total` bytes by `write`, which is told how many were taken before, however few are taken at a time.
/// [`io::ErrorKind::TimedOut`] where none is taken for `patience`.
pub(super) fn write_out(
    total: usize,
    patience: Duration,
    mut write: impl FnMut(usize) -> io::Result<usize>,
) -> io::Result<()> {
    let (mut done, mut since) = (0, Instant::now());
    while done < total {
        match write(done) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                done += n;
                since = Instant::now();
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The write was given up by the socket's own, shorter time-out.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if since.elapsed() >= patience {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Adds `range` to an ascending list, to its last range where that ends here.
fn extend(list: &mut Vec<PageRange>, range: PageRange) {
    match list.last_mut() {
        Some(last) if last.end() == range.start() => *last = PageRange::between(last.start(), range.end()),
        _ => list.push(range),
    }
}
