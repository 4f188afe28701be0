//! The layout of records, the units that two engines exchange, and their headers.
//!
//! All numbers are little-endian.
//!
//! | offset | what |
//! |---|---|
//! | 0 | version, `u8`: 1 |
//! | 1 | transforms that were applied ([`Flags`]), `u8` |
//! | 2 | 0, `u16` |
//! | 4 | generation of the key, `u32`; 0 unless sealed |
//! | 8 | bytes of the body, `u32`: at most [`MAX_BODY`] |
//! | 12 | bytes of the payload after opening, `u32`: 1 to [`MAX_PAYLOAD`] |
//! | 16 | counter, `u64`: earlier records under this key; 0 unless sealed |
//! | 24 | the body |
//! | after it | the tag of AES-GCM, 16 bytes, over header and body; only if sealed |
//!
//! The body is the payload, compressed or not, followed by the payload's CRC32C (`u32`, over the
//! uncompressed payload) if [`Flags::CHECKED`] is set. In a sealed record all of the body is
//! ciphertext.
//!
//! A record that does not conform is an error that ends its connection: the end of the record, and
//! so the beginning of the next one, is unknown.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a header.
pub const HEADER: usize = 24;
/// Bytes of a tag.
pub const TAG: usize = 16;
/// Bytes of a checksum.
pub const CHECKSUM: usize = 4;
/// Payload of the largest record: it bounds the memory that a peer can make this process reserve.
pub const MAX_PAYLOAD: usize = 256 * 1024;
/// Body of the largest record. Compression never makes it larger: a payload that does not get
/// smaller is sent uncompressed.
pub const MAX_BODY: usize = MAX_PAYLOAD + CHECKSUM;
/// The largest number of bytes that a record has in addition to its payload.
pub const OVERHEAD: usize = HEADER + CHECKSUM + TAG;
/// Bytes of the largest record.
pub const MAX_RECORD: usize = MAX_PAYLOAD + OVERHEAD;

const VERSION: u8 = 1;

/// Transforms that were applied to a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Flags(u8);

impl Flags {
    /// Sealed with AES-GCM.
    pub const SEALED: Self = Self(1);
    /// With the payload's CRC32C.
    pub const CHECKED: Self = Self(2);
    /// Compressed as an LZ4 block.
    pub const LZ4: Self = Self(4);
    /// Compressed as a zstd frame.
    pub const ZSTD: Self = Self(8);

    /// Returns whether all flags of `other` are set.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the flags of both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns whether the payload is compressed.
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

/// A valid header. Lengths are within their limits and fit each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The transforms that were applied.
    pub flags: Flags,
    /// The generation of the key.
    pub generation: u32,
    /// The record's counter under this key.
    pub counter: u64,
    /// Bytes of the body.
    pub body: usize,
    /// Bytes of the payload.
    pub payload: usize,
}

/// The reason why a header is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The version is not 1.
    #[error("a record of version {0}")]
    Version(u8),
    /// A flag is unknown, or two flags exclude each other.
    #[error("a record with flags {0:#x}")]
    Flags(u8),
    /// A field that must be 0 is not.
    #[error("a record with a reserved field in use")]
    Reserved,
    /// The payload is empty or too large, or the two lengths do not fit each other.
    #[error("a record with a payload of {payload} bytes in {body}")]
    Length {
        /// Bytes of the body.
        body: u32,
        /// Bytes of the payload.
        payload: u32,
    },
}

impl Header {
    /// Reads the header of a record that begins with `bytes`. Returns `None` if the header has not
    /// all arrived yet.
    ///
    /// # Errors
    /// If the header is invalid.
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

    fn lengths_fit(&self) -> bool {
        let Some(packed) = self.body.checked_sub(self.checksum()) else { return false };
        (1..=MAX_PAYLOAD).contains(&self.payload)
            && match self.flags.is_compressed() {
                true => (1..self.payload).contains(&packed),
                false => packed == self.payload,
            }
    }

    /// Returns the header in its wire format.
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

    /// Returns the bytes of the checksum within the body.
    pub fn checksum(&self) -> usize {
        if self.flags.has(Flags::CHECKED) { CHECKSUM } else { 0 }
    }

    /// Returns the bytes of the whole record.
    pub fn record(&self) -> usize {
        HEADER + self.body + if self.flags.has(Flags::SEALED) { TAG } else { 0 }
    }
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
        // Byte 1: compressed but not smaller. `small`: no room for the checksum. Then an empty
        // record.
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
