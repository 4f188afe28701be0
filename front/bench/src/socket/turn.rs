//! Runs one turn: two programs, a load between them, and its cost.

use std::process::Stdio;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::board::{Board, Phase};
use super::cost::{Cost, softirq_threads, used};
use super::peer::{PeerResult, PeerSpec, Role};
use super::{SocketLoad, SocketMeasured, Traffic, Way};
use crate::Times;
use crate::packet::process::Running;

/// The longest time that a program may take to begin or to end, with a second more for each
/// thousand sockets: longer than a busy machine stands still.
const PATIENCE: Duration = Duration::from_secs(60);

/// One of the two programs of a load.
struct Program {
    running: Running,
    lines: Receiver<String>,
    patience: Duration,
}

impl Program {
    fn start(way: &Way, spec: &PeerSpec) -> Result<Self> {
        let mut command = way.command(spec)?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut running = Running::start(&mut command)?;
        let lines = running.lines();
        let patience = PATIENCE + Duration::from_secs(u64::from(spec.load.sockets) / 1000);
        Ok(Self { running, lines, patience })
    }

    /// Waits for the program's next line. Fails unless it begins with `word`, and returns the rest.
    fn hear(&self, word: &str) -> Result<String> {
        let line = self.lines.recv_timeout(self.patience);
        let line = line.with_context(|| format!("a load's program does not say \"{word}\""))?;
        match line.strip_prefix(word) {
            Some(rest) => Ok(rest.trim().to_owned()),
            None => bail!("a load's program says \"{line}\" and not \"{word}\""),
        }
    }
}

/// The two programs of a load, or of a part of it, and their shared page.
struct Pair {
    board: Board,
    client: Program,
    server: Program,
}

impl Pair {
    /// Starts both programs, and waits until the server listens.
    fn start(way: &Way, load: &SocketLoad) -> Result<Self> {
        let board = Board::create()?;
        let spec = |role, ports| PeerSpec {
            role,
            load: *load,
            address: way.net.address(),
            ports,
            board: board.path(),
            cpus: match role {
                Role::Server => way.cpus.target.clone(),
                Role::Client => way.cpus.client.clone(),
            },
            tls: way.tls.as_ref().map(super::Certificate::path),
            past_the_kernel: way.engines.is_some(),
        };
        let server = Program::start(way, &spec(Role::Server, Vec::new()))?;
        let ports = server.hear("listening")?;
        let ports: Result<Vec<u16>, _> = ports.split(',').map(str::parse).collect();
        let client =
            Program::start(way, &spec(Role::Client, ports.context("the server's ports")?))?;
        client.hear("ready")?;
        Ok(Self { board, client, server })
    }

    fn connect(&mut self) -> Result<()> {
        self.client.running.tell("connect")?;
        self.client.hear("connected")?;
        self.server.hear("accepted").map(drop)
    }

    /// Ends the load. Returns the client's result.
    fn end(&mut self) -> Result<PeerResult> {
        self.board.ask(Phase::Over);
        self.client.running.end_input();
        Ok(serde_json::from_str(&self.client.hear("")?)?)
    }

    fn finish(self) -> Result<()> {
        [self.client, self.server]
            .into_iter()
            .try_for_each(|mut program| program.running.finish(Instant::now() + program.patience))
    }
}

/// The most idle sockets of one program: the limit of open files is 20,000 on many machines, and a
/// socket may take two.
const SOCKETS_OF_A_PROGRAM: u32 = 8000;

/// Splits a load with more sockets than one program may have.
fn parts(load: &SocketLoad) -> Vec<SocketLoad> {
    if load.traffic != Traffic::Idle {
        return vec![*load];
    }
    let count = load.sockets.div_ceil(SOCKETS_OF_A_PROGRAM);
    let sockets = |part| (load.sockets + part) / count;
    (0..count).map(|part| SocketLoad { sockets: sockets(part), ..*load }).collect()
}

/// Runs `load` over `way`, for as long as the way's times say.
///
/// # Errors
/// An obstacle, with a hint at the remedy.
pub fn turn(way: &Way, load: &SocketLoad) -> Result<SocketMeasured> {
    let Times { warm_up, time } = way.times;
    let parts = parts(load);
    let pairs: Result<Vec<Pair>> = parts.iter().map(|part| Pair::start(way, part)).collect();
    let mut pairs = pairs?;
    let before = used();
    pairs.iter_mut().try_for_each(Pair::connect)?;
    std::thread::sleep(warm_up);
    let memory =
        (load.traffic == Traffic::Idle).then(|| Some(used()?.saturating_sub(before?))).flatten();
    let carries = load.traffic != Traffic::Idle;
    let message = carries.then_some(load.bytes.into());
    let mut measured = window(way, &pairs, (time, message));
    measured.memory_bytes = memory;
    anyhow::ensure!(measured.bytes > 0 || !carries, "nothing arrived");
    for pair in &mut pairs {
        measured.latency = pair.end()?.latency;
    }
    pairs.into_iter().try_for_each(Pair::finish)?;
    Ok(measured)
}

/// Measures the bytes that arrive within `time`, and their cost. If the load has messages, of
/// `message` bytes, continues until more than one has arrived.
fn window(way: &Way, pairs: &[Pair], (time, message): (Duration, Option<u64>)) -> SocketMeasured {
    let softirqs = softirq_threads();
    let engines: Vec<u32> = way.engines.iter().flat_map(super::Engines::ids).collect();
    let clients: Vec<u32> = pairs.iter().map(|pair| pair.client.running.id()).collect();
    let servers: Vec<u32> = pairs.iter().map(|pair| pair.server.running.id()).collect();
    let counted = || pairs.iter().map(|pair| pair.board.counted()).sum::<u64>();
    let costs = || [&clients, &servers, &engines, &softirqs].map(|pids| Cost::of_all(pids));
    // This thread may stand still between any two lines. So the costs are read within the measured
    // time, in which no program can have more of a processor than there was, and round trips count
    // within the time of the bytes.
    let (began, bytes) = (Instant::now(), counted());
    let before = costs();
    pairs.iter().for_each(|pair| pair.board.ask(Phase::Measured));
    let moved = counted();
    std::thread::sleep(time);
    // On a busy machine a short turn may see no bytes at all. Those that arrived before the costs
    // were read may have cost nothing since, and the first message after that may belong to a round
    // trip that began too early to count.
    let is_little = || message.is_some_and(|bytes| counted() - moved <= bytes);
    while is_little() && began.elapsed() < PATIENCE {
        std::thread::sleep(time);
    }
    pairs.iter().for_each(|pair| pair.board.ask(Phase::WarmUp));
    let after = costs();
    let (all, ended) = (counted(), Instant::now());
    let [client, server, engine, kernel] = std::array::from_fn(|at| after[at].since(before[at]));
    SocketMeasured {
        bytes: all - bytes,
        elapsed_ns: (ended - began).as_nanos() as u64,
        client,
        server,
        engine,
        kernel,
        ..SocketMeasured::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_idle_sockets_are_several_programs() {
        for sockets in [1, 4096, 8000, 8001, 100_000, 200_000] {
            let load = SocketLoad { traffic: Traffic::Idle, bytes: 0, sockets };
            let parts = parts(&load);
            assert_eq!(parts.iter().map(|part| part.sockets).sum::<u32>(), sockets);
            assert!(parts.iter().all(|part| (1..=SOCKETS_OF_A_PROGRAM).contains(&part.sockets)));
        }
        let busy = SocketLoad { traffic: Traffic::Window, bytes: 4096, sockets: 100_000 };
        assert_eq!(parts(&busy), [busy]);
    }
}
