//! The guest as a [`Machine`]: paused, saved, restored.
//!
//! Saved state is two sections of JSON: `guest`, what of the guest is not in its RAM, and `balloon`, the device's own.

use crate::guest::SoftGuest;
use crate::kernel::Kernel;
use crate::{Error, Result};
use machine::{Machine, MachineConfig, MachineState, Section};
use std::sync::atomic::Ordering;

const GUEST: &str = "guest";
const BALLOON: &str = "balloon";
const VERSION: u32 = 1;

/// vCPUs and devices of a [`SoftGuest`].
pub struct SoftMachine {
    guest: SoftGuest,
}

impl SoftMachine {
    pub(crate) fn new(guest: SoftGuest) -> Self {
        SoftMachine { guest }
    }

    fn try_save(&self) -> Result<MachineState> {
        let shared = self.guest.shared();
        if shared.platform.is_running() {
            return Err(Error::State("the guest runs; pause it before saving".to_owned()));
        }
        // The device first: it ends an open session, and that raises an interrupt.
        let balloon = shared.ports.as_ref().map(|ports| ports.device.lock().save());
        let kernel = shared.kernel();
        let data = kernel
            .as_ref()
            .ok_or(Error::NotRestored)?
            .save(shared.platform.pending())?;
        let guest = Section {
            name: GUEST.to_owned(),
            version: VERSION,
            data,
        };
        Ok(MachineState {
            sections: std::iter::once(guest).chain(balloon).collect(),
        })
    }

    fn try_restore(&self, state: &MachineState) -> Result<()> {
        let shared = self.guest.shared();
        if shared.platform.is_running() {
            return Err(Error::State(
                "the guest runs; a running guest cannot be replaced".to_owned(),
            ));
        }
        let expected = if shared.ports.is_some() {
            &[GUEST, BALLOON][..]
        } else {
            &[GUEST]
        };
        let names: Vec<&str> = state.sections.iter().map(|section| section.name.as_str()).collect();
        if names != expected {
            return Err(Error::State(format!(
                "its sections are {names:?}, expected are {expected:?}"
            )));
        }
        let mut kernel = shared.kernel();
        *kernel = None;
        let guest = &state.sections[0];
        if guest.version != VERSION {
            let version = guest.version;
            return Err(Error::State(format!(
                "its version is {version}, this program knows {VERSION}"
            )));
        }
        let (restored, irqs) = Kernel::restore(&shared.config, shared.ram.clone(), &guest.data)?;
        if let (Some(ports), Some(section)) = (&shared.ports, state.sections.get(1)) {
            ports.device.lock().restore(section)?;
        }
        shared.platform.set_pending(irqs);
        shared.catch_up.store(true, Ordering::Release);
        *kernel = Some(restored);
        Ok(())
    }
}

impl Machine for SoftMachine {
    fn config(&self) -> MachineConfig {
        self.guest.machine_config()
    }

    fn is_running(&self) -> bool {
        self.guest.shared().platform.is_running()
    }

    fn pause(&mut self) -> machine::Result<()> {
        self.guest.shared().platform.pause();
        Ok(())
    }

    fn resume(&mut self) -> machine::Result<()> {
        let shared = self.guest.shared();
        if shared.kernel().is_none() {
            return Err(Error::NotRestored.into());
        }
        if let (true, Some(ports)) = (shared.catch_up.swap(false, Ordering::AcqRel), &shared.ports) {
            ports.device.lock().resume();
        }
        shared.platform.resume();
        Ok(())
    }

    fn save(&mut self) -> machine::Result<MachineState> {
        Ok(self.try_save()?)
    }

    fn restore(&mut self, state: &MachineState) -> machine::Result<()> {
        Ok(self.try_restore(state)?)
    }
}
