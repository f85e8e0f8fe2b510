//! The socket's file: made for its owner alone, taken over only where nobody listens.
//!
//! Invariant: whoever has a socket at `SOCKET`, listening or not yet, holds a lock on `SOCKET.lock` for as long: of two that
//! find the same stale socket each would else remove it, one of them the other's new one. The file has mode 0600, so that
//! nobody else can hold it; the lock ends with its process, however that ends.

use crate::Error;
use rustix::fd::OwnedFd;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use socket2::{Domain, SockAddr, Socket, Type};
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 32;

const TAKEN: &str = "another process serves a guest there, or is about to: give another path";

/// How often a lock's file may go with its owner while it is taken.
const LOCK_TRIES: u32 = 100;

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
        ClaimedSocket::claim(path)?.listen()
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.file.path
    }
}

/// The place of a control socket, held for a guest that is yet to come: clients are refused meanwhile.
#[derive(Debug)]
pub struct ClaimedSocket {
    socket: Socket,
    file: SocketFile,
}

impl ClaimedSocket {
    /// Takes `path`, as [`ControlListener::bind`] does.
    ///
    /// # Errors
    /// As there.
    pub fn claim(path: &Path) -> Result<Self, Error> {
        let claim = || -> Result<ClaimedSocket, String> {
            let address = address(path)?;
            // Before anything is made: what lies there and is no socket gets no lock beside it.
            find(path)?;
            let lock = LockFile::take(path)?;
            make_room(path)?;
            let bind = || -> io::Result<ClaimedSocket> {
                let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
                socket.bind(&address)?;
                let file = SocketFile::of(path, lock)?;
                std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
                Ok(ClaimedSocket { socket, file })
            };
            bind().map_err(|error| error.to_string())
        };
        claim().map_err(|why| failed(path, why))
    }

    /// Listens: clients are served once [`serve`](super::serve) is called.
    ///
    /// # Errors
    /// The system's.
    pub fn listen(self) -> Result<ControlListener, Error> {
        let ClaimedSocket { socket, file } = self;
        socket
            .listen(BACKLOG)
            .map_err(|error| failed(&file.path, error.to_string()))?;
        Ok(ControlListener {
            socket: socket.into(),
            file,
        })
    }
}

fn failed(path: &Path, why: String) -> Error {
    Error::ControlSocket {
        path: path.to_owned(),
        why,
    }
}

/// A socket's file. Removed when this goes, if it is still the same.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
    /// Goes after the socket.
    _lock: LockFile,
}

impl SocketFile {
    fn of(path: &Path, lock: LockFile) -> io::Result<Self> {
        let meta = std::fs::symlink_metadata(path)?;
        Ok(SocketFile {
            path: path.to_owned(),
            device: meta.dev(),
            inode: meta.ino(),
            _lock: lock,
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

/// The lock that goes with a socket. Its file is removed while it is still held.
#[derive(Debug)]
struct LockFile {
    path: PathBuf,
    /// Locked.
    held: OwnedFd,
}

impl LockFile {
    fn take(socket: &Path) -> Result<Self, String> {
        let mut name = socket.as_os_str().to_owned();
        name.push(".lock");
        let path = PathBuf::from(name);
        let failed = |error: io::Error| format!("its lock {}: {error}", path.display());
        for _ in 0..LOCK_TRIES {
            let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let held = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR);
            let held = held.map_err(|error| failed(error.into()))?;
            let meta = rustix::fs::fstat(&held).map_err(|error| failed(error.into()))?;
            if FileType::from_raw_mode(meta.st_mode) != FileType::RegularFile {
                return Err(format!("its lock {} is no file: give another path", path.display()));
            }
            match rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(TAKEN.to_owned()),
                Err(error) => return Err(failed(error.into())),
            }
            // One that went with its owner, before it was locked here, holds nobody off.
            if lies_at(&held, &path) {
                return Ok(LockFile { path, held });
            }
        }
        Err(TAKEN.to_owned())
    }
}

/// Whether this file is the one at `path`.
fn lies_at(file: &OwnedFd, path: &Path) -> bool {
    let found = std::fs::symlink_metadata(path);
    rustix::fs::fstat(file)
        .is_ok_and(|ours| found.is_ok_and(|found| (found.dev(), found.ino()) == (ours.st_dev, ours.st_ino)))
}

impl Drop for LockFile {
    fn drop(&mut self) {
        if lies_at(&self.held, &self.path)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!("the control socket's lock {} stays: {error}", self.path.display());
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

    /// Leaves what a process leaves that was killed: the files, and nobody who holds them.
    fn kill(listener: ControlListener) {
        let ControlListener { socket, file } = listener;
        drop(socket);
        let (socket, lock) = (file.path.clone(), file._lock.path.clone());
        let (kept_socket, kept_lock) = (socket.with_extension("kept"), lock.with_extension("lock-kept"));
        std::fs::rename(&socket, &kept_socket).unwrap();
        std::fs::hard_link(&lock, &kept_lock).unwrap();
        drop(file);
        std::fs::rename(kept_socket, socket).unwrap();
        std::fs::rename(kept_lock, lock).unwrap();
    }

    #[test]
    fn the_files_are_their_owners_alone_and_go_with_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = ControlListener::bind(&path).unwrap();
        for name in ["s", "s.lock"] {
            let mode = std::fs::metadata(folder.path().join(name))
                .unwrap()
                .permissions()
                .mode();
            assert_eq!(mode & 0o7777, 0o600, "{name}");
        }
        drop(listener);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_socket_is_taken_over_only_where_nobody_listens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = ControlListener::bind(&path).unwrap();
        let taken = || {
            let error = ControlListener::bind(&path).unwrap_err().to_string();
            assert!(error.contains("another process") && error.contains("/s"), "{error}");
        };
        taken();
        // Of somebody who knows nothing of the lock.
        std::fs::rename(folder.path().join("s.lock"), folder.path().join("kept")).unwrap();
        taken();
        std::fs::rename(folder.path().join("kept"), folder.path().join("s.lock")).unwrap();
        kill(first);
        assert!(path.exists() && folder.path().join("s.lock").exists());
        let second = ControlListener::bind(&path).unwrap();
        assert!(second.path().exists());
    }

    #[test]
    fn a_place_that_is_claimed_is_neither_served_nor_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let claimed = ClaimedSocket::claim(&path).unwrap();
        let error = std::os::unix::net::UnixStream::connect(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        let error = ControlListener::bind(&path).unwrap_err().to_string();
        assert!(error.contains("is about to"), "{error}");
        let listener = claimed.listen().unwrap();
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        drop(listener);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_lock_on_the_folder_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let held = std::fs::File::open(folder.path()).unwrap();
        rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
        ControlListener::bind(&folder.path().join("s")).unwrap();
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
            let error = ControlListener::bind(&path).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    }

    #[test]
    fn of_many_that_find_a_stale_socket_one_takes_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        for _ in 0..200 {
            kill(ControlListener::bind(&path).unwrap());
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
