//! The header that virtio devices, TAP interfaces and packet sockets have in front of a frame
//! (virtio 1.2, section 5.1.6; `struct virtio_net_hdr`), as an [`Offload`].

use crate::{Offload, Segmentation};

/// Bytes of the header, without the number of buffers that follows it in some forms.
pub const HEADER: usize = 10;

const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

impl Offload {
    /// Reads a header. Returns `None` for a kind of segmentation that is not supported (old UDP
    /// fragmentation), or for a frame that is to be cut but has no checksum or no segment length.
    pub fn from_header(header: &[u8; HEADER]) -> Option<Self> {
        let word = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let checksum = (header[0] & NEEDS_CSUM != 0).then(|| (word(6), word(8)));
        let segmentation = match header[1] & !GSO_ECN {
            0 => Segmentation::None,
            GSO_TCPV4 => Segmentation::Tcp4,
            GSO_TCPV6 => Segmentation::Tcp6,
            GSO_UDP_L4 => Segmentation::Udp,
            _ => return None,
        };
        let cut = segmentation != Segmentation::None;
        // Section 5.1.6.2: a driver that leaves segmentation also leaves the checksum.
        if cut && (checksum.is_none() || word(4) == 0) {
            return None;
        }
        Some(Self {
            checksum,
            valid: checksum.is_none() && header[0] & DATA_VALID != 0,
            segmentation,
            segment: if cut { word(4) } else { 0 },
            ecn: cut && header[1] & GSO_ECN != 0,
        })
    }

    /// Returns the header of this offload. `payload_at` is the offset of the payload of a frame
    /// that is to be cut, a hint.
    pub fn to_header(self, payload_at: u16) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        if let Some((start, offset)) = self.checksum {
            header[0] = NEEDS_CSUM;
            header[6..8].copy_from_slice(&start.to_le_bytes());
            header[8..10].copy_from_slice(&offset.to_le_bytes());
        } else if self.valid {
            header[0] = DATA_VALID;
        }
        header[1] = match self.segmentation {
            Segmentation::None => return header,
            Segmentation::Tcp4 => GSO_TCPV4,
            Segmentation::Tcp6 => GSO_TCPV6,
            Segmentation::Udp => GSO_UDP_L4,
        };
        header[1] |= if self.ecn { GSO_ECN } else { 0 };
        header[2..4].copy_from_slice(&payload_at.to_le_bytes());
        header[4..6].copy_from_slice(&self.segment.to_le_bytes());
        header
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read() {
        let sum = Offload { checksum: Some((34, 16)), ..Offload::NONE };
        let cut = Offload { segmentation: Segmentation::Tcp6, segment: 1440, ecn: true, ..sum };
        for offload in [Offload::NONE, sum, cut, Offload { valid: true, ..Offload::NONE }] {
            assert_eq!(Offload::from_header(&offload.to_header(66)), Some(offload));
        }
    }

    #[test]
    fn every_header_is_read_or_refused() {
        for first in 0..=255 {
            for second in 0..=255 {
                let header = [first, second, 1, 0, 2, 0, 3, 0, 4, 0];
                if let Some(offload) = Offload::from_header(&header) {
                    assert_eq!(Offload::from_header(&offload.to_header(1)), Some(offload));
                }
            }
        }
        assert_eq!(Offload::from_header(&[1, 3, 0, 0, 0, 5, 0, 0, 0, 0]), None, "UFO");
        assert_eq!(Offload::from_header(&[0, 1, 0, 0, 0, 5, 0, 0, 0, 0]), None, "without a sum");
        assert_eq!(
            Offload::from_header(&[1, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
            None,
            "pieces of nothing"
        );
    }
}
