//! The guest's balloon driver: what drivers/virtio/virtio_balloon.c does for the `standard` dialect, and what the patches
//! of 2016 do for the `bitmap` one.
//!
//! Nothing here blocks: where Linux sleeps until the device has used a buffer, [`Driver::step`] returns, so a guest can
//! be paused, saved and restored at any point. All queues lie in guest RAM; what is not in RAM travels with the guest's
//! state and is checked when it comes back ([`Driver::check`]).

mod bitmap;
mod inflate;
mod page_bitmap;
mod reporting;
mod standard;
mod stats;
mod virtqueue;

use crate::frames::{QUEUE_SIZE, QUEUES};
use crate::hooks::{Hooks, Work};
use crate::mm::Mm;
use crate::platform::{Irqs, Platform};
use crate::quirks::Quirks;
use crate::ram::Ram;
use crate::{Error, Result};
use balloon::{Dialect, QueueConfig, SharedBalloon, feature};
pub(crate) use bitmap::Alive;
use bitmap::Misc;
use inflate::{Manner, Transfer};
use reporting::Reporting;
use serde::{Deserialize, Serialize};
use standard::Hinting;
use stats::Statistics;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Offsets in the configuration space.
const NUM_PAGES: u64 = 0;
const ACTUAL: u64 = 4;
const CMD_ID: u64 = 8;
const POISON_VAL: u64 = 12;

/// How the driver reaches its device.
#[derive(Clone)]
pub(crate) struct Ports {
    pub(crate) device: SharedBalloon<Ram>,
    pub(crate) platform: Arc<Platform>,
    pub(crate) hooks: Arc<dyn Hooks>,
}

impl Ports {
    fn config(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.device.lock().read_config(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn set_config(&self, offset: u64, value: u32) {
        self.device.lock().write_config(offset, &value.to_le_bytes());
    }

    /// Does `act`, and says how long it took.
    fn timed<T>(&self, work: Work, act: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = act();
        self.hooks.worked(work, began.elapsed());
        done
    }

    /// Rings, and goes on at once: an ioeventfd.
    fn kick(&self, queue: u16) {
        self.platform.ring(queue);
    }

    /// Rings, and goes on once the device has looked: a write that exits to the VMM. The buffer that the `bitmap`
    /// dialect's answers share needs it.
    fn kick_and_wait(&self, queue: u16) {
        self.platform.ring(queue);
        self.platform.drain();
    }
}

/// When to look again where no interrupt comes before; `None` for never.
pub(crate) type Later = Option<Duration>;

fn sooner(one: Later, other: Later) -> Later {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

/// Which queue does what, for a set of features: numbers are compacted over the features in use in the `standard`
/// dialect, and fixed in the `bitmap` one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    stats: Option<u16>,
    hints: Option<u16>,
    reports: Option<u16>,
    misc: Option<u16>,
    queues: u16,
}

impl Plan {
    fn new(dialect: Dialect, features: u64) -> Self {
        let has = |bit: u64| features & bit != 0;
        if dialect != Dialect::Standard {
            let misc = has(feature::MISC_VQ);
            return Plan {
                stats: has(feature::STATS_VQ).then_some(2),
                hints: None,
                reports: None,
                misc: misc.then_some(3),
                queues: if misc {
                    4
                } else if has(feature::STATS_VQ) {
                    3
                } else {
                    2
                },
            };
        }
        let mut next = 2;
        let mut take = |bit: u64| {
            has(bit).then(|| {
                next += 1;
                next - 1
            })
        };
        let [stats, hints, reports] = [feature::STATS_VQ, feature::FREE_PAGE_HINT, feature::REPORTING].map(&mut take);
        Plan {
            stats,
            hints,
            reports,
            misc: None,
            queues: next,
        }
    }
}

/// The features that a driver of this dialect would take, if the device offers them.
fn wanted(dialect: Dialect, poisons: bool) -> u64 {
    let common = feature::MUST_TELL_HOST | feature::STATS_VQ | feature::DEFLATE_ON_OOM | feature::VERSION_1;
    match dialect {
        Dialect::Standard => {
            let poison = if poisons { feature::PAGE_POISON } else { 0 };
            common | feature::FREE_PAGE_HINT | feature::REPORTING | poison
        }
        Dialect::Bitmap => common | feature::PAGE_BITMAP | feature::MISC_VQ,
        Dialect::BitmapRfc => common | feature::PAGE_BITMAP,
    }
}

/// What the driver goes by of the features that it acknowledged: without memory for a bitmap it forgets those that need one,
/// and the device does not hear of it (quirk 12).
fn own(dialect: Dialect, features: u64, quirks: &Quirks) -> u64 {
    if quirks.has_no_bitmap && dialect != Dialect::Standard {
        features & !(feature::PAGE_BITMAP | feature::MISC_VQ)
    } else {
        features
    }
}

/// The driver.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Driver {
    features: u64,
    pages: Transfer,
    stats: Option<Statistics>,
    hints: Option<Hinting>,
    reports: Option<Reporting>,
    misc: Option<Misc>,
    quirks: Quirks,
}

impl Driver {
    /// Brings the device up: features, queues, first buffers, DRIVER_OK.
    pub(crate) fn probe(mm: &mut Mm, ports: &Ports, quirks: &Quirks) -> Result<Self> {
        let (dialect, features) = {
            let mut device = ports.device.lock();
            let dialect = device.config().dialect;
            let features = device.device_features() & wanted(dialect, mm.poison.is_some());
            device.ack_features(features)?;
            (dialect, features)
        };
        let own = own(dialect, features, quirks);
        let plan = Plan::new(dialect, own);
        for index in 0..plan.queues {
            virtqueue::clear(mm, index)?;
        }
        let mut driver = Driver {
            features,
            pages: Transfer::new(Manner::new(dialect, own)),
            stats: plan.stats.map(Statistics::new),
            hints: plan.hints.map(Hinting::new),
            reports: plan.reports.map(Reporting::new),
            misc: plan.misc.map(Misc::new),
            quirks: quirks.clone(),
        };
        // The request buffer is there before DRIVER_OK, the kick for it comes after; the rest waits for DRIVER_OK.
        let early = quirks.queues_before_driver_ok;
        if let Some(misc) = driver.misc.as_mut().filter(|_| early) {
            misc.probe(mm)?;
        }
        let poisons = dialect == Dialect::Standard && features & feature::PAGE_POISON != 0;
        if let (true, Some(poison)) = (poisons, mm.poison) {
            ports.set_config(POISON_VAL, u32::from_le_bytes([poison; 4]));
        }
        let queues: Vec<QueueConfig> = (0..plan.queues).map(|index| queue_config(mm, index)).collect();
        ports.device.lock().activate(&queues)?;
        if let Some(misc) = driver.misc.as_mut().filter(|_| !early) {
            misc.probe(mm)?;
            ports.kick(misc.index());
        }
        if let Some(stats) = &mut driver.stats {
            stats.post(mm, features, ports)?;
        }
        driver.pages.configured(ports);
        Ok(driver)
    }

    /// Takes interrupts. Whether the driver is still there.
    pub(crate) fn interrupt(&mut self, mm: &mut Mm, irqs: &Irqs, ports: &Ports) -> Result<Alive> {
        if irqs.config {
            self.pages.configured(ports);
            if let Some(hints) = &mut self.hints {
                hints.configured(ports);
            }
        }
        if let Some(stats) = &mut self.stats {
            stats.completed(mm, self.features, ports)?;
        }
        match &mut self.misc {
            Some(misc) => {
                let raised = count(irqs, misc.index());
                misc.interrupts(mm, ports, &self.quirks, raised)
            }
            None => Ok(Alive::Yes),
        }
    }

    /// The driver goes away, in the middle of whatever it does: the device is reset, and all that it had is the guest's.
    pub(crate) fn gone(self, mm: &mut Mm, ports: &Ports) -> Result<()> {
        ports.device.lock().reset();
        self.pages.gone(mm)?;
        mm.release_held(u64::MAX)?;
        self.reports.map_or(Ok(()), |reports| reports.gone(mm))
    }

    /// The kernel moves a page of the balloon.
    pub(crate) fn compact(&mut self, mm: &mut Mm, ports: &Ports) -> Result<()> {
        self.pages.compact(mm, ports, &self.quirks)
    }

    /// Goes on with whatever is under way.
    pub(crate) fn step(&mut self, mm: &mut Mm, ports: &Ports, report_interval: Duration) -> Result<Later> {
        let mut later = self.pages.step(mm, ports, &self.quirks)?;
        if let Some(hints) = &mut self.hints {
            later = sooner(later, hints.step(mm, ports)?);
        }
        if let Some(reports) = &mut self.reports {
            later = sooner(later, reports.step(mm, ports, report_interval)?);
        }
        Ok(later)
    }

    /// Blocks that are allocated and on no list in RAM.
    pub(crate) fn in_flight(&self) -> Vec<(u64, u32)> {
        let mut all = self.pages.in_flight();
        all.extend(self.reports.iter().flat_map(Reporting::in_flight));
        all
    }

    /// Refuses a restored driver that no driver of this device could be.
    pub(crate) fn check(&mut self, config: &balloon::Config, mm: &Mm) -> Result<()> {
        let possible = (config.features | feature::VERSION_1) & wanted(config.dialect, mm.poison.is_some());
        if self.features & !possible != 0 {
            let extra = self.features & !possible;
            return Err(Error::State(format!(
                "the driver has features {extra:#x} that the device does not offer"
            )));
        }
        let is = Plan {
            stats: self.stats.as_ref().map(Statistics::index),
            hints: self.hints.as_ref().map(Hinting::index),
            reports: self.reports.as_ref().map(Reporting::index),
            misc: self.misc.as_ref().map(Misc::index),
            queues: 0,
        };
        let lie = self.quirks.lies_about;
        if lie.is_some_and(|lie| {
            lie.start()
                .0
                .checked_add(lie.count())
                .is_none_or(|end| end > mm.frames.end().0)
        }) {
            return Err(Error::State("the driver lies about pages that are not RAM".to_owned()));
        }
        let own = own(config.dialect, self.features, &self.quirks);
        let should = Plan {
            queues: 0,
            ..Plan::new(config.dialect, own)
        };
        if is != should {
            return Err(Error::State(format!(
                "the driver's queues are {is:?}, its features give {should:?}"
            )));
        }
        self.pages.check(mm, Manner::new(config.dialect, own))?;
        let queues = [
            self.stats.as_mut().map(Statistics::queue),
            self.hints.as_mut().map(Hinting::queue),
            self.reports.as_mut().map(Reporting::queue),
            self.misc.as_mut().map(Misc::queue),
        ];
        for queue in queues.into_iter().flatten() {
            queue.check()?;
        }
        self.reports.as_ref().map_or(Ok(()), |reports| reports.check(mm))
    }
}

fn count(irqs: &Irqs, queue: u16) -> u32 {
    irqs.queues.get(usize::from(queue)).copied().unwrap_or(0)
}

fn queue_config(mm: &Mm, index: u16) -> QueueConfig {
    let desc = mm.places.queues[usize::from(index) % QUEUES];
    QueueConfig {
        size: QUEUE_SIZE,
        desc,
        avail: desc + virtqueue::AVAIL,
        used: desc + virtqueue::USED,
        ready: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standard_queues_are_compacted_and_bitmap_queues_are_fixed() {
        use feature::{FREE_PAGE_HINT, MISC_VQ, REPORTING, STATS_VQ};
        let plan = |features| {
            let plan = Plan::new(Dialect::Standard, features);
            (plan.stats, plan.hints, plan.reports, plan.queues)
        };
        assert_eq!(plan(0), (None, None, None, 2));
        assert_eq!(plan(REPORTING), (None, None, Some(2), 3));
        assert_eq!(plan(FREE_PAGE_HINT | REPORTING), (None, Some(2), Some(3), 4));
        assert_eq!(plan(STATS_VQ | REPORTING), (Some(2), None, Some(3), 4));
        assert_eq!(
            plan(STATS_VQ | FREE_PAGE_HINT | REPORTING),
            (Some(2), Some(3), Some(4), 5)
        );
        let bitmap = Plan::new(Dialect::Bitmap, MISC_VQ);
        assert_eq!((bitmap.stats, bitmap.misc, bitmap.queues), (None, Some(3), 4));
    }
}
