//! Saving a device and taking a saved one over.
//!
//! Saved state comes back over a network, so it is untrusted: the plain [`State`] becomes a device only through the same
//! checks that a driver's own words go through, and a few more. Guest memory is neither read nor written here, so it
//! does not matter whether it has arrived.

use crate::ask::Asking;
use crate::device::{QUEUE_MAX_SIZE, Slot, check_features};
use crate::dialect::Role;
use crate::dialect::hinting::Hinting;
use crate::dialect::misc::Misc;
use crate::inflate::{Aside, LastBits};
use crate::queue::VirtQueue;
use crate::{Balloon, Error, QueueConfig, Result, Stats, feature};
use machine::Section;
use pages::{Layout, PageRange, PageSet};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use vm_memory::GuestAddressSpace;

/// The name of the section.
const NAME: &str = "balloon";

/// The version of its form.
const VERSION: u32 = 3;

/// The version before, which had nothing aside. It is read.
const VERSION_BEFORE: u32 = 2;

/// A device, as it is saved.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    dialect: String,
    offered: u64,
    acked: u64,
    active: bool,
    needs_reset: bool,
    num_pages: u32,
    actual: u32,
    poison_val: u32,
    /// How many command ids (`standard`), or which last request id (`bitmap`), were used.
    issued: u32,
    queues: Vec<Option<QueueRecord>>,
    /// Head of the statistics buffer that is held.
    held_stats: Option<u16>,
    stats: Option<Stats>,
    /// Head of the request buffer that is held, and where its bytes lie.
    posted: Option<(u16, Vec<(u64, u32)>)>,
    ballooned: Ballooned,
    last_bits: LastBits,
    /// What may have been compaction's.
    #[serde(default)]
    aside: Option<AsideRecord>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AsideRecord {
    before: Ballooned,
    named: Ballooned,
    digest: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueRecord {
    size: u16,
    desc: u64,
    avail: u64,
    used: u64,
    next_avail: u16,
    next_used: u16,
    broken: bool,
}

/// The balloon's pages, in the shorter of two forms.
#[derive(Debug, Serialize, Deserialize)]
enum Ballooned {
    Runs(Vec<PageRange>),
    /// Hexadecimal digits of a bitmap in RAM order.
    Bitmap(String),
}

impl<M: GuestAddressSpace> Balloon<M> {
    /// The device's state. A session that is open is ended first: the guest has to find DONE wherever it runs on.
    pub fn save(&mut self) -> Section {
        self.end_open();
        let (issued, posted) = match &self.asking {
            Asking::Hints(hints) => (hints.issued(), None),
            Asking::Misc(misc) => (misc.issued(), misc.posted()),
            Asking::Never => (0, None),
        };
        let state = State {
            dialect: self.config.dialect.name().to_owned(),
            offered: self.config.offered(),
            acked: self.acked,
            active: self.active,
            needs_reset: self.needs_reset,
            num_pages: self.space.num_pages,
            actual: self.space.actual,
            poison_val: self.space.poison_val,
            issued,
            queues: self.queues.iter().map(|slot| slot.as_ref().map(record)).collect(),
            held_stats: self.stats.held,
            stats: self.stats.last,
            posted,
            ballooned: Ballooned::of(self.ballooned.pages()),
            last_bits: self.ballooned.last_bits(),
            aside: self.ballooned.aside().map(|aside| AsideRecord {
                before: Ballooned::of(&aside.before),
                named: Ballooned::of(&aside.named),
                digest: aside.digest,
            }),
        };
        #[expect(
            clippy::expect_used,
            reason = "plain fields without maps or foreign types always have a JSON form"
        )]
        let data = serde_json::to_vec(&state).expect("balloon state has a JSON form");
        Section {
            name: NAME.to_owned(),
            version: VERSION,
            data,
        }
    }

    /// Takes over the state of another device like this one. [`Balloon::resume`] then catches up with the guest.
    ///
    /// # Errors
    /// [`Error::State`] for anything that this device could not have saved. Nothing changes then.
    pub fn restore(&mut self, section: &Section) -> Result<()> {
        if section.name != NAME || !(VERSION_BEFORE..=VERSION).contains(&section.version) {
            return Err(Error::State(format!(
                "section {:?} version {} is not {NAME:?} version {VERSION_BEFORE} or {VERSION}",
                section.name, section.version
            )));
        }
        let state: State = serde_json::from_slice(&section.data).map_err(|e| Error::State(e.to_string()))?;
        self.check_like(&state)?;
        let queues = self.restore_queues(&state)?;
        let asking = self.restore_asking(&state, &queues)?;
        if let Some(head) = state.held_stats {
            check_head(&queues, Role::Stats, head)?;
        }
        let ballooned = state.ballooned.into_set(&self.layout)?;
        let aside = state.aside.map(|aside| aside.into_sets(&self.layout)).transpose()?;

        self.end_open();
        self.asking = asking;
        self.queues = queues;
        self.acked = state.acked;
        self.active = state.active;
        self.needs_reset = state.needs_reset;
        self.space.num_pages = state.num_pages;
        self.space.actual = state.actual;
        self.space.poison_val = state.poison_val;
        self.stats.held = state.held_stats;
        self.stats.last = state.stats;
        self.ballooned.replace(ballooned, state.last_bits, aside);
        let stopped = |slot: &Slot| slot.queue.is_none() && matches!(slot.role, Role::Inflate | Role::Deflate);
        if self.queues.iter().flatten().any(stopped) {
            self.ballooned.deafen();
        }
        let tells = self.acked & feature::MUST_TELL_HOST != 0;
        self.ballooned
            .speak(self.config.dialect.form(self.acked, &self.layout), tells);
        Ok(())
    }

    /// Refuses the state of a device that is not like this one, or that could not exist.
    fn check_like(&self, state: &State) -> Result<()> {
        let refuse = |why: String| Err(Error::State(why));
        if state.dialect != self.config.dialect.name() {
            return refuse(format!(
                "its dialect is {:?}, ours {}",
                state.dialect, self.config.dialect
            ));
        }
        if state.offered != self.config.offered() {
            return refuse(format!(
                "it offers features {:#x}, ours {:#x}",
                state.offered,
                self.config.offered()
            ));
        }
        if state.active || state.acked != 0 {
            check_features(state.acked, self.config.offered()).map_err(|e| Error::State(e.to_string()))?;
        }
        if !state.active && state.queues.iter().any(Option::is_some) {
            return refuse("it has queues but no driver".to_owned());
        }
        if u64::from(state.num_pages) > self.layout.total_pages() {
            return refuse(format!(
                "its target of {} pages exceeds RAM of {}",
                state.num_pages,
                self.layout.total_pages()
            ));
        }
        Ok(())
    }

    fn restore_queues(&self, state: &State) -> Result<Vec<Option<Slot>>> {
        let roles = self.config.dialect.roles(state.acked);
        if state.queues.len() > roles.len() {
            return Err(Error::State(format!(
                "it has {} queues, the features in use at most {}",
                state.queues.len(),
                roles.len()
            )));
        }
        let memory = self.memory.memory();
        let mut slots = Vec::new();
        for (index, (role, record)) in roles.into_iter().zip(&state.queues).enumerate() {
            slots.push(match (role, record) {
                (_, None) => None,
                (None, Some(_)) => return Err(Error::State(format!("it uses queue {index}, which has no use"))),
                (Some(role), Some(record)) if record.broken => Some(Slot { role, queue: None }),
                (Some(role), Some(record)) => {
                    let config = QueueConfig {
                        size: record.size,
                        desc: record.desc,
                        avail: record.avail,
                        used: record.used,
                        ready: true,
                    };
                    let (avail, used) = (record.next_avail, record.next_used);
                    let queue = VirtQueue::resume(&*memory, index, QUEUE_MAX_SIZE, &config, avail, used)
                        .map_err(|e| Error::State(e.to_string()))?;
                    Some(Slot {
                        role,
                        queue: Some(queue),
                    })
                }
            });
        }
        Ok(slots)
    }

    fn restore_asking(&self, state: &State, queues: &[Option<Slot>]) -> Result<Asking> {
        Ok(match &self.asking {
            Asking::Hints(_) | Asking::Never if state.posted.is_some() => {
                return Err(Error::State(
                    "it holds a request buffer, which its dialect does not have".to_owned(),
                ));
            }
            Asking::Never if state.issued != 0 => {
                return Err(Error::State(format!(
                    "it has asked {} times, in a dialect without questions",
                    state.issued
                )));
            }
            Asking::Never => Asking::Never,
            Asking::Hints(_) => Asking::Hints(Hinting::restored(state.issued)?),
            Asking::Misc(_) => {
                let mut misc = Misc::restored(state.issued);
                if let Some((head, segments)) = &state.posted {
                    check_head(queues, Role::Misc, *head)?;
                    misc.repost(*head, segments)?;
                }
                Asking::Misc(misc)
            }
        })
    }
}

/// A queue, as it is saved.
fn record(slot: &Slot) -> QueueRecord {
    let config = slot.queue.as_ref().map(VirtQueue::config).unwrap_or_default();
    let (next_avail, next_used) = slot.queue.as_ref().map(VirtQueue::positions).unwrap_or_default();
    QueueRecord {
        size: config.size,
        desc: config.desc,
        avail: config.avail,
        used: config.used,
        next_avail,
        next_used,
        broken: slot.queue.is_none(),
    }
}

/// Refuses a held chain that the queue for `role` cannot have.
fn check_head(queues: &[Option<Slot>], role: Role, head: u16) -> Result<()> {
    let queue = queues
        .iter()
        .flatten()
        .find(|slot| slot.role == role)
        .and_then(|slot| slot.queue.as_ref());
    match queue {
        Some(queue) if head < queue.config().size => Ok(()),
        _ => Err(Error::State(format!(
            "it holds buffer {head} of a {role:?} queue that cannot have it"
        ))),
    }
}

impl AsideRecord {
    fn into_sets(self, layout: &Arc<Layout>) -> Result<Aside> {
        Ok(Aside {
            before: self.before.into_set(layout)?,
            named: self.named.into_set(layout)?,
            digest: self.digest,
        })
    }
}

impl Ballooned {
    fn of(set: &PageSet) -> Self {
        // A run has some 12 to 20 characters; two digits of a bitmap hold 8 pages.
        let digits = set.layout().total_pages() / 4;
        let runs: Vec<PageRange> = set.runs().collect();
        if runs.len() as u64 * 16 <= digits {
            return Ballooned::Runs(runs);
        }
        let digit = |nibble: u8| char::from_digit(u32::from(nibble), 16).unwrap_or('0');
        let bitmap = set.to_bitmap();
        Ballooned::Bitmap(
            bitmap
                .iter()
                .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)])
                .collect(),
        )
    }

    fn into_set(self, layout: &Arc<Layout>) -> Result<PageSet> {
        let refuse = |why: String| Error::State(format!("pages in the balloon: {why}"));
        match self {
            Ballooned::Runs(runs) => {
                let mut set = PageSet::empty(layout);
                for run in runs {
                    if layout.region_of_range(run).is_none() {
                        return Err(refuse(format!("{run} is not within one region of RAM")));
                    }
                    set.insert_range(run);
                }
                Ok(set)
            }
            Ballooned::Bitmap(digits) => {
                let digit = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok());
                let bitmap: Option<Vec<u8>> = digits
                    .as_bytes()
                    .chunks(2)
                    .map(|two| Some(digit(two[0])? << 4 | digit(*two.get(1)?)?))
                    .collect();
                let bitmap = bitmap.ok_or_else(|| refuse("a bitmap is pairs of hexadecimal digits".to_owned()))?;
                PageSet::from_bitmap(layout, &bitmap).map_err(|e| refuse(e.to_string()))
            }
        }
    }
}
