//! Medians, as a table and as JSON.

use crate::{Pages, Took, Way};
use serde_json::{Value, json};

/// What bitmaps are to save against page by page, percent.
const TARGET: f64 = -93.0;

/// The median of some.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    let middle = all.len() / 2;
    if all.len() % 2 == 1 {
        all[middle]
    } else {
        (all[middle - 1] + all[middle]) / 2.0
    }
}

/// One guest with one kind of memory.
pub(crate) struct Cell {
    memory_mib: u64,
    balloon_mib: u64,
    pages: Pages,
    /// By way: of inflating and of deflating, the medians, and all totals.
    inflate: Vec<(Took, Vec<f64>)>,
    deflate: Vec<(Took, Vec<f64>)>,
}

fn medians(took: Vec<Took>) -> (Took, Vec<f64>) {
    let of = |stage: fn(&Took) -> f64| median(took.iter().map(stage));
    let medians = Took {
        guest: of(|t| t.guest),
        tell: of(|t| t.tell),
        translate: of(|t| t.translate),
        discard: of(|t| t.discard),
        total: of(|t| t.total),
        discards: took[0].discards,
    };
    (medians, took.iter().map(|t| t.total).collect())
}

impl Cell {
    pub(crate) fn new(memory_mib: u64, balloon_mib: u64, pages: Pages, took: &[Vec<(Took, Took)>; 3]) -> Self {
        let each = |one: fn(&(Took, Took)) -> Took| {
            let ways = took.iter().map(|rounds| medians(rounds.iter().map(one).collect()));
            ways.collect()
        };
        Cell {
            memory_mib,
            balloon_mib,
            pages,
            inflate: each(|both| both.0),
            deflate: each(|both| both.1),
        }
    }

    pub(crate) fn json(&self) -> Value {
        let ways = |all: &[(Took, Vec<f64>)]| -> Vec<Value> {
            let base = all[0].0.total;
            let each = all.iter().zip(Way::ALL).map(|((took, runs), way)| {
                json!({
                    "way": way.name(), "guest_ms": took.guest, "tell_ms": took.tell, "translate_ms": took.translate,
                    "discard_ms": took.discard, "discards": took.discards, "total_ms": took.total,
                    "change_percent": change(took.total, base), "runs_ms": runs,
                })
            });
            each.collect()
        };
        json!({
            "memory_mib": self.memory_mib, "balloon_mib": self.balloon_mib, "pages": self.pages.name(),
            "inflate": ways(&self.inflate), "deflate": ways(&self.deflate),
        })
    }
}

fn change(total: f64, base: f64) -> f64 {
    (total / base - 1.0) * 100.0
}

/// Prints it.
pub(crate) fn print(cell: &Cell) {
    println!(
        "\n### {} of {} MiB, {} pages\n\n\
         | ms | guest | tell | translate | discard | calls | total | least .. most | change |\n\
         |---|---|---|---|---|---|---|---|---|",
        cell.balloon_mib,
        cell.memory_mib,
        cell.pages.name()
    );
    for (what, all) in [("inflate", &cell.inflate), ("deflate", &cell.deflate)] {
        for ((took, runs), way) in all.iter().zip(Way::ALL) {
            let least = runs.iter().copied().fold(f64::INFINITY, f64::min);
            let most = runs.iter().copied().fold(0.0, f64::max);
            println!(
                "| {what}, {} | {:.1} | {:.1} | {:.1} | {:.1} | {} | {:.1} | {least:.1} .. {most:.1} | {:+.1} % |",
                way.name(),
                took.guest,
                took.tell,
                took.translate,
                took.discard,
                took.discards,
                took.total,
                change(took.total, all[0].0.total),
            );
        }
    }
    let reached = change(cell.inflate[2].0.total, cell.inflate[0].0.total);
    let verdict = if reached <= TARGET { "met" } else { "MISSED" };
    println!("\ninflate, bitmaps against page by page: {reached:+.1} %, limit {TARGET:.0} %: {verdict}");
}
