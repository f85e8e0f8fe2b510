//! What a vCPU comes out of the guest for, and what is done about it.

use super::sys::{InternalError, RunPage};
use crate::kvm::hex;
use crate::wiring::Exits;
use crate::{Ended, Error};
use kvm_bindings::{
    KVM_EXIT_DIRTY_RING_FULL, KVM_INTERNAL_ERROR_EMULATION, KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET,
    KVM_SYSTEM_EVENT_SHUTDOWN,
};
use kvm_ioctls::{VcpuExit, VcpuFd};
use memory::GuestMemory;
use pages::PAGE_BYTES;
use std::sync::Arc;

/// The longest instruction.
const INSTRUCTION_BYTES: usize = 15;

/// What comes after an exit.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum After {
    /// The vCPU goes on.
    GoOn,
    /// Its dirty ring has to be emptied first.
    RingFull,
    /// The guest ended.
    End(End),
}

/// A guest's end, before it is looked into.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    PowerOff,
    Reset,
    /// A triple fault.
    Shutdown,
    InternalError,
    /// Anything else, in words.
    Other(String),
}

/// Serves an exit.
pub(super) fn serve(exit: VcpuExit<'_>, page: &RunPage, exits: &dyn Exits) -> After {
    match exit {
        VcpuExit::IoIn(port, data) => {
            let one = access_bytes(page.port_access_bytes(), data.len());
            data.chunks_mut(one).for_each(|access| exits.port_read(port, access));
        }
        VcpuExit::IoOut(port, data) => {
            let one = access_bytes(page.port_access_bytes(), data.len());
            data.chunks(one).for_each(|access| exits.port_write(port, access));
        }
        VcpuExit::MmioRead(address, data) => exits.memory_read(address, data),
        VcpuExit::MmioWrite(address, data) => exits.memory_write(address, data),
        VcpuExit::Intr | VcpuExit::IrqWindowOpen | VcpuExit::SetTpr | VcpuExit::IoapicEoi(_) => {}
        VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL) => return After::RingFull,
        VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _) => return After::End(End::PowerOff),
        VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _) => return After::End(End::Reset),
        VcpuExit::Shutdown => return After::End(End::Shutdown),
        VcpuExit::InternalError => return After::End(End::InternalError),
        other => return After::End(End::Other(words(&other))),
    }
    After::GoOn
}

/// Bytes of one access to a port, of `all` that came: a string instruction makes several at once.
fn access_bytes(one: usize, all: usize) -> usize {
    if one == 0 || !all.is_multiple_of(one) {
        return all.max(1);
    }
    one
}

fn words(exit: &VcpuExit<'_>) -> String {
    match exit {
        VcpuExit::FailEntry(reason, cpu) => {
            format!("the processor refused to enter the guest: hardware reason {reason:#x}, on CPU {cpu} of this host")
        }
        VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_CRASH, data) => format!("the guest says that it crashed: {data:x?}"),
        VcpuExit::MemoryFault { flags, gpa, size } => {
            format!("guest memory at {gpa:#x}, {size} bytes, cannot be reached (flags {flags:#x})")
        }
        other => format!("KVM stopped it for a reason that has no meaning here: {other:?}"),
    }
}

/// What the end of a guest is called, after a look at the vCPU that met it.
pub(super) fn ended(end: End, vcpu: u32, fd: &VcpuFd, page: &RunPage, memory: &GuestMemory) -> Ended {
    let failed = |error| Ended::Failed(Arc::new(error));
    let at = || {
        fd.get_regs()
            .map_or("an address that KVM does not say".to_owned(), |regs| {
                format!("{:#x}", regs.rip)
            })
    };
    let stopped = |why| failed(Error::Vcpu { vcpu, why });
    match end {
        End::PowerOff => Ended::PowerOff,
        End::Reset => Ended::Reset,
        End::Shutdown => stopped(format!("triple fault, at {}", at())),
        End::Other(why) => stopped(format!("{why}; it is at {}", at())),
        End::InternalError => {
            let error = page.internal_error();
            if error.suberror == KVM_INTERNAL_ERROR_EMULATION {
                failed(emulation(vcpu, fd, error, memory))
            } else {
                let InternalError { suberror, data, .. } = error;
                stopped(format!("KVM's internal error {suberror}, data {data:x?}, at {}", at()))
            }
        }
    }
}

fn emulation(vcpu: u32, fd: &VcpuFd, error: InternalError, memory: &GuestMemory) -> Error {
    let rip = fd.get_regs().map_or(0, |regs| regs.rip);
    let bytes = match error.instruction {
        Some(bytes) => hex(&bytes),
        None => match instruction_at(fd, memory) {
            bytes if bytes.is_empty() => "that cannot be read".to_owned(),
            bytes => hex(&bytes),
        },
    };
    Error::Emulation { vcpu, rip, bytes }
}

/// The bytes where the vCPU is, as far as they are in RAM.
pub(super) fn instruction_at(fd: &VcpuFd, memory: &GuestMemory) -> Vec<u8> {
    let mut found = Vec::new();
    let (Ok(regs), Ok(sregs)) = (fd.get_regs(), fd.get_sregs()) else {
        return found;
    };
    let mut linear = sregs.cs.base.wrapping_add(regs.rip);
    if sregs.cs.l == 0 {
        linear &= 0xffff_ffff;
    }
    while found.len() < INSTRUCTION_BYTES {
        // A page at a time: the next one may lie elsewhere, or nowhere.
        let in_page = usize::try_from(PAGE_BYTES - linear % PAGE_BYTES).unwrap_or(1);
        let mut bytes = vec![0; in_page.min(INSTRUCTION_BYTES - found.len())];
        let physical = match fd.translate_gva(linear) {
            Ok(translation) if translation.valid != 0 => translation.physical_address,
            _ => break,
        };
        if memory.read(physical, &mut bytes).is_err() {
            break;
        }
        linear = linear.wrapping_add(bytes.len() as u64);
        found.append(&mut bytes);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::access_bytes;

    #[test]
    fn several_accesses_at_once_are_told_apart() {
        assert_eq!(access_bytes(2, 6), 2);
        assert_eq!(access_bytes(4, 4), 4);
        assert_eq!(access_bytes(1, 4096), 1);
        // What makes no sense is one access, and never an endless or empty one.
        assert_eq!(access_bytes(0, 4), 4);
        assert_eq!(access_bytes(4, 6), 6);
        assert_eq!(access_bytes(0, 0), 1);
    }
}
