//! A guest for tests: real memory, a tracker that is told of writes, a machine that remembers what was done to it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    dead_code,
    unreachable_pub,
    clippy::cast_possible_truncation,
    missing_docs
)]

pub mod cutter;
pub mod peer;
pub mod pki;
pub mod stingy;

use machine::{
    Answer, AnswerSink, BalloonConfig, BalloonCounts, DirtyTracker, FreePages, GuestMemoryStats, GuestRam, Machine,
    MachineConfig, MachineState, Section,
};
use memory::trackers::{BitmapTracker, DirtyMarker};
use memory::{Backing, GuestMemory};
use pageferry::control_socket::ControlClient;
use pageferry::{Address, Compress, Finished, Guest, Handle, Listener, Migration, ReceiveOptions, SendOptions};
use pages::{Layout, PAGE_BYTES, PageRange, PageSet, Pfn};
use serde_json::Value;
use std::future::Future;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub fn r(start: u64, count: u64) -> PageRange {
    PageRange::new(Pfn(start), count).unwrap()
}

/// No test takes so long unless it hangs.
pub async fn guarded<T>(future: impl Future<Output = T>) -> T {
    // `RUST_LOG=debug` shows what a failing test did; a second test finds the log set up already.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_test_writer()
        .try_init();
    tokio::time::timeout(Duration::from_secs(60), future)
        .await
        .expect("the test hangs")
}

/// What was done to a guest, and what is to fail; shared with the test.
#[derive(Debug, Default)]
pub struct Inner {
    pub running: AtomicBool,
    pub pauses: AtomicU64,
    pub resumes: AtomicU64,
    pub restored: Mutex<Option<MachineState>>,
    pub tracking: AtomicBool,
    pub given_back: AtomicU64,
    pub begun: AtomicU64,
    pub ended: AtomicU64,
    pub refuse_restore: AtomicBool,
    /// A resume starts the first vCPUs, and fails.
    pub fail_resume: AtomicBool,
    pub refuse_save: AtomicBool,
    pub panic_in_save: AtomicBool,
    /// Bytes that a third device saves; 0: there is none.
    pub large_state: AtomicU64,
    /// Held by whoever writes guest memory; `pause` takes it.
    pub writing: Mutex<()>,
}

/// A test's own view of a guest.
#[derive(Clone)]
pub struct Probe {
    pub inner: Arc<Inner>,
    pub memory: Arc<GuestMemory>,
    pub marker: DirtyMarker,
}

impl Probe {
    /// Writes as the guest would, if it runs.
    pub fn guest_writes(&self, pfn: u64, byte: u8) -> bool {
        let _writing = self.inner.writing.lock().unwrap();
        if !self.inner.running.load(Ordering::SeqCst) {
            return false;
        }
        self.memory.write(pfn * PAGE_BYTES, &[byte; 64]).unwrap();
        self.marker.mark(r(pfn, 1));
        true
    }

    pub fn is_running(&self) -> bool {
        self.inner.running.load(Ordering::SeqCst)
    }

    /// As it was before the migration: running, tracking off, every session ended.
    pub fn assert_unharmed(&self) {
        assert!(self.is_running(), "the guest does not run");
        assert!(!self.inner.tracking.load(Ordering::SeqCst), "tracking is still on");
        let (begun, ended) = (&self.inner.begun, &self.inner.ended);
        assert!(
            ended.load(Ordering::SeqCst) >= begun.load(Ordering::SeqCst),
            "a session was left open"
        );
    }
}

struct TestMachine {
    inner: Arc<Inner>,
    config: MachineConfig,
}

impl Machine for TestMachine {
    fn config(&self) -> MachineConfig {
        self.config.clone()
    }

    fn is_running(&self) -> bool {
        self.inner.running.load(Ordering::SeqCst)
    }

    fn pause(&mut self) -> machine::Result<()> {
        let _writing = self.inner.writing.lock().unwrap();
        self.inner.pauses.fetch_add(1, Ordering::SeqCst);
        self.inner.running.store(false, Ordering::SeqCst);
        Ok(())
    }

    fn resume(&mut self) -> machine::Result<()> {
        self.inner.resumes.fetch_add(1, Ordering::SeqCst);
        self.inner.running.store(true, Ordering::SeqCst);
        if self.inner.fail_resume.load(Ordering::SeqCst) {
            return Err(machine::Error::Refused("vcpu1 does not start".to_owned()));
        }
        Ok(())
    }

    fn save(&mut self) -> machine::Result<MachineState> {
        assert!(!self.inner.panic_in_save.load(Ordering::SeqCst), "a planted panic");
        if self.inner.refuse_save.load(Ordering::SeqCst) {
            return Err(machine::Error::Refused("vcpu0 does not let go".to_owned()));
        }
        let section = |name: &str, data: Vec<u8>| Section {
            name: name.to_owned(),
            version: 1,
            data,
        };
        let mut sections = vec![section("vcpu0", vec![7; 100]), section("balloon", vec![9; 70_000])];
        let large = self.inner.large_state.load(Ordering::SeqCst);
        if large > 0 {
            sections.push(section("gpu", (0..large).map(|i| i.to_le_bytes()[1]).collect()));
        }
        Ok(MachineState { sections })
    }

    fn restore(&mut self, state: &MachineState) -> machine::Result<()> {
        if self.inner.refuse_restore.load(Ordering::SeqCst) {
            return Err(machine::Error::Refused("vcpu0: unknown register 0x4242".to_owned()));
        }
        *self.inner.restored.lock().unwrap() = Some(state.clone());
        Ok(())
    }
}

struct TestTracker {
    inner: Arc<Inner>,
    tracker: BitmapTracker,
}

impl DirtyTracker for TestTracker {
    fn start(&mut self) -> machine::Result<()> {
        self.inner.tracking.store(true, Ordering::SeqCst);
        self.tracker.start()
    }

    fn harvest(&mut self) -> machine::Result<PageSet> {
        self.tracker.harvest()
    }

    fn give_back(&mut self, pages: &PageSet) -> machine::Result<()> {
        self.inner.given_back.fetch_add(pages.count(), Ordering::SeqCst);
        self.tracker.give_back(pages)
    }

    fn stop(&mut self) -> machine::Result<()> {
        self.inner.tracking.store(false, Ordering::SeqCst);
        self.tracker.stop()
    }
}

/// A balloon that answers at once.
#[derive(Clone)]
pub struct Free {
    pub ranges: Vec<PageRange>,
    pub poison: Option<u32>,
    pub ballooned: Vec<PageRange>,
    /// Says nothing, ever.
    pub silent: bool,
}

struct TestBalloon {
    inner: Arc<Inner>,
    layout: Arc<Layout>,
    free: Option<Free>,
}

impl FreePages for TestBalloon {
    fn dialect(&self) -> &'static str {
        "bitmap"
    }

    fn can_ask(&self) -> Result<(), String> {
        self.free
            .as_ref()
            .map(|_| ())
            .ok_or_else(|| "the guest has no driver".to_owned())
    }

    fn allocates(&self) -> bool {
        false
    }

    fn stats(&mut self) -> Option<GuestMemoryStats> {
        None
    }

    fn ballooned(&mut self) -> Option<PageSet> {
        let mut set = PageSet::empty(&self.layout);
        for range in self.free.iter().flat_map(|free| &free.ballooned) {
            set.insert_range(*range);
        }
        Some(set)
    }

    fn poison(&self) -> Option<u32> {
        self.free.as_ref().and_then(|free| free.poison)
    }

    fn begin(&mut self, session: u32, sink: AnswerSink) -> machine::Result<()> {
        self.inner.begun.fetch_add(1, Ordering::SeqCst);
        let free = self.free.clone().unwrap();
        let regions = self.layout.regions().to_vec();
        if !free.silent {
            std::thread::spawn(move || {
                sink(session, Answer::Free(free.ranges));
                for region in regions {
                    sink(session, Answer::Covered(region));
                }
                sink(session, Answer::Finished);
            });
        }
        Ok(())
    }

    fn end(&mut self, _session: u32) -> machine::Result<()> {
        self.inner.ended.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn counts(&self) -> BalloonCounts {
        BalloonCounts {
            answers: self.inner.begun.load(Ordering::SeqCst),
            ..BalloonCounts::default()
        }
    }
}

pub fn config(layout: &Layout) -> MachineConfig {
    MachineConfig {
        kind: "test".to_owned(),
        layout: layout.clone(),
        vcpus: 2,
        balloon: BalloonConfig {
            dialect: "bitmap".to_owned(),
            features: 0x1a,
        },
        extra: [("serial".to_owned(), "ttyS0".to_owned())].into(),
    }
}

/// A paused guest with zero memory.
pub fn blank_guest(layout: &Layout, free: Option<Free>) -> (Guest, Probe) {
    let shared = Arc::new(layout.clone());
    let memory = Arc::new(GuestMemory::new(Arc::clone(&shared), &Backing::Anonymous).unwrap());
    let inner = Arc::new(Inner::default());
    let tracker = BitmapTracker::new(&shared);
    let probe = Probe {
        inner: Arc::clone(&inner),
        memory: Arc::clone(&memory),
        marker: tracker.marker(),
    };
    let guest = Guest {
        ram: memory,
        tracker: Box::new(TestTracker {
            inner: Arc::clone(&inner),
            tracker,
        }),
        free_pages: Box::new(TestBalloon {
            inner: Arc::clone(&inner),
            layout: shared,
            free,
        }),
        machine: Box::new(TestMachine {
            inner,
            config: config(layout),
        }),
    };
    (guest, probe)
}

/// A running guest: of every four pages, one was never touched, one is zero, two have content.
pub fn busy_guest(layout: &Layout, free: Option<Free>) -> (Guest, Probe) {
    let (guest, probe) = blank_guest(layout, free);
    for region in layout.regions() {
        for pfn in region.start().0..region.end().0 {
            let content: Vec<u8> = (0..4096u64).map(|i| (pfn * 31 + i * 7 + 1).to_le_bytes()[0]).collect();
            match pfn % 4 {
                0 => {}
                1 => probe.memory.write(pfn * PAGE_BYTES, &[0; 4096]).unwrap(),
                _ => probe.memory.write(pfn * PAGE_BYTES, &content).unwrap(),
            }
        }
    }
    probe.inner.running.store(true, Ordering::SeqCst);
    (guest, probe)
}

/// Compares two guests' RAM, pages of `but` left out.
pub fn assert_same_ram(a: &Probe, b: &Probe, but: &[PageRange]) {
    let (mut left, mut right) = ([0; 4096], [0; 4096]);
    for region in a.memory.layout().regions() {
        for pfn in region.start().0..region.end().0 {
            if but.iter().any(|range| range.contains(Pfn(pfn))) {
                continue;
            }
            GuestRam::read_page(&*a.memory, Pfn(pfn), &mut left).unwrap();
            GuestRam::read_page(&*b.memory, Pfn(pfn), &mut right).unwrap();
            assert!(left == right, "page {pfn:#x} differs");
        }
    }
}

pub fn send_options(streams: u16) -> SendOptions {
    let mut options = SendOptions {
        // What crosses is counted, and some links are slow on purpose.
        compress: Compress::None,
        ..SendOptions::default()
    };
    options.source.streams = streams;
    options.source.peer_timeout = Duration::from_secs(5);
    // A peer that dies ends the migration at once: `tests/resume.rs` has those that come back.
    options.source.resume_window = Duration::ZERO;
    options.connect_timeout = Duration::from_secs(5);
    options
}

pub fn receive_options() -> ReceiveOptions {
    let mut options = ReceiveOptions::default();
    options.destination.peer_timeout = Duration::from_secs(5);
    options.destination.resume_window = Duration::ZERO;
    options.handshake_timeout = Duration::from_secs(5);
    options
}

/// The receiver's guests, as `prepare` makes them.
pub type Made = Arc<Mutex<Vec<Probe>>>;

/// A receiver on a free port of loopback, for machines like [`config`].
pub fn receiver(options: ReceiveOptions) -> (Handle, Address, Made) {
    receiver_at("tcp:127.0.0.1:0", options, |_| {})
}

pub fn receiver_at(
    address: &str,
    options: ReceiveOptions,
    plant: impl Fn(&Inner) + Send + 'static,
) -> (Handle, Address, Made) {
    let listener = Listener::bind(&address.parse().unwrap()).unwrap();
    let address = listener.local_address().clone();
    let made = Made::default();
    let makes = Arc::clone(&made);
    let handle = Migration::receive(listener, options, move |incoming| {
        let (guest, probe) = blank_guest(&incoming.config.layout, None);
        plant(&probe.inner);
        makes.lock().unwrap().push(probe);
        Ok(guest)
    });
    (handle, address, made)
}

/// Sends a guest over loopback; both sides' ends, and the receiver's guest.
pub async fn migrate(guest: Guest, send: SendOptions, receive: ReceiveOptions) -> (Finished, Finished, Option<Probe>) {
    let (receiving, address, made) = receiver(receive);
    let sending = Migration::send(guest, &address, send);
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    let probe = made.lock().unwrap().pop();
    (source, destination, probe)
}

/// Waits until pages cross, of the guest that is served at this control socket.
pub async fn wait_for_pages(path: &Path) {
    let mut client = guarded(ControlClient::connect(path)).await.unwrap();
    guarded(async {
        loop {
            let progress = client.call("progress", &Value::Null).await.unwrap().unwrap();
            if progress["progress"]["phase"] == "precopy" {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}
