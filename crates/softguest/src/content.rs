//! What the guest's pages hold: about a fifth of them only zeroes, half of them something that compresses, the rest not.
//!
//! Every page but the zero ones starts with a header of 24 bytes: its number u64, version u32, kind u32, and the
//! xxh3-64 of the rest, seeded with the first three. Little-endian.

use pages::Pfn;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A page's bytes.
pub(crate) type Page = [u8; 4096];

const HEADER: usize = 24;

/// A stream of random words: xorshift, eight at a time, which the compiler turns into wide instructions.
#[derive(Clone, Debug)]
struct Lanes([u64; 8]);

impl Lanes {
    fn new(seed: u64) -> Self {
        let mut at = seed;
        Lanes(std::array::from_fn(|_| {
            at = at.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(at) | 1
        }))
    }

    fn next(&mut self) -> &[u64; 8] {
        for lane in &mut self.0 {
            *lane ^= *lane << 13;
            *lane ^= *lane >> 7;
            *lane ^= *lane << 17;
        }
        &self.0
    }
}

/// Spreads a number's bits over all 64 (the finalizer of splitmix64).
pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// Fills with random bytes.
pub(crate) fn noise(page: &mut Page, seed: u64) {
    let mut lanes = Lanes::new(seed);
    for line in page.chunks_exact_mut(64) {
        for (slot, word) in line.chunks_exact_mut(8).zip(lanes.next()) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// Fills with lines of 64 bytes out of eight, as repetitive as program data is.
fn text(page: &mut Page, seed: u64) {
    let mut lanes = Lanes::new(seed);
    let mut lines = [[0u8; 64]; 8];
    for line in &mut lines {
        for (slot, word) in line.chunks_exact_mut(8).zip(lanes.next()) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
    }
    let mut choice = seed;
    for line in page.chunks_exact_mut(64) {
        choice = choice
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        line.copy_from_slice(&lines[(choice >> 61) as usize]);
    }
}

/// What is expected of a page: a word of the table in RAM. 0 stands for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    /// How often the page was written since the guest booted, wrapping.
    pub(crate) version: u32,
    /// Whether it holds zeroes only.
    pub(crate) zero: bool,
}

impl Expected {
    const USED: u64 = 1 << 32;
    const ZERO: u64 = 1 << 33;

    pub(crate) fn to_word(self) -> u64 {
        u64::from(self.version) | Self::USED | if self.zero { Self::ZERO } else { 0 }
    }

    pub(crate) fn from_word(word: u64) -> Option<Self> {
        let known = word & !(Self::USED | Self::ZERO) <= u64::from(u32::MAX);
        (word & Self::USED != 0 && known).then_some(Expected {
            version: low(word),
            zero: word & Self::ZERO != 0,
        })
    }

    /// What this adds to the sum over all pages that travels outside RAM.
    pub(crate) fn weight(self, frame: u64) -> u64 {
        mix(mix(frame.wrapping_add(1)).wrapping_add(self.to_word()))
    }
}

/// The low 32 bits.
pub(crate) fn low(word: u64) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "the low half is what is asked for")]
    let low = word as u32;
    low
}

/// Makes the content of version `version` of a page; whether it is all zero.
pub(crate) fn compose(page: &mut Page, pfn: Pfn, version: u32, seed: u64) -> bool {
    let random = mix(seed ^ mix(pfn.0 << 32 ^ u64::from(version)));
    let kind: u32 = match random % 10 {
        0 | 1 => {
            page.fill(0);
            return true;
        }
        2..=6 => {
            text(page, random);
            1
        }
        _ => {
            noise(page, random);
            2
        }
    };
    page[..8].copy_from_slice(&pfn.0.to_le_bytes());
    page[8..12].copy_from_slice(&version.to_le_bytes());
    page[12..16].copy_from_slice(&kind.to_le_bytes());
    let sum = checksum(page);
    page[16..HEADER].copy_from_slice(&sum.to_le_bytes());
    false
}

fn checksum(page: &Page) -> u64 {
    let seed = mix(word(page, 0)) ^ word(page, 8);
    xxh3_64_with_seed(&page[HEADER..], seed)
}

fn word(page: &Page, at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&page[at..at + 8]);
    u64::from_le_bytes(bytes)
}

/// Holds a page against what is expected of it; what is wrong, if anything is.
pub(crate) fn verify(page: &Page, pfn: Pfn, expected: Expected) -> std::result::Result<(), String> {
    if expected.zero {
        return match page.iter().position(|byte| *byte != 0) {
            None => Ok(()),
            Some(at) => Err(format!(
                "byte {at} is {:#x} where the page should be all zero",
                page[at]
            )),
        };
    }
    let (number, version) = (word(page, 0), low(word(page, 8)));
    if number != pfn.0 {
        return Err(format!("it says that it is page {number:#x}"));
    }
    if version != expected.version {
        return Err(format!(
            "it holds version {version}, the last one written is {}",
            expected.version
        ));
    }
    let (said, is) = (word(page, 16), checksum(page));
    if said != is {
        return Err(format!("its checksum is {is:#x} and should be {said:#x}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_flipped_byte_and_any_other_page_or_version_is_noticed() {
        let mut page = [0; 4096];
        let pfn = Pfn(77);
        for version in 0..40 {
            let zero = compose(&mut page, pfn, version, 5);
            let expected = Expected { version, zero };
            assert_eq!(verify(&page, pfn, expected), Ok(()));
            for at in (0..4096).step_by(113).chain([0, 8, 12, 15, 16, 23, 24, 4095]) {
                page[at] ^= 0x10;
                assert!(verify(&page, pfn, expected).is_err(), "version {version}, byte {at}");
                page[at] ^= 0x10;
            }
            if !zero {
                assert!(verify(&page, Pfn(78), expected).is_err());
                assert!(
                    verify(
                        &page,
                        pfn,
                        Expected {
                            version: version + 1,
                            zero
                        }
                    )
                    .is_err()
                );
                assert!(verify(&page, pfn, Expected { version, zero: true }).is_err());
            }
        }
    }

    #[test]
    fn contents_are_mixed_as_promised() {
        let mut page = [0; 4096];
        let (mut zero, mut text) = (0, 0);
        for n in 0..1000 {
            if compose(&mut page, Pfn(n), 1, 9) {
                zero += 1;
            } else if page[12] == 1 {
                text += 1;
            }
        }
        assert!((150..250).contains(&zero), "{zero}");
        assert!((430..570).contains(&text), "{text}");
    }

    #[test]
    fn table_words_are_parsed_strictly() {
        let expected = Expected { version: 7, zero: true };
        assert_eq!(Expected::from_word(expected.to_word()), Some(expected));
        assert_eq!(Expected::from_word(0), None);
        assert_eq!(Expected::from_word(7), None);
        assert_eq!(Expected::from_word(expected.to_word() | 1 << 40), None);
    }
}
