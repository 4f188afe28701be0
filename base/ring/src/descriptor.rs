//! The descriptor of a slot: one word, so that it is read whole.

/// The way in which a frame that is too long for a wire is to be cut. The numbers are those of the
/// descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum Segmentation {
    /// The frame is not to be cut.
    #[default]
    None = 0,
    /// TCP over IPv4.
    Tcp4 = 1,
    /// TCP over IPv6.
    Tcp6 = 2,
    /// UDP over either.
    Udp = 3,
}

/// A slot's content: bits of a 64-bit word.
///
/// | bits | content |
/// |---|---|
/// | 0-16 | bytes in this slot, at most its payload |
/// | 17 | the frame goes on in the next slot |
/// | 18 | the checksum has been checked |
/// | 19-20 | segmentation: 0 none, 1 TCP over IPv4, 2 TCP over IPv6, 3 UDP |
/// | 21 | congestion was experienced, or may have been |
/// | 22 | the checksum is to be filled in |
/// | 23-32 | the offset at which the checksum begins, from the frame's first byte |
/// | 33-39 | the offset at which the checksum is stored, from there |
/// | 40-55 | bytes of payload in each piece of a frame that is to be cut |
/// | 56-63 | 0 |
///
/// The bits that concern the frame are those of its first slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Descriptor(pub u64);

impl Descriptor {
    const MORE: u64 = 1 << 17;
    const VALID: u64 = 1 << 18;
    const ECN: u64 = 1 << 21;
    const SUM: u64 = 1 << 22;

    /// Makes the descriptor of a slot with `len` bytes and no other property.
    #[inline]
    pub const fn new(len: u32) -> Self {
        Self(len as u64 & 0x1_ffff)
    }

    /// Marks that the frame goes on in the next slot.
    #[inline]
    #[must_use]
    pub const fn and_more(self) -> Self {
        Self(self.0 | Self::MORE)
    }

    /// Marks that the checksum has been checked.
    #[must_use]
    pub const fn checked(self) -> Self {
        Self(self.0 | Self::VALID)
    }

    /// Marks that the checksum is to be filled in: it covers the frame from `start` (below 1,024)
    /// on and is stored `offset` (below 128) bytes behind that. Returns `None` if the numbers do
    /// not fit.
    pub const fn unsummed(self, start: u16, offset: u16) -> Option<Self> {
        if start >= 1 << 10 || offset >= 1 << 7 {
            return None;
        }
        Some(Self(self.0 | Self::SUM | (start as u64) << 23 | (offset as u64) << 33))
    }

    /// Marks that the frame is to be cut into pieces of `segment` bytes of payload.
    #[must_use]
    pub const fn uncut(self, segmentation: Segmentation, segment: u16, ecn: bool) -> Self {
        let ecn = if ecn { Self::ECN } else { 0 };
        Self(self.0 | (segmentation as u64) << 19 | ecn | (segment as u64) << 40)
    }

    /// Returns the number of bytes in the slot, as the producer claims.
    #[inline]
    pub const fn len(self) -> usize {
        (self.0 & 0x1_ffff) as usize
    }

    /// Returns whether the producer claims that the slot has no bytes.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Returns whether the frame goes on in the next slot.
    #[inline]
    pub const fn has_more(self) -> bool {
        self.0 & Self::MORE != 0
    }

    /// Returns whether any bit is set beside the length and the bit that the frame goes on.
    #[inline]
    pub const fn is_plain(self) -> bool {
        self.0 >> 18 == 0
    }

    /// Returns whether the checksum has been checked.
    pub const fn is_checked(self) -> bool {
        self.0 & Self::VALID != 0
    }

    /// Returns the offset at which the checksum that is to be filled in begins, and the offset from
    /// there at which it is stored. Returns `None` if none is to be filled in.
    pub const fn checksum(self) -> Option<(u16, u16)> {
        if self.0 & Self::SUM == 0 {
            return None;
        }
        Some(((self.0 >> 23 & 0x3ff) as u16, (self.0 >> 33 & 0x7f) as u16))
    }

    /// Returns the way in which the frame is to be cut.
    pub const fn segmentation(self) -> Segmentation {
        match self.0 >> 19 & 3 {
            1 => Segmentation::Tcp4,
            2 => Segmentation::Tcp6,
            3 => Segmentation::Udp,
            _ => Segmentation::None,
        }
    }

    /// Returns the bytes of payload in each piece.
    pub const fn segment(self) -> u16 {
        (self.0 >> 40) as u16
    }

    /// Returns whether congestion was experienced, or may have been.
    pub const fn ecn(self) -> bool {
        self.0 & Self::ECN != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read() {
        let cut = Descriptor::new(65_553).and_more().uncut(Segmentation::Tcp6, 65_535, true);
        let all = cut.unsummed(1023, 127).unwrap();
        assert_eq!((all.len(), all.has_more(), all.is_checked()), (65_553, true, false));
        assert_eq!((all.segmentation(), all.segment()), (Segmentation::Tcp6, 65_535));
        assert_eq!((all.checksum(), all.ecn()), (Some((1023, 127)), true));
        assert!(!all.is_plain() && Descriptor::new(5).and_more().is_plain());
        assert_eq!(Descriptor::new(1).unsummed(1024, 0), None);
        assert_eq!(Descriptor::new(1).unsummed(0, 128), None);
        assert_eq!(Descriptor::new(7).checked().0, 7 | 1 << 18);
        assert_eq!(all.0 >> 56, 0);
    }
}
