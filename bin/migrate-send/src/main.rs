//! `migrate-send`: sends a guest to a waiting `migrate-recv`.
#![forbid(unsafe_code)]

mod host;
mod run;

use clap::Parser;
use cli::{GuestFlags, OutputFlags, SandboxFlags, SendFlags};
use std::process::ExitCode;

/// Send a guest: one that is started here, or the one that a host serves
#[derive(Parser, Debug)]
#[command(
    name = "migrate-send",
    version,
    after_help = "The built-in guest and one in a file are sent at once; so is a Linux guest, unless --send-when or --send-after \
                  says otherwise. A Linux guest that could not be sent goes on here until it powers off or a signal comes; the \
                  exit code is the migration's. Its console is this terminal: Ctrl-A x ends the command, Ctrl-A Ctrl-A sends a \
                  Ctrl-A to the guest.\n\nSIGINT or SIGTERM cancels the migration and waits until the guest goes on; a second one ends \
                  the command, and its guest, at once.\n\nExit codes: 0 done, 2 usage, 3 refused (nothing was sent), 4 failed, 5 cancelled, 6 \
                  timed out (the guest is still the source's), 7 outcome unknown (the source stays paused), 8 done, but the report \
                  could not be written"
)]
struct Arguments {
    #[command(flatten)]
    send: SendFlags,
    #[command(flatten)]
    guest: GuestFlags,
    #[command(flatten)]
    output: OutputFlags,
    #[command(flatten)]
    sandbox: SandboxFlags,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    arguments.output.log.start();
    cli::finish(
        "migrate-send",
        cli::take_room_for_files().and_then(|()| run::run(&arguments)),
    )
}
