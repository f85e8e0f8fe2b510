//! Whether to ask the guest for its free pages: a decision with a reason, from what a look at RAM and balloon found.
//!
//! Asking costs. A driver that *looks* at its free lists costs next to nothing; one that *allocates* what it hands over
//! (mainline Linux) may zero every page of it (`init_on_alloc=1`), which writes all of the guest's free memory while
//! tracking is on. So the guest is asked when more memory is present in the host than the guest uses, by a margin that
//! depends on the driver; and what an allocating driver's first answers cost is watched ([`CostWatch`]).

use crate::{Ask, Peeked, Scanned};
use pages::{Layout, PAGE_BYTES, PageRange};

const MIB_PAGES: u64 = (1 << 20) / PAGE_BYTES;
/// A driver that looks is asked when so much may be gained.
const LOOKING_EXCESS: u64 = 16 * MIB_PAGES;
/// Without statistics, a driver that looks is asked when so much is present.
const LOOKING_PRESENT: u64 = 64 * MIB_PAGES;
/// A driver that allocates is asked when so much is known to be gained, and an eighth of what is present.
const ALLOCATING_EXCESS: u64 = 64 * MIB_PAGES;

/// The decision and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) ask: bool,
    pub(crate) why: String,
}

/// Decides.
pub(crate) fn decide(ask: Ask, skip_free: bool, scanned: &Scanned, layout: &Layout) -> Decision {
    let no = |why: &str| Decision {
        ask: false,
        why: why.to_owned(),
    };
    if !skip_free {
        return no("free pages are not to be skipped (--skip), so an answer could not be used");
    }
    if ask == Ask::Never {
        return no("it was not to be asked (--ask never)");
    }
    if let Err(reason) = &scanned.can_ask {
        return Decision {
            ask: false,
            why: format!("the guest cannot be asked: {reason}"),
        };
    }
    if ask == Ask::Always {
        return Decision {
            ask: true,
            why: "it was to be asked (--ask always)".to_owned(),
        };
    }
    can_pay(scanned, layout)
}

/// Whether asking can pay, from memory that is present and memory that the guest uses.
fn can_pay(scanned: &Scanned, layout: &Layout) -> Decision {
    let total = layout.total_pages();
    let in_balloon = scanned
        .ballooned
        .as_ref()
        .map_or(0, |b| b.intersection_count(&scanned.present));
    let present = scanned.present.count().saturating_sub(in_balloon);
    let (present_mib, total_mib) = (mib(present), mib(total));
    let Some(stats) = scanned.stats else {
        let (enough, why) = if scanned.allocates {
            let enough = present.saturating_mul(2) >= total;
            (
                enough,
                "its driver allocates what it hands over, so half of its RAM has to be present",
            )
        } else {
            (
                present >= LOOKING_PRESENT,
                "its driver only looks, so 64 MiB present are enough",
            )
        };
        let why = format!(
            "{present_mib} MiB of the guest's {total_mib} MiB are present and there are no statistics on what it uses; {why}"
        );
        return Decision { ask: enough, why };
    };
    let used = stats.total_pages.saturating_sub(stats.free_pages);
    let excess = present.saturating_sub(used);
    let needed = if scanned.allocates {
        ALLOCATING_EXCESS.max(present / 8)
    } else {
        LOOKING_EXCESS
    };
    let facts = format!(
        "the guest uses {} MiB and {present_mib} MiB of its memory is present",
        mib(used)
    );
    if excess >= needed {
        Decision {
            ask: true,
            why: format!("{facts}: up to {} MiB to gain", mib(excess)),
        }
    } else if excess < LOOKING_EXCESS {
        Decision {
            ask: false,
            why: format!("{facts}: nothing to gain"),
        }
    } else {
        let why = format!(
            "{facts}: {} MiB to gain, below the {} MiB that make up for a driver that allocates what it hands over",
            mib(excess),
            mib(needed)
        );
        Decision { ask: false, why }
    }
}

fn mib(pages: u64) -> u64 {
    pages / MIB_PAGES
}

/// Peeked answers after which the cost is known, and pages after which it is.
const ANSWERS_TO_JUDGE: u32 = 2;
const PAGES_TO_JUDGE: u64 = 4 * MIB_PAGES;

/// Watches whether an allocating guest writes the pages that it hands over.
#[derive(Clone, Debug)]
pub(crate) struct CostWatch {
    allocates: bool,
    watching: bool,
    asked: u32,
    answered: u32,
    peeked: u64,
    written: u64,
}

impl CostWatch {
    /// Watches a guest that allocates; one that looks costs nothing.
    pub(crate) fn new(allocates: bool) -> Self {
        CostWatch {
            allocates,
            watching: allocates,
            asked: 0,
            answered: 0,
            peeked: 0,
            written: 0,
        }
    }

    /// Whether the guest allocates what it hands over.
    pub(crate) fn allocates(&self) -> bool {
        self.allocates
    }

    /// What of an answered range to peek at, if anything.
    pub(crate) fn peek(&mut self, range: PageRange) -> Option<PageRange> {
        let worth = self.watching && self.asked < ANSWERS_TO_JUDGE && !range.is_empty();
        worth.then(|| {
            self.asked += 1;
            range.split_at(PAGES_TO_JUDGE).0
        })
    }

    /// Takes a result in; `Some` once, with the reason, if the guest turns out to write what it hands over.
    pub(crate) fn peeked(&mut self, peeked: &Peeked) -> Option<String> {
        if !self.watching {
            return None;
        }
        let Some(written) = peeked.written else {
            self.watching = false;
            return None;
        };
        self.answered += 1;
        self.peeked += peeked.range.count();
        self.written += written.min(peeked.range.count());
        if self.answered < ANSWERS_TO_JUDGE && self.peeked < PAGES_TO_JUDGE {
            return None;
        }
        self.watching = false;
        (self.written * 2 >= self.peeked).then(|| {
            let (written, peeked) = (self.written, self.peeked);
            format!(
                "the guest writes the pages it hands over (init_on_alloc=1): {written} of the first {peeked} were \
                 written since tracking began"
            )
        })
    }
}

#[cfg(test)]
#[path = "ask_tests.rs"]
mod tests;
