//! Write tracking by userfaultfd's asynchronous write protection and `PAGEMAP_SCAN`.
//!
//! The page table holds the log: a page is *written* while its entry lacks the write-protect bit. A harvest reads and
//! protects in one pass, entry by entry under the kernel's lock, so a racing write is in this harvest or in the next.
//! Whoever writes through our mapping is seen: vCPUs (KVM's own tables follow ours), threads, system calls. Writes
//! through another mapping of a shared file are not.
//!
//! **What has no page.** By default a page without an entry is left alone: once it gets one, by a write, that entry lacks
//! the bit and so is written. Arming then costs as much as there is memory, not as there is RAM. That is right as long as
//! an entry, once there, stays; a *shared* mapping can lose entries whose page was written: to reclaim (swap, a disk's
//! write-back), or where a file's huge page is split. There everything is protected, what has no page too, by markers in
//! the page table, and an entry that is gone counts as written. See [`Unpopulated`].
//!
//! **Huge pages.** A protected huge page is split by its first write, and only the 4 KiB page of that write is written.
//! A huge page that a write populates is written as a whole.

use crate::error::{Error, Result};
use crate::populate::mem_field;
use crate::ram::GuestMemory;
use crate::sys::pagemap::{PFNZERO, PRESENT, Pagemap, SWAPPED, WRITTEN, Wanted};
use crate::sys::uffd::Uffd;
use crate::write_log::WriteLog;
use machine::DirtyTracker;
use pages::{PageRange, PageSet};
use std::sync::Arc;

/// What to do with RAM that has no page when tracking starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unpopulated {
    /// Nothing: it shows up as written when a write populates it.
    Leave,
    /// Protect it too, by markers. Costs 8 bytes of page table and about 35 ns a page of RAM.
    Protect,
}

/// A tracker that sees every write through the mapping of a [`GuestMemory`].
#[derive(Debug)]
pub struct UffdTracker {
    memory: Arc<GuestMemory>,
    unpopulated: Unpopulated,
    /// What the page table does not tell: discards, and pages given back.
    log: WriteLog,
    /// `Some` while tracking is on.
    uffd: Option<Uffd>,
}

impl UffdTracker {
    /// A tracker, off.
    ///
    /// # Errors
    /// [`Error::NoTracking`] where the kernel is older than 6.7 or does not let this process use userfaultfd.
    pub fn new(memory: &Arc<GuestMemory>) -> Result<Self> {
        let unpopulated = unpopulated_for(memory)?;
        Self::with_unpopulated(memory, unpopulated)
    }

    /// The same with a choice of what to do about RAM without pages. [`Unpopulated::Leave`] loses writes on shared
    /// memory that can be reclaimed.
    pub fn with_unpopulated(memory: &Arc<GuestMemory>, unpopulated: Unpopulated) -> Result<Self> {
        if memory.pagemap.is_none() {
            return Err(Error::NoTracking("/proc/self/pagemap cannot be opened".to_owned()));
        }
        // Opened once to find out now, rather than when the migration starts, whether it can be.
        open_uffd()?;
        Ok(UffdTracker {
            memory: Arc::clone(memory),
            unpopulated,
            log: memory.write_log(),
            uffd: None,
        })
    }

    /// Scans `range` (of one region) for written pages, and protects them too if `protect`.
    fn scan(&self, range: PageRange, protect: bool, dirty: &mut PageSet) -> Result<()> {
        let pagemap = self.pagemap()?;
        let mut add = |run: PageRange| {
            dirty.insert_range(run);
        };
        match self.unpopulated {
            // The zero page is what a read put there: nobody wrote it.
            Unpopulated::Leave => {
                let wanted = Wanted {
                    all: WRITTEN,
                    none: PFNZERO,
                    any: PRESENT | SWAPPED,
                    protect,
                };
                self.memory.scan(pagemap, range, wanted, &mut add)
            }
            Unpopulated::Protect => {
                // Asked for in just this form, the kernel counts an empty entry as written and puts a marker there.
                let entries = Wanted {
                    all: WRITTEN,
                    none: 0,
                    any: 0,
                    protect,
                };
                self.memory.scan(pagemap, range, entries, &mut add)?;
                // But a table of entries that is gone as a whole, as splitting a file's huge page may leave it, has no
                // entry to count: hence a second pass, for what is nothing at all. A precaution: on Linux 6.18 the
                // tests pass without.
                if !self.memory.storage.huge_folios && self.memory.storage.in_ram {
                    return Ok(());
                }
                let gone = Wanted {
                    all: 0,
                    none: WRITTEN | PRESENT | SWAPPED,
                    any: 0,
                    protect,
                };
                self.memory.scan(pagemap, range, gone, &mut add)
            }
        }
    }

    fn pagemap(&self) -> Result<&Pagemap> {
        let missing = || Error::NoTracking("/proc/self/pagemap is not open".to_owned());
        self.memory.pagemap.as_ref().ok_or_else(missing)
    }

    /// Protects everything that must be, forgetting what was written.
    fn arm(&self, uffd: &Uffd) -> Result<()> {
        // What is forgotten here goes nowhere.
        let mut earlier = PageSet::empty(self.memory.layout());
        for region in self.memory.layout().regions() {
            match self.unpopulated {
                Unpopulated::Leave => self.scan(*region, true, &mut earlier)?,
                Unpopulated::Protect => uffd
                    .protect(self.memory.place(*region)?.addr, region.bytes())
                    .map_err(|e| Error::sys(format!("write-protecting pages {region}"), e))?,
            }
        }
        Ok(())
    }

    fn put_back(&self, pages: &PageSet) {
        for run in pages.runs() {
            self.log.pages().insert(run);
        }
    }
}

impl DirtyTracker for UffdTracker {
    fn start(&mut self) -> machine::Result<()> {
        self.log.pages().clear();
        if let Some(uffd) = &self.uffd {
            return Ok(self.arm(uffd)?);
        }
        let uffd = open_uffd()?;
        for region in self.memory.layout().regions() {
            let addr = self.memory.place(*region)?.addr;
            uffd.register(addr, region.bytes()).map_err(|e| {
                let doing = format!("tracking writes to pages {region} (does another tracker watch them?)");
                Error::sys(doing, e)
            })?;
        }
        self.arm(&uffd)?;
        self.uffd = Some(uffd);
        Ok(())
    }

    fn harvest(&mut self) -> machine::Result<PageSet> {
        if self.uffd.is_none() {
            return Err(machine::Error::Refused(
                "harvesting the dirty log: tracking is off, start it first".to_owned(),
            ));
        }
        let mut dirty = PageSet::empty(self.memory.layout());
        for region in self.memory.layout().regions() {
            if let Err(error) = self.scan(*region, true, &mut dirty) {
                // These are protected already; without this nobody would ever hear of them.
                self.put_back(&dirty);
                return Err(error.into());
            }
        }
        self.log.pages().take(&mut dirty);
        Ok(dirty)
    }

    fn give_back(&mut self, pages: &PageSet) -> machine::Result<()> {
        super::check_layout(pages, self.memory.layout())?;
        self.put_back(pages);
        Ok(())
    }

    fn peek(&mut self, range: PageRange) -> machine::Result<Option<u64>> {
        if self.uffd.is_none() {
            return Ok(Some(0));
        }
        let layout = Arc::clone(self.memory.layout());
        let mut dirty = PageSet::empty(&layout);
        for part in layout.clip(range) {
            self.scan(part, false, &mut dirty)?;
            self.log.pages().copy(part, &mut dirty);
        }
        Ok(Some(dirty.count()))
    }

    fn stop(&mut self) -> machine::Result<()> {
        // Closing it takes the protection off everything.
        self.uffd = None;
        self.log.pages().clear();
        Ok(())
    }
}

fn open_uffd() -> Result<Uffd> {
    Uffd::open().map_err(|e| {
        Error::NoTracking(format!(
            "userfaultfd with asynchronous write protection: {e} (Linux 6.7 or newer is needed, and a sandbox that allows it)"
        ))
    })
}

/// What `memory` needs: see the module's text.
fn unpopulated_for(memory: &GuestMemory) -> Result<Unpopulated> {
    if !memory.storage.loses_entries {
        return Ok(Unpopulated::Leave);
    }
    if memory.storage.in_ram && !memory.storage.huge_folios {
        // tmpfs and memfds lose entries to swap alone.
        let text = std::fs::read_to_string("/proc/meminfo").map_err(|e| Error::sys("reading /proc/meminfo", e))?;
        if mem_field(&text, "SwapTotal:") == Some(0) {
            return Ok(Unpopulated::Leave);
        }
    }
    Ok(Unpopulated::Protect)
}
