//! What `migrate-host` does: start a guest, let it be, and serve it where it is to be served.
//!
//! Invariant: once the guest runs, words that cannot be said cost nothing but a warning.

use crate::Arguments;
use cli::{ConsoleLine, Error, GuestPlan, Lived, Signals, say_stderr};
use pageferry::control_socket::ControlListener;

/// Runs the command; gives its exit code.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Error> {
    let mut plan = arguments.guest.plan()?;
    let quiet = arguments.log.quiet;
    let console = match &plan {
        GuestPlan::Linux(linux) => Some(ConsoleLine::new(linux.console.as_deref(), None)?),
        GuestPlan::Soft(_) | GuestPlan::File(_) => None,
    };
    let _held = cli::hold_files(&mut plan);
    let files = cli::with_made(cli::Files::new(), arguments.control.as_deref());
    arguments.sandbox.enter(&cli::with_guest(files, &plan));
    // Stdout is a Linux guest's.
    let say = |sentence: &str| match (quiet, &console) {
        (true, _) => {}
        (false, None) => cli::or_warn(cli::print_line(sentence)),
        (false, Some(_)) => say_stderr(sentence),
    };
    cli::block_on(async {
        let mut signals = Signals::catch()?;
        // The socket first: that it is taken is not worth starting a guest for.
        let listen = |path| ControlListener::bind(path).map_err(|error| Error::Refused(error.to_string()));
        let listener = arguments.control.as_deref().map(listen).transpose()?;
        let line = console.clone();
        let started = signals.or(move || cli::start(&plan, line.as_ref())).await?;
        let state = if started.guest.machine.is_running() {
            "runs"
        } else {
            "is here, paused"
        };
        let end = match &arguments.control {
            Some(path) => format!("it is served at {}", path.display()),
            None => "SIGINT or SIGTERM ends it".to_owned(),
        };
        say(&format!("guest: {state}; {end}"));
        let attached = console.as_ref().map(|line| line.attach(quiet)).transpose()?;
        let lived = cli::live(&started.slot, started.guest, listener, &mut signals).await;
        drop(attached);
        if let Some(line) = &console {
            line.drain();
        }
        match lived? {
            Lived::HandedOver(to) => say(&format!("guest: was handed over to {to}")),
            Lived::Ended(end) => say(&format!("guest: ended: {}", cli::ended_because(&end)?)),
            Lived::Quit | Lived::Signal => {
                let Some(checked) = started.slot.self_check() else {
                    return Ok(0);
                };
                let pages = checked
                    .passed()
                    .map_err(|error| Error::Failed(format!("the guest came to harm: {error}")))?;
                say(&format!("guest: ends; self-check of {pages} pages passed"));
            }
        }
        Ok(0)
    })
}
