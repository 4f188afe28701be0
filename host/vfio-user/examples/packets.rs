//! Serves two virtio-net functions on sockets, on one switch, in a process of its own on CPU 0,
//! drives both from CPU 1, and measures how many frames of 64 bytes a second go from one driver to
//! the other. `cargo run --release -p slipway-vfio-user --example packets [SECONDS [FRAME]]`; or `…
//! packets serve DIRECTORY [PAIRS [MTU]]` alone, for other clients, such as two QEMUs.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;
use slipway_pci::Interrupt;
use slipway_ram::Span;
use slipway_reactor::{Reactor, Settings as ReactorSettings};
use slipway_switch::{Learning, LearningOptions, Mac, PortConfig, Switch};
use slipway_vfio_user::{Config, Endpoint, EndpointParts};
use slipway_vfio_user_client::{Registers, TestGuest};
use slipway_virtio_net::driver::{Arena, Driver, Options, RegisterAccess, Ring, notification};
use slipway_virtio_net::{Device, Parts, Settings, vectors};
use slipway_virtio_spec::net::HEADER;

type Failure = Box<dyn std::error::Error>;

const PATIENCE: Duration = Duration::from_secs(20);
const MEMORY: u64 = 8 << 20;
const ENTRIES: u16 = 256;
/// The number of frames that a driver makes available at once.
const BATCH: usize = 64;

fn pin(cpu: usize) -> Result<(), Failure> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// Serves until standard input ends.
fn serve(directory: &Path, pairs: u16, mtu: u16) -> Result<(), Failure> {
    pin(0)?;
    let reactor = Reactor::spawn(ReactorSettings::default())?;
    let lookup = Learning::new(LearningOptions::default(), 1);
    let switch = slipway_switch::spawn(&reactor.handle(), Switch::new(Box::new(lookup)))?;
    for number in 1..=2 {
        let config = Config::at(directory.join(number.to_string()));
        let parts = EndpointParts::new(&config);
        let (sink, mac) = (parts.interrupts(), Mac::local(number));
        let (device, port) = Device::new(Parts {
            memory: parts.memory(),
            interrupts: (0..vectors(pairs))
                .map(|vector| Interrupt::new(sink.clone(), vector))
                .collect(),
            clock: parts.clock(),
            settings: Settings { pairs, mtu, ..Settings::new(mac) },
            journal: None,
        })?;
        let wanted = PortConfig { mac: Some(mac), spoof_check: true, ..PortConfig::default() };
        switch.call(move |owner| owner.attach(Box::new(port), wanted))??;
        let home = reactor.handle();
        let endpoint = Endpoint::new(config, parts, Box::new(device), Vec::new(), &home)?;
        home.add(Box::new(endpoint))?;
    }
    println!("ready");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

/// A driver with memory of its own, and the number of its notifications.
struct Host {
    driver: Driver<Registers>,
    notifications: u64,
}

impl Host {
    fn new(path: &Path) -> Result<Self, Failure> {
        let guest = TestGuest::new(0, MEMORY)?;
        let registers = guest.connect(path, PATIENCE)?;
        let options = Options { entries: ENTRIES, ..Options::default() };
        let driver = Driver::new(registers, Arena::new(guest.memory, 0, MEMORY), options)?;
        Ok(Self { driver, notifications: 0 })
    }

    /// Makes the pushed buffers available to the device, and notifies it if it wants that.
    fn publish(&mut self, queue: u16) -> Result<(), Failure> {
        let driver = &mut self.driver;
        let ring = match queue {
            0 => &mut driver.receive[0].ring,
            _ => &mut driver.transmit[0].ring,
        };
        if ring.publish()? {
            self.notifications += 1;
            driver.registers.post(notification(queue), &queue.to_le_bytes())?;
        }
        Ok(())
    }
}

/// The sender's frames: each descriptor has a buffer of its own.
struct Frames {
    buffers: Vec<Span>,
    free: Vec<u16>,
    bytes: Vec<u8>,
    next: u64,
}

impl Frames {
    fn new(host: &mut Host, len: usize) -> Result<Self, Failure> {
        let mut bytes = vec![0; HEADER + len];
        bytes[HEADER..HEADER + 6].copy_from_slice(&Mac::local(2).0);
        bytes[HEADER + 6..HEADER + 12].copy_from_slice(&Mac::local(1).0);
        bytes[HEADER + 12..HEADER + 14].copy_from_slice(&[0x88, 0xb5]);
        let mut buffers = Vec::new();
        for _ in 0..ENTRIES {
            buffers.push(host.driver.arena.allocate_span(2048)?);
        }
        for (index, buffer) in buffers.iter().enumerate() {
            describe(&host.driver.transmit[0].ring, index, buffer.iova(), bytes.len())?;
        }
        Ok(Self { buffers, free: (0..ENTRIES).collect(), bytes, next: 0 })
    }

    /// Sends up to [`BATCH`] frames, each with the next number in it.
    fn send(&mut self, host: &mut Host) -> Result<(), Failure> {
        while let Some(used) = host.driver.transmit[0].ring.pop()? {
            self.free.push(used.id);
        }
        for _ in 0..BATCH.min(self.free.len()) {
            let Some(id) = self.free.pop() else { break };
            self.bytes[HEADER + 14..HEADER + 22].copy_from_slice(&self.next.to_le_bytes());
            self.buffers[usize::from(id)].write(0, &self.bytes)?;
            host.driver.transmit[0].ring.push_head(id)?;
            self.next += 1;
        }
        host.publish(1)
    }
}

fn describe(ring: &Ring, index: usize, at: u64, len: usize) -> Result<(), Failure> {
    let entry = [&at.to_le_bytes()[..], &(len as u32).to_le_bytes(), &[0; 4]].concat();
    Ok(ring.areas()[0].write(16 * index, &entry)?)
}

/// The state of the receiver.
#[derive(Default)]
struct Sink {
    frames: u64,
    /// The number of the next expected frame; frames before a later one were dropped.
    next: u64,
    disordered: u64,
}

impl Sink {
    /// Takes the received frames and returns their buffers to the device; `buffers` holds the place
    /// of each.
    fn receive(&mut self, host: &mut Host, buffers: &[Span]) -> Result<(), Failure> {
        let mut taken = 0;
        while let Some(used) = host.driver.receive[0].ring.pop()? {
            let mut bytes = [0; HEADER + 22];
            let buffer = buffers.get(usize::from(used.id)).ok_or("a buffer that there is not")?;
            buffer.read(0, &mut bytes)?;
            let [.., a, b, c, d, e, f, g, h] = bytes;
            let number = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
            self.disordered += u64::from(number < self.next);
            self.next = number + 1;
            self.frames += 1;
            host.driver.receive[0].ring.push_head(used.id)?;
            taken += 1;
            if taken == BATCH {
                break;
            }
        }
        host.publish(0)
    }
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, mode, directory, rest @ ..] = arguments.as_slice()
        && mode == "serve"
    {
        let number = |at: usize, none| rest.get(at).map_or(Ok(none), |text: &String| text.parse());
        return serve(Path::new(directory), number(0, 1)?, number(1, 1500)?);
    }
    let seconds = arguments.get(1).map_or(Ok(3), |text| text.parse())?;
    let len: usize = arguments.get(2).map_or(Ok(64), |text| text.parse())?;
    let directory = std::env::temp_dir().join(format!("packets-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let mut child = std::process::Command::new(std::env::current_exe()?)
        .arg("serve")
        .arg(&directory)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()?;
    let output = child.stdout.take().ok_or("no output")?;
    std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut String::new())?;
    let outcome = drive(&directory, Duration::from_secs(seconds), len);
    drop(child.stdin.take());
    child.wait()?;
    std::fs::remove_dir_all(&directory)?;
    outcome
}

fn drive(directory: &Path, time: Duration, len: usize) -> Result<(), Failure> {
    pin(1)?;
    let (mut from, mut to) = (Host::new(&directory.join("1"))?, Host::new(&directory.join("2"))?);
    let mut frames = Frames::new(&mut from, len)?;
    // The places of the receive buffers, in the order in which the driver made them.
    let places = to.driver.receive[0].places();
    let (mut sink, mut begun) = (Sink::default(), None);
    let (start, warm) = (Instant::now(), Duration::from_millis(500));
    loop {
        for _ in 0..64 {
            frames.send(&mut from)?;
            sink.receive(&mut to, &places)?;
        }
        let now = start.elapsed();
        if now > warm + time {
            break;
        }
        if now > warm && begun.is_none() {
            begun = Some((Instant::now(), sink.frames, frames.next));
        }
    }
    let (at, received, sent) = begun.ok_or("too short")?;
    let seconds = at.elapsed().as_secs_f64();
    let rate = |count: u64| count as f64 / seconds / 1e6;
    println!(
        "{len} bytes: received {:.3} Mpps, sent {:.3} Mpps, {} out of order, {} notifications",
        rate(sink.frames - received),
        rate(frames.next - sent),
        sink.disordered,
        from.notifications + to.notifications,
    );
    Ok(())
}
