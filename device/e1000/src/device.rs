//! The device as a PCI function: registers, resets, and the life of the data path.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use slipway_e1000_spec::{
    CLASS, DEVICE, REGISTERS, REVISION, VENDOR, cause, control, csb, eeprom, io, rctl, register,
    tctl,
};
use slipway_pci::{
    Access, Bar, ConfigEffect, ConfigSpace, Description, DoorbellRegisters, Function, Identity,
    Notifications, Progress, StateError,
};
use slipway_ram::Memory;
use slipway_switch::{Exchange, Exchanged, PathHolder};

use crate::access::dword;
use crate::common::Shared;
use crate::eeprom::Wires;
use crate::moderation::Delays;
use crate::parts::{DOORBELLS, TAILS};
use crate::path::DataPath;
use crate::phy::Phy;
use crate::registers::Registers;
use crate::rules::{RingRules, Rules};
use crate::statistics::Cleared;
use crate::transmit::TransmitState;
use crate::{Control, DevicePort, Parts, PartsError, Settings};

/// Subsystem vendor ID: the one of virtual devices, Red Hat's.
const SUBSYSTEM_VENDOR: u16 = 0x1af4;
/// The time for the switch's thread to answer before the function looks again.
const RECHECK: Duration = Duration::from_micros(50);

/// A network controller; the crate's head describes it.
///
/// Before it drops a device, the host calls `quiesce` until it returns `true`: the port then holds
/// no guest memory.
pub struct Device {
    pub(crate) config: ConfigSpace,
    description: Description,
    memory: Memory,
    pub(crate) settings: Settings,
    pub(crate) registers: Registers,
    pub(crate) words: [u16; eeprom::WORDS],
    pub(crate) wires: Wires,
    pub(crate) eerd: u32,
    /// The address at the I/O ports.
    pub(crate) address: u32,
    pub(crate) mdic: u32,
    pub(crate) phy: Phy,
    /// The link state that the driver was told last.
    pub(crate) link: bool,
    pub(crate) exchange: Arc<Exchange<DataPath>>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) cleared: Cleared,
    path: PathHolder<DataPath>,
    /// The transmitter's state that a new path begins with.
    pub(crate) transmit: TransmitState,
    /// `true` if nothing may touch guest memory.
    quiesced: bool,
    /// `true` if the device was reset and the port may still have the path.
    pub(crate) resetting: bool,
    /// `true` if the data path has to be told new rules.
    pub(crate) changed: bool,
    /// The transmit tail that the function saw last.
    pub(crate) tail: u32,
    /// Epochs of the rings: transmit, receive.
    pub(crate) epochs: [u32; 2],
    /// Heads that the rings begin with.
    pub(crate) heads: [u32; 2],
}

/// The Command register, and its value for a function whose driver runs: ports, memory and bus
/// mastering.
const COMMAND: u16 = 4;
const ENABLED: [u8; 2] = [7, 0];

/// Returns the BARs: the registers, and the ports that reach them, too.
fn bars(settings: &Settings) -> Vec<Bar> {
    let kick = u64::from(register::CSBK);
    let kick = Notifications { range: kick..kick + 4, stride: 4 };
    let registers = Bar {
        index: 0,
        size: REGISTERS,
        wide: false,
        ports: false,
        doorbells: Some(DoorbellRegisters::Apart(TAILS.map(u64::from).to_vec())),
        notifications: settings.csb.then_some(kick),
    };
    let ports = Bar {
        index: 1,
        size: io::PORTS,
        wide: false,
        ports: true,
        doorbells: None,
        notifications: None,
    };
    vec![registers, ports]
}

fn identity(settings: &Settings) -> Identity {
    Identity {
        vendor: VENDOR,
        device: DEVICE,
        subsystem_vendor: SUBSYSTEM_VENDOR,
        subsystem: if settings.csb { csb::SUBSYSTEM } else { csb::PLAIN_SUBSYSTEM },
        class: CLASS,
        revision: REVISION,
    }
}

impl Device {
    /// Makes a device in its state after power-on, and its port, which is to be attached to a
    /// switch.
    ///
    /// # Errors
    /// [`PartsError`] when the parts do not fit together.
    pub fn new(parts: Parts) -> Result<(Self, DevicePort), PartsError> {
        let Parts { memory, interrupt, doorbells, clock, settings } = parts;
        settings.check()?;
        if doorbells.len() != DOORBELLS {
            return Err(PartsError::Doorbells(doorbells.len()));
        }
        let description = Description { bars: bars(&settings), vectors: 0, pin: true };
        let identity = identity(&settings);
        let now = clock.nanos();
        let (exchange, shared) = (Exchange::new(), Shared::new(interrupt.pin(), doorbells, clock));
        let floor = u64::try_from(settings.interval.as_nanos()).unwrap_or(u64::MAX);
        shared.line.with(|line| line.set_floor(now, floor));
        let device = Self {
            config: ConfigSpace::new(&identity, &description, None),
            description,
            memory,
            settings,
            registers: Registers::new(settings.mac),
            words: crate::eeprom::contents(settings.mac, SUBSYSTEM_VENDOR, identity.subsystem),
            wires: Wires::default(),
            eerd: 0,
            address: 0,
            mdic: 0,
            phy: Phy::new(now),
            link: false,
            exchange: Arc::clone(&exchange),
            shared: Arc::clone(&shared),
            cleared: Cleared::default(),
            path: PathHolder::default(),
            transmit: TransmitState::default(),
            quiesced: false,
            resetting: false,
            changed: false,
            tail: 0,
            epochs: [0; 2],
            heads: [0; 2],
        };
        Ok((device, DevicePort::new(exchange, shared)))
    }

    /// Returns a handle to the device for other threads.
    pub fn control(&self) -> Control {
        Control { exchange: Arc::clone(&self.exchange), shared: Arc::clone(&self.shared) }
    }

    pub(crate) fn now(&self) -> u64 {
        self.shared.clock.nanos()
    }

    /// Returns whether a direction is enabled, and the device may use memory.
    fn enabled(&self, register: u32, bit: u32) -> bool {
        self.config.bus_master() && self.registers.get(register) & bit != 0
    }

    fn transmits(&self) -> bool {
        self.enabled(register::TCTL, tctl::EN)
    }

    fn receives(&self) -> bool {
        self.enabled(register::RCTL, rctl::EN)
    }

    fn ring(&self, number: usize, enabled: bool, [low, high, len]: [u32; 3]) -> RingRules {
        RingRules {
            enabled,
            base: self.registers.wide(low, high),
            entries: self.registers.get(len) / slipway_e1000_spec::DESCRIPTOR as u32,
            head: self.heads[number],
            epoch: self.epochs[number],
        }
    }

    /// Returns the rules for the data path, as the registers have them.
    fn rules(&self) -> Rules {
        let registers = &self.registers;
        let rctl = registers.get(register::RCTL);
        let block = registers.wide(register::CSBAL, register::CSBAH);
        let has_block = self.settings.csb && block & u64::from(csb::ENABLE) != 0;
        let loops = self.phy.loops() || rctl & rctl::LBM != 0;
        Rules {
            transmit: self.ring(
                0,
                self.transmits(),
                [register::TDBAL, register::TDBAH, register::TDLEN],
            ),
            receive: self.ring(
                1,
                self.receives(),
                [register::RDBAL, register::RDBAH, register::RDLEN],
            ),
            csb: has_block.then_some(block & !u64::from(!csb::ADDRESS)),
            offloads: has_block && block & u64::from(csb::OFFLOADS) != 0,
            rctl,
            rxcsum: registers.get(register::RXCSUM),
            small: registers.get(register::RSRPD) as u16,
            vlans: registers.get(register::CTRL) & control::VME != 0,
            tag: registers.get(register::VET) as u16,
            loops,
            filter: Arc::new(registers.filter()),
        }
    }

    /// Brings the data path to where the registers want it, as far as the port allows. Never waits.
    pub(crate) fn advance(&mut self) {
        self.look_at_link();
        self.fetch_path();
        let runs = self.transmits() || self.receives();
        self.exchange.set_up(runs && self.link && !self.phy.loops());
        if self.path.is_port() {
            if self.changed && !self.path.is_recalled() {
                self.changed = false;
                self.exchange.update(self.rules());
                self.exchange.wake();
            }
            return;
        }
        if std::mem::take(&mut self.resetting) {
            (self.path, self.transmit) = (PathHolder::default(), TransmitState::default());
            self.store_heads();
        }
        if runs && !self.quiesced {
            self.dispatch();
        }
    }

    /// Asks the port for the data path if the function needs it, and takes it if it has come back.
    fn fetch_path(&mut self) {
        let wanted = self.quiesced || self.resetting;
        if !self.path.fetch(wanted, &self.exchange) {
            return;
        }
        // The port may not have taken the latest rules, by which a ring may begin anew.
        let rules = self.rules();
        if let Some(path) = self.path.path_mut() {
            path.set_rules(rules);
            self.transmit = path.transmit_state();
        }
    }

    /// Gives the data path to the port.
    fn dispatch(&mut self) {
        let rules = self.rules();
        let path = match self.path.take() {
            Some(mut path) => {
                path.set_rules(rules);
                path
            }
            None => {
                let (memory, shared) = (self.memory.clone(), Arc::clone(&self.shared));
                Box::new(DataPath::new(memory, rules, shared, self.transmit))
            }
        };
        self.changed = false;
        self.path.send(path, &self.exchange);
    }

    /// Makes the shared heads those that the rings begin with.
    pub(crate) fn store_heads(&self) {
        self.shared.tdh.store(self.heads[0], Ordering::Release);
        self.shared.rdh.store(self.heads[1], Ordering::Release);
    }

    /// Resets everything but configuration space and the PHY (CTRL.RST).
    pub(crate) fn reset_controller(&mut self) {
        let now = self.now();
        self.registers = Registers::new(self.settings.mac);
        (self.wires, self.eerd, self.mdic) = (Wires::default(), 0, 0);
        self.address = 0;
        self.shared.line.with(|line| {
            line.reset();
            line.advance(now);
        });
        self.cleared.clear(&self.shared.statistics);
        (self.heads, self.transmit) = ([0; 2], TransmitState::default());
        self.epochs = self.epochs.map(|epoch| epoch.wrapping_add(1));
        self.store_heads();
        self.resetting = true;
        self.changed = false;
        self.advance();
        // After the path was asked for: a port that loads such a tail sees that, and moves nothing.
        self.shared.store_tails([0; DOORBELLS]);
        self.tail = 0;
    }

    pub(crate) fn set_delays(&mut self) {
        let get = |offset| self.registers.get(offset) as u16;
        let delays = Delays {
            receive: get(register::RDTR),
            receive_absolute: get(register::RADV),
            transmit: get(register::TIDV),
            transmit_absolute: get(register::TADV),
        };
        let (now, throttle) = (self.now(), get(register::ITR));
        self.shared.line.with(|line| {
            line.set_delays(delays);
            line.set_throttle(now, throttle);
        });
    }

    /// Follows the host's link and the PHY's negotiation, and tells the driver of changes.
    pub(crate) fn look_at_link(&mut self) {
        let now = self.now();
        self.phy.set_carrier(now, self.exchange.link());
        self.phy.advance(now);
        let link = self.phy.link();
        if std::mem::replace(&mut self.link, link) != link {
            self.shared.line.with(|line| line.cause(now, cause::LSC));
        }
    }

    /// Follows a write to configuration space.
    pub(crate) fn config_changed(&mut self) {
        self.shared.line.enable(self.config.pin_enabled());
        self.change();
    }

    /// Returns the time of the next work that no access announces, in nanoseconds.
    fn deadline(&self) -> Option<u64> {
        self.shared.line.deadline().into_iter().chain(self.phy.deadline()).min()
    }

    /// Returns the heads for a successor, after a reset that waits for the port.
    pub(crate) fn saved_heads(&self) -> [u32; 2] {
        if self.resetting {
            return self.heads;
        }
        let Shared { tdh, rdh, .. } = &*self.shared;
        [tdh.load(Ordering::Acquire), rdh.load(Ordering::Acquire)]
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.exchange.abandon();
    }
}

impl Function for Device {
    fn description(&self) -> &Description {
        &self.description
    }

    fn config_read(&mut self, offset: u16, into: &mut [u8]) {
        let pending = self.shared.line.with(|line| line.asserted());
        self.config.set_interrupt_status(pending);
        self.config.read(offset, into);
    }

    fn config_write(&mut self, offset: u16, from: &[u8]) {
        match self.config.write(offset, from) {
            ConfigEffect::FunctionLevelReset => self.reset(),
            ConfigEffect::None => self.config_changed(),
        }
    }

    /// Registers have 32 bits. A narrower read returns its part of one, and a read of 8 bytes two.
    fn read(&mut self, bar: u8, offset: u64, into: &mut [u8]) -> Access {
        let first = (offset % 4) as usize;
        let within = first + into.len() <= 4 || (first == 0 && into.len() == 8);
        let at = match (bar, within) {
            (0, true) => dword(offset),
            (1, true) => u32::try_from(offset & !3).ok(),
            _ => None,
        };
        let Some(at) = at else { return Access::Refused };
        for (number, part) in into.chunks_mut(4).enumerate() {
            let at = at + 4 * number as u32;
            let word =
                if bar == 0 { Some(self.read_register(at)) } else { self.read_port(at.into()) };
            let Some(word) = word.map(u32::to_le_bytes) else { return Access::Refused };
            let from = if number == 0 { first } else { 0 };
            part.copy_from_slice(&word[from..from + part.len()]);
        }
        Access::Done
    }

    /// Registers are written as a whole: narrower writes are refused (section 4.1.1).
    fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> Access {
        if !offset.is_multiple_of(4) || !matches!(from.len(), 4 | 8) {
            return Access::Refused;
        }
        for (number, part) in from.as_chunks::<4>().0.iter().enumerate() {
            let (at, value) = (offset + 4 * number as u64, u32::from_le_bytes(*part));
            match (bar, dword(at)) {
                (0, Some(at)) => self.write_register(at, value),
                (1, _) if self.write_port(at, value) == Access::Done => {}
                _ => return Access::Refused,
            }
        }
        Access::Done
    }

    /// A tail was stored to its cell, or the register CSBK written. A receive tail wakes nobody,
    /// unless transmit descriptors wait: several stores before this call may have brought the
    /// driver round its ring, to the transmit tail that was seen last.
    fn notified(&mut self, writes: u64) {
        self.shared.live.announced.add(writes);
        let tail = std::mem::replace(&mut self.tail, self.shared.tdt());
        let block = self.registers.get(register::CSBAL) & csb::ENABLE != 0;
        let waits = self.tail != self.shared.tdh.load(Ordering::Acquire);
        if block || tail != self.tail || waits {
            self.kick();
        }
    }

    fn poll(&mut self) -> Progress {
        self.quiesced = false;
        self.advance();
        self.shared.line.advance(self.now());
        let recheck = self.path.is_recalled().then(|| self.shared.clock.now() + RECHECK);
        let deadline = self.deadline().map(Duration::from_nanos);
        Progress::Idle(recheck.into_iter().chain(deadline).min())
    }

    fn reset(&mut self) {
        let now = self.now();
        self.config.reset();
        self.shared.line.enable(self.config.pin_enabled());
        self.phy.reset(now);
        self.reset_controller();
    }

    fn quiesce(&mut self) -> bool {
        self.quiesced = true;
        self.advance();
        !self.path.is_port()
    }

    fn max_state(&self) -> usize {
        crate::state::MAX_LEN
    }

    fn save(&self) -> Vec<u8> {
        crate::state::save(self)
    }

    fn take_over(&mut self, state: &[u8]) -> Result<(), StateError> {
        crate::state::restore(self, state)
    }

    /// A successor of a device that was killed begins as after a reset, since there is no journal.
    /// Linux's driver resets the controller when frames that it has queued are not sent within
    /// seconds. One that only receives has to be told (`ethtool --negotiate`). A driver does not
    /// enable the function again, so that is done here.
    fn recover(&mut self) -> Result<(), StateError> {
        self.reset();
        self.config_write(COMMAND, &ENABLED);
        Ok(())
    }
}
