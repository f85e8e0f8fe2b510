//! `migrate-host`: runs a guest that can be migrated, as a VMM would that embeds the library.
#![forbid(unsafe_code)]

use clap::Parser;
use cli::{Error, GuestFlags, LogFlags, Signals};
use std::path::PathBuf;
use std::process::ExitCode;

/// Run a guest until SIGINT or SIGTERM
#[derive(Parser, Debug)]
#[command(
    name = "migrate-host",
    version,
    after_help = "Exit codes: 0 done, 2 usage, 3 refused, 4 failed"
)]
struct Arguments {
    #[command(flatten)]
    guest: GuestFlags,
    /// Where the running guest can be sent from
    #[arg(long, value_name = "SOCKET", help_heading = "Migration")]
    control: Option<PathBuf>,
    #[command(flatten)]
    log: LogFlags,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    arguments.log.start();
    cli::finish("migrate-host", run(&arguments))
}

fn run(arguments: &Arguments) -> Result<u8, Error> {
    if arguments.control.is_some() {
        return Err(cli::control_is_not_there_yet());
    }
    let plan = arguments.guest.plan()?;
    let say = |sentence: &str| {
        if arguments.log.quiet {
            Ok(())
        } else {
            cli::print_line(sentence)
        }
    };
    cli::block_on(async {
        let mut signals = Signals::catch()?;
        let started = signals.or(move || cli::start(&plan)).await?;
        if !started.guest.machine.is_running() {
            say("guest: is here, paused; SIGINT or SIGTERM ends it")?;
            signals.wait().await;
            return Ok(0);
        }
        say("guest: runs; SIGINT or SIGTERM ends it")?;
        started.soft.run(None, &mut signals).await?;
        let Some(checked) = started.soft.self_check() else {
            return Ok(0);
        };
        let pages = checked
            .passed()
            .map_err(|error| Error::Failed(format!("the guest came to harm: {error}")))?;
        say(&format!("guest: ends; self-check of {pages} pages passed"))?;
        Ok(0)
    })
}
