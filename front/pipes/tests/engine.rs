//! A small but complete engine: sockets of several tenants, each with a chain of two pipes (seal,
//! open) and a ring between them, on executors that share a core. The scheduler picks the next
//! socket. Runs in virtual time.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use slipway_pipes::{
    Completion, Core, Executor, Fifo, Input, Job, Options, Output, Pipe, Rule, Simulated, Sink,
    Sizes, Source, Work, records,
};
use slipway_telemetry::{Clock, ManualClock};
use slipway_warp::share::{ChainId, ExecutorId, Scheduler, TenantId, TenantOptions, Ticket};
use slipway_warp::{Cipher, Class, Header, Opener, Sealer, Secret};

/// The largest payload of a record.
const RECORD: usize = 4096;

struct Socket {
    chain: ChainId,
    tenant: usize,
    /// The rings from the application, between the stages, and to the application.
    rings: [Fifo; 3],
    pipes: [Pipe; 2],
    given: u64,
    got: u64,
    /// The socket is queued, or an executor has its job.
    busy: bool,
}

/// Returns the byte at `at` of a socket's stream.
fn byte(socket: usize, at: u64) -> u8 {
    (at * 31 + at / 251 + socket as u64 * 7) as u8
}

impl Socket {
    /// The application sends as much as it can, and reads and checks all bytes that have arrived.
    fn application(&mut self, number: usize) {
        let room = self.rings[0].writable().unwrap();
        let bytes: Vec<u8> =
            (0..room.length() as u64).map(|n| byte(number, self.given + n)).collect();
        Output::Ring(Sink::memory(&self.rings[0]), room).write(&bytes).unwrap();
        self.rings[0].produce(bytes.len());
        self.given += bytes.len() as u64;
        let there = self.rings[2].readable().unwrap();
        let mut bytes = vec![0; there.length()];
        Input::Ring(Source::memory(&self.rings[2]), there).read(&mut bytes).unwrap();
        for read in bytes {
            assert_eq!(read, byte(number, self.got), "socket {number}, byte {}", self.got);
            self.got += 1;
        }
        self.rings[2].consume(there.length());
    }

    /// Returns the pipe's next job at a stage.
    fn job(&mut self, stage: usize, needs: slipway_pipes::Needs) -> Option<Job> {
        let [first, middle, last] = &mut self.rings;
        let (source, sink) = if stage == 0 { (first, middle) } else { (middle, last) };
        if stage == 1 {
            let there = source.readable().unwrap().first(24);
            let mut head = vec![0; there.length()];
            Input::Ring(Source::memory(source), there).read(&mut head).unwrap();
            let header = Header::parse(&head).unwrap()?;
            let sizes = Sizes::Whole { input: header.record(), output: header.payload };
            self.pipes[1].set_rule(Rule { sizes, needs, least: 1 });
        }
        let mut jobs = Vec::new();
        self.pipes[stage].generate(0, source, sink, 1, &mut jobs).unwrap();
        jobs.pop()
    }

    fn completed(&mut self, stage: usize, completion: &Completion) {
        let [first, middle, last] = &mut self.rings;
        let (source, sink) = if stage == 0 { (first, middle) } else { (middle, last) };
        self.pipes[stage].completed(completion, source, sink).unwrap();
    }
}

struct Engine {
    clock: ManualClock,
    scheduler: Scheduler<usize>,
    core: slipway_warp::share::ResourceId,
    executors: [Simulated<Core>; 2],
    ids: [ExecutorId; 2],
    tenants: Vec<TenantId>,
    sockets: Vec<Socket>,
}

impl Engine {
    /// Creates an engine whose tenants have as many sockets as `counts` says.
    fn new(counts: &[usize]) -> Self {
        let clock = ManualClock::new();
        let mut scheduler = Scheduler::new();
        let core = scheduler.add_resource("core 0", 1);
        let ids = [
            scheduler.add_executor("seal", Class::I, core, 1_000_000),
            scheduler.add_executor("open", Class::L, core, 1_000_000),
        ];
        let simulated = |rate| {
            let inner = Core::new(Class::L, Arc::new(clock.clone()));
            Simulated::new(inner, Class::L, rate, 1, Arc::new(clock.clone()))
        };
        let executors = [simulated(200_000_000), simulated(100_000_000)];
        let tenants =
            counts.iter().map(|_| scheduler.add_tenant(TenantOptions::default()).unwrap());
        let tenants: Vec<_> = tenants.collect();
        let mut engine =
            Self { clock, scheduler, core, executors, ids, tenants, sockets: Vec::new() };
        for (tenant, count) in counts.iter().enumerate() {
            (0..*count).for_each(|_| engine.connect(tenant));
        }
        engine
    }

    fn connect(&mut self, tenant: usize) {
        let number = self.sockets.len();
        let secret = Secret::derive(b"an engine's master secret", &[&number.to_le_bytes()]);
        let sealing = self.executors[0].inner().add_sealer(Sealer::new(Cipher::Aes128Gcm, &secret));
        let opening = self.executors[1].inner().add_opener(Opener::new(Cipher::Aes128Gcm, &secret));
        let options = Options::default();
        let rule = records(RECORD, 512, true, options, self.executors[0].needs());
        let pipes = [
            Pipe::new(Work::Seal(Some(sealing), options), rule),
            Pipe::new(Work::Open(Some(opening)), rule),
        ];
        let chain = self.scheduler.open(self.tenants[tenant], &self.ids).unwrap();
        let rings = [Fifo::new(16_384), Fifo::new(16_384), Fifo::new(8192)];
        self.sockets.push(Socket { chain, tenant, rings, pipes, given: 0, got: 0, busy: false });
    }

    /// Runs one turn: all applications, then one job.
    fn turn(&mut self) {
        for (number, socket) in self.sockets.iter_mut().enumerate() {
            socket.application(number);
            if !std::mem::replace(&mut socket.busy, true) {
                self.scheduler.push(socket.chain, RECORD as u64, number).unwrap();
            }
        }
        let now = self.clock.now();
        let ticket = self.scheduler.next(self.core, now).expect("there is always something to do");
        let stage = usize::from(ticket.executor == self.ids[1]);
        let (executor, socket) = (&mut self.executors[stage], &mut self.sockets[ticket.item]);
        let job = socket.job(stage, executor.needs()).expect("the rings have room");
        let mut ended = Vec::new();
        executor.submit(&mut VecDeque::from([job]), &mut ended);
        self.clock.advance(executor.due().unwrap().saturating_sub(now));
        executor.poll(&mut ended);
        let completion = ended.pop().expect("it is due");
        socket.completed(stage, &completion);
        self.give_back(ticket, &completion);
    }

    fn give_back(&mut self, ticket: Ticket<usize>, completion: &Completion) {
        let bytes = completion.result.unwrap().produced as u64;
        let now = self.clock.now();
        if let Some(socket) = self.scheduler.done(ticket, bytes, completion.busy, now) {
            self.sockets[socket].busy = false;
        }
    }
}

#[test]
fn every_stream_arrives_whole_and_tenants_share_the_core_whatever_their_number_of_sockets() {
    let counts = [1, 3, 12];
    let mut engine = Engine::new(&counts);
    while engine.clock.now() < Duration::from_millis(400) {
        engine.turn();
    }
    let mut bytes = [0; 3];
    engine.sockets.iter().for_each(|socket| bytes[socket.tenant] += socket.got);
    // 1/200 + 1/100 of a second for each million bytes: 66.7 MB/s in all, 22.2 MB/s for each
    // tenant.
    for (tenant, bytes) in bytes.into_iter().enumerate() {
        let rate = bytes as f64 / 0.4;
        assert!((rate / 22.2e6 - 1.0).abs() < 0.05, "tenant {tenant}: {rate}");
    }
    assert!(engine.sockets.iter().all(|socket| socket.got > 100_000));
}
