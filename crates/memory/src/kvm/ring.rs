//! KVM's dirty ring: each vCPU has a ring into which KVM puts every page that it writes.
//!
//! An entry that was read is KVM's again only after `KVM_RESET_DIRTY_RINGS`, which protects its page. Until then the page can
//! be written without a word, so reading entries, resetting them, and handing their pages out are **one step under one
//! lock**: were a page handed out before its reset, a write in between would be lost.
//!
//! A ring that is full ends `KVM_RUN`; the vCPU's thread empties it by itself ([`KvmRing::on_full`]) and keeps the pages for
//! the next harvest.
//!
//! On hosts whose processor logs pages by itself (Intel's PML) an entry shows up when its vCPU leaves the guest at the
//! latest. A page may so be in a later harvest than it could be; none is missing once the vCPUs are paused.

use super::{KvmSlots, capabilities};
use crate::error::{Error, Result};
use crate::sys::kvm::{self, GFN_BYTES, RingMap};
use kvm_ioctls::{VcpuFd, VmFd};
use pages::{PageRange, PageSet, Pfn};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The fewest entries of a ring: a page of them. Intel's processors need more (1024).
const MIN_ENTRIES: u32 = 4096 / GFN_BYTES;

/// The dirty rings of a VM.
#[derive(Debug)]
pub struct KvmRing {
    vm: Arc<VmFd>,
    entries: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    rings: Vec<Ring>,
    /// Where entries point to and what was read of them; `None` as long as no tracker was made.
    pages: Option<(Arc<KvmSlots>, PageSet)>,
    /// An entry that named no page. The guest is none the worse for it; the next harvest fails.
    wrong: Option<Error>,
}

/// The ring of one vCPU.
#[derive(Debug)]
struct Ring {
    vcpu: u32,
    map: RingMap,
    /// The entry to read next, counted on and on.
    next: u32,
}

impl KvmRing {
    /// Gives the vCPUs of `vm` rings of `entries` entries each, a power of two. There must be no vCPU yet. A VM with rings
    /// has no other dirty log.
    ///
    /// # Errors
    /// [`Error::NoTracking`] where KVM has no rings, or none of that size.
    pub fn enable(vm: &Arc<VmFd>, entries: u32) -> Result<Arc<KvmRing>> {
        let most = capabilities(vm).ring_entries;
        if most == 0 {
            return Err(Error::NoTracking("its KVM has no dirty ring".to_owned()));
        }
        if !entries.is_power_of_two() || entries < MIN_ENTRIES || entries > most {
            return Err(Error::NoTracking(format!(
                "a dirty ring has a power of two of entries, {MIN_ENTRIES} to {most}, not {entries}"
            )));
        }
        kvm::enable_ring(vm, entries).map_err(|e| {
            let doing = format!("enabling dirty rings of {entries} entries (has the VM vCPUs already, or rings?)");
            Error::sys(doing, e)
        })?;
        Ok(Arc::new(KvmRing {
            vm: Arc::clone(vm),
            entries,
            state: Mutex::default(),
        }))
    }

    /// Takes in the ring of vCPU `index`. Every vCPU of the VM needs it before it runs.
    ///
    /// # Errors
    /// The ring cannot be mapped; the vCPU was added before.
    pub fn add_vcpu(&self, index: u32, vcpu: &VcpuFd) -> Result<()> {
        let mut state = self.lock();
        if state.rings.iter().any(|ring| ring.vcpu == index) {
            return Err(Error::NoTracking(format!("vCPU {index} has a dirty ring already")));
        }
        let map = RingMap::new(vcpu, self.entries)
            .map_err(|e| Error::sys(format!("mapping the dirty ring of vCPU {index}"), e))?;
        state.rings.push(Ring {
            vcpu: index,
            map,
            next: 0,
        });
        Ok(())
    }

    /// Empties the rings, for a vCPU whose `KVM_RUN` ended with `KVM_EXIT_DIRTY_RING_FULL`; it can run on after. Its pages
    /// are in the next harvest. Waits at most for a harvest that is under way.
    ///
    /// # Errors
    /// KVM does not take the entries back: the vCPU cannot run on.
    pub fn on_full(&self) -> Result<()> {
        self.collect(&mut self.lock())
    }

    /// Has entries of the slots of `slots` read from now on.
    pub(crate) fn attach(&self, slots: &Arc<KvmSlots>) {
        let mut state = self.lock();
        let same = |known: &(Arc<KvmSlots>, PageSet)| Arc::ptr_eq(&known.0, slots);
        if !state.pages.as_ref().is_some_and(same) {
            state.pages = Some((Arc::clone(slots), PageSet::empty(slots.memory().layout())));
        }
    }

    /// The VM that the rings are of.
    pub(crate) fn vm(&self) -> &Arc<VmFd> {
        &self.vm
    }

    /// Takes all pages that were written, and protects them.
    pub(crate) fn harvest(&self) -> Result<Option<PageSet>> {
        let mut state = self.lock();
        self.collect(&mut state)?;
        if let Some(error) = state.wrong.take() {
            return Err(error);
        }
        Ok(state.pages.as_mut().map(|(slots, pages)| {
            let empty = PageSet::empty(slots.memory().layout());
            std::mem::replace(pages, empty)
        }))
    }

    /// Puts the pages of `range` that were written into `into`, and keeps them.
    pub(crate) fn peek(&self, range: PageRange, into: &mut PageSet) -> Result<()> {
        let mut state = self.lock();
        self.collect(&mut state)?;
        if let Some((_, pages)) = &state.pages {
            into.union_with(pages);
            // Only what was asked for.
            let end = into.layout().end();
            into.remove_range(PageRange::between(Pfn(0), range.start()));
            into.remove_range(PageRange::between(range.end(), end.max(range.end())));
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // What a panic could leave behind are entries that were read and are in no set yet, a state that no code under this
        // lock passes through.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads all rings and has their entries reset.
    fn collect(&self, state: &mut State) -> Result<()> {
        let State { rings, pages, wrong } = state;
        for ring in rings {
            // A full ring and no more, or a guest that writes as fast as we read would keep us here.
            for _ in 0..self.entries {
                let Some((slot, offset)) = ring.map.take(ring.next) else {
                    break;
                };
                ring.next = ring.next.wrapping_add(1);
                if let Some((slots, pages)) = pages {
                    let added = add_entry(slots, pages, ring.vcpu, slot, offset);
                    *wrong = wrong.take().or(added.err());
                }
            }
        }
        kvm::reset_dirty_rings(&self.vm).map_err(|e| Error::sys("resetting the dirty rings", e))?;
        Ok(())
    }
}

/// Puts the page of an entry into `pages`. Slots of others are none of ours: they may be ROM, or in another address space
/// (its number is in the upper half).
fn add_entry(slots: &KvmSlots, pages: &mut PageSet, vcpu: u32, slot: u32, offset: u64) -> Result<()> {
    let Some(range) = slots.pages_of(slot) else {
        return Ok(());
    };
    if offset >= range.count() {
        return Err(Error::RingEntry {
            vcpu,
            slot,
            offset,
            pages: range.count(),
        });
    }
    pages.insert(Pfn(range.start().0 + offset));
    Ok(())
}
