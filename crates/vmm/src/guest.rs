//! All of it put together, as a migration takes it.

use crate::devices::Board;
use crate::kvm::{self, Vm};
use crate::machine_impl::LinuxMachine;
use crate::platform;
use crate::vcpu::Vcpus;
use crate::wiring::{Ending, Wiring};
use crate::{BootFiles, Console, Error, Result, Tracking, VmConfig, boot};
use balloon::SharedBalloon;
use machine::{DirtyTracker, FreePages, Machine, MachineConfig, NoBalloon};
use memory::{Backing, DeviceMemory, GuestMemory};
use pages::PageRange;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What such a machine is called in a [`MachineConfig`].
pub(crate) const KIND: &str = "linux";

/// How a guest ended by itself.
#[derive(Clone, Debug)]
pub enum Ended {
    /// It switched its power off.
    PowerOff,
    /// It asked for a reset, which ends it here: there is nothing to boot from again.
    Reset,
    /// It cannot go on.
    Failed(Arc<Error>),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ended::PowerOff => write!(f, "it switched its power off"),
            Ended::Reset => write!(f, "it asked for a reset"),
            Ended::Failed(error) => write!(f, "{error}"),
        }
    }
}

/// A guest as a migration takes it.
pub struct Parts {
    /// Its RAM.
    pub ram: Arc<GuestMemory>,
    /// Which of its pages are written.
    pub tracker: Box<dyn DirtyTracker>,
    /// Its balloon.
    pub free_pages: Box<dyn FreePages>,
    /// Its vCPUs and devices.
    pub machine: Box<dyn Machine>,
}

/// A device that does not let its state go, or does not take any: for tests of what a failed migration leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateFault {
    /// Saving fails.
    Save,
    /// Restoring fails, after half of the devices took theirs.
    Restore,
}

/// A Linux guest under KVM. Clones are handles to the same one; it is switched off when the last of them, and the last
/// machine that came from [`LinuxGuest::parts`], is gone.
#[derive(Clone)]
pub struct LinuxGuest {
    inner: Arc<Inner>,
}

/// What there is to resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Nothing yet: state has to be restored first.
    Empty,
    /// A guest.
    Guest,
    /// A guest that was restored in part.
    Broken,
}

/// A machine. Its parts go in this order: no vCPU runs any more when the board goes, and the VM goes last.
pub(crate) struct Inner {
    pub(crate) vcpus: Vcpus,
    pub(crate) board: Board,
    pub(crate) vm: Vm,
    pub(crate) ending: Ending,
    ram: Arc<GuestMemory>,
    config: MachineConfig,
    /// Held while the machine is paused, resumed, saved or restored: one at a time.
    content: Mutex<Content>,
    fault: AtomicU8,
}

impl Inner {
    pub(crate) fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn config(&self) -> &MachineConfig {
        &self.config
    }

    pub(crate) fn has_fault(&self, fault: StateFault) -> bool {
        self.fault.load(Ordering::Relaxed) == number(fault)
    }
}

impl LinuxGuest {
    /// Boots a kernel in new memory, and lets it run.
    ///
    /// # Errors
    /// No KVM, or one that lacks something; files that are no kernel or too large; memory that cannot be had.
    pub fn boot(config: VmConfig, files: &BootFiles, console: Console) -> Result<LinuxGuest> {
        config.check()?;
        let ram = Arc::new(GuestMemory::new(Arc::clone(&config.layout), &Backing::Anonymous)?);
        let guest = LinuxGuest::assemble(&config, ram, console, None)?;
        let inner = &guest.inner;
        let memory = DeviceMemory::new(&inner.ram);
        let entry = boot::load(
            &memory,
            &config.layout,
            config.vcpus,
            files,
            &inner.board.virtio_places(),
        )?;
        inner
            .vcpus
            .set_first_state(|sregs, regs| boot::first_state(&memory, &entry, sregs, regs))?;
        *inner.content() = Content::Guest;
        inner.board.start()?;
        inner.vcpus.resume()?;
        Ok(guest)
    }

    /// A machine like the one that `config` describes, paused and empty: its RAM comes into `ram`, then
    /// [`Machine::restore`] brings it to life. `config` comes from a peer and is checked against this host.
    ///
    /// # Errors
    /// Every reason why this host cannot run it, each by name.
    pub fn new_for_restore(
        config: &MachineConfig,
        ram: Arc<GuestMemory>,
        tracking: Tracking,
        console: Console,
    ) -> std::result::Result<LinuxGuest, Vec<String>> {
        let one = |error: Error| vec![error.to_string()];
        if config.kind != KIND {
            return Err(vec![format!(
                "a Linux guest cannot be made of a machine of kind {:?}",
                config.kind
            )]);
        }
        let balloon = balloon::Config::from_description(&config.balloon).map_err(|error| one(error.into()))?;
        let here = VmConfig {
            layout: Arc::new(config.layout.clone()),
            vcpus: config.vcpus,
            balloon,
            tracking,
        };
        here.check().map_err(one)?;
        if *ram.layout() != here.layout {
            return Err(vec!["guest RAM has another layout than the machine".to_owned()]);
        }
        let needs = kvm::preflight(config)?;
        LinuxGuest::assemble(&here, ram, console, Some(needs)).map_err(one)
    }

    /// A paused machine with nothing in it. `needs` is what came with a guest that is to be restored.
    fn assemble(
        config: &VmConfig,
        ram: Arc<GuestMemory>,
        console: Console,
        needs: Option<BTreeMap<String, String>>,
    ) -> Result<LinuxGuest> {
        check_places(config)?;
        let ending = Ending::default();
        let vm = Vm::new(config.vcpus, &ram, config.tracking)?;
        let wiring: &dyn Wiring = &vm;
        let memory = DeviceMemory::new(&ram);
        let board = Board::new(wiring, &memory, &config.layout, config.balloon, console, ending.clone())?;
        let host = vm.host_cpuid()?;
        let cpuids = (0..config.vcpus).map(|vcpu| boot::cpuid(&host, vcpu, config.vcpus));
        let vcpus = Vcpus::start(&vm, cpuids.collect::<Result<_>>()?, board.exits(), ending.clone())?;
        let config = MachineConfig {
            kind: KIND.to_owned(),
            layout: (*config.layout).clone(),
            vcpus: config.vcpus,
            balloon: balloon::Config::describe(config.balloon.as_ref()),
            extra: needs.unwrap_or_else(|| vcpus.needs()),
        };
        let inner = Inner {
            vcpus,
            board,
            vm,
            ending,
            ram,
            config,
            content: Mutex::new(Content::Empty),
            fault: AtomicU8::new(0),
        };
        Ok(LinuxGuest { inner: Arc::new(inner) })
    }

    /// The guest as a migration takes it.
    ///
    /// # Errors
    /// A host that does not track writes in the way that was asked for.
    pub fn parts(&self) -> Result<Parts> {
        Ok(Parts {
            ram: Arc::clone(&self.inner.ram),
            tracker: self.inner.vm.tracker()?,
            free_pages: match self.balloon() {
                Some(device) => Box::new(device),
                None => Box::new(NoBalloon),
            },
            machine: Box::new(LinuxMachine::new(Arc::clone(&self.inner))),
        })
    }

    /// Its RAM.
    pub fn ram(&self) -> &Arc<GuestMemory> {
        &self.inner.ram
    }

    /// Its balloon device, for the host's side of it: targets, statistics.
    pub fn balloon(&self) -> Option<SharedBalloon<DeviceMemory>> {
        self.inner.board.balloon()
    }

    /// Whether its vCPUs run.
    pub fn is_running(&self) -> bool {
        self.inner.vcpus.is_running()
    }

    /// How it ended by itself, if it has within `time`.
    pub fn ended(&self, time: Duration) -> Option<Ended> {
        if time.is_zero() {
            self.inner.ending.get()
        } else {
            self.inner.ending.wait(time)
        }
    }

    /// Makes its state refuse to be saved or restored from now on; `None` ends that. For tests.
    pub fn set_state_fault(&self, fault: Option<StateFault>) {
        self.inner.fault.store(fault.map_or(0, number), Ordering::Relaxed);
    }
}

fn number(fault: StateFault) -> u8 {
    match fault {
        StateFault::Save => 1,
        StateFault::Restore => 2,
    }
}

/// RAM must leave the devices' addresses alone.
fn check_places(config: &VmConfig) -> Result<()> {
    let devices = PageRange::between(
        pages::Pfn::of_address(platform::VIRTIO_MMIO_BASE),
        pages::Pfn::of_address(1 << 32),
    );
    match config.layout.clip(devices).next() {
        None => Ok(()),
        Some(range) => Err(Error::RamOverDevices(range)),
    }
}
