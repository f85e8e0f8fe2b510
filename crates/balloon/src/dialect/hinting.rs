//! Asking in the `standard` dialect: free page hints (virtio 1.3, section 5.5.6.5).
//!
//! The device publishes a fresh command id in the configuration space. The guest sends that id (a device-readable buffer
//! of 4 bytes), then its free blocks (device-writable buffers, every descriptor of which is a block), then STOP. It keeps
//! the blocks allocated until the device publishes DONE, so DONE is owed on every way out.
//!
//! ```text
//!            begin                id            STOP
//!   (none) --------> Asked  ----------> Sending ------> Stopped
//!                      |  end: DONE        |  end: DONE    |  end: DONE
//!                      +-------------------+---------------+------------> (none)
//! ```
//!
//! `hold` publishes STOP in place of DONE and goes to Stopped from anywhere; `end` follows later.
//!
//! Invariants: direction tells commands from blocks, length does not. An id is good for one session: a start that is
//! replayed, an id of an earlier session, and blocks in any state but Sending are late, counted and ignored.

use crate::counters::{Counters, Tally};
use crate::queue::{Chain, Fate};
use crate::session::Outlet;
use crate::{Error, Result};
use machine::AnswerSink;
use pages::{Layout, PageRange};
use vm_memory::GuestMemory;

/// The guest says that it has no more (and the configuration space, that nothing was ever asked).
const STOP: u32 = 0;

/// The host says that the guest may have its blocks back.
const DONE: u32 = 1;

/// The first command id.
const FIRST_ID: u32 = 0x8000_0000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Asked,
    Sending,
    Stopped,
}

struct Open {
    id: u32,
    phase: Phase,
    outlet: Outlet,
}

/// The device's side of hinting.
pub(crate) struct Hinting {
    /// What the configuration space says.
    published: u32,
    /// How many ids were used; persisted, so that an id is never used twice.
    issued: u32,
    open: Option<Open>,
}

impl Hinting {
    /// Nothing was ever asked.
    pub(crate) fn new() -> Self {
        Hinting {
            published: STOP,
            issued: 0,
            open: None,
        }
    }

    /// As saved by another device, no session being open.
    pub(crate) fn restored(issued: u32) -> Result<Self> {
        if issued > FIRST_ID {
            return Err(Error::State(format!(
                "{issued} hinting sessions are more than there are ids"
            )));
        }
        Ok(Hinting {
            published: if issued == 0 { STOP } else { DONE },
            issued,
            open: None,
        })
    }

    pub(crate) fn published(&self) -> u32 {
        self.published
    }

    pub(crate) fn issued(&self) -> u32 {
        self.issued
    }

    /// The session that is open.
    pub(crate) fn session(&self) -> Option<u32> {
        self.open.as_ref().map(|open| open.outlet.session())
    }

    /// Publishes a fresh id. The caller raises the configuration interrupt.
    pub(crate) fn begin(&mut self, session: u32, sink: AnswerSink) -> Result<()> {
        let id = FIRST_ID
            .checked_add(self.issued)
            .ok_or_else(|| Error::CannotAsk("every command id has been used".to_owned()))?;
        self.issued += 1;
        self.published = id;
        self.open = Some(Open {
            id,
            phase: Phase::Asked,
            outlet: Outlet::new(session, sink),
        });
        Ok(())
    }

    /// Publishes DONE. The caller raises the configuration interrupt. Answers not handed over yet are dropped.
    pub(crate) fn end(&mut self) {
        if self.open.take().is_some() {
            self.published = DONE;
        }
    }

    /// Publishes STOP: the guest says no more, and keeps what it handed over until DONE. The caller raises the
    /// configuration interrupt. Answers not handed over yet are dropped, and none follow.
    pub(crate) fn hold(&mut self) {
        if let Some(open) = &mut self.open {
            self.published = STOP;
            open.phase = Phase::Stopped;
            open.outlet.close();
        }
    }

    /// The guest will say no more: its driver is gone, or its queue is broken. DONE is still owed.
    pub(crate) fn abandon(&mut self) {
        if let Some(open) = &mut self.open {
            open.phase = Phase::Stopped;
            open.outlet.finish();
        }
    }

    /// Hands over what one kick brought.
    pub(crate) fn flush(&mut self) {
        if let Some(open) = &mut self.open {
            open.outlet.flush();
        }
    }

    /// Serves one chain of the hint queue.
    pub(crate) fn serve<M: GuestMemory>(
        &mut self,
        mem: &M,
        chain: &Chain,
        layout: &Layout,
        tally: &mut Counters,
    ) -> Fate {
        if chain.readable().next().is_some() {
            self.command(mem, chain, layout, tally);
        }
        if chain.has_writable() {
            self.blocks(chain, layout, tally);
        }
        Fate::Used(0)
    }

    fn command<M: GuestMemory>(&mut self, mem: &M, chain: &Chain, layout: &Layout, tally: &mut Counters) {
        let mut bytes = Vec::new();
        let read = chain.gather(mem, 0, 4, &mut bytes);
        let command = match <[u8; 4]>::try_from(bytes.as_slice()) {
            Ok(four) if read.is_ok() && chain.readable_bytes() == 4 => u32::from_le_bytes(four),
            _ => return tally.malformed("a hint command is not 4 bytes of guest memory"),
        };
        match &mut self.open {
            Some(open) if command == open.id && open.phase == Phase::Asked => open.phase = Phase::Sending,
            Some(open) if command == STOP && open.phase == Phase::Sending => {
                open.phase = Phase::Stopped;
                for region in layout.regions() {
                    open.outlet.covered(layout, *region);
                }
                open.outlet.finish();
            }
            _ => tally.late("a hint command of no open session, or a replayed one"),
        }
    }

    fn blocks(&mut self, chain: &Chain, layout: &Layout, tally: &mut Counters) {
        let Some(open) = self.open.as_mut().filter(|open| open.phase == Phase::Sending) else {
            return tally.late("free blocks outside a session");
        };
        tally.answers += 1;
        for segment in chain.writable() {
            match PageRange::inside_bytes(segment.address, u64::from(segment.len)) {
                Some(block) => open.outlet.free(layout, block),
                None => tally.malformed("a free block ends past the 64-bit address space"),
            }
        }
    }
}
