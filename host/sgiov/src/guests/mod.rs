//! Guests: their socket functions, and their streams to each other and to programs of this node.
//!
//! The engine's thread calls [`Guests`]. A reactor serves the functions (`serve`): accesses of a
//! guest's VMM to registers are handled there. A thread of its own (`carrying`) has the channels of
//! all guests and all streams with a guest at one end at least. It exchanges messages with the
//! guests (`talk`), and copies bytes once, from one end's FIFO into the other's (`pair`). In each
//! turn every stream moves a limited number of bytes. A stream with nothing to do is armed and
//! costs nothing, and if no stream has anything to do the thread sleeps (`sleep`). In an engine
//! with links, whose thread takes the programs' signals, this thread gets its own streams' signals
//! from there (`beside`).
//!
//! Nothing that a guest writes is trusted: `slipway_sgiov_function` checks memory, messages and
//! counters, and here the function of a guest that names something it does not own, or uses a
//! number twice, is broken. A stream with invalid counters ends alone. The end of a guest, for
//! whatever reason, resets its streams, and their other ends see ECONNRESET.

mod asked;
mod beside;
mod book;
mod carrying;
mod ear;
mod guest;
mod hearing;
mod pair;
mod serve;
mod sleep;
mod talk;

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::{Wake, Waker};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use slipway_family::Family;
use slipway_reactor::Reactor;
use slipway_sgiov_spec::Address;

use crate::Function;
use crate::policy::Policy;
use crate::remote::{Event, Line, StreamCarrier};

use beside::Claims;
use book::Book;
pub use book::GuestReport;
use carrying::{Carrying, Command, News};
use ear::SignalReceiver;
use serve::Served;

/// The bit of [`Event::Incoming`]'s numbers that marks requests of guests.
pub const GUESTS: u64 = 1 << 63;

/// An eventfd that wakes the thread.
struct Bell(OwnedFd);

impl Bell {
    fn new() -> std::io::Result<Arc<Self>> {
        Ok(Arc::new(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        slipway_family::wake(&self.0);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        slipway_family::wake(&self.0);
    }
}

/// The guests of an engine, for the engine's thread.
pub struct Guests {
    commands: Sender<Command>,
    wake: Arc<Bell>,
    news: Receiver<News>,
    notice: Arc<Bell>,
    book: Arc<Book>,
    policy: Policy,
    /// The functions, by guest.
    served: HashMap<u32, Served>,
    /// Connections with an end here.
    connections: HashSet<u32>,
    next: u32,
    reactor: Option<Reactor>,
    thread: Option<JoinHandle<()>>,
}

impl Guests {
    /// Starts the thread.
    ///
    /// # Errors
    /// No descriptors or threads are left.
    pub fn start(policy: Policy) -> std::io::Result<Self> {
        let (wake, notice) = (Bell::new()?, Bell::new()?);
        let (commands, theirs) = channel();
        let (told, news) = channel();
        let book = Arc::<Book>::default();
        let around = (theirs, told, notice.clone());
        let carrying = Carrying::new(wake.clone(), around, book.clone(), policy.clone())?;
        let thread = std::thread::Builder::new().name("slipway-guests".into());
        let thread = Some(thread.spawn(move || carrying.run())?);
        let (served, connections, reactor) = Default::default();
        Ok(Self {
            commands,
            wake,
            news,
            notice,
            book,
            policy,
            served,
            connections,
            next: 0,
            reactor,
            thread,
        })
    }

    /// Uses another policy for connections from now on.
    pub fn go_by(&mut self, policy: Policy) {
        self.policy = policy.clone();
        self.command(Command::Policy(policy));
    }

    /// Adds a family whose signals the links' thread takes. Returns the family for that thread.
    pub fn family_beside(&mut self, number: u32, family: Family) -> Family {
        let claims = Arc::<Claims>::default();
        self.command(Command::Beside(number, claims.clone()));
        let (commands, wake) = (self.commands.clone(), self.wake.clone());
        family.with_beside(Box::new(SignalReceiver { family: number, claims, commands, wake }))
    }

    fn command(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            self.wake.wake_by_ref();
        }
    }

    /// Serves a function to the VMM that connects to `listener`, for as long as the crate's
    /// protocol says. `asker` is the client that requested it.
    ///
    /// # Errors
    /// `listener` is no listening Unix socket; no descriptors or threads are left.
    pub fn add(
        &mut self,
        asker: u32,
        listener: OwnedFd,
        function: Function,
    ) -> std::io::Result<()> {
        let reactor = match self.reactor.take() {
            Some(reactor) => reactor,
            None => Reactor::spawn(slipway_reactor::Settings::default())?,
        };
        let reactor = self.reactor.insert(reactor);
        let waker = Waker::from(self.wake.clone());
        let memory = function.memory;
        let (served, peer) = serve::serve(asker, listener, memory, waker, &reactor.handle())?;
        let guest = self.next;
        self.next = self.next.wrapping_add(1);
        self.book.add(guest, function);
        self.command(Command::Add { guest, peer, control: served.control() });
        self.served.insert(guest, served);
        Ok(())
    }

    /// Removes the functions of a client that has gone, except those that a VMM has connected to.
    pub fn asker_left(&mut self, asker: u32) {
        let unused = |served: &Served| served.asker == asker && !served.was_used();
        let all = self.served.iter().filter(|(_, served)| unused(served));
        let all: Vec<u32> = all.map(|(guest, _)| *guest).collect();
        all.into_iter().for_each(|guest| self.remove(guest));
    }

    fn remove(&mut self, guest: u32) {
        // The command ends the channel, with which the function releases its memory.
        if let Some(served) = self.served.remove(&guest) {
            served.close();
            self.book.remove(guest);
            self.command(Command::Remove(guest));
        }
    }

    /// Returns whether no function is served.
    pub fn is_empty(&self) -> bool {
        self.served.is_empty()
    }

    /// Returns whether the connection is one with a guest.
    pub fn has(&self, connection: u32) -> bool {
        self.connections.contains(&connection)
    }

    /// Returns the report of all guests.
    pub fn report(&self) -> Vec<GuestReport> {
        self.book.report()
    }

    fn heard(&mut self, news: News) -> Option<Event> {
        match news {
            News::Gone(guest) => {
                self.remove(guest);
                None
            }
            News::Event(event) => {
                if let Event::Refused { connection, .. } | Event::Ended { connection, .. } = &event
                {
                    self.connections.remove(connection);
                }
                Some(event)
            }
        }
    }
}

impl StreamCarrier for Guests {
    fn is_for(&self, tenant: &str, to: &Address) -> bool {
        self.book.route(&self.policy, tenant, to).is_some()
    }

    fn family(&mut self, number: u32, family: Family) {
        self.command(Command::Family(number, family));
    }

    fn family_ended(&mut self, family: u32) {
        self.command(Command::FamilyEnded(family));
    }

    fn connect(&mut self, connection: u32, tenant: &str, from: Address, to: Address, line: Line) {
        self.connections.insert(connection);
        // `None` if the guest has stopped listening since the request.
        let guest = self.book.route(&self.policy, tenant, &to);
        self.command(Command::Connect { connection, guest, from, to, line });
    }

    fn answer(&mut self, incoming: u64, answer: Result<(u32, Line), u32>) {
        if let Ok((connection, _)) = &answer {
            self.connections.insert(*connection);
        }
        let incoming = (incoming & !GUESTS) as u32;
        self.command(Command::Answer { incoming, answer });
    }

    fn closed(&mut self, connection: u32) {
        self.command(Command::Closed(connection));
    }

    fn wakes(&self) -> BorrowedFd<'_> {
        self.notice.0.as_fd()
    }

    fn events(&mut self) -> Vec<Event> {
        slipway_peer::eventfd::drain(self.notice.0.as_fd());
        let news: Vec<News> = self.news.try_iter().collect();
        news.into_iter().filter_map(|news| self.heard(news)).collect()
    }
}

impl Drop for Guests {
    fn drop(&mut self) {
        self.command(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.served.values().for_each(Served::close);
    }
}
