//! What inflating and deflating cost, stage by stage, and what asking for free pages costs: guests with real memory, real
//! virtqueues and a driver that allocates in it. `scripts/bench inflate` runs it.
//!
//! Stages as in the posts of 2016: the guest allocates (or frees) pages; it tells the host, which is filling buffers,
//! queue, kick, interrupt, and all waiting for each other; the host turns page numbers or bits into runs of its memory; it
//! gives them back. Guest and device take turns, so the stages add up to the total.
//!
//! Three ways, taking turns: arrays of page numbers handled page by page ([`PageByPage`], the posts' base line, over the
//! same queues and by the same driver); the same arrays as our device handles them; bitmaps.
#![allow(clippy::unwrap_used)]

#[path = "inflate/collect.rs"]
mod collect;
#[path = "inflate/page_by_page.rs"]
mod page_by_page;
#[path = "inflate/table.rs"]
mod table;

use balloon::{Dialect, DiscardPolicy, Interrupts, SharedBalloon, feature};
use machine::GuestRam;
use memory::{Backing, GuestMemory};
use page_by_page::PageByPage;
use pages::{Layout, PageRange};
use serde_json::json;
use softguest::{GuestConfig, Hooks, Ram, SoftGuest, Work, default_balloon};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vm_memory::{GuestAddress, GuestMemoryBackend};

/// What a guest uses, bytes.
const USED: u64 = 300 << 20;

/// The share of it that lies singly: some 800 holes in what is free.
const SCATTER: f64 = 0.01;

/// Guests, MiB of memory, and what goes into their balloons.
const SIZES: [(u64, u64); 2] = [(8 << 10, 7 << 10), (4 << 10, 3 << 10)];

/// What must stay free on this machine beside a guest, MiB.
const SPARE_MIB: u64 = 2 << 10;

/// What can be measured alone.
const PARTS: [&str; 3] = ["4k-pages", "huge-pages", "free-pages"];

/// What is a hang.
const PATIENCE: Duration = Duration::from_secs(300);

/// How the host hears of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    PageByPage,
    Arrays,
    Bitmaps,
}

impl Way {
    const ALL: [Way; 3] = [Way::PageByPage, Way::Arrays, Way::Bitmaps];

    fn name(self) -> &'static str {
        match self {
            Way::PageByPage => "page by page",
            Way::Arrays => "arrays, runs merged",
            Way::Bitmaps => "bitmaps",
        }
    }
}

/// What backs guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pages {
    Small,
    Huge,
}

impl Pages {
    fn name(self) -> &'static str {
        match self {
            Pages::Small => "4 KiB",
            Pages::Huge => "huge",
        }
    }
}

/// A stopwatch of several threads.
#[derive(Default)]
struct Watch(AtomicU64);

impl Watch {
    fn add(&self, time: Duration) {
        self.0
            .fetch_add(u64::try_from(time.as_nanos()).unwrap(), Ordering::Relaxed);
    }

    /// What it shows, ms; it starts over.
    fn take(&self) -> f64 {
        Duration::from_nanos(self.0.swap(0, Ordering::Relaxed)).as_secs_f64() * 1e3
    }
}

/// The places in a guest where time is taken.
#[derive(Default)]
struct Stages {
    /// The driver allocates or frees.
    guest: Watch,
    /// The device serves inflate or deflate queues; with `discard`.
    device: Watch,
    /// Memory goes back.
    discard: Watch,
    calls: AtomicU64,
    base_line: Option<Mutex<PageByPage>>,
}

impl Stages {
    fn discarding<T>(&self, calls: u64, act: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = act();
        self.discard.add(began.elapsed());
        self.calls.fetch_add(calls, Ordering::Relaxed);
        done
    }
}

impl Hooks for Stages {
    fn worked(&self, _work: Work, time: Duration) {
        self.guest.add(time);
    }

    fn discard(&self, ram: &GuestMemory, ranges: &[PageRange], done: &mut dyn FnMut(PageRange, machine::Result<()>)) {
        let done = &mut |range, result: memory::Result<()>| done(range, result.map_err(Into::into));
        self.discarding(ranges.len() as u64, || ram.discard_all(ranges, done));
    }

    fn kicked(&self, device: &SharedBalloon<Ram>, interrupts: &dyn Interrupts, queue: u16) {
        if queue > 1 {
            return device.lock().notify(queue);
        }
        match &self.base_line {
            Some(base_line) => base_line.lock().unwrap().serve(self, device, interrupts, queue),
            None => {
                let mut device = device.lock();
                let began = Instant::now();
                device.notify(queue);
                self.device.add(began.elapsed());
            }
        }
    }
}

/// What one way took, ms.
#[derive(Clone, Copy, Debug)]
struct Took {
    guest: f64,
    tell: f64,
    translate: f64,
    discard: f64,
    total: f64,
    discards: u64,
}

impl Took {
    fn new(stages: &Stages, total: Duration) -> Self {
        let (guest, device, discard) = (stages.guest.take(), stages.device.take(), stages.discard.take());
        let total = total.as_secs_f64() * 1e3;
        Took {
            guest,
            tell: total - guest - device,
            translate: device - discard,
            discard,
            total,
            discards: stages.calls.swap(0, Ordering::Relaxed),
        }
    }
}

/// What to measure.
struct Options {
    rounds: usize,
    small: bool,
    json: Option<String>,
    only: Option<String>,
}

impl Options {
    fn parse() -> Self {
        let mut options = Options {
            rounds: 5,
            small: false,
            json: None,
            only: None,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--rounds" => options.rounds = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(0),
                "--json" => options.json = Some(arguments.next().unwrap_or_default()),
                "--only" => {
                    options.only = arguments
                        .next()
                        .filter(|part| PARTS.contains(&part.as_str()))
                        .or(Some(String::new()))
                }
                "--small" => options.small = true,
                _ => options.rounds = 0,
            }
        }
        if options.rounds == 0 || [&options.json, &options.only].contains(&&Some(String::new())) {
            eprintln!(
                "usage: scripts/bench inflate [--rounds N] [--json FILE] [--only PART] [--small]\n\
                 --rounds N    rounds of which the median is taken (5)\n\
                 --json FILE   where the figures go, too\n\
                 --only PART   4k-pages, huge-pages or free-pages\n\
                 --small       guests of an eighth of the size, to see whether it works"
            );
            std::process::exit(2);
        }
        options
    }
}

/// Boots a guest whose memory is all there, fills its balloon and empties it. What both took.
fn round(memory_mib: u64, balloon_mib: u64, pages: Pages, way: Way) -> (Took, Took) {
    let layout = Arc::new(Layout::pc(memory_mib << 8).unwrap());
    let ram = Arc::new(GuestMemory::new(Arc::clone(&layout), &Backing::Anonymous).unwrap());
    if pages == Pages::Small {
        no_huge_pages(&ram);
    }
    let dialect = match way {
        Way::PageByPage | Way::Arrays => Dialect::Standard,
        Way::Bitmaps => Dialect::Bitmap,
    };
    let mut balloon = default_balloon(dialect, &layout);
    balloon.discard = DiscardPolicy::AtOnce;
    assert!(way != Way::Bitmaps || balloon.features & feature::PAGE_BITMAP != 0);
    let config = GuestConfig {
        used_bytes: USED.min(layout.total_bytes() / 16),
        scatter: SCATTER,
        balloon: Some(balloon),
        ..GuestConfig::new(Arc::clone(&layout))
    };
    let stages = Arc::new(Stages {
        base_line: (way == Way::PageByPage).then(|| Mutex::new(PageByPage::new(ram.vm_memory()))),
        ..Stages::default()
    });
    let hooks: Arc<dyn Hooks> = stages.clone();
    let guest = SoftGuest::boot_with(config, Arc::clone(&ram), hooks).unwrap();
    ram.populate_all().unwrap();
    check_huge(pages);
    let inflated = settle(&guest, &stages, balloon_mib << 8);
    // What was given up is gone from the host: but for a page or two that a bitmap's end rounds off, and where khugepaged
    // has put a huge page over what is left of one.
    let left = ram.present().unwrap().count() + (balloon_mib << 8);
    let more = if pages == Pages::Huge {
        layout.total_pages() / 64
    } else {
        64
    };
    let counters = guest.balloon().unwrap().lock().counters();
    let wanted = layout.total_pages() + more;
    assert!(
        left <= wanted,
        "{way:?}: {left} pages, not {wanted}: {inflated:?}, {counters:?}"
    );
    let deflated = settle(&guest, &stages, 0);
    guest.self_check().unwrap();
    (inflated, deflated)
}

/// Has 4 KiB pages back all of it.
fn no_huge_pages(ram: &GuestMemory) {
    let map = ram.vm_memory();
    for region in ram.layout().regions() {
        let address = map.get_host_address(GuestAddress(region.start().0 << 12)).unwrap();
        let bytes = usize::try_from(region.bytes()).unwrap();
        // SAFETY: the region is one mapping of that many bytes, and its content stays.
        unsafe { rustix::mm::madvise(address.cast(), bytes, rustix::mm::Advice::LinuxNoHugepage) }.unwrap();
    }
}

/// Refuses to measure huge pages where there are none, and the other way round.
fn check_huge(pages: Pages) {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let field = |name: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    let (all, huge) = (field("Rss:"), field("AnonHugePages:"));
    match pages {
        Pages::Small => assert!(huge < all / 100, "{huge} of {all} KiB are huge pages"),
        Pages::Huge => assert!(huge > all / 2, "only {huge} of {all} KiB are huge pages"),
    }
}

/// Sets a target, and waits until the guest is there.
fn settle(guest: &SoftGuest, stages: &Stages, target: u64) -> Took {
    let device = guest.balloon().unwrap();
    Took::new(stages, Duration::ZERO);
    let began = Instant::now();
    device.lock().set_target(target).unwrap();
    while device.lock().actual() != target {
        assert!(began.elapsed() < PATIENCE, "the guest does not get to {target} pages");
        std::thread::sleep(Duration::from_micros(500));
    }
    Took::new(stages, began.elapsed())
}

/// Guests that fit this machine now; says what was made smaller.
fn sizes(small: bool) -> Vec<(u64, u64)> {
    let available = memory::available_bytes().unwrap().map_or(u64::MAX, |bytes| bytes >> 20);
    let fit = |(memory, balloon)| {
        let by = if small { 8 } else { 1 };
        let (mut memory, mut balloon): (u64, u64) = (memory / by, balloon / by);
        while memory + SPARE_MIB > available && memory > 512 {
            (memory, balloon) = (memory / 2, balloon / 2);
        }
        (memory, balloon)
    };
    let fits: Vec<_> = SIZES.into_iter().map(fit).collect();
    for (wanted, got) in SIZES.into_iter().zip(&fits) {
        if wanted != *got {
            println!(
                "LOWERED: a guest of {} MiB in place of {} ({available} MiB available)",
                got.0, wanted.0
            );
        }
    }
    fits
}

fn main() {
    let options = Options::parse();
    let skipped = |part: usize| options.only.as_deref().is_some_and(|only| only != PARTS[part]);
    let mut cells = Vec::new();
    for (memory, balloon) in sizes(options.small) {
        for (part, pages) in [Pages::Small, Pages::Huge].into_iter().enumerate() {
            if skipped(part) {
                continue;
            }
            let mut took: [Vec<(Took, Took)>; 3] = Default::default();
            for number in 0..options.rounds {
                // Every other round in the opposite order, so that a machine that drifts slows all.
                for i in 0..3 {
                    let i = if number % 2 == 0 { i } else { 2 - i };
                    took[i].push(round(memory, balloon, pages, Way::ALL[i]));
                }
            }
            cells.push(table::Cell::new(memory, balloon, pages, &took));
            table::print(cells.last().unwrap());
        }
    }
    let collected = if skipped(2) {
        Vec::new()
    } else {
        collect::all(options.rounds)
    };
    if let Some(file) = options.json {
        let cells: Vec<_> = cells.iter().map(table::Cell::json).collect();
        let all = json!({ "rounds": options.rounds, "inflate": cells, "free_pages": collected });
        std::fs::write(&file, format!("{all:#}\n")).unwrap_or_else(|e| panic!("writing {file}: {e}"));
    }
}
