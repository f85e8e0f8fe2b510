//! Free page reporting (virtio 1.3, section 5.5.6.7): the guest's chains of device-writable buffers *are* free blocks,
//! which it holds until the chain is returned; their memory goes back to the host.
//!
//! With PAGE_POISON negotiated and `poison_val` other than 0, the guest expects to find its poison in the blocks when it
//! has them back. Memory that was given back reads as zero, so then nothing is discarded, as QEMU does.

use crate::counters::Counters;
use crate::device::Discard;
use crate::inflate::{give_back, push_joined, whole_granules};
use crate::queue::{Chain, Fate};
use pages::{Layout, PageRange};

/// Serves one chain. `keep` is whether the blocks must keep what they hold. `budget` is how many more pages are given back
/// for this kick: a guest that names the same block over and over must not hold the device up.
pub(crate) fn report(
    chain: &Chain,
    layout: &Layout,
    discard: &dyn Discard,
    keep: bool,
    budget: &mut u64,
    counters: &mut Counters,
) -> Fate {
    if chain.readable().next().is_some() {
        tracing::debug!("free page report with a device-readable descriptor skipped");
        counters.malformed += 1;
        return Fate::Used(0);
    }
    let mut ranges = Vec::new();
    for segment in chain.writable() {
        let Some(block) = PageRange::inside_bytes(segment.address, u64::from(segment.len)) else {
            counters.malformed += 1;
            continue;
        };
        for part in layout.clip(block) {
            counters.reported_pages += part.count();
            push_joined(&mut ranges, layout, whole_granules(part, discard.granule_pages()));
        }
    }
    if !keep {
        let within = ranges.iter().take_while(|range| {
            let left = budget.checked_sub(range.count());
            *budget = left.unwrap_or(*budget);
            left.is_some()
        });
        let within = within.count();
        if let Some(range) = ranges.get(within) {
            tracing::debug!(%range, "reported more than all of RAM in one go: not given back");
            counters.malformed += 1;
        }
        ranges.truncate(within);
        give_back(discard, &ranges, counters);
    }
    Fate::Used(0)
}
