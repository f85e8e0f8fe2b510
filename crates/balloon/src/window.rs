//! Inflate and deflate buffers that carry a page bitmap: what the bitmap dialects share.
//!
//! Bit `i` of the bitmap, the least significant bit of its first byte being bit 0, is page `start_pfn + i`. Bits that
//! name no RAM (holes of the layout, past its end) are counted and ignored.
//!
//! A buffer lies in guest memory, which the guest may write at any time. It is read once, in whole, into our own memory,
//! and only that copy is looked at. All of it is then read once more, the header last, and compared: a buffer that changed
//! meanwhile was overwritten, and is not believed. The driver writes the bitmap first, which takes it long, and the header
//! last. A rewrite that the guest began before and did not go on with in between is not seen, so kicks are to be served
//! before the vCPU that kicked goes on.

use crate::queue::Chain;
use pages::Pfn;
use vm_memory::GuestMemory;

/// The longest bitmap of a window, bytes: 32 GiB of guest-physical space.
pub(crate) const MOST_WINDOW: usize = 1 << 20;

/// Bytes of a buffer that are read again at once.
const PIECE: usize = 64 << 10;

/// How a dialect lays out a buffer.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    /// Bytes in front of the bitmap.
    pub(crate) header: usize,
    /// The longest bitmap that is read, bytes.
    pub(crate) most: usize,
    /// The strict check of a header, given how many bytes follow it: the page of bit 0, or why it is not believed.
    pub(crate) parse: fn(&[u8], u64) -> Result<Pfn, &'static str>,
}

/// Why a buffer is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unbelieved {
    /// It is no buffer that a device may read, or not in guest memory.
    Buffer(&'static str),
    /// Its header failed the strict check.
    Header(&'static str),
    /// It changed while it was read.
    Torn,
}

/// Reads the buffer of `chain` into `bytes`. The page of its first bit; the bitmap is what follows the header.
pub(crate) fn read<M: GuestMemory>(
    mem: &M,
    chain: &Chain,
    form: &Form,
    bytes: &mut Vec<u8>,
) -> Result<Pfn, Unbelieved> {
    bytes.clear();
    if chain.has_writable() {
        return Err(Unbelieved::Buffer("it has a device-writable descriptor"));
    }
    let Some(present) = chain.readable_bytes().checked_sub(form.header as u64) else {
        return Err(Unbelieved::Header("it is shorter than its header"));
    };
    if present > form.most as u64 {
        return Err(Unbelieved::Header("it is longer than any bitmap"));
    }
    let outside = Unbelieved::Buffer("it does not lie in guest memory");
    if chain.gather(mem, 0, form.header + form.most, bytes).is_err() {
        return Err(outside);
    }
    let start = (form.parse)(bytes, present).map_err(Unbelieved::Header)?;
    let (header, bitmap) = bytes.split_at(form.header);
    if is_still(mem, chain, form.header, bitmap) && is_still(mem, chain, 0, header) {
        Ok(start)
    } else {
        Err(Unbelieved::Torn)
    }
}

/// Whether the bytes of `chain` from `at` on are those of `copy` still. Read once more, a piece at a time.
pub(crate) fn is_still<M: GuestMemory>(mem: &M, chain: &Chain, at: usize, copy: &[u8]) -> bool {
    let mut again = Vec::new();
    copy.chunks(PIECE).enumerate().all(|(i, piece)| {
        let skip = (at + i * PIECE) as u64;
        chain.gather(mem, skip, piece.len(), &mut again).is_ok() && again == piece
    })
}

/// The bits that are set.
pub(crate) fn ones(bitmap: &[u8]) -> u64 {
    let (words, rest) = bitmap.as_chunks::<8>();
    let whole: u64 = words
        .iter()
        .map(|w| u64::from(u64::from_le_bytes(*w).count_ones()))
        .sum();
    whole + rest.iter().map(|b| u64::from(b.count_ones())).sum::<u64>()
}

/// The little-endian number of 16 bits at byte `at`.
pub(crate) fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

/// The little-endian number of 32 bits at byte `at`.
pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

/// The little-endian number of 64 bits at byte `at`.
pub(crate) fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..)?.first_chunk().copied()?))
}
