//! A guest as a model: a version number a page, a dirty log, a balloon that says which pages are free.
//!
//! Version 0 reads as zero. A free page that is written is no longer free; a page that is freed keeps its version, which
//! from then on is nobody's.

use crate::rng::Rng;
use engine::{Peeked, Rechecked, Scanned};
use machine::{Answer, BalloonCounts, GuestMemoryStats};
use pages::{Layout, PageRange, PageSet};
use std::collections::VecDeque;
use std::sync::Arc;

/// What is in memory that nobody wrote.
pub const GARBAGE: u64 = u64::MAX;
/// What the guest fills free pages with, where it does.
pub const POISON: u64 = u64::MAX - 1;

/// How a guest is made.
#[derive(Clone, Debug)]
pub struct Make {
    pub layout: Arc<Layout>,
    pub running: bool,
    /// Whether the balloon's driver allocates what it hands over, and whether the guest zeroes what it allocates.
    pub allocates: bool,
    pub init_on_alloc: bool,
    pub poison: bool,
    /// Whether it answers to the end.
    pub finishes: bool,
    pub can_ask: bool,
    /// Whether it says at times that it has said all of a window before it has.
    pub torn: bool,
    /// Whether some of what it saw is said only after the session's end.
    pub holds_back: bool,
    /// Whether it tells what it uses.
    pub stats: bool,
    /// Whether pages have left the balloon without a word, and are in use, before anybody tracks writes. The balloon finds out
    /// some time later, when the guest is paused at the latest: of them alone, or that nothing in it is to be believed.
    pub leaves_silently: bool,
    pub believes_nothing_then: bool,
    /// Writes that it makes in all, for it to come to rest.
    pub writes: u64,
}

/// The guest at the source.
#[derive(Clone, Debug)]
pub struct Guest {
    pub make: Make,
    pub ram: Vec<u64>,
    pub free: Vec<bool>,
    pub running: bool,
    pub tracking: bool,
    pub log: PageSet,
    /// Everything written since tracking was turned on.
    pub written: PageSet,
    /// Whether the log had all of `written` when tracking was turned off.
    pub whole_at_stop: Option<bool>,
    pub session: Option<u32>,
    /// Whether it waits for the pages that it handed over.
    pub waits: bool,
    pub sessions: Vec<u32>,
    pub ballooned: Option<PageSet>,
    /// Those that left it without a word, as far as the balloon has not found out.
    pub left: PageSet,
    pub counts: BalloonCounts,
    present: PageSet,
    version: u64,
    looks: VecDeque<PageRange>,
    said: VecDeque<(u32, Answer)>,
    /// Answers that come only after their session has ended.
    held: VecDeque<(u32, Answer)>,
    finished_said: bool,
    /// Pages that it saw to be free: it likes to use those next, before it has said so.
    seen_free: Vec<usize>,
}

impl Guest {
    /// RAM of four parts, mixed by `rng`: in use, free, in the balloon, never touched.
    pub fn new(make: Make, rng: &mut Rng) -> Self {
        let layout = &make.layout;
        let total = layout.total_pages() as usize;
        let (mut ram, mut free) = (vec![0; total], vec![false; total]);
        let (mut present, mut ballooned, mut left) =
            (PageSet::empty(layout), PageSet::empty(layout), PageSet::empty(layout));
        let mut version = 0;
        let mut at = 0;
        while at < total {
            let run = 1 + rng.below(40) as usize;
            let kind = rng.below(5);
            for i in at..(at + run).min(total) {
                let pfn = layout.pfn_at(i as u64).unwrap();
                free[i] = kind >= 2;
                if kind != 4 {
                    present.insert(pfn);
                    version += 1;
                    // Some pages in use are zero.
                    ram[i] = if kind == 0 && rng.one_in(3) { 0 } else { version };
                }
                if kind == 3 {
                    ballooned.insert(pfn);
                    if make.leaves_silently && rng.one_in(4) {
                        free[i] = false;
                        left.insert(pfn);
                    }
                }
            }
            at += run;
        }
        Guest {
            log: PageSet::empty(layout),
            written: PageSet::empty(layout),
            running: make.running,
            ballooned: (!rng.one_in(3)).then_some(ballooned),
            left,
            // It has been asked before, in another migration.
            counts: BalloonCounts {
                answers: 1000,
                malformed: 10,
                ..BalloonCounts::default()
            },
            make,
            ram,
            free,
            tracking: false,
            whole_at_stop: None,
            session: None,
            waits: false,
            sessions: Vec::new(),
            present,
            version,
            looks: VecDeque::new(),
            said: VecDeque::new(),
            held: VecDeque::new(),
            seen_free: Vec::new(),
            finished_said: false,
        }
    }

    /// Writes page number `index`, if the guest may: it takes no page back that it handed over.
    pub fn write(&mut self, index: usize) {
        self.version += 1;
        self.put(index, self.version);
        self.free[index] = false;
    }

    fn put(&mut self, index: usize, version: u64) {
        let pfn = self.make.layout.pfn_at(index as u64).unwrap();
        self.ram[index] = version;
        self.present.insert(pfn);
        if let Some(ballooned) = &mut self.ballooned {
            ballooned.remove(pfn);
        }
        if self.tracking {
            self.log.insert(pfn);
            self.written.insert(pfn);
        }
    }

    /// What a running guest does: mostly it writes, pages of a small set rather than any; now and then it frees a page.
    pub fn live(&mut self, rng: &mut Rng) {
        let total = self.ram.len() as u64;
        if rng.one_in(200) {
            self.find_out();
        }
        self.make.writes = self.make.writes.saturating_sub(1);
        let index = match rng.below(4) {
            0 => rng.below(total) as usize,
            1 if !self.seen_free.is_empty() => self.seen_free[rng.below(self.seen_free.len() as u64) as usize],
            _ => rng.below(total.min(24)) as usize,
        };
        if rng.one_in(8) {
            self.free[index] = true;
        } else {
            self.write(index);
        }
    }

    pub fn start_tracking(&mut self) {
        self.tracking = true;
        self.log.clear();
        self.written.clear();
    }

    pub fn stop_tracking(&mut self) {
        self.whole_at_stop = Some(self.written.is_subset(&self.log));
        self.tracking = false;
    }

    pub fn harvest(&mut self) -> PageSet {
        let empty = PageSet::empty(&self.make.layout);
        std::mem::replace(&mut self.log, empty)
    }

    pub fn peek(&self, range: PageRange) -> Peeked {
        Peeked {
            range,
            written: Some(self.log.count_range(range)),
        }
    }

    pub fn scan(&self, skip_hole: bool) -> Scanned {
        let layout = &self.make.layout;
        Scanned {
            present: if skip_hole {
                self.present.clone()
            } else {
                PageSet::full(layout)
            },
            ballooned: self.ballooned.clone(),
            stats: self.make.stats.then(|| GuestMemoryStats {
                free_pages: self.free.iter().filter(|f| **f).count() as u64,
                total_pages: layout.total_pages(),
            }),
            dialect: "standard",
            can_ask: if self.make.can_ask {
                Ok(())
            } else {
                Err("the guest has no driver".to_owned())
            },
            allocates: self.make.allocates,
            poison: self.make.poison.then_some(0xaaaa_aaaa),
            counts: self.counts,
        }
    }

    pub fn recheck(&self) -> Rechecked {
        Rechecked {
            ballooned: self.ballooned.clone(),
            counts: self.counts,
        }
    }

    /// The balloon finds out that pages had left it.
    pub fn find_out(&mut self) {
        if self.left.is_empty() {
            return;
        }
        self.counts.stale_bitmaps += 1;
        if let Some(ballooned) = &mut self.ballooned {
            if self.make.believes_nothing_then {
                ballooned.clear();
            }
            ballooned.subtract(&self.left);
        }
        self.left.clear();
    }

    /// The guest will look at its free pages, window by window, and say what it saw some time later.
    pub fn begin(&mut self, session: u32, rng: &mut Rng) {
        self.session = Some(session);
        self.counts.answers += 7;
        self.waits = true;
        self.sessions.push(session);
        for region in self.make.layout.regions() {
            let mut rest = *region;
            while !rest.is_empty() {
                let (window, tail) = rest.split_at(16 + rng.below(80));
                self.looks.push_back(window);
                rest = tail;
            }
        }
        self.finished_said = !self.make.finishes;
    }

    pub fn has_to_say(&self) -> bool {
        !self.said.is_empty() || (self.session.is_some() && (!self.looks.is_empty() || !self.finished_said))
    }

    /// Looks at a window, or says what it saw. An answer may be said after its session has ended.
    pub fn speak(&mut self, rng: &mut Rng) -> Option<(u32, Answer)> {
        if let (Some(session), true) = (self.session, self.said.is_empty() || rng.one_in(2)) {
            if let Some(window) = self.looks.pop_front() {
                let torn = self.make.torn && rng.one_in(4);
                self.look(session, window, torn);
                if self.make.holds_back && rng.one_in(4) {
                    self.held.extend(self.said.drain(..));
                }
                return None;
            }
            if self.said.is_empty() && !self.finished_said {
                self.finished_said = true;
                return Some((session, Answer::Finished));
            }
        }
        self.said.pop_front()
    }

    fn look(&mut self, session: u32, window: PageRange, torn: bool) {
        let layout = Arc::clone(&self.make.layout);
        let first = layout.index_of(window.start()).unwrap() as usize;
        let mut free = PageSet::empty(&layout);
        for i in first..first + window.count() as usize {
            if self.free[i] {
                self.seen_free.push(i);
                free.insert(layout.pfn_at(i as u64).unwrap());
                if self.make.allocates && self.make.init_on_alloc {
                    self.put(i, 0);
                }
            }
        }
        self.said.push_back((session, Answer::Free(free.runs().collect())));
        self.said.push_back((session, Answer::Covered(window)));
        if torn {
            // A dialect that says too early that it has said all: its pages may be under way when they are called free.
            let last = self.said.len() - 1;
            self.said.swap(last, last - 1);
        }
    }

    /// Another migration has another sink for answers.
    pub fn new_sink(&mut self) {
        self.said.clear();
        self.sessions.clear();
    }

    /// A guest that poisons what it frees writes all that it handed over, once it has it back.
    pub fn end(&mut self, hold: bool) {
        if self.waits && !hold && self.make.poison && self.running {
            for i in std::mem::take(&mut self.seen_free) {
                if self.free[i] {
                    self.put(i, POISON);
                }
            }
        }
        self.waits = hold;
        self.said.append(&mut self.held);
        self.session = None;
        self.looks.clear();
    }
}
