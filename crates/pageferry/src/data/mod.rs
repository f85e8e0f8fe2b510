//! The data plane: one thread a stream, blocking sockets, pages straight between guest memory and the socket, or packed
//! between the two where the link is slow.
//! Specification: [`wire::batch`].

mod headroom;
mod judge;
mod pacer;
mod packing;
mod receiver;
mod sender;

pub(crate) use headroom::Headroom;
pub(crate) use pacer::Pacer;
pub(crate) use packing::Totals;
pub(crate) use receiver::{Gate, Receiver};
pub(crate) use sender::{Command, Sender};

use std::io;

/// A clause for a data connection that broke.
fn broken(stream: u16, doing: &str, error: &io::Error) -> String {
    format!("data stream {stream} broke while {doing}: {error}")
}
