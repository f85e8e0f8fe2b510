//! Which pages were written.

use crate::Result;
use pages::{PageRange, PageSet};

/// A log of written pages.
///
/// The discipline, which every implementation and the engine's `give_back` rest on: **reading a log destroys it**. What
/// `harvest` returned is known to its caller alone. If the migration then fails, the caller owes it back, because
/// somebody else (a second migration, a snapshot) may read the log after us and must see those pages.
///
/// Every write counts, whoever makes it: vCPUs, and the VMM's own devices (used rings, statistics, discards that change
/// what a page reads as). A page that was written and is missing from a harvest is a lost byte; one too many is only
/// bandwidth.
pub trait DirtyTracker: Send {
    /// Turns tracking on. When this has returned, every later write will be in a harvest. Calling it while tracking is
    /// on starts over: earlier writes are forgotten.
    fn start(&mut self) -> Result<()>;

    /// Returns the pages written since `start`, or since the harvest before, and forgets them. **Destructive.** A write
    /// that races with it is in this harvest or in the next one, never in neither.
    fn harvest(&mut self) -> Result<PageSet>;

    /// Puts pages back that a harvest took: the next harvest returns them again, whoever makes it. Owed where the log is
    /// not ours alone; an implementation whose log ends with `stop` keeps them until then.
    fn give_back(&mut self, pages: &PageSet) -> Result<()>;

    /// How many pages of `range` were written since `start` or the last harvest, without forgetting them; `None` if
    /// this tracker cannot tell. The engine looks at answers to its question with this: a guest that writes what it
    /// hands over (`init_on_alloc`) is better not asked.
    fn peek(&mut self, range: PageRange) -> Result<Option<u64>> {
        let _ = range;
        Ok(None)
    }

    /// Turns tracking off, and lets go of what it cost the guest. Fine to call when it is off.
    fn stop(&mut self) -> Result<()>;
}
