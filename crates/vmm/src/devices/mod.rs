//! The board: everything that a vCPU reaches by ports, by addresses that are not RAM, and by doorbells.
//!
//! | | file |
//! |---|---|
//! | ports and addresses to devices | [`bus`] |
//! | COM1, and the thread that reads the console | [`serial`] |
//! | keyboard controller; ACPI's sleep and reset registers | [`i8042`], [`power`] |
//! | virtio over MMIO: balloon, entropy | [`virtio`] |
//! | the thread that serves rung doorbells | [`doorbells`] |
//!
//! Invariants:
//!
//! - between [`Board::pause`] and [`Board::resume`] no device writes guest memory of its own accord or takes input. The
//!   vCPUs are paused before and resumed after, so there is no access from there either;
//! - nothing that a guest does at a register or in a ring makes the board panic, spin or allocate without bound;
//! - state that is restored is checked: a board that refused a section must not be resumed.

mod bus;
mod doorbells;
mod i8042;
mod power;
mod serial;
mod virtio;

#[cfg(test)]
mod tests;

use crate::platform::{
    I8042_COMMAND, I8042_DATA, MAX_VIRTIO, SERIAL_GSI, SERIAL_PORT, VIRTIO_MMIO_BYTES, VirtioPlace, virtio_place,
};
use crate::state::Incoming;
use crate::wiring::{Ending, Exits, Wiring};
use crate::{Console, Error, Result};
use ::balloon::SharedBalloon;
use bus::Bus;
use doorbells::{DeviceThread, Doorbell, eventfd};
use i8042::I8042;
use machine::Section;
use memory::DeviceMemory;
use pages::Layout;
use power::Power;
use serial::Serial;
use std::sync::Arc;
use virtio::balloon::VirtioBalloon;
use virtio::mmio::{NOTIFY_OFFSET, Transport};
use virtio::rng::Rng;
use virtio::{Line, VirtioDevice};

/// The two address spaces, as vCPUs reach them.
#[derive(Default)]
struct Buses {
    ports: Bus,
    memory: Bus,
}

impl Exits for Buses {
    fn port_read(&self, port: u16, data: &mut [u8]) {
        self.ports.read(u64::from(port), data);
    }

    fn port_write(&self, port: u16, data: &[u8]) {
        self.ports.write(u64::from(port), data);
    }

    fn memory_read(&self, address: u64, data: &mut [u8]) {
        self.memory.read(address, data);
    }

    fn memory_write(&self, address: u64, data: &[u8]) {
        self.memory.write(address, data);
    }
}

/// The virtio devices while the board is put together.
struct Virtio<'a> {
    wiring: &'a dyn Wiring,
    transports: Vec<Arc<Transport>>,
    bells: Vec<Doorbell>,
}

impl Virtio<'_> {
    /// Puts the next device into its place.
    fn add<D: VirtioDevice + 'static>(
        &mut self,
        buses: &mut Buses,
        make: impl FnOnce(Arc<Line>) -> Result<D>,
    ) -> Result<Arc<D>> {
        let index = self.transports.len();
        if index >= MAX_VIRTIO {
            return Err(Error::Config(format!("more than {MAX_VIRTIO} virtio devices")));
        }
        let place = virtio_place(index);
        let line = Arc::new(Line::new(self.wiring.irq(place.gsi)?));
        let device = Arc::new(make(Arc::clone(&line))?);
        let transport = Arc::new(Transport::new(
            index,
            line,
            Arc::clone(&device) as Arc<dyn VirtioDevice>,
        ));
        let registers = Arc::clone(&transport);
        buses.memory.insert(place.address, VIRTIO_MMIO_BYTES, registers)?;
        if !device.serves_on_vcpu() {
            for queue in (0u16..).take(device.queue_sizes().len()) {
                let bell = eventfd()?;
                let address = place.address + NOTIFY_OFFSET;
                self.wiring.doorbell(&bell, address, u32::from(queue))?;
                self.bells.push(Doorbell {
                    bell,
                    device: Arc::clone(&transport),
                    queue,
                });
            }
        }
        self.transports.push(transport);
        Ok(device)
    }
}

/// The board of one machine. Dropping it ends its threads.
pub(crate) struct Board {
    buses: Arc<Buses>,
    serial: Serial,
    i8042: Arc<I8042>,
    transports: Vec<Arc<Transport>>,
    balloon: Option<SharedBalloon<DeviceMemory>>,
    thread: DeviceThread,
}

impl Board {
    /// A board that no driver has touched, its threads parked.
    ///
    /// # Errors
    /// A balloon that cannot be so; what `wiring` refuses; a thread or an eventfd that cannot be had.
    pub(crate) fn new(
        wiring: &dyn Wiring,
        memory: &DeviceMemory,
        layout: &Arc<Layout>,
        balloon: Option<balloon::Config>,
        console: Console,
        ending: Ending,
    ) -> Result<Board> {
        let mut buses = Buses::default();
        let serial = Serial::new(wiring.irq(SERIAL_GSI)?, console)?;
        let i8042 = Arc::new(I8042::new(ending.clone()));
        let ports = &mut buses.ports;
        ports.insert(u64::from(SERIAL_PORT), serial::PORTS, serial.registers())?;
        ports.insert(u64::from(I8042_DATA), 1, i8042.port(I8042_DATA))?;
        ports.insert(u64::from(I8042_COMMAND), 1, i8042.port(I8042_COMMAND))?;
        let power = Arc::new(Power::new(ending.clone()));
        ports.insert(u64::from(power::BASE), power::PORTS, power)?;

        let mut virtio = Virtio {
            wiring,
            transports: Vec::new(),
            bells: Vec::new(),
        };
        let balloon = match balloon {
            None => None,
            Some(config) => {
                let make = |line| VirtioBalloon::new(config, layout, memory, line);
                Some(virtio.add(&mut buses, make)?.shared())
            }
        };
        virtio.add(&mut buses, |line| Ok(Rng::new(memory.clone(), line)))?;
        Ok(Board {
            buses: Arc::new(buses),
            serial,
            i8042,
            transports: virtio.transports,
            balloon,
            thread: DeviceThread::spawn(virtio.bells, ending)?,
        })
    }

    /// Who answers the vCPUs' accesses.
    pub(crate) fn exits(&self) -> Arc<dyn Exits> {
        Arc::clone(&self.buses) as Arc<dyn Exits>
    }

    /// Where the virtio-mmio devices lie, in order.
    pub(crate) fn virtio_places(&self) -> Vec<VirtioPlace> {
        (0..self.transports.len()).map(virtio_place).collect()
    }

    /// The balloon device, where there is one.
    pub(crate) fn balloon(&self) -> Option<SharedBalloon<DeviceMemory>> {
        self.balloon.clone()
    }

    /// Lets the device threads run for the first time: the same as [`Board::resume`].
    pub(crate) fn start(&self) -> Result<()> {
        self.resume()
    }

    /// Serves the doorbells that were rung and parks the device threads. The vCPUs have to be paused before. Fine on a
    /// board that is paused.
    ///
    /// # Errors
    /// The device thread is gone, because of which the guest has ended.
    pub(crate) fn pause(&self) -> Result<()> {
        self.serial.pause();
        self.thread.pause()?;
        self.transports.iter().for_each(|transport| transport.pause());
        Ok(())
    }

    /// Catches up with what was lost on the way (looks at every queue, raises again the interrupts that are pending), and
    /// lets the device threads run. The vCPUs follow after. Fine on a board that runs.
    ///
    /// # Errors
    /// An interrupt that cannot be raised.
    pub(crate) fn resume(&self) -> Result<()> {
        for transport in &self.transports {
            transport.resume();
        }
        self.serial.resume()?;
        self.thread.run();
        Ok(())
    }

    /// The state of a paused board. An open question to the balloon is ended by it.
    ///
    /// # Errors
    /// The board runs.
    pub(crate) fn save(&self) -> Result<Vec<Section>> {
        self.check_paused("saved")?;
        let mut sections = vec![self.serial.save()?, self.i8042.save()?];
        for transport in &self.transports {
            sections.extend(transport.save()?);
        }
        Ok(sections)
    }

    /// Takes over the state of another board like this one, while paused.
    ///
    /// # Errors
    /// The board runs; a section that is missing or that this board could not have saved.
    pub(crate) fn restore(&self, incoming: &mut Incoming<'_>) -> Result<()> {
        self.check_paused("restored")?;
        self.serial.restore(incoming)?;
        self.i8042.restore(incoming)?;
        self.transports
            .iter()
            .try_for_each(|transport| transport.restore(incoming))
    }

    fn check_paused(&self, what: &str) -> Result<()> {
        if self.thread.is_parked() {
            return Ok(());
        }
        Err(Error::Condition(format!(
            "the devices cannot be {what} while they run: pause the machine first"
        )))
    }
}
