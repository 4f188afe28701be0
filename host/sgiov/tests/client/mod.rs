//! A small client of the engine: raw messages, and streams over the descriptors that come with the
//! replies.
#![allow(dead_code)] // not every test needs all of it

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use slipway_peer::{Bin, Foreign};
use slipway_ram::Lasting;
use slipway_ring::cross::{Arena, Error, Own, Regions, Side, Stream};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::{Endpoint, REPLY, Reply, Request, VERSION};
use slipway_sgiov_spec::table::{self, entry};

/// The time that a test waits on a busy machine before it fails.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Client {
    pub socket: OwnedFd,
    pub table: Lasting,
    pub bell: OwnedFd,
    pub entries: usize,
    pub links: usize,
    pub arenas: HashMap<u16, Arena>,
}

/// A connected endpoint.
pub struct Connected {
    pub endpoint: Endpoint,
    pub eventfd: OwnedFd,
    pub peer: OwnedFd,
    /// The number of the group of endpoints that share its eventfd.
    pub group: u32,
    /// Set while the eventfd of the other side is not fetched yet.
    pub later: bool,
}

pub fn connect(path: &Path) -> OwnedFd {
    let address = SocketAddrUnix::new(path).unwrap();
    let begun = Instant::now();
    loop {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return socket,
            Err(error) => assert!(begun.elapsed() < PATIENCE, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn send(socket: &OwnedFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(files)));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
        .map(drop)
}

/// Receives a reply with its descriptors. Returns `None` if the engine has hung up.
pub fn receive(socket: &OwnedFd) -> Option<(Reply, Vec<OwnedFd>)> {
    assert!(readable(socket.as_fd(), PATIENCE), "no reply");
    let mut bytes = [0; REPLY + 1];
    let parts = &mut [IoSliceMut::new(&mut bytes)];
    let message =
        slipway_peer::receive_reply(socket, parts, &Bin::new(), RecvFlags::empty()).ok()?;
    let files = message.files.into_iter().map(Foreign::into_owned).collect();
    (message.bytes > 0).then(|| (Reply::decode(&bytes[..message.bytes]).unwrap(), files))
}

pub fn readable(file: BorrowedFd<'_>, patience: Duration) -> bool {
    let wait =
        Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
    let mut polled = [PollFd::new(&file, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut polled, Some(&wait))).unwrap() > 0
}

/// Waits until `done` returns `true`.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

impl Client {
    pub fn attach(path: &Path) -> Self {
        Self::over(connect(path))
    }

    pub fn over(socket: OwnedFd) -> Self {
        // The context for raising eventfds is made now: a process at its group's memory limit
        // gets none.
        assert!(slipway_peer::eventfd::can_raise());
        send(&socket, &Request::Attach { version: VERSION }.encode(), &[]).unwrap();
        let (reply, files) = receive(&socket).unwrap();
        let Reply::Attached { entries, links } = reply else { panic!("{reply:?}") };
        let [table, bell] = <[OwnedFd; 2]>::try_from(files).unwrap();
        Self::of(socket, table, bell, (entries as usize, links as usize))
    }

    fn of(
        socket: OwnedFd,
        table: OwnedFd,
        bell: OwnedFd,
        (entries, links): (usize, usize),
    ) -> Self {
        let table = Lasting::of(table).unwrap();
        assert!(table.len() >= table::bytes(entries, links));
        Self { socket, table, bell, entries, links, arenas: HashMap::new() }
    }

    /// Makes a client of the descriptors that came with the reply to [`Request::Resume`].
    pub fn resumed(files: Vec<OwnedFd>) -> Self {
        let [table, bell, socket] = <[OwnedFd; 3]>::try_from(files).unwrap();
        let words = Lasting::of(table.try_clone().unwrap()).unwrap();
        let word = |at: usize| words.words()[at].load(Ordering::Relaxed) as usize;
        Self::of(socket, table, bell, (word(2), word(3)))
    }

    pub fn held(&mut self, entry: u64) -> Result<Connected, u32> {
        let answer = self.ask(Request::Held { entry });
        self.connected(answer)
    }

    pub fn ask(&self, request: Request) -> (Reply, Vec<OwnedFd>) {
        send(&self.socket, &request.encode(), &[]).unwrap();
        receive(&self.socket).unwrap()
    }

    /// Listens. Returns the listener and its eventfd.
    pub fn listen(&self, at: Address, backlog: u32) -> (u64, OwnedFd) {
        let (reply, mut files) =
            self.ask(Request::Listen { at, backlog, shared: false, v6_only: false });
        let Reply::Listening { listener, .. } = reply else { panic!("{reply:?}") };
        (listener, files.pop().unwrap())
    }

    pub fn connect(&mut self, to: Address) -> Result<Connected, u32> {
        self.connect_from(Address::ANY, to)
    }

    pub fn connect_from(&mut self, from: Address, to: Address) -> Result<Connected, u32> {
        let answer = self.ask(Request::Connect { to, from });
        self.connected(answer)
    }

    /// Takes the reply to a request to connect that was sent before.
    pub fn take_connected(&mut self) -> Result<Connected, u32> {
        let answer = receive(&self.socket).unwrap();
        self.connected(answer)
    }

    pub fn accept(&mut self, listener: u64) -> Result<Connected, u32> {
        let answer = self.ask(Request::Accept { listener });
        self.connected(answer)
    }

    fn connected(&mut self, (reply, files): (Reply, Vec<OwnedFd>)) -> Result<Connected, u32> {
        let (endpoint, new_link, group, later) = match reply {
            Reply::Refused(errno) => return Err(errno),
            Reply::Connected { endpoint, new_link, group, peer_later } => {
                (endpoint, new_link, group, peer_later)
            }
            other => panic!("{other:?}"),
        };
        let mut files = files.into_iter();
        let eventfd = files.next().unwrap();
        // The engine is notified by a signal, and by the bell.
        let peer = if endpoint.place.engine {
            self.bell.try_clone().unwrap()
        } else if later {
            // The other side does not sleep yet; see `Client::peer`.
            eventfd.try_clone().unwrap()
        } else {
            files.next().unwrap()
        };
        if new_link {
            let arena = Arena::open(files.next().unwrap()).unwrap();
            self.arenas.insert(endpoint.place.link, arena);
        }
        assert!(files.next().is_none());
        assert!(self.arenas.contains_key(&endpoint.place.link));
        Ok(Connected { endpoint, eventfd, peer, group, later })
    }

    /// Allows or forbids that endpoints share eventfds from now on.
    pub fn share(&self, on: bool) {
        send(&self.socket, &Request::Share { on }.encode(), &[]).unwrap();
    }

    /// Returns the eventfd that the other side of an endpoint sleeps on.
    pub fn peer(&mut self, entry: u64) -> Result<OwnedFd, u32> {
        match self.ask(Request::Peer { entry }) {
            (Reply::Done, files) => Ok(files.into_iter().next().unwrap()),
            (Reply::Refused(errno), _) => Err(errno),
            other => panic!("{other:?}"),
        }
    }

    /// Closes a connection. A program whose control group has no memory left repeats the request
    /// until there is some: the kernel counts the message, too.
    pub fn close(&self, connected: Connected) {
        let request = Request::Close { entry: connected.endpoint.entry }.encode();
        let begun = Instant::now();
        while let Err(errno) = send(&self.socket, &request, &[]) {
            assert!(errno == Errno::NOBUFS && begun.elapsed() < PATIENCE, "{errno}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn word(&self, number: u64, word: usize) -> &AtomicU64 {
        &self.table.words()[(table::ENTRIES + number as usize * table::ENTRY) / 8 + word]
    }

    pub fn stream(&self, connected: &Connected) -> Stream<'_> {
        let place = connected.endpoint.place;
        let number = connected.endpoint.entry;
        let own = |own, seen| Own { own: self.word(number, own), seen: self.word(number, seen) };
        let side = if place.side == 0 { Side::Zero } else { Side::One };
        let (out, into) =
            (own(entry::TX_TAIL, entry::TX_SEEN), own(entry::RX_HEAD, entry::RX_SEEN));
        Stream::new(&self.arenas[&place.link], place.stream, side, out, into)
    }

    pub fn regions(&self, connected: &Connected) -> Regions<'_> {
        let link = usize::from(connected.endpoint.place.link);
        let first = (table::links(self.entries) + link * table::LINK) / 8;
        let shape = self.arenas[&connected.endpoint.place.link].shape();
        Regions::new(&self.table.words()[first..first + Regions::WORDS], shape)
    }

    pub fn tell(&self, connected: &Connected) {
        if connected.endpoint.place.engine {
            let first = table::signals(self.entries, self.links) / 8;
            let words = self.table.words();
            let at = words[first].load(Ordering::Relaxed);
            let event = &words[first + 16 + at as usize % table::SIGNALS];
            event.store(connected.endpoint.entry, Ordering::Relaxed);
            words[first].store(at + 1, Ordering::Release);
        }
        // The kernel may refuse a program whose control group has no memory left. A library asks
        // the engine then.
        let begun = Instant::now();
        while !slipway_peer::eventfd::raise(connected.peer.as_fd()) {
            assert!(begun.elapsed() < PATIENCE, "the peer cannot be woken");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn write(&self, connected: &Connected, bytes: &[u8]) -> Result<usize, Error> {
        let tell = || self.tell(connected);
        self.stream(connected).write(bytes, 4 << 20, self.regions(connected), tell)
    }

    /// Writes as a library does: under the lock of the sending half.
    pub fn send(&self, connected: &Connected, bytes: &[u8]) -> Result<usize, Error> {
        let lock = self.word(connected.endpoint.entry, entry::TX_LOCK);
        lock.store(1, Ordering::Relaxed);
        let sent = self.write(connected, bytes);
        lock.store(0, Ordering::Relaxed);
        sent
    }

    /// Reads the next bytes, at most `most`. An empty result is the end of the stream.
    pub fn read(&self, connected: &Connected, most: usize) -> Result<Vec<u8>, Error> {
        let begun = Instant::now();
        let mut into = vec![0; most];
        loop {
            let stream = self.stream(connected);
            let tell = || self.tell(connected);
            let count = stream.read(&mut into, tell)?;
            if count > 0 || stream.available()?.1 {
                into.truncate(count);
                return Ok(into);
            }
            assert!(begun.elapsed() < PATIENCE, "nothing came");
            if !stream.arm_data(1)? {
                readable(connected.eventfd.as_fd(), Duration::from_secs(1));
                slipway_peer::eventfd::drain(connected.eventfd.as_fd());
            }
        }
    }
}
