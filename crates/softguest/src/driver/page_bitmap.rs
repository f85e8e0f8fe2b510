//! Page bitmaps, as inflate and deflate buffers of the `bitmap` and `bitmap-rfc` dialects and as answers of the misc queue.
//!
//! In `bitmap` there is one buffer for all of them: a header of 32 bytes, then the bitmap. In `bitmap-rfc` the fields lie
//! apart and are put together by a chain of five descriptors; their sizes are a 64-bit guest's own.

use super::virtqueue::Buffer;
use crate::Result;
use crate::mm::Mm;
use crate::quirks::Quirks;
use pages::{PageRange, Pfn};

/// Bytes of the header of the `bitmap` dialect.
pub(crate) const HEADER_BYTES: u64 = 32;

/// A bit stands for a page of 4 KiB.
const BITMAP_SHIFT: u16 = 12;

/// More windows follow, and none.
pub(crate) const CONT: u16 = 0;
pub(crate) const DONE: u16 = 1;

/// Where the fields of `bitmap-rfc` lie in their page: flags, first page, page shift, length.
const RFC_FIELDS: [(u64, u32); 4] = [(0, 8), (64, 8), (128, 4), (192, 8)];

/// Which pages of a window are meant.
#[derive(Debug)]
pub(crate) struct Bits {
    /// The page of bit 0.
    base: u64,
    words: Vec<u64>,
    /// The lowest page and the highest, if there is any.
    pub(crate) span: Option<(u64, u64)>,
}

impl Bits {
    /// No page of the `count` from `base` on.
    pub(crate) fn new(base: u64, count: u64) -> Self {
        let words = usize::try_from(count.div_ceil(64)).unwrap_or(0);
        Bits {
            base,
            words: vec![0; words],
            span: None,
        }
    }

    fn end(&self) -> u64 {
        self.base + self.words.len() as u64 * 64
    }

    /// Takes in those of the `count` pages from `pfn` on that are in the window.
    pub(crate) fn insert(&mut self, pfn: u64, count: u64) {
        let (first, end) = (pfn.max(self.base), pfn.saturating_add(count).min(self.end()));
        if first >= end {
            return;
        }
        let (low, high) = self.span.unwrap_or((first, end - 1));
        self.span = Some((low.min(first), high.max(end - 1)));
        let (mut at, end) = (first - self.base, end - self.base);
        while at < end {
            let here = (64 - at % 64).min(end - at);
            let mask = (u64::MAX >> (64 - here)) << (at % 64);
            if let Some(word) = usize::try_from(at / 64).ok().and_then(|i| self.words.get_mut(i)) {
                *word |= mask;
            }
            at += here;
        }
    }

    /// Takes in a word of bits, of which the first is page `pfn`, whatever it is a multiple of.
    pub(crate) fn insert_word(&mut self, pfn: u64, word: u64) {
        let mut rest = word;
        while rest != 0 {
            let first = u64::from(rest.trailing_zeros());
            let run = u64::from((rest >> first).trailing_ones());
            self.insert(pfn + first, run);
            rest &= !((u64::MAX >> (64 - run)) << first);
        }
    }

    /// The first `len` bytes from page `start` on, a multiple of 64 pages behind the first; a word has the guest's byte order.
    pub(crate) fn bytes(&self, start: u64, len: u64, big_endian: bool) -> Vec<u8> {
        let skip = usize::try_from((start - self.base) / 64).unwrap_or(usize::MAX);
        let len = usize::try_from(len).unwrap_or(0);
        let words = self.words.iter().skip(skip).take(len.div_ceil(8));
        let mut bytes: Vec<u8> = words
            .flat_map(|word| {
                if big_endian {
                    word.to_be_bytes()
                } else {
                    word.to_le_bytes()
                }
            })
            .collect();
        bytes.resize(len, 0);
        bytes
    }
}

/// The stretch of pages that a buffer covers: from the word of the lowest on, to the word of the highest. As in the posts the
/// end is the highest page itself, rounded up, so that one at a multiple of 64 is not in it.
pub(crate) fn covered(low: u64, high: u64, quirks: &Quirks) -> PageRange {
    let end = if quirks.drops_last_page { high } else { high + 1 };
    let start = low / 64 * 64;
    PageRange::between(Pfn(start), Pfn(end.next_multiple_of(64).max(start)))
}

/// What stands in front of a bitmap.
pub(crate) struct Header {
    /// `None`: what is there stays.
    pub(crate) flag: Option<u16>,
    pub(crate) req_id: u64,
    pub(crate) start_pfn: u64,
    pub(crate) bmap_len: u64,
}

impl Header {
    /// Writes it into the shared buffer.
    pub(crate) fn write(&self, mm: &Mm) -> Result<()> {
        let at = mm.places.bitmap;
        // GET_FREE_PAGES, or nothing at all on inflate and deflate.
        mm.ram.write(at, &0u16.to_le_bytes())?;
        mm.ram.write(at + 2, &BITMAP_SHIFT.to_le_bytes())?;
        if let Some(flag) = self.flag {
            mm.ram.write(at + 4, &flag.to_le_bytes())?;
        }
        mm.ram.write(at + 6, &0u16.to_le_bytes())?;
        for (i, value) in (1u64..).zip([self.req_id, self.start_pfn, self.bmap_len]) {
            mm.ram.write_u64(at + i * 8, value)?;
        }
        Ok(())
    }

    /// The shared buffer with this header.
    pub(crate) fn buffer(&self, mm: &Mm) -> Buffer {
        Buffer {
            address: mm.places.bitmap,
            len: u32::try_from(HEADER_BYTES + self.bmap_len).unwrap_or(u32::MAX),
            writable: false,
        }
    }
}

/// Writes the fields of a `bitmap-rfc` buffer and puts it together; `fields` is the page where they lie.
pub(crate) fn rfc_chain(mm: &Mm, fields: u64, start_pfn: u64, bmap_len: u64, big_endian: bool) -> Result<Vec<Buffer>> {
    let long = |value: u64| {
        if big_endian {
            value.to_be_bytes()
        } else {
            value.to_le_bytes()
        }
    };
    let shift = u32::from(BITMAP_SHIFT);
    let shift = if big_endian {
        shift.to_be_bytes()
    } else {
        shift.to_le_bytes()
    };
    let values: [&[u8]; 4] = [&long(0), &long(start_pfn), &shift, &long(bmap_len)];
    let mut chain = Vec::new();
    for ((offset, len), value) in RFC_FIELDS.into_iter().zip(values) {
        mm.ram.write(fields + offset, value)?;
        chain.push(Buffer {
            address: fields + offset,
            len,
            writable: false,
        });
    }
    chain.push(Buffer {
        address: mm.places.bitmap + HEADER_BYTES,
        len: u32::try_from(bmap_len).unwrap_or(u32::MAX),
        writable: false,
    });
    Ok(chain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_clipped_to_their_window_and_span_what_is_in_it() {
        let mut bits = Bits::new(128, 200);
        assert_eq!(bits.end(), 128 + 256, "whole words");
        bits.insert(0, 128);
        assert_eq!(bits.span, None);
        bits.insert(100, 30);
        bits.insert_word(190, 0b1101);
        bits.insert(383, 64);
        assert_eq!(bits.span, Some((128, 383)));
        let bytes = bits.bytes(128, 32, false);
        assert_eq!(
            (bytes[0], bytes[7], bytes[8], bytes[31]),
            (0b11, 0b0100_0000, 0b11, 0x80)
        );
        // Pages 190, 192 and 193 of the word at 190.
        let ones: u32 = bytes.iter().map(|byte| byte.count_ones()).sum();
        assert_eq!(ones, 2 + 3 + 1);
    }

    #[test]
    fn a_big_endian_guest_writes_its_words_the_other_way_round() {
        let mut bits = Bits::new(0, 128);
        bits.insert(64, 1);
        assert_eq!(bits.bytes(64, 8, false), [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bits.bytes(64, 8, true), [0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(bits.bytes(0, 9, false), [0, 0, 0, 0, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn quirk_08_a_last_page_at_a_multiple_of_64_is_not_covered() {
        let (posts, none) = (Quirks::default(), Quirks::none());
        let ends = |low, high, quirks: &Quirks| {
            let range = covered(low, high, quirks);
            (range.start().0, range.end().0)
        };
        assert_eq!(ends(70, 128, &posts), (64, 128));
        assert_eq!(ends(70, 128, &none), (64, 192));
        assert_eq!(ends(70, 129, &posts), (64, 192));
        assert_eq!(ends(128, 128, &posts), (128, 128), "alone it is nothing at all");
        assert_eq!(ends(0, 0, &posts), (0, 0));
        assert_eq!(ends(63, 63, &none), (0, 64));
    }
}
