//! What the tests of the guest share: small guests, answers collected, RAM copied.
#![allow(dead_code)]

use machine::{Answer, AnswerSink, DirtyTracker, FreePages, GuestRam};
use memory::{Backing, GuestMemory};
use pages::{Layout, PAGE_BYTES, PageRange, PageSet, Pfn};
use softguest::{GuestConfig, SoftGuest};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A guest of `pages` pages in one region.
pub(crate) fn config(pages: u64) -> GuestConfig {
    GuestConfig::new(Arc::new(Layout::flat(pages).unwrap()))
}

pub(crate) fn start(config: GuestConfig) -> SoftGuest {
    SoftGuest::start(config, &Backing::Anonymous).unwrap()
}

/// Waits for `condition`; only a guard against hanging.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < end, "waited a minute in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What a guest answered.
#[derive(Default)]
pub(crate) struct Answers(Mutex<Vec<Answer>>);

impl Answers {
    pub(crate) fn sink(self: &Arc<Self>) -> AnswerSink {
        let answers = Arc::clone(self);
        Arc::new(move |_, answer| answers.0.lock().unwrap().push(answer))
    }

    pub(crate) fn finished(&self) -> bool {
        self.0.lock().unwrap().contains(&Answer::Finished)
    }

    pub(crate) fn free(&self, layout: &Arc<Layout>) -> PageSet {
        let mut set = PageSet::empty(layout);
        for answer in self.0.lock().unwrap().iter() {
            if let Answer::Free(ranges) = answer {
                set.extend(ranges.iter().copied());
            }
        }
        set
    }
}

/// Asks, waits for all of the answer, and leaves the session open.
pub(crate) fn ask(free_pages: &mut dyn FreePages, session: u32, layout: &Arc<Layout>) -> PageSet {
    let answers = Arc::new(Answers::default());
    free_pages.begin(session, answers.sink()).unwrap();
    wait_until("the guest answers", || answers.finished());
    answers.free(layout)
}

/// Copies pages as a migration does.
pub(crate) fn copy(from: &GuestMemory, to: &GuestMemory, pages: &PageSet) {
    let mut page = [0; 4096];
    for run in pages.runs() {
        for pfn in (run.start().0..run.end().0).map(Pfn) {
            from.read_page(pfn, &mut page).unwrap();
            to.write(pfn.0 * PAGE_BYTES, &page).unwrap();
        }
    }
}

pub(crate) fn is_zero(ram: &GuestMemory, range: PageRange) -> bool {
    let mut zero = true;
    ram.classify(range, &mut |_, kind| zero &= kind == machine::PageKind::Zero)
        .unwrap();
    zero
}

/// A migration in small: tracked, asked, copied in rounds, paused, copied, saved, restored into RAM of its own.
/// The destination is left paused.
pub(crate) fn migrate(source: &SoftGuest, tracker: &mut dyn DirtyTracker) -> SoftGuest {
    let mut parts = source.parts();
    let layout = Arc::clone(parts.ram.layout());
    let target = Arc::new(GuestMemory::new(Arc::clone(&layout), &Backing::Anonymous).unwrap());
    let there = SoftGuest::new_for_restore(&parts.machine.config(), Arc::clone(&target)).unwrap();
    tracker.start().unwrap();
    let mut pending = parts.ram.present().unwrap();
    if parts.free_pages.can_ask().is_ok() {
        pending.subtract(&ask(&mut *parts.free_pages, 1, &layout));
    }
    if let Some(ballooned) = parts.free_pages.ballooned() {
        pending.subtract(&ballooned);
    }
    copy(&parts.ram, &target, &pending);
    parts.free_pages.end(1).unwrap();
    for _ in 0..2 {
        copy(&parts.ram, &target, &tracker.harvest().unwrap());
    }
    parts.machine.pause().unwrap();
    copy(&parts.ram, &target, &tracker.harvest().unwrap());
    let state = parts.machine.save().unwrap();
    there.parts().machine.restore(&state).unwrap();
    tracker.stop().unwrap();
    there
}
