//! What the guest does all day, in slices of time.

use crate::Result;
use crate::config::Workload;
use crate::mm::{Mm, Rng};
use std::time::Duration;

/// Page writes a second of an idle guest.
const IDLE_RATE: u64 = 300;

/// Pages written, allocated or freed a second by a compiler run.
const COMPILE_RATE: u64 = 20_000;

/// A vCPU that was held up does not catch up on more than this.
const MOST_AT_ONCE: Duration = Duration::from_millis(50);

/// The pages that an idle guest comes back to all the time.
const HOT_PAGES: u64 = 32;

/// One vCPU's share of a workload.
#[derive(Debug)]
pub(crate) struct Share {
    workload: Workload,
    vcpus: u64,
    /// Billionths of a page write that are owed: pages a second times nanoseconds.
    owed: u128,
}

impl Share {
    pub(crate) fn new(workload: Workload, vcpus: u32) -> Self {
        Share {
            workload,
            vcpus: u64::from(vcpus),
            owed: 0,
        }
    }

    /// How long a vCPU sleeps between slices.
    pub(crate) fn tick(&self) -> Duration {
        match self.workload {
            Workload::Idle => Duration::from_millis(10),
            Workload::Churn { .. } | Workload::Compile => Duration::from_millis(1),
        }
    }

    /// Does what is due after `elapsed`. `base` is how many pages a guest of this kind settles at.
    pub(crate) fn run(&mut self, mm: &mut Mm, rng: &mut Rng, base: u64, elapsed: Duration) -> Result<()> {
        let rate = match self.workload {
            Workload::Idle => IDLE_RATE,
            Workload::Churn { pages_per_s } => pages_per_s,
            Workload::Compile => COMPILE_RATE,
        };
        self.owed += elapsed.min(MOST_AT_ONCE).as_nanos() * u128::from(rate);
        let each = 1_000_000_000 * u128::from(self.vcpus);
        let mut left = u64::try_from(self.owed / each).unwrap_or(0);
        self.owed %= each;
        while left > 0 {
            let done = match self.workload {
                Workload::Idle => idle(mm, rng)?,
                Workload::Churn { .. } => rewrite_next(mm)?,
                Workload::Compile => compile(mm, rng, base)?,
            };
            left = left.saturating_sub(done);
        }
        Ok(())
    }
}

/// Rewrites the pages in use in turn, so that as many pages get dirty as are written, until it has been round.
fn rewrite_next(mm: &mut Mm) -> Result<u64> {
    if let Some(frame) = mm.used_from(mm.churn_at)? {
        mm.churn_at = frame + 1;
        mm.rewrite(frame)?;
    }
    Ok(1)
}

fn rewrite_any(mm: &mut Mm, rng: &mut Rng) -> Result<u64> {
    let from = rng.below(mm.frames.total());
    if let Some(frame) = mm.used_from(from)? {
        mm.rewrite(frame)?;
    }
    Ok(1)
}

/// Half of the writes go to a few pages, the others anywhere; now and then a page is written twice in a row.
fn idle(mm: &mut Mm, rng: &mut Rng) -> Result<u64> {
    if rng.below(2) == 0 {
        return rewrite_any(mm, rng);
    }
    let Some(first) = mm.used_from(0)? else {
        return Ok(1);
    };
    let Some(frame) = mm.used_from(first + rng.below(HOT_PAGES))? else {
        return Ok(1);
    };
    mm.rewrite(frame)?;
    if rng.below(4) > 0 {
        return Ok(1);
    }
    mm.rewrite(frame)?;
    Ok(2)
}

/// Allocates a file's worth of pages, or frees some, or rewrites one; stays within a fifth of where it began.
fn compile(mm: &mut Mm, rng: &mut Rng, base: u64) -> Result<u64> {
    let burst = 1 + rng.below(16);
    match rng.below(5) {
        0 | 1 if mm.used_pages < base + base / 5 + 64 => {
            for _ in 0..burst {
                // A guest that is out of memory makes do with what it has.
                let Some(frame) = mm.alloc(0)? else { break };
                mm.start_using(frame)?;
            }
        }
        2 | 3 if mm.used_pages > base - base / 5 => {
            let mut from = rng.below(mm.frames.total());
            for _ in 0..burst {
                let Some(frame) = mm.used_from(from)? else { break };
                mm.stop_using(frame)?;
                from = frame + 1;
            }
        }
        _ => {
            rewrite_any(mm, rng)?;
            return Ok(1);
        }
    }
    Ok(burst)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GuestConfig, boot::boot, ram::Ram};
    use memory::{Backing, GuestMemory};
    use pages::Layout;
    use std::sync::Arc;

    #[test]
    fn churn_dirties_as_many_pages_as_it_writes_though_most_memory_is_free() {
        const USED: u64 = 1000;
        let layout = Arc::new(Layout::flat(1 << 16).unwrap());
        let ram = Arc::new(GuestMemory::new(Arc::clone(&layout), &Backing::Anonymous).unwrap());
        let config = GuestConfig {
            used_bytes: USED << 12,
            scatter: 0.1,
            ..GuestConfig::new(layout)
        };
        let mut mm = boot(&config, Ram::new(ram)).unwrap();
        let contents = |mm: &Mm| -> Vec<u64> {
            let (mut found, mut from) = (Vec::new(), 0);
            while let Some(frame) = mm.used_from(from).unwrap().filter(|frame| *frame >= from) {
                found.push(mm.expected(frame).unwrap().unwrap().weight(frame));
                from = frame + 1;
            }
            found
        };
        let before = contents(&mm);
        assert_eq!(before.len() as u64, USED);
        let mut share = Share::new(Workload::Churn { pages_per_s: 100_000 }, 1);
        for (ms, rewritten) in [(4, 400), (6, 1000), (5, 1000)] {
            share
                .run(&mut mm, &mut Rng(1), USED, Duration::from_millis(ms))
                .unwrap();
            let changed = before.iter().zip(contents(&mm)).filter(|(old, new)| **old != *new);
            assert_eq!(changed.count(), rewritten, "after {ms} ms more");
        }
    }
}
