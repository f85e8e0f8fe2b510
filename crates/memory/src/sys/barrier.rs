//! A memory barrier in every thread of this process, paid for by the one who asks.

use rustix::thread::{MembarrierCommand, membarrier};
use std::io;

/// Once this has returned, whatever another thread did before has been seen by all, or what we did before is seen by
/// whatever it does next. `membarrier(2)`, Linux 4.14.
pub(crate) fn in_all_threads() -> io::Result<()> {
    // Registering again costs nothing.
    membarrier(MembarrierCommand::RegisterPrivateExpedited)?;
    membarrier(MembarrierCommand::PrivateExpedited)?;
    Ok(())
}
