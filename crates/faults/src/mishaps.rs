//! What goes wrong, and when.

use crate::link::{Accident, Harm, Line};
use crate::rng::Rng;
use engine::Time;

/// One of the two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    Source,
    Destination,
}

/// A process is stopped for a while, or killed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blow {
    /// Before this step.
    pub step: usize,
    pub party: Party,
    /// For how long; `None`: it is killed.
    pub frozen: Option<Time>,
}

/// What goes wrong, and when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mishaps {
    /// The source's action on the guest of this number fails (counted from 0).
    pub source_action: Option<usize>,
    /// The destination's.
    pub destination_action: Option<usize>,
    /// The connection breaks in place of the message of this number, counted in both directions together.
    pub message: Option<usize>,
    /// Somebody cancels at the source, at the destination, before this step.
    pub cancel_source: Option<usize>,
    pub cancel_destination: Option<usize>,
    /// From this step on nothing is carried in either direction, and nobody is told.
    pub silence: Option<usize>,
    /// What befalls the connections.
    pub accidents: Vec<Accident>,
    /// How long it takes to reach the destination again after the first, second... link.
    pub outages: Vec<Time>,
    /// How often a stranger comes ahead of the source that comes back.
    pub strangers: usize,
    pub blows: Vec<Blow>,
    /// So many steps after the machine was first saved, the control connection breaks, or the source stands still.
    pub after_save: Option<AfterSave>,
}

/// What goes wrong while the guest is paused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AfterSave {
    pub steps: usize,
    /// For how long the source stands still; `None`: the connection breaks.
    pub frozen: Option<Time>,
}

impl Mishaps {
    /// Whether nothing goes wrong.
    pub fn is_harmless(&self) -> bool {
        let rest = Mishaps {
            outages: Vec::new(),
            strangers: 0,
            ..self.clone()
        };
        rest == Mishaps::default()
    }

    /// Whether connections break, and nothing else goes wrong.
    pub(crate) fn only_breaks_links(&self) -> bool {
        let rest = Mishaps {
            message: None,
            accidents: self
                .accidents
                .iter()
                .filter(|a| a.harm != Harm::Reset)
                .cloned()
                .collect(),
            after_save: self.after_save.clone().filter(|after| after.frozen.is_some()),
            ..self.clone()
        };
        rest.is_harmless()
    }

    /// None to a few of all kinds.
    pub fn random(rng: &mut Rng) -> Self {
        let mut mishaps = Mishaps::default();
        for _ in 0..[0, 1, 1, 2, 2, 3, 4, 6][rng.below(8) as usize] {
            mishaps.add(rng);
        }
        for _ in 0..4 {
            mishaps.outages.push(span(rng));
        }
        if rng.one_in(4) {
            mishaps.strangers = 1;
        }
        if rng.one_in(3) {
            mishaps.after_save = Some(AfterSave {
                steps: rng.below(25) as usize,
                frozen: rng.one_in(3).then(|| span(rng)),
            });
        }
        mishaps
    }

    fn add(&mut self, rng: &mut Rng) {
        let step = |rng: &mut Rng| {
            let most = [60, 250, 250, 1500][rng.below(4) as usize];
            rng.below(most) as usize
        };
        match rng.below(20) {
            0..12 => {
                let accident = accident(rng);
                self.accidents.push(accident);
            }
            12 => self.source_action = Some(rng.below(24) as usize),
            13 => self.destination_action = Some(rng.below(7) as usize),
            14 => self.message = Some(rng.below(40) as usize),
            15 => self.cancel_source = Some(step(rng)),
            16 => self.cancel_destination = Some(step(rng)),
            17 if rng.one_in(2) => self.silence = Some(step(rng)),
            n => {
                let party = if rng.one_in(2) {
                    Party::Source
                } else {
                    Party::Destination
                };
                let frozen = (n < 19 || rng.one_in(2)).then(|| span(rng));
                let step = step(rng);
                self.blows.push(Blow { step, party, frozen });
            }
        }
    }
}

/// From a moment to longer than any time-out.
fn span(rng: &mut Rng) -> Time {
    let ms = [1, 1, 2, 5, 300, 1500, 2500, 8000, 40_000, 100_000];
    Time::from_millis(ms[rng.below(10) as usize])
}

fn accident(rng: &mut Rng) -> Accident {
    let line = match rng.below(5) {
        0 => Line::ToDestination,
        1 => Line::ToSource,
        _ => {
            let streams = 1 + rng.below(4);
            Line::Data(rng.below(streams) as u16)
        }
    };
    let most = match line {
        Line::Data(_) => [300, 1000, 3000, 12_000][rng.below(4) as usize],
        _ => [150, 300, 900][rng.below(3) as usize],
    };
    Accident {
        link: [0, 0, 0, 0, 1, 1, 1, 2, 2, 3][rng.below(10) as usize],
        line,
        byte: rng.below(most),
        harm: match rng.below(10) {
            0..8 => Harm::Reset,
            8 => Harm::Flip,
            _ => Harm::Stall(span(rng)),
        },
    }
}
