//! The guest kernel's memory management: pages in use and what is expected of them, the balloon, blocks that were handed
//! over as hints.

use crate::buddy::{Buddy, Counts, MAX_ORDER, REPORT_ORDER};
use crate::config::GuestConfig;
use crate::content::{self, Expected, Page, mix};
use crate::frames::{Frames, Places};
use crate::ram::Ram;
use crate::{Error, Result};
use pages::{PAGE_BYTES, Pfn};
use serde::{Deserialize, Serialize};

/// A stream of random numbers (splitmix64).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`, which is not 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// What of memory management is not in RAM. Travels with the vCPU state.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MmState {
    pub(crate) free: Counts,
    pub(crate) used_pages: u64,
    pub(crate) balloon_pages: u64,
    pub(crate) held_blocks: u64,
    /// Sum over the used pages of what is expected of them.
    pub(crate) fingerprint: u64,
    pub(crate) next_version: u32,
}

/// Memory management.
#[derive(Debug)]
pub(crate) struct Mm {
    pub(crate) ram: Ram,
    pub(crate) frames: Frames,
    pub(crate) places: Places,
    pub(crate) buddy: Buddy,
    pub(crate) used_pages: u64,
    pub(crate) balloon_pages: u64,
    pub(crate) held_blocks: u64,
    pub(crate) fingerprint: u64,
    next_version: u32,
    pub(crate) seed: u64,
    pub(crate) init_on_alloc: bool,
    pub(crate) poison: Option<u8>,
    /// Where a guest that churns goes on.
    pub(crate) churn_at: u64,
}

/// How much is written at a time where a stretch is filled with one byte.
const CHUNK: usize = 64 << 10;

impl Mm {
    pub(crate) fn new(config: &GuestConfig, ram: Ram, state: &MmState) -> Result<Self> {
        let frames = Frames::new(&config.layout);
        let places = Places::new(&config.layout, &frames)?;
        let total = config.layout.total_pages();
        let held = state.held_blocks.saturating_mul(1 << MAX_ORDER);
        let parts = [
            state.free.pages(),
            state.used_pages,
            state.balloon_pages,
            held,
            places.reserved.count(),
        ];
        if parts.iter().fold(0, |sum: u64, n| sum.saturating_add(*n)) > total {
            return Err(Error::State(format!(
                "it accounts for more pages than the guest's {total}: {parts:?}"
            )));
        }
        Ok(Mm {
            buddy: Buddy::new(&places.trees, state.free),
            ram,
            frames,
            places,
            used_pages: state.used_pages,
            balloon_pages: state.balloon_pages,
            held_blocks: state.held_blocks,
            fingerprint: state.fingerprint,
            next_version: state.next_version,
            seed: config.seed,
            init_on_alloc: config.init_on_alloc,
            poison: config.poison,
            churn_at: 0,
        })
    }

    pub(crate) fn state(&self) -> MmState {
        MmState {
            free: self.buddy.counts(),
            used_pages: self.used_pages,
            balloon_pages: self.balloon_pages,
            held_blocks: self.held_blocks,
            fingerprint: self.fingerprint,
            next_version: self.next_version,
        }
    }

    /// Allocates a block, without taking anything back for it (`__GFP_NORETRY`). Zeroed with `init_on_alloc`.
    pub(crate) fn alloc_noretry(&mut self, order: u32) -> Result<Option<u64>> {
        let Some(frame) = self.buddy.alloc(&self.ram, order)? else {
            return Ok(None);
        };
        self.allocated(frame, order)?;
        Ok(Some(frame))
    }

    /// Allocates in one go what the next single pages would be, without taking anything back for it: the first frame and
    /// the order.
    pub(crate) fn alloc_some_noretry(&mut self, most: u64) -> Result<Option<(u64, u32)>> {
        let Some((frame, order)) = self.buddy.alloc_some(&self.ram, most)? else {
            return Ok(None);
        };
        self.allocated(frame, order)?;
        Ok(Some((frame, order)))
    }

    /// Allocates a block; takes hinted blocks back where there is no other memory, as Linux's shrinker does.
    pub(crate) fn alloc(&mut self, order: u32) -> Result<Option<u64>> {
        loop {
            let got = self.alloc_noretry(order)?;
            if got.is_some() || self.release_held(1)? == 0 {
                return Ok(got);
            }
        }
    }

    /// Allocates this very page; whether it was free.
    pub(crate) fn alloc_at(&mut self, frame: u64) -> Result<bool> {
        let got = self.buddy.take(&self.ram, frame, 0)?;
        if got {
            self.allocated(frame, 0)?;
        }
        Ok(got)
    }

    fn allocated(&mut self, frame: u64, order: u32) -> Result<()> {
        let first = frame >> REPORT_ORDER;
        for block in first..=(frame + (1 << order) - 1) >> REPORT_ORDER {
            self.places.trees.reported.remove(&self.ram, block)?;
        }
        if let Some(poison) = self.poison {
            self.check_poison(frame, order, poison)?;
        }
        if self.init_on_alloc {
            self.fill(frame, 1 << order, 0)?;
        }
        Ok(())
    }

    /// Frees a block; poisoned where the guest poisons.
    pub(crate) fn free(&mut self, frame: u64, order: u32) -> Result<()> {
        if let Some(poison) = self.poison {
            self.fill(frame, 1 << order, poison)?;
        }
        self.buddy.free(&self.ram, frame, order)
    }

    /// Frees `count` frames that follow each other, in the largest blocks that fit.
    pub(crate) fn free_run(&mut self, frame: u64, count: u64) -> Result<()> {
        let (mut at, end) = (frame, frame + count);
        while at < end {
            let order = at.trailing_zeros().min((end - at).ilog2()).min(MAX_ORDER);
            self.free(at, order)?;
            at += 1 << order;
        }
        Ok(())
    }

    /// What Linux calls "pagealloc: memory corruption": a free page that someone wrote.
    pub(crate) fn check_poison(&self, frame: u64, order: u32, poison: u8) -> Result<()> {
        let mut page: Page = [0; 4096];
        for frame in frame..frame + (1 << order) {
            let address = self.frames.address(frame)?;
            self.ram.read(address, &mut page)?;
            if let Some(at) = page.iter().position(|byte| *byte != poison) {
                return Err(Error::Page {
                    pfn: Pfn::of_address(address),
                    why: format!("byte {at} is {:#x} where a free page has poison {poison:#x}", page[at]),
                });
            }
        }
        Ok(())
    }

    /// Fills `count` frames of one stretch with a byte.
    pub(crate) fn fill(&self, frame: u64, count: u64, byte: u8) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let start = self.frames.address(frame)?;
        let end = start + count * PAGE_BYTES;
        let bytes = [byte; CHUNK];
        let mut at = start;
        while at < end {
            let left = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            self.ram.write(at, &bytes[..left])?;
            at += left as u64;
        }
        Ok(())
    }

    /// A version that no page has had for 4 billion writes.
    pub(crate) fn new_version(&mut self) -> u32 {
        self.next_version = self.next_version.wrapping_add(1);
        self.next_version
    }

    fn table(&self, frame: u64) -> u64 {
        self.places.table + frame * 8
    }

    pub(crate) fn expected(&self, frame: u64) -> Result<Option<Expected>> {
        Ok(Expected::from_word(self.ram.read_u64(self.table(frame))?))
    }

    /// Writes a page's content and its entry in the table; what it adds to the fingerprint. From several threads at once
    /// while booting, on frames of their own.
    pub(crate) fn write_content(&self, frame: u64, version: u32) -> Result<u64> {
        let address = self.frames.address(frame)?;
        let mut page: Page = [0; 4096];
        let zero = content::compose(&mut page, Pfn::of_address(address), version, self.seed);
        self.ram.write(address, &page)?;
        let expected = Expected { version, zero };
        self.ram.write_u64(self.table(frame), expected.to_word())?;
        Ok(expected.weight(frame))
    }

    /// Takes an allocated page into use, with content.
    pub(crate) fn start_using(&mut self, frame: u64) -> Result<()> {
        self.mark_used(frame)?;
        let version = self.new_version();
        let weight = self.write_content(frame, version)?;
        self.fingerprint = self.fingerprint.wrapping_add(weight);
        Ok(())
    }

    pub(crate) fn mark_used(&mut self, frame: u64) -> Result<()> {
        if !self.places.trees.used.insert(&self.ram, frame)? {
            return Err(Error::Corrupt(format!(
                "frame {frame:#x} is allocated and in use already"
            )));
        }
        self.used_pages += 1;
        Ok(())
    }

    /// Writes new content to a page in use.
    pub(crate) fn rewrite(&mut self, frame: u64) -> Result<()> {
        self.forget(frame)?;
        let version = self.new_version();
        let weight = self.write_content(frame, version)?;
        self.fingerprint = self.fingerprint.wrapping_add(weight);
        Ok(())
    }

    fn forget(&mut self, frame: u64) -> Result<()> {
        let expected = self.expected(frame)?;
        let expected =
            expected.ok_or_else(|| Error::Corrupt(format!("frame {frame:#x} is in use and not in the table")))?;
        self.fingerprint = self.fingerprint.wrapping_sub(expected.weight(frame));
        Ok(())
    }

    /// Stops using a page and frees it; its content stays where it is, as in any kernel.
    pub(crate) fn stop_using(&mut self, frame: u64) -> Result<()> {
        self.forget(frame)?;
        if !self.places.trees.used.remove(&self.ram, frame)? {
            return Err(Error::Corrupt(format!(
                "frame {frame:#x} is in the table and not in use"
            )));
        }
        self.used_pages = minus_one(self.used_pages, "used pages")?;
        self.ram.write_u64(self.table(frame), 0)?;
        self.free(frame, 0)
    }

    /// The first page in use from `frame` on, going round at the end.
    pub(crate) fn used_from(&self, frame: u64) -> Result<Option<u64>> {
        let used = &self.places.trees.used;
        match used.next(&self.ram, frame)? {
            Some(found) => Ok(Some(found)),
            None => used.next(&self.ram, 0),
        }
    }

    /// Notes an allocated page as being in the balloon.
    pub(crate) fn enter_balloon(&mut self, frame: u64) -> Result<()> {
        if !self.places.trees.balloon.insert(&self.ram, frame)? {
            return Err(Error::Corrupt(format!("frame {frame:#x} is in the balloon twice")));
        }
        self.balloon_pages += 1;
        Ok(())
    }

    /// Notes an allocated block as being in the balloon.
    pub(crate) fn enter_balloon_block(&mut self, frame: u64, order: u32) -> Result<()> {
        let end = frame + (1 << order);
        let mut at = frame;
        while at < end {
            let here = (64 - at % 64).min(end - at);
            let mask = (u64::MAX >> (64 - here)) << (at % 64);
            if !self.places.trees.balloon.insert_bits(&self.ram, at / 64 * 64, mask)? {
                return Err(Error::Corrupt(format!(
                    "a frame of the {here} from {at:#x} on is in the balloon twice"
                )));
            }
            self.balloon_pages += here;
            at += here;
        }
        Ok(())
    }

    /// Takes up to `most` pages out of the balloon's list, of one word of it; they stay allocated. The word's first frame,
    /// and which of its 64.
    pub(crate) fn leave_balloon_some(&mut self, most: u64) -> Result<Option<(u64, u64)>> {
        let Some((first, word)) = self.places.trees.balloon.take_bits(&self.ram, most)? else {
            return Ok(None);
        };
        let left = self.balloon_pages.checked_sub(u64::from(word.count_ones()));
        self.balloon_pages =
            left.ok_or_else(|| Error::Corrupt("there are more pages in the balloon than are counted".to_owned()))?;
        Ok(Some((first, word)))
    }

    /// Takes a page out of the balloon's list; the page stays allocated.
    pub(crate) fn leave_balloon(&mut self) -> Result<Option<u64>> {
        let Some(frame) = self.places.trees.balloon.next(&self.ram, 0)? else {
            return Ok(None);
        };
        self.places.trees.balloon.remove(&self.ram, frame)?;
        self.balloon_pages = minus_one(self.balloon_pages, "pages in the balloon")?;
        Ok(Some(frame))
    }

    /// Notes an allocated block of the largest order as handed over.
    pub(crate) fn hold(&mut self, frame: u64) -> Result<()> {
        if !self.places.trees.held.insert(&self.ram, frame >> MAX_ORDER)? {
            return Err(Error::Corrupt(format!("block {frame:#x} is handed over twice")));
        }
        self.held_blocks += 1;
        Ok(())
    }

    /// Frees up to `most` blocks that were handed over; how many.
    pub(crate) fn release_held(&mut self, most: u64) -> Result<u64> {
        let mut done = 0;
        while done < most && self.held_blocks > 0 {
            let found = self.places.trees.held.next(&self.ram, 0)?;
            let block =
                found.ok_or_else(|| Error::Corrupt("the list of hinted blocks is shorter than its count".into()))?;
            self.places.trees.held.remove(&self.ram, block)?;
            self.held_blocks -= 1;
            self.free(block << MAX_ORDER, MAX_ORDER)?;
            done += 1;
        }
        Ok(done)
    }
}

fn minus_one(count: u64, what: &str) -> Result<u64> {
    let less = count.checked_sub(1);
    less.ok_or_else(|| Error::Corrupt(format!("there are more {what} than are counted")))
}
