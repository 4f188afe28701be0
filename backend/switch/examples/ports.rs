//! Measures port to port: a source and the switch on one processor, the sink on another, over
//! memory ports.
//!
//!     cargo run --release -p slipway-switch --example ports -- \
//!         [BYTES [PORTS [SECONDS [BURST [SLOTS [ROW [PAYLOAD]]]]]]]
#![allow(clippy::unwrap_used)] // a program to measure with

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slipway_ring::{Consumer, Descriptor, Geometry, Link, Producer};
use slipway_switch::ports::{MemoryPort, Tell};
use slipway_switch::{Abilities, Learning, LearningOptions, Mac, PortConfig, Switch};

fn argument<T: std::str::FromStr<Err: std::fmt::Debug>>(at: usize, default: T) -> T {
    std::env::args().nth(at).map_or(default, |text| text.parse().unwrap())
}

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}

/// Attaches a port with the address `number`; returns the program's side.
fn attach(switch: &mut Switch, number: u64, geometry: Geometry) -> (Consumer, Producer) {
    let link = Link::new(geometry).unwrap();
    let port = MemoryPort::new(&link, Tell::new().unwrap(), Abilities::NONE);
    let config = PortConfig { mac: Some(Mac::local(number)), ..PortConfig::default() };
    switch.attach(Box::new(port), config).map_err(|(error, _)| error).unwrap();
    link.peer()
}

fn frame(from: u64, to: u64, bytes: usize) -> Vec<u8> {
    let mut frame = vec![0; bytes];
    frame[..6].copy_from_slice(&Mac::local(to).0);
    frame[6..12].copy_from_slice(&Mac::local(from).0);
    frame[12..14].copy_from_slice(&0x88b5_u16.to_be_bytes());
    frame
}

fn main() {
    let (bytes, ports, seconds) = (argument(1, 64), argument(2, 2), argument(3, 2.0));
    let burst = argument(4, 256);
    let slots = argument(5, 512);
    let geometry = Geometry { slots, payload: argument(7, 2048) };
    if ports == 2 && std::env::var_os("DIRECT").is_some() {
        return direct(bytes, slots, burst);
    }
    let mut switch =
        Switch::new(Box::new(Learning::new(LearningOptions::default(), 0x1234_5678_9abc_def1)));
    let (_back, mut source) = attach(&mut switch, 0, geometry);
    let sinks: Vec<_> =
        (1..ports as u64).map(|number| attach(&mut switch, number, geometry)).collect();
    let mut sinks = sinks;
    let mut inline = std::env::var_os("SINGLE").map(|_| sinks.remove(0));
    let stop = Arc::new(AtomicBool::new(false));
    let received = Arc::new(AtomicU64::new(0));
    let sink = {
        let (stop, received) = (stop.clone(), received.clone());
        std::thread::spawn(move || {
            pin(1);
            drain(sinks, &stop, &received);
        })
    };
    pin(0);
    // The number of consecutive frames to one port.
    let run = argument(6, 1);
    // Slots are filled once: the source's own work is only a descriptor.
    let frames: Vec<_> = (1..ports as u64).map(|to| frame(0, to, bytes)).collect();
    for slot in 0..slots as usize {
        source.memory().write(source.place(slot), &frames[slot / run % frames.len()]).unwrap();
    }
    let begin = Instant::now();
    let mut sent = 0_u64;
    let mut next = begin;
    let mut before = 0;
    while begin.elapsed() < Duration::from_secs_f64(seconds) {
        let now = begin.elapsed();
        for _ in 0..64 {
            let free = source.free(burst).unwrap().min(burst);
            for slot in 0..free {
                if ports > 2 {
                    let to = 1 + (sent as usize + slot) / run % (ports - 1);
                    source.memory().write(source.place(slot), &Mac::local(to as u64).0).unwrap();
                }
                source.describe(slot, Descriptor::new(bytes as u32));
            }
            source.publish(free);
            sent += free as u64;
            let _ = switch.turn(0, 256, now);
            if let Some((input, _)) = inline.as_mut() {
                let there = input.available(1).unwrap();
                input.release(there);
            }
        }
        if next.elapsed() > Duration::from_millis(200) {
            let all = received.load(Ordering::Relaxed);
            let rate = (all - before) as f64 / next.elapsed().as_secs_f64();
            println!("{:.2} Mpps, {:.1} Gbit/s", rate / 1e6, rate * bytes as f64 * 8.0 / 1e9);
            (before, next) = (all, Instant::now());
        }
    }
    stop.store(true, Ordering::Relaxed);
    sink.join().unwrap();
    let cost = begin.elapsed().as_nanos() as f64 / sent as f64;
    println!("{cost:.1} ns a packet");
    let stats = switch.stats(1).unwrap();
    println!("sent {sent}, out {} {:?}", stats.frames_out, stats.causes_out().collect::<Vec<_>>());
}

/// Measures a link without a switch.
fn direct(bytes: usize, slots: u32, burst: usize) {
    let link = Link::new(Geometry { slots, payload: 2048 }).unwrap();
    let (_, mut output) = link.server();
    let (input, back) = link.peer();
    let stop = Arc::new(AtomicBool::new(false));
    let received = Arc::new(AtomicU64::new(0));
    let (s, r) = (stop.clone(), received.clone());
    std::thread::spawn(move || {
        pin(1);
        drain(vec![(input, back)], &s, &r);
    });
    pin(0);
    let frame = frame(0, 1, bytes);
    let mut next = Instant::now();
    let mut before = 0;
    for _ in 0..4 {
        while next.elapsed() < Duration::from_millis(500) {
            for _ in 0..64 {
                let free = output.free(burst).unwrap().min(burst);
                for slot in 0..free {
                    output.fetch(slot + 8);
                    output.memory().write(output.place(slot), &frame).unwrap();
                    output.describe(slot, Descriptor::new(bytes as u32));
                }
                output.publish(free);
            }
        }
        let all = received.load(Ordering::Relaxed);
        let rate = (all - before) as f64 / next.elapsed().as_secs_f64();
        println!("direct {:.2} Mpps, {:.1} Gbit/s", rate / 1e6, rate * bytes as f64 * 8.0 / 1e9);
        (before, next) = (all, Instant::now());
    }
}

fn drain(mut sinks: Vec<(Consumer, Producer)>, stop: &AtomicBool, received: &AtomicU64) {
    let mut sum = 0_u32;
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        for at in 0..sinks.len() {
            if let Some((later, _)) = sinks.get(at + 16) {
                later.fetch_next();
            }
            if let Some((soon, _)) = sinks.get_mut(at + 8)
                && soon.available(1).unwrap() > 0
            {
                soon.fetch(0);
            }
            let (input, _) = &mut sinks[at];
            let there = input.available(1).unwrap();
            for slot in 1..there.min(8) {
                input.fetch(slot);
            }
            for slot in 0..there {
                if slot + 8 < there {
                    input.fetch(slot + 8);
                }
                let mut header = [0; 14];
                input.read(slot, &mut header);
                sum = sum.wrapping_add(u32::from(header[5]) + input.descriptor(slot).len() as u32);
            }
            input.release(there);
            count += there as u64;
        }
        received.store(count, Ordering::Relaxed);
    }
    std::hint::black_box(sum);
}
