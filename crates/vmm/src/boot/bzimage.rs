//! A bzImage, by the 64-bit boot protocol: <https://docs.kernel.org/arch/x86/boot.html>.

use super::input::{Input, Size};
use super::kernel::Kernel;
use super::{COMMAND_LINE_BYTES, ONE_MIB};
use crate::Result;
use linux_loader::loader::bootparam::{XLF_KERNEL_64, setup_header};
use linux_loader::loader::{BzImage, KernelLoader};
use memory::VmMemory;
use vm_memory::{ByteValued, GuestAddress};

/// Where the setup header begins in the file.
const HEADER_AT: usize = 0x1f1;
/// The header's length byte: counted from [`HEADER_END_FROM`].
const HEADER_LENGTH_AT: usize = 0x201;
const HEADER_END_FROM: usize = 0x202;
/// One past `init_size`, the last field that is needed here.
const HEADER_LEAST: usize = 0x264;
/// Protocol 2.12 brought `xloadflags`.
const VERSION_LEAST: u16 = 0x20c;
/// The kernel was loaded above 1 MiB (`loadflags`).
const LOADED_HIGH: u8 = 1;
/// Bytes of a sector, in which the setup part is counted.
const SECTOR: u64 = 512;
/// The 64-bit entry, counted from where the protected-mode part lies.
const ENTRY_64: u64 = 0x200;

/// Reads a bzImage into guest RAM, at the address that it prefers.
pub(super) fn load(ram: &VmMemory, low_end: u64, mut input: Input, head: &[u8]) -> Result<Kernel> {
    let mut header = header(&input, head)?;
    let code_bytes = code_bytes(&input, &header)?;
    let start = header.pref_address;
    let alignment = u64::from(header.kernel_alignment);
    if start < ONE_MIB || !alignment.is_power_of_two() || start % alignment != 0 {
        return Err(input.error(format!(
            "its header is broken: it wants to lie at {start:#x}, aligned to {alignment:#x}"
        )));
    }
    let needed = code_bytes.max(u64::from(header.init_size));
    let end = start.checked_add(needed).filter(|end| *end <= low_end).ok_or_else(|| {
        input.error(format!(
            "it does not fit into the guest's RAM: it needs {} from {start:#x} on, and RAM ends at {low_end:#x}, {}; give \
             the guest more memory",
            Size(needed),
            Size(low_end)
        ))
    })?;
    BzImage::load(ram, Some(GuestAddress(start)), &mut input.file, None)
        .map_err(|e| input.error(format!("reading it into guest RAM: {e}")))?;
    header.code32_start = u32::try_from(start).map_err(|_| input.error("it wants to lie above 4 GiB"))?;
    Ok(Kernel {
        entry: start + ENTRY_64,
        header,
        start,
        end,
        command_line_max: u64::from(header.cmdline_size).min(COMMAND_LINE_BYTES - 1),
        initrd_max: u64::from(header.initrd_addr_max),
    })
}

/// The setup header, of which only as much is taken as the file says that it has: what follows is code.
fn header(input: &Input, head: &[u8]) -> Result<setup_header> {
    if head.len() < HEADER_LEAST {
        return Err(input.error(format!("it is cut off within its header, after {} bytes", head.len())));
    }
    let version = u16::from_le_bytes([head[0x206], head[0x207]]);
    let end = HEADER_END_FROM + usize::from(head[HEADER_LENGTH_AT]);
    if version < VERSION_LEAST || end < HEADER_LEAST {
        return Err(input.error(format!(
            "it speaks boot protocol {}.{:02} with a header of {} bytes, which has no 64-bit start; 2.12 (Linux 3.8) or newer is \
             wanted",
            version >> 8,
            version & 0xff,
            end.saturating_sub(HEADER_AT)
        )));
    }
    let mut header = setup_header::default();
    let into = header.as_mut_slice();
    let count = into.len().min(end.min(head.len()) - HEADER_AT);
    into[..count].copy_from_slice(&head[HEADER_AT..HEADER_AT + count]);
    if header.loadflags & LOADED_HIGH == 0 {
        return Err(input.error("it is a zImage, which is loaded below 1 MiB; a bzImage is wanted"));
    }
    if header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(input.error("it is a 32-bit kernel; one for x86-64 is wanted"));
    }
    Ok(header)
}

/// Bytes of the part that is loaded: all after the setup part.
fn code_bytes(input: &Input, header: &setup_header) -> Result<u64> {
    // 0 stands for 4, from the days of boot sectors on floppy disks.
    let sectors = match header.setup_sects {
        0 => 4,
        count => u64::from(count),
    };
    let setup = (sectors + 1) * SECTOR;
    let told = u64::from(header.syssize) * 16;
    let wanted = setup + told.max(ENTRY_64 + 1);
    if input.bytes < wanted {
        return Err(input.error(format!(
            "it is cut off: by its header it has {wanted} bytes, and the file has {}",
            input.bytes
        )));
    }
    Ok(input.bytes - setup)
}
