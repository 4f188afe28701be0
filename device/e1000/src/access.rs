//! Accesses of registers, and their effects.

use std::sync::atomic::Ordering;

use slipway_e1000_spec::{
    DESCRIPTOR, REGISTERS, cause, control, csb, io, mdic, register, statistic, status,
};
use slipway_pci::Access;

use crate::Device;
use crate::common::INDEX;
use crate::registers::Effect;

/// The bit of RDTR that ends a delay.
const FLUSH: u32 = 1 << 31;

/// Returns the offset of the register at a dword's place.
pub(crate) fn dword(offset: u64) -> Option<u32> {
    u32::try_from(offset).ok().filter(|offset| u64::from(*offset) < REGISTERS).map(|at| at & !3)
}

impl Device {
    /// Reads by the I/O ports (section 4.1.2): the address that was written, or its register.
    pub(crate) fn read_port(&mut self, port: u64) -> Option<u32> {
        match port {
            io::ADDRESS => Some(self.address),
            io::DATA => Some(dword(self.address.into()).map_or(0, |at| self.read_register(at))),
            _ => None,
        }
    }

    /// Writes by the I/O ports.
    pub(crate) fn write_port(&mut self, port: u64, value: u32) -> Access {
        match (port, dword(self.address.into())) {
            (io::ADDRESS, _) => self.address = value,
            (io::DATA, Some(at)) => self.write_register(at, value),
            (io::DATA, None) => {}
            _ => return Access::Refused,
        }
        Access::Done
    }

    /// Reads the register at `offset`.
    pub(crate) fn read_register(&mut self, offset: u32) -> u32 {
        self.shared.live.accesses.read(offset);
        let line = &self.shared.line;
        match offset {
            register::ICR => {
                let now = self.now();
                line.with(|line| {
                    let causes = line.causes();
                    line.clear(now, causes);
                    causes
                })
            }
            register::STATUS => self.status(),
            register::IMS => line.with(|line| line.mask()),
            register::ICS => line.with(|line| line.causes()),
            register::IMC => 0,
            register::TDT => self.shared.tdt(),
            register::RDT => self.shared.rdt(),
            register::TDH => self.shared.tdh.load(Ordering::Acquire),
            register::RDH => self.shared.rdh.load(Ordering::Acquire),
            register::CTRL => {
                let resets = if self.resetting { control::RST } else { 0 };
                self.registers.get(offset) | resets
            }
            register::EECD => self.wires.read(),
            register::EERD => self.eerd,
            register::MDIC => self.mdic,
            register::PBA => {
                // The transmitter has what the receiver leaves of 64 KiB.
                let receive = self.registers.get(offset);
                receive | 64_u32.saturating_sub(receive) << 16
            }
            register::CSBAL | register::CSBAH if !self.settings.csb => 0,
            register::CSBAL => self.registers.get(offset) | csb::KICKS,
            register::CSBK => 0,
            statistic::FIRST..statistic::END => {
                self.cleared.read(&self.shared.statistics, offset).unwrap_or_default()
            }
            _ => self.registers.get(offset),
        }
    }

    fn status(&mut self) -> u32 {
        self.look_at_link();
        let link = if self.link { status::LU } else { 0 };
        status::FD | link | status::SPEED_1000 | status::ASDV_1000
    }

    /// Writes the register at `offset`.
    pub(crate) fn write_register(&mut self, offset: u32, value: u32) {
        self.shared.live.accesses.wrote(offset);
        let now = self.now();
        let line = &self.shared.line;
        match offset {
            register::TDT => self.set_transmit_tail(value & INDEX),
            register::RDT => {
                self.count_tail(register::RDLEN, value & INDEX);
                self.shared.store_rdt(value & INDEX);
            }
            register::ICR => line.with(|line| line.clear(now, value)),
            register::ICS => line.with(|line| line.cause(now, value)),
            register::IMS => line.with(|line| line.set_mask(now, line.mask() | value)),
            register::IMC => line.with(|line| line.set_mask(now, line.mask() & !value)),
            register::TDH => self.set_head(0, value & INDEX),
            register::RDH => self.set_head(1, value & INDEX),
            register::CTRL => self.write_control(value),
            register::EECD => self.wires.write(&self.words, value),
            register::EERD => self.eerd = crate::eeprom::read(&self.words, value),
            register::MDIC => self.access_phy(value),
            register::CSBAL | register::CSBAH if !self.settings.csb => {}
            register::CSBK if self.settings.csb => self.kick(),
            register::RDTR if value & FLUSH != 0 => {
                self.set_plain(offset, value);
                let line = &self.shared.line;
                line.with(|line| line.flush(now));
            }
            _ => self.set_plain(offset, value),
        }
    }

    /// Sets a register that keeps its value, and acts on the change.
    fn set_plain(&mut self, offset: u32, value: u32) {
        match self.registers.set(offset, value) {
            Effect::None => {}
            Effect::Rules => self.change(),
            Effect::Transmit => self.begin_anew(0, self.shared.tdh.load(Ordering::Acquire)),
            Effect::Receive => self.begin_anew(1, self.shared.rdh.load(Ordering::Acquire)),
            Effect::Delays => self.set_delays(),
        }
    }

    /// Notes that the rules have changed. The port has them before the driver's next write.
    pub(crate) fn change(&mut self) {
        self.changed = true;
        self.advance();
    }

    /// Makes a ring begin anew, with this head.
    fn begin_anew(&mut self, ring: usize, head: u32) {
        self.heads[ring] = head;
        self.epochs[ring] = self.epochs[ring].wrapping_add(1);
        if ring == 0 {
            // The descriptor at the new head is the first one of a frame.
            self.transmit.overlong = false;
        }
        self.change();
    }

    fn set_head(&mut self, ring: usize, head: u32) {
        let place = if ring == 0 { &self.shared.tdh } else { &self.shared.rdh };
        place.store(head, Ordering::Release);
        self.begin_anew(ring, head);
    }

    fn count_tail(&self, len: u32, tail: u32) {
        let entries = self.registers.get(len) / DESCRIPTOR as u32;
        if tail >= entries && tail != 0 {
            self.shared.live.tail.add(1);
        }
    }

    fn set_transmit_tail(&mut self, tail: u32) {
        self.count_tail(register::TDLEN, tail);
        self.shared.store_tdt(tail);
        self.tail = tail;
        self.kick();
    }

    /// Wakes the switch if it sleeps until there is a new transmit tail.
    pub(crate) fn kick(&mut self) {
        if self.shared.rouse() {
            self.exchange.wake();
            self.shared.live.kicks.add(1);
        }
    }

    fn write_control(&mut self, value: u32) {
        if value & control::PHY_RST != 0 {
            let now = self.now();
            self.phy.reset(now);
        }
        if value & control::RST != 0 {
            return self.reset_controller();
        }
        self.set_plain(register::CTRL, value);
    }

    /// Carries out an access to the PHY, at once.
    fn access_phy(&mut self, value: u32) {
        let now = self.now();
        let register = (value >> mdic::REGISTER & 31) as u8;
        let address = value >> mdic::PHY & 31;
        let kept = value & !(mdic::ERROR | mdic::READY);
        self.mdic = kept | mdic::READY;
        self.phy.advance(now);
        match value & mdic::OPERATION {
            _ if address != mdic::PHY_ADDRESS => self.mdic |= mdic::ERROR,
            mdic::READ => {
                let data = self.phy.read(register);
                self.mdic = self.mdic & !mdic::DATA | u32::from(data);
            }
            mdic::WRITE => {
                let loops = self.phy.loops();
                self.phy.write(now, register, (value & mdic::DATA) as u16);
                self.changed |= loops != self.phy.loops();
                self.advance();
            }
            _ => self.mdic |= mdic::ERROR,
        }
        if value & mdic::INTERRUPT != 0 {
            self.shared.line.with(|line| line.cause(now, cause::MDAC));
        }
    }
}
