//! KVM's dirty ring: a harvest costs as much as was written, not as there is RAM. See [`KvmRing`] for its protocol.

use crate::error::Error;
use crate::kvm::{KvmRing, KvmSlots, Watch};
use machine::{DirtyTracker, Result};
use pages::{PageRange, PageSet};
use std::sync::Arc;

/// A tracker of what vCPUs write, by their dirty rings, and of what the VMM writes.
#[derive(Debug)]
pub struct KvmRingTracker {
    watch: Watch,
    ring: Arc<KvmRing>,
}

impl KvmRingTracker {
    /// A tracker, off. Every vCPU has to be in `ring` before it runs ([`KvmRing::add_vcpu`]).
    ///
    /// # Errors
    /// [`Error::NoTracking`] if slots and rings are of different VMs.
    pub fn new(slots: &Arc<KvmSlots>, ring: &Arc<KvmRing>) -> crate::Result<Self> {
        if !Arc::ptr_eq(slots.vm(), ring.vm()) {
            return Err(Error::NoTracking("the dirty rings are of another VM".to_owned()));
        }
        ring.attach(slots);
        Ok(KvmRingTracker {
            // Not initially all set: nothing would be protected, and so nothing be put into a ring.
            watch: Watch::new(slots, 0),
            ring: Arc::clone(ring),
        })
    }
}

impl DirtyTracker for KvmRingTracker {
    fn start(&mut self) -> Result<()> {
        self.watch.begin()?;
        if let Err(error) = self.ring.harvest() {
            super::end_after_error(&mut self.watch);
            return Err(error.into());
        }
        self.watch.own().pages().clear();
        Ok(())
    }

    fn harvest(&mut self) -> Result<PageSet> {
        self.watch.check_on()?;
        // What fails here stays with the ring.
        let mut dirty = self
            .ring
            .harvest()?
            .unwrap_or_else(|| PageSet::empty(self.watch.layout()));
        self.watch.own().pages().take(&mut dirty);
        Ok(dirty)
    }

    fn give_back(&mut self, pages: &PageSet) -> Result<()> {
        self.watch.give_back(pages)
    }

    fn peek(&mut self, range: PageRange) -> Result<Option<u64>> {
        let mut dirty = PageSet::empty(self.watch.layout());
        if self.watch.is_on() {
            self.ring.peek(range, &mut dirty)?;
        }
        self.watch.own().pages().copy(range, &mut dirty);
        Ok(Some(dirty.count()))
    }

    fn stop(&mut self) -> Result<()> {
        let was_on = self.watch.is_on();
        let off = self.watch.end();
        if was_on {
            // What is left in the rings would fill them, and is nobody's any more.
            self.ring.harvest()?;
        }
        Ok(off?)
    }
}
