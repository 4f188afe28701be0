//! A load in which one side sends without a pause and the other reads.

use anyhow::Result;

use super::connection::{Connection, is_early};
use super::epoll::{Epoll, IN, OUT};
use super::{Board, SocketLoad, over};

/// The smallest receive buffer of a reader.
const ROOM: usize = 128 << 10;
/// The longest time that a sender waits for room before it checks whether the load is over, ms.
const LOOK: i32 = 100;

/// Sends until the load is over.
pub fn send(mut connections: Vec<Connection>, load: &SocketLoad, board: &Board) -> Result<()> {
    let message = vec![0x5A; load.bytes as usize];
    if let [connection] = connections.as_mut_slice() {
        while !over(board) {
            connection.send_all(&message)?;
        }
        return Ok(());
    }
    let mut epoll = Epoll::of(&mut connections, OUT)?;
    // Bytes of the present message that each connection has sent.
    let mut sent = vec![0; connections.len()];
    while !over(board) {
        for (at, _) in epoll.wait(LOOK)? {
            match connections[at].send(&message[sent[at]..]) {
                Ok(count) => sent[at] = (sent[at] + count) % message.len(),
                Err(error) if is_early(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// Reads until all connections have ended.
pub fn receive(mut connections: Vec<Connection>, load: &SocketLoad, board: &Board) -> Result<()> {
    let mut buffer = vec![0; ROOM.max(load.bytes as usize)];
    if let [connection] = connections.as_mut_slice() {
        loop {
            match connection.receive(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => board.count(count as u64),
                Err(error) if is_early(&error) => {}
                Err(error) => return ended(error),
            }
        }
    }
    let mut epoll = Epoll::of(&mut connections, IN)?;
    let mut open: Vec<Option<Connection>> = connections.into_iter().map(Some).collect();
    let mut left = open.len();
    while left > 0 {
        for (at, _) in epoll.wait(-1)? {
            let Some(connection) = open[at].as_mut() else { continue };
            match connection.receive(&mut buffer) {
                Ok(0) => (open[at], left) = (None, left - 1),
                Ok(count) => board.count(count as u64),
                Err(error) if is_early(&error) => {}
                Err(error) => {
                    ended(error)?;
                    (open[at], left) = (None, left - 1);
                }
            }
        }
    }
    Ok(())
}

/// Treats a reset as an end: a client that closes with unread answers resets the connection.
pub fn ended(error: std::io::Error) -> Result<()> {
    match error.kind() {
        std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe => Ok(()),
        _ => Err(error.into()),
    }
}
