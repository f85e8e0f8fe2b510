//! Who has to run, and who does: the agreement between vCPU threads and whoever pauses and resumes them.
//!
//! A kick cannot be lost. It is made under the lock, after the wish to park was written there: `immediate_exit` is set in
//! the vCPU's run page, then a signal is sent. A thread clears `immediate_exit` under the same lock, and only when it finds
//! that it shall run. So whatever the thread does when it is kicked:
//!
//! - in the guest, the signal makes `KVM_RUN` return;
//! - about to call `KVM_RUN`, which looks at `immediate_exit` first and returns;
//! - serving an exit: the same, once that is done.
//!
//! The signal's handler does nothing; the signal is there to interrupt.

use super::sys::RunPage;
use crate::wiring::Ending;
use crate::{Error, Result};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

/// What all vCPUs have to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Park,
    Run,
    End,
}

/// Where a vCPU's thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Waiting to be let go. Its vCPU is in the middle of nothing.
    Parked,
    Running,
    /// It ended or panicked, and will never answer.
    Gone,
}

#[derive(Debug)]
struct Member {
    place: Place,
    /// The last resume that it has seen.
    seen: u64,
    page: Arc<RunPage>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct State {
    wanted: Wanted,
    /// Counts resumes.
    resumes: u64,
    members: Vec<Member>,
}

/// The agreement of all vCPUs of a VM.
#[derive(Debug)]
pub(super) struct Control {
    state: Mutex<State>,
    changed: Condvar,
    ending: Ending,
}

/// The signal that kicks: real-time, so that nobody else uses it by default.
pub(super) fn kick_signal() -> i32 {
    SIGRTMIN()
}

extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Without a handler the signal would end the process.
fn handle_kicks() -> Result<()> {
    static DONE: OnceLock<std::result::Result<(), i32>> = OnceLock::new();
    let done = DONE.get_or_init(|| register_signal_handler(kick_signal(), on_kick).map_err(|e| e.errno()));
    done.map_err(|errno| Error::Thread(io::Error::from_raw_os_error(errno)))
}

impl Control {
    /// For vCPUs with these run pages; they are parked, once they have threads.
    pub(super) fn new(pages: Vec<Arc<RunPage>>, ending: Ending) -> Result<Control> {
        handle_kicks()?;
        let members = pages.into_iter().map(|page| Member {
            place: Place::Parked,
            seen: 0,
            page,
            thread: None,
        });
        Ok(Control {
            state: Mutex::new(State {
                wanted: Wanted::Park,
                resumes: 0,
                members: members.collect(),
            }),
            changed: Condvar::new(),
            ending,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, so: impl Fn(&State) -> bool) -> MutexGuard<'a, State> {
        self.changed
            .wait_while(state, |state| so(state))
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives vCPU `index` its thread, so that it can be kicked.
    pub(super) fn set_thread(&self, index: usize, thread: JoinHandle<()>) {
        if let Some(member) = self.lock().members.get_mut(index) {
            member.thread = Some(thread);
        }
    }

    /// Has all vCPUs park, and waits until they have.
    pub(super) fn pause(&self) {
        let mut state = self.lock();
        if state.wanted == Wanted::Run {
            state.wanted = Wanted::Park;
        }
        state.kick();
        drop(self.wait(state, |state| state.any(Place::Running)));
    }

    /// Lets all vCPUs go, and waits until they went.
    ///
    /// # Errors
    /// A vCPU whose thread is gone. Then all are parked.
    pub(super) fn resume(&self) -> Result<()> {
        let mut state = self.lock();
        if state.wanted == Wanted::Run {
            return Ok(());
        }
        state.check_threads()?;
        state.wanted = Wanted::Run;
        state.resumes += 1;
        self.changed.notify_all();
        let left = |state: &State| {
            let left = |member: &Member| member.seen != state.resumes;
            state
                .members
                .iter()
                .any(|member| left(member) && member.place != Place::Gone)
        };
        let state = self.wait(state, left);
        // One that went and is gone by now has ended the guest, and says why there.
        let went = state.members.iter().all(|member| member.seen == state.resumes);
        let gone = if went { Ok(()) } else { state.check_threads() };
        drop(state);
        if gone.is_err() {
            self.pause();
        }
        gone
    }

    /// Whether vCPUs are to run, and the guest has not ended.
    pub(super) fn is_running(&self) -> bool {
        self.lock().wanted == Wanted::Run && self.ending.get().is_none()
    }

    /// Whether all vCPUs are parked and stay so until [`Control::resume`].
    pub(super) fn check_parked(&self, doing: &str) -> Result<()> {
        let state = self.lock();
        if state.wanted == Wanted::Run || state.any(Place::Running) {
            return Err(Error::Condition(format!("{doing}: the vCPUs run, pause them first")));
        }
        state.check_threads()
    }

    /// How often the vCPUs were let go.
    pub(super) fn resumes(&self) -> u64 {
        self.lock().resumes
    }

    /// Has all threads end, whatever they are doing, and waits for that.
    pub(super) fn end(&self) {
        let mut state = self.lock();
        state.wanted = Wanted::End;
        state.kick();
        self.changed.notify_all();
        let threads: Vec<_> = state.members.iter_mut().filter_map(|m| m.thread.take()).collect();
        // Joined without the lock, which they need; nobody can kick them any more, but they were.
        drop(state);
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a vCPU's thread panicked on its way out");
            }
        }
    }

    /// For a vCPU's thread: waits until it shall run; false: until it shall end.
    pub(super) fn wait_for_run(&self, index: usize) -> bool {
        let stay = |state: &State| match state.wanted {
            Wanted::Park => true,
            Wanted::End => false,
            // One that parked by itself, as the guest has ended, waits for the next resume.
            Wanted::Run => state.members[index].seen == state.resumes,
        };
        let mut state = self.wait(self.lock(), stay);
        if state.wanted == Wanted::End {
            return false;
        }
        let resumes = state.resumes;
        let member = &mut state.members[index];
        member.seen = resumes;
        member.place = Place::Running;
        member.page.set_immediate_exit(false);
        self.changed.notify_all();
        true
    }

    /// For a vCPU's thread that was interrupted, and is in the middle of nothing: whether it has to park. If not, it can run
    /// on.
    pub(super) fn has_to_park(&self, index: usize) -> bool {
        let state = self.lock();
        if state.wanted != Wanted::Run || self.ending.get().is_some() {
            return true;
        }
        state.members[index].page.set_immediate_exit(false);
        false
    }

    /// For a vCPU's thread: it is parked now.
    pub(super) fn parked(&self, index: usize) {
        self.lock().members[index].place = Place::Parked;
        self.changed.notify_all();
    }

    /// For a vCPU's thread on its way out.
    pub(super) fn gone(&self, index: usize) {
        self.lock().members[index].place = Place::Gone;
        self.changed.notify_all();
    }

    /// For a vCPU's thread that found that the guest has ended: stops the others too.
    pub(super) fn guest_ended(&self) {
        self.lock().kick();
    }
}

impl State {
    fn any(&self, place: Place) -> bool {
        self.members.iter().any(|member| member.place == place)
    }

    fn check_threads(&self) -> Result<()> {
        match self.members.iter().position(|member| member.place == Place::Gone) {
            None => Ok(()),
            Some(vcpu) => Err(Error::Condition(format!(
                "the thread of vCPU {vcpu} has ended: this guest cannot go on"
            ))),
        }
    }

    /// Interrupts all vCPUs that run, the calling thread's own among them.
    fn kick(&self) {
        for member in self.members.iter().filter(|member| member.place == Place::Running) {
            member.page.set_immediate_exit(true);
            if let Some(thread) = &member.thread
                && let Err(error) = thread.kill(kick_signal())
            {
                // The thread exists until it is joined, and the signal is valid: this does not happen.
                tracing::error!(%error, "a vCPU cannot be kicked");
            }
        }
    }
}
