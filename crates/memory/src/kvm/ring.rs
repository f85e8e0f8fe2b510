//! KVM's dirty ring: each vCPU has a ring into which KVM puts every page that it writes.
//!
//! An entry that was read is KVM's again only after `KVM_RESET_DIRTY_RINGS`, which protects its page. Until then the page can
//! be written without a word, so reading entries, resetting them, and handing their pages out are **one step under one
//! lock**: were a page handed out before its reset, a write in between would be lost.
//!
//! A ring that is full ends `KVM_RUN`; the vCPU's thread empties it by itself ([`KvmRing::on_full`]) and keeps the pages for
//! the next harvest.
//!
//! KVM keeps some entries of a ring in reserve and never fills it. Should a ring be found full all the same, then KVM wrote over
//! entries that nobody had read, and no longer agrees with us on which is the next: nothing more can be said of what its vCPU
//! wrote, and every harvest fails from then on. (Seen on a KVM that emulates instructions, many at a time.)
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
    /// KVM has overrun it.
    overrun: bool,
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
            overrun: false,
        });
        Ok(())
    }

    /// Empties the rings, for a vCPU whose `KVM_RUN` ended with `KVM_EXIT_DIRTY_RING_FULL`; it can run on after. Its pages
    /// are in the next harvest. Waits at most for a harvest that is under way.
    ///
    /// # Errors
    /// KVM does not take the entries back, or has overrun a ring: the vCPU cannot run on.
    pub fn on_full(&self) -> Result<()> {
        let mut state = self.lock();
        let taken = self.collect(&mut state)?;
        match state.overrun() {
            Some(error) if taken == 0 => Err(error),
            _ => Ok(()),
        }
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
        if let Some(error) = state.overrun().or(state.wrong.take()) {
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

    /// Reads all rings and has their entries reset. How many KVM took back.
    fn collect(&self, state: &mut State) -> Result<u32> {
        let State { rings, pages, wrong } = state;
        for ring in rings {
            // A full ring and no more, or a guest that writes as fast as we read would keep us here.
            let mut read = 0;
            while read < self.entries
                && let Some((slot, offset)) = ring.map.take(ring.next)
            {
                read += 1;
                ring.next = ring.next.wrapping_add(1);
                if let Some((slots, pages)) = pages {
                    let added = add_entry(slots, pages, ring.vcpu, slot, offset);
                    *wrong = wrong.take().or(added.err());
                }
            }
            ring.overrun |= read == self.entries;
        }
        kvm::reset_dirty_rings(&self.vm).map_err(|e| Error::sys("resetting the dirty rings", e))
    }
}

impl State {
    fn overrun(&self) -> Option<Error> {
        let ring = self.rings.iter().find(|ring| ring.overrun)?;
        Some(Error::RingOverrun { vcpu: ring.vcpu })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, GuestMemory};
    use pages::Layout;

    fn r(start: u64, count: u64) -> PageRange {
        PageRange::new(Pfn(start), count).unwrap()
    }

    /// Rings of our own beside a VM that has none to reset.
    fn ring(rings: u32) -> Option<(Arc<KvmRing>, Arc<KvmSlots>)> {
        let vm = match kvm_ioctls::Kvm::new().and_then(|kvm| kvm.create_vm()) {
            Ok(vm) => Arc::new(vm),
            Err(e) => {
                eprintln!("\n*** SKIPPED: the ring's protocol: /dev/kvm: {e} ***\n");
                return None;
            }
        };
        let layout = Arc::new(Layout::new(vec![r(0, 131), r(1000, 67)]).unwrap());
        let memory = Arc::new(GuestMemory::new(layout, &Backing::Anonymous).unwrap());
        let slots = KvmSlots::register(&vm, &memory).unwrap();
        let ring = (8..=16).find_map(|bits| KvmRing::enable(&vm, 1 << bits).ok());
        let Some(ring) = ring else {
            eprintln!("\n*** SKIPPED: the ring's protocol: this host's KVM has no dirty ring ***\n");
            return None;
        };
        ring.attach(&slots);
        let state = |vcpu| Ring {
            vcpu,
            map: RingMap::of_our_own(ring.entries),
            next: 0,
            overrun: false,
        };
        ring.lock().rings = (0..rings).map(state).collect();
        Some((ring, slots))
    }

    fn pages(ring: &KvmRing) -> Vec<PageRange> {
        ring.harvest().unwrap().unwrap().runs().collect()
    }

    #[test]
    fn entries_are_read_in_order_up_to_one_that_is_not_filled_and_marked_as_read() {
        let Some((ring, _slots)) = ring(2) else { return };
        let entries = ring.entries;
        // Counted on past 32 bits.
        for state in &mut ring.lock().rings {
            state.next = 0u32.wrapping_sub(2);
        }
        let fill = |of: usize, at: u32, flags: u32, slot: u32, offset: u64| {
            ring.lock().rings[of].map.fill(at, flags, slot, offset);
        };
        fill(0, entries - 2, 1, 0, 130);
        fill(0, entries - 1, 1, 1, 66);
        fill(0, 0, 1, 0, 3);
        // Read already; that it still says so is KVM's to change. What comes after is of the lap before.
        fill(0, 1, 2, 0, 50);
        fill(0, 2, 1, 0, 51);
        fill(1, entries - 2, 1, 0, 4);
        assert_eq!(pages(&ring), [r(3, 2), r(130, 1), r(1066, 1)]);
        let flags = |of: usize, at: u32| ring.lock().rings[of].map.entry(at).flags;
        assert_eq!(
            [entries - 2, entries - 1, 0, 1, 2].map(|at| flags(0, at)),
            [2, 2, 2, 2, 1]
        );
        assert_eq!([entries - 2, entries - 1].map(|at| flags(1, at)), [2, 0]);
        assert!(pages(&ring).is_empty());
    }

    #[test]
    fn an_entry_that_names_no_page_fails_the_harvest_and_nothing_else_is_lost() {
        let Some((ring, _slots)) = ring(1) else { return };
        let entry = |at: u32, slot: u32, offset: u64| ring.lock().rings[0].map.fill(at, 1, slot, offset);
        entry(0, 0, 5);
        entry(1, 0, 131);
        entry(2, 1, u64::MAX);
        // Not our slots: past the last, and in the address space of system management mode.
        entry(3, 2, 0);
        entry(4, 1 << 16, 0);
        entry(5, 1, 0);
        // A vCPU is none the worse for it.
        ring.on_full().unwrap();
        let text = ring.harvest().unwrap_err().to_string();
        assert!(
            text.contains("vCPU 0 names page 131 of memory slot 0, which has 131"),
            "{text}"
        );
        assert_eq!(pages(&ring), [r(5, 1), r(1000, 1)]);
    }

    #[test]
    fn a_ring_that_was_overrun_fails_every_harvest() {
        let Some((ring, slots)) = ring(2) else { return };
        for at in 0..ring.entries - 1 {
            ring.lock().rings[1].map.fill(at, 1, 0, u64::from(at % 131));
        }
        assert_eq!(pages(&ring), [r(0, 131)], "a ring with room left is none");
        for at in 0..ring.entries {
            ring.lock().rings[1].map.fill(at, 1, 0, 0);
        }
        for _ in 0..2 {
            let text = ring.harvest().unwrap_err().to_string();
            assert!(text.contains("vCPU 1"), "{text}");
            assert!(ring.on_full().is_err(), "its vCPU would come back for ever");
        }
        let mut tracker = crate::trackers::KvmRingTracker::new(&slots, &ring).unwrap();
        assert!(machine::DirtyTracker::start(&mut tracker).is_err());
    }
}
