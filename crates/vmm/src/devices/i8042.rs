//! The keyboard controller: enough for a kernel to find out quickly that it has nothing to offer but reset.
//!
//! A controller that answers nothing costs Linux half a second a command while it boots, so the commands of its probe are
//! answered: there is a control byte, the self tests pass, there is no second port, and no keyboard ever says anything.

use super::bus::BusDevice;
use crate::platform::{I8042_COMMAND, I8042_DATA};
use crate::state::{Incoming, section};
use crate::wiring::Ending;
use crate::{Ended, Error, Result};
use machine::Section;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const NAME: &str = "i8042";
const VERSION: u32 = 1;

/// Status: a byte waits to be read.
const OUTPUT_FULL: u8 = 1 << 0;
/// Status: set by the self test.
const SYSTEM: u8 = 1 << 2;

/// Both ports off, scan code translation on, self test passed.
const CONTROL_AT_RESET: u8 = 0x74;

const READ_CONTROL: u8 = 0x20;
const WRITE_CONTROL: u8 = 0x60;
const TEST_AUX: u8 = 0xa9;
const SELF_TEST: u8 = 0xaa;
const TEST_KEYBOARD: u8 = 0xab;
const LOOP_AUX: u8 = 0xd3;
const RESET_CPU: u8 = 0xfe;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    control: u8,
    /// The byte that waits to be read.
    output: Option<u8>,
    /// The command whose parameter comes next.
    command: Option<u8>,
}

/// The controller.
pub(super) struct I8042 {
    state: Mutex<State>,
    ending: Ending,
}

impl I8042 {
    pub(super) fn new(ending: Ending) -> Self {
        I8042 {
            state: Mutex::new(State {
                control: CONTROL_AT_RESET,
                output: None,
                command: None,
            }),
            ending,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn save(&self) -> Result<Section> {
        section(NAME, VERSION, &*self.lock())
    }

    pub(super) fn restore(&self, incoming: &mut Incoming<'_>) -> Result<()> {
        let state: State = incoming.take(NAME, VERSION)?;
        if !matches!(state.command, None | Some(WRITE_CONTROL | LOOP_AUX)) {
            let why = format!("command {:#x?} takes no parameter", state.command);
            return Err(Error::state(NAME, why));
        }
        *self.lock() = state;
        Ok(())
    }

    /// One of its two ports, for the bus.
    pub(super) fn port(self: &Arc<Self>, port: u16) -> Arc<dyn BusDevice> {
        Arc::new(Port {
            controller: Arc::clone(self),
            port,
        })
    }

    fn command(&self, command: u8) {
        let mut state = self.lock();
        state.command = None;
        match command {
            READ_CONTROL => state.output = Some(state.control),
            WRITE_CONTROL | LOOP_AUX => state.command = Some(command),
            SELF_TEST => state.output = Some(0x55),
            TEST_KEYBOARD => state.output = Some(0),
            // The clock line is stuck: nothing is there.
            TEST_AUX => state.output = Some(1),
            RESET_CPU => self.ending.tell(Ended::Reset),
            _ => tracing::debug!(command, "keyboard controller command ignored"),
        }
    }

    fn data(&self, value: u8) {
        let mut state = self.lock();
        match state.command.take() {
            Some(WRITE_CONTROL) => state.control = value,
            // It comes back, but not as from a second port.
            Some(LOOP_AUX) => state.output = Some(value),
            _ => tracing::debug!(value, "a byte for a keyboard that is not there"),
        }
    }
}

/// The data or the command port.
struct Port {
    controller: Arc<I8042>,
    port: u16,
}

impl BusDevice for Port {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        let [byte] = data else { return };
        let mut state = self.controller.lock();
        *byte = match self.port {
            I8042_DATA => state.output.take().unwrap_or(0),
            _ if state.output.is_some() => SYSTEM | OUTPUT_FULL,
            _ => SYSTEM,
        };
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        match (self.port, data) {
            (I8042_COMMAND, &[command]) => self.controller.command(command),
            (I8042_DATA, &[value]) => self.controller.data(value),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use machine::MachineState;

    struct Driver(Arc<I8042>, Arc<dyn BusDevice>, Arc<dyn BusDevice>, Ending);

    impl Driver {
        fn new() -> Self {
            let ending = Ending::default();
            let device = Arc::new(I8042::new(ending.clone()));
            let (data, command) = (device.port(I8042_DATA), device.port(I8042_COMMAND));
            Driver(device, data, command, ending)
        }

        fn status(&self) -> u8 {
            let mut byte = [0];
            self.2.read(0, &mut byte);
            byte[0]
        }

        fn data(&self) -> u8 {
            let mut byte = [0];
            self.1.read(0, &mut byte);
            byte[0]
        }

        /// A command with an answer.
        fn ask(&self, command: u8, parameter: Option<u8>) -> u8 {
            self.2.write(0, &[command]);
            if let Some(parameter) = parameter {
                self.1.write(0, &[parameter]);
            }
            assert_eq!(self.status() & 3, OUTPUT_FULL, "an answer waits, no input is pending");
            self.data()
        }
    }

    #[test]
    fn a_probe_is_answered_without_waiting() {
        let driver = Driver::new();
        assert_eq!(driver.status() & 3, 0);
        assert_eq!(driver.ask(SELF_TEST, None), 0x55);
        let control = driver.ask(READ_CONTROL, None);
        driver.2.write(0, &[WRITE_CONTROL]);
        driver.1.write(0, &[control | 1]);
        assert_eq!(driver.ask(READ_CONTROL, None), control | 1);
        assert_eq!(driver.ask(LOOP_AUX, Some(0x5a)), 0x5a);
        assert_ne!(driver.ask(TEST_AUX, None), 0, "there is no second port");
        driver.1.write(0, &[0xf2]);
        assert_eq!(driver.status() & OUTPUT_FULL, 0, "no keyboard answers");
        assert!(driver.3.get().is_none());
    }

    #[test]
    fn the_reset_command_ends_the_guest_and_its_value_as_data_does_not() {
        let driver = Driver::new();
        driver.1.write(0, &[RESET_CPU]);
        driver.2.write(0, &[RESET_CPU, 0]);
        assert!(driver.3.get().is_none());
        driver.2.write(0, &[RESET_CPU]);
        assert!(matches!(driver.3.get(), Some(Ended::Reset)));
    }

    #[test]
    fn state_is_carried_over_and_checked() {
        let (a, b) = (Driver::new(), Driver::new());
        a.2.write(0, &[SELF_TEST]);
        a.2.write(0, &[WRITE_CONTROL]);
        let good = MachineState {
            sections: vec![a.0.save().unwrap()],
        };
        b.0.restore(&mut Incoming::new(&good)).unwrap();
        b.1.write(0, &[0x11]);
        assert_eq!(b.data(), 0x55);
        assert_eq!(b.ask(READ_CONTROL, None), 0x11);
        let bad = State {
            command: Some(RESET_CPU),
            ..a.0.lock().clone()
        };
        let bad = MachineState {
            sections: vec![section(NAME, VERSION, &bad).unwrap()],
        };
        assert!(b.0.restore(&mut Incoming::new(&bad)).is_err());
    }
}
