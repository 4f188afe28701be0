//! TCP segments (RFC 9293, section 3.1).

use crate::view::{FrameError, view};

/// Bytes of a header without options.
pub const MIN_HEADER: usize = 20;
/// Offset of the checksum.
pub const CHECKSUM: usize = 16;

const SEQUENCE: usize = 4;
const DATA_OFFSET: usize = 12;
const FLAGS: usize = 13;

/// Flags of a segment.
pub mod flag {
    /// No more data.
    pub const FIN: u8 = 1;
    /// Push.
    pub const PSH: u8 = 8;
    /// The congestion window is reduced (RFC 3168).
    pub const CWR: u8 = 128;
}

view! {
    /// A TCP segment.
    TcpSegment
}

impl<T: AsRef<[u8]>> TcpSegment<T> {
    #[inline]
    fn check(&self) -> Result<(), FrameError> {
        let len = self.0.len();
        match self.header_len() {
            _ if len < MIN_HEADER => Err(FrameError::Short),
            header if header < MIN_HEADER => Err(FrameError::HeaderLength),
            header if header > len => Err(FrameError::Short),
            _ => Ok(()),
        }
    }

    /// Returns the bytes of the header, with options: 20 to 60 if the segment was checked.
    #[inline]
    pub fn header_len(&self) -> usize {
        usize::from(self.0.byte(DATA_OFFSET) >> 4) * 4
    }

    /// Returns the sequence number of the first byte.
    #[inline]
    pub fn sequence(&self) -> u32 {
        u32::from_be_bytes(self.0.get(SEQUENCE))
    }

    /// Returns the flags, as in [`flag`].
    #[inline]
    pub fn flags(&self) -> u8 {
        self.0.byte(FLAGS)
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> TcpSegment<T> {
    /// Writes the sequence number of the first byte.
    #[inline]
    pub fn set_sequence(&mut self, sequence: u32) {
        self.0.put(SEQUENCE, sequence.to_be_bytes());
    }

    /// Writes the flags.
    #[inline]
    pub fn set_flags(&mut self, flags: u8) {
        self.0.put(FLAGS, [flags]);
    }
}
