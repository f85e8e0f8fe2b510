//! `migrate-recv`: waits for a guest, rebuilds it, and runs it.
#![forbid(unsafe_code)]

mod run;

use clap::Parser;
use cli::{OutputFlags, RecvFlags, SandboxFlags};
use std::process::ExitCode;

/// Receive one guest, and run it
#[derive(Parser, Debug)]
#[command(
    name = "migrate-recv",
    version,
    after_help = "The first line on stdout is `listening on ADDR`.\n\nSIGINT or SIGTERM cancels the \
                  migration, a second one without waiting for its end; once the guest is here, one that comes after its arrival \
                  ends it.\n\nExit codes: 0 the guest was handed over, 2 usage, \
                  3 refused, 4 failed (the report tells where the outcome is unknown), 5 cancelled, 6 timed out, 8 the \
                  guest was handed over, but the report could not be written"
)]
struct Arguments {
    #[command(flatten)]
    receive: RecvFlags,
    #[command(flatten)]
    output: OutputFlags,
    #[command(flatten)]
    sandbox: SandboxFlags,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    arguments.output.log.start();
    cli::finish(
        "migrate-recv",
        cli::take_room_for_files().and_then(|()| run::run(arguments)),
    )
}
