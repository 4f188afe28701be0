//! Tests of receive rates: what a port at its rate gets, and what others lose by that. The tests
//! set the time.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)] // it has more than these tests use
mod rig;

use std::time::Duration;

use rig::{Rig, mac, untagged};
use slipway_switch::decorators::{Capturing, Directions, Impairment, record};
use slipway_switch::{BURST, LinkSetting, PortConfig, PortIndex, PortTurn, Rate};

const MS: Duration = Duration::from_millis(1);

fn limited(number: u64, per_second: u64, burst: u64) -> PortConfig {
    let receive_rate = Some(Rate { per_second, burst });
    PortConfig { mac: Some(mac(number)), receive_rate, ..PortConfig::default() }
}

/// Makes a port without limits and another one with a receive rate.
fn pair(per_second: u64, burst: u64) -> Rig {
    let mut rig = Rig::default();
    rig.attach(PortConfig { mac: Some(mac(0)), ..PortConfig::default() });
    rig.attach(limited(1, per_second, burst));
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

    fn dropped_out(&mut self, port: PortIndex) -> Vec<(&'static str, u64)> {
        self.stats(port).causes_out().collect()
    }
}

/// Returns the number that a frame carries.
fn number(frame: &[u8]) -> u32 {
    u32::from_be_bytes(frame[14..18].try_into().unwrap())
}

#[test]
fn a_load_above_the_rate_gets_the_rate_and_the_rest_is_counted() {
    let mut rig = pair(100_000, 1000);
    let (mut sent, mut arrived) = (0_u32, Vec::new());
    for at in 0..2000 {
        // Twice the rate, in frames of 100 bytes.
        for _ in 0..2 {
            let payload = [&sent.to_be_bytes()[..], &[0; 82]].concat();
            rig.queue(0, &untagged(0, 1, &payload));
            sent += 1;
        }
        rig.run_at(MS * at);
        arrived.extend(rig.received_at(1).iter().map(|frame| number(frame)));
    }
    let bytes = rig.stats(1).bytes_out;
    assert!((200_000..=201_100).contains(&bytes), "2 s, the burst and a frame: {bytes}");
    // The queue empties within its time.
    for at in 2000..2400 {
        rig.run_at(MS * at);
        arrived.extend(rig.received_at(1).iter().map(|frame| number(frame)));
    }
    assert!(arrived.is_sorted_by(|one, next| one < next), "frames were reordered");
    let dropped = u64::from(sent) - arrived.len() as u64;
    assert_eq!(rig.dropped_out(1), [("rate", dropped)]);
    assert_eq!((rig.stats(0).frames_in, rig.dropped_in(0)), (u64::from(sent), Vec::new()));
}

#[test]
fn a_load_below_the_rate_loses_nothing_in_its_bursts() {
    let mut rig = pair(100_000, 1000);
    let mut arrived = 0;
    for at in 0..2000 {
        // Ten frames of 100 bytes every 20 ms are half of the rate.
        if at % 20 == 0 {
            (0..10).for_each(|_| rig.queue(0, &untagged(0, 1, &[0; 86])));
        }
        rig.run_at(MS * at);
        arrived += rig.received_at(1).len();
    }
    assert_eq!((arrived, rig.dropped_out(1)), (1000, Vec::new()));
}

/// Frames of all lengths, some above the burst, at all distances.
#[test]
fn no_frame_is_reordered_and_each_is_delivered_or_counted() {
    for seed in 1..20_u64 {
        let mut random = seed;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        let (rate, burst) = (1000 + draw(2_000_000), draw(5000));
        let mut rig = pair(rate, burst);
        let (mut sent, mut now, mut arrived) = (0_u32, Duration::ZERO, Vec::new());
        for _ in 0..500 {
            for _ in 0..draw(4) {
                let rest = vec![0; 46 + draw(6000) as usize];
                rig.queue(0, &untagged(0, 1, &[&sent.to_be_bytes()[..], &rest[..]].concat()));
                sent += 1;
                // Each frame takes up to three of the ring's 16 slots.
                if sent % 2 == 0 {
                    rig.run_at(now);
                    arrived.extend(rig.received_at(1).iter().map(|frame| number(frame)));
                }
            }
            rig.run_at(now);
            arrived.extend(rig.received_at(1).iter().map(|frame| number(frame)));
            now += Duration::from_micros(draw(3000));
        }
        // No frame waits for longer than a second.
        for _ in 0..1200 {
            now += MS;
            rig.run_at(now);
            arrived.extend(rig.received_at(1).iter().map(|frame| number(frame)));
        }
        assert!(arrived.is_sorted_by(|one, next| one < next), "seed {seed}: reordered");
        let dropped: u64 = rig.dropped_out(1).iter().map(|(_, count)| count).sum();
        assert_eq!(dropped + arrived.len() as u64, u64::from(sent), "seed {seed}");
    }
}

#[test]
fn a_frame_longer_than_the_bucket_passes_and_is_paid_for() {
    let mut rig = pair(100_000, 1000);
    let mut arrived = 0;
    for at in 0..2000 {
        rig.queue(0, &untagged(0, 1, &[0; 20_000]));
        rig.run_at(MS * at);
        arrived += rig.received_at(1).len();
    }
    // Each takes 200 ms, and the first has the burst.
    assert!((10..=11).contains(&arrived), "{arrived}");
}

#[test]
fn a_port_at_its_rate_holds_nobody_back() {
    let mut rig = pair(1, 1);
    rig.attach(PortConfig { mac: Some(mac(2)), ..PortConfig::default() });
    for _ in 0..4 {
        rig.queue(0, &untagged(0, 1, b"slow"));
        rig.queue(0, &untagged(0, 2, b"fast"));
    }
    rig.run_at(Duration::ZERO);
    assert_eq!(rig.counts(), [0, 1, 4]);
    assert_eq!(rig.dropped_out(1), [("rate", 3)]);
    // It sends as ever.
    rig.queue(1, &untagged(1, 2, b"sent"));
    rig.run_at(MS);
    assert_eq!(rig.counts(), [0, 0, 1]);
}

#[test]
fn a_receive_rate_is_changed_and_taken_away() {
    let mut rig = pair(1000, 1);
    let frame = untagged(0, 1, &[0; 86]);
    let arrivals = |rig: &mut Rig, sent: usize, at: u32| {
        (0..sent).for_each(|_| rig.queue(0, &frame));
        rig.run_at(MS * at);
        rig.received_at(1).len()
    };
    assert_eq!(arrivals(&mut rig, 3, 0), 1);
    assert_eq!(arrivals(&mut rig, 0, 99), 0);
    assert_eq!(arrivals(&mut rig, 0, 100), 1);
    // Other settings leave the queue as it is.
    rig.configure(1, PortConfig { trust: true, ..limited(1, 1000, 1) });
    assert_eq!(arrivals(&mut rig, 0, 200), 1);
    assert_eq!(arrivals(&mut rig, 1, 201), 0);
    rig.configure(1, limited(1, 2000, 1));
    assert_eq!(rig.dropped_out(1), [("rate", 1)], "what waited for the former rate");
    assert_eq!(arrivals(&mut rig, 2, 202), 1);
    assert_eq!(arrivals(&mut rig, 0, 252), 1);
    rig.configure(1, PortConfig { mac: Some(mac(1)), ..PortConfig::default() });
    assert_eq!(arrivals(&mut rig, 9, 253), 9);
    assert_eq!(rig.dropped_out(1), [("rate", 1)]);
}

#[test]
fn a_link_that_goes_down_takes_the_queue_along() {
    let mut rig = pair(1000, 1);
    (0..2).for_each(|_| rig.queue(0, &untagged(0, 1, &[0; 86])));
    rig.run_at(Duration::ZERO);
    rig.configure(1, PortConfig { link: LinkSetting::Down, ..limited(1, 1000, 1) });
    rig.run_at(MS * 500);
    assert_eq!((rig.received_at(1).len(), rig.dropped_out(1)), (1, vec![("rate", 1)]));
}

#[test]
fn the_queue_is_behind_impairments_and_before_observers() {
    let mut rig = Rig::default();
    for number in 0..2 {
        rig.attach(PortConfig { mac: Some(mac(number)), ..PortConfig::default() });
    }
    let clock = || Duration::ZERO;
    let capturing = Capturing { snap: 1000, count: None, ways: Directions::BOTH, clock };
    let (recorder, captured) = record(capturing).unwrap();
    rig.switch.observe(1, 0, Box::new(recorder)).unwrap();
    rig.switch.impair(1, Some(Impairment { delay: 5 * MS, ..Impairment::default() })).unwrap();
    rig.configure(1, limited(1, 1000, 1));
    let frame = untagged(0, 1, &[0; 86]);
    let arrivals = |rig: &mut Rig, sent: usize, at: u32| {
        (0..sent).for_each(|_| rig.queue(0, &frame));
        rig.run_at(MS * at);
        rig.received_at(1).len()
    };
    assert_eq!(arrivals(&mut rig, 2, 0), 0);
    assert_eq!(arrivals(&mut rig, 0, 5), 1, "delayed, and then the first at the rate");
    assert_eq!(arrivals(&mut rig, 0, 104), 0);
    assert_eq!(arrivals(&mut rig, 0, 105), 1);
    rig.switch.impair(1, None).unwrap();
    assert_eq!(arrivals(&mut rig, 3, 205), 1, "the rate stays");
    assert_eq!(captured.count(), 3, "the peer's frames, not those that wait");
}
