//! A limit on bytes a second that all streams of a migration share.

use crate::transport::Closer;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How far behind its schedule sending may fall and still catch up: what was not used earlier is lost.
const SLACK: Duration = Duration::from_millis(50);

/// The longest sleep without a look at whether the migration is over.
const NAP: Duration = Duration::from_millis(20);

/// A token bucket that runs on a schedule: each batch books its time on the link, one behind the other. A limit that changes
/// voids what was booked.
#[derive(Debug)]
pub(crate) struct Pacer {
    /// 0: no limit.
    bytes_per_s: AtomicU64,
    /// When the link is free again.
    free_at: Mutex<Instant>,
}

impl Pacer {
    /// `None` is no limit.
    pub(crate) fn new(bytes_per_s: Option<u64>) -> Self {
        Pacer {
            bytes_per_s: AtomicU64::new(bytes_per_s.unwrap_or(0)),
            free_at: Mutex::new(Instant::now()),
        }
    }

    /// The limit.
    pub(crate) fn bytes_per_s(&self) -> Option<u64> {
        Some(self.bytes_per_s.load(Ordering::Acquire)).filter(|rate| *rate > 0)
    }

    /// Another limit, for whoever waits as well.
    pub(crate) fn set(&self, bytes_per_s: Option<u64>) {
        let mut free_at = self.lock();
        self.bytes_per_s.store(bytes_per_s.unwrap_or(0), Ordering::Release);
        *free_at = Instant::now();
    }

    /// Pages in a batch: fewer on a slow link, so that its flow is even.
    pub(crate) fn batch_pages(&self, most: u64) -> u64 {
        let in_a_twentieth = |rate: u64| rate / 20 / pages::PAGE_BYTES;
        self.bytes_per_s()
            .map_or(most, |rate| in_a_twentieth(rate).clamp(1, most))
    }

    /// Waits until `bytes` may be sent; returns at once where the connections were closed.
    pub(crate) fn wait(&self, bytes: u64, closer: &Closer) {
        while let Some(rate) = self.bytes_per_s() {
            let start = self.book(bytes, rate, Instant::now());
            while self.bytes_per_s() == Some(rate) {
                let left = start.saturating_duration_since(Instant::now());
                if left.is_zero() || closer.is_closed() {
                    return;
                }
                std::thread::sleep(left.min(NAP));
            }
        }
    }

    /// Books the link for `bytes`, and returns when their time begins.
    fn book(&self, bytes: u64, rate: u64, now: Instant) -> Instant {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
        let takes = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let mut free_at = self.lock();
        let start = now
            .checked_sub(SLACK)
            .map_or(*free_at, |earliest| earliest.max(*free_at));
        *free_at = start.checked_add(takes).unwrap_or(start);
        start
    }

    fn lock(&self) -> MutexGuard<'_, Instant> {
        self.free_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_take_their_turn_on_the_link() {
        let pacer = Pacer::new(Some(1 << 20));
        let now = Instant::now() + Duration::from_secs(5);
        let first = pacer.book(1 << 20, 1 << 20, now);
        assert_eq!(first, now - SLACK);
        assert_eq!(pacer.book(1 << 19, 1 << 20, now), first + Duration::from_secs(1));
        assert_eq!(pacer.book(1, 1 << 20, now), first + Duration::from_millis(1500));
        // An idle link gathers no more than its slack.
        let later = now + Duration::from_secs(100);
        assert_eq!(pacer.book(1, 1 << 20, later), later - SLACK);
    }

    /// In no second does more leave than one in twenty above the limit, after an idle time as well; and the limit is reached.
    #[test]
    fn the_limit_is_kept_and_reached_to_one_in_twenty() {
        for rate in [10_000_000, 100_000_000, 1_000_000_000, 20_000_000_000_u64] {
            let pacer = Pacer::new(Some(rate));
            let batch = pacer.batch_pages(256) * pages::PAGE_BYTES;
            let begin = Instant::now() + Duration::from_secs(100);
            let (mut now, mut left) = (begin, Vec::new());
            while now < begin + Duration::from_secs(2) {
                now = pacer.book(batch, rate, now).max(now);
                left.push(now);
            }
            let within = |from: Duration| {
                let window = begin + from..begin + from + Duration::from_secs(1);
                left.iter().filter(|at| window.contains(at)).count() as u64 * batch
            };
            for from in [0, 100, 500, 990] {
                let bytes = within(Duration::from_millis(from));
                let most = rate / 20 * 21 + batch;
                assert!(
                    (rate / 20 * 19..=most).contains(&bytes),
                    "{bytes} of {rate} from {from} ms on"
                );
            }
        }
    }

    #[test]
    fn slow_links_get_small_batches() {
        assert_eq!(Pacer::new(None).batch_pages(256), 256);
        assert_eq!(Pacer::new(Some(1 << 40)).batch_pages(256), 256);
        assert_eq!(Pacer::new(Some(4096 * 20 * 3)).batch_pages(256), 3);
        assert_eq!(Pacer::new(Some(1)).batch_pages(256), 1);
    }

    #[test]
    fn another_limit_frees_who_waits_for_the_old_one() {
        let (pacer, closer) = (Pacer::new(Some(1)), Closer::default());
        pacer.wait(1 << 30, &closer);
        std::thread::scope(|scope| {
            // Its turn would come in 34 years.
            let waiting = scope.spawn(|| pacer.wait(4096, &closer));
            std::thread::sleep(Duration::from_millis(30));
            assert!(!waiting.is_finished());
            pacer.set(Some(1 << 40));
        });
        assert_eq!((pacer.bytes_per_s(), pacer.batch_pages(256)), (Some(1 << 40), 256));
        pacer.set(None);
        assert_eq!(pacer.bytes_per_s(), None);
    }

    #[test]
    fn closing_ends_a_wait() {
        let (pacer, closer) = (Pacer::new(Some(1)), Closer::default());
        closer.close();
        pacer.wait(1 << 40, &closer);
        pacer.wait(1 << 40, &closer);
    }
}
