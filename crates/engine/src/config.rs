//! What the operator or the embedding VMM asked for.

use std::time::Duration;

/// When to ask the guest which pages are free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ask {
    /// When it can pay.
    #[default]
    Auto,
    /// Whenever the guest can be asked.
    Always,
    /// Never.
    Never,
}

/// What to do when the time-out passes while the guest dirties faster than the link carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnTimeout {
    /// Give up: the guest goes on at the source.
    #[default]
    Cancel,
    /// Pause the guest and finish, whatever the downtime.
    Stop,
}

/// Which pages are left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkipSet {
    /// What the guest calls free, and what its balloon holds.
    pub free: bool,
    /// Pages that read as zero (they cross as a range, without content).
    pub zero: bool,
    /// Pages that were never touched.
    pub hole: bool,
}

impl SkipSet {
    /// All three: the default.
    pub const ALL: SkipSet = SkipSet {
        free: true,
        zero: true,
        hole: true,
    };
    /// None: every page crosses with its content.
    pub const NONE: SkipSet = SkipSet {
        free: false,
        zero: false,
        hole: false,
    };
}

/// Settings that may change while a migration runs; `None`: as it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    /// The downtime that is aimed at, from the next decision on.
    pub downtime_limit: Option<Duration>,
    /// The most bytes a second that all streams together send; 0: as fast as the link takes them. The engine reckons with
    /// it, its executor keeps to it.
    pub max_bandwidth: Option<u64>,
}

impl Tuning {
    /// The two together, the later one's settings before this one's.
    pub fn then(self, later: Tuning) -> Tuning {
        Tuning {
            downtime_limit: later.downtime_limit.or(self.downtime_limit),
            max_bandwidth: later.max_bandwidth.or(self.max_bandwidth),
        }
    }
}

/// How long a peer that is alive may leave an answer owing.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a migration whose connections were lost can be taken up again.
const RESUME_WINDOW: Duration = Duration::from_secs(30);

/// A source's settings.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// What to leave behind.
    pub skip: SkipSet,
    /// When to ask the balloon.
    pub ask: Ask,
    /// How long answers may take before the session is ended.
    pub hint_timeout: Duration,
    /// Data streams, 1 to 64.
    pub streams: u16,
    /// The downtime that is aimed at.
    pub downtime_limit: Duration,
    /// The most time before the guest is paused; zero: none.
    pub timeout: Duration,
    /// What to do then.
    pub on_timeout: OnTimeout,
    /// A peer that was silent for so long is dead.
    pub peer_timeout: Duration,
    /// How long to try to reach a receiver again whose connections were lost; zero: not at all.
    pub resume_window: Duration,
    /// How long a receiver that is alive may leave an answer owing (to the end of a round, the machine's state, `Commit`)
    /// while this side has nothing else to do: the guest may be paused meanwhile. With `verify` a second a GiB of RAM is
    /// added.
    pub answer_timeout: Duration,
    /// Digest RAM on both sides and compare.
    pub verify: bool,
    /// Checks only.
    pub dry_run: bool,
}

impl Default for SourceConfig {
    fn default() -> Self {
        SourceConfig {
            skip: SkipSet::ALL,
            ask: Ask::Auto,
            hint_timeout: Duration::from_millis(500),
            streams: 1,
            downtime_limit: Duration::from_millis(300),
            timeout: Duration::ZERO,
            on_timeout: OnTimeout::Cancel,
            peer_timeout: Duration::from_secs(10),
            resume_window: RESUME_WINDOW,
            answer_timeout: ANSWER_TIMEOUT,
            verify: false,
            dry_run: false,
        }
    }
}

/// A destination's settings.
#[derive(Clone, Debug)]
pub struct DestinationConfig {
    /// A peer that was silent for so long is dead.
    pub peer_timeout: Duration,
    /// The longest that a source whose connections were lost is waited for, however long it would try; zero: not at all.
    pub resume_window: Duration,
    /// How long a source that is alive may leave `Ready` without `Commit`.
    pub answer_timeout: Duration,
    /// Leave the guest paused once it is here.
    pub stay_paused: bool,
    /// RAM reads as zero where nothing was received.
    pub memory_is_zero: bool,
}

impl Default for DestinationConfig {
    fn default() -> Self {
        DestinationConfig {
            peer_timeout: Duration::from_secs(10),
            resume_window: RESUME_WINDOW,
            answer_timeout: ANSWER_TIMEOUT,
            stay_paused: false,
            memory_is_zero: true,
        }
    }
}
