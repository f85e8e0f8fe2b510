//! KVM's memory slots and dirty logs: the ioctls that kvm-ioctls lacks or leaves unsafe, each wrapped once.
//!
//! See the kernel's `Documentation/virt/kvm/api.rst`: 4.35 (slots), 4.8 (GET_DIRTY_LOG), 4.117 (CLEAR_DIRTY_LOG), 8.29 (dirty
//! ring).

use super::{check, size};
use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
    KVM_DIRTY_LOG_PAGE_OFFSET, KVM_MEM_LOG_DIRTY_PAGES, kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1,
    kvm_dirty_gfn, kvm_enable_cap, kvm_userspace_memory_region,
};
use kvm_ioctls::{VcpuFd, VmFd};
use pages::{PAGE_BYTES, PageRange};
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

/// `_IOWR(KVMIO, 0xc0, struct kvm_clear_dirty_log)`.
const KVM_CLEAR_DIRTY_LOG: libc::c_ulong =
    (3 << 30) | ((size_of::<kvm_clear_dirty_log>() as libc::c_ulong) << 16) | (0xAE << 8) | 0xc0;
/// `_IO(KVMIO, 0xc7)`.
const KVM_RESET_DIRTY_RINGS: libc::c_ulong = (0xAE << 8) | 0xc7;

/// An entry of a ring holds a page that was written.
const GFN_DIRTY: u32 = 1;
/// We have read an entry: KVM may protect its page again and reuse it.
const GFN_RESET: u32 = 2;

/// Bytes of an entry of a ring.
pub(crate) const GFN_BYTES: u32 = 16;
const _: () = assert!(size_of::<kvm_dirty_gfn>() == GFN_BYTES as usize);

/// Makes, changes or (with no page) deletes memory slot `slot`: guest pages `pages`, which lie at `addr` here.
///
/// # Safety
/// Guest RAM of that length lies at `addr` and stays mapped until the slot is deleted or the VM is gone.
pub(crate) unsafe fn set_slot(vm: &VmFd, slot: u32, pages: PageRange, addr: usize, log: bool) -> io::Result<()> {
    let region = kvm_userspace_memory_region {
        slot,
        flags: if log { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
        guest_phys_addr: pages.start().0 * PAGE_BYTES,
        memory_size: pages.bytes(),
        userspace_addr: addr as u64,
    };
    loop {
        // SAFETY: the caller's promise. The guest changes that memory at any time, and nobody holds a reference to it.
        match unsafe { vm.set_user_memory_region(region) } {
            Err(e) if e.errno() == libc::EINTR => {}
            result => return Ok(result?),
        }
    }
}

/// The dirty bitmap of a slot of `pages` pages. Clears it and protects its pages, unless manual protection is on.
pub(crate) fn get_dirty_log(vm: &VmFd, slot: u32, pages: u64) -> io::Result<Vec<u64>> {
    Ok(vm.get_dirty_log(slot, size(pages * PAGE_BYTES))?)
}

/// Clears and protects those of `pages` pages of a slot, from `first` on (a multiple of 64), whose bits are set in `words`,
/// which has a bit for each of them.
pub(crate) fn clear_dirty_log(vm: &VmFd, slot: u32, first: u64, pages: u32, words: &[u64]) -> io::Result<()> {
    if words.len() as u64 != u64::from(pages).div_ceil(64) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let arg = kvm_clear_dirty_log {
        slot,
        num_pages: pages,
        first_page: first,
        __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 {
            dirty_bitmap: words.as_ptr().cast_mut().cast(),
        },
    };
    // SAFETY: `arg` is a kvm_clear_dirty_log; the kernel reads as many bits as there are pages, rounded up to words, and
    // writes none.
    check(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_CLEAR_DIRTY_LOG, &raw const arg) })?;
    Ok(())
}

/// Sets how the dirty log is cleared: flags of `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`, 0 for by reading it.
pub(crate) fn set_manual_protect(vm: &VmFd, flags: u32) -> io::Result<()> {
    enable(vm, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, u64::from(flags))
}

/// Gives every vCPU that is made from now on a ring of `entries` entries.
pub(crate) fn enable_ring(vm: &VmFd, entries: u32) -> io::Result<()> {
    let ordered = vm.check_extension_raw(KVM_CAP_DIRTY_LOG_RING_ACQ_REL.into()) > 0;
    // A kernel that has only the older name has it on x86 alone, where loads and stores are ordered anyway.
    let cap = if ordered {
        KVM_CAP_DIRTY_LOG_RING_ACQ_REL
    } else {
        KVM_CAP_DIRTY_LOG_RING
    };
    enable(vm, cap, u64::from(entries) * u64::from(GFN_BYTES))
}

fn enable(vm: &VmFd, cap: u32, arg: u64) -> io::Result<()> {
    let cap = kvm_enable_cap {
        cap,
        args: [arg, 0, 0, 0],
        ..Default::default()
    };
    Ok(vm.enable_cap(&cap)?)
}

/// Has KVM protect the pages of all entries that were read, and take the entries back. How many there were.
pub(crate) fn reset_dirty_rings(vm: &VmFd) -> io::Result<u32> {
    loop {
        // SAFETY: KVM_RESET_DIRTY_RINGS takes no argument.
        match check(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_RESET_DIRTY_RINGS, 0) }) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            result => return Ok(result?.unsigned_abs()),
        }
    }
}

/// A vCPU's dirty ring, mapped. KVM writes it at any time.
#[derive(Debug)]
pub(crate) struct RingMap {
    addr: usize,
    entries: u32,
}

impl RingMap {
    /// Maps the ring of a vCPU, which has `entries` entries, a power of two.
    pub(crate) fn new(vcpu: &VcpuFd, entries: u32) -> io::Result<Self> {
        let bytes = size(u64::from(entries) * u64::from(GFN_BYTES));
        let offset = libc::off_t::from(KVM_DIRTY_LOG_PAGE_OFFSET) * 4096;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe { libc::mmap(ptr::null_mut(), bytes, prot, libc::MAP_SHARED, vcpu.as_raw_fd(), offset) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(RingMap {
            addr: at.expose_provenance(),
            entries,
        })
    }

    /// A ring that no KVM writes.
    #[cfg(test)]
    pub(crate) fn of_our_own(entries: u32) -> Self {
        let (bytes, flags) = (
            size(u64::from(entries * GFN_BYTES)),
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe { libc::mmap(ptr::null_mut(), bytes, prot, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        RingMap {
            addr: at.expose_provenance(),
            entries,
        }
    }

    /// The entry at place `at`.
    #[cfg(test)]
    pub(crate) fn entry(&self, at: u32) -> kvm_dirty_gfn {
        // SAFETY: as in take.
        unsafe {
            ptr::with_exposed_provenance::<kvm_dirty_gfn>(self.addr)
                .add(at as usize)
                .read_volatile()
        }
    }

    /// Fills the entry at place `at`, as KVM does.
    #[cfg(test)]
    pub(crate) fn fill(&self, at: u32, flags: u32, slot: u32, offset: u64) {
        assert!(at < self.entries);
        let gfn = kvm_dirty_gfn { flags, slot, offset };
        // SAFETY: as in take.
        unsafe {
            ptr::with_exposed_provenance_mut::<kvm_dirty_gfn>(self.addr)
                .add(at as usize)
                .write_volatile(gfn)
        };
    }

    /// Takes entry `index` (counted on and on, modulo the ring's size): the slot and the page in it; `None` if KVM has not
    /// filled it.
    pub(crate) fn take(&self, index: u32) -> Option<(u32, u64)> {
        let place = size(u64::from(index & (self.entries - 1)) * u64::from(GFN_BYTES));
        let gfn: *mut kvm_dirty_gfn = ptr::with_exposed_provenance_mut(self.addr + place);
        // SAFETY: the entry lies in the mapping, which lives as long as self, and is aligned; its flags are shared with the
        // kernel, which accesses them atomically.
        let flags = unsafe { AtomicU32::from_ptr(&raw mut (*gfn).flags) };
        if flags.load(Ordering::Acquire) != GFN_DIRTY {
            return None;
        }
        // SAFETY: as above. The kernel leaves a dirty entry alone until its flags say that it was read.
        let (slot, offset) = unsafe {
            (
                (&raw const (*gfn).slot).read_volatile(),
                (&raw const (*gfn).offset).read_volatile(),
            )
        };
        flags.store(GFN_RESET, Ordering::Release);
        Some((slot, offset))
    }
}

impl Drop for RingMap {
    fn drop(&mut self) {
        let bytes = size(u64::from(self.entries) * u64::from(GFN_BYTES));
        // SAFETY: our own mapping, which nobody else knows of.
        let result = unsafe { libc::munmap(ptr::with_exposed_provenance_mut(self.addr), bytes) };
        if result == -1 {
            tracing::warn!(error = %io::Error::last_os_error(), "unmapping a dirty ring");
        }
    }
}
