//! [`StreamCarrier`] by a socket function.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slipway_ring::cross::{Arena, Shape, Tail};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::function::{self, Message, PIECE, VERSION};

use super::listeners::{Added, Listeners};
use super::machine::{Machine, PATIENCE};
use super::streams::{Arenas, Streams, break_off};
use super::watches::Watches;
use super::{Device, FunctionError, Piece};
use crate::address::show;
use crate::error::errno_number;
use crate::remote::{Event, Family, Line, StreamCarrier};

/// The number of streams of an arena. A family that needs more has several arenas.
const STREAMS: u32 = 32;

/// The carrier by a socket function: to other guests of its network, and to programs of the
/// machine.
pub struct FunctionRemote {
    pub(super) machine: Machine,
    pub(super) watches: Watches,
    /// Families by number. This thread takes their signals.
    pub(super) families: HashMap<u32, Family>,
    pub(super) arenas: Arenas,
    pub(super) streams: Streams,
    pub(super) listeners: Listeners,
    /// Set once the machine has answered, until the function has failed.
    pub(super) welcome: bool,
    /// Events that the engine has not taken.
    pub(super) events: Vec<Event>,
}

impl FunctionRemote {
    /// Resets the function, starts it, and waits until the machine's engine has answered.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn start(device: Box<dyn Device>) -> Result<Self, FunctionError> {
        let watches = Watches::new(device.interrupt())?;
        let machine = Machine::start(device)?;
        let (families, arenas, streams, listeners) = Default::default();
        let (welcome, events) = Default::default();
        let mut remote =
            Self { machine, watches, families, arenas, streams, listeners, welcome, events };
        if let Err(why) = remote.greet() {
            remote.machine.stop(&mut remote.arenas);
            return Err(why);
        }
        remote.watches.come_back();
        Ok(remote)
    }

    /// Greets the machine, and waits for its answer.
    fn greet(&mut self) -> Result<(), FunctionError> {
        self.send(Message::Hello { version: VERSION });
        let begun = Instant::now();
        while !self.welcome {
            self.turn()?;
            if begun.elapsed() > PATIENCE {
                return Err(FunctionError::Stuck("answer"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Sends a message to the machine, now or when there is room.
    pub(super) fn send(&mut self, message: Message) {
        if !self.machine.is_running() {
            return;
        }
        self.machine.queue(message);
        let sent = self.machine.flush();
        if self.checked(sent).is_some() && self.machine.has_waiting() {
            // The next rest asks the machine to interrupt when there is room.
            self.watches.come_back();
        }
    }

    /// Ends the function after an error, and returns the value otherwise.
    pub(super) fn checked<T>(&mut self, outcome: Result<T, FunctionError>) -> Option<T> {
        outcome
            .map_err(|error| {
                // A reason in the status is more precise.
                let error = self.machine.fault().unwrap_or(error);
                self.fail(&error);
            })
            .ok()
    }

    /// Stops using the function: all streams are reset, and later connections are left to the
    /// kernel.
    pub(super) fn fail(&mut self, error: &FunctionError) {
        if !self.machine.is_running() {
            return;
        }
        tracing::error!(
            "all sockets to other machines are reset, new ones are the kernel's: {error}"
        );
        self.machine.stop(&mut self.arenas);
        self.welcome = false;
        for connection in self.streams.connections() {
            let Some(carried) = self.streams.remove(connection) else { continue };
            break_off(&carried.line);
            self.events.push(if carried.connected {
                Event::Ended { connection, last: Tail::default() }
            } else {
                Event::Refused { connection, errno: errno_number(Errno::CONNRESET) }
            });
        }
        if let Some(interrupt) = self.machine.interrupt() {
            self.watches.unwatch(interrupt);
        }
        // The engine has to take the events.
        self.watches.come_back();
    }

    fn is_listened_at(at: &Address) -> bool {
        !at.is_loopback()
    }
}

impl StreamCarrier for FunctionRemote {
    fn is_for(&self, _tenant: &str, to: &Address) -> bool {
        self.welcome && !to.is_loopback()
    }

    fn family(&mut self, number: u32, family: Family) {
        // Without the watch, the family's signals are seen only when something else wakes this
        // engine.
        if self.watches.watch_family(number, family.bell()) {
            family.set_asleep(true);
            self.families.insert(number, family);
        }
    }

    fn arena(&mut self) -> Option<std::io::Result<Arena>> {
        self.machine.is_running().then(|| self.new_arena())
    }

    fn arena_gone(&mut self, arena: &Arena) {
        if let Some(arena) = self.arenas.number(arena) {
            self.send(Message::ArenaGone { arena });
        }
    }

    fn listens(&mut self, namespace: u32, at: Address) {
        if !Self::is_listened_at(&at) {
            return;
        }
        match self.listeners.add(namespace, at) {
            Added::First => self.send(Message::Listen { at }),
            Added::Another => {}
            Added::TooMany => {
                tracing::warn!("too many listeners: other machines do not reach {}", show(&at));
            }
        }
        self.update_timer();
    }

    fn listens_no_more(&mut self, namespace: u32, at: Address) {
        if self.listeners.remove(namespace, &at) {
            self.send(Message::Unlisten { at });
        }
        self.update_timer();
    }

    fn family_ended(&mut self, family: u32) {
        if let Some(family) = self.families.remove(&family) {
            self.watches.unwatch(family.bell());
        }
    }

    fn connect(&mut self, connection: u32, _: &str, from: Address, to: Address, line: Line) {
        match self.carry(connection, line, false) {
            Some(line) => self.send(Message::Connect { connection, line, from, to }),
            None => {
                self.events.push(Event::Refused { connection, errno: function_gone() });
                self.watches.come_back();
            }
        }
        self.update_timer();
    }

    fn answer(&mut self, incoming: u64, answer: Result<(u32, Line), u32>) {
        let Ok(incoming) = u32::try_from(incoming) else { return };
        match answer {
            Ok((connection, line)) => match self.carry(connection, line.clone(), true) {
                Some(line) => self.send(Message::Accepted { incoming, connection, line }),
                None => {
                    break_off(&line);
                    self.events.push(Event::Ended { connection, last: Tail::default() });
                    self.reject(incoming, function_gone());
                    self.watches.come_back();
                }
            },
            Err(errno) => self.reject(incoming, errno.max(1)),
        }
        self.update_timer();
    }

    fn closed(&mut self, connection: u32) {
        if self.streams.get_mut(connection).is_some() {
            self.send(Message::Closed { connection });
        }
    }

    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.watches.descriptor()]
    }

    fn events(&mut self) -> Vec<Event> {
        self.work();
        self.update_timer();
        std::mem::take(&mut self.events)
    }
}

fn function_gone() -> u32 {
    errno_number(Errno::NETDOWN)
}

impl FunctionRemote {
    fn new_arena(&mut self) -> std::io::Result<Arena> {
        let number = self.arenas.free_number().ok_or(std::io::ErrorKind::OutOfMemory)?;
        let Piece { memory, at } = self.machine.piece()?;
        let shape = Shape::filling(STREAMS, PIECE).ok_or(std::io::ErrorKind::InvalidInput)?;
        let arena = Arena::within(memory, shape)?;
        self.arenas.insert(number, arena.clone());
        self.send(Message::Arena { arena: number, at });
        Ok(arena)
    }

    /// Takes the engine's side of a stream. Returns `None` if the function is broken, or the
    /// machine does not know the stream's arena.
    fn carry(&mut self, connection: u32, line: Line, connected: bool) -> Option<function::Line> {
        if !self.machine.is_running() {
            return None;
        }
        let arena = self.arenas.number(&line.arena)?;
        let place = function::Line { arena, stream: line.stream, side: line.side as u8 };
        self.streams.insert(connection, line, place, connected);
        Some(place)
    }
}
