//! A guest and its threads: one a vCPU, one for the device.

use crate::check::SelfCheck;
use crate::config::GuestConfig;
use crate::driver::Ports;
use crate::frames::{Frames, Places};
use crate::hooks::{Hooks, Plain};
use crate::kernel::{Kernel, Order};
use crate::machine_impl::SoftMachine;
use crate::platform::Platform;
use crate::ram::Ram;
use crate::{Error, Result};
use balloon::{Balloon, SharedBalloon};
use machine::{FreePages, Machine, MachineConfig, NoBalloon};
use memory::{Backing, GuestMemory};
use pages::{PAGE_BYTES, PageRange, PageSet, Pfn};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the kernel may take to do what it is told.
const ORDER_TIMEOUT: Duration = Duration::from_secs(10);

/// Where in a page [`SoftGuest::flip_byte`] flips one.
const FLIPPED: u64 = 2000;

/// A guest as a migration takes it; the dirty tracker is the caller's, over `ram`.
pub struct Parts {
    /// Its RAM.
    pub ram: Arc<GuestMemory>,
    /// Its balloon.
    pub free_pages: Box<dyn FreePages>,
    /// Its vCPUs and devices.
    pub machine: Box<dyn Machine>,
}

/// A guest. Clones are handles to the same one; it is switched off when the last of them, and the last machine that came
/// from [`SoftGuest::parts`], is gone.
#[derive(Clone)]
pub struct SoftGuest {
    owner: Arc<Owner>,
}

/// Ends the threads when it goes.
struct Owner {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What the threads see.
pub(crate) struct Shared {
    pub(crate) config: GuestConfig,
    pub(crate) ram: Ram,
    pub(crate) platform: Arc<Platform>,
    pub(crate) ports: Option<Ports>,
    /// `None` until a guest was restored.
    kernel: Mutex<Option<Kernel>>,
    /// The device was restored and has not caught up.
    pub(crate) catch_up: AtomicBool,
}

impl Shared {
    pub(crate) fn kernel(&self) -> MutexGuard<'_, Option<Kernel>> {
        self.kernel.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives memory back for the balloon.
struct Giver(Arc<GuestMemory>, Arc<dyn Hooks>);

impl balloon::Discard for Giver {
    fn discard(&self, range: PageRange) -> machine::Result<()> {
        Ok(self.0.discard(range)?)
    }

    fn discard_all(&self, ranges: &[PageRange], done: &mut dyn FnMut(PageRange, machine::Result<()>)) {
        self.1.discard(&self.0, ranges, done);
    }

    fn granule_pages(&self) -> u64 {
        self.0.discard_granule_pages()
    }
}

impl SoftGuest {
    /// Makes RAM of `backing`, boots a guest in it, and lets it run.
    ///
    /// # Errors
    /// A configuration that makes no guest, RAM that cannot be had, or more memory to use than there is.
    pub fn start(config: GuestConfig, backing: &Backing) -> Result<SoftGuest> {
        config.check()?;
        let ram = GuestMemory::new(Arc::clone(&config.layout), backing)?;
        SoftGuest::boot(config, Arc::new(ram))
    }

    /// Boots a guest in `ram`, which is all zero, and lets it run.
    ///
    /// # Errors
    /// As [`SoftGuest::start`]; and RAM whose layout is not the configuration's.
    pub fn boot(config: GuestConfig, ram: Arc<GuestMemory>) -> Result<SoftGuest> {
        SoftGuest::boot_with(config, ram, Arc::new(Plain))
    }

    /// The same with places for a benchmark to look in.
    ///
    /// # Errors
    /// As [`SoftGuest::boot`].
    pub fn boot_with(config: GuestConfig, ram: Arc<GuestMemory>, hooks: Arc<dyn Hooks>) -> Result<SoftGuest> {
        let guest = SoftGuest::assemble(config, ram, hooks)?;
        let shared = guest.shared();
        let kernel = Kernel::boot(&shared.config, shared.ram.clone(), shared.ports.as_ref())?;
        *shared.kernel() = Some(kernel);
        shared.platform.resume();
        Ok(guest)
    }

    /// A guest like the one that `config` describes, paused and empty: its RAM comes into `ram`, then
    /// [`Machine::restore`] brings it to life. `config` comes from a peer and is checked.
    ///
    /// # Errors
    /// A description of no soft guest, or RAM whose layout is not that of the description.
    pub fn new_for_restore(config: &MachineConfig, ram: Arc<GuestMemory>) -> Result<SoftGuest> {
        SoftGuest::assemble(GuestConfig::from_machine_config(config)?, ram, Arc::new(Plain))
    }

    fn assemble(config: GuestConfig, memory: Arc<GuestMemory>, hooks: Arc<dyn Hooks>) -> Result<SoftGuest> {
        config.check()?;
        if *memory.layout() != config.layout {
            return Err(Error::Config(
                "guest RAM has another layout than the guest's configuration".to_owned(),
            ));
        }
        Places::new(&config.layout, &Frames::new(&config.layout))?;
        let platform = Arc::new(Platform::new(config.vcpus));
        let ram = Ram::new(Arc::clone(&memory));
        let ports = match config.balloon {
            None => None,
            Some(balloon) => {
                let interrupts: Arc<dyn balloon::Interrupts> = platform.clone();
                let giver = Arc::new(Giver(memory, Arc::clone(&hooks)));
                let device = Balloon::new(balloon, Arc::clone(&config.layout), ram.clone(), interrupts, giver)?;
                Some(Ports {
                    device: SharedBalloon::new(device),
                    platform: Arc::clone(&platform),
                    hooks,
                })
            }
        };
        let vcpus = config.vcpus;
        let shared = Arc::new(Shared {
            config,
            ram,
            platform,
            ports,
            kernel: Mutex::new(None),
            catch_up: AtomicBool::new(false),
        });
        // The owner first: where a thread cannot be started, it ends those that were.
        let owner = Owner {
            shared: Arc::clone(&shared),
            threads: Mutex::default(),
        };
        for vcpu in 0..vcpus {
            let shared = Arc::clone(&shared);
            owner.spawn(format!("vcpu{vcpu}"), move || vcpu_thread(&shared, vcpu))?;
        }
        owner.spawn("balloon".to_owned(), move || device_thread(&shared))?;
        Ok(SoftGuest { owner: Arc::new(owner) })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.owner.shared
    }

    /// The guest as a migration takes it.
    pub fn parts(&self) -> Parts {
        Parts {
            ram: Arc::clone(self.ram()),
            free_pages: match self.balloon() {
                Some(device) => Box::new(device),
                None => Box::new(NoBalloon),
            },
            machine: Box::new(self.machine()),
        }
    }

    /// Its RAM.
    pub fn ram(&self) -> &Arc<GuestMemory> {
        self.shared().ram.owner()
    }

    /// Its vCPUs and devices.
    pub fn machine(&self) -> SoftMachine {
        SoftMachine::new(self.clone())
    }

    /// Its balloon device, for the host's side of it: targets, statistics.
    pub fn balloon(&self) -> Option<SharedBalloon<Ram>> {
        self.shared().ports.as_ref().map(|ports| ports.device.clone())
    }

    /// What a migration compares.
    pub fn machine_config(&self) -> MachineConfig {
        self.shared().config.machine_config()
    }

    /// Lets the guest look at all of its memory: every page that it uses must hold what it last wrote there, and every
    /// page of RAM must be accounted for once. Its workload waits meanwhile.
    ///
    /// # Errors
    /// The first thing that is broken; [`Error::NotRestored`] before there is a guest.
    pub fn self_check(&self) -> Result<SelfCheck> {
        let kernel = self.shared().kernel();
        kernel.as_ref().ok_or(Error::NotRestored)?.self_check()
    }

    /// Waits while the guest runs for `time`; how often its clock ticked.
    ///
    /// # Errors
    /// A guest that is paused, is not there yet, or has stopped because its memory is broken.
    pub fn run_for(&self, time: Duration) -> Result<u64> {
        let ticks = || -> Result<u64> {
            let kernel = self.shared().kernel();
            let kernel = kernel.as_ref().ok_or(Error::NotRestored)?;
            kernel.panicked()?;
            Ok(kernel.ticks())
        };
        if !self.shared().platform.is_running() {
            return Err(Error::Paused);
        }
        let before = ticks()?;
        std::thread::sleep(time);
        Ok(ticks()?.saturating_sub(before))
    }

    /// Lets the guest load its balloon driver, if it has not yet.
    ///
    /// # Errors
    /// A guest that does not run, has no balloon, or whose driver cannot bring the device up.
    pub fn load_driver(&self) -> Result<()> {
        self.order(Order::Load)
    }

    /// Lets the guest's balloon driver go away, whatever it is doing: the device is reset, and the balloon is empty.
    ///
    /// # Errors
    /// A guest that does not run or has no balloon.
    pub fn unload_driver(&self) -> Result<()> {
        self.order(Order::Unload)
    }

    /// Lets the guest's kernel move a page of the balloon elsewhere, as memory compaction does.
    ///
    /// # Errors
    /// A guest that does not run, has no balloon or no driver for it, or a device that does not listen.
    pub fn compact_balloon(&self) -> Result<()> {
        self.order(Order::Compact)
    }

    fn order(&self, order: Order) -> Result<()> {
        let shared = self.shared();
        if shared.ports.is_none() {
            return Err(Error::Config("the guest has no balloon for a driver".to_owned()));
        }
        if !shared.platform.is_running() {
            return Err(Error::Paused);
        }
        let (done, obeyed) = mpsc::sync_channel(1);
        shared.kernel().as_mut().ok_or(Error::NotRestored)?.order(order, done);
        shared.platform.poke();
        obeyed.recv_timeout(ORDER_TIMEOUT).unwrap_or(Err(Error::Paused))
    }

    /// A page that the guest uses, as the table in its RAM says: for tests that break one.
    ///
    /// # Errors
    /// RAM without such a page.
    pub fn used_page(&self) -> Result<Pfn> {
        let shared = self.shared();
        let frames = Frames::new(&shared.config.layout);
        let places = Places::new(&shared.config.layout, &frames)?;
        let frame = places.trees.used.next(&shared.ram, 0)?;
        let frame = frame.ok_or_else(|| Error::Corrupt("no page of RAM is in use".to_owned()))?;
        Ok(Pfn::of_address(frames.address(frame)?))
    }

    /// All pages that the guest uses, likewise.
    ///
    /// # Errors
    /// RAM whose bookkeeping is broken.
    pub fn used_pages(&self) -> Result<PageSet> {
        let shared = self.shared();
        let frames = Frames::new(&shared.config.layout);
        let places = Places::new(&shared.config.layout, &frames)?;
        let mut set = PageSet::empty(&shared.config.layout);
        places.trees.used.for_each(&shared.ram, |frame| {
            let pfn = Pfn::of_address(frames.address(frame)?);
            set.insert_range(PageRange::between(pfn, Pfn(pfn.0 + 1)));
            Ok(())
        })?;
        Ok(set)
    }

    /// Breaks a page: flips a byte of it, as a migration with a fault would. For tests.
    ///
    /// # Errors
    /// A page that is not RAM.
    pub fn flip_byte(&self, pfn: Pfn) -> Result<()> {
        let ram = &self.shared().ram;
        let address = pfn.0.saturating_mul(PAGE_BYTES).saturating_add(FLIPPED);
        let mut byte = [0];
        ram.read(address, &mut byte)?;
        ram.write(address, &[!byte[0]])
    }
}

impl Owner {
    fn spawn(&self, name: String, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(body)
            .map_err(Error::Thread)?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.platform.quit();
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        for thread in threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the guest panicked");
            }
        }
    }
}

/// Switches the guest off when one of its threads panics: nobody must wait for it.
struct OnPanic<'a>(&'a Platform);

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.quit();
        }
    }
}

fn vcpu_thread(shared: &Shared, vcpu: u32) {
    let _guard = OnPanic(&shared.platform);
    let mut last = Instant::now();
    while let Some(entered) = shared.platform.enter(vcpu) {
        let now = Instant::now();
        if entered.parked {
            last = now;
        }
        let elapsed = now - last;
        last = now;
        let sleep = match shared.kernel().as_mut() {
            Some(kernel) => kernel.run(vcpu, &entered.irqs, elapsed, shared.ports.as_ref()),
            None => Duration::from_millis(10),
        };
        if !sleep.is_zero() {
            shared.platform.idle(vcpu, sleep);
        }
    }
}

fn device_thread(shared: &Shared) {
    let _guard = OnPanic(&shared.platform);
    while let Some(rings) = shared.platform.rings() {
        let Some(ports) = &shared.ports else {
            continue;
        };
        for queue in (0..32).filter(|queue| rings >> queue & 1 == 1) {
            ports.hooks.kicked(&ports.device, &*ports.platform, queue);
        }
    }
}
