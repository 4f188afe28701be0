//! A stream with a limit of bytes in flight: the reader answers each message with a byte.

use anyhow::Result;

use super::connection::{Connection, is_early};
use super::epoll::{EDGE, Epoll, IN, OUT};
use super::stream::ended;
use super::{Board, SocketLoad, over};

/// The smallest receive buffer of a reader.
const ROOM: usize = 128 << 10;
/// The longest time that a sender waits before it checks whether the load is over, ms.
const LOOK: i32 = 100;

/// The sender's side of a connection.
struct Sender {
    connection: Connection,
    /// The number of messages that may be sent.
    credit: u32,
    /// Bytes of the present message that were sent.
    sent: usize,
}

impl Sender {
    /// Takes answers, and sends all that the credit allows.
    fn go_on(&mut self, message: &[u8], answers: &mut [u8]) -> Result<()> {
        loop {
            match self.connection.receive(answers) {
                Ok(0) => anyhow::bail!("the other side ended"),
                Ok(count) => self.credit += count as u32,
                Err(error) if is_early(&error) => break,
                Err(error) => return Err(error.into()),
            }
        }
        while self.credit > 0 {
            match self.connection.send(&message[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if is_early(&error) => break,
                Err(error) => return Err(error.into()),
            }
            if self.sent == message.len() {
                (self.sent, self.credit) = (0, self.credit - 1);
            }
        }
        Ok(())
    }
}

/// Sends until the load is over.
pub fn send(mut connections: Vec<Connection>, load: &SocketLoad, board: &Board) -> Result<()> {
    let (message, mut answers) = (vec![0x5A; load.bytes as usize], vec![0; 4096]);
    let mut epoll = Epoll::of(&mut connections, IN | OUT | EDGE)?;
    let sender = |connection| Sender { connection, credit: load.credit(), sent: 0 };
    let mut senders: Vec<Sender> = connections.into_iter().map(sender).collect();
    while !over(board) {
        for (at, _) in epoll.wait(LOOK)? {
            senders[at].go_on(&message, &mut answers)?;
        }
    }
    Ok(())
}

/// The reader's side of a connection.
struct Reader {
    connection: Connection,
    /// Bytes of the present message that have arrived.
    have: usize,
    /// The number of messages that have arrived and are not answered.
    owed: usize,
}

impl Reader {
    /// Reads once what has arrived, and answers. Returns `false` at the end.
    fn go_on(&mut self, bytes: usize, buffer: &mut [u8], board: &Board) -> Result<bool> {
        match self.connection.receive(buffer) {
            Ok(0) => return Ok(false),
            Ok(count) => {
                board.count(count as u64);
                self.have += count;
                self.owed += self.have / bytes;
                self.have %= bytes;
            }
            Err(error) if is_early(&error) => {}
            Err(error) => return ended(error).map(|()| false),
        }
        while self.owed > 0 {
            match self.connection.send(&buffer[..self.owed.min(buffer.len())]) {
                Ok(count) => self.owed -= count,
                Err(error) if is_early(&error) => break,
                Err(error) => return ended(error).map(|()| false),
            }
        }
        Ok(true)
    }
}

/// Reads and answers until all connections have ended.
pub fn receive(mut connections: Vec<Connection>, load: &SocketLoad, board: &Board) -> Result<()> {
    let (bytes, mut buffer) = (load.bytes as usize, vec![0; ROOM.max(load.bytes as usize)]);
    let mut epoll = Epoll::of(&mut connections, IN)?;
    let reader = |connection| Some(Reader { connection, have: 0, owed: 0 });
    let mut open: Vec<Option<Reader>> = connections.into_iter().map(reader).collect();
    let mut left = open.len();
    while left > 0 {
        for (at, _) in epoll.wait(-1)? {
            let Some(reader) = open[at].as_mut() else { continue };
            if !reader.go_on(bytes, &mut buffer, board)? {
                (open[at], left) = (None, left - 1);
            }
        }
    }
    Ok(())
}
