//! One turn of [`FunctionRemote`]: messages and signals, both ways.

use rustix::io::Errno;
use slipway_ring::cross::Tail;
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::function::{Addresses, Message, event, stream_of};

use super::FunctionError;
use super::machine::Machine;
use super::remote::FunctionRemote;
use super::streams::Streams;
use crate::error::errno_number;
use crate::remote::{Destined, Event, Family, StreamCarrier};

/// The number of messages, and of signals, that are taken before the engine's programs have their
/// turn.
const TURN: usize = 256;

impl FunctionRemote {
    /// Does one round of all kinds of work. Returns whether there was any.
    pub(super) fn turn(&mut self) -> Result<bool, FunctionError> {
        let received = self.receive()?;
        let signalled = self.take_signals()?;
        let forwarded = self.forward_signals()?;
        let sent = self.machine.flush()?;
        Ok(received || signalled || forwarded || sent)
    }

    /// Handles the machine's messages. Returns whether there were any.
    fn receive(&mut self) -> Result<bool, FunctionError> {
        let mut some = false;
        for _ in 0..TURN {
            let Some(message) = self.machine.receive()? else { break };
            some = true;
            self.handle_message(message)?;
        }
        if some {
            self.machine.ring(false, true);
        }
        Ok(some)
    }

    fn handle_message(&mut self, message: Message) -> Result<(), FunctionError> {
        let unknown = FunctionError::Protocol("it names something that does not exist");
        match message {
            Message::Welcome(addresses) => self.handle_welcome(&addresses),
            Message::Connected { connection } => {
                self.streams.get_mut(connection).ok_or(unknown)?.connected = true;
                self.events.push(Event::Connected { connection });
            }
            Message::Refused { connection, errno } => {
                self.streams.remove(connection).ok_or(unknown)?;
                self.events.push(Event::Refused { connection, errno });
            }
            Message::Incoming { incoming, from, to } => match self.listeners.namespace_at(&to) {
                Some(namespace) => {
                    let into = Destined::Namespace(namespace);
                    let incoming = incoming.into();
                    self.events.push(Event::Incoming { incoming, into, from, to });
                }
                None => self.reject(incoming, errno_number(Errno::CONNREFUSED)),
            },
            Message::Ended { connection } => {
                let carried = self.streams.remove(connection).ok_or(unknown)?;
                self.events.push(if carried.connected {
                    Event::Ended { connection, last: Tail::default() }
                } else {
                    Event::Refused { connection, errno: errno_number(Errno::CONNRESET) }
                });
            }
            Message::ArenaFree { arena } => {
                self.arenas.remove(arena).then_some(()).ok_or(unknown)?;
            }
            _ => return Err(FunctionError::Protocol("a message that only guests send")),
        }
        Ok(())
    }

    fn handle_welcome(&mut self, addresses: &Addresses) {
        let held = addresses.ips.iter().take(addresses.count as usize);
        let held: Vec<String> =
            held.map(|ip| crate::address::ip(&Address { ip: *ip, port: 0 }).to_string()).collect();
        tracing::info!("the machine's socket engine serves {}", held.join(", "));
        self.welcome = true;
    }

    /// Refuses a connection of another machine.
    pub(super) fn reject(&mut self, incoming: u32, errno: u32) {
        self.send(Message::Rejected { incoming, errno });
    }

    /// Takes the machine's signals and wakes the programs of their streams.
    fn take_signals(&mut self) -> Result<bool, FunctionError> {
        let mut some = self.machine.overflowed();
        if some {
            self.streams.raise_all();
        }
        for _ in 0..TURN {
            let Some(event) = self.machine.take_signal()? else { break };
            some = true;
            self.streams.raise(stream_of(event));
        }
        Ok(some)
    }

    /// Forwards the families' signals to the machine.
    fn forward_signals(&mut self) -> Result<bool, FunctionError> {
        if !self.machine.is_running() {
            return Ok(false);
        }
        let (mut some, mut spoiled) = (false, None);
        for (number, family) in &mut self.families {
            let forwarded = forward(*number, family, &self.streams, &mut self.machine)?;
            some |= forwarded.any;
            if forwarded.is_spoiled {
                spoiled = Some(*number);
            }
        }
        if some {
            self.machine.ring(true, false);
        }
        if let Some(number) = spoiled {
            // Logged once per family, which can recover only by attaching again. Only its own
            // streams stall.
            tracing::warn!(
                family = number,
                "its signals are invalid, and are not looked at any more"
            );
            self.family_ended(number);
        }
        Ok(some)
    }
}

/// The outcome of a look at the signals of a family.
struct Forwarded {
    any: bool,
    /// The family's signals are invalid.
    is_spoiled: bool,
}

/// Forwards some signals of a family to the machine.
fn forward(
    number: u32,
    family: &mut Family,
    streams: &Streams,
    machine: &mut Machine,
) -> Result<Forwarded, FunctionError> {
    let mut any = false;
    if family.overflowed() {
        any = true;
        for (arena, stream) in streams.places(number) {
            machine.signal(event(arena, stream))?;
        }
    }
    for _ in 0..TURN {
        match family.take() {
            Ok(Some(entry)) => {
                any = true;
                if let Some((arena, stream)) = streams.place(number, entry) {
                    machine.signal(event(arena, stream))?;
                }
            }
            Ok(None) => break,
            Err(_) => return Ok(Forwarded { any, is_spoiled: true }),
        }
    }
    Ok(Forwarded { any, is_spoiled: false })
}
