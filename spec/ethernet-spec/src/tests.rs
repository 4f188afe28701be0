//! Tests of the views: honest headers, and the contract on bytes of any content and length.

extern crate std;

use core::fmt::Write;
use core::net::{Ipv4Addr, Ipv6Addr};
use std::string::{String, ToString};
use std::vec::Vec;
use std::{format, vec};

use crate::checksum::{fold, sum};
use crate::*;

const FROM: Mac = Mac([2, 0, 0, 0, 0, 1]);
const TO: Mac = Mac([2, 0, 0, 0, 0, 2]);

fn frame(kind: u16, packet: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER + packet.len()];
    let mut frame = EthernetFrame::new_unchecked(&mut bytes[..]);
    frame.set_destination(TO);
    frame.set_source(FROM);
    frame.set_ethertype(kind);
    frame.payload_mut().copy_from_slice(packet);
    bytes
}

fn ipv4(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; ipv4::MIN_HEADER];
    let mut packet = Ipv4Packet::new_unchecked(&mut bytes[..]);
    packet.set_plain(protocol, 64);
    packet.set_source(Ipv4Addr::new(10, 0, 0, 1));
    packet.set_destination(Ipv4Addr::new(10, 0, 0, 2));
    packet.set_total_length((ipv4::MIN_HEADER + payload.len()) as u16);
    packet.fill_checksum();
    bytes.extend(payload);
    bytes
}

fn ipv6(next: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; ipv6::HEADER];
    (bytes[0], bytes[6], bytes[23], bytes[39]) = (0x60, next, 1, 2);
    Ipv6Packet::new_unchecked(&mut bytes[..]).set_payload_length(payload.len() as u16);
    bytes.extend(payload);
    bytes
}

#[test]
fn frames_print_what_they_carry() {
    let ports = [0, 53, 0x12, 0x34];
    let mut arp = [0_u8; arp::LEN];
    let address = Ipv4Addr::new(10, 1, 2, 3);
    ArpPacket::new_unchecked(&mut arp[..]).set_request(FROM, address, address);
    let mut later = ipv4(protocol::UDP, &ports);
    later[7] = 1;
    for (kind, packet, text) in [
        (ethertype::ARP, arp.to_vec(), "arp 10.1.2.3 > 10.1.2.3"),
        (ethertype::IPV4, ipv4(protocol::UDP, &ports), "udp 10.0.0.1:53 > 10.0.0.2:4660"),
        (ethertype::IPV4, later, "udp 10.0.0.1 > 10.0.0.2"),
        (ethertype::IPV4, ipv4(protocol::ICMP, &ports), "icmp 10.0.0.1 > 10.0.0.2"),
        (ethertype::IPV4, ipv4(protocol::TCP, &[0; 3]), "tcp 10.0.0.1 > 10.0.0.2"),
        (ethertype::IPV4, ipv6(0, &[]), "ipv4 (the header has another version)"),
        (ethertype::IPV6, ipv6(protocol::TCP, &ports), "tcp6 [::1]:53 > [::2]:4660"),
        (ethertype::IPV6, ipv6(protocol::ROUTING, &ports), "ipv6 ::1 > ::2"),
        (ethertype::IPV6, vec![0x60; 39], "ipv6 (the header is cut off)"),
        (0x88b5, vec![], "type 0x88b5"),
    ] {
        let mut bytes = frame(kind, &packet);
        let shown = EthernetFrame::new_checked(&bytes).unwrap().to_string();
        assert_eq!(shown, format!("{FROM} > {TO} {text}"));
        bytes.splice(TYPE..TYPE, [0x81, 0, 0x60, 7]);
        let tagged = EthernetFrame::new_checked(&bytes).unwrap();
        assert_eq!(tagged.to_string(), format!("{FROM} > {TO} vlan 7 {text}"));
        assert_eq!((tagged.tag(), tagged.ethertype()), (Some(0x6007), kind));
        assert_eq!(tagged.payload(), packet);
    }
}

#[test]
fn headers_that_are_not_whole_are_refused() {
    let (short, length) = (Some(FrameError::Short), Some(FrameError::HeaderLength));
    let mut whole = frame(ethertype::IPV4, &[0; 4]);
    whole[12..14].copy_from_slice(&ethertype::VLAN.to_be_bytes());
    for len in 0..whole.len() {
        assert_eq!(EthernetFrame::new_checked(&whole[..len]).err(), short);
    }
    let mut options = ipv4(protocol::TCP, &[0; 8]);
    options[0] = 0x47;
    for len in 0..28 {
        assert_eq!(Ipv4Packet::new_checked(&options[..len]).err(), short);
    }
    assert_eq!(Ipv4Packet::new_checked(&options).unwrap().payload().len(), 0);
    options[0] = 0x44;
    assert_eq!(Ipv4Packet::new_checked(&options).err(), length);
    let mut segment = [0_u8; 24];
    assert_eq!(TcpSegment::new_checked(&segment).err(), length);
    segment[12] = 0x60;
    assert_eq!(TcpSegment::new_checked(&segment[..23]).err(), short);
    assert!(TcpSegment::new_checked(&segment).is_ok());
    assert_eq!(ArpPacket::new_checked(&[0_u8; 27]).err(), short);
    assert_eq!(UdpDatagram::new_checked(&[0_u8; 7]).err(), short);
    assert_eq!(Icmpv6Message::new_checked(&[0_u8; 3]).err(), short);
    assert_eq!(Ipv6Packet::new_checked(&[0x60_u8; 39]).err(), short);
    assert_eq!(Ipv6Packet::new_checked(&[0x40_u8; 40]).err(), Some(FrameError::Version));
}

#[test]
fn an_ipv4_header_is_summed() {
    let bytes = ipv4(protocol::TCP, &[]);
    let packet = Ipv4Packet::new_checked(&bytes).unwrap();
    assert!(packet.is_checksum_right());
    assert_eq!(fold(packet.pseudo_sum(20)), fold(sum(&[10, 0, 0, 1, 10, 0, 0, 2]) + 6 + 20));
    let mut wrong = bytes.clone();
    wrong[8] ^= 1;
    assert!(!Ipv4Packet::new_checked(&wrong).unwrap().is_checksum_right());
}

#[test]
fn icmpv6_is_found_behind_extension_headers() {
    let message = [message_type::NEIGHBOR_ADVERTISEMENT, 0, 0, 0];
    let found = |next, payload: &[u8]| {
        let bytes = ipv6(next, payload);
        Ipv6Packet::new_checked(&bytes).unwrap().icmpv6().map(<[u8]>::to_vec)
    };
    let behind = |header: &[u8]| [header, &message].concat();
    assert_eq!(found(protocol::ICMPV6, &message), Some(message.to_vec()));
    let options = behind(&[protocol::ICMPV6, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(found(protocol::HOP_BY_HOP, &options), Some(message.to_vec()));
    let authentication = behind(&[protocol::ICMPV6, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(found(protocol::AUTHENTICATION, &authentication), Some(message.to_vec()));
    assert_eq!(found(protocol::TCP, &message), Some(vec![]), "another protocol");
    assert_eq!(found(protocol::ICMPV6, &[]), None);
    assert_eq!(found(protocol::ROUTING, &[protocol::ICMPV6, 1, 0, 0]), None, "cut off");
    let mut bytes = [message_type::NEIGHBOR_ADVERTISEMENT; 24];
    assert_eq!(Icmpv6Message::new_checked(&bytes[..23]).unwrap().target(), None);
    bytes[8..].fill(7);
    assert_eq!(
        Icmpv6Message::new_checked(&bytes).unwrap().target(),
        Some(Ipv6Addr::from([7_u8; 16]))
    );
}

/// Calls every method of every view of `bytes`, checked or not, with setters.
fn use_all(bytes: &mut [u8], text: &mut String) {
    if let Ok(frame) = EthernetFrame::new_checked(&*bytes) {
        let _ = write!(text, "{frame} {:?} {:?}", frame.kind(), frame.tag());
        let _ = write!(text, "{:?}", use_packets(frame.payload()));
    }
    let frame = EthernetFrame::new_unchecked(&*bytes);
    let _ = write!(text, "{frame} {:?} {:?}", frame.kind(), frame.payload());
    let _ = write!(text, "{:?}", use_packets(bytes));
    let mut frame = EthernetFrame::new_unchecked(&mut *bytes);
    frame.set_ethertype(ethertype::IPV4);
    frame.set_source(FROM);
    frame.set_destination(TO);
    frame.payload_mut().reverse();
    let mut packet = Ipv4Packet::new_unchecked(&mut *bytes);
    packet.set_identification(7);
    packet.fill_checksum();
    packet.set_plain(protocol::TCP, 64);
    packet.set_source(Ipv4Addr::LOCALHOST);
    packet.set_destination(Ipv4Addr::LOCALHOST);
    packet.set_total_length(9);
    packet.fill_checksum();
    ArpPacket::new_unchecked(&mut *bytes).set_request(
        FROM,
        Ipv4Addr::LOCALHOST,
        Ipv4Addr::UNSPECIFIED,
    );
    Ipv6Packet::new_unchecked(&mut *bytes).set_payload_length(7);
    let mut segment = TcpSegment::new_unchecked(&mut *bytes);
    segment.set_flags(tcp::flag::CWR);
    segment.set_sequence(8);
    let mut datagram = UdpDatagram::new_unchecked(&mut *bytes);
    datagram.set_source(1);
    datagram.set_destination(2);
    datagram.set_length(3);
}

/// Returns something of every field, so that all are read.
fn use_packets(bytes: &[u8]) -> impl core::fmt::Debug {
    let ipv4 = Ipv4Packet::new_unchecked(bytes);
    let ipv6 = Ipv6Packet::new_unchecked(bytes);
    let arp = ArpPacket::new_unchecked(bytes);
    let tcp = TcpSegment::new_unchecked(bytes);
    let udp = UdpDatagram::new_unchecked(bytes);
    let icmpv6 = Icmpv6Message::new_unchecked(bytes);
    if let Ok(packet) = Ipv4Packet::new_checked(bytes) {
        assert_eq!(packet.header_len() + packet.payload().len(), bytes.len());
    }
    if let Ok(segment) = TcpSegment::new_checked(bytes) {
        assert!((tcp::MIN_HEADER..=bytes.len()).contains(&segment.header_len()));
    }
    let (ipv4_text, ipv6_text) = (ipv4.to_string(), ipv6.to_string());
    (
        (ipv4.total_length(), ipv4.identification(), ipv4.is_fragment(), ipv4.pseudo_sum(1)),
        (ipv4.is_checksum_right(), ipv4.payload().len(), ipv4_text),
        (ipv6.payload_length(), ipv6.pseudo_sum(1), ipv6.icmpv6().map(<[u8]>::len), ipv6_text),
        (arp.sender_mac(), arp.to_string()),
        (tcp.header_len(), tcp.sequence(), tcp.flags()),
        (udp.source(), udp.destination(), udp.checksum()),
        (icmpv6.message_type(), icmpv6.target()),
    )
}

#[test]
fn no_method_panics_whatever_the_bytes_are() {
    // A linear congruential generator (Knuth, volume 2, 3.3.4).
    let mut state = 1_u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    let mut text = String::new();
    for len in 0..=128 {
        for round in 0..64 {
            let mut bytes: Vec<u8> = (0..len).map(|_| random()).collect();
            let types = [[8, 0], [8, 6], [0x86, 0xdd], [0x81, 0]];
            if let Some(place) = bytes.get_mut(TYPE..HEADER).filter(|_| round % 8 > 0) {
                place.copy_from_slice(&types[round % 4]);
            }
            if let Some(first) = bytes.get_mut(HEADER).filter(|_| round % 16 > 3) {
                *first = if round % 4 == 2 { 0x60 } else { 0x40 | *first & 15 };
            }
            text.clear();
            use_all(&mut bytes, &mut text);
            assert!(!text.is_empty());
        }
    }
}
