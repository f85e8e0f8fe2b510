//! What the three commands share: flags, units, exit codes, guests, logs and the report's way out.
//!
//! A command is `parse, run, exit code`. Flags first become plain values (clap), then meaning (`plan` or `check` of each
//! group of flags), and only then is anything opened, allocated or sent. The contract is the section "The command line"
//! of the README.
#![forbid(unsafe_code)]

mod balloon_controls;
mod balloon_flags;
mod console;
mod exit;
mod file_guest;
mod guest;
mod guest_flags;
mod host_flags;
mod linux_flags;
mod living;
mod logging;
mod progress;
mod receiving;
mod recv_flags;
mod report_out;
mod runtime;
mod sandbox_flags;
mod security_flags;
mod send_flags;
mod slot;
mod tamper;
mod units;

pub use balloon_flags::{BalloonChoice, DiscardChoice};
pub use console::{Attached, ConsoleLine, RawTerminal};
pub use engine::Role;
pub use exit::{Error, finish};
pub use file_guest::FileMachine;
pub use guest::{Started, start};
pub use guest_flags::{FilePlan, GuestFlags, GuestKind, GuestPlan, SoftPlan};
pub use host_flags::{HostFlags, Request};
pub use linux_flags::{DirtyTrackerChoice, LinuxPlan};
pub use living::{Life, Lived, ended_because, live, until_ended};
pub use logging::{LogFlags, LogFormat, OutputFlags, say_stderr};
pub use progress::show_progress;
pub use receiving::{RamFile, Receiving};
pub use recv_flags::{After, Corrupt, PreallocFor, RecvFlags, RefuseState};
pub use report_out::{GuestReport, REPORT_MISSING, ReportOut, or_warn, print_line, report_early};
pub use runtime::{Signals, Watched, block_on, take_room_for_files};
pub use sandbox::Files;
pub use sandbox_flags::{SandboxFlags, hold_files, with_guest, with_made, with_receiver};
pub use security_flags::SecurityFlags;
pub use send_flags::{AskChoice, MAX_STREAMS, OnTimeoutChoice, SendFlags, SkipChoice, Streams, Target};
pub use slot::{GuestEnd, GuestSlot, SelfChecked};
pub use units::{Size, UnitError, human_bytes, parse_bandwidth, parse_duration, parse_share};
