//! The guest's page allocator: buddies of order 0 to 10, as Linux has them, all of it in guest RAM.
//!
//! Invariants: a block is aligned to its size; no free block lies within another; two free buddies of an order below the
//! largest have been merged; the counts (which are not in RAM) equal the members of the trees.

use crate::ram::Ram;
use crate::tree::BitTree;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// The largest order: 4 MiB, Linux's `MAX_PAGE_ORDER`.
pub(crate) const MAX_ORDER: u32 = 10;

/// Orders that there are.
pub(crate) const ORDERS: usize = 11;

/// The order from which free blocks are reported (Linux's `pageblock_order`).
pub(crate) const REPORT_ORDER: u32 = 9;

/// The sets of frames that the kernel keeps in RAM.
#[derive(Clone, Debug)]
pub(crate) struct Trees {
    /// Free blocks by order, numbered in units of their size.
    pub(crate) free: [BitTree; ORDERS],
    /// Frames with content.
    pub(crate) used: BitTree,
    /// Frames in the balloon.
    pub(crate) balloon: BitTree,
    /// Blocks of the largest order that were handed over as hints.
    pub(crate) held: BitTree,
    /// Blocks of [`REPORT_ORDER`] that were reported and not allocated since.
    pub(crate) reported: BitTree,
}

impl Trees {
    /// The sets for `frames` frames at `address`, and how many bytes they take.
    pub(crate) fn new(address: u64, frames: u64) -> (Self, u64) {
        let mut at = address;
        let mut tree = |order: u32| {
            let (tree, bytes) = BitTree::new(at, frames >> order);
            at += bytes;
            tree
        };
        let mut order = 0;
        let trees = Trees {
            free: std::array::from_fn(|_| {
                order += 1;
                tree(order - 1)
            }),
            used: tree(0),
            balloon: tree(0),
            held: tree(MAX_ORDER),
            reported: tree(REPORT_ORDER),
        };
        (trees, at - address)
    }
}

/// The allocator. Frames in, frames out; what they are good for is the caller's.
#[derive(Clone, Debug)]
pub(crate) struct Buddy {
    free: [BitTree; ORDERS],
    counts: Counts,
}

/// Free blocks by order. Travels with the vCPU state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counts(pub(crate) [u64; ORDERS]);

impl Counts {
    /// Pages in all free blocks.
    pub(crate) fn pages(&self) -> u64 {
        let each = self.0.iter().enumerate();
        each.fold(0, |sum: u64, (order, n)| {
            sum.saturating_add(n.saturating_mul(1 << order))
        })
    }
}

impl Buddy {
    /// An allocator over trees that say what `counts` counts.
    pub(crate) fn new(trees: &Trees, counts: Counts) -> Self {
        Buddy {
            free: trees.free.clone(),
            counts,
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    pub(crate) fn free_pages(&self) -> u64 {
        self.counts.pages()
    }

    /// Takes the lowest block of the smallest order that will do; `None` if there is none.
    pub(crate) fn alloc(&mut self, ram: &Ram, order: u32) -> Result<Option<u64>> {
        for larger in order..=MAX_ORDER {
            if self.counts.0[larger as usize] == 0 {
                continue;
            }
            let frame = self.lowest(ram, larger)?;
            self.carve(ram, frame, larger, frame, order)?;
            return Ok(Some(frame));
        }
        Ok(None)
    }

    /// Takes in one go what the next calls for single pages would take, `most` pages at most: the beginning of the lowest
    /// block of the smallest order that there is. Its first frame and its order.
    pub(crate) fn alloc_some(&mut self, ram: &Ram, most: u64) -> Result<Option<(u64, u32)>> {
        let smallest = (0..=MAX_ORDER).find(|order| self.counts.0[*order as usize] > 0);
        let (Some(larger), Some(fits)) = (smallest, most.checked_ilog2()) else {
            return Ok(None);
        };
        let frame = self.lowest(ram, larger)?;
        let order = larger.min(fits);
        self.carve(ram, frame, larger, frame, order)?;
        Ok(Some((frame, order)))
    }

    /// The lowest block of this very order, of which some are counted.
    fn lowest(&self, ram: &Ram, order: u32) -> Result<u64> {
        let found = self.free[order as usize].next(ram, 0)?;
        let block = found.ok_or_else(|| {
            let count = self.counts.0[order as usize];
            Error::Corrupt(format!("no free block of order {order} where {count} are counted"))
        })?;
        Ok(block << order)
    }

    /// Takes this one block, out of whatever free block holds it; whether it was free.
    pub(crate) fn take(&mut self, ram: &Ram, frame: u64, order: u32) -> Result<bool> {
        for larger in order..=MAX_ORDER {
            if self.free[larger as usize].contains(ram, frame >> larger)? {
                self.carve(ram, frame >> larger << larger, larger, frame, order)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Takes `wanted` of order `order` out of the free block `block` of order `larger`; the rest stays free.
    fn carve(&mut self, ram: &Ram, block: u64, larger: u32, wanted: u64, order: u32) -> Result<()> {
        self.set(ram, block, larger, false)?;
        for half in (order..larger).rev() {
            let other = (wanted >> half ^ 1) << half;
            self.set(ram, other, half, true)?;
        }
        Ok(())
    }

    /// Gives a block back and merges it with its buddies.
    pub(crate) fn free(&mut self, ram: &Ram, frame: u64, order: u32) -> Result<()> {
        for larger in order..=MAX_ORDER {
            if self.free[larger as usize].contains(ram, frame >> larger)? {
                return Err(Error::Corrupt(format!(
                    "frame {frame:#x} of order {order} is freed twice"
                )));
            }
        }
        let (mut frame, mut order) = (frame, order);
        while order < MAX_ORDER {
            let buddy = frame ^ 1 << order;
            if !self.free[order as usize].contains(ram, buddy >> order)? {
                break;
            }
            self.set(ram, buddy, order, false)?;
            frame = frame.min(buddy);
            order += 1;
        }
        self.set(ram, frame, order, true)
    }

    /// Gives back `count` frames from `frame` on, in the largest blocks that fit.
    pub(crate) fn free_stretch(&mut self, ram: &Ram, frame: u64, count: u64) -> Result<()> {
        let (mut at, end) = (frame, frame + count);
        while at < end {
            let fits = (end - at).ilog2();
            let order = at.trailing_zeros().min(fits).min(MAX_ORDER);
            self.free(ram, at, order)?;
            at += 1 << order;
        }
        Ok(())
    }

    /// The first free block of this very order from `frame` on.
    pub(crate) fn next_free(&self, ram: &Ram, frame: u64, order: u32) -> Result<Option<u64>> {
        if self.counts.0[order as usize] == 0 {
            return Ok(None);
        }
        let found = self.free[order as usize].next(ram, frame.div_ceil(1 << order))?;
        Ok(found.map(|block| block << order))
    }

    /// Calls `each` with every free block and its order; allocates nothing and touches no free page.
    pub(crate) fn for_each_free(&self, ram: &Ram, mut each: impl FnMut(u64, u32) -> Result<()>) -> Result<()> {
        for order in 0..=MAX_ORDER {
            if self.counts.0[order as usize] > 0 {
                self.free[order as usize].for_each(ram, |block| each(block << order, order))?;
            }
        }
        Ok(())
    }

    fn set(&mut self, ram: &Ram, frame: u64, order: u32, free: bool) -> Result<()> {
        let tree = &self.free[order as usize];
        let block = frame >> order;
        let changed = if free {
            tree.insert(ram, block)?
        } else {
            tree.remove(ram, block)?
        };
        let count = &mut self.counts.0[order as usize];
        let counted = if free {
            count.checked_add(1)
        } else {
            count.checked_sub(1)
        };
        match counted {
            Some(n) if changed => *count = n,
            _ => {
                return Err(Error::Corrupt(format!(
                    "the free block at frame {frame:#x}, order {order}, is not as the allocator left it"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::{Backing, GuestMemory};
    use pages::Layout;
    use proptest::prelude::*;
    use std::sync::Arc;

    const FRAMES: u64 = 8192;

    fn fixture() -> (Ram, Buddy) {
        let layout = Arc::new(Layout::flat(4096).unwrap());
        let ram = Ram::new(Arc::new(GuestMemory::new(layout, &Backing::Anonymous).unwrap()));
        let (trees, _) = Trees::new(4096, FRAMES);
        (ram, Buddy::new(&trees, Counts::default()))
    }

    fn blocks(ram: &Ram, buddy: &Buddy) -> Vec<(u64, u32)> {
        let mut all = Vec::new();
        buddy
            .for_each_free(ram, |frame, order| {
                all.push((frame, order));
                Ok(())
            })
            .unwrap();
        all
    }

    #[test]
    fn what_is_taken_in_one_go_is_what_single_pages_would_be() {
        let (ram, mut singly) = fixture();
        let (ram_too, mut at_once) = fixture();
        for (buddy, ram) in [(&mut singly, &ram), (&mut at_once, &ram_too)] {
            buddy.free_stretch(ram, 3, 2000).unwrap();
            buddy.free_stretch(ram, 4095, 700).unwrap();
        }
        for count in [1, 2, 5, 64, 100, 1, 900, 3, 5000] {
            let mut got = Vec::new();
            while let Some((frame, order)) = at_once.alloc_some(&ram_too, count - got.len() as u64).unwrap() {
                got.extend(frame..frame + (1 << order));
            }
            let one_by_one: Vec<u64> = (0..count).map_while(|_| singly.alloc(&ram, 0).unwrap()).collect();
            assert_eq!(got, one_by_one);
            assert_eq!(blocks(&ram_too, &at_once), blocks(&ram, &singly));
        }
        assert_eq!(at_once.free_pages(), 0);
    }

    #[test]
    fn freed_neighbours_coalesce_up_to_order_10_and_no_further() {
        let (ram, mut buddy) = fixture();
        buddy.free_stretch(&ram, 0, 2048).unwrap();
        assert_eq!(blocks(&ram, &buddy), [(0, 10), (1024, 10)]);
        let got: Vec<u64> = (0..1024).map(|_| buddy.alloc(&ram, 0).unwrap().unwrap()).collect();
        assert_eq!(got, (0..1024).collect::<Vec<_>>());
        assert_eq!(blocks(&ram, &buddy), [(1024, 10)]);
        for frame in got.into_iter().rev() {
            buddy.free(&ram, frame, 0).unwrap();
        }
        assert_eq!(blocks(&ram, &buddy), [(0, 10), (1024, 10)]);
        assert_eq!(buddy.free_pages(), 2048);
    }

    #[test]
    fn odd_stretches_are_cut_into_aligned_blocks() {
        let (ram, mut buddy) = fixture();
        buddy.free_stretch(&ram, 3, 1024 + 7).unwrap();
        let mut all = blocks(&ram, &buddy);
        all.sort_unstable();
        let mut at = 3;
        for (frame, order) in all {
            assert_eq!((frame, frame % (1 << order)), (at, 0));
            at += 1 << order;
        }
        assert_eq!(at, 3 + 1024 + 7);
        assert_eq!(buddy.alloc(&ram, 10).unwrap(), None);
    }

    #[test]
    fn freeing_twice_is_caught_also_inside_a_larger_block() {
        let (ram, mut buddy) = fixture();
        buddy.free_stretch(&ram, 0, 1024).unwrap();
        assert!(matches!(buddy.free(&ram, 0, 10), Err(Error::Corrupt(_))));
        assert!(matches!(buddy.free(&ram, 5, 0), Err(Error::Corrupt(_))));
    }

    #[derive(Clone, Debug)]
    enum Op {
        Alloc(u32),
        Take(u64, u32),
        Free(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0..=MAX_ORDER).prop_map(Op::Alloc),
            (0..FRAMES, 0..=MAX_ORDER).prop_map(|(frame, order)| Op::Take(frame >> order << order, order)),
            any::<usize>().prop_map(Op::Free),
        ]
    }

    /// The free frames by themselves, one bool each; blocks are what merging as far as possible makes of them.
    fn merged(free: &[bool]) -> Vec<(u64, u32)> {
        let is_free = |frame: u64, order: u32| (frame..frame + (1 << order)).all(|f| free[usize::try_from(f).unwrap()]);
        let mut all = Vec::new();
        for order in 0..=MAX_ORDER {
            for frame in (0..FRAMES).step_by(1 << order) {
                let parent = frame >> (order + 1) << (order + 1);
                if is_free(frame, order) && (order == MAX_ORDER || !is_free(parent, order + 1)) {
                    all.push((frame, order));
                }
            }
        }
        all
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_allocator_agrees_with_an_oracle(
            start in 0..100u64, len in 1000..FRAMES - 100, ops in prop::collection::vec(op(), 1..60)
        ) {
            let (ram, mut buddy) = fixture();
            buddy.free_stretch(&ram, start, len).unwrap();
            let mut free: Vec<bool> = (0..FRAMES).map(|f| (start..start + len).contains(&f)).collect();
            let mut taken: Vec<(u64, u32)> = Vec::new();
            for op in ops {
                let (got, order) = match op {
                    Op::Alloc(order) => {
                        let possible = merged(&free).iter().any(|(_, o)| *o >= order);
                        let got = buddy.alloc(&ram, order).unwrap();
                        prop_assert_eq!(got.is_some(), possible);
                        (got, order)
                    }
                    Op::Take(frame, order) => {
                        let range = usize::try_from(frame).unwrap()..usize::try_from(frame + (1 << order)).unwrap();
                        let possible = free[range].iter().all(|f| *f);
                        let got = buddy.take(&ram, frame, order).unwrap();
                        prop_assert_eq!(got, possible);
                        (got.then_some(frame), order)
                    }
                    Op::Free(_) if taken.is_empty() => continue,
                    Op::Free(n) => {
                        let (frame, order) = taken.swap_remove(n % taken.len());
                        buddy.free(&ram, frame, order).unwrap();
                        for f in frame..frame + (1 << order) {
                            free[usize::try_from(f).unwrap()] = true;
                        }
                        (None, 0)
                    }
                };
                if let Some(frame) = got {
                    prop_assert_eq!(frame % (1 << order), 0);
                    for f in frame..frame + (1 << order) {
                        prop_assert!(std::mem::replace(&mut free[usize::try_from(f).unwrap()], false));
                    }
                    taken.push((frame, order));
                }
                prop_assert_eq!(blocks(&ram, &buddy), merged(&free));
                prop_assert_eq!(buddy.free_pages(), free.iter().filter(|f| **f).count() as u64);
            }
        }
    }
}
