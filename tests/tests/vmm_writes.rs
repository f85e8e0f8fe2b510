//! Writes that the VMM itself makes (case 21): a guest that stands still, a device that writes. The tracker is told by
//! whoever writes, so what is not told is lost; the digests notice, and the guest stays at the source.
#![allow(clippy::unwrap_used)]

mod common;

use common::{block_on, verified};
use machine::{BalloonConfig, Machine, MachineConfig, MachineState, NoBalloon};
use memory::trackers::{BitmapTracker, DirtyMarker};
use memory::{Backing, GuestMemory};
use pageferry::{Ending, Finished, Guest, Listener, Migration, ReceiveOptions, SendOptions};
use pages::{Layout, PAGE_BYTES, PageRange, Pfn};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// A machine whose one device writes a page over and over until it is paused.
struct Devices {
    layout: Layout,
    running: bool,
    stop: Arc<AtomicBool>,
    device: Option<JoinHandle<()>>,
}

impl Machine for Devices {
    fn config(&self) -> MachineConfig {
        MachineConfig {
            kind: "device-only".to_owned(),
            layout: self.layout.clone(),
            vcpus: 1,
            balloon: BalloonConfig {
                dialect: "off".to_owned(),
                features: 0,
            },
            extra: Default::default(),
        }
    }

    fn is_running(&self) -> bool {
        self.running
    }

    fn pause(&mut self) -> machine::Result<()> {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(device) = self.device.take() {
            device.join().unwrap();
        }
        self.running = false;
        Ok(())
    }

    fn resume(&mut self) -> machine::Result<()> {
        self.running = true;
        Ok(())
    }

    fn save(&mut self) -> machine::Result<MachineState> {
        Ok(MachineState::default())
    }

    fn restore(&mut self, _state: &MachineState) -> machine::Result<()> {
        Ok(())
    }
}

const RING: Pfn = Pfn(77);

fn device(ram: Arc<GuestMemory>, marker: Option<DirtyMarker>, stop: Arc<AtomicBool>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut written = 0u64;
        while !stop.load(Ordering::SeqCst) {
            written += 1;
            ram.write(RING.0 * PAGE_BYTES + 128, &written.to_le_bytes()).unwrap();
            if let Some(marker) = &marker {
                marker.mark(PageRange::new(RING, 1).unwrap());
            }
        }
    })
}

fn guest(layout: &Layout, device_tells: Option<bool>) -> (Guest, Arc<GuestMemory>) {
    let ram = Arc::new(GuestMemory::new(Arc::new(layout.clone()), &Backing::Anonymous).unwrap());
    let tracker = BitmapTracker::new(ram.layout());
    let stop = Arc::new(AtomicBool::new(false));
    let device = device_tells.map(|tells| {
        for page in 0..4096 {
            ram.write(page * PAGE_BYTES, &(page + 1).to_le_bytes()).unwrap();
        }
        device(Arc::clone(&ram), tells.then(|| tracker.marker()), Arc::clone(&stop))
    });
    let machine = Box::new(Devices {
        layout: layout.clone(),
        running: device.is_some(),
        stop,
        device,
    });
    let guest = Guest {
        ram: Arc::clone(&ram) as Arc<dyn machine::GuestRam>,
        tracker: Box::new(tracker),
        free_pages: Box::new(NoBalloon),
        machine,
    };
    (guest, ram)
}

fn migrate(device_tells: bool) -> (Finished, Finished, Arc<GuestMemory>, Option<u64>) {
    let layout = Layout::flat(8192).unwrap();
    let (guest, ram) = guest(&layout, Some(device_tells));
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_address().clone();
    let options = SendOptions {
        max_bandwidth: Some(200 << 20),
        compress: pageferry::Compress::None,
        ..verified()
    };
    let (source, destination, there) = block_on(async {
        let there = Arc::new(std::sync::Mutex::new(None));
        let slot = Arc::clone(&there);
        let receiving = Migration::receive(listener, ReceiveOptions::default(), move |incoming| {
            let (guest, ram) = self::guest(&incoming.config.layout, None);
            *slot.lock().unwrap() = Some(ram);
            Ok(guest)
        });
        let sending = Migration::send(guest, &address, options);
        let (source, destination) = tokio::join!(sending.finish(), receiving.finish());
        let there = there.lock().unwrap().take();
        (source, destination, there)
    });
    let arrived = there.map(|there| value_of(&there));
    (source, destination, ram, arrived)
}

fn value_of(ram: &GuestMemory) -> u64 {
    let mut value = [0; 8];
    ram.read(RING.0 * PAGE_BYTES + 128, &mut value).unwrap();
    u64::from_le_bytes(value)
}

#[test]
fn case_21_writes_of_a_device_alone_arrive() {
    let (source, _, ram, arrived) = migrate(true);
    assert_eq!(source.outcome.error, None);
    assert_eq!(arrived, Some(value_of(&ram)));
    assert_eq!(source.outcome.report.verified, Some(true));
}

#[test]
fn planted_forgetting_the_vmms_own_writes_is_caught() {
    let (source, destination, _, _) = migrate(false);
    let error = source.outcome.error.unwrap_or_default();
    assert_eq!(source.outcome.ending, Ending::Failed, "a lost write went unnoticed");
    assert!(error.contains("verif"), "{error}");
    assert_eq!(source.outcome.report.verified, Some(false));
    assert!(
        source.guest.is_some_and(|guest| guest.machine.is_running()),
        "the guest is the source's again"
    );
    assert!(destination.guest.is_none());
}
