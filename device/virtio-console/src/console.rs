//! The device: registers, control queues, and the host's end of the ports.

use slipway_pci::{Function, StateError};
use slipway_virtio::layout::DeviceKind;
use slipway_virtio::queue::{Broken, Chain};
use slipway_virtio::registers::Offer;
use slipway_virtio::{Local, function_on_local, state};
use slipway_virtio_spec::console::{CONTROL, Config, Control, DEVICE_TYPE, Features, event, queue};
use zerocopy::{FromBytes, FromZeros};

use crate::parts::QUEUE_SIZE;
use crate::port::{Dialogue, Notice, encode};
use crate::state::{DEVICE, PortState, STATE_VERSION};
use crate::stream::{CHAINS, Source};
use crate::{Parts, PartsError, PortSettings};

/// A console: class 07 80 00, other communication controller.
const KIND: DeviceKind =
    DeviceKind { device_type: DEVICE_TYPE, class: 0x07_80_00, config_size: size_of::<Config>() };
/// Most control messages of each direction in one poll.
const MESSAGES: usize = 64;

/// A console device, and the host's end of its ports; the crate's head describes both.
///
/// A port number that does not exist is a port that nobody opens: its calls do nothing.
pub struct Console {
    local: Local,
    ports: Vec<Port>,
}

/// One port.
#[derive(Default)]
struct Port {
    settings: PortSettings,
    dialogue: Dialogue,
    /// `true` if the host's end is open.
    host_open: bool,
    /// The bytes from the driver.
    source: Source,
    /// `true` if the host has bytes for which the driver had no buffer.
    wants_room: bool,
    /// `true` if a call has left work that needs no notification.
    behind: bool,
}

impl Port {
    fn new(settings: PortSettings) -> Self {
        Self { settings, ..Self::default() }
    }

    /// Returns to the state after construction, but for the host's end.
    fn reset(&mut self) {
        let host_open = self.host_open;
        *self = Self { host_open, ..Self::new(self.settings.clone()) };
    }
}

impl Console {
    /// Makes a device in its state after power-on. The host's end of every port is closed.
    ///
    /// # Errors
    /// [`PartsError`] when the parts do not fit together.
    pub fn new(parts: Parts) -> Result<Self, PartsError> {
        parts.check()?;
        let offer = Offer {
            queues: queue::count(parts.ports.len() as u16),
            queue_size: QUEUE_SIZE,
            features: Offer::SINGLE.features | Features::MULTIPORT.bits(),
            ..Offer::SINGLE
        };
        let local = Local::new(&KIND, &offer, parts.memory, parts.interrupts)?;
        Ok(Self { local, ports: parts.ports.into_iter().map(Port::new).collect() })
    }

    /// Opens or closes the host's end of a port. The driver is told by the next polls. While the
    /// end is closed, polls drop the driver's bytes. A reset of the device does not close it.
    pub fn set_host_open(&mut self, port: u16, open: bool) {
        let Some(port) = self.ports.get_mut(usize::from(port)) else { return };
        if port.host_open && !open {
            port.dialogue.host_closed();
        }
        port.host_open = open;
    }

    /// Returns whether the host's end of a port is open.
    pub fn host_open(&self, port: u16) -> bool {
        self.ports.get(usize::from(port)).is_some_and(|port| port.host_open)
    }

    /// Returns whether the guest's end of a port is open: the driver runs, and a process has the
    /// port open, or the port is a console.
    pub fn guest_open(&self, port: u16) -> bool {
        let Some(one) = self.ports.get(usize::from(port)) else { return false };
        let open = if self.is_multiport() { one.dialogue.guest_open } else { port == 0 };
        open && self.local.transport.registers.is_live()
    }

    fn is_multiport(&self) -> bool {
        let features = self.local.transport.registers.state.driver_features;
        Features::from_bits_truncate(features).contains(Features::MULTIPORT)
    }

    /// Returns whether the port exists, and the host may move its bytes.
    fn can_move_bytes(&self, port: u16) -> bool {
        self.host_open(port) && (self.is_multiport() || port == 0)
    }

    /// Copies bytes of `from` into the guest's receive buffers of a port. Returns the number of
    /// bytes copied: fewer than there are if the guest has no more buffers, and 0 while one of the
    /// ends is closed. The host offers the rest again after later polls. The guest is interrupted.
    pub fn port_write(&mut self, port: u16, from: &[u8]) -> usize {
        if from.is_empty() || !self.can_move_bytes(port) || !self.guest_open(port) {
            return 0;
        }
        let written = self.write_stream(port, from);
        self.local.checked(written).unwrap_or(0)
    }

    /// Implements [`Console::port_write`] for a port that exists.
    fn write_stream(&mut self, number: u16, from: &[u8]) -> Result<usize, Broken> {
        let port = &mut self.ports[usize::from(number)];
        let Some((memory, queue)) = self.local.queue(queue::receive(number)) else { return Ok(0) };
        port.wants_room = false;
        let (mut done, mut chain) = (0, Chain::default());
        let mut begun = 0;
        while done < from.len() && begun < CHAINS {
            let Some(head) = queue.queue.take_writable(memory, &mut chain)? else {
                port.wants_room = true;
                break;
            };
            let written = chain.scatter(memory, &from[done..])?;
            queue.queue.report(memory, head, written as u32)?;
            done += written;
            begun += 1;
        }
        port.behind |= done < from.len() && !port.wants_room;
        queue.publish(memory)?;
        Ok(done)
    }

    /// Copies bytes that the guest has sent by a port into `into`. Returns the number of bytes
    /// copied. If that is less than the length of `into`, the host calls again after later polls.
    /// Bytes that the guest sent before it closed its end can still be read. A buffer goes back to
    /// the guest when its last byte is read.
    pub fn port_read(&mut self, port: u16, into: &mut [u8]) -> usize {
        if into.is_empty() || !self.can_move_bytes(port) {
            return 0;
        }
        let read = self.read_stream(port, into);
        self.local.checked(read).unwrap_or(0)
    }

    /// Implements [`Console::port_read`] for a port that exists.
    fn read_stream(&mut self, number: u16, into: &mut [u8]) -> Result<usize, Broken> {
        let port = &mut self.ports[usize::from(number)];
        let Some((memory, queue)) = self.local.queue(queue::transmit(number)) else {
            return Ok(0);
        };
        let (read, more) = port.source.read(memory, queue, into)?;
        port.behind |= more;
        Ok(read)
    }

    /// Serves all queues. Returns whether there was anything to do.
    fn serve(&mut self) -> Result<bool, Broken> {
        let mut busy = false;
        if self.is_multiport() {
            busy |= self.take_messages()?;
            busy |= self.send_messages()?;
        }
        for number in 0..self.ports.len() as u16 {
            busy |= self.serve_port(number)?;
        }
        Ok(busy)
    }

    /// Takes the driver's control messages. Returns whether there were any.
    fn take_messages(&mut self) -> Result<bool, Broken> {
        let mut chain = Chain::default();
        for count in 0..MESSAGES {
            let Some((memory, queue)) = self.local.queue(queue::CONTROL_TRANSMIT) else {
                return Ok(false);
            };
            let Some(head) = queue.queue.take_readable(memory, &mut chain)? else {
                return Ok(count > 0);
            };
            let mut bytes = [0; CONTROL];
            let whole = chain.readable_len() >= CONTROL as u64;
            if whole {
                chain.gather(memory, &mut bytes)?;
            }
            queue.queue.report(memory, head, 0)?;
            queue.publish(memory)?;
            if let (true, Ok(control)) = (whole, Control::read_from_bytes(&bytes)) {
                self.handle_message(&control);
            }
        }
        Ok(true)
    }

    /// Carries out a control message of the driver. A message about a port that does not exist
    /// changes nothing.
    fn handle_message(&mut self, control: &Control) {
        let (event, value) = (control.event.get(), control.value.get());
        if (event, value) == (event::DEVICE_READY, 1) {
            return self.ports.iter_mut().for_each(|port| port.dialogue.driver_ready());
        }
        let number = usize::try_from(control.id.get()).unwrap_or(usize::MAX);
        let Some(port) = self.ports.get_mut(number) else { return };
        match (event, value) {
            (event::PORT_READY, 1) => port.dialogue.port_ready(&port.settings),
            (event::PORT_OPEN, open) => port.dialogue.guest_opened(open != 0),
            _ => {}
        }
    }

    /// Returns the next message for the driver, and the number of its port. Returns `None` if none
    /// waits.
    fn next_notice(&self) -> Option<(u16, Notice)> {
        (0..).zip(&self.ports).find_map(|(number, port)| {
            port.dialogue.notice(port.host_open).map(|notice| (number, notice))
        })
    }

    /// Sends the control messages that wait for the driver, as far as it has buffers. Returns
    /// whether any were sent.
    fn send_messages(&mut self) -> Result<bool, Broken> {
        let mut chain = Chain::default();
        for count in 0..MESSAGES {
            let Some((number, notice)) = self.next_notice() else { return Ok(count > 0) };
            let Some((memory, queue)) = self.local.queue(queue::CONTROL_RECEIVE) else {
                return Ok(false);
            };
            let Some(head) = queue.queue.take_writable(memory, &mut chain)? else {
                return Ok(count > 0);
            };
            let port = &mut self.ports[usize::from(number)];
            let bytes = encode(notice, number, &port.settings);
            // A message cannot be sent in parts.
            if chain.scatter(memory, &bytes)? < bytes.len() {
                return Err(Broken::Chain);
            }
            queue.queue.report(memory, head, bytes.len() as u32)?;
            queue.publish(memory)?;
            port.dialogue.told(notice);
        }
        Ok(true)
    }

    /// Serves the queues of a port that exists. While the host's end is closed, drops the driver's
    /// bytes; otherwise asks the driver to notify of new bytes. Returns whether bytes are left to
    /// drop, or the host can move bytes that it could not move after the last poll. Bytes that
    /// waited for the host by then do not count.
    fn serve_port(&mut self, number: u16) -> Result<bool, Broken> {
        let port = &mut self.ports[usize::from(number)];
        let mut busy = std::mem::take(&mut port.behind);
        if port.wants_room
            && let Some((memory, queue)) = self.local.queue(queue::receive(number))
            && queue.queue.look(memory)? > 0
        {
            port.wants_room = false;
            busy = true;
        }
        let Some((memory, queue)) = self.local.queue(queue::transmit(number)) else {
            return Ok(busy);
        };
        if !port.host_open {
            return Ok(port.source.discard(memory, queue)? || busy);
        }
        if !port.source.holds() && queue.queue.look(memory)? == 0 {
            busy |= queue.queue.arm(memory)?;
        }
        Ok(busy)
    }

    fn config(&self) -> Config {
        let max_nr_ports = (self.ports.len() as u32).into();
        Config { max_nr_ports, ..Config::new_zeroed() }
    }

    /// Resets the ports if the device was reset since the last call.
    fn follow_reset(&mut self) {
        if self.local.take_reset() {
            self.ports.iter_mut().for_each(Port::reset);
        }
    }
}

/// A poll serves the control queues and looks at the ports.
/// [`Busy`](slipway_pci::Progress::Busy) also tells that a port has room again; bytes of the guest
/// that wait for the host do not make it busy.
impl Function for Console {
    function_on_local!(serve, config, follow_reset);

    fn save(&self) -> Vec<u8> {
        let ports = self.ports.iter().map(|port| PortState {
            name: port.settings.name.clone(),
            is_console: port.settings.is_console,
            dialogue: port.dialogue,
            taken: port.source.taken(),
        });
        let (transport, ports) = (self.local.transport.save(), ports.collect::<Vec<_>>());
        state::encode(DEVICE, STATE_VERSION, transport, ports)
    }

    /// Takes over a saved state. The host's ends keep what the host has set on this device: a
    /// driver that was told otherwise is told so by the next polls.
    fn take_over(&mut self, state: &[u8]) -> Result<(), StateError> {
        let (transport, ports): (_, Vec<PortState>) = state::decode(DEVICE, STATE_VERSION, state)?;
        let mut pairs = ports.iter().zip(&self.ports);
        let same = ports.len() == self.ports.len();
        if !same || !pairs.all(|(saved, own)| saved.is_of(&own.settings)) {
            return Err(StateError::Inconsistent("other ports".into()));
        }
        self.local.restore(transport)?;
        let started = self.local.transport.registers.has_started();
        let multiport = self.is_multiport();
        if !ports.iter().all(|port| port.is_sound(started, multiport)) {
            return Err(StateError::Inconsistent("a port that cannot be".into()));
        }
        for (port, saved) in self.ports.iter_mut().zip(ports) {
            port.reset();
            (port.dialogue, port.source) = (saved.dialogue, Source::resume(saved.taken));
        }
        Ok(())
    }
}
