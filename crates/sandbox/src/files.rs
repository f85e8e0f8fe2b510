//! The files and folders that a process goes on using: Landlock.
//!
//! Rights hang on what a path names when this is set up, so a file that is replaced later, or that is yet to come, is
//! reached by a right on its folder. What is open already stays so.

use crate::Error;
use landlock::{
    ABI, Access, AccessFs, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
    make_bitflags,
};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// What the C library, tokio and guest RAM read of the system: names, limits, the host's memory and processors, terminals.
const SYSTEM: &[&str] = &[
    "/proc/self",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/cpuinfo",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/net/core",
    "/sys/kernel/mm",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
    "/sys/fs/cgroup",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/protocols",
    "/etc/localtime",
    "/etc/ld.so.cache",
    "/etc/terminfo",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/terminfo",
    "/lib",
    "/lib64",
];

/// Devices that are opened to read and write.
const DEVICES: &[&str] = &["/dev/null", "/dev/kvm", "/dev/userfaultfd", "/dev/vsock"];

/// What is opened later.
#[derive(Clone, Debug, Default)]
pub struct Files {
    read: Vec<PathBuf>,
    made: Vec<PathBuf>,
}

impl Files {
    /// Nothing but what every process needs of the system.
    pub fn new() -> Self {
        Files::default()
    }

    /// A file that is read.
    #[must_use]
    pub fn reads(mut self, file: impl Into<PathBuf>) -> Self {
        self.read.push(file.into());
        self
    }

    /// A file or socket that is made, replaced or removed, or that is there and is written. Others beside it in its folder can
    /// be, too.
    #[must_use]
    pub fn makes(mut self, file: impl Into<PathBuf>) -> Self {
        self.made.push(file.into());
        self
    }

    /// Forbids the rest to this thread, and to those that it starts.
    pub(crate) fn enforce(&self) -> Result<(), Error> {
        match threads() {
            Some(1) | None => self.enforce_on_this_thread(),
            Some(more) => Err(Error::Threads(more)),
        }
    }

    pub(crate) fn enforce_on_this_thread(&self) -> Result<(), Error> {
        /// Entries of /proc are made anew when they are looked up again, and rights hang on the old ones, so those are held.
        static HELD: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());
        let read = make_bitflags!(AccessFs::{ReadFile | ReadDir});
        let write = read | make_bitflags!(AccessFs::{WriteFile | Truncate});
        let make = write | make_bitflags!(AccessFs::{MakeReg | MakeSock | RemoveFile});
        let mut rules: Vec<(PathBuf, BitFlags<AccessFs>)> = Vec::new();
        rules.extend(SYSTEM.iter().map(|path| (path.into(), read)));
        rules.extend(name_servers().into_iter().map(|folder| (folder, read)));
        rules.extend(DEVICES.iter().map(|path| (path.into(), write)));
        rules.extend(self.read.iter().map(|path| (path.clone(), read)));
        for path in &self.made {
            rules.push((folder_of(path).to_owned(), make));
            rules.push((path.clone(), write));
        }
        let mut set = Ruleset::default()
            .handle_access(AccessFs::from_all(ABI::V3))?
            .create()?;
        let mut held = Vec::new();
        for (path, rights) in rules {
            // What is not there cannot be opened either.
            let Ok(fd) = PathFd::new(&path) else { continue };
            // Rights on folders mean nothing for a file.
            let rights = if path.is_dir() {
                rights
            } else {
                rights & AccessFs::from_file(ABI::V3)
            };
            set = set.add_rule(PathBeneath::new(&fd, rights))?;
            held.extend(hold(&path));
        }
        let status = set.restrict_self()?;
        HELD.lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .append(&mut held);
        match status.ruleset {
            RulesetStatus::NotEnforced => Err(Error::NoLandlock),
            RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => Ok(()),
        }
    }
}

/// Keeps what lies in /proc from being forgotten.
fn hold(path: &Path) -> Option<OwnedFd> {
    if !path.starts_with("/proc") {
        return None;
    }
    let path_only = File::options().read(true).custom_flags(libc::O_PATH).open(path);
    path_only.ok().map(OwnedFd::from)
}

/// Where the list of name servers really lies, where it is a link: it is replaced there when the network changes.
fn name_servers() -> Option<PathBuf> {
    let list = Path::new("/etc/resolv.conf");
    let real = list.canonicalize().ok().filter(|real| real != list)?;
    // Not a folder of everything: a link into /etc or / gives nothing away.
    let folder = real.parent()?;
    folder.starts_with("/run").then(|| folder.to_owned())
}

/// The folder that `file` lies in.
fn folder_of(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// How many threads there are; `None` where /proc does not say.
fn threads() -> Option<usize> {
    std::fs::read_dir("/proc/self/task").ok().map(Iterator::count)
}
