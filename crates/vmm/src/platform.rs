//! The machine's fixed places: addresses, ports and interrupts. Part of what a guest sees, so never to be changed without
//! a new version of the machine (see [`MACHINE_VERSION`]).

/// The version of the machine as a guest sees it: its devices, their places and their interrupts.
pub(crate) const MACHINE_VERSION: u32 = 1;

/// The most vCPUs. Local APIC ids are 8 bits (no x2APIC), and the I/O APIC has one of them.
pub(crate) const MAX_VCPUS: u32 = 64;

/// The least RAM that a Linux kernel is booted in, bytes.
pub(crate) const MIN_RAM_BYTES: u64 = 32 << 20;

/// Where the first virtio-mmio device's registers lie; each has [`VIRTIO_MMIO_BYTES`]. In the hole of
/// [`pages::Layout::pc`], 3 to 4 GiB.
pub(crate) const VIRTIO_MMIO_BASE: u64 = 0xd000_0000;
/// Bytes of registers a virtio-mmio device.
pub(crate) const VIRTIO_MMIO_BYTES: u64 = 0x1000;
/// The first virtio-mmio device's interrupt; the next device has the next.
pub(crate) const VIRTIO_GSI_BASE: u32 = 5;
/// The most virtio-mmio devices: interrupts 5 to 11.
pub(crate) const MAX_VIRTIO: usize = 7;

/// The I/O APIC's registers, where KVM has it.
pub(crate) const IOAPIC_BASE: u32 = 0xfec0_0000;
/// The local APICs' registers.
pub(crate) const LAPIC_BASE: u32 = 0xfee0_0000;
/// Where KVM keeps what Intel's real mode needs: one page for the identity map, then three for the TSS.
pub(crate) const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// Three pages for the TSS.
pub(crate) const KVM_TSS: u64 = 0xfffb_d000;

/// COM1.
pub(crate) const SERIAL_PORT: u16 = 0x3f8;
/// COM1's interrupt.
pub(crate) const SERIAL_GSI: u32 = 4;
/// The keyboard controller's data and command ports; used for reset only.
pub(crate) const I8042_DATA: u16 = 0x60;
/// Its command port.
pub(crate) const I8042_COMMAND: u16 = 0x64;

/// ACPI's power management ports (hardware-reduced: sleep control and status registers).
pub(crate) const ACPI_SLEEP_CONTROL: u16 = 0x600;
/// Sleep status.
pub(crate) const ACPI_SLEEP_STATUS: u16 = 0x601;
/// ACPI's reset register; value [`ACPI_RESET_VALUE`] resets.
pub(crate) const ACPI_RESET: u16 = 0x602;
/// What resets.
pub(crate) const ACPI_RESET_VALUE: u8 = 1;
/// SLP_TYP of S5, power off.
pub(crate) const ACPI_S5: u8 = 5;
/// ACPI's system control interrupt.
pub(crate) const ACPI_SCI: u32 = 9;

/// Where the ACPI tables lie: the area in which a kernel looks for the RSDP.
pub(crate) const ACPI_TABLES: u64 = 0xe_0000;
/// Its end.
pub(crate) const ACPI_TABLES_END: u64 = 0x10_0000;
/// The end of conventional memory; E820 has RAM below it and from 1 MiB on.
pub(crate) const LOW_RAM_END: u64 = 0x9_fc00;

/// A virtio-mmio device's place, as ACPI and the bus have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VirtioPlace {
    /// Guest-physical address of its registers.
    pub(crate) address: u64,
    /// Its interrupt, edge-triggered.
    pub(crate) gsi: u32,
}

/// The place of virtio-mmio device `index`.
pub(crate) fn virtio_place(index: usize) -> VirtioPlace {
    debug_assert!(index < MAX_VIRTIO);
    let index = u32::try_from(index).unwrap_or(u32::MAX);
    let mut gsi = VIRTIO_GSI_BASE.saturating_add(index);
    // 9 is ACPI's.
    if gsi >= ACPI_SCI {
        gsi += 1;
    }
    VirtioPlace {
        address: VIRTIO_MMIO_BASE + u64::from(index) * VIRTIO_MMIO_BYTES,
        gsi,
    }
}
