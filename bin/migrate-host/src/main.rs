//! `migrate-host`: runs a guest that can be migrated, as a VMM would that embeds the library.
#![forbid(unsafe_code)]

mod run;

use clap::Parser;
use cli::{GuestFlags, LogFlags, SandboxFlags};
use std::path::PathBuf;
use std::process::ExitCode;

/// Run a guest until it ends, SIGINT or SIGTERM
#[derive(Parser, Debug)]
#[command(
    name = "migrate-host",
    version,
    after_help = "With --control the guest can be sent (migrate-send --control SOCKET --to ADDR), and this command ends once \
                  it was handed over. The console of a Linux guest is this terminal: Ctrl-A x ends the command, Ctrl-A \
                  Ctrl-A sends a Ctrl-A to the guest.\n\nExit codes: 0 done, 2 usage, 3 refused, 4 failed"
)]
struct Arguments {
    #[command(flatten)]
    guest: GuestFlags,
    /// Serve the guest at this Unix socket (mode 0600): it can be sent from there, among other things
    #[arg(long, value_name = "SOCKET", help_heading = "Migration")]
    control: Option<PathBuf>,
    #[command(flatten)]
    log: LogFlags,
    #[command(flatten)]
    sandbox: SandboxFlags,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    arguments.log.start();
    cli::finish(
        "migrate-host",
        cli::take_room_for_files().and_then(|()| run::run(&arguments)),
    )
}
