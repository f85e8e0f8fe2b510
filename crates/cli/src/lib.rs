//! What the three commands share: flags, units, exit codes, guests, logs and the report's way out.
//!
//! A command is `parse, run, exit code`. Flags first become plain values (clap), then meaning (`plan` or `check` of each
//! group of flags), and only then is anything opened, allocated or sent. The contract is the section "The command line"
//! of the README.
#![forbid(unsafe_code)]

mod exit;
mod file_guest;
mod guest;
mod guest_flags;
mod logging;
mod progress;
mod receiving;
mod recv_flags;
mod report_out;
mod runtime;
mod send_flags;
mod soft;
mod tamper;
mod units;

pub use engine::Role;
pub use exit::{Error, finish};
pub use file_guest::FileMachine;
pub use guest::{Started, start};
pub use guest_flags::{BalloonChoice, FilePlan, GuestFlags, GuestKind, GuestPlan, SoftPlan};
pub use logging::{LogFlags, LogFormat, OutputFlags, say_stderr};
pub use progress::show_progress;
pub use receiving::{RamFile, Receiving};
pub use recv_flags::{After, Corrupt, RecvFlags};
pub use report_out::{GuestReport, ReportOut, or_warn, print_line, report_early};
pub use runtime::{Signals, block_on};
pub use send_flags::{AskChoice, MAX_STREAMS, OnTimeoutChoice, SendFlags, SkipChoice, Streams};
pub use soft::{SelfChecked, SoftSlot};
pub use units::{Size, UnitError, human_bytes, parse_bandwidth, parse_duration, parse_share};

/// What `--control` gets for now.
pub fn control_is_not_there_yet() -> Error {
    Error::Usage(
        "--control comes with a later version of pageferry: start the guest with this command instead".to_owned(),
    )
}
