//! A small KVM VMM that boots Linux, and that can be saved and restored as a whole.
//!
//! ```text
//!   boot      kernel, initrd, E820, ACPI tables, a vCPU's first state       files -> guest RAM
//!   kvm       /dev/kvm, the VM and what lives in it: irqchip, PIT, clock    ioctls
//!   vcpu      vCPU threads, their kick, pause and resume; a vCPU's state    exits -> board
//!   devices   the board: serial, i8042, power, virtio-mmio, balloon, rng    exits, eventfds
//!   guest     all of it put together, as a migration takes it
//! ```
//!
//! Guest RAM and the dirty trackers are `memory`'s, the balloon device is `balloon`'s.
//!
//! Invariants:
//!
//! - after [`machine::Machine::pause`] no vCPU and no device writes guest memory, and none is in the middle of anything;
//! - the state of a guest is a list of sections, one a vCPU or device, each with a version; what comes in is checked
//!   before it is used, and what nobody consumed is an error;
//! - nothing that a guest does makes the VMM panic, spin or allocate without bound.

mod boot;
mod config;
mod devices;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod guest;
mod kvm;
mod machine_impl;
mod platform;
mod state;
mod vcpu;
mod wiring;

pub use config::{BootFiles, Console, Tracking, VmConfig};
pub use error::{Error, Result};
pub use guest::{Ended, LinuxGuest, Parts, StateFault};
