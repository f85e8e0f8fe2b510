//! Guest memory as devices take it: a [`GuestAddressSpace`] whose writes every attached tracker hears of.

use crate::ram::GuestMemory;
use crate::write_log::WriteMarks;
use std::sync::Arc;
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};

/// Guest memory in rust-vmm's terms. Every write through it is noted by the trackers that would not see it otherwise.
pub type VmMemory = GuestMemoryMmap<WriteMarks>;

/// Guest memory for a device, together with the owner of its mapping. Cheap to clone.
#[derive(Clone, Debug)]
pub struct DeviceMemory {
    // Dropped in this order: the owner unmaps only what no one else holds.
    map: Arc<VmMemory>,
    owner: Arc<GuestMemory>,
}

impl DeviceMemory {
    /// The memory of `owner`.
    pub fn new(owner: &Arc<GuestMemory>) -> Self {
        DeviceMemory {
            map: owner.vm_memory(),
            owner: Arc::clone(owner),
        }
    }

    /// Whose mapping it is.
    pub fn owner(&self) -> &Arc<GuestMemory> {
        &self.owner
    }
}

impl GuestAddressSpace for DeviceMemory {
    type M = VmMemory;
    type T = Arc<VmMemory>;

    fn memory(&self) -> Self::T {
        Arc::clone(&self.map)
    }
}
