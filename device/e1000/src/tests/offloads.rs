//! Checksums and segmentation, through the switch, with headers that are checked on arrival.

use slipway_e1000_spec::{
    Context, Legacy, Transmit, command, option, rctl, receive_error, receive_status, register,
    statistic,
};
use slipway_switch::Mac;

use super::rig::{Host, Setup, frame, pair};
use crate::offload::{fold, get, sum};

/// Returns the sum of the pseudo header of an IPv4 packet with addresses 10.0.0.1 and 10.0.0.2.
fn pseudo(protocol: u8, len: usize) -> u64 {
    sum(&[10, 0, 0, 1, 10, 0, 0, 2]) + u64::from(protocol) + len as u64
}

/// Returns a frame with IPv4 and TCP headers (54 bytes), whose checksums are those that a driver
/// leaves to the device; `len` bytes in all.
fn tcp(from: Mac, to: Mac, len: usize, counted: usize) -> Vec<u8> {
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

fn context(segment: u16) -> Context {
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
fn check(frame: &[u8]) {
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
