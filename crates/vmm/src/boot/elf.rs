//! An ELF vmlinux, started at its 64-bit entry: the address in an x86-64 Linux's ELF header is the physical one of
//! `startup_64`, which takes what the 64-bit boot protocol gives.
//!
//! The loader of `linux-loader` believes program headers, so they are all checked here first. It is told to load at an
//! offset of 0, which keeps it from looking for notes.

use super::input::{Input, Size};
use super::kernel::Kernel;
use super::{COMMAND_LINE_BYTES, ONE_MIB};
use crate::Result;
use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{Elf, KernelLoader};
use memory::VmMemory;
use vm_memory::GuestAddress;

/// How an ELF file starts.
pub(super) const MAGIC: &[u8] = b"\x7fELF";
const HEADER_BYTES: usize = 64;
const CLASS_AT: usize = 4;
const CLASS_64: u8 = 2;
const DATA_AT: usize = 5;
const DATA_LITTLE_ENDIAN: u8 = 1;
const TYPE_AT: usize = 16;
const TYPE_EXEC: u16 = 2;
const MACHINE_AT: usize = 18;
const MACHINE_X86_64: u16 = 62;
const ENTRY_AT: usize = 24;
const PROGRAM_HEADERS_AT: usize = 32;
const PROGRAM_HEADER_SIZE_AT: usize = 54;
const PROGRAM_HEADER_COUNT_AT: usize = 56;
const PROGRAM_HEADER_BYTES: usize = 56;
/// A vmlinux has about five.
const PROGRAM_HEADERS_MAX: usize = 64;
const LOAD: u32 = 1;

/// `COMMAND_LINE_SIZE` of Linux on x86, without the zero. There is no header that tells it.
const COMMAND_LINE_MAX: u64 = 2047;
/// What a bzImage of Linux has for `initrd_addr_max`.
const INITRD_MAX: u64 = 0x7fff_ffff;

/// A part of the file and its place.
#[derive(Clone, Copy, Debug)]
struct Segment {
    offset: u64,
    address: u64,
    file_bytes: u64,
    memory_bytes: u64,
}

/// Reads an ELF kernel into guest RAM, where its program headers say.
pub(super) fn load(ram: &VmMemory, low_end: u64, mut input: Input, head: &[u8]) -> Result<Kernel> {
    check_header(&input, head)?;
    let segments = segments(&mut input, head)?;
    let (mut start, mut end) = (u64::MAX, 0);
    for segment in &segments {
        let segment_end = check_segment(&input, segment, low_end)?;
        start = start.min(segment.address);
        end = end.max(segment_end);
    }
    let entry = u64_at(head, ENTRY_AT);
    let holds = |segment: &Segment| (segment.address..segment.address + segment.file_bytes).contains(&entry);
    if !segments.iter().any(holds) {
        return Err(input.error(format!(
            "it is no kernel that can be started: its entry, {entry:#x}, lies in nothing that is loaded from the file"
        )));
    }
    Elf::load(ram, Some(GuestAddress(0)), &mut input.file, None)
        .map_err(|e| input.error(format!("reading it into guest RAM: {e}")))?;
    Ok(Kernel {
        entry,
        header: made_up_header(),
        start,
        end,
        command_line_max: COMMAND_LINE_MAX.min(COMMAND_LINE_BYTES - 1),
        initrd_max: INITRD_MAX,
    })
}

fn check_header(input: &Input, head: &[u8]) -> Result<()> {
    if head.len() < HEADER_BYTES {
        return Err(input.error(format!(
            "it is cut off within its ELF header, after {} bytes",
            head.len()
        )));
    }
    if head[CLASS_AT] != CLASS_64 {
        return Err(input.error("it is a 32-bit ELF file; a kernel for x86-64 is wanted"));
    }
    let machine = u16_at(head, MACHINE_AT);
    if head[DATA_AT] != DATA_LITTLE_ENDIAN || machine != MACHINE_X86_64 {
        return Err(input.error(format!(
            "it is an ELF file for another machine (number {machine}); a kernel for x86-64 (number {MACHINE_X86_64}) is wanted"
        )));
    }
    let form = u16_at(head, TYPE_AT);
    if form != TYPE_EXEC {
        return Err(input.error(format!(
            "it is an ELF file of type {form}, not an executable that lies at fixed addresses (type {TYPE_EXEC}); a vmlinux is \
             wanted"
        )));
    }
    Ok(())
}

/// What is to be loaded; at least one.
fn segments(input: &mut Input, head: &[u8]) -> Result<Vec<Segment>> {
    let count = usize::from(u16_at(head, PROGRAM_HEADER_COUNT_AT));
    let size = usize::from(u16_at(head, PROGRAM_HEADER_SIZE_AT));
    if size != PROGRAM_HEADER_BYTES || count == 0 || count > PROGRAM_HEADERS_MAX {
        return Err(input.error(format!(
            "it has {count} program headers of {size} bytes; a kernel has 1 to {PROGRAM_HEADERS_MAX} of {PROGRAM_HEADER_BYTES}"
        )));
    }
    let at = u64_at(head, PROGRAM_HEADERS_AT);
    let mut table = [0; PROGRAM_HEADERS_MAX * PROGRAM_HEADER_BYTES];
    let table = &mut table[..count * PROGRAM_HEADER_BYTES];
    if at < HEADER_BYTES as u64 || at >= input.bytes || input.read_at(at, table)? < table.len() {
        return Err(input.error(format!(
            "its program headers, {} bytes at {at:#x}, do not lie within its {} bytes",
            table.len(),
            input.bytes
        )));
    }
    let segments: Vec<Segment> = table
        .chunks_exact(PROGRAM_HEADER_BYTES)
        .map(|entry| (u32_at(entry, 0), entry))
        .filter(|(kind, _)| *kind == LOAD)
        .map(|(_, entry)| Segment {
            offset: u64_at(entry, 8),
            address: u64_at(entry, 24),
            file_bytes: u64_at(entry, 32),
            memory_bytes: u64_at(entry, 40),
        })
        .filter(|segment| segment.file_bytes != 0 || segment.memory_bytes != 0)
        .collect();
    if segments.is_empty() {
        return Err(input.error("it is an ELF file with nothing to load; a vmlinux is wanted"));
    }
    Ok(segments)
}

/// Whether a segment lies in the file and in RAM; returns the address after it.
fn check_segment(input: &Input, segment: &Segment, low_end: u64) -> Result<u64> {
    let Segment {
        offset,
        address,
        file_bytes,
        memory_bytes,
    } = *segment;
    let in_file = offset.checked_add(file_bytes).is_some_and(|end| end <= input.bytes);
    if !in_file || file_bytes > memory_bytes {
        return Err(input.error(format!(
            "it is cut off or broken: a segment for {memory_bytes} bytes of memory has {file_bytes} bytes at {offset:#x} of the \
             file, which has {}",
            input.bytes
        )));
    }
    match address.checked_add(memory_bytes) {
        Some(end) if address >= ONE_MIB && end <= low_end => Ok(end),
        _ => Err(input.error(format!(
            "it does not fit into the guest's RAM: it has {} for {address:#x} on, and RAM for kernels goes from {ONE_MIB:#x} \
             to {low_end:#x}, {}",
            Size(memory_bytes),
            Size(low_end)
        ))),
    }
}

/// What a bzImage's header would tell the kernel, as far as the kernel itself looks at it.
fn made_up_header() -> setup_header {
    setup_header {
        boot_flag: 0xaa55,
        header: u32::from_le_bytes(*b"HdrS"),
        version: 0x20f,
        loadflags: 1,
        kernel_alignment: 0x20_0000,
        initrd_addr_max: 0x7fff_ffff,
        cmdline_size: 2047,
        ..Default::default()
    }
}

fn array<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&from[at..at + N]);
    bytes
}

fn u16_at(from: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(from, at))
}

fn u32_at(from: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(from, at))
}

fn u64_at(from: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(from, at))
}
