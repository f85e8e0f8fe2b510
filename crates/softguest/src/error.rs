//! What can go wrong with a guest.

use pages::Pfn;

/// What the guest could not do, or what it found broken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration that makes no guest.
    #[error("{0}")]
    Config(String),
    /// Guest RAM could not be made.
    #[error("making guest RAM: {0}")]
    Memory(#[from] memory::Error),
    /// The guest reached for an address that is not RAM.
    #[error("the guest reached for {len} bytes at guest-physical address {address:#x}, which is not RAM: {why}")]
    Address {
        /// The address.
        address: u64,
        /// How many bytes.
        len: usize,
        /// What guest memory says.
        why: String,
    },
    /// The guest ran out of memory at boot.
    #[error("the guest has no memory left for {wanted} pages of {what}; ask for less or give it more RAM")]
    OutOfMemory {
        /// What for.
        what: &'static str,
        /// How many pages are missing.
        wanted: u64,
    },
    /// The guest found its own memory broken.
    #[error("guest RAM is broken: {0}")]
    Corrupt(String),
    /// A page that the guest uses does not hold what it wrote there last.
    #[error("page {pfn} of the guest is broken: {why}")]
    Page {
        /// The page.
        pfn: Pfn,
        /// What is wrong with it.
        why: String,
    },
    /// The balloon device refused something of the guest's driver.
    #[error("the guest's balloon driver: {0}")]
    Balloon(#[from] balloon::Error),
    /// Saved state that cannot be taken over.
    #[error("saved guest state was refused: {0}")]
    State(String),
    /// A thread of the guest could not be started.
    #[error("starting a thread for the guest: {0}")]
    Thread(#[source] std::io::Error),
    /// Asked of a guest that has not been restored yet.
    #[error("the guest is not here yet: restore its state first")]
    NotRestored,
    /// Asked of a guest that does not run.
    #[error("the guest is paused; resume it first")]
    Paused,
}

impl From<Error> for machine::Error {
    fn from(error: Error) -> Self {
        machine::Error::Refused(error.to_string())
    }
}

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;
