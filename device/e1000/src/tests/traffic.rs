//! Frames both ways, filters, lengths, statistics.

use slipway_e1000_spec::{
    Context, Data, Transmit, command, rah, rctl, receive_status, register, statistic,
};
use slipway_pci::Function;
use slipway_switch::Mac;
use slipway_switch::ports::LoopbackPort;

use super::rig::{Setup, World, frame, pair};

#[test]
fn frames_of_every_length_arrive_whole_and_short_ones_padded() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    for len in (14..200).chain([1000, 1513, 1514]) {
        let sent = frame(a.mac, b.mac, len);
        a.send(&sent);
        let mut padded = sent;
        padded.resize(len.max(60), 0);
        assert_eq!(b.received(), [padded], "{len} bytes");
    }
    a.send(&frame(a.mac, b.mac, 1515));
    assert!(b.received().is_empty(), "long packets are not enabled");
    assert_eq!(b.driver.get(statistic::ROC).unwrap(), 1);
    assert_eq!(b.counters().too_large, 1);
    a.send(&[1; 13]);
    assert_eq!(a.counters().too_short, 1);
}

#[test]
fn a_port_that_sends_frames_back_returns_all_of_them_over_many_rounds_of_the_ring() {
    let world = World::new();
    world.attach(Box::new(LoopbackPort::default()));
    let mut host = Setup::new(1).options(|one| one.receive = rctl::UPE).host(&world);
    let (own, other) = (host.mac, Mac::local(9));
    for round in 0..500_usize {
        let count = 1 + round % 40;
        let sent: Vec<Vec<u8>> = (0..count).map(|at| frame(own, other, 60 + at + round)).collect();
        sent.iter().for_each(|frame| host.queue(frame));
        host.driver.flush().unwrap();
        world.settle();
        let mut back = host.received();
        assert_eq!(back.len(), count, "round {round}");
        back.iter_mut().for_each(|frame| frame.rotate_left(6));
        for (sent, back) in sent.iter().zip(&back) {
            assert_eq!(sent[12..], back[6..back.len() - 6]);
        }
    }
}

#[test]
fn long_packets_take_several_buffers() {
    let (_, mut a, mut b) =
        pair(Setup::new(1), Setup::new(2).options(|one| one.receive = rctl::LPE));
    for len in [1515, 2044, 2045, 4000, 9014] {
        let sent = frame(a.mac, b.mac, len);
        let pieces = a.driver.sending.queue_offloaded(&sent, 1000, Context::default(), (0, 0, 0));
        assert!(pieces.unwrap());
        a.driver.flush().unwrap();
        a.world.settle();
        assert_eq!(b.received(), [sent]);
    }
    let (piece, long) = (a.driver.sending.fill(&[7; 2048]).unwrap(), 9);
    for number in 0..long {
        let end = if number + 1 == long { command::EOP | command::RS } else { 0 };
        let command = command::DEXT | end;
        let data = Data { address: piece, length: 2048, command, ..Data::default() };
        a.driver.sending.push(&Transmit::Data(data)).unwrap();
    }
    a.driver.flush().unwrap();
    a.world.settle();
    assert!(b.received().is_empty(), "longer than the longest");
}

#[test]
fn only_wanted_frames_reach_the_driver() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let group = Mac([0x33, 0x33, 0, 0, 0, 1]);
    let other = Mac::local(77);
    let mut count = |b: &mut super::rig::Host| {
        for to in [b.mac, Mac::BROADCAST, group, other] {
            a.send(&frame(a.mac, to, 60));
        }
        b.received().iter().map(|frame| frame[..6].to_vec()).collect::<Vec<_>>()
    };
    let (own, all) = (b.mac.0.to_vec(), Mac::BROADCAST.0.to_vec());
    assert_eq!(count(&mut b), [own.clone(), all.clone()]);
    // Bits 47:36 of the group's address are 0x010: word 0, bit 16.
    b.driver.set(register::MTA, 1 << 16).unwrap();
    assert_eq!(count(&mut b), [own.clone(), all.clone(), group.0.to_vec()]);
    b.driver.set(register::MTA, 0).unwrap();
    b.driver.set(register::RCTL, rctl::EN | rctl::UPE | rctl::MPE).unwrap();
    assert_eq!(count(&mut b), [own, group.0.to_vec(), other.0.to_vec()]);
    b.driver.set(register::RCTL, rctl::EN).unwrap();
    b.driver.set(register::RAL + 4, 0).unwrap();
    assert!(count(&mut b).is_empty(), "without an address");
    let [w, x, y, z, e, f] = other.0;
    b.driver.set(register::RAL + 8, u32::from_le_bytes([w, x, y, z])).unwrap();
    b.driver.set(register::RAL + 12, rah::AV | u32::from_le_bytes([e, f, 0, 0])).unwrap();
    assert_eq!(count(&mut b), [other.0.to_vec()]);
}

#[test]
fn statistics_count_what_passed_and_clear_on_read() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    for host in [&mut a, &mut b] {
        for offset in (statistic::FIRST..statistic::END).step_by(4) {
            host.driver.get(offset).unwrap();
        }
    }
    for (to, len) in [(b.mac, 60), (b.mac, 100), (Mac::BROADCAST, 1514)] {
        a.send(&frame(a.mac, to, len));
    }
    b.received();
    let read = |host: &mut super::rig::Host, offset| host.driver.get(offset).unwrap();
    for (sent, got) in [
        (statistic::GPTC, statistic::GPRC),
        (statistic::BPTC, statistic::BPRC),
        (statistic::PTC64, statistic::PRC64),
        (statistic::PTC64 + 4, statistic::PRC64 + 4),
        (statistic::PTC64 + 20, statistic::PRC64 + 20),
        (statistic::TOTL, statistic::TORL),
    ] {
        let (sent, got) = (read(&mut a, sent), read(&mut b, got));
        assert_eq!(sent, got);
        assert_ne!(sent, 0);
    }
    assert_eq!(read(&mut b, statistic::GORCL), 64 + 104 + 1518);
    assert_eq!(read(&mut b, statistic::GPRC), 0);
}

#[test]
fn a_full_receive_ring_loses_frames_and_says_so() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    b.driver.get(statistic::MPC).unwrap();
    for _ in 0..3 {
        (0..50).for_each(|_| a.queue(&frame(a.mac, b.mac, 60)));
        a.driver.flush().unwrap();
        a.world.settle();
    }
    let causes = b.driver.get(register::ICR).unwrap();
    assert_ne!(causes & slipway_e1000_spec::cause::RXO, 0);
    assert_ne!(causes & slipway_e1000_spec::cause::RXDMT0, 0);
    assert_eq!(b.received().len(), 63, "one descriptor stays the driver's");
    assert_eq!(b.driver.get(statistic::MPC).unwrap(), 150 - 63);
    a.send(&frame(a.mac, b.mac, 61));
    assert_eq!(b.received()[0].len(), 61);
}

#[test]
fn tags_are_inserted_stripped_and_filtered() {
    let vlans =
        |number| Setup::new(number).options(|one| (one.vlans, one.receive) = (true, rctl::VFE));
    let (_, mut a, mut b) = pair(vlans(1), vlans(2));
    let sent = frame(a.mac, b.mac, 100);
    let context = Context::default();
    let tagged = (command::VLE, 0, 0x6064);
    let send = |a: &mut super::rig::Host| {
        assert!(a.driver.sending.queue_offloaded(&sent, 64, context, tagged).unwrap());
        a.driver.flush().unwrap();
        a.world.settle();
    };
    send(&mut a);
    assert!(b.received().is_empty(), "the driver is not in VLAN 100");
    b.driver.set(register::VFTA + 4 * 3, 1 << 4).unwrap();
    send(&mut a);
    let (got, descriptor) = b.one();
    assert_eq!(got, sent);
    assert_eq!(descriptor.special, 0x6064);
    assert_ne!(descriptor.status & receive_status::VP, 0);
    b.driver.set(register::CTRL, 0).unwrap();
    send(&mut a);
    let (got, descriptor) = b.one();
    assert_eq!((got.len(), &got[12..16]), (104, &[0x81, 0, 0x60, 0x64][..]));
    assert_eq!(descriptor.status & receive_status::VP, 0);
    a.driver.set(register::CTRL, 0).unwrap();
    send(&mut a);
    assert_eq!(b.one().0, sent, "a tag is inserted in VLAN mode only");
}

/// As under a VMM that stores a guest's tails to memory that it shares with the function.
#[test]
fn a_tail_that_is_stored_and_announced_is_as_good_as_a_written_one() {
    let (first, second) = (Setup::new(1), Setup::new(2));
    let (tails, others) = (first.tails.clone(), second.tails.clone());
    let (world, mut a, mut b) = pair(first, second);
    world.settle();
    let before = a.counters();
    a.queue(&frame(a.mac, b.mac, 60));
    let tail = a.driver.sending.tail();
    tails.store(0, tail);
    a.device().notified(1);
    world.settle();
    assert_eq!(b.received().len(), 1);
    let after = a.counters();
    assert_eq!((after.kicks - before.kicks, after.announced), (1, 1));
    assert_eq!(after.registers[0].writes, before.registers[0].writes, "no write of TDT");
    assert_eq!(a.driver.get(register::TDT).unwrap(), tail);
    // One buffer fewer, by a store.
    let given = b.driver.get(register::RDT).unwrap();
    others.store(1, (given + 63) % 64);
    b.device().notified(1);
    assert_eq!(b.driver.get(register::RDT).unwrap(), (given + 63) % 64);
    // No register has such a value, and no ring such an end.
    for value in [64, 0xffff, u32::MAX] {
        tails.store(0, value);
        a.device().notified(u64::MAX);
        world.settle();
        assert!(b.received().is_empty(), "{value:#x}");
        assert_eq!(a.driver.get(register::TDT).unwrap(), value & 0xffff);
    }
    a.queue(&frame(a.mac, b.mac, 61));
    a.driver.flush().unwrap();
    world.settle();
    assert_eq!(b.received().len(), 1);
}

/// As of a function whose thread has had no turn while the port sent the frames by itself.
#[test]
fn a_tail_that_comes_round_the_ring_wakes_a_port_that_sleeps() {
    let (first, second) = (Setup::new(1), Setup::new(2));
    let tails = first.tails.clone();
    let (world, mut a, mut b) = pair(first, second);
    world.settle();
    let (start, before) = (a.driver.sending.tail(), a.counters().kicks);
    loop {
        a.queue(&frame(a.mac, b.mac, 60));
        let tail = a.driver.sending.tail();
        tails.store(0, tail);
        if tail == start {
            break;
        }
        world.settle();
        assert_eq!(b.received().len(), 1);
    }
    assert_eq!(a.counters().kicks, before);
    a.device().notified(1);
    assert_eq!(a.counters().kicks, before + 1);
    world.settle();
    assert_eq!(b.received().len(), 1);
    // The tail is the head again, so a receive tail wakes nobody.
    a.device().notified(1);
    assert_eq!(a.counters().kicks, before + 1);
}
