//! UDP datagrams (RFC 768).

use crate::view::{FrameError, view};

/// Bytes of a header.
pub const HEADER: usize = 8;
/// Offset of the checksum. A checksum of 0 over IPv4 says that the sender made none.
pub const CHECKSUM: usize = 6;

const DESTINATION: usize = 2;
const LENGTH: usize = 4;

view! {
    /// A UDP datagram. Its length field is not checked.
    UdpDatagram
}

impl<T: AsRef<[u8]>> UdpDatagram<T> {
    #[inline]
    fn check(&self) -> Result<(), FrameError> {
        if self.0.len() < HEADER { Err(FrameError::Short) } else { Ok(()) }
    }

    /// Returns the source port.
    #[inline]
    pub fn source(&self) -> u16 {
        self.0.half(0)
    }

    /// Returns the destination port.
    #[inline]
    pub fn destination(&self) -> u16 {
        self.0.half(DESTINATION)
    }

    /// Returns the checksum.
    #[inline]
    pub fn checksum(&self) -> u16 {
        self.0.half(CHECKSUM)
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> UdpDatagram<T> {
    /// Writes the source port.
    #[inline]
    pub fn set_source(&mut self, port: u16) {
        self.0.put_half(0, port);
    }

    /// Writes the destination port.
    #[inline]
    pub fn set_destination(&mut self, port: u16) {
        self.0.put_half(DESTINATION, port);
    }

    /// Writes the bytes of header and payload.
    #[inline]
    pub fn set_length(&mut self, length: u16) {
        self.0.put_half(LENGTH, length);
    }
}
