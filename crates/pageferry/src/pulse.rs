//! What both control loops have: a clock, a time-out to sleep to, a cancel to hear, progress to publish.

use crate::handle::Watch;
use engine::{Progress, Time};
use std::time::{Duration, Instant};

/// Progress is published so often at most: making it counts sets of pages.
const PUBLISH_EVERY: Duration = Duration::from_millis(10);

/// How long a data stream's failure is held back for the peer's own words, which come on the control connection.
const GRACE: Duration = Duration::from_millis(500);

/// A loop's clock and its tie to the handle.
#[derive(Debug)]
pub(crate) struct Pulse {
    watch: Watch,
    started: Instant,
    published: Option<Instant>,
}

impl Pulse {
    /// Time counts from `started`.
    pub(crate) fn new(watch: Watch, started: Instant) -> Self {
        Pulse {
            watch,
            started,
            published: None,
        }
    }

    /// The engine's time.
    pub(crate) fn now(&self) -> Time {
        self.started.elapsed()
    }

    /// Returns at `deadline`; never, where there is none.
    pub(crate) async fn until(&self, deadline: Option<Time>) {
        match deadline.and_then(|deadline| self.started.checked_add(deadline)) {
            Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
            None => std::future::pending().await,
        }
    }

    /// Returns when somebody cancels.
    pub(crate) async fn cancelled(&self) {
        self.watch.cancelled().await;
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
