//! A bitmap that the VMM marks itself, for guests whose every write the VMM makes (an emulator, a test).

use crate::atomic_pages::AtomicPages;
use machine::{DirtyTracker, Result};
use pages::{Layout, PageRange, PageSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A tracker that knows what its [`DirtyMarker`]s were told.
#[derive(Debug)]
pub struct BitmapTracker {
    log: Arc<Log>,
}

/// Marks pages as written. Cheap to clone; any thread may mark.
#[derive(Clone, Debug)]
pub struct DirtyMarker {
    log: Arc<Log>,
}

#[derive(Debug)]
struct Log {
    on: AtomicBool,
    pages: AtomicPages,
}

impl BitmapTracker {
    /// A tracker for RAM of this layout, off.
    pub fn new(layout: &Arc<Layout>) -> Self {
        BitmapTracker {
            log: Arc::new(Log {
                on: AtomicBool::new(false),
                pages: AtomicPages::new(layout),
            }),
        }
    }

    /// A handle for whoever writes guest RAM.
    pub fn marker(&self) -> DirtyMarker {
        DirtyMarker {
            log: Arc::clone(&self.log),
        }
    }
}

impl DirtyMarker {
    /// Notes that the RAM pages of `range` were written. Call it **after** the write: a harvest between a mark and its
    /// write would take the mark, and the page would be read too early. Does nothing while tracking is off.
    pub fn mark(&self, range: PageRange) {
        if self.log.on.load(Ordering::Acquire) {
            self.log.pages.insert(range);
        }
    }
}

impl DirtyTracker for BitmapTracker {
    fn start(&mut self) -> Result<()> {
        self.log.pages.clear();
        self.log.on.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn harvest(&mut self) -> Result<PageSet> {
        let mut dirty = PageSet::empty(self.log.pages.layout());
        self.log.pages.take(&mut dirty);
        Ok(dirty)
    }

    fn give_back(&mut self, pages: &PageSet) -> Result<()> {
        super::check_layout(pages, self.log.pages.layout())?;
        for run in pages.runs() {
            self.log.pages.insert(run);
        }
        Ok(())
    }

    fn peek(&mut self, range: PageRange) -> Result<Option<u64>> {
        Ok(Some(self.log.pages.count(range)))
    }

    fn stop(&mut self) -> Result<()> {
        self.log.on.store(false, Ordering::SeqCst);
        self.log.pages.clear();
        Ok(())
    }
}
