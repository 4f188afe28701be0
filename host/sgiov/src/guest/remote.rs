//! [`StreamCarrier`] by a socket function.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use rustix::time::{TimerfdClockId, TimerfdFlags, Timespec};
use slipway_ring::cross::{Arena, Shape, Tail};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::function::{
    self, LISTENERS, MAGIC, Message, PIECE, RUNNING, VERSION, register,
};

use super::control::Control;
use super::streams::{Arenas, Streams, break_off};
use super::{Device, FunctionError, Piece, broken};
use crate::address::show;
use crate::error::errno_number;
use crate::remote::{Event, Family, Line, StreamCarrier};

/// The number of streams of an arena. A family that needs more has several arenas.
const STREAMS: u32 = 32;
/// The number of messages, and of signals, that are taken before the engine's programs have their
/// turn.
pub(super) const TURN: usize = 256;
/// The time for which it polls after the last work. An interrupt costs the guest several exits,
/// which together take about as long.
pub(super) const POLL: Duration = Duration::from_micros(250);
/// The time for which it polls before the engine's programs have their turn.
pub(super) const SHIFT: Duration = Duration::from_millis(1);
/// The time that a reset may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// The interval at which a function without interrupts is polled.
pub(super) const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// The interval at which the function's status is read while there are streams: a function that is
/// gone does not interrupt.
pub(super) const PULSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
/// The shortest time between two readings of the status.
pub(super) const BETWEEN: Duration = Duration::from_millis(400);

pub(super) const INTERRUPT: u64 = u64::MAX;
pub(super) const AGAIN: u64 = u64::MAX - 1;
pub(super) const TIMER: u64 = u64::MAX - 2;

/// The carrier by a socket function: to other guests of its network, and to programs of the
/// machine.
pub struct FunctionRemote {
    pub(super) device: Box<dyn Device>,
    /// The control memory, or `None` if the function is broken.
    pub(super) control: Option<Control>,
    /// Messages that are sent as soon as there is room.
    pub(super) waiting: VecDeque<Message>,
    pub(super) epoll: OwnedFd,
    /// An eventfd that is raised when there is more to do than a turn had room for.
    pub(super) again: OwnedFd,
    pub(super) timer: OwnedFd,
    pub(super) is_looking: bool,
    /// The time at which the device was last asked for its status.
    pub(super) asked: Instant,
    pub(super) families: HashMap<u32, Family>,
    pub(super) arenas: Arenas,
    pub(super) streams: Streams,
    /// By address: the network namespaces of the listeners there.
    pub(super) listeners: HashMap<Address, Vec<u32>>,
    /// The machine has answered.
    pub(super) welcome: bool,
    pub(super) events: Vec<Event>,
}

impl FunctionRemote {
    /// Resets the function, starts it, and waits until the machine's engine has answered.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn start(mut device: Box<dyn Device>) -> Result<Self, FunctionError> {
        let piece = begin(&mut *device)?;
        let control = Control::new(piece)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let again = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        watch(&epoll, again.as_fd(), AGAIN)?;
        if let Some(interrupt) = device.interrupt() {
            watch(&epoll, interrupt, INTERRUPT)?;
        }
        let timer = timer(&epoll)?;
        for (half, value) in [control.at as u32, (control.at >> 32) as u32].into_iter().enumerate()
        {
            device.write(register::MEMORY + half as u64 * 4, value);
        }
        // From here on the machine may access the memory, until a reset has ended.
        device.write(register::CONTROL, 1);
        let (waiting, families, arenas, streams, listeners) = Default::default();
        let (is_looking, welcome, events) = Default::default();
        let mut remote = Self {
            device,
            control: Some(control),
            waiting,
            epoll,
            again,
            timer,
            is_looking,
            asked: Instant::now(),
            families,
            arenas,
            streams,
            listeners,
            welcome,
            events,
        };
        let status = remote.device.read(register::STATUS);
        if status & RUNNING == 0 {
            let why = broken(status).unwrap_or(FunctionError::Stuck("start"));
            remote.stop();
            return Err(why);
        }
        remote.device.unmask();
        remote.say(Message::Hello { version: VERSION });
        if let Err(why) = remote.await_welcome() {
            remote.stop();
            return Err(why);
        }
        slipway_family::wake(&remote.again);
        Ok(remote)
    }

    fn await_welcome(&mut self) -> Result<(), FunctionError> {
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

    /// Resets the function and releases the memory that the machine knows. If the reset does not
    /// end, the memory stays allocated, since the machine may still access it.
    fn stop(&mut self) {
        let control = self.control.take();
        if !reset(&mut *self.device) {
            std::mem::forget((control, std::mem::take(&mut self.arenas)));
        }
        self.arenas = Arenas::default();
    }

    /// Sends a message to the machine, now or when there is room.
    pub(super) fn say(&mut self, message: Message) {
        if self.control.is_none() {
            return;
        }
        self.waiting.push_back(message);
        let said = self.send();
        if self.checked(said).is_some() && !self.waiting.is_empty() {
            // The next rest asks the machine to interrupt when there is room.
            slipway_family::wake(&self.again);
        }
    }

    /// Sends waiting messages as far as there is room. Returns whether any was sent.
    pub(super) fn send(&mut self) -> Result<bool, FunctionError> {
        let Some(control) = &self.control else { return Ok(false) };
        let mut some = false;
        while let Some(message) = self.waiting.front() {
            if !control.send(message)? {
                break;
            }
            self.waiting.pop_front();
            some = true;
        }
        if some && control.is_to_be_told(true, false) {
            self.device.write(register::BELL, 1);
        }
        Ok(some)
    }

    /// Ends the function after an error, and returns the value otherwise.
    pub(super) fn checked<T>(&mut self, outcome: Result<T, FunctionError>) -> Option<T> {
        outcome
            .map_err(|error| {
                // A reason in the status is more precise.
                let error = broken(self.device.read(register::STATUS)).unwrap_or(error);
                self.fail(&error);
            })
            .ok()
    }

    /// Stops using the function: all streams are reset, and later connections are left to the
    /// kernel.
    pub(super) fn fail(&mut self, error: &FunctionError) {
        if self.control.is_none() {
            return;
        }
        tracing::error!(
            "all sockets to other machines are reset, new ones are the kernel's: {error}"
        );
        self.stop();
        (self.welcome, self.waiting) = (false, VecDeque::new());
        for connection in self.streams.connections() {
            let Some(carried) = self.streams.remove(connection) else { continue };
            break_off(&carried.line);
            self.events.push(if carried.connected {
                Event::Ended { connection, last: Tail::default() }
            } else {
                Event::Refused { connection, errno: errno_number(Errno::CONNRESET) }
            });
        }
        if let Some(interrupt) = self.device.interrupt() {
            let _ = epoll::delete(&self.epoll, interrupt);
        }
        // The engine has to take the events.
        slipway_family::wake(&self.again);
    }

    fn is_listened_at(at: &Address) -> bool {
        !at.is_loopback()
    }
}

/// Checks that the device is a socket function and resets it. Returns memory for its control.
fn begin(device: &mut dyn Device) -> Result<Piece, FunctionError> {
    let low = u64::from(device.read(register::MAGIC));
    let magic = low | u64::from(device.read(register::MAGIC + 4)) << 32;
    if magic != MAGIC {
        return Err(FunctionError::Other(magic));
    }
    let version = device.read(register::VERSION);
    if version != VERSION {
        return Err(FunctionError::Version(version));
    }
    if !reset(device) {
        return Err(FunctionError::Stuck("end a reset"));
    }
    Ok(device.piece()?)
}

/// Resets the device. Returns whether it has ended all accesses to memory.
fn reset(device: &mut dyn Device) -> bool {
    device.write(register::CONTROL, 0);
    let begun = Instant::now();
    // A device that is gone reads as ones.
    while !matches!(device.read(register::STATUS), 0 | u32::MAX) {
        if begun.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

fn watch(epoll: &OwnedFd, file: BorrowedFd<'_>, number: u64) -> std::io::Result<()> {
    let data = epoll::EventData::new_u64(number);
    Ok(epoll::add(epoll, file, data, epoll::EventFlags::IN)?)
}

fn timer(epoll: &OwnedFd) -> std::io::Result<OwnedFd> {
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
    watch(epoll, timer.as_fd(), TIMER)?;
    Ok(timer)
}

impl StreamCarrier for FunctionRemote {
    fn is_for(&self, _tenant: &str, to: &Address) -> bool {
        self.welcome && !to.is_loopback()
    }

    fn family(&mut self, number: u32, family: Family) {
        // Without the watch, the family's signals are seen only when something else wakes this
        // engine.
        if watch(&self.epoll, family.bell(), number.into()).is_ok() {
            family.set_asleep(true);
            self.families.insert(number, family);
        }
    }

    fn arena(&mut self) -> Option<std::io::Result<Arena>> {
        self.control.as_ref()?;
        Some(self.new_arena())
    }

    fn arena_gone(&mut self, arena: &Arena) {
        if let Some(arena) = self.arenas.number(arena) {
            self.say(Message::ArenaGone { arena });
        }
    }

    fn listens(&mut self, namespace: u32, at: Address) {
        if !Self::is_listened_at(&at) {
            return;
        }
        let count = self.listeners.len();
        match self.listeners.get_mut(&at) {
            Some(namespaces) => namespaces.push(namespace),
            None if count < LISTENERS => {
                self.listeners.insert(at, vec![namespace]);
                self.say(Message::Listen { at });
            }
            None => tracing::warn!("too many listeners: other machines do not reach {}", show(&at)),
        }
        self.look_or_not();
    }

    fn listens_no_more(&mut self, namespace: u32, at: Address) {
        let Some(namespaces) = self.listeners.get_mut(&at) else { return };
        if let Some(own) = namespaces.iter().position(|own| *own == namespace) {
            namespaces.swap_remove(own);
        }
        if namespaces.is_empty() {
            self.listeners.remove(&at);
            self.say(Message::Unlisten { at });
        }
        self.look_or_not();
    }

    fn family_ended(&mut self, family: u32) {
        if let Some(family) = self.families.remove(&family) {
            let _ = epoll::delete(&self.epoll, family.bell());
        }
    }

    fn connect(&mut self, connection: u32, _: &str, from: Address, to: Address, line: Line) {
        match self.carry(connection, line, false) {
            Some(line) => self.say(Message::Connect { connection, line, from, to }),
            None => {
                self.events.push(Event::Refused { connection, errno: function_gone() });
                slipway_family::wake(&self.again);
            }
        }
        self.look_or_not();
    }

    fn answer(&mut self, incoming: u64, answer: Result<(u32, Line), u32>) {
        let Ok(incoming) = u32::try_from(incoming) else { return };
        match answer {
            Ok((connection, line)) => match self.carry(connection, line.clone(), true) {
                Some(line) => self.say(Message::Accepted { incoming, connection, line }),
                None => {
                    break_off(&line);
                    self.events.push(Event::Ended { connection, last: Tail::default() });
                    self.reject(incoming, function_gone());
                    slipway_family::wake(&self.again);
                }
            },
            Err(errno) => self.reject(incoming, errno.max(1)),
        }
        self.look_or_not();
    }

    fn closed(&mut self, connection: u32) {
        if self.streams.get_mut(connection).is_some() {
            self.say(Message::Closed { connection });
        }
    }

    fn wakes(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn events(&mut self) -> Vec<Event> {
        self.work();
        self.look_or_not();
        std::mem::take(&mut self.events)
    }
}

fn function_gone() -> u32 {
    errno_number(Errno::NETDOWN)
}

impl FunctionRemote {
    fn new_arena(&mut self) -> std::io::Result<Arena> {
        let number = self.arenas.free_number().ok_or(std::io::ErrorKind::OutOfMemory)?;
        let Piece { memory, at } = self.device.piece()?;
        let shape = Shape::filling(STREAMS, PIECE).ok_or(std::io::ErrorKind::InvalidInput)?;
        let arena = Arena::within(memory, shape)?;
        self.arenas.insert(number, arena.clone());
        self.say(Message::Arena { arena: number, at });
        Ok(arena)
    }

    /// Takes the engine's side of a stream. Returns `None` if the function is broken, or the
    /// machine does not know the stream's arena.
    fn carry(&mut self, connection: u32, line: Line, connected: bool) -> Option<function::Line> {
        self.control.as_ref()?;
        let arena = self.arenas.number(&line.arena)?;
        let place = function::Line { arena, stream: line.stream, side: line.side as u8 };
        self.streams.insert(connection, line, place, connected);
        Some(place)
    }
}
