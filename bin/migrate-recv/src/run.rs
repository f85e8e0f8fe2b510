//! What `migrate-recv` does: listen, rebuild the guest that comes, report at the hand-over, and let the guest run on.
//!
//! Invariant: once the guest was handed over, it exists here and nowhere else. A report that cannot be written, a socket
//! that cannot be served, or a stdout that nobody reads, then costs a warning ([`cli::or_warn`]) and never the guest.

use crate::Arguments;
use cli::{
    After, ConsoleLine, Error, Files, GuestReport, GuestSlot, Life, Lived, Receiving, RecvFlags, ReportOut, Role,
    Signals, Watched, say_stderr,
};
use pageferry::control_socket::{ClaimedSocket, ControlListener};
use pageferry::{
    Abandoned, Address, DestinationConfig, Ending, Finished, Guest, Listener, Migration, ReceiveOptions, Report,
    Security,
};
use std::time::Duration;

/// How long a guest that runs until a signal has run when it checks itself for the first time.
const FIRST_CHECK: Duration = Duration::from_secs(1);

/// Runs the command; gives its exit code.
pub(crate) fn run(arguments: Arguments) -> Result<u8, Error> {
    let Arguments {
        receive: flags,
        output,
        sandbox,
    } = arguments;
    let out = ReportOut::new(&output);
    let listen: Address = flags
        .listen
        .parse()
        .map_err(|error| Error::Usage(format!("--listen: {error}")))?;
    flags.check()?;
    let security = flags.security.plan("--listen", &listen, None)?;
    out.check()?;
    let console = ConsoleLine::new(flags.console.as_deref(), None)?;
    sandbox.enter(&cli::with_receiver(cli::with_made(Files::new(), out.file()), &flags));
    let done = cli::block_on(async {
        let early = |error| cli::report_early(&out, Role::Receiver, error);
        let mut signals = Signals::catch().map_err(early)?;
        // It is served once the guest is here; that it cannot be is better known before.
        let claim = |path| ClaimedSocket::claim(path).map_err(|error| early(Error::Refused(error.to_string())));
        let claimed = flags.control.as_deref().map(claim).transpose()?;
        // The port first: that it is taken is not worth populating memory for.
        let listener = Listener::bind(&listen).map_err(|error| early(Error::Failed(error.to_string())))?;
        let (preparing, line) = (flags.clone(), console.clone());
        let receiving = signals
            .or(move || Receiving::new(&preparing, line))
            .await
            .map_err(early)?;
        let slot = receiving.slot();
        let ram_file = receiving.ram_file();
        cli::print_line(&format!("listening on {}", listener.local_address())).map_err(|error| {
            // What --prealloc made of it.
            ram_file.remove_if_ours();
            early(error)
        })?;

        let options = options(&flags, security);
        let mut receiving = receiving;
        let handle = Migration::receive(listener, options, move |incoming| {
            receiving.prepare(&incoming.config, incoming.dry_run)
        });
        let line = cli::show_progress(output.log.quiet, handle.observer());
        let (cancel, abandon) = (handle.canceller(), handle.abandoner());
        // Past Commit the guest is here and nowhere else, and does not end for signals that were meant for the migration.
        let leaves = |abandoned| abandoned == Abandoned::Before;
        let watched = signals.watch(handle.finish(), cancel, abandon, leaves).await;
        drop(line);
        let Watched::Ended(Finished { outcome, guest }) = watched else {
            ram_file.remove_if_ours();
            // Its threads are not waited for.
            std::mem::forget(slot);
            return Err(early(Error::EndedAtOnce));
        };
        match (outcome.ending, guest) {
            (Ending::Completed, Some(guest)) => {
                if signals.forget() {
                    say_stderr(
                        "the signal came too late to cancel: the guest is here, and goes on; another one ends it",
                    );
                }
                let mut arrived = Arrived {
                    flags: &flags,
                    out: &out,
                    report: &outcome.report,
                    slot: &slot,
                    console: &console,
                    claimed,
                    signals: &mut signals,
                };
                cli::or_warn(out.write_file(&outcome.report, Some(GuestReport::default())));
                if slot.is_linux() {
                    arrived.go_on_as_linux(guest, output.log.quiet).await
                } else {
                    arrived.go_on(guest).await
                }
            }
            (ending, guest) => {
                drop(guest);
                slot.clear();
                ram_file.remove_if_ours();
                cli::or_warn(out.write_file(&outcome.report, None));
                cli::or_warn(out.conclude(&outcome.report, None));
                let error = outcome.error.as_deref().unwrap_or("no guest came");
                say_stderr(format_args!("migrate-recv: {ending}: {error}"));
                Ok(match ending {
                    // Without a guest the receiver has not done what it is there for, whatever the engine says.
                    Ending::Completed => Ending::Failed.exit_code(),
                    Ending::Unknown => {
                        say_stderr(
                            "the outcome is unknown: this copy of the guest ends now, and the source keeps its own",
                        );
                        Ending::Failed.exit_code()
                    }
                    Ending::Refused | Ending::Failed | Ending::Cancelled | Ending::TimedOut => ending.exit_code(),
                })
            }
        }
    });
    done.map(|code| out.code(code))
}

fn options(flags: &RecvFlags, security: Security) -> ReceiveOptions {
    ReceiveOptions {
        destination: DestinationConfig {
            peer_timeout: flags.peer_timeout,
            resume_window: flags.resume_window,
            stay_paused: flags.after != After::Run,
            memory_is_zero: true,
            ..DestinationConfig::default()
        },
        max_memory: flags.max_memory.map(|size| size.0),
        security,
        ..ReceiveOptions::default()
    }
}

/// A guest that is here, and reported on in the report's file.
struct Arrived<'a> {
    flags: &'a RecvFlags,
    out: &'a ReportOut,
    report: &'a Report,
    slot: &'a GuestSlot,
    console: &'a ConsoleLine,
    /// Where it is to be served.
    claimed: Option<ClaimedSocket>,
    signals: &'a mut Signals,
}

impl Arrived<'_> {
    /// Opens the control socket, if there is to be one. The guest goes on without it, where it cannot be.
    fn listen(&mut self) -> Option<ControlListener> {
        let listener = self.claimed.take()?.listen();
        listener
            .inspect_err(|error| say_stderr(format_args!("warning: the guest is not served: {error}")))
            .ok()
    }

    /// A Linux guest: runs until something ends it. Where its console is stdout, what the report says there waits until
    /// then.
    async fn go_on_as_linux(&mut self, guest: Guest, quiet: bool) -> Result<u8, Error> {
        let own_stdout = self.console.is_stdout() && self.flags.after == After::Run;
        let conclude = || cli::or_warn(self.out.conclude(self.report, Some(GuestReport::default())));
        if !own_stdout {
            conclude();
        }
        if self.flags.after == After::Exit {
            return Ok(0);
        }
        if !quiet {
            let state = if guest.machine.is_running() {
                "runs"
            } else {
                "is here, paused"
            };
            say_stderr(format_args!("guest: {state}"));
        }
        // Without a terminal to be had the guest runs on all the same.
        let attached = self.console.attach(quiet);
        let attached = attached.inspect_err(|error| say_stderr(format_args!("warning: {error}")));
        let listener = self.listen();
        let lived = cli::live(self.slot, guest, listener, self.signals).await;
        self.slot.clear();
        drop(attached);
        self.console.drain();
        if own_stdout {
            conclude();
        }
        say_end(&lived?)?;
        Ok(0)
    }

    /// Another guest: reports on its self-check, and does with it what `--after` says. The one error is a guest that came to
    /// harm.
    async fn go_on(&mut self, guest: Guest) -> Result<u8, Error> {
        let runs = guest.machine.is_running();
        let until_told = self.flags.runs_for().is_zero();
        // A guest that is served is so at once, and checks itself meanwhile.
        let life = Life::begin(self.slot, guest, self.listen());
        if runs {
            let first = if until_told { FIRST_CHECK } else { self.flags.runs_for() };
            self.slot.run(Some(first), self.signals).await?;
        }
        let word = self.check()?;
        cli::or_warn(self.out.conclude(self.report, Some(word)));
        match word.self_check {
            Some(_) => {
                let state = life.state(runs);
                let checked = word.pages_checked;
                cli::or_warn(
                    self.out
                        .say(&format!("guest: {state}; self-check of {checked} pages passed")),
                );
            }
            None => cli::or_warn(self.out.say("guest: its RAM is here; it has nothing that runs")),
        }
        let waits = match self.flags.after {
            After::Run => until_told && (runs || self.flags.control.is_some()),
            After::Pause => true,
            After::Exit => false,
        };
        if !waits {
            life.stop("it powered off, as --run-for says").await?;
            return Ok(0);
        }
        let lived = life.end(self.slot, self.signals).await?;
        say_end(&lived)?;
        if runs && matches!(lived, Lived::Quit | Lived::Signal) {
            self.check()?;
        }
        Ok(0)
    }

    /// Lets the guest check itself, and adds what it says to the report's file. A guest that came to harm is an error.
    fn check(&self) -> Result<GuestReport, Error> {
        let Some(checked) = self.slot.self_check() else {
            return Ok(GuestReport::default());
        };
        let word = checked.report(self.slot.ticks());
        cli::or_warn(self.out.write_file(self.report, Some(word)));
        if let Err(error) = checked.passed() {
            cli::or_warn(self.out.conclude(self.report, Some(word)));
            return Err(Error::Failed(format!("the guest came to harm on its way: {error}")));
        }
        Ok(word)
    }
}

/// Says what ended the guest's time here, where nobody here asked for it.
fn say_end(lived: &Lived) -> Result<(), Error> {
    match lived {
        Lived::HandedOver(to) => say_stderr(format_args!("guest: was handed over to {to}")),
        Lived::Ended(end) => say_stderr(format_args!("guest: ended: {}", cli::ended_because(end)?)),
        Lived::Quit | Lived::Signal => {}
    }
    Ok(())
}
