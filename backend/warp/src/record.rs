//! Records: what goes between two engines. A header, a body, a tag.
//!
//! All numbers are little-endian.
//!
//! | offset | what |
//! |---|---|
//! | 0 | version, `u8`: 1 |
//! | 1 | what was done ([`Flags`]), `u8` |
//! | 2 | 0, `u16` |
//! | 4 | generation of the key, `u32`; 0 unless sealed |
//! | 8 | bytes of the body, `u32`: at most [`MAX_BODY`] |
//! | 12 | bytes of the payload, `u32`: what comes out; 1 to [`MAX_PAYLOAD`] |
//! | 16 | counter, `u64`: records under this key before this one; 0 unless sealed |
//! | 24 | the body |
//! | after it | the tag of AES-GCM, 16 bytes, over header and body; only if sealed |
//!
//! The body is the payload, compressed or not, and after it the payload's CRC32C (`u32`, before
//! compression) where that is asked for. Sealed, all of the body is ciphertext.
//!
//! A record that is not as this page has it is an error, and the connection that brought it is of no use
//! any more: what follows cannot be told from garbage.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::TransformError;
use crate::key::{Opener, Sealer, Ticket};

/// Bytes of a header.
pub const HEADER: usize = 24;
/// Bytes of a tag.
pub const TAG: usize = 16;
/// Bytes of a checksum.
pub const CHECKSUM: usize = 4;
/// Payload of the largest record: what a peer can make us set aside.
pub const MAX_PAYLOAD: usize = 256 * 1024;
/// Body of the largest record: what is not smaller when compressed is not compressed.
pub const MAX_BODY: usize = MAX_PAYLOAD + CHECKSUM;
/// Bytes that a record has more than its payload, at most.
pub const OVERHEAD: usize = HEADER + CHECKSUM + TAG;
/// Bytes of the largest record.
pub const MAX_RECORD: usize = MAX_PAYLOAD + OVERHEAD;

const VERSION: u8 = 1;

/// What was done with a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Flags(u8);

impl Flags {
    /// AES-GCM.
    pub const SEALED: Self = Self(1);
    /// CRC32C.
    pub const CHECKED: Self = Self(2);
    /// LZ4, a block.
    pub const LZ4: Self = Self(4);
    /// zstd, a frame.
    pub const ZSTD: Self = Self(8);

    /// Whether all of `other` is among it.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// With `other`.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether the payload is compressed.
    pub fn is_compressed(self) -> bool {
        self.has(Self::LZ4) || self.has(Self::ZSTD)
    }

    fn is_valid(self) -> bool {
        self.0 & !0xf == 0 && !self.has(Self::LZ4.and(Self::ZSTD))
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Wire {
    version: u8,
    flags: u8,
    zero: U16,
    generation: U32,
    body: U32,
    payload: U32,
    counter: U64,
}

/// A header that can be. Lengths are within their limits and fit each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What was done.
    pub flags: Flags,
    /// Generation of the key.
    pub generation: u32,
    /// Counter under this key.
    pub counter: u64,
    /// Bytes of the body.
    pub body: usize,
    /// Bytes of the payload.
    pub payload: usize,
}

/// Why a header cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Another version.
    #[error("a record of version {0}")]
    Version(u8),
    /// Bits that mean nothing, or two that exclude each other.
    #[error("a record with flags {0:#x}")]
    Flags(u8),
    /// Something in a field that is to be 0.
    #[error("a record with a reserved field in use")]
    Reserved,
    /// Longer than allowed, empty, or lengths that cannot belong together.
    #[error("a record with a payload of {payload} bytes in {body}")]
    Length {
        /// Bytes of the body.
        body: u32,
        /// Bytes of the payload.
        payload: u32,
    },
}

impl Header {
    /// Reads the header of a record that begins with `bytes`. None: it has not all come yet.
    ///
    /// # Errors
    /// When it cannot be.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, HeaderError> {
        let Ok((wire, _)) = Wire::read_from_prefix(bytes) else { return Ok(None) };
        let flags = Flags(wire.flags);
        if wire.version != VERSION {
            return Err(HeaderError::Version(wire.version));
        }
        if !flags.is_valid() {
            return Err(HeaderError::Flags(wire.flags));
        }
        let key = wire.generation.get() != 0 || wire.counter.get() != 0;
        if wire.zero.get() != 0 || key && !flags.has(Flags::SEALED) {
            return Err(HeaderError::Reserved);
        }
        let header = Self {
            flags,
            generation: wire.generation.get(),
            counter: wire.counter.get(),
            body: wire.body.get() as usize,
            payload: wire.payload.get() as usize,
        };
        let length = HeaderError::Length { body: wire.body.get(), payload: wire.payload.get() };
        if header.lengths_fit() { Ok(Some(header)) } else { Err(length) }
    }

    /// The header of `record`, which is exactly one.
    pub(crate) fn of(record: &[u8]) -> Result<Self, TransformError> {
        let there = record.len();
        let header =
            Self::parse(record)?.ok_or(TransformError::NotWhole { there, record: HEADER })?;
        match header.record() {
            whole if whole == there => Ok(header),
            record => Err(TransformError::NotWhole { there, record }),
        }
    }

    fn lengths_fit(&self) -> bool {
        let Some(packed) = self.body.checked_sub(self.checksum()) else { return false };
        (1..=MAX_PAYLOAD).contains(&self.payload)
            && match self.flags.is_compressed() {
                true => (1..self.payload).contains(&packed),
                false => packed == self.payload,
            }
    }

    /// The header's bytes.
    pub fn bytes(&self) -> [u8; HEADER] {
        let wire = Wire {
            version: VERSION,
            flags: self.flags.0,
            zero: U16::ZERO,
            generation: U32::new(self.generation),
            body: U32::new(self.body as u32),
            payload: U32::new(self.payload as u32),
            counter: U64::new(self.counter),
        };
        zerocopy::transmute!(wire)
    }

    /// Bytes of the checksum within the body.
    pub fn checksum(&self) -> usize {
        if self.flags.has(Flags::CHECKED) { CHECKSUM } else { 0 }
    }

    /// Bytes of the whole record.
    pub fn record(&self) -> usize {
        HEADER + self.body + if self.flags.has(Flags::SEALED) { TAG } else { 0 }
    }
}

/// Seals the record that `record` is to be, in place: its payload lies behind [`HEADER`] bytes, and [`TAG`]
/// bytes are left behind it. For who fills a payload himself; not compressed, not checked.
///
/// # Errors
/// [`TransformError::NoRoom`]: no payload, or too much; [`TransformError::Key`]: the key is used up.
pub fn seal(sealer: &mut Sealer, record: &mut [u8]) -> Result<(), TransformError> {
    let room = record.len();
    let payload = room.saturating_sub(HEADER + TAG);
    if !(1..=MAX_PAYLOAD).contains(&payload) {
        return Err(TransformError::NoRoom { input: payload, room });
    }
    let Ticket { generation, counter } = sealer.ticket()?;
    let header = Header { flags: Flags::SEALED, generation, counter, body: payload, payload };
    let (head, rest) = record.split_at_mut(HEADER);
    let (body, tag) = rest.split_at_mut(payload);
    head.copy_from_slice(&header.bytes());
    tag.copy_from_slice(&sealer.seal(Ticket { generation, counter }, &header.bytes(), body)?);
    Ok(())
}

/// A record's header as it came, and what follows.
pub(crate) fn split(record: &mut [u8]) -> Result<(&mut [u8; HEADER], &mut [u8]), TransformError> {
    let there = record.len();
    record.split_first_chunk_mut().ok_or(TransformError::NotWhole { there, record: HEADER })
}

/// Opens `record`, exactly one that [`seal`] made, in place, and gives its payload.
///
/// # Errors
/// All are the peer's doing; `record` is of no use afterwards.
pub fn open<'a>(opener: &mut Opener, record: &'a mut [u8]) -> Result<&'a [u8], TransformError> {
    let header = Header::of(record)?;
    if header.flags != Flags::SEALED {
        return Err(TransformError::Sealing);
    }
    let (raw, body) = split(record)?;
    Ok(opener.open(&header, raw, body)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header { flags: Flags::SEALED, generation: 7, counter: 1 << 40, body: 100, payload: 100 }
    }

    #[test]
    fn a_header_reads_back() {
        for flags in [0u8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11].map(Flags) {
            let sealed = flags.has(Flags::SEALED);
            let mut header = Header { flags, ..header() };
            header.body = if flags.is_compressed() { 60 } else { 100 } + header.checksum();
            (header.generation, header.counter) = if sealed { (7, 1 << 40) } else { (0, 0) };
            assert_eq!(Header::parse(&header.bytes()), Ok(Some(header)));
            assert_eq!(Header::parse(&header.bytes()[..HEADER - 1]), Ok(None));
            assert_eq!(header.record(), HEADER + header.body + if sealed { 16 } else { 0 });
        }
    }

    #[test]
    fn a_record_is_sealed_and_opened_in_place() {
        use crate::{Cipher, Secret};

        let secret = Secret::derive(&[1; 32], &[b"a"]);
        let mut sealer = Sealer::new(Cipher::Aes128Gcm, &secret);
        let mut opener = Opener::new(Cipher::Aes128Gcm, &secret);
        let mut record = vec![7; HEADER + 100 + TAG];
        for _ in 0..2 {
            record[HEADER..HEADER + 100].fill(7);
            seal(&mut sealer, &mut record).unwrap();
            for at in 0..record.len() {
                let mut damaged = record.clone();
                damaged[at] ^= 1;
                assert!(open(&mut opener, &mut damaged).is_err(), "byte {at}");
            }
            assert!(open(&mut opener, &mut record[..139]).is_err());
            let mut replayed = record.clone();
            assert_eq!(open(&mut opener, &mut record), Ok(&[7; 100][..]));
            assert!(open(&mut opener, &mut replayed).is_err());
        }
        assert!(seal(&mut sealer, &mut record[..HEADER + TAG]).is_err(), "no payload");
        assert!(seal(&mut sealer, &mut vec![0; HEADER + TAG + MAX_PAYLOAD + 1]).is_err());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let with = |at: usize, value: u8| {
            let mut bytes = header().bytes();
            bytes[at] = value;
            Header::parse(&bytes)
        };
        assert_eq!(with(0, 2), Err(HeaderError::Version(2)));
        assert_eq!(with(1, 16), Err(HeaderError::Flags(16)));
        assert_eq!(with(1, 12), Err(HeaderError::Flags(12)));
        assert_eq!(with(1, 0), Err(HeaderError::Reserved));
        assert_eq!(with(2, 1), Err(HeaderError::Reserved));
        assert_eq!(with(8, 99), Err(HeaderError::Length { body: 99, payload: 100 }));
        assert!(with(15, 1).is_err());
        // Compressed, and not smaller; checked, and no room for the checksum; empty.
        assert!(with(1, 5).is_err());
        let small =
            Header { flags: Flags::CHECKED, generation: 0, counter: 0, body: 3, payload: 1 };
        assert!(Header::parse(&small.bytes()).is_err());
        assert!(Header::parse(&Header { body: 0, payload: 0, ..header() }.bytes()).is_err());
        let large = MAX_PAYLOAD + 1;
        assert!(
            Header::parse(&Header { body: large, payload: large, ..header() }.bytes()).is_err()
        );
    }
}
