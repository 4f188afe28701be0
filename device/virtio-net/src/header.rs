//! The header in front of every frame, and its offloads (section 5.1.6).

use slipway_switch::{Abilities, Offload, Segmentation};
use slipway_virtio_spec::net::{Features, Header, gso, header_flag};

/// Bytes of the shortest frame: two addresses and a type.
pub(crate) const MIN_FRAME: usize = 14;

/// Returns the offloads that a driver with these features accepts.
pub(crate) fn abilities(features: Features) -> Abilities {
    Abilities {
        checksum: features.contains(Features::GUEST_CSUM),
        tcp4: features.contains(Features::GUEST_TSO4),
        tcp6: features.contains(Features::GUEST_TSO6),
        udp: features.contains(Features::GUEST_USO4.union(Features::GUEST_USO6)),
    }
}

/// Returns the offloads that a driver with `features` asks for, for a frame of `len` bytes (section
/// 5.1.6.2). Returns `None` if the header is invalid, or asks for something that was not
/// negotiated.
#[inline]
pub(crate) fn offload(header: &Header, len: usize, features: Features) -> Option<Offload> {
    if header.flags & header_flag::NEEDS_CSUM == 0 {
        // Segmentation needs a checksum to fill in.
        return (header.gso_type == gso::NONE).then_some(Offload::NONE);
    }
    let (start, offset) = (header.csum_start.get(), header.csum_offset.get());
    let end = usize::from(start) + usize::from(offset) + 2;
    if !features.contains(Features::CSUM) || end > len || usize::from(start) < MIN_FRAME {
        return None;
    }
    let (segmentation, needed) = match header.gso_type & !gso::ECN {
        gso::NONE => (Segmentation::None, Features::empty()),
        gso::TCPV4 => (Segmentation::Tcp4, Features::HOST_TSO4),
        gso::TCPV6 => (Segmentation::Tcp6, Features::HOST_TSO6),
        gso::UDP_L4 => (Segmentation::Udp, Features::HOST_USO),
        _ => return None,
    };
    let ecn = header.gso_type & gso::ECN != 0;
    let segment = header.gso_size.get();
    let cut = segmentation != Segmentation::None;
    let ecn_allowed = cut && features.contains(Features::HOST_ECN);
    if !features.contains(needed) || (cut && segment == 0) || (ecn && !ecn_allowed) {
        return None;
    }
    Some(Offload {
        checksum: Some((start, offset)),
        valid: false,
        segmentation,
        segment: if cut { segment } else { 0 },
        ecn,
    })
}

/// Returns the header of a frame that the driver receives in `buffers` buffers (section 5.1.6.4).
#[inline]
pub(crate) fn header(offload: &Offload, buffers: u16) -> Header {
    let mut header = Header { num_buffers: buffers.into(), ..Header::default() };
    if let Some((start, offset)) = offload.checksum {
        header.flags = header_flag::NEEDS_CSUM;
        header.csum_start = start.into();
        header.csum_offset = offset.into();
    } else if offload.valid {
        header.flags = header_flag::DATA_VALID;
    }
    header.gso_type = match offload.segmentation {
        Segmentation::None => return header,
        Segmentation::Tcp4 => gso::TCPV4,
        Segmentation::Tcp6 => gso::TCPV6,
        Segmentation::Udp => gso::UDP_L4,
    };
    if offload.ecn {
        header.gso_type |= gso::ECN;
    }
    header.gso_size = offload.segment.into();
    // The header length is only a hint (section 5.1.6.2): up to the checksummed header and TCP's
    // largest header.
    let start = offload.checksum.map_or(0, |(start, _)| start);
    header.hdr_len = start.saturating_add(60).into();
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tso() -> Header {
        Header {
            flags: header_flag::NEEDS_CSUM,
            gso_type: gso::TCPV4,
            gso_size: 1448.into(),
            csum_start: 34.into(),
            csum_offset: 16.into(),
            ..Header::default()
        }
    }

    #[test]
    fn what_was_not_negotiated_or_cannot_be_is_refused() {
        let all = Features::all();
        let good = offload(&tso(), 9000, all).unwrap();
        assert_eq!(good.segmentation, Segmentation::Tcp4);
        assert_eq!((good.segment, good.checksum), (1448, Some((34, 16))));
        assert_eq!(offload(&tso(), 9000, all - Features::HOST_TSO4), None);
        assert_eq!(offload(&tso(), 9000, all - Features::CSUM), None);
        assert_eq!(offload(&tso(), 51, all), None, "the checksum lies behind the frame");
        let bad = [
            Header { flags: 0, ..tso() },
            Header { gso_type: gso::UDP, ..tso() },
            Header { gso_type: 7, ..tso() },
            Header { gso_size: 0.into(), ..tso() },
            Header { gso_type: gso::ECN, ..tso() },
            Header { csum_start: u16::MAX.into(), csum_offset: u16::MAX.into(), ..tso() },
            Header { csum_start: 0.into(), ..tso() },
        ];
        for header in bad {
            assert_eq!(offload(&header, 9000, all), None, "{header:?}");
        }
        let ecn = Header { gso_type: gso::TCPV4 | gso::ECN, ..tso() };
        assert!(offload(&ecn, 9000, all).unwrap().ecn);
        assert_eq!(offload(&ecn, 9000, all - Features::HOST_ECN), None);
    }

    #[test]
    fn a_header_says_again_what_it_said() {
        for gso_type in [gso::NONE, gso::TCPV4, gso::TCPV6, gso::UDP_L4, gso::TCPV6 | gso::ECN] {
            let sent = Header { gso_type, ..tso() };
            let meaning = offload(&sent, 9000, Features::all()).unwrap();
            let received = header(&meaning, 1);
            assert_eq!(offload(&received, 9000, Features::all()), Some(meaning));
        }
        assert_eq!(
            header(&Offload::NONE, 3),
            Header { num_buffers: 3.into(), ..Header::default() }
        );
    }
}
