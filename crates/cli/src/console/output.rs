//! What the guest prints, on its way out: a bounded queue, and a thread that writes.
//!
//! The guest's vCPU prints, so printing must not stop it for long: a pipe that nobody reads would, by and by, hold up a
//! pause and with it a migration. A full queue is waited for while it moves, so a slow terminal slows a chatty guest down;
//! one that does not move for [`STALLED`] is passed by, and output is lost until it moves again.
//!
//! Invariant: nothing is logged by the thread that prints, nor with the lock held: stderr may be the very pipe that nobody
//! reads. That output was lost is said by the thread that writes, or at the end.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Bytes that wait to be written.
const QUEUE_BYTES: usize = 1 << 20;

/// Bytes that are written at a time.
const WRITE_BYTES: usize = 16 << 10;

/// How long output may stand still before it is passed by.
const STALLED: Duration = Duration::from_secs(1);

/// The way out. Clones share it; writing to it never fails.
#[derive(Clone, Debug)]
pub(super) struct Output(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// What the sink is called in warnings.
    name: String,
    printed: watch::Sender<bool>,
}

#[derive(Debug)]
struct State {
    /// Until there is a guest.
    sink: Option<File>,
    queue: Vec<u8>,
    /// Bytes are on their way to the sink.
    writing: bool,
    /// When the sink last took something, or had nothing to take.
    moved: Instant,
    /// The sink takes nothing at the moment.
    stalled: bool,
    /// Output was lost, and nobody has been told yet.
    lost: bool,
    /// The sink failed: it takes nothing any more.
    gone: bool,
    finder: Option<Finder>,
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Output {
    /// Into `sink`. `wanted`: a text to look for.
    pub(super) fn new(sink: File, name: String, wanted: Option<&str>) -> Self {
        let (printed, _) = watch::channel(false);
        Output(Arc::new(Shared {
            state: Mutex::new(State {
                sink: Some(sink),
                queue: Vec::new(),
                writing: false,
                moved: Instant::now(),
                stalled: false,
                lost: false,
                gone: false,
                finder: wanted.map(Finder::new),
            }),
            changed: Condvar::new(),
            name,
            printed,
        }))
    }

    /// A guest is about to print: empties a file of what was in it, and starts writing. Fine to call again.
    pub(super) fn begin(&self, file: Option<&Path>) -> io::Result<()> {
        let Some(sink) = lock(&self.0).sink.take() else {
            return Ok(());
        };
        if file.is_some() && sink.metadata()?.is_file() {
            sink.set_len(0)?;
        }
        let shared = Arc::clone(&self.0);
        let thread = std::thread::Builder::new().name("console-out".to_owned());
        // It ends with the process: what it waits for, a sink that takes something, may never come.
        thread.spawn(move || write_out(&shared, sink)).map(drop)
    }

    /// Returns once the wanted text was printed; never without one.
    pub(super) async fn has_printed(&self) {
        let mut printed = self.0.printed.subscribe();
        if printed.wait_for(|printed| *printed).await.is_err() {
            std::future::pending().await
        }
    }

    /// Waits until all is written; `false` if that takes longer than `within`, or output was lost that nobody has been told
    /// of.
    pub(super) fn drain(&self, within: Duration) -> bool {
        let unwritten =
            |state: &mut State| !state.gone && state.sink.is_none() && (state.writing || !state.queue.is_empty());
        let waited = self.0.changed.wait_timeout_while(lock(&self.0), within, unwritten);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !unwritten(&mut state) && !std::mem::take(&mut state.lost)
    }

    fn push(&self, bytes: &[u8]) {
        let mut state = lock(&self.0);
        if state.finder.as_mut().is_some_and(|finder| finder.feed(bytes)) {
            state.finder = None;
            self.0.printed.send_replace(true);
        }
        let mut rest = bytes;
        while !rest.is_empty() && !state.gone {
            let room = QUEUE_BYTES.saturating_sub(state.queue.len()).min(rest.len());
            if room > 0 {
                if state.queue.is_empty() && !state.writing {
                    state.moved = Instant::now();
                }
                state.queue.extend_from_slice(&rest[..room]);
                rest = &rest[room..];
                self.0.changed.notify_all();
                continue;
            }
            let left = STALLED.saturating_sub(state.moved.elapsed());
            if state.stalled || left.is_zero() {
                state.stalled = true;
                state.lost = true;
                return;
            }
            let waited = self.0.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The thread.
fn write_out(shared: &Shared, mut sink: File) {
    loop {
        let empty = |state: &mut State| state.queue.is_empty();
        let waited = shared.changed.wait_while(lock(shared), empty);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        let bytes = std::mem::take(&mut state.queue);
        state.writing = true;
        drop(state);
        for part in bytes.chunks(WRITE_BYTES) {
            let written = sink.write_all(part).and_then(|()| sink.flush());
            let mut state = lock(shared);
            state.moved = Instant::now();
            state.stalled = false;
            let lost = std::mem::take(&mut state.lost);
            if written.is_err() {
                state.gone = true;
                state.queue = Vec::new();
            }
            drop(state);
            shared.changed.notify_all();
            if lost {
                tracing::warn!("{} took nothing for a while: console output was lost", shared.name);
            }
            if let Err(error) = written {
                tracing::warn!(
                    "the guest's console output cannot be written to {}: {error}; the guest goes on without",
                    shared.name
                );
                return;
            }
        }
        lock(shared).writing = false;
        shared.changed.notify_all();
    }
}

/// Finds a text in a stream, however it is cut.
#[derive(Debug)]
struct Finder {
    wanted: Vec<u8>,
    /// The stream's last bytes, one fewer than are wanted.
    tail: Vec<u8>,
}

impl Finder {
    fn new(wanted: &str) -> Self {
        Finder {
            wanted: wanted.as_bytes().to_vec(),
            tail: Vec::new(),
        }
    }

    /// Whether the text is in what came so far.
    fn feed(&mut self, bytes: &[u8]) -> bool {
        self.tail.extend_from_slice(bytes);
        if self.tail.windows(self.wanted.len()).any(|window| window == self.wanted) {
            return true;
        }
        let keep = self.wanted.len().saturating_sub(1);
        self.tail.drain(..self.tail.len().saturating_sub(keep));
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::{PipeFlags, pipe_with};
    use std::io::Read;

    const WITHIN: Duration = Duration::from_secs(30);

    fn piped(wanted: Option<&str>) -> (Output, File) {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let output = Output::new(write.into(), "a pipe".to_owned(), wanted);
        output.begin(None).unwrap();
        (output, read.into())
    }

    #[test]
    fn what_is_printed_comes_out_in_order() {
        let (mut output, mut read) = piped(None);
        let bytes: Vec<u8> = (0..3 << 20)
            .map(|n: u32| n.to_le_bytes()[1] ^ n.to_le_bytes()[2])
            .collect();
        let expected = bytes.clone();
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; expected.len()];
            read.read_exact(&mut got).unwrap();
            assert!(got == expected);
            read
        });
        for part in bytes.chunks(777) {
            output.write_all(part).unwrap();
        }
        let _read = reader.join().unwrap();
        assert!(output.drain(WITHIN));
    }

    #[test]
    fn a_reader_that_is_gone_costs_nothing() {
        let (mut output, read) = piped(None);
        drop(read);
        for _ in 0..100 {
            output.write_all(&[b'x'; 100_000]).unwrap();
        }
        assert!(output.drain(WITHIN), "nothing is waited for");
    }

    #[test]
    fn a_reader_that_does_not_read_holds_the_guest_up_once_at_most() {
        let (mut output, mut read) = piped(None);
        // A hundred times the queue: were each waited for, this would take minutes.
        for _ in 0..1000 {
            output.write_all(&[b'x'; 100_000]).unwrap();
        }
        assert!(!output.drain(Duration::from_millis(10)));
        // Once it reads again, output goes on.
        let reader = std::thread::spawn(move || {
            let mut last = Vec::new();
            let mut bytes = [0; 65536];
            while !last.ends_with(b"again") {
                let n = read.read(&mut bytes).unwrap();
                last.extend_from_slice(&bytes[..n]);
                last.drain(..last.len().saturating_sub(5));
            }
        });
        while !output.drain(Duration::from_millis(50)) {}
        output.write_all(b"again").unwrap();
        reader.join().unwrap();
    }

    /// Notes that something was logged.
    struct Noting(Arc<std::sync::atomic::AtomicBool>);

    impl Write for Noting {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.store(true, std::sync::atomic::Ordering::SeqCst);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_thread_that_prints_logs_nothing_where_nobody_reads() {
        let (mut output, _read) = piped(None);
        let logged = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let noting = Arc::clone(&logged);
        let log = tracing_subscriber::fmt().with_writer(move || Noting(Arc::clone(&noting)));
        tracing::subscriber::with_default(log.finish(), || {
            for _ in 0..20 {
                output.write_all(&[b'x'; 1 << 20]).unwrap();
            }
        });
        assert!(!logged.load(std::sync::atomic::Ordering::SeqCst));
        assert!(!output.drain(Duration::ZERO), "the end tells of it");
    }

    #[tokio::test]
    async fn a_text_is_found_however_it_is_cut() {
        for cut in 1..9 {
            let (mut output, _read) = piped(Some("login: "));
            for part in b"Debian\r\nlogin:login: \r\n".chunks(cut) {
                assert!(!*output.0.printed.borrow() || part.len() < 4);
                output.write_all(part).unwrap();
            }
            output.has_printed().await;
        }
        let (mut output, _read) = piped(Some("login: "));
        output.write_all(b"login:-login:").unwrap();
        assert!(!*output.0.printed.borrow());
    }

    #[test]
    fn a_file_is_emptied_for_a_guest_and_not_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console");
        std::fs::write(&path, "of an earlier guest").unwrap();
        let sink = File::options().write(true).open(&path).unwrap();
        let mut output = Output::new(sink, "a file".to_owned(), None);
        assert!(!std::fs::read(&path).unwrap().is_empty());
        output.begin(Some(&path)).unwrap();
        output.begin(Some(&path)).unwrap();
        output.write_all(b"hello").unwrap();
        assert!(output.drain(WITHIN));
        assert_eq!(std::fs::read(&path).unwrap(), b"hello");
    }
}
