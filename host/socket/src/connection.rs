//! The connection to the engine: a request, its reply, and the descriptors that come with it.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::sockopt::Timeout;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use slipway_peer::Bin;
use slipway_sgiov_spec::control::{DESCRIPTORS, REPLY, Reply, Request};

use crate::hidden::Hidden;

/// The longest time for the engine's answer; after that, the engine counts as dead.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);

pub(crate) struct Connection {
    socket: Hidden,
    /// Closed entries for whose message the kernel had no memory. The engine grants none of them
    /// again before it is told, so they are at most as many as the table has entries.
    untold: Vec<u64>,
    /// Closed listeners for whose message the kernel had no memory. They are at most as many as the
    /// engine has made for this process, since it still counts them.
    untold_listeners: Vec<u64>,
    /// The connection is the parent's: this process was forked without one of its own.
    is_parents: bool,
}

/// A reply and its descriptors.
pub(crate) struct Answer {
    pub reply: Reply,
    pub descriptors: Descriptors,
}

/// Descriptors of a message, in the order in which they were sent.
#[derive(Default)]
pub(crate) struct Descriptors([Option<OwnedFd>; DESCRIPTORS], usize);

impl<const N: usize> From<[OwnedFd; N]> for Descriptors {
    fn from(some: [OwnedFd; N]) -> Self {
        let mut all = Self::default();
        all.0.iter_mut().zip(some).for_each(|(place, fd)| *place = Some(fd));
        all
    }
}

impl Descriptors {
    /// Takes the last descriptor.
    ///
    /// # Errors
    /// `EPROTO`: no descriptor is left.
    pub fn last(&mut self) -> Result<OwnedFd, Errno> {
        self.0.iter_mut().rev().find_map(Option::take).ok_or(Errno::PROTO)
    }

    /// Takes the next descriptor.
    ///
    /// # Errors
    /// `EPROTO`: no descriptor is left.
    pub fn next(&mut self) -> Result<OwnedFd, Errno> {
        let at = self.1;
        self.1 += 1;
        self.0.get_mut(at).and_then(Option::take).ok_or(Errno::PROTO)
    }
}

impl Connection {
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let kind = SocketType::SEQPACKET;
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        let socket = Hidden::new(socket)?;
        rustix::net::connect(&socket, &address)?;
        Self::of(socket)
    }

    pub fn of(socket: Hidden) -> std::io::Result<Self> {
        rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        let (untold, untold_listeners) = (Vec::new(), Vec::new());
        Ok(Self { socket, untold, untold_listeners, is_parents: false })
    }

    /// Continues, in the child of fork(2), on the connection that was made for it. The engine
    /// counts the child as a holder of what is untold, too, so the child tells of it as well.
    pub fn replace(&mut self, own: Self) {
        self.socket = own.socket;
    }

    /// Continues, in the child of fork(2), without a connection. Requests fail from now on: the
    /// engine would take them for the parent's, and close the parent's entries.
    pub fn give_up(&mut self) {
        self.is_parents = true;
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Tells the engine that this process has closed an entry. If there is no memory for the
    /// message, it is sent before the next one.
    pub fn close(&mut self, entry: u64) {
        let told = self.tell(Request::Close { entry }, None);
        // A dead engine needs no message.
        if matches!(told, Err(Errno::NOBUFS | Errno::NOMEM | Errno::AGAIN)) {
            self.untold.push(entry);
        }
    }

    /// Tells the engine that this process has closed a listener, and waits until the engine has
    /// removed it from the listener's holders. After `ENOBUFS`, that is done before the next
    /// request that has a reply.
    ///
    /// # Errors
    /// The errors of [`Connection::ask`].
    pub fn unlisten(&mut self, listener: u64) -> Result<(), Errno> {
        self.untold_listeners.push(listener);
        self.tell_of_listeners()
    }

    /// Tells the engine of the listeners that were closed, one after the other: it hangs up on who
    /// leaves it with many replies.
    fn tell_of_listeners(&mut self) -> Result<(), Errno> {
        while let Some(&listener) = self.untold_listeners.last() {
            self.tell(Request::Unlisten { listener }, None)?;
            self.untold_listeners.pop();
            // The reply does not matter.
            self.receive()?;
        }
        Ok(())
    }

    /// Sends a request after those of [`Connection::close`] that were not sent. The caller receives
    /// the reply, if the request has one.
    ///
    /// # Errors
    /// `EPIPE`: the engine is gone. `ENOBUFS`: there is no memory, and the request was not sent.
    /// `ENOTCONN`: after [`Connection::give_up`].
    pub fn tell(&mut self, request: Request, with: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        if self.is_parents {
            return Err(Errno::NOTCONN);
        }
        while let Some(&entry) = self.untold.last() {
            self.send(Request::Close { entry }, None)?;
            self.untold.pop();
        }
        self.send(request, with)
    }

    fn send(&self, request: Request, with: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        let bytes = request.encode();
        let pieces = [std::io::IoSlice::new(&bytes)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let passed = with.map(|fd| [fd]);
        if let Some(fds) = &passed {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        rustix::io::retry_on_intr(|| {
            rustix::net::sendmsg(&self.socket, &pieces, &mut ancillary, SendFlags::NOSIGNAL)
        })?;
        Ok(())
    }

    /// Sends a request and receives its reply.
    ///
    /// # Errors
    /// The errors of [`Connection::tell`] and of [`Connection::receive`].
    pub fn ask(&mut self, request: Request, with: Option<BorrowedFd<'_>>) -> Result<Answer, Errno> {
        self.tell_of_listeners()?;
        // `EPIPE`: the engine is gone, or it refuses this user. Then it has sent the reason before
        // it hung up.
        let told = self.tell(request, with);
        told.or_else(|errno| if errno == Errno::PIPE { Ok(()) } else { Err(errno) })?;
        self.receive()
    }

    /// Receives a reply.
    ///
    /// # Errors
    /// `EPIPE`: the engine is gone. `EAGAIN`: it does not answer. `EPROTO`: its reply is invalid.
    fn receive(&self) -> Result<Answer, Errno> {
        let mut bytes = [0; REPLY];
        let got = rustix::io::retry_on_intr(|| {
            let pieces = &mut [std::io::IoSliceMut::new(&mut bytes)];
            slipway_peer::receive_reply(&self.socket, pieces, &Bin::new(), RecvFlags::empty())
        })?;
        if got.bytes == 0 {
            return Err(Errno::PIPE);
        }
        // All descriptors are the engine's own: eventfds and memory that it made, and its
        // connections. It passes on nothing that another program sent, so closing one never blocks.
        let mut descriptors = Descriptors::default();
        for (place, fd) in descriptors.0.iter_mut().zip(got.files) {
            *place = Some(fd.into_owned());
        }
        let reply = Reply::decode(&bytes[..got.bytes]).ok_or(Errno::PROTO)?;
        Ok(Answer { reply, descriptors })
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::socketpair;
    use slipway_sgiov_spec::control::REQUEST;

    use super::*;

    /// Returns a connection and the engine's side of it. Neither waits.
    fn pair() -> (Connection, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::SEQPACKET;
        let (ours, engine) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        (Connection::of(Hidden::new(ours).unwrap()).unwrap(), engine)
    }

    fn requests(engine: &OwnedFd) -> Vec<Request> {
        let (mut all, mut bytes) = (Vec::new(), [0; REQUEST]);
        while let Ok(REQUEST) = rustix::io::read(engine, &mut bytes) {
            all.push(Request::decode(&bytes).unwrap());
        }
        all
    }

    /// Fills the connection, so that the kernel refuses the next message.
    fn fill(connection: &mut Connection) {
        while connection.tell(Request::Share { on: true }, None).is_ok() {}
    }

    const NEXT: Request = Request::Share { on: false };

    #[test]
    fn a_close_that_was_not_sent_is_sent_before_the_next_request_and_once() {
        let (mut connection, engine) = pair();
        fill(&mut connection);
        connection.close(7);
        connection.close(9);
        assert_eq!(connection.tell(NEXT, None), Err(Errno::AGAIN), "it would come before them");
        requests(&engine);
        connection.close(8);
        let close = |entry| Request::Close { entry };
        assert_eq!(requests(&engine), [close(9), close(7), close(8)]);
        connection.tell(NEXT, None).unwrap();
        assert_eq!(requests(&engine), [NEXT]);
    }

    #[test]
    fn a_listener_that_could_not_be_closed_is_closed_before_the_next_request() {
        let (mut connection, engine) = pair();
        fill(&mut connection);
        for listener in [7, 8] {
            assert_eq!(connection.unlisten(listener), Err(Errno::AGAIN));
        }
        requests(&engine);
        // The replies to what was kept come first, and are not the next request's.
        for reply in [Reply::Done, Reply::Refused(9), Reply::Refused(5)] {
            rustix::io::write(&engine, &reply.encode()).unwrap();
        }
        let answer = connection.ask(Request::Report, None).unwrap();
        assert_eq!(answer.reply, Reply::Refused(5));
        let unlisten = |listener| Request::Unlisten { listener };
        assert_eq!(requests(&engine), [unlisten(8), unlisten(7), Request::Report]);
        rustix::io::write(&engine, &Reply::Done.encode()).unwrap();
        connection.unlisten(9).unwrap();
        assert_eq!(requests(&engine), [unlisten(9)]);
    }

    #[test]
    fn a_forked_child_tells_what_it_holds_on_its_own_connection() {
        let (mut connection, parents) = pair();
        fill(&mut connection);
        connection.close(7);
        connection.unlisten(8).unwrap_err();
        requests(&parents);
        let (own, engine) = pair();
        connection.replace(own);
        for reply in [Reply::Done, Reply::Refused(5)] {
            rustix::io::write(&engine, &reply.encode()).unwrap();
        }
        connection.ask(Request::Report, None).unwrap();
        let unlisten = Request::Unlisten { listener: 8 };
        assert_eq!(requests(&engine), [Request::Close { entry: 7 }, unlisten, Request::Report]);
        assert!(requests(&parents).is_empty());
    }

    #[test]
    fn a_forked_child_without_a_connection_says_nothing_on_its_parents() {
        let (mut connection, parents) = pair();
        connection.give_up();
        connection.close(7);
        assert_eq!(connection.ask(Request::Fork, None).err(), Some(Errno::NOTCONN));
        assert!(requests(&parents).is_empty());
    }
}
