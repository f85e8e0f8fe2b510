//! The files that describe a guest whose RAM lies in a file, and the sets of pages that a free map becomes.
//!
//! The oracle: a layout that is taken holds what `pages` promises, and comes back from the file that says it; a set of
//! pages is held against plain booleans.

use arbitrary::{Result, Unstructured};
use memory::FreeMap;
use pages::{Layout, PageRange, PageSet, Pfn};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// One byte says which: a layout file's text; a free map for a layout of some regions; or a set's algebra.
pub fn layout_and_free_map(input: &[u8]) {
    let Some((what, rest)) = input.split_first() else {
        return;
    };
    let mut u = Unstructured::new(rest);
    // An input that ends early has said all it had to say.
    let _ = match what % 3 {
        0 => return layout_text(rest),
        1 => free_map(&mut u),
        _ => algebra(&mut u),
    };
}

/// Hands `bytes` over as a file.
fn with_file<T>(bytes: &[u8], load: impl FnOnce(&str) -> T) -> T {
    let mut file: File = memfd_create("fuzzed", MemfdFlags::CLOEXEC).expect("a memfd").into();
    file.write_all(bytes).expect("a memfd takes bytes");
    load(&format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn layout_text(text: &[u8]) {
    let Ok(layout) = with_file(text, |path| memory::layout_file::load(path)) else {
        return;
    };
    assert!(!layout.regions().is_empty() && layout.regions().len() <= pages::MAX_REGIONS);
    let (mut total, mut floor) = (0u64, Pfn(0));
    for region in layout.regions() {
        assert!(!region.is_empty() && region.start() >= floor);
        for page in [region.start(), Pfn(region.end().0 - 1)] {
            let index = layout.index_of(page).expect("a page of RAM has a place");
            assert_eq!(layout.pfn_at(index), Some(page));
        }
        assert_eq!(layout.index_of(region.start()), Some(total));
        (total, floor) = (total + region.count(), region.end());
    }
    assert!(total == layout.total_pages() && total <= pages::MAX_PAGES && layout.pfn_at(total).is_none());
    let regions = layout.regions().iter();
    let again: Vec<String> = regions
        .map(|r| format!(r#"{{"start":{},"bytes":{}}}"#, r.start().0 * 4096, r.bytes()))
        .collect();
    let again = format!(r#"{{"page_size":4096,"regions":[{}]}}"#, again.join(","));
    let back = with_file(again.as_bytes(), |path| memory::layout_file::load(path));
    assert_eq!(back.expect("a layout that was taken is taken again"), layout);
}

/// A few regions, small ones or one of many groups.
fn some_layout(u: &mut Unstructured<'_>) -> Result<Arc<Layout>> {
    let (mut regions, mut at) = (Vec::new(), 0u64);
    for _ in 0..u.int_in_range(1..=3)? {
        let start = at + u.int_in_range(0..=130)?;
        let pages = match u.int_in_range(0..=3)? {
            0 => 4096 * u.int_in_range(1..=70)? + u.int_in_range(0..=65)?,
            _ => u.int_in_range(1..=200)?,
        };
        regions.push(PageRange::between(Pfn(start), Pfn(start + pages)));
        at = start + pages;
    }
    Ok(Arc::new(Layout::new(regions).expect("regions in order")))
}

fn free_map(u: &mut Unstructured<'_>) -> Result<()> {
    let layout = some_layout(u)?;
    let right = usize::try_from(layout.total_pages().div_ceil(8)).expect("a small layout");
    let len = match u.int_in_range(0..=7)? {
        0 => u.int_in_range(0..=right + 2)?,
        _ => right,
    };
    let mut bitmap = vec![u.arbitrary::<u8>()?; len];
    let said = u.bytes(u.len().min(len))?;
    bitmap[..said.len()].copy_from_slice(said);
    let map = with_file(&bitmap, |path| FreeMap::load(path, &layout));
    assert_eq!(
        map.is_ok(),
        len == right,
        "a map of {len} bytes for {} pages",
        layout.total_pages()
    );
    let Ok(map) = map else { return Ok(()) };
    let bit = |index: u64| usize::try_from(index).is_ok_and(|i| bitmap[i / 8] >> (i % 8) & 1 == 1);
    for index in 0..layout.total_pages().min(2000) {
        let page = layout.pfn_at(index).expect("a page");
        assert_eq!(map.free().contains(page), bit(index), "page {page}");
    }
    let count = (0..layout.total_pages()).filter(|index| bit(*index)).count();
    assert_eq!(map.free().count(), count as u64);
    let back = PageSet::from_bitmap(&layout, &map.free().to_bitmap()).expect("as long as it has to be");
    assert_eq!(back.runs().collect::<Vec<_>>(), map.free().runs().collect::<Vec<_>>());
    Ok(())
}

/// A set of pages beside the booleans that it stands for.
struct Twin {
    layout: Arc<Layout>,
    set: PageSet,
    plain: Vec<bool>,
}

impl Twin {
    fn new(layout: &Arc<Layout>) -> Self {
        let total = usize::try_from(layout.total_pages()).expect("a small layout");
        Twin {
            layout: Arc::clone(layout),
            set: PageSet::empty(layout),
            plain: vec![false; total],
        }
    }

    /// The places of the pages of `range` that are RAM.
    fn places(&self, range: PageRange) -> impl Iterator<Item = usize> + use<> {
        let parts: Vec<PageRange> = self.layout.clip(range).collect();
        let first = |part: &PageRange| self.layout.index_of(part.start()).expect("clipped to RAM");
        let all: Vec<(u64, u64)> = parts.iter().map(|part| (first(part), part.count())).collect();
        all.into_iter()
            .flat_map(|(first, count)| first..first + count)
            .map(|place| usize::try_from(place).expect("a small layout"))
    }

    /// Sets or clears a range in both; as many pages change.
    fn mark(&mut self, range: PageRange, value: bool) {
        let changed = if value {
            self.set.insert_range(range)
        } else {
            self.set.remove_range(range)
        };
        let mut expected = 0;
        for place in self.places(range) {
            expected += u64::from(self.plain[place] != value);
            self.plain[place] = value;
        }
        assert_eq!(changed, expected, "{range}");
    }

    /// Has the set and the booleans take others in; as many pages change.
    fn with(&mut self, others: &[bool], act: impl FnOnce(&mut PageSet) -> u64, each: fn(bool, bool) -> bool) {
        let changed = act(&mut self.set);
        let mut expected = 0;
        for (mine, other) in self.plain.iter_mut().zip(others) {
            let next = each(*mine, *other);
            expected += u64::from(next != *mine);
            *mine = next;
        }
        assert_eq!(changed, expected);
    }

    /// Puts in the pages that a bitmap names.
    fn mark_bits(&mut self, start: Pfn, bits: &[u8]) {
        self.set.insert_bitmap(start, bits);
        for (i, byte) in (0u64..).zip(bits) {
            for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
                let page = start.0 + i * 8 + bit;
                for place in self.places(PageRange::between(Pfn(page), Pfn(page + 1))) {
                    self.plain[place] = true;
                }
            }
        }
    }

    /// Takes a run out.
    fn take(&mut self, from: Pfn, most: u64) {
        let taken = self.set.take_run(from, most);
        for place in taken.into_iter().flat_map(|run| self.places(run)).collect::<Vec<_>>() {
            assert!(
                std::mem::take(&mut self.plain[place]),
                "a page that was not there was taken"
            );
        }
    }

    fn check(&self) {
        let count = self.plain.iter().filter(|is| **is).count() as u64;
        assert_eq!((self.set.count(), self.set.is_empty()), (count, count == 0));
        let bitmap = self.set.to_bitmap();
        let equal = self
            .plain
            .iter()
            .enumerate()
            .all(|(i, is)| (bitmap[i / 8] >> (i % 8) & 1 == 1) == *is);
        assert!(equal, "the set is not what it should be");
    }
}

fn algebra(u: &mut Unstructured<'_>) -> Result<()> {
    let layout = some_layout(u)?;
    let mut twins = [Twin::new(&layout), Twin::new(&layout)];
    for _ in 0..40 {
        if u.is_empty() {
            break;
        }
        let which = usize::from(u.arbitrary::<bool>()?);
        let (start, pages) = (
            u.int_in_range(0..=layout.end().0 + 5)?,
            u.int_in_range(0..=layout.total_pages() + 5)?,
        );
        let range = PageRange::between(Pfn(start), Pfn(start + pages));
        let [a, b] = &mut twins;
        let (one, other) = if which == 0 { (a, b) } else { (b, a) };
        match u.int_in_range(0..=7)? {
            0 => one.with(&other.plain, |set| set.union_with(&other.set), |a, b| a || b),
            1 => one.with(&other.plain, |set| set.subtract(&other.set), |a, b| a && !b),
            2 => one.with(&other.plain, |set| set.intersect_with(&other.set), |a, b| a && b),
            3 => one.mark_bits(Pfn(start), u.bytes(u.len().min(20))?),
            4 => one.take(Pfn(start), pages),
            _ => one.mark(range, u.ratio(2, 3)?),
        }
    }
    twins.iter().for_each(Twin::check);
    Ok(())
}
