//! Runs seeds of the simulation, one with its trace, or the table of planted faults.
//!
//! ```text
//! faults [--from N] [--seeds N]                  N seeds from N on; the first that breaks a law is told, with the law
//! faults --seed N [--planted NAME] [--trace]     one seed, step by step
//! faults --table                                 each planted fault, the seed that catches it, and the law that it breaks
//! ```
//!
//! `--planted` and `--table` need the feature `planted`.
// What a command prints is its output.
#![allow(clippy::print_stdout)]

use faults::run_seed;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

/// What the command line asks for.
#[derive(Debug, Default)]
struct Asked {
    from: u64,
    seeds: u64,
    seed: Option<u64>,
    planted: Option<String>,
    trace: bool,
    table: bool,
}

fn main() -> ExitCode {
    let asked = match parse(std::env::args().skip(1)) {
        Ok(asked) => asked,
        Err(error) => {
            eprintln!("faults: {error}");
            return ExitCode::from(2);
        }
    };
    let result = match asked.seed {
        _ if asked.table => planted::table(),
        Some(seed) => planted::fault(asked.planted.as_deref())
            .and_then(|fault| run_seed(seed, fault, asked.trace))
            .map(|told| println!("seed {seed}: {told:?}")),
        None => soak(asked.from, asked.seeds),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Asked, String> {
    let mut asked = Asked {
        seeds: 2000,
        ..Asked::default()
    };
    while let Some(word) = words.next() {
        let mut number = || {
            let value = words.next().ok_or(format!("{word} takes a number"))?;
            value
                .parse()
                .map_err(|_| format!("{word} takes a number, not '{value}'"))
        };
        match word.as_str() {
            "--from" => asked.from = number()?,
            "--seeds" => asked.seeds = number()?,
            "--seed" => asked.seed = Some(number()?),
            "--planted" => asked.planted = Some(words.next().ok_or("--planted takes a fault's name")?),
            "--trace" => asked.trace = true,
            "--table" => asked.table = true,
            _ => {
                return Err(format!(
                    "'{word}' is no flag of it; see the top of crates/faults/src/main.rs"
                ));
            }
        }
    }
    Ok(asked)
}

/// Many seeds: how they ended, or the first that broke a law.
fn soak(from: u64, seeds: u64) -> Result<(), String> {
    let began = Instant::now();
    let mut ends: BTreeMap<String, u64> = BTreeMap::new();
    let (mut resumed, mut again, mut steps) = (0, 0, 0);
    for seed in from..from + seeds {
        let told = run_seed(seed, None, false)?;
        let side = |end: Option<engine::Ending>| end.map_or("killed".to_owned(), |end| end.to_string());
        *ends
            .entry(format!("{} / {}", side(told.source), side(told.destination)))
            .or_default() += 1;
        resumed += told.resumed;
        again += u64::from(told.again);
        steps += told.steps;
    }
    println!(
        "{seeds} seeds from {from}, {steps} steps, {:.0} s: every law kept",
        began.elapsed().as_secs_f64()
    );
    println!("{resumed} links replaced; {again} guests migrated again after a failure");
    println!("source / receiver ended as:");
    for (end, count) in ends {
        println!("{count:>8}  {end}");
    }
    Ok(())
}

#[cfg(feature = "planted")]
mod planted {
    use faults::{Fault, caught};

    pub(crate) fn fault(name: Option<&str>) -> Result<Option<Fault>, String> {
        let Some(name) = name else { return Ok(None) };
        Fault::named(name)
            .map(Some)
            .ok_or_else(|| format!("no fault is named '{name}'; there are {:?}", Fault::ALL))
    }

    /// Markdown, as in docs/faults.md.
    pub(crate) fn table() -> Result<(), String> {
        println!("| fault | caught at seed | by |\n|---|---|---|");
        let mut missed = Vec::new();
        for fault in Fault::ALL {
            match caught(fault) {
                Some((seed, law)) => println!("| `{fault:?}` | {seed} | {law} |"),
                None => missed.push(fault),
            }
        }
        if missed.is_empty() {
            return Ok(());
        }
        Err(format!("not caught: {missed:?}"))
    }
}

#[cfg(not(feature = "planted"))]
mod planted {
    use faults::Fault;

    const NEEDED: &str = "planted faults are compiled in with --features planted alone";

    pub(crate) fn fault(name: Option<&str>) -> Result<Option<Fault>, String> {
        match name {
            Some(_) => Err(NEEDED.to_owned()),
            None => Ok(None),
        }
    }

    pub(crate) fn table() -> Result<(), String> {
        Err(NEEDED.to_owned())
    }
}
