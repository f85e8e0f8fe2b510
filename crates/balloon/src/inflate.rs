//! Inflating and deflating (virtio 1.3, section 5.5.6), and the pages in the balloon.
//!
//! A buffer is an array of 32-bit little-endian page frame numbers, split over descriptors anywhere, in the middle of an
//! entry too; or, with PAGE_BITMAP, a header and a bitmap (see [`crate::window`]). What an inflate buffer names goes into
//! the set of ballooned pages, whose words a bitmap joins 64 at a time. Naming a page again changes nothing.
//!
//! Invariant: a page is in the set only while every word of the guest on pages that left is understood. A buffer that may
//! have been such a word and is not believed empties it, and so does a queue that is heard no more, until a reset. While it
//! is open whether a buffer was such a word (see [`Aside`]), the set is empty too.
//!
//! With [`DiscardPolicy::AtOnce`], memory is given back by whole granules of the host (4 KiB, or 2 MiB where huge pages
//! back the guest), once all pages of a granule are in the balloon, and in one call a run, the runs being merged.

use crate::config::DiscardPolicy;
use crate::counters::Counters;
use crate::device::Discard;
use crate::queue::{Chain, Fate};
use crate::window::{self, Form, MOST_WINDOW, Unbelieved};
use pages::{Layout, PageRange, PageSet, Pfn};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use vm_memory::GuestMemory;

/// The most entries of one buffer that are honoured. Linux sends 256, Windows 1024.
const MOST_PFNS: usize = 1 << 16;

/// What a driver's bitmap held when it came last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LastBits {
    /// Of its place and its bits, as an inflate or deflate buffer.
    digest: Option<u64>,
    /// It has carried an answer to a question since, or was overwritten while it was read.
    was_an_answer: bool,
}

/// What an inflate buffer brought that may be compaction's. The next buffer tells: the driver sends its bitmap on the deflate
/// queue as well then, and nothing else in between.
#[derive(Clone, Debug)]
pub(crate) struct Aside {
    /// What was in the balloon before it.
    pub(crate) before: PageSet,
    /// The pages that it names.
    pub(crate) named: PageSet,
    /// Of its place and its bits.
    pub(crate) digest: u64,
}

/// The pages that the guest gave up.
pub(crate) struct Ballooned {
    layout: Arc<Layout>,
    set: PageSet,
    discard: Arc<dyn Discard>,
    policy: DiscardPolicy,
    /// How buffers carry bitmaps; `None` where they carry arrays.
    form: Option<Form>,
    /// What the driver's bitmap held when it came last; see [`Ballooned::is_stale`].
    last: LastBits,
    /// While it is not known whether an inflation was compaction's, nothing is in the balloon; see [`Aside`].
    aside: Option<Aside>,
    /// A page is used again only after the deflate buffer that names it (MUST_TELL_HOST).
    tells: bool,
    /// The inflate or the deflate queue was stopped: what the guest says of its balloon is not heard in whole.
    deaf: bool,
    /// Scratch: the bytes and the numbers of one buffer.
    bytes: Vec<u8>,
    pfns: Vec<u32>,
}

impl Ballooned {
    pub(crate) fn new(layout: &Arc<Layout>, discard: Arc<dyn Discard>, policy: DiscardPolicy) -> Self {
        Ballooned {
            layout: Arc::clone(layout),
            set: PageSet::empty(layout),
            discard,
            policy,
            form: None,
            last: LastBits::default(),
            aside: None,
            tells: false,
            deaf: false,
            bytes: Vec::new(),
            pfns: Vec::new(),
        }
    }

    /// The pages in the balloon.
    pub(crate) fn pages(&self) -> &PageSet {
        &self.set
    }

    /// Back to before a driver came.
    pub(crate) fn clear(&mut self) {
        self.replace(PageSet::empty(&self.layout), LastBits::default(), None);
    }

    /// Takes over the set that another device had.
    pub(crate) fn replace(&mut self, set: PageSet, last: LastBits, aside: Option<Aside>) {
        self.set = set;
        self.last = last;
        self.aside = aside;
        self.deaf = false;
    }

    /// The inflate or the deflate queue was stopped. Until a reset nothing goes into the balloon: the guest may take pages
    /// out and no one hears of it.
    pub(crate) fn deafen(&mut self) {
        self.distrust("a queue was stopped");
        self.deaf = true;
    }

    /// Nothing that is in the balloon is believed to be there any more.
    fn distrust(&mut self, why: &'static str) {
        tracing::debug!(why, "nothing in the balloon is believed");
        self.set = PageSet::empty(&self.layout);
        self.aside = None;
    }

    /// What is aside, for saved state.
    pub(crate) fn aside(&self) -> Option<&Aside> {
        self.aside.as_ref()
    }

    /// What is aside was no compaction: all of it is in the balloon, but for what the guest takes `out` by now.
    fn take_back(&mut self, out: Option<&PageSet>, counters: &mut Counters) {
        let Some(Aside { before, mut named, .. }) = self.aside.take() else {
            return;
        };
        self.set = before;
        if self.policy == DiscardPolicy::MarkOnly || !self.tells {
            self.set.union_with(&named);
            return;
        }
        // Discarding comes late: what the guest may have taken back since, with a word or without (quirk 8), stays.
        if let Some(out) = out {
            named.subtract(out);
        }
        named.subtract(&multiples_of_64(&self.layout));
        self.put_in(named, counters);
    }

    /// What the driver's bitmap held when it came last, for saved state.
    pub(crate) fn last_bits(&self) -> LastBits {
        self.last
    }

    /// An answer to a question came out of the driver's one bitmap: what it holds now may go out as an inflation.
    pub(crate) fn bitmap_was_an_answer(&mut self) {
        self.last.was_an_answer = true;
    }

    /// Whether an inflate buffer may be one that the driver sends a second time, which is how it tells of compaction (quirk 11):
    /// it moved a page out of the balloon, and does not say which. The driver does not rewrite its bitmap for that, so the
    /// bits are those of the buffer before, on whichever queue that was; after an answer to a question they may be its. The
    /// same bits come on the deflate queue next, and nothing in the balloon can be believed after that; each later inflate
    /// names all of it again (quirk 10). Any other buffer that comes next shows that it was an inflation.
    fn is_stale(&self, bits: u64) -> bool {
        self.last.was_an_answer || self.last.digest == Some(bits)
    }

    fn came(&mut self, bits: u64) {
        self.last = LastBits {
            digest: Some(bits),
            was_an_answer: false,
        };
    }

    /// The driver's features are known: whether buffers carry bitmaps, and how; whether it tells before it takes.
    pub(crate) fn speak(&mut self, form: Option<Form>, tells: bool) {
        self.form = form;
        self.tells = tells;
    }

    /// Serves one buffer of the inflate queue.
    pub(crate) fn inflate<M: GuestMemory>(&mut self, mem: &M, chain: &Chain, counters: &mut Counters) -> Fate {
        if self.deaf {
            return Fate::Used(0);
        }
        if let Some(form) = self.form {
            if let Some((named, bits)) = self.take_bitmap(mem, chain, &form, counters) {
                // A driver with something to say names a page. One that names none is compaction's too: what the driver
                // leaves in its bitmap behind a window without pages.
                if named.is_empty() {
                    counters.stale_bitmaps += 1;
                    self.distrust("an inflate bitmap names no page");
                } else {
                    self.take_back(None, counters);
                    if self.is_stale(bits) {
                        let before = std::mem::replace(&mut self.set, PageSet::empty(&self.layout));
                        let digest = bits;
                        self.aside = Some(Aside { before, named, digest });
                    } else {
                        self.put_in(named, counters);
                    }
                }
                self.came(bits);
            }
        } else if self.take_pfns(mem, chain, counters) {
            let mut whole = Vec::new();
            let mut bad = 0;
            let layout = Arc::clone(&self.layout);
            for run in runs(&self.pfns) {
                bad += run.count();
                for part in layout.clip(run) {
                    bad -= part.count();
                    insert(&mut self.set, part, self.discard.granule_pages(), &mut whole);
                }
            }
            counters.bad_pfns += bad;
            self.release(whole, counters);
        }
        Fate::Used(0)
    }

    /// Puts in the pages that a bitmap named.
    fn put_in(&mut self, mut named: PageSet, counters: &mut Counters) {
        if self.policy == DiscardPolicy::MarkOnly {
            self.set.union_with(&named);
            return;
        }
        if self.discard.granule_pages() > 1 {
            // The guest may have taken such a page back without a word (quirk 8), and a granule is given back in whole:
            // only one that this very buffer names is known to be in the balloon.
            let mut unsaid = multiples_of_64(&self.layout);
            unsaid.subtract(&named);
            self.set.subtract(&unsaid);
        }
        // Only pages that were not in the balloon can make a granule whole. Each of their runs goes in in bulk.
        named.subtract(&self.set);
        let mut whole = Vec::new();
        for run in named.runs() {
            insert(&mut self.set, run, self.discard.granule_pages(), &mut whole);
        }
        self.release(whole, counters);
    }

    /// Gives granules that became whole back to the host, where that is the policy.
    fn release(&self, whole: Vec<PageRange>, counters: &mut Counters) {
        if self.policy == DiscardPolicy::AtOnce {
            give_back(&*self.discard, &whole, counters);
        }
    }

    /// Serves one buffer of the deflate queue.
    pub(crate) fn deflate<M: GuestMemory>(&mut self, mem: &M, chain: &Chain, counters: &mut Counters) -> Fate {
        if self.deaf {
            return Fate::Used(0);
        }
        if let Some(form) = self.form {
            if let Some((named, bits)) = self.take_bitmap(mem, chain, &form, counters) {
                if self.aside.as_ref().is_some_and(|aside| aside.digest == bits) {
                    counters.stale_bitmaps += 1;
                    self.distrust("the same bitmap came on both queues: compaction's");
                } else {
                    self.take_back(Some(&named), counters);
                    self.set.subtract(&named);
                }
                self.came(bits);
            }
        } else if !self.take_pfns(mem, chain, counters) || chain.readable_bytes() > (MOST_PFNS * 4) as u64 {
            self.distrust("a deflate array was refused or cut");
        } else {
            for run in runs(&self.pfns) {
                let ram: u64 = self.layout.clip(run).map(PageRange::count).sum();
                counters.bad_pfns += run.count() - ram;
                self.set.remove_range(run);
            }
        }
        Fate::Used(0)
    }

    /// Reads the pages of RAM that a buffer's bitmap names; `None` where it is not to be believed at all. Nor is the
    /// balloon then, whichever queue it came on: compaction uses both, and the driver may have no bitmap to send.
    fn take_bitmap<M: GuestMemory>(
        &mut self,
        mem: &M,
        chain: &Chain,
        form: &Form,
        counters: &mut Counters,
    ) -> Option<(PageSet, u64)> {
        let start = match window::read(mem, chain, form, &mut self.bytes) {
            Ok(start) => start,
            Err(unbelieved) => {
                tracing::debug!(?unbelieved, len = chain.readable_bytes(), "page bitmap skipped");
                counters.malformed += 1;
                counters.bad_headers += u64::from(matches!(unbelieved, Unbelieved::Header(_)));
                counters.torn += u64::from(unbelieved == Unbelieved::Torn);
                // What the driver's bitmap holds by now, compaction may send as it is.
                self.last.was_an_answer |= unbelieved == Unbelieved::Torn;
                self.distrust("a buffer that should carry a bitmap was refused");
                return None;
            }
        };
        let bitmap = self.bytes.get(form.header..).unwrap_or(&[]);
        let mut named = PageSet::empty(&self.layout);
        let ram = named.insert_bitmap(start, bitmap);
        counters.bad_pfns += window::ones(bitmap) - ram;
        let digest = xxhash_rust::xxh3::xxh3_64_with_seed(bitmap, start.0);
        Some((named, digest))
    }

    /// Reads the numbers of a buffer, sorted, each once. False where the buffer is not to be believed at all.
    fn take_pfns<M: GuestMemory>(&mut self, mem: &M, chain: &Chain, counters: &mut Counters) -> bool {
        self.pfns.clear();
        let len = chain.readable_bytes();
        let why = if chain.has_writable() {
            "it has a device-writable descriptor"
        } else if !len.is_multiple_of(4) {
            "its length is not a multiple of 4"
        } else if chain.gather(mem, 0, MOST_PFNS * 4, &mut self.bytes).is_err() {
            "it does not lie in guest memory"
        } else {
            if len > (MOST_PFNS * 4) as u64 {
                tracing::debug!(len, honoured = MOST_PFNS * 4, "page frame number buffer is too long");
                counters.malformed += 1;
            }
            let entries = self.bytes.chunks_exact(4);
            self.pfns
                .extend(entries.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])));
            self.pfns.sort_unstable();
            self.pfns.dedup();
            return true;
        };
        tracing::debug!(len, why, "page frame number buffer skipped");
        counters.malformed += 1;
        false
    }
}

/// Gives the memory of `ranges`, each of which lies in one region, back to the host. A refusal is counted: memory is then
/// not saved, and nothing else is wrong.
pub(crate) fn give_back(discard: &dyn Discard, ranges: &[PageRange], counters: &mut Counters) {
    discard.discard_all(ranges, &mut |range, result| {
        counters.discards += 1;
        match result {
            Ok(()) => counters.discarded_pages += range.count(),
            Err(error) => {
                tracing::debug!(%range, %error, "discard failed");
                counters.discard_errors += 1;
            }
        }
    });
}

/// Runs of sorted numbers without duplicates.
fn runs(pfns: &[u32]) -> impl Iterator<Item = PageRange> + '_ {
    pfns.chunk_by(|a, b| a.checked_add(1) == Some(*b)).map(|run| {
        let start = Pfn(u64::from(run[0]));
        PageRange::between(start, Pfn(start.0 + run.len() as u64))
    })
}

/// Puts `part`, which lies in one region, into `set`. The granules that became whole by it go to `whole`; one that was
/// whole before does not.
fn insert(set: &mut PageSet, part: PageRange, granule: u64, whole: &mut Vec<PageRange>) {
    let granule = granule.max(1);
    let layout = Arc::clone(set.layout());
    // Fresh granules in the middle go in at once; the rest, and granules known in part, one by one.
    let inner = whole_granules(part, granule);
    let bulk = !inner.is_empty() && set.count_range(inner) == 0;
    let mut at = part.start();
    while at < part.end() {
        if bulk && at == inner.start() {
            set.insert_range(inner);
            push_joined(whole, &layout, inner);
            at = inner.end();
            continue;
        }
        let start = Pfn(at.0 - at.0 % granule);
        let outer = PageRange::between(start, Pfn(start.0.saturating_add(granule)));
        let piece = outer.intersection(part);
        let had = set.count_range(outer);
        let new = set.insert_range(piece);
        // A granule that crosses a region's border is not one of the host's.
        if new > 0 && had + new == granule && layout.region_of_range(outer).is_some() {
            push_joined(whole, &layout, outer);
        }
        at = piece.end();
    }
}

/// The whole granules inside `range`; empty where there is none.
pub(crate) fn whole_granules(range: PageRange, granule: u64) -> PageRange {
    let granule = granule.max(1);
    let first = range.start().0.div_ceil(granule).saturating_mul(granule);
    PageRange::between(Pfn(first), Pfn(range.end().0 - range.end().0 % granule))
}

/// Adds `range`, joined with the last of `list` where the two touch in one region.
pub(crate) fn push_joined(list: &mut Vec<PageRange>, layout: &Layout, range: PageRange) {
    if let Some(last) = list.last_mut()
        && last.end() == range.start()
        && let joined = PageRange::between(last.start(), range.end())
        && layout.region_of_range(joined).is_some()
    {
        *last = joined;
    } else if !range.is_empty() {
        list.push(range);
    }
}

/// The pages of RAM that the guest may take back without a word where buffers carry bitmaps (quirk 8): one in 64.
pub(crate) fn multiples_of_64(layout: &Arc<Layout>) -> PageSet {
    // 32 GiB at a time: one bit in every word.
    let pattern: Vec<u8> = [1, 0, 0, 0, 0, 0, 0, 0].repeat(MOST_WINDOW / 8);
    let pages = MOST_WINDOW as u64 * 8;
    let mut set = PageSet::empty(layout);
    for region in layout.regions() {
        let mut start = Pfn(region.start().0 - region.start().0 % pages);
        while start < region.end() {
            set.insert_bitmap(start, &pattern);
            start = Pfn(start.0.saturating_add(pages));
        }
    }
    set
}
