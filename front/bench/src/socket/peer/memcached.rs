//! A load on memcached, for which no generator is as common as the server: one thread requests a
//! value over and over, on many connections, in memcached's text protocol.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::connection::{Connection, is_early};
use super::epoll::{Epoll, IN};

/// Bytes of the value.
const VALUE: usize = 64;
const ASK: &[u8] = b"get slipway-bench\r\n";

/// The specification of this load, as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Memcached {
    /// The address of memcached.
    pub memcached: SocketAddr,
    /// The number of connections, each with one request in flight.
    pub connections: usize,
    /// The duration in seconds.
    pub seconds: u64,
}

/// Runs the load, and prints the answers per second. Checks every answer completely.
pub fn ask(told: &Memcached) -> Result<()> {
    let value = "x".repeat(VALUE);
    store(told.memcached, &value)?;
    let answer = format!("VALUE slipway-bench 0 {VALUE}\r\n{value}\r\nEND\r\n").into_bytes();
    let mut connections = Vec::new();
    for _ in 0..told.connections {
        let stream = TcpStream::connect(told.memcached)?;
        stream.set_nodelay(true)?;
        connections.push(Connection::Plain(stream));
    }
    let mut epoll = Epoll::of(&mut connections, IN)?;
    let (begun, time) = (Instant::now(), Duration::from_secs(told.seconds));
    for connection in &mut connections {
        connection.send_all(ASK)?;
    }
    // The bytes of the present answer that have arrived on each connection.
    let mut come = vec![0; connections.len()];
    let (mut answers, mut buffer) = (0u64, vec![0; 2 * answer.len()]);
    while begun.elapsed() < time {
        for (at, _) in epoll.wait(100)? {
            let (connection, come) = (&mut connections[at], &mut come[at]);
            let count = match connection.receive(&mut buffer) {
                Ok(count) => count,
                Err(error) if is_early(&error) => continue,
                Err(error) => return Err(error.into()),
            };
            let right = answer.get(*come..*come + count) == Some(&buffer[..count]);
            ensure!(count > 0 && right, "memcached's answer is another one");
            *come += count;
            if *come == answer.len() {
                *come = 0;
                answers += 1;
                connection.send_all(ASK)?;
            }
        }
    }
    let rate = answers as f64 / begun.elapsed().as_secs_f64();
    super::say(&format!("answers a second: {rate:.1}"))
}

fn store(at: SocketAddr, value: &str) -> Result<()> {
    let mut stream = TcpStream::connect(at).with_context(|| format!("connecting to {at}"))?;
    write!(stream, "set slipway-bench 0 0 {}\r\n{value}\r\n", value.len())?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line)?;
    ensure!(line == "STORED\r\n", "memcached says: {line}");
    Ok(())
}
