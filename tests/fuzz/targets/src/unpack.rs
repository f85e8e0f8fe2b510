//! Packed pages from a peer: they fill their buffer to the byte, or are refused; nothing past it is touched.

use codec::{Packer, Unpacker};
use wire::batch::Codec;

/// What lies behind a buffer that is unpacked into.
const GUARD: [u8; 64] = [0xa5; 64];

/// One byte for the codec, one for the pages of the batch, then packed bytes, twice by the same unpacker: nothing may stay
/// behind from the first time. With the codec's high bit the rest is packed first, and has to come back.
pub fn unpack(input: &[u8]) {
    let Some(([codec, pages], rest)) = input.split_first_chunk::<2>() else {
        return;
    };
    let codec_of = Codec::ALL[usize::from(codec & 1)];
    let (mut unpacker, mut fresh) = (Unpacker::default(), Unpacker::default());
    if codec & 0x80 != 0 {
        return comes_back(codec_of, 1 + pages % 19, rest);
    }
    let bytes = (usize::from(pages % 32) + 1) * 4096;
    let raw = guarded(&mut unpacker, codec_of, rest, vec![0; bytes]);
    // Whatever came first, what comes next unpacks as if it were the first.
    let good = [[7u8; 4096].as_slice(), rest].concat();
    comes_back_by(&mut unpacker, codec_of, 1, &good);
    // Whatever the buffer held before, none of it is left.
    assert_eq!(guarded(&mut fresh, codec_of, rest, vec![0xff; bytes]), raw);
}

fn guarded(unpacker: &mut Unpacker, codec: Codec, packed: &[u8], mut raw: Vec<u8>) -> Option<Vec<u8>> {
    let bytes = raw.len();
    raw.extend(GUARD);
    let done = unpacker.unpack(codec, packed, &mut raw[..bytes]);
    assert_eq!(raw[bytes..], GUARD, "bytes behind the batch's pages were written");
    raw.truncate(bytes);
    done.is_ok().then_some(raw)
}

fn comes_back(codec: Codec, level: u8, raw: &[u8]) {
    comes_back_by(&mut Unpacker::default(), codec, level, raw);
}

fn comes_back_by(unpacker: &mut Unpacker, codec: Codec, level: u8, raw: &[u8]) {
    let mut packer = Packer::default();
    let packed = packer.pack(codec, level, raw).expect("packing does not fail");
    if let Some(packed) = packed {
        assert!(packed.len() < raw.len());
        let mut again = vec![0x5a; raw.len()];
        unpacker
            .unpack(codec, packed, &mut again)
            .expect("what was packed unpacks");
        assert_eq!(again, raw);
    }
}
