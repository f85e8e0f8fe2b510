//! The board: interrupts to the vCPUs, doorbells to the device thread, and the way to stop and start both.
//!
//! A raised interrupt is counted and taken as often as it was raised, as on a core that takes each the moment it comes;
//! what is pending when the guest pauses travels with its state. A doorbell is an eventfd in all but name: rings
//! coalesce, and the device thread looks at the queue some time later.

use crate::frames::QUEUES;
use serde::{Deserialize, Serialize};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Interrupts that are pending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Irqs {
    /// The configuration changed.
    pub(crate) config: bool,
    /// Completions by queue.
    pub(crate) queues: [u32; QUEUES],
}

impl Irqs {
    pub(crate) fn any(&self) -> bool {
        self.config || self.queues.iter().any(|n| *n > 0)
    }
}

#[derive(Debug, Default)]
struct Cpus {
    running: bool,
    quit: bool,
    parked: u32,
    irqs: Irqs,
    /// Something new for vCPU 0 to look at.
    poke: bool,
}

#[derive(Debug, Default)]
struct Bell {
    rung: u32,
    busy: bool,
    quit: bool,
}

/// The board.
#[derive(Debug)]
pub(crate) struct Platform {
    vcpus: u32,
    cpus: Mutex<Cpus>,
    to_vcpus: Condvar,
    to_host: Condvar,
    bell: Mutex<Bell>,
    to_device: Condvar,
    device_idle: Condvar,
}

/// What a vCPU comes back to.
pub(crate) struct Entered {
    /// Interrupts to take; vCPU 0 takes them all.
    pub(crate) irqs: Irqs,
    /// Whether it was stopped in between.
    pub(crate) parked: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is done under these locks that can panic halfway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

impl Platform {
    /// A board that is stopped.
    pub(crate) fn new(vcpus: u32) -> Self {
        Platform {
            vcpus,
            cpus: Mutex::default(),
            to_vcpus: Condvar::new(),
            to_host: Condvar::new(),
            bell: Mutex::default(),
            to_device: Condvar::new(),
            device_idle: Condvar::new(),
        }
    }

    /// A vCPU, about to run: waits while the guest is stopped. `None` when the guest is switched off.
    pub(crate) fn enter(&self, vcpu: u32) -> Option<Entered> {
        let mut cpus = lock(&self.cpus);
        let parked = !cpus.running;
        if parked {
            cpus.parked += 1;
            self.to_host.notify_all();
            while !cpus.running && !cpus.quit {
                cpus = wait(&self.to_vcpus, cpus);
            }
            cpus.parked -= 1;
        }
        if cpus.quit {
            return None;
        }
        let irqs = if vcpu == 0 {
            cpus.poke = false;
            std::mem::take(&mut cpus.irqs)
        } else {
            Irqs::default()
        };
        Some(Entered { irqs, parked })
    }

    /// A vCPU with nothing to do for `time`: sleeps until then, or until it has an interrupt or is to stop.
    pub(crate) fn idle(&self, vcpu: u32, time: Duration) {
        let mut cpus = lock(&self.cpus);
        let asleep = |cpus: &mut Cpus| {
            let called = vcpu == 0 && (cpus.irqs.any() || cpus.poke);
            cpus.running && !cpus.quit && !called
        };
        if asleep(&mut cpus) {
            let woken = self.to_vcpus.wait_timeout_while(cpus, time, asleep);
            drop(woken.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Stops every vCPU, then waits until the device thread has served every ring.
    pub(crate) fn pause(&self) {
        let mut cpus = lock(&self.cpus);
        cpus.running = false;
        self.to_vcpus.notify_all();
        while cpus.parked < self.vcpus && !cpus.quit {
            cpus = wait(&self.to_host, cpus);
        }
        drop(cpus);
        self.drain();
    }

    pub(crate) fn resume(&self) {
        lock(&self.cpus).running = true;
        self.to_vcpus.notify_all();
    }

    pub(crate) fn is_running(&self) -> bool {
        lock(&self.cpus).running
    }

    /// Calls vCPU 0 out of its sleep.
    pub(crate) fn poke(&self) {
        lock(&self.cpus).poke = true;
        self.to_vcpus.notify_all();
    }

    /// Switches off: every thread leaves.
    pub(crate) fn quit(&self) {
        lock(&self.cpus).quit = true;
        self.to_vcpus.notify_all();
        self.to_host.notify_all();
        lock(&self.bell).quit = true;
        self.to_device.notify_all();
        self.device_idle.notify_all();
    }

    pub(crate) fn pending(&self) -> Irqs {
        lock(&self.cpus).irqs
    }

    pub(crate) fn set_pending(&self, irqs: Irqs) {
        lock(&self.cpus).irqs = irqs;
    }

    /// The guest rings for queue `queue`.
    pub(crate) fn ring(&self, queue: u16) {
        lock(&self.bell).rung |= 1 << (queue % 32);
        self.to_device.notify_one();
    }

    /// Waits until the device has served all rings up to now.
    pub(crate) fn drain(&self) {
        let mut bell = lock(&self.bell);
        while (bell.rung != 0 || bell.busy) && !bell.quit {
            bell = wait(&self.device_idle, bell);
        }
    }

    /// The device thread: waits for rings; `None` when the guest is switched off. Calling it says that the last ones
    /// were served.
    pub(crate) fn rings(&self) -> Option<u32> {
        let mut bell = lock(&self.bell);
        bell.busy = false;
        if bell.rung == 0 {
            self.device_idle.notify_all();
        }
        while bell.rung == 0 && !bell.quit {
            bell = wait(&self.to_device, bell);
        }
        if bell.quit {
            return None;
        }
        bell.busy = true;
        Some(std::mem::take(&mut bell.rung))
    }
}

impl balloon::Interrupts for Platform {
    fn queue(&self, index: u16) {
        let mut cpus = lock(&self.cpus);
        if let Some(count) = cpus.irqs.queues.get_mut(usize::from(index)) {
            *count = count.saturating_add(1);
        }
        drop(cpus);
        self.to_vcpus.notify_all();
    }

    fn config(&self) {
        lock(&self.cpus).irqs.config = true;
        self.to_vcpus.notify_all();
    }
}
