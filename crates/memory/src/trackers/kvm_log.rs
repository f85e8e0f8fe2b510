//! `KVM_GET_DIRTY_LOG`: reads a slot's bitmap, clears it and protects its pages, all in one call.
//!
//! Every KVM has it. Switching it on protects all of RAM at once, and a harvest holds KVM's MMU lock for a whole slot:
//! [`super::KvmManualTracker`] is easier on the guest.
//!
//! The log cannot be looked at without being cleared, so a peek moves it into ours, where the next harvest finds it.

use crate::kvm::{KvmSlots, Watch};
use machine::{DirtyTracker, Result};
use pages::{PageRange, PageSet};
use std::sync::Arc;

/// A tracker of what vCPUs write, by reading KVM's dirty log, and of what the VMM writes.
#[derive(Debug)]
pub struct KvmLogTracker {
    watch: Watch,
}

impl KvmLogTracker {
    /// A tracker, off.
    pub fn new(slots: &Arc<KvmSlots>) -> Self {
        KvmLogTracker {
            watch: Watch::new(slots, 0),
        }
    }

    /// Takes what KVM has noted, and protects it.
    fn collect(&self) -> crate::Result<PageSet> {
        let mut dirty = PageSet::empty(self.watch.layout());
        for (slot, pages) in self.watch.slots().all() {
            if let Err(error) = self.watch.slots().read_log(slot, pages, &mut dirty) {
                // KVM has forgotten these; without this nobody would ever hear of them.
                self.watch.keep(&dirty);
                return Err(error);
            }
        }
        Ok(dirty)
    }
}

impl DirtyTracker for KvmLogTracker {
    fn start(&mut self) -> Result<()> {
        self.watch.begin()?;
        if let Err(error) = self.collect() {
            super::end_after_error(&mut self.watch);
            return Err(error.into());
        }
        self.watch.own().pages().clear();
        Ok(())
    }

    fn harvest(&mut self) -> Result<PageSet> {
        self.watch.check_on()?;
        let mut dirty = self.collect()?;
        self.watch.own().pages().take(&mut dirty);
        Ok(dirty)
    }

    fn give_back(&mut self, pages: &PageSet) -> Result<()> {
        self.watch.give_back(pages)
    }

    fn peek(&mut self, range: PageRange) -> Result<Option<u64>> {
        if self.watch.is_on() {
            let dirty = self.collect()?;
            self.watch.keep(&dirty);
        }
        Ok(Some(self.watch.own().pages().count(range)))
    }

    fn stop(&mut self) -> Result<()> {
        Ok(self.watch.end()?)
    }
}
