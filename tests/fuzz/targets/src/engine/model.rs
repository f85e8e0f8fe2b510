//! The guest that a fuzzed source migrates: a version number a page, a dirty log, a balloon that says what is free.
//!
//! A page that the guest calls free is nobody's until it writes it. Version 0 reads as zero.

use ::engine::{Rechecked, Scanned};
use machine::BalloonCounts;
use pages::{Layout, PageRange, PageSet, Pfn};
use std::sync::Arc;

pub(super) struct Guest {
    layout: Arc<Layout>,
    versions: Vec<u64>,
    /// What the destination has of each page, once all that was handed to streams has arrived.
    there: Vec<u64>,
    free: PageSet,
    present: PageSet,
    log: PageSet,
    pub(super) tracking: bool,
    pub(super) paused: bool,
    pub(super) session: Option<u32>,
    /// It waits for the pages that it handed over.
    pub(super) waits: bool,
    version: u64,
}

impl Guest {
    /// Every third page in use, every third free but touched, the rest never touched; all used at the end.
    pub(super) fn new(layout: &Arc<Layout>) -> Self {
        let total = usize::try_from(layout.total_pages()).expect("a small guest");
        let mut guest = Guest {
            layout: Arc::clone(layout),
            versions: vec![0; total],
            there: vec![0; total],
            free: PageSet::empty(layout),
            present: PageSet::empty(layout),
            log: PageSet::empty(layout),
            tracking: false,
            paused: false,
            session: None,
            waits: false,
            version: 0,
        };
        for index in 0..layout.total_pages() {
            match index % 3 {
                0 => guest.write(index),
                1 => {
                    guest.write(index);
                    guest.free(index);
                }
                _ => guest.free(index),
            }
        }
        guest
    }

    fn page(&self, index: u64) -> Pfn {
        self.layout.pfn_at(index % self.layout.total_pages()).expect("a page")
    }

    fn place(&self, page: Pfn) -> usize {
        let place = self.layout.index_of(page).and_then(|place| usize::try_from(place).ok());
        place.expect("a page of RAM")
    }

    /// The guest writes a page.
    pub(super) fn write(&mut self, index: u64) {
        if self.paused {
            return;
        }
        let page = self.page(index);
        self.version += 1;
        let place = self.place(page);
        self.versions[place] = self.version;
        self.present.insert(page);
        self.free.remove(page);
        if self.tracking {
            self.log.insert(page);
        }
    }

    /// The guest gives a page up.
    pub(super) fn free(&mut self, index: u64) {
        if !self.paused {
            self.free.insert(self.page(index));
        }
    }

    pub(super) fn start_tracking(&mut self) {
        self.tracking = true;
        self.log.clear();
    }

    pub(super) fn harvest(&mut self) -> PageSet {
        std::mem::replace(&mut self.log, PageSet::empty(&self.layout))
    }

    pub(super) fn give_back(&mut self, pages: &PageSet) {
        self.log.union_with(pages);
    }

    pub(super) fn logged(&self, pages: &PageSet) -> bool {
        pages.is_subset(&self.log)
    }

    pub(super) fn written(&self, range: PageRange) -> u64 {
        self.log.count_range(range)
    }

    pub(super) fn scan(&self, can_ask: bool, allocates: bool, poison: Option<u32>) -> Scanned {
        Scanned {
            present: self.present.clone(),
            ballooned: None,
            stats: None,
            dialect: "standard",
            can_ask: if can_ask { Ok(()) } else { Err("no driver".to_owned()) },
            allocates,
            poison,
            counts: BalloonCounts::default(),
        }
    }

    pub(super) fn recheck(&self) -> Rechecked {
        Rechecked {
            ballooned: None,
            counts: BalloonCounts::default(),
        }
    }

    /// The free pages of `range`, as the guest says now.
    pub(super) fn free_in(&self, range: PageRange) -> Vec<PageRange> {
        let runs = self.free.runs().map(|run| run.intersection(range));
        runs.filter(|run| !run.is_empty()).collect()
    }

    /// Pages were handed to a stream: at the worst they are read at once, and what is written later is not in them.
    pub(super) fn sent(&mut self, ranges: &[PageRange]) {
        for page in ranges.iter().flat_map(|range| range.start().0..range.end().0) {
            let place = self.place(Pfn(page));
            self.there[place] = self.versions[place];
        }
    }

    /// Pages are filled: whatever was there is not there any more.
    pub(super) fn filled(&mut self, ranges: &[PageRange]) {
        for page in ranges.iter().flat_map(|range| range.start().0..range.end().0) {
            let place = self.place(Pfn(page));
            self.there[place] = u64::MAX;
        }
    }

    /// Of a chunk: the pages that read as zero, which were told as such.
    pub(super) fn zero_in(&self, ranges: &[PageRange]) -> Vec<PageRange> {
        let pages = ranges.iter().flat_map(|range| range.start().0..range.end().0);
        let zero = pages.filter(|page| self.versions[self.place(Pfn(*page))] == 0);
        zero.map(|page| PageRange::between(Pfn(page), Pfn(page + 1))).collect()
    }

    /// A page in use whose content the destination lacks.
    pub(super) fn lost(&self) -> Option<Pfn> {
        let all = self
            .layout
            .regions()
            .iter()
            .flat_map(|region| region.start().0..region.end().0);
        all.map(Pfn).find(|page| {
            !self.free.contains(*page) && self.versions[self.place(*page)] != self.there[self.place(*page)]
        })
    }
}
