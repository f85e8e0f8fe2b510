//! What guest RAM is made of, and the checks ahead of mapping it.
//!
//! A RAM file stays sparse: nothing is allocated ahead. So that a full file system does not kill the guest later (by
//! SIGBUS), a new file is refused unless the file system could take all of it now.

use crate::error::{Error, Result};
use crate::sys::map;
use pages::{Layout, PAGE_BYTES};
use rustix::fs::SealFlags;
use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const TMPFS_MAGIC: u64 = 0x0102_1994;
/// A transparent huge page.
const HUGE_BYTES: u64 = 2 << 20;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// What guest RAM is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// Private memory, with transparent huge pages where the host has them. The fastest to fill and to track.
    #[default]
    Anonymous,
    /// A memfd: for VMMs that share RAM with another process.
    Memfd,
    /// A file on tmpfs, hugetlbfs or a disk, mapped shared. RAM order is file order.
    File {
        /// The file.
        path: PathBuf,
        /// How it is opened.
        mode: FileMode,
    },
    /// Huge pages from the host's pool: of a new file on a hugetlbfs, or of a memfd.
    Hugetlbfs {
        /// The file to create; a memfd of the default huge page size if there is none.
        path: Option<PathBuf>,
    },
}

/// How a RAM file is opened. One that can be written is locked against every other user of this library, one that is
/// read against writers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileMode {
    /// A receiver's: created or emptied, all zero. Exclusive.
    Create,
    /// An existing one of exactly RAM's size, to read and write. Exclusive.
    Open,
    /// An existing one of exactly RAM's size, for a source that only sends it. Shared among readers. Its mapping must
    /// not be handed to a device: a write through it raises SIGSEGV.
    ReadOnly,
}

impl Backing {
    /// A new RAM file at `path`.
    pub fn create_file(path: impl Into<PathBuf>) -> Self {
        Backing::File {
            path: path.into(),
            mode: FileMode::Create,
        }
    }

    /// The RAM file that lies at `path`, to read and write.
    pub fn open_file(path: impl Into<PathBuf>) -> Self {
        Backing::File {
            path: path.into(),
            mode: FileMode::Open,
        }
    }

    /// The RAM file that lies at `path`, to read alone.
    pub fn read_file(path: impl Into<PathBuf>) -> Self {
        Backing::File {
            path: path.into(),
            mode: FileMode::ReadOnly,
        }
    }
}

/// An opened [`Backing`].
#[derive(Debug)]
pub(crate) struct Storage {
    /// `None` for anonymous memory.
    pub(crate) file: Option<File>,
    /// Bytes of a page: 4096, or a huge page's on hugetlbfs.
    pub(crate) page_bytes: u64,
    pub(crate) writable: bool,
    /// Whether others may cut the file short under our mapping, so that a load from it raises SIGBUS: it has a name, and
    /// no seal says that it stays as long as it is.
    pub(crate) may_shrink: bool,
    /// Whether our page table may lose entries whose pages live on: not for anonymous memory, whose entries are its
    /// pages, nor for hugetlbfs, which is never reclaimed.
    pub(crate) loses_entries: bool,
    /// Whether the file system may use transparent huge pages for it.
    pub(crate) huge_folios: bool,
    /// Whether a load from a page that is not there allocates it, rather than showing the shared zero page.
    pub(crate) reads_allocate: bool,
    /// Whether populated pages stay in RAM and so need that much of it: not so on a disk.
    pub(crate) in_ram: bool,
}

impl Storage {
    pub(crate) fn open(backing: &Backing, layout: &Layout) -> Result<Storage> {
        match backing {
            Backing::Anonymous => Ok(Storage {
                file: None,
                page_bytes: PAGE_BYTES,
                writable: true,
                may_shrink: false,
                loses_entries: false,
                huge_folios: false,
                reads_allocate: !huge_zero_page(),
                in_ram: true,
            }),
            Backing::Memfd | Backing::Hugetlbfs { path: None } => {
                let huge = *backing != Backing::Memfd;
                let file = map::memfd(huge).map_err(|e| Error::sys("making a memfd for guest RAM", e))?;
                let storage = Storage::of_file(file, true, false)?;
                storage.check_regions(layout)?;
                storage.set_len(layout, Path::new("memfd"))?;
                Ok(storage)
            }
            Backing::File { path, mode } => open_file(path, *mode, layout),
            Backing::Hugetlbfs { path: Some(path) } => open_file(path, FileMode::Create, layout),
        }
    }

    /// Refuses regions that huge pages do not fill.
    fn check_regions(&self, layout: &Layout) -> Result<()> {
        let pages = self.page_bytes / PAGE_BYTES;
        for region in layout.regions() {
            if !region.start().0.is_multiple_of(pages) || !region.count().is_multiple_of(pages) {
                return Err(Error::NotHuge {
                    range: *region,
                    page_bytes: self.page_bytes,
                });
            }
        }
        Ok(())
    }

    /// Makes the file, which is ours by now, all zero and as long as RAM.
    fn empty(&self, layout: &Layout, path: &Path) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        // Before it is emptied: a file that does not fit keeps what it has.
        check_space(file, path, layout.total_bytes())?;
        file.set_len(0)
            .map_err(|e| Error::sys(format!("emptying RAM file {}", path.display()), e))?;
        self.set_len(layout, path)
    }

    fn set_len(&self, layout: &Layout, path: &Path) -> Result<()> {
        let bytes = layout.total_bytes();
        let Some(file) = &self.file else { return Ok(()) };
        file.set_len(bytes)
            .map_err(|e| Error::sys(format!("making {} {bytes} bytes long", path.display()), e))
    }

    fn of_file(file: File, writable: bool, named: bool) -> Result<Storage> {
        let fs =
            rustix::fs::fstatfs(&file).map_err(|e| Error::sys("looking at the RAM file's file system", e.into()))?;
        // A magic number has 32 bits; what lies above is the sign.
        let magic = u64::from_ne_bytes(fs.f_type.to_ne_bytes()) & 0xffff_ffff;
        let huge = magic == HUGETLBFS_MAGIC;
        let page_bytes = if huge {
            u64::try_from(fs.f_bsize).unwrap_or(PAGE_BYTES)
        } else {
            PAGE_BYTES
        };
        // tmpfs mounted with huge pages says so by its preferred block size.
        let block_bytes = file
            .metadata()
            .map_err(|e| Error::sys("looking at the RAM file", e))?
            .blksize();
        // A hole that is punched into huge pages may find the host's pool empty when it is read: SIGBUS, seal or none.
        let may_shrink = named && (huge || !is_sealed(&file));
        Ok(Storage {
            file: Some(file),
            page_bytes,
            writable,
            may_shrink,
            loses_entries: !huge,
            huge_folios: block_bytes >= HUGE_BYTES,
            reads_allocate: true,
            in_ram: huge || magic == TMPFS_MAGIC,
        })
    }

    /// Whether pages are hugetlb pages.
    pub(crate) fn is_huge(&self) -> bool {
        self.page_bytes > PAGE_BYTES
    }

    /// Whether what our page table lacks is known to be zero: only we can have put anything there.
    pub(crate) fn page_table_is_truth(&self) -> bool {
        self.file.is_none() || (self.is_huge() && !self.may_shrink)
    }
}

/// Opens a RAM file, after looking at everything that could go wrong with it later.
fn open_file(path: &Path, mode: FileMode, layout: &Layout) -> Result<Storage> {
    let writable = mode != FileMode::ReadOnly;
    match std::fs::metadata(path) {
        Ok(meta) if !meta.is_file() => return Err(not_regular(path, meta.file_type())),
        Err(e) if mode != FileMode::Create || e.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::sys(format!("looking at RAM file {}", path.display()), e));
        }
        Ok(_) | Err(_) => {}
    }
    let file = OpenOptions::new()
        .read(true)
        .write(writable)
        .create(mode == FileMode::Create)
        .truncate(false)
        // Should a pipe have taken the file's place since, opening it must not hang.
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(|e| Error::sys(format!("opening RAM file {}", path.display()), e))?;
    let lock = if writable {
        file.try_lock()
    } else {
        file.try_lock_shared()
    };
    match lock {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(Error::InUse(path.to_owned())),
        Err(TryLockError::Error(e)) => return Err(Error::sys(format!("locking RAM file {}", path.display()), e)),
    }
    let meta = file
        .metadata()
        .map_err(|e| Error::sys(format!("looking at RAM file {}", path.display()), e))?;
    if !meta.is_file() {
        return Err(not_regular(path, meta.file_type()));
    }
    let got = meta.len();
    let storage = Storage::of_file(file, writable, true)?;
    storage.check_regions(layout)?;
    if mode == FileMode::Create {
        storage.empty(layout, path)?;
    } else if got != layout.total_bytes() {
        return Err(Error::FileLength {
            path: path.to_owned(),
            expected: layout.total_bytes(),
            got,
        });
    }
    Ok(storage)
}

/// Whether nobody can make the file shorter any more: a memfd of a VMM's, reached by `/proc/PID/fd`, may be so.
fn is_sealed(file: &File) -> bool {
    // Files that cannot be sealed answer with an error.
    rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

/// Whether a load from an untouched huge page of private memory shows the shared one; a host can switch that off. Without
/// transparent huge pages there is no such switch: then there is the small zero page.
fn huge_zero_page() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/use_zero_page").map_or(true, |text| text.trim() != "0")
}

/// Opens a small file to be read whole; a pipe in its place would make that wait.
pub(crate) fn open_regular(path: &Path, what: &str) -> Result<File> {
    let failed = |e| Error::sys(format!("reading {what} {}", path.display()), e);
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(failed)?;
    let kind = file.metadata().map_err(failed)?.file_type();
    if kind.is_file() {
        Ok(file)
    } else {
        Err(not_regular(path, kind))
    }
}

fn not_regular(path: &Path, kind: std::fs::FileType) -> Error {
    tracing::debug!(
        path = %path.display(),
        dir = kind.is_dir(),
        fifo = kind.is_fifo(),
        device = kind.is_char_device() || kind.is_block_device(),
        "not a RAM file"
    );
    Error::NotRegular(path.to_owned())
}

/// Refuses a file that its file system could not hold in whole.
fn check_space(file: &File, path: &Path, needed: u64) -> Result<()> {
    let fs = rustix::fs::fstatvfs(file)
        .map_err(|e| Error::sys(format!("asking for space at {}", path.display()), e.into()))?;
    let own = file
        .metadata()
        .map_err(|e| Error::sys(format!("looking at {}", path.display()), e))?
        .blocks();
    // The file's own blocks, of 512 bytes, come back when it is emptied.
    let free = fs
        .f_bavail
        .saturating_mul(fs.f_frsize)
        .saturating_add(own.saturating_mul(512));
    // No blocks at all: a file system without a limit of its own (hugetlbfs; its pool is checked by mapping).
    if fs.f_blocks > 0 && free < needed {
        return Err(Error::NoSpace {
            path: path.to_owned(),
            needed,
            free,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    #[test]
    fn what_may_shrink_under_us_is_known() {
        let memfd = File::from(memfd_create("ram", MemfdFlags::ALLOW_SEALING).unwrap());
        let may_shrink = |named| {
            let file = memfd.try_clone().unwrap();
            Storage::of_file(file, false, named).unwrap().may_shrink
        };
        assert!(!may_shrink(false));
        assert!(may_shrink(true));
        fcntl_add_seals(&memfd, SealFlags::GROW).unwrap();
        assert!(may_shrink(true));
        fcntl_add_seals(&memfd, SealFlags::SHRINK).unwrap();
        assert!(!may_shrink(true));
        // Files that know no seals.
        for dir in ["/dev/shm", "/var/tmp"] {
            let file = tempfile::tempfile_in(dir).unwrap();
            assert!(Storage::of_file(file, false, true).unwrap().may_shrink, "{dir}");
        }
    }
}
