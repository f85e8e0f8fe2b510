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
    /// A source does not notice that nothing comes from the destination.
    NoPeerTimeout,
    /// A destination waits for a lost source without end.
    WaitWithoutEnd,
    /// A page that a stream was given is filled too, if the guest called it free later.
    FillInFlight,
    /// A source listens to connections that it has given up.
    HearOldWords,
    /// A chunk that is reported sent while the connections are lost counts as sent.
    CountSentWithoutLink,
    /// A guest that was paused for its last round, and goes on as the connections are lost, has no round after that one.
    KeepLastRound,
    /// The state that was saved before the connections were lost is sent over the new ones.
    KeepSavedState,
    /// The destination keeps the state that came over connections that were lost.
    KeepHandover,
    /// A round is closed while pages are still being zeroed.
    CloseBeforeZeroed,
    /// A guest that was paused before the migration runs after it failed.
    ResumePausedGuest,
}

#[cfg(feature = "planted-faults")]
impl Fault {
    /// All of them.
    pub const ALL: [Fault; 24] = [
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
        Fault::NoPeerTimeout,
        Fault::WaitWithoutEnd,
        Fault::FillInFlight,
        Fault::HearOldWords,
        Fault::CountSentWithoutLink,
        Fault::KeepLastRound,
        Fault::KeepSavedState,
        Fault::KeepHandover,
        Fault::CloseBeforeZeroed,
        Fault::ResumePausedGuest,
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
