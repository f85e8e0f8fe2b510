//! The two state machines, each against a peer that sends anything at any time, while what they want done succeeds or
//! fails, in virtual time.

mod destination;
mod model;
mod source;

pub use destination::destination_engine;
pub use source::source_engine;

use arbitrary::{Result, Unstructured};
use pages::{Layout, PageRange, Pfn};
use std::sync::Arc;
use std::time::Duration;
use wire::{AbortCause, Commit, Digests, Message, NotRunning, Offer, Running};

/// The most steps of an input.
const MOST_STEPS: usize = 400;

/// Two regions, a hole between.
fn layout() -> Arc<Layout> {
    Arc::new(Layout::new(vec![range(0, 70), range(100, 30)]).expect("a layout"))
}

fn range(start: u64, pages: u64) -> PageRange {
    PageRange::new(Pfn(start), pages).expect("a small range")
}

/// Mostly a range of RAM; also an empty one, one over a border, one far out.
fn any_range(u: &mut Unstructured<'_>) -> Result<PageRange> {
    Ok(match u.int_in_range(0..=7)? {
        0 => range(u.int_in_range(0..=140)?, u.int_in_range(0..=40)?),
        1 => PageRange::new(Pfn(u.arbitrary()?), u.arbitrary()?).unwrap_or(PageRange::between(Pfn(0), Pfn(1))),
        2 => range(0, 70),
        3 => range(100, 30),
        _ => range(u.int_in_range(0..=69)?, u.int_in_range(1..=4)?),
    })
}

/// A step of time: none, a little, or as long as some time-out.
fn any_time(u: &mut Unstructured<'_>) -> Result<Duration> {
    const USUAL: [u64; 8] = [0, 1, 20, 300, 1000, 10_000, 60_000, 4_000_000_000];
    Ok(match u.arbitrary()? {
        true => Duration::from_millis(*u.choose(&USUAL)?),
        false => Duration::from_millis(u.int_in_range(0..=2000)?),
    })
}

fn any_cause(u: &mut Unstructured<'_>) -> Result<AbortCause> {
    Ok(*u.choose(&[AbortCause::Failed, AbortCause::Cancelled, AbortCause::TimedOut])?)
}

/// Text as a peer may send it: `wire` lets no control characters and nothing long past.
fn any_text(u: &mut Unstructured<'_>) -> Result<String> {
    let len = u.int_in_range(0..=6)?;
    let text = String::from_utf8_lossy(u.bytes(len)?).into_owned();
    Ok(text.chars().filter(|c| !c.is_control()).collect())
}

/// A message of a kind that either side could send, at any time: `round` is the one that would be right.
fn any_message(u: &mut Unstructured<'_>, round: u32) -> Result<Message> {
    let round = if u.ratio(7, 8)? { round } else { u.arbitrary()? };
    Ok(match u.int_in_range(0..=11)? {
        0 => Message::Ping,
        1 => Message::Abort {
            reason: any_text(u)?,
            cause: any_cause(u)?,
        },
        2 => Message::RoundReceived { round },
        3 => Message::RoundEnd {
            round,
            last: u.arbitrary()?,
        },
        4 => Message::Ready {
            verified: u.arbitrary()?,
            verify_us: u.arbitrary()?,
        },
        5 => Message::Running(Running {
            running: u.arbitrary()?,
            after_us: u.arbitrary()?,
        }),
        6 => Message::NotRunning(NotRunning { reason: any_text(u)? }),
        7 => Message::Refuse {
            reasons: vec![any_text(u)?],
        },
        8 => Message::StateEnd {
            sections: u.int_in_range(0..=3)?,
        },
        9 => Message::Commit(Commit {
            total_us: u.arbitrary()?,
            downtime_us: u.arbitrary()?,
            verify_us: u.arbitrary()?,
        }),
        10 => Message::Digests(Digests {
            chunk_pages: u.int_in_range(0..=200)?,
            sums: vec![0; u.int_in_range(0..=5)?],
        }),
        _ => Message::Offer(Offer {
            codecs: u.int_in_range(0..=3)?,
        }),
    })
}
