//! Free page hints (virtio 1.3, section 5.5.6.4), as Linux gives them: blocks of the largest order are *allocated*, each
//! is handed over in a device-writable buffer, and all are kept until the device says DONE.
//!
//! With `init_on_alloc` the allocator zeroes each block first. The kernel takes blocks back earlier where it has no other
//! memory. A new command id in the middle ends the running session with STOP and starts the next.

use super::virtqueue::{Buffer, Virtqueue};
use super::{CMD_ID, Later, Ports};
use crate::Result;
use crate::buddy::MAX_ORDER;
use crate::mm::Mm;
use pages::PAGE_BYTES;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The device's command ids that are not sessions.
const STOP: u32 = 0;
const DONE: u32 = 1;

/// Blocks handed over before other work gets its turn.
const AT_ONCE: u32 = 64;

/// How long to wait for the device to make room.
const ROOM: Duration = Duration::from_micros(100);

/// Where the command to stop lies behind the command to start, bytes.
const STOP_PLACE: u64 = 64;

/// The hint queue.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hinting {
    queue: Virtqueue,
    /// The command id that was last read.
    received: u32,
    /// The session that was last started.
    active: u32,
    /// Whether its STOP is still to be sent.
    sending: bool,
}

impl Hinting {
    pub(crate) fn new(index: u16) -> Self {
        Hinting {
            queue: Virtqueue::new(index),
            received: STOP,
            active: STOP,
            sending: false,
        }
    }

    pub(crate) fn index(&self) -> u16 {
        self.queue.index()
    }

    pub(crate) fn queue(&mut self) -> &mut Virtqueue {
        &mut self.queue
    }

    pub(crate) fn configured(&mut self, ports: &Ports) {
        self.received = ports.config(CMD_ID);
    }

    pub(crate) fn step(&mut self, mm: &mut Mm, ports: &Ports) -> Result<Later> {
        while self.queue.take_used(mm)?.is_some() {}
        if self.sending {
            return self.send_blocks(mm, ports);
        }
        if self.received == DONE {
            mm.release_held(u64::MAX)?;
            return Ok(None);
        }
        if self.received == STOP || self.received == self.active {
            return Ok(None);
        }
        if !self.command(mm, ports, mm.places.commands, self.received)? {
            return Ok(Some(ROOM));
        }
        self.active = self.received;
        self.sending = true;
        self.send_blocks(mm, ports)
    }

    fn send_blocks(&mut self, mm: &mut Mm, ports: &Ports) -> Result<Later> {
        for _ in 0..AT_ONCE {
            if self.received != self.active {
                return self.stop(mm, ports);
            }
            // One descriptor is kept for STOP.
            if self.queue.room() <= 1 {
                return Ok(Some(ROOM));
            }
            let Some(frame) = mm.alloc_noretry(MAX_ORDER)? else {
                return self.stop(mm, ports);
            };
            mm.hold(frame)?;
            let block = Buffer {
                address: mm.frames.address(frame)?,
                len: u32::try_from(PAGE_BYTES << MAX_ORDER).unwrap_or(u32::MAX),
                writable: true,
            };
            self.queue.add(mm, &[block])?;
            ports.kick(self.queue.index());
        }
        Ok(Some(Duration::ZERO))
    }

    fn stop(&mut self, mm: &Mm, ports: &Ports) -> Result<Later> {
        if self.command(mm, ports, mm.places.commands + STOP_PLACE, STOP)? {
            self.sending = false;
        }
        // Room for it, or a newer id that is waiting, or DONE.
        Ok(Some(ROOM).filter(|_| self.sending || self.received != self.active))
    }

    fn command(&mut self, mm: &Mm, ports: &Ports, address: u64, id: u32) -> Result<bool> {
        if self.queue.room() == 0 {
            return Ok(false);
        }
        mm.ram.write(address, &id.to_le_bytes())?;
        let buffer = Buffer {
            address,
            len: 4,
            writable: false,
        };
        let added = self.queue.add(mm, &[buffer])?;
        ports.kick(self.queue.index());
        Ok(added)
    }
}
