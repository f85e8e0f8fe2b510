//! Where a peer is: `tcp:HOST:PORT`, `unix:PATH` or `vsock:CID:PORT`.

use crate::Error;
use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::str::FromStr;

/// Where to listen, or whom to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A TCP port. IPv6 addresses are written in brackets, and kept here without.
    Tcp {
        /// A name or a numeric address.
        host: String,
        /// 0 to listen on any free port.
        port: u16,
    },
    /// A Unix stream socket in the file system.
    Unix(PathBuf),
    /// A vsock port of this host or of one of its guests.
    Vsock {
        /// The context id: 2 is the host, 1 this machine; 4294967295 listens on all.
        cid: u32,
        /// The port.
        port: u32,
    },
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = |why: &str| Error::Address {
            text: text.to_owned(),
            why: why.to_owned(),
        };
        let (kind, rest) = text.split_once(':').ok_or_else(|| bad("it names no transport"))?;
        match kind {
            "tcp" => {
                let (host, port) = rest.rsplit_once(':').ok_or_else(|| bad("it has no port"))?;
                let port = port.parse().map_err(|_| bad("the port is no number from 0 to 65535"))?;
                let host = match host.strip_prefix('[') {
                    Some(inner) => {
                        let inner = inner.strip_suffix(']').ok_or_else(|| bad("a bracket is not closed"))?;
                        check_ipv6(inner).map_err(bad)?;
                        inner
                    }
                    None if host.contains(':') => return Err(bad("an IPv6 address goes in brackets")),
                    None => {
                        check_name(host).map_err(bad)?;
                        host
                    }
                };
                Ok(Address::Tcp {
                    host: host.to_owned(),
                    port,
                })
            }
            "unix" if rest.is_empty() => Err(bad("the path is empty")),
            "unix" => Ok(Address::Unix(PathBuf::from(rest))),
            "vsock" => {
                let (cid, port) = rest.split_once(':').ok_or_else(|| bad("it has no port"))?;
                Ok(Address::Vsock {
                    cid: cid.parse().map_err(|_| bad("the context id is no 32-bit number"))?,
                    port: port.parse().map_err(|_| bad("the port is no 32-bit number"))?,
                })
            }
            _ => Err(bad("its transport is none of tcp, unix and vsock")),
        }
    }
}

/// The longest name of a host (RFC 1035, section 2.3.4), and of a network interface.
const MAX_NAME_CHARS: usize = 253;

/// A name, or a numeric IPv4 address: it has to come back from a log and a shell as it went in.
fn check_name(host: &str) -> Result<(), &'static str> {
    if host.is_empty() {
        return Err("the host is empty");
    }
    if host.chars().count() > MAX_NAME_CHARS {
        return Err("the host has more than 253 characters");
    }
    match host
        .chars()
        .all(|c| c.is_alphanumeric() || matches!(c, '-' | '.' | '_'))
    {
        true => Ok(()),
        false => Err("the host has a character that no name of a host has"),
    }
}

/// What is in brackets: a numeric address, and behind a % perhaps the interface that it is of.
fn check_ipv6(inner: &str) -> Result<(), &'static str> {
    let (address, interface) = inner.split_once('%').unwrap_or((inner, "lo"));
    if address.parse::<Ipv6Addr>().is_err() {
        return Err("what is in brackets is no IPv6 address");
    }
    check_name(interface).map_err(|_| "what is behind the % is no interface's name")
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Vsock { cid, port } => write!(f, "vsock:{cid}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read_and_written_alike() {
        for text in [
            "tcp:127.0.0.1:0",
            "tcp:host.example:65535",
            "tcp:[::1]:4000",
            "tcp:[fe80::1%eth0]:4000",
            "tcp:hôte_1.example:1",
            "unix:/run/x.sock",
            "vsock:2:1234",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn bad_forms_are_refused_with_the_form_that_was_meant() {
        for text in [
            "",
            "tcp",
            "tcp:",
            "tcp:h",
            "tcp::1",
            "tcp:h:65536",
            "tcp:::1:5",
            "tcp:[::1:5",
            "tcp:[host]:5",
            "tcp:[[::1]]:5",
            "tcp:[fe80::1%]:5",
            "tcp:[fe80::1%a b]:5",
            "tcp:a b:5",
            "tcp:a\nb:5",
            "tcp:[]:5",
            "unix:",
            "vsock:1",
            "vsock:x:1",
            "vsock:1:4294967296",
            "udp:h:1",
            "127.0.0.1:80",
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains("tcp:HOST:PORT"), "{text}: {error}");
        }
    }
}
