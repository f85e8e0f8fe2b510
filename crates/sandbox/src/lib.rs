//! What a process that handles a guest gives up once it has started.
//!
//! A peer, a network and a guest may all be hostile, and a process that talks to them may have a hole. [`enter`] makes sure
//! that little can be done with it: no programs are run, no other process is looked into, no file is opened that the
//! command line does not name. Three layers, each of which holds without the others:
//!
//! - `no_new_privs`: no program that is set-user-ID helps;
//! - a list of the system calls that are used, with their arguments where those matter (`calls.rs`): seccomp, on all threads;
//! - a list of the files and folders that are used ([`Files`]): Landlock.
//!
//! A call that is not on the list fails with EPERM; the process is not killed for it. The lists hold an intruder off either
//! way, and a process that has a guest must not die, and the guest with it, for a call that somebody forgot: it is told no,
//! and says so in its log. Calls newer than the list are answered as an old kernel would (ENOSYS), for the C library to do
//! without.
//!
//! Invariants: what is entered cannot be left; it is inherited by every thread; and a kernel that lacks a layer costs that
//! layer and a warning, never the guest.
#![cfg_attr(not(test), forbid(unsafe_code))]

mod calls;
mod files;
mod ioctls;

pub use files::Files;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use std::io;

/// Why a layer is not there.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel knows no seccomp filters, or another sandbox forbids to set one.
    #[error("this kernel sets no filter for system calls: {0}")]
    NoFilter(#[source] seccompiler::Error),
    /// The filter cannot be made for this machine.
    #[error("making the filter for system calls: {0}")]
    Filter(#[from] seccompiler::BackendError),
    /// Landlock is not there.
    #[error("this kernel cannot limit which files are opened (Landlock, Linux 5.13 or newer)")]
    NoLandlock,
    /// Landlock refused.
    #[error("limiting which files are opened: {0}")]
    Files(#[from] landlock::RulesetError),
    /// Landlock binds the calling thread and its descendants; there are others already.
    #[error("limiting which files are opened: there are {0} threads already")]
    Threads(usize),
    /// The process cannot be kept from gaining privileges.
    #[error("setting no_new_privs: {0}")]
    Privileges(#[source] io::Error),
}

/// What was given up.
#[derive(Debug)]
#[must_use]
pub struct Entered {
    /// The layers that could not be had, with the reason of each.
    pub missing: Vec<Error>,
}

/// Gives up what is not needed: to be called early, from a process of one thread, as soon as it is known what is needed.
pub fn enter(files: &Files) -> Entered {
    let mut missing = Vec::new();
    let mut note = |done: Result<(), Error>| missing.extend(done.err());
    note(no_new_privileges());
    note(files.enforce());
    note(filter());
    Entered { missing }
}

fn no_new_privileges() -> Result<(), Error> {
    rustix::thread::set_no_new_privs(true).map_err(|error| Error::Privileges(error.into()))
}

/// Sets the filters on all threads of this process.
fn filter() -> Result<(), Error> {
    let filters = Filters::new(std::process::id())?;
    for program in [&filters.newer, &filters.allowed] {
        seccompiler::apply_filter_all_threads(program).map_err(Error::NoFilter)?;
    }
    Ok(())
}

/// The filters. Both are asked for each call, and the stricter one wins.
struct Filters {
    /// Answers calls newer than the list with ENOSYS. Set first, for the other one does not let itself be followed.
    newer: BpfProgram,
    /// Lets pass what is on the list, and those newer calls.
    allowed: BpfProgram,
}

impl Filters {
    /// For the process `pid`.
    fn new(pid: u32) -> Result<Self, Error> {
        let arch = TargetArch::try_from(std::env::consts::ARCH)?;
        let compile = |rules, otherwise, matched| -> Result<BpfProgram, Error> {
            Ok(SeccompFilter::new(rules, otherwise, matched, arch)?.try_into()?)
        };
        let errno = |number: i32| SeccompAction::Errno(number.unsigned_abs());
        let allow = SeccompAction::Allow;
        let newer = calls::newer();
        let mut allowed = calls::allowed(pid)?;
        allowed.extend(newer.clone());
        Ok(Filters {
            newer: compile(newer, allow.clone(), errno(libc::ENOSYS))?,
            allowed: compile(allowed, errno(libc::EPERM), allow)?,
        })
    }
}

#[cfg(test)]
mod tests;
