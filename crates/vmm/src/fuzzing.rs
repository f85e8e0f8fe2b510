//! What is fuzzed of this crate: a board without KVM, and the sections that go to KVM, as far as they are read without it.
//!
//! For the fuzz targets alone (feature `fuzzing`); no embedding VMM needs it.

use crate::devices::Board;
use crate::state::Incoming;
use crate::wiring::{Ending, Exits, Wiring};
use crate::{Console, Ended, Error, Result, kvm, vcpu};
use machine::MachineState;
use memory::{DeviceMemory, GuestMemory};
use std::sync::Arc;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Interrupts that nobody takes, doorbells that nobody rings: a kick is an access to the notify register.
struct Unwired;

impl Wiring for Unwired {
    fn irq(&self, _gsi: u32) -> Result<EventFd> {
        EventFd::new(EFD_NONBLOCK).map_err(|e| Error::Condition(format!("an eventfd: {e}")))
    }

    fn doorbell(&self, _bell: &EventFd, _address: u64, _value: u32) -> Result<()> {
        Ok(())
    }
}

/// A board over guest RAM, paused at first.
pub struct FuzzedBoard {
    board: Board,
    exits: Arc<dyn Exits>,
    ending: Ending,
}

impl FuzzedBoard {
    /// A board that no driver has touched.
    ///
    /// # Errors
    /// A balloon that cannot be so.
    pub fn new(ram: &Arc<GuestMemory>, balloon: balloon::Config) -> Result<Self> {
        let ending = Ending::default();
        let console = Console {
            input: None,
            output: Box::new(std::io::sink()),
        };
        let memory = DeviceMemory::new(ram);
        let board = Board::new(&Unwired, &memory, ram.layout(), Some(balloon), console, ending.clone())?;
        Ok(FuzzedBoard {
            exits: board.exits(),
            board,
            ending,
        })
    }

    /// Runs the board.
    ///
    /// # Errors
    /// An interrupt that cannot be raised.
    pub fn resume(&self) -> Result<()> {
        self.board.resume()
    }

    /// Pauses the board and saves it.
    ///
    /// # Errors
    /// Its thread is gone.
    pub fn save(&self) -> Result<MachineState> {
        self.board.pause()?;
        let sections = self.board.save()?;
        Ok(MachineState { sections })
    }

    /// Takes over a state.
    ///
    /// # Errors
    /// One that no such board could have saved.
    pub fn restore(&self, state: &MachineState) -> Result<()> {
        let mut incoming = Incoming::new(state);
        self.board.restore(&mut incoming)?;
        incoming.finish()
    }

    /// A vCPU's access to a port: what is read there, after what is written.
    pub fn port(&self, port: u16, write: Option<&[u8]>, read: &mut [u8]) {
        if let Some(bytes) = write {
            self.exits.port_write(port, bytes);
        }
        self.exits.port_read(port, read);
    }

    /// A vCPU's access to memory that is not RAM, likewise.
    pub fn memory(&self, address: u64, write: Option<&[u8]>, read: &mut [u8]) {
        if let Some(bytes) = write {
            self.exits.memory_write(address, bytes);
        }
        self.exits.memory_read(address, read);
    }

    /// Whether something failed, and did not merely end.
    pub fn has_failed(&self) -> bool {
        matches!(self.ending.get(), Some(Ended::Failed(_)))
    }
}

/// Where the board's virtio devices lie, the first of them, and how far one from the next.
pub const VIRTIO: (u64, u64) = (crate::platform::VIRTIO_MMIO_BASE, crate::platform::VIRTIO_MMIO_BYTES);

/// Sections of one vCPU and of what lives in the kernel, all zero: what their forms are.
///
/// # Errors
/// None that is known.
pub fn kernel_sections() -> Result<MachineState> {
    let mut sections = vec![vcpu::fuzzing::zeroed()?];
    sections.extend(kvm::zeroed_chips()?);
    Ok(MachineState { sections })
}

/// Reads and checks such sections as a restore does, short of handing them to KVM.
///
/// # Errors
/// What a restore refuses.
pub fn check_kernel_sections(state: &MachineState) -> Result<()> {
    let mut incoming = Incoming::new(state);
    vcpu::fuzzing::check(&mut incoming)?;
    kvm::read_chips(&mut incoming)?;
    incoming.finish()
}
