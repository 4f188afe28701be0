//! A small real virtio console driver, for unit tests and fuzzing. It follows Linux: it sets ports
//! up as the device tells of them, and takes no interrupts.

use slipway_virtio::driver::Start;
use slipway_virtio_spec::console::{CONTROL, Config, Control, Features, event, queue};
use slipway_virtio_spec::{RingFeatures, Status};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

pub use slipway_virtio::driver::{
    AccessError, Arena, Buffer, Direct, DriverError, RegisterAccess, Ring, Used, notification,
};

/// Bytes of each receive buffer.
pub const BUFFER: u32 = 128;
/// Bytes of a port's memory for what it sends.
const SEND: u32 = 1 << 16;

/// The features and sizes that a driver asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// `true` if the driver accepts MULTIPORT.
    pub multiport: bool,
    /// `true` if the driver accepts event indexes.
    pub event_index: bool,
    /// Entries of each queue, a power of two.
    pub entries: u16,
}

impl Default for Options {
    fn default() -> Self {
        Self { multiport: true, event_index: true, entries: 8 }
    }
}

/// A receive queue, full of buffers.
pub struct Inbox {
    /// The queue.
    pub ring: Ring,
    /// The address of each buffer, by chain ID.
    places: Vec<u64>,
    /// Buffers that are not in the ring.
    spare: Vec<u64>,
}

/// A transmit queue with memory for its bytes.
pub struct Outbox {
    /// The queue.
    pub ring: Ring,
    at: u64,
    next: u32,
}

/// A port as the driver sees it.
#[derive(Default)]
pub struct Port {
    /// `true` once the device has told of the port.
    pub is_there: bool,
    /// `true` once the device has said that the port is a console.
    pub is_console: bool,
    /// The port's name, once the device has told it.
    pub name: Option<String>,
    /// The states of the host's end, as the device has told them.
    pub host_opens: Vec<bool>,
    /// The queue for bytes of the host.
    pub receive: Option<Inbox>,
    /// The queue for bytes to the host.
    pub transmit: Option<Outbox>,
}

impl Inbox {
    fn new(ring: Ring, arena: &mut Arena) -> Result<Self, DriverError> {
        let places = vec![0; usize::from(ring.entries())];
        let mut spare = Vec::new();
        for _ in 0..ring.entries() {
            spare.push(arena.allocate(BUFFER as usize)?);
        }
        Ok(Self { ring, places, spare })
    }

    /// Gives all spare buffers to the device. Returns whether it wants to be notified.
    fn fill(&mut self) -> Result<bool, DriverError> {
        while let Some(at) = self.spare.pop() {
            let id = self.ring.push(&[Buffer::writable(at, BUFFER)])?;
            self.places[usize::from(id)] = at;
        }
        Ok(self.ring.publish()?)
    }

    /// Takes the bytes of the next used buffer. The buffer stays with the driver.
    fn pop(&mut self, arena: &Arena) -> Result<Option<Vec<u8>>, DriverError> {
        let Some(used) = self.ring.pop()? else { return Ok(None) };
        let at = *self.places.get(usize::from(used.id)).ok_or(DriverError::Memory)?;
        if used.len > BUFFER {
            return Err(DriverError::Memory);
        }
        let mut bytes = vec![0; used.len as usize];
        arena.memory().read(at, &mut bytes)?;
        self.spare.push(at);
        Ok(Some(bytes))
    }
}

impl Outbox {
    fn new(ring: Ring, arena: &mut Arena) -> Result<Self, DriverError> {
        Ok(Self { ring, at: arena.allocate(SEND as usize)?, next: 0 })
    }

    /// Queues `bytes` as one chain that is cut into `pieces` pieces. Returns whether the device
    /// wants to be notified.
    fn push(&mut self, arena: &Arena, bytes: &[u8], pieces: u32) -> Result<bool, DriverError> {
        while self.ring.pop()?.is_some() {}
        let len = bytes.len() as u32;
        if len > SEND - self.next {
            self.next = 0;
        }
        let at = self.at + u64::from(self.next);
        arena.memory().write(at, bytes)?;
        let cut = |piece: u32| piece * (len / pieces);
        let buffers: Vec<Buffer> = (0..pieces)
            .map(|piece| {
                let end = if piece + 1 == pieces { len } else { cut(piece + 1) };
                Buffer::readable(at + u64::from(cut(piece)), end - cut(piece))
            })
            .collect();
        self.ring.push(&buffers)?;
        self.next += len;
        Ok(self.ring.publish()?)
    }

    /// Returns the number of descriptors that the device has not given back.
    pub fn in_flight(&mut self) -> Result<usize, DriverError> {
        while self.ring.pop()?.is_some() {}
        Ok(usize::from(self.ring.entries()) - self.ring.room())
    }
}

/// The driver of one device.
pub struct Driver<R> {
    /// The access to the registers.
    pub registers: R,
    /// Memory for queues and buffers.
    pub arena: Arena,
    /// The ports by number.
    pub ports: Vec<Port>,
    options: Options,
    control: Option<(Inbox, Outbox)>,
}

impl<R: RegisterAccess> Driver<R> {
    /// Resets and initialises the device, and sets its ports up as far as the device tells of them.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(registers: R, arena: Arena, options: Options) -> Result<Self, DriverError> {
        let mut driver = Self { registers, arena, ports: Vec::new(), options, control: None };
        driver.start()?;
        Ok(driver)
    }

    /// Resets the device and initialises it anew, with fresh queues.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn start(&mut self) -> Result<(), DriverError> {
        self.registers.reset()?;
        self.arena.clear();
        (self.ports, self.control) = (Vec::new(), None);
        let Options { multiport, event_index, .. } = self.options;
        let mut rings = RingFeatures::VERSION_1;
        rings.set(RingFeatures::EVENT_IDX, event_index);
        let mut wanted = Features::empty();
        wanted.set(Features::MULTIPORT, multiport);
        self.registers.negotiate(rings.bits() | wanted.bits())?;
        let ports = if multiport { self.config()?.max_nr_ports.get() as u16 } else { 1 };
        if multiport {
            let inbox = self.inbox(rings, queue::CONTROL_RECEIVE)?;
            let outbox = self.outbox(rings, queue::CONTROL_TRANSMIT)?;
            self.control = Some((inbox, outbox));
        }
        for port in 0..ports {
            let receive = Some(self.inbox(rings, queue::receive(port))?);
            let transmit = Some(self.outbox(rings, queue::transmit(port))?);
            self.ports.push(Port { receive, transmit, ..Port::default() });
        }
        self.registers.set_status(Status::DRIVER_OK)?;
        self.registers.needs_no_reset()?;
        match multiport {
            true => {
                self.fill_control()?;
                self.say(0, event::DEVICE_READY, 1)?;
                self.pump()
            }
            false => self.fill(0),
        }
    }

    fn inbox(&mut self, rings: RingFeatures, number: u16) -> Result<Inbox, DriverError> {
        Inbox::new(self.ring(rings, number)?, &mut self.arena)
    }

    fn outbox(&mut self, rings: RingFeatures, number: u16) -> Result<Outbox, DriverError> {
        Outbox::new(self.ring(rings, number)?, &mut self.arena)
    }

    /// Makes queue `number`, with the vector after that of the configuration.
    fn ring(&mut self, rings: RingFeatures, number: u16) -> Result<Ring, DriverError> {
        let entries = self.options.entries;
        self.registers.make_queue(&mut self.arena, rings, number, entries, number + 1)
    }

    /// Reads the device's configuration.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn config(&mut self) -> Result<Config, DriverError> {
        let mut config = Config::new_zeroed();
        self.registers.read_config(config.as_mut_bytes())?;
        Ok(config)
    }

    fn fill_control(&mut self) -> Result<(), DriverError> {
        let Some((inbox, _)) = &mut self.control else { return Ok(()) };
        if inbox.fill()? {
            self.registers.notify(queue::CONTROL_RECEIVE)?;
        }
        Ok(())
    }

    /// Sends a control message, and lets the device work.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn say(&mut self, port: u32, event: u16, value: u16) -> Result<(), DriverError> {
        let control = Control { id: port.into(), event: event.into(), value: value.into() };
        let Some((_, outbox)) = &mut self.control else { return Err(DriverError::Refused) };
        if outbox.push(&self.arena, control.as_bytes(), 1)? {
            self.registers.notify(queue::CONTROL_TRANSMIT)?;
        }
        Ok(self.registers.idle()?)
    }

    /// Takes the device's control messages, and answers them.
    ///
    /// # Errors
    /// [`DriverError`]; [`DriverError::Memory`] for a message that cannot be.
    pub fn pump(&mut self) -> Result<(), DriverError> {
        loop {
            self.registers.idle()?;
            let Some((inbox, _)) = &mut self.control else { return Ok(()) };
            let Some(bytes) = inbox.pop(&self.arena)? else { return Ok(()) };
            self.heard(&bytes)?;
            self.fill_control()?;
        }
    }

    fn heard(&mut self, bytes: &[u8]) -> Result<(), DriverError> {
        let (control, rest) = bytes.split_at_checked(CONTROL).ok_or(DriverError::Memory)?;
        let control = Control::read_from_bytes(control).map_err(|_| DriverError::Memory)?;
        let number = control.id.get() as u16;
        let port = self.ports.get_mut(usize::from(number)).ok_or(DriverError::Memory)?;
        match control.event.get() {
            event::PORT_ADD if !port.is_there => {
                port.is_there = true;
                self.fill(number)?;
                self.say(number.into(), event::PORT_READY, 1)
            }
            event::CONSOLE_PORT if port.is_there => {
                port.is_console = true;
                self.open(number, true)
            }
            event::PORT_NAME if port.is_there => {
                port.name = Some(String::from_utf8_lossy(rest).into_owned());
                Ok(())
            }
            event::PORT_OPEN if port.is_there => {
                port.host_opens.push(control.value.get() != 0);
                Ok(())
            }
            _ => Err(DriverError::Memory),
        }
    }

    /// Opens or closes the driver's end of a port.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn open(&mut self, port: u16, open: bool) -> Result<(), DriverError> {
        self.say(port.into(), event::PORT_OPEN, open.into())
    }

    /// Gives all buffers of a port to the device.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn fill(&mut self, port: u16) -> Result<(), DriverError> {
        let inbox = self.ports.get_mut(usize::from(port)).and_then(|port| port.receive.as_mut());
        if inbox.ok_or(DriverError::Memory)?.fill()? {
            self.registers.notify(queue::receive(port))?;
        }
        Ok(())
    }

    /// Takes the bytes that came to a port. The buffers stay with the driver until
    /// [`Driver::fill`].
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn receive(&mut self, port: u16) -> Result<Vec<u8>, DriverError> {
        let inbox = self.ports.get_mut(usize::from(port)).and_then(|port| port.receive.as_mut());
        let inbox = inbox.ok_or(DriverError::Memory)?;
        let mut all = Vec::new();
        while let Some(bytes) = inbox.pop(&self.arena)? {
            all.extend(bytes);
        }
        Ok(all)
    }

    /// Sends bytes to a port as one chain of `pieces` pieces, and notifies the device if it wants
    /// that. Returns whether it did.
    ///
    /// # Errors
    /// [`DriverError::Memory`] if the queue is full.
    pub fn send(&mut self, port: u16, bytes: &[u8], pieces: u32) -> Result<bool, DriverError> {
        let outbox = self.ports.get_mut(usize::from(port)).and_then(|port| port.transmit.as_mut());
        let notifies = outbox.ok_or(DriverError::Memory)?.push(&self.arena, bytes, pieces)?;
        if notifies {
            self.registers.notify(queue::transmit(port))?;
        }
        Ok(notifies)
    }
}
