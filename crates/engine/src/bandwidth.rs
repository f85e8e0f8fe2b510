//! What the link carries and what the guest writes: the two rates that decide when to pause the guest.
//!
//! A round is measured from its first chunk to the receiver's word that all of it is there, so buffers on the way are
//! counted. Small rounds measure latency rather than bandwidth: they count only while there is nothing better.

use crate::Time;
use pages::PAGE_BYTES;
use std::time::Duration;

/// A round below this many bytes says little about the bandwidth.
const TELLING_BYTES: u64 = 1 << 20;

/// Smoothed bandwidth, and the parts of a switchover that do not depend on how much is to be sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bandwidth {
    bytes_per_s: Option<f64>,
    /// Whether the figure comes from a round that was large enough.
    telling: bool,
    /// The shortest time from a round's end here to the receiver's word for it.
    barrier: Option<Duration>,
    /// How long the last harvest took.
    harvest: Duration,
}

impl Bandwidth {
    /// A round of `bytes` took `took`.
    pub(crate) fn round(&mut self, bytes: u64, took: Duration) {
        if bytes == 0 {
            return;
        }
        let telling = bytes >= TELLING_BYTES;
        if self.telling && !telling {
            return;
        }
        let rate = bytes as f64 / took.as_secs_f64().max(1e-6);
        self.bytes_per_s = match self.bytes_per_s {
            Some(old) if self.telling == telling => Some((old + rate) / 2.0),
            _ => Some(rate),
        };
        self.telling = telling;
    }

    /// The receiver's word for a round came `took` after the round's end had left.
    pub(crate) fn barrier(&mut self, took: Duration) {
        self.barrier = Some(self.barrier.map_or(took, |b| b.min(took)));
    }

    /// A harvest took so long.
    pub(crate) fn harvest(&mut self, took: Duration) {
        self.harvest = took;
    }

    /// Bytes a second.
    pub(crate) fn bytes_per_s(&self) -> Option<f64> {
        self.bytes_per_s
    }

    /// The downtime to expect if `pages` were left to send: their bytes, two exchanges with the receiver (the last
    /// round's and the state's), and a harvest. `None` where nothing was measured.
    pub(crate) fn expected_downtime(&self, pages: u64) -> Option<Duration> {
        let bytes = pages.saturating_mul(PAGE_BYTES) as f64;
        let send = match self.bytes_per_s {
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

    #[test]
    fn no_figure_overflows() {
        let mut bw = Bandwidth::default();
        bw.round(1, Duration::MAX);
        bw.barrier(Duration::MAX);
        assert_eq!(bw.expected_downtime(u64::MAX), Some(Duration::MAX));
    }
}
