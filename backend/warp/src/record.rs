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
