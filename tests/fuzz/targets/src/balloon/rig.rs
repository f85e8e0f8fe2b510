//! A device, its driver's rings, and what both may have done.

use super::oracle::{self, Named, Reading};
use ::balloon::{Balloon, Config, Dialect, Discard, Interrupts, QueueConfig, SharedBalloon, feature};
use machine::{Answer, AnswerSink, FreePages};
use pages::{Layout, PageRange, Pfn};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Guest memory that is there; the layout names more, and nothing beyond this is read or written.
pub(super) const MEMORY_BYTES: u64 = 128 << 10;

/// Entries of each ring.
pub(super) const RING_ENTRIES: u16 = 16;

/// Where buffers lie, behind the rings.
pub(super) const BUFFERS: u64 = 0xa000;

/// Where a request buffer lies.
pub(super) const REQUEST: u64 = 0x9000;

/// A descriptor: address, bytes, device-writable.
pub(super) type Desc = (u64, u32, bool);

type Mem = Arc<GuestMemoryMmap>;

struct Quiet;

impl Interrupts for Quiet {
    fn queue(&self, _index: u16) {}

    fn config(&self) {}
}

struct Discards {
    granule: u64,
    done: Mutex<Vec<PageRange>>,
}

impl Discard for Discards {
    fn discard(&self, range: PageRange) -> machine::Result<()> {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.push(range);
        // Every fifth is refused: that is counted, and nothing else.
        if done.len().is_multiple_of(5) {
            return Err(machine::Error::Refused("a discard that fails".to_owned()));
        }
        Ok(())
    }

    fn granule_pages(&self) -> u64 {
        self.granule
    }
}

struct Ring {
    config: QueueConfig,
    next_desc: u16,
    avail: u16,
}

impl Ring {
    fn new(number: u64) -> Self {
        let base = 0x1000 * (number + 1);
        Ring {
            config: QueueConfig {
                size: RING_ENTRIES,
                desc: base,
                avail: base + 0x400,
                used: base + 0x800,
                ready: true,
            },
            next_desc: 0,
            avail: 0,
        }
    }
}

impl Ring {
    /// Where its used ring lies: from and to.
    fn used(&self) -> (u64, u64) {
        (self.config.used, self.config.used + 6 + 8 * u64::from(RING_ENTRIES))
    }
}

/// A device with its driver and its host.
pub(super) struct Rig {
    config: Config,
    mem: Mem,
    layout: Arc<Layout>,
    discards: Arc<Discards>,
    device: SharedBalloon<Mem>,
    rings: Vec<Ring>,
    answers: Arc<Mutex<Vec<(u32, Answer)>>>,
    open: Option<u32>,
    sessions: u32,
    /// By buffers of the inflate and deflate queues, and by those of the others.
    named: [Named; 2],
    /// Where request buffers lay, now or before.
    requests: HashSet<(u64, u64)>,
    /// Guest memory as the guest left it.
    before: Vec<u8>,
}

impl Rig {
    pub(super) fn new(config: Config, granule: u64) -> Self {
        let mem = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 128 << 10)]).expect("guest memory");
        let range = |start, pages| PageRange::new(Pfn(start), pages).expect("a small range");
        // Two regions that touch, a hole, and an end in the middle of a word.
        let layout = Layout::new(vec![range(0, 200), range(200, 130), range(400, 277)]).expect("a layout");
        let discards = Arc::new(Discards {
            granule,
            done: Mutex::default(),
        });
        let mem = Arc::new(mem);
        let layout = Arc::new(layout);
        let device = Balloon::new(
            config,
            Arc::clone(&layout),
            Arc::clone(&mem),
            Arc::new(Quiet),
            Arc::clone(&discards) as Arc<dyn Discard>,
        );
        let device = SharedBalloon::new(device.expect("features of the dialect"));
        let queues = device.lock().queue_count() as u64;
        Rig {
            config,
            mem,
            layout,
            discards,
            device,
            rings: (0..queues).map(Ring::new).collect(),
            answers: Arc::default(),
            open: None,
            sessions: 0,
            named: [Named::none(), Named::none()],
            requests: HashSet::new(),
            before: vec![0; usize::try_from(MEMORY_BYTES).unwrap_or(0)],
        }
    }

    /// The driver comes up with all that is offered.
    pub(super) fn drive(&mut self) {
        let queues: Vec<QueueConfig> = self.rings.iter().map(|ring| ring.config).collect();
        self.have(|rig| {
            let mut device = rig.device.lock();
            let features = device.device_features();
            device.ack_features(features).expect("offered features");
            device.activate(&queues).expect("sound rings");
        });
    }

    pub(super) fn dialect(&self) -> Dialect {
        self.config.dialect
    }

    pub(super) fn carries_bitmaps(&self) -> bool {
        self.dialect() != Dialect::Standard && self.config.features & feature::PAGE_BITMAP != 0
    }

    /// The queue that questions are answered on.
    pub(super) fn asking_queue(&self) -> Option<usize> {
        let features = self.config.features;
        match self.dialect() {
            Dialect::Standard if features & feature::FREE_PAGE_HINT != 0 => {
                Some(if features & feature::STATS_VQ != 0 { 3 } else { 2 })
            }
            Dialect::Bitmap if features & feature::MISC_VQ != 0 => Some(3),
            _ => None,
        }
    }

    pub(super) fn write(&mut self, at: u64, bytes: &[u8]) {
        // Past the end of memory nothing is written.
        drop(self.mem.write_slice(bytes, GuestAddress(at)));
    }

    pub(super) fn write_config(&self, offset: u64, bytes: &[u8]) {
        self.device.lock().write_config(offset, bytes);
    }

    pub(super) fn descriptor(&self, queue: usize, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        let Some(ring) = self.rings.get(queue) else { return };
        let at = ring.config.desc + u64::from(index) * 16;
        self.put(at, &address.to_le_bytes());
        self.put(at + 8, &len.to_le_bytes());
        self.put(at + 12, &flags.to_le_bytes());
        self.put(at + 14, &next.to_le_bytes());
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.mem
            .write_slice(bytes, GuestAddress(at))
            .expect("rings lie in memory");
    }

    pub(super) fn set_avail(&mut self, queue: usize, index: u16) {
        let Some(ring) = self.rings.get_mut(queue) else { return };
        ring.avail = index;
        let at = ring.config.avail + 2;
        self.put(at, &index.to_le_bytes());
    }

    /// Makes the chain at `head` available.
    pub(super) fn push(&mut self, queue: usize, head: u16) {
        let Some(ring) = self.rings.get(queue) else { return };
        let (slot, next) = (u64::from(ring.avail % RING_ENTRIES), ring.avail.wrapping_add(1));
        self.put(ring.config.avail + 4 + slot * 2, &head.to_le_bytes());
        self.set_avail(queue, next);
    }

    /// Adds a sound chain of these descriptors.
    pub(super) fn add(&mut self, queue: usize, chain: &[Desc]) {
        let Some(head) = self.rings.get(queue).map(|ring| ring.next_desc) else {
            return;
        };
        let mut at = head;
        for (i, (address, len, writable)) in chain.iter().enumerate() {
            let next = (at + 1) % RING_ENTRIES;
            let flags = u16::from(i + 1 < chain.len()) | u16::from(*writable) << 1;
            self.descriptor(queue, at, *address, *len, flags, next);
            at = next;
        }
        self.rings[queue].next_desc = at;
        self.push(queue, head);
    }

    /// An inflate or deflate buffer, or a window of an answer.
    pub(super) fn bitmap_buffer(&self, flag: u16, id: u64, start: u64, bitmap: &[u8]) -> Vec<u8> {
        let len = (bitmap.len() as u64).to_le_bytes();
        let start = start.to_le_bytes();
        let head = match self.dialect() {
            Dialect::Bitmap => {
                let flag = flag.to_le_bytes();
                [
                    &[0, 0, 12, 0, flag[0], flag[1], 0, 0],
                    &id.to_le_bytes()[..],
                    &start,
                    &len,
                ]
                .concat()
            }
            _ => [&[0; 8], &start[..], &12u32.to_le_bytes(), &len].concat(),
        };
        [&head, bitmap].concat()
    }

    /// What the configuration space says of hints.
    pub(super) fn hint_command(&self) -> u32 {
        let mut bytes = [0; 4];
        self.device.lock().read_config(8, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// The id that the request buffer holds.
    pub(super) fn request_id(&self) -> u64 {
        self.mem.read_obj(GuestAddress(REQUEST + 8)).unwrap_or(0)
    }

    pub(super) fn kick(&mut self, queue: usize) {
        let index = u16::try_from(queue).unwrap_or(u16::MAX);
        self.have(|rig| rig.device.lock().notify(index));
    }

    pub(super) fn begin(&mut self) {
        self.have(|rig| {
            let (session, answers) = (rig.sessions + 1, Arc::clone(&rig.answers));
            let sink: AnswerSink = Arc::new(move |session, answer| {
                answers
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push((session, answer));
            });
            if rig.device.begin(session, sink).is_ok() {
                (rig.sessions, rig.open) = (session, Some(session));
            }
        });
    }

    pub(super) fn end(&mut self) {
        self.have(|rig| {
            if let Some(session) = rig.open.take() {
                rig.device.end(session).expect("an open session ends");
            }
        });
    }

    pub(super) fn hold(&mut self) {
        self.have(|rig| {
            if let Some(session) = rig.open {
                rig.device.hold(session).expect("an open session is held");
            }
        });
        // From here on nothing is said; the session is still to be ended.
        let session = self.open.take();
        self.check();
        self.open = session.filter(|_| self.dialect() == Dialect::Standard);
    }

    pub(super) fn ask_for_stats(&mut self) {
        self.have(|rig| {
            if let Some(stats) = rig.device.stats() {
                assert!(stats.free_pages <= u64::MAX / 4096);
            }
        });
    }

    pub(super) fn set_target(&mut self, pages: u64) {
        let fits = pages <= self.layout.total_pages();
        self.have(|rig| assert_eq!(rig.device.lock().set_target(pages).is_ok(), fits));
    }

    /// The guest migrates, to a device that is like this one, or fails to and runs on.
    pub(super) fn move_to_another(&mut self, fails: bool) {
        self.have(|rig| {
            rig.open = None;
            rig.device.lock().park();
            let section = rig.device.lock().save();
            if !fails {
                let fresh = Balloon::new(
                    rig.config,
                    Arc::clone(&rig.layout),
                    Arc::clone(&rig.mem),
                    Arc::new(Quiet),
                    Arc::clone(&rig.discards) as Arc<dyn Discard>,
                );
                let mut fresh = fresh.expect("features of the dialect");
                // The guest may have put its rings into any state, but the device cannot have taken it over.
                fresh.restore(&section).expect("what was saved is taken over");
                assert_eq!(fresh.save(), section, "a device that was restored saves something else");
                rig.device = SharedBalloon::new(fresh);
            }
            rig.device.lock().resume();
        });
    }

    pub(super) fn reset(&mut self) {
        self.have(|rig| {
            rig.device.lock().reset();
            assert!(
                rig.device.lock().ballooned().is_empty(),
                "a reset guest has pages in the balloon"
            );
            rig.named = [Named::none(), Named::none()];
        });
        for number in 0..self.rings.len() {
            self.rings[number] = Ring::new(number as u64);
            self.set_avail(number, 0);
        }
    }

    /// Has the device do something: what do buffers name before, and what of memory has it changed after?
    fn have(&mut self, act: impl FnOnce(&mut Self)) {
        self.look();
        act(self);
        self.compare();
    }

    fn look(&mut self) {
        if let Some(misc) = self.rings.get(3).filter(|_| self.dialect() == Dialect::Bitmap) {
            self.requests.extend(oracle::requests(&self.mem, &misc.config));
        }
        let used = self.rings.iter().map(Ring::used);
        let written: Vec<(u64, u64)> = used.chain(self.requests.iter().copied()).collect();
        let (dialect, bitmaps) = (self.dialect(), self.carries_bitmaps());
        for (index, ring) in self.rings.iter().enumerate() {
            let reading = match (index < 2, dialect) {
                (true, _) if !bitmaps => Reading::Numbers,
                (true, _) | (false, Dialect::Bitmap) => Reading::Bitmap(dialect),
                (false, _) => Reading::Blocks,
            };
            let named = &mut self.named[usize::from(index >= 2)];
            oracle::name_pages(&self.mem, &ring.config, reading, &written, named);
        }
        self.mem
            .read_slice(&mut self.before, GuestAddress(0))
            .expect("guest memory");
    }

    /// The device wrote used rings and requests, and nothing else.
    fn compare(&self) {
        let mut page = [0; 4096];
        for (number, before) in self.before.chunks_exact(page.len()).enumerate() {
            let start = number as u64 * 4096;
            self.mem
                .read_slice(&mut page, GuestAddress(start))
                .expect("guest memory");
            if page == before {
                continue;
            }
            let changed = page
                .iter()
                .zip(before)
                .enumerate()
                .filter(|(_, (now, then))| now != then);
            for address in changed.map(|(at, _)| start + at as u64) {
                let of_ring = |ring: &Ring| (ring.used().0..ring.used().1).contains(&address);
                let of_request = |(from, to): &(u64, u64)| (*from..*to).contains(&address);
                let may = self.rings.iter().any(of_ring) || self.requests.iter().any(of_request);
                assert!(may, "the device wrote guest memory at {address:#x}");
            }
        }
    }

    /// What must hold after every step.
    pub(super) fn check(&mut self) {
        let held = std::mem::take(&mut *self.answers.lock().unwrap_or_else(PoisonError::into_inner));
        for (session, answer) in held {
            assert_eq!(Some(session), self.open, "an answer to no open question");
            match answer {
                Answer::Free(ranges) => {
                    assert!(!ranges.is_empty());
                    ranges
                        .into_iter()
                        .for_each(|range| self.was_named("called free", range, &[1]));
                }
                Answer::Covered(range) => assert!(self.layout.region_of_range(range).is_some(), "{range} is not RAM"),
                Answer::Finished => {}
            }
        }
        // Reports are the standard dialect's.
        let queues: &[usize] = if self.dialect() == Dialect::Standard {
            &[0, 1]
        } else {
            &[0]
        };
        let granule = self.discards.granule;
        let done = std::mem::take(&mut *self.discards.done.lock().unwrap_or_else(PoisonError::into_inner));
        for range in done {
            assert!(
                range.start().0.is_multiple_of(granule) && range.count().is_multiple_of(granule),
                "{range}"
            );
            self.was_named("discarded", range, queues);
        }
        let ballooned: Vec<PageRange> = self.device.lock().ballooned().runs().collect();
        for range in ballooned {
            self.was_named("put into the balloon", range, &[0]);
        }
        let device = self.device.lock();
        assert!(device.target() <= self.layout.total_pages() && device.actual() <= self.layout.total_pages());
    }

    fn was_named(&self, what: &str, range: PageRange, queues: &[usize]) {
        assert!(
            self.layout.region_of_range(range).is_some(),
            "{range} was {what}, and is not RAM"
        );
        for page in (range.start().0..range.end().0).map(Pfn) {
            let named = queues.iter().any(|queue| self.named[*queue].holds(page));
            assert!(named, "page {page} was {what}, and no buffer named it");
        }
    }
}
