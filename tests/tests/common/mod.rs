//! Both sides of a migration of the built-in guest, in one process, over a real socket.
#![allow(clippy::unwrap_used, clippy::expect_used, dead_code, unreachable_pub, missing_docs)]

use machine::DirtyTracker;
use memory::trackers::UffdTracker;
use memory::{Backing, GuestMemory};
use pageferry::{Finished, Guest, Listener, Migration, ReceiveOptions, SendOptions};
use pages::Layout;
use softguest::{GuestConfig, SelfCheck, SoftGuest};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const MIB: u64 = 1 << 20;

/// What came of a migration.
pub struct Moved {
    pub source: Finished,
    pub destination: Finished,
    /// The guest at the destination, if one was made.
    pub arrived: Option<SoftGuest>,
}

impl Moved {
    /// Both sides completed, the fates add up on both and are equal, and the guest itself finds all it wrote.
    pub fn assert_whole(&self) -> SelfCheck {
        let (s, d) = (&self.source.outcome, &self.destination.outcome);
        assert_eq!(s.error, None, "source");
        assert_eq!(d.error, None, "destination");
        assert!(s.report.pages.adds_up(), "{:?}", s.report.pages);
        let fates = |p: &engine::PagesReport| (p.total, p.sent, p.zero, p.hole, p.hinted, p.ballooned, p.filled);
        assert_eq!(
            fates(&s.report.pages),
            fates(&d.report.pages),
            "the sides tell different fates"
        );
        let guest = self.arrived.as_ref().expect("a guest arrived");
        let check = guest
            .self_check()
            .unwrap_or_else(|e| panic!("the guest is not whole: {e}"));
        let ticks = guest.run_for(Duration::from_millis(50)).expect("the guest goes on");
        assert!(ticks > 0, "the guest's clock stands still");
        guest.self_check().expect("the guest stays whole");
        check
    }
}

pub fn guest_of(soft: &SoftGuest) -> Guest {
    let tracker = Box::new(UffdTracker::new(soft.ram()).unwrap());
    guest_with(soft, tracker)
}

pub fn guest_with(soft: &SoftGuest, tracker: Box<dyn DirtyTracker>) -> Guest {
    let parts = soft.parts();
    Guest {
        ram: parts.ram,
        tracker,
        free_pages: parts.free_pages,
        machine: parts.machine,
    }
}

/// No test takes so long unless it hangs.
pub fn block_on<T>(future: impl std::future::Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(120), future)
            .await
            .expect("the test hangs")
    })
}

/// Sends `guest` over loopback to a receiver that builds a soft guest from the source's word alone; `tamper` may break
/// the arrived guest's memory between its restore and the hand-over.
pub async fn migrate(guest: Guest, options: SendOptions) -> Moved {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_address().clone();
    let arrived: Arc<Mutex<Option<SoftGuest>>> = Arc::default();
    let slot = Arc::clone(&arrived);
    let receiving = Migration::receive(listener, ReceiveOptions::default(), move |incoming| {
        let made = || -> Result<SoftGuest, String> {
            let layout = Arc::new(incoming.config.layout.clone());
            let ram = GuestMemory::new(layout, &Backing::Anonymous).map_err(|e| e.to_string())?;
            SoftGuest::new_for_restore(&incoming.config, Arc::new(ram)).map_err(|e| e.to_string())
        };
        let soft = made().map_err(|e| vec![e])?;
        let guest = guest_of(&soft);
        *slot.lock().unwrap() = Some(soft);
        Ok(guest)
    });
    let sending = Migration::send(guest, &address, options);
    let (source, destination) = tokio::join!(sending.finish(), receiving.finish());
    let arrived = arrived.lock().unwrap().take();
    Moved {
        source,
        destination,
        arrived,
    }
}

pub fn start(config: GuestConfig) -> SoftGuest {
    SoftGuest::start(config, &Backing::Anonymous).unwrap()
}

pub fn flat(bytes: u64) -> Arc<Layout> {
    Arc::new(Layout::flat(bytes / 4096).unwrap())
}

/// Settings with verification on.
pub fn verified() -> SendOptions {
    let mut options = SendOptions::default();
    options.source.verify = true;
    // On a busy machine a guest that fills what it hands over takes longer than operators would wait.
    options.source.hint_timeout = Duration::from_secs(30);
    options
}
