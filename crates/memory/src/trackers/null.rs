//! For a guest that does not run: nothing is ever written.

use machine::{DirtyTracker, Result};
use pages::{Layout, PageRange, PageSet};
use std::sync::Arc;

/// A tracker for a paused guest whose RAM lies in a file. All harvests are empty, but for what was given back.
#[derive(Debug)]
pub struct NullTracker {
    returned: PageSet,
}

impl NullTracker {
    /// A tracker for RAM of this layout.
    pub fn new(layout: &Arc<Layout>) -> Self {
        NullTracker {
            returned: PageSet::empty(layout),
        }
    }
}

impl DirtyTracker for NullTracker {
    fn start(&mut self) -> Result<()> {
        self.returned.clear();
        Ok(())
    }

    fn harvest(&mut self) -> Result<PageSet> {
        let empty = PageSet::empty(self.returned.layout());
        Ok(std::mem::replace(&mut self.returned, empty))
    }

    fn give_back(&mut self, pages: &PageSet) -> Result<()> {
        super::check_layout(pages, self.returned.layout())?;
        self.returned.union_with(pages);
        Ok(())
    }

    fn peek(&mut self, range: PageRange) -> Result<Option<u64>> {
        Ok(Some(self.returned.count_range(range)))
    }

    fn stop(&mut self) -> Result<()> {
        self.returned.clear();
        Ok(())
    }
}
