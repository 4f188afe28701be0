//! Serves the socket of a memory port, on the switch's own reactor: nothing here waits for a
//! client.
//!
//! A connection is *pending* until it has sent [`Hello`]. The first to send it while the port is
//! free becomes the client; others are told that the port is busy. A client that sends anything
//! more, or closes its socket, is disconnected. There are at most [`PENDING`] pending connections;
//! a new one replaces the oldest, so a silent connection keeps nobody out.
//!
//! No descriptor is expected. Descriptors that come nevertheless, and every connection, which may
//! hold some, are closed through the port's [`Bin`]: that may take as long as a client likes. While
//! the bin holds more than [`HELD`], no connection is accepted.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use slipway_peer::{Bin, Foreign};
use slipway_reactor::{Context, Interest, Step, Stopped, Task, TaskId};
use slipway_ring::{Geometry, Hello, Link, Takes, Welcome};
use slipway_switch::ports::{MemoryPort, Tell, UnpluggedPort};
use slipway_switch::{Abilities, Handle, Port, PortIndex};

use super::listener::Listener;

/// The largest number of connections that have sent nothing yet.
const PENDING: usize = 8;
/// The number of connections accepted in a step.
const STEP: usize = 16;
/// The number of descriptors and connections awaiting closing above which no connection is
/// accepted.
const HELD: usize = 64;
/// The pause in accepting when no descriptors are left, or too many await closing.
const REST: Duration = Duration::from_millis(100);
/// The token that the listener is watched with; connections have tokens from 1.
const LISTENER: u32 = 0;

/// The control thread's handle to a gate.
pub struct Keyhole {
    stop: Arc<AtomicBool>,
    reactor: slipway_reactor::Handle,
    task: TaskId,
    /// Disconnected when the task ends.
    end: Mutex<Receiver<()>>,
}

impl Keyhole {
    /// Ends the gate with its client and its socket; waits for that, up to `patience`.
    pub fn close(&self, patience: Duration) {
        self.stop.store(true, Ordering::Release);
        // A reactor that has ended has dropped its tasks.
        let _ = self.reactor.wake(self.task);
        let end = self.end.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let _ = end.recv_timeout(patience);
    }
}

/// A connection, and the token that it is watched with.
struct Connection {
    socket: Foreign,
    token: u32,
}

/// The task that serves the socket of a port.
pub struct Gate {
    listener: Listener,
    switch: Handle,
    port: PortIndex,
    geometry: Geometry,
    mac: [u8; 6],
    client: Option<Connection>,
    pending: VecDeque<Connection>,
    next: u32,
    /// The time until which no connection is accepted; `None` if connections are accepted now.
    rests: Option<Instant>,
    stop: Arc<AtomicBool>,
    _end: SyncSender<()>,
}

impl Gate {
    /// Has `reactor` serve `listener` for a port of a switch. The port's links have this geometry.
    pub fn spawn(
        reactor: &slipway_reactor::Handle,
        listener: Listener,
        (switch, port): (Handle, PortIndex),
        geometry: Geometry,
        mac: [u8; 6],
    ) -> Result<Keyhole, Stopped> {
        let stop = Arc::new(AtomicBool::new(false));
        let (_end, end) = sync_channel(0);
        let gate = Self {
            listener,
            switch,
            port,
            geometry,
            mac,
            client: None,
            pending: VecDeque::new(),
            next: LISTENER + 1,
            rests: None,
            stop: Arc::clone(&stop),
            _end,
        };
        let task = reactor.add(Box::new(gate))?;
        Ok(Keyhole { stop, reactor: reactor.clone(), task, end: Mutex::new(end) })
    }

    fn accept(&mut self, context: &mut Context<'_>) {
        for _ in 0..STEP {
            if self.listener.bin().held() > HELD {
                return self.rest(context);
            }
            match self.listener.accept() {
                Ok(Some(socket)) => self.admit(socket, context),
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "a client of a memory port waits to be accepted");
                    return self.rest(context);
                }
            }
        }
    }

    fn rest(&mut self, context: &mut Context<'_>) {
        self.rests = Some(context.now() + REST);
        let _ = context.rewatch(LISTENER, Interest::None);
    }

    fn admit(&mut self, socket: Foreign, context: &mut Context<'_>) {
        if self.pending.len() == PENDING
            && let Some(oldest) = self.pending.pop_front()
        {
            context.unwatch(oldest.token);
        }
        let token = self.next;
        // A token that is not in use: there are few connections at a time.
        self.next = self.next.checked_add(1).unwrap_or(LISTENER + 1);
        // A message that was already sent makes the socket readable in the next step.
        if context.watch(socket.as_fd(), Interest::Read, token).is_ok() {
            self.pending.push_back(Connection { socket, token });
        }
    }

    /// Handles a connection that is readable or closed.
    fn hear(&mut self, token: u32, context: &mut Context<'_>) {
        if self.client.as_ref().is_some_and(|client| client.token == token) {
            return self.part(context);
        }
        let Some(at) = self.pending.iter().position(|one| one.token == token) else { return };
        let mut bytes = [0; Hello::LEN + 1];
        let said = match hear(&self.pending[at].socket, &mut bytes, self.listener.bin()) {
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(_) => Err(0),
            Ok(len) => Hello::decode(&bytes[..len]),
        };
        let Some(connection) = self.pending.remove(at) else { return };
        let status = match said {
            Ok(_) if self.client.is_some() => Welcome::BUSY,
            Ok(hello) => match self.connect(&connection.socket, hello.takes) {
                Ok(()) => return self.client = Some(connection),
                Err(status) => status,
            },
            Err(status) => status,
        };
        // Before the connection is closed: the duplicate that is watched must not be the last one.
        context.unwatch(token);
        if status != 0 {
            // A client that does not accept the refusal at once does not get it.
            let _ = send(&connection.socket, &Welcome::refusal(status), &[]);
        }
    }

    /// Makes a new link for a client. The error is the status that the client is refused with.
    fn connect(&self, socket: &Foreign, takes: Takes) -> Result<(), u32> {
        let lacking =
            |error: std::io::Error| error.raw_os_error().map_or(12, |number| number as u32);
        if !slipway_peer::eventfd::can_raise() {
            return Err(Welcome::LACKING);
        }
        let link = Link::new(self.geometry).map_err(lacking)?;
        let tell = Tell::new().map_err(lacking)?;
        let theirs = [&tell.server, &tell.peer].map(OwnedFd::try_clone);
        let [to_server, to_peer] = theirs;
        let (to_server, to_peer) = (to_server.map_err(lacking)?, to_peer.map_err(lacking)?);
        let file = link.file().ok_or(12_u32)?;
        let Takes { checksum, tcp4, tcp6, udp } = takes;
        let port = MemoryPort::new(&link, tell, Abilities { checksum, tcp4, tcp6, udp });
        self.plug(Box::new(port));
        let files = [file, to_server.as_fd(), to_peer.as_fd()];
        if send(socket, &Welcome::new(self.mac), &files).is_err() {
            self.plug(Box::new(UnpluggedPort));
            return Err(0);
        }
        Ok(())
    }

    /// Replaces the switch's port; the switch does so before later requests.
    fn plug(&self, port: Box<dyn Port>) {
        let index = self.port;
        // An error means that the switch is gone, its ports with it, and this gate soon.
        let _ = self.switch.run(move |owner| drop(owner.replace(index, port)));
    }

    /// Disconnects the client, which has hung up or broken the protocol.
    fn part(&mut self, context: &mut Context<'_>) {
        if let Some(client) = self.client.take() {
            context.unwatch(client.token);
            self.plug(Box::new(UnpluggedPort));
        }
    }
}

impl Task for Gate {
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        let resting = self.rests.is_some();
        let listening = if resting { Interest::None } else { Interest::Read };
        // A gate that slept in a step starts again, on a thread of its own.
        for connection in self.client.iter().chain(&self.pending) {
            context.watch(connection.socket.as_fd(), Interest::Read, connection.token)?;
        }
        context.watch(self.listener.file(), listening, LISTENER)
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Step {
        if self.stop.load(Ordering::Acquire) {
            return Step::Done;
        }
        let tokens: Vec<u32> = context.events().iter().map(|event| event.token).collect();
        // Connections that end make room for new ones.
        tokens
            .iter()
            .filter(|token| **token != LISTENER)
            .for_each(|token| self.hear(*token, context));
        if self.rests.is_some_and(|until| until <= context.now()) {
            self.rests = None;
            let _ = context.rewatch(LISTENER, Interest::Read);
        }
        if self.rests.is_none() && tokens.contains(&LISTENER) {
            self.accept(context);
        }
        Step::Idle(self.rests)
    }
}

/// Receives one message. Returns its length, or that of `bytes` if the message is longer.
fn hear(socket: &Foreign, bytes: &mut [u8], bin: &Bin) -> Result<usize, Errno> {
    let parts = &mut [IoSliceMut::new(bytes)];
    slipway_peer::receive(socket, parts, bin, RecvFlags::DONTWAIT).map(|received| received.bytes)
}

fn send(socket: &Foreign, welcome: &Welcome, files: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::INVAL);
    }
    let bytes = welcome.encode();
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    // A packet is sent completely or not at all.
    rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags).map(drop)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    use slipway_peer::MAX_FILES;

    use super::*;

    /// Needs a kernel that lets descriptors pass.
    #[test]
    fn a_greeting_with_descriptors_that_cannot_be_closed_is_heard() {
        let (lingering, _other) = slipway_peer::testing::lingering().unwrap();
        let flags = SocketFlags::CLOEXEC;
        let kind = SocketType::SEQPACKET;
        let pair = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None);
        let (ours, theirs) = pair.unwrap();
        for _ in 0..2 {
            let files = [lingering.as_fd(); MAX_FILES];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
            let parts = [IoSlice::new(b"hello")];
            rustix::net::sendmsg(&theirs, &parts, &mut control, SendFlags::NOSIGNAL).unwrap();
        }
        drop(lingering);
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let (bin, mut bytes) = (Bin::new(), [0; Hello::LEN + 1]);
            let ours = Foreign::new(ours, &bin);
            let heard = hear(&ours, &mut bytes, &bin);
            // With the second message unread.
            drop(ours);
            let _ = done.send(heard);
        });
        assert_eq!(is_done.recv_timeout(Duration::from_secs(60)).unwrap(), Ok(5));
    }
}
