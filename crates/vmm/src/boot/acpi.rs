//! The ACPI tables: processors and interrupts (MADT), power-off and reset (FADT), and the devices that nobody could find
//! otherwise (DSDT). ACPI 6.5: <https://uefi.org/specs/ACPI/6.5/>.
//!
//! The platform is *hardware-reduced* (section 4.1): no fixed hardware, no SCI, no PM timer, sleep and reset by three
//! ports. Linux then leaves the PIC and the PIT alone and takes its time from the local APICs and from KVM's clock, which
//! every KVM has. Device interrupts go to the I/O APIC, whose pins are the interrupt numbers: KVM's routing is the identity
//! unless told otherwise, the PIT's interrupt 0 included, so there are no interrupt source overrides.

use crate::platform::{
    ACPI_RESET, ACPI_RESET_VALUE, ACPI_S5, ACPI_SCI, ACPI_SLEEP_CONTROL, ACPI_SLEEP_STATUS, ACPI_TABLES,
    ACPI_TABLES_END, IOAPIC_BASE, LAPIC_BASE, MAX_VCPUS, MAX_VIRTIO, SERIAL_GSI, SERIAL_PORT, VIRTIO_MMIO_BYTES,
    VirtioPlace,
};
use crate::{Error, Result};
use acpi_tables::Aml;
use acpi_tables::aml::{Device, EISAName, IO, Interrupt, Memory32Fixed, Name, Package, Path, ResourceTemplate, Scope};
use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;

const OEM: [u8; 6] = *b"PGFRRY";
const OEM_TABLE: [u8; 8] = *b"PAGEFRRY";
const OEM_REVISION: u32 = 1;
/// Of what runs the machine, for the FADT.
const HYPERVISOR: [u8; 8] = *b"PAGEFRRY";
/// The DSDT's: 2 and above have 64-bit integers.
const DSDT_REVISION: u8 = 2;
/// Bytes of a table's header, as which the DSDT begins.
const TABLE_HEADER_BYTES: u32 = 36;
/// Each table starts at a multiple of this; the RSDP has to at 16.
const ALIGNMENT: usize = 64;

/// `IAPC_BOOT_ARCH` (section 5.2.9.3): there is COM1 on an ISA bus, but no keyboard controller to speak of.
const BOOT_LEGACY_DEVICES: u16 = 1 << 0;
const BOOT_NO_VGA: u16 = 1 << 2;
const BOOT_NO_MSI: u16 = 1 << 3;
const BOOT_NO_PCIE_ASPM: u16 = 1 << 4;
const BOOT_NO_CMOS_RTC: u16 = 1 << 5;

/// The registers of a 16550.
const SERIAL_PORTS: u8 = 8;

/// All tables, as they lie from [`ACPI_TABLES`] on.
pub(super) fn tables(vcpus: u32, virtio: &[VirtioPlace]) -> Result<Vec<u8>> {
    let mut area = Area::default();
    // The RSDP comes first, where kernels look for it; what it points to is known last.
    area.place(&[0; 36]);
    let dsdt = area.place(dsdt(virtio)?.as_slice());
    let fadt = area.place(&bytes(&fadt(dsdt)));
    let madt = area.place(&bytes(&madt(vcpus)?));
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = area.place(&bytes(&xsdt));
    let rsdp = bytes(&Rsdp::new(OEM, xsdt));
    area.0[..rsdp.len()].copy_from_slice(&rsdp);
    if area.0.len() as u64 > ACPI_TABLES_END - ACPI_TABLES {
        return Err(Error::Config(format!(
            "{} bytes of ACPI tables are too many",
            area.0.len()
        )));
    }
    Ok(area.0)
}

/// Tables, one after the other.
#[derive(Default)]
struct Area(Vec<u8>);

impl Area {
    /// Appends a table and returns its address.
    fn place(&mut self, table: &[u8]) -> u64 {
        self.0.resize(self.0.len().next_multiple_of(ALIGNMENT), 0);
        let address = ACPI_TABLES + self.0.len() as u64;
        self.0.extend_from_slice(table);
        address
    }
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn fadt(dsdt: u64) -> impl Aml {
    let port = |port: u16| GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(port));
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::Wbinvd)
        // No buttons of the fixed kind.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Headless)
        .dsdt_64(dsdt);
    fadt.iapc_boot_arch =
        (BOOT_LEGACY_DEVICES | BOOT_NO_VGA | BOOT_NO_MSI | BOOT_NO_PCIE_ASPM | BOOT_NO_CMOS_RTC).into();
    // Never raised, but Linux describes interrupt 0 as level-triggered if it finds 0 here.
    fadt.sci_int = u16::try_from(ACPI_SCI).unwrap_or_default().into();
    fadt.reset_reg = port(ACPI_RESET);
    fadt.reset_value = ACPI_RESET_VALUE;
    fadt.sleep_control_reg = port(ACPI_SLEEP_CONTROL);
    fadt.sleep_status_reg = port(ACPI_SLEEP_STATUS);
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(HYPERVISOR).into();
    fadt.finalize()
}

/// The I/O APIC's id comes after the processors', with which it shares a number space on old hardware.
fn madt(vcpus: u32) -> Result<MADT> {
    let count = u8::try_from(vcpus)
        .ok()
        .filter(|count| (1..=MAX_VCPUS).contains(&u32::from(*count)))
        .ok_or_else(|| Error::Config(format!("{vcpus} vCPUs: a machine has 1 to {MAX_VCPUS}")))?;
    let mut madt = MADT::new(
        OEM,
        OEM_TABLE,
        OEM_REVISION,
        LocalInterruptController::Address(LAPIC_BASE),
    );
    for id in 0..count {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(count, IOAPIC_BASE, 0));
    Ok(madt)
}

fn dsdt(virtio: &[VirtioPlace]) -> Result<Sdt> {
    let mut dsdt = Sdt::new(
        *b"DSDT",
        TABLE_HEADER_BYTES,
        DSDT_REVISION,
        OEM,
        OEM_TABLE,
        OEM_REVISION,
    );
    let zero = 0u8;
    let s5 = Package::new(vec![&ACPI_S5, &zero, &zero, &zero]);
    dsdt.append_slice(&bytes(&Name::new("_S5_".into(), &s5)));
    dsdt.append_slice(&serial());
    if virtio.len() > MAX_VIRTIO {
        return Err(Error::Config(format!(
            "{} virtio devices: at most {MAX_VIRTIO} have a place",
            virtio.len()
        )));
    }
    for (index, place) in virtio.iter().enumerate() {
        dsdt.append_slice(&virtio_mmio(index, *place)?);
    }
    Ok(dsdt)
}

/// COM1.
fn serial() -> Vec<u8> {
    let ports = IO::new(SERIAL_PORT, SERIAL_PORT, 1, SERIAL_PORTS);
    let interrupt = edge(SERIAL_GSI);
    let resources = ResourceTemplate::new(vec![&ports, &interrupt]);
    let hid = Name::new("_HID".into(), &EISAName::new("PNP0501"));
    let uid = Name::new("_UID".into(), &0u8);
    let crs = Name::new("_CRS".into(), &resources);
    on_the_bus("COM1", vec![&hid, &uid, &crs])
}

/// A virtio-mmio device, as Linux's driver finds it.
fn virtio_mmio(index: usize, place: VirtioPlace) -> Result<Vec<u8>> {
    let fits = |value: u64| {
        u32::try_from(value).map_err(|_| Error::Config(format!("virtio registers at {value:#x} lie above 4 GiB")))
    };
    let registers = Memory32Fixed::new(true, fits(place.address)?, fits(VIRTIO_MMIO_BYTES)?);
    let interrupt = edge(place.gsi);
    let resources = ResourceTemplate::new(vec![&registers, &interrupt]);
    let hid = Name::new("_HID".into(), &"LNRO0005");
    let uid = Name::new("_UID".into(), &index);
    // Its DMA is coherent with the processors' caches.
    let cca = Name::new("_CCA".into(), &1u8);
    let crs = Name::new("_CRS".into(), &resources);
    Ok(on_the_bus(&format!("VR{index:02}"), vec![&hid, &uid, &cca, &crs]))
}

/// A consumer's interrupt: edge-triggered, active high, shared with nobody.
fn edge(gsi: u32) -> Interrupt {
    Interrupt::new(true, true, false, false, gsi)
}

/// A device on the system bus; `name` has four letters.
fn on_the_bus(name: &str, children: Vec<&dyn Aml>) -> Vec<u8> {
    let device = Device::new(Path::new(name), children);
    bytes(&Scope::new("_SB_".into(), vec![&device]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::virtio_place;
    use std::ops::Range;

    /// What a guest finds, starting from the RSDP; everything is checked on the way.
    struct Found {
        area: Vec<u8>,
        fadt: Range<usize>,
        madt: Range<usize>,
        dsdt: Range<usize>,
    }

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
        bytes[at..at + len]
            .iter()
            .rev()
            .fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    fn index(address: u64) -> usize {
        usize::try_from(address - ACPI_TABLES).unwrap()
    }

    fn table(area: &[u8], address: u64, signature: &[u8]) -> Range<usize> {
        let start = index(address);
        let end = start + usize::try_from(number(area, start + 4, 4)).unwrap();
        assert_eq!(&area[start..start + 4], signature);
        assert_eq!(
            sum(&area[start..end]),
            0,
            "checksum of {}",
            String::from_utf8_lossy(signature)
        );
        start..end
    }

    fn found(vcpus: u32, devices: usize) -> Found {
        let places: Vec<_> = (0..devices).map(virtio_place).collect();
        let area = tables(vcpus, &places).unwrap();
        assert_eq!(&area[..8], b"RSD PTR ");
        assert_eq!((sum(&area[..20]), sum(&area[..36]), area[15]), (0, 0, 2));
        let xsdt = table(&area, number(&area, 24, 8), b"XSDT");
        assert_eq!(xsdt.len(), 36 + 2 * 8);
        let fadt = table(&area, number(&area, xsdt.start + 36, 8), b"FACP");
        let madt = table(&area, number(&area, xsdt.start + 44, 8), b"APIC");
        let dsdt = table(&area, number(&area, fadt.start + 140, 8), b"DSDT");
        let mut all = [0..36, xsdt, fadt.clone(), madt.clone(), dsdt.clone()];
        all.sort_by_key(|range| range.start);
        assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start), "{all:?}");
        assert!(all[4].end <= area.len() && area.len() as u64 <= ACPI_TABLES_END - ACPI_TABLES);
        Found { area, fadt, madt, dsdt }
    }

    fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
        bytes.windows(wanted.len()).any(|window| window == wanted)
    }

    #[test]
    fn the_fadt_has_power_off_and_reset_at_their_ports() {
        let found = found(1, 1);
        let fadt = &found.area[found.fadt];
        assert_eq!(fadt.len(), 276);
        let flags = number(fadt, 112, 4);
        assert_eq!(flags & (1 << 20), 1 << 20, "hardware-reduced");
        assert_eq!(flags & (1 << 10), 1 << 10, "there is a reset register");
        // Space, bits, offset, access size; then the port.
        let port = |port: u16| [&[1, 8, 0, 1], &u64::from(port).to_le_bytes()[..]].concat();
        assert_eq!(fadt[116..128], port(ACPI_RESET));
        assert_eq!(fadt[128], ACPI_RESET_VALUE);
        assert_eq!(fadt[244..256], port(ACPI_SLEEP_CONTROL));
        assert_eq!(fadt[256..268], port(ACPI_SLEEP_STATUS));
        assert_eq!(number(fadt, 46, 2), u64::from(ACPI_SCI));
        // _S5: a package of four, the first being SLP_TYP.
        let s5 = [&b"\x08_S5_\x12\x07\x04\x0a"[..], &[ACPI_S5, 0, 0, 0]].concat();
        assert!(contains(&found.area[found.dsdt], &s5));
    }

    #[test]
    fn the_madt_has_every_processor_and_the_io_apic() {
        for vcpus in 1..=MAX_VCPUS {
            let found = found(vcpus, 2);
            let madt = &found.area[found.madt];
            assert_eq!(number(madt, 36, 4), u64::from(LAPIC_BASE));
            let mut rest = &madt[44..];
            let (mut ids, mut io_apics) = (Vec::new(), Vec::new());
            while !rest.is_empty() {
                let (entry, tail) = rest.split_at(usize::from(rest[1]));
                match entry[0] {
                    0 => {
                        assert_eq!((entry[2], number(entry, 4, 4)), (entry[3], 1));
                        ids.push(u32::from(entry[3]));
                    }
                    1 => io_apics.push((u32::from(entry[2]), number(entry, 4, 4), number(entry, 8, 4))),
                    other => panic!("an entry of type {other}"),
                }
                rest = tail;
            }
            assert_eq!(ids, (0..vcpus).collect::<Vec<_>>());
            assert_eq!(io_apics, [(vcpus, u64::from(IOAPIC_BASE), 0)]);
        }
        assert!(tables(0, &[]).is_err());
        assert!(tables(MAX_VCPUS + 1, &[]).is_err());
        assert!(tables(257, &[]).is_err(), "a count that is 1 in eight bits");
    }

    #[test]
    fn the_dsdt_has_every_device_with_its_place() {
        let mut interrupts = Vec::new();
        for devices in 0..=MAX_VIRTIO {
            let found = found(1, devices);
            let dsdt = &found.area[found.dsdt];
            let mut com1 = vec![0x47, 1, 0xf8, 3, 0xf8, 3, 1, 8];
            com1.extend([0x89, 6, 0, 0b0011, 1, 4, 0, 0, 0, 0x79]);
            assert!(contains(dsdt, &com1));
            assert!(contains(dsdt, b"\x0c\x41\xd0\x05\x01"), "PNP0501");
            let ids = dsdt.windows(9).filter(|window| *window == b"LNRO0005\0").count();
            assert_eq!(ids, devices);
            for index in 0..devices {
                let place = virtio_place(index);
                let address = u32::try_from(place.address).unwrap().to_le_bytes();
                let gsi = place.gsi.to_le_bytes();
                let size = u32::try_from(VIRTIO_MMIO_BYTES).unwrap().to_le_bytes();
                let registers = [&[0x86, 9, 0, 1][..], &address, &size].concat();
                let resources = [&registers[..], &[0x89, 6, 0, 0b0011, 1], &gsi, &[0x79]].concat();
                assert!(contains(dsdt, &resources), "device {index} of {devices}");
                interrupts.push(place.gsi);
            }
        }
        interrupts.sort_unstable();
        interrupts.dedup();
        assert_eq!(interrupts.len(), MAX_VIRTIO);
        assert!(!interrupts.contains(&SERIAL_GSI) && !interrupts.contains(&ACPI_SCI));
        let places: Vec<_> = (0..=MAX_VIRTIO).map(|_| virtio_place(0)).collect();
        assert!(tables(1, &places).is_err());
        let far = VirtioPlace {
            address: 1 << 32,
            gsi: 5,
        };
        assert!(tables(1, &[far]).is_err());
    }
}
