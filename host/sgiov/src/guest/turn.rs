//! One turn of [`FunctionRemote`]: messages and signals, both ways.

use rustix::io::Errno;
use slipway_ring::cross::Tail;
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::function::{Addresses, Message, event, register, stream_of};

use super::FunctionError;
use super::remote::{FunctionRemote, TURN};
use crate::address::is_meant;
use crate::error::errno_number;
use crate::remote::{Destined, Event, StreamCarrier};

impl FunctionRemote {
    /// Does one round of all kinds of work. Returns whether there was any.
    pub(super) fn turn(&mut self) -> Result<bool, FunctionError> {
        let heard = self.hear()?;
        let stirred = self.take_signals()?;
        let forwarded = self.forward_signals()?;
        let said = self.send()?;
        Ok(heard || stirred || forwarded || said)
    }

    /// Handles the machine's messages. Returns whether there were any.
    fn hear(&mut self) -> Result<bool, FunctionError> {
        let mut some = false;
        for _ in 0..TURN {
            let Some(control) = &self.control else { break };
            let Some(message) = control.receive()? else { break };
            some = true;
            self.message(message)?;
        }
        if some && self.control.as_ref().is_some_and(|control| control.is_to_be_told(false, true)) {
            self.device.write(register::BELL, 1);
        }
        Ok(some)
    }

    fn message(&mut self, message: Message) -> Result<(), FunctionError> {
        let unknown = FunctionError::Protocol("it names what there is not");
        match message {
            Message::Welcome(addresses) => self.welcomed(&addresses),
            Message::Connected { connection } => {
                self.streams.get_mut(connection).ok_or(unknown)?.connected = true;
                self.events.push(Event::Connected { connection });
            }
            Message::Refused { connection, errno } => {
                self.streams.remove(connection).ok_or(unknown)?;
                self.events.push(Event::Refused { connection, errno });
            }
            Message::Incoming { incoming, from, to } => match self.namespace_at(&to) {
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

    fn welcomed(&mut self, addresses: &Addresses) {
        let held = addresses.ips.iter().take(addresses.count as usize);
        let held: Vec<String> =
            held.map(|ip| crate::address::ip(&Address { ip: *ip, port: 0 }).to_string()).collect();
        tracing::info!("the machine's socket engine serves {}", held.join(", "));
        self.welcome = true;
    }

    pub(super) fn reject(&mut self, incoming: u32, errno: u32) {
        self.say(Message::Rejected { incoming, errno });
    }

    /// Returns the network namespace of a listener at `to`. One at exactly that address goes before
    /// one at all addresses.
    fn namespace_at(&self, to: &Address) -> Option<u32> {
        let exact = self.listeners.get(to);
        let mut others = self.listeners.iter();
        let meant = || others.find(|(at, _)| is_meant(at, false, to)).map(|(_, all)| all);
        exact.or_else(meant)?.first().copied()
    }

    /// Takes the machine's signals and wakes the programs of their streams.
    fn take_signals(&mut self) -> Result<bool, FunctionError> {
        let Some(control) = &mut self.control else { return Ok(false) };
        let mut some = control.overflowed();
        if some {
            self.streams.raise_all();
        }
        for _ in 0..TURN {
            let Some(event) = control.take_signal()? else { break };
            some = true;
            self.streams.raise(stream_of(event));
        }
        Ok(some)
    }

    /// Forwards the families' signals to the machine.
    fn forward_signals(&mut self) -> Result<bool, FunctionError> {
        let Some(control) = &mut self.control else { return Ok(false) };
        let (mut some, mut spoiled) = (false, None);
        for (number, family) in &mut self.families {
            if family.overflowed() {
                some = true;
                for (arena, stream) in self.streams.places(*number) {
                    control.signal(event(arena, stream))?;
                }
            }
            for _ in 0..TURN {
                match family.take() {
                    Ok(Some(entry)) => {
                        some = true;
                        if let Some((arena, stream)) = self.streams.place(*number, entry) {
                            control.signal(event(arena, stream))?;
                        }
                    }
                    Ok(None) => break,
                    Err(_) => {
                        spoiled = Some(*number);
                        break;
                    }
                }
            }
        }
        if some && control.is_to_be_told(true, false) {
            self.device.write(register::BELL, 1);
        }
        if let Some(number) = spoiled {
            // Logged once per family, which can recover only by attaching again. Only its own
            // streams stall.
            tracing::warn!(
                family = number,
                "its signals cannot be, and are not looked at any more"
            );
            self.family_ended(number);
        }
        Ok(some)
    }
}
