//! How the guest reaches its RAM: volatile copies through vm-memory, so that every write is seen by whoever tracks the
//! mapping. Invariant: no reference to guest memory ever exists here.

use crate::{Error, Result};
use memory::{GuestMemory, VmMemory};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

/// Guest RAM together with the owner of its mapping; what the balloon device gets too.
#[derive(Clone, Debug)]
pub struct Ram {
    // Dropped in this order: the owner unmaps only what no one else holds.
    map: Arc<VmMemory>,
    owner: Arc<GuestMemory>,
}

impl GuestAddressSpace for Ram {
    type M = VmMemory;
    type T = Arc<VmMemory>;

    fn memory(&self) -> Self::T {
        Arc::clone(&self.map)
    }
}

impl Ram {
    pub(crate) fn new(owner: Arc<GuestMemory>) -> Self {
        Ram {
            map: owner.vm_memory(),
            owner,
        }
    }

    pub(crate) fn owner(&self) -> &Arc<GuestMemory> {
        &self.owner
    }

    pub(crate) fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        let len = into.len();
        let done = self.map.read_slice(into, GuestAddress(address));
        done.map_err(|e| outside(address, len, &e))
    }

    pub(crate) fn write(&self, address: u64, from: &[u8]) -> Result<()> {
        let done = self.map.write_slice(from, GuestAddress(address));
        done.map_err(|e| outside(address, from.len(), &e))
    }

    pub(crate) fn read_u64(&self, address: u64) -> Result<u64> {
        let value: std::result::Result<u64, _> = self.map.read_obj(GuestAddress(address));
        value.map_err(|e| outside(address, 8, &e))
    }

    pub(crate) fn write_u64(&self, address: u64, value: u64) -> Result<()> {
        let done = self.map.write_obj(value, GuestAddress(address));
        done.map_err(|e| outside(address, 8, &e))
    }

    /// Reads what the device publishes by this index: everything it wrote before is seen after.
    pub(crate) fn load_u16(&self, address: u64) -> Result<u16> {
        let value: std::result::Result<u16, _> = self.map.load(GuestAddress(address), Ordering::Acquire);
        value.map_err(|e| outside(address, 2, &e))
    }

    /// Publishes what was written before to the device.
    pub(crate) fn store_u16(&self, address: u64, value: u16) -> Result<()> {
        let done = self.map.store(value, GuestAddress(address), Ordering::Release);
        done.map_err(|e| outside(address, 2, &e))
    }
}

fn outside(address: u64, len: usize, why: &vm_memory::GuestMemoryError) -> Error {
    Error::Address {
        address,
        len,
        why: why.to_string(),
    }
}
