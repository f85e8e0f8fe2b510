//! The data plane: one thread a stream, blocking sockets, pages straight between guest memory and the socket, or packed
//! between the two where the link is slow.
//! Specification: [`wire::batch`].

mod headroom;
mod judge;
mod pacer;
mod packing;
mod receiver;
mod sealing;
mod sender;

pub(crate) use headroom::Headroom;
pub(crate) use pacer::Pacer;
pub(crate) use packing::Totals;
pub(crate) use receiver::{Gate, Receiver};
pub(crate) use sender::{Command, Sender};

use engine::Step;
use std::io;

/// Why a stream's thread ended early.
#[derive(Debug)]
enum Broken {
    /// Its connection did: another one could go on.
    Link(String),
    /// The receiver took no byte for too long.
    Stalled,
    /// Something that a new connection does not mend: what was wrong with which step.
    Failed(Step, String),
}

impl Broken {
    /// After a read or a write: of guest memory and a socket at once, so either may have failed.
    fn by(stream: u16, step: Step, doing: &str, error: &io::Error) -> Self {
        use io::ErrorKind::*;
        let text = broken(stream, doing, error);
        match error.kind() {
            ConnectionReset | ConnectionAborted | BrokenPipe | NotConnected | UnexpectedEof | TimedOut | WriteZero
            | HostUnreachable | NetworkUnreachable | NetworkDown => Broken::Link(text),
            _ => Broken::Failed(step, text),
        }
    }
}

/// A clause for a data connection that broke.
fn broken(stream: u16, doing: &str, error: &io::Error) -> String {
    format!("data stream {stream} broke while {doing}: {error}")
}
