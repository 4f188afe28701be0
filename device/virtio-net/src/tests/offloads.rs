//! Every combination of the offloads that one driver asks for and another accepts.

use slipway_virtio_spec::net::{Features, Header, gso, header_flag};

use super::rig::{Setup, pair};

/// Returns the ones' complement sum of 16-bit words (RFC 1071).
fn sum(bytes: &[u8], mut sum: u32) -> u32 {
    for pair in bytes.chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum
}

/// Returns a TCP or UDP packet of `payload` bytes with a partial checksum, and the offset of its
/// transport header.
fn packet(from: &[u8; 6], to: &[u8; 6], six: bool, tcp: bool, payload: usize) -> (Vec<u8>, usize) {
    let transport = if tcp { 20 } else { 8 };
    let start = 14 + if six { 40 } else { 20 };
    let len = start + transport + payload;
    let mut bytes: Vec<u8> = (0..len).map(|at| (at * 13 + at / 255) as u8).collect();
    bytes[..6].copy_from_slice(to);
    bytes[6..12].copy_from_slice(from);
    let protocol = if tcp { 6 } else { 17 };
    let above = (transport + payload) as u16;
    let addresses = if six {
        bytes[12..14].copy_from_slice(&[0x86, 0xdd]);
        bytes[14..18].copy_from_slice(&[0x60, 0, 0, 0]);
        bytes[18..20].copy_from_slice(&above.to_be_bytes());
        bytes[20..22].copy_from_slice(&[protocol, 64]);
        22..54
    } else {
        bytes[12..14].copy_from_slice(&[8, 0]);
        bytes[14..16].copy_from_slice(&[0x45, 0]);
        bytes[16..18].copy_from_slice(&(above + 20).to_be_bytes());
        bytes[18..22].copy_from_slice(&[0, 1, 0x40, 0]);
        bytes[22..26].copy_from_slice(&[64, protocol, 0, 0]);
        let checksum = !(sum(&bytes[14..34], 0) as u16);
        bytes[24..26].copy_from_slice(&checksum.to_be_bytes());
        26..34
    };
    let pseudo = sum(&bytes[addresses], u32::from(protocol) + u32::from(above));
    let at = start + if tcp { 16 } else { 6 };
    if tcp {
        // Data offset 5, ACK and PSH.
        bytes[start + 12..start + 14].copy_from_slice(&[0x50, 0x18]);
    } else {
        bytes[start + 4..start + 6].copy_from_slice(&above.to_be_bytes());
    }
    bytes[at..at + 2].copy_from_slice(&(pseudo as u16).to_be_bytes());
    (bytes, start)
}

/// Returns whether the packet's transport checksum is right and complete.
fn is_complete(bytes: &[u8], six: bool, tcp: bool) -> bool {
    let (addresses, start) = if six { (22..54, 54) } else { (26..34, 34) };
    let protocol = if tcp { 6 } else { 17 };
    let above = (bytes.len() - start) as u32;
    let pseudo = sum(&bytes[addresses], protocol + above);
    sum(&bytes[start..], pseudo) == 0xffff
}

#[test]
fn what_one_leaves_to_do_is_done_for_who_cannot_take_it() {
    let all = Features::all();
    let none = all - Features::GUEST_OFFLOADS;
    let checksum = none | Features::GUEST_CSUM;
    let single = all - Features::MRG_RXBUF;
    for taker in [all, checksum, none, checksum | Features::GUEST_TSO4, single] {
        let buffer = if taker.contains(Features::MRG_RXBUF) { 2048 } else { 70_000 };
        let second = Setup::new(2).options(|options| {
            (options.features, options.buffer, options.entries) = (taker, buffer, 64);
        });
        let (world, mut a, mut b) = pair(Setup::new(1), second);
        for six in [false, true] {
            for (tcp, payload, segment) in [
                (true, 900, 0),
                (false, 900, 0),
                (true, 7001, 1400),
                (true, 65_000, 1400),
                (false, 9000, 1400),
            ] {
                let (sent, start) = packet(&a.mac.0, &b.mac.0, six, tcp, payload);
                let kind = match (segment, tcp, six) {
                    (0, _, _) => gso::NONE,
                    (_, true, false) => gso::TCPV4,
                    (_, true, true) => gso::TCPV6,
                    _ => gso::UDP_L4,
                };
                let header = Header {
                    flags: header_flag::NEEDS_CSUM,
                    gso_type: kind,
                    gso_size: segment.into(),
                    hdr_len: ((start + if tcp { 20 } else { 8 }) as u16).into(),
                    csum_start: (start as u16).into(),
                    csum_offset: u16::into(if tcp { 16 } else { 6 }),
                    num_buffers: 0.into(),
                };
                a.send_with(&header, &sent, &[12, 12 + start, 4000]);
                world.settle();
                let received = b.received();
                let takes = match kind {
                    gso::NONE => taker.contains(Features::GUEST_CSUM),
                    gso::TCPV4 => taker.contains(Features::GUEST_TSO4),
                    gso::TCPV6 => taker.contains(Features::GUEST_TSO6),
                    _ => taker.contains(Features::GUEST_USO4),
                };
                let what = format!("{taker:?} six {six} tcp {tcp} payload {payload}");
                if takes {
                    assert_eq!(received.len(), 1, "{what}");
                    assert!(received[0].frame == sent, "{what}");
                    let got = received[0].header;
                    assert_eq!((got.flags, got.gso_type), (header.flags, kind), "{what}");
                    assert_eq!(got.gso_size, header.gso_size);
                    assert_eq!(got.csum_start, header.csum_start);
                    continue;
                }
                let pieces = if segment == 0 { 1 } else { payload.div_ceil(segment.into()) };
                let lengths: Vec<usize> = received.iter().map(|one| one.frame.len()).collect();
                assert_eq!(lengths.len(), pieces, "{what}: {lengths:?}");
                let head = start + if tcp { 20 } else { 8 };
                let mut data = Vec::new();
                for one in &received {
                    assert_eq!(one.header.gso_type, gso::NONE, "{what}");
                    if one.header.flags & header_flag::NEEDS_CSUM == 0 {
                        assert!(is_complete(&one.frame, six, tcp), "{what}");
                    } else {
                        assert!(taker.contains(Features::GUEST_CSUM), "{what}");
                    }
                    data.extend_from_slice(&one.frame[head..]);
                }
                assert!(data == sent[head..], "{what}");
            }
        }
    }
}
