//! A guest's own side, beside what the library needs of it: its end, its balloon, and whether its memory is what it wrote.

use crate::balloon_controls::BalloonControls;
use crate::{Error, GuestReport, Signals};
use memory::trackers::UffdTracker;
use pageferry::Guest;
use pageferry::control_socket::{GuestControls, NoControls};
use pages::Pfn;
use softguest::SoftGuest;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use vmm::{Ended, LinuxGuest};

/// How long a guest runs between looks for a signal.
const SLICE: Duration = Duration::from_millis(100);

/// Pages that [`GuestSlot::flip_bytes`] breaks.
const FLIPPED_PAGES: u64 = 256;

/// A guest that has a side of its own; one in a file has none.
#[derive(Clone)]
enum Own {
    Soft(SoftGuest),
    Linux(LinuxGuest),
}

/// Where the guest can be found, if there is one. Clones share it.
#[derive(Clone, Default)]
pub struct GuestSlot {
    own: Arc<Mutex<Option<Own>>>,
    /// How often the built-in guest's clock ticked while somebody waited for it.
    ticks: Arc<AtomicU64>,
}

impl fmt::Debug for GuestSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.get() {
            None => "empty",
            Some(Own::Soft(_)) => "soft",
            Some(Own::Linux(_)) => "linux",
        };
        f.debug_tuple("GuestSlot").field(&kind).finish()
    }
}

/// How a guest ended by itself.
#[derive(Clone, Debug)]
pub enum GuestEnd {
    /// A Linux guest's own way.
    Linux(Ended),
    /// The built-in guest found its memory broken, and stopped.
    Broken,
}

/// What a guest found when it checked itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelfChecked {
    result: Result<u64, String>,
}

impl SelfChecked {
    /// For the report; `ticks` as [`GuestSlot::run`] gave it.
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

impl GuestSlot {
    /// Takes the built-in guest in, and gives what the library needs of it.
    pub(crate) fn put_soft(&self, soft: SoftGuest) -> Result<Guest, Error> {
        let parts = soft.parts();
        let tracker = UffdTracker::new(&parts.ram).map_err(|error| Error::Refused(error.to_string()))?;
        self.put(Own::Soft(soft));
        Ok(Guest {
            ram: parts.ram,
            tracker: Box::new(tracker),
            free_pages: parts.free_pages,
            machine: parts.machine,
        })
    }

    /// The same with a Linux guest.
    pub(crate) fn put_linux(&self, linux: LinuxGuest) -> vmm::Result<Guest> {
        let parts = linux.parts()?;
        self.put(Own::Linux(linux));
        Ok(Guest {
            ram: parts.ram,
            tracker: parts.tracker,
            free_pages: parts.free_pages,
            machine: parts.machine,
        })
    }

    fn put(&self, own: Own) {
        *self.own.lock().unwrap_or_else(PoisonError::into_inner) = Some(own);
    }

    /// Lets go of the guest; it is switched off with its last handle.
    pub fn clear(&self) {
        let before = self.own.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Outside of the lock: its threads are waited for.
        drop(before);
    }

    fn get(&self) -> Option<Own> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn soft(&self) -> Option<SoftGuest> {
        match self.get() {
            Some(Own::Soft(soft)) => Some(soft),
            _ => None,
        }
    }

    /// Whether it is a Linux guest.
    pub fn is_linux(&self) -> bool {
        matches!(self.get(), Some(Own::Linux(_)))
    }

    /// Whether there is no guest with a side of its own: none at all, or one in a file, which outlives the command.
    pub fn is_empty(&self) -> bool {
        self.get().is_none()
    }

    /// What a control socket may do to it.
    pub fn controls(&self) -> Arc<dyn GuestControls> {
        match self.get() {
            Some(Own::Soft(soft)) => BalloonControls::of(soft.balloon()),
            Some(Own::Linux(linux)) => BalloonControls::of(linux.balloon()),
            None => Arc::new(NoControls),
        }
    }

    /// Waits until the guest has ended by itself; for ever for one that cannot. Cancel-safe.
    ///
    /// # Errors
    /// [`Error::Failed`] where a thread died.
    pub async fn ended(&self) -> Result<GuestEnd, Error> {
        loop {
            let slice = match self.get() {
                None => {
                    tokio::time::sleep(SLICE).await;
                    continue;
                }
                Some(own) => tokio::task::spawn_blocking(move || own.run_for(SLICE)),
            };
            match slice.await.map_err(died)? {
                Ok(ticks) => self.tick(ticks),
                Err(end) => return Ok(end),
            };
        }
    }

    /// Lets the built-in guest check every page that it uses; `None` of another guest.
    pub fn self_check(&self) -> Option<SelfChecked> {
        let result = self.soft()?.self_check().map(|check| check.pages_checked);
        Some(SelfChecked {
            result: result.map_err(|error| error.to_string()),
        })
    }

    /// Lets the built-in guest run on for `time` (`None`: without end) or until a signal comes. Gives how often its own
    /// clock ticked in that time: 0 for a guest that does not run, or that found its memory broken and stopped. Returns at
    /// once where there is another guest, or none.
    ///
    /// # Errors
    /// [`Error::Failed`] where a thread died.
    pub async fn run(&self, time: Option<Duration>, signals: &mut Signals) -> Result<u64, Error> {
        let began = Instant::now();
        let mut ticks = 0;
        while let Some(guest) = self.soft() {
            let left = time.map_or(SLICE, |time| time.saturating_sub(began.elapsed()));
            if left.is_zero() {
                break;
            }
            let slice = tokio::task::spawn_blocking(move || guest.run_for(left.min(SLICE)));
            match slice.await.map_err(died)? {
                Ok(more) => ticks += self.tick(more),
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

    fn tick(&self, ticks: u64) -> u64 {
        self.ticks.fetch_add(ticks, Ordering::Relaxed);
        ticks
    }

    /// How often the built-in guest's own clock has ticked, as far as somebody waited for it here.
    pub fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// Breaks pages that the guest uses: a stretch of them, for one that it happens to write anew is whole again. For
    /// tests of the checks.
    pub(crate) fn flip_bytes(&self) -> machine::Result<()> {
        let Some(guest) = self.soft() else {
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

impl Own {
    /// How it ended, if it does within `time`; else how often the built-in guest's clock ticked. Blocks.
    fn run_for(self, time: Duration) -> Result<u64, GuestEnd> {
        match self {
            Own::Linux(linux) => linux.ended(time).map_or(Ok(0), |how| Err(GuestEnd::Linux(how))),
            Own::Soft(soft) => match soft.run_for(time) {
                Ok(ticks) => Ok(ticks),
                // By an operator, or a migration.
                Err(softguest::Error::Paused | softguest::Error::NotRestored) => {
                    std::thread::sleep(time);
                    Ok(0)
                }
                Err(error) => {
                    tracing::warn!("the guest does not run on: {error}");
                    Err(GuestEnd::Broken)
                }
            },
        }
    }
}

fn died(died: tokio::task::JoinError) -> Error {
    Error::Failed(format!("a thread of the guest died: {died}"))
}
