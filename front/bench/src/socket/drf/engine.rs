//! A small engine in real time: streams of tenants, a pipe for each stage of a stream, and
//! executors.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use slipway_pipes::{
    BrokenFifo, Completion, Core, Executor, Fifo, Input, Job, Needs, Options, Output, Pipe, Rule,
    Simulated, Sink, Sizes, Source, Stretch, records,
};
use slipway_telemetry::{Clock, MonotonicClock};
use slipway_warp::share::{ChainId, ResourceId, Scheduler, TenantOptions, Ticket};
use slipway_warp::{Cipher, Class, Header, Opener, Sealer, Secret, record};

use super::mix::JOB;
use super::{DrfTenant, Mix, Work};

/// Seconds of work that an executor is given in advance, so that it stays busy while the machine
/// runs other things.
const AHEAD: f64 = 0.004;
/// The fewest and the most jobs that an executor is given.
const DEPTH: (usize, usize) = (4, 24);
/// Bytes of a ring between two stages: more than a chain ever has there.
const RING: usize = 1 << 20;
/// Bytes after which a stream's pattern repeats. It is no power of two, so that misplaced bytes are
/// detected.
const PERIOD: usize = 8191;

/// The front of a FIFO: its first bytes, up to a number.
struct First<'a>(&'a mut Fifo, usize);

impl Source for First<'_> {
    fn memory(&self) -> &slipway_ram::Span {
        Source::memory(self.0)
    }

    fn readable(&mut self) -> Result<Stretch, BrokenFifo> {
        Ok(self.0.readable()?.first(self.1))
    }

    fn consume(&mut self, bytes: usize) {
        self.0.consume(bytes);
    }
}

struct Stream {
    tenant: usize,
    chain: ChainId,
    /// The rings: from the application, between the stages, to the application.
    rings: Vec<Fifo>,
    pipes: Vec<Pipe>,
    /// Bytes that executors are working on, by stage.
    lent: Vec<usize>,
    /// Opens records, if the first stage seals.
    opener: Option<Opener>,
    given: usize,
    got: usize,
    buffer: Vec<u8>,
}

/// A scheduler's job in flight at an executor, in pieces.
struct Flight {
    ticket: Ticket<usize>,
    pieces: usize,
    produced: usize,
    busy: Duration,
}

struct QueuePlace {
    resource: ResourceId,
    simulated: Simulated<Core>,
    flights: VecDeque<Flight>,
}

pub struct Engine {
    clock: Arc<MonotonicClock>,
    scheduler: Scheduler<usize>,
    places: Vec<QueuePlace>,
    streams: Vec<Stream>,
    tenants: Vec<DrfTenant>,
    /// Bytes that applications received, by tenant.
    got: Vec<u64>,
    pattern: Vec<u8>,
    jobs: VecDeque<Job>,
    ended: Vec<Completion>,
}

impl Engine {
    pub fn new(mix: &Mix) -> Result<Self> {
        let clock = Arc::new(MonotonicClock::new());
        let mut scheduler = Scheduler::new();
        let mut places = Vec::new();
        let mut ids = Vec::new();
        for executor in &mix.executors {
            let depth = ((executor.capacity * AHEAD) as usize / JOB).clamp(DEPTH.0, DEPTH.1);
            let resource = scheduler.add_resource(&executor.name, depth);
            // The estimate of the rate is wrong for all executors at first: the scheduler measures
            // it.
            ids.push(scheduler.add_executor(&executor.name, Class::L, resource, 250_000_000));
            let (core, rate) = (Core::new(Class::L, clock.clone()), executor.capacity as u64);
            // A job is cut into up to three pieces at the ends of rings.
            let simulated = Simulated::new(core, Class::L, rate, 3 * depth, clock.clone());
            places.push(QueuePlace { resource, simulated, flights: VecDeque::new() });
        }
        let mut streams = Vec::new();
        for (number, tenant) in mix.tenants.iter().enumerate() {
            let options = TenantOptions { weight: tenant.weight, cap: None };
            let id = scheduler.add_tenant(options)?;
            let executors: Vec<_> = tenant.executors.iter().map(|at| ids[*at]).collect();
            for _ in 0..tenant.streams {
                let chain = scheduler.open(id, &executors)?;
                let seed = streams.len() as u64;
                streams.push(Stream::new(number, chain, tenant, mix, &mut places, seed));
            }
        }
        let pattern = (0..PERIOD + JOB).map(|at| (at % PERIOD * 131 / 7) as u8).collect();
        let (tenants, got) = (mix.tenants.clone(), vec![0; mix.tenants.len()]);
        let (jobs, ended) = (VecDeque::new(), Vec::new());
        let mut engine =
            Self { clock, scheduler, places, streams, tenants, got, pattern, jobs, ended };
        (0..engine.streams.len()).try_for_each(|stream| engine.top_up(stream))?;
        Ok(engine)
    }

    /// Returns the bytes per second that each tenant's applications received in `time`, after
    /// `warm_up`.
    pub fn run(&mut self, warm_up: Duration, time: Duration) -> Result<Vec<f64>> {
        self.go_on(warm_up)?;
        let (before, began) = (self.got.clone(), self.clock.now());
        self.go_on(time)?;
        let seconds = (self.clock.now() - began).as_secs_f64();
        let rates =
            self.got.iter().zip(before).map(|(got, before)| (got - before) as f64 / seconds);
        Ok(rates.collect())
    }

    fn go_on(&mut self, time: Duration) -> Result<()> {
        let end = self.clock.now() + time;
        loop {
            self.hand_out()?;
            let now = self.clock.now();
            if now >= end {
                return Ok(());
            }
            let next = self.places.iter().filter_map(|place| place.simulated.due()).min();
            let next = next.context("nobody has anything to do")?;
            if next > now {
                std::thread::sleep((next - now).min(end.saturating_sub(now)));
            }
            self.take_back()?;
        }
    }

    /// Writes as the application does, and queues as many jobs as the tenant keeps waiting.
    fn top_up(&mut self, number: usize) -> Result<()> {
        let stream = &mut self.streams[number];
        let queued = self.tenants[stream.tenant].queued;
        while self.scheduler.waiting(stream.chain) < queued {
            let room = stream.rings[0].writable()?;
            ensure!(room.length() >= JOB, "a ring is full");
            let bytes = &self.pattern[stream.given % PERIOD..][..JOB];
            let mut output = Output::Ring(Sink::memory(&stream.rings[0]), room.first(JOB));
            output.write(bytes)?;
            stream.rings[0].produce(JOB);
            stream.given += JOB;
            self.scheduler.push(stream.chain, JOB as u64, number)?;
        }
        Ok(())
    }

    /// Gives every executor as many jobs as it takes.
    fn hand_out(&mut self) -> Result<()> {
        let now = self.clock.now();
        for at in 0..self.places.len() {
            while let Some(ticket) = self.scheduler.next(self.places[at].resource, now) {
                self.start(at, ticket)?;
            }
        }
        Ok(())
    }

    fn start(&mut self, at: usize, ticket: Ticket<usize>) -> Result<()> {
        let number = ticket.item;
        let stream = &mut self.streams[number];
        let stage = self.tenants[stream.tenant].executors.iter().position(|one| *one == at);
        let stage = stage.context("a job at an executor that its tenant does not use")?;
        let (before, after) = stream.rings.split_at_mut(stage + 1);
        let (source, sink) = (&mut before[stage], &mut after[0]);
        let bytes = ticket.bytes as usize;
        let mut first = First(source, stream.lent[stage] + bytes);
        let pieces = stream.pipes[stage].generate(0, &mut first, sink, 3, &mut self.jobs)?;
        let cut: usize = self.jobs.iter().map(|job| job.source.length()).sum();
        ensure!(cut == bytes, "a job of {bytes} bytes was cut into pieces of {cut}");
        stream.lent[stage] += bytes;
        let place = &mut self.places[at];
        place.simulated.submit(&mut self.jobs, &mut self.ended);
        ensure!(self.jobs.is_empty(), "an executor takes no more");
        place.flights.push_back(Flight { ticket, pieces, produced: 0, busy: Duration::ZERO });
        if stage == 0 {
            self.top_up(number)?;
        }
        Ok(())
    }

    fn take_back(&mut self) -> Result<()> {
        let now = self.clock.now();
        for at in 0..self.places.len() {
            let mut ended = std::mem::take(&mut self.ended);
            self.places[at].simulated.poll(&mut ended);
            for completion in ended.drain(..) {
                self.end(at, &completion, now)?;
            }
            self.ended = ended;
        }
        Ok(())
    }

    fn end(&mut self, at: usize, completion: &Completion, now: Duration) -> Result<()> {
        let flights = &mut self.places[at].flights;
        let flight = flights.front_mut().context("an end without a beginning")?;
        let stream = &mut self.streams[flight.ticket.item];
        let stage = self.tenants[stream.tenant].executors.iter().position(|one| *one == at);
        let stage = stage.context("a job at an executor that its tenant does not use")?;
        let (before, after) = stream.rings.split_at_mut(stage + 1);
        stream.lent[stage] -= completion.job.source.length();
        stream.pipes[stage].completed(completion, &mut before[stage], &mut after[0])?;
        flight.produced += completion.result?.produced;
        flight.busy += completion.busy;
        flight.pieces -= 1;
        if flight.pieces > 0 {
            return Ok(());
        }
        let Some(Flight { ticket, produced, busy, .. }) = flights.pop_front() else {
            return Ok(());
        };
        if let Some(number) = self.scheduler.done(ticket, produced as u64, busy, now) {
            let stream = &mut self.streams[number];
            self.got[stream.tenant] += stream.arrived(&self.pattern)? as u64;
        }
        Ok(())
    }
}

impl Stream {
    fn new(
        tenant: usize,
        chain: ChainId,
        of: &DrfTenant,
        mix: &Mix,
        places: &mut [QueuePlace],
        seed: u64,
    ) -> Self {
        // Simulated executors use a core, which accepts both parts of a wrapped ring.
        let (needs, options) = (Needs::default(), Options::default());
        let same = Rule { sizes: Sizes::Same, needs, least: 1 };
        let secret = Secret::derive(b"a bench of shares", &[&seed.to_le_bytes()]);
        let mut opener = None;
        let pipes = of.executors.iter().map(|at| match mix.executors[*at].work {
            Work::Copy => Pipe::new(slipway_pipes::Work::Copy, same),
            Work::Check => Pipe::new(slipway_pipes::Work::CopyChecked, same),
            Work::Seal => {
                opener = Some(Opener::new(Cipher::Aes128Gcm, &secret));
                let core = places[*at].simulated.inner();
                let key = core.add_sealer(Sealer::new(Cipher::Aes128Gcm, &secret));
                let rule = records(JOB, 512, true, options, needs);
                Pipe::new(slipway_pipes::Work::Seal(Some(key), options), rule)
            }
        });
        let pipes: Vec<Pipe> = pipes.collect();
        let rings = (0..=pipes.len()).map(|_| Fifo::new(RING)).collect();
        let (lent, buffer) = (vec![0; pipes.len()], Vec::new());
        Self { tenant, chain, rings, pipes, lent, opener, given: 0, got: 0, buffer }
    }

    /// Reads and checks all that has arrived, as the application does. Returns the number of
    /// payload bytes.
    fn arrived(&mut self, pattern: &[u8]) -> Result<usize> {
        let ring = self.rings.last_mut().context("a stream without rings")?;
        let there = ring.readable()?;
        let held = self.buffer.len();
        self.buffer.resize(held + there.length(), 0);
        Input::Ring(Source::memory(ring), there).read(&mut self.buffer[held..])?;
        ring.consume(there.length());
        let before = self.got;
        let Some(opener) = &mut self.opener else {
            check(pattern, &mut self.got, &self.buffer)?;
            self.buffer.clear();
            return Ok(self.got - before);
        };
        let mut at = 0;
        while let Some(header) = Header::parse(&self.buffer[at..])? {
            let Some(whole) = self.buffer.get_mut(at..at + header.record()) else { break };
            check(pattern, &mut self.got, record::open(opener, whole)?)?;
            at += header.record();
        }
        self.buffer.drain(..at);
        Ok(self.got - before)
    }
}

/// Checks that `bytes` are those of the stream from `got` on.
fn check(pattern: &[u8], got: &mut usize, bytes: &[u8]) -> Result<()> {
    for part in bytes.chunks(JOB) {
        ensure!(part == &pattern[*got % PERIOD..][..part.len()], "a wrong byte after {got}");
        *got += part.len();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the slides' example with real bytes in real time. It checks a ratio, which holds on a
    /// loaded machine, too.
    #[test]
    fn the_example_of_the_slides_has_its_ratio() {
        let mut engine = Engine::new(&Mix::talk()).unwrap();
        let (warm_up, time) = (Duration::from_millis(300), Duration::from_millis(700));
        let rates = engine.run(warm_up, time).unwrap();
        let part = rates[0] / (rates[0] + rates[1]);
        println!("A {:.2}, B {:.2}: A has {part:.3}", rates[0] / 1e6, rates[1] / 1e6);
        assert!((part / 0.375 - 1.0).abs() < 0.1, "{rates:?}");
    }

    #[test]
    fn a_byte_out_of_place_is_seen() {
        let engine = Engine::new(&Mix::talk()).unwrap();
        let good = engine.pattern[..JOB].to_vec();
        assert!(check(&engine.pattern, &mut 0, &good).is_ok());
        let mut bad = good.clone();
        bad[100] ^= 1;
        assert!(check(&engine.pattern, &mut 0, &bad).is_err());
        assert!(check(&engine.pattern, &mut 1, &good).is_err(), "one byte is missing");
    }
}
