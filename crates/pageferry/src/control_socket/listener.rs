//! The socket's file: made for its owner alone, taken over only where nobody listens.

use crate::Error;
use rustix::fs::{FlockOperation, Mode, OFlags};
use socket2::{Domain, SockAddr, Socket, Type};
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 32;

const TAKEN: &str = "another process serves a guest there: give another path";

/// How long another process may hold the folder.
const FOLDER_WITHIN: Duration = Duration::from_secs(5);

/// A control socket that nobody is served on yet. Its file goes with it.
#[derive(Debug)]
pub struct ControlListener {
    pub(super) socket: UnixListener,
    pub(super) file: SocketFile,
}

impl ControlListener {
    /// Listens at `path`. The file is made with mode 0600, before anybody can connect. A socket's file that nobody listens
    /// on any more is replaced.
    ///
    /// # Errors
    /// Somebody listens there, something else lies there, or no socket can be there.
    pub fn bind(path: &Path) -> Result<Self, Error> {
        let failed = |why: String| Error::ControlSocket {
            path: path.to_owned(),
            why,
        };
        let address = address(path).map_err(failed)?;
        // Two that find the same stale file would each remove it, one of them the other's new one.
        let folder = lock_folder(path).map_err(failed)?;
        make_room(path).map_err(failed)?;
        let bind = || -> io::Result<ControlListener> {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
            socket.bind(&address)?;
            let file = SocketFile::of(path)?;
            std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
            socket.listen(BACKLOG)?;
            Ok(ControlListener {
                socket: socket.into(),
                file,
            })
        };
        let bound = bind().map_err(|error| failed(error.to_string()));
        drop(folder);
        bound
    }

    /// Whether [`ControlListener::bind`] would work now, as far as can be told without making anything.
    ///
    /// # Errors
    /// As there.
    pub fn check(path: &Path) -> Result<(), Error> {
        let check = || -> Result<(), String> {
            address(path)?;
            drop(lock_folder(path)?);
            find(path).map(drop)
        };
        check().map_err(|why| Error::ControlSocket {
            path: path.to_owned(),
            why,
        })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.file.path
    }
}

/// A socket's file. Removed when this goes, if it is still the same.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        let meta = std::fs::symlink_metadata(path)?;
        Ok(SocketFile {
            path: path.to_owned(),
            device: meta.dev(),
            inode: meta.ino(),
        })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let same = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|found| (found.dev(), found.ino()) == (self.device, self.inode));
        if same && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!("the control socket {} stays: {error}", self.path.display());
        }
    }
}

fn address(path: &Path) -> Result<SockAddr, String> {
    if path.as_os_str().is_empty() {
        return Err("its path is empty".to_owned());
    }
    SockAddr::unix(path).map_err(|_| "its path is too long for a socket; 107 bytes at most".to_owned())
}

/// Holds the folder that the socket lies in, against others that do the same.
fn lock_folder(path: &Path) -> Result<rustix::fd::OwnedFd, String> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let open = rustix::fs::open(
        folder,
        OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let held = open.map_err(|error| format!("its folder {}: {}", folder.display(), io::Error::from(error)))?;
    let began = Instant::now();
    loop {
        match rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(held),
            Err(rustix::io::Errno::WOULDBLOCK) if began.elapsed() < FOLDER_WITHIN => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => {
                let error = io::Error::from(error);
                return Err(format!("locking its folder {}: {error}", folder.display()));
            }
        }
    }
}

/// What lies at the path: nothing, or a socket that nobody listens on.
enum Found {
    Nothing,
    Stale,
}

fn find(path: &Path) -> Result<Found, String> {
    let meta = match std::fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(error) => return Err(error.to_string()),
    };
    if !meta.file_type().is_socket() {
        return Err("something else than a socket lies there: remove it, or give another path".to_owned());
    }
    let probe = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        // Where many wait to be accepted, a blocking connect would wait with them.
        socket.set_nonblocking(true)?;
        socket.connect(&SockAddr::unix(path)?)
    };
    match probe() {
        Ok(()) => Err(TAKEN.to_owned()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(TAKEN.to_owned()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(Found::Stale),
        Err(error) => Err(format!("a socket lies there that cannot be tried: {error}")),
    }
}

fn make_room(path: &Path) -> Result<(), String> {
    match find(path)? {
        Found::Nothing => Ok(()),
        Found::Stale => {
            tracing::info!("replacing the control socket {} that nobody listens on", path.display());
            std::fs::remove_file(path).map_err(|error| format!("removing the stale socket: {error}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_its_owners_alone_and_goes_with_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = ControlListener::bind(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_is_taken_over_only_where_nobody_listens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = ControlListener::bind(&path).unwrap();
        for refused in [ControlListener::bind(&path).map(drop), ControlListener::check(&path)] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("another process") && error.contains("/s"), "{error}");
        }
        // As a process that was killed leaves it.
        let ControlListener { socket, file } = first;
        drop(socket);
        std::mem::forget(file);
        assert!(path.exists());
        ControlListener::check(&path).unwrap();
        assert!(path.exists(), "a check leaves it");
        let second = ControlListener::bind(&path).unwrap();
        assert!(second.path().exists());
    }

    #[test]
    fn a_file_that_is_no_longer_ours_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = ControlListener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "another's").unwrap();
        drop(listener);
        assert_eq!(std::fs::read(&path).unwrap(), b"another's");
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "precious").unwrap();
        for (path, word) in [
            (file.clone(), "something else"),
            (folder.path().to_owned(), "something else"),
            (folder.path().join("no/s"), "no"),
            (folder.path().join("x".repeat(200)), "too long"),
            (PathBuf::new(), "empty"),
        ] {
            for refused in [ControlListener::bind(&path).map(drop), ControlListener::check(&path)] {
                let error = refused.unwrap_err().to_string();
                assert!(error.contains(word), "{error}");
            }
        }
        assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    }

    #[test]
    fn of_many_that_find_a_stale_socket_one_takes_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        for _ in 0..200 {
            let ControlListener { socket, file } = ControlListener::bind(&path).unwrap();
            drop(socket);
            std::mem::forget(file);
            let together = std::sync::Arc::new(std::sync::Barrier::new(4));
            let taking: Vec<_> = (0..4)
                .map(|_| {
                    let (path, together) = (path.clone(), std::sync::Arc::clone(&together));
                    std::thread::spawn(move || {
                        together.wait();
                        ControlListener::bind(&path)
                    })
                })
                .collect();
            let taken: Vec<_> = taking.into_iter().map(|thread| thread.join().unwrap()).collect();
            assert_eq!(taken.iter().filter(|taken| taken.is_ok()).count(), 1);
        }
    }
}
