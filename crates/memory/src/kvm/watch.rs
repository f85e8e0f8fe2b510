//! What the trackers by KVM share: one has the log at a time, the VMM's own writes go along with it, and whatever fails
//! leaves it off.

use super::KvmSlots;
use crate::error::{Error, Result};
use crate::sys::kvm;
use crate::trackers::check_layout;
use crate::write_log::WriteLog;
use pages::{Layout, PageSet};
use std::sync::Arc;

/// The log of a VM's writes, in the hands of one tracker.
#[derive(Debug)]
pub(crate) struct Watch {
    slots: Arc<KvmSlots>,
    /// What KVM's log does not tell: the VMM's own writes, discards, pages given back or kept.
    own: WriteLog,
    /// Flags of manual protection; `None` where KVM does not have it.
    manual: Option<u32>,
    on: bool,
}

impl Watch {
    /// A watch that is off. It clears the log in the way that `flags` of manual protection say: 0 is by reading it.
    pub(crate) fn new(slots: &Arc<KvmSlots>, flags: u32) -> Self {
        let known = super::capabilities(slots.vm()).manual_protect;
        Watch {
            slots: Arc::clone(slots),
            own: slots.memory().write_log(),
            manual: known.then_some(flags),
            on: false,
        }
    }

    pub(crate) fn slots(&self) -> &Arc<KvmSlots> {
        &self.slots
    }

    pub(crate) fn layout(&self) -> &Arc<Layout> {
        self.slots.memory().layout()
    }

    pub(crate) fn own(&self) -> &WriteLog {
        &self.own
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Turns it on if it is off. What was noted up to now is still to be forgotten.
    pub(crate) fn begin(&mut self) -> Result<()> {
        if self.on {
            return Ok(());
        }
        if !self.slots.take_log() {
            return Err(Error::NoTracking("another tracker watches this VM".to_owned()));
        }
        let started = self.own.listen().and_then(|()| self.switch_on());
        match started {
            Ok(()) => self.on = true,
            Err(_) => {
                self.own.ignore();
                self.slots.release_log();
            }
        }
        started
    }

    fn switch_on(&self) -> Result<()> {
        // Before the logs are on: the flags say what switching them on does.
        if let Some(flags) = self.manual {
            kvm::set_manual_protect(self.slots.vm(), flags)
                .map_err(|e| Error::sys(format!("setting KVM's manual dirty log protection to {flags:#x}"), e))?;
        }
        self.slots.start_logging()
    }

    /// Turns it off, all of it, whatever fails on the way; forgets what was noted.
    pub(crate) fn end(&mut self) -> Result<()> {
        if !self.on {
            self.own.pages().clear();
            return Ok(());
        }
        let result = self.slots.stop_logging();
        self.on = false;
        self.own.ignore();
        self.own.pages().clear();
        self.slots.release_log();
        result
    }

    /// Refuses to harvest where nothing is noted.
    pub(crate) fn check_on(&self) -> machine::Result<()> {
        if self.on {
            return Ok(());
        }
        Err(machine::Error::Refused(
            "harvesting the dirty log: tracking is off, start it first".to_owned(),
        ))
    }

    /// Puts pages back, to be in the next harvest.
    pub(crate) fn keep(&self, pages: &PageSet) {
        for run in pages.runs() {
            self.own.pages().insert(run);
        }
    }

    /// The same with pages that may be of another layout.
    pub(crate) fn give_back(&self, pages: &PageSet) -> machine::Result<()> {
        check_layout(pages, self.layout())?;
        self.keep(pages);
        Ok(())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!(%error, "a tracker that was on is gone");
        }
    }
}
