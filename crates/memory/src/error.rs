//! What can go wrong with guest RAM.

use pages::{BitmapError, LayoutError, PageRange};
use std::io;
use std::path::PathBuf;

/// Why guest RAM could not be made, read, given back or watched.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("{doing}: {source}")]
    Sys {
        /// What was being done, with the value it was done to.
        doing: String,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Pages that are not guest RAM, or not within one region of it.
    #[error("pages {0} do not lie within one region of guest RAM")]
    OutsideRam(PageRange),
    /// Bytes that are not guest RAM, or not within one region of it.
    #[error("{len} bytes at guest-physical address {address:#x} do not lie within one region of guest RAM")]
    BytesOutsideRam {
        /// The guest-physical address.
        address: u64,
        /// How many bytes from there on.
        len: u64,
    },
    /// Not something that RAM can be mapped from.
    #[error("{0} is not a regular file; name a file on tmpfs, hugetlbfs or a disk")]
    NotRegular(PathBuf),
    /// The file and the layout do not belong together.
    #[error("RAM file {path} has {got} bytes, but the guest's RAM has {expected}; give the layout it was written with")]
    FileLength {
        /// The file.
        path: PathBuf,
        /// Bytes of the layout.
        expected: u64,
        /// Bytes of the file.
        got: u64,
    },
    /// Another process holds the file.
    #[error("RAM file {0} is in use by another process; end that one or name another file")]
    InUse(PathBuf),
    /// The file system could not take all of RAM: running full later would kill the guest (SIGBUS).
    #[error("{path} needs up to {needed} bytes, but its file system has {free} free; free some, or use another one")]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Bytes of RAM.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// The host could not take all of RAM.
    #[error(
        "populating {needed} bytes of guest RAM: the host has {available} available; free some, or do not populate"
    )]
    NotEnoughMemory {
        /// Bytes to populate.
        needed: u64,
        /// `MemAvailable`.
        available: u64,
    },
    /// Regions that huge pages do not fill.
    #[error("RAM region {range} does not start and end at a multiple of the huge page size, {page_bytes} bytes")]
    NotHuge {
        /// The region.
        range: PageRange,
        /// Bytes in a huge page.
        page_bytes: u64,
    },
    /// The file lost its end while it was mapped.
    #[error("the RAM file shrank to {got} bytes while in use; pages {range} are gone")]
    Truncated {
        /// What was being read or written.
        range: PageRange,
        /// The length that the file has now, in bytes.
        got: u64,
    },
    /// A write to RAM that was opened for reading.
    #[error("pages {0} cannot be changed: the RAM file was opened for reading only")]
    ReadOnly(PageRange),
    /// No such list of RAM regions.
    #[error("layout file {path}: {source}")]
    Layout {
        /// The file.
        path: PathBuf,
        /// What is wrong with the regions.
        #[source]
        source: LayoutError,
    },
    /// A file that holds something else than it should.
    #[error("{path}: {what}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What was wrong, and what is expected.
        what: String,
    },
    /// The kernel lacks what write tracking needs.
    #[error("this kernel cannot track writes: {0}")]
    NoTracking(String),
    /// A dirty bitmap that is not of its memory slot.
    #[error("the dirty log of memory slot {slot}: {source}")]
    SlotBitmap {
        /// The slot.
        slot: u32,
        /// Which length it has, and should have.
        #[source]
        source: BitmapError,
    },
    /// KVM wrote over entries of a ring that nobody had read.
    #[error(
        "this host's KVM has overrun the dirty ring of vCPU {vcpu}: which pages it wrote is not known any more; track writes in \
         another way"
    )]
    RingOverrun {
        /// The vCPU.
        vcpu: u32,
    },
    /// KVM named a page that its slot does not have.
    #[error("the dirty ring of vCPU {vcpu} names page {offset} of memory slot {slot}, which has {pages}")]
    RingEntry {
        /// The vCPU.
        vcpu: u32,
        /// The slot.
        slot: u32,
        /// The page, counted from the slot's first.
        offset: u64,
        /// Pages of the slot.
        pages: u64,
    },
}

impl Error {
    /// A [`Error::Sys`] from an I/O error.
    pub(crate) fn sys(doing: impl Into<String>, source: io::Error) -> Self {
        Error::Sys {
            doing: doing.into(),
            source,
        }
    }

    /// The error as an I/O error, its text kept.
    pub(crate) fn into_io(self) -> io::Error {
        match self {
            Error::OutsideRam(_) | Error::BytesOutsideRam { .. } => io::Error::new(io::ErrorKind::InvalidInput, self),
            Error::Truncated { .. } => io::Error::new(io::ErrorKind::UnexpectedEof, self),
            other => io::Error::other(other),
        }
    }
}

impl From<Error> for machine::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::OutsideRam(range) => machine::Error::OutsideRam(range),
            Error::Sys { doing, source } => machine::Error::Host { doing, source },
            other => machine::Error::Refused(other.to_string()),
        }
    }
}

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;
