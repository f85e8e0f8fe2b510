//! What opens every connection, and what the destination answers: the same bytes in every version of the protocol.
//!
//! All numbers are little-endian.
//!
//! | preamble, [`PREAMBLE_BYTES`] | | reply, [`REPLY_BYTES`] | |
//! |---|---|---|---|
//! | 0 | magic `PGFERRY\n` | 0 | magic `PGFERRY\n` |
//! | 8 | lowest version spoken, u16 | 8 | version picked, u16; 0: none in common |
//! | 10 | highest version spoken, u16 | 10 | lowest version spoken, u16 |
//! | 12 | role, u16: 1 control, 2 data | 12 | highest version spoken, u16 |
//! | 14 | stream, u16 (0 for control) | 14 | crc32c over the 14 bytes before, u32 |
//! | 16 | session, 16 bytes | | |
//! | 32 | crc32c over the 32 bytes before, u32 | | |
//!
//! The session number ties the data connections to their control connection: it tells two sources apart that arrive at
//! the same time. It is no secret and no authentication.

use crate::{Error, MAX_STREAMS, Result};
use std::fmt;

/// The first bytes of every connection, in both directions.
pub const MAGIC: [u8; 8] = *b"PGFERRY\n";

/// Bytes of an encoded [`Preamble`].
pub const PREAMBLE_BYTES: usize = 36;

/// Bytes of an encoded [`PreambleReply`].
pub const REPLY_BYTES: usize = 18;

/// The versions of the protocol that this crate speaks.
pub const VERSIONS: VersionRange = VersionRange { min: 1, max: 3 };

/// The first version with an `Offer` and packed batches, and in which the state may come before `RoundReceived`.
pub const PACKING_SINCE: u16 = 2;

/// The first version in which a migration is taken up again after its connections were lost (`Terms`, `Resume`, `Have`,
/// `Resumed`).
pub const RESUMING_SINCE: u16 = 3;

/// The first version in which a batch may have a checksum over its payload.
pub const CHECKSUM_SINCE: u16 = 3;

/// The versions that a side speaks, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionRange {
    /// The lowest, at least 1.
    pub min: u16,
    /// The highest.
    pub max: u16,
}

impl VersionRange {
    /// Whether `version` is one of them.
    pub fn contains(self, version: u16) -> bool {
        self.min <= version && version <= self.max
    }

    /// Refuses what is no range of versions.
    fn checked(self) -> Result<Self> {
        if self.min == 0 || self.min > self.max {
            return Err(Error::VersionRange(self));
        }
        Ok(self)
    }
}

impl fmt::Display for VersionRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.min == self.max {
            write!(f, "{}", self.min)
        } else {
            write!(f, "{} to {}", self.min, self.max)
        }
    }
}

/// The highest version that both sides speak.
pub fn negotiate(ours: VersionRange, theirs: VersionRange) -> Option<u16> {
    let version = ours.max.min(theirs.max);
    (version >= ours.min.max(theirs.min)).then_some(version)
}

/// Which migration a connection belongs to: random, drawn by the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; 16]);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConnectionRole {
    /// Control frames, both ways.
    Control,
    /// Page batches, from source to destination.
    Data {
        /// Which of the streams: 0 to [`MAX_STREAMS`] - 1.
        stream: u16,
    },
}

/// What the source sends first on every connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preamble {
    /// What the source speaks.
    pub versions: VersionRange,
    /// Which migration this is.
    pub session: SessionId,
    /// What the connection is for.
    pub role: ConnectionRole,
}

impl Preamble {
    /// The bytes.
    pub fn encode(&self) -> [u8; PREAMBLE_BYTES] {
        let (role, stream) = match self.role {
            ConnectionRole::Control => (1, 0),
            ConnectionRole::Data { stream } => (2, stream),
        };
        let mut out = [0; PREAMBLE_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        put_u16(&mut out, 8, self.versions.min);
        put_u16(&mut out, 10, self.versions.max);
        put_u16(&mut out, 12, role);
        put_u16(&mut out, 14, stream);
        out[16..32].copy_from_slice(&self.session.0);
        seal(&mut out);
        out
    }

    /// Reads and checks the bytes. A version that this side does not speak is no error here: [`negotiate`] tells.
    pub fn decode(bytes: &[u8; PREAMBLE_BYTES]) -> Result<Self> {
        check_magic(bytes)?;
        check_seal("a connection's preamble", bytes)?;
        let versions = VersionRange {
            min: get_u16(bytes, 8),
            max: get_u16(bytes, 10),
        };
        let stream = get_u16(bytes, 14);
        let role = match get_u16(bytes, 12) {
            1 if stream == 0 => ConnectionRole::Control,
            1 => {
                return Err(Error::Stream {
                    role: "control",
                    stream,
                });
            }
            2 if stream < MAX_STREAMS => ConnectionRole::Data { stream },
            2 => return Err(Error::Stream { role: "data", stream }),
            role => return Err(Error::Role(role)),
        };
        let mut session = [0; 16];
        session.copy_from_slice(&bytes[16..32]);
        Ok(Preamble {
            versions: versions.checked()?,
            session: SessionId(session),
            role,
        })
    }
}

/// What the destination answers to a preamble, on the same connection. With version 0 it then closes the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreambleReply {
    /// The version that both sides speak from here on; 0 where they have none in common.
    pub version: u16,
    /// What the destination speaks.
    pub ours: VersionRange,
}

impl PreambleReply {
    /// The destination's answer to a source that speaks `theirs`.
    pub fn answer(ours: VersionRange, theirs: VersionRange) -> Self {
        PreambleReply {
            version: negotiate(ours, theirs).unwrap_or(0),
            ours,
        }
    }

    /// The bytes.
    pub fn encode(&self) -> [u8; REPLY_BYTES] {
        let mut out = [0; REPLY_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        put_u16(&mut out, 8, self.version);
        put_u16(&mut out, 10, self.ours.min);
        put_u16(&mut out, 12, self.ours.max);
        seal(&mut out);
        out
    }

    /// Reads and checks the bytes.
    pub fn decode(bytes: &[u8; REPLY_BYTES]) -> Result<Self> {
        check_magic(bytes)?;
        check_seal("the answer to a preamble", bytes)?;
        let ours = VersionRange {
            min: get_u16(bytes, 10),
            max: get_u16(bytes, 12),
        };
        Ok(PreambleReply {
            version: get_u16(bytes, 8),
            ours: ours.checked()?,
        })
    }

    /// For the source: the version to speak, if the destination picked one that both sides speak.
    pub fn agreed(&self, spoken: VersionRange) -> Result<u16> {
        if self.version == 0 {
            return Err(Error::NoCommonVersion {
                ours: spoken,
                theirs: self.ours,
            });
        }
        if !spoken.contains(self.version) || !self.ours.contains(self.version) {
            return Err(Error::VersionPicked {
                picked: self.version,
                ours: spoken,
                theirs: self.ours,
            });
        }
        Ok(self.version)
    }
}

/// Refuses the first bytes of a connection as soon as they cannot be ours. `bytes` may be any number of them, also
/// fewer than the magic has: whoever sends less than a preamble and waits (an HTTP client) is refused at once, not
/// after a time-out.
pub fn check_magic(bytes: &[u8]) -> Result<()> {
    let known = bytes.len().min(MAGIC.len());
    if bytes[..known] != MAGIC[..known] {
        return Err(Error::NotAPeer(bytes[..known].escape_ascii().to_string()));
    }
    Ok(())
}

/// Writes the checksum over all but the last four bytes into those.
fn seal(bytes: &mut [u8]) {
    let at = bytes.len() - 4;
    let crc = crc32c::crc32c(&bytes[..at]);
    bytes[at..].copy_from_slice(&crc.to_le_bytes());
}

/// Checks what [`seal`] wrote.
fn check_seal(what: &'static str, bytes: &[u8]) -> Result<()> {
    let at = bytes.len() - 4;
    let said = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let computed = crc32c::crc32c(&bytes[..at]);
    if said != computed {
        return Err(Error::Checksum { what, said, computed });
    }
    Ok(())
}

fn put_u16(out: &mut [u8], at: usize, value: u16) {
    out[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

fn get_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v(min: u16, max: u16) -> VersionRange {
        VersionRange { min, max }
    }

    /// A control preamble with one of its 16-bit fields changed and the checksum made right again.
    fn with(at: usize, value: u16) -> [u8; PREAMBLE_BYTES] {
        let preamble = Preamble {
            versions: v(1, 3),
            session: SessionId([7; 16]),
            role: ConnectionRole::Control,
        };
        let mut bytes = preamble.encode();
        put_u16(&mut bytes, at, value);
        seal(&mut bytes);
        bytes
    }

    #[test]
    fn the_highest_version_that_both_speak_is_picked() {
        for (ours, theirs, picked) in [
            (v(1, 1), v(1, 1), Some(1)),
            (v(1, 3), v(2, 5), Some(3)),
            (v(2, 5), v(1, 3), Some(3)),
            (v(1, 9), v(4, 4), Some(4)),
            (v(1, 2), v(2, 3), Some(2)),
            (v(1, 1), v(2, 2), None),
            (v(5, 6), v(1, 4), None),
            (v(1, u16::MAX), v(u16::MAX, u16::MAX), Some(u16::MAX)),
        ] {
            assert_eq!(negotiate(ours, theirs), picked, "{ours} and {theirs}");
            assert_eq!(negotiate(theirs, ours), picked, "{theirs} and {ours}");
        }
    }

    #[test]
    fn case_12_a_newer_version_is_refused_by_name() {
        let reply = PreambleReply::answer(VERSIONS, v(4, 5));
        assert_eq!(
            reply,
            PreambleReply {
                version: 0,
                ours: VERSIONS
            }
        );
        let error = reply.agreed(v(4, 5)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no protocol version in common: this side speaks 4 to 5, the peer 1 to 3; upgrade the older one"
        );
        // It is no fault of the preamble.
        assert_eq!(Preamble::decode(&with(10, 9)).unwrap().versions, v(1, 9));
    }

    #[test]
    fn a_version_that_was_not_on_offer_is_not_taken() {
        let reply = |version, ours| PreambleReply { version, ours };
        assert_eq!(reply(2, v(1, 3)).agreed(v(1, 2)), Ok(2));
        for (picked, theirs) in [(3, v(1, 3)), (2, v(3, 4)), (7, v(1, 3))] {
            assert!(matches!(
                reply(picked, theirs).agreed(v(1, 2)),
                Err(Error::VersionPicked { .. })
            ));
        }
    }

    #[test]
    fn case_12_strangers_are_told_by_their_first_bytes() {
        let mut request = [b' '; PREAMBLE_BYTES];
        request[..16].copy_from_slice(b"GET / HTTP/1.1\r\n");
        assert_eq!(
            Preamble::decode(&request).unwrap_err().to_string(),
            "not a pageferry peer: the first bytes are \"GET / HT\"; is something else listening or connecting there?"
        );
        let mut answer = [0; REPLY_BYTES];
        answer[..10].copy_from_slice(b"\x16\x03\x01\r\n\"\xff\x00\x00\x00");
        let error = PreambleReply::decode(&answer).unwrap_err();
        assert_eq!(error, Error::NotAPeer(r#"\x16\x03\x01\r\n\"\xff\x00"#.to_owned()));
    }

    #[test]
    fn case_12_a_stranger_is_told_before_its_preamble_is_whole() {
        for good in 0..=PREAMBLE_BYTES {
            assert_eq!(check_magic(&with(8, 1)[..good]), Ok(()));
        }
        assert_eq!(check_magic(b"G"), Err(Error::NotAPeer("G".to_owned())));
        assert_eq!(check_magic(b"PGFERRY\r"), Err(Error::NotAPeer("PGFERRY\\r".to_owned())));
    }

    #[test]
    fn fields_out_of_range_are_refused_by_name() {
        let refused = |at, value| Preamble::decode(&with(at, value)).unwrap_err();
        assert_eq!(refused(8, 0), Error::VersionRange(v(0, 3)));
        assert_eq!(refused(8, 4), Error::VersionRange(v(4, 3)));
        assert_eq!(refused(12, 3), Error::Role(3));
        assert_eq!(
            refused(14, 1),
            Error::Stream {
                role: "control",
                stream: 1
            }
        );
        let mut data = with(12, 2);
        assert!(Preamble::decode(&data).is_ok());
        put_u16(&mut data, 14, 64);
        seal(&mut data);
        assert_eq!(
            Preamble::decode(&data),
            Err(Error::Stream {
                role: "data",
                stream: 64
            })
        );
    }
}
