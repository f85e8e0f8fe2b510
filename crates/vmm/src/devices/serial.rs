//! COM1: a 16550 whose output goes to the console, and whose input comes from it.
//!
//! Invariants:
//!
//! - input is read only while the board runs and only as far as the FIFO has room, so no byte is lost: what the guest has
//!   not taken stays with whoever types it, or is in the FIFO and travels with the state;
//! - the input thread sleeps until there is something for it to do, however long the guest leaves the FIFO full.

use super::bus::BusDevice;
use crate::state::{Incoming, section};
use crate::{Console, Error, Result};
use machine::Section;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial as Registers, Trigger};
use vmm_sys_util::eventfd::EventFd;

const NAME: &str = "serial";
const VERSION: u32 = 1;

/// How many ports it has.
pub(super) const PORTS: u64 = 8;

/// Bytes of the FIFO.
const FIFO: usize = 64;

/// Interrupt enable: the bits that there are; received data, transmitter empty.
const IER_BITS: u8 = 0x0f;
const IER_RECEIVED: u8 = 1;
const IER_EMPTY: u8 = 2;
/// Interrupt identification: none, transmitter empty, received data.
const IIR_NONE: u8 = 1;
const IIR_EMPTY: u8 = 2;
const IIR_RECEIVED: u8 = 4;
/// Line status: data ready.
const LSR_READY: u8 = 1;
/// Modem control: loop mode.
const MCR_LOOP: u8 = 1 << 4;

/// The interrupt.
struct Irq(EventFd);

impl Trigger for Irq {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Where output goes. Never fails: a console that is gone must not disturb the guest.
#[derive(Default)]
struct Output {
    to: Option<Box<dyn Write + Send>>,
    warned: bool,
}

impl Output {
    fn report(&mut self, result: io::Result<()>) {
        if let Err(error) = result
            && !std::mem::replace(&mut self.warned, true)
        {
            tracing::warn!(%error, "the guest's console output cannot be written; it is dropped from here on");
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(to) = &mut self.to {
            let result = to.write_all(bytes);
            self.report(result);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if let Some(to) = &mut self.to {
            let result = to.flush();
            self.report(result);
        }
        Ok(())
    }
}

/// The device, as it is saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    baud_divisor_low: u8,
    baud_divisor_high: u8,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    fifo: Vec<u8>,
}

impl State {
    fn of(state: SerialState) -> Self {
        State {
            baud_divisor_low: state.baud_divisor_low,
            baud_divisor_high: state.baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            fifo: state.in_buffer,
        }
    }

    /// The device that it describes, unless no device could be so.
    fn check(self) -> Result<SerialState> {
        let fresh = SerialState::default();
        let ready = if self.fifo.is_empty() { 0 } else { LSR_READY };
        let identified = self.interrupt_identification;
        let wrong = if self.fifo.len() > FIFO {
            Some(format!("{} bytes in a FIFO of {FIFO}", self.fifo.len()))
        } else if self.interrupt_enable & !IER_BITS != 0 {
            Some(format!("interrupt enable register {:#x}", self.interrupt_enable))
        } else if self.line_status != fresh.line_status | ready {
            let (line, held) = (self.line_status, self.fifo.len());
            Some(format!("line status {line:#x} with {held} bytes in the FIFO"))
        } else if identified != IIR_NONE && (identified == 0 || identified & !(IIR_EMPTY | IIR_RECEIVED) != 0) {
            Some(format!("interrupt identification register {identified:#x}"))
        } else if identified & IIR_RECEIVED != 0 && self.fifo.is_empty() {
            Some("an interrupt for received data, but none in the FIFO".to_owned())
        } else if self.modem_status != fresh.modem_status {
            Some(format!("modem status {:#x}", self.modem_status))
        } else {
            None
        };
        if let Some(wrong) = wrong {
            return Err(Error::state(NAME, wrong));
        }
        Ok(SerialState {
            baud_divisor_low: self.baud_divisor_low,
            baud_divisor_high: self.baud_divisor_high,
            interrupt_enable: self.interrupt_enable,
            interrupt_identification: identified,
            line_control: self.line_control,
            line_status: self.line_status,
            modem_control: self.modem_control,
            modem_status: self.modem_status,
            scratch: self.scratch,
            in_buffer: self.fifo,
        })
    }
}

struct Port {
    registers: Registers<Irq, NoEvents, Output>,
    /// Whether input may be taken.
    running: bool,
    quit: bool,
    /// The input thread waits for room, or to be let run.
    starved: bool,
}

impl Port {
    /// Bytes of input that can be taken now. In loop mode the device hears only itself.
    fn room(&self) -> usize {
        if !self.running || self.registers.state().modem_control & MCR_LOOP != 0 {
            return 0;
        }
        self.registers.fifo_capacity()
    }
}

struct Shared {
    port: Mutex<Port>,
    /// Written to have the input thread look at `port` again.
    wake: OwnedFd,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Port> {
        self.port.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // Fails only where the count is about to overflow: then it is readable, which is all that is wanted.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Lets the input thread go on, where it waited for what is there now.
    fn feed(&self, port: &mut Port) {
        if port.starved && port.room() > 0 {
            port.starved = false;
            self.wake();
        }
    }

    /// Takes what there is to read; false when there will be no more.
    fn take_input(&self, input: &OwnedFd) -> bool {
        let mut port = self.lock();
        let mut bytes = [0; FIFO];
        let room = port.room().min(FIFO);
        // A read must not block under the lock, and whoever else reads this terminal may have been faster.
        if room == 0 || !is_readable(input) {
            return true;
        }
        match rustix::io::read(input, &mut bytes[..room]) {
            Ok(0) => false,
            Ok(n) => {
                if let Err(error) = port.registers.enqueue_raw_bytes(&bytes[..n]) {
                    tracing::error!(%error, "the serial device's interrupt");
                }
                true
            }
            Err(Errno::INTR | Errno::AGAIN) => true,
            Err(error) => {
                tracing::warn!(%error, "the guest's console input cannot be read; there is none from here on");
                false
            }
        }
    }

    /// The input thread.
    fn run(&self, input: &OwnedFd) {
        loop {
            let mut port = self.lock();
            if port.quit {
                return;
            }
            let wanted = port.room() > 0;
            port.starved = !wanted;
            drop(port);
            let mut fds = [
                PollFd::new(&self.wake, PollFlags::IN),
                PollFd::new(input, PollFlags::IN),
            ];
            let watched = if wanted { 2 } else { 1 };
            match poll(&mut fds[..watched], None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => {
                    tracing::error!(%error, "waiting for console input; there is none from here on");
                    return;
                }
            }
            if !fds[0].revents().is_empty() {
                // What was to be seen is seen above; an empty counter is as good.
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            }
            if wanted && !fds[1].revents().is_empty() && !self.take_input(input) {
                return;
            }
        }
    }
}

/// Whether a read would not block: bytes, an end or an error.
fn is_readable(input: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut [PollFd::new(input, PollFlags::IN)], Some(&now)), Ok(n) if n > 0)
}

/// The device and its input thread, which ends when this is dropped.
pub(super) struct Serial {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Serial {
    /// A device as it is at reset, that takes no input yet.
    pub(super) fn new(irq: EventFd, console: Console) -> Result<Self> {
        let output = Output {
            to: Some(console.output),
            warned: false,
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::kvm("making an eventfd for the serial device", e))?;
        let shared = Arc::new(Shared {
            port: Mutex::new(Port {
                registers: Registers::new(Irq(irq), output),
                running: false,
                quit: false,
                starved: false,
            }),
            wake,
        });
        let thread = match console.input {
            None => None,
            Some(input) => {
                let shared = Arc::clone(&shared);
                let thread = thread::Builder::new().name("console-input".to_owned());
                Some(thread.spawn(move || shared.run(&input)).map_err(Error::Thread)?)
            }
        };
        Ok(Serial { shared, thread })
    }

    /// The device, for the bus.
    pub(super) fn registers(&self) -> Arc<dyn BusDevice> {
        Arc::clone(&self.shared) as Arc<dyn BusDevice>
    }

    /// No input is taken when this has returned.
    pub(super) fn pause(&self) {
        self.shared.lock().running = false;
    }

    /// Takes input again, and raises the interrupt that is pending: its edge may have gone to a VM that is no more.
    pub(super) fn resume(&self) -> Result<()> {
        let mut port = self.shared.lock();
        port.running = true;
        self.shared.feed(&mut port);
        let state = port.registers.state();
        let (enabled, pending) = (state.interrupt_enable, state.interrupt_identification);
        let received = enabled & IER_RECEIVED != 0 && pending & IIR_RECEIVED != 0;
        let empty = enabled & IER_EMPTY != 0 && pending & IIR_EMPTY != 0;
        if received || empty {
            let irq = port.registers.interrupt_evt();
            irq.trigger()
                .map_err(|e| Error::kvm("raising the serial device's interrupt", e))?;
        }
        Ok(())
    }

    pub(super) fn save(&self) -> Result<Section> {
        let state = self.shared.lock().registers.state();
        section(NAME, VERSION, &State::of(state))
    }

    pub(super) fn restore(&self, incoming: &mut Incoming<'_>) -> Result<()> {
        let state = incoming.take::<State>(NAME, VERSION)?.check()?;
        let mut port = self.shared.lock();
        let irq = port.registers.interrupt_evt().0.try_clone();
        let irq = irq.map_err(|e| Error::kvm("duplicating the serial device's interrupt", e))?;
        let output = std::mem::take(port.registers.writer_mut());
        port.registers = Registers::from_state(&state, Irq(irq), NoEvents, output)
            .map_err(|e| Error::state(NAME, format!("it does not restore: {e}")))?;
        Ok(())
    }
}

impl Drop for Serial {
    fn drop(&mut self) {
        self.shared.lock().quit = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the console input thread panicked");
        }
    }
}

impl BusDevice for Shared {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let ([byte], Ok(offset)) = (data, u8::try_from(offset)) else {
            return;
        };
        let mut port = self.lock();
        *byte = port.registers.read(offset);
        self.feed(&mut port);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let (&[byte], Ok(offset)) = (data, u8::try_from(offset)) else {
            return;
        };
        let mut port = self.lock();
        if let Err(error) = port.registers.write(offset, byte) {
            tracing::error!(%error, "the serial device's interrupt");
        }
        self.feed(&mut port);
    }
}
