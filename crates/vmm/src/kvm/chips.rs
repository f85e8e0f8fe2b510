//! The interrupt controllers and the timer that live in the kernel: their state.

use super::blob::Blob;
use crate::platform::IOAPIC_BASE;
use crate::state::{Incoming, section};
use crate::{Error, Result};
use kvm_bindings::{KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip, kvm_pit_state2};
use kvm_ioctls::VmFd;
use machine::Section;
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, IntoBytes};

const IRQCHIP: &str = "irqchip";
const PIT: &str = "pit";
const VERSION: u32 = 1;

/// Where a chip's state starts in `kvm_irqchip`: after its number and padding.
const CHIP_AT: usize = 8;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Irqchip {
    pic_master: Blob,
    pic_slave: Blob,
    ioapic: Blob,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pit {
    state: Blob,
}

/// Sections [`IRQCHIP`] and [`PIT`].
pub(super) fn save(vm: &VmFd) -> Result<Vec<Section>> {
    let chip = |id: u32, what: &str| {
        let mut chip = kvm_irqchip {
            chip_id: id,
            ..Default::default()
        };
        vm.get_irqchip(&mut chip)
            .map_err(|e| Error::kvm(format!("reading the state of the {what}"), e))?;
        Ok::<_, Error>(Blob::from_bytes(chip.as_bytes()[CHIP_AT..].to_vec()))
    };
    let irqchip = Irqchip {
        pic_master: chip(KVM_IRQCHIP_PIC_MASTER, "first PIC")?,
        pic_slave: chip(KVM_IRQCHIP_PIC_SLAVE, "second PIC")?,
        ioapic: chip(KVM_IRQCHIP_IOAPIC, "I/O APIC")?,
    };
    let pit = vm
        .get_pit2()
        .map_err(|e| Error::kvm("reading the state of the PIT", e))?;
    let pit = Pit { state: Blob::of(&pit) };
    Ok(vec![section(IRQCHIP, VERSION, &irqchip)?, section(PIT, VERSION, &pit)?])
}

/// Reads both sections, then sets both.
pub(super) fn restore(vm: &VmFd, incoming: &mut Incoming<'_>) -> Result<()> {
    let (chips, pit) = read(incoming)?;
    for (what, chip) in chips {
        vm.set_irqchip(&chip)
            .map_err(|e| Error::state(IRQCHIP, format!("KVM does not take that of the {what}: {e}")))?;
    }
    vm.set_pit2(&pit)
        .map_err(|e| Error::state(PIT, format!("KVM does not take it: {e}")))
}

/// The chips, each with its name, and the timer.
pub(crate) type Read = (Vec<(&'static str, kvm_irqchip)>, kvm_pit_state2);

/// Reads both sections, and checks them as far as can be without KVM.
pub(crate) fn read(incoming: &mut Incoming<'_>) -> Result<Read> {
    let irqchip: Irqchip = incoming.take(IRQCHIP, VERSION)?;
    let chips = [
        (KVM_IRQCHIP_PIC_MASTER, "first PIC", &irqchip.pic_master),
        (KVM_IRQCHIP_PIC_SLAVE, "second PIC", &irqchip.pic_slave),
        (KVM_IRQCHIP_IOAPIC, "I/O APIC", &irqchip.ioapic),
    ]
    .into_iter()
    .map(|(id, what, blob)| Ok((what, chip(id, what, blob)?)))
    .collect::<Result<Vec<_>>>()?;
    let pit: Pit = incoming.take(PIT, VERSION)?;
    Ok((chips, pit.state.read(PIT, "its state")?))
}

/// Both sections, all zero.
#[cfg(feature = "fuzzing")]
pub(crate) fn zeroed() -> Result<Vec<Section>> {
    let chip = || Blob::from_bytes(vec![0; size_of::<kvm_irqchip>() - CHIP_AT]);
    let mut ioapic = u64::from(IOAPIC_BASE).to_le_bytes().to_vec();
    ioapic.resize(size_of::<kvm_irqchip>() - CHIP_AT, 0);
    let irqchip = Irqchip {
        pic_master: chip(),
        pic_slave: chip(),
        ioapic: Blob::from_bytes(ioapic),
    };
    let state = Blob::of(&kvm_pit_state2::default());
    Ok(vec![
        section(IRQCHIP, VERSION, &irqchip)?,
        section(PIT, VERSION, &Pit { state })?,
    ])
}

fn chip(id: u32, what: &str, blob: &Blob) -> Result<kvm_irqchip> {
    if id == KVM_IRQCHIP_IOAPIC {
        let base = blob.bytes().first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        if base.is_some_and(|base| base != u64::from(IOAPIC_BASE)) {
            return Err(Error::state(
                IRQCHIP,
                format!(
                    "its I/O APIC lies at {:#x}, ours at {IOAPIC_BASE:#x}",
                    base.unwrap_or(0)
                ),
            ));
        }
    }
    // The number is ours, the rest came.
    let mut bytes = vec![0; CHIP_AT];
    bytes[..4].copy_from_slice(&id.to_le_bytes());
    bytes.extend_from_slice(blob.bytes());
    kvm_irqchip::read_from_bytes(&bytes).map_err(|_| {
        let (came, wanted) = (blob.bytes().len(), size_of::<kvm_irqchip>() - CHIP_AT);
        Error::state(
            IRQCHIP,
            format!("state of the {what}: {came} bytes came, it has {wanted}"),
        )
    })
}
