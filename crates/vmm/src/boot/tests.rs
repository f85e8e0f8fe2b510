//! Files of every kind, into guest RAM.

use super::test_images::{ELF_END, INIT_SIZE, LOAD_AT, SEGMENTS_AT, bzimage, elf, put};
use super::*;
use crate::platform::{LOW_RAM_END, virtio_place};
use kvm_ioctls::{Kvm, VcpuExit};
use linux_loader::loader::bootparam::boot_params;
use memory::{Backing, GuestMemory};
use pages::PAGE_BYTES;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use vm_memory::ByteValued;

const RAM: u64 = 32 << 20;
const CODE: &[u8] = b"code, not run";

struct Room {
    dir: TempDir,
}

impl Room {
    fn new() -> Room {
        Room {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }
}

struct Ram {
    memory: DeviceMemory,
    layout: Arc<Layout>,
}

impl Ram {
    fn new(bytes: u64) -> Ram {
        let layout = Arc::new(Layout::pc(bytes / PAGE_BYTES).unwrap());
        let owner = Arc::new(GuestMemory::new(Arc::clone(&layout), &Backing::Anonymous).unwrap());
        Ram {
            memory: DeviceMemory::new(&owner),
            layout,
        }
    }

    fn read<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory
            .memory()
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        bytes
    }

    fn params(&self) -> boot_params {
        let mut params = boot_params::default();
        let bytes = self.read::<4096>(BOOT_PARAMS);
        params.as_mut_slice().copy_from_slice(&bytes);
        params
    }

    fn load(&self, files: &BootFiles) -> Result<Entry> {
        load(
            &self.memory,
            &self.layout,
            2,
            files,
            &[virtio_place(0), virtio_place(1)],
        )
    }
}

fn files(kernel: &Path, initrd: Option<&Path>, cmdline: &str) -> BootFiles {
    BootFiles {
        kernel: kernel.to_owned(),
        initrd: initrd.map(Path::to_owned),
        cmdline: cmdline.to_owned(),
    }
}

/// The error of loading `kernel`: it names the file, and everything in `wanted`.
#[track_caller]
fn refused(kernel: &[u8], wanted: &[&str]) {
    let room = Room::new();
    let path = room.file("the-kernel", kernel);
    let error = Ram::new(RAM).load(&files(&path, None, "")).unwrap_err().to_string();
    assert!(
        error.starts_with("kernel ") && error.contains("the-kernel: "),
        "{error}"
    );
    for word in wanted {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
}

fn changed(mut image: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    put(&mut image, at, bytes);
    image
}

#[test]
fn the_places_in_low_memory_do_not_overlap() {
    let places = [
        (GDT, GDT + 48),
        (BOOT_PARAMS, BOOT_PARAMS + 4096),
        (BOOT_STACK - 0xf00, BOOT_STACK),
        (PAGE_TABLES, PAGE_TABLES + PAGE_TABLE_PAGES * PAGE_BYTES),
        (COMMAND_LINE, COMMAND_LINE + COMMAND_LINE_BYTES),
        (LOW_RAM_END, ACPI_TABLES),
    ];
    assert!(places.iter().all(|(from, to)| from < to));
    assert!(places.windows(2).all(|pair| pair[0].1 <= pair[1].0));
    // The first bytes are the real mode interrupt vectors and the BIOS data area.
    const { assert!(GDT >= 0x500) };
}

#[test]
fn a_bzimage_is_loaded_with_everything_it_is_told_of() {
    let room = Room::new();
    let kernel = room.file("kernel", &bzimage(CODE));
    let initrd = room.file("initrd", &[0xa7; 5000]);
    let ram = Ram::new(RAM);
    let entry = ram.load(&files(&kernel, Some(&initrd), "console=ttyS0 quiet")).unwrap();
    assert_eq!(entry.rip, LOAD_AT + 0x200);
    assert_eq!(&ram.read::<13>(entry.rip), CODE);
    assert_eq!(entry.boot_params, BOOT_PARAMS);

    let params = ram.params();
    let hdr = params.hdr;
    assert_eq!((hdr.boot_flag, hdr.header, hdr.version), (0xaa55, 0x5372_6448, 0x20f));
    assert_eq!((hdr.type_of_loader, params.sentinel), (0xff, 0));
    assert_eq!({ hdr.code32_start }, 0x20_0000);
    assert_eq!({ hdr.setup_data }, 0, "a pointer from the file");
    assert_eq!({ hdr.kernel_info_offset }, 0, "code after the header's end");
    assert_eq!(ram.read::<20>(u64::from(hdr.cmd_line_ptr)), *b"console=ttyS0 quiet\0");
    let (start, bytes) = ({ hdr.ramdisk_image }, { hdr.ramdisk_size });
    assert_eq!((u64::from(start), bytes), (RAM - 8192, 5000));
    assert_eq!(ram.read::<5000>(u64::from(start)), [0xa7; 5000]);
    assert_eq!(ram.read::<1>(u64::from(start) + 5000), [0]);

    assert_eq!(params.e820_entries, 3);
    let map: Vec<_> = (0..4)
        .map(|i| { params.e820_table }[i])
        .map(|e| ({ e.addr }, { e.size }, { e.r#type }))
        .collect();
    assert_eq!(map[0], (0, LOW_RAM_END, 1));
    assert_eq!(map[1], (LOW_RAM_END, ONE_MIB - LOW_RAM_END, 2));
    assert_eq!(map[2], (ONE_MIB, RAM - ONE_MIB, 1));
    assert_eq!(map[3], (0, 0, 0));
    assert_eq!({ params.acpi_rsdp_addr }, ACPI_TABLES);
    assert_eq!(&ram.read::<8>(ACPI_TABLES), b"RSD PTR ");
}

#[test]
fn an_elf_kernel_is_loaded_segment_by_segment() {
    let room = Room::new();
    let kernel = room.file("vmlinux", &elf(CODE));
    let ram = Ram::new(RAM);
    let entry = ram.load(&files(&kernel, None, "")).unwrap();
    assert_eq!(entry.rip, SEGMENTS_AT[0]);
    assert_eq!(&ram.read::<13>(SEGMENTS_AT[0]), CODE);
    assert_eq!(ram.read::<32>(SEGMENTS_AT[1]), [[0x5a; 16], [0; 16]].concat()[..]);
    let hdr = ram.params().hdr;
    assert_eq!(
        (hdr.boot_flag, hdr.header, hdr.type_of_loader),
        (0xaa55, 0x5372_6448, 0xff)
    );
    assert_eq!(({ hdr.ramdisk_image }, { hdr.ramdisk_size }), (0, 0));
    assert_eq!(ram.read::<1>(COMMAND_LINE), [0]);
}

#[test]
fn what_is_no_kernel_is_refused_by_its_first_bytes() {
    refused(b"hello, world", &["no kernel", "68 65 6c 6c 6f 2c 20 77", "vmlinux"]);
    refused(b"\x1f\x8b\x08\x00rest", &["1f 8b 08 00", "gzip"]);
    refused(b"070701000", &["initrd?"]);
    refused(b"x", &["starts with 78;"]);
    refused(b"", &["empty"]);
    refused(&[0; 4096], &["00 00 00 00"]);
    let none = Path::new("/nowhere/the-kernel");
    let error = Ram::new(RAM).load(&files(none, None, "")).unwrap_err().to_string();
    assert!(
        error.contains("/nowhere/the-kernel") && error.contains("No such file"),
        "{error}"
    );
    let error = Ram::new(RAM)
        .load(&files(Path::new("/"), None, ""))
        .unwrap_err()
        .to_string();
    assert!(error.contains("directory"), "{error}");
}

#[test]
fn a_bzimage_that_cannot_be_started_is_refused() {
    let image = || bzimage(CODE);
    refused(&changed(image(), 0x206, &[0xb, 2]), &["2.11", "2.12"]);
    refused(&changed(image(), 0x201, &[0x30]), &["65 bytes", "2.12"]);
    refused(&changed(image(), 0x211, &[0]), &["zImage"]);
    refused(&changed(image(), 0x236, &[0xfe]), &["32-bit", "x86-64"]);
    refused(&changed(image(), 0x1f4, &1000u32.to_le_bytes()), &["cut off", "17024"]);
    refused(&changed(image(), 0x1f4, &[0xff; 4]), &["cut off"]);
    refused(&changed(image(), 0x1f1, &[255]), &["cut off"]);
    refused(&changed(image(), 0x258, &0u64.to_le_bytes()), &["broken", "0x0"]);
    refused(
        &changed(image(), 0x258, &(LOAD_AT + 4096).to_le_bytes()),
        &["broken", "0x201000"],
    );
    refused(&changed(image(), 0x230, &[0; 4]), &["broken"]);
    refused(&changed(image(), 0x230, &3u32.to_le_bytes()), &["broken"]);
    // Too large, and an end past all addresses.
    let (lies, needs) = (LOAD_AT.to_le_bytes(), (31u32 << 20).to_le_bytes());
    let large = changed(changed(image(), 0x258, &lies), 0x260, &needs);
    refused(&large, &["does not fit", "31.0 MiB", "32.0 MiB", "more memory"]);
    refused(
        &changed(image(), 0x258, &(!0u64 << 21).to_le_bytes()),
        &["does not fit"],
    );
    refused(&changed(image(), 0x258, &(4u64 << 30).to_le_bytes()), &["does not fit"]);
}

#[test]
fn a_kernel_larger_than_ram_is_not_read() {
    let room = Room::new();
    for image in [bzimage(CODE), elf(CODE)] {
        let path = room.file("the-kernel", &image);
        // It costs no disk.
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(100 << 30)
            .unwrap();
        let ram = Ram::new(RAM);
        match ram.load(&files(&path, None, "")) {
            // What comes after an ELF file's segments is nobody's business.
            Ok(_) => assert!(image.starts_with(elf::MAGIC)),
            Err(error) => assert!(error.to_string().contains("102399.9 MiB"), "{error}"),
        }
    }
}

#[test]
fn an_elf_file_that_cannot_be_started_is_refused() {
    let image = || elf(CODE);
    let row = |row: usize, field: usize| 64 + 56 * row + field;
    refused(&changed(image(), 4, &[1]), &["32-bit ELF"]);
    refused(&changed(image(), 5, &[2]), &["another machine"]);
    refused(&changed(image(), 18, &[183]), &["another machine", "183"]);
    refused(&changed(image(), 16, &[3]), &["type 3"]);
    refused(&changed(image(), 54, &[57]), &["57 bytes"]);
    refused(&changed(image(), 56, &[0, 0]), &["0 program headers"]);
    refused(&changed(image(), 56, &[0xff, 0xff]), &["65535 program headers"]);
    refused(&changed(image(), 32, &0u64.to_le_bytes()), &["program headers"]);
    refused(&changed(image(), 32, &[0xff; 8]), &["program headers"]);
    refused(&changed(image(), 56, &[1]), &["nothing to load"]);
    // A segment out of the file, out of RAM, over our tables; one that ends nowhere.
    refused(&changed(image(), row(1, 8), &0x201u64.to_le_bytes()), &["cut off"]);
    refused(&changed(image(), row(1, 8), &[0xff; 8]), &["cut off"]);
    refused(&changed(image(), row(1, 32), &[0xff; 8]), &["cut off"]);
    refused(&changed(image(), row(1, 40), &[0; 8]), &["broken"]);
    refused(
        &changed(image(), row(1, 24), &RAM.to_le_bytes()),
        &["does not fit", "32.0 MiB"],
    );
    refused(
        &changed(image(), row(1, 24), &0x7000u64.to_le_bytes()),
        &["does not fit", "0x100000"],
    );
    refused(&changed(image(), row(2, 40), &[0xff; 8]), &["does not fit"]);
    refused(&changed(image(), row(2, 40), &RAM.to_le_bytes()), &["does not fit"]);
    refused(
        &changed(image(), 24, &SEGMENTS_AT[1].wrapping_add(16).to_le_bytes()),
        &["entry", "0x400010"],
    );
}

#[test]
fn every_truncation_is_an_error_or_loads() {
    let room = Room::new();
    let ram = Ram::new(RAM);
    for image in [bzimage(CODE), elf(CODE)] {
        let loaded = (0..=image.len()).filter(|&length| {
            let path = room.file("kernel", &image[..length]);
            match ram.load(&files(&path, None, "")) {
                Ok(_) => true,
                Err(Error::File { .. }) => false,
                Err(other) => panic!("{length}: {other}"),
            }
        });
        assert_eq!(loaded.collect::<Vec<_>>(), [image.len()]);
    }
}

#[test]
fn every_changed_byte_is_an_error_or_loads() {
    let room = Room::new();
    let ram = Ram::new(RAM);
    for (image, headers) in [(bzimage(CODE), 0x1f0..0x270), (elf(CODE), 0..0x200)] {
        for at in headers {
            for value in [0, 0xff, image[at] ^ 0x80, image[at] ^ 1] {
                let path = room.file("kernel", &changed(image.clone(), at, &[value]));
                if let Ok(entry) = ram.load(&files(&path, None, "")) {
                    assert!((ONE_MIB..RAM).contains(&entry.rip), "byte {at} = {value:#x}: {entry:?}");
                }
            }
        }
    }
}

#[test]
fn a_command_line_that_the_kernel_does_not_take_is_refused() {
    let room = Room::new();
    let ram = Ram::new(RAM);
    let kernel = room.file("the-kernel", &bzimage(CODE));
    let said = |line: &str| ram.load(&files(&kernel, None, line)).map_err(|e| e.to_string());
    // The header says 100.
    assert!(said(&"x".repeat(100)).is_ok());
    let error = said(&"x".repeat(101)).unwrap_err();
    assert!(
        error.contains("101 bytes") && error.contains("at most 100") && error.contains("the-kernel"),
        "{error}"
    );
    assert!(said("quiet\nroot=/dev/null").unwrap_err().contains("byte 5"));
    assert!(said("a\0").unwrap_err().contains("byte 1"));
    let kernel = room.file("vmlinux", &elf(CODE));
    let said = |line: &str| ram.load(&files(&kernel, None, line)).map_err(|e| e.to_string());
    assert!(said(&"x".repeat(2047)).is_ok());
    assert!(said(&"x".repeat(2048)).unwrap_err().contains("at most 2047"));
    // A header that takes all of memory for a line still leaves it its place.
    let kernel = room.file("greedy", &changed(bzimage(CODE), 0x238, &[0xff; 4]));
    let said = |line: &str| ram.load(&files(&kernel, None, line)).map_err(|e| e.to_string());
    assert!(said(&"x".repeat(65535)).is_ok());
    assert!(said(&"x".repeat(65536)).unwrap_err().contains("at most 65535"));
}

#[test]
fn an_initrd_lies_clear_of_the_kernel_or_is_refused_unread() {
    let room = Room::new();
    let ram = Ram::new(RAM);
    let free = RAM - LOAD_AT - u64::from(INIT_SIZE);
    let kernel = room.file("kernel", &bzimage(CODE));
    let initrd = room.file("the-initrd", b"");
    let load = |bytes: u64| {
        File::options()
            .write(true)
            .open(&initrd)
            .unwrap()
            .set_len(bytes)
            .unwrap();
        ram.load(&files(&kernel, Some(&initrd), "")).map_err(|e| e.to_string())
    };
    assert!(load(0).unwrap_err().contains("empty"));
    assert!(load(free).is_ok(), "all that there is");
    assert_eq!(
        u64::from(ram.params().hdr.ramdisk_image),
        LOAD_AT + u64::from(INIT_SIZE)
    );
    let error = load(free + 1).unwrap_err();
    assert!(error.starts_with("initrd ") && error.contains("the-initrd"), "{error}");
    assert!(
        error.contains(&free.to_string()) && error.contains(&(free + 1).to_string()),
        "{error}"
    );
    for huge in [100 << 30, 4 << 30, (4 << 30) + 4096] {
        let error = load(huge).unwrap_err();
        assert!(
            error.contains("do not fit") && error.contains(&huge.to_string()),
            "{error}"
        );
    }
    // What an ELF kernel keeps zero at its end is the kernel's, too.
    let kernel = room.file("vmlinux", &elf(CODE));
    File::options()
        .write(true)
        .open(&initrd)
        .unwrap()
        .set_len(RAM - ELF_END)
        .unwrap();
    assert!(ram.load(&files(&kernel, Some(&initrd), "")).is_ok());
    File::options()
        .write(true)
        .open(&initrd)
        .unwrap()
        .set_len(RAM - ELF_END + 1)
        .unwrap();
    assert!(ram.load(&files(&kernel, Some(&initrd), "")).is_err());
}

#[test]
fn an_initrd_lies_below_the_kernels_limit_and_below_the_hole() {
    let room = Room::new();
    let limited = changed(bzimage(CODE), 0x22c, &0x00ff_ffffu32.to_le_bytes());
    let initrd = room.file("initrd", &[1; 4096]);
    let ram = Ram::new(RAM);
    ram.load(&files(&room.file("limited", &limited), Some(&initrd), ""))
        .unwrap();
    assert_eq!({ ram.params().hdr.ramdisk_image }, 0x00ff_f000);
    // With RAM above the hole, by the header's limit and by the hole.
    for (limit, wanted) in [(0x7fff_ffffu32, 0x7fff_f000), (u32::MAX, 0xbfff_f000u32)] {
        let kernel = room.file("kernel", &changed(bzimage(CODE), 0x22c, &limit.to_le_bytes()));
        let ram = Ram::new(5 << 30);
        ram.load(&files(&kernel, Some(&initrd), "")).unwrap();
        let params = ram.params();
        assert_eq!({ params.hdr.ramdisk_image }, wanted);
        assert_eq!(params.e820_entries, 4);
    }
}

#[test]
fn the_first_state_is_written_to_ram() {
    let ram = Ram::new(RAM);
    let entry = Entry {
        rip: LOAD_AT + 0x200,
        boot_params: BOOT_PARAMS,
    };
    let (mut sregs, mut regs) = Default::default();
    first_state(&ram.memory, &entry, &mut sregs, &mut regs).unwrap();
    assert_eq!((regs.rip, regs.rsi, regs.rflags), (entry.rip, BOOT_PARAMS, 2));
    assert_eq!(
        ram.read::<8>(sregs.gdt.base + 0x10),
        0x00af_9b00_0000_ffffu64.to_le_bytes()
    );
    assert_eq!(ram.read::<8>(sregs.cr3), (PAGE_TABLES + 0x1003).to_le_bytes());
    // The last page of the last table: 4 GiB less 2 MiB.
    assert_eq!(
        ram.read::<8>(PAGE_TABLES + 6 * PAGE_BYTES - 8),
        0xffe0_0083u64.to_le_bytes()
    );
}

/// 64-bit code for a bzImage's entry. It says what it sees by 4-byte writes to COM1's port, and halts.
#[rustfmt::skip]
const PAYLOAD: &[u8] = &[
    // The segments, once more from the GDT.
    0xb8, 0x18, 0x00, 0x00, 0x00,                               // mov eax, 0x18
    0x8e, 0xd8, 0x8e, 0xd0,                                     // mov ds, ax; mov ss, ax
    0x66, 0xba, 0xf8, 0x03,                                     // mov dx, 0x3f8
    // The boot parameters: the header's magic, and the initrd's first word.
    0x8b, 0x86, 0x02, 0x02, 0x00, 0x00, 0xef,                   // mov eax, [rsi + 0x202]; out dx, eax
    0x8b, 0xbe, 0x18, 0x02, 0x00, 0x00,                         // mov edi, [rsi + 0x218]
    0x8b, 0x07, 0xef,                                           // mov eax, [rdi]; out dx, eax
    // That this is 64-bit mode, and that the stack is there.
    0x48, 0xbb, 1, 2, 3, 4, 5, 6, 7, 8,                         // mov rbx, 0x0807060504030201
    0x53, 0x58, 0x48, 0xc1, 0xe8, 0x20, 0xef,                   // push rbx; pop rax; shr rax, 32; out dx, eax
    // Leaf 1: local APIC id and number of processors.
    0xb8, 0x01, 0x00, 0x00, 0x00, 0x0f, 0xa2,                   // mov eax, 1; cpuid
    0x89, 0xd8, 0xc1, 0xe8, 0x10,                               // mov eax, ebx; shr eax, 16
    0x66, 0xba, 0xf8, 0x03, 0xef,                               // mov dx, 0x3f8; out dx, eax
    0xf4,                                                       // hlt
];

#[test]
fn kvm_enters_the_kernel_as_the_boot_protocol_wants() {
    let opened = Kvm::new().and_then(|kvm| Ok((kvm.create_vm()?, kvm)));
    let (vm, kvm) = match opened {
        Ok((vm, kvm)) => (Arc::new(vm), kvm),
        Err(error) => {
            eprintln!("SKIPPED: kvm_enters_the_kernel_as_the_boot_protocol_wants: /dev/kvm: {error}");
            return;
        }
    };
    let room = Room::new();
    let kernel = room.file("kernel", &bzimage(PAYLOAD));
    let initrd = room.file("initrd", b"070701");
    let ram = Ram::new(RAM);
    let entry = ram.load(&files(&kernel, Some(&initrd), "")).unwrap();
    let _slots = memory::kvm::KvmSlots::register(&vm, ram.memory.owner()).unwrap();
    let mut vcpu = vm.create_vcpu(0).unwrap();
    let supported = kvm.get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES).unwrap();
    vcpu.set_cpuid2(&cpuid(&supported, 0, 2).unwrap()).unwrap();
    let (mut sregs, mut regs) = (vcpu.get_sregs().unwrap(), vcpu.get_regs().unwrap());
    first_state(&ram.memory, &entry, &mut sregs, &mut regs).unwrap();
    vcpu.set_sregs(&sregs).unwrap();
    vcpu.set_regs(&regs).unwrap();
    let mut said = Vec::new();
    loop {
        match vcpu.run().unwrap() {
            VcpuExit::IoOut(0x3f8, data) => said.push(data.to_vec()),
            VcpuExit::Hlt => break,
            other => panic!("after {said:x?}: {other:?}"),
        }
    }
    assert_eq!(said, [*b"HdrS", *b"0707", [5, 6, 7, 8], [2, 0, 0, 0]]);
}

/// A stock kernel, if this machine has one: `scripts/capture-linux-ram` leaves Debian's in this cache.
#[test]
fn a_stock_kernel_loads() {
    let cache = std::env::home_dir()
        .unwrap_or_default()
        .join(".cache/pageferry/capture");
    let packages = fs::read_dir(&cache).into_iter().flatten().flatten();
    let boot = packages.filter_map(|package| fs::read_dir(package.path().join("boot")).ok());
    let is_kernel = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"))
    };
    let Some(kernel) = boot.flatten().flatten().map(|file| file.path()).find(is_kernel) else {
        eprintln!(
            "SKIPPED: a_stock_kernel_loads: there is no kernel in {}",
            cache.display()
        );
        return;
    };
    let ram = Ram::new(256 << 20);
    let entry = ram.load(&files(&kernel, None, "console=ttyS0")).unwrap();
    assert_eq!(entry.rip, (16 << 20) + 0x200);
    let error = Ram::new(RAM).load(&files(&kernel, None, "")).unwrap_err().to_string();
    assert!(error.contains("more memory"), "{error}");
}
