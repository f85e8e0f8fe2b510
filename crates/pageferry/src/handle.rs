//! Starting a migration, and watching, cancelling and awaiting it.

use crate::{Address, Guest, Incoming, Listener, ReceiveOptions, SendOptions, destination, report, source};
use engine::{Outcome, Progress, Role, Tuning};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// Starts migrations.
#[derive(Clone, Copy, Debug)]
pub struct Migration;

impl Migration {
    /// Sends `guest` to the receiver at `to`. Returns at once; the migration runs on the current tokio runtime and on
    /// threads of its own. Its clock starts here.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn send(guest: Guest, to: &Address, options: SendOptions) -> Handle {
        let (watch, started, to) = (Watch::default(), Instant::now(), to.clone());
        let inner = watch.clone();
        let task = tokio::spawn(async move { source::run(guest, to, options, inner, started).await });
        Handle {
            watch,
            task,
            role: Role::Source,
        }
    }

    /// Waits on `listener` for one guest and takes it. `prepare` is called with what the source asks for and returns a
    /// paused machine like that, or the reasons why there is none; it is called once a source that comes (a source that
    /// only asks, with `dry_run`, is answered, and the next one awaited), on a thread that may block. It does well to
    /// check the description before it touches anything that cannot be had back.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn receive<F>(listener: Listener, options: ReceiveOptions, prepare: F) -> Handle
    where
        F: FnMut(&Incoming) -> Result<Guest, Vec<String>> + Send + 'static,
    {
        let watch = Watch::default();
        let inner = watch.clone();
        let task = tokio::spawn(async move { destination::run(listener, options, Box::new(prepare), inner).await });
        Handle {
            watch,
            task,
            role: Role::Receiver,
        }
    }
}

/// The end of a migration.
#[derive(Debug)]
pub struct Finished {
    /// How it ended, why, and its figures.
    pub outcome: Outcome,
    /// The guest. A source gets its own back whatever happened (paused where it was handed over or that is unknown,
    /// else as it was before); `None` only if a thread of the library died. A destination gets the guest that came,
    /// running or paused, and `None` unless it completed.
    pub guest: Option<Guest>,
}

/// A migration under way. Dropping it lets the migration go on unwatched, and its guest is dropped at the end.
#[derive(Debug)]
pub struct Handle {
    watch: Watch,
    task: JoinHandle<Finished>,
    role: Role,
}

impl Handle {
    /// Where it stands.
    pub fn progress(&self) -> Progress {
        self.watch.progress()
    }

    /// Asks for an end; [`Handle::finish`] returns soon after. Without effect once the guest was handed over. May be
    /// called again.
    pub fn cancel(&self) {
        self.watch.cancel.notify_one();
    }

    /// A function that does what [`Handle::cancel`] does, for a signal handler or another thread.
    pub fn canceller(&self) -> impl Fn() + Send + Sync + 'static {
        let cancel = Arc::clone(&self.watch.cancel);
        move || cancel.notify_one()
    }

    /// A function for a process that is about to end and does not wait for [`Handle::finish`]: from then on this side does
    /// not hand the guest over, or take it over, unless it had done so before, which the function tells. It may be called
    /// again. A migration that goes on nevertheless does not complete.
    pub fn abandoner(&self) -> impl Fn() -> Abandoned + Send + Sync + 'static {
        let watch = self.watch.clone();
        move || watch.abandon()
    }

    /// Changes settings of a source while it runs, as of the next round or the next batch; those that it leaves out stay as they
    /// are. Without effect on a destination.
    pub fn tune(&self, tuning: Tuning) {
        self.watch.tune(tuning);
    }

    /// A function that does what [`Handle::tune`] does, for another thread.
    pub fn tuner(&self) -> impl Fn(Tuning) + Send + Sync + 'static {
        let watch = self.watch.clone();
        move |tuning| watch.tune(tuning)
    }

    /// A function that returns what [`Handle::progress`] does, for a progress bar's own task.
    pub fn observer(&self) -> impl Fn() -> Progress + Send + Sync + 'static {
        let watch = self.watch.clone();
        move || watch.progress()
    }

    /// Waits for the end.
    pub async fn finish(self) -> Finished {
        match self.task.await {
            Ok(finished) => finished,
            Err(error) => Finished {
                outcome: report::failed(self.role, format!("the migration's own task died: {error}"), 0.0),
                guest: None,
            },
        }
    }
}

/// Where a migration was when it was abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abandoned {
    /// The guest had not been handed over, and will not be: it is surely the source's.
    Before,
    /// `Commit` had left the source, or come to the destination.
    After,
}

/// What a handle and its migration share.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch {
    progress: Arc<Mutex<Progress>>,
    cancel: Arc<Notify>,
    /// What somebody changed and nobody has heard of yet.
    tuning: Arc<(Mutex<Tuning>, Notify)>,
    /// Unset until `Commit` leaves or comes, or the migration is abandoned: whichever is first.
    fate: Arc<OnceLock<Abandoned>>,
}

impl Watch {
    fn progress(&self) -> Progress {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn publish(&self, progress: Progress) {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner) = progress;
    }

    /// `Commit` is about to leave, or has come: whether it may be acted upon.
    pub(crate) fn may_commit(&self) -> bool {
        *self.fate.get_or_init(|| Abandoned::After) == Abandoned::After
    }

    fn abandon(&self) -> Abandoned {
        *self.fate.get_or_init(|| Abandoned::Before)
    }

    fn tune(&self, tuning: Tuning) {
        let (pending, told) = &*self.tuning;
        let mut pending = pending.lock().unwrap_or_else(PoisonError::into_inner);
        *pending = pending.then(tuning);
        told.notify_one();
    }

    /// Returns what somebody changes, or has since the last time that this was asked.
    pub(crate) async fn tuned(&self) -> Tuning {
        let (pending, told) = &*self.tuning;
        told.notified().await;
        std::mem::take(&mut *pending.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns when somebody cancels, or has since the last time that this was asked.
    pub(crate) async fn cancelled(&self) {
        self.cancel.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commit_and_abandoning_exclude_each_other() {
        let watch = Watch::default();
        assert_eq!(watch.abandon(), Abandoned::Before);
        assert!(!watch.clone().may_commit());
        let watch = Watch::default();
        assert!(watch.may_commit() && watch.may_commit());
        assert_eq!(watch.clone().abandon(), Abandoned::After);
    }
}
