//! What a command gives up once it has started, unless it is told to keep it.

use crate::{GuestPlan, RecvFlags};
use clap::Args;
use sandbox::Files;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The flag.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Security")]
pub struct SandboxFlags {
    /// Keep what is given up at start otherwise: to run programs, to make system calls that are not used, and (Linux 5.13) to
    /// open files that the command line does not name
    #[arg(long)]
    pub no_sandbox: bool,
}

impl SandboxFlags {
    /// Gives up all but `files` and what every command needs. To be called before there is a second thread. A kernel that
    /// cannot do that costs a warning.
    pub fn enter(self, files: &Files) {
        if self.no_sandbox {
            tracing::debug!("no sandbox, as --no-sandbox says");
            return;
        }
        for missing in sandbox::enter(files).missing {
            tracing::warn!("the sandbox is not whole: {missing}");
        }
    }
}

/// A file that a guest is started from and that is another process's (`/proc/PID/fd/N`, a VMM's memfd): it is opened now, for
/// inside the sandbox nobody looks into other processes. Gives what keeps it open.
pub fn hold_files(plan: &mut GuestPlan) -> Vec<File> {
    let GuestPlan::File(plan) = plan else { return Vec::new() };
    let others = [Some(&mut plan.ram), plan.layout.as_mut(), plan.free_map.as_mut()];
    others.into_iter().flatten().filter_map(hold).collect()
}

/// One that cannot be opened stays as it is: whoever opens it says why.
fn hold(path: &mut PathBuf) -> Option<File> {
    if !path.starts_with("/proc") {
        return None;
    }
    let file = File::options()
        .read(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
        .open(&path);
    let file = file.ok()?;
    *path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    Some(file)
}

/// The files that a guest is started from.
#[must_use]
pub fn with_guest(files: Files, plan: &GuestPlan) -> Files {
    let read = |files: Files, path: Option<&Path>| match path {
        Some(path) => files.reads(path),
        None => files,
    };
    match plan {
        GuestPlan::Soft(_) => files,
        GuestPlan::File(plan) => {
            let files = read(files.reads(&plan.ram), plan.layout.as_deref());
            read(files, plan.free_map.as_deref())
        }
        GuestPlan::Linux(plan) => {
            let files = read(files.reads(&plan.kernel), plan.initrd.as_deref());
            with_made(files, plan.console.as_deref())
        }
    }
}

/// The files that a receiver makes, but for its report.
#[must_use]
pub fn with_receiver(files: Files, flags: &RecvFlags) -> Files {
    let listen = flags.listen.strip_prefix("unix:").map(Path::new);
    let made = [
        flags.ram.as_deref(),
        flags.control.as_deref(),
        flags.console.as_deref(),
        listen,
    ];
    made.into_iter().fold(files, with_made)
}

/// A file that is made or written, if there is one.
#[must_use]
pub fn with_made(files: Files, path: Option<&Path>) -> Files {
    match path {
        Some(path) => files.makes(path),
        None => files,
    }
}
