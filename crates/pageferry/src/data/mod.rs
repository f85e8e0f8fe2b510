//! The data plane: one thread a stream, blocking sockets, pages straight between guest memory and the socket.
//! Specification: [`wire::batch`].

mod headroom;
mod pacer;
mod receiver;
mod sender;

pub(crate) use headroom::Headroom;
pub(crate) use pacer::Pacer;
pub(crate) use receiver::{Gate, Receiver};
pub(crate) use sender::{Command, Sender};

use std::io;

/// A clause for a data connection that broke.
fn broken(stream: u16, doing: &str, error: &io::Error) -> String {
    format!("data stream {stream} broke while {doing}: {error}")
}
