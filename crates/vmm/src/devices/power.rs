//! Power: ACPI's sleep control, sleep status and reset registers (ACPI 6.5, sections 4.8.3.7 and 4.8.3.6).
//!
//! All of it is without state: what a guest writes either ends it or does nothing.

use super::bus::BusDevice;
use crate::Ended;
use crate::platform::{ACPI_RESET, ACPI_RESET_VALUE, ACPI_S5, ACPI_SLEEP_CONTROL, ACPI_SLEEP_STATUS};
use crate::wiring::Ending;

/// The first of its ports.
pub(super) const BASE: u16 = ACPI_SLEEP_CONTROL;
/// How many there are.
pub(super) const PORTS: u64 = 3;

/// SLP_EN of the sleep control register.
const SLEEP_ENABLE: u8 = 1 << 5;
/// Where SLP_TYPx lies in it, and its width.
const SLEEP_TYPE_SHIFT: u8 = 2;
const SLEEP_TYPE_MASK: u8 = 7;

const _: () = assert!(ACPI_SLEEP_STATUS == BASE + 1 && ACPI_RESET == BASE + 2);

/// The registers.
pub(super) struct Power {
    ending: Ending,
}

impl Power {
    pub(super) fn new(ending: Ending) -> Self {
        Power { ending }
    }
}

impl BusDevice for Power {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        // No sleep state was left, none is being entered.
        if data.len() == 1 {
            data.fill(0);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let &[value] = data else { return };
        match u16::try_from(offset).map(|offset| BASE + offset) {
            Ok(ACPI_SLEEP_CONTROL) if value & SLEEP_ENABLE != 0 => {
                let sleep_type = value >> SLEEP_TYPE_SHIFT & SLEEP_TYPE_MASK;
                if sleep_type == ACPI_S5 {
                    self.ending.tell(Ended::PowerOff);
                } else {
                    tracing::debug!(sleep_type, "a sleep state that this machine does not have");
                }
            }
            Ok(ACPI_RESET) if value == ACPI_RESET_VALUE => self.ending.tell(Ended::Reset),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(writes: &[(u64, &[u8])]) -> Option<Ended> {
        let ending = Ending::default();
        let power = Power::new(ending.clone());
        for (offset, data) in writes {
            power.write(*offset, data);
        }
        ending.get()
    }

    #[test]
    fn s5_powers_off_and_the_reset_register_resets() {
        assert!(matches!(after(&[(0, &[5 << 2 | 1 << 5])]), Some(Ended::PowerOff)));
        assert!(matches!(after(&[(2, &[1])]), Some(Ended::Reset)));
    }

    #[test]
    fn anything_else_does_nothing() {
        // S5 without SLP_EN, S3, the status register, another reset value, two bytes at once.
        let all: [(u64, &[u8]); 6] = [
            (0, &[5 << 2]),
            (0, &[3 << 2 | 1 << 5]),
            (1, &[0xff]),
            (2, &[0]),
            (2, &[6]),
            (0, &[5 << 2 | 1 << 5, 0]),
        ];
        assert!(after(&all).is_none());
    }

    #[test]
    fn its_registers_read_as_zero() {
        let power = Power::new(Ending::default());
        let mut byte = [0xff];
        power.read(1, &mut byte);
        assert_eq!(byte, [0]);
    }
}
