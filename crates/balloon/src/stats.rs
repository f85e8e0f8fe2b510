//! The statistics queue (virtio 1.3, section 5.5.6.3): the device holds one buffer of the guest, and returning it asks
//! for a fresh one.
//!
//! A buffer is packed pairs of a 16-bit tag and a 64-bit value. Invariant: at most one buffer is held.

use crate::queue::{Chain, Fate};
use serde::{Deserialize, Serialize};
use vm_memory::GuestMemory;

/// Bytes of a pair.
const PAIR: usize = 10;

/// The most pairs of a buffer that are read; Linux has 16 tags.
const MOST_PAIRS: usize = 64;

/// What the guest last said of its memory; `None` where it did not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Bytes swapped in (tag 0).
    pub swap_in: Option<u64>,
    /// Bytes swapped out (1).
    pub swap_out: Option<u64>,
    /// Major page faults (2).
    pub major_faults: Option<u64>,
    /// Minor page faults (3).
    pub minor_faults: Option<u64>,
    /// Bytes that no one uses (4).
    pub free_memory: Option<u64>,
    /// Bytes that the guest manages (5).
    pub total_memory: Option<u64>,
    /// Bytes that could be had without swapping (6).
    pub available_memory: Option<u64>,
    /// Bytes of file caches (7).
    pub disk_caches: Option<u64>,
    /// Huge pages allocated (8).
    pub hugetlb_allocations: Option<u64>,
    /// Huge page allocations that failed (9).
    pub hugetlb_failures: Option<u64>,
    /// Processes killed for want of memory (10).
    pub oom_kills: Option<u64>,
    /// Allocations that had to wait (11).
    pub alloc_stalls: Option<u64>,
    /// Pages scanned in the background (12).
    pub async_scans: Option<u64>,
    /// Pages scanned on behalf of an allocation (13).
    pub direct_scans: Option<u64>,
    /// Pages reclaimed in the background (14).
    pub async_reclaims: Option<u64>,
    /// Pages reclaimed on behalf of an allocation (15).
    pub direct_reclaims: Option<u64>,
}

impl Stats {
    /// Reads pairs; tags that are not known are skipped, a partial pair at the end is left out.
    fn parse(bytes: &[u8]) -> Self {
        let mut stats = Stats::default();
        for pair in bytes.chunks_exact(PAIR) {
            let (tag, value) = pair.split_at(2);
            let mut eight = [0; 8];
            eight.copy_from_slice(value);
            if let Some(field) = stats.field(u16::from_le_bytes([tag[0], tag[1]])) {
                *field = Some(u64::from_le_bytes(eight));
            }
        }
        stats
    }

    fn field(&mut self, tag: u16) -> Option<&mut Option<u64>> {
        Some(match tag {
            0 => &mut self.swap_in,
            1 => &mut self.swap_out,
            2 => &mut self.major_faults,
            3 => &mut self.minor_faults,
            4 => &mut self.free_memory,
            5 => &mut self.total_memory,
            6 => &mut self.available_memory,
            7 => &mut self.disk_caches,
            8 => &mut self.hugetlb_allocations,
            9 => &mut self.hugetlb_failures,
            10 => &mut self.oom_kills,
            11 => &mut self.alloc_stalls,
            12 => &mut self.async_scans,
            13 => &mut self.direct_scans,
            14 => &mut self.async_reclaims,
            15 => &mut self.direct_reclaims,
            _ => return None,
        })
    }
}

/// The device's side of the statistics queue.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StatsQueue {
    /// Head of the chain that is held.
    pub(crate) held: Option<u16>,
    /// What was last said.
    pub(crate) last: Option<Stats>,
}

impl StatsQueue {
    /// Takes a buffer; gives back the one that was held before, which a driver that keeps to the rules never causes.
    /// The third value is whether the buffer was malformed: it is held all the same, since returning it at once would
    /// ask for the next one.
    pub(crate) fn take<M: GuestMemory>(&mut self, mem: &M, chain: &Chain) -> (Fate, Option<u16>, bool) {
        let before = self.held.replace(chain.head);
        let mut bytes = Vec::new();
        let len = chain.readable_bytes();
        let readable = !chain.has_writable() && chain.gather(mem, 0, MOST_PAIRS * PAIR, &mut bytes).is_ok();
        if readable {
            self.last = Some(Stats::parse(&bytes));
        }
        let malformed = !readable || !len.is_multiple_of(PAIR as u64) || len > (MOST_PAIRS * PAIR) as u64;
        if malformed {
            tracing::debug!(len, readable, "malformed statistics buffer");
        }
        (Fate::Held, before, malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tag_has_a_name_of_its_own_and_unknown_ones_are_skipped() {
        let mut bytes = Vec::new();
        for tag in 0u16..20 {
            bytes.extend(tag.to_le_bytes());
            bytes.extend((u64::from(tag) + 100).to_le_bytes());
        }
        bytes.extend([4, 0, 1]);
        let mut stats = Stats::parse(&bytes);
        for tag in 0u16..16 {
            assert_eq!(*stats.field(tag).unwrap(), Some(u64::from(tag) + 100));
        }
        assert!(stats.field(16).is_none());
        assert_eq!(stats.free_memory, Some(104));
        assert_eq!(Stats::parse(&[]), Stats::default());
    }
}
