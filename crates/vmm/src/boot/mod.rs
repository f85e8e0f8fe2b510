//! What lies in guest RAM before the first instruction, and the state that a vCPU first runs it with: the 64-bit boot
//! protocol of Linux on x86.
//!
//! ```text
//!   0x0500    GDT
//!   0x7000    boot parameters (the "zero page")
//!   0x9000    page tables, 6 pages
//!   0x20000   command line, at most 64 KiB
//!   0xe0000   ACPI tables, the RSDP first
//!   0x100000  from here to the hole: the kernel where it wants to be, the initrd as high as it may
//! ```
//!
//! Files are untrusted: every length and address in them is checked against the file and against RAM before anything
//! is read by it, and nothing is allocated by a size that a file names. An ELF kernel is started at its 64-bit entry,
//! too. PVH is not used: its 32-bit start gives nothing that Linux on x86-64 would not take from this one.
//!
//! <https://docs.kernel.org/arch/x86/boot.html>

mod acpi;
mod bzimage;
mod cpu;
mod cpuid;
mod elf;
mod initrd;
mod input;
mod kernel;
mod offered;
mod params;
#[cfg(test)]
mod test_images;
#[cfg(test)]
mod tests;

use crate::platform::{ACPI_TABLES, VirtioPlace};
use crate::{BootFiles, Error, Result};
use memory::{DeviceMemory, VmMemory};
use pages::Layout;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

pub(crate) use cpu::first_state;
pub(crate) use cpuid::cpuid;

/// Where conventional memory ends and what a kernel may be loaded to begins.
const ONE_MIB: u64 = 1 << 20;
/// The GDT that a vCPU starts with.
const GDT: u64 = 0x500;
/// The boot parameters, one page.
const BOOT_PARAMS: u64 = 0x7000;
/// The end of a stack that a kernel may use until it has its own; grows down from here.
const BOOT_STACK: u64 = 0x8ff0;
/// The page tables that a vCPU starts with: [`PAGE_TABLE_PAGES`] pages.
const PAGE_TABLES: u64 = 0x9000;
/// A level 4 table, a level 3 table, and a level 2 table for each of 4 GiB.
const PAGE_TABLE_PAGES: u64 = 6;
/// The command line, with a zero at its end.
const COMMAND_LINE: u64 = 0x2_0000;
/// Room for the command line and its zero.
const COMMAND_LINE_BYTES: u64 = 0x1_0000;

/// Where a vCPU enters the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Address of the first instruction.
    pub(crate) rip: u64,
    /// Guest-physical address of the kernel's boot parameters, which goes into RSI.
    pub(crate) boot_params: u64,
}

/// Puts the kernel, its initrd, its command line, the boot parameters and the ACPI tables into guest RAM, which must be
/// new (all zero).
///
/// # Errors
/// A file that does not do ([`Error::File`]), a command line that the kernel does not take ([`Error::Config`]).
pub(crate) fn load(
    memory: &DeviceMemory,
    layout: &Layout,
    vcpus: u32,
    files: &BootFiles,
    virtio: &[VirtioPlace],
) -> Result<Entry> {
    let ram = memory.memory();
    let e820 = params::e820(layout)?;
    let low_end = params::low_end(layout)?;
    let kernel = kernel::load(&ram, low_end, &files.kernel)?;
    params::check_command_line(&files.cmdline, &kernel, &files.kernel)?;
    let initrd = match &files.initrd {
        Some(path) => Some(initrd::load(&ram, low_end, &kernel, path)?),
        None => None,
    };
    write(&ram, ACPI_TABLES, &acpi::tables(vcpus, virtio)?)?;
    params::write(&ram, &kernel, initrd, &files.cmdline, &e820)?;
    tracing::debug!(
        entry = kernel.entry,
        start = kernel.start,
        end = kernel.end,
        ?initrd,
        "the kernel is loaded"
    );
    Ok(Entry {
        rip: kernel.entry,
        boot_params: BOOT_PARAMS,
    })
}

/// Writes bytes to guest RAM.
fn write(ram: &VmMemory, address: u64, bytes: &[u8]) -> Result<()> {
    ram.write_slice(bytes, GuestAddress(address))
        .map_err(|e| Error::Address {
            address,
            len: bytes.len() as u64,
            why: e.to_string(),
        })
}
