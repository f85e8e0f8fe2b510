//! Booting: the allocator is filled, memory is put in use, other memory is used and freed again.

use crate::buddy::{Counts, MAX_ORDER};
use crate::config::GuestConfig;
use crate::content::{self, Page, mix};
use crate::mm::{Mm, MmState, Rng};
use crate::ram::Ram;
use crate::{Error, Result};
use pages::{PAGE_BYTES, PageRange, Pfn};

/// Threads that fill memory.
const THREADS: usize = 2;

/// Tries to find a free page near a random place before the next best is taken.
const TRIES: u32 = 64;

/// A guest's memory as it is when init has come up.
pub(crate) fn boot(config: &GuestConfig, ram: Ram) -> Result<Mm> {
    let nothing = MmState {
        free: Counts::default(),
        used_pages: 0,
        balloon_pages: 0,
        held_blocks: 0,
        fingerprint: 0,
        next_version: 0,
    };
    let mut mm = Mm::new(config, ram, &nothing)?;
    give_memory(&mut mm)?;
    let mut rng = Rng(mix(config.seed));
    use_memory(&mut mm, config.used_bytes / PAGE_BYTES, config.scatter, &mut rng)?;
    age_memory(&mut mm, config.aged_bytes / PAGE_BYTES, &mut rng)?;
    Ok(mm)
}

/// Hands all of RAM but the kernel's own to the allocator. A kernel that poisons touches all of it here.
fn give_memory(mm: &mut Mm) -> Result<()> {
    let reserved = mm.places.reserved;
    let stretches: Vec<(u64, u64)> = mm.frames.stretches().collect();
    for (first, count) in stretches {
        let taken = match mm.frames.pfn(first) {
            Some(pfn) if pfn == reserved.start() => reserved.count(),
            _ => 0,
        };
        if let Some(poison) = mm.poison {
            mm.fill(first + taken, count - taken, poison)?;
        }
        mm.buddy.free_stretch(&mm.ram, first + taken, count - taken)?;
    }
    Ok(())
}

fn use_memory(mm: &mut Mm, pages: u64, scatter: f64, rng: &mut Rng) -> Result<()> {
    // Both are below 2^34, far within what a double holds exactly.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss
    )]
    let single = ((pages as f64 * scatter) as u64).min(pages);
    let mut frames = Vec::new();
    for done in 0..single {
        let frame = random_page(mm, rng)?.ok_or(Error::OutOfMemory {
            what: "scattered use",
            wanted: pages - done,
        })?;
        frames.push(frame);
    }
    for done in single..pages {
        let frame = mm.alloc(0)?.ok_or(Error::OutOfMemory {
            what: "contiguous use",
            wanted: pages - done,
        })?;
        frames.push(frame);
    }
    for frame in &frames {
        mm.mark_used(*frame)?;
    }
    let version = mm.new_version();
    let shared = &*mm;
    let sums = in_threads(&frames, |part| {
        populate_runs(shared, part)?;
        let weights = part.iter().map(|frame| shared.write_content(*frame, version));
        weights.sum::<Result<Wrapping>>()
    })?;
    mm.fingerprint = sums.iter().fold(mm.fingerprint, |sum, part| sum.wrapping_add(part.0));
    Ok(())
}

/// A sum that wraps, for `sum`.
struct Wrapping(u64);

impl std::iter::Sum<u64> for Wrapping {
    fn sum<I: Iterator<Item = u64>>(iter: I) -> Self {
        Wrapping(iter.fold(0, u64::wrapping_add))
    }
}

/// Allocates a page at a random place.
fn random_page(mm: &mut Mm, rng: &mut Rng) -> Result<Option<u64>> {
    for _ in 0..TRIES {
        let frame = rng.below(mm.frames.total());
        if mm.frames.pfn(frame).is_some() && mm.alloc_at(frame)? {
            return Ok(Some(frame));
        }
    }
    mm.alloc(0)
}

/// Uses `pages` pages and frees them again: their content stays, unless the kernel poisons.
fn age_memory(mm: &mut Mm, pages: u64, rng: &mut Rng) -> Result<()> {
    let mut blocks = Vec::new();
    let mut left = pages;
    while left > 0 {
        let mut order = left.ilog2().min(MAX_ORDER);
        let frame = loop {
            match (mm.alloc(order)?, order) {
                (Some(frame), _) => break frame,
                (None, 0) => {
                    return Err(Error::OutOfMemory {
                        what: "memory that was used before",
                        wanted: left,
                    });
                }
                _ => order -= 1,
            }
        };
        blocks.push((frame, order));
        left -= 1 << order;
    }
    let seed = rng.next();
    let shared = &*mm;
    in_threads(&blocks, |part| {
        let mut page: Page = [0; 4096];
        for (block, order) in part {
            populate(shared, *block, 1 << order)?;
            for frame in *block..*block + (1 << order) {
                content::noise(&mut page, seed ^ mix(frame));
                shared.ram.write(shared.frames.address(frame)?, &page)?;
            }
        }
        Ok(())
    })?;
    for (frame, order) in blocks {
        mm.free(frame, order)?;
    }
    Ok(())
}

/// Has the host back `count` frames from `frame` on in one go, cheaper than one fault a page.
fn populate(mm: &Mm, frame: u64, count: u64) -> Result<()> {
    let start = Pfn::of_address(mm.frames.address(frame)?);
    Ok(mm
        .ram
        .owner()
        .populate(PageRange::between(start, Pfn(start.0 + count)))?)
}

/// Populates runs of frames that follow each other; single ones are left to be touched.
fn populate_runs(mm: &Mm, frames: &[u64]) -> Result<()> {
    let runs = frames.chunk_by(|frame, next| *next == frame + 1 && next % (1 << MAX_ORDER) != 0);
    for run in runs.filter(|run| run.len() > 1) {
        populate(mm, run[0], run.len() as u64)?;
    }
    Ok(())
}

/// Does `work` on parts of `list` in threads.
fn in_threads<T: Sync, R: Send>(list: &[T], work: impl Fn(&[T]) -> Result<R> + Sync) -> Result<Vec<R>> {
    let part = list.len().div_ceil(THREADS).max(1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = list.chunks(part).map(|part| scope.spawn(|| work(part))).collect();
        let done = threads.into_iter().map(|thread| {
            let result = thread.join();
            result.unwrap_or_else(|_| Err(Error::Corrupt("a thread that filled memory panicked".to_owned())))
        });
        done.collect()
    })
}
