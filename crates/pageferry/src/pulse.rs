//! What both control loops have: a clock, a time-out to sleep to, a cancel to hear, progress to publish.

use crate::handle::Watch;
use engine::{Progress, Time, Tuning};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Progress is published so often at most: making it counts sets of pages.
const PUBLISH_EVERY: Duration = Duration::from_millis(10);

/// How long a data stream's failure is held back for the peer's own words, which come on the control connection.
const GRACE: Duration = Duration::from_millis(500);

/// A time-out that is seen so late was slept over: the process was stopped, or its whole machine was.
const SLEPT: Duration = Duration::from_millis(500);

/// How long what the peer said meanwhile may take to be read.
const AWAKE: Duration = Duration::from_millis(100);

/// A loop's clock and its tie to the handle.
#[derive(Debug)]
pub(crate) struct Pulse {
    watch: Watch,
    started: Instant,
    published: Option<Instant>,
    /// The last time-out that was slept over, and when it counts all the same.
    slept: Mutex<Option<(Time, Instant)>>,
}

impl Pulse {
    /// Time counts from `started`.
    pub(crate) fn new(watch: Watch, started: Instant) -> Self {
        Pulse {
            watch,
            started,
            published: None,
            slept: Mutex::default(),
        }
    }

    /// The engine's time.
    pub(crate) fn now(&self) -> Time {
        self.started.elapsed()
    }

    /// Returns at `deadline`; never, where there is none. One that was slept over passes a moment later, once: the peer's
    /// words lie in the socket then, and are to be heard before its silence is.
    pub(crate) async fn until(&self, deadline: Option<Time>) {
        let Some((deadline, at)) = deadline.and_then(|d| Some((d, self.started.checked_add(d)?))) else {
            return std::future::pending().await;
        };
        tokio::time::sleep_until(at.into()).await;
        if at.elapsed() >= SLEPT {
            tokio::time::sleep_until(self.awake_at(deadline).into()).await;
        }
    }

    /// When `deadline`, which was slept over, counts.
    fn awake_at(&self, deadline: Time) -> Instant {
        let mut slept = self.slept.lock().unwrap_or_else(PoisonError::into_inner);
        let known = slept.filter(|(of, _)| *of == deadline);
        slept
            .insert(known.unwrap_or_else(|| (deadline, Instant::now() + AWAKE)))
            .1
    }

    /// Returns when somebody cancels.
    pub(crate) async fn cancelled(&self) {
        self.watch.cancelled().await;
    }

    /// Returns what somebody changes.
    pub(crate) async fn tuned(&self) -> Tuning {
        self.watch.tuned().await
    }

    /// Whether `Commit` may leave, or be acted upon: not once the migration was abandoned.
    pub(crate) fn may_commit(&self) -> bool {
        self.watch.may_commit()
    }

    /// Publishes progress if the last time was a while ago.
    pub(crate) fn tick(&mut self, progress: impl FnOnce() -> Progress) {
        if self.published.is_none_or(|at| at.elapsed() >= PUBLISH_EVERY) {
            self.publish(progress());
        }
    }

    /// Publishes progress.
    pub(crate) fn publish(&mut self, progress: Progress) {
        self.published = Some(Instant::now());
        self.watch.publish(progress);
    }
}

/// An event that waits for a moment: when a peer fails it closes everything, and its data streams may be seen to break
/// before its reason has come.
#[derive(Debug)]
pub(crate) struct Held<E>(Option<(E, tokio::time::Instant)>);

impl<E> Default for Held<E> {
    fn default() -> Self {
        Held(None)
    }
}

impl<E> Held<E> {
    /// Holds `event`, unless there is one already: the first failure is the cause.
    pub(crate) fn hold(&mut self, event: E) {
        self.0
            .get_or_insert_with(|| (event, tokio::time::Instant::now() + GRACE));
    }

    /// The event, once it has waited long enough.
    pub(crate) async fn due(&mut self) -> E {
        if let Some((_, at)) = &self.0 {
            tokio::time::sleep_until(*at).await;
            if let Some((event, _)) = self.0.take() {
                return event;
            }
        }
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The loop asks anew after each event: a time-out that was slept over waits for the peer's words, but not for ever.
    #[tokio::test]
    async fn a_time_out_that_was_slept_over_passes_a_moment_later_and_once() {
        let started = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
        let pulse = Pulse::new(Watch::default(), started);
        let due = Some(Duration::from_secs(5));
        let passes_at_once = async || {
            tokio::select! {
                biased;
                () = pulse.until(due) => true,
                () = std::future::ready(()) => false,
            }
        };
        assert!(!passes_at_once().await, "the peer's words are not waited for");
        assert!(!passes_at_once().await);
        pulse.until(due).await;
        assert!(passes_at_once().await, "each event puts the time-out off");
        // One that has just passed was not slept over.
        let just = Some(pulse.now());
        pulse.until(just).await;
    }
}
