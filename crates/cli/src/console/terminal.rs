//! A terminal in raw mode, and its way back on every way out.
//!
//! Output processing stays as it was: a log line on the same terminal ends where it should.
//!
//! The way back: dropping [`RawTerminal`] (an end, an error, a signal that the command handles); SIGHUP and SIGQUIT, which
//! end a process outright, are turned into SIGTERM for as long as the terminal is raw; and a panic of any thread restores
//! it before the panic's own message. A process that lives on after that has a terminal that is no longer raw.

use rustix::process::Signal;
use rustix::stdio::stdin;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};
use std::io;
use std::sync::{Mutex, Once, PoisonError};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;

/// How the terminal was, while it is raw.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);
static HOOK: Once = Once::new();

/// Whether stdin is a terminal that this process may use: one in the background would be stopped for it.
pub(super) fn is_ours() -> bool {
    let foreground = tcgetpgrp(stdin());
    foreground.is_ok_and(|group| group == rustix::process::getpgrp())
}

/// While this lives, the terminal of stdin is in raw mode.
#[derive(Debug)]
pub struct RawTerminal {
    hangups: JoinHandle<()>,
}

impl RawTerminal {
    /// Sets it. Needs a tokio runtime, which has to handle SIGTERM.
    ///
    /// # Errors
    /// The system's, also where stdin is no terminal.
    pub fn enter() -> io::Result<Self> {
        HOOK.call_once(|| {
            let then = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                restore();
                then(panic);
            }));
        });
        let (mut hangup, mut quit) = (signal(SignalKind::hangup())?, signal(SignalKind::quit())?);
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        raw.output_modes = before.output_modes;
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        if let Err(error) = set(&raw) {
            restore();
            return Err(error);
        }
        let hangups = tokio::spawn(async move {
            tokio::select! {
                _ = hangup.recv() => {}
                _ = quit.recv() => {}
            }
            end_the_command();
        });
        Ok(RawTerminal { hangups })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        self.hangups.abort();
        restore();
    }
}

/// Does what SIGTERM does.
pub(super) fn end_the_command() {
    if let Err(error) = rustix::process::kill_process(rustix::process::getpid(), Signal::TERM) {
        tracing::error!("this process cannot be told to end: {error}");
    }
}

/// Puts the terminal back as it was. Fine to call when it is.
fn restore() {
    let before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(before) = before
        && let Err(error) = set(&before)
    {
        // One that has hung up needs nothing any more.
        tracing::debug!("the terminal cannot be restored: {error}");
    }
}

fn set(termios: &Termios) -> io::Result<()> {
    rustix::io::retry_on_intr(|| tcsetattr(stdin(), OptionalActions::Now, termios))?;
    Ok(())
}
