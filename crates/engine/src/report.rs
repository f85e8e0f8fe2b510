//! The report: what happened, in figures. The keys are the command line's contract.

use crate::Ending;
use machine::BalloonCounts;
use serde::{Deserialize, Serialize};

/// Whose report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The side that sent.
    Source,
    /// The side that received.
    Receiver,
}

/// One migration in figures. Times in milliseconds, sizes in bytes, pages of 4 KiB.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Of this form: 1.
    pub version: u32,
    /// Whose.
    pub role: Role,
    /// How it ended.
    pub result: Ending,
    /// Why, unless it completed.
    pub error: Option<String>,
    /// From the command to migrate to the guest running on the receiver.
    pub total_ms: f64,
    /// Until the receiver accepted and tracking was on.
    pub setup_ms: f64,
    /// From the question to the guest to the end of its session.
    pub hint_ms: f64,
    /// From the first page to the pause.
    pub precopy_ms: f64,
    /// From the pause to the guest running on the receiver, `verify_ms` left out.
    pub downtime_ms: f64,
    /// What `--verify` added while the guest was paused.
    pub verify_ms: f64,
    /// What `--verify` took ahead of the pause, while the guest ran; a source's alone. Part of `precopy_ms` and `total_ms`.
    #[serde(default)]
    pub verify_ahead_ms: f64,
    /// How long vCPUs stood still during precopy, as far as it was measured.
    pub guest_stall_ms: f64,
    /// Guest RAM.
    pub ram_bytes: u64,
    /// Everything that crossed, headers and control included.
    pub wire_bytes: u64,
    /// Page content that crossed.
    pub payload_bytes: u64,
    /// `wire_bytes` over `total_ms`.
    pub throughput_bytes_per_s: f64,
    /// Data streams.
    pub streams: u16,
    /// Pages by fate.
    pub pages: PagesReport,
    /// Connections that were lost and replaced.
    #[serde(default)]
    pub link: LinkReport,
    /// The question to the guest.
    pub balloon: BalloonReport,
    /// One entry a round.
    pub rounds: Vec<RoundReport>,
    /// What was packed, and why; the source's alone.
    #[serde(default)]
    pub compress: Option<CompressReport>,
    /// Whether both sides' digests were equal; null where they were not compared.
    pub verified: Option<bool>,
    /// The most memory that this process held.
    pub peak_rss_bytes: u64,
}

impl Report {
    /// Of a migration that ended before anything was sent.
    pub fn nothing_sent(role: Role, result: Ending, error: Option<String>, total_ms: f64) -> Self {
        Report {
            version: 1,
            role,
            result,
            error,
            total_ms,
            setup_ms: 0.0,
            hint_ms: 0.0,
            precopy_ms: 0.0,
            downtime_ms: 0.0,
            verify_ms: 0.0,
            verify_ahead_ms: 0.0,
            guest_stall_ms: 0.0,
            ram_bytes: 0,
            wire_bytes: 0,
            payload_bytes: 0,
            throughput_bytes_per_s: 0.0,
            streams: 0,
            pages: PagesReport::default(),
            link: LinkReport::default(),
            balloon: BalloonReport {
                dialect: "off".to_owned(),
                why: "the migration did not come so far".to_owned(),
                ..BalloonReport::default()
            },
            rounds: Vec::new(),
            compress: None,
            verified: None,
            peak_rss_bytes: 0,
        }
    }
}

/// Connections that were lost, and what that cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    /// How often the migration was taken up again over new ones.
    pub resumed: u32,
    /// Milliseconds for which there were none.
    pub down_ms: f64,
    /// Bytes of batches that were written and did not arrive whole; only a source counts them.
    pub bytes_again: u64,
}

/// Pages by fate: what the receiver was told of each page last. `sent + zero + hole + hinted + ballooned + filled` is
/// `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagesReport {
    /// All pages that have a fate. All of guest RAM, but for a migration that ended within round 0 or before: then only
    /// [`Report::ram_bytes`] tells the size.
    pub total: u64,
    /// Crossed with content.
    pub sent: u64,
    /// Transmissions beyond a page's first.
    pub resent: u64,
    /// Read as zero.
    pub zero: u64,
    /// Never touched.
    pub hole: u64,
    /// Called free by the guest.
    pub hinted: u64,
    /// In the balloon.
    pub ballooned: u64,
    /// Free, and filled with the guest's poison on the receiver.
    pub filled: u64,
    /// Of `sent`: called free at first, then sent after all.
    pub hinted_then_sent: u64,
}

impl PagesReport {
    /// The counts as reported: of the pages that the receiver was told of. That they are all of RAM is checked before the
    /// hand-over.
    pub(crate) fn told(self) -> Self {
        PagesReport {
            total: self.fates(),
            ..self
        }
    }

    /// Pages that have a fate.
    pub(crate) fn fates(&self) -> u64 {
        self.sent + self.zero + self.hole + self.hinted + self.ballooned + self.filled
    }

    /// Whether the six fates add up to the total.
    pub fn adds_up(&self) -> bool {
        self.fates() == self.total
    }
}

/// The question to the guest's balloon.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct BalloonReport {
    /// Which dialect.
    pub dialect: String,
    /// Whether it was asked.
    pub asked: bool,
    /// Why, or why not, or why the session was ended early.
    pub why: String,
    /// Answers that counted.
    pub answers: u64,
    /// Answers that came to no open question.
    pub late: u64,
    /// Buffers of any of its queues that failed a check.
    pub malformed: u64,
    /// Whether the session ran into its time-out.
    pub timed_out: bool,
    /// Of `malformed`: buffers whose bitmap header failed the strict check.
    #[serde(default)]
    pub bad_headers: u64,
    /// Of `malformed`: bitmaps that changed while they were read.
    #[serde(default)]
    pub torn: u64,
    /// Of `malformed`: windows of an answer that overlap, or come with some left out.
    #[serde(default)]
    pub stray_windows: u64,
    /// Inflations that only said that compaction had moved pages: nothing in the balloon was believed from there on.
    #[serde(default)]
    pub stale_bitmaps: u64,
    /// Page numbers and bits that name no RAM.
    #[serde(default)]
    pub bad_pfns: u64,
    /// Kicks on queues that are not in use.
    #[serde(default)]
    pub ignored_kicks: u64,
    /// Queues that were stopped because their rings are broken.
    #[serde(default)]
    pub broken_queues: u64,
    /// Calls that gave memory back to the host.
    #[serde(default)]
    pub discards: u64,
    /// Pages given back by those calls.
    #[serde(default)]
    pub discarded_pages: u64,
    /// Of `discards`: those that the host refused.
    #[serde(default)]
    pub discard_errors: u64,
    /// Pages that the guest reported as free unasked.
    #[serde(default)]
    pub reported_pages: u64,
    /// Writes to parts of the configuration space that are not the guest's.
    #[serde(default)]
    pub ignored_config_writes: u64,
}

impl BalloonReport {
    /// Takes over what was counted in this migration.
    pub(crate) fn count(&mut self, counts: BalloonCounts) {
        self.answers = counts.answers;
        self.late = counts.late;
        self.malformed = counts.malformed;
        self.bad_headers = counts.bad_headers;
        self.torn = counts.torn;
        self.stray_windows = counts.stray_windows;
        self.stale_bitmaps = counts.stale_bitmaps;
        self.bad_pfns = counts.bad_pfns;
        self.ignored_kicks = counts.ignored_kicks;
        self.broken_queues = counts.broken_queues;
        self.discards = counts.discards;
        self.discarded_pages = counts.discarded_pages;
        self.discard_errors = counts.discard_errors;
        self.reported_pages = counts.reported_pages;
        self.ignored_config_writes = counts.ignored_config_writes;
    }
}

/// Whether pages were packed on their way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompressReport {
    /// What was asked for.
    pub asked: String,
    /// What most pages were packed by; `none`: they went as they were.
    pub used: String,
    /// Why.
    pub why: String,
    /// Bytes of pages that were sent with content.
    pub raw_bytes: u64,
    /// Bytes that crossed for them, headers left out.
    pub wire_bytes: u64,
}

/// One round.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct RoundReport {
    /// Pages that were to be sent when it began.
    pub pending_pages: u64,
    /// Pages that were sent, with content or as zero or fill.
    pub sent_pages: u64,
    /// Bytes that crossed.
    pub wire_bytes: u64,
    /// How long it took, until the receiver had it all.
    pub ms: f64,
    /// Pages that the harvest after it returned.
    pub dirty_pages_after: u64,
    /// The rate at which the guest wrote, from that.
    pub dirty_bytes_per_s: f64,
}
