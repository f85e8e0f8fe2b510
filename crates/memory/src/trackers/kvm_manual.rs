//! KVM's manual dirty log protection: `KVM_GET_DIRTY_LOG` only reads, `KVM_CLEAR_DIRTY_LOG` clears what it is told to and
//! protects those pages.
//!
//! A harvest reads, then clears exactly what it read. A page written in between was in what was read, and is read by the
//! caller after this write; or it was not, and then it is not cleared.
//!
//! **Initially all set.** Where KVM has it, switching the log on protects nothing, which for a large guest would hold up its
//! vCPUs; everything counts as dirty instead. `start` clears all of it, piece by piece, *before* it returns: were that left
//! to later clears (of pages that the balloon called free, say), a clear could swallow a write.

use crate::error::Error;
use crate::kvm::{KvmSlots, Watch, capabilities};
use crate::sys::size;
use kvm_bindings::{KVM_DIRTY_LOG_INITIALLY_SET, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE};
use machine::{DirtyTracker, Result};
use pages::{PageRange, PageSet};
use std::sync::Arc;

/// A tracker of what vCPUs write, by KVM's dirty log with manual protection, and of what the VMM writes.
#[derive(Debug)]
pub struct KvmManualTracker {
    watch: Watch,
}

impl KvmManualTracker {
    /// A tracker, off.
    ///
    /// # Errors
    /// [`Error::NoTracking`] where KVM does not have it.
    pub fn new(slots: &Arc<KvmSlots>) -> crate::Result<Self> {
        let host = capabilities(slots.vm());
        if !host.manual_protect {
            return Err(Error::NoTracking(
                "its KVM has no manual dirty log protection (Linux 5.1 or newer is needed)".to_owned(),
            ));
        }
        let all_set = if host.initially_set {
            KVM_DIRTY_LOG_INITIALLY_SET
        } else {
            0
        };
        Ok(KvmManualTracker {
            watch: Watch::new(slots, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | all_set),
        })
    }

    /// Clears everything.
    fn forget(&self) -> crate::Result<()> {
        for (slot, pages) in self.watch.slots().all() {
            let all = vec![u64::MAX; size(pages.count().div_ceil(64))];
            self.watch.slots().clear_log(slot, pages, &all)?;
        }
        self.watch.own().pages().clear();
        Ok(())
    }

    fn collect(&self, dirty: &mut PageSet) -> crate::Result<()> {
        for (slot, pages) in self.watch.slots().all() {
            let read = self.watch.slots().read_log(slot, pages, dirty)?;
            self.watch.slots().clear_log(slot, pages, &read)?;
        }
        Ok(())
    }
}

impl DirtyTracker for KvmManualTracker {
    fn start(&mut self) -> Result<()> {
        self.watch.begin()?;
        if let Err(error) = self.forget() {
            super::end_after_error(&mut self.watch);
            return Err(error.into());
        }
        Ok(())
    }

    fn harvest(&mut self) -> Result<PageSet> {
        self.watch.check_on()?;
        let mut dirty = PageSet::empty(self.watch.layout());
        if let Err(error) = self.collect(&mut dirty) {
            // Some of these are cleared already; without this nobody would ever hear of them.
            self.watch.keep(&dirty);
            return Err(error.into());
        }
        self.watch.own().pages().take(&mut dirty);
        Ok(dirty)
    }

    fn give_back(&mut self, pages: &PageSet) -> Result<()> {
        self.watch.give_back(pages)
    }

    fn peek(&mut self, range: PageRange) -> Result<Option<u64>> {
        let mut dirty = PageSet::empty(self.watch.layout());
        self.watch.own().pages().copy(range, &mut dirty);
        let near = |pages: PageRange| self.watch.is_on() && !pages.intersection(range).is_empty();
        for (slot, pages) in self.watch.slots().all().filter(|(_, pages)| near(*pages)) {
            // This only reads.
            self.watch.slots().read_log(slot, pages, &mut dirty)?;
        }
        Ok(Some(dirty.count_range(range)))
    }

    fn stop(&mut self) -> Result<()> {
        Ok(self.watch.end()?)
    }
}
