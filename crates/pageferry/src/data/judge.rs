//! Whether packing pays, and by what: decided from figures alone, so that no test of it takes a clock.
//!
//! All is in nanoseconds a byte of pages. As they are, pages cost what the link takes for them. Packed, they cost the
//! packing and the link's time for what is left, of which the socket's buffer lets the shorter hide behind the longer, up
//! to a quarter. What the link takes is what blocking writes say, once they block, and that takes as much as the socket's
//! buffers hold. So a link that nothing is known of is taken for a slow one at first: if it is, nothing was lost; if it is
//! fast, writes have not blocked by the end of [`START_BYTES`], packed at about the speed of such a link, and all else costs
//! no more than the sums here, as nothing is packed to try while writes are fast.
//!
//! A receiver that is slow to take pages looks like a slow link, and packing does not help it: so packing has to prove
//! itself against what went as it was just before, or it is given up for a good while.

use wire::batch::Codec;

/// A batch below this many bytes of pages measures latency, unless a limit makes all batches small.
const TELLING_BYTES: u64 = 64 << 10;

/// A limit at which so many bytes take this long makes small batches, and of them it is the limit that tells.
/// Nanoseconds: as long as the pacer has a batch take.
const SMALL_BATCH_NS: f64 = 50e6;

/// Batches to a judgement, and bytes of pages.
const BATCHES: u32 = 3;
const WINDOW_BYTES: u64 = BATCHES as u64 * TELLING_BYTES;

/// Slow windows in a row before packing is tried, and the same on a link that was fast before: a processor that is taken
/// away for a moment, here or there, is no slow link.
const SLOW_WINDOWS: u32 = 2;
const SLOW_WINDOWS_AFTER_FAST: u32 = 3;

/// A link above this is not worth a try: no core packs much faster. Nanoseconds a byte, of all streams: they share the
/// link, and where each of many gets little of a fast one, it is the cores that are short.
const FAST: f64 = 1.0;

/// The same where the receiver is on this machine: what looks like a slow link is then its memory, whose first touch costs
/// up to 9 ns a byte where a host has it from another one, and packing takes processors from the same guest. Slower still is a
/// tunnel that ends here.
const FAST_LOCAL: f64 = 20.0;

/// What a link is taken for that nothing is known of: 2.5 Gbit/s. Nanoseconds a byte.
const UNKNOWN: f64 = 3.2;

/// Bytes of pages that are packed on the strength of that.
const START_BYTES: u64 = 32 << 20;

/// Bytes of pages after which packing has to prove itself that was there from the start.
const UNPROVEN_BYTES: u64 = 256 << 20;

/// Packing is turned on below this part of what it costs without, and off above [`STAY`].
const TURN: f64 = 0.6;
const STAY: f64 = 0.8;

/// Another codec is taken for this part of the cost.
const SWITCH: f64 = 0.85;

/// Bytes of pages after which a figure that may be out of date is measured again.
const STALE_BYTES: u64 = 32 << 20;

/// Bytes of pages packed before the link is tried without again, doubled each time.
const RETRY_BYTES: u64 = 64 << 20;
const MAX_RETRY_BYTES: u64 = 4 << 30;

/// What a codec does: nanoseconds and bytes a byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cost {
    pub(crate) pack: f64,
    pub(crate) ratio: f64,
}

/// What a batch took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Took {
    /// Bytes of pages.
    pub(crate) raw: u64,
    /// Bytes that crossed for them.
    pub(crate) wire: u64,
    /// Nanoseconds of copying and packing.
    pub(crate) pack_ns: f64,
    /// Nanoseconds of waiting for one's turn and of writing.
    pub(crate) link_ns: f64,
}

/// What is known of a stream's way to the receiver beforehand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    /// The receiver is on this machine.
    pub(crate) local: bool,
    /// The stream's share of a limited bandwidth, bytes a second.
    pub(crate) limit: Option<f64>,
    /// Data streams of the migration, which share the link.
    pub(crate) streams: u16,
}

/// Decides for one stream.
#[derive(Debug)]
pub(crate) struct Judge {
    offered: Vec<Codec>,
    /// What a link has to be slower than, for this stream alone.
    fast: f64,
    streams: f64,
    /// What the stream may take of a limited bandwidth, nanoseconds a byte.
    limit: Option<f64>,
    using: Option<Codec>,
    window: Took,
    batches: u32,
    /// Windows in a row in which the link was slow, and whether it was fast before them.
    slow: u32,
    was_fast: bool,
    /// The last that was measured of the link, or taken for it: then it is `assumed`.
    link: Option<f64>,
    assumed: bool,
    /// What pages cost just before packing was turned on.
    plain: Option<f64>,
    costs: [Option<Cost>; 2],
    sample_wanted: bool,
    /// Bytes of pages until figures are measured again.
    until_fresh: u64,
    retry_bytes: u64,
    why: String,
}

impl Judge {
    /// For a stream whose receiver takes `offered`.
    pub(crate) fn new(offered: &[Codec], path: Path) -> Self {
        let limit = path.limit.map(|rate| 1e9 / rate.max(1.0));
        let streams = f64::from(path.streams.max(1));
        let fast = if path.local && limit.is_none() {
            FAST_LOCAL
        } else {
            FAST
        };
        let fast = fast * streams;
        let assumed = !path.local && limit.is_none();
        Judge {
            offered: offered.to_vec(),
            fast,
            streams,
            limit,
            using: None,
            window: Took::default(),
            batches: 0,
            slow: 0,
            was_fast: false,
            link: if assumed { Some(UNKNOWN * streams) } else { limit },
            assumed,
            plain: None,
            costs: [None; 2],
            // A limit is known beforehand.
            sample_wanted: !offered.is_empty() && (assumed || limit.is_some_and(|limit| limit > fast)),
            until_fresh: STALE_BYTES,
            retry_bytes: RETRY_BYTES,
            why: "too little was sent to tell".to_owned(),
        }
    }

    /// What the next batch is packed by.
    pub(crate) fn choice(&self) -> Option<Codec> {
        self.using
    }

    /// Whether a sample is to be packed by every codec, for [`Judge::sampled`].
    pub(crate) fn wants_sample(&self) -> bool {
        self.sample_wanted
    }

    /// Why it is as it is, for the report.
    pub(crate) fn why(&self) -> &str {
        &self.why
    }

    /// What the codecs made of a sample.
    pub(crate) fn sampled(&mut self, costs: &[(Codec, Cost)]) {
        self.sample_wanted = false;
        self.until_fresh = STALE_BYTES;
        for (codec, cost) in costs {
            self.costs[slot(*codec)] = Some(*cost);
        }
        self.decide();
    }

    /// A batch was sent.
    pub(crate) fn sent(&mut self, took: Took) {
        let paced_small = self
            .limit
            .is_some_and(|limit| limit * float(TELLING_BYTES) >= SMALL_BATCH_NS);
        if (took.raw < TELLING_BYTES && !paced_small) || self.offered.is_empty() {
            return;
        }
        self.window.raw += took.raw;
        self.window.wire += took.wire;
        self.window.pack_ns += took.pack_ns;
        self.window.link_ns += took.link_ns;
        self.batches += 1;
        self.until_fresh = self.until_fresh.saturating_sub(took.raw);
        if self.batches >= BATCHES && self.window.raw >= WINDOW_BYTES {
            let window = std::mem::take(&mut self.window);
            self.batches = 0;
            match self.using {
                None => self.judge_plain(&window),
                Some(codec) => self.judge_packed(codec, &window),
            }
        }
    }

    /// Pages went as they are.
    fn judge_plain(&mut self, window: &Took) {
        let measured = window.link_ns / float(window.wire);
        let measured = measured.max(self.limit.unwrap_or(0.0));
        let slow = measured >= self.fast;
        self.slow = if slow { self.slow + 1 } else { 0 };
        if slow && self.was_fast && self.slow < SLOW_WINDOWS_AFTER_FAST {
            return;
        }
        if std::mem::take(&mut self.assumed) {
            self.link = None;
        }
        let link = self.link.map_or(measured, |before| (before + measured) / 2.0);
        self.link = Some(link);
        if link < self.fast {
            self.was_fast = true;
            self.why = format!(
                "the link takes {} MB/s, and no core packs faster to a gain",
                mb_per_s(link / self.streams)
            );
            return;
        }
        self.was_fast &= !slow;
        if self.slow < SLOW_WINDOWS {
            return;
        }
        if self.costs.iter().all(Option::is_none) || self.until_fresh == 0 {
            // Packing that did not help is not tried before that time has passed.
            self.sample_wanted = self.plain.is_none() || self.until_fresh == 0;
            return;
        }
        if self.plain.is_none() {
            self.decide();
        }
    }

    /// Pages were packed by `codec`.
    fn judge_packed(&mut self, codec: Codec, window: &Took) {
        let raw = float(window.raw);
        let now = Cost {
            pack: window.pack_ns / raw,
            ratio: float(window.wire) / raw,
        };
        let cost = self.costs[slot(codec)].get_or_insert(now);
        cost.pack = (cost.pack + now.pack) / 2.0;
        cost.ratio = (cost.ratio + now.ratio) / 2.0;
        let total = (window.pack_ns + window.link_ns) / raw;
        // Where the cores hold the stream up, another codec may still do better: that is for what is known to tell.
        let held_by_link = window.link_ns * 3.0 > window.pack_ns;
        if let Some(plain) = self.plain.filter(|plain| held_by_link && total > plain * STAY) {
            self.using = None;
            self.until_fresh = self.retry_bytes;
            self.retry_bytes = (self.retry_bytes * 2).min(MAX_RETRY_BYTES);
            self.why = format!(
                "packing by {codec} was tried and did not help: {} MB/s of pages with it, {} without",
                mb_per_s(total),
                mb_per_s(plain)
            );
            return;
        }
        if self.limit.is_none() {
            if held_by_link {
                // The link holds the stream up: what it takes in all that time is what it takes.
                self.link = Some((window.pack_ns + window.link_ns) / float(window.wire));
                if std::mem::take(&mut self.assumed) {
                    self.until_fresh = UNPROVEN_BYTES;
                }
            }
            // Where the cores do, the link may be fast, or have become so.
            if self.until_fresh == 0 && (!held_by_link || self.plain.is_none()) {
                (self.using, self.plain, self.link) = (None, None, None);
                self.until_fresh = self.retry_bytes;
                self.retry_bytes = (self.retry_bytes * 2).min(MAX_RETRY_BYTES);
                return;
            }
        }
        self.decide();
    }

    /// Chooses by what is known.
    fn decide(&mut self) {
        let Some(link) = self.link else { return };
        let cost = |codec: Codec| self.costs[slot(codec)].map(|cost| (codec, packed(cost, link), cost));
        let best = self.offered.iter().filter_map(|codec| cost(*codec));
        let Some(mut best) = best.min_by(|a, b| a.1.total_cmp(&b.1)) else {
            return;
        };
        if let Some(used) = self.using.and_then(cost)
            && best.1 > used.1 * SWITCH
        {
            best = used;
        }
        let (codec, took, cost) = best;
        let bound = if self.using.is_some() { STAY } else { TURN };
        let pays = took < link * bound;
        if pays && self.using.is_none() {
            self.plain = Some(link).filter(|_| !self.assumed);
            self.until_fresh = if self.assumed { START_BYTES } else { RETRY_BYTES };
        }
        if !pays {
            self.plain = None;
        }
        self.using = pays.then_some(codec);
        self.why = format!(
            "the link takes {} MB/s, and {codec} packs {} MB/s to {:.0} %{}",
            mb_per_s(link),
            mb_per_s(cost.pack),
            cost.ratio * 100.0,
            if pays { "" } else { ": not worth it" }
        );
    }
}

/// What a byte of pages costs, packed, on a link of `link` nanoseconds a byte.
fn packed(cost: Cost, link: f64) -> f64 {
    let (pack, send) = (cost.pack, cost.ratio * link);
    pack.max(send) + pack.min(send) / 4.0
}

fn slot(codec: Codec) -> usize {
    match codec {
        Codec::Lz4 => 0,
        Codec::Zstd => 1,
    }
}

#[expect(clippy::cast_precision_loss, reason = "bytes of a few batches, to be divided")]
fn float(bytes: u64) -> f64 {
    bytes.max(1) as f64
}

/// A cost as a rate, for people.
fn mb_per_s(ns_per_byte: f64) -> String {
    let rate = 1000.0 / ns_per_byte.max(1e-3);
    if rate < 10.0 {
        format!("{rate:.1}")
    } else {
        format!("{rate:.0}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    /// As measured of a Linux guest: LZ4 1.21 GB/s to a third, zstd 0.61 GB/s to a fifth.
    const LINUX: [(Codec, Cost); 2] = [
        (
            Codec::Lz4,
            Cost {
                pack: 0.83,
                ratio: 0.33,
            },
        ),
        (Codec::Zstd, Cost { pack: 1.64, ratio: 0.2 }),
    ];
    const RANDOM: [(Codec, Cost); 2] = [
        (Codec::Lz4, Cost { pack: 0.3, ratio: 1.0 }),
        (Codec::Zstd, Cost { pack: 0.6, ratio: 1.0 }),
    ];

    /// Sends `batches` of 1 MiB over a link of `gbit`, behind which a receiver takes no more than `receiver` bytes of
    /// pages a nanosecond; returns how many were packed and how many samples were taken.
    fn send(judge: &mut Judge, costs: &[(Codec, Cost)], gbit: f64, receiver: f64, batches: u32) -> (u32, u32) {
        send_by(judge, costs, (gbit, receiver), (batches, MIB))
    }

    #[allow(clippy::cast_possible_truncation, reason = "whole numbers below 2^53")]
    fn send_by(
        judge: &mut Judge,
        costs: &[(Codec, Cost)],
        (gbit, receiver): (f64, f64),
        (batches, bytes): (u32, u64),
    ) -> (u32, u32) {
        let (mut packed, mut samples) = (0, 0);
        for _ in 0..batches {
            if judge.wants_sample() {
                judge.sampled(costs);
                samples += 1;
            }
            let cost = judge
                .choice()
                .map(|codec| costs.iter().find(|c| c.0 == codec).unwrap().1);
            let (pack, ratio) = cost.map_or((0.0, 1.0), |cost| (cost.pack, cost.ratio));
            packed += u32::from(cost.is_some());
            let raw = bytes as f64;
            let busy = (ratio * 8.0 / gbit).max(1.0 / receiver);
            // The socket's buffer empties while the next batch is packed.
            let link = (busy - pack).max(ratio * 0.25);
            judge.sent(Took {
                raw: bytes,
                wire: (raw * ratio) as u64,
                pack_ns: raw * pack,
                link_ns: raw * link,
            });
        }
        (packed, samples)
    }

    fn judge(local: bool, limit: Option<f64>) -> Judge {
        judge_of(local, limit, 1)
    }

    fn judge_of(local: bool, limit: Option<f64>, streams: u16) -> Judge {
        let path = Path { local, limit, streams };
        Judge::new(&Codec::ALL, path)
    }

    #[test]
    fn a_fast_link_costs_no_more_than_a_start() {
        for local in [true, false] {
            for gbit in [10.0, 20.0, 28.0] {
                let mut judge = judge(local, None);
                let (packed, samples) = send(&mut judge, &LINUX, gbit, 9.0, 1000);
                let start = if local { (0, 0) } else { (33, 1) };
                assert_eq!((packed, samples), start, "{gbit}: {}", judge.why());
                assert!(judge.why().contains("MB/s"), "{}", judge.why());
            }
        }
    }

    #[test]
    fn a_slow_link_is_found_within_a_few_batches() {
        for (gbit, codec) in [(4.0, Codec::Lz4), (1.0, Codec::Zstd), (0.1, Codec::Zstd)] {
            for local in [true, false] {
                let mut judge = judge(local, None);
                if local && gbit > 0.4 {
                    let sent = send(&mut judge, &LINUX, gbit, 9.0, 300);
                    assert_eq!(sent, (0, 0), "this machine's own memory is slow: {}", judge.why());
                    continue;
                }
                let (packed, samples) = send(&mut judge, &LINUX, gbit, 9.0, 60);
                assert!(
                    packed >= 54 && samples == 1,
                    "{gbit}: {packed} packed, {samples} samples"
                );
                assert_eq!(judge.choice(), Some(codec), "{gbit}: {}", judge.why());
                assert!(judge.why().contains(codec.name()), "{}", judge.why());
            }
        }
    }

    /// The limit is known before a byte is sent: every batch is packed.
    #[test]
    fn a_limited_bandwidth_is_a_slow_link_from_the_start() {
        for (limit, gbit) in [(12.5e6, 0.1), (125e6, 1.0)] {
            let mut judge = judge(true, Some(limit));
            assert_eq!(send(&mut judge, &LINUX, gbit, 9.0, 300), (300, 1));
            assert_eq!(judge.choice(), Some(Codec::Zstd), "{}", judge.why());
        }
        let mut judge = judge(true, Some(1.25e9));
        assert_eq!(send(&mut judge, &LINUX, 10.0, 9.0, 300), (0, 0), "{}", judge.why());
    }

    #[test]
    fn what_does_not_shrink_goes_as_it_is() {
        for limit in [None, Some(12.5e6)] {
            let mut judge = judge(false, limit);
            let (packed, samples) = send(&mut judge, &RANDOM, 0.1, 9.0, 320);
            assert_eq!(packed, 0, "{}", judge.why());
            // Now and then it looks again: there may be other pages.
            assert!((2..=12).contains(&samples), "{samples}");
            assert!(judge.why().contains("not worth it"), "{}", judge.why());
            send(&mut judge, &LINUX, 0.1, 9.0, 40);
            assert_eq!(judge.choice(), Some(Codec::Zstd), "{}", judge.why());
        }
    }

    /// A receiver that takes 250 MB/s of pages, whatever they were packed by, at the end of a link of 20 Gbit/s.
    #[test]
    fn a_slow_receiver_is_not_helped_by_packing() {
        let mut judge = judge(false, None);
        let (packed, _) = send(&mut judge, &LINUX, 20.0, 0.25, 1000);
        assert!(packed <= 300, "{packed} of 1000 were packed");
        let (packed, _) = send(&mut judge, &LINUX, 20.0, 0.25, 3000);
        assert!(packed <= 100, "{packed} of 3000 were packed");
        assert!(judge.why().contains("did not help"), "{}", judge.why());
    }

    #[test]
    fn a_link_that_becomes_fast_is_noticed() {
        let mut judge = judge(false, None);
        send(&mut judge, &LINUX, 0.5, 9.0, 40);
        assert!(judge.choice().is_some());
        send(&mut judge, &LINUX, 20.0, 9.0, 300);
        assert_eq!(judge.choice(), None, "{}", judge.why());
    }

    #[test]
    fn a_receiver_without_codecs_gets_no_samples() {
        let path = Path {
            local: false,
            limit: Some(1e6),
            streams: 1,
        };
        let mut judge = Judge::new(&[], path);
        assert_eq!(send(&mut judge, &LINUX, 0.01, 9.0, 50), (0, 0));
    }

    #[test]
    fn small_batches_say_nothing() {
        let mut judge = judge(true, None);
        for _ in 0..100 {
            judge.sent(Took {
                raw: 4096,
                wire: 4200,
                pack_ns: 0.0,
                link_ns: 1e6,
            });
        }
        assert!(!judge.wants_sample() && judge.why().contains("too little"));
    }
    /// Below 10.5 Mbit/s no batch has the bytes that tell: they are judged together.
    #[test]
    fn small_batches_of_a_low_limit_are_judged_together() {
        let (slow, small) = ((0.008, 9.0), 48 << 10);
        let mut judge = judge(false, Some(1e6));
        let (packed, samples) = send_by(&mut judge, &RANDOM, slow, (2000, small));
        assert_eq!(packed, 0, "{}", judge.why());
        // 94 MiB: the first, and one every 32 MiB.
        assert!((2..=4).contains(&samples), "{samples}");
        send_by(&mut judge, &LINUX, slow, (800, small));
        assert_eq!(judge.choice(), Some(Codec::Zstd), "{}", judge.why());
        send_by(&mut judge, &RANDOM, slow, (100, small));
        assert_eq!(judge.choice(), None, "{}", judge.why());
    }

    /// 8 streams share 20 Gbit/s: each has 2.5, which alone would be slow.
    #[test]
    fn many_streams_of_a_fast_link_are_not_slow() {
        for local in [true, false] {
            let mut many = judge_of(local, None, 8);
            if !local {
                send(&mut many, &LINUX, 2.5, 9.0, 40);
            }
            assert_eq!(send(&mut many, &LINUX, 2.5, 9.0, 300), (0, 0), "{}", many.why());
            assert!(many.why().contains("2500 MB/s"), "{}", many.why());
        }
        let mut limited = judge_of(true, Some(1.25e9 / 8.0), 8);
        assert_eq!(send(&mut limited, &LINUX, 1.25, 9.0, 300), (0, 0), "{}", limited.why());
        let mut slow = judge_of(false, None, 8);
        let (packed, _) = send(&mut slow, &LINUX, 0.125, 9.0, 60);
        assert!(packed >= 54, "{packed}: {}", slow.why());
    }

    /// On a link that was fast a stall of one window, or of two, tries nothing; one that stays slow is found.
    #[test]
    fn a_stall_is_no_slow_link() {
        for local in [true, false] {
            let mut judge = judge(local, None);
            send(&mut judge, &LINUX, 20.0, 9.0, 40);
            for stalled in [1, 3, 4] {
                assert_eq!(send(&mut judge, &LINUX, 20.0, 9.0, 30), (0, 0));
                assert_eq!(send(&mut judge, &LINUX, 0.1, 9.0, stalled), (0, 0));
                assert_eq!(send(&mut judge, &LINUX, 20.0, 9.0, 30), (0, 0), "{}", judge.why());
            }
            send(&mut judge, &LINUX, 0.1, 9.0, 30);
            assert_eq!(judge.choice(), Some(Codec::Zstd), "{}", judge.why());
        }
    }
}
