//! The guest's own look at its memory: every page that it uses, and a census of all of RAM.

use crate::buddy::MAX_ORDER;
use crate::content::{self, Page};
use crate::mm::Mm;
use crate::{Error, Result};
use pages::Pfn;

/// What a guest found that all is well with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SelfCheck {
    /// Pages in use, each read and found to be what was last written there.
    pub pages_checked: u64,
    /// Pages that the allocator holds free.
    pub free_pages: u64,
    /// How often the guest's clock has ticked since boot: it grows as long as the guest runs.
    pub ticks: u64,
}

/// Every frame may be counted once.
struct Census {
    seen: Vec<u64>,
    count: u64,
}

impl Census {
    fn count(&mut self, frame: u64, count: u64, what: &str) -> Result<()> {
        let mut at = frame;
        while at < frame + count {
            let here = (64 - at % 64).min(frame + count - at);
            let mask = (u64::MAX >> (64 - here)) << (at % 64);
            let word = usize::try_from(at / 64).ok().and_then(|i| self.seen.get_mut(i));
            let word =
                word.ok_or_else(|| Error::Corrupt(format!("frame {at:#x} is {what} and past the end of RAM")))?;
            if *word & mask != 0 {
                let frame = at / 64 * 64 + u64::from((*word & mask).trailing_zeros());
                return Err(Error::Corrupt(format!(
                    "frame {frame:#x} is {what} and something else at once"
                )));
            }
            *word |= mask;
            at += here;
        }
        self.count += count;
        Ok(())
    }
}

/// Checks all of it. `in_flight` are frames that the driver holds allocated without them being on any list.
pub(crate) fn check(mm: &Mm, in_flight: &[(u64, u32)]) -> Result<u64> {
    census(mm, in_flight)?;
    let (mut pages, mut sum) = (0, 0u64);
    let mut page: Page = [0; 4096];
    mm.places.trees.used.for_each(&mm.ram, |frame| {
        let address = mm.frames.address(frame)?;
        let pfn = Pfn::of_address(address);
        let expected = mm.expected(frame)?;
        let expected = expected.ok_or_else(|| Error::Page {
            pfn,
            why: "it is in use and the table does not know it".to_owned(),
        })?;
        mm.ram.read(address, &mut page)?;
        content::verify(&page, pfn, expected).map_err(|why| Error::Page { pfn, why })?;
        sum = sum.wrapping_add(expected.weight(frame));
        pages += 1;
        Ok(())
    })?;
    if sum != mm.fingerprint {
        return Err(Error::Corrupt(
            "what the table of pages expects is not what was last written: part of it is of an older moment".to_owned(),
        ));
    }
    Ok(pages)
}

fn census(mm: &Mm, in_flight: &[(u64, u32)]) -> Result<()> {
    let words = usize::try_from(mm.frames.total().div_ceil(64)).unwrap_or(0);
    let mut census = Census {
        seen: vec![0; words],
        count: 0,
    };
    let (mut free, mut used, mut balloon, mut held) = (crate::buddy::Counts::default(), 0u64, 0u64, 0u64);
    mm.buddy.for_each_free(&mm.ram, |frame, order| {
        free.0[order as usize] += 1;
        mm.frames.address(frame)?;
        mm.frames.address(frame + (1 << order) - 1)?;
        if let Some(poison) = mm.poison {
            mm.check_poison(frame, order, poison)?;
        }
        census.count(frame, 1 << order, "free")
    })?;
    let trees = &mm.places.trees;
    trees.used.for_each(&mm.ram, |frame| {
        used += 1;
        census.count(frame, 1, "in use")
    })?;
    trees.balloon.for_each(&mm.ram, |frame| {
        balloon += 1;
        census.count(frame, 1, "in the balloon")
    })?;
    trees.held.for_each(&mm.ram, |block| {
        held += 1;
        census.count(block << MAX_ORDER, 1 << MAX_ORDER, "handed over as free")
    })?;
    for (frame, order) in in_flight {
        census.count(*frame, 1 << order, "on its way to or from the device")?;
    }
    let reserved = mm.frames.frame(mm.places.reserved.start());
    let reserved = reserved.ok_or_else(|| Error::Corrupt("the kernel lies outside RAM".to_owned()))?;
    census.count(reserved, mm.places.reserved.count(), "the kernel's")?;
    let counted = (mm.buddy.counts(), mm.used_pages, mm.balloon_pages, mm.held_blocks);
    if (free, used, balloon, held) != counted {
        return Err(Error::Corrupt(format!(
            "free blocks, used pages, ballooned pages and hinted blocks are {:?}, counted were {counted:?}",
            (free, used, balloon, held)
        )));
    }
    let total: u64 = mm.frames.stretches().map(|(_, count)| count).sum();
    if census.count != total {
        return Err(Error::Corrupt(format!(
            "{} of {total} pages are accounted for: the others leaked",
            census.count
        )));
    }
    Ok(())
}
