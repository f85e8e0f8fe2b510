//! Asking a guest for its free pages: memory that was never touched, so size alone counts.

use crate::{PATIENCE, USED};
use balloon::Dialect;
use machine::{Answer, AnswerSink};
use memory::Backing;
use pages::Layout;
use serde_json::{Value, json};
use softguest::{GuestConfig, SoftGuest};
use std::sync::{Arc, mpsc};
use std::time::Instant;

const GIB: [u64; 3] = [8, 40, 512];

const DIALECTS: [Dialect; 2] = [Dialect::Bitmap, Dialect::Standard];

/// From the question to the last answer, ms, and how many pages the guest called free.
fn ask(gib: u64, dialect: Dialect) -> (f64, u64) {
    let layout = Arc::new(Layout::pc(gib << 18).unwrap());
    let config = GuestConfig {
        used_bytes: USED,
        ..GuestConfig::new(layout).with_balloon(dialect)
    };
    let guest = SoftGuest::start(config, &Backing::Anonymous).unwrap();
    let mut free_pages = guest.parts().free_pages;
    let (say, heard) = mpsc::channel();
    let sink: AnswerSink = Arc::new(move |_, answer| say.send((Instant::now(), answer)).unwrap());
    let began = Instant::now();
    free_pages.begin(1, sink).unwrap();
    let mut pages = 0;
    loop {
        match heard.recv_timeout(PATIENCE).unwrap() {
            (_, Answer::Free(runs)) => pages += runs.iter().map(|run| run.count()).sum::<u64>(),
            (_, Answer::Covered(_)) => {}
            (at, Answer::Finished) => {
                let took = (at - began).as_secs_f64() * 1e3;
                assert!(
                    pages << 12 > (gib << 30) * 7 / 8,
                    "{gib} GiB, {dialect}: {pages} pages free"
                );
                free_pages.end(1).unwrap();
                return (took, pages);
            }
        }
    }
}

/// All sizes, both ways: prints a table, and returns what goes into the JSON.
pub(crate) fn all(rounds: usize) -> Vec<Value> {
    println!("\n| free pages of a guest of | misc queue | hinting |\n|---|---|---|");
    let mut values = Vec::new();
    for gib in GIB {
        let mut runs = [Vec::new(), Vec::new()];
        let mut pages = [0; 2];
        for number in 0..rounds {
            for i in 0..2 {
                let i = if number % 2 == 0 { i } else { 1 - i };
                let (took, free) = ask(gib, DIALECTS[i]);
                runs[i].push(took);
                pages[i] = free;
            }
        }
        let cell = |i: usize| {
            let median = crate::table::median(runs[i].iter().copied());
            let least = runs[i].iter().copied().fold(f64::INFINITY, f64::min);
            let most = runs[i].iter().copied().fold(0.0, f64::max);
            format!("{median:.1} ms ({least:.1} .. {most:.1})")
        };
        println!("| {gib} GiB | {} | {} |", cell(0), cell(1));
        for (i, dialect) in DIALECTS.into_iter().enumerate() {
            let median = crate::table::median(runs[i].iter().copied());
            values.push(json!({
                "guest_gib": gib, "dialect": dialect.name(), "median_ms": median, "runs_ms": runs[i], "free_pages": pages[i],
            }));
        }
    }
    values
}
