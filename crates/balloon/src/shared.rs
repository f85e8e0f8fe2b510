//! A balloon that several threads share: vCPUs that kick, a host that sets targets, a migration that asks.

use crate::Balloon;
use crate::inflate::multiples_of_64;
use machine::{AnswerSink, BalloonCounts, FreePages, GuestMemoryStats};
use pages::{PAGE_BYTES, PageSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vm_memory::GuestAddressSpace;

/// One balloon, many owners. As a [`FreePages`] it asks the guest of the balloon.
pub struct SharedBalloon<M: GuestAddressSpace>(Arc<Mutex<Balloon<M>>>);

impl<M: GuestAddressSpace> SharedBalloon<M> {
    /// Shares `balloon`.
    pub fn new(balloon: Balloon<M>) -> Self {
        SharedBalloon(Arc::new(Mutex::new(balloon)))
    }

    /// The device, for as long as the guard lives. A thread that panicked with the lock held does not stop the others:
    /// the device has no state between two fields that a half-done call could leave dangerous.
    pub fn lock(&self) -> MutexGuard<'_, Balloon<M>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: GuestAddressSpace> Clone for SharedBalloon<M> {
    fn clone(&self) -> Self {
        SharedBalloon(Arc::clone(&self.0))
    }
}

impl<M: GuestAddressSpace + Send> FreePages for SharedBalloon<M> {
    fn dialect(&self) -> &'static str {
        self.lock().config().dialect.name()
    }

    fn can_ask(&self) -> Result<(), String> {
        self.lock().can_ask()
    }

    fn allocates(&self) -> bool {
        self.lock().config().dialect == crate::Dialect::Standard
    }

    /// What the guest last said; asks it for fresh numbers, which a later call finds.
    fn stats(&mut self) -> Option<GuestMemoryStats> {
        let mut balloon = self.lock();
        balloon.request_stats();
        let stats = balloon.stats()?;
        Some(GuestMemoryStats {
            free_pages: stats.free_memory? / PAGE_BYTES,
            total_pages: stats.total_memory? / PAGE_BYTES,
        })
    }

    /// Only of a guest that took MUST_TELL_HOST. Without it a guest may use a page of the balloon again before it says so
    /// (virtio 1.3, section 5.5.6), and a page that was written before tracking began would be taken for ballooned. For
    /// the same reason without the pages that the guest may have taken back silently, one in 64 where buffers carry
    /// bitmaps; see [`Balloon::may_deflate_silently`].
    fn ballooned(&mut self) -> Option<PageSet> {
        let balloon = self.lock();
        if balloon.driver_features() & crate::feature::MUST_TELL_HOST == 0 {
            return None;
        }
        let silent = balloon.may_deflate_silently();
        let mut set = balloon.ballooned().clone();
        drop(balloon);
        if silent {
            set.subtract(&multiples_of_64(&Arc::clone(set.layout())));
        }
        Some(set)
    }

    fn poison(&self) -> Option<u32> {
        self.lock().poison()
    }

    fn begin(&mut self, session: u32, sink: AnswerSink) -> machine::Result<()> {
        Ok(self.lock().begin(session, sink)?)
    }

    fn end(&mut self, session: u32) -> machine::Result<()> {
        self.lock().end(session);
        Ok(())
    }

    fn hold(&mut self, session: u32) -> machine::Result<()> {
        self.lock().hold(session);
        Ok(())
    }

    fn counts(&self) -> BalloonCounts {
        self.lock().counters()
    }
}
