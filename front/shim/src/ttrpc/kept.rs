//! Connections that outlive the serving process: requests are recorded before they are taken off
//! the socket, and until their responses are on it.
//!
//! A piece of a request is looked at, recorded, and only then consumed. Of the last piece it is not
//! known whether a process that was killed had consumed it: it had if something else is at the head
//! of the socket. No two requests of a connection have the same beginning, since a client numbers
//! its calls upwards.
//!
//! | file in the store | |
//! |---|---|
//! | `part-N` | what there is of the request that connection N sends; a piece has [`PIECE`] bytes, the last one of a request may have fewer |
//! | `call-N-S` | the request of stream S, until it is answered. An answer that is sent twice is ignored: nobody waits for it |
//! | `cut-N` | there while a response of more than [`PIECE`] bytes is written, of which a part may be on the socket: such a connection cannot go on |
//!
//! Without room for its record a request stays in the socket. Its caller is told so first, and only
//! then the request is passed over: a process that is killed between the two leaves it for the next
//! one. A request that ends something has the room that the store keeps, so that a container can be
//! stopped there ([`ENDS`]). A request of several pieces waits in the socket until there is room: a
//! process that was killed while it passed over one would leave the next process in the middle of
//! it.

use std::io;
use std::time::Duration;

use prost::Message;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::frame::{HEADER, Header, MOST};
use super::{Failure, v1};
use crate::store::Store;

/// The largest piece that is recorded at once, bytes. It is less than a socket has room for, and so
/// little that a socket takes it as a whole or not at all: in one buffer of the kernel's.
const PIECE: usize = 16 << 10;
/// The methods that end something, and so give room back.
const ENDS: [&str; 5] = ["Kill", "Delete", "Shutdown", "StopSandbox", "ShutdownSandbox"];
/// The time between two attempts to record a piece of a request.
const AGAIN: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 1000 });

/// The record of a connection.
#[derive(Clone, Default)]
pub struct Record {
    store: Store,
    number: u64,
}

impl Record {
    /// Makes the record of the connection with this number.
    pub fn new(store: &Store, number: u64) -> Self {
        Self { store: store.clone(), number }
    }

    /// Returns whether an earlier process was killed in the middle of a response.
    pub fn is_cut(&self) -> bool {
        self.store.get(&self.cut()).is_some()
    }

    /// Returns the requests that an earlier process has not answered.
    pub fn calls(&self) -> Vec<(Header, Vec<u8>)> {
        let names = self.store.names(&format!("call-{}-", self.number));
        names.iter().filter_map(|name| parts(self.store.get(name)?)).collect()
    }

    /// Notes that a request was answered.
    pub fn answered(&self, stream: u32) {
        self.store.remove(&self.call(stream));
    }

    /// Removes the record: the connection has ended.
    pub fn delete(&self) {
        let calls = self.store.names(&format!("call-{}-", self.number));
        calls.iter().chain([&self.part(), &self.cut()]).for_each(|name| self.store.remove(name));
    }

    /// Notes that a frame of so many bytes is about to be written.
    ///
    /// # Errors
    /// There is no room for the record, and the frame must not be written.
    pub fn begin(&self, size: usize) -> io::Result<()> {
        if size > PIECE { self.store.try_put(&self.cut(), b"") } else { Ok(()) }
    }

    /// Writes a response, or any other frame, after [`begin`](Self::begin).
    ///
    /// # Errors
    /// The connection broke.
    pub async fn write(&self, to: &OwnedWriteHalf, frame: &[u8]) -> io::Result<()> {
        let mut rest = frame;
        while !rest.is_empty() {
            to.writable().await?;
            match to.try_write(rest) {
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            }
        }
        if frame.len() > PIECE {
            self.store.remove(&self.cut());
        }
        Ok(())
    }

    fn part(&self) -> String {
        format!("part-{}", self.number)
    }

    fn call(&self, stream: u32) -> String {
        format!("call-{}-{stream}", self.number)
    }

    fn cut(&self) -> String {
        format!("cut-{}", self.number)
    }
}

/// Divides a whole request.
fn parts(mut request: Vec<u8>) -> Option<(Header, Vec<u8>)> {
    let header = Header::parse(request.get(..HEADER)?.try_into().ok()?);
    request.drain(..HEADER);
    Some((header, request))
}

/// The next thing that a peer asks for.
#[derive(Debug)]
pub enum Next {
    /// A request, which is recorded until it is answered.
    Request(Header, Vec<u8>),
    /// A request of this stream that could not be recorded. It is to be answered so, and then
    /// passed over ([`Requests::pass_over`]).
    Refused(u32, Failure),
}

/// The requests of a connection.
pub struct Requests {
    from: OwnedReadHalf,
    record: Record,
    /// The consumed bytes of the next request.
    part: Vec<u8>,
    /// The bytes in the socket of a request that was refused.
    refused: usize,
}

impl Requests {
    /// Makes the requests of a new connection.
    pub fn new(from: OwnedReadHalf, record: Record) -> Self {
        Self { from, record, part: Vec::new(), refused: 0 }
    }

    /// Goes on with a connection of an earlier process.
    ///
    /// # Errors
    /// The connection broke.
    pub fn resume(from: OwnedReadHalf, record: Record) -> io::Result<Self> {
        let mut part = record.store.get(&record.part()).unwrap_or_default();
        let whole = part.get(..HEADER).and_then(|_| total(&part).ok());
        if whole != Some(part.len()) {
            // The last piece was not recorded to its end, so it was not consumed.
            part.truncate(part.len() / PIECE * PIECE);
        }
        let socket: &UnixStream = from.as_ref();
        if let Some(before) = part.len().checked_sub(1) {
            let last = &part[before / PIECE * PIECE..];
            let mut head = vec![0; last.len()];
            if look(socket, &mut head).is_ok_and(|count| head[..count] == *last) {
                consume(socket, last.len())?;
            }
        }
        // The next piece takes the place of one that was not recorded to its end.
        Ok(Self { from, record, part, refused: 0 })
    }

    /// Returns the next request. Returns `None` if the peer closed the connection between two.
    /// Memory is taken as bytes arrive, not as the header promises.
    ///
    /// # Errors
    /// The connection broke, or the message is larger than [`MOST`].
    pub async fn next(&mut self) -> io::Result<Option<Next>> {
        let mut is_told = false;
        while self.part.len() < HEADER || self.part.len() < total(&self.part)? {
            let Some(piece) = self.piece().await? else { return Ok(None) };
            let (record, before) = (&self.record, self.part.len());
            let is_whole = before == 0 && total(&piece)? == piece.len();
            let appended = record.store.append(&record.part(), &piece, before);
            let recorded = appended.or_else(|error| match is_whole && ends_something(&piece) {
                true => record.store.put_with_room(&record.part(), &piece),
                false => Err(error),
            });
            if let Err(error) = recorded {
                let failure = Failure::unrecorded("the call", &error);
                if is_whole {
                    let header = Header::parse(std::array::from_fn(|at| piece[at]));
                    self.refused = piece.len();
                    return Ok(Some(Next::Refused(header.stream, failure)));
                }
                if !std::mem::replace(&mut is_told, true) {
                    crate::log::warn(&format!("a large call waits: {failure}"));
                }
                tokio::time::sleep(AGAIN).await;
                continue;
            }
            consume(self.from.as_ref(), piece.len())?;
            self.part.extend(piece);
        }
        let request = std::mem::take(&mut self.part);
        let Some((header, message)) = parts(request) else { return Ok(None) };
        let call = self.record.call(header.stream);
        match self.record.store.rename(&self.record.part(), &call) {
            Ok(()) => Ok(Some(Next::Request(header, message))),
            Err(error) => {
                Ok(Some(Next::Refused(header.stream, Failure::unrecorded("the call", &error))))
            }
        }
    }

    /// Takes a request off the socket that was refused, once its caller has been told.
    ///
    /// # Errors
    /// The connection broke.
    pub fn pass_over(&mut self) -> io::Result<()> {
        // A part of it may be there, or all of it.
        self.record.store.remove(&self.record.part());
        match std::mem::take(&mut self.refused) {
            0 => Ok(()),
            count => consume(self.from.as_ref(), count),
        }
    }

    /// Waits for the next piece, and leaves it in the socket.
    async fn piece(&self) -> io::Result<Option<Vec<u8>>> {
        let socket: &UnixStream = self.from.as_ref();
        loop {
            let is_closed = socket.ready(Interest::READABLE).await?.is_read_closed();
            let seen = socket.try_io(Interest::READABLE, || {
                let mut bytes = vec![0; PIECE];
                let count = look(socket, &mut bytes)?;
                bytes.truncate(count);
                match self.wanted(&bytes)? {
                    _ if count == 0 => Ok(None),
                    Some(wanted) if wanted <= count => {
                        bytes.truncate(wanted);
                        Ok(Some(bytes))
                    }
                    _ if is_closed => Err(io::ErrorKind::UnexpectedEof.into()),
                    // The rest is on its way.
                    _ => Err(io::ErrorKind::WouldBlock.into()),
                }
            });
            match seen {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(None) if !self.part.is_empty() => {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                seen => return seen,
            }
        }
    }

    /// Returns the size of the next piece, of which `seen` are the first bytes in the socket, or
    /// `None` if they do not tell.
    fn wanted(&self, seen: &[u8]) -> io::Result<Option<usize>> {
        let begun = if self.part.is_empty() { seen } else { &self.part };
        if begun.len() < HEADER {
            return Ok(None);
        }
        Ok(Some((total(begun)? - self.part.len()).min(PIECE)))
    }
}

/// Returns whether a whole request is of one of the methods that end something.
fn ends_something(request: &[u8]) -> bool {
    let message = request.get(HEADER..).unwrap_or_default();
    v1::Request::decode(message).is_ok_and(|it| ENDS.contains(&it.method.as_str()))
}

/// Returns the size of the request that begins so, with its header.
///
/// # Panics
/// There is no whole header.
fn total(begun: &[u8]) -> io::Result<usize> {
    let header = Header::parse(std::array::from_fn(|at| begun[at]));
    match header.length as usize {
        length if length > MOST => {
            Err(io::Error::new(io::ErrorKind::InvalidData, "a message larger than 4 MiB"))
        }
        length => Ok(HEADER + length),
    }
}

/// Reads what is at the head of the socket, and leaves it there. Does not wait.
fn look(socket: &UnixStream, into: &mut [u8]) -> io::Result<usize> {
    let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
    #[allow(clippy::disallowed_methods, reason = "containerd is of this user, and of no other")]
    let (count, _) = rustix::net::recv(socket, into, flags)?;
    Ok(count)
}

/// Takes bytes off the socket that [`look`] has shown.
fn consume(socket: &UnixStream, count: usize) -> io::Result<()> {
    let mut bytes = vec![0; count];
    let flags = rustix::net::RecvFlags::DONTWAIT;
    #[allow(clippy::disallowed_methods, reason = "containerd is of this user, and of no other")]
    let (consumed, _) = rustix::net::recv(socket, &mut bytes[..], flags)?;
    match consumed == count {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
#[path = "../tests/kept.rs"]
mod tests;
