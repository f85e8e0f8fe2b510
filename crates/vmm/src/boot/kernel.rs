//! A kernel, whichever form its file has.

use super::input::Input;
use super::{bzimage, elf};
use crate::Result;
use linux_loader::loader::bootparam::setup_header;
use memory::VmMemory;
use std::path::Path;

/// As much of a file's start as tells what it is: an ELF header, or a bzImage's setup header.
const HEAD_BYTES: usize = 0x290;
/// Where a bzImage has its magic.
const HDRS_AT: usize = 0x202;

/// A kernel in guest RAM.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    /// Where it is entered in 64-bit mode.
    pub(super) entry: u64,
    /// What goes into the boot parameters.
    pub(super) header: setup_header,
    /// Guest-physical address of its first byte.
    pub(super) start: u64,
    /// One past the last byte that it needs before it knows what else is RAM: it unpacks itself within.
    pub(super) end: u64,
    /// The longest command line that it takes, bytes without the zero.
    pub(super) command_line_max: u64,
    /// The highest address that a byte of its initrd may have.
    pub(super) initrd_max: u64,
}

/// Reads a kernel into guest RAM, which goes on without a hole from 1 MiB to `low_end`.
pub(super) fn load(ram: &VmMemory, low_end: u64, path: &Path) -> Result<Kernel> {
    let mut input = Input::open("kernel", path)?;
    let mut head = [0; HEAD_BYTES];
    let count = input.read_at(0, &mut head)?;
    let head = &head[..count];
    if head.starts_with(elf::MAGIC) {
        elf::load(ram, low_end, input, head)
    } else if head.get(HDRS_AT..HDRS_AT + 4) == Some(b"HdrS") {
        bzimage::load(ram, low_end, input, head)
    } else {
        let first: Vec<String> = head.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let first = first.join(" ");
        let form = other_form(head).map_or_else(String::new, |form| format!(", which is {form}"));
        Err(input.error(format!(
            "it is no kernel: it starts with {first}{form}; a bzImage or an ELF vmlinux for x86-64 is wanted"
        )))
    }
}

/// What else a file can be that somebody takes for a kernel.
fn other_form(head: &[u8]) -> Option<&'static str> {
    let forms: [(&[u8], &str); 8] = [
        (b"\x1f\x8b", "gzip data"),
        (b"\xfd7zXZ", "xz data"),
        (b"\x28\xb5\x2f\xfd", "zstd data"),
        (b"\x02\x21\x4c\x18", "LZ4 data"),
        (b"BZh", "bzip2 data"),
        (b"070701", "a cpio archive: an initrd?"),
        (b"!<arch>", "an archive: a Debian package?"),
        (b"MZ", "a program for EFI or DOS without the header of a bzImage"),
    ];
    let form = forms.iter().find(|(magic, _)| head.starts_with(magic));
    form.map(|(_, name)| *name)
}
