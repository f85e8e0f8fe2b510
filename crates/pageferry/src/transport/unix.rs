//! Unix stream sockets in the file system.

use super::Endpoint;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// The socket at `path`; an error where the path is too long for one.
pub(super) fn endpoints(path: &Path) -> io::Result<Vec<Endpoint>> {
    Ok(vec![(Domain::UNIX, SockAddr::unix(path)?)])
}

/// Removes a socket's file that a dead process left: nobody answers there. Anything else is left alone.
pub(super) fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {}
        _ => return Ok(()),
    }
    let probe = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    match probe.connect(&SockAddr::unix(path)?) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        _ => Ok(()),
    }
}
