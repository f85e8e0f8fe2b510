//! The tokio runtime of a command, and the two signals by which an operator stops it.

use crate::{Error, say_stderr};
use pageferry::Abandoned;
use rustix::process::{Resource, getrlimit, setrlimit};
use std::future::Future;
use std::task::{Context, Waker};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Files that a command opens in any case, and a few connections.
const LEAST_FILES: u64 = 64;

/// Files that no command needs more of: what a receiver takes of connections is bounded.
const MOST_FILES: u64 = 4096;

/// Takes the right to as many open files as the machine's administrator allows and a command can use. Before the sandbox, which
/// takes that away.
///
/// # Errors
/// [`Error::Refused`] where they are too few for any migration.
pub fn take_room_for_files() -> Result<(), Error> {
    let mut limit = getrlimit(Resource::Nofile);
    let Some(current) = limit.current.filter(|current| *current < MOST_FILES) else {
        return Ok(());
    };
    let most = limit.maximum.map_or(MOST_FILES, |maximum| maximum.min(MOST_FILES));
    limit.current = Some(most);
    let have = match setrlimit(Resource::Nofile, limit) {
        Ok(()) => most,
        Err(error) => {
            tracing::warn!(%error, "the limit of open files stays at {current}");
            current
        }
    };
    if have < LEAST_FILES {
        return Err(Error::Refused(format!(
            "this process may have {have} files open, and takes {LEAST_FILES} at least: raise the limit (ulimit -n, or \
             LimitNOFILE= of a unit)"
        )));
    }
    Ok(())
}

/// Runs a command's asynchronous part to its end. Work that still blocks then is not waited for: the process is about to
/// exit.
///
/// # Errors
/// What the part returns, and [`Error::Failed`] where there can be no runtime.
pub fn block_on<T>(part: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Error::Failed(format!("starting the threads of the control loop: {error}")))?;
    let result = runtime.block_on(part);
    runtime.shutdown_background();
    result
}

/// What [`Signals::watch`] saw.
#[derive(Debug)]
pub enum Watched<T> {
    /// The end.
    Ended(T),
    /// A second signal: the end is not waited for.
    Left(Abandoned),
}

impl<T> Watched<T> {
    /// The same with another end.
    pub fn map<U>(self, to: impl FnOnce(T) -> U) -> Watched<U> {
        match self {
            Watched::Ended(end) => Watched::Ended(to(end)),
            Watched::Left(abandoned) => Watched::Left(abandoned),
        }
    }
}

/// SIGINT and SIGTERM, caught from the moment this is made.
#[derive(Debug)]
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// One has come. It stays so until [`Signals::forget`].
    came: bool,
}

impl Signals {
    /// Catches both signals. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Failed`] where the kernel refuses.
    pub fn catch() -> Result<Self, Error> {
        let failed = |error| Error::Failed(format!("catching SIGINT and SIGTERM: {error}"));
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt()).map_err(failed)?,
            terminate: signal(SignalKind::terminate()).map_err(failed)?,
            came: false,
        })
    }

    /// Waits for one of them, unless one has come already.
    pub async fn wait(&mut self) {
        if !self.came {
            self.next().await;
        }
    }

    /// Waits for one that has not been heard of yet.
    pub async fn again(&mut self) {
        self.next().await;
    }

    async fn next(&mut self) -> &'static str {
        let name = tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
        };
        self.came = true;
        name
    }

    /// Whether one of them has come, without waiting for it.
    pub fn pending(&mut self) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        self.came |= self.interrupt.poll_recv(&mut context).is_ready();
        self.came |= self.terminate.poll_recv(&mut context).is_ready();
        self.came
    }

    /// Forgets those that have come; `true` if any had. One that comes while a guest is being handed over was meant for the
    /// migration, and is too late: the guest that arrived exists here and nowhere else, and must not end for it.
    pub fn forget(&mut self) -> bool {
        let came = self.pending();
        self.came = false;
        came
    }

    /// Does blocking work on a thread of its own, unless a signal comes first.
    ///
    /// # Errors
    /// What the work returns; [`Error::Cancelled`] on a signal, and the work goes on unwatched.
    pub async fn or<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let work = tokio::task::spawn_blocking(work);
        tokio::select! {
            done = work => done.unwrap_or_else(|died| Err(Error::Failed(format!("a thread died: {died}")))),
            () = self.wait() => Err(Error::Cancelled),
        }
    }

    /// Waits for a migration's end, and asks for it when a signal comes. A second signal does not wait for that: it has the
    /// migration `abandon`ed, and `leaves` says whether the command then goes, which depends on where the guest is.
    pub async fn watch<T>(
        &mut self,
        end: impl Future<Output = T>,
        cancel: impl Fn(),
        abandon: impl Fn() -> Abandoned,
        leaves: impl Fn(Abandoned) -> bool,
    ) -> Watched<T> {
        tokio::pin!(end);
        let mut asked = false;
        loop {
            tokio::select! {
                biased;
                ended = &mut end => return Watched::Ended(ended),
                signal = self.next() => {
                    if asked {
                        let abandoned = abandon();
                        if leaves(abandoned) {
                            return Watched::Left(abandoned);
                        }
                    } else {
                        say_stderr(format_args!("{signal}: cancelling; another one ends this command at once"));
                        cancel();
                        asked = true;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Signal as Number, getpid, kill_process};

    /// Signals are the process's, and so is who hears them.
    static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

    #[tokio::test]
    async fn a_signal_stays_until_it_is_forgotten() {
        let _alone = ALONE.lock().await;
        let mut signals = Signals::catch().unwrap();
        assert!(!signals.forget());
        kill_process(getpid(), Number::TERM).unwrap();
        signals.wait().await;
        assert!(signals.pending());
        signals.wait().await;
        assert!(signals.forget());
        assert!(!signals.pending());
        kill_process(getpid(), Number::INT).unwrap();
        signals.again().await;
        assert!(signals.forget());
    }

    /// Watches something that only a second signal ends, if `leaves` lets it; gives how often it was called off.
    async fn signalled(times: u32, abandoned: Abandoned, leaves: bool) -> (u32, Option<Abandoned>) {
        let mut signals = Signals::catch().unwrap();
        let (cancels, abandons) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
        let seen = std::cell::Cell::new(0);
        let end = async {
            for sent in 1..=times {
                kill_process(getpid(), Number::INT).unwrap();
                while seen.get() < sent {
                    tokio::task::yield_now().await;
                }
            }
            if leaves && times > 1 {
                std::future::pending::<()>().await;
            }
        };
        let cancel = || {
            cancels.set(cancels.get() + 1);
            seen.set(seen.get() + 1);
        };
        let abandon = || {
            abandons.set(abandons.get() + 1);
            seen.set(seen.get() + 1);
            abandoned
        };
        let left = match signals.watch(end, cancel, abandon, |_| leaves).await {
            Watched::Ended(()) => None,
            Watched::Left(abandoned) => Some(abandoned),
        };
        assert_eq!(cancels.get() + abandons.get(), times);
        (cancels.get(), left)
    }

    #[tokio::test]
    async fn one_signal_asks_for_the_end_and_a_second_one_does_not_wait_for_it() {
        let _alone = ALONE.lock().await;
        for abandoned in [Abandoned::Before, Abandoned::After] {
            assert_eq!(signalled(1, abandoned, true).await, (1, None));
            assert_eq!(signalled(2, abandoned, true).await, (1, Some(abandoned)));
            // A guest that is here and nowhere else does not end for it.
            assert_eq!(signalled(3, abandoned, false).await, (1, None));
        }
    }
}
