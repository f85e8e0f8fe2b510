//! A table of timers: each has one deadline or none. There is no clock here; deadlines are compared with the caller's.

use crate::Time;

/// What there is to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timer {
    /// The peer was silent for too long.
    PeerDead,
    /// We were silent for a while.
    Ping,
    /// The guest's answers take too long.
    Hints,
    /// The migration takes too long.
    Migration,
    /// The peer is alive and owes an answer for too long.
    Answer,
    /// The connections are lost for too long.
    Relink,
}

const TIMERS: [Timer; 6] = [
    Timer::PeerDead,
    Timer::Ping,
    Timer::Hints,
    Timer::Migration,
    Timer::Answer,
    Timer::Relink,
];

/// The deadlines.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timers {
    deadlines: [Option<Time>; TIMERS.len()],
}

impl Timers {
    pub(crate) fn set(&mut self, timer: Timer, at: Time) {
        self.deadlines[timer as usize] = Some(at);
    }

    pub(crate) fn clear(&mut self, timer: Timer) {
        self.deadlines[timer as usize] = None;
    }

    pub(crate) fn clear_all(&mut self) {
        self.deadlines = Default::default();
    }

    /// The earliest deadline.
    pub(crate) fn next(&self) -> Option<Time> {
        self.deadlines.iter().flatten().min().copied()
    }

    /// Takes one timer whose deadline has come. Call it until it returns `None`: each call clears what it returns.
    pub(crate) fn expire(&mut self, now: Time) -> Option<Timer> {
        let timer = TIMERS
            .into_iter()
            .find(|t| self.deadlines[*t as usize].is_some_and(|at| at <= now))?;
        self.clear(timer);
        Some(timer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_timer_expires_once() {
        let at = Time::from_millis;
        let mut timers = Timers::default();
        timers.set(Timer::Hints, at(5));
        timers.set(Timer::Ping, at(7));
        timers.set(Timer::Ping, at(3));
        assert_eq!(timers.next(), Some(at(3)));
        assert_eq!(timers.expire(at(2)), None);
        assert_eq!(timers.expire(at(5)), Some(Timer::Ping));
        assert_eq!(timers.expire(at(5)), Some(Timer::Hints));
        assert_eq!(timers.expire(at(50)), None);
        assert_eq!(timers.next(), None);
    }
}
