//! The device as a PCI function: registers, features, the control queue, and the life cycle of the
//! queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use slipway_pci::{Access, Description, Function, Progress, StateError};
use slipway_ram::{Memory, Snapshots};
use slipway_switch::{Exchange, Exchanged, Mac, PathHolder};
use slipway_telemetry::Clock;
use slipway_virtio::layout::{COMMON, DeviceKind};
use slipway_virtio::queue::Broken;
use slipway_virtio::registers::Effect;
use slipway_virtio::{Configured, Transport, Written};
use slipway_virtio_spec::Status;
use slipway_virtio_spec::net::{Config, DEVICE_TYPE, Features, config_status};
use zerocopy::IntoBytes;

use crate::common::Rules;
use crate::control::{Change, ControlQueue, execute};
use crate::counters::Live;
use crate::driven::Driven;
use crate::parts::FRAME_OVERHEAD;
use crate::path::DataPath;
use crate::registers::{features, offer};
use crate::{Counters, DevicePort, Parts, PartsError, Settings};

/// A network device: class 02 00 00, Ethernet controller.
const KIND: DeviceKind =
    DeviceKind { device_type: DEVICE_TYPE, class: 0x02_00_00, config_size: size_of::<Config>() };
/// The time for the switch's thread to answer before the function looks again.
const RECHECK: Duration = Duration::from_micros(50);
/// The most commands of the control queue in one poll.
const COMMANDS: usize = 16;
/// Duplex of the configuration: full.
const FULL_DUPLEX: u8 = 1;
/// Speed of the configuration, Mbit/s: a number for tools that expect one, since there is no wire.
const SPEED: u32 = 100_000;

/// A network device; the crate's head describes it.
///
/// Before it drops a device, the host calls `quiesce` until it returns `true`: the port then holds
/// no guest memory.
pub struct Device {
    pub(crate) transport: Transport,
    pub(crate) memory: Memory,
    clock: Arc<dyn Clock>,
    pub(crate) settings: Settings,
    /// The MAC address that the host gave the device last, as [`Mac::to_bits`].
    address: Arc<AtomicU64>,
    pub(crate) driven: Driven,
    pub(crate) exchange: Arc<Exchange<DataPath>>,
    live: Arc<Live>,
    pub(crate) path: PathHolder<DataPath>,
    pub(crate) control: Option<ControlQueue>,
    /// `true` if nothing may touch guest memory.
    quiesced: bool,
    /// `true` if the driver has reset the device and the port may still have the queues.
    resetting: bool,
    /// `true` if the queues' registers have changed since the port got the queues.
    pub(crate) queues_changed: bool,
    /// `true` if the state was loaded, so that queues begin at their used index instead of at 0
    /// when the port gets them next.
    pub(crate) resumes: bool,
    /// The link state that the driver was told last. `None` if the state was loaded: what the
    /// driver knows is not part of it, so the driver is told.
    pub(crate) link: Option<bool>,
    pub(crate) journal: Option<Snapshots>,
}

impl Device {
    /// Makes a device in its state after power-on, and its port, which is to be attached to a
    /// switch.
    ///
    /// # Errors
    /// [`PartsError`] when the parts do not fit together.
    pub fn new(parts: Parts) -> Result<(Self, DevicePort), PartsError> {
        parts.check()?;
        let exchange = Exchange::new();
        let journal = match &parts.journal {
            Some(memory) => Some(Snapshots::new(memory).ok_or(PartsError::Journal)?),
            None => None,
        };
        let device = Self {
            transport: Transport::new(&KIND, &offer(&parts.settings), parts.interrupts),
            memory: parts.memory,
            clock: parts.clock,
            settings: parts.settings,
            address: Arc::new(AtomicU64::new(parts.settings.mac.to_bits())),
            driven: Driven::new(parts.settings.mac, parts.settings.pairs),
            exchange: Arc::clone(&exchange),
            live: Arc::default(),
            path: PathHolder::default(),
            control: None,
            quiesced: false,
            resetting: false,
            queues_changed: false,
            resumes: false,
            link: Some(true),
            journal,
        };
        Ok((device, DevicePort::new(exchange)))
    }

    /// Returns a handle to the device for other threads.
    pub fn control(&self) -> Control {
        let (exchange, live) = (Arc::clone(&self.exchange), Arc::clone(&self.live));
        Control { exchange, live, address: Arc::clone(&self.address) }
    }

    /// Returns the MAC address that the host gave the device last. The driver has it from its next
    /// reset on.
    pub(crate) fn host_mac(&self) -> Mac {
        mac_in(&self.address)
    }

    /// Returns whether the driver runs, and the device needs no reset and is in none.
    pub(crate) fn runs(&self) -> bool {
        self.transport.registers.is_live() && !self.resetting
    }

    pub(crate) fn is_resetting(&self) -> bool {
        self.resetting
    }

    /// Returns the features that the driver chose.
    pub(crate) fn features(&self) -> Features {
        features(&self.transport.registers)
    }

    /// Returns the rules for the port, as negotiated and set by the driver.
    pub(crate) fn rules(&self) -> Rules {
        let negotiated = self.features();
        let offloads = Features::from_bits_truncate(self.driven.offloads);
        let mut filter = self.driven.filter.clone();
        // A driver without CTRL_RX cannot ask for less than all frames.
        filter.promiscuous |= !negotiated.contains(Features::CTRL_RX);
        let limited = negotiated.contains(Features::MTU);
        let longest = usize::from(self.settings.mtu) + FRAME_OVERHEAD;
        Rules {
            features: (negotiated - Features::GUEST_OFFLOADS) | offloads,
            pairs: self.driven.pairs,
            longest: if limited { longest } else { usize::MAX },
            filter,
            config: self.transport.interrupt(self.transport.registers.state.config_vector),
        }
    }

    /// Returns whether the function needs the data path back from the port.
    fn wants_path(&self) -> bool {
        let resets = self.transport.registers.state.queues.iter().any(|queue| queue.resetting);
        self.quiesced || resets || self.queues_changed || !self.runs()
    }

    /// Carries out what the registers ask for: resets the device or queues, and gives the queues to
    /// the port. This takes the data path. While the port has the path, asks for its return if
    /// there is something to carry out, and leaves that to a later call. Never waits.
    fn advance(&mut self) {
        if self.path.is_port() && self.live.is_broken() {
            self.transport.need_reset();
        }
        self.fetch_path();
        self.exchange.set_up(self.runs());
        if self.path.is_port() {
            return;
        }
        if self.resetting {
            self.finish_reset();
        }
        self.reset_queues();
        if self.runs() && !self.quiesced {
            self.dispatch();
        }
    }

    /// Asks the port for the data path if the function needs it, and takes it if it has come back.
    fn fetch_path(&mut self) {
        let wanted = self.path.is_port() && self.wants_path();
        if self.path.fetch(wanted, &self.exchange) && self.live.is_broken() {
            self.transport.need_reset();
        }
    }

    fn finish_reset(&mut self) {
        self.resetting = false;
        self.transport.reset_device();
        self.driven = Driven::new(self.host_mac(), self.settings.pairs);
        (self.path, self.control) = (PathHolder::default(), None);
        (self.queues_changed, self.resumes) = (false, false);
    }

    fn begin_reset(&mut self) {
        self.resetting = true;
        self.exchange.set_up(false);
        self.advance();
    }

    /// Gives the queues to the port, as the registers describe them.
    fn dispatch(&mut self) {
        let rules = self.rules();
        let mut path = match self.path.take() {
            Some(path) => path,
            None => {
                let (memory, live) = (self.memory.clone(), Arc::clone(&self.live));
                let pairs = usize::from(self.settings.pairs);
                Box::new(DataPath::new(memory, rules.clone(), live, pairs))
            }
        };
        path.set_rules(rules);
        if self.equip(&mut path).is_err() {
            self.path = PathHolder::Function(Some(path));
            self.exchange.set_up(false);
            self.transport.need_reset();
            return;
        }
        self.queues_changed = false;
        self.live.set_broken(false);
        self.path.send(path, &self.exchange);
    }

    /// Acts on a write to the common configuration.
    fn common_written(&mut self, effect: Effect) {
        match effect {
            Effect::None => {}
            Effect::Reset => self.begin_reset(),
            Effect::Status(new) => self.status_set(new),
            Effect::Enable(queue) => self.enabled(queue),
            Effect::ResetQueue(_) | Effect::Vector => self.queues_changed = true,
        }
        self.advance();
    }

    fn status_set(&mut self, new: Status) {
        if new.contains(Status::FEATURES_OK) {
            self.driven.negotiated(self.features());
        }
        if new.contains(Status::DRIVER_OK) {
            self.link = Some(self.exchange.link());
        }
    }

    fn enabled(&mut self, queue: u16) {
        let largest = self.settings.queue_size;
        let one = &self.transport.registers.state.queues[usize::from(queue)];
        if one.is_sound(largest) {
            self.queues_changed = true;
        } else {
            self.transport.need_reset();
        }
    }

    /// Handles the driver's notification of a queue. The port, which serves the queues of frames,
    /// is woken. The control queue is served by the poll that follows every register write.
    fn notify(&mut self, queue: u64) {
        self.live.notifications.add(1);
        if self.path.is_port() && queue < self.transport.registers.state.queues.len() as u64 {
            self.exchange.wake();
        }
    }

    /// Returns the device configuration as the driver reads it.
    fn config(&self) -> Config {
        let mut status = if self.exchange.link() { config_status::LINK_UP } else { 0 };
        if self.driven.announce {
            status |= config_status::ANNOUNCE;
        }
        Config {
            mac: self.driven.filter.mac,
            status: status.into(),
            max_virtqueue_pairs: self.settings.pairs.into(),
            mtu: self.settings.mtu.into(),
            speed: SPEED.into(),
            duplex: FULL_DUPLEX,
        }
    }

    fn look_at_link(&mut self) {
        let link = Some(self.exchange.link());
        let told = self.features().contains(Features::STATUS);
        if self.runs() && std::mem::replace(&mut self.link, link) != link && told {
            self.transport.config_changed();
        }
    }

    /// Carries out commands of the control queue. Returns whether there were any.
    fn serve_control(&mut self) -> bool {
        let Some(mut control) = self.control.take() else { return false };
        let mut busy = false;
        for _ in 0..COMMANDS {
            match self.serve_one(&mut control) {
                Ok(true) => busy = true,
                Ok(false) => break,
                Err(_) => {
                    self.transport.need_reset();
                    break;
                }
            }
        }
        self.control = Some(control);
        busy
    }

    /// Carries out or acknowledges one command. Returns whether there was progress.
    fn serve_one(&mut self, control: &mut ControlQueue) -> Result<bool, Broken> {
        let done = match control.pending {
            // A command is acknowledged only when the port follows the new rules.
            Some(_) if !self.exchange.is_settled() => return Ok(false),
            Some(done) => done,
            None => {
                let features = self.features();
                let Some((mut done, bytes)) = control.next(&self.memory)? else { return Ok(false) };
                let change = execute(bytes, features, &mut self.driven);
                if change.is_some() {
                    done.ack = slipway_virtio_spec::net::control::OK;
                }
                control.pending = Some(done);
                if change == Some(Change::Rules) && self.path.is_port() {
                    self.exchange.update(self.rules());
                    self.exchange.wake();
                    return Ok(true);
                }
                done
            }
        };
        control.pending = None;
        control.finish(&self.memory, done)?;
        Ok(true)
    }

    fn is_waiting(&self) -> bool {
        let pending = self.control.as_ref().is_some_and(|control| control.pending.is_some());
        self.path.is_recalled() || pending
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.exchange.abandon();
    }
}

impl Function for Device {
    fn description(&self) -> &Description {
        self.transport.description()
    }

    fn config_read(&mut self, offset: u16, into: &mut [u8]) {
        if let Some((at, len)) = self.transport.config_read(offset, into) {
            self.read(0, at, &mut into[..len]);
        }
    }

    fn config_write(&mut self, offset: u16, from: &[u8]) {
        match self.transport.config_write(offset, from) {
            Configured::Done => {}
            Configured::Reset => return self.reset(),
            Configured::Window(at, len) => drop(self.write(0, at, &from[..len])),
        }
        self.checkpoint();
    }

    fn read(&mut self, bar: u8, offset: u64, into: &mut [u8]) -> Access {
        if COMMON.contains(&offset) {
            self.advance();
        }
        let config = self.config();
        self.transport.read(bar, offset, into, config.as_bytes())
    }

    fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> Access {
        if COMMON.contains(&offset) {
            self.advance();
        }
        match self.transport.write(bar, offset, from) {
            Written::Refused => return Access::Refused,
            // A notification changes no state that is saved.
            Written::Notified(queue) => {
                self.notify(queue);
                return Access::Done;
            }
            Written::Common(effect) => self.common_written(effect),
            Written::Other => {}
        }
        self.checkpoint();
        Access::Done
    }

    fn notified(&mut self, writes: u64) {
        self.live.notifications.add(writes);
        if self.path.is_port() {
            self.exchange.wake();
        }
    }

    fn poll(&mut self) -> Progress {
        self.quiesced = false;
        self.advance();
        self.look_at_link();
        if self.runs() && self.serve_control() {
            self.checkpoint();
            return Progress::Busy;
        }
        let soon = self.is_waiting().then(|| self.clock.now() + RECHECK);
        Progress::Idle(soon)
    }

    fn reset(&mut self) {
        self.transport.reset_pci();
        self.begin_reset();
        self.checkpoint();
    }

    fn quiesce(&mut self) -> bool {
        self.quiesced = true;
        self.advance();
        if let Some(control) = &mut self.control {
            control.virtqueue.queue.release_memory();
        }
        !self.path.is_port()
    }

    fn max_state(&self) -> usize {
        crate::parts::max_state(self.settings.pairs)
    }

    fn save(&self) -> Vec<u8> {
        crate::state::save(self)
    }

    fn take_over(&mut self, state: &[u8]) -> Result<(), StateError> {
        crate::state::restore(self, state)
    }

    fn recover(&mut self) -> Result<(), StateError> {
        Self::recover(self)
    }
}

/// A handle to a device for other threads. It is cheap to clone, and harmless after the device is
/// gone.
#[derive(Clone)]
pub struct Control {
    exchange: Arc<Exchange<DataPath>>,
    live: Arc<Live>,
    address: Arc<AtomicU64>,
}

impl Control {
    /// Returns the counts so far.
    pub fn counters(&self) -> Counters {
        self.live.snapshot()
    }

    /// Returns whether the driver runs.
    pub fn is_up(&self) -> bool {
        self.exchange.is_up()
    }

    /// Gives the device another MAC address, as its host. A driver finds it from its next reset of
    /// the device on, with which each driver begins (section 3.1.1). A driver that runs keeps the
    /// address that it has. Does nothing if `mac` is no unicast address.
    pub fn set_mac(&self, mac: Mac) {
        if mac.is_unicast() {
            // Nothing else depends on the word. A client that connects later has a message after
            // this store: the socket orders both.
            self.address.store(mac.to_bits(), Ordering::Relaxed);
        }
    }

    /// Returns the MAC address that the host gave the device last.
    pub fn mac(&self) -> Mac {
        mac_in(&self.address)
    }
}

fn mac_in(address: &AtomicU64) -> Mac {
    Mac::from_bits(address.load(Ordering::Relaxed))
}
