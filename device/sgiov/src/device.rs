//! The device as a PCI function: registers, and the life of its channel.

use std::sync::Arc;
use std::task::Waker;

use slipway_pci::{
    Access, ConfigEffect, ConfigSpace, Description, Function, Interrupt, Msix, Progress, StateError,
};
use slipway_ram::Memory;
use slipway_sgiov_spec::function::{BROKEN, Broken, MAGIC, RUNNING, VERSION, register};

use crate::attention::Attention;
use crate::exchange::{ChannelOwner, Exchange};
use crate::layout::{self, MSIX_END, MSIX_TABLE};
use crate::{Channel, Peer};

/// Bytes of the registers.
const REGISTERS: usize = 0x28;

/// The parts of a device.
pub struct Parts {
    /// The guest's memory.
    pub memory: Memory,
    /// The one vector.
    pub interrupt: Interrupt,
    /// Wakes the owner of the [`Peer`]: the guest rang, or the channel needs attention.
    pub peer: Waker,
}

/// A socket function; the crate's head describes it.
pub struct Device {
    description: Description,
    pub(crate) pci: ConfigSpace,
    pub(crate) msix: Msix,
    memory: Memory,
    pub(crate) exchange: Arc<Exchange>,
    /// The control memory's address.
    pub(crate) at: u64,
}

impl Device {
    /// Makes a device in its state after power-on, and its peer.
    pub fn new(parts: Parts) -> (Self, Peer) {
        let description = layout::description();
        let exchange = Exchange::new(parts.peer, Attention::new(parts.interrupt));
        let device = Self {
            pci: layout::config_space(&description),
            msix: Msix::new(layout::msix()),
            description,
            memory: parts.memory,
            exchange: exchange.clone(),
            at: 0,
        };
        (device, Peer(exchange))
    }

    fn start(&mut self) {
        let mut state = self.exchange.state();
        if state.status != 0 || !matches!(state.place, ChannelOwner::Nowhere) {
            return;
        }
        match Channel::open(self.memory.clone(), self.at, self.exchange.clone()) {
            Ok(channel) => {
                state.place = ChannelOwner::Here(Box::new(channel));
                (state.status, state.suspend, state.suspended) = (RUNNING, false, false);
                drop(state);
                self.exchange.notify();
            }
            Err(why) => state.status = why.status(),
        }
    }

    fn stop(&mut self) {
        let mut state = self.exchange.state();
        let place = std::mem::replace(&mut state.place, ChannelOwner::Nowhere);
        if matches!(place, ChannelOwner::Away) {
            (state.place, state.recalled) = (place, true);
            drop(state);
            self.exchange.notify();
        } else {
            state.status = 0;
            drop(state);
            // Outside the lock: a channel that is dropped takes the lock.
            drop(place);
        }
        self.exchange.attention.take();
    }

    fn registers(&self) -> [u8; REGISTERS] {
        let status = self.exchange.state().status;
        let mut image = [0; REGISTERS];
        let mut put = |at: u64, bytes: &[u8]| {
            let at = at as usize;
            image[at..at + bytes.len()].copy_from_slice(bytes);
        };
        put(register::MAGIC, &MAGIC.to_le_bytes());
        put(register::VERSION, &VERSION.to_le_bytes());
        put(register::STATUS, &status.to_le_bytes());
        put(register::CONTROL, &u32::from(status & RUNNING != 0).to_le_bytes());
        put(register::MEMORY, &self.at.to_le_bytes());
        image
    }

    fn read_registers(&self, offset: u64, into: &mut [u8]) {
        let image = self.registers();
        for (at, byte) in (offset as usize..).zip(into.iter_mut()) {
            *byte = image.get(at).copied().unwrap_or(0);
        }
        if let Some(cause) = register::CAUSE.checked_sub(offset)
            && let Some(byte) = into.get_mut(cause as usize)
        {
            let broken = self.exchange.state().status & BROKEN != 0;
            *byte = u8::from(self.exchange.attention.take()) | u8::from(broken) << 1;
        }
    }

    fn write_register(&mut self, offset: u64, from: &[u8]) {
        let word = |at: usize| Some(u32::from_le_bytes(from.get(at..at + 4)?.try_into().ok()?));
        match (offset, word(0), word(4)) {
            (register::CONTROL, Some(1), _) => self.start(),
            (register::CONTROL, Some(0), _) => self.stop(),
            (register::MEMORY, Some(low), Some(high)) => {
                self.set_memory(u64::from(high) << 32 | u64::from(low));
            }
            (register::MEMORY, Some(low), None) => {
                self.set_memory(self.at & !u64::from(u32::MAX) | u64::from(low));
            }
            (_, Some(high), None) if offset == register::MEMORY + 4 => {
                self.set_memory(u64::from(high) << 32 | self.at & u64::from(u32::MAX));
            }
            _ => {}
        }
    }

    fn set_memory(&mut self, at: u64) {
        if matches!(self.exchange.state().place, ChannelOwner::Nowhere) {
            self.at = at;
        }
    }

    pub(crate) fn route(&self) {
        let msix = self.pci.msix_control().enabled;
        self.exchange.attention.route(self.pci.pin_enabled(), msix);
    }

    /// Takes over the status of a saved state. The predecessor's channel is gone, so a running
    /// function is broken.
    pub(crate) fn set_status(&mut self, status: u32) {
        let lost = if status == RUNNING { Broken::Unserved.status() } else { status };
        self.exchange.state().status = lost;
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Function for Device {
    fn description(&self) -> &Description {
        &self.description
    }

    fn config_read(&mut self, offset: u16, into: &mut [u8]) {
        self.pci.set_interrupt_status(self.exchange.attention.is_pending());
        self.pci.read(offset, into);
    }

    fn config_write(&mut self, offset: u16, from: &[u8]) {
        let had_master = self.pci.bus_master();
        if self.pci.write(offset, from) == ConfigEffect::FunctionLevelReset {
            return self.reset();
        }
        // The driver has gone, and its memory may soon have another owner in the guest.
        if had_master && !self.pci.bus_master() {
            self.stop();
        }
        self.route();
    }

    fn read(&mut self, bar: u8, offset: u64, into: &mut [u8]) -> Access {
        if bar != 0 {
            return Access::Refused;
        }
        into.fill(0);
        match offset {
            MSIX_TABLE..MSIX_END => drop(self.msix.read(bar, offset, into)),
            _ if offset < MSIX_TABLE => self.read_registers(offset, into),
            _ => {}
        }
        Access::Done
    }

    fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> Access {
        match offset {
            _ if bar != 0 => return Access::Refused,
            MSIX_TABLE..MSIX_END => drop(self.msix.write(bar, offset, from)),
            register::BELL => self.exchange.ring(),
            _ => self.write_register(offset, from),
        }
        Access::Done
    }

    fn notified(&mut self, _: u64) {
        self.exchange.ring();
    }

    fn poll(&mut self) -> Progress {
        let mut state = self.exchange.state();
        if !std::mem::take(&mut state.suspend) {
            return Progress::Idle(None);
        }
        match &mut state.place {
            ChannelOwner::Nowhere => {}
            ChannelOwner::Away => {
                drop(state);
                self.exchange.notify();
            }
            ChannelOwner::Here(channel) => {
                let resumed = channel.resume();
                state.suspended = false;
                if let Err(why) = resumed {
                    let place = std::mem::replace(&mut state.place, ChannelOwner::Nowhere);
                    drop(state);
                    drop(place);
                    self.exchange.broken(why);
                }
            }
        }
        Progress::Idle(None)
    }

    fn reset(&mut self) {
        self.pci.reset();
        self.msix.reset();
        self.stop();
        self.at = 0;
        self.route();
        // The client may have gone, so the peer is woken to look.
        self.exchange.ring();
    }

    fn quiesce(&mut self) -> bool {
        let mut state = self.exchange.state();
        let is_new = !std::mem::replace(&mut state.suspend, true);
        match &mut state.place {
            ChannelOwner::Nowhere => true,
            ChannelOwner::Here(channel) => {
                channel.suspend();
                state.suspended = true;
                true
            }
            ChannelOwner::Away => {
                let done = state.suspended;
                drop(state);
                if is_new && !done {
                    self.exchange.notify();
                }
                done
            }
        }
    }

    fn save(&self) -> Vec<u8> {
        crate::state::save(self)
    }

    fn take_over(&mut self, state: &[u8]) -> Result<(), StateError> {
        crate::state::restore(self, state)
    }
}
