//! What a run is made of, drawn from a seed or set by a test.

use crate::guest::Make;
use crate::rng::Rng;
use engine::{Ask, DestinationConfig, OnTimeout, SkipSet, SourceConfig};
use machine::{BalloonConfig, MachineConfig, MachineState, Section};
use pages::{Layout, PageRange, Pfn};
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "planted")]
pub use engine::Fault;

/// Faults that can be planted: none without the feature `planted`.
#[cfg(not(feature = "planted"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {}

/// All of a run.
#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    pub guest: Make,
    pub source: SourceConfig,
    pub destination: DestinationConfig,
    /// How eager the guest is to write, against everything else.
    pub writes_weight: usize,
    pub refusals: Vec<String>,
    /// Whether the executor holds a stream's failure back until it has heard what the peer said last.
    pub holds: bool,
    /// Of the protocol: from 2 on the destination takes the state early, from 3 on lost connections are replaced.
    pub version: u16,
    /// How long digesting takes at the source, at the destination.
    pub source_digest: Duration,
    pub destination_digest: Duration,
    /// Sections of the machine's state beside those that it always has: name and bytes.
    pub more_state: Vec<(&'static str, usize)>,
    /// Whether what is done to the guest takes long, while all else goes on.
    pub slow_source: bool,
    pub slow_destination: bool,
    pub fault: Option<Fault>,
}

impl Setup {
    /// A run with everything at its plainest: one region of `pages` pages, one stream, a guest that is asked.
    pub fn plain(seed: u64, pages: u64) -> Self {
        Setup {
            seed,
            guest: Make {
                layout: Arc::new(Layout::flat(pages).unwrap()),
                running: true,
                allocates: false,
                init_on_alloc: false,
                poison: false,
                finishes: true,
                can_ask: true,
                stats: true,
                torn: false,
                holds_back: false,
                leaves_silently: false,
                believes_nothing_then: false,
                writes: 200,
            },
            source: SourceConfig {
                ask: Ask::Always,
                hint_timeout: Duration::from_millis(200),
                peer_timeout: Duration::from_secs(2),
                downtime_limit: Duration::from_millis(3),
                verify: true,
                ..SourceConfig::default()
            },
            destination: DestinationConfig {
                peer_timeout: Duration::from_secs(2),
                ..DestinationConfig::default()
            },
            writes_weight: 1,
            refusals: Vec::new(),
            holds: true,
            version: 2,
            source_digest: Duration::ZERO,
            destination_digest: Duration::ZERO,
            more_state: Vec::new(),
            slow_source: false,
            slow_destination: false,
            fault: None,
        }
    }

    /// Anything, drawn from the seed.
    pub fn random(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0xabcd);
        let mut setup = Setup::plain(seed, 1);
        let (mut regions, mut at) = (Vec::new(), 0);
        for _ in 0..=rng.below(3) {
            at += rng.below(70);
            let most = if rng.one_in(12) { 2500 } else { 300 };
            let region = PageRange::new(Pfn(at), 1 + rng.below(most)).unwrap();
            at = region.end().0;
            regions.push(region);
        }
        setup.guest.layout = Arc::new(Layout::new(regions).unwrap());
        setup.guest.running = !rng.one_in(8);
        setup.guest.allocates = rng.one_in(2);
        setup.guest.init_on_alloc = rng.one_in(2);
        setup.guest.poison = rng.one_in(3);
        setup.guest.finishes = !rng.one_in(5);
        setup.guest.can_ask = !rng.one_in(8);
        setup.holds = rng.one_in(2);
        setup.version = [1, 2, 3, 3, 3, 3, 3, 3][rng.below(8) as usize];
        setup.guest.holds_back = rng.one_in(2);
        setup.guest.torn = rng.one_in(3);
        setup.guest.stats = !rng.one_in(3);
        setup.guest.writes = rng.below(400);
        let mut skip = || !rng.one_in(5);
        setup.source.skip = SkipSet {
            free: skip(),
            zero: skip(),
            hole: skip(),
        };
        setup.source.ask = match rng.below(6) {
            0 => Ask::Never,
            1 => Ask::Auto,
            _ if setup.source.skip.free => Ask::Always,
            _ => Ask::Auto,
        };
        setup.source.streams = 1 + rng.below(4) as u16;
        setup.source.verify = rng.one_in(2);
        setup.source.downtime_limit = Duration::from_micros(rng.below(6000));
        setup.source.hint_timeout = Duration::from_micros(if rng.one_in(2) {
            rng.below(20_000)
        } else {
            rng.below(1500)
        });
        if rng.one_in(5) {
            setup.source.timeout = Duration::from_micros(1 + rng.below(6000));
            setup.source.on_timeout = if rng.one_in(3) {
                OnTimeout::Cancel
            } else {
                OnTimeout::Stop
            };
        }
        setup.destination.memory_is_zero = !rng.one_in(3);
        setup.destination.stay_paused = rng.one_in(6);
        setup.source.resume_window = Duration::from_millis([0, 500, 5000, 5000, 30_000, 30_000][rng.below(6) as usize]);
        setup.destination.resume_window =
            Duration::from_millis([0, 5000, 30_000, 30_000, 30_000, 30_000][rng.below(6) as usize]);
        setup.writes_weight = rng.below(3) as usize;
        setup.slow_source = rng.one_in(3);
        setup.slow_destination = rng.one_in(3);
        setup.guest.leaves_silently = rng.one_in(3);
        setup.guest.believes_nothing_then = rng.one_in(2);
        setup
    }

    pub fn machine(&self) -> MachineConfig {
        MachineConfig {
            kind: "model".to_owned(),
            layout: (*self.guest.layout).clone(),
            vcpus: 1,
            balloon: BalloonConfig {
                dialect: "standard".to_owned(),
                features: 8,
            },
            extra: Default::default(),
        }
    }

    pub fn state(&self, saves: usize) -> MachineState {
        let mut state = crate::state(saves);
        for (name, bytes) in &self.more_state {
            state.sections.push(Section {
                name: (*name).to_owned(),
                version: 7,
                data: (0..*bytes).map(|i| (i % 251) as u8).collect(),
            });
        }
        state
    }
}
