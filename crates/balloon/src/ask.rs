//! Asking the guest for its free pages, whatever the dialect: one session at a time, from `begin` to `end`.
//!
//! Invariant: while a session is open its sink may be called; once `end` has returned it is not.

use crate::device::number;
use crate::dialect::Role;
use crate::dialect::hinting::Hinting;
use crate::dialect::misc::Misc;
use crate::queue::{Broken, Fate, VirtQueue};
use crate::{Balloon, Error, Result, feature};
use machine::AnswerSink;
use vm_memory::GuestAddressSpace;

/// How the device's dialect asks for free pages.
pub(crate) enum Asking {
    Hints(Hinting),
    Misc(Misc),
    /// It has no way to ask.
    Never,
}

impl Asking {
    pub(crate) fn session(&self) -> Option<u32> {
        match self {
            Asking::Hints(hints) => hints.session(),
            Asking::Misc(misc) => misc.session(),
            Asking::Never => None,
        }
    }

    pub(crate) fn abandon(&mut self) {
        match self {
            Asking::Hints(hints) => hints.abandon(),
            Asking::Misc(misc) => misc.abandon(),
            Asking::Never => {}
        }
    }
}

impl<M: GuestAddressSpace> Balloon<M> {
    /// Whether a guest can be asked for its free pages now, else why not.
    pub fn can_ask(&self) -> std::result::Result<(), String> {
        let (bit, name, role) = match &self.asking {
            Asking::Hints(_) => (feature::FREE_PAGE_HINT, "FREE_PAGE_HINT", Role::Hint),
            Asking::Misc(_) => (feature::MISC_VQ, "MISC_VQ", Role::Misc),
            Asking::Never => {
                return Err(format!(
                    "the {} balloon has no way to ask for free pages",
                    self.config.dialect
                ));
            }
        };
        if self.config.features & bit == 0 {
            Err(format!("the balloon does not offer {name}"))
        } else if !self.active {
            Err("no balloon driver is running in the guest".to_owned())
        } else if self.acked & bit == 0 {
            Err(format!("the guest's balloon driver did not take {name}"))
        } else if self.index_of(role).is_none() {
            Err(format!("the queue of {name} was not set up, or is broken"))
        } else if self.is_parked() {
            Err("the guest is paused and cannot answer".to_owned())
        } else if let Some(session) = self.asking.session() {
            Err(format!("session {session} is still open"))
        } else {
            Ok(())
        }
    }

    /// Asks the guest for its free pages, as session `session`; see [`machine::FreePages::begin`].
    ///
    /// # Errors
    /// What [`Balloon::can_ask`] says, session 0, or no fresh id being left.
    pub fn begin(&mut self, session: u32, sink: AnswerSink) -> Result<()> {
        self.can_ask().map_err(Error::CannotAsk)?;
        if session == 0 {
            return Err(Error::CannotAsk("a session cannot have number 0".to_owned()));
        }
        match &mut self.asking {
            Asking::Hints(hints) => {
                hints.begin(session, sink)?;
                self.interrupts.config();
            }
            Asking::Misc(misc) => {
                misc.begin(session, sink, &self.layout)?;
                self.send_request();
            }
            // `can_ask` has refused.
            Asking::Never => {}
        }
        Ok(())
    }

    /// Ends session `session`; nothing happens where it is not open. See [`machine::FreePages::end`].
    pub fn end(&mut self, session: u32) {
        if self.asking.session() == Some(session) {
            self.end_open();
        }
    }

    /// Ends session `session`, but leaves the guest's blocks with it; see [`machine::FreePages::hold`]. In the `bitmap`
    /// dialect, whose guest hands nothing over, the same as [`Balloon::end`].
    pub fn hold(&mut self, session: u32) {
        match &mut self.asking {
            Asking::Hints(hints) if hints.session() == Some(session) => {
                hints.hold();
                self.config_changed();
            }
            Asking::Hints(_) | Asking::Never => {}
            Asking::Misc(_) => self.end(session),
        }
    }

    /// Ends whatever session is open. The guest is told that it may have its pages back.
    pub(crate) fn end_open(&mut self) {
        if self.asking.session().is_none() {
            return;
        }
        match &mut self.asking {
            Asking::Hints(hints) => {
                hints.end();
                self.config_changed();
            }
            Asking::Misc(misc) => {
                if misc.end()
                    && let Some(index) = self.index_of(Role::Misc)
                {
                    // A request that shared its interrupt with another completion is stuck in the driver: free it.
                    self.interrupts.queue(number(index));
                }
            }
            Asking::Never => {}
        }
    }

    /// `standard`: commands and free blocks. What one kick brought goes to the sink at once.
    pub(crate) fn serve_hints(&mut self, queue: &mut VirtQueue, used: &mut u32) -> std::result::Result<(), Broken> {
        let Asking::Hints(hints) = &mut self.asking else {
            return Ok(());
        };
        let tally = &mut self.counters;
        let layout = &*self.layout;
        let done = queue.drain(
            &self.memory.memory(),
            |mem, _, chain| Ok(hints.serve(mem, chain, layout, tally)),
            || *used += 1,
        );
        hints.flush();
        done
    }

    /// `bitmap`: request buffers and answers, one interrupt a completion.
    pub(crate) fn serve_misc(&mut self, index: u16, queue: &mut VirtQueue) -> std::result::Result<(), Broken> {
        let Asking::Misc(misc) = &mut self.asking else {
            return Ok(());
        };
        let tally = &mut self.counters;
        let interrupts = &*self.interrupts;
        let answers = tally.answers + tally.late + tally.malformed;
        let done = queue.drain(
            &self.memory.memory(),
            |mem, queue, chain| {
                let fate = misc.serve(mem, chain, tally);
                if fate == Fate::Held && misc.send(mem, queue, tally)? {
                    interrupts.queue(index);
                }
                Ok(fate)
            },
            || interrupts.queue(index),
        );
        if self.counters.answers + self.counters.late + self.counters.malformed != answers {
            self.ballooned.bitmap_was_an_answer();
        }
        done
    }

    /// Puts an open request into the guest's hands, where it has a buffer posted.
    fn send_request(&mut self) {
        let Some(index) = self.index_of(Role::Misc) else {
            return;
        };
        self.with_queue(index, |device, mem, queue| match &mut device.asking {
            Asking::Misc(misc) => misc.send(mem, queue, &mut device.counters),
            Asking::Hints(_) | Asking::Never => Ok(false),
        });
    }
}
