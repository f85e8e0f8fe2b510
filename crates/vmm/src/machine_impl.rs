//! The guest as a [`Machine`]: paused, saved, restored.
//!
//! Order: the vCPUs stop before the board does, so that every doorbell that was rung is served; the board goes on before
//! the vCPUs. State is restored in the order in which parts need one another: vCPUs, then what lives in the kernel
//! (pending interrupts go to local APICs), then the board.

use crate::guest::{Content, Inner, StateFault};
use crate::state::Incoming;
use crate::{Error, Result};
use machine::{Machine, MachineConfig, MachineState};
use std::sync::Arc;

/// vCPUs and devices of a [`crate::LinuxGuest`].
pub(crate) struct LinuxMachine {
    inner: Arc<Inner>,
}

impl LinuxMachine {
    pub(crate) fn new(inner: Arc<Inner>) -> Self {
        LinuxMachine { inner }
    }

    fn try_pause(&self) -> Result<()> {
        let _one_at_a_time = self.inner.content();
        self.inner.vcpus.pause()?;
        self.inner.board.pause()
    }

    fn try_resume(&self) -> Result<()> {
        let content = self.inner.content();
        match *content {
            Content::Guest => {}
            Content::Empty => return Err(Error::Condition("there is no guest in this machine yet".to_owned())),
            Content::Broken => {
                return Err(Error::Condition(
                    "restoring this guest failed half-way; it cannot run here".to_owned(),
                ));
            }
        }
        let resumed = self.inner.board.resume().and_then(|()| self.inner.vcpus.resume());
        resumed.inspect_err(|_| {
            // No vCPU runs; the board must not write either.
            if let Err(error) = self.inner.board.pause() {
                tracing::warn!(%error, "the board cannot be paused again");
            }
        })
    }

    fn try_save(&self) -> Result<MachineState> {
        let content = self.inner.content();
        if self.inner.vcpus.is_running() {
            return Err(Error::Condition("the guest runs; pause it before saving".to_owned()));
        }
        if *content != Content::Guest {
            return Err(Error::Condition("there is no guest to save in this machine".to_owned()));
        }
        // It may have ended while it was being moved: what is left of it must not live on elsewhere.
        if let Some(how) = self.inner.ending.get() {
            return Err(Error::Condition(format!("the guest has ended: {how}")));
        }
        let mut sections = self.inner.vcpus.save()?;
        sections.extend(self.inner.vm.save()?);
        if self.inner.has_fault(StateFault::Save) {
            return Err(Error::state(
                "a device",
                "it refuses to be saved (a test asked for that)",
            ));
        }
        sections.extend(self.inner.board.save()?);
        Ok(MachineState { sections })
    }

    fn try_restore(&self, state: &MachineState) -> Result<()> {
        let mut content = self.inner.content();
        if *content != Content::Empty {
            return Err(Error::Condition(
                "a guest is or was in this machine; state is restored into a new one".to_owned(),
            ));
        }
        *content = Content::Broken;
        let mut incoming = Incoming::new(state);
        self.inner.vcpus.restore(&mut incoming)?;
        self.inner.vm.restore(&mut incoming)?;
        if self.inner.has_fault(StateFault::Restore) {
            return Err(Error::state(
                "a device",
                "it refuses to be restored (a test asked for that)",
            ));
        }
        self.inner.board.restore(&mut incoming)?;
        incoming.finish()?;
        *content = Content::Guest;
        Ok(())
    }
}

impl Machine for LinuxMachine {
    fn config(&self) -> MachineConfig {
        self.inner.config().clone()
    }

    fn is_running(&self) -> bool {
        self.inner.vcpus.is_running()
    }

    fn pause(&mut self) -> machine::Result<()> {
        Ok(self.try_pause()?)
    }

    fn resume(&mut self) -> machine::Result<()> {
        Ok(self.try_resume()?)
    }

    fn save(&mut self) -> machine::Result<MachineState> {
        Ok(self.try_save()?)
    }

    fn restore(&mut self, state: &MachineState) -> machine::Result<()> {
        Ok(self.try_restore(state)?)
    }
}
