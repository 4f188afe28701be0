//! Subjects in this machine's memory alone: packet rings, and the switch between them.
//!
//! A `Source` sends, a `Quiet` is its neighbour that sends little, and `Sinks` receive on a thread
//! of their own. [`RawLink`] connects them by rings alone, and [`Switched`] by a switch. `timed`
//! measures either.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use slipway_load::Waiting;
use slipway_ring::{Consumer, Descriptor, Geometry, Link, Producer};
use slipway_switch::ports::{MemoryPort, Tell};
use slipway_switch::{Abilities, BURST, Learning, LearningOptions, Mac, PortConfig, Switch};

use super::{Neighbour, PacketLoad, PacketMeasured, Times};
use crate::block::native::{Cpus, pin};
use crate::measurement::Subject;

/// Frames of a burst at a set rate, as in *Speeding Up Packet I/O in Virtual Machines*.
const OFFERED: usize = 100;
/// Slots of rings with few ports.
const SLOTS: u32 = 512;
/// Slots of a neighbour's rings: it loses nothing while the machine does something else for 40 ms.
const QUIET_SLOTS: u32 = 4096;
/// Slots of rings with many ports: their memory is that of many small guests.
const FEW_SLOTS: u32 = 64;
/// The number of slots, and of rings, by which memory is prefetched.
const AHEAD: usize = 8;
/// Turns between two looks at the clock.
const TURNS: u32 = 32;

fn geometry(load: &PacketLoad) -> Geometry {
    let slots = if load.ports > 64 { FEW_SLOTS } else { SLOTS };
    let (slots, payload) = load.ring.unwrap_or((slots, 2048));
    Geometry { slots, payload }
}

/// Makes a frame from one station to another.
pub(super) fn frame(from: u32, to: u32, bytes: u32) -> Vec<u8> {
    let mut frame = vec![0; bytes as usize];
    frame[..6].copy_from_slice(&Mac::local(to.into()).0);
    frame[6..12].copy_from_slice(&Mac::local(from.into()).0);
    // The type for experiments (IEEE 802, table 9-1).
    frame[12..14].copy_from_slice(&0x88b5_u16.to_be_bytes());
    frame
}

/// A program that sends: it fills slots once, then publishes them again and again. With several
/// destinations it writes each frame's address.
struct Source {
    output: Producer,
    load: PacketLoad,
    begin: Instant,
    sent: u64,
}

impl Source {
    fn new(mut output: Producer, load: &PacketLoad) -> Result<Self> {
        let slots = output.free(usize::MAX)?;
        let frame = frame(0, 1, load.bytes);
        for slot in 0..slots {
            output.memory().write(output.place(slot), &frame)?;
        }
        Ok(Self { output, load: *load, begin: Instant::now(), sent: 0 })
    }

    /// Returns the frames that are due: a burst. Returns `None` before the time of the next burst.
    fn due(&self) -> Option<usize> {
        let PacketLoad { offered, neighbour, .. } = self.load;
        if offered > 0 {
            let due = self.begin.elapsed().as_secs_f64() * offered as f64 - self.sent as f64;
            return (due >= OFFERED as f64).then_some(OFFERED);
        }
        Some(if neighbour > 0 { OFFERED } else { BURST })
    }

    /// Sends as many frames as are due and fit.
    fn send(&mut self) -> Result<()> {
        let Some(due) = self.due() else { return Ok(()) };
        let count = self.output.free(due)?.min(due);
        for slot in 0..count {
            if self.load.ports > 2 {
                let row = (self.sent + slot as u64) / u64::from(self.load.row);
                let to = 1 + row % u64::from(self.load.ports - 1);
                self.output.memory().write(self.output.place(slot), &Mac::local(to).0)?;
            }
            self.output.describe(slot, Descriptor::new(self.load.bytes));
        }
        self.output.publish(count);
        self.sent += count as u64;
        Ok(())
    }
}

/// A neighbour that sends little: each frame when it is due, even if late.
struct Quiet {
    output: Producer,
    bytes: u32,
    per_second: u64,
    begin: Instant,
    due: u64,
}

impl Quiet {
    /// Makes the source of `load`'s neighbour at `output`, for the station `to`.
    fn new(output: Producer, load: &PacketLoad, to: u32) -> Result<Self> {
        let mut quiet = Self {
            output,
            bytes: load.bytes,
            per_second: load.neighbour,
            begin: Instant::now(),
            due: 0,
        };
        let frame = frame(to - 1, to, load.bytes);
        let slots = quiet.output.free(usize::MAX)?;
        for slot in 0..slots {
            quiet.output.memory().write(quiet.output.place(slot), &frame)?;
        }
        Ok(quiet)
    }

    /// Sends the frames that are due. Frames without room in the ring are lost and count as due.
    fn send(&mut self) -> Result<()> {
        let due = (self.begin.elapsed().as_secs_f64() * self.per_second as f64) as u64;
        let wanted = (due - self.due) as usize;
        let count = self.output.free(wanted)?.min(wanted);
        for slot in 0..count {
            self.output.describe(slot, Descriptor::new(self.bytes));
        }
        self.output.publish(count);
        self.due = due;
        Ok(())
    }
}

/// The frames that sinks received.
#[derive(Default)]
struct Counts {
    /// The frames that all sinks have received.
    all: AtomicU64,
    /// The frames of the last sink, which is the neighbour's if there is one.
    last: AtomicU64,
}

/// Sinks on a thread of their own, which read headers only.
struct Sinks {
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    thread: Option<std::thread::JoinHandle<Result<()>>>,
    /// They use no processor of the source's.
    are_apart: bool,
}

impl Sinks {
    fn start(inputs: Vec<Consumer>, cpus: &Cpus) -> Self {
        let (stop, counts) = (Arc::new(AtomicBool::new(false)), Arc::<Counts>::default());
        let (until, its) = (Arc::clone(&stop), Arc::clone(&counts));
        let (client, are_apart) = (cpus.client.clone(), cpus.are_enough(1));
        let thread = std::thread::spawn(move || {
            pin(&client)?;
            drain(inputs, &until, &its)
        });
        Self { stop, counts, thread: Some(thread), are_apart }
    }

    /// Waits until frames in flight have arrived, or had the time to.
    fn settle(&self) {
        std::thread::sleep(Duration::from_millis(5));
    }

    fn count(&self) -> u64 {
        self.counts.all.load(Ordering::Relaxed)
    }

    fn count_of_last(&self) -> u64 {
        self.counts.last.load(Ordering::Relaxed)
    }

    fn finish(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.take().map(std::thread::JoinHandle::join) {
            Some(Ok(result)) => result,
            _ => anyhow::bail!("the sinks' thread panicked"),
        }
    }
}

impl Drop for Sinks {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Takes the frames of all sinks until it is to stop.
fn drain(mut inputs: Vec<Consumer>, stop: &AtomicBool, counts: &Counts) -> Result<()> {
    let (mut sum, mut all, mut of_last) = (0, 0, 0);
    let end = inputs.len() - 1;
    while !stop.load(Ordering::Relaxed) {
        for at in 0..inputs.len() {
            fetch_ahead(&mut inputs, at)?;
            let taken = take(&mut inputs[at], &mut sum)? as u64;
            all += taken;
            of_last += if at == end { taken } else { 0 };
        }
        counts.all.store(all, Ordering::Relaxed);
        counts.last.store(of_last, Ordering::Relaxed);
    }
    std::hint::black_box(sum);
    Ok(())
}

/// Prefetches for the sinks whose turns follow that of sink `at`. A real program has one port; this
/// one stands for as many programs as there are ports.
#[inline]
fn fetch_ahead(inputs: &mut [Consumer], at: usize) -> Result<()> {
    if let Some(later) = inputs.get(at + 2 * AHEAD) {
        later.fetch_next();
    }
    // Slots that were not written are left alone, since their cache lines are the producer's.
    if let Some(soon) = inputs.get_mut(at + AHEAD)
        && soon.available(1)? > 0
    {
        soon.fetch(0);
    }
    Ok(())
}

/// Takes all frames of a sink, and adds what it read of them to `sum`. Returns how many there were.
#[inline]
fn take(input: &mut Consumer, sum: &mut u64) -> Result<usize> {
    let there = input.available(1)?;
    for slot in 1..there.min(AHEAD) {
        input.fetch(slot);
    }
    for slot in 0..there {
        if slot + AHEAD < there {
            input.fetch(slot + AHEAD);
        }
        let mut header = [0; 14];
        input.read(slot, &mut header);
        let read = u64::from(header[5]) + input.descriptor(slot).len() as u64;
        *sum = sum.wrapping_add(read);
    }
    input.release(there);
    Ok(there)
}

/// Runs `turn` for `warm_up`, then for `time`. Returns the frames sent and received in the latter.
/// The calling thread has a processor of its own if the sinks are not on it.
fn timed(
    sinks: &Sinks,
    Times { warm_up, time }: Times,
    mut turn: impl FnMut() -> Result<u64>,
) -> Result<PacketMeasured> {
    let mut run = |time: Duration| {
        let (begin, mut sent) = (Instant::now(), 0);
        while begin.elapsed() < time {
            for _ in 0..TURNS {
                sent = turn()?;
            }
        }
        anyhow::Ok((sent, begin.elapsed()))
    };
    let (before, _) = run(warm_up)?;
    let (waiting, delivered) = (Waiting::begin(), sinks.count());
    let (sent, elapsed) = run(time)?;
    let elapsed_ns = elapsed.as_nanos() as u64;
    Ok(PacketMeasured {
        sent: sent - before,
        delivered: sinks.count() - delivered,
        elapsed_ns,
        waited_ns: waiting.scaled_to(elapsed_ns).filter(|_| sinks.are_apart),
        ..PacketMeasured::default()
    })
}

/// Links of packet rings without a switch: frames are only copied into them.
pub struct RawLink(pub Cpus, pub Times);

impl Subject for RawLink {
    type Load = PacketLoad;
    type Measured = PacketMeasured;

    fn name(&self) -> &'static str {
        "link"
    }

    fn about(&self) -> String {
        "rings in shared memory without a switch: the floor".to_owned()
    }

    fn takes(&self, load: &PacketLoad) -> bool {
        (load.offered, load.neighbour, load.window) == (0, 0, 0)
    }

    fn run(&mut self, load: &PacketLoad) -> Result<PacketMeasured> {
        let (mut outputs, mut inputs) = (Vec::new(), Vec::new());
        for _ in 1..load.ports {
            let link = Link::new(geometry(load)).context("memory for the rings")?;
            outputs.push(link.server().1);
            inputs.push(link.peer().0);
        }
        let sinks = Sinks::start(inputs, &self.0);
        pin(&self.0.target)?;
        let row = if load.ports == 2 { BURST } else { (load.row as usize).min(BURST) };
        let frame = frame(0, 1, load.bytes);
        let (mut at, mut sent) = (0, 0);
        let measured = timed(&sinks, self.1, || {
            // A burst is less by what remains of a row: what is sent is counted.
            for _ in 0..BURST / row {
                if outputs.len() > AHEAD {
                    outputs[(at + AHEAD) % outputs.len()].fetch_next(row.min(AHEAD));
                }
                sent += fill(&mut outputs[at], &frame, row)?;
                at = (at + 1) % outputs.len();
            }
            Ok(sent)
        })?;
        sinks.finish()?;
        Ok(measured)
    }
}

/// Writes up to `count` copies of a frame into a ring. Returns how many.
fn fill(output: &mut Producer, frame: &[u8], count: usize) -> Result<u64> {
    let count = output.free(count)?.min(count);
    for slot in 0..count {
        if slot + AHEAD < count {
            output.fetch(slot + AHEAD);
        }
        output.write(slot, frame);
        output.describe(slot, Descriptor::new(frame.len() as u32));
    }
    output.publish(count);
    Ok(count as u64)
}

/// The switch, with a program that sends at one of its memory ports and sinks at all others.
pub struct Switched(pub Cpus, pub Times);

impl Subject for Switched {
    type Load = PacketLoad;
    type Measured = PacketMeasured;

    fn name(&self) -> &'static str {
        "switch"
    }

    fn about(&self) -> String {
        "Slipway's switch between memory ports, sharing a processor with the source".to_owned()
    }

    fn takes(&self, load: &PacketLoad) -> bool {
        load.window == 0
    }

    fn run(&mut self, load: &PacketLoad) -> Result<PacketMeasured> {
        // Any number will do, since no frames are hostile here.
        let table = Learning::new(LearningOptions::default(), 0x9e37_79b9_7f4a_7c15);
        let mut switch = Switch::new(Box::new(table));
        let mut peers = Vec::new();
        for number in 0..load.ports {
            peers.push(attach(&mut switch, number, &geometry(load))?);
        }
        // A neighbour's two ports are the last.
        let quiet = match load.neighbour {
            0 => None,
            _ => {
                let geometry = Geometry { slots: QUIET_SLOTS, ..geometry(load) };
                let (_, output) = attach(&mut switch, load.ports, &geometry)?;
                peers.push(attach(&mut switch, load.ports + 1, &geometry)?);
                Some(Quiet::new(output, load, load.ports + 1)?)
            }
        };
        let (_, output) = peers.remove(0);
        let inputs = peers.into_iter().map(|(input, _)| input).collect();
        let sinks = Sinks::start(inputs, &self.0);
        pin(&self.0.target)?;
        let source = Source::new(output, load)?;
        let measured = match quiet {
            None => alone(&mut switch, source, &sinks, self.1)?,
            Some(quiet) => beside(&mut switch, (source, quiet), &sinks, self.1)?,
        };
        sinks.finish()?;
        Ok(measured)
    }
}

/// Measures a source whose port was attached first.
fn alone(
    switch: &mut Switch,
    mut source: Source,
    sinks: &Sinks,
    times: Times,
) -> Result<PacketMeasured> {
    timed(sinks, times, || {
        source.send()?;
        let _ = switch.turn(0, BURST, Duration::ZERO);
        Ok(source.sent)
    })
}

/// Measures a source beside a neighbour, whose port has every second turn, as ports have in a
/// switch's task.
fn beside(
    switch: &mut Switch,
    (mut source, mut quiet): (Source, Quiet),
    sinks: &Sinks,
    Times { warm_up, time }: Times,
) -> Result<PacketMeasured> {
    let own = source.load.ports as slipway_switch::PortIndex;
    let mut turns = |time| {
        // Frames that were due before the turns began are not counted as lost.
        (quiet.begin, quiet.due) = (Instant::now(), 0);
        timed(sinks, Times { warm_up: Duration::ZERO, time }, || {
            source.send()?;
            let _ = switch.turn(0, BURST, Duration::ZERO);
            quiet.send()?;
            let _ = switch.turn(own, BURST, Duration::ZERO);
            Ok(source.sent)
        })
        .map(|measured| (measured, quiet.due))
    };
    turns(warm_up)?;
    sinks.settle();
    let before = sinks.count_of_last();
    let (mut measured, due) = turns(time)?;
    sinks.settle();
    let delivered = sinks.count_of_last() - before;
    measured.neighbour = Some(Neighbour { offered: due, delivered });
    measured.delivered = measured.delivered.saturating_sub(delivered);
    Ok(measured)
}

fn attach(switch: &mut Switch, number: u32, geometry: &Geometry) -> Result<(Consumer, Producer)> {
    let link = Link::new(*geometry).context("memory for the rings")?;
    let port = MemoryPort::new(&link, Tell::new()?, Abilities::NONE);
    let config = PortConfig { mac: Some(Mac::local(number.into())), ..PortConfig::default() };
    switch.attach(Box::new(port), config).map_err(|(error, _)| error)?;
    Ok(link.peer())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::PacketSubject;

    /// Makes a subject whose turns last so long.
    type Make = fn(Cpus, Times) -> Box<PacketSubject>;

    /// Runs a load until frames of all kinds have arrived, for longer each time: a busy machine may
    /// carry none in a short time. Returns the result, and how long the last run took in all.
    fn carry(make: Make, cpus: &Cpus, load: &PacketLoad) -> (PacketMeasured, Duration) {
        let mut time = Duration::from_millis(100);
        loop {
            let begin = Instant::now();
            let mut subject = make(cpus.clone(), Times { warm_up: time / 5, time });
            let measured = subject.run(load).unwrap();
            let quiet = measured.neighbour.map(|one| one.offered.min(one.delivered));
            let carried = measured.sent > 0 && measured.delivered > 0 && quiet != Some(0);
            if carried || time > Duration::from_secs(10) {
                assert!(carried, "{load}: {measured:?}");
                return (measured, begin.elapsed());
            }
            time *= 2;
        }
    }

    #[test]
    fn every_load_is_carried() {
        let cpus = Cpus::split(1).unwrap();
        for load in ["64b-p2", "1500b-p2", "64b-p100-r8", "64b-p2-o100k", "64b-p2-n10k"] {
            let load: PacketLoad = load.parse().unwrap();
            let both: [Make; 2] = [
                |cpus, times| Box::new(RawLink(cpus, times)),
                |cpus, times| Box::new(Switched(cpus, times)),
            ];
            for make in both {
                let times = Times { warm_up: Duration::ZERO, time: Duration::ZERO };
                if make(cpus.clone(), times).takes(&load) {
                    let (measured, took) = carry(make, &cpus, &load);
                    assert_eq!(measured.neighbour.is_some(), load.neighbour > 0);
                    let most = took.as_secs_f64() * load.offered as f64;
                    assert!(load.offered == 0 || measured.sent as f64 <= most, "{measured:?}");
                }
            }
        }
    }
}
