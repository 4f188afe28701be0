//! The body of the fuzz target `sgiov-function`: a guest that writes anything into its registers
//! and memory, and a machine that serves it.

use std::sync::Arc;
use std::task::Waker;

use slipway_pci::{FifoSink, Function, Interrupt};
use slipway_ram::{Access, Lasting, Memory};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::function::{Addresses, Line, MESSAGE, Message, PIECE, register};

use crate::driver::Driver;
use crate::{Attended, Channel, Device, Parts, Peer};

/// Pieces of the guest's memory.
const PIECES: u64 = 3;

/// The rest of the input.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }
}

struct Machine {
    device: Device,
    peer: Peer,
    channel: Option<Channel>,
}

impl Machine {
    /// Serves a turn of the machine, whatever the guest did.
    fn turn(&mut self) {
        if self.channel.is_none() {
            self.channel = self.peer.take();
        }
        let Some(mut channel) = self.channel.take() else { return };
        let served = serve(&mut channel);
        match served {
            Ok(Attended::Over) => {}
            Ok(_) => self.channel = Some(channel),
            Err(why) => channel.break_off(why),
        }
    }
}

fn serve(channel: &mut Channel) -> Result<Attended, crate::Broken> {
    let attended = channel.attend()?;
    for _ in 0..64 {
        let Some(message) = channel.hear()? else { break };
        match message {
            Message::Hello { .. } => {
                let ips = [[7; 16], [0; 16], [0; 16], [0; 16]];
                channel.say(&Message::Welcome(Addresses { count: 1, ips }))?;
            }
            Message::Arena { arena, at } => channel.add_arena(arena, at)?,
            Message::ArenaGone { arena } => {
                channel.remove_arena(arena);
                channel.say(&Message::ArenaFree { arena })?;
            }
            Message::Connect { connection, line, .. } => {
                if let Some((arena, _)) = channel.arena(line.arena) {
                    assert!(Some(arena.shape().streams) == channel.streams(line.arena));
                }
                channel.say(&Message::Connected { connection })?;
            }
            _ => {}
        }
    }
    while let Some((arena, stream)) = channel.signal()? {
        channel.raise(arena, stream)?;
    }
    channel.overflowed();
    channel.flush()?;
    channel.tell();
    if !channel.sleep(true) {
        channel.awake();
    }
    Ok(attended)
}

/// Returns a piece of `memory` as the guest maps it.
pub(crate) fn guests(memory: &Memory, at: u64) -> Lasting {
    let mut spans = Vec::new();
    let pinned = memory.pin(at, PIECE, Access::Write, &mut spans);
    let words = spans.pop().filter(|_| pinned.is_ok()).and_then(Lasting::over);
    words.unwrap_or_else(|| Lasting::heap(PIECE))
}

/// Interprets `data` as the actions of a hostile guest and of the machine that serves it.
pub fn function(data: &[u8]) {
    let mut bytes = Bytes(data);
    let memory = Memory::heap(PIECE * PIECES as usize);
    let sink = FifoSink::new();
    let interrupt = Interrupt::new(Arc::clone(&sink) as _, 0);
    let parts = Parts { memory: memory.clone(), interrupt, peer: Waker::noop().clone() };
    let (device, peer) = Device::new(parts);
    let mut machine = Machine { device, peer, channel: None };
    let Some(mut driver) = Driver::new(guests(&memory, 0)) else { return };
    while step(&mut bytes, &mut machine, &mut driver, &memory).is_some() {}
    machine.device.reset();
    machine.turn();
    assert!(machine.channel.is_none(), "a channel after a reset");
    let mut status = [0; 4];
    machine.device.read(0, register::STATUS, &mut status);
    assert_eq!(status, [0; 4]);
}

fn step(
    bytes: &mut Bytes<'_>,
    machine: &mut Machine,
    driver: &mut Driver,
    memory: &Memory,
) -> Option<()> {
    let device = &mut machine.device;
    match bytes.byte()? % 12 {
        0 => drop(device.write(0, register::CONTROL, &[1, 0, 0, 0])),
        1 => {
            let at = u64::from(bytes.byte()?) << 20;
            device.write(0, register::MEMORY, &at.to_le_bytes());
        }
        2 => {
            let (offset, value) = (bytes.word()? % 0x2000, bytes.word()?.to_le_bytes());
            let len = usize::from(bytes.byte()? % 8) + 1;
            device.write(0, offset, &value[..len]);
            device.read(0, offset, &mut [0; 8][..len]);
        }
        3 => {
            let (offset, value) = (bytes.byte()?, bytes.word()?.to_le_bytes());
            device.config_write(offset.into(), &value[..4]);
            device.config_read(offset.into(), &mut [0; 4]);
        }
        4 => {
            let place = bytes.word()? % (PIECES * PIECE as u64 - 8);
            let _ = memory.write(place, &bytes.word()?.to_le_bytes());
        }
        5 => {
            // Offsets of counters of arenas and signals, and of the words that say who sleeps.
            let near = [0, 4096, 4224, 1 << 20, 3 << 19, PIECE as u64 - 4096];
            let place = near[usize::from(bytes.byte()?) % near.len()] + u64::from(bytes.byte()?);
            let _ = memory.write(place, &bytes.word()?.to_le_bytes());
        }
        6 => drop(driver.say(&message(bytes)?)),
        7 => {
            let mut any = [0; MESSAGE];
            let len = usize::from(bytes.byte()?) % MESSAGE;
            for byte in &mut any[..len] {
                *byte = bytes.byte()?;
            }
            driver.write(&any);
        }
        8 => drop(driver.raise(bytes.byte()?.into(), bytes.byte()?.into())),
        9 => {
            device.quiesce();
            machine.turn();
            assert!(machine.device.quiesce(), "suspended in a turn");
            machine.device.poll();
        }
        10 => {
            while driver.hear().is_some() {}
            while driver.signal().is_some() {}
        }
        _ => machine.turn(),
    }
    Some(())
}

fn message(bytes: &mut Bytes<'_>) -> Option<Message> {
    let here = Address::v4([10, 0, 0, 1], 80);
    let number = u32::from(bytes.byte()?);
    let line = Line { arena: number % 64, stream: number / 4, side: 1 };
    Some(match bytes.byte()? % 8 {
        0 => Message::Hello { version: number },
        1 => Message::Arena { arena: number % 64, at: u64::from(bytes.byte()?) << 20 },
        2 => Message::ArenaGone { arena: number % 64 },
        3 => Message::Listen { at: here },
        4 => Message::Connect { connection: number, line, from: here, to: here },
        5 => Message::Accepted { incoming: number, connection: number, line },
        6 => Message::Closed { connection: number },
        _ => Message::Ended { connection: number },
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn random_guests_do_no_harm() {
        let mut state = 7_u64;
        for _ in 0..300 {
            let data: Vec<u8> = (0..400)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 33) as u8
                })
                .collect();
            super::function(&[&[1, 0, 0, 11], &data[..]].concat());
        }
    }
}
