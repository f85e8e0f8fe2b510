//! What the link carries and what the guest writes: the two rates that decide when to pause the guest.
//!
//! A round is measured from its first chunk to the receiver's word that all of it is there, so buffers on the way are
//! counted. Small rounds measure latency rather than bandwidth: they count only while there is nothing better.
//!
//! Pages may be packed. What the link carries is bytes on the wire, and what is left to send is pages: between them is
//! how far pages shrink. That is no property of the link, and pages that the guest rewrites need not shrink as those did
//! that it wrote long ago. So it is kept apart, and only rounds of rewritten pages tell of it.

use crate::Time;
use pages::PAGE_BYTES;
use std::time::Duration;

/// A round below this many bytes says little about the bandwidth, or about how far pages shrink.
const TELLING_BYTES: u64 = 1 << 20;

/// Rounds of rewritten pages of which the one that shrank least is reckoned with.
const RATIOS: usize = 3;

/// Smoothed bandwidth, and the parts of a switchover that do not depend on how much is to be sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bandwidth {
    /// On the wire.
    bytes_per_s: Option<f64>,
    /// What may cross at most, where somebody has said so since the migration began.
    limit: Option<f64>,
    /// Whether the figure comes from a round that was large enough.
    telling: bool,
    /// Bytes on the wire for a byte of pages, at most 1: of the last rounds of rewritten pages, in a ring.
    ratios: [Option<f64>; RATIOS],
    next_ratio: usize,
    /// The shortest time from a round's end here to the receiver's word for it.
    barrier: Option<Duration>,
    /// How long the last harvest took.
    harvest: Duration,
}

impl Bandwidth {
    /// A round took `took` for so many bytes on the wire.
    pub(crate) fn round(&mut self, wire_bytes: u64, took: Duration) {
        if wire_bytes == 0 {
            return;
        }
        let telling = wire_bytes >= TELLING_BYTES;
        if self.telling && !telling {
            return;
        }
        let rate = wire_bytes as f64 / took.as_secs_f64().max(1e-6);
        self.bytes_per_s = match self.bytes_per_s {
            Some(old) if self.telling == telling => Some((old + rate) / 2.0),
            _ => Some(rate),
        };
        self.telling = telling;
    }

    /// A round of rewritten pages, which is any but the first, took `wire_bytes` for `page_bytes` of content.
    pub(crate) fn rewritten(&mut self, wire_bytes: u64, page_bytes: u64) {
        if page_bytes >= TELLING_BYTES {
            self.ratios[self.next_ratio] = Some((wire_bytes as f64 / page_bytes as f64).min(1.0));
            self.next_ratio = (self.next_ratio + 1) % RATIOS;
        }
    }

    /// Bytes on the wire to expect for a byte of rewritten pages: as in the worst of the last rounds, and all of it
    /// before there was one.
    fn ratio(&self) -> f64 {
        self.ratios.iter().flatten().copied().reduce(f64::max).unwrap_or(1.0)
    }

    /// The receiver's word for a round came `took` after the round's end had left.
    pub(crate) fn barrier(&mut self, took: Duration) {
        self.barrier = Some(self.barrier.map_or(took, |b| b.min(took)));
    }

    /// A harvest took so long.
    pub(crate) fn harvest(&mut self, took: Duration) {
        self.harvest = took;
    }

    /// From now on so many bytes a second may cross at most; 0: any number. What was measured before is no bound any more: the
    /// next round that is large enough counts alone.
    pub(crate) fn limit(&mut self, bytes_per_s: u64) {
        self.limit = (bytes_per_s > 0).then_some(bytes_per_s as f64);
        self.telling = false;
    }

    /// Bytes on the wire a second.
    pub(crate) fn bytes_per_s(&self) -> Option<f64> {
        match (self.bytes_per_s, self.limit) {
            (Some(measured), Some(limit)) => Some(measured.min(limit)),
            (measured, _) => measured,
        }
    }

    /// The downtime to expect if `pages` were left to send: what they take on the wire, two exchanges with the receiver (the last
    /// round's and the state's), and a harvest. `None` where nothing was measured.
    pub(crate) fn expected_downtime(&self, pages: u64) -> Option<Duration> {
        let bytes = pages.saturating_mul(PAGE_BYTES) as f64 * self.ratio();
        let send = match self.bytes_per_s() {
            Some(rate) => bytes / rate,
            None if pages == 0 => 0.0,
            None => return None,
        };
        let send = Duration::try_from_secs_f64(send).unwrap_or(Duration::MAX);
        let fixed = self
            .barrier
            .unwrap_or_default()
            .saturating_mul(2)
            .saturating_add(self.harvest);
        Some(send.saturating_add(fixed))
    }
}

/// Bytes a second for `pages` pages within `took`.
pub(crate) fn rate(pages: u64, took: Time) -> f64 {
    pages.saturating_mul(PAGE_BYTES) as f64 / took.as_secs_f64().max(1e-6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_round_counts_only_while_there_is_nothing_better() {
        let mut bw = Bandwidth::default();
        assert_eq!(bw.expected_downtime(1), None);
        assert_eq!(bw.expected_downtime(0), Some(Duration::ZERO));
        bw.round(4096, Duration::from_secs(1));
        assert_eq!(bw.bytes_per_s(), Some(4096.0));
        bw.round(100 << 20, Duration::from_secs(1));
        assert_eq!(bw.bytes_per_s(), Some(f64::from(100 << 20)));
        bw.round(4096, Duration::from_secs(1));
        assert_eq!(bw.bytes_per_s(), Some(f64::from(100 << 20)));
        bw.round(200 << 20, Duration::from_secs(1));
        assert_eq!(bw.bytes_per_s(), Some(f64::from(150 << 20)));
    }

    #[test]
    fn expected_downtime_has_a_fixed_part() {
        let mut bw = Bandwidth::default();
        bw.round(100 << 20, Duration::from_secs(1));
        bw.barrier(Duration::from_millis(10));
        bw.barrier(Duration::from_millis(30));
        bw.harvest(Duration::from_millis(5));
        assert_eq!(bw.expected_downtime(0), Some(Duration::from_millis(25)));
        assert_eq!(bw.expected_downtime(25_600), Some(Duration::from_millis(1025)));
    }

    /// Also after a first round that shrank, pages are reckoned as they are until rewritten ones were seen to shrink, and
    /// then as the worst of the last rounds.
    #[test]
    fn rewritten_pages_are_trusted_to_shrink_only_as_they_did() {
        let seconds = |bw: &Bandwidth| bw.expected_downtime(25_600).unwrap().as_secs_f64();
        let mut bw = Bandwidth::default();
        bw.round(100 << 20, Duration::from_secs(1));
        assert_eq!(seconds(&bw), 1.0);
        bw.rewritten(4096, 40_960);
        assert_eq!(seconds(&bw), 1.0, "too few to tell");
        bw.rewritten(20 << 20, 80 << 20);
        assert_eq!(seconds(&bw), 0.25);
        bw.rewritten(81 << 20, 80 << 20);
        for _ in 0..RATIOS - 1 {
            bw.rewritten(10 << 20, 80 << 20);
            assert_eq!(seconds(&bw), 1.0);
        }
        bw.rewritten(10 << 20, 80 << 20);
        assert_eq!(seconds(&bw), 0.125);
        assert_eq!(bw.bytes_per_s(), Some(f64::from(100 << 20)), "the link's own");
    }

    /// A guest is not paused for what a slower link would take long to send, and a faster one shows at once.
    #[test]
    fn a_limit_that_changes_is_reckoned_with_from_then_on() {
        let mut bw = Bandwidth::default();
        bw.limit(10 << 20);
        assert_eq!(bw.expected_downtime(1), None, "nothing was measured");
        bw.limit(0);
        bw.round(100 << 20, Duration::from_secs(1));
        bw.limit(10 << 20);
        assert_eq!(bw.expected_downtime(25_600), Some(Duration::from_secs(10)));
        bw.round(20 << 20, Duration::from_secs(2));
        bw.limit(0);
        assert_eq!(bw.bytes_per_s(), Some(f64::from(10 << 20)));
        bw.round(200 << 20, Duration::from_secs(1));
        assert_eq!(
            bw.bytes_per_s(),
            Some(f64::from(200 << 20)),
            "mixed with what was slower"
        );
    }

    #[test]
    fn no_figure_overflows() {
        let mut bw = Bandwidth::default();
        bw.round(1, Duration::MAX);
        bw.barrier(Duration::MAX);
        assert_eq!(bw.expected_downtime(u64::MAX), Some(Duration::MAX));
    }
}
