//! A minimal engine for tests of clients: one tenant, no policy, nothing given back.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use slipway_ram::Lasting;
use slipway_ring::cross::{Arena, Own, Regions, Side, Stream};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::{Endpoint, NOT_OURS, REQUEST, Reply, Request};
use slipway_sgiov_spec::table::{self, Place, entry};

const ENTRIES: usize = 1024;
const LINKS: usize = 64;

struct Family {
    table: Lasting,
    bell: OwnedFd,
    next: u64,
    /// The other family's number, and the arena, of each link.
    links: Vec<(usize, Arena)>,
    /// The holders and eventfds of each entry.
    open: BTreeMap<u64, Open>,
}

struct Open {
    holders: HashSet<usize>,
    own: OwnedFd,
    peer: OwnedFd,
    place: Place,
    local: Address,
    remote: Address,
}

struct Process {
    socket: OwnedFd,
    family: usize,
    links: HashSet<u16>,
}

struct Listener {
    at: Address,
    family: usize,
    eventfd: OwnedFd,
    waiting: VecDeque<(Endpoint, Open)>,
    holders: HashSet<usize>,
}

pub struct Engine {
    listener: OwnedFd,
    families: Vec<Family>,
    processes: BTreeMap<usize, Process>,
    listeners: BTreeMap<u64, Listener>,
    streams: HashMap<(usize, usize), u32>,
    next: usize,
    port: u16,
}

impl Engine {
    pub fn new(path: &Path) -> Self {
        let kind = SocketType::SEQPACKET;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
                .unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::listen(&listener, 64).unwrap();
        Self {
            listener,
            families: Vec::new(),
            processes: BTreeMap::new(),
            listeners: BTreeMap::new(),
            streams: HashMap::new(),
            next: 1,
            port: 40_000,
        }
    }

    /// Serves until `stop` hangs up.
    pub fn run(mut self, stop: &OwnedFd) {
        loop {
            let ids: Vec<usize> = self.processes.keys().copied().collect();
            let mut fds =
                vec![PollFd::new(stop, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
            fds.extend(self.processes.values().map(|p| PollFd::new(&p.socket, PollFlags::IN)));
            poll(&mut fds, None).unwrap();
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(fds);
            if ready[0] {
                return;
            }
            for (id, _) in ids.iter().zip(&ready[2..]).filter(|(_, ready)| **ready) {
                self.serve(*id);
            }
            if ready[1] {
                let socket =
                    rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC).unwrap();
                self.admit(socket, usize::MAX, HashSet::new());
            }
        }
    }

    fn admit(&mut self, socket: OwnedFd, family: usize, links: HashSet<u16>) -> usize {
        self.next += 1;
        self.processes.insert(self.next, Process { socket, family, links });
        self.next
    }

    fn serve(&mut self, id: usize) {
        let mut bytes = [0; REQUEST];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let socket = &self.processes[&id].socket;
        let pieces = &mut [IoSliceMut::new(&mut bytes)];
        #[allow(
            clippy::disallowed_methods,
            reason = "an engine for tests, whose client is the test"
        )]
        let got = rustix::net::recvmsg(socket, pieces, &mut ancillary, RecvFlags::CMSG_CLOEXEC);
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                fds.for_each(drop);
            }
        }
        match got {
            Ok(got) if got.bytes > 0 => match Request::decode(&bytes) {
                Some(request) => self.answer(id, request),
                None => self.gone(id),
            },
            _ => self.gone(id),
        }
    }

    fn gone(&mut self, id: usize) {
        let process = self.processes.remove(&id).unwrap();
        if process.family == usize::MAX {
            return;
        }
        let entries: Vec<u64> = self.families[process.family].open.keys().copied().collect();
        for number in entries {
            self.release(id, process.family, number);
        }
        let listeners: Vec<u64> = self.listeners.keys().copied().collect();
        for listener in listeners {
            self.unlisten(id, listener);
        }
    }

    /// Removes a process from the holders of a listener. With the last one, waiting connections are
    /// reset.
    fn unlisten(&mut self, id: usize, number: u64) {
        let Some(listener) = self.listeners.get_mut(&number) else { return };
        listener.holders.remove(&id);
        if !listener.holders.is_empty() {
            return;
        }
        let listener = self.listeners.remove(&number).unwrap();
        for (endpoint, open) in listener.waiting {
            self.end(listener.family, endpoint.entry, &open, true);
        }
    }

    fn release(&mut self, id: usize, family: usize, number: u64) {
        let entries = &mut self.families[family].open;
        let Some(open) = entries.get_mut(&number) else { return };
        if !open.holders.remove(&id) || !open.holders.is_empty() {
            return;
        }
        let open = entries.remove(&number).unwrap();
        self.end(family, number, &open, false);
    }

    /// Ends the stream of a family's entry, with a reset if `aborts` or if bytes were not read.
    fn end(&self, family: usize, number: u64, open: &Open, aborts: bool) {
        let family = &self.families[family];
        let arena = &family.links[usize::from(open.place.link)].1;
        let at = (table::ENTRIES + number as usize * table::ENTRY) / 8;
        let words = &family.table.words()[at..at + entry::WORDS];
        let out = Own { own: &words[entry::TX_TAIL], seen: &words[entry::TX_SEEN] };
        let into = Own { own: &words[entry::RX_HEAD], seen: &words[entry::RX_SEEN] };
        let side = if open.place.side == 0 { Side::Zero } else { Side::One };
        let stream = Stream::new(arena, open.place.stream, side, out, into);
        if aborts || stream.available().is_ok_and(|(count, _)| count > 0) {
            stream.out.reset();
            stream.into.reset();
        } else if !stream.out.tail().is_reset() {
            stream.out.finish();
            stream.into.shut();
        }
        rustix::io::write(&open.peer, &1u64.to_ne_bytes()).unwrap();
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    fn send(&self, id: usize, reply: Reply, fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        let bytes = reply.encode();
        let _ = rustix::net::sendmsg(
            &self.processes[&id].socket,
            &[IoSlice::new(&bytes)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        );
    }

    fn answer(&mut self, id: usize, request: Request) {
        let family = self.processes[&id].family;
        match request {
            Request::Attach { .. } => self.attach(id),
            Request::Fork | Request::Exec => self.fork(id),
            Request::Resume => self.resume(id),
            Request::Held { entry } => self.held(id, entry),
            Request::HeldListener { listener } => self.held_listener(id, listener),
            Request::Listen { mut at, .. } => {
                if at.port == 0 {
                    self.port += 1;
                    at.port = self.port;
                }
                if self.listeners.values().any(|l| l.at.port == at.port) {
                    return self.send(id, Reply::Refused(98), &[]);
                }
                let flags =
                    EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
                let own = eventfd(0, flags).unwrap();
                let copy = own.try_clone().unwrap();
                self.next += 1;
                let listener = self.next as u64;
                let (waiting, holders) = (VecDeque::new(), HashSet::from([id]));
                let new = Listener { at, family, eventfd: own, waiting, holders };
                self.listeners.insert(listener, new);
                self.send(id, Reply::Listening { listener, at }, &[copy.as_fd()]);
            }
            Request::Unlisten { listener } => {
                self.unlisten(id, listener);
                self.send(id, Reply::Done, &[]);
            }
            Request::Accept { listener } => {
                let waiting = self.listeners.get_mut(&listener).and_then(|l| l.waiting.pop_front());
                match waiting {
                    None => self.send(id, Reply::Refused(11), &[]),
                    Some((endpoint, open)) => self.grant(id, endpoint, open),
                }
            }
            Request::Connect { to, .. } => self.connect(id, to),
            Request::Close { entry } => self.release(id, family, entry),
            // An engine need not share eventfds.
            Request::Share { .. } => {}
            Request::Peer { .. } => self.send(id, Reply::Refused(11), &[]),
            Request::Report | Request::Function { .. } => self.send(id, Reply::Refused(38), &[]),
        }
    }

    fn attach(&mut self, id: usize) {
        let table = Lasting::new("table", table::bytes(ENTRIES, LINKS)).unwrap();
        let header = [table::MAGIC, table::VERSION, ENTRIES as u64, LINKS as u64];
        for (word, value) in table.words().iter().zip(header) {
            word.store(value, Ordering::Relaxed);
        }
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let file = table.file().unwrap().try_clone_to_owned().unwrap();
        let other = bell.try_clone().unwrap();
        self.processes.get_mut(&id).unwrap().family = self.families.len();
        self.families.push(Family {
            table,
            bell,
            next: 0,
            links: Vec::new(),
            open: BTreeMap::new(),
        });
        let reply = Reply::Attached { entries: ENTRIES as u64, links: LINKS as u64 };
        self.send(id, reply, &[file.as_fd(), other.as_fd()]);
        let _ = &self.families.last().unwrap().bell;
    }

    fn fork(&mut self, id: usize) {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let (family, links) = {
            let parent = &self.processes[&id];
            (parent.family, parent.links.clone())
        };
        let child = self.admit(ours, family, links);
        for open in self.families[family].open.values_mut() {
            if open.holders.contains(&id) {
                open.holders.insert(child);
            }
        }
        for listener in self.listeners.values_mut() {
            if listener.holders.contains(&id) {
                listener.holders.insert(child);
            }
        }
        self.send(id, Reply::Done, &[theirs.as_fd()]);
    }

    fn resume(&mut self, id: usize) {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        let process = self.processes.get_mut(&id).unwrap();
        process.links.clear();
        let family = &self.families[process.family];
        let file = family.table.file().unwrap().try_clone_to_owned().unwrap();
        let bell = family.bell.try_clone().unwrap();
        let reply = Reply::Attached { entries: ENTRIES as u64, links: LINKS as u64 };
        self.send(id, reply, &[file.as_fd(), bell.as_fd(), theirs.as_fd()]);
        self.processes.get_mut(&id).unwrap().socket = ours;
    }

    fn held_listener(&self, id: usize, from: u64) {
        let mut all = self.listeners.range(from..);
        match all.find(|(_, listener)| listener.holders.contains(&id)) {
            None => self.send(id, Reply::Refused(2), &[]),
            Some((number, there)) => {
                let reply = Reply::Listening { listener: *number, at: there.at };
                self.send(id, reply, &[there.eventfd.as_fd()]);
            }
        }
    }

    fn held(&mut self, id: usize, from: u64) {
        let family = self.processes[&id].family;
        let mut all = self.families[family].open.range(from..);
        let Some((entry, _)) = all.find(|(_, open)| open.holders.contains(&id)) else {
            return self.send(id, Reply::Refused(2), &[]);
        };
        let entry = *entry;
        let open = self.families[family].open.remove(&entry).unwrap();
        let endpoint = Endpoint { entry, place: open.place, local: open.local, peer: open.remote };
        self.grant(id, endpoint, open);
    }

    /// Returns the link from family `from` to family `to`, with an arena that both know.
    fn link(&mut self, from: usize, to: usize) -> (u16, u16, Arena) {
        let find = |engine: &Self, a: usize, b: usize, skip: usize| {
            let links = engine.families[a].links.iter().enumerate();
            links.filter(|(_, link)| link.0 == b).nth(skip).map(|(at, _)| at as u16)
        };
        let second = usize::from(from == to);
        if find(self, from, to, 0).is_none() {
            let arena = Arena::new(Regions::shape(512)).unwrap();
            self.families[from].links.push((to, arena.clone()));
            self.families[to].links.push((from, arena));
        }
        let (mine, theirs) =
            (find(self, from, to, 0).unwrap(), find(self, to, from, second).unwrap());
        (mine, theirs, self.families[from].links[usize::from(mine)].1.clone())
    }

    fn connect(&mut self, id: usize, to: Address) {
        let family = self.processes[&id].family;
        let found = self.listeners.iter().find(|(_, listener)| {
            listener.at.port == to.port && (listener.at.is_unspecified() || listener.at.ip == to.ip)
        });
        let Some((&listener, found)) = found else {
            return self.send(id, Reply::Refused(NOT_OURS), &[]);
        };
        let other = found.family;
        let (mine, theirs, _) = self.link(family, other);
        let pair = (family.min(other), family.max(other));
        let number = self.streams.entry(pair).or_default();
        let stream = *number;
        *number += 1;
        let side = u8::from(family > other);
        let make = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (own, peer) = (make(), make());
        self.port += 1;
        let local = Address { ip: to.ip, port: self.port };
        let place = |side, link| Place { stream, side, engine: false, same_tenant: true, link };
        let mut entry = |family: usize| {
            self.families[family].next += 1;
            self.families[family].next - 1
        };
        let client = Endpoint { entry: entry(family), place: place(side, mine), local, peer: to };
        let server = Endpoint {
            entry: entry(other),
            place: place(1 - side, theirs),
            local: to,
            peer: local,
        };
        let open = |endpoint: &Endpoint, own: &OwnedFd, peer: &OwnedFd| Open {
            holders: HashSet::new(),
            own: own.try_clone().unwrap(),
            peer: peer.try_clone().unwrap(),
            place: endpoint.place,
            local: endpoint.local,
            remote: endpoint.peer,
        };
        let waiting = (server, open(&server, &peer, &own));
        let listener = self.listeners.get_mut(&listener).unwrap();
        listener.waiting.push_back(waiting);
        rustix::io::write(&listener.eventfd, &1u64.to_ne_bytes()).unwrap();
        let open = open(&client, &own, &peer);
        self.grant(id, client, open);
    }

    fn grant(&mut self, id: usize, endpoint: Endpoint, mut open: Open) {
        open.holders.insert(id);
        let process = self.processes.get_mut(&id).unwrap();
        let new_link = process.links.insert(endpoint.place.link);
        let family = &mut self.families[process.family];
        let (own, peer) = (open.own.try_clone().unwrap(), open.peer.try_clone().unwrap());
        let at = (table::ENTRIES + endpoint.entry as usize * table::ENTRY) / 8;
        family.table.words()[at].store(endpoint.place.encode(), Ordering::Relaxed);
        family.open.insert(endpoint.entry, open);
        let arena = family.links[usize::from(endpoint.place.link)].1.clone();
        let mut fds = vec![own.as_fd(), peer.as_fd()];
        if new_link {
            fds.push(arena.file().unwrap());
        }
        let (group, peer_later) = (0, false);
        self.send(id, Reply::Connected { endpoint, new_link, group, peer_later }, &fds);
    }
}
