//! Faults that tests plant, to see that the tests of the protocol's invariants catch them. All of them are named here;
//! without the feature `planted-faults` none can be planted, and the questions for them fold away.

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "planted-faults"), expect(unreachable_pub))]
pub enum Fault {
    /// An answer that comes after its session has ended takes pages out of the round under way.
    AcceptLateHint,
    /// Harvested pages are not given back after a failure.
    ForgetGiveBack,
    /// The guest is asked before tracking is on.
    AskBeforeTracking,
    /// The next round starts before the receiver has the last one.
    SkipBarrier,
    /// The session is left open at the end of round 0.
    ForgetEndHints,
    /// Pages harvested while the guest ran are forgotten at the pause.
    ForgetHarvest,
    /// Pages that left the balloon after they were skipped are not looked for.
    ForgetRecheck,
    /// The source resumes its guest when the answer to `Commit` does not come.
    ResumeAfterCommit,
    /// The destination resumes as soon as it is ready.
    ResumeBeforeCommit,
    /// The destination says that it does not run the guest before its copy is gone.
    AnswerBeforeDiscard,
    /// Tracking stays on after a failure.
    ForgetStopTracking,
    /// A guest that was paused when the connections were lost waits for new ones.
    StayPausedWithoutLink,
    /// What was in flight when the connections were lost is taken for received.
    ForgetInFlight,
    /// The destination keeps what it was told would be left out, and is told again.
    KeepSkips,
}

#[cfg(feature = "planted-faults")]
impl Fault {
    /// All of them.
    pub const ALL: [Fault; 14] = [
        Fault::AcceptLateHint,
        Fault::ForgetGiveBack,
        Fault::AskBeforeTracking,
        Fault::SkipBarrier,
        Fault::ForgetEndHints,
        Fault::ForgetHarvest,
        Fault::ForgetRecheck,
        Fault::ResumeAfterCommit,
        Fault::ResumeBeforeCommit,
        Fault::AnswerBeforeDiscard,
        Fault::ForgetStopTracking,
        Fault::StayPausedWithoutLink,
        Fault::ForgetInFlight,
        Fault::KeepSkips,
    ];

    /// The one of this name.
    pub fn named(name: &str) -> Option<Fault> {
        Fault::ALL.into_iter().find(|fault| format!("{fault:?}") == name)
    }
}

/// What is planted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Planted {
    #[cfg(feature = "planted-faults")]
    fault: Option<Fault>,
}

impl Planted {
    /// Plants one.
    #[cfg(feature = "planted-faults")]
    pub(crate) fn plant(&mut self, fault: Fault) {
        self.fault = Some(fault);
    }

    /// Whether `fault` is planted.
    #[cfg(feature = "planted-faults")]
    pub(crate) fn has(self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// Nothing is planted in a build that is not for tests.
    #[cfg(not(feature = "planted-faults"))]
    pub(crate) fn has(self, _fault: Fault) -> bool {
        false
    }
}
