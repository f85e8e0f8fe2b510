//! Guest RAM: backings, hole scan, dirty trackers, page I/O. The only crate that reaches guest memory by address.
//!
//! - [`GuestMemory`] is RAM mapped from a [`Backing`]; it implements [`machine::GuestRam`];
//! - [`kvm`] gives that RAM to a VM;
//! - [`trackers`] are implementations of [`machine::DirtyTracker`]: by KVM's logs, by userfaultfd, by a bitmap that a VMM
//!   marks, and for guests that do not run;
//! - [`free_map`] and [`layout_file`] read the two files that can come with a guest's RAM in a file.
//!
//! Invariants:
//!
//! - no reference to guest memory exists: it is reached by system calls that take addresses and by volatile copies;
//! - *RAM order is file order*: the regions of the layout lie in a RAM file one after the other, holes left out;
//! - memory that is absent (never touched, or discarded) reads as zero, and neither finding that out nor sending it allocates it;
//! - whatever changes guest memory is told to every tracker that would not see it (the VMM's own writes, discards), after it
//!   has happened.

mod atomic_pages;
mod backing;
mod cgroup;
mod content;
mod device_memory;
mod discard;
mod error;
pub mod free_map;
mod guest_ram;
pub mod kvm;
pub mod layout_file;
mod populate;
mod presence;
mod ram;
mod sending;
mod sparse;
mod sys;
pub mod trackers;
mod write_log;
mod zero_scan;

pub use backing::{Backing, FileMode};
pub use device_memory::{DeviceMemory, VmMemory};
pub use error::{Error, Result};
pub use free_map::FreeMap;
pub use populate::available_bytes;
pub use presence::Presence;
pub use ram::GuestMemory;
pub use write_log::{MarksFrom, WriteMarks};
