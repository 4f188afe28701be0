//! Two virtio-net functions over vfio-user sockets, in another process, with the switch between
//! them and our own driver on both.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use slipway_ram::Span;
use slipway_switch::Mac;
use slipway_vfio_user_client::{Registers, TestGuest};
use slipway_virtio_net::driver::{Arena, Driver, Options, RegisterAccess, notification};

use super::served::{MEMORY, Model, PATIENCE, Serve, Wanted, drive_apart};
use super::{PacketLoad, PacketMeasured, Times};
use crate::block::native::Cpus;
use crate::measurement::Subject;

/// Entries of each queue.
const ENTRIES: u16 = 256;
/// The most frames that a driver gives or takes at once.
const BATCH: usize = 64;
/// Bytes in front of every frame (virtio 1.2, section 5.1.6).
const HEADER: usize = 12;
/// Bytes of a frame that the receiver reads: addresses, type, number.
const LOOKED_AT: usize = 22;
/// Turns between two looks at the clock.
const TURNS: u32 = 32;

/// A path from driver to driver: functions and switch on the target's processors, both drivers on
/// the client's.
pub struct Devices {
    cpus: Cpus,
    times: Times,
    serve: Box<Serve>,
}

impl Devices {
    /// Makes the subject, whose turns last `times`, with functions that `serve` serves.
    pub fn new(cpus: Cpus, times: Times, serve: Box<Serve>) -> Self {
        Self { cpus, times, serve }
    }

    /// Returns the MAC address of function `number`, as text.
    pub fn mac(number: u64) -> String {
        Mac::local(number).to_string()
    }
}

impl Subject for Devices {
    type Load = PacketLoad;
    type Measured = PacketMeasured;

    fn name(&self) -> &'static str {
        "virtio-net"
    }

    fn about(&self) -> String {
        "two virtio-net functions over vfio-user sockets and the switch on one processor, their \
         drivers on another"
            .to_owned()
    }

    fn takes(&self, load: &PacketLoad) -> bool {
        load.is_plain() && load.bytes <= 1518
    }

    fn run(&mut self, load: &PacketLoad) -> Result<PacketMeasured> {
        let directory = tempfile::tempdir().context("no place for sockets")?;
        let (path, cpus, times) = (directory.path(), &self.cpus, self.times);
        let wanted = Wanted { directory: path, cpus, model: Model::Virtio, source: None };
        let served = (self.serve)(&wanted)?;
        let measured = drive_apart(cpus, || drive(path, load, times));
        drop(served);
        measured
    }
}

/// A driver with memory of its own.
struct Host {
    driver: Driver<Registers>,
}

impl Host {
    fn new(socket: &Path) -> Result<Self> {
        let guest = TestGuest::new(0, MEMORY)?;
        let registers = guest.connect(socket, PATIENCE)?;
        let options = Options { entries: ENTRIES, ..Options::default() };
        Ok(Self { driver: Driver::new(registers, Arena::new(guest.memory, 0, MEMORY), options)? })
    }

    /// Publishes the buffers that were pushed, and notifies the device if it wants that.
    fn publish(&mut self, queue: u16) -> Result<()> {
        let driver = &mut self.driver;
        let ring = match queue {
            0 => &mut driver.receive[0].ring,
            _ => &mut driver.transmit[0].ring,
        };
        if ring.publish()? {
            driver.registers.post(notification(queue), &queue.to_le_bytes())?;
        }
        Ok(())
    }
}

/// The sender. Each descriptor has one buffer, which stays its own. Each frame is written anew,
/// with its number.
struct Sender {
    host: Host,
    buffers: Vec<Span>,
    free: Vec<u16>,
    bytes: Vec<u8>,
    sent: u64,
}

impl Sender {
    fn new(mut host: Host, len: usize) -> Result<Self> {
        let mut bytes = vec![0; HEADER + len];
        bytes[HEADER..HEADER + 6].copy_from_slice(&Mac::local(2).0);
        bytes[HEADER + 6..HEADER + 12].copy_from_slice(&Mac::local(1).0);
        // The type for experiments (IEEE 802, table 9-1).
        bytes[HEADER + 12..HEADER + 14].copy_from_slice(&[0x88, 0xb5]);
        let mut buffers = Vec::new();
        for index in 0..usize::from(ENTRIES) {
            let buffer = host.driver.arena.allocate_span(2048)?;
            let len = (bytes.len() as u32).to_le_bytes();
            let descriptor = [&buffer.iova().to_le_bytes()[..], &len, &[0; 4]].concat();
            host.driver.transmit[0].ring.areas()[0].write(16 * index, &descriptor)?;
            buffers.push(buffer);
        }
        Ok(Self { host, buffers, free: (0..ENTRIES).collect(), bytes, sent: 0 })
    }

    fn send(&mut self) -> Result<()> {
        let ring = &mut self.host.driver.transmit[0].ring;
        while let Some(used) = ring.pop()? {
            self.free.push(used.id);
        }
        for _ in 0..BATCH {
            let Some(id) = self.free.pop() else { break };
            let number = HEADER + LOOKED_AT - 8..HEADER + LOOKED_AT;
            self.bytes[number].copy_from_slice(&self.sent.to_le_bytes());
            let buffer = self.buffers.get(usize::from(id)).context("a buffer that there is not")?;
            buffer.write(0, &self.bytes)?;
            ring.push_head(id)?;
            self.sent += 1;
        }
        self.host.publish(1)
    }
}

/// The receiver, which reads headers only.
struct Receiver {
    host: Host,
    buffers: Vec<Span>,
    received: u64,
    /// The number of the next frame. Missing frames with lower numbers were dropped.
    due: u64,
}

impl Receiver {
    fn new(host: Host) -> Self {
        let buffers = host.driver.receive[0].places();
        Self { host, buffers, received: 0, due: 0 }
    }

    fn receive(&mut self) -> Result<()> {
        let ring = &mut self.host.driver.receive[0].ring;
        for _ in 0..BATCH {
            let Some(used) = ring.pop()? else { break };
            let mut bytes = [0; HEADER + LOOKED_AT];
            let buffer = self.buffers.get(usize::from(used.id));
            buffer.context("a buffer that there is not")?.read(0, &mut bytes)?;
            let number = bytes.last_chunk().map_or(0, |number| u64::from_le_bytes(*number));
            ensure!(number >= self.due, "frame {number} came after frame {}", self.due);
            self.due = number + 1;
            self.received += 1;
            ring.push_head(used.id)?;
        }
        self.host.publish(0)
    }
}

fn drive(
    directory: &Path,
    load: &PacketLoad,
    Times { warm_up, time }: Times,
) -> Result<PacketMeasured> {
    let mut sender = Sender::new(Host::new(&directory.join("1"))?, load.bytes as usize)?;
    let mut receiver = Receiver::new(Host::new(&directory.join("2"))?);
    let mut run = |time: Duration| -> Result<(u64, u64, Duration)> {
        let begin = Instant::now();
        while begin.elapsed() < time {
            for _ in 0..TURNS {
                sender.send()?;
                receiver.receive()?;
            }
        }
        Ok((sender.sent, receiver.received, begin.elapsed()))
    };
    let (sent_before, before, _) = run(warm_up)?;
    let (sent, delivered, elapsed) = run(time)?;
    Ok(PacketMeasured {
        sent: sent - sent_before,
        delivered: delivered - before,
        elapsed_ns: elapsed.as_nanos() as u64,
        ..PacketMeasured::default()
    })
}
