//! The processes that put load on sockets: a client that drives it and a server that answers.
//!
//! Both use only the C library's socket functions, as any program does, so a preloaded library
//! changes their load as it would change any program's. [`serve`] is all that such a process runs.

mod connection;
mod epoll;
mod memcached;
mod openssl;
mod pingpong;
mod stream;
mod window;

use std::io::{BufRead, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::fs::{FileType, fstat};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use slipway_telemetry::Histogram;

use super::board::{Board, Phase};
use super::load::{SocketLoad, Traffic};
use crate::block::native::pin;
use connection::Connection;
pub use memcached::Memcached;
use openssl::Context as Tls;
pub use openssl::OpenSsl;

/// Sockets on a port of the server: fewer than the number of a client's own ports.
const SOCKETS_PER_PORT: usize = 20_000;

/// The most connections that wait to be accepted: below the backlog of listeners.
const WAITING: u64 = 64;

/// The role of a process in a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Connects, and drives the load.
    Client,
    /// Listens, and answers.
    Server,
}

/// The specification of such a process, as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerSpec {
    /// The role of the process.
    pub role: Role,
    /// The load.
    pub load: SocketLoad,
    /// The address on which the server listens.
    pub address: IpAddr,
    /// The ports of the server, for a client.
    pub ports: Vec<u16>,
    /// The page shared with the measurement.
    pub board: PathBuf,
    /// Processors to run on; if empty, any.
    pub cpus: Vec<usize>,
    /// A file with the server's key and certificate for TLS by OpenSSL, or `None` without TLS.
    pub tls: Option<PathBuf>,
    /// Fail if a connection is a kernel socket: a library that leaves connections to the kernel
    /// would go unnoticed.
    pub past_the_kernel: bool,
}

/// A client's result.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerResult {
    /// Round trips that began during the measured time, ns.
    pub latency: Option<Histogram>,
}

/// Runs what `spec` says, and reports progress on standard output.
///
/// # Errors
/// Any obstacle, the peer's end included.
pub fn serve(spec: &str) -> Result<()> {
    if let Ok(told) = serde_json::from_str(spec) {
        return memcached::ask(&told);
    }
    let spec: PeerSpec = serde_json::from_str(spec).context("what a load is told")?;
    if !spec.cpus.is_empty() {
        pin(&spec.cpus)?;
    }
    allow_descriptors()?;
    let board = Board::open(&spec.board)?;
    let tls = spec.tls.as_deref().map(|file| Tls::new(spec.role, file)).transpose()?;
    match spec.role {
        Role::Client => client(&spec, &board, tls.as_ref()),
        Role::Server => server(&spec, &board, tls.as_ref()),
    }
}

/// Raises the limit of descriptors to the most allowed: a load may have far more sockets than usual
/// programs.
fn allow_descriptors() -> Result<()> {
    let now = getrlimit(Resource::Nofile);
    let most = std::fs::read_to_string("/proc/sys/fs/nr_open")?.trim().parse().ok();
    let raised = Rlimit { current: most, maximum: most };
    if setrlimit(Resource::Nofile, raised).is_err() {
        setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum })?;
    }
    Ok(())
}

fn say(line: &str) -> Result<()> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}")?;
    Ok(output.flush()?)
}

fn client(spec: &PeerSpec, board: &Board, tls: Option<&Tls>) -> Result<()> {
    // Announced before connecting, so that the process's base memory does not count as the
    // connections'.
    say("ready")?;
    std::io::stdin().lock().read_line(&mut String::new())?;
    let mut connections = Vec::new();
    for at in 0..spec.load.sockets as usize {
        let port =
            *spec.ports.get(at / SOCKETS_PER_PORT).context("the server has too few ports")?;
        while at as u64 >= board.accepted() + WAITING {
            std::thread::sleep(Duration::from_micros(50));
        }
        let stream = TcpStream::connect((spec.address, port))
            .with_context(|| format!("connecting to {} port {port}", spec.address))?;
        connections.push(connection(stream, spec, tls)?);
    }
    say("connected")?;
    let latency = match spec.load.traffic {
        Traffic::Stream => stream::send(connections, &spec.load, board).map(|()| None),
        Traffic::Window => window::send(connections, &spec.load, board).map(|()| None),
        Traffic::Pingpong(pace) => pingpong::drive(connections, &spec.load, pace, board).map(Some),
        Traffic::Idle => wait_for_end().map(|()| None),
    }?;
    say(&serde_json::to_string(&PeerResult { latency })?)
}

fn server(spec: &PeerSpec, board: &Board, tls: Option<&Tls>) -> Result<()> {
    let sockets = spec.load.sockets as usize;
    let bind = |_| TcpListener::bind((spec.address, 0));
    let listeners: Vec<TcpListener> = (0..sockets.div_ceil(SOCKETS_PER_PORT))
        .map(bind)
        .collect::<std::io::Result<_>>()
        .with_context(|| format!("listening at {}", spec.address))?;
    let ports: Result<Vec<String>> =
        listeners.iter().map(|one| Ok(one.local_addr()?.port().to_string())).collect();
    say(&format!("listening {}", ports?.join(",")))?;
    let mut connections = Vec::new();
    for at in 0..sockets {
        let (stream, _) = listeners[at / SOCKETS_PER_PORT].accept().context("accepting")?;
        board.accept();
        connections.push(connection(stream, spec, tls)?);
    }
    say("accepted")?;
    match spec.load.traffic {
        Traffic::Stream => stream::receive(connections, &spec.load, board),
        Traffic::Window => window::receive(connections, &spec.load, board),
        Traffic::Pingpong(pace) => pingpong::answer(connections, &spec.load, pace),
        Traffic::Idle => epoll::until_all_ended(connections),
    }
}

fn connection(stream: TcpStream, spec: &PeerSpec, tls: Option<&Tls>) -> Result<Connection> {
    if spec.past_the_kernel {
        // Not by /proc, which would make the kernel allocate further objects for the descriptor.
        let kernels = FileType::from_raw_mode(fstat(&stream)?.st_mode).is_socket();
        anyhow::ensure!(!kernels, "the engine left a connection to the kernel");
    }
    // Small messages that are answered must not wait for more; a stream keeps the default, as
    // programs do.
    if matches!(spec.load.traffic, Traffic::Pingpong(_) | Traffic::Window) {
        stream.set_nodelay(true)?;
    }
    match tls {
        None => Ok(Connection::Plain(stream)),
        Some(tls) => Ok(Connection::Tls(tls.shake_hands(stream)?)),
    }
}

/// Waits until the measurement closes standard input.
fn wait_for_end() -> Result<()> {
    let mut line = String::new();
    while std::io::stdin().lock().read_line(&mut line)? > 0 {}
    Ok(())
}

/// Returns whether the load is over.
fn over(board: &Board) -> bool {
    board.phase() == Phase::Over
}
