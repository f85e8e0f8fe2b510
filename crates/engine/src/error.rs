//! Why a migration did not complete, as a sentence that an operator can act on.
//!
//! What a peer says is untrusted text: it is cut to a length and freed of control characters before it goes anywhere.

use crate::{Ending, Step};
use std::fmt;
use std::time::Duration;
use wire::{AbortCause, MAX_REASON_BYTES, Message};

/// How a destination's word on unequal digests begins, so that the source can report `verified: false`.
pub(crate) const VERIFY_FAILED: &str = "verification failed";

/// Why a migration did not complete.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    /// The receiver's checks said no.
    #[error("the receiver refused: {0}")]
    Refused(String),
    /// Our own checks said no.
    #[error("{0}")]
    RefusedHere(String),
    /// The peer gave up.
    #[error("the {peer} gave up: {reason}")]
    Aborted {
        peer: &'static str,
        reason: String,
        cause: AbortCause,
    },
    /// The receiver took `Commit` and could not run the guest.
    #[error("the receiver could not run the guest: {0}")]
    NotRunning(String),
    /// An operator's cancel, here.
    #[error("cancelled")]
    Cancelled,
    /// The migration's own time-out.
    #[error(
        "the guest was not paused within the time-out of {}: it writes faster than the link carries, or the link is \
         slow; raise --timeout or --downtime-limit, or choose --on-timeout stop", Span(*.0)
    )]
    TimedOut(Duration),
    /// The peer was silent.
    #[error("no sign of life from the {peer} for {}", Span(*.after))]
    Silent { peer: &'static str, after: Duration },
    /// The receiver took no pages.
    #[error("the receiver took no data for {}", Span(*.0))]
    Stalled(Duration),
    /// The peer speaks, and does not answer.
    #[error("the {peer} is alive but gave no answer to {to} for {}", Span(*.after))]
    NoAnswer {
        peer: &'static str,
        to: &'static str,
        after: Duration,
    },
    /// The control connection ended.
    #[error("the connection to the {peer} was lost: {error}")]
    Gone { peer: &'static str, error: String },
    /// The connections ended, and the migration was not taken up again: a sentence that says both.
    #[error("{0}")]
    Lost(String, AbortCause),
    /// A message that has no place here.
    #[error("the {peer} sent {message} {when}: it does not follow the protocol")]
    Unexpected {
        peer: &'static str,
        message: &'static str,
        when: String,
    },
    /// What the peer said cannot be.
    #[error("the {peer} sent {0}", peer = .1)]
    Invalid(String, &'static str),
    /// Something failed on this side.
    #[error("{step} failed: {error}")]
    Step { step: Step, error: String },
    /// Digests differ.
    #[error("{VERIFY_FAILED}: the digests of pages {0} differ")]
    Verify(pages::PageRange),
    /// Our own executor, or this machine itself, broke a rule.
    #[error("internal error: {0}; please report this")]
    Internal(String),
}

impl Error {
    /// The ending of a migration that this ended, where the guest is known to be the source's.
    pub(crate) fn ending(&self) -> Ending {
        match self {
            Error::Refused(_) | Error::RefusedHere(_) => Ending::Refused,
            _ => match self.cause() {
                AbortCause::Failed => Ending::Failed,
                AbortCause::Cancelled => Ending::Cancelled,
                AbortCause::TimedOut => Ending::TimedOut,
            },
        }
    }

    /// What kind of reason it is, as the peer is told; one that the peer gave is passed on.
    pub(crate) fn cause(&self) -> AbortCause {
        match self {
            Error::Aborted { cause, .. } | Error::Lost(_, cause) => *cause,
            Error::Cancelled => AbortCause::Cancelled,
            Error::TimedOut(_) | Error::Silent { .. } | Error::Stalled(_) | Error::NoAnswer { .. } => {
                AbortCause::TimedOut
            }
            _ => AbortCause::Failed,
        }
    }

    /// Whether there is still a peer to tell.
    pub(crate) fn peer_listens(&self) -> bool {
        !matches!(
            self,
            Error::Gone { .. }
                | Error::Lost(..)
                | Error::Aborted { .. }
                | Error::Refused(_)
                | Error::RefusedHere(_)
                | Error::NotRunning(_)
        )
    }
}

/// A duration as people write it.
pub(crate) struct Span(pub(crate) Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.subsec_nanos() == 0 {
            write!(f, "{} s", self.0.as_secs())
        } else {
            write!(f, "{} ms", self.0.as_millis())
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::StartTracking => "turning dirty tracking on",
            Step::Scan => "looking for the pages that RAM holds",
            Step::BeginHints => "asking the guest for its free pages",
            Step::Peek => "looking at what the guest wrote",
            Step::EndHints => "ending the question to the guest",
            Step::Send => "sending pages",
            Step::Recheck => "looking at the balloon again",
            Step::Harvest => "reading the dirty log",
            Step::Pause => "pausing the guest",
            Step::Save => "saving the machine's state",
            Step::Digest => "digesting RAM",
            Step::GiveBack => "giving harvested pages back to the dirty log",
            Step::StopTracking => "turning dirty tracking off",
            Step::Resume => "resuming the guest",
            Step::Prepare => "preparing the machine",
            Step::Receive => "receiving pages",
            Step::Zero => "zeroing pages",
            Step::Restore => "restoring the machine's state",
            Step::Discard => "throwing the copy of the guest away",
            Step::Control => "speaking to the peer",
        })
    }
}

/// A message's name, for errors.
pub(crate) fn name_of(message: &Message) -> &'static str {
    match message {
        Message::Hello(_) => "Hello",
        Message::Accept(_) => "Accept",
        Message::Refuse { .. } => "Refuse",
        Message::Skip(_) => "Skip",
        Message::RoundEnd { .. } => "RoundEnd",
        Message::RoundReceived { .. } => "RoundReceived",
        Message::Section(_) => "Section",
        Message::StateEnd { .. } => "StateEnd",
        Message::Digests(_) => "Digests",
        Message::Ready { .. } => "Ready",
        Message::Commit(_) => "Commit",
        Message::Running(_) => "Running",
        Message::NotRunning(_) => "NotRunning",
        Message::Abort { .. } => "Abort",
        Message::Ping => "Ping",
        Message::Offer(_) => "Offer",
        Message::Terms(_) => "Terms",
        Message::Resume(_) => "Resume",
        Message::Have(_) => "Have",
        Message::Resumed { .. } => "Resumed",
    }
}

/// A peer's words, or ours to it: without control characters, at most [`MAX_REASON_BYTES`].
pub(crate) fn plain(text: &str) -> String {
    let mut clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    while clean.len() > MAX_REASON_BYTES {
        clean.pop();
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_words_are_cut_and_cannot_drive_a_terminal() {
        assert_eq!(plain("no\u{1b}[31m room\n"), "no [31m room ");
        let long = plain(&"ü".repeat(MAX_REASON_BYTES));
        assert!(long.len() <= MAX_REASON_BYTES && long.len() > MAX_REASON_BYTES - 2);
    }

    #[test]
    fn endings_follow_the_cause() {
        let abort = |cause| Error::Aborted {
            peer: "receiver",
            reason: "x".to_owned(),
            cause,
        };
        assert_eq!(abort(AbortCause::Cancelled).ending(), Ending::Cancelled);
        assert_eq!(abort(AbortCause::Failed).ending(), Ending::Failed);
        assert_eq!(abort(AbortCause::TimedOut).ending(), Ending::TimedOut);
        assert_eq!(Error::TimedOut(Duration::from_secs(3)).ending(), Ending::TimedOut);
        let silent = Error::Silent {
            peer: "source",
            after: Duration::from_secs(10),
        };
        assert_eq!(silent.ending(), Ending::TimedOut);
        assert_eq!(silent.to_string(), "no sign of life from the source for 10 s");
    }
}
