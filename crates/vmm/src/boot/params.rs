//! The boot parameters: the kernel's own header with our part filled in, the memory map, and the command line.

use super::initrd::Initrd;
use super::kernel::Kernel;
use super::{BOOT_PARAMS, COMMAND_LINE, ONE_MIB, write as write_bytes};
use crate::platform::{ACPI_TABLES, LOW_RAM_END};
use crate::{Error, Result};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use memory::VmMemory;
use pages::{Layout, PAGE_BYTES};
use std::path::Path;
use vm_memory::ByteValued;

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
/// A loader without a number of its own.
const LOADER_OTHER: u8 = 0xff;

/// One past the RAM that kernel and initrd can lie in: the end of the region that starts at address 0.
pub(super) fn low_end(layout: &Layout) -> Result<u64> {
    let first = layout.regions().first();
    match first.map(|region| (region.start().0, region.end().0 * PAGE_BYTES)) {
        Some((0, end)) if end > ONE_MIB => Ok(end),
        _ => Err(Error::Config(
            "RAM has to start at address 0 and to go on to more than 1 MiB for a kernel to boot".to_owned(),
        )),
    }
}

/// The memory map: sorted, without overlaps.
pub(super) fn e820(layout: &Layout) -> Result<Vec<boot_e820_entry>> {
    let low_end = low_end(layout)?;
    let entry = |from: u64, to: u64, kind| boot_e820_entry {
        addr: from,
        size: to - from,
        r#type: kind,
    };
    let mut map = vec![
        entry(0, LOW_RAM_END, E820_RAM),
        entry(LOW_RAM_END, ONE_MIB, E820_RESERVED),
        entry(ONE_MIB, low_end, E820_RAM),
    ];
    let others = layout.regions().iter().skip(1);
    map.extend(others.map(|region| entry(region.start().0 * PAGE_BYTES, region.end().0 * PAGE_BYTES, E820_RAM)));
    let room = boot_params::default().e820_table.len();
    if map.len() > room {
        return Err(Error::Config(format!(
            "RAM in {} pieces: the boot protocol knows at most {}",
            layout.regions().len(),
            room - 2
        )));
    }
    Ok(map)
}

/// Whether the kernel takes this command line.
pub(super) fn check_command_line(line: &str, kernel: &Kernel, path: &Path) -> Result<()> {
    if let Some(at) = line.find(['\0', '\n', '\r']) {
        return Err(Error::Config(format!(
            "the kernel's command line cannot have a line break or a zero byte in it, and has one at byte {at}"
        )));
    }
    if line.len() as u64 > kernel.command_line_max {
        return Err(Error::Config(format!(
            "the kernel's command line has {} bytes; {} takes at most {}",
            line.len(),
            path.display(),
            kernel.command_line_max
        )));
    }
    Ok(())
}

/// Writes command line and boot parameters. The command line must have passed [`check_command_line`].
pub(super) fn write(
    ram: &VmMemory,
    kernel: &Kernel,
    initrd: Option<Initrd>,
    line: &str,
    e820: &[boot_e820_entry],
) -> Result<()> {
    let mut zero_terminated = line.as_bytes().to_vec();
    zero_terminated.push(0);
    write_bytes(ram, COMMAND_LINE, &zero_terminated)?;
    let params = params(kernel, initrd, e820)?;
    write_bytes(ram, BOOT_PARAMS, params.as_slice())
}

fn params(kernel: &Kernel, initrd: Option<Initrd>, e820: &[boot_e820_entry]) -> Result<boot_params> {
    let mut params = boot_params {
        hdr: kernel.header,
        acpi_rsdp_addr: ACPI_TABLES,
        ..Default::default()
    };
    params.hdr.type_of_loader = LOADER_OTHER;
    params.hdr.cmd_line_ptr =
        u32::try_from(COMMAND_LINE).map_err(|_| Error::Config("the command line lies above 4 GiB".to_owned()))?;
    // What the file has here is not for us to pass on: a list of data that nobody has put into memory.
    params.hdr.setup_data = 0;
    params.hdr.ramdisk_image = initrd.map_or(0, |initrd| initrd.address);
    params.hdr.ramdisk_size = initrd.map_or(0, |initrd| initrd.bytes);
    let mut table = params.e820_table;
    for (to, from) in table.iter_mut().zip(e820) {
        *to = *from;
    }
    params.e820_table = table;
    params.e820_entries =
        u8::try_from(e820.len()).map_err(|_| Error::Config("the memory map is too long".to_owned()))?;
    Ok(params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pages::{PageRange, Pfn};

    fn map(bytes: u64) -> Vec<(u64, u64, u32)> {
        let layout = Layout::pc(bytes / PAGE_BYTES).unwrap();
        let map = e820(&layout).unwrap();
        map.iter().map(|e| (e.addr, e.addr + e.size, e.r#type)).collect()
    }

    #[test]
    fn the_memory_map_is_ram_and_nothing_else() {
        const GIB: u64 = 1 << 30;
        let low = |end| {
            vec![
                (0, LOW_RAM_END, E820_RAM),
                (LOW_RAM_END, ONE_MIB, E820_RESERVED),
                (ONE_MIB, end, E820_RAM),
            ]
        };
        assert_eq!(map(32 << 20), low(32 << 20));
        assert_eq!(map(3 * GIB), low(3 * GIB));
        let mut both = low(3 * GIB);
        both.push((4 * GIB, 4 * GIB + 4096, E820_RAM));
        assert_eq!(map(3 * GIB + 4096), both);
        both[3].1 = 9 * GIB;
        assert_eq!(map(8 * GIB), both);
    }

    #[test]
    fn the_memory_map_has_no_overlaps_and_all_of_ram() {
        for pages in (257..)
            .step_by(8191)
            .take(600)
            .chain([256 * 3072, 256 * 3072 + 1, 1 << 30])
        {
            let map = map(pages * PAGE_BYTES);
            assert!(map.iter().all(|(from, to, _)| from < to), "{pages}: {map:?}");
            assert!(map.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{pages}: {map:?}");
            let ram: u64 = map.iter().map(|(from, to, _)| to - from).sum();
            assert_eq!(ram, pages * PAGE_BYTES);
        }
    }

    #[test]
    fn ram_that_no_kernel_could_boot_in_is_refused() {
        let range = |from, to| PageRange::between(Pfn(from), Pfn(to));
        for regions in [vec![range(0, 256)], vec![range(1, 4096)]] {
            let layout = Layout::new(regions).unwrap();
            assert!(e820(&layout).unwrap_err().to_string().contains("1 MiB"));
        }
        let pieces = |count: u64| Layout::new((0..count).map(|i| range(i * 2048, i * 2048 + 1024)).collect()).unwrap();
        assert_eq!(e820(&pieces(126)).unwrap().len(), 128);
        let error = e820(&pieces(127)).unwrap_err().to_string();
        assert!(error.contains("127") && error.contains("126"), "{error}");
    }
}
