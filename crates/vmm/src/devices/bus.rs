//! Ports and addresses to devices.
//!
//! A device has one range of a bus and a lock of its own, so vCPUs meet only where they use the same one. What nobody
//! answers reads as all ones and is lost when written, as on a PC: a place without a device, an access that leaves its
//! device's range at the end, a width that no instruction has.

use crate::{Error, Result};
use std::sync::Arc;

/// A device as a bus reaches it. Offsets are within the device's range; an access lies within it, and is 1, 2, 4 or 8
/// bytes wide.
pub(crate) trait BusDevice: Send + Sync {
    /// A read: fills `data`, which holds all ones.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// A write.
    fn write(&self, offset: u64, data: &[u8]);
}

struct Slot {
    start: u64,
    len: u64,
    device: Arc<dyn BusDevice>,
}

/// One address space, ports or memory.
#[derive(Default)]
pub(crate) struct Bus {
    slots: Vec<Slot>,
}

impl Bus {
    /// Puts `device` at `len` addresses from `start` on.
    pub(crate) fn insert(&mut self, start: u64, len: u64, device: Arc<dyn BusDevice>) -> Result<()> {
        let free = |slot: &Slot| start >= slot.start + slot.len || start + len <= slot.start;
        if len == 0 || start.checked_add(len).is_none() || !self.slots.iter().all(free) {
            return Err(Error::Config(format!(
                "two devices cannot both be at {start:#x}, {len:#x} addresses"
            )));
        }
        self.slots.push(Slot { start, len, device });
        Ok(())
    }

    /// The device that answers an access of `width` bytes at `address`, and the offset in it.
    fn find(&self, address: u64, width: usize) -> Option<(&dyn BusDevice, u64)> {
        if !matches!(width, 1 | 2 | 4 | 8) {
            return None;
        }
        self.slots.iter().find_map(|slot| {
            let offset = address.checked_sub(slot.start)?;
            let end = offset.checked_add(width as u64)?;
            (end <= slot.len).then(|| (&*slot.device, offset))
        })
    }

    pub(crate) fn read(&self, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        match self.find(address, data.len()) {
            Some((device, offset)) => device.read(offset, data),
            None => tracing::trace!(address, width = data.len(), "read that nobody answers"),
        }
    }

    pub(crate) fn write(&self, address: u64, data: &[u8]) {
        match self.find(address, data.len()) {
            Some((device, offset)) => device.write(offset, data),
            None => tracing::trace!(address, width = data.len(), "write that nobody takes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<(u64, Vec<u8>)>>);

    impl BusDevice for Recorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(u8::try_from(offset).unwrap());
        }

        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    fn bus() -> (Bus, Arc<Recorder>) {
        let (mut bus, device) = (Bus::default(), Arc::new(Recorder::default()));
        bus.insert(0x100, 8, device.clone()).unwrap();
        (bus, device)
    }

    #[test]
    fn accesses_reach_their_device_at_the_offset_in_it() {
        let (bus, device) = bus();
        let mut four = [0; 4];
        bus.read(0x104, &mut four);
        assert_eq!(four, [4; 4]);
        bus.write(0x107, &[9]);
        bus.write(0x100, &[1, 2]);
        assert_eq!(*device.0.lock().unwrap(), [(7, vec![9]), (0, vec![1, 2])]);
    }

    #[test]
    fn what_nobody_answers_is_all_ones_and_lost() {
        let (bus, device) = bus();
        for (address, width) in [
            (0xff, 1),
            (0x108, 1),
            (0x105, 4),
            (0xff, 2),
            (0x100, 3),
            (u64::MAX, 8),
            (0x100, 0),
        ] {
            let mut data = vec![0; width];
            bus.read(address, &mut data);
            assert!(data.iter().all(|byte| *byte == 0xff), "{address:#x}, {width} bytes");
            bus.write(address, &data);
        }
        assert!(device.0.lock().unwrap().is_empty());
    }

    #[test]
    fn two_devices_do_not_share_an_address() {
        let (mut bus, device) = bus();
        for (start, len) in [
            (0x107, 1),
            (0xff, 2),
            (0x80, 0x100),
            (0x102, 2),
            (0x200, 0),
            (u64::MAX, 2),
        ] {
            assert!(bus.insert(start, len, device.clone()).is_err(), "{start:#x}, {len}");
        }
        bus.insert(0x108, 1, device.clone()).unwrap();
        bus.insert(0xff, 1, device).unwrap();
    }
}
