//! Tests of decorators: each alone, together, and removed again. The tests set the time; random
//! numbers have a seed.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)] // it has more than these tests use
mod rig;

use std::time::Duration;

use rig::{Rig, mac, untagged};
use slipway_switch::decorators::{
    BadImpairment, Capturing, Direction, Directions, FrameKind, Impairment, Trace, record,
};
use slipway_switch::ports::UnpluggedPort;
use slipway_switch::{
    BURST, BadConfig, LinkSetting, Mac, PortConfig, PortIndex, PortTurn, Rate, VlanMode,
};

const MS: Duration = Duration::from_millis(1);

/// Makes two ports with assigned addresses.
fn pair() -> Rig {
    let mut rig = Rig::default();
    for number in 0..2 {
        rig.attach(PortConfig { mac: Some(mac(number)), ..PortConfig::default() });
    }
    rig
}

impl Rig {
    fn run_at(&mut self, now: Duration) {
        for port in self.switch.ports().collect::<Vec<_>>() {
            while !matches!(self.switch.turn(port, BURST, now), PortTurn::Idle | PortTurn::Held(_))
            {
            }
        }
    }

    /// Returns the turn, of `count` turns one millisecond apart, in which each frame arrives at a
    /// port.
    fn arrivals(&mut self, port: usize, count: u32) -> Vec<u32> {
        let mut arrivals = Vec::new();
        for at in 0..count {
            self.run_at(MS * at);
            arrivals.extend(self.received_at(port).iter().map(|_| at));
        }
        arrivals
    }

    fn impair(&mut self, port: PortIndex, impairment: Impairment) {
        self.switch.impair(port, Some(impairment)).unwrap();
    }

    fn dropped_out(&mut self, port: PortIndex) -> Vec<(&'static str, u64)> {
        self.stats(port).causes_out().collect()
    }
}

fn only(way: Direction) -> Directions {
    Directions { inward: way == Direction::In, outward: way == Direction::Out }
}

fn clock() -> Duration {
    Duration::new(1_700_000_000, 5)
}

#[test]
fn loss_takes_its_fraction_and_counts_it() {
    for way in [Direction::In, Direction::Out] {
        let mut rig = pair();
        rig.impair(1, Impairment { loss: 0.25, ways: only(way), seed: 7, ..Default::default() });
        let (from, to) = if way == Direction::In { (1, 0) } else { (0, 1) };
        let mut arrived = 0;
        for round in 0..500_u64 {
            for number in 0..8 {
                rig.queue(
                    from,
                    &untagged(from as u64, to as u64, &(round * 8 + number).to_le_bytes()),
                );
            }
            rig.run();
            arrived += rig.received_at(to).len();
        }
        // Four standard deviations of 4,000 draws are 110, and the seed is fixed.
        assert!((2890..=3110).contains(&arrived), "{arrived}");
        let lost = 4000 - arrived as u64;
        let stats = rig.stats(1);
        let causes = if way == Direction::In { rig.dropped_in(1) } else { rig.dropped_out(1) };
        assert_eq!(causes, [("loss", lost)]);
        let bytes = 22 * 4000;
        match way {
            Direction::In => assert_eq!((stats.frames_in, stats.bytes_in), (4000, bytes)),
            Direction::Out => assert_eq!(stats.frames_out, arrived as u64),
        }
    }
}

#[test]
fn what_loss_leaves_is_whole() {
    let mut rig = pair();
    rig.impair(0, Impairment { loss: 0.5, seed: 3, ..Default::default() });
    let sent: Vec<_> =
        (0..12).map(|n| untagged(0, 1, &vec![n; 100 + 90 * usize::from(n)])).collect();
    sent.iter().for_each(|frame| rig.queue(0, frame));
    rig.run();
    let arrived = rig.received_at(1);
    assert!(!arrived.is_empty() && arrived.len() < sent.len());
    assert!(arrived.iter().all(|frame| sent.contains(frame)));
    rig.impair(0, Impairment { loss: 1.0, ..Default::default() });
    sent.iter().take(8).for_each(|frame| rig.queue(0, frame));
    rig.run();
    assert!(rig.received_at(1).is_empty(), "all of it");
}

#[test]
fn delay_holds_each_way_and_keeps_the_order() {
    for way in [Direction::In, Direction::Out] {
        let mut rig = pair();
        let delay = Impairment { delay: 10 * MS, ways: only(way), ..Default::default() };
        rig.impair(1, delay);
        let (from, to) = if way == Direction::In { (1, 0) } else { (0, 1) };
        let frames: Vec<_> =
            (0..5_u8).map(|n| untagged(from as u64, to as u64, &vec![n; 3000])).collect();
        frames.iter().for_each(|frame| rig.queue(from, frame));
        rig.run_at(Duration::ZERO);
        rig.run_at(9 * MS);
        assert!(rig.received_at(to).is_empty(), "{way:?}");
        rig.run_at(10 * MS);
        assert_eq!(rig.received_at(to), frames);
        assert_eq!(rig.stats(0).frames_out + rig.stats(1).frames_out, 5);
    }
}

#[test]
fn jitter_is_within_its_bounds() {
    let mut rig = pair();
    let jitter = Impairment { delay: 20 * MS, jitter: 10 * MS, seed: 9, ..Default::default() };
    rig.impair(1, Impairment { ways: only(Direction::Out), ..jitter });
    let mut times = Vec::new();
    for round in 0..60 {
        rig.queue(0, &untagged(0, 1, b"round"));
        let begin = MS * 100 * round;
        let arrived = (0..100).find(|at| {
            rig.run_at(begin + MS * *at);
            !rig.received_at(1).is_empty()
        });
        times.push(arrived.unwrap());
    }
    assert!(times.iter().all(|at| (10..=30).contains(at)), "{times:?}");
    assert!(times.iter().min() < Some(&15) && times.iter().max() > Some(&25), "{times:?}");
}

#[test]
fn a_full_queue_drops_and_counts() {
    for way in [Direction::In, Direction::Out] {
        let mut rig = pair();
        let ways = only(way);
        rig.impair(1, Impairment { delay: 10 * MS, queue: 4, ways, ..Default::default() });
        let (from, to) = if way == Direction::In { (1, 0) } else { (0, 1) };
        for _ in 0..10 {
            rig.queue(from, &untagged(from as u64, to as u64, b"a frame"));
        }
        assert_eq!(rig.arrivals(to, 15), [10; 4]);
        let causes = if way == Direction::In { rig.dropped_in(1) } else { rig.dropped_out(1) };
        assert_eq!(causes, [("queue", 6)]);
    }
}

#[test]
fn a_rate_lets_its_burst_pass_and_then_its_rate() {
    for way in [Direction::In, Direction::Out] {
        let mut rig = pair();
        // Frames of 100 bytes: two at once, then one each millisecond.
        let rate = Some(Rate { per_second: 100_000, burst: 200 });
        rig.impair(1, Impairment { rate, ways: only(way), ..Default::default() });
        let (from, to) = if way == Direction::In { (1, 0) } else { (0, 1) };
        for _ in 0..10 {
            rig.queue(from, &untagged(from as u64, to as u64, &[0; 86]));
        }
        let arrivals = rig.arrivals(to, 20);
        // The third frame may begin as soon as one byte is paid for.
        assert_eq!(arrivals.len(), 10, "{arrivals:?}");
        assert_eq!(arrivals[..2], [0, 0]);
        let gaps: Vec<_> = arrivals[2..].windows(2).map(|two| two[1] - two[0]).collect();
        assert_eq!(gaps, [1; 7], "{arrivals:?}");
    }
}

#[test]
fn all_of_it_together_and_away_again() {
    let mut rig = pair();
    let rate = Some(Rate { per_second: 1_000_000, burst: 0 });
    let all = Impairment { loss: 0.1, delay: 2 * MS, jitter: MS, rate, ..Default::default() };
    rig.impair(1, all.clone());
    assert_eq!(rig.switch.impairment(1), Some(&all));
    // A new impairment replaces the former one, and waiting frames are dropped.
    rig.queue(0, &untagged(0, 1, b"waits"));
    rig.run_at(Duration::ZERO);
    let waits = Impairment { delay: 50 * MS, ..Default::default() };
    rig.impair(1, waits);
    rig.queue(0, &untagged(0, 1, b"waits"));
    rig.queue(1, &untagged(1, 0, b"waits"));
    rig.run_at(MS);
    rig.switch.impair(1, None).unwrap();
    rig.run_at(100 * MS);
    assert!(rig.received_at(1).is_empty() && rig.received_at(0).is_empty());
    let (inward, outward) = (rig.dropped_in(1), rig.dropped_out(1));
    assert_eq!(inward, [("queue", 1)]);
    let lost: u64 = outward.iter().map(|(_, count)| count).sum();
    assert_eq!(lost, 2, "{outward:?}");
    assert_eq!(rig.switch.impairment(1), None);
    rig.send(0, &untagged(0, 1, b"passes"));
    assert_eq!(rig.received_at(1).len(), 1);
}

#[test]
fn a_port_that_goes_takes_its_queues_along() {
    let mut rig = pair();
    rig.impair(1, Impairment { delay: 5 * MS, ..Default::default() });
    rig.queue(0, &untagged(0, 1, b"late"));
    rig.run_at(Duration::ZERO);
    rig.detach(1);
    rig.run_at(10 * MS);
    let again = rig.attach(PortConfig { mac: Some(mac(1)), ..PortConfig::default() });
    rig.send(0, &untagged(0, 1, b"new"));
    assert_eq!((again, rig.received_at(1).len()), (1, 1));
}

#[test]
fn an_impairment_that_cannot_be_changes_nothing() {
    let mut rig = pair();
    let kept = Impairment { loss: 1.0, ..Default::default() };
    rig.impair(1, kept.clone());
    let none = Impairment::default;
    let no_way = Directions { inward: false, outward: false };
    for (bad, error) in [
        (none(), BadImpairment::Nothing),
        (Impairment { ways: no_way, ..kept.clone() }, BadImpairment::Nothing),
        (Impairment { loss: 1.1, ..none() }, BadImpairment::Loss),
        (Impairment { loss: f64::NAN, ..none() }, BadImpairment::Loss),
        (Impairment { delay: 61_000 * MS, ..none() }, BadImpairment::Delay),
        (Impairment { delay: MS, jitter: 2 * MS, ..none() }, BadImpairment::Jitter),
        (
            Impairment { rate: Some(Rate { per_second: 0, burst: 1 }), ..none() },
            BadImpairment::Rate,
        ),
        (Impairment { delay: MS, queue: 65_537, ..none() }, BadImpairment::Queue),
    ] {
        assert_eq!(rig.switch.impair(1, Some(bad)), Err(BadConfig::Impairment(error)));
    }
    assert_eq!(rig.switch.impairment(1), Some(&kept));
    assert_eq!(rig.switch.impair(9, None), Err(BadConfig::NoSuchPort));
}

fn capturing(snap: u32, count: Option<u64>) -> Capturing {
    Capturing { snap, count, ways: Directions { inward: true, outward: true }, clock }
}

#[test]
fn a_capture_has_both_ways_and_what_was_delivered() {
    let mut rig = pair();
    let (recorder, mut captured) = record(capturing(1000, None)).unwrap();
    rig.switch.observe(1, 4, Box::new(recorder)).unwrap();
    // The loss is in front of the capture, so the capture does not see frames lost on their way to
    // it.
    rig.impair(1, Impairment { loss: 1.0, ways: only(Direction::Out), ..Default::default() });
    rig.send(0, &untagged(0, 1, b"lost"));
    rig.switch.impair(1, None).unwrap();
    let (there, back) = (untagged(0, 1, &[1; 700]), untagged(1, 0, &[2; 1500]));
    rig.send(0, &there);
    rig.send(1, &back);
    let first = captured.next().unwrap();
    assert_eq!(
        (first.way, first.len, first.time_ns),
        (Direction::Out, 714, 1_700_000_000_000_000_005)
    );
    assert_eq!(first.bytes, there);
    let second = captured.next().unwrap();
    assert_eq!((second.way, second.len), (Direction::In, 1514));
    assert_eq!(second.bytes, back[..1000], "snapped");
    assert_eq!((captured.next(), captured.missed(), captured.has_ended()), (None, 0, false));
    assert!(rig.switch.unobserve(1, 4) && captured.has_ended());
    assert!(!rig.switch.unobserve(1, 4));
    rig.send(0, &there);
    assert_eq!((captured.next(), rig.received_at(1).len()), (None, 2));
}

#[test]
fn what_does_not_fit_in_a_capture_is_counted_and_delivered() {
    let mut rig = pair();
    let (recorder, mut captured) = record(capturing(65_536, None)).unwrap();
    rig.switch.observe(1, 0, Box::new(recorder)).unwrap();
    let frame = untagged(0, 1, &[5; 60]);
    for _ in 0..4100 {
        (0..8).for_each(|_| rig.queue(0, &frame));
        rig.run();
        assert_eq!(rig.received_at(1).len(), 8, "nobody waits for who captures");
    }
    assert_eq!(captured.missed(), 32);
    let all = captured.by_ref().count();
    assert_eq!(all, 32_768);
    rig.send(0, &frame);
    assert_eq!(captured.next().unwrap().bytes, frame, "and it goes on");
}

#[test]
fn a_capture_ends_after_its_count_or_with_its_port() {
    let mut rig = pair();
    let (recorder, mut captured) = record(capturing(64, Some(3))).unwrap();
    rig.switch.observe(1, 0, Box::new(recorder)).unwrap();
    (0..5).for_each(|_| rig.queue(0, &untagged(0, 1, b"one of five")));
    rig.run();
    assert!(captured.has_ended());
    assert_eq!(captured.by_ref().count(), 3);
    assert_eq!(rig.received_at(1).len(), 5);
    let (recorder, captured) = record(capturing(64, None)).unwrap();
    rig.switch.observe(1, 1, Box::new(recorder)).unwrap();
    rig.detach(1);
    assert!(captured.has_ended());
}

#[test]
fn a_trace_counts_all_and_tells_of_some() {
    let mut rig = pair();
    let (trace, tracing) = Trace::new(2, Directions::BOTH, clock);
    rig.switch.observe(1, 0, Box::new(trace)).unwrap();
    let mut ping = untagged(0, 1, &[0; 60]);
    ping[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
    ping[23] = 17;
    ping[26..38].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2, 0, 53, 0x12, 0x34]);
    for _ in 0..3 {
        rig.send(0, &ping);
    }
    rig.send(1, &untagged(1, 0, b"?"));
    let told: Vec<_> = tracing.headers.try_iter().collect();
    assert_eq!((told.len(), tracing.untold()), (2, 2), "two a second");
    let text =
        format!("received {} > {} udp 10.0.0.1:53 > 10.0.0.2:4660, 74 bytes", mac(0), mac(1));
    assert_eq!(told[0].to_string(), text);
    let counts: Vec<_> =
        tracing.counts().iter().map(|one| (one.way, one.kind, one.frames, one.bytes)).collect();
    assert_eq!(
        counts,
        [(Direction::In, FrameKind::Other, 1, 15), (Direction::Out, FrameKind::Udp4, 3, 222)]
    );
}

#[test]
fn a_trace_believes_no_header() {
    let mut rig = pair();
    let (trace, tracing) = Trace::new(100_000, Directions::BOTH, clock);
    rig.switch.observe(0, 0, Box::new(trace)).unwrap();
    let mut byte = 0_u8;
    for len in 0..90 {
        for kind in [0x0800_u16, 0x0806, 0x86dd, 0x8100] {
            let mut frame = untagged(0, 1, &vec![byte; len]);
            frame[12..14].copy_from_slice(&kind.to_be_bytes());
            rig.send(0, &frame);
            byte = byte.wrapping_add(37);
            rig.received_at(1);
        }
    }
    assert_eq!(
        tracing.headers.try_iter().map(|told| told.to_string().len().min(1)).sum::<usize>(),
        360
    );
}

#[test]
fn what_waits_goes_nowhere_else() {
    let late = Impairment {
        delay: 5 * MS,
        ways: Directions { inward: true, outward: true },
        ..Default::default()
    };
    let vlan = |vlan| PortConfig {
        mac: Some(mac(1)),
        vlans: VlanMode::Access(vlan),
        ..Default::default()
    };
    for change in 0..3 {
        let mut rig = pair();
        rig.impair(1, late.clone());
        rig.queue(0, &untagged(0, 1, b"to the one who was there"));
        rig.queue(1, &untagged(1, 0, b"from him"));
        rig.run_at(MS);
        match change {
            0 => rig.switch.configure(1, vlan(7)).unwrap(),
            1 => {
                let down =
                    PortConfig { mac: Some(mac(1)), link: LinkSetting::Down, ..Default::default() };
                rig.switch.configure(1, down).unwrap();
            }
            _ => drop(rig.switch.replace(1, Box::new(UnpluggedPort)).ok()),
        }
        rig.run_at(20 * MS);
        assert!(rig.received_at(0).is_empty() && rig.received_at(1).is_empty(), "{change}");
        assert_eq!(rig.dropped_out(1), [("queue", 1)], "{change}");
        assert_eq!(rig.dropped_in(1), [("queue", 1)], "{change}");
    }
}

/// Two guests that take the same address for theirs, and one that has its own.
#[test]
fn guests_with_one_address_have_their_own_on_the_switch() {
    let mut rig = Rig::default();
    let translated = |number| PortConfig {
        mac: Some(mac(number)),
        peer_mac: Some(mac(9)),
        spoof_check: true,
        ..PortConfig::default()
    };
    for number in [0, 1] {
        rig.attach(translated(number));
    }
    rig.attach(PortConfig { mac: Some(mac(2)), ..PortConfig::default() });
    let long = [7; 1000];
    rig.send(0, &untagged(9, 1, &long));
    assert_eq!(rig.received(), [vec![], vec![untagged(0, 9, &long)], vec![]]);
    rig.send(1, &untagged(9, 2, b"one"));
    rig.send(2, &untagged(2, 0, b"two"));
    assert_eq!(
        rig.received(),
        [vec![untagged(2, 9, b"two")], vec![], vec![untagged(1, 2, b"one")]]
    );
    // A request of ARP is for all of them, and only what is the receiver's own is translated.
    let arp = |mac: Mac| {
        let own: [&[u8]; 3] = [&[0, 1, 8, 0, 6, 4, 0, 1], &mac.0, &[0; 14]];
        let mut frame = [&[0xff; 6][..], &mac.0, &[8, 6]].concat();
        frame.extend(own.concat());
        frame
    };
    rig.send(0, &arp(mac(9)));
    assert_eq!(rig.received(), [vec![], vec![arp(mac(0))], vec![arp(mac(0))]]);
    rig.send(0, &untagged(2, 1, b"forged"));
    assert_eq!(rig.counts(), [0, 0, 0]);
    assert_eq!(rig.dropped_in(0), [("spoofed-mac", 1)]);
    rig.configure(1, PortConfig { peer_mac: None, ..translated(1) });
    rig.send(2, &untagged(2, 1, b"plain"));
    assert_eq!(rig.received_at(1), [untagged(2, 1, b"plain")]);
    rig.configure(1, translated(1));
    rig.send(2, &untagged(2, 1, b"again"));
    assert_eq!(rig.received_at(1), [untagged(2, 9, b"again")]);
    let group = PortConfig { peer_mac: Some(Mac::BROADCAST), ..translated(4) };
    assert_eq!(rig.attach_refused(group), BadConfig::Mac(Mac::BROADCAST));
    // Behind a delay.
    rig.impair(1, Impairment { delay: MS, ..Default::default() });
    rig.queue(2, &untagged(2, 1, b"late"));
    rig.run_at(MS);
    rig.run_at(3 * MS);
    assert_eq!(rig.received_at(1), [untagged(2, 9, b"late")]);
}

/// A sandbox that came later may have the address with which the guest's machine was saved.
#[test]
fn a_guest_reaches_the_station_whose_address_it_keeps() {
    let mut rig = Rig::default();
    let (own, peer_mac) = (Some(mac(0)), Some(mac(1)));
    rig.attach(PortConfig { mac: own, peer_mac, spoof_check: true, ..PortConfig::default() });
    rig.attach(PortConfig { mac: peer_mac, spoof_check: true, ..PortConfig::default() });
    rig.send(0, &untagged(1, 1, b"to it"));
    assert_eq!(rig.received(), [vec![], vec![untagged(0, 1, b"to it")]]);
    rig.send(1, &untagged(1, 0, b"back"));
    assert_eq!(rig.received(), [vec![untagged(1, 1, b"back")], vec![]]);
}
