//! What a balloon is configured with, and its configuration space (virtio 1.3, sections 5.5.3 and 5.5.4).

use crate::dialect::bitmap;
use crate::{Dialect, Error, Result};
use machine::BalloonConfig;
use pages::Layout;
use std::fmt;
use std::str::FromStr;

/// Feature bits. Bits 3 and 4 mean one thing in the `standard` dialect and another in the `bitmap` ones.
pub mod feature {
    /// A page may be used again only after the deflate buffer that names it was used.
    pub const MUST_TELL_HOST: u64 = 1 << 0;
    /// There is a statistics queue.
    pub const STATS_VQ: u64 = 1 << 1;
    /// The guest may take pages back when it is short of memory.
    pub const DEFLATE_ON_OOM: u64 = 1 << 2;
    /// `standard`: the guest hands over blocks of free pages during a migration.
    pub const FREE_PAGE_HINT: u64 = 1 << 3;
    /// `standard`: the guest tells what it fills free pages with.
    pub const PAGE_POISON: u64 = 1 << 4;
    /// `standard`: the guest reports free blocks all the time.
    pub const REPORTING: u64 = 1 << 5;
    /// `bitmap` dialects: inflate and deflate buffers carry a page bitmap.
    pub const PAGE_BITMAP: u64 = 1 << 3;
    /// `bitmap`: queue 3 carries requests to the guest and its answers.
    pub const MISC_VQ: u64 = 1 << 4;
    /// The device follows virtio 1. Always offered, always needed.
    pub const VERSION_1: u64 = 1 << 32;
}

/// What a balloon device is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The dialect that it speaks.
    pub dialect: Dialect,
    /// The device's own feature bits that it offers (see [`feature`]); `VERSION_1` is added.
    pub features: u64,
    /// When the memory of ballooned pages goes back to the host.
    pub discard: DiscardPolicy,
}

/// When the memory of pages that the guest puts into its balloon goes back to the host.
///
/// Whichever it is, the pages count as ballooned, and a migration may skip them. Free page reporting of the `standard`
/// dialect is another matter: it is for giving memory back, and always does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiscardPolicy {
    /// Never: the pages only become skippable for a migration. The safe one where buffers carry bitmaps: drivers of those
    /// dialects send bits again that are no longer true, and a page that is in use would lose what it holds.
    #[default]
    MarkOnly,
    /// At inflation. Right for `standard`. Where buffers carry bitmaps, what a driver says wrongly costs the guest what its pages
    /// hold, and two traits of the drivers of 2016 matter:
    ///
    /// - A silent deflate ([`crate::Balloon::may_deflate_silently`]): a page at a multiple of 64 leaves the balloon without a
    ///   word. With granules of 4 KiB nothing comes of it: a page is given back when it is named and was not in the balloon.
    ///   With granules of 2 MiB ([`crate::Discard::granule_pages`] = 512) the granule must not go back with that page in it once
    ///   the rest is inflated; so pages at multiples of 64 count only as far as the buffer that makes the granule whole names
    ///   them itself. A driver that names new pages alone, a few a buffer, therefore gives back little there.
    /// - A big-endian guest in the `bitmap` dialect: its header is right and its bitmap is words of its own byte order, so that
    ///   other pages are named than the guest gave up, and nothing tells that bitmap from a good one. So PAGE_BITMAP of that
    ///   dialect is refused on hosts where such a guest can run ([`crate::Error::ByteOrder`]), whatever the policy: under
    ///   `MarkOnly` a migration would skip those pages. (`bitmap-rfc` refuses such a guest by its header; answers of the misc
    ///   queue are refused by the id.)
    AtOnce,
}

impl DiscardPolicy {
    /// The policy's name in configurations: `mark` or `at-once`.
    pub fn name(self) -> &'static str {
        match self {
            DiscardPolicy::MarkOnly => "mark",
            DiscardPolicy::AtOnce => "at-once",
        }
    }
}

impl fmt::Display for DiscardPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DiscardPolicy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        [DiscardPolicy::MarkOnly, DiscardPolicy::AtOnce]
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| Error::UnknownDiscard(name.to_owned()))
    }
}

impl Config {
    /// A balloon of `dialect` that offers `features`, with the dialect's usual policy for discarding: at once where
    /// buffers name single pages (`standard`), mark only where they carry bitmaps.
    pub fn new(dialect: Dialect, features: u64) -> Self {
        let discard = match dialect {
            Dialect::Standard => DiscardPolicy::AtOnce,
            Dialect::Bitmap | Dialect::BitmapRfc => DiscardPolicy::MarkOnly,
        };
        Config {
            dialect,
            features,
            discard,
        }
    }

    /// What a migration compares of a machine's balloon; `None`: it has none.
    pub fn describe(config: Option<&Config>) -> BalloonConfig {
        BalloonConfig {
            dialect: config.map_or("off".to_owned(), |config| config.dialect.to_string()),
            features: config.map_or(0, |config| config.features),
        }
    }

    /// The balloon that a machine's description asks for, with the dialect's usual policy for discarding, which is each
    /// host's own affair. It comes from a peer; [`crate::Balloon::new`] checks what can be served.
    ///
    /// # Errors
    /// A dialect that nobody knows.
    pub fn from_description(description: &BalloonConfig) -> Result<Option<Config>> {
        match description.dialect.as_str() {
            "off" => Ok(None),
            name => Ok(Some(Config::new(name.parse()?, description.features))),
        }
    }

    /// Refuses bits that the dialect does not have, or that a guest of this layout cannot have.
    pub(crate) fn check(&self, layout: &Layout) -> Result<()> {
        let possible = self.dialect.offerable();
        let bits = self.features & !(possible | feature::VERSION_1);
        if bits != 0 {
            return Err(Error::Unofferable {
                dialect: self.dialect,
                bits,
                possible,
            });
        }
        if self.dialect == Dialect::Bitmap {
            bitmap::check_space(self.features, layout)?;
            bitmap::check_byte_order(self.features, bitmap::RUNS_BIG_ENDIAN)?;
        }
        Ok(())
    }

    /// All that is offered.
    pub(crate) fn offered(&self) -> u64 {
        self.features | feature::VERSION_1
    }

    /// The length of the configuration space, bytes: what the offered features need, as QEMU and Linux have it.
    pub(crate) fn space_len(&self) -> usize {
        match self.dialect {
            Dialect::Standard if self.features & feature::PAGE_POISON != 0 => 16,
            Dialect::Standard if self.features & feature::FREE_PAGE_HINT != 0 => 12,
            _ => 8,
        }
    }
}

/// Where a driver put a queue, as it told the transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueConfig {
    /// Entries; a power of two.
    pub size: u16,
    /// Guest-physical address of the descriptor table.
    pub desc: u64,
    /// Guest-physical address of the available ring.
    pub avail: u64,
    /// Guest-physical address of the used ring.
    pub used: u64,
    /// Whether the driver enabled it.
    pub ready: bool,
}

/// The fields of the configuration space that are not kept elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Space {
    /// Pages that the host wants in the balloon.
    pub(crate) num_pages: u32,
    /// Pages that the guest says are in it. The guest's to write, so worth nothing.
    pub(crate) actual: u32,
    /// What the guest fills free pages with.
    pub(crate) poison_val: u32,
}

impl Space {
    /// Reads `into.len()` bytes from `offset` on; what lies past `len` reads as zero.
    pub(crate) fn read(&self, hint_cmd_id: u32, len: usize, offset: u64, into: &mut [u8]) {
        let mut bytes = [0u8; 16];
        for (slot, value) in bytes
            .chunks_exact_mut(4)
            .zip([self.num_pages, self.actual, hint_cmd_id, self.poison_val])
        {
            slot.copy_from_slice(&value.to_le_bytes());
        }
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let there = bytes[..len].get(start..).unwrap_or(&[]);
        let n = there.len().min(into.len());
        into[..n].copy_from_slice(&there[..n]);
        into[n..].fill(0);
    }

    /// Writes `data` at `offset`: `actual` always, `poison_val` where it was negotiated. Whether every byte was the
    /// guest's to write.
    pub(crate) fn write(&mut self, poison_negotiated: bool, offset: u64, data: &[u8]) -> bool {
        let mut fields = [
            (4u64, &mut self.actual, true),
            (12, &mut self.poison_val, poison_negotiated),
        ];
        let mut taken = 0;
        for (at, field, allowed) in &mut fields {
            if !*allowed {
                continue;
            }
            let mut bytes = field.to_le_bytes();
            for (i, byte) in bytes.iter_mut().enumerate() {
                let from = (*at + i as u64)
                    .checked_sub(offset)
                    .and_then(|i| usize::try_from(i).ok());
                if let Some(new) = from.and_then(|i| data.get(i)) {
                    *byte = *new;
                    taken += 1;
                }
            }
            **field = u32::from_le_bytes(bytes);
        }
        taken == data.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(dialect: Dialect, features: u64) -> Config {
        Config::new(dialect, features)
    }

    #[test]
    fn case_37_the_space_is_as_long_as_the_offered_features_need() {
        use feature::*;
        let len = |features| config(Dialect::Standard, features).space_len();
        assert_eq!(len(0), 8);
        assert_eq!(len(STATS_VQ | DEFLATE_ON_OOM | REPORTING), 8);
        assert_eq!(len(FREE_PAGE_HINT), 12);
        assert_eq!(len(PAGE_POISON), 16);
        assert_eq!(len(FREE_PAGE_HINT | PAGE_POISON), 16);
        assert_eq!(config(Dialect::Bitmap, MISC_VQ | STATS_VQ).space_len(), 8);
    }

    #[test]
    fn configurations_that_cannot_be_served_are_refused() {
        let layout = Layout::flat(16384).unwrap();
        let check = |dialect, features| config(dialect, features).check(&layout);
        assert!(check(Dialect::Standard, 0x3f).is_ok());
        let refused = check(Dialect::Standard, 1 << 6);
        assert!(matches!(refused, Err(Error::Unofferable { bits: 0x40, .. })));
        assert!(check(Dialect::Bitmap, 0x1f).is_ok());
        let refused = check(Dialect::Bitmap, feature::REPORTING);
        assert!(matches!(refused, Err(Error::Unofferable { bits: 0x20, .. })));
        assert!(check(Dialect::BitmapRfc, 0xf).is_ok());
        let refused = check(Dialect::BitmapRfc, feature::MISC_VQ);
        assert!(matches!(refused, Err(Error::Unofferable { bits: 0x10, .. })));
    }

    #[test]
    fn names_of_policies_go_both_ways() {
        for policy in [DiscardPolicy::MarkOnly, DiscardPolicy::AtOnce] {
            assert_eq!(policy.to_string().parse::<DiscardPolicy>().unwrap(), policy);
        }
        let refused = "never".parse::<DiscardPolicy>().unwrap_err().to_string();
        assert!(
            refused.contains("\"never\"") && refused.contains("at-once"),
            "{refused}"
        );
        assert_eq!(DiscardPolicy::default(), DiscardPolicy::MarkOnly);
    }

    #[test]
    fn reads_past_the_end_are_zero_and_any_split_of_a_write_works() {
        let mut space = Space {
            num_pages: 0x0403_0201,
            ..Space::default()
        };
        let mut two = [0xff; 2];
        space.read(0xdead, 8, 1, &mut two);
        assert_eq!(two, [2, 3]);
        let mut past = [0xff; 8];
        space.read(0xdead, 8, 6, &mut past);
        assert_eq!(past, [0; 8]);
        space.read(0xdead, 8, u64::MAX, &mut past);
        assert_eq!(past, [0; 8]);
        assert!(space.write(false, 4, &[0xaa, 0xbb]));
        assert!(space.write(false, 6, &[0xcc, 0xdd]));
        assert_eq!(space.actual, 0xddcc_bbaa);
        assert!(!space.write(false, 12, &[1, 1, 1, 1]), "poison was not negotiated");
        assert_eq!(space.poison_val, 0);
        assert!(!space.write(true, 3, &[9, 9]), "num_pages is not the guest's");
        assert_eq!((space.num_pages, space.actual), (0x0403_0201, 0xddcc_bb09));
        assert!(!space.write(true, u64::MAX, &[9; 4]));
    }
}
