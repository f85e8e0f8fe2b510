//! A proxy between a source and a receiver that understands what crosses it, and does one harm at one place.
//!
//! Two threads a connection. Each takes one thing at a time off its side (a preamble or its reply, a control frame, a batch's
//! header and table, a slice of a batch's pages), asks the [`Hub`] about it, and passes it on. Reads and writes wake up every
//! [`TICK`], so that a connection can be dropped by whoever acts, and no thread outlives the proxy.

use crate::faults::Harm;
use crate::phases::{Phase, Seen};
use rustix::net::sockopt::set_socket_linger;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use wire::{ConnectionRole, Message, batch, frame};

/// How often a thread that waits looks up.
const TICK: Duration = Duration::from_millis(20);
/// What is passed on at once.
const SLICE_BYTES: usize = 64 << 10;
/// How many bytes crawl one at a time, all connections together.
const CRAWLING_BYTES: usize = 400;
/// How long each of them takes.
const CRAWL: Duration = Duration::from_millis(2);

/// The two ways through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the source to the receiver.
    Up,
    /// From the receiver to the source.
    Down,
}

/// What a connection does with what comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Pass,
    /// Nothing is taken, nothing is passed on.
    Blackhole,
    /// What comes this way is taken and goes nowhere: the other end was told that no more comes.
    Closed(Way),
    /// Both ends are closed, with or without notice.
    Dropped,
}

/// A connection through the proxy.
struct Link {
    source: TcpStream,
    receiver: TcpStream,
    mode: Mutex<Mode>,
}

impl Link {
    fn ends(&self, way: Way) -> (&TcpStream, &TcpStream) {
        match way {
            Way::Up => (&self.source, &self.receiver),
            Way::Down => (&self.receiver, &self.source),
        }
    }

    fn mode(&self) -> Mode {
        *self.mode.lock().unwrap()
    }

    fn set(&self, mode: Mode) {
        *self.mode.lock().unwrap() = mode;
    }

    /// Closes both ends, without notice: what is under way is lost.
    fn reset(&self) {
        for end in [&self.source, &self.receiver] {
            // One that is gone already has no options.
            let _ = set_socket_linger(end, Some(Duration::ZERO));
        }
        self.set(Mode::Dropped);
    }

    /// Tells the far end that no more comes this way.
    fn close(&self, way: Way) {
        // An end that is gone need not be told.
        let _ = self.ends(way).1.shutdown(Shutdown::Write);
    }
}

/// What the proxy is to do, and what came of it.
pub(crate) struct Hub {
    at: Phase,
    harm: Harm,
    /// Does the harm that is no affair of connections; called ahead of any other.
    act: Box<dyn Fn() + Send + Sync>,
    links: Mutex<Vec<Arc<Link>>>,
    seen: Mutex<Seen>,
    fired: Mutex<bool>,
    has_fired: Condvar,
    /// The phase is about to end: whoever does not end it waits for the harm.
    frozen: AtomicBool,
    /// Bytes that are still to crawl.
    crawling: AtomicUsize,
    /// The next thing of the right kind is to be damaged.
    damaging: AtomicBool,
    ended: AtomicBool,
    /// Bytes of pages that have passed, and after how many of them all connections are cut, least first.
    carried: Mutex<(u64, VecDeque<u64>)>,
    /// What the proxy did not understand.
    confused: Mutex<Option<String>>,
}

/// A proxy that runs until it is dropped.
pub(crate) struct Proxy {
    hub: Arc<Hub>,
    accepting: Option<JoinHandle<()>>,
    /// Where the source is to connect.
    pub(crate) address: String,
}

impl Proxy {
    /// One in front of the receiver at `to`, which does `harm` at the end of phase `at`, and calls `act` just
    /// before.
    pub(crate) fn start(to: &str, at: Phase, harm: Harm, act: impl Fn() + Send + Sync + 'static) -> Proxy {
        let to = to.strip_prefix("tcp:").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = format!("tcp:{}", listener.local_addr().unwrap());
        let hub = Arc::new(Hub {
            at,
            harm,
            act: Box::new(act),
            links: Mutex::default(),
            seen: Mutex::default(),
            fired: Mutex::default(),
            has_fired: Condvar::new(),
            frozen: AtomicBool::new(false),
            crawling: AtomicUsize::new(0),
            damaging: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            carried: Mutex::default(),
            confused: Mutex::default(),
        });
        let accepting = Arc::clone(&hub);
        Proxy {
            hub,
            accepting: Some(std::thread::spawn(move || accept(&listener, &to, &accepting))),
            address,
        }
    }

    /// One that cuts all connections each time that so many bytes of pages have passed, least first, and does no other harm.
    pub(crate) fn cutting(to: &str, after_bytes: impl IntoIterator<Item = u64>) -> Proxy {
        // There is nothing to cut any more at its end.
        let proxy = Proxy::start(to, Phase::Running, Harm::Trickle, || ());
        proxy.hub.carried.lock().unwrap().1 = after_bytes.into_iter().collect();
        proxy
    }

    /// How many cuts of those were not made.
    pub(crate) fn cuts_left(&self) -> usize {
        self.hub.carried.lock().unwrap().1.len()
    }

    /// Waits until the harm is done; false where the migration never came so far within the time.
    pub(crate) fn wait_until_done(&self, within: Duration) -> bool {
        let fired = self.hub.fired.lock().unwrap();
        let (fired, _) = self.hub.has_fired.wait_timeout_while(fired, within, |f| !*f).unwrap();
        *fired
    }

    /// Whether `Commit` went on to the receiver as it was.
    pub(crate) fn has_passed_commit(&self) -> bool {
        self.hub.seen.lock().unwrap().commit_passed
    }

    /// What it did not understand, if anything.
    pub(crate) fn confused(&self) -> Option<String> {
        self.hub.confused.lock().unwrap().clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.hub.ended.store(true, Ordering::SeqCst);
        if let Some(accepting) = self.accepting.take() {
            // A panic in it was noted before.
            let _ = accepting.join();
        }
    }
}

fn accept(listener: &TcpListener, to: &str, hub: &Arc<Hub>) {
    let mut pumps = Vec::new();
    while !hub.ended() {
        let source = match listener.accept() {
            Ok((source, _)) => source,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(TICK / 4);
                continue;
            }
            Err(error) => panic!("the proxy cannot accept: {error}"),
        };
        // Nobody listens there any more: the source sees its connection closed.
        let Ok(receiver) = TcpStream::connect(to) else { continue };
        for end in [&source, &receiver] {
            end.set_nonblocking(false).unwrap();
            end.set_nodelay(true).unwrap();
            end.set_read_timeout(Some(TICK)).unwrap();
            end.set_write_timeout(Some(TICK)).unwrap();
        }
        let mode = Mutex::new(Mode::Pass);
        let link = Arc::new(Link { source, receiver, mode });
        hub.links.lock().unwrap().push(Arc::clone(&link));
        pumps.push(std::thread::spawn({
            let hub = Arc::clone(hub);
            move || serve(&link, &hub)
        }));
    }
    pumps.into_iter().for_each(|pump| pump.join().unwrap());
}

/// Serves one connection, on this thread and another.
fn serve(link: &Arc<Link>, hub: &Arc<Hub>) {
    let pump = |way| Pump {
        link,
        hub,
        way,
        goes_last: false,
    };
    let mut up = pump(Way::Up);
    if let Some(role) = up.preamble() {
        std::thread::scope(|scope| {
            scope.spawn(|| pump(Way::Down).run(role));
            up.run(role);
        });
    }
    // With the last of its holders the connection is closed.
    hub.links.lock().unwrap().retain(|l| !Arc::ptr_eq(l, link));
}

/// One way of a connection.
struct Pump<'a> {
    link: &'a Arc<Link>,
    hub: &'a Arc<Hub>,
    way: Way,
    /// What it passes on ends the phase.
    goes_last: bool,
}

impl Pump<'_> {
    /// Passes on what the source says first; what the connection is for.
    fn preamble(&mut self) -> Option<ConnectionRole> {
        let mut bytes = [0; wire::PREAMBLE_BYTES];
        self.fill(&mut bytes)?;
        let preamble = self.understood(wire::Preamble::decode(&bytes).map_err(|e| e.to_string()))?;
        self.pass(&bytes)?;
        Some(preamble.role)
    }

    fn run(&mut self, role: ConnectionRole) {
        let went = match (self.way, role) {
            (Way::Down, _) => self.reply(role),
            (Way::Up, ConnectionRole::Control) => self.frames(),
            (Way::Up, ConnectionRole::Data { .. }) => self.batches(),
        };
        // Both ways end by `None`; the other one is told unless it is dropped.
        debug_assert!(went.is_none());
    }

    /// The receiver's answer to a preamble, and what follows.
    fn reply(&mut self, role: ConnectionRole) -> Option<()> {
        let mut bytes = [0; wire::REPLY_BYTES];
        self.fill(&mut bytes)?;
        let control = role == ConnectionRole::Control;
        self.pass_and_note(&bytes, |seen, _| seen.connected |= control)?;
        match role {
            ConnectionRole::Control => self.frames(),
            ConnectionRole::Data { .. } => {
                // Nothing comes this way but the end.
                let mut byte = [0];
                loop {
                    self.fill(&mut byte)?;
                    self.pass(&byte)?;
                }
            }
        }
    }

    fn frames(&mut self) -> Option<()> {
        loop {
            let mut bytes = vec![0; frame::HEADER_BYTES];
            self.fill(&mut bytes)?;
            let header: [u8; frame::HEADER_BYTES] = bytes[..].try_into().unwrap();
            let header = self.understood(frame::decode_header(&header).map_err(|e| e.to_string()))?;
            let mut payload = vec![0; header.payload_bytes()];
            self.fill(&mut payload)?;
            let message = self.understood(frame::decode_payload(&header, &payload).map_err(|e| e.to_string()))?;
            bytes.extend(payload);
            let (way, hub) = (self.way, self.hub);
            if hub.holds(&message) {
                hub.fire();
                continue;
            }
            let harmed = hub.damage_frame(way, &message, &mut bytes);
            self.pass_and_note(&bytes, |seen, lost| seen.message(&message, harmed || lost))?;
        }
    }

    fn batches(&mut self) -> Option<()> {
        loop {
            let mut bytes = vec![0; batch::HEADER_BYTES];
            self.fill(&mut bytes)?;
            let header: [u8; batch::HEADER_BYTES] = bytes[..].try_into().unwrap();
            let header = self.understood(batch::decode_header(&header).map_err(|e| e.to_string()))?;
            let mut table = vec![0; header.table_bytes()];
            self.fill(&mut table)?;
            bytes.extend(table);
            self.hub.damage_batch(&mut bytes);
            self.pass(&bytes)?;
            let mut left = header.wire_bytes();
            // The first phase with pages ends inside a batch.
            while left > 0 {
                let mut pages = vec![0; left.min(SLICE_BYTES)];
                self.fill(&mut pages)?;
                self.pass_and_note(&pages, |seen, _| seen.pages())?;
                left -= pages.len();
                self.hub.carry(pages.len() as u64);
            }
            self.hub.reached(|seen| seen.batch(header.round(), header.is_marker()));
        }
    }

    /// Whatever the proxy cannot read is a fault of the proxy, or of a peer: the cell is void.
    fn understood<T>(&self, read: Result<T, String>) -> Option<T> {
        read.inspect_err(|error| {
            let mut confused = self.hub.confused.lock().unwrap();
            confused.get_or_insert_with(|| format!("{:?}: {error}", self.way));
            self.link.reset();
        })
        .ok()
    }

    /// Takes so many bytes; `None` once there is nothing more to take. Half of something is passed on as it is.
    fn fill(&mut self, bytes: &mut [u8]) -> Option<()> {
        let mut have = 0;
        while have < bytes.len() {
            self.may_take()?;
            let (mut from, _) = self.link.ends(self.way);
            match from.read(&mut bytes[have..]) {
                Ok(0) => {
                    if have > 0 {
                        self.pass(&bytes[..have])?;
                    }
                    self.link.close(self.way);
                    return None;
                }
                Ok(n) => have += n,
                Err(error) if is_tick(&error) => {}
                Err(_) => {
                    self.link.reset();
                    return None;
                }
            }
        }
        Some(())
    }

    /// Waits as long as nothing may be taken; `None` once nothing ever may.
    fn may_take(&self) -> Option<()> {
        while self.link.mode() == Mode::Blackhole && !self.hub.ended() {
            std::thread::sleep(TICK / 4);
        }
        (self.link.mode() != Mode::Dropped && !self.hub.ended()).then_some(())
    }

    /// Passes bytes on, and notes what they are; where they end the phase, nothing else passes before the harm is done.
    fn pass_and_note(&mut self, bytes: &[u8], note: impl Fn(&mut Seen, bool)) -> Option<()> {
        self.goes_last = self.hub.freeze_if_last(|seen| note(seen, false));
        let passed = self.pass(bytes);
        if passed.is_some() {
            let lost = self.link.mode() == Mode::Closed(self.way);
            self.hub.reached(|seen| note(seen, lost));
        }
        if std::mem::take(&mut self.goes_last) {
            self.hub.frozen.store(false, Ordering::SeqCst);
        }
        passed
    }

    fn pass(&mut self, bytes: &[u8]) -> Option<()> {
        let mut done = 0;
        while done < bytes.len() {
            while self.hub.frozen.load(Ordering::SeqCst) && !self.goes_last && !self.hub.ended() {
                std::thread::sleep(TICK / 10);
            }
            self.may_take()?;
            if self.link.mode() == Mode::Closed(self.way) {
                return Some(());
            }
            let some = match self.hub.crawls() {
                true => 1,
                false => (bytes.len() - done).min(SLICE_BYTES),
            };
            let (_, mut to) = self.link.ends(self.way);
            match to.write(&bytes[done..done + some]) {
                Ok(n) => done += n,
                Err(error) if is_tick(&error) => {}
                Err(_) if matches!(self.link.mode(), Mode::Closed(_)) => return Some(()),
                Err(_) => {
                    self.link.reset();
                    return None;
                }
            }
        }
        Some(())
    }
}

fn is_tick(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

impl Hub {
    fn ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Notes what has passed, and does the harm once the phase is over.
    fn reached(&self, note: impl FnOnce(&mut Seen)) {
        let over = {
            let mut seen = self.seen.lock().unwrap();
            note(&mut seen);
            self.at.is_over(&seen)
        };
        if over {
            self.fire();
        }
    }

    /// Whether the phase is over with what is to be noted; if it is, nobody else passes anything on.
    fn freeze_if_last(&self, note: impl FnOnce(&mut Seen)) -> bool {
        let fired = self.fired.lock().unwrap();
        let mut seen = self.seen.lock().unwrap().clone();
        note(&mut seen);
        let last = !*fired && self.at.is_over(&seen);
        if last {
            self.frozen.store(true, Ordering::SeqCst);
        }
        last
    }

    /// Whether this is not passed on before the harm is done.
    fn holds(&self, message: &Message) -> bool {
        self.at == Phase::CommitHeld && matches!(message, Message::Commit(_))
    }

    /// Does the harm, once.
    fn fire(&self) {
        let mut fired = self.fired.lock().unwrap();
        if std::mem::replace(&mut *fired, true) {
            return;
        }
        let links = self.links.lock().unwrap().clone();
        (self.act)();
        match self.harm {
            Harm::Process(_) => {}
            Harm::Cut => cut(&links),
            Harm::Reset => links.iter().for_each(|link| link.reset()),
            Harm::HalfClosed(way) => {
                for link in links {
                    link.set(Mode::Closed(way));
                    link.close(way);
                }
            }
            Harm::Blackhole => links.iter().for_each(|link| link.set(Mode::Blackhole)),
            Harm::Trickle => self.crawling.store(CRAWLING_BYTES, Ordering::SeqCst),
            Harm::Frame { .. } | Harm::Batch => self.damaging.store(true, Ordering::SeqCst),
        }
        self.has_fired.notify_all();
    }

    /// Pages have passed: cuts what is due.
    fn carry(&self, bytes: u64) {
        let mut carried = self.carried.lock().unwrap();
        carried.0 += bytes;
        if carried.1.front().is_some_and(|at| *at <= carried.0) {
            carried.1.pop_front();
            cut(&self.links.lock().unwrap());
        }
    }

    /// Whether the next byte goes alone; takes its time then.
    fn crawls(&self) -> bool {
        let take = |left: usize| left.checked_sub(1);
        let crawls = self.crawling.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take);
        if crawls.is_ok() {
            std::thread::sleep(CRAWL);
        }
        crawls.is_ok()
    }

    /// Flips a bit of a control frame, if it is its turn.
    fn damage_frame(&self, way: Way, message: &Message, bytes: &mut [u8]) -> bool {
        let Harm::Frame { way: wanted, at_length } = self.harm else {
            return false;
        };
        // A frame whose length is wrong is only noticed with the next one: a ping at the latest.
        if way != wanted || matches!(message, Message::Ping) || !self.damaging.swap(false, Ordering::SeqCst) {
            return false;
        }
        let at = if at_length { 0 } else { bytes.len() - 1 };
        bytes[at] ^= 1;
        true
    }

    /// Flips a bit of a batch's header, if it is its turn.
    fn damage_batch(&self, bytes: &mut [u8]) {
        if self.harm == Harm::Batch && self.damaging.swap(false, Ordering::SeqCst) {
            bytes[8] ^= 4;
        }
    }
}

fn cut(links: &[Arc<Link>]) {
    for link in links {
        link.set(Mode::Dropped);
        link.close(Way::Up);
        link.close(Way::Down);
    }
}

/// The time of a wait, for those that poll.
pub(crate) fn poll<T>(within: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if began.elapsed() > within {
            return None;
        }
        std::thread::sleep(TICK / 2);
    }
}
