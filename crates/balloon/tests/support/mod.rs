//! The driver's side of the device, by hand, over real rings in guest memory.
#![allow(dead_code, reason = "each test binary uses a part of this")]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

pub(crate) mod bitmaps;

use balloon::{Balloon, Config, Dialect, Discard, Interrupts, QueueConfig, SharedBalloon, feature};
use machine::{Answer, AnswerSink};
use pages::{Layout, PageRange, Pfn};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

pub(crate) type Mem = Arc<GuestMemoryMmap>;

/// Entries of each ring.
pub(crate) const SIZE: u16 = 64;

/// Where buffers of tests lie; rings are below.
pub(crate) const BUFFERS: u64 = 1 << 20;

/// A descriptor: address, bytes, device-writable.
pub(crate) type Desc = (u64, u32, bool);

#[derive(Default)]
pub(crate) struct Irqs {
    pub(crate) queues: Mutex<Vec<u16>>,
    pub(crate) configs: AtomicUsize,
}

impl Irqs {
    pub(crate) fn configs(&self) -> usize {
        self.configs.load(Ordering::SeqCst)
    }

    pub(crate) fn take(&self) -> Vec<u16> {
        std::mem::take(&mut self.queues.lock().unwrap())
    }
}

impl Interrupts for Irqs {
    fn queue(&self, index: u16) {
        self.queues.lock().unwrap().push(index);
    }

    fn config(&self) {
        self.configs.fetch_add(1, Ordering::SeqCst);
    }
}

pub(crate) struct Discards {
    pub(crate) granule: u64,
    pub(crate) calls: Mutex<Vec<PageRange>>,
}

impl Discard for Discards {
    fn discard(&self, range: PageRange) -> machine::Result<()> {
        self.calls.lock().unwrap().push(range);
        Ok(())
    }

    fn granule_pages(&self) -> u64 {
        self.granule
    }
}

/// The driver's side of one queue.
pub(crate) struct Ring {
    pub(crate) config: QueueConfig,
    next_desc: u16,
    pub(crate) avail: u16,
    seen: u16,
}

impl Ring {
    pub(crate) fn new(number: u64) -> Self {
        let base = 0x10000 + number * 0x8000;
        Ring {
            config: QueueConfig {
                size: SIZE,
                desc: base,
                avail: base + 0x2000,
                used: base + 0x4000,
                ready: true,
            },
            next_desc: 0,
            avail: 0,
            seen: 0,
        }
    }

    /// Writes one descriptor as it is told.
    pub(crate) fn raw_desc(&self, mem: &Mem, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        let at = GuestAddress(self.config.desc + u64::from(index) * 16);
        mem.write_slice(&bytes, at).unwrap();
    }

    /// Makes the chain that starts at `head` available.
    pub(crate) fn push(&mut self, mem: &Mem, head: u16) {
        let slot = u64::from(self.avail % self.config.size);
        mem.write_obj(head.to_le(), GuestAddress(self.config.avail + 4 + slot * 2))
            .unwrap();
        self.set_avail(mem, self.avail.wrapping_add(1));
    }

    pub(crate) fn set_avail(&mut self, mem: &Mem, index: u16) {
        self.avail = index;
        mem.write_obj(index.to_le(), GuestAddress(self.config.avail + 2))
            .unwrap();
    }

    /// Adds a chain; its head.
    pub(crate) fn add(&mut self, mem: &Mem, chain: &[Desc]) -> u16 {
        let size = self.config.size;
        let head = self.next_desc;
        for (i, (addr, len, writable)) in chain.iter().enumerate() {
            let index = self.next_desc;
            self.next_desc = (index + 1) % size;
            let more = u16::from(i + 1 < chain.len());
            self.raw_desc(
                mem,
                index,
                *addr,
                *len,
                more | u16::from(*writable) << 1,
                self.next_desc,
            );
        }
        self.push(mem, head);
        head
    }

    /// What was used since the last look: heads and lengths.
    pub(crate) fn used(&mut self, mem: &Mem) -> Vec<(u32, u32)> {
        let index: u16 = mem.read_obj(GuestAddress(self.config.used + 2)).unwrap();
        let mut all = Vec::new();
        while self.seen != index {
            let at = self.config.used + 4 + u64::from(self.seen % self.config.size) * 8;
            let id: u32 = mem.read_obj(GuestAddress(at)).unwrap();
            let len: u32 = mem.read_obj(GuestAddress(at + 4)).unwrap();
            all.push((id, len));
            self.seen = self.seen.wrapping_add(1);
        }
        all
    }
}

/// A device with its driver.
pub(crate) struct Rig {
    pub(crate) mem: Mem,
    pub(crate) layout: Arc<Layout>,
    pub(crate) irqs: Arc<Irqs>,
    pub(crate) discards: Arc<Discards>,
    pub(crate) device: SharedBalloon<Mem>,
    pub(crate) rings: Vec<Ring>,
}

/// Guest memory for tests: 64 MiB from 0 on. A layout may name more; nothing there is touched.
pub(crate) fn memory() -> Mem {
    Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 64 << 20)]).unwrap())
}

pub(crate) fn flat() -> Arc<Layout> {
    Arc::new(Layout::flat(16384).unwrap())
}

impl Rig {
    /// A device that offers `features` and that no driver has touched, with the dialect's usual policy for discarding.
    pub(crate) fn cold(dialect: Dialect, features: u64, layout: Arc<Layout>, granule: u64) -> Self {
        Rig::configured(Config::new(dialect, features), layout, granule)
    }

    /// A device that no driver has touched.
    pub(crate) fn configured(config: Config, layout: Arc<Layout>, granule: u64) -> Self {
        let (mem, irqs) = (memory(), Arc::new(Irqs::default()));
        let discards = Arc::new(Discards {
            granule,
            calls: Mutex::default(),
        });
        let device = Balloon::new(
            config,
            Arc::clone(&layout),
            Arc::clone(&mem),
            Arc::clone(&irqs) as Arc<dyn Interrupts>,
            Arc::clone(&discards) as Arc<dyn Discard>,
        )
        .unwrap();
        let rings = (0..device.queue_count() as u64).map(Ring::new).collect();
        Rig {
            mem,
            layout,
            irqs,
            discards,
            device: SharedBalloon::new(device),
            rings,
        }
    }

    /// A device whose driver took all of `features`.
    pub(crate) fn new(dialect: Dialect, features: u64) -> Self {
        let rig = Rig::cold(dialect, features, flat(), 1);
        rig.drive(features);
        rig
    }

    /// The driver comes up with `features`.
    pub(crate) fn drive(&self, features: u64) {
        let configs: Vec<QueueConfig> = self.rings.iter().map(|r| r.config).collect();
        let mut device = self.device.lock();
        device.ack_features(features | feature::VERSION_1).unwrap();
        device.activate(&configs).unwrap();
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
        self.mem.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    pub(crate) fn kick(&self, queue: usize) {
        self.device.lock().notify(queue as u16);
    }

    /// Adds a chain, kicks, and gives back what was used.
    pub(crate) fn send(&mut self, queue: usize, chain: &[Desc]) -> Vec<(u32, u32)> {
        self.rings[queue].add(&self.mem, chain);
        self.kick(queue);
        self.rings[queue].used(&self.mem)
    }

    /// Sends an array of page frame numbers in one descriptor.
    pub(crate) fn send_pfns(&mut self, queue: usize, pfns: &[u32]) -> Vec<(u32, u32)> {
        let bytes: Vec<u8> = pfns.iter().flat_map(|p| p.to_le_bytes()).collect();
        self.write(BUFFERS, &bytes);
        self.send(queue, &[(BUFFERS, bytes.len() as u32, false)])
    }

    /// Sends a bitmap as the device's dialect has it, in one descriptor.
    pub(crate) fn send_bitmap(&mut self, queue: usize, start: u64, bitmap: &[u8]) -> Vec<(u32, u32)> {
        let all = bitmap_buffer(self.device.lock().config().dialect, start, bitmap);
        self.write(BUFFERS, &all);
        self.send(queue, &[(BUFFERS, all.len() as u32, false)])
    }

    /// Sends the pages of `ranges` as the posts' drivers do: from the lowest page, rounded down to a multiple of 64, to
    /// the highest, rounded up, so that a last page at a multiple of 64 is left out, and alone sends nothing.
    pub(crate) fn send_pages(&mut self, queue: usize, ranges: &[PageRange]) {
        let first = ranges.iter().map(|r| r.start().0).min().unwrap();
        let last = ranges.iter().map(|r| r.end().0 - 1).max().unwrap();
        let (start, end) = (first - first % 64, last.next_multiple_of(64));
        if start < end {
            self.send_bitmap(queue, start, &bits(start, (end - start) as usize / 8, ranges));
        }
    }

    /// Sends a 4-byte command.
    pub(crate) fn command(&mut self, queue: usize, id: u32) -> Vec<(u32, u32)> {
        self.write(BUFFERS, &id.to_le_bytes());
        self.send(queue, &[(BUFFERS, 4, false)])
    }

    pub(crate) fn config_u32(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.device.lock().read_config(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub(crate) fn take_discards(&self) -> Vec<PageRange> {
        std::mem::take(&mut self.discards.calls.lock().unwrap())
    }

    /// The pages in the balloon, as runs.
    pub(crate) fn ballooned(&self) -> Vec<PageRange> {
        self.device.lock().ballooned().runs().collect()
    }
}

/// The bytes of an inflate or deflate buffer of a bitmap dialect.
pub(crate) fn bitmap_buffer(dialect: Dialect, start: u64, bitmap: &[u8]) -> Vec<u8> {
    let mut all = match dialect {
        Dialect::Bitmap => vec![0, 0, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        _ => vec![0; 8],
    };
    all.extend(start.to_le_bytes());
    if dialect == Dialect::BitmapRfc {
        all.extend(12u32.to_le_bytes());
    }
    all.extend((bitmap.len() as u64).to_le_bytes());
    all.extend(bitmap);
    all
}

/// A bitmap of `len` bytes from page `start` on, in which the pages of `ranges` are set.
pub(crate) fn bits(start: u64, len: usize, ranges: &[PageRange]) -> Vec<u8> {
    let mut bitmap = vec![0u8; len];
    for page in ranges.iter().flat_map(|r| r.start().0..r.end().0) {
        if let Some(byte) = bitmap.get_mut((page - start) as usize / 8) {
            *byte |= 1 << ((page - start) % 8);
        }
    }
    bitmap
}

/// Collects what a session's sink is given.
#[derive(Clone, Default)]
pub(crate) struct Answers(Arc<Mutex<Vec<(u32, Answer)>>>);

impl Answers {
    pub(crate) fn sink(&self) -> AnswerSink {
        let all = Arc::clone(&self.0);
        Arc::new(move |session, answer| all.lock().unwrap().push((session, answer)))
    }

    pub(crate) fn take(&self) -> Vec<(u32, Answer)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

pub(crate) fn range(start: u64, count: u64) -> PageRange {
    PageRange::new(Pfn(start), count).unwrap()
}
