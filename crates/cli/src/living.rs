//! A guest's time here: it runs until it ends by itself, until somebody has it end, or until it was handed over.

use crate::slot::{GuestEnd, GuestSlot};
use crate::{Error, Signals};
use pageferry::control_socket::{ControlListener, How, Serving, serve};
use pageferry::{Address, Guest};
use std::future::Future;
use vmm::Ended;

/// What ended a guest's time here.
#[derive(Debug)]
pub enum Lived {
    /// It was handed over to this address.
    HandedOver(Address),
    /// A client of the control socket said `quit`.
    Quit,
    /// SIGINT, SIGTERM, or Ctrl-A x.
    Signal,
    /// It ended by itself.
    Ended(GuestEnd),
}

/// A guest that is here, running or paused.
#[derive(Debug)]
pub enum Life {
    /// By itself.
    Here(Guest),
    /// Served at a control socket.
    Served(Serving),
}

impl Life {
    /// Begins. With a `listener`, its clients are served from now on. Needs a tokio runtime.
    pub fn begin(slot: &GuestSlot, guest: Guest, listener: Option<ControlListener>) -> Self {
        match listener {
            None => Life::Here(guest),
            Some(listener) => Life::Served(serve(listener, guest, slot.controls())),
        }
    }

    /// What is to be said of a guest that `runs`, or does not, as far as this process knows: clients may have done more.
    pub fn state(&self, runs: bool) -> &'static str {
        let Life::Served(serving) = self else {
            return if runs { "runs on" } else { "is here, paused" };
        };
        match serving.state() {
            "running" => "runs on",
            "migrating" => "is being sent on",
            "ended" => "is no longer here",
            _ => "is here, paused",
        }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// [`Error::Failed`] where the guest was lost with a thread of this process.
    pub async fn end(self, slot: &GuestSlot, signals: &mut Signals) -> Result<Lived, Error> {
        let mut serving = match self {
            Life::Here(guest) => {
                let lived = wait(slot, signals).await;
                drop(guest);
                return lived;
            }
            Life::Served(serving) => serving,
        };
        let asked = tokio::select! {
            biased;
            served = serving.finish() => return lived(served.how, None),
            asked = wait(slot, signals) => asked,
        };
        let why = match &asked {
            Ok(Lived::Signal) => "its host was told to end",
            Ok(Lived::Ended(_)) => "it ended by itself",
            _ => "its host failed",
        };
        // A migration under way is cancelled, which may take its time.
        let signalled = matches!(asked, Ok(Lived::Signal));
        if signalled {
            signals.forget();
        }
        let stopped = tokio::select! {
            biased;
            stopped = Life::Served(serving).stop(why) => stopped,
            () = signals.again(), if signalled => {
                // The guest's threads are not waited for.
                std::mem::forget(slot.clone());
                return Err(Error::Failed(
                    "ended at once by a second signal; where a migration was under way, only its receiver knows how it ended"
                        .to_owned(),
                ));
            }
        };
        match stopped {
            Ok(None) => asked,
            Ok(Some(lived)) => Ok(lived),
            Err(error) => Err(error),
        }
    }

    /// Ends it, and with it a migration under way. One that was past the point of return has won, and is what ended it.
    ///
    /// # Errors
    /// As [`Life::end`].
    pub async fn stop(self, why: &str) -> Result<Option<Lived>, Error> {
        let Life::Served(mut serving) = self else {
            return Ok(None);
        };
        serving.stop(why);
        match serving.finish().await.how {
            How::Stopped => Ok(None),
            how => lived(how, None).map(Some),
        }
    }
}

/// [`Life::begin`] and [`Life::end`] in one.
///
/// # Errors
/// As [`Life::end`].
pub async fn live(
    slot: &GuestSlot,
    guest: Guest,
    listener: Option<ControlListener>,
    signals: &mut Signals,
) -> Result<Lived, Error> {
    Life::begin(slot, guest, listener).end(slot, signals).await
}

fn lived(how: How, asked: Option<Lived>) -> Result<Lived, Error> {
    match how {
        How::HandedOver(to) => Ok(Lived::HandedOver(to)),
        How::Quit => Ok(Lived::Quit),
        How::Stopped => Ok(asked.unwrap_or(Lived::Signal)),
        How::Lost(why) => Err(Error::Failed(why)),
    }
}

/// Waits for a signal, or the guest's own end.
async fn wait(slot: &GuestSlot, signals: &mut Signals) -> Result<Lived, Error> {
    tokio::select! {
        biased;
        () = signals.wait() => Ok(Lived::Signal),
        end = slot.ended() => end.map(Lived::Ended),
    }
}

/// Waits for something that the guest has to live to see.
///
/// # Errors
/// [`Error::Cancelled`] on a signal; [`Error::Failed`] where the guest ended before.
pub async fn until_ended<T>(
    slot: &GuestSlot,
    signals: &mut Signals,
    something: impl Future<Output = T>,
) -> Result<T, Error> {
    tokio::select! {
        biased;
        something = something => Ok(something),
        ended = wait(slot, signals) => match ended? {
            Lived::Ended(end) => Err(match ended_because(&end) {
                Ok(how) => Error::Failed(format!("the guest ended before it was sent: {how}")),
                Err(error) => error,
            }),
            _ => Err(Error::Cancelled),
        },
    }
}

/// How a guest ended, in words, where that is how guests end.
///
/// # Errors
/// [`Error::Failed`] says what it came to harm by.
pub fn ended_because(end: &GuestEnd) -> Result<String, Error> {
    match end {
        GuestEnd::Linux(Ended::Failed(error)) => Err(Error::Failed(error.to_string())),
        GuestEnd::Linux(how @ (Ended::PowerOff | Ended::Reset)) => Ok(how.to_string()),
        GuestEnd::Broken => Err(Error::Failed(
            "the guest came to harm: it found its memory broken, and stopped".to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_guest_that_switches_itself_off_is_no_failure_and_one_that_cannot_go_on_is() {
        let linux = |how| ended_because(&GuestEnd::Linux(how));
        assert!(linux(Ended::PowerOff).unwrap().contains("power off"));
        assert!(linux(Ended::Reset).unwrap().contains("reset"));
        let emulation = vmm::Error::Emulation {
            vcpu: 0,
            rip: 0xffff_ffff_8100_0000,
            bytes: "0f ae 10".to_owned(),
        };
        let error = linux(Ended::Failed(Arc::new(emulation))).unwrap_err();
        assert_eq!(error.exit_code(), 4);
        let text = error.to_string();
        for word in ["cannot run this kernel", "0xffffffff81000000", "0f ae 10"] {
            assert!(text.contains(word), "{text}");
        }
        assert_eq!(ended_because(&GuestEnd::Broken).unwrap_err().exit_code(), 4);
    }
}
