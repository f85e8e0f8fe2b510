//! What lies in guest RAM before the first instruction, and the state that a vCPU first runs it with.

use crate::platform::VirtioPlace;
use crate::{BootFiles, Error, Result};
use kvm_bindings::{CpuId, kvm_regs, kvm_sregs};
use memory::DeviceMemory;
use pages::Layout;

/// Where a vCPU enters the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Address of the first instruction.
    pub(crate) rip: u64,
    /// Guest-physical address of the kernel's boot parameters, which goes into RSI.
    pub(crate) boot_params: u64,
}

/// Puts the kernel, its initrd, its command line, the boot parameters and the ACPI tables into guest RAM.
pub(crate) fn load(
    memory: &DeviceMemory,
    layout: &Layout,
    vcpus: u32,
    files: &BootFiles,
    virtio: &[VirtioPlace],
) -> Result<Entry> {
    let _ = (memory, layout, vcpus, files, virtio);
    Err(Error::Condition("not built yet".to_owned()))
}

/// Puts page tables and a GDT into guest RAM, and sets the registers that the boot protocol wants, for vCPU 0.
pub(crate) fn first_state(
    memory: &DeviceMemory,
    entry: &Entry,
    sregs: &mut kvm_sregs,
    regs: &mut kvm_regs,
) -> Result<()> {
    let _ = (memory, entry, sregs, regs);
    Err(Error::Condition("not built yet".to_owned()))
}

/// The CPUID of vCPU `vcpu` of `vcpus`, made of what this host's KVM supports.
pub(crate) fn cpuid(supported: &CpuId, vcpu: u32, vcpus: u32) -> Result<CpuId> {
    let _ = (supported, vcpu, vcpus);
    Err(Error::Condition("not built yet".to_owned()))
}
