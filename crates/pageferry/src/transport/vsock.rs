//! vsock: stream sockets between a host and its guests.

use super::Endpoint;
use socket2::{Domain, SockAddr};

/// The one address. Whether this system has vsock at all, making the socket tells.
pub(super) fn endpoints(cid: u32, port: u32) -> Vec<Endpoint> {
    vec![(Domain::VSOCK, SockAddr::vsock(cid, port))]
}
