//! What `migrate-recv` does: listen, rebuild the guest that comes, report at the hand-over, and let the guest run on.
//!
//! Invariant: once the guest was handed over, it exists here and nowhere else. A report that cannot be written, or a
//! stdout that nobody reads, then costs a warning ([`cli::or_warn`]) and never the guest.

use crate::Arguments;
use cli::{After, Error, GuestReport, Receiving, RecvFlags, ReportOut, Role, Signals, SoftSlot};
use pageferry::{Address, DestinationConfig, Ending, Finished, Guest, Listener, Migration, ReceiveOptions, Report};
use std::time::Duration;

/// How long a guest that runs until a signal has run when it checks itself for the first time.
const FIRST_CHECK: Duration = Duration::from_secs(1);

/// Runs the command; gives its exit code.
pub(crate) fn run(arguments: Arguments) -> Result<u8, Error> {
    let Arguments { receive: flags, output } = arguments;
    let out = ReportOut::new(&output);
    let listen: Address = flags
        .listen
        .parse()
        .map_err(|error| Error::Usage(format!("--listen: {error}")))?;
    flags.check()?;
    out.check()?;
    cli::block_on(async {
        let early = |error| cli::report_early(&out, Role::Receiver, error);
        let mut signals = Signals::catch().map_err(early)?;
        // The port first: that it is taken is not worth populating memory for.
        let listener = Listener::bind(&listen).map_err(|error| early(Error::Failed(error.to_string())))?;
        let preparing = flags.clone();
        let receiving = signals.or(move || Receiving::new(&preparing)).await.map_err(early)?;
        let soft = receiving.soft();
        let ram_file = receiving.ram_file();
        cli::print_line(&format!("listening on {}", listener.local_address())).inspect_err(|_| {
            // What --prealloc made of it.
            ram_file.remove_if_ours();
        })?;

        let options = options(&flags);
        let mut receiving = receiving;
        let handle = Migration::receive(listener, options, move |incoming| {
            receiving.prepare(&incoming.config, incoming.dry_run)
        });
        let line = cli::show_progress(output.log.quiet, handle.observer());
        let cancel = handle.canceller();
        let Finished { outcome, guest } = signals.watch(handle.finish(), cancel).await;
        drop(line);
        match (outcome.ending, guest) {
            (Ending::Completed, Some(guest)) => go_on(&flags, &out, &outcome.report, guest, &soft, &mut signals).await,
            (ending, guest) => {
                drop(guest);
                soft.clear();
                ram_file.remove_if_ours();
                cli::or_warn(out.write_file(&outcome.report, None));
                cli::or_warn(out.conclude(&outcome.report, None));
                let error = outcome.error.as_deref().unwrap_or("no guest came");
                cli::say_stderr(format_args!("migrate-recv: {ending}: {error}"));
                // Without a guest the receiver has not done what it is there for, whatever the engine says.
                Ok(if ending == Ending::Completed {
                    Ending::Failed.exit_code()
                } else {
                    ending.exit_code()
                })
            }
        }
    })
}

fn options(flags: &RecvFlags) -> ReceiveOptions {
    ReceiveOptions {
        destination: DestinationConfig {
            peer_timeout: flags.peer_timeout,
            stay_paused: flags.after != After::Run,
            memory_is_zero: true,
            ..DestinationConfig::default()
        },
        max_memory: flags.max_memory.map(|size| size.0),
        ..ReceiveOptions::default()
    }
}

/// The guest is here: reports at once, then does with it what `--after` says. The one error is a guest that came to harm.
async fn go_on(
    flags: &RecvFlags,
    out: &ReportOut,
    report: &Report,
    guest: Guest,
    soft: &SoftSlot,
    signals: &mut Signals,
) -> Result<u8, Error> {
    cli::or_warn(out.write_file(report, Some(GuestReport::default())));
    let runs = guest.machine.is_running();
    let mut ticks = 0;
    if runs {
        let first = if flags.run_for.is_zero() {
            FIRST_CHECK
        } else {
            flags.run_for
        };
        ticks = soft.run(Some(first), signals).await?;
    }
    let word = check(out, report, soft, ticks)?;
    cli::or_warn(out.conclude(report, Some(word)));
    match word.self_check {
        Some(_) => {
            let state = if runs { "runs on" } else { "is here, paused" };
            let checked = word.pages_checked;
            cli::or_warn(out.say(&format!("guest: {state}; self-check of {checked} pages passed")));
        }
        None => cli::or_warn(out.say("guest: its RAM is here; it has nothing that runs")),
    }
    match flags.after {
        After::Run if flags.run_for.is_zero() && runs => {
            ticks += soft.run(None, signals).await?;
            check(out, report, soft, ticks)?;
        }
        After::Pause => {
            signals.wait().await;
        }
        After::Run | After::Exit => {}
    }
    drop(guest);
    Ok(0)
}

/// Lets the guest check itself, and adds what it says to the report's file. A guest that came to harm is an error.
fn check(out: &ReportOut, report: &Report, soft: &SoftSlot, ticks: u64) -> Result<GuestReport, Error> {
    let Some(checked) = soft.self_check() else {
        return Ok(GuestReport::default());
    };
    let word = checked.report(ticks);
    cli::or_warn(out.write_file(report, Some(word)));
    if let Err(error) = checked.passed() {
        cli::or_warn(out.conclude(report, Some(word)));
        return Err(Error::Failed(format!("the guest came to harm on its way: {error}")));
    }
    Ok(word)
}
