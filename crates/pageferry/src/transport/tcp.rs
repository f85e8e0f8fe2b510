//! TCP over IPv4 and IPv6.

use super::Endpoint;
use socket2::Domain;
use std::io;
use std::net::ToSocketAddrs;

/// All addresses of `host`.
pub(super) fn endpoints(host: &str, port: u16) -> io::Result<Vec<Endpoint>> {
    let found = (host, port).to_socket_addrs()?;
    Ok(found
        .map(|address| (Domain::for_address(address), address.into()))
        .collect())
}
