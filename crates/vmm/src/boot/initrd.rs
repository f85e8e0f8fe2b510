//! The initial RAM disk: any file, as high in memory as the kernel and the hole allow.

use super::input::{Input, Size};
use super::kernel::Kernel;
use crate::Result;
use memory::VmMemory;
use pages::PAGE_BYTES;
use std::path::Path;
use vm_memory::{Bytes, GuestAddress};

/// Where an initrd lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Initrd {
    /// Guest-physical address of its first byte.
    pub(super) address: u32,
    /// Its length.
    pub(super) bytes: u32,
}

/// Reads an initrd into guest RAM, between the kernel and `low_end`. Its length is checked before anything is read.
pub(super) fn load(ram: &VmMemory, low_end: u64, kernel: &Kernel, path: &Path) -> Result<Initrd> {
    let mut input = Input::open("initrd", path)?;
    let top = low_end.min(kernel.initrd_max.saturating_add(1));
    let place = place(kernel.end, top, input.bytes).ok_or_else(|| {
        input.error(format!(
            "its {} do not fit into the guest's RAM: between the kernel, which needs it up to {:#x}, and {top:#x} there is room \
             for {}; give the guest more memory, or a smaller initrd",
            Size(input.bytes),
            kernel.end,
            Size(top.saturating_sub(kernel.end.next_multiple_of(PAGE_BYTES)))
        ))
    })?;
    let count = usize::try_from(place.bytes).map_err(|_| input.error("it is too long"))?;
    ram.read_exact_volatile_from(GuestAddress(u64::from(place.address)), &mut input.file, count)
        .map_err(|e| input.error(format!("reading its {} bytes into guest RAM: {e}", place.bytes)))?;
    Ok(place)
}

/// The highest place for `bytes` that starts at a page, ends by `top` and does not reach below `kernel_end`.
fn place(kernel_end: u64, top: u64, bytes: u64) -> Option<Initrd> {
    let start = top.checked_sub(bytes)? / PAGE_BYTES * PAGE_BYTES;
    if start < kernel_end {
        return None;
    }
    Some(Initrd {
        address: u32::try_from(start).ok()?,
        bytes: u32::try_from(bytes).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_lies_as_high_as_it_may_and_over_nothing() {
        const TOP: u64 = 64 << 20;
        let placed = |kernel_end, top, bytes| place(kernel_end, top, bytes).map(|p| (u64::from(p.address), p.bytes));
        assert_eq!(placed(32 << 20, TOP, 1), Some((TOP - 4096, 1)));
        assert_eq!(placed(32 << 20, TOP, 4097), Some((TOP - 8192, 4097)));
        assert_eq!(placed(32 << 20, 0x7fff_ffff + 1, 4096), Some((0x7fff_f000, 4096)));
        // All of the room, and a byte more.
        assert_eq!(placed(32 << 20, TOP, 32 << 20), Some((32 << 20, 32 << 20)));
        assert_eq!(placed(32 << 20, TOP, (32 << 20) + 1), None);
        // The page that the kernel ends in is the kernel's.
        assert_eq!(placed((32 << 20) + 1, TOP, 32 << 20), None);
        assert_eq!(placed(32 << 20, TOP, u64::MAX), None);
        // A kernel that takes none at all.
        assert_eq!(placed(32 << 20, 1, 1), None);
    }
}
