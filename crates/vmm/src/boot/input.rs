//! A file to boot from: opened so that nothing but a regular file can get in, its length known before it is read.

use crate::{Error, Result};
use std::fmt;
use std::fs::{File, FileType, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file to boot from.
#[derive(Debug)]
pub(super) struct Input {
    what: &'static str,
    path: PathBuf,
    pub(super) file: File,
    /// Its length when it was opened; not 0.
    pub(super) bytes: u64,
}

impl Input {
    /// Opens a file; `what` it is for is `kernel` or `initrd`.
    pub(super) fn open(what: &'static str, path: &Path) -> Result<Input> {
        let fail = |why: String| Error::File {
            what,
            path: path.to_owned(),
            why,
        };
        // Not to block on a pipe that nobody writes to. A regular file does not care.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(|e| fail(format!("it cannot be opened: {e}")))?;
        let about = file
            .metadata()
            .map_err(|e| fail(format!("it cannot be examined: {e}")))?;
        if !about.is_file() {
            return Err(fail(format!(
                "it is {}; a regular file is wanted",
                kind(about.file_type())
            )));
        }
        if about.len() == 0 {
            return Err(fail("it is empty".to_owned()));
        }
        Ok(Input {
            what,
            path: path.to_owned(),
            file,
            bytes: about.len(),
        })
    }

    /// The error that this file does not do.
    pub(super) fn error(&self, why: impl Into<String>) -> Error {
        Error::File {
            what: self.what,
            path: self.path.clone(),
            why: why.into(),
        }
    }

    /// Reads from `offset` on, as far as `into` or the file goes; returns how far that was.
    pub(super) fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<usize> {
        let sought = self.file.seek(SeekFrom::Start(offset));
        sought.map_err(|e| self.error(format!("seeking to byte {offset}: {e}")))?;
        let mut done = 0;
        while done < into.len() {
            match self.file.read(&mut into[done..]) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.error(format!("reading byte {offset} and on: {e}"))),
            }
        }
        Ok(done)
    }
}

fn kind(kind: FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_block_device() {
        "a block device"
    } else if kind.is_char_device() {
        "a character device"
    } else {
        "no regular file"
    }
}

/// A number of bytes, exact and for people.
#[derive(Clone, Copy)]
pub(super) struct Size(pub(super) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: u64 = 1 << 20;
        let Size(bytes) = *self;
        write!(f, "{bytes} bytes")?;
        if bytes >= MIB {
            write!(f, " ({}.{} MiB)", bytes / MIB, bytes % MIB * 10 / MIB)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_that_hold_something_get_in() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |path: &Path, wanted: &str| {
            let error = Input::open("initrd", path).unwrap_err().to_string();
            assert!(error.starts_with("initrd "), "{error}");
            assert!(
                error.contains(path.to_str().unwrap()) && error.contains(wanted),
                "{error}"
            );
        };
        refused(dir.path(), "directory");
        refused(&dir.path().join("none"), "cannot be opened");
        refused(Path::new("/dev/null"), "character device");
        let empty = dir.path().join("empty");
        std::fs::write(&empty, b"").unwrap();
        refused(&empty, "empty");
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        refused(&pipe, "pipe");
    }

    #[test]
    fn sizes_are_exact() {
        assert_eq!(Size(77).to_string(), "77 bytes");
        assert_eq!(Size(3 << 19).to_string(), "1572864 bytes (1.5 MiB)");
    }
}
