//! The seams between the VM, its vCPUs and its board, so that each can be built and tested without the others.

use crate::{Ended, Error, Result};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use vmm_sys_util::eventfd::EventFd;

/// What the board needs of the VM. Implemented by `kvm::Vm`, and by a mock in the board's tests.
pub(crate) trait Wiring {
    /// An eventfd whose write raises interrupt `gsi` as an edge.
    fn irq(&self, gsi: u32) -> Result<EventFd>;

    /// Has a 4-byte write of `value` to guest-physical `address` signal `bell` in place of an exit. The VM keeps no
    /// reference to it.
    fn doorbell(&self, bell: &EventFd, address: u64, value: u32) -> Result<()>;
}

/// Who answers a vCPU's accesses to ports and to addresses that are not RAM. Called from vCPU threads. Accesses to what
/// nobody answers read as all ones, and writes to it are lost, as on a PC.
pub(crate) trait Exits: Send + Sync {
    /// A read of `data.len()` bytes (1, 2 or 4) from a port.
    fn port_read(&self, port: u16, data: &mut [u8]);
    /// A write to a port.
    fn port_write(&self, port: u16, data: &[u8]);
    /// A read of 1 to 8 bytes from guest-physical memory that is not RAM.
    fn memory_read(&self, address: u64, data: &mut [u8]);
    /// A write there.
    fn memory_write(&self, address: u64, data: &[u8]);
}

/// How the guest ended, if it has: told once, by whoever finds out first (a device, a vCPU), and awaited by all. Clones
/// share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ending(Arc<EndingInner>);

#[derive(Default)]
struct EndingInner {
    how: Mutex<Option<Ended>>,
    told: Condvar,
    stop: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for EndingInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ending").field("how", &self.how).finish_non_exhaustive()
    }
}

impl Ending {
    /// Tells how the guest ended, unless that is known already. A vCPU thread looks at it after every exit and stops; it
    /// does not acknowledge anything by that: a pause of an ended guest still finds every vCPU parked.
    pub(crate) fn tell(&self, how: Ended) {
        let mut known = self.0.how.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_some() {
            return;
        }
        tracing::info!(%how, "the guest ended");
        *known = Some(how);
        self.0.told.notify_all();
        drop(known);
        if let Some(stop) = self.0.stop.get() {
            stop();
        }
    }

    /// Has `stop` called when the guest ends, from whatever thread tells it: it kicks the vCPUs. For one owner, once.
    pub(crate) fn on_told(&self, stop: impl Fn() + Send + Sync + 'static) {
        if self.0.stop.set(Box::new(stop)).is_err() {
            tracing::error!("the end of a guest is watched twice");
        }
    }

    /// The same with an error.
    pub(crate) fn fail(&self, error: Error) {
        self.tell(Ended::Failed(Arc::new(error)));
    }

    /// How it ended, if it has.
    pub(crate) fn get(&self) -> Option<Ended> {
        self.0.how.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until it has ended, or for `time`.
    pub(crate) fn wait(&self, time: Duration) -> Option<Ended> {
        let known = self.0.how.lock().unwrap_or_else(PoisonError::into_inner);
        let (known, _) = self
            .0
            .told
            .wait_timeout_while(known, time, |how| how.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        known.clone()
    }
}
