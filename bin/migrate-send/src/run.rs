//! What `migrate-send` does: start a guest, send it, report; and if it could not be handed over, show that it is unharmed.

use crate::{Arguments, host};
use cli::{
    Attached, ConsoleLine, Error, Files, GuestPlan, GuestReport, GuestSlot, Lived, ReportOut, Role, Signals, Started,
    Target, Watched, say_stderr,
};
use pageferry::{Abandoned, Address, Ending, Finished, Guest, Handle, Migration, SendOptions};
use std::time::Duration;

/// How long a guest that stayed here is watched running on.
const GOES_ON: Duration = Duration::from_millis(200);

/// Runs the command; gives its exit code.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Error> {
    let out = ReportOut::new(&arguments.output);
    match arguments.send.target(&arguments.guest)? {
        Target::Request(socket, request) => {
            arguments.sandbox.enter(&Files::new());
            host::request(&socket, &request)
        }
        Target::Host(socket, to) => {
            let options = options(arguments, &to)?;
            out.check()?;
            arguments.sandbox.enter(&cli::with_made(Files::new(), out.file()));
            host::send(arguments, &out, &socket, &to, &options)
        }
        Target::Here(to) => {
            arguments.send.check_guest(&arguments.guest)?;
            let options = options(arguments, &to)?;
            let mut plan = arguments.guest.plan()?;
            out.check()?;
            let console = match &plan {
                GuestPlan::Linux(linux) => {
                    let wanted = arguments.send.send_when.as_deref();
                    Some(ConsoleLine::new(linux.console.as_deref(), wanted)?)
                }
                GuestPlan::Soft(_) | GuestPlan::File(_) => None,
            };
            let _held = cli::hold_files(&mut plan);
            let files = cli::with_made(Files::new(), out.file());
            arguments.sandbox.enter(&cli::with_guest(files, &plan));
            let sending = Sending {
                arguments,
                out: &out,
                console,
            };
            cli::block_on(sending.run(plan, &to, options)).map(|code| out.code(code))
        }
    }
}

fn options(arguments: &Arguments, to: &Address) -> Result<SendOptions, Error> {
    Ok(SendOptions {
        source: arguments.send.plan(is_local(to))?,
        connect_timeout: arguments.send.connect_timeout,
        max_bandwidth: Some(arguments.send.max_bandwidth).filter(|&rate| rate > 0),
        compress: arguments.send.compress,
        checksum: arguments.send.checksum,
        security: (arguments.send.security).plan("--to", to, arguments.send.tls_name.as_deref())?,
        ..SendOptions::default()
    })
}

/// A guest that is started here, to be sent.
struct Sending<'a> {
    arguments: &'a Arguments,
    out: &'a ReportOut,
    /// Of a Linux guest.
    console: Option<ConsoleLine>,
}

impl Sending<'_> {
    async fn run(&self, plan: GuestPlan, to: &Address, options: SendOptions) -> Result<u8, Error> {
        let early = |error| cli::report_early(self.out, Role::Source, error);
        let quiet = self.arguments.output.log.quiet;
        let mut signals = Signals::catch().map_err(early)?;
        let line = self.console.clone();
        let started = signals.or(move || cli::start(&plan, line.as_ref())).await;
        let Started { guest, slot } = started.map_err(early)?;
        let attached = self.console.as_ref().map(|line| line.attach(quiet)).transpose();
        let attached = attached.map_err(early)?;
        if let Err(error) = self.await_the_moment(&slot, &mut signals).await {
            drop((attached, guest));
            slot.clear();
            self.drain();
            return Err(early(error));
        }
        let handle = Migration::send(guest, to, options);
        // Over a console that is on the same terminal, a bar could not be read.
        let no_bar = quiet || self.has_stdout();
        let bar = cli::show_progress(no_bar, handle.observer());
        let watched = watch(handle, &slot, &mut signals).await;
        drop(bar);
        match watched {
            Watched::Ended((finished, harm)) => self.after(finished, harm, slot, attached, &mut signals).await,
            Watched::Left(abandoned) => {
                drop(attached);
                // Its threads are not waited for.
                std::mem::forget(slot);
                Err(early(left(abandoned)))
            }
        }
    }

    /// Reports, and sees to the guest that stayed here, if one did.
    async fn after(
        &self,
        finished: Finished,
        harm: Option<Error>,
        slot: GuestSlot,
        attached: Option<Attached>,
        signals: &mut Signals,
    ) -> Result<u8, Error> {
        let Finished { mut outcome, guest } = finished;
        let dry_run = self.arguments.send.dry_run;
        if let Some(harm) = &harm {
            // The ending is the migration's, and so is the exit code.
            outcome.error = Some(match &outcome.error {
                Some(error) => format!("{harm} ({error})"),
                None => harm.to_string(),
            });
            outcome.report.error.clone_from(&outcome.error);
        }
        if let Some(error) = &outcome.error {
            say_stderr(format_args!("migrate-send: {}: {error}", outcome.ending));
        }
        let stayed = !matches!(outcome.ending, Ending::Completed | Ending::Unknown);
        cli::or_warn(self.out.write_file(&outcome.report, None));
        let code = match (guest, self.console.is_some()) {
            (Some(guest), _) if outcome.ending == Ending::Unknown && harm.is_none() && !slot.is_empty() => {
                drop(attached);
                self.drain();
                cli::or_warn(self.out.conclude(&outcome.report, None));
                keep(signals).await;
                drop(guest);
                slot.clear();
                outcome.ending.exit_code()
            }
            (Some(guest), true) if stayed && !dry_run && !signals.pending() && harm.is_none() => {
                say_stderr("guest: goes on here");
                let lived = cli::live(&slot, guest, None, signals).await?;
                slot.clear();
                drop(attached);
                self.drain();
                cli::or_warn(self.out.conclude(&outcome.report, None));
                if let Lived::Ended(end) = lived {
                    say_stderr(format_args!("guest: ended: {}", cli::ended_because(&end)?));
                }
                outcome.ending.exit_code()
            }
            (guest, true) => {
                drop(guest);
                slot.clear();
                drop(attached);
                self.drain();
                cli::or_warn(self.out.conclude(&outcome.report, None));
                outcome.ending.exit_code()
            }
            (guest, false) => {
                let word = self.self_check(stayed, guest.as_ref(), &slot, signals).await?;
                self.conclude(&outcome.report, word)?;
                outcome.ending.exit_code()
            }
        };
        Ok(code)
    }

    /// Waits until the guest is to be sent.
    async fn await_the_moment(&self, slot: &GuestSlot, signals: &mut Signals) -> Result<(), Error> {
        if let (Some(line), Some(_)) = (&self.console, &self.arguments.send.send_when) {
            cli::until_ended(slot, signals, line.has_printed()).await?;
        }
        match self.arguments.send.send_after {
            Some(time) if !time.is_zero() => cli::until_ended(slot, signals, tokio::time::sleep(time)).await,
            _ => Ok(()),
        }
    }

    fn has_stdout(&self) -> bool {
        self.console.as_ref().is_some_and(ConsoleLine::is_stdout)
    }

    fn drain(&self) {
        if let Some(line) = &self.console {
            line.drain();
        }
    }

    /// A guest that stayed here goes on; that it is unharmed, it says itself.
    async fn self_check(
        &self,
        stayed: bool,
        guest: Option<&Guest>,
        slot: &GuestSlot,
        signals: &mut Signals,
    ) -> Result<Option<(GuestReport, Result<u64, String>)>, Error> {
        if !stayed || !guest.is_some_and(|guest| guest.machine.is_running()) {
            return Ok(None);
        }
        let ticks = slot.run(Some(GOES_ON), signals).await?;
        Ok(slot
            .self_check()
            .map(|checked| (checked.report(ticks), checked.passed())))
    }

    /// Reports. The exit code tells where the guest is: a report that cannot be written must not make 4, "still the
    /// source's", of a guest that was handed over.
    fn conclude(
        &self,
        report: &pageferry::Report,
        checked: Option<(GuestReport, Result<u64, String>)>,
    ) -> Result<(), Error> {
        let (word, passed) = checked.unzip();
        cli::or_warn(self.out.write_file(report, word));
        cli::or_warn(self.out.conclude(report, word));
        match passed {
            Some(Err(error)) => return Err(Error::Failed(format!("the guest came to harm: {error}"))),
            Some(Ok(pages)) => cli::or_warn(
                self.out
                    .say(&format!("the guest is unharmed: self-check of {pages} pages passed")),
            ),
            None => {}
        }
        Ok(())
    }
}

/// Nobody knows whether the receiver runs the guest, so the copy here may be the only one: it is there, paused, for as long
/// as this command is, which only a signal ends. One that came before these words was meant for the migration.
async fn keep(signals: &mut Signals) {
    signals.pending();
    say_stderr(
        "guest: stays paused here until SIGINT or SIGTERM ends this command, and is lost then: find out first whether the \
         receiver runs it",
    );
    signals.again().await;
}

/// A source that left has no say any more in where the guest runs.
fn left(abandoned: Abandoned) -> Error {
    match abandoned {
        Abandoned::Before => Error::EndedAtOnce,
        Abandoned::After => Error::Unknown(
            "ended at once by a second signal, after the guest was handed over: nobody here knows whether the receiver runs it"
                .to_owned(),
        ),
    }
}

/// Waits for a migration's end, and asks for it when a signal comes, or when the guest has ended by itself: what is left of
/// it is not worth sending. What it came to harm by is told beside.
async fn watch(handle: Handle, slot: &GuestSlot, signals: &mut Signals) -> Watched<(Finished, Option<Error>)> {
    let (cancel, cancel_too, abandon) = (handle.canceller(), handle.canceller(), handle.abandoner());
    let end = signals.watch(handle.finish(), cancel, abandon, |_| true);
    tokio::pin!(end);
    if !slot.is_linux() {
        return end.await.map(|finished| (finished, None));
    }
    let ended = tokio::select! {
        biased;
        watched = &mut end => return watched.map(|finished| (finished, None)),
        ended = slot.ended() => ended,
    };
    cancel_too();
    let finished = match end.await {
        Watched::Ended(finished) => finished,
        Watched::Left(abandoned) => return Watched::Left(abandoned),
    };
    let harm = match ended.and_then(|ended| cli::ended_because(&ended)) {
        Ok(how) => Error::Failed(format!("the guest ended while it was being sent: {how}")),
        Err(error) => error,
    };
    // It ended after it was handed over: there is nothing here that could.
    let stayed = finished.outcome.ending != Ending::Completed;
    Watched::Ended((finished, stayed.then_some(harm)))
}

/// Whether the receiver is on this machine: nothing but memory lies between.
fn is_local(to: &Address) -> bool {
    match to {
        Address::Unix(_) => true,
        Address::Tcp { host, .. } => {
            host == "localhost"
                || host
                    .parse::<std::net::IpAddr>()
                    .is_ok_and(|address| address.is_loopback())
        }
        Address::Vsock { .. } => false,
    }
}
