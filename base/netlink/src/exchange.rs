//! Requests and their answers on a socket.

use std::io;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{RecvFlags, SendFlags};

use crate::Netlink;
use crate::message::{self, Answer, Reply, Request};

/// Most requests for one list. The kernel says if a list changed while it was sent.
const DUMPS: usize = 16;
/// Most entries of a list.
const MOST: usize = 65_536;

impl Netlink {
    /// Asks for a list as [`Netlink::dump_some`] does, and returns all of it.
    ///
    /// # Errors
    /// The errors of [`Netlink::dump_some`]; [`io::ErrorKind::InvalidData`] if there are more than
    /// [`MOST`] entries.
    pub(crate) fn dump<T>(
        &mut self,
        ask: u16,
        body: &[u8],
        entry: u16,
        parse: fn(&[u8]) -> Option<T>,
    ) -> io::Result<Vec<T>> {
        match self.dump_some(ask, body, entry, parse)? {
            (entries, false) => Ok(entries),
            // Whoever has the rights of a namespace's network can fill it.
            (_, true) => {
                let text = format!("the kernel lists more than {MOST} entries");
                Err(io::Error::new(io::ErrorKind::InvalidData, text))
            }
        }
    }

    /// Asks for a list by a request of the kind `ask` with the body `body`. Reads the messages of
    /// the kind `entry` by `parse`, and returns the first [`MOST`] entries and whether there are
    /// more. Asks again for a list that changed while the kernel sent it.
    pub(crate) fn dump_some<T>(
        &mut self,
        ask: u16,
        body: &[u8],
        entry: u16,
        parse: fn(&[u8]) -> Option<T>,
    ) -> io::Result<(Vec<T>, bool)> {
        let mut again = 1..DUMPS;
        loop {
            let mut request = Request::dump(ask);
            request.body(body);
            let (mut entries, mut more) = (Vec::new(), false);
            let asked = self.exchange(request, |kind, body| {
                match (kind == entry).then(|| parse(body)).flatten() {
                    Some(_) if entries.len() == MOST => more = true,
                    read => entries.extend(read),
                }
            });
            let interrupted = |error: &io::Error| error.kind() == io::ErrorKind::Interrupted;
            match asked {
                Err(error) if interrupted(&error) && more => return Ok((entries, true)),
                Err(error) if interrupted(&error) && again.next().is_some() => {}
                asked => return asked.map(|()| (entries, more)),
            }
        }
    }

    /// Asks for a list as [`Netlink::dump`] does, of at most `most` entries. Returns `None` if
    /// there are more, which are not read: the kernel sends them before any other list, so the
    /// caller drops the socket.
    ///
    /// # Errors
    /// The errors of [`Netlink::exchange`].
    pub(crate) fn dump_within<T>(
        &mut self,
        most: usize,
        (ask, body): (u16, &[u8]),
        entry: u16,
        parse: fn(&[u8]) -> Option<T>,
    ) -> io::Result<Option<Vec<T>>> {
        let mut again = 1..DUMPS;
        loop {
            let mut request = Request::dump(ask);
            request.body(body);
            let mut entries = Vec::new();
            let asked = self.exchange_until(request, |kind, body| {
                entries.extend((kind == entry).then(|| parse(body)).flatten());
                entries.len() > most
            });
            if entries.len() > most {
                return Ok(None);
            }
            match asked {
                Err(error)
                    if error.kind() == io::ErrorKind::Interrupted && again.next().is_some() => {}
                asked => return asked.map(|()| Some(entries)),
            }
        }
    }

    /// Sends a request that one message of the kind `answer` answers, and reads that by `parse`.
    ///
    /// # Errors
    /// The errors of [`Netlink::exchange`].
    pub(crate) fn ask<T>(
        &mut self,
        request: Request,
        answer: u16,
        parse: fn(&[u8]) -> Option<T>,
    ) -> io::Result<Option<T>> {
        let sequence = self.next_sequence();
        self.send(&request.only_failure().finish(sequence))?;
        self.receive(|reply| match reply.answer {
            _ if reply.sequence != sequence => None,
            Answer::Message(kind, body) => (kind == answer).then(|| Ok(parse(body))),
            Answer::End(errno) => Some(outcome(errno).map(|()| None)),
        })?
    }

    /// Sends a request and passes each message of its answer to `each`, up to the answer's end.
    ///
    /// # Errors
    /// The kernel's errors; [`io::ErrorKind::Interrupted`] if entries of a list may be missing;
    /// [`io::ErrorKind::InvalidData`] if a message is cut.
    pub(crate) fn exchange(
        &mut self,
        request: Request,
        mut each: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.exchange_until(request, |kind, body| {
            each(kind, body);
            false
        })
    }

    /// Does what [`Netlink::exchange`] does, until `each` returns `true`. The rest of the answer is
    /// not read then.
    ///
    /// # Errors
    /// The errors of [`Netlink::exchange`].
    fn exchange_until(
        &mut self,
        request: Request,
        mut each: impl FnMut(u16, &[u8]) -> bool,
    ) -> io::Result<()> {
        let sequence = self.next_sequence();
        self.send(&request.finish(sequence))?;
        let mut interrupted = false;
        let end = self.receive(|reply| {
            if reply.sequence != sequence {
                // It answers an earlier request, whose exchange ended with an error.
                return None;
            }
            interrupted |= reply.interrupted;
            match reply.answer {
                Answer::End(errno) => Some(errno),
                Answer::Message(kind, body) => each(kind, body).then_some(0),
            }
        })?;
        match end {
            0 if interrupted => Err(io::ErrorKind::Interrupted.into()),
            errno => outcome(errno),
        }
    }

    /// Returns the sequence number of the next request.
    pub(crate) fn next_sequence(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    /// Sends one request, or several one behind the other. On return the kernel has carried them
    /// out, except that a list may still be sent.
    ///
    /// # Errors
    /// The errors of sendto(2).
    pub(crate) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let kernel = SocketAddrNetlink::new(0, 0);
        rustix::net::sendto(&self.socket, bytes, SendFlags::empty(), &kernel)?;
        Ok(())
    }

    /// Receives messages of the kernel until `each` returns a value, and returns that.
    ///
    /// # Errors
    /// The errors of recv(2); [`io::ErrorKind::InvalidData`] if a message is cut.
    pub(crate) fn receive<T>(
        &mut self,
        mut each: impl FnMut(Reply<'_>) -> Option<T>,
    ) -> io::Result<T> {
        loop {
            #[allow(clippy::disallowed_methods, reason = "a netlink socket's peer is the kernel")]
            let received =
                rustix::net::recv(&self.socket, self.buffer.as_mut_slice(), RecvFlags::empty());
            let length = match received {
                Err(Errno::INTR) => continue,
                received => received?.0,
            };
            for reply in message::replies(self.buffer.get(..length).unwrap_or_default()) {
                if let Some(done) = each(reply?) {
                    return Ok(done);
                }
            }
        }
    }
}

/// Returns the outcome of a request that ended with `errno`, or with 0 for success.
pub(crate) fn outcome(errno: i32) -> io::Result<()> {
    match errno {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}
