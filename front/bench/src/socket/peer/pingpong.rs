//! A load that sends a message and gets the same message back.

use std::time::Instant;

use anyhow::{Context, Result};
use slipway_telemetry::Histogram;

use super::super::board::Phase;
use super::super::load::Pace;
use super::connection::Connection;
use super::{Board, SocketLoad, over};

/// Sends messages and waits for each answer until the load is over. Returns the round-trip times,
/// ns.
pub fn drive(
    connections: Vec<Connection>,
    load: &SocketLoad,
    pace: Pace,
    board: &Board,
) -> Result<Histogram> {
    let mut connection = only(connections)?;
    connection.set_nonblocking(pace == Pace::Busy)?;
    let (message, mut answer) = (vec![0x5A; load.bytes as usize], vec![0; load.bytes as usize]);
    let mut latency = Histogram::new();
    while !over(board) {
        if pace == Pace::Asleep {
            std::thread::sleep(SocketLoad::PAUSE);
        }
        let counts = board.phase() == Phase::Measured;
        let begin = Instant::now();
        connection.send_all(&message)?;
        anyhow::ensure!(connection.fill(&mut answer)?, "the other side ended");
        if counts {
            latency.record(begin.elapsed().as_nanos() as u64);
        }
        board.count(load.bytes.into());
    }
    anyhow::ensure!(answer == message, "the answer is another than what was sent");
    Ok(latency)
}

/// Answers until the other side ends.
pub fn answer(connections: Vec<Connection>, load: &SocketLoad, pace: Pace) -> Result<()> {
    let mut connection = only(connections)?;
    connection.set_nonblocking(pace == Pace::Busy)?;
    let mut message = vec![0; load.bytes as usize];
    while connection.fill(&mut message)? {
        connection.send_all(&message)?;
    }
    Ok(())
}

fn only(connections: Vec<Connection>) -> Result<Connection> {
    connections.into_iter().next().context("a ping-pong without a connection")
}
