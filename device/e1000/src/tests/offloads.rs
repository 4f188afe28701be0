//! Checksums and segmentation, through the switch, with headers that are checked on arrival.

use slipway_e1000_spec::{
    Context, Legacy, Transmit, command, csb, option, rctl, receive_error, receive_status, register,
    statistic,
};
use slipway_ethernet_spec::checksum::{fold, sum};
use slipway_switch::{Mac, Offload, Segmentation, vnet};

use super::rig::{Host, Setup, frame, pair};
use crate::offload::get;

/// Returns the sum of the pseudo header of an IPv4 packet with addresses 10.0.0.1 and 10.0.0.2.
fn pseudo(protocol: u8, len: usize) -> u64 {
    sum(&[10, 0, 0, 1, 10, 0, 0, 2]) + u64::from(protocol) + len as u64
}

/// Returns a frame with IPv4 and TCP headers (54 bytes), whose checksums are those that a driver
/// leaves to the device; `len` bytes in all.
pub(super) fn tcp(from: Mac, to: Mac, len: usize, counted: usize) -> Vec<u8> {
    let mut bytes = frame(from, to, len);
    bytes[12..14].copy_from_slice(&[8, 0]);
    bytes[14..34].copy_from_slice(&[
        0x45, 0, 0, 0, 0x12, 0x34, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
    ]);
    bytes[34..54].copy_from_slice(&[
        0x0f, 0xa0, 0, 80, 0, 0, 1, 0, 0, 0, 0, 9, 0x50, 0x19, 1, 0, 0, 0, 0, 0,
    ]);
    let value = fold(pseudo(6, counted));
    bytes[50..52].copy_from_slice(&value.to_be_bytes());
    bytes
}

pub(super) fn context(segment: u16) -> Context {
    let cut = if segment > 0 { command::TSE } else { 0 };
    Context {
        ipcss: 14,
        ipcso: 24,
        ipcse: 33,
        tucss: 34,
        tucso: 50,
        tucse: 0,
        payload: 0,
        command: command::DEXT | command::TCP | command::IP | cut,
        header: 54,
        mss: segment,
    }
}

fn send(host: &mut Host, frame: &[u8], context: Context, more: u8, options: u8) {
    let queued = host.driver.sending.queue_offloaded(frame, 1500, context, (more, options, 0));
    assert!(queued.unwrap());
    host.driver.flush().unwrap();
    host.world.settle();
    host.driver.sending.clean().unwrap();
}

/// Asserts that a frame's IPv4 and TCP checksums are right.
pub(super) fn check(frame: &[u8]) {
    assert_eq!(usize::from(get(frame, 16).unwrap()), frame.len() - 14);
    assert_eq!(fold(sum(&frame[14..34])), 0xffff, "the header");
    let len = frame.len() - 34;
    assert_eq!(fold(pseudo(6, len) + sum(&frame[34..])), 0xffff, "the segment");
}

#[test]
fn a_segment_is_cut_for_a_peer_that_cannot_take_it_whole() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    for _ in 0..2 {
        a.driver.get(statistic::GPTC).unwrap();
        a.driver.get(statistic::TSCTC).unwrap();
    }
    let sent = tcp(a.mac, b.mac, 54 + 5000, 0);
    send(&mut a, &sent, context(1448), command::TSE, option::IXSM | option::TXSM);
    let mut pieces = Vec::new();
    let keep = |one: crate::driver::Received<'_>| {
        assert_eq!(one.descriptor.errors, 0);
        let checked = receive_status::IPCS | receive_status::TCPCS;
        assert_eq!(one.descriptor.status & checked, checked);
        pieces.push(one.bytes.to_vec());
    };
    b.driver.receive(usize::MAX, keep).unwrap();
    assert_eq!(pieces.iter().map(Vec::len).collect::<Vec<_>>(), [1502, 1502, 1502, 710]);
    let mut payload: Vec<u8> = Vec::new();
    for (number, piece) in pieces.iter().enumerate() {
        check(piece);
        assert_eq!(get(piece, 18), Some(0x1234 + number as u16), "identification");
        let sequence = u32::from_be_bytes(piece[38..42].try_into().unwrap());
        assert_eq!(sequence as usize, 256 + payload.len());
        let last = number == 3;
        assert_eq!(piece[47] & 9, if last { 9 } else { 0 }, "FIN and PSH");
        payload.extend(&piece[54..]);
    }
    assert_eq!(payload, sent[54..]);
    assert_eq!(a.driver.get(statistic::GPTC).unwrap(), 4);
    assert_eq!(a.driver.get(statistic::TSCTC).unwrap(), 1);
}

#[test]
fn checksums_are_filled_in_by_all_descriptors_that_can_ask() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let mut sent = tcp(a.mac, b.mac, 300, 300 - 34);
    sent[16..18].copy_from_slice(&286_u16.to_be_bytes());
    send(&mut a, &sent, context(0), 0, option::IXSM | option::TXSM);
    let (got, descriptor) = b.one();
    check(&got);
    assert_eq!(descriptor.errors, 0);
    // A legacy descriptor has the TCP checksum only.
    let header = fold(sum(&sent[14..34]));
    sent[24..26].copy_from_slice(&(!header).to_be_bytes());
    let address = a.driver.sending.fill(&sent).unwrap();
    let command = command::EOP | command::RS | command::IC;
    let legacy = Legacy { address, length: 300, cso: 50, css: 34, command, special: 0 };
    a.driver.sending.push(&Transmit::Legacy(legacy)).unwrap();
    a.driver.flush().unwrap();
    a.world.settle();
    check(&b.one().0);
}

#[test]
fn wrong_checksums_are_found_on_arrival() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let mut sent = tcp(a.mac, b.mac, 300, 300 - 34);
    sent[16..18].copy_from_slice(&286_u16.to_be_bytes());
    send(&mut a, &sent, context(0), 0, option::IXSM | option::TXSM);
    let mut good = b.one().0;
    let mut errors = |frame: &[u8]| {
        a.send(frame);
        b.one().1.errors
    };
    assert_eq!(errors(&good), 0);
    good[200] ^= 1;
    assert_eq!(errors(&good), receive_error::TCPE);
    good[22] ^= 1;
    assert_eq!(errors(&good), receive_error::TCPE | receive_error::IPE);
    good[20] |= 0x20;
    assert_eq!(errors(&good), receive_error::IPE, "a fragment");
    b.driver.set(register::RXCSUM, 0).unwrap();
    a.send(&good);
    let (_, descriptor) = b.one();
    assert_eq!((descriptor.errors, descriptor.status & receive_status::IXSM), (0, 4));
}

#[test]
fn a_context_lasts_until_the_next_of_its_kind() {
    let (_, mut a, mut b) =
        pair(Setup::new(1), Setup::new(2).options(|one| one.receive = rctl::LPE));
    let whole = tcp(a.mac, b.mac, 54 + 2000, 0);
    send(&mut a, &whole, context(1000), command::TSE, 3);
    assert_eq!(b.received().len(), 2);
    let mut plain = tcp(a.mac, b.mac, 200, 200 - 34);
    plain[16..18].copy_from_slice(&186_u16.to_be_bytes());
    send(&mut a, &plain, context(0), 0, 3);
    check(&b.one().0);
    // The context of segmentation is still there; a context of checksums comes with this frame.
    send(&mut a, &whole, context(0), command::TSE, 3);
    assert_eq!(b.received().len(), 2);
}

#[test]
fn offloads_that_cannot_be_are_dropped_and_counted() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let sent = tcp(a.mac, b.mac, 54 + 2000, 0);
    let bad = [
        Context { mss: 0, ..context(1448) },
        Context { header: 255, tucss: 250, ..context(1448) },
        Context { command: command::DEXT | command::TSE, ..context(1448) },
        Context { tucso: 3, ..context(1448) },
        Context { tucse: 100, ..context(1448) },
        Context { ipcse: u16::MAX, ..context(1448) },
    ];
    for context in bad {
        send(&mut a, &sent, context, command::TSE, 3);
    }
    assert_eq!(a.counters().bad_offload, bad.len() as u64);
    assert!(b.received().is_empty());
    send(&mut a, &sent, context(1448), command::TSE, 3);
    assert_eq!(b.received().len(), 2, "the device goes on");
}

/// A host whose driver takes frames with work left.
fn taker(number: u64) -> Setup {
    Setup::block(number).options(|one| one.offloads = true)
}

#[test]
fn a_segment_reaches_a_driver_that_asks_for_it_whole() {
    let (_, mut a, mut b) = pair(Setup::new(1), taker(2).options(|one| one.vlans = true));
    let sent = tcp(a.mac, b.mac, 54 + 60_000, 0);
    send(&mut a, &sent, context(1448), command::TSE, option::IXSM | option::TXSM);
    let (got, descriptor) = b.one();
    let (header, got) = got.split_at(csb::HEADER);
    let offload = Offload::from_header(header.first_chunk().unwrap()).unwrap();
    let expected = Offload {
        checksum: Some((34, 16)),
        segmentation: Segmentation::Tcp4,
        segment: 1448,
        ..Offload::NONE
    };
    assert_eq!((offload, &header[vnet::HEADER..]), (expected, &[0; 6][..]));
    assert_eq!((got.len(), &got[54..]), (sent.len(), &sent[54..]));
    assert_eq!(fold(sum(&got[14..34])), 0xffff, "the header");
    assert_eq!(get(got, 50), Some(fold(pseudo(6, sent.len() - 34))), "the pseudo header's sum");
    assert_eq!((descriptor.errors, descriptor.status & 0x64), (0, receive_status::IXSM));
    // A frame that lacks its checksum only, with a tag that is taken off.
    let mut tagged = tcp(a.mac, b.mac, 200, 200 - 34);
    tagged[16..18].copy_from_slice(&186_u16.to_be_bytes());
    tagged.splice(12..12, [0x81, 0, 0, 7]);
    let moved = |at: u8| at + 4;
    let plain = context(0);
    let shifted =
        Context { ipcss: moved(14), ipcso: moved(24), ipcse: 37, tucss: 38, tucso: 54, ..plain };
    send(&mut a, &tagged, shifted, 0, option::IXSM | option::TXSM);
    let (got, descriptor) = b.one();
    let offload = Offload::from_header(got.first_chunk().unwrap()).unwrap();
    assert_eq!(offload, Offload { checksum: Some((34, 16)), ..Offload::NONE });
    assert_eq!((descriptor.special, get(&got, csb::HEADER + 12)), (7, Some(0x0800)));
    // A complete frame is checked as ever.
    let mut good = tcp(a.mac, b.mac, 300, 300 - 34);
    good[16..18].copy_from_slice(&286_u16.to_be_bytes());
    let header = fold(sum(&good[14..34]));
    good[24..26].copy_from_slice(&(!header).to_be_bytes());
    let value = !fold(sum(&good[34..]));
    good[50..52].copy_from_slice(&value.to_be_bytes());
    a.send(&good);
    let (got, descriptor) = b.one();
    assert_eq!((&got[..csb::HEADER], &got[csb::HEADER..]), (&[0; csb::HEADER][..], &good[..]));
    let checked = receive_status::IPCS | receive_status::TCPCS;
    assert_eq!((descriptor.errors, descriptor.status & checked), (0, checked));
}

#[test]
fn a_ring_that_is_too_short_for_a_segment_loses_no_other_frame() {
    let (_, mut a, mut b) = pair(Setup::new(1), taker(2).options(|one| one.descriptors = 32));
    let sent = tcp(a.mac, b.mac, 54 + 64_000, 0);
    send(&mut a, &sent, context(1448), command::TSE, option::IXSM | option::TXSM);
    a.send(&frame(a.mac, b.mac, 60));
    assert_eq!(b.received().iter().map(Vec::len).collect::<Vec<_>>(), [csb::HEADER + 60]);
    assert_eq!(b.counters().too_large, 1);
}
