//! What is done to a migration, and what has to come of it.

use crate::phases::Phase;
use crate::proxy::Way;
use Way::{Down, Up};
use std::fmt;

/// One of the two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Receiver,
}

/// What is done to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blow {
    /// SIGKILL.
    Killed(Side),
    /// SIGSTOP, until the other side has given it up or has done its part; then SIGCONT.
    Stopped(Side),
}

/// One harm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Harm {
    Process(Blow),
    /// All connections are closed.
    Cut,
    /// All connections are reset.
    Reset,
    /// One way of all connections is closed.
    HalfClosed(Way),
    /// Nothing more crosses the connections that there are.
    Blackhole,
    /// What crosses next does so a byte at a time.
    Trickle,
    /// A bit of the next control frame that goes this way is flipped: of its length, or of its last byte.
    Frame {
        way: Way,
        at_length: bool,
    },
    /// A bit of the next batch's header is flipped.
    Batch,
}

/// Who runs the guest in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runs {
    Source,
    Receiver,
    /// It stays paused at the source, until an operator says more.
    PausedAtSource,
    /// Its host was killed.
    Nobody,
}

/// What became of the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// It ended by itself.
    Code(i32),
    /// It was killed.
    Killed,
    /// It has the guest.
    Guest,
    /// It never believed that a source was there, and waits for one.
    Waits,
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Left::Code(code) => write!(f, "{code}"),
            Left::Killed => f.write_str("killed"),
            Left::Guest => f.write_str("0"),
            Left::Waits => f.write_str("waits on"),
        }
    }
}

/// What may come of a cell: the exit code of the source's command, what became of the receiver, and who runs the guest.
pub(crate) type Outcome = (i32, Left, Runs);

const DONE: i32 = 0;
const LOST: i32 = 4;
const SILENT: i32 = 6;
const UNKNOWN: i32 = 7;

impl Harm {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Harm::Process(Blow::Killed(Side::Source)) => "source killed",
            Harm::Process(Blow::Killed(Side::Receiver)) => "receiver killed",
            Harm::Process(Blow::Stopped(Side::Source)) => "source stopped",
            Harm::Process(Blow::Stopped(Side::Receiver)) => "receiver stopped",
            Harm::Cut => "cut",
            Harm::Reset => "reset",
            Harm::HalfClosed(Up) => "half-closed to receiver",
            Harm::HalfClosed(Down) => "half-closed to source",
            Harm::Blackhole => "blackhole",
            Harm::Trickle => "trickle",
            Harm::Frame { way: Up, at_length } => ["frame to receiver", "length to receiver"][usize::from(at_length)],
            Harm::Frame { way: Down, at_length } => ["frame to source", "length to source"][usize::from(at_length)],
            Harm::Batch => "batch header",
        }
    }

    /// Whether there is anything left for it to harm.
    pub(crate) fn makes_sense_at(self, phase: Phase) -> bool {
        match self {
            // The source says no more but pings once it has handed the guest over.
            Harm::Frame { way: Up, .. } => phase <= Phase::Ready,
            Harm::Frame { way: Down, .. } => phase <= Phase::Commit && phase != Phase::CommitHeld,
            Harm::Batch => phase < Phase::LastRoundEnd,
            Harm::Trickle => phase < Phase::Running && phase != Phase::CommitHeld,
            _ => true,
        }
    }

    /// Everything that may come of it at the end of `phase`; `resumes`: there is a window to take the migration up again in;
    /// `commit_passed`: the receiver could read that it is to run the guest.
    pub(crate) fn outcomes(self, phase: Phase, resumes: bool, commit_passed: bool) -> Vec<Outcome> {
        if !resumes || !self.is_of_the_link() || phase < Phase::Accept || phase >= Phase::CommitHeld {
            return self.outcomes_without_window(phase, commit_passed);
        }
        let done = vec![arrived(DONE)];
        match phase {
            // The receiver begins to restore the machine as soon as all is there, and then it is too late. Each side ends
            // for what it saw first.
            Phase::LastRoundEnd | Phase::Section | Phase::StateEnd | Phase::Ready => {
                let mut outcomes = [done, self.outcomes_without_window(phase, commit_passed)].concat();
                for code in [LOST, SILENT] {
                    outcomes.extend([LOST, SILENT].map(|left| (code, Left::Code(left), Runs::Source)));
                }
                outcomes
            }
            _ => done,
        }
    }

    /// Whether it is the connections that are harmed, or seem to be, and both sides live.
    pub(crate) fn is_of_the_link(self) -> bool {
        match self {
            Harm::Process(Blow::Killed(_)) | Harm::Frame { .. } | Harm::Batch | Harm::Trickle => false,
            Harm::Process(Blow::Stopped(_)) => true,
            Harm::Cut | Harm::Reset | Harm::HalfClosed(_) | Harm::Blackhole => true,
        }
    }

    fn outcomes_without_window(self, phase: Phase, commit_passed: bool) -> Vec<Outcome> {
        if self == Harm::Trickle {
            return vec![arrived(DONE)];
        }
        match phase {
            Phase::Running => self.after_running(),
            Phase::Commit => self.after_commit(),
            Phase::CommitHeld => self.with_commit_held(),
            Phase::Ready => {
                // The source hands over as soon as it has read it.
                let mut outcomes = self.before_commit(phase);
                // A receiver that was told nonsense in place of `Commit` gives the guest up, and says so.
                if !matches!(self, Harm::Frame { .. }) {
                    outcomes.extend(self.with_commit_held());
                }
                if commit_passed {
                    // And the receiver may be quick with its answer.
                    outcomes.extend(self.after_commit());
                    outcomes.push(arrived(DONE));
                }
                outcomes
            }
            _ => self.before_commit(phase),
        }
    }

    fn before_commit(self, phase: Phase) -> Vec<Outcome> {
        let outcome = match self {
            // Its command hears of no end; the receiver sees the connection closed.
            Harm::Process(Blow::Killed(Side::Source)) => (UNKNOWN, Left::Code(LOST), Runs::Nobody),
            Harm::Process(Blow::Killed(Side::Receiver)) => (LOST, Left::Killed, Runs::Source),
            Harm::Process(Blow::Stopped(_)) | Harm::Blackhole => stayed(SILENT),
            _ => stayed(LOST),
        };
        let (code, left, runs) = outcome;
        // Nobody is believed before it has said what it wants.
        let may_wait = phase == Phase::Connected || (phase, self) == (Phase::Hello, Harm::Reset);
        match left {
            // Who was stopped before it said what it wants can say so when it wakes.
            Left::Code(_) if may_wait && matches!(self, Harm::Process(Blow::Stopped(_))) => {
                vec![outcome, (code, Left::Waits, runs), arrived(DONE)]
            }
            Left::Code(_) if may_wait => vec![outcome, (code, Left::Waits, runs)],
            _ => vec![outcome],
        }
    }

    /// The source has handed the guest over, and the receiver never learns of it.
    fn with_commit_held(self) -> Vec<Outcome> {
        let unknown = |left| (UNKNOWN, left, Runs::PausedAtSource);
        match self {
            Harm::Process(Blow::Killed(Side::Source)) => vec![(UNKNOWN, Left::Code(LOST), Runs::Nobody)],
            Harm::Process(Blow::Killed(Side::Receiver)) => vec![unknown(Left::Killed)],
            // The receiver gives up and says so, and the source believes it: the guest is its own. It may have given up
            // itself when it hears of it.
            Harm::Process(Blow::Stopped(Side::Source)) => vec![stayed(SILENT), unknown(Left::Code(SILENT))],
            Harm::Process(Blow::Stopped(Side::Receiver)) => {
                vec![unknown(Left::Code(SILENT)), unknown(Left::Code(LOST))]
            }
            Harm::Blackhole => vec![unknown(Left::Code(SILENT))],
            _ => vec![unknown(Left::Code(LOST))],
        }
    }

    /// The receiver could read that it is to run the guest, and its answer is still to pass.
    fn after_commit(self) -> Vec<Outcome> {
        let paused = |left| (UNKNOWN, left, Runs::PausedAtSource);
        match self {
            Harm::Process(Blow::Killed(Side::Receiver)) => {
                vec![paused(Left::Killed), (DONE, Left::Killed, Runs::Nobody)]
            }
            // One that wakes up takes the other for dead, or reads what it was told.
            Harm::Process(Blow::Stopped(Side::Source)) => vec![arrived(DONE), arrived(UNKNOWN)],
            Harm::Process(Blow::Stopped(Side::Receiver)) => {
                vec![arrived(DONE), arrived(UNKNOWN), paused(Left::Code(SILENT))]
            }
            // What was not read is lost.
            Harm::Reset => vec![arrived(UNKNOWN), paused(Left::Code(LOST))],
            Harm::HalfClosed(Up) => vec![arrived(DONE)],
            _ => vec![arrived(UNKNOWN)],
        }
    }

    fn after_running(self) -> Vec<Outcome> {
        match self {
            Harm::Process(Blow::Killed(Side::Receiver)) => vec![(DONE, Left::Killed, Runs::Nobody)],
            // It has been told, and has perhaps not read it.
            Harm::Process(_) | Harm::Reset => vec![arrived(DONE), arrived(UNKNOWN)],
            _ => vec![arrived(DONE)],
        }
    }
}

/// The guest is the receiver's.
fn arrived(code: i32) -> Outcome {
    (code, Left::Guest, Runs::Receiver)
}

/// The guest is still the source's.
fn stayed(code: i32) -> Outcome {
    (code, Left::Code(code), Runs::Source)
}
