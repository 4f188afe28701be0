//! The protocol between two socket engines: links.
//!
//! Two engines share one TCP connection for all streams of a tenant. The connection begins with a
//! TLS 1.3 handshake (RFC 8446), in which both engines show a certificate. Within TLS each side
//! sends one [`Hello`], the connecting side first. After the hellos, TLS is no longer used: both
//! sides send records (`slipway_warp::record`). The keys of the records come from the TLS session:
//! - TLS's exporter (RFC 8446, section 7.5), with the label [`EXPORTER`] and the tenant's name as
//!   context, gives both sides the same 32 bytes;
//! - a secret for each direction is derived from these bytes, with the labels [`TO_SERVER`] and
//!   [`TO_CLIENT`].
//!
//! So each tenant has a connection of its own, with keys that no other tenant's connection has.
//!
//! The payload of a record is a sequence of whole frames. A frame is a header of 16 bytes
//! ([`Frame`]) and, for some kinds, a body. Bytes of streams and messages about streams are both
//! frames, so both are sealed.
//!
//! # Streams
//! Either side opens streams: the connecting side with odd numbers, the other one with even
//! numbers. A number is used once. Number 0 is the connection itself.
//!
//! Flow control: a side may send only as many bytes of a stream as the other side has granted. It
//! grants [`Hello::window`] bytes when the stream begins, and more with [`Kind::Credit`]. A side
//! that gets more bytes than it has granted ends the connection.
//!
//! # Encoding and errors
//! All numbers are little-endian. An invalid frame ends the connection, and so does a frame for a
//! stream that never existed. A frame for a stream that has ended is ignored: it may have been sent
//! before the sender got the frame that ended the stream.

use crate::Address;
use crate::words::{address, put_address, word32, word64};

/// The version of the protocol.
pub const VERSION: u32 = 1;
/// The label for TLS's exporter.
pub const EXPORTER: &[u8] = b"EXPORTER-slipway-link-1";
/// The label from which the secret of the connecting side's records is derived.
pub const TO_SERVER: &[u8] = b"to server";
/// The label from which the secret of the accepting side's records is derived.
pub const TO_CLIENT: &[u8] = b"to client";
/// The size in bytes of a frame without its body.
pub const FRAME: usize = 16;
/// The size in bytes of the body of [`Kind::Open`]: the source and the destination, each with 16
/// bytes of address, 2 of port, and 6 of 0.
pub const OPEN: usize = 48;
/// The largest payload of a record in bytes. Each side reserves memory for one.
pub const PAYLOAD: usize = 128 << 10;
/// The largest length in bytes of the name of an engine or a tenant. The smallest is 1.
pub const NAME: usize = 64;
/// The size in bytes of a [`Hello`].
pub const HELLO: usize = 256;
/// The largest [`Hello::window`] in bytes.
pub const MAX_WINDOW: u32 = 4 << 20;

const MAGIC: [u8; 8] = *b"sliplink";

/// The cipher of the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    /// AES-128-GCM.
    Aes128Gcm = 1,
    /// AES-256-GCM.
    Aes256Gcm = 2,
}

/// The name of an engine or a tenant: 1 to [`NAME`] bytes of printable ASCII without spaces.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Name {
    bytes: [u8; NAME],
    length: u8,
}

impl Name {
    /// Returns the name, or `None` if it is too long, empty, or has other characters.
    pub fn new(name: &str) -> Option<Self> {
        let printable = name.bytes().all(|byte| byte.is_ascii_graphic());
        if !printable || name.is_empty() || name.len() > NAME {
            return None;
        }
        let mut bytes = [0; NAME];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        Some(Self { bytes, length: name.len() as u8 })
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        core::str::from_utf8(&self.bytes[..self.length.into()]).unwrap_or("")
    }

    fn decode(bytes: &[u8], length: u8) -> Option<Self> {
        let (name, rest) = bytes.split_at_checked(length.into())?;
        let name = Self::new(core::str::from_utf8(name).ok()?)?;
        rest.iter().all(|byte| *byte == 0).then_some(name)
    }
}

impl core::fmt::Debug for Name {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.as_str().fmt(f)
    }
}

/// The first message of each side, and the only one that is sent within TLS.
///
/// | offset | what |
/// |---|---|
/// | 0 | the bytes `sliplink` |
/// | 8 | version, `u32` |
/// | 12 | status, `u32`: 0, or the number of errno(3) with which the accepting side refuses the
/// connection |
/// | 16 | window, `u32` |
/// | 20 | cipher, `u8`; the accepting side repeats the connecting side's |
/// | 21 | length of the engine's name, `u8` |
/// | 22 | length of the tenant's name, `u8` |
/// | 64 | the engine's name, 64 bytes, and zeros |
/// | 128 | the tenant's name, 64 bytes, and zeros |
///
/// The rest is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// 0, or the reason for a refusal: a number of errno(3).
    pub status: u32,
    /// The number of bytes of each stream that the other side may send before it gets credit: 1 to
    /// [`MAX_WINDOW`].
    pub window: u32,
    /// The cipher of the records.
    pub cipher: Cipher,
    /// The name of the sending engine. It is also in the engine's certificate.
    pub engine: Name,
    /// The tenant whose streams the connection carries.
    pub tenant: Name,
}

impl Hello {
    /// Returns the hello as it is sent.
    pub fn encode(&self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.status.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.window.to_le_bytes());
        bytes[20] = self.cipher as u8;
        bytes[21] = self.engine.length;
        bytes[22] = self.tenant.length;
        bytes[64..128].copy_from_slice(&self.engine.bytes);
        bytes[128..192].copy_from_slice(&self.tenant.bytes);
        bytes
    }

    /// Returns the hello in `bytes`, or `None` if it is not of this version.
    pub fn decode(bytes: &[u8; HELLO]) -> Option<Self> {
        let cipher = match bytes[20] {
            1 => Cipher::Aes128Gcm,
            2 => Cipher::Aes256Gcm,
            _ => return None,
        };
        let hello = Self {
            status: word32(bytes, 12)?,
            window: word32(bytes, 16)?,
            cipher,
            engine: Name::decode(&bytes[64..128], bytes[21])?,
            tenant: Name::decode(&bytes[128..192], bytes[22])?,
        };
        let fits = (1..=MAX_WINDOW).contains(&hello.window);
        // Checks the magic, the version, and that reserved bytes are zero.
        (fits && hello.encode() == *bytes).then_some(hello)
    }
}

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A program connects, and the stream begins. The body is an [`Open`].
    Open,
    /// The stream was accepted.
    Accepted,
    /// The stream was refused, and has ended. The value is a number of errno(3), 1 to 4,095.
    Refused,
    /// Bytes of the stream. The body has the bytes; the value is their number, at least 1.
    Data,
    /// The other side may send more bytes. The value is their number, 1 to 2^31.
    Credit,
    /// The sending side of the frame sends no more bytes of the stream.
    Fin,
    /// The stream is reset in both directions, and has ended.
    Reset,
    /// For the connection: the other side answers with a pong that has the same value.
    Ping,
    /// For the connection: the answer to a ping, with the ping's value.
    Pong,
    /// For the connection: the other side must open no more streams.
    GoAway,
}

const KINDS: [Kind; 10] = [
    Kind::Open,
    Kind::Accepted,
    Kind::Refused,
    Kind::Data,
    Kind::Credit,
    Kind::Fin,
    Kind::Reset,
    Kind::Ping,
    Kind::Pong,
    Kind::GoAway,
];

/// A frame without its body.
///
/// | offset | what |
/// |---|---|
/// | 0 | kind, `u8`: 1 to 10, in [`Kind`]'s order |
/// | 1 | 3 bytes of 0 |
/// | 4 | stream, `u32`; 0 exactly for the kinds that concern the connection |
/// | 8 | value, `u64`; 0 where a kind has none |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The kind of the frame.
    pub kind: Kind,
    /// The number of the stream.
    pub stream: u32,
    /// The value, whose meaning depends on the kind.
    pub value: u64,
}

impl Frame {
    /// Returns the frame as it is sent, without its body.
    pub fn encode(&self) -> [u8; FRAME] {
        let mut bytes = [0; FRAME];
        bytes[0] = self.kind as u8 + 1;
        bytes[4..8].copy_from_slice(&self.stream.to_le_bytes());
        bytes[8..].copy_from_slice(&self.value.to_le_bytes());
        bytes
    }

    /// Returns the first frame of `payload`, the frame's body, and the payload after it. Returns
    /// `None` if the frame is invalid or not complete.
    pub fn decode(payload: &[u8]) -> Option<(Self, &[u8], &[u8])> {
        let (head, rest) = payload.split_at_checked(FRAME)?;
        let kind = *KINDS.get(usize::from(head[0]).checked_sub(1)?)?;
        let frame = Self { kind, stream: word32(head, 4)?, value: word64(head, 8)? };
        if head[1..4] != [0; 3] || !frame.is_possible() {
            return None;
        }
        let (body, rest) = rest.split_at_checked(frame.body()?)?;
        Some((frame, body, rest))
    }

    fn is_possible(&self) -> bool {
        let value = match self.kind {
            Kind::Refused => (1..4096).contains(&self.value),
            Kind::Data => self.value > 0,
            Kind::Credit => (1..=1 << 31).contains(&self.value),
            Kind::Ping | Kind::Pong => true,
            _ => self.value == 0,
        };
        let connection = matches!(self.kind, Kind::Ping | Kind::Pong | Kind::GoAway);
        value && connection == (self.stream == 0)
    }

    /// Returns the length of the frame's body in bytes, or `None` if the frame is invalid.
    fn body(&self) -> Option<usize> {
        match self.kind {
            Kind::Open => Some(OPEN),
            Kind::Data => usize::try_from(self.value).ok(),
            _ => Some(0),
        }
    }
}

/// The body of [`Kind::Open`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// The connecting program's address.
    pub source: Address,
    /// The destination address.
    pub destination: Address,
}

impl Open {
    /// Returns the body as it is sent.
    pub fn encode(&self) -> [u8; OPEN] {
        let mut bytes = [0; OPEN];
        for (to, address) in bytes.chunks_exact_mut(24).zip([self.source, self.destination]) {
            put_address(to, address);
        }
        bytes
    }

    /// Returns the body in `bytes`, or `None` if it has another length or a reserved byte is not 0.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let open = Self { source: address(bytes, 0)?, destination: address(bytes, 24)? };
        (open.encode() == *bytes).then_some(open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            status: 0,
            window: 65536,
            cipher: Cipher::Aes128Gcm,
            engine: Name::new("left.example").unwrap(),
            tenant: Name::new("blue").unwrap(),
        }
    }

    #[test]
    fn a_hello_reads_back_and_nothing_else_does() {
        let bytes = hello().encode();
        assert_eq!(Hello::decode(&bytes), Some(hello()));
        // With any byte changed it is invalid, or another hello.
        for at in 0..HELLO {
            for bit in 0..8 {
                let mut other = bytes;
                other[at] ^= 1 << bit;
                assert_ne!(Hello::decode(&other), Some(hello()), "byte {at}");
            }
        }
        for (at, value) in [(0, 0), (8, 2), (20, 0), (20, 3), (21, 65), (21, 0), (22, 3), (255, 1)]
        {
            let mut other = bytes;
            other[at] = value;
            assert_eq!(Hello::decode(&other), None, "byte {at}: {value}");
        }
        assert_eq!(Hello::decode(&Hello { window: 0, ..hello() }.encode()), None);
        assert_eq!(Hello::decode(&Hello { window: MAX_WINDOW + 1, ..hello() }.encode()), None);
    }

    #[test]
    fn names_are_short_and_printable() {
        assert_eq!(Name::new("node-2.example").unwrap().as_str(), "node-2.example");
        assert!(Name::new(core::str::from_utf8(&[b'a'; NAME]).unwrap()).is_some());
        for bad in ["", "a b", "ä", "a\n", core::str::from_utf8(&[b'a'; NAME + 1]).unwrap()] {
            assert_eq!(Name::new(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn frames_read_back() {
        let value = |kind| match kind {
            Kind::Refused => 111,
            Kind::Data => 3,
            Kind::Credit => 1 << 31,
            Kind::Ping | Kind::Pong => u64::MAX,
            _ => 0,
        };
        for kind in KINDS {
            let connection = matches!(kind, Kind::Ping | Kind::Pong | Kind::GoAway);
            let frame = Frame { kind, stream: u32::from(!connection) * 7, value: value(kind) };
            let mut payload = [9; FRAME + OPEN + 1];
            payload[..FRAME].copy_from_slice(&frame.encode());
            let (read, body, rest) = Frame::decode(&payload).unwrap();
            assert_eq!(read, frame);
            let expected = match kind {
                Kind::Open => OPEN,
                Kind::Data => 3,
                _ => 0,
            };
            assert_eq!((body.len(), rest.len()), (expected, OPEN + 1 - expected));
            assert_eq!(Frame::decode(&payload[..FRAME - 1]), None);
            // A kind is of the connection or of streams, never of both.
            let other = Frame { stream: u32::from(connection), ..frame };
            payload[..FRAME].copy_from_slice(&other.encode());
            assert_eq!(Frame::decode(&payload), None, "{other:?}");
        }
    }

    #[test]
    fn frames_that_cannot_be_are_none() {
        let with = |kind, value| Frame { kind, stream: 1, value }.encode();
        for bytes in [
            with(Kind::Refused, 0),
            with(Kind::Refused, 4096),
            with(Kind::Data, 0),
            with(Kind::Credit, 0),
            with(Kind::Credit, (1 << 31) + 1),
            with(Kind::Fin, 1),
            // The body is missing.
            with(Kind::Data, 1),
            with(Kind::Data, u64::MAX),
            with(Kind::Open, 0),
        ] {
            assert_eq!(Frame::decode(&bytes), None, "{bytes:?}");
        }
        let mut bytes = with(Kind::Fin, 0);
        (bytes[0], bytes[2]) = (11, 0);
        assert_eq!(Frame::decode(&bytes), None);
        (bytes[0], bytes[2]) = (0, 0);
        assert_eq!(Frame::decode(&bytes), None);
        (bytes[0], bytes[2]) = (6, 1);
        assert_eq!(Frame::decode(&bytes), None);
    }

    #[test]
    fn an_opening_reads_back() {
        let open = Open {
            source: Address::v4([10, 1, 0, 2], 40000),
            destination: Address::v4([10, 2, 0, 2], 80),
        };
        let mut bytes = open.encode();
        assert_eq!(Open::decode(&bytes), Some(open));
        assert_eq!(Open::decode(&bytes[..47]), None);
        bytes[47] = 1;
        assert_eq!(Open::decode(&bytes), None);
    }
}
