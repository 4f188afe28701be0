//! One turn: two programs, a load between them, and what it cost.

use std::process::Stdio;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::board::{Board, Phase};
use super::cost::{Cost, available, softirq_threads};
use super::peer::{PeerResult, PeerSpec, Role};
use super::{SocketLoad, SocketMeasured, Traffic, Way};
use crate::packet::process::Running;

/// How long a program may need to begin or to end, and for each thousand sockets more.
const PATIENCE: Duration = Duration::from_secs(20);

/// A program of a load.
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

    /// Its next line, which begins with `word`: what follows.
    fn hear(&self, word: &str) -> Result<String> {
        let line = self.lines.recv_timeout(self.patience);
        let line = line.with_context(|| format!("a load's program does not say \"{word}\""))?;
        match line.strip_prefix(word) {
            Some(rest) => Ok(rest.trim().to_owned()),
            None => bail!("a load's program says \"{line}\" and not \"{word}\""),
        }
    }
}

/// Carries `load` over `way`: `warm_up` without being measured, then for `time`.
///
/// # Errors
/// What stands in the way, with the next step.
pub fn turn(
    way: &Way,
    load: &SocketLoad,
    warm_up: Duration,
    time: Duration,
) -> Result<SocketMeasured> {
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
        past_the_kernel: way.engine.is_some(),
    };
    let mut server = Program::start(way, &spec(Role::Server, Vec::new()))?;
    let ports = server.hear("listening")?;
    let ports: Result<Vec<u16>, _> = ports.split(',').map(str::parse).collect();
    let before = available();
    let mut client =
        Program::start(way, &spec(Role::Client, ports.context("the server's ports")?))?;
    client.hear("connected")?;
    server.hear("accepted")?;
    std::thread::sleep(warm_up);
    let memory = (load.traffic == Traffic::Idle)
        .then(|| Some(before?.saturating_sub(available()?)))
        .flatten();
    let carries = load.traffic != Traffic::Idle;
    let mut measured = window(&board, way, [&client, &server], (time, carries));
    measured.memory_bytes = memory;
    board.ask(Phase::Over);
    client.running.end_input();
    anyhow::ensure!(measured.bytes > 0 || !carries, "nothing arrived");
    let result: PeerResult = serde_json::from_str(&client.hear("")?)?;
    measured.latency = result.latency;
    for program in [&mut client, &mut server] {
        program.running.finish(Instant::now() + program.patience)?;
    }
    Ok(measured)
}

/// What arrives within `time`, something at least if anything is to, and what that costs.
fn window(
    board: &Board,
    way: &Way,
    programs: [&Program; 2],
    (time, carries): (Duration, bool),
) -> SocketMeasured {
    let softirqs = softirq_threads();
    let engines: Vec<u32> = way.engine.iter().map(super::Engine::id).collect();
    let [client, server] = programs.map(|program| program.running.id());
    let look = || {
        let costs = [&[client], &[server], engines.as_slice(), &softirqs].map(Cost::of_all);
        (Instant::now(), board.counted(), costs)
    };
    let (began, bytes, before) = look();
    board.ask(Phase::Measured);
    std::thread::sleep(time);
    // On a machine that has other things to do a short turn may see nothing at all.
    while bytes == board.counted() && carries && began.elapsed() < PATIENCE {
        std::thread::sleep(time);
    }
    let (ended, all, after) = look();
    let [client, server, engine, kernel] = std::array::from_fn(|at| after[at].since(before[at]));
    SocketMeasured {
        bytes: all - bytes,
        elapsed_ns: (ended - began).as_nanos() as u64,
        client,
        server,
        engine,
        kernel,
        latency: None,
        memory_bytes: None,
    }
}
