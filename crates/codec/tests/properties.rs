//! What was packed unpacks to itself; what a peer could send that is wrong is refused with a sentence.
#![allow(clippy::unwrap_used)]

use codec::{Error, Packer, Unpacker};
use proptest::prelude::*;
use wire::batch::Codec;

/// Pages such as guests have: some of one pattern, some text, some random.
fn pages() -> impl Strategy<Value = Vec<u8>> {
    let page = prop_oneof![
        any::<[u8; 8]>().prop_map(|pattern| pattern.repeat(512)),
        "[a-z ]{64}".prop_map(|text| text.into_bytes().repeat(64)),
        any::<u64>().prop_map(|seed| random(seed, 4096)),
    ];
    prop::collection::vec(page, 1..12).prop_map(|pages| pages.concat())
}

fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..bytes.div_ceil(8))
        .flat_map(|_| next().to_le_bytes())
        .take(bytes)
        .collect()
}

fn text(bytes: usize) -> Vec<u8> {
    b"a page of a guest, ".iter().copied().cycle().take(bytes).collect()
}

fn packed(codec: Codec, raw: &[u8]) -> Vec<u8> {
    Packer::default().pack(codec, 1, raw).unwrap().unwrap().to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// One packer and one unpacker for many batches, of any order of codecs and levels.
    #[test]
    fn what_was_packed_unpacks_to_itself(batches in prop::collection::vec((pages(), 0usize..2, 1u8..5), 1..6)) {
        let (mut packer, mut unpacker) = (Packer::default(), Unpacker::default());
        for (raw, codec, level) in batches {
            let codec = Codec::ALL[codec];
            if let Some(packed) = packer.pack(codec, level, &raw).unwrap() {
                prop_assert!(!packed.is_empty() && packed.len() < raw.len());
                let mut out = vec![0xEE; raw.len()];
                unpacker.unpack(codec, packed, &mut out).unwrap();
                prop_assert!(out == raw);
            }
        }
    }

    /// Any bytes at all end in an answer, and leave the unpacker fit for the next batch.
    #[test]
    fn no_bytes_break_an_unpacker(bytes in prop::collection::vec(any::<u8>(), 0..600), flips in any::<(u16, u8)>()) {
        let raw = text(8192);
        for codec in Codec::ALL {
            let mut unpacker = Unpacker::default();
            let mut out = vec![0; raw.len()];
            // Random bytes are no 8192 bytes of anything.
            let _ = unpacker.unpack(codec, &bytes, &mut out);
            let mut damaged = packed(codec, &raw);
            let at = usize::from(flips.0) % damaged.len();
            damaged[at] ^= flips.1;
            // Damage may make other bytes of the same size: that is TCP's and --verify's to find.
            let _ = unpacker.unpack(codec, &damaged, &mut out);
            unpacker.unpack(codec, &packed(codec, &raw), &mut out).unwrap();
            prop_assert!(out == raw);
        }
    }
}

#[test]
fn random_pages_are_not_worth_packing() {
    for codec in Codec::ALL {
        assert_eq!(Packer::default().pack(codec, 1, &random(7, 1 << 20)), Ok(None));
    }
}

#[test]
fn more_than_the_batch_has_is_refused() {
    for codec in Codec::ALL {
        // A bomb: 16 MiB in a few KiB at most, for a batch of one page.
        for bytes in [4097, 8192, 16 << 20] {
            let mut page = [0; 4096];
            let error = Unpacker::default().unpack(codec, &packed(codec, &vec![0; bytes]), &mut page);
            let error = error.unwrap_err();
            assert!(matches!(error, Error::Unpack { expected: 4096, .. }), "{error}");
            assert!(error.to_string().contains(codec.name()), "{error}");
        }
    }
}

#[test]
fn less_than_the_batch_has_and_what_is_cut_off_are_refused() {
    for codec in Codec::ALL {
        let mut pages = vec![0; 8192];
        let error = Unpacker::default()
            .unpack(codec, &packed(codec, &text(4096)), &mut pages)
            .unwrap_err();
        let (got, expected) = (4096, 8192);
        let codec_name = codec.name();
        assert_eq!(
            error,
            Error::Short {
                codec: codec_name,
                got,
                expected
            }
        );
        let whole = packed(codec, &text(8192));
        for cut in 0..whole.len() {
            let result = Unpacker::default().unpack(codec, &whole[..cut], &mut pages);
            assert!(result.is_err(), "{codec}: {cut} of {} bytes were taken", whole.len());
        }
    }
}

/// The frame says that it holds 2^62 bytes.
#[test]
fn a_size_that_a_frame_claims_is_not_believed() {
    let mut frame = vec![0x28, 0xB5, 0x2F, 0xFD, 0xE0];
    frame.extend((1u64 << 62).to_le_bytes());
    frame.extend([0x01, 0, 0]);
    let error = Unpacker::default()
        .unpack(Codec::Zstd, &frame, &mut [0; 4096])
        .unwrap_err();
    assert!(error.to_string().contains("4096 bytes"), "{error}");
}
