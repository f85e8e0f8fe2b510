//! The device thread: serves the queues whose doorbells are rung.
//!
//! A doorbell is an eventfd that KVM signals in place of an exit, so the vCPU that rings it runs on at once. Invariants:
//!
//! - what was rung before [`DeviceThread::pause`] is served when it returns, and nothing is after, until
//!   [`DeviceThread::run`];
//! - a device thread that is gone (it panicked) ends the guest, and nobody waits for it.

use super::virtio::mmio::Transport;
use crate::wiring::Ending;
use crate::{Error, Result};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Doorbells are taken this many at a time.
const EVENTS: usize = 16;

/// The doorbell of one queue.
pub(super) struct Doorbell {
    pub(super) bell: EventFd,
    pub(super) device: Arc<Transport>,
    pub(super) queue: u16,
}

impl Doorbell {
    /// Serves the queue if the bell was rung.
    fn serve(&self) {
        // Not rung is an error that says so; rung often is served once.
        if self.bell.read().is_ok() {
            self.device.kick(self.queue);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Run,
    Park,
    Quit,
}

struct State {
    wanted: Wanted,
    /// The thread has served all and waits. Taken back by whoever lets it run, so that it cannot be seen too early.
    parked: bool,
    gone: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    wake: EventFd,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the thread look at what is wanted.
    fn want(&self, state: &mut State, wanted: Wanted) {
        state.wanted = wanted;
        self.changed.notify_all();
        // Fails only where the count is about to overflow: then it is readable, which is all that is wanted.
        let _ = self.wake.write(1);
    }

    /// The thread's place to stop at. Everything was served when it is called with a stop wanted. False: it is to end.
    fn park(&self) -> bool {
        let mut state = self.lock();
        if state.wanted == Wanted::Park {
            state.parked = true;
            self.changed.notify_all();
        }
        while state.parked && state.wanted != Wanted::Quit {
            state = self.wait(state);
        }
        state.wanted != Wanted::Quit
    }

    fn is_stopping(&self) -> bool {
        self.lock().wanted != Wanted::Run
    }
}

/// Tells that the thread is gone, however it went.
struct Leaving {
    shared: Arc<Shared>,
    ending: Ending,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        // The reason first: whoever finds the thread gone looks for it.
        if thread::panicking() {
            let why = "the device thread panicked, which is a bug of this program: the guest cannot go on";
            self.ending.fail(Error::Condition(why.to_owned()));
        }
        self.shared.lock().gone = true;
        self.shared.changed.notify_all();
    }
}

/// The device thread; it ends when this is dropped.
pub(super) struct DeviceThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// A doorbell, or what wakes the thread for other reasons.
pub(super) fn eventfd() -> Result<EventFd> {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(|e| Error::kvm("making an eventfd for the device thread", e))
}

impl DeviceThread {
    /// A thread that serves `bells`, parked.
    pub(super) fn spawn(bells: Vec<Doorbell>, ending: Ending) -> Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                wanted: Wanted::Park,
                parked: true,
                gone: false,
            }),
            changed: Condvar::new(),
            wake: eventfd()?,
        });
        let epoll = watch(&shared.wake, &bells).map_err(|e| Error::kvm("watching doorbells", e))?;
        let leaving = Leaving {
            shared: Arc::clone(&shared),
            ending,
        };
        let thread = thread::Builder::new().name("devices".to_owned());
        let thread = thread.spawn(move || serve(&epoll, &bells, &leaving));
        Ok(DeviceThread {
            shared,
            thread: Some(thread.map_err(Error::Thread)?),
        })
    }

    /// Serves what was rung, then stops.
    pub(super) fn pause(&self) -> Result<()> {
        let mut state = self.shared.lock();
        if state.wanted != Wanted::Park {
            self.shared.want(&mut state, Wanted::Park);
        }
        while !state.parked && !state.gone {
            state = self.shared.wait(state);
        }
        if state.gone {
            return Err(Error::Condition(
                "the device thread is gone: the guest ended".to_owned(),
            ));
        }
        Ok(())
    }

    /// Goes on serving.
    pub(super) fn run(&self) {
        let mut state = self.shared.lock();
        state.parked = false;
        self.shared.want(&mut state, Wanted::Run);
    }

    pub(super) fn is_parked(&self) -> bool {
        let state = self.shared.lock();
        state.parked && state.wanted == Wanted::Park
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        self.shared.want(&mut self.shared.lock(), Wanted::Quit);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the device thread had panicked");
        }
    }
}

fn watch(wake: &EventFd, bells: &[Doorbell]) -> io::Result<Epoll> {
    let epoll = Epoll::new()?;
    let all = bells.iter().map(|doorbell| &doorbell.bell).chain([wake]);
    for (index, fd) in all.enumerate() {
        let event = EpollEvent::new(EventSet::IN, index as u64);
        epoll.ctl(ControlOperation::Add, fd.as_raw_fd(), event)?;
    }
    Ok(epoll)
}

/// The thread.
fn serve(epoll: &Epoll, bells: &[Doorbell], leaving: &Leaving) {
    let shared = &leaving.shared;
    let mut events = [EpollEvent::default(); EVENTS];
    loop {
        if shared.is_stopping() {
            // The vCPUs are stopped, so nothing rings any more: one look at each finds all.
            for doorbell in bells {
                doorbell.serve();
            }
            if !shared.park() {
                return;
            }
        }
        let ready = match epoll.wait(-1, &mut events) {
            Ok(ready) => ready,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
            Err(e) => {
                leaving.ending.fail(Error::kvm("waiting for doorbells", e));
                return;
            }
        };
        for event in &events[..ready] {
            match usize::try_from(event.data()).ok().and_then(|index| bells.get(index)) {
                Some(doorbell) => doorbell.serve(),
                // Only a wake-up: why, is looked at above. An empty counter is as good.
                None => drop(shared.wake.read()),
            }
        }
    }
}
