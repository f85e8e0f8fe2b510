//! Where a benchmark looks into a guest, and where it puts a device or a host of its own in place of ours.

use balloon::{Interrupts, SharedBalloon};
use memory::GuestMemory;
use pages::PageRange;
use std::time::Duration;

use crate::Ram;

/// What of the driver's work is told apart from talking to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Pages are allocated and put into the balloon's list.
    Allocate,
    /// Pages are taken from the balloon's list and freed.
    Free,
}

/// What happens at these places; by default, what happens in any guest.
///
/// Everything is called from the guest's own threads, so it must not panic and not wait for the guest.
pub trait Hooks: Send + Sync {
    /// The driver was busy with `work` for `time`.
    fn worked(&self, work: Work, time: Duration) {
        let _ = (work, time);
    }

    /// Gives `ranges` of `ram` back to the host, and tells `done` of each.
    fn discard(&self, ram: &GuestMemory, ranges: &[PageRange], done: &mut dyn FnMut(PageRange, machine::Result<()>)) {
        ram.discard_all(ranges, &mut |range, result| done(range, result.map_err(Into::into)));
    }

    /// Serves a kick of queue `queue`; an interrupt says to the guest that buffers were used.
    fn kicked(&self, device: &SharedBalloon<Ram>, interrupts: &dyn Interrupts, queue: u16) {
        // The device has interrupts of its own.
        let _ = interrupts;
        device.lock().notify(queue);
    }
}

/// Any guest.
pub(crate) struct Plain;

impl Hooks for Plain {}
