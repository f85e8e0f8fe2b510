//! The VM, and what of it lives in the kernel: interrupt controllers, timer, memory slots, dirty log.
//!
//! - [`Host`] is this host's KVM, opened and checked;
//! - [`Vm`] is a VM with all that the machine of [`crate::platform`] has, but for its vCPUs;
//! - [`preflight()`] compares what a machine needs with what this host has.
//!
//! Follows the kernel's `Documentation/virt/kvm/api.rst`.

mod blob;
mod chips;
mod features;
mod host;
mod preflight;
#[cfg(test)]
mod tests;
mod tsc;

pub(crate) use blob::{Blob, hex};
#[cfg(feature = "fuzzing")]
pub(crate) use chips::{read as read_chips, zeroed as zeroed_chips};
pub(crate) use features::{lacking, leaf};
pub(crate) use host::{DEVICE, Host};
pub(crate) use preflight::{Needs, preflight};
pub(crate) use tsc::{Fit, Tsc, invariant_tsc};

use crate::platform::{KVM_IDENTITY_MAP, KVM_TSS};
use crate::state::Incoming;
use crate::wiring::Wiring;
use crate::{Error, Result, Tracking};
use kvm_bindings::{CpuId, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{IoEventAddress, VmFd};
use machine::{DirtyTracker, Section};
use memory::GuestMemory;
use memory::kvm::{KvmRing, KvmSlots};
use memory::trackers::{KvmLogTracker, KvmManualTracker, KvmRingTracker, UffdTracker};
use std::path::Path;
use std::sync::Arc;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Entries of a vCPU's dirty ring, if its writes are tracked so: 64 MiB of pages between two harvests.
const RING_ENTRIES: u32 = 16_384;

/// A VM with its RAM, its interrupt controllers and its timer; vCPUs are [`crate::vcpu::Vcpus`].
#[derive(Debug)]
pub(crate) struct Vm {
    slots: Arc<KvmSlots>,
    ring: Option<Arc<KvmRing>>,
    ram: Arc<GuestMemory>,
    tracking: Tracking,
    vcpus: u32,
    fd: Arc<VmFd>,
    host: Arc<Host>,
}

impl Vm {
    /// Makes a VM that can have `vcpus` vCPUs, with `ram` in it.
    ///
    /// # Errors
    /// No KVM, or one that lacks something; a way of tracking that this host does not have.
    pub(crate) fn new(vcpus: u32, ram: &Arc<GuestMemory>, tracking: Tracking) -> Result<Vm> {
        Vm::at(Path::new(DEVICE), vcpus, ram, tracking)
    }

    /// The same with another device than [`DEVICE`].
    pub(crate) fn at(path: &Path, vcpus: u32, ram: &Arc<GuestMemory>, tracking: Tracking) -> Result<Vm> {
        let host = Host::open(path)?;
        if vcpus as usize > host.max_vcpus() {
            let most = host.max_vcpus();
            return Err(Error::KvmLacks(format!("room for {vcpus} vCPUs: it has {most}")));
        }
        let fd = Arc::new(host.create_vm()?);
        let at = usize::try_from(KVM_TSS).unwrap_or(usize::MAX);
        fd.set_tss_address(at)
            .map_err(|e| Error::kvm(format!("putting KVM's TSS at {KVM_TSS:#x}"), e))?;
        fd.set_identity_map_address(KVM_IDENTITY_MAP)
            .map_err(|e| Error::kvm(format!("putting KVM's identity map at {KVM_IDENTITY_MAP:#x}"), e))?;
        fd.create_irq_chip()
            .map_err(|e| Error::kvm("making the interrupt controllers", e))?;
        // The dummy speaker answers at port 0x61, which Linux reads to calibrate its clock.
        let pit = kvm_pit_config {
            flags: KVM_PIT_SPEAKER_DUMMY,
            ..Default::default()
        };
        fd.create_pit2(pit).map_err(|e| Error::kvm("making the PIT", e))?;
        let ring = match tracking {
            // Before there are vCPUs, or never.
            Tracking::Ring => Some(KvmRing::enable(&fd, RING_ENTRIES)?),
            _ => None,
        };
        let slots = KvmSlots::register(&fd, ram)?;
        Ok(Vm {
            slots,
            ring,
            ram: Arc::clone(ram),
            tracking,
            vcpus,
            fd,
            host: Arc::new(host),
        })
    }

    /// What this host's KVM offers a guest, without what cannot be moved (nested virtualization).
    pub(crate) fn host_cpuid(&self) -> Result<CpuId> {
        self.host.cpuid()
    }

    /// A tracker of the kind asked for in [`Vm::new`].
    ///
    /// # Errors
    /// This host does not have it.
    pub(crate) fn tracker(&self) -> Result<Box<dyn DirtyTracker>> {
        let manual = memory::kvm::capabilities(&self.fd).manual_protect;
        Ok(match (self.tracking, &self.ring) {
            (Tracking::Auto, _) if manual => Box::new(KvmManualTracker::new(&self.slots)?),
            (Tracking::Auto | Tracking::Log, _) => Box::new(KvmLogTracker::new(&self.slots)),
            (Tracking::ManualProtect, _) => Box::new(KvmManualTracker::new(&self.slots)?),
            (Tracking::Ring, Some(ring)) => Box::new(KvmRingTracker::new(&self.slots, ring)?),
            (Tracking::Ring, None) => return Err(Error::Condition("the VM was made without dirty rings".to_owned())),
            (Tracking::Userfault, _) => Box::new(UffdTracker::new(&self.ram)?),
        })
    }

    /// The sections `irqchip` and `pit` of a paused machine. Called after [`crate::vcpu::Vcpus::save`], which may still
    /// move interrupts into the local APICs. A tick of the PIT in between is lost, as one on a busy host may be.
    pub(crate) fn save(&self) -> Result<Vec<Section>> {
        chips::save(&self.fd)
    }

    /// Takes them over. Called after [`crate::vcpu::Vcpus::restore`]: the I/O APIC hands pending interrupts to the local
    /// APICs at once.
    pub(crate) fn restore(&self, incoming: &mut Incoming<'_>) -> Result<()> {
        chips::restore(&self.fd, incoming)
    }

    pub(crate) fn fd(&self) -> &Arc<VmFd> {
        &self.fd
    }

    pub(crate) fn host(&self) -> &Arc<Host> {
        &self.host
    }

    pub(crate) fn ram(&self) -> &Arc<GuestMemory> {
        &self.ram
    }

    pub(crate) fn ring(&self) -> Option<&Arc<KvmRing>> {
        self.ring.as_ref()
    }

    /// How many vCPUs it was made for.
    pub(crate) fn vcpus(&self) -> u32 {
        self.vcpus
    }
}

impl Wiring for Vm {
    fn irq(&self, gsi: u32) -> Result<EventFd> {
        let doing = || format!("wiring interrupt {gsi}");
        let fd = EventFd::new(EFD_NONBLOCK).map_err(|e| Error::kvm(doing(), e))?;
        self.fd.register_irqfd(&fd, gsi).map_err(|e| Error::kvm(doing(), e))?;
        Ok(fd)
    }

    fn doorbell(&self, bell: &EventFd, address: u64, value: u32) -> Result<()> {
        self.fd
            .register_ioevent(bell, &IoEventAddress::Mmio(address), value)
            .map_err(|e| Error::kvm(format!("wiring a doorbell for {value} at {address:#x}"), e))
    }
}
