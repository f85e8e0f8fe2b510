//! The state that vCPU 0 enters the kernel with, by the 64-bit boot protocol: long mode, the first 4 GiB mapped to
//! themselves, flat segments with the protocol's selectors, interrupts off, RSI at the boot parameters.
//!
//! The kernel makes its own tables before anything else uses the memory of these.

use super::{BOOT_STACK, Entry, GDT, PAGE_TABLE_PAGES, PAGE_TABLES, write};
use crate::Result;
use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};
use memory::DeviceMemory;
use pages::PAGE_BYTES;
use vm_memory::GuestAddressSpace;

// Selectors: `__BOOT_CS` and `__BOOT_DS` of the protocol, and a TSS, which hardware wants in long mode.
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;

/// Two empty descriptors, code, data, and a TSS that takes the space of two.
const DESCRIPTORS: [u64; 6] = [
    0,
    0,
    // Present, execute and read, accessed; 64-bit; 4 GiB in pages.
    0x00af_9b00_0000_ffff,
    // Present, read and write, accessed; 32-bit; 4 GiB in pages.
    0x00cf_9300_0000_ffff,
    // Present, a busy 64-bit TSS of 0x68 bytes at address 0. Nobody gets to use it.
    0x0000_8b00_0000_0067,
    0,
];

const CR0_PE: u64 = 1 << 0;
const CR0_ET: u64 = 1 << 4;
const CR0_NE: u64 = 1 << 5;
const CR0_WP: u64 = 1 << 16;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// The bit of RFLAGS that is always set.
const RFLAGS_FIXED: u64 = 1 << 1;

// Page table entries.
const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const LARGE: u64 = 1 << 7;
const ENTRIES: u64 = 512;
const LARGE_PAGE_BYTES: u64 = 2 << 20;

/// Puts page tables and a GDT into guest RAM, and sets the registers of vCPU 0, which come as KVM has them after reset.
/// The other vCPUs wait for vCPU 0 to start them, as KVM leaves them.
///
/// # Errors
/// Guest memory that is not there.
pub(crate) fn first_state(
    memory: &DeviceMemory,
    entry: &Entry,
    sregs: &mut kvm_sregs,
    regs: &mut kvm_regs,
) -> Result<()> {
    let ram = memory.memory();
    write(&ram, PAGE_TABLES, &bytes_of(&page_tables()))?;
    write(&ram, GDT, &bytes_of(&DESCRIPTORS))?;
    set_sregs(sregs);
    *regs = kvm_regs {
        rip: entry.rip,
        rsi: entry.boot_params,
        rsp: BOOT_STACK,
        rbp: BOOT_STACK,
        rflags: RFLAGS_FIXED,
        ..Default::default()
    };
    Ok(())
}

fn set_sregs(sregs: &mut kvm_sregs) {
    let data = segment(DATA);
    sregs.cs = segment(CODE);
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.ss = data;
    sregs.tr = segment(TASK);
    sregs.ldt = kvm_segment {
        unusable: 1,
        ..Default::default()
    };
    sregs.gdt = kvm_dtable {
        base: GDT,
        limit: 8 * 6 - 1,
        ..Default::default()
    };
    // No handler for anything: an exception before the kernel has its own ends in a triple fault, which is told.
    sregs.idt = kvm_dtable::default();
    sregs.cr0 = CR0_PE | CR0_ET | CR0_NE | CR0_WP | CR0_PG;
    sregs.cr2 = 0;
    sregs.cr3 = PAGE_TABLES;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LME | EFER_LMA;
}

/// What a vCPU has in its hidden part after loading `selector`.
fn segment(selector: u16) -> kvm_segment {
    let descriptor = DESCRIPTORS[usize::from(selector / 8)];
    let bits = |from: u32, count: u32| (descriptor >> from) & ((1 << count) - 1);
    let byte = |from, count| bits(from, count).to_le_bytes()[0];
    let word = |value: u64| {
        let bytes = value.to_le_bytes();
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    };
    let granular = byte(55, 1);
    let limit = word(bits(0, 16) | bits(48, 4) << 16);
    kvm_segment {
        base: bits(16, 24) | bits(56, 8) << 24,
        limit: if granular == 1 { limit << 12 | 0xfff } else { limit },
        selector,
        type_: byte(40, 4),
        s: byte(44, 1),
        dpl: byte(45, 2),
        present: byte(47, 1),
        avl: byte(52, 1),
        l: byte(53, 1),
        db: byte(54, 1),
        g: granular,
        unusable: 0,
        padding: 0,
    }
}

/// The first 4 GiB, mapped to themselves by pages of 2 MiB.
fn page_tables() -> Vec<u64> {
    let level_3 = PAGE_TABLES + PAGE_BYTES;
    let level_2 = level_3 + PAGE_BYTES;
    let tables_2 = PAGE_TABLE_PAGES - 2;
    let row = |count: u64, entry: &dyn Fn(u64) -> u64| -> Vec<u64> {
        (0..ENTRIES).map(|i| if i < count { entry(i) } else { 0 }).collect()
    };
    let mut tables = row(1, &|_| level_3 | PRESENT | WRITABLE);
    tables.extend(row(tables_2, &|i| (level_2 + i * PAGE_BYTES) | PRESENT | WRITABLE));
    tables.extend((0..tables_2 * ENTRIES).map(|i| (i * LARGE_PAGE_BYTES) | PRESENT | WRITABLE | LARGE));
    tables
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the tables lead a guest-virtual address.
    fn translate(tables: &[u64], address: u64) -> Option<u64> {
        let entry = |table: u64, shift: u32| {
            let index = (table - PAGE_TABLES) / 8 + ((address >> shift) & 0x1ff);
            let entry = tables[usize::try_from(index).unwrap()];
            (entry & PRESENT != 0).then_some(entry)
        };
        let level_3 = entry(PAGE_TABLES, 39)? & !0xfff;
        let level_2 = entry(level_3, 30)? & !0xfff;
        let page = entry(level_2, 21)?;
        assert_eq!(page & LARGE, LARGE);
        Some((page & !(LARGE_PAGE_BYTES - 1)) | (address & (LARGE_PAGE_BYTES - 1)))
    }

    #[test]
    fn four_gib_are_mapped_to_themselves_and_no_more() {
        let tables = page_tables();
        assert_eq!(tables.len() as u64, PAGE_TABLE_PAGES * ENTRIES);
        for address in (0..4u64 << 30).step_by(0x1f_f123) {
            assert_eq!(translate(&tables, address), Some(address));
        }
        assert_eq!(translate(&tables, u64::from(u32::MAX)), Some(u64::from(u32::MAX)));
        assert_eq!(translate(&tables, 4 << 30), None);
        assert_eq!(translate(&tables, 1 << 39), None);
    }

    #[test]
    fn registers_are_those_of_the_boot_protocol() {
        // As KVM has them after reset: caches off, real mode.
        let mut sregs = kvm_sregs {
            cr0: 0x6000_0010,
            apic_base: 0xfee0_0900,
            ..Default::default()
        };
        set_sregs(&mut sregs);
        let flat = |s: &kvm_segment| (s.selector, s.base, s.limit, s.type_, s.s, s.present, s.dpl, s.g);
        assert_eq!(flat(&sregs.cs), (0x10, 0, u32::MAX, 0xb, 1, 1, 0, 1));
        assert_eq!((sregs.cs.l, sregs.cs.db), (1, 0), "64-bit");
        for data in [sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss] {
            assert_eq!(flat(&data), (0x18, 0, u32::MAX, 0x3, 1, 1, 0, 1));
        }
        assert_eq!(flat(&sregs.tr), (0x20, 0, 0x67, 0xb, 0, 1, 0, 0));
        assert_eq!(sregs.cr0 & 0x6000_0000, 0, "caches on");
        assert_eq!(sregs.cr0 & (CR0_PE | CR0_PG), CR0_PE | CR0_PG);
        assert_eq!(
            (sregs.cr3, sregs.efer, sregs.apic_base),
            (PAGE_TABLES, 0x500, 0xfee0_0900)
        );
        assert_eq!(usize::from(sregs.gdt.limit) + 1, DESCRIPTORS.len() * 8);
    }
}
