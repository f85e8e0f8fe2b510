//! A guest without KVM that is honest: what a Linux guest does to its RAM and to its balloon, this one does, with real
//! memory, real virtqueues and threads in place of vCPUs.
//!
//! - Its RAM is a [`memory::GuestMemory`], touched only where a guest would touch it. The buddy allocator, the tables of
//!   what is used and the virtqueues lie **in that RAM**, so a migration that loses a page of them breaks the guest.
//! - Every page it uses carries its number, a version and a checksum; pages whose content is all zero are known by the
//!   table. [`SoftGuest::self_check`] reads all of them, and takes a census of all of RAM: no page free and used at once,
//!   none lost. What the table says is itself held against a sum that travels with the vCPU state and not in RAM, so a
//!   page of an older moment is caught even where table and page agree.
//! - Its balloon driver speaks the dialects of `balloon` as the Linux drivers do (virtio 1.3, section 5.5, and the
//!   `bitmap` dialect of 2016), with their quirks.
//! - A kick is served by a device thread, as with an ioeventfd, so the VMM's writes race with the guest's own.
//!
//! Invariants:
//!
//! - all of the guest's state is in RAM, in the section `guest` of its saved state, or in the device's section;
//! - a paused guest writes nothing, nor does its device on its behalf: [`machine::Machine::pause`] waits for every vCPU and
//!   for the device thread;
//! - a restored guest is untrusted: what it reads from RAM and from its state is checked where it is used, and a guest
//!   that finds its own memory broken stops (see [`Error::Corrupt`]) and does not bring the host down.
#![forbid(unsafe_code)]

mod boot;
mod buddy;
mod check;
mod config;
mod content;
mod driver;
mod error;
mod frames;
mod guest;
mod hooks;
mod kernel;
mod machine_impl;
mod mm;
mod platform;
mod quirks;
mod ram;
mod tree;
mod workload;

pub use check::SelfCheck;
pub use config::{GuestConfig, MAX_VCPUS, MIN_BYTES, Workload, default_balloon};
pub use error::{Error, Result};
pub use guest::{Parts, SoftGuest};
pub use hooks::{Hooks, Work};
pub use machine_impl::SoftMachine;
pub use quirks::Quirks;
pub use ram::Ram;
