//! A balloon device as a control socket uses it.
//!
//! The device is shared with vCPUs and migrations: its lock is taken for one call at a time, and never while waiting.

use balloon::{SharedBalloon, Stats, feature};
use pageferry::control_socket::{BalloonState, BalloonStats, GuestControls, NoControls};
use pages::PAGE_BYTES;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use vm_memory::GuestAddressSpace;

/// How often the device is looked at while the guest is awaited.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A guest's balloon.
pub(crate) struct BalloonControls<M: GuestAddressSpace> {
    balloon: SharedBalloon<M>,
    /// When the guest's last answer was seen.
    answered: Mutex<Option<Instant>>,
}

impl<M: GuestAddressSpace + Send + Sync + 'static> BalloonControls<M> {
    /// The knobs of a guest with this balloon, or with none.
    pub(crate) fn of(balloon: Option<SharedBalloon<M>>) -> Arc<dyn GuestControls> {
        match balloon {
            None => Arc::new(NoControls),
            Some(balloon) => Arc::new(BalloonControls {
                balloon,
                answered: Mutex::new(None),
            }),
        }
    }

    /// Whether the guest can be asked for statistics at all.
    fn can_ask(&self) -> Result<(), String> {
        let balloon = self.balloon.lock();
        if !balloon.is_active() {
            return Err("the guest's balloon driver is not there (yet)".to_owned());
        }
        if balloon.driver_features() & feature::STATS_VQ == 0 {
            return Err("the guest's balloon driver gives no statistics".to_owned());
        }
        Ok(())
    }

    /// Asks, and takes the answer to that. The device holds one buffer of the guest, and returning it is the question: a
    /// second question can be asked only once the first was answered, which is how the answer is noticed. That second one is
    /// left open. Its answer, and that to one that was given up, may be from before a pause or a move: where one is still
    /// open, it is taken first, and another one asked.
    fn ask(&self, within: Duration) -> Option<Stats> {
        if within.is_zero() {
            return None;
        }
        let mut is_old = !self.balloon.lock().request_stats();
        let asked = Instant::now();
        loop {
            std::thread::sleep(LOOK_EVERY.min(within));
            let mut balloon = self.balloon.lock();
            let stats = balloon.stats();
            if balloon.request_stats() {
                if !is_old {
                    return stats;
                }
                is_old = false;
            }
            drop(balloon);
            if asked.elapsed() >= within {
                return None;
            }
        }
    }
}

impl<M: GuestAddressSpace + Send + Sync + 'static> GuestControls for BalloonControls<M> {
    fn balloon(&self) -> Option<BalloonState> {
        let balloon = self.balloon.lock();
        Some(BalloonState {
            dialect: balloon.config().dialect.name().to_owned(),
            target_pages: balloon.target(),
            actual_pages: balloon.actual(),
        })
    }

    fn set_balloon_target(&self, pages: u64) -> Result<(), String> {
        self.balloon.lock().set_target(pages).map_err(|error| error.to_string())
    }

    fn balloon_stats(&self, within: Duration) -> Result<BalloonStats, String> {
        self.can_ask()?;
        let fresh = self.ask(within);
        let mut answered = self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        if fresh.is_some() {
            *answered = Some(Instant::now());
        }
        let age = answered.map(|at| at.elapsed().as_secs_f64() * 1000.0);
        drop(answered);
        let balloon = self.balloon.lock();
        let (target, actual) = (balloon.target(), balloon.actual());
        let last = balloon.stats().unwrap_or_default();
        drop(balloon);
        let why = format!("the guest did not answer within {} ms", within.as_millis());
        Ok(BalloonStats {
            fresh: fresh.is_some(),
            why: fresh.is_none().then_some(why),
            age_ms: age,
            target_pages: target,
            actual_pages: actual,
            ..described(&fresh.unwrap_or(last))
        })
    }
}

/// What the guest said, in pages where it is memory.
fn described(stats: &Stats) -> BalloonStats {
    let pages = |bytes: Option<u64>| bytes.map(|bytes| bytes / PAGE_BYTES);
    let others = [
        ("swap_in_bytes", stats.swap_in),
        ("swap_out_bytes", stats.swap_out),
        ("major_faults", stats.major_faults),
        ("minor_faults", stats.minor_faults),
        ("disk_cache_bytes", stats.disk_caches),
        ("hugetlb_allocations", stats.hugetlb_allocations),
        ("hugetlb_failures", stats.hugetlb_failures),
        ("oom_kills", stats.oom_kills),
        ("alloc_stalls", stats.alloc_stalls),
        ("async_scans", stats.async_scans),
        ("direct_scans", stats.direct_scans),
        ("async_reclaims", stats.async_reclaims),
        ("direct_reclaims", stats.direct_reclaims),
    ];
    let said = others
        .iter()
        .filter_map(|(name, value)| Some(((*name).to_owned(), (*value)?)));
    BalloonStats {
        free_pages: pages(stats.free_memory),
        total_pages: pages(stats.total_memory),
        available_pages: pages(stats.available_memory),
        others: said.collect::<BTreeMap<_, _>>(),
        ..BalloonStats::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pages::Layout;
    use softguest::{GuestConfig, SoftGuest};

    fn guest(balloon: bool) -> SoftGuest {
        let layout = Arc::new(Layout::flat(16384).unwrap());
        let mut config = GuestConfig::new(layout);
        if !balloon {
            config.balloon = None;
        }
        SoftGuest::start(config, &memory::Backing::Anonymous).unwrap()
    }

    #[test]
    fn case_47_statistics_are_fresh_each_time() {
        use machine::Machine;
        let guest = guest(true);
        let controls = BalloonControls::of(guest.balloon());
        let mut free = Vec::new();
        for pages in [0, 2000, 0] {
            controls.set_balloon_target(pages).unwrap();
            let began = Instant::now();
            while controls.balloon().unwrap().actual_pages != pages {
                assert!(began.elapsed() < Duration::from_secs(60), "the guest does not follow");
                std::thread::sleep(Duration::from_millis(5));
            }
            let stats = controls.balloon_stats(Duration::from_secs(30)).unwrap();
            assert!(stats.fresh && stats.why.is_none(), "{stats:?}");
            assert!(stats.age_ms.unwrap() < 30_000.0);
            assert_eq!((stats.target_pages, stats.actual_pages), (pages, pages));
            assert!(stats.total_pages.unwrap() <= 16384);
            free.push(stats.free_pages.unwrap());
        }
        assert!(free[1] + 1500 < free[0] && free[2] > free[1] + 1500, "{free:?}");
        // A guest that cannot answer: what it said last, and that it is that.
        guest.machine().pause().unwrap();
        let stats = controls.balloon_stats(Duration::from_millis(50)).unwrap();
        assert!(!stats.fresh && stats.free_pages.is_some() && stats.age_ms.is_some());
        assert!(stats.why.unwrap().contains("50 ms"));
        // The question that it did not answer is not taken for the next one.
        guest.machine().resume().unwrap();
        let stats = controls.balloon_stats(Duration::from_secs(30)).unwrap();
        assert!(stats.fresh && stats.age_ms.unwrap() < 30_000.0, "{stats:?}");
    }

    #[test]
    fn what_a_guest_cannot_do_is_said() {
        let none = BalloonControls::of(guest(false).balloon());
        assert!(none.balloon().is_none());
        assert!(none.set_balloon_target(1).unwrap_err().contains("no balloon"));
        let guest = guest(true);
        let controls = BalloonControls::of(guest.balloon());
        let error = controls.set_balloon_target(16385).unwrap_err();
        assert!(error.contains("16385") && error.contains("16384"), "{error}");
        guest.balloon().unwrap().lock().reset();
        let error = controls.balloon_stats(Duration::from_secs(1)).unwrap_err();
        assert!(error.contains("driver is not there"), "{error}");
    }
}
