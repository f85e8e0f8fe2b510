//! Guest RAM under KVM: its memory slots, its dirty logs, and the dirty ring.
//!
//! - [`KvmSlots`] gives guest RAM to a VM, a slot a region; nothing else sets those slots;
//! - [`KvmRing`] is the dirty ring of a VM's vCPUs; it has to be enabled before there are any;
//! - [`capabilities`] says which ways of tracking a host has; the trackers themselves are in [`crate::trackers`].
//!
//! Lock order: a vCPU thread that comes with a full ring takes the ring's lock, and holds nothing else. KVM never waits for
//! a vCPU that is not in `KVM_RUN`, so a harvest that holds the lock ends whatever the vCPUs do.

mod ring;
mod slots;
mod watch;

pub use ring::KvmRing;
pub use slots::KvmSlots;
pub(crate) use watch::Watch;

use crate::sys::kvm::GFN_BYTES;
use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
    KVM_DIRTY_LOG_INITIALLY_SET, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
};
use kvm_ioctls::VmFd;

/// Ways to track writes beyond `KVM_GET_DIRTY_LOG`, which every KVM has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// `KVM_CLEAR_DIRTY_LOG`: reading the log and protecting pages are two steps.
    pub manual_protect: bool,
    /// With it, switching the log on protects nothing: everything counts as dirty until it is cleared, which can be done
    /// piece by piece.
    pub initially_set: bool,
    /// The most entries of a vCPU's dirty ring; 0 where there are no rings.
    pub ring_entries: u32,
}

/// What this host's KVM has, asked of a VM.
pub fn capabilities(vm: &VmFd) -> Capabilities {
    // A negative answer is an error, which a capability that is not known gives as well.
    let ask = |cap: u32| vm.check_extension_raw(cap.into()).max(0).unsigned_abs();
    let manual = ask(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2);
    let ring_bytes = ask(KVM_CAP_DIRTY_LOG_RING_ACQ_REL).max(ask(KVM_CAP_DIRTY_LOG_RING));
    Capabilities {
        manual_protect: manual & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE != 0,
        initially_set: manual & KVM_DIRTY_LOG_INITIALLY_SET != 0,
        ring_entries: ring_bytes / GFN_BYTES,
    }
}
