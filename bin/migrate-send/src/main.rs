//! `migrate-send`: sends a guest to a waiting `migrate-recv`.
#![forbid(unsafe_code)]

mod run;

use clap::Parser;
use cli::{GuestFlags, OutputFlags, SendFlags};
use std::process::ExitCode;

/// Send a guest: one that is started here
#[derive(Parser, Debug)]
#[command(
    name = "migrate-send",
    version,
    after_help = "Exit codes: 0 done, 2 usage, 3 refused (nothing was sent), 4 failed, 5 cancelled, 6 timed out (the \
                  guest is still the source's), 7 outcome unknown (the source stays paused)"
)]
struct Arguments {
    #[command(flatten)]
    send: SendFlags,
    #[command(flatten)]
    guest: GuestFlags,
    #[command(flatten)]
    output: OutputFlags,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    arguments.output.log.start();
    cli::finish("migrate-send", run::run(&arguments))
}
