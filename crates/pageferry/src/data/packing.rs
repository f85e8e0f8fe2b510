//! A source's stream packs its batches: by what was asked for, or by what its [`Judge`] finds.
//!
//! Guest memory is never handed to a codec: pages are copied into a buffer of the stream's own first. A page that the
//! guest writes meanwhile is torn there, as it may be in a plain write, and is sent again. Batches that are not packed
//! are not copied either.

use super::judge::{Cost, Judge, Path, Took};
use crate::Compress;
use codec::{Packer, ZSTD_LEVEL};
use engine::CompressReport;
use machine::{GuestRam, PageKind};
use pages::{PAGE_BYTES, PageRange, Pfn};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use wire::batch::Codec;

/// Pages of a sample: 64 KiB, from all over a batch.
const SAMPLE_PAGES: u64 = 16;

/// How often a sample is packed.
const SAMPLE_TURNS: u32 = 4;

/// Why a receiver may take no packed pages: either way it says no more than that.
const TAKES_NONE: &str = "it is older, or its guest's memory cannot be copied to";

/// One page.
pub(super) const PAGE: usize = 4096;

/// What all streams of a migration share of this: what the receiver takes, and what came of it.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    /// The codecs that the receiver offered, as bits. Set before it accepts, and so before anything is sent.
    offered: AtomicU32,
    /// The version of the protocol that the control connection speaks.
    version: AtomicU16,
    /// Bytes of pages by what they were packed by: nothing, then by [`Codec::number`].
    raw: [AtomicU64; 3],
    wire: AtomicU64,
    /// Bytes of batches that were written, whether they arrived or not.
    written: AtomicU64,
    /// What each stream has to say at its end.
    why: Mutex<BTreeMap<u16, String>>,
}

impl Totals {
    /// So many bytes of batches left.
    pub(crate) fn wrote(&self, bytes: usize) {
        self.written.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// How many did so far.
    pub(crate) fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// The receiver speaks this version of the protocol.
    pub(crate) fn speaks(&self, version: u16) {
        self.version.store(version, Ordering::Release);
    }

    /// Whether the receiver takes checksums; else a sentence.
    pub(crate) fn check_sums(&self) -> Result<(), String> {
        let version = self.version.load(Ordering::Acquire);
        if version < wire::CHECKSUM_SINCE {
            return Err(format!(
                "the receiver speaks version {version} of the protocol, which has no checksums over pages (--checksum): \
                 leave it out, or upgrade the receiver"
            ));
        }
        if self.offered().is_empty() {
            return Err(format!(
                "the receiver cannot check pages before it uses them (--checksum): {TAKES_NONE}; leave it out"
            ));
        }
        Ok(())
    }

    /// The receiver takes these.
    pub(crate) fn offer(&self, codecs: u32) {
        self.offered.store(codecs, Ordering::Release);
    }

    /// Whether the receiver takes what `asked` needs; else a sentence.
    pub(crate) fn check(&self, asked: Compress) -> Result<(), String> {
        match asked.codec() {
            Some((codec, _)) if !self.offered().contains(&codec) => Err(format!(
                "the receiver does not take pages packed by {codec} (--compress {asked}): {TAKES_NONE}; use --compress \
                 auto or none, or upgrade it"
            )),
            _ => Ok(()),
        }
    }

    fn offered(&self) -> Vec<Codec> {
        let bits = self.offered.load(Ordering::Acquire);
        Codec::ALL.into_iter().filter(|codec| codec.bit() & bits != 0).collect()
    }

    /// For the source's report.
    pub(crate) fn report(&self, asked: Compress) -> CompressReport {
        let raw = |number: usize| self.raw[number].load(Ordering::Relaxed);
        // Of equal ones the last: a codec that packed a page was in use.
        let most = (0..self.raw.len()).max_by_key(|number| raw(*number)).unwrap_or(0);
        let used = match Codec::ALL.into_iter().find(|codec| codec.number() as usize == most) {
            Some(codec) if raw(most) > 0 => Compress::of(codec, asked.level()).to_string(),
            _ => "none".to_owned(),
        };
        let why = self.why.lock().unwrap_or_else(PoisonError::into_inner);
        let why = why.values().next().cloned();
        CompressReport {
            asked: asked.to_string(),
            used,
            why: why.unwrap_or_else(|| "the migration did not come so far".to_owned()),
            raw_bytes: raw(0) + raw(1) + raw(2),
            wire_bytes: self.wire.load(Ordering::Relaxed),
        }
    }
}

/// How a stream packs.
#[derive(Debug)]
enum How {
    Plain(String),
    Always(Codec),
    Auto(Box<Judge>),
}

/// A batch that was packed, copied, or left where it lies.
pub(super) struct Packed<'a> {
    /// What it is packed by.
    pub(super) codec: Option<Codec>,
    /// The bytes to send, packed or copied; `None`: they go from guest memory.
    pub(super) bytes: Option<&'a [u8]>,
    /// Nanoseconds that packing took.
    pub(super) pack_ns: f64,
}

/// One stream's.
pub(super) struct Packing<'a> {
    stream: u16,
    how: How,
    level: u8,
    skips_zero: bool,
    totals: &'a Totals,
    packer: Packer,
    /// The pages of the batch.
    raw: Vec<u8>,
}

impl<'a> Packing<'a> {
    /// For stream `stream`, whose receiver has accepted. `packs`: the stream speaks a version that has packed batches.
    /// Fails where pages are to be packed by a codec that the stream cannot have.
    pub(super) fn new(
        stream: u16,
        asked: Compress,
        packs: bool,
        path: Path,
        skips_zero: bool,
        totals: &'a Totals,
    ) -> Result<Self, String> {
        // The control loop refuses what the receiver did not offer before a page is sent; a stream may still differ.
        totals.check(asked)?;
        let how = match asked.codec() {
            Some((codec, _)) if packs => How::Always(codec),
            Some(_) => {
                return Err(format!(
                    "data stream {stream} speaks a version of the protocol without packed pages (--compress {asked}), \
                     though the control connection has them: are there two receivers of different versions at this \
                     address? Use --compress auto or none, or upgrade the older one"
                ));
            }
            None if asked == Compress::None => How::Plain("as asked".to_owned()),
            None if !packs => How::Plain("the stream takes no packed pages: the receiver is older".to_owned()),
            None if totals.offered().is_empty() => {
                How::Plain(format!("the receiver takes no packed pages: {TAKES_NONE}"))
            }
            None => How::Auto(Box::new(Judge::new(&totals.offered(), path))),
        };
        Ok(Packing {
            stream,
            how,
            level: asked.level(),
            skips_zero,
            totals,
            packer: Packer::default(),
            raw: Vec::new(),
        })
    }

    /// Packs the pages of `ranges`, if that is what is to be done with them. What is not packed is copied where it has to
    /// be `staged`: it has a checksum, and the guest goes on writing.
    pub(super) fn pack(
        &mut self,
        ram: &dyn GuestRam,
        ranges: &[PageRange],
        staged: bool,
    ) -> Result<Packed<'_>, String> {
        let plain = Packed {
            codec: None,
            bytes: None,
            pack_ns: 0.0,
        };
        if ranges.is_empty() {
            return Ok(plain);
        }
        let codec = match &self.how {
            How::Plain(_) => None,
            How::Always(codec) => Some(*codec),
            How::Auto(judge) => {
                if judge.wants_sample() {
                    self.sample(ram, ranges)?;
                }
                self.choice()
            }
        };
        if codec.is_none() && !staged {
            return Ok(plain);
        }
        let from = Instant::now();
        self.raw.clear();
        for range in ranges {
            copy_out(ram, *range, self.skips_zero, &mut self.raw)?;
        }
        let Some(codec) = codec else {
            return Ok(Packed {
                bytes: Some(&self.raw),
                ..plain
            });
        };
        let packed = self.packer.pack(codec, self.level, &self.raw);
        let packed = packed.map_err(|e| e.to_string())?;
        Ok(Packed {
            codec: packed.map(|_| codec),
            bytes: packed.or(staged.then_some(&self.raw)),
            pack_ns: nanos(from),
        })
    }

    fn choice(&self) -> Option<Codec> {
        match &self.how {
            How::Auto(judge) => judge.choice(),
            How::Plain(_) | How::Always(_) => None,
        }
    }

    /// Copies pages that were not packed out of guest memory, behind what `into` has.
    pub(super) fn copy_out(&self, ram: &dyn GuestRam, range: PageRange, into: &mut Vec<u8>) -> Result<(), String> {
        copy_out(ram, range, self.skips_zero, into)
    }

    /// A batch was sent.
    pub(super) fn sent(&mut self, codec: Option<Codec>, took: Took) {
        let number = codec.map_or(0, Codec::number) as usize;
        self.totals.raw[number].fetch_add(took.raw, Ordering::Relaxed);
        self.totals.wire.fetch_add(took.wire, Ordering::Relaxed);
        if let How::Auto(judge) = &mut self.how {
            judge.sent(took);
        }
    }

    /// Has every codec pack a few pages of `ranges`, for the judge.
    fn sample(&mut self, ram: &dyn GuestRam, ranges: &[PageRange]) -> Result<(), String> {
        let from = Instant::now();
        self.raw.clear();
        for pfn in spread(ranges, SAMPLE_PAGES) {
            let page = PageRange::between(pfn, Pfn(pfn.0 + 1));
            copy_out(ram, page, self.skips_zero, &mut self.raw)?;
        }
        let bytes = float(self.raw.len());
        let copy = nanos(from) / bytes;
        let mut costs = Vec::new();
        for codec in self.totals.offered() {
            let (mut pack, mut ratio) = (f64::INFINITY, 1.0);
            // The first one makes room, which is not what a batch costs; of the others the best, as a processor that
            // was taken away for a moment says nothing of the codec.
            for turn in 0..SAMPLE_TURNS {
                let from = Instant::now();
                let packed = self
                    .packer
                    .pack(codec, self.level, &self.raw)
                    .map_err(|e| e.to_string())?;
                ratio = packed.map_or(1.0, |packed| float(packed.len()) / bytes);
                if turn > 0 {
                    pack = nanos(from).min(pack);
                }
            }
            let pack = copy + pack / bytes;
            let cost = Cost { pack, ratio };
            costs.push((codec, cost));
        }
        if let How::Auto(judge) = &mut self.how {
            judge.sampled(&costs);
        }
        Ok(())
    }
}

impl Drop for Packing<'_> {
    fn drop(&mut self) {
        let why = match &self.how {
            How::Plain(why) => why.clone(),
            How::Always(_) => "as asked".to_owned(),
            How::Auto(judge) => judge.why().to_owned(),
        };
        let mut all = self.totals.why.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(self.stream, why);
    }
}

/// At most `most` pages, evenly from all over `ranges`.
fn spread(ranges: &[PageRange], most: u64) -> Vec<Pfn> {
    let total: u64 = ranges.iter().map(|range| range.count()).sum();
    let step = total.div_ceil(most).max(1);
    let (mut out, mut next, mut before) = (Vec::new(), 0, 0);
    for range in ranges {
        while next < before + range.count() {
            out.push(Pfn(range.start().0 + (next - before)));
            next += step;
        }
        before += range.count();
    }
    out
}

/// Appends the pages of `range` to `into`. Where pages were not looked at before, those that were never touched are not
/// read here either: that may allocate them.
fn copy_out(ram: &dyn GuestRam, range: PageRange, looked_at: bool, into: &mut Vec<u8>) -> Result<(), String> {
    let failed = |e: machine::Error| format!("reading pages {range}: {e}");
    let mut kinds = Vec::new();
    if looked_at {
        kinds.push((range, PageKind::Data));
    } else {
        let mut each = |part, kind| kinds.push((part, kind));
        ram.classify(range, &mut each).map_err(failed)?;
    }
    for (part, kind) in kinds {
        for pfn in part.start().0..part.end().0 {
            let at = into.len();
            into.resize(at + PAGE, 0);
            if kind == PageKind::Data
                && let Some((_, page)) = into.split_last_chunk_mut::<PAGE>()
            {
                ram.read_page(Pfn(pfn), page).map_err(failed)?;
            }
        }
    }
    Ok(())
}

fn nanos(from: Instant) -> f64 {
    from.elapsed().as_secs_f64() * 1e9
}

#[expect(clippy::cast_precision_loss, reason = "bytes of a batch, to be divided")]
fn float(bytes: usize) -> f64 {
    bytes.max(1) as f64
}

/// Bytes of so many pages.
pub(super) fn raw_bytes(pages: u64) -> u64 {
    pages * PAGE_BYTES
}

impl Compress {
    /// What was asked for by name, and its level.
    fn codec(self) -> Option<(Codec, u8)> {
        match self {
            Compress::Auto | Compress::None => None,
            Compress::Lz4 => Some((Codec::Lz4, ZSTD_LEVEL)),
            Compress::Zstd(level) => Some((Codec::Zstd, level)),
        }
    }

    fn level(self) -> u8 {
        self.codec().map_or(ZSTD_LEVEL, |(_, level)| level)
    }

    fn of(codec: Codec, level: u8) -> Compress {
        match codec {
            Codec::Lz4 => Compress::Lz4,
            Codec::Zstd => Compress::Zstd(level),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, pages: u64) -> PageRange {
        PageRange::between(Pfn(start), Pfn(start + pages))
    }

    #[test]
    fn samples_come_from_all_over_a_batch() {
        assert_eq!(spread(&[range(5, 3)], 16), [Pfn(5), Pfn(6), Pfn(7)]);
        let spread_out = spread(&[range(0, 100), range(1000, 1), range(2000, 155)], 16);
        assert_eq!(spread_out.len(), 16);
        assert!(spread_out.contains(&Pfn(96)) && spread_out.contains(&Pfn(2000 + 240 - 101)));
        assert!(spread(&[], 16).is_empty());
    }

    #[test]
    fn what_is_asked_for_by_name_has_to_be_offered() {
        let totals = Totals::default();
        assert!(totals.check(Compress::Auto).is_ok() && totals.check(Compress::None).is_ok());
        let error = totals.check(Compress::Zstd(3)).unwrap_err();
        assert!(error.contains("--compress zstd:3"), "{error}");
        totals.offer(Codec::Lz4.bit());
        assert!(totals.check(Compress::Lz4).is_ok() && totals.check(Compress::Zstd(1)).is_err());
    }

    const PATH: Path = Path {
        local: true,
        limit: None,
        streams: 1,
    };

    /// The control connection speaks version 2, this stream version 1.
    #[test]
    fn a_stream_that_cannot_pack_as_asked_fails() {
        let totals = Totals::default();
        totals.offer(Codec::ALL_BITS);
        for asked in [Compress::Lz4, Compress::Zstd(3)] {
            let error = Packing::new(7, asked, false, PATH, true, &totals).err().unwrap();
            let asked = format!("--compress {asked}");
            assert!(error.contains("data stream 7") && error.contains(&asked), "{error}");
        }
        let why = |packs, totals: &Totals| {
            drop(Packing::new(0, Compress::Auto, packs, PATH, true, totals).unwrap());
            totals.report(Compress::Auto).why
        };
        assert!(why(false, &totals).contains("older"));
        let none = why(true, &Totals::default());
        assert!(
            none.contains("takes no packed pages") && none.contains("copied to"),
            "{none}"
        );
    }

    #[test]
    fn the_report_names_what_most_pages_were_packed_by() {
        let totals = Totals::default();
        let report = totals.report(Compress::Auto);
        assert_eq!((report.used.as_str(), report.raw_bytes), ("none", 0));
        totals.offer(Codec::ALL_BITS);
        let mut packing = Packing::new(0, Compress::Zstd(4), true, PATH, true, &totals).unwrap();
        let took = |raw, wire| Took {
            raw,
            wire,
            ..Took::default()
        };
        packing.sent(None, took(100, 100));
        packing.sent(Some(Codec::Zstd), took(900, 200));
        drop(packing);
        let report = totals.report(Compress::Zstd(4));
        assert_eq!((report.used.as_str(), report.why.as_str()), ("zstd:4", "as asked"));
        assert_eq!((report.raw_bytes, report.wire_bytes), (1000, 300));
    }
}
