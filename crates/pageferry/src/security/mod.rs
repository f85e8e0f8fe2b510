//! Who may take part in a migration: TLS with certificates on both sides, a token that both sides know, and plain TCP only
//! where somebody said so. Threat model: `docs/security.md`; what crosses: `docs/protocol.md`, "Below the preamble".
//!
//! Invariants: nothing of a peer is decoded before it has proven itself in every way that was asked for; a key and a token
//! are never printed, not by `Debug` either.

mod names;
mod tls;
mod token;
mod words;

pub use tls::{Tls, TlsFiles, TlsPem};
pub use token::Token;

pub(crate) use tls::{ALPN, Side};
pub(crate) use token::{Nonce, PROOF_BYTES, REPLY_BYTES, Reply, Status, TOKEN_MAGIC};
pub(crate) use words::{refused_by_tls, sentence};

use crate::{Address, Error};
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Arc;

/// How connections are protected. The default is plain, which is refused for TCP beyond loopback.
#[derive(Clone, Debug, Default)]
pub struct Security {
    /// TLS 1.3 on all connections.
    pub tls: Option<Arc<Tls>>,
    /// A token that both sides have to know; on its own it encrypts nothing.
    pub token: Option<Token>,
    /// Allows plain TCP beyond loopback: everybody on the way reads the guest's memory, and may change it.
    pub insecure: bool,
}

impl Security {
    /// Plain connections, also beyond loopback.
    pub fn insecure() -> Self {
        Security {
            insecure: true,
            ..Security::default()
        }
    }

    /// Whether `address` may be connected to, or listened on, like this. A name is looked up, which blocks; one that is not
    /// known is nobody's to connect to either way.
    ///
    /// # Errors
    /// [`Error::Options`] for plain TCP beyond loopback, and for a receiver whose certificate has no name to be checked by.
    pub fn check(&self, address: &Address) -> Result<(), Error> {
        if self.tls.is_some() || self.insecure {
            return Ok(());
        }
        let Address::Tcp { host, port } = address else {
            return Ok(());
        };
        let Ok(found) = (host.as_str(), *port).to_socket_addrs() else {
            return Ok(());
        };
        for ip in found.map(|found| found.ip()) {
            self.check_ip(address, ip)?;
        }
        Ok(())
    }

    /// The same, of one of the addresses that a name has.
    pub(crate) fn check_ip(&self, address: &Address, ip: IpAddr) -> Result<(), Error> {
        if self.tls.is_some() || self.insecure || is_loopback(ip) {
            return Ok(());
        }
        Err(Error::Options(format!(
            "{address} is beyond this machine, and the guest's memory would cross the network unencrypted: give --tls-cert, \
             --tls-key and --tls-ca on both sides, or --insecure if the network is encrypted otherwise"
        )))
    }

    /// Whether connections to `address` cross a network in plain.
    pub fn is_exposed(&self, address: &Address) -> bool {
        let plain = Security {
            insecure: false,
            ..self.clone()
        };
        self.insecure && plain.check(address).is_err()
    }
}

/// Random bytes that nobody can guess.
pub(crate) fn draw<const N: usize>(what: &str) -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    let drawn = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty());
    match drawn {
        Ok(n) if n == N => Ok(bytes),
        Ok(_) => Err(Error::io(what, std::io::ErrorKind::UnexpectedEof.into())),
        Err(error) => Err(Error::io(what, error.into())),
    }
}

/// A side's random number for the token's handshake.
pub(crate) fn draw_nonce() -> Result<Nonce, Error> {
    draw("drawing a random number")
}

/// Whether only this machine is there. An IPv4 address may be written as an IPv6 one.
fn is_loopback(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_loopback(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.to_ipv4_mapped().is_some_and(|ip| ip.is_loopback()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_tcp_stays_on_this_machine_unless_somebody_says_so() {
        let plain = Security::default();
        for near in [
            "tcp:127.0.0.1:1",
            "tcp:127.9.8.7:1",
            "tcp:[::1]:1",
            "tcp:[::ffff:127.0.0.1]:1",
            "unix:/x",
            "vsock:2:1",
        ] {
            let address = near.parse().unwrap();
            assert!(plain.check(&address).is_ok(), "{near}");
            assert!(!Security::insecure().is_exposed(&address), "{near}");
        }
        for far in [
            "tcp:0.0.0.0:1",
            "tcp:[::]:1",
            "tcp:192.0.2.1:1",
            "tcp:[2001:db8::1]:1",
            "tcp:[::ffff:192.0.2.1]:1",
        ] {
            let address = far.parse().unwrap();
            let error = plain.check(&address).unwrap_err().to_string();
            assert!(error.contains("--tls-cert") && error.contains("--insecure"), "{error}");
            assert!(Security::insecure().check(&address).is_ok() && Security::insecure().is_exposed(&address));
        }
    }
}
