//! What a source makes of rounds whose pages were packed on the wire.
#![allow(clippy::unwrap_used)]

mod hand;

use engine::{Content, SourceConfig, SourceEvent, Step};
use hand::{Hand, config, r};
use machine::{Answer, BalloonCounts};
use std::time::Duration;
use wire::Message;

/// The round under way is sent in `took` and received; `fifths` of its pages' bytes crossed.
fn a_packed_round(hand: &mut Hand, round: u32, fifths: u64, took: Duration) {
    assert!(!hand.chunks.is_empty());
    hand.now += took;
    while !hand.chunks.is_empty() {
        let (stream, chunk) = hand.chunks.remove(0);
        let Content::Pages(ranges) = &chunk.content else {
            panic!("{chunk:?}")
        };
        let payload_bytes = 4096 * ranges.iter().map(|range| range.count()).sum::<u64>();
        let wire_bytes = payload_bytes * fifths / 5;
        hand.on(SourceEvent::Sent {
            stream,
            chunk: chunk.id,
            zero: Vec::new(),
            wire_bytes,
            payload_bytes,
        });
    }
    hand.hears(Message::RoundReceived { round });
    assert_eq!(hand.steps(), [Step::Harvest]);
}

/// 1 GiB shrinks to a fifth on 1 Gbit/s. Then 183 MB are dirty, which takes 300 ms if they shrink likewise and 1.5 s if
/// not: nobody knows before some were sent.
#[test]
fn a_compressible_first_round_promises_nothing_of_rewritten_pages() {
    let limit = Duration::from_millis(310);
    let mut hand = Hand::asking(
        SourceConfig {
            downtime_limit: limit,
            ..config()
        },
        1 << 18,
        false,
    );
    hand.says(Answer::Finished);
    assert_eq!(hand.steps(), [Step::EndHints]);
    hand.on(SourceEvent::HintsEnded(BalloonCounts::default()));
    a_packed_round(&mut hand, 0, 1, Duration::from_millis(1718));
    let dirty = hand.set(&[r(1000, 44_678)]);
    hand.on(SourceEvent::Harvested(dirty.clone()));
    assert_eq!(hand.steps(), [], "paused on the first round's word");
    let progress = hand.source.progress();
    assert!(
        progress.expected_downtime.unwrap() > Duration::from_secs(1),
        "{progress:?}"
    );
    // They do not shrink, and the next ones may not either.
    a_packed_round(&mut hand, 1, 5, Duration::from_millis(1464));
    hand.on(SourceEvent::Harvested(dirty.clone()));
    assert_eq!(hand.steps(), []);
    // Once what is rewritten is seen to shrink, the limit is within reach.
    for round in 2..5 {
        a_packed_round(&mut hand, round, 1, Duration::from_millis(250));
        hand.on(SourceEvent::Harvested(dirty.clone()));
        let pause = if round == 4 {
            vec![Step::Pause, Step::Harvest]
        } else {
            vec![]
        };
        assert_eq!(hand.steps(), pause, "round {round}");
    }
}
