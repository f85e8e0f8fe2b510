//! Packs the pages of a batch, and unpacks them within bounds. Specification: [`wire::batch`], version 2.
//!
//! Neither side ever hands guest memory to a codec: pages are copied into a buffer of the stream's own first, so that a
//! guest that writes meanwhile tears its page (which is sent again) and nothing else. What comes from a peer unpacks into
//! a buffer whose size the batch's own table of runs gives: a byte more or less is an error, and no size that packed data
//! claims makes room for anything. All buffers are made once and kept.
//!
//! | codec | what for | packs, of a Linux guest's memory |
//! |---|---|---|
//! | lz4 | links of a few Gbit/s | to a third |
//! | zstd, level 1 to [`MAX_ZSTD_LEVEL`] | slower links | to a fifth (level 1) |
#![forbid(unsafe_code)]

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};
use std::fmt;
use wire::batch::Codec;

/// The highest level of zstd: beyond, its memory grows with no gain on batches.
pub const MAX_ZSTD_LEVEL: u8 = 19;

/// The level of zstd where none was asked for.
pub const ZSTD_LEVEL: u8 = 1;

/// Pages that do not shrink by a sixteenth go as they are: unpacking them would cost the receiver more than that.
const WORTH: usize = 16;

/// What packing or unpacking failed by.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Packed data that is damaged, or holds more than its batch has pages for.
    #[error(
        "pages packed by {codec} do not unpack into the {expected} bytes that their batch has: {reason}; damaged on the \
         way, or not from a sound source"
    )]
    Unpack {
        /// The codec's name.
        codec: &'static str,
        /// What the batch's runs make.
        expected: usize,
        /// Why not.
        reason: String,
    },
    /// Packed data that holds less than its batch has pages for.
    #[error("pages packed by {codec} make {got} bytes, their batch has {expected}; not from a sound source")]
    Short {
        /// The codec's name.
        codec: &'static str,
        /// How many there are.
        got: usize,
        /// How many there have to be.
        expected: usize,
    },
    /// The codec refuses to work here.
    #[error("packing pages by {codec}: {reason}")]
    Pack {
        /// The codec's name.
        codec: &'static str,
        /// Why.
        reason: String,
    },
}

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// Packs one stream's batches. Makes room for a codec when it is first used.
#[derive(Default)]
pub struct Packer {
    lz4: Option<CompressTable>,
    zstd: Option<(u8, zstd::bulk::Compressor<'static>)>,
    out: Vec<u8>,
}

impl Packer {
    /// Packs `raw`; `None` where that is not worth it: it goes as it is. `level` is zstd's, 1 to [`MAX_ZSTD_LEVEL`].
    ///
    /// # Errors
    ///
    /// The codec has no memory, or a level that it does not know.
    pub fn pack(&mut self, codec: Codec, level: u8, raw: &[u8]) -> Result<Option<&[u8]>> {
        let failed = |reason: String| Error::Pack {
            codec: codec.name(),
            reason,
        };
        let room = match codec {
            Codec::Lz4 => get_maximum_output_size(raw.len()),
            Codec::Zstd => zstd::zstd_safe::compress_bound(raw.len()),
        };
        if self.out.len() < room {
            self.out.resize(room, 0);
        }
        let bytes = match codec {
            Codec::Lz4 => {
                let table = self.lz4.get_or_insert_with(CompressTable::large);
                compress_into_with_table(raw, &mut self.out, table).map_err(|e| failed(e.to_string()))?
            }
            Codec::Zstd => {
                let compressor = at_level(&mut self.zstd, level).map_err(|e| failed(e.to_string()))?;
                let packed = compressor.compress_to_buffer(raw, &mut self.out[..]);
                packed.map_err(|e| failed(e.to_string()))?
            }
        };
        let worth = bytes < raw.len() - raw.len() / WORTH;
        Ok(self.out.get(..bytes).filter(|_| worth))
    }
}

/// The compressor for `level`: the one that is there, if it is of that level.
fn at_level<'a>(
    there: &'a mut Option<(u8, zstd::bulk::Compressor<'static>)>,
    level: u8,
) -> std::io::Result<&'a mut zstd::bulk::Compressor<'static>> {
    let kept = match there.take().filter(|(of, _)| *of == level) {
        Some(kept) => kept,
        None => (
            level,
            zstd::bulk::Compressor::new(i32::from(level.clamp(1, MAX_ZSTD_LEVEL)))?,
        ),
    };
    Ok(&mut there.insert(kept).1)
}

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packer")
            .field("room", &self.out.len())
            .finish_non_exhaustive()
    }
}

/// Unpacks one stream's batches. Makes room for a codec when it is first used.
#[derive(Default)]
pub struct Unpacker {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
}

impl Unpacker {
    /// Unpacks `packed`, which comes from a peer, into `raw`, whose size is the batch's: it fills that to the byte. What
    /// `raw` holds after an error is nobody's.
    ///
    /// # Errors
    ///
    /// It is damaged, or makes more or fewer bytes.
    pub fn unpack(&mut self, codec: Codec, packed: &[u8], raw: &mut [u8]) -> Result<()> {
        let expected = raw.len();
        let failed = |reason: String| Error::Unpack {
            codec: codec.name(),
            expected,
            reason,
        };
        let got = match codec {
            Codec::Lz4 => decompress_into(packed, raw).map_err(|e| failed(e.to_string()))?,
            Codec::Zstd => {
                let decompressor = match &mut self.zstd {
                    Some(decompressor) => decompressor,
                    none => none.insert(zstd::bulk::Decompressor::new().map_err(|e| failed(e.to_string()))?),
                };
                let unpacked = decompressor.decompress_to_buffer(packed, raw);
                unpacked.map_err(|e| failed(e.to_string()))?
            }
        };
        if got == expected {
            return Ok(());
        }
        Err(Error::Short {
            codec: codec.name(),
            got,
            expected,
        })
    }
}

impl fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unpacker").finish_non_exhaustive()
    }
}
