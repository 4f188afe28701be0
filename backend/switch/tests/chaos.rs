//! Ports that come and go under traffic, and peers that rewrite their rings while the switch reads
//! them. No peer may get a frame that is not for it, or one with a sender's address that is not the
//! sender's.
//!
//! `SLIPWAY_CHAOS_SECONDS` sets the seconds to run: 5 by default, a minute in `make soak`.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use slipway_ring::{Consumer, Descriptor, Geometry, Link};
use slipway_switch::ports::{MemoryPort, Tell};
use slipway_switch::{
    Abilities, BURST, Learning, LearningOptions, Mac, PortConfig, PortIndex, Switch, VlanMode,
};

/// The number of ports at a time, half of them in one VLAN and half in another.
const PORTS: u64 = 16;

/// xorshift64*, with the same numbers in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 16) % end
    }
}

/// A peer: the test checks the frames that it receives, and a thread of its own sends.
struct Peer {
    index: PortIndex,
    station: u64,
    input: Consumer,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn vlan(station: u64) -> u16 {
    1 + (station % 2) as u16
}

impl Peer {
    fn attach(switch: &mut Switch, station: u64, seed: u64) -> Self {
        let link = Link::new(Geometry { slots: 32, payload: 256 }).unwrap();
        let port = MemoryPort::new(&link, Tell::new().unwrap(), Abilities::NONE);
        let config = PortConfig {
            mac: Some(Mac::local(station)),
            spoof_check: true,
            vlans: VlanMode::Access(vlan(station)),
            ..PortConfig::default()
        };
        let index = switch.attach(Box::new(port), config).map_err(|(error, _)| error).unwrap();
        let (input, _) = link.peer();
        let stop = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&stop);
        let thread = std::thread::spawn(move || misbehave(&link, station, seed, &until));
        Self { index, station, input, stop, thread: Some(thread) }
    }

    /// Checks all frames that it received, and returns their number.
    fn check(&mut self) -> u64 {
        let there = self.input.available(32).unwrap();
        let mut begins = true;
        for slot in 0..there {
            let descriptor = self.input.descriptor(slot);
            if begins {
                let mut header = [0; 12];
                self.input.memory().read(self.input.place(slot), &mut header).unwrap();
                self.judge(&header);
            }
            begins = !descriptor.has_more();
        }
        assert!(begins, "half a frame");
        self.input.release(there);
        there as u64
    }

    fn judge(&self, header: &[u8; 12]) {
        let to = Mac(header[..6].try_into().unwrap());
        let from = Mac(header[6..].try_into().unwrap());
        let own = Mac::local(self.station);
        assert!(to == own || to.is_group(), "{own} got a frame for {to}");
        // Addresses are assigned and checked, so the sender's address must be its own.
        let sender = from.to_bits() >> 8;
        assert_eq!(from, Mac::local(sender), "{own} got a frame from {from}, which nobody has");
        assert_eq!(
            vlan(sender),
            vlan(self.station),
            "{own} got a frame of another VLAN from {from}"
        );
        assert_ne!(sender, self.station, "{own} got its own frame");
    }

    fn detach(mut self, switch: &mut Switch) {
        switch.detach(self.index).unwrap();
        self.end();
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// Sends frames, rewrites them and their descriptors at any time, and sometimes breaks the ring.
fn misbehave(link: &Link, station: u64, seed: u64, stop: &AtomicBool) {
    let mut random = Random(seed | 1);
    let (_, mut output) = link.peer();
    let mut sent = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        let Ok(free) = output.free(32) else { return };
        for slot in 0..free {
            let (to, from) = (random.below(2 * PORTS), [station, random.below(2 * PORTS)]);
            let mut frame = [0; 64];
            let to = if random.below(8) == 0 { Mac::BROADCAST } else { Mac::local(to) };
            frame[..6].copy_from_slice(&to.0);
            frame[6..12].copy_from_slice(&Mac::local(from[usize::from(random.below(4) == 0)]).0);
            if random.below(8) == 0 {
                frame[12..16].copy_from_slice(&[0x81, 0, 0, 1 + (random.below(3)) as u8]);
            }
            output.memory().write(output.place(slot), &frame).unwrap();
            let descriptor = match random.below(8) {
                0 => Descriptor(random.next()),
                1 => Descriptor::new(random.below(300) as u32).and_more(),
                _ => Descriptor::new(60),
            };
            output.describe(slot, descriptor);
        }
        output.publish(free);
        sent += free as u64;
        // Rewrite frames that the switch may be reading now.
        for _ in 0..64 {
            let slot = random.below(32) as usize;
            let address = Mac::local(random.below(2 * PORTS)).0;
            let at = output.place(slot) + if random.below(2) == 0 { 0 } else { 6 };
            output.memory().write(at, &address).unwrap();
            output.describe(slot, Descriptor(random.next() >> random.below(64)));
        }
        if sent > 20_000 && random.below(4000) == 0 {
            // An impossible counter breaks the peer's own link, and nothing else.
            output.publish(1 << 20);
            return;
        }
        std::thread::yield_now();
    }
}

fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn nobody_gets_what_is_not_his() {
    let seconds = std::env::var("SLIPWAY_CHAOS_SECONDS");
    let seconds = seconds.map_or(5, |text| text.parse().unwrap());
    let table =
        Learning::new(LearningOptions { stations: 64, ..LearningOptions::default() }, 0x5851_f42d);
    let mut switch = Switch::new(Box::new(table));
    let mut random = Random(42);
    let mut peers: Vec<Peer> =
        (0..PORTS).map(|station| Peer::attach(&mut switch, station, station + 1)).collect();
    let (begin, mut now) = (Instant::now(), Duration::ZERO);
    let (mut received, mut changes, mut resident_then) = (0, 0_u64, 0);
    while now < Duration::from_secs(seconds) {
        for _ in 0..50 {
            for port in switch.ports().collect::<Vec<_>>() {
                let _ = switch.turn(port, BURST, now);
            }
            received += peers.iter_mut().map(Peer::check).sum::<u64>();
        }
        now = begin.elapsed();
        switch.age(now);
        // One peer leaves, and a new one with another number comes, in either VLAN.
        let gone = peers.swap_remove(random.below(PORTS) as usize);
        gone.detach(&mut switch);
        let free = (0..2 * PORTS).filter(|one| peers.iter().all(|peer| peer.station != *one));
        let free: Vec<u64> = free.collect();
        let station = free[random.below(free.len() as u64) as usize];
        peers.push(Peer::attach(&mut switch, station, random.next()));
        changes += 1;
        if changes == 100 {
            resident_then = resident();
        }
    }
    for peer in peers {
        peer.detach(&mut switch);
    }
    println!("{received} slots received, {changes} ports came and went");
    assert!(received > 10_000 && changes > 20);
    let grown = resident().saturating_sub(resident_then);
    assert!(changes < 200 || grown < 32 << 20, "{grown} bytes more than after the first ports");
}
