//! The built-in guest's own side: beside what the library needs of it, it can say whether its memory is what it wrote.

use crate::{Error, GuestReport, Signals};
use memory::trackers::UffdTracker;
use pageferry::Guest;
use pages::Pfn;
use softguest::SoftGuest;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a guest runs between looks for a signal.
const SLICE: Duration = Duration::from_millis(100);

/// Pages that [`SoftSlot::flip_bytes`] breaks.
const FLIPPED_PAGES: u64 = 256;

/// Where the built-in guest can be found, if there is one. Clones share it.
#[derive(Clone, Default)]
pub struct SoftSlot(Arc<Mutex<Option<SoftGuest>>>);

impl fmt::Debug for SoftSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SoftSlot").field(&self.get().is_some()).finish()
    }
}

/// What a guest found when it checked itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelfChecked {
    result: Result<u64, String>,
}

impl SelfChecked {
    /// For the report; `ticks` as [`SoftSlot::run`] gave it.
    pub fn report(&self, ticks: u64) -> GuestReport {
        GuestReport {
            self_check: Some(if self.result.is_ok() { "passed" } else { "failed" }),
            pages_checked: self.result.as_ref().map_or(0, |&pages| pages),
            ticks,
        }
    }

    /// The pages that it checked; else what it found broken.
    ///
    /// # Errors
    /// The guest's own sentence.
    pub fn passed(self) -> Result<u64, String> {
        self.result
    }
}

impl SoftSlot {
    /// Takes a guest in, and gives what the library needs of it.
    pub(crate) fn put(&self, soft: SoftGuest) -> Result<Guest, Error> {
        let parts = soft.parts();
        let tracker = UffdTracker::new(&parts.ram).map_err(|error| Error::Refused(error.to_string()))?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(soft);
        Ok(Guest {
            ram: parts.ram,
            tracker: Box::new(tracker),
            free_pages: parts.free_pages,
            machine: parts.machine,
        })
    }

    /// Lets go of the guest; it is switched off with its last handle.
    pub fn clear(&self) {
        let before = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Outside of the lock: its threads are waited for.
        drop(before);
    }

    fn get(&self) -> Option<SoftGuest> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets the guest check every page that it uses; `None` without a guest.
    pub fn self_check(&self) -> Option<SelfChecked> {
        let result = self.get()?.self_check().map(|check| check.pages_checked);
        Some(SelfChecked {
            result: result.map_err(|error| error.to_string()),
        })
    }

    /// Lets the running guest run on for `time` (`None`: without end) or until a signal comes. Gives how often its own
    /// clock ticked in that time: 0 for a guest that does not run, or that found its memory broken and stopped.
    ///
    /// # Errors
    /// [`Error::Failed`] where a thread died.
    pub async fn run(&self, time: Option<Duration>, signals: &mut Signals) -> Result<u64, Error> {
        let began = Instant::now();
        let mut ticks = 0;
        while let Some(guest) = self.get() {
            let left = time.map_or(SLICE, |time| time.saturating_sub(began.elapsed()));
            if left.is_zero() {
                break;
            }
            let slice = tokio::task::spawn_blocking(move || guest.run_for(left.min(SLICE)));
            match slice
                .await
                .map_err(|died| Error::Failed(format!("a thread of the guest died: {died}")))?
            {
                Ok(more) => ticks += more,
                // What is wrong with it, its self-check says.
                Err(error) => {
                    tracing::warn!("the guest does not run on: {error}");
                    break;
                }
            }
            if signals.pending() {
                break;
            }
        }
        Ok(ticks)
    }

    /// Breaks pages that the guest uses: a stretch of them, for one that it happens to write anew is whole again. For
    /// tests of the checks.
    pub(crate) fn flip_bytes(&self) -> machine::Result<()> {
        let Some(guest) = self.get() else {
            return Err(machine::Error::Refused(
                "there is no built-in guest to corrupt".to_owned(),
            ));
        };
        let first = guest.used_page()?;
        for page in first.0..first.0 + FLIPPED_PAGES {
            guest.flip_byte(Pfn(page))?;
        }
        tracing::warn!("{FLIPPED_PAGES} pages were corrupted, as --corrupt-page says");
        Ok(())
    }
}
