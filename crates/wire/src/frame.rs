//! Control frames: how a [`Message`] becomes bytes and back.
//!
//! A header of [`HEADER_BYTES`], little-endian, then the payload:
//!
//! | at | |
//! |---|---|
//! | 0 | payload's length in bytes, u32, at most what its kind may have ([`Kind::max_payload_bytes`]) |
//! | 4 | kind, u16: the number of the [`Message`]'s variant, see [`Kind`] |
//! | 6 | reserved, u16, 0 |
//! | 8 | crc32c over the 8 bytes before and the payload, u32 |
//!
//! The payload is the message by serde in bincode's standard form: little-endian, integers of variable length, a variant
//! by its index. [`validate`] holds on both sides.
//!
//! Nothing is allocated on a length's word alone: a frame's buffer grows with what has come, and bincode is told the
//! limit, which it checks before it makes room for what a length inside the payload says.

use crate::limits::{clip, validate};
use crate::message::Message;
use crate::{Error, Result};
use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Bytes ahead of every control message.
pub const HEADER_BYTES: usize = 12;

/// The most bytes of any frame's payload: 1 MiB.
pub const MAX_PAYLOAD_BYTES: usize = 1 << 20;

/// How payloads are written. The limit bounds what a decoder may read and make room for.
const FORM: Configuration<LittleEndian, Varint, Limit<MAX_PAYLOAD_BYTES>> =
    bincode::config::standard().with_limit::<MAX_PAYLOAD_BYTES>();

/// Which message a frame holds. The numbers are the wire's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Kind {
    /// [`Message::Hello`]
    Hello = 1,
    /// [`Message::Accept`]
    Accept = 2,
    /// [`Message::Refuse`]
    Refuse = 3,
    /// [`Message::Skip`]
    Skip = 4,
    /// [`Message::RoundEnd`]
    RoundEnd = 5,
    /// [`Message::RoundReceived`]
    RoundReceived = 6,
    /// [`Message::Section`]
    Section = 7,
    /// [`Message::StateEnd`]
    StateEnd = 8,
    /// [`Message::Digests`]
    Digests = 9,
    /// [`Message::Ready`]
    Ready = 10,
    /// [`Message::Commit`]
    Commit = 11,
    /// [`Message::Running`]
    Running = 12,
    /// [`Message::NotRunning`]
    NotRunning = 13,
    /// [`Message::Abort`]
    Abort = 14,
    /// [`Message::Ping`]
    Ping = 15,
    /// [`Message::Offer`]
    Offer = 16,
    /// [`Message::Terms`]
    Terms = 17,
    /// [`Message::Resume`]
    Resume = 18,
    /// [`Message::Have`]
    Have = 19,
    /// [`Message::Resumed`]
    Resumed = 20,
}

impl Kind {
    /// All of them, by number.
    pub const ALL: [Kind; 20] = [
        Kind::Hello,
        Kind::Accept,
        Kind::Refuse,
        Kind::Skip,
        Kind::RoundEnd,
        Kind::RoundReceived,
        Kind::Section,
        Kind::StateEnd,
        Kind::Digests,
        Kind::Ready,
        Kind::Commit,
        Kind::Running,
        Kind::NotRunning,
        Kind::Abort,
        Kind::Ping,
        Kind::Offer,
        Kind::Terms,
        Kind::Resume,
        Kind::Have,
        Kind::Resumed,
    ];

    /// The kind of a message.
    pub fn of(message: &Message) -> Kind {
        match message {
            Message::Hello(_) => Kind::Hello,
            Message::Accept(_) => Kind::Accept,
            Message::Refuse { .. } => Kind::Refuse,
            Message::Skip(_) => Kind::Skip,
            Message::RoundEnd { .. } => Kind::RoundEnd,
            Message::RoundReceived { .. } => Kind::RoundReceived,
            Message::Section(_) => Kind::Section,
            Message::StateEnd { .. } => Kind::StateEnd,
            Message::Digests(_) => Kind::Digests,
            Message::Ready { .. } => Kind::Ready,
            Message::Commit(_) => Kind::Commit,
            Message::Running(_) => Kind::Running,
            Message::NotRunning(_) => Kind::NotRunning,
            Message::Abort { .. } => Kind::Abort,
            Message::Ping => Kind::Ping,
            Message::Offer(_) => Kind::Offer,
            Message::Terms(_) => Kind::Terms,
            Message::Resume(_) => Kind::Resume,
            Message::Have(_) => Kind::Have,
            Message::Resumed { .. } => Kind::Resumed,
        }
    }

    /// The kind with this number.
    pub fn from_number(number: u16) -> Result<Kind> {
        let index = usize::from(number).checked_sub(1);
        let kind = index.and_then(|i| Kind::ALL.get(i));
        kind.copied().ok_or(Error::FrameKind(number))
    }

    /// Its number on the wire.
    pub fn number(self) -> u16 {
        self as u16
    }

    /// The first version of the protocol that has it.
    pub fn since(self) -> u16 {
        match self {
            Kind::Offer => crate::PACKING_SINCE,
            Kind::Terms | Kind::Resume | Kind::Have | Kind::Resumed => crate::RESUMING_SINCE,
            _ => crate::VERSIONS.min,
        }
    }

    /// The message's name.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Hello => "Hello",
            Kind::Accept => "Accept",
            Kind::Refuse => "Refuse",
            Kind::Skip => "Skip",
            Kind::RoundEnd => "RoundEnd",
            Kind::RoundReceived => "RoundReceived",
            Kind::Section => "Section",
            Kind::StateEnd => "StateEnd",
            Kind::Digests => "Digests",
            Kind::Ready => "Ready",
            Kind::Commit => "Commit",
            Kind::Running => "Running",
            Kind::NotRunning => "NotRunning",
            Kind::Abort => "Abort",
            Kind::Ping => "Ping",
            Kind::Offer => "Offer",
            Kind::Terms => "Terms",
            Kind::Resume => "Resume",
            Kind::Have => "Have",
            Kind::Resumed => "Resumed",
        }
    }

    /// The most bytes that a payload of this kind may have.
    pub fn max_payload_bytes(self) -> usize {
        match self {
            Kind::Hello | Kind::Refuse => 512 << 10,
            Kind::Skip | Kind::Section | Kind::Digests | Kind::Have => MAX_PAYLOAD_BYTES,
            Kind::NotRunning | Kind::Abort => 8 << 10,
            Kind::Accept
            | Kind::RoundEnd
            | Kind::RoundReceived
            | Kind::StateEnd
            | Kind::Ready
            | Kind::Commit
            | Kind::Running
            | Kind::Ping
            | Kind::Offer
            | Kind::Terms
            | Kind::Resume
            | Kind::Resumed => 64,
        }
    }
}

/// A frame's header, checked but for its checksum, which covers the payload too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    kind: Kind,
    payload_bytes: usize,
    crc: u32,
    /// Of the header's own first 8 bytes.
    crc_so_far: u32,
}

impl FrameHeader {
    /// Which message follows.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// How many bytes of payload follow: at most what the kind may have.
    pub fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }
}

/// A whole frame. Reasons that are too long for the peer are cut first (see [`crate::MAX_REASON_BYTES`]); all else that
/// it would refuse is an error.
pub fn encode(message: &Message) -> Result<Bytes> {
    let clipped = clip(message);
    let message = clipped.as_ref().unwrap_or(message);
    validate(message)?;
    let kind = Kind::of(message);
    let mut frame = BytesMut::zeroed(HEADER_BYTES).writer();
    let payload_bytes =
        bincode::serde::encode_into_std_write(message, &mut frame, FORM).map_err(|e| Error::Encode {
            kind: kind.name(),
            reason: e.to_string(),
        })?;
    let mut frame = frame.into_inner();
    let len = checked_len(kind, payload_bytes)?;
    frame[..4].copy_from_slice(&len.to_le_bytes());
    frame[4..6].copy_from_slice(&kind.number().to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&frame[..8]), &frame[HEADER_BYTES..]);
    frame[8..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
    Ok(frame.freeze())
}

/// Reads and checks a header: whatever it says of what follows, it is bounded.
pub fn decode_header(bytes: &[u8; HEADER_BYTES]) -> Result<FrameHeader> {
    let mut fields = &bytes[..];
    let (len, number, reserved, crc) = (
        fields.get_u32_le(),
        fields.get_u16_le(),
        fields.get_u16_le(),
        fields.get_u32_le(),
    );
    let kind = Kind::from_number(number)?;
    if reserved != 0 {
        return Err(Error::Reserved {
            what: "a control frame's header",
            value: u64::from(reserved),
        });
    }
    let payload_bytes = len as usize;
    checked_len(kind, payload_bytes)?;
    Ok(FrameHeader {
        kind,
        payload_bytes,
        crc,
        crc_so_far: crc32c::crc32c(&bytes[..8]),
    })
}

/// Reads and checks the payload that follows `header`.
pub fn decode_payload(header: &FrameHeader, payload: &[u8]) -> Result<Message> {
    let kind = header.kind.name();
    if payload.len() != header.payload_bytes {
        return Err(Error::Length {
            what: "a control frame's payload",
            given: payload.len(),
            said: header.payload_bytes,
        });
    }
    let computed = crc32c::crc32c_append(header.crc_so_far, payload);
    if computed != header.crc {
        return Err(Error::Checksum {
            what: "a control frame",
            said: header.crc,
            computed,
        });
    }
    let (message, read): (Message, usize) =
        bincode::serde::decode_from_slice(payload, FORM).map_err(|e| Error::Payload {
            kind,
            reason: e.to_string(),
        })?;
    if read != payload.len() {
        return Err(Error::Trailing {
            kind,
            bytes: payload.len() - read,
        });
    }
    let holds = Kind::of(&message);
    if holds != header.kind {
        return Err(Error::KindMismatch {
            kind,
            holds: holds.name(),
        });
    }
    validate(&message)?;
    Ok(message)
}

/// Checks a payload's length against its kind's limit, on both sides.
fn checked_len(kind: Kind, payload_bytes: usize) -> Result<u32> {
    let limit = kind.max_payload_bytes();
    let len = u32::try_from(payload_bytes).ok().filter(|_| payload_bytes <= limit);
    len.ok_or(Error::Limit {
        what: kind.name(),
        value: payload_bytes as u64,
        limit: limit as u64,
    })
}

/// Puts messages together from bytes as they come, in pieces of any size.
///
/// Holds one frame at most. Frame borders are lost after an error, so every later call gives the same error again.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: BytesMut,
    header: Option<FrameHeader>,
    failed: Option<Error>,
}

impl Decoder {
    /// One at a frame's border.
    pub fn new() -> Self {
        Decoder::default()
    }

    /// Takes bytes off the front of `input`, up to the end of a message; returns that message, or `None` once `input`
    /// is used up. Call it until it returns `None`.
    pub fn push(&mut self, input: &mut &[u8]) -> Result<Option<Message>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.advance(input).inspect_err(|error| {
            self.failed = Some(error.clone());
            self.buffer = BytesMut::new();
        })
    }

    /// To be called when the connection has ended: an error if that was inside a frame.
    pub fn finish(&self) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let header = if self.header.is_some() { HEADER_BYTES } else { 0 };
        match header + self.buffer.len() {
            0 => Ok(()),
            given => Err(Error::Truncated {
                what: "a control frame",
                given,
            }),
        }
    }

    fn advance(&mut self, input: &mut &[u8]) -> Result<Option<Message>> {
        let header = match self.header {
            Some(header) => header,
            None => {
                if !self.fill(HEADER_BYTES, input) {
                    return Ok(None);
                }
                let mut bytes = [0; HEADER_BYTES];
                self.buffer.copy_to_slice(&mut bytes);
                *self.header.insert(decode_header(&bytes)?)
            }
        };
        if !self.fill(header.payload_bytes, input) {
            return Ok(None);
        }
        let message = decode_payload(&header, &self.buffer)?;
        self.buffer.clear();
        self.header = None;
        Ok(Some(message))
    }

    /// Moves bytes into the buffer until it has `want`; false where `input` has too few.
    fn fill(&mut self, want: usize, input: &mut &[u8]) -> bool {
        let take = (want - self.buffer.len()).min(input.len());
        let (head, rest) = input.split_at(take);
        self.buffer.extend_from_slice(head);
        *input = rest;
        self.buffer.len() == want
    }
}
