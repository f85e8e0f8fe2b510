//! A vCPU's thread: it runs the vCPU, serves its exits, and parks when it is told to.

use super::control::{Control, kick_signal};
use super::exits::{self, After, End};
use super::sys::RunPage;
use crate::wiring::{Ending, Exits};
use crate::{Ended, Error};
use kvm_ioctls::VcpuFd;
use memory::GuestMemory;
use memory::kvm::KvmRing;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use vmm_sys_util::signal::unblock_signal;

/// Exits that a vCPU of a guest that has ended may still need until what it was doing is complete. KVM hands out about 1024
/// pieces of a string instruction before it looks whether it was interrupted.
const MOST_TO_COMPLETE: u32 = 1 << 16;

/// What a vCPU's thread works with.
pub(super) struct Worker {
    pub(super) index: usize,
    pub(super) vcpu: u32,
    /// Held while the vCPU runs; whoever else wants it, waits until it is parked.
    pub(super) fd: Arc<Mutex<VcpuFd>>,
    pub(super) page: Arc<RunPage>,
    pub(super) control: Arc<Control>,
    pub(super) exits: Arc<dyn Exits>,
    pub(super) ending: Ending,
    pub(super) ring: Option<Arc<KvmRing>>,
    pub(super) memory: Arc<GuestMemory>,
}

impl Worker {
    /// The thread's whole life. Whatever becomes of it, it is known to be gone after.
    pub(super) fn work(self) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.runs())) {
            self.ending.fail(Error::Vcpu {
                vcpu: self.vcpu,
                why: format!(
                    "its thread panicked, which is a fault of this program: {}",
                    text(&*panic)
                ),
            });
        }
        self.control.gone(self.index);
        if self.ending.get().is_some() {
            self.control.guest_ended();
        }
    }

    fn runs(&self) {
        // Who made this thread may have blocked all signals.
        if let Err(error) = unblock_signal(kick_signal()) {
            let why = format!("its thread cannot be interrupted: {error}");
            self.ending.fail(Error::Vcpu { vcpu: self.vcpu, why });
            return;
        }
        let mut ran = false;
        while self.control.wait_for_run(self.index) {
            let mut fd = self.fd.lock().unwrap_or_else(PoisonError::into_inner);
            if ran {
                self.tell_of_pause(&fd);
            }
            self.run(&mut fd);
            ran = true;
            drop(fd);
            self.control.parked(self.index);
        }
    }

    /// Tells the guest that it was stopped, so that its watchdogs do not take the time for a lockup. Who restores a guest does
    /// the same.
    fn tell_of_pause(&self, fd: &VcpuFd) {
        match fd.kvmclock_ctrl() {
            // EINVAL: the guest does not use KVM's clock.
            Err(error) if error.errno() != libc::EINVAL => {
                tracing::warn!(vcpu = self.vcpu, %error, "the guest cannot be told that it was paused");
            }
            _ => {}
        }
    }

    /// Runs the vCPU until it has to park. On return it is in the middle of nothing: each exit that was served is complete,
    /// because `KVM_RUN` was called once more and said that it was interrupted.
    fn run(&self, fd: &mut VcpuFd) {
        if self.control.has_to_park(self.index) {
            return;
        }
        let mut ended = false;
        let mut completing = 0;
        loop {
            let after = match fd.run() {
                Ok(exit) => exits::serve(exit, &self.page, &*self.exits),
                Err(error) if error.errno() == libc::EINTR => {
                    if self.control.has_to_park(self.index) {
                        return;
                    }
                    After::GoOn
                }
                Err(error) if error.errno() == libc::EAGAIN => After::GoOn,
                Err(error) => return self.end(End::Other(format!("KVM cannot run it: {error}")), fd),
            };
            match after {
                After::GoOn => {}
                After::RingFull => {
                    if let Err(error) = self.empty_ring() {
                        return self.tell(Ended::Failed(Arc::new(error)));
                    }
                }
                After::End(end) => return self.end(end, fd),
            }
            if self.ending.get().is_some() {
                if !ended {
                    // Also sets our own immediate_exit.
                    self.control.guest_ended();
                    ended = true;
                }
                completing += 1;
                if completing > MOST_TO_COMPLETE {
                    return;
                }
            }
        }
    }

    fn empty_ring(&self) -> crate::Result<()> {
        match &self.ring {
            Some(ring) => Ok(ring.on_full()?),
            None => Err(Error::Vcpu {
                vcpu: self.vcpu,
                why: "KVM says that its dirty ring is full, and it has none".to_owned(),
            }),
        }
    }

    fn end(&self, end: End, fd: &VcpuFd) {
        self.tell(exits::ended(end, self.vcpu, fd, &self.page, &self.memory));
    }

    fn tell(&self, how: Ended) {
        self.ending.tell(how);
        self.control.guest_ended();
    }
}

/// What a panic said.
fn text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text")
}
