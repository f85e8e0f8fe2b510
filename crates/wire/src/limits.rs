//! The limits on what a control message may hold, and the one check that both sides make against them.
//!
//! The sender checks too: a message that the peer would refuse is an error where it is made. Text from a peer ends up
//! on a terminal and in a log, so none of it may hold control characters.

use crate::batch::Codec;
use crate::frame::Kind;
use crate::message::{Digests, Hello, MAX_REASON_BYTES, MAX_SKIP_RANGES, Message};
use crate::{Error, Result};
use machine::Section;
use pages::PageRange;

/// The most data streams of a migration.
pub const MAX_STREAMS: u16 = 64;

/// The most bytes of a name: a machine's kind, a balloon's dialect, an extra's or a section's name.
pub const MAX_NAME_BYTES: usize = 64;

/// The most extras in a machine's configuration.
pub const MAX_EXTRAS: usize = 256;

/// The most bytes of an extra's value.
pub const MAX_EXTRA_VALUE_BYTES: usize = 1024;

/// The most reasons in one `Refuse`; a sender puts the number of those it left out in the last one's place.
pub const MAX_REASONS: usize = 64;

/// The most bytes of state in one `Section` message. A section that is larger goes in several, one behind the other, of
/// the same name and version.
pub const MAX_SECTION_BYTES: usize = 512 << 10;

/// The most sections in a machine's state.
pub const MAX_SECTIONS: u32 = 4096;

/// The most digests in [`Digests`]; the sender makes its chunks large enough.
pub const MAX_DIGEST_SUMS: usize = 32_768;

/// Checks a message's fields against the limits. Whether its page ranges are RAM is not known here: that is up to
/// whoever knows the layout.
pub fn validate(message: &Message) -> Result<()> {
    match message {
        Message::Hello(hello) => check_hello(hello),
        Message::Refuse { reasons } => {
            limit("reasons of a refusal", reasons.len(), MAX_REASONS)?;
            reasons.iter().try_for_each(|r| check_reason(Kind::Refuse, r))
        }
        Message::Skip(skip) => check_ranges(Kind::Skip, &skip.ranges),
        Message::Have(have) => check_ranges(Kind::Have, &have.ranges),
        Message::Section(section) => check_section(section),
        Message::StateEnd { sections } => limit(
            "sections of a machine's state",
            *sections as usize,
            MAX_SECTIONS as usize,
        ),
        Message::Digests(digests) => check_digests(digests),
        Message::NotRunning(not_running) => check_reason(Kind::NotRunning, &not_running.reason),
        Message::Abort { reason, .. } => check_reason(Kind::Abort, reason),
        Message::Offer(offer) => match offer.codecs & !Codec::ALL_BITS {
            0 => Ok(()),
            unknown => Err(invalid(Kind::Offer, format!("unknown codecs {unknown:#x}"))),
        },
        Message::Accept(_)
        | Message::RoundEnd { .. }
        | Message::RoundReceived { .. }
        | Message::Ready { .. }
        | Message::Commit(_)
        | Message::Running(_)
        | Message::Ping
        | Message::Terms(_)
        | Message::Resume(_)
        | Message::Resumed { .. } => Ok(()),
    }
}

/// Cuts reasons to what a peer takes, and takes control characters out of them. Whatever went wrong here, its reason
/// must not fail to reach the other side for being too long.
pub(crate) fn clip(message: &Message) -> Option<Message> {
    match message {
        Message::Refuse { reasons } => {
            let mut clipped: Vec<String> = reasons.iter().take(MAX_REASONS).map(|r| clip_reason(r)).collect();
            if reasons.len() > MAX_REASONS {
                clipped.truncate(MAX_REASONS - 1);
                clipped.push(format!("and {} more reasons", reasons.len() - (MAX_REASONS - 1)));
            }
            Some(Message::Refuse { reasons: clipped })
        }
        Message::NotRunning(n) => Some(Message::NotRunning(crate::NotRunning {
            reason: clip_reason(&n.reason),
        })),
        Message::Abort { reason, cause } => Some(Message::Abort {
            reason: clip_reason(reason),
            cause: *cause,
        }),
        _ => None,
    }
}

fn clip_reason(reason: &str) -> String {
    const MARK: &str = "...";
    let plain: String = reason.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if plain.len() <= MAX_REASON_BYTES {
        return plain;
    }
    let mut cut = MAX_REASON_BYTES - MARK.len();
    while !plain.is_char_boundary(cut) {
        cut -= 1;
    }
    format!("{}{MARK}", &plain[..cut])
}

fn check_hello(hello: &Hello) -> Result<()> {
    if hello.streams == 0 || hello.streams > MAX_STREAMS {
        let reason = format!("{} data streams; there are 1 to {MAX_STREAMS}", hello.streams);
        return Err(invalid(Kind::Hello, reason));
    }
    let config = &hello.config;
    text(Kind::Hello, "bytes of the machine's kind", &config.kind, MAX_NAME_BYTES)?;
    text(
        Kind::Hello,
        "bytes of the balloon's dialect",
        &config.balloon.dialect,
        MAX_NAME_BYTES,
    )?;
    limit("extras of a machine's configuration", config.extra.len(), MAX_EXTRAS)?;
    for (name, value) in &config.extra {
        text(Kind::Hello, "bytes of an extra's name", name, MAX_NAME_BYTES)?;
        text(Kind::Hello, "bytes of an extra's value", value, MAX_EXTRA_VALUE_BYTES)?;
    }
    Ok(())
}

fn check_ranges(kind: Kind, ranges: &[PageRange]) -> Result<()> {
    limit("ranges of one message", ranges.len(), MAX_SKIP_RANGES)?;
    if ranges.is_empty() {
        return Err(invalid(kind, "no ranges".to_owned()));
    }
    match ranges.iter().find(|r| r.is_empty()) {
        Some(range) => Err(invalid(kind, format!("empty range {range}"))),
        None => Ok(()),
    }
}

fn check_section(section: &Section) -> Result<()> {
    if section.name.is_empty() {
        return Err(invalid(Kind::Section, "a section without a name".to_owned()));
    }
    text(
        Kind::Section,
        "bytes of a section's name",
        &section.name,
        MAX_NAME_BYTES,
    )?;
    limit(
        "bytes of a Section message's state",
        section.data.len(),
        MAX_SECTION_BYTES,
    )
}

fn check_digests(digests: &Digests) -> Result<()> {
    if digests.chunk_pages == 0 {
        return Err(invalid(Kind::Digests, "chunks of 0 pages".to_owned()));
    }
    limit("digests of RAM", digests.sums.len(), MAX_DIGEST_SUMS)
}

fn check_reason(kind: Kind, reason: &str) -> Result<()> {
    text(kind, "bytes of a reason", reason, MAX_REASON_BYTES)
}

fn text(kind: Kind, what: &'static str, text: &str, limit_bytes: usize) -> Result<()> {
    limit(what, text.len(), limit_bytes)?;
    if text.chars().any(char::is_control) {
        let shown = text.escape_debug();
        return Err(invalid(kind, format!("control characters in text: \"{shown}\"")));
    }
    Ok(())
}

fn limit(what: &'static str, value: usize, limit: usize) -> Result<()> {
    if value > limit {
        return Err(Error::Limit {
            what,
            value: value as u64,
            limit: limit as u64,
        });
    }
    Ok(())
}

fn invalid(kind: Kind, reason: String) -> Error {
    Error::Invalid {
        kind: kind.name(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Decoder, encode};
    use crate::{AbortCause, NotRunning, Skip, SkipReason};
    use pages::{Layout, MAX_PAGES, Pfn};

    fn through(message: &Message) -> Message {
        let frame = encode(message).unwrap();
        Decoder::new().push(&mut &frame[..]).unwrap().unwrap()
    }

    /// Whatever the limits allow, a frame holds and a decoder takes.
    #[test]
    fn the_largest_of_every_kind_go_through() {
        let text = |n: usize| "x".repeat(n);
        let region = |i: u64| PageRange::between(Pfn((i << 40) + 1), Pfn((i << 40) + 1 + (MAX_PAGES >> 9)));
        let extra = |i| (format!("{i:064}"), text(MAX_EXTRA_VALUE_BYTES));
        let hello = Hello {
            config: machine::MachineConfig {
                kind: text(MAX_NAME_BYTES),
                layout: Layout::new((0..512).map(region).collect()).unwrap(),
                vcpus: u32::MAX,
                balloon: machine::BalloonConfig {
                    dialect: text(MAX_NAME_BYTES),
                    features: u64::MAX,
                },
                extra: (0..MAX_EXTRAS).map(extra).collect(),
            },
            running: true,
            streams: MAX_STREAMS,
            verify: true,
            dry_run: true,
        };
        let far = |i: usize| PageRange::between(Pfn(1 << 60), Pfn((1 << 61) + i as u64));
        let messages = [
            Message::Hello(hello),
            Message::Refuse {
                reasons: vec![text(MAX_REASON_BYTES); MAX_REASONS],
            },
            Message::Skip(Skip {
                reason: SkipReason::Ballooned,
                ranges: (0..MAX_SKIP_RANGES).map(far).collect(),
            }),
            Message::Section(Section {
                name: text(MAX_NAME_BYTES),
                version: u32::MAX,
                data: vec![0xff; MAX_SECTION_BYTES],
            }),
            Message::Digests(Digests {
                chunk_pages: u64::MAX,
                sums: vec![u128::MAX; MAX_DIGEST_SUMS],
            }),
            Message::NotRunning(NotRunning {
                reason: text(MAX_REASON_BYTES),
            }),
            Message::Commit(crate::Commit {
                total_us: u64::MAX,
                downtime_us: u64::MAX,
                verify_us: u64::MAX,
            }),
        ];
        for message in messages {
            assert_eq!(through(&message), message);
        }
    }

    #[test]
    fn reasons_are_cut_rather_than_lost() {
        // A character of three bytes lies across the limit.
        let long = "\u{20ac}".repeat(MAX_REASON_BYTES);
        let Message::Abort { reason, cause } = through(&Message::Abort {
            reason: long,
            cause: AbortCause::TimedOut,
        }) else {
            panic!("another message came back");
        };
        assert!(cause == AbortCause::TimedOut && reason.ends_with("\u{20ac}..."));
        assert!(
            (MAX_REASON_BYTES - 2..=MAX_REASON_BYTES).contains(&reason.len()),
            "{}",
            reason.len()
        );

        let refuse = Message::Refuse {
            reasons: (0..70).map(|i| format!("reason {i}\nwith a line break")).collect(),
        };
        let Message::Refuse { reasons } = through(&refuse) else {
            panic!("another message came back");
        };
        assert_eq!(reasons.len(), MAX_REASONS);
        assert_eq!(reasons[62], "reason 62 with a line break");
        assert_eq!(reasons[63], "and 7 more reasons");
    }
}
