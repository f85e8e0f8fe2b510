//! Stream sockets of three kinds behind one type: TCP, Unix and vsock.
//!
//! A data connection is a blocking socket, a [`DataSocket`], owned by one thread, closed from outside by `shutdown(2)` (see
//! [`Closer`]). A control connection, and any connection while it says who it is, is an [`AsyncSocket`] on the control
//! loop's runtime. Either may be wrapped in TLS, and goes from the one to the other with it.

mod closer;
mod data_socket;
mod socket;
mod tcp;
mod tls;
mod unix;
mod vsock;

pub(crate) use closer::Closer;
pub(crate) use data_socket::{DataSocket, Encrypted};
pub(crate) use socket::AsyncSocket;

use crate::security::{self, PROOF_BYTES, Token};
use crate::{Address, Error, Security};
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The most connections that wait to be accepted: a flood is worked off, and a source that comes meanwhile has to find a
/// place.
const BACKLOG: i32 = 1024;

/// What a receiver says first under TLS: that it has taken the source's certificate.
const WELCOME: u8 = 1;

/// A socket's family and address.
type Endpoint = (Domain, SockAddr);

/// Where the system says that `address` is: several for a name with several addresses.
fn endpoints(address: &Address) -> io::Result<Vec<Endpoint>> {
    match address {
        Address::Tcp { host, port } => tcp::endpoints(host, *port),
        Address::Unix(path) => unix::endpoints(path),
        Address::Vsock { cid, port } => Ok(vsock::endpoints(*cid, *port)),
    }
}

/// Connects as `security` has it, blocking for about `timeout` (and for as long as the system takes to look a name up).
pub(crate) fn connect(address: &Address, timeout: Duration, security: &Security) -> Result<DataSocket, Error> {
    let socket = dial(address, timeout, None, security)?;
    secure(socket, address, timeout, security)
}

/// Connects, and proves nothing yet. The socket asks for kernel buffers of `buffer_bytes`, where given.
pub(crate) fn dial(
    address: &Address,
    timeout: Duration,
    buffer_bytes: Option<usize>,
    security: &Security,
) -> Result<Socket, Error> {
    let failed = |source| Error::Connect {
        address: address.clone(),
        source,
    };
    let deadline = Instant::now() + timeout;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for (domain, endpoint) in endpoints(address).map_err(failed)? {
        if let Some(found) = endpoint.as_socket() {
            security.check_ip(address, found.ip())?;
        }
        let attempt = || -> io::Result<Socket> {
            let socket = Socket::new(domain, Type::STREAM, None)?;
            if let Some(bytes) = buffer_bytes {
                set_buffers(&socket, bytes);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let left = left.max(Duration::from_millis(1));
            if domain == Domain::UNIX {
                // One that does not block is refused where too many wait already.
                socket.set_write_timeout(Some(left))?;
                socket.connect(&endpoint)?;
                socket.set_write_timeout(None)?;
            } else {
                socket.connect_timeout(&endpoint, left)?;
            }
            tune(&socket, domain)?;
            Ok(socket)
        };
        match attempt() {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

/// What comes ahead of the preamble, at the source's end: TLS, then the token. No single read or write takes longer than
/// `timeout`.
pub(crate) fn secure(
    socket: Socket,
    address: &Address,
    timeout: Duration,
    security: &Security,
) -> Result<DataSocket, Error> {
    let mut socket = DataSocket::from(socket);
    if security.tls.is_none() && security.token.is_none() {
        return Ok(socket);
    }
    let limited = |limit| {
        socket
            .set_read_timeout(limit)
            .and_then(|()| socket.set_write_timeout(limit))
    };
    limited(Some(timeout)).map_err(|e| Error::io("preparing a connection", e))?;
    if let Some(tls) = &security.tls {
        let name = tls.name_of(address)?;
        socket.connect_tls(tls, name)?;
    }
    if let Some(token) = &security.token {
        prove(&mut socket, token)?;
    }
    let limited = socket
        .set_read_timeout(None)
        .and_then(|()| socket.set_write_timeout(None));
    limited.map_err(|e| Error::io("preparing a connection", e))?;
    Ok(socket)
}

/// Proves the token to the receiver, and has it prove the same.
fn prove(socket: &mut DataSocket, token: &Token) -> Result<(), Error> {
    let broke = |e: io::Error| match e.kind() {
        io::ErrorKind::UnexpectedEof => Error::Refused(
            "the receiver closed the connection instead of answering the token: is it older, or does it take none?"
                .to_owned(),
        ),
        _ => Error::io("proving the token to the receiver", e),
    };
    let ours = security::draw_nonce()?;
    let mut hello = [0; 8 + 32];
    hello[..8].copy_from_slice(&security::TOKEN_MAGIC);
    hello[8..].copy_from_slice(&ours);
    socket.write_all(&hello).map_err(broke)?;
    let mut reply = [0; security::REPLY_BYTES];
    socket.read_exact(&mut reply).map_err(broke)?;
    let theirs = security::Reply::decode(&reply).map_err(Error::Refused)?;
    socket.write_all(&token.source_proof(&ours, &theirs)).map_err(broke)?;
    let mut answer = [0; 1 + PROOF_BYTES];
    socket.read_exact(&mut answer).map_err(broke)?;
    security::Status::check(answer[0]).map_err(Error::Refused)?;
    match token.receiver_proves(&answer[1..], &ours, &theirs) {
        true => Ok(()),
        false => Err(Error::Refused(
            "what answers as the receiver does not know the token: nothing was sent to it".to_owned(),
        )),
    }
}

/// No delay for the sake of fuller segments: batches are large, and what is small is waited for.
fn tune(socket: &Socket, domain: Domain) -> io::Result<()> {
    if domain == Domain::IPV4 || domain == Domain::IPV6 {
        socket.set_tcp_nodelay(true)?;
    }
    Ok(())
}

/// Asks for kernel buffers. Best effort: past the system's limit only a privileged process gets them, and for the
/// others TCP's own growing of buffers does better than a buffer fixed at that limit.
fn set_buffers(socket: &Socket, bytes: usize) {
    /// What an unprivileged process gets on Linux by default (`net.core.wmem_max`).
    const USUAL_LIMIT: usize = 208 << 10;
    let forced = rustix::net::sockopt::set_socket_send_buffer_size_force(socket, bytes)
        .and_then(|()| rustix::net::sockopt::set_socket_recv_buffer_size_force(socket, bytes));
    if forced.is_err() && bytes <= USUAL_LIMIT {
        let plain = socket
            .set_send_buffer_size(bytes)
            .and_then(|()| socket.set_recv_buffer_size(bytes));
        if let Err(error) = plain {
            tracing::debug!(%error, bytes, "the system keeps its own socket buffers");
        }
    }
}

/// A socket that receivers listen on.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    domain: Domain,
    address: Address,
    /// The socket's file, to be removed at the end.
    file: Option<PathBuf>,
}

impl Listener {
    /// Listens at `address`. A Unix socket's file that nobody listens on any more is replaced.
    pub fn bind(address: &Address) -> Result<Self, Error> {
        let failed = |source| Error::Listen {
            address: address.clone(),
            source,
        };
        if let Address::Unix(path) = address {
            unix::remove_stale(path).map_err(failed)?;
        }
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for (domain, endpoint) in endpoints(address).map_err(failed)? {
            let attempt = || -> io::Result<Socket> {
                let socket = Socket::new(domain, Type::STREAM, None)?;
                if domain != Domain::UNIX {
                    socket.set_reuse_address(true)?;
                }
                socket.bind(&endpoint)?;
                socket.listen(BACKLOG)?;
                Ok(socket)
            };
            match attempt() {
                Ok(socket) => {
                    let address = local_address(&socket, address).map_err(failed)?;
                    let file = match &address {
                        Address::Unix(path) => Some(path.clone()),
                        _ => None,
                    };
                    return Ok(Listener {
                        socket,
                        domain,
                        address,
                        file,
                    });
                }
                Err(error) => last = error,
            }
        }
        Err(failed(last))
    }

    /// Where it listens, with the port that the system chose where 0 was asked for.
    pub fn local_address(&self) -> &Address {
        &self.address
    }

    /// Whether connections may be taken here as `security` has it.
    pub(crate) fn check(&self, security: &Security) -> Result<(), Error> {
        let local = self.socket.local_addr().ok().and_then(|local| local.as_socket());
        match local {
            Some(local) => security.check_ip(&self.address, local.ip()),
            None => Ok(()),
        }
    }

    /// A handle on the same socket for the control loop, whose connections will have buffers of `buffer_bytes`.
    pub(crate) fn accepting(&self, buffer_bytes: usize) -> Result<Acceptor, Error> {
        let prepare = || -> io::Result<AsyncSocket> {
            // Before a connection comes: TCP settles the scale of its window at the handshake.
            set_buffers(&self.socket, buffer_bytes);
            AsyncSocket::new(self.socket.try_clone()?)
        };
        let socket = prepare().map_err(|e| Error::io(format!("preparing to accept on {}", self.address), e))?;
        Ok(Acceptor {
            socket,
            domain: self.domain,
        })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(file) = &self.file
            && let Err(error) = std::fs::remove_file(file)
        {
            tracing::debug!(%error, file = %file.display(), "the socket's file could not be removed");
        }
    }
}

/// Accepts connections on the control loop's runtime.
pub(crate) struct Acceptor {
    socket: AsyncSocket,
    domain: Domain,
}

impl Acceptor {
    /// The next connection.
    pub(crate) async fn accept(&self) -> io::Result<AsyncSocket> {
        let socket = self.socket.accept().await?;
        tune(&socket, self.domain)?;
        AsyncSocket::new(socket)
    }
}

fn local_address(socket: &Socket, asked: &Address) -> io::Result<Address> {
    let local = socket.local_addr()?;
    Ok(match asked {
        Address::Tcp { host, port: 0 } => Address::Tcp {
            host: host.clone(),
            port: local.as_socket().map_or(0, |a| a.port()),
        },
        Address::Vsock { cid, port } => Address::Vsock {
            cid: *cid,
            port: local.as_vsock_address().map_or(*port, |(_, port)| port),
        },
        other => other.clone(),
    })
}
