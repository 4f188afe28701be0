//! Measures the cost of ports without traffic: a switch on a reactor, its memory ports, and the
//! process's CPU time.
//!
//!     cargo run --release -p slipway-switch --example idle_ports -- [PORTS [SECONDS]]
#![allow(clippy::unwrap_used)] // a program to measure with

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use slipway_reactor::{Reactor, Settings};
use slipway_ring::{Descriptor, Geometry, Link};
use slipway_switch::ports::{MemoryPort, Tell};
use slipway_switch::{Abilities, Learning, LearningOptions, Mac, PortConfig, Switch, spawn};

fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn main() {
    let argument = |at: usize| std::env::args().nth(at).and_then(|text| text.parse::<u64>().ok());
    let (count, seconds) = (argument(1).unwrap_or(1000), argument(2).unwrap_or(10));
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let switch = Switch::new(Box::new(Learning::new(LearningOptions::default(), 0x1234_5679)));
    let handle = spawn(&reactor.handle(), switch).unwrap();
    let mut peers = Vec::new();
    for number in 0..count {
        let link = Link::new(Geometry { slots: 64, payload: 2048 }).unwrap();
        let tell = Tell::new().unwrap();
        let bell = tell.server.try_clone().unwrap();
        let port = MemoryPort::new(&link, tell, Abilities::NONE);
        let config = PortConfig { mac: Some(Mac::local(number)), ..PortConfig::default() };
        handle.call(|owner| owner.attach(Box::new(port), config)).unwrap().unwrap();
        peers.push((link.peer(), bell));
    }
    std::thread::sleep(Duration::from_millis(200));
    let (begin, before) = (Instant::now(), cpu());
    std::thread::sleep(Duration::from_secs(seconds));
    let spent = (cpu() - before).as_secs_f64() / begin.elapsed().as_secs_f64() * 100.0;
    println!("{count} ports without traffic: {spent:.3} % of a processor");
    if count < 2 {
        return;
    }
    // The first frame after the silence arrives.
    let mut frame = [0; 60];
    frame[..6].copy_from_slice(&Mac::local(1).0);
    frame[6..12].copy_from_slice(&Mac::local(0).0);
    let (_, output) = &mut peers[0].0;
    output.memory().write(output.place(0), &frame).unwrap();
    output.describe(0, Descriptor::new(60));
    let sent = Instant::now();
    output.publish(1);
    slipway_ring::barrier();
    if output.must_tell() {
        rustix::io::write(&peers[0].1, &1_u64.to_ne_bytes()).unwrap();
    }
    while peers[1].0.0.available(1).unwrap() == 0 {
        std::hint::spin_loop();
    }
    println!("first frame after that: {:.0} us", sent.elapsed().as_secs_f64() * 1e6);
}
