//! The device: features, configuration space, life cycle, and which queue's buffers go where.
//!
//! Life cycle, as virtio 1.3, section 3.1 has it: `ack_features` (FEATURES_OK), `activate` (DRIVER_OK), `notify` for
//! every kick, `reset`. A device that was restored from saved state is where it was; [`Balloon::resume`] then catches up
//! with kicks that were lost on the way.

use crate::ask::Asking;
use crate::config::Space;
use crate::counters::Counters;
use crate::dialect::hinting::Hinting;
use crate::dialect::misc::Misc;
use crate::dialect::{Role, reporting};
use crate::inflate::Ballooned;
use crate::queue::{Broken, VirtQueue};
use crate::stats::{Stats, StatsQueue};
use crate::{Config, Error, QueueConfig, Result, feature};
use pages::{Layout, PageRange, PageSet};
use std::sync::Arc;
use vm_memory::GuestAddressSpace;

/// The most entries that a queue may have.
pub const QUEUE_MAX_SIZE: u16 = 256;

/// How the device raises interrupts. Called from within the device's methods: must be quick, and must not call back.
pub trait Interrupts: Send + Sync {
    /// A buffer of queue `index` (its number on the transport) was used. Every call is an interrupt of its own: the
    /// `bitmap` dialect's driver takes one completion for each.
    fn queue(&self, index: u16);

    /// The configuration space changed, or the device needs a reset.
    fn config(&self);
}

/// How the device gives guest memory back to the host.
pub trait Discard: Send + Sync {
    /// Gives back the memory of `range`, which lies in one region of RAM and is whole granules. It then reads as zero:
    /// that is a write, which the implementation has to put into the dirty log where writes are tracked.
    fn discard(&self, range: PageRange) -> machine::Result<()>;

    /// Does so for each of `ranges`, and tells `done` of each, in that order. For a host that can do better with many at
    /// once than one after the other.
    fn discard_all(&self, ranges: &[PageRange], done: &mut dyn FnMut(PageRange, machine::Result<()>)) {
        ranges.iter().for_each(|range| done(*range, self.discard(*range)));
    }

    /// How many pages, a power of two, the host gives back at once: 1, or 512 where 2 MiB pages back the guest.
    fn granule_pages(&self) -> u64;
}

/// A queue that the driver set up, and what it is for.
pub(crate) struct Slot {
    pub(crate) role: Role,
    /// `None` once its rings were found broken.
    pub(crate) queue: Option<VirtQueue>,
}

/// A virtio-balloon device over guest memory `M`.
pub struct Balloon<M: GuestAddressSpace> {
    pub(crate) config: Config,
    pub(crate) layout: Arc<Layout>,
    pub(crate) memory: M,
    pub(crate) interrupts: Arc<dyn Interrupts>,
    discard: Arc<dyn Discard>,
    pub(crate) acked: u64,
    pub(crate) active: bool,
    pub(crate) needs_reset: bool,
    /// The guest is paused: nothing is written to its memory until [`Balloon::resume`].
    parked: bool,
    pub(crate) space: Space,
    /// By number on the transport.
    pub(crate) queues: Vec<Option<Slot>>,
    pub(crate) ballooned: Ballooned,
    pub(crate) stats: StatsQueue,
    pub(crate) asking: Asking,
    pub(crate) counters: Counters,
}

impl<M: GuestAddressSpace> Balloon<M> {
    /// A device that no driver has touched.
    ///
    /// # Errors
    /// Feature bits that the dialect does not have, or that a guest of this layout cannot have.
    pub fn new(
        config: Config,
        layout: Arc<Layout>,
        memory: M,
        interrupts: Arc<dyn Interrupts>,
        discard: Arc<dyn Discard>,
    ) -> Result<Self> {
        config.check(&layout)?;
        let asking = match config.dialect {
            crate::Dialect::Standard => Asking::Hints(Hinting::new()),
            crate::Dialect::Bitmap => Asking::Misc(Misc::new()),
            crate::Dialect::BitmapRfc => Asking::Never,
        };
        Ok(Balloon {
            config,
            ballooned: Ballooned::new(&layout, Arc::clone(&discard), config.discard),
            layout,
            memory,
            interrupts,
            discard,
            acked: 0,
            active: false,
            needs_reset: false,
            parked: false,
            space: Space::default(),
            queues: Vec::new(),
            stats: StatsQueue::default(),
            asking,
            counters: Counters::default(),
        })
    }

    /// What the device was made of.
    pub fn config(&self) -> Config {
        self.config
    }

    /// All feature bits that the device offers, `VERSION_1` among them.
    pub fn device_features(&self) -> u64 {
        self.config.offered()
    }

    /// The feature bits that the driver acknowledged.
    pub fn driver_features(&self) -> u64 {
        self.acked
    }

    /// Takes all 64 feature bits of the driver, at FEATURES_OK.
    ///
    /// # Errors
    /// Bits that were not offered, no `VERSION_1`, or a device that is active already. Nothing changes then.
    pub fn ack_features(&mut self, features: u64) -> Result<()> {
        if self.active {
            return Err(Error::Active("features cannot change"));
        }
        check_features(features, self.config.offered())?;
        self.acked = features;
        let tells = features & feature::MUST_TELL_HOST != 0;
        self.ballooned
            .speak(self.config.dialect.form(features, &self.layout), tells);
        Ok(())
    }

    /// The most queues that a device of this dialect has; a driver sets up those of the features in use.
    pub fn queue_count(&self) -> usize {
        self.config.dialect.queue_count()
    }

    /// The most entries that each queue may have.
    pub fn queue_max_size(&self) -> u16 {
        QUEUE_MAX_SIZE
    }

    /// Bytes of the configuration space: 8, 12 or 16, by the features offered.
    pub fn config_len(&self) -> usize {
        self.config.space_len()
    }

    /// Reads the configuration space from byte `offset` on. What lies past its end reads as zero.
    pub fn read_config(&self, offset: u64, into: &mut [u8]) {
        let hint_cmd_id = match &self.asking {
            Asking::Hints(hints) => hints.published(),
            Asking::Misc(_) | Asking::Never => 0,
        };
        self.space.read(hint_cmd_id, self.config_len(), offset, into);
    }

    /// Writes the configuration space at byte `offset`. Bytes that are not the guest's to write are ignored.
    pub fn write_config(&mut self, offset: u64, data: &[u8]) {
        let poison = self.acked & self.poison_bit() != 0;
        if !self.space.write(poison, offset, data) {
            tracing::debug!(offset, len = data.len(), "configuration write ignored");
            self.counters.ignored_config_writes += 1;
        }
    }

    /// Starts the device, at DRIVER_OK, with the queues by their numbers on the transport. Queues that are not ready,
    /// or that the features in use do not have, are left alone. Every queue is looked at once: a driver may have put
    /// buffers there before.
    ///
    /// # Errors
    /// A ready queue whose size or rings are wrong, an active device, features not acknowledged. The device stays
    /// inactive then.
    pub fn activate(&mut self, queues: &[QueueConfig]) -> Result<()> {
        if self.active {
            return Err(Error::Active("it cannot be started"));
        }
        if self.acked & feature::VERSION_1 == 0 {
            return Err(Error::Legacy);
        }
        let memory = self.memory.memory();
        let mut slots = Vec::new();
        let roles = self.config.dialect.roles(self.acked);
        for (index, (role, config)) in roles.into_iter().zip(queues).enumerate() {
            let slot = match role {
                Some(role) if config.ready => Some(Slot {
                    role,
                    queue: Some(VirtQueue::new(&*memory, index, QUEUE_MAX_SIZE, config)?),
                }),
                _ => None,
            };
            slots.push(slot);
        }
        self.queues = slots;
        self.active = true;
        self.look_at_all();
        Ok(())
    }

    /// Where the driver put queue `index`, as the device has it; `None` for one that is not in use, or that was stopped.
    pub fn queue_config(&self, index: usize) -> Option<QueueConfig> {
        let slot = self.queues.get(index)?.as_ref()?;
        slot.queue.as_ref().map(VirtQueue::config)
    }

    /// Whether a driver is at work.
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// Whether a ring was found broken; the transport shows it to the driver as DEVICE_NEEDS_RESET.
    pub fn needs_reset(&self) -> bool {
        self.needs_reset
    }

    /// Back to before a driver came. A reset guest uses any page without a word, so the balloon is empty then. The
    /// target stays. An open session is told that no more will come; its owner still ends it.
    pub fn reset(&mut self) {
        self.asking.abandon();
        self.queues.clear();
        self.active = false;
        self.acked = 0;
        self.needs_reset = false;
        self.space.actual = 0;
        self.space.poison_val = 0;
        self.stats = StatsQueue::default();
        self.ballooned.clear();
    }

    /// Has the device leave guest memory alone until [`Balloon::resume`]: a statistics request would write a ring that
    /// nobody harvests any more. Comes when vCPUs are stopped and every kick was served. Kicks are served all the same.
    pub fn park(&mut self) {
        self.parked = true;
    }

    /// Whether the guest is paused, as far as the device was told.
    pub(crate) fn is_parked(&self) -> bool {
        self.parked
    }

    /// Catches up after a restore or a pause: looks at every queue once, and lets the guest look at the configuration space. Needs
    /// interrupts and guest memory to be in place, so it comes when the guest is about to run.
    pub fn resume(&mut self) {
        self.parked = false;
        if self.active {
            self.look_at_all();
            self.interrupts.config();
        }
    }

    /// Serves a kick of queue `queue_index`. See the crate's documentation on where to call this from.
    pub fn notify(&mut self, queue_index: u16) {
        let index = usize::from(queue_index);
        let slot = self.queues.get_mut(index).and_then(Option::as_mut);
        let Some((role, mut queue)) = slot.and_then(|slot| Some((slot.role, slot.queue.take()?))) else {
            tracing::debug!(queue_index, "kick on a queue that is not in use");
            self.counters.ignored_kicks += 1;
            return;
        };
        match self.serve(role, queue_index, &mut queue) {
            Ok(()) => self.put_back(index, queue),
            Err(broken) => self.stop_queue(role, queue_index, &broken),
        }
    }

    /// Pages that the host wants in the balloon.
    pub fn target(&self) -> u64 {
        u64::from(self.space.num_pages)
    }

    /// Asks the guest for a balloon of `pages` pages. Works without a driver: one that comes later finds it.
    ///
    /// # Errors
    /// More pages than RAM has.
    pub fn set_target(&mut self, pages: u64) -> Result<()> {
        let ram_pages = self.layout.total_pages();
        let fits = u32::try_from(pages).ok().filter(|_| pages <= ram_pages);
        let num_pages = fits.ok_or(Error::Target { pages, ram_pages })?;
        if self.space.num_pages != num_pages {
            self.space.num_pages = num_pages;
            self.config_changed();
        }
        Ok(())
    }

    /// Pages that the guest says are in the balloon, all of RAM at most.
    pub fn actual(&self) -> u64 {
        u64::from(self.space.actual).min(self.layout.total_pages())
    }

    /// The pages that are in the balloon, as far as the guest said. See [`Balloon::may_deflate_silently`].
    pub fn ballooned(&self) -> &PageSet {
        self.ballooned.pages()
    }

    /// Whether the guest may take back a page at a multiple of 64 and use it without the device hearing of it, though it
    /// took MUST_TELL_HOST. Drivers of the bitmap dialects round the end of a deflate bitmap such that a last page at
    /// such a number is dropped from it, and a page that is alone sends nothing at all.
    pub fn may_deflate_silently(&self) -> bool {
        self.config.dialect.form(self.acked, &self.layout).is_some()
    }

    /// The value that the guest fills free pages with, where it said so and it is not 0.
    pub fn poison(&self) -> Option<u32> {
        let negotiated = self.acked & self.poison_bit() != 0;
        (negotiated && self.space.poison_val != 0).then_some(self.space.poison_val)
    }

    /// Asks for fresh statistics, by returning the buffer that is held. False where none is: there is no driver, no
    /// statistics queue, the guest is paused, or the last request is still unanswered.
    pub fn request_stats(&mut self) -> bool {
        if self.parked {
            return false;
        }
        let Some(index) = self.index_of(Role::Stats) else {
            return false;
        };
        let Some(head) = self.stats.held.take() else {
            return false;
        };
        self.with_queue(index, |_, mem, queue| queue.complete(mem, head, 0).map(|()| true))
    }

    /// What the guest last said of its memory.
    pub fn stats(&self) -> Option<Stats> {
        self.stats.last
    }

    /// Counts over the life of the device.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// The bit of PAGE_POISON; none in a dialect where that bit means something else.
    fn poison_bit(&self) -> u64 {
        match &self.asking {
            Asking::Hints(_) => feature::PAGE_POISON,
            Asking::Misc(_) | Asking::Never => 0,
        }
    }

    pub(crate) fn config_changed(&self) {
        if self.active {
            self.interrupts.config();
        }
    }

    /// The number of the queue for `role`, where there is one that works.
    pub(crate) fn index_of(&self, role: Role) -> Option<usize> {
        self.queues
            .iter()
            .position(|slot| matches!(slot, Some(s) if s.role == role && s.queue.is_some()))
    }

    fn look_at_all(&mut self) {
        for index in 0..self.queues.len() {
            if matches!(&self.queues[index], Some(slot) if slot.queue.is_some()) {
                self.notify(number(index));
            }
        }
    }

    /// Serves what is available on a queue, a ring's worth at most.
    fn serve(&mut self, role: Role, index: u16, queue: &mut VirtQueue) -> std::result::Result<(), Broken> {
        let mut used = 0u32;
        let done = match role {
            Role::Inflate | Role::Deflate | Role::Report => self.serve_pages(role, queue, &mut used),
            Role::Stats => self.serve_stats(queue, &mut used),
            Role::Hint => self.serve_hints(queue, &mut used),
            Role::Misc => self.serve_misc(index, queue),
        };
        if used > 0 {
            self.interrupts.queue(index);
        }
        done
    }

    /// Inflate, deflate and reporting: pages that the guest gives up or takes back.
    fn serve_pages(&mut self, role: Role, queue: &mut VirtQueue, used: &mut u32) -> std::result::Result<(), Broken> {
        let keep = self.poison().is_some();
        let (ballooned, counters) = (&mut self.ballooned, &mut self.counters);
        let (layout, discard) = (&*self.layout, &*self.discard);
        let mut budget = layout.total_pages();
        queue.drain(
            &self.memory.memory(),
            |mem, _, chain| {
                Ok(match role {
                    Role::Inflate => ballooned.inflate(mem, chain, counters),
                    Role::Deflate => ballooned.deflate(mem, chain, counters),
                    _ => reporting::report(chain, layout, discard, keep, &mut budget, counters),
                })
            },
            || *used += 1,
        )
    }

    /// Statistics: the newest buffer is held.
    fn serve_stats(&mut self, queue: &mut VirtQueue, used: &mut u32) -> std::result::Result<(), Broken> {
        let (stats, counters) = (&mut self.stats, &mut self.counters);
        queue.drain(
            &self.memory.memory(),
            |mem, queue, chain| {
                let (fate, before, malformed) = stats.take(mem, chain);
                counters.malformed += u64::from(malformed);
                if let Some(head) = before {
                    tracing::debug!(head, "a second statistics buffer came: the first is returned");
                    counters.malformed += 1;
                    queue.complete(mem, head, 0)?;
                    *used += 1;
                }
                Ok(fate)
            },
            || {},
        )
    }

    /// Does something on queue `index` besides serving kicks; raises its interrupt where `act` says that it completed
    /// something. Returns what `act` said.
    pub(crate) fn with_queue(
        &mut self,
        index: usize,
        act: impl FnOnce(&mut Self, &M::M, &mut VirtQueue) -> std::result::Result<bool, Broken>,
    ) -> bool {
        let slot = self.queues.get_mut(index).and_then(Option::as_mut);
        let Some((role, mut queue)) = slot.and_then(|slot| Some((slot.role, slot.queue.take()?))) else {
            return false;
        };
        let memory = self.memory.memory();
        match act(self, &*memory, &mut queue) {
            Ok(completed) => {
                self.put_back(index, queue);
                if completed {
                    self.interrupts.queue(number(index));
                }
                completed
            }
            Err(broken) => {
                self.stop_queue(role, number(index), &broken);
                false
            }
        }
    }

    fn put_back(&mut self, index: usize, queue: VirtQueue) {
        if let Some(slot) = self.queues.get_mut(index).and_then(Option::as_mut) {
            slot.queue = Some(queue);
        }
    }

    /// A queue whose rings are broken is not touched again; the others go on.
    fn stop_queue(&mut self, role: Role, index: u16, broken: &Broken) {
        // A driver that resets the device and breaks its rings again, over and over, is told of once.
        if self.counters.broken_queues == 0 {
            tracing::warn!(index, ?role, error = %broken, "balloon queue stopped: its rings are broken");
        } else {
            tracing::debug!(index, ?role, error = %broken, "balloon queue stopped: its rings are broken");
        }
        self.counters.broken_queues += 1;
        self.needs_reset = true;
        match role {
            Role::Hint | Role::Misc => self.asking.abandon(),
            Role::Stats => self.stats.held = None,
            Role::Inflate | Role::Deflate => self.ballooned.deafen(),
            Role::Report => {}
        }
        self.interrupts.config();
    }
}

/// Refuses acknowledged bits that were not offered, and drivers from before virtio 1.
pub(crate) fn check_features(acked: u64, offered: u64) -> Result<()> {
    let extra = acked & !offered;
    if extra != 0 {
        return Err(Error::NotOffered { extra, offered });
    }
    if acked & feature::VERSION_1 == 0 {
        return Err(Error::Legacy);
    }
    Ok(())
}

/// A queue's number as interrupts have it; no dialect has more than five queues.
pub(crate) fn number(index: usize) -> u16 {
    u16::try_from(index).unwrap_or(u16::MAX)
}
