//! How a batch's pages may be packed (version 2 of the protocol).

use crate::{Error, Result};
use std::fmt;

/// A way to pack a batch's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// An LZ4 block, without a size ahead of it.
    Lz4,
    /// Zstandard frames, without a dictionary.
    Zstd,
}

impl Codec {
    /// All of them, by number.
    pub const ALL: [Codec; 2] = [Codec::Lz4, Codec::Zstd];

    /// The bits of all of them: see [`Codec::bit`].
    pub const ALL_BITS: u32 = Codec::Lz4.bit() | Codec::Zstd.bit();

    /// Its number in a batch's header; 0 is a batch that is not packed.
    pub const fn number(self) -> u32 {
        match self {
            Codec::Lz4 => 1,
            Codec::Zstd => 2,
        }
    }

    /// Its bit in an `Offer`.
    pub const fn bit(self) -> u32 {
        1 << (self.number() - 1)
    }

    /// Its name, as the command line has it.
    pub const fn name(self) -> &'static str {
        match self {
            Codec::Lz4 => "lz4",
            Codec::Zstd => "zstd",
        }
    }

    /// The codec with this number; `None` for 0.
    pub(super) fn from_number(number: u32) -> Result<Option<Codec>> {
        match number {
            0 => Ok(None),
            1 => Ok(Some(Codec::Lz4)),
            2 => Ok(Some(Codec::Zstd)),
            _ => Err(Error::Codec(number)),
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
