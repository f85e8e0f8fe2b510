//! Bitmaps as guests, kernels and files hold them: little-endian, least significant bit of byte 0 first.

use super::PageSet;
use super::node::{Bits, bits_between};
use crate::{Layout, PageRange, Pfn};
use std::sync::Arc;

/// Why a bitmap does not fit its layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a bitmap of {pages} pages has {expected} bytes; this one has {got}")]
pub struct BitmapError {
    /// Pages of the layout.
    pub pages: u64,
    /// Bytes that a bitmap of them has.
    pub expected: u64,
    /// Bytes that were there.
    pub got: u64,
}

impl PageSet {
    /// The set that a bitmap in RAM order stands for (bit `i` is the page at [`Layout::pfn_at`]`(i)`). Its length must
    /// be `total_pages / 8` bytes, rounded up; bits past the last page are ignored.
    pub fn from_bitmap(layout: &Arc<Layout>, bitmap: &[u8]) -> Result<Self, BitmapError> {
        let expected = layout.total_pages().div_ceil(8);
        if bitmap.len() as u64 != expected {
            return Err(BitmapError {
                pages: layout.total_pages(),
                expected,
                got: bitmap.len() as u64,
            });
        }
        let mut set = PageSet::empty(layout);
        let mut index = 0;
        for region in layout.regions() {
            set.insert_bits(*region, bitmap, index);
            index += region.count();
        }
        Ok(set)
    }

    /// The set as a bitmap in RAM order, `total_pages / 8` bytes rounded up, the bits past the last page clear.
    pub fn to_bitmap(&self) -> Vec<u8> {
        let bytes = self.layout.total_pages().div_ceil(8);
        let mut bitmap = vec![0u8; usize::try_from(bytes).unwrap_or(usize::MAX)];
        for run in self.runs() {
            let Some(first) = self.layout.index_of(run.start()) else {
                continue;
            };
            set_bits(&mut bitmap, first, first + run.count());
        }
        bitmap
    }

    /// Puts in the pages that a bitmap by frame number names: bit `i` is page `start + i`. Bits that name no RAM are
    /// ignored. How many pages were new.
    pub fn insert_bitmap(&mut self, start: Pfn, bitmap: &[u8]) -> u64 {
        let bits = bitmap.len() as u64 * 8;
        let end = Pfn(start.0.saturating_add(bits));
        let layout = Arc::clone(&self.layout);
        let mut new = 0;
        for part in layout.clip(PageRange::between(start, end)) {
            new += self.insert_bits(part, bitmap, part.start().0 - start.0);
        }
        new
    }

    /// Puts in the pages of `part` (of one region) whose bits, from bit `first` of `bitmap` on, are set. Word by word.
    fn insert_bits(&mut self, part: PageRange, bitmap: &[u8], first: u64) -> u64 {
        let (mut new, mut done) = (0, 0);
        while done < part.count() {
            let Some(at) = self.place(Pfn(part.start().0 + done)) else {
                break;
            };
            let bit = at.at % 64;
            let room = (64 - bit).min(part.count() - done);
            let bits = (bits_at(bitmap, first + done) & bits_between(0, room)) << bit;
            new += self.groups[at.group].insert_word(at.at - bit, bits, at.valid);
            done += room;
        }
        new
    }
}

/// The 64 bits of `bitmap` from bit `at` on; what lies past its end is clear.
fn bits_at(bitmap: &[u8], at: u64) -> u64 {
    let byte = usize::try_from(at / 8).unwrap_or(usize::MAX);
    let shift = at % 8;
    let mut sixteen = [0u8; 16];
    let tail = bitmap.get(byte..).unwrap_or(&[]);
    let n = tail.len().min(9);
    sixteen[..n].copy_from_slice(&tail[..n]);
    // The low 64 bits are what is wanted.
    #[expect(clippy::cast_possible_truncation)]
    let bits = (u128::from_le_bytes(sixteen) >> shift) as u64;
    bits
}

/// Sets bits `from..to` of `bitmap`, which reaches at least to `to`.
fn set_bits(bitmap: &mut [u8], from: u64, to: u64) {
    let mut at = from;
    while at < to {
        let Ok(byte) = usize::try_from(at / 8) else { return };
        if at.is_multiple_of(8) && to - at >= 8 {
            let whole = usize::try_from((to - at) / 8).unwrap_or(0);
            bitmap[byte..byte + whole].fill(0xff);
            at += whole as u64 * 8;
        } else {
            bitmap[byte] |= 1 << (at % 8);
            at += 1;
        }
    }
}
