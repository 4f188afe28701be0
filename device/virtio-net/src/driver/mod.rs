//! A small real virtio-net driver, for unit tests, fuzzing and benchmarks.
//!
//! [`Driver`] is generic over [`RegisterAccess`], so that it runs on a device by direct calls
//! ([`Direct`]) as well as over a socket. Queues and buffers lie in an [`Arena`] of memory that
//! driver and device both reach. The driver polls and takes no interrupts. A [`Ring`] is one of its
//! queues, which may go to a thread of its own.

mod frames;

use std::mem::offset_of;

use slipway_virtio::driver::Start;
use slipway_virtio_spec::net::{Config, Features, control as command};
use slipway_virtio_spec::{RingFeatures, Status};
use zerocopy::{FromZeros, IntoBytes};

pub use frames::{Received, Receiving, Sending};
pub use slipway_virtio::driver::{
    AccessError, Arena, Buffer, Direct, DriverError, RegisterAccess, Ring, Used, notification,
};

/// The looks at the control queue between two reads of the device status, each of which may be a
/// message to a server. Linux, while it waits, does not read the status at all.
const LOOKS: usize = 64;

/// The features and sizes that a driver asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Features of the network device that the driver accepts where they are offered.
    pub features: Features,
    /// Features of rings that the driver accepts, VERSION_1 among them.
    pub rings: RingFeatures,
    /// Entries of each queue, a power of two.
    pub entries: u16,
    /// Queue pairs.
    pub pairs: u16,
    /// Bytes of each receive buffer.
    pub buffer: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            features: Features::all(),
            rings: RingFeatures::all(),
            entries: 64,
            pairs: 1,
            buffer: 2048,
        }
    }
}

/// The driver of one device.
pub struct Driver<R> {
    /// The access to the registers.
    pub registers: R,
    /// Memory for queues and buffers.
    pub arena: Arena,
    /// The negotiated features of the network device.
    pub features: Features,
    /// The negotiated features of rings.
    pub rings: RingFeatures,
    options: Options,
    /// Receive queues.
    pub receive: Vec<Receiving>,
    /// Transmit queues.
    pub transmit: Vec<Sending>,
    control: Option<(u16, Ring)>,
}

impl<R: RegisterAccess> Driver<R> {
    /// Resets and initialises the device (section 3.1.1).
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(registers: R, arena: Arena, options: Options) -> Result<Self, DriverError> {
        let mut driver = Self {
            registers,
            arena,
            features: Features::empty(),
            rings: RingFeatures::empty(),
            options,
            receive: Vec::new(),
            transmit: Vec::new(),
            control: None,
        };
        driver.start()?;
        Ok(driver)
    }

    /// Resets the device and initialises it anew, with fresh queues.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn start(&mut self) -> Result<(), DriverError> {
        self.reset()?;
        let wanted = self.options.features.bits() | self.options.rings.bits();
        let accepted = self.registers.negotiate(wanted)?;
        self.features = Features::from_bits_truncate(accepted);
        self.rings = RingFeatures::from_bits_truncate(accepted);
        self.make_queues()?;
        self.set_status(Status::DRIVER_OK)?;
        self.needs_no_reset()
    }

    /// Resets the device and waits until that is done.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn reset(&mut self) -> Result<(), DriverError> {
        self.registers.reset()?;
        self.receive.clear();
        self.transmit.clear();
        self.control = None;
        self.arena.clear();
        Ok(())
    }

    /// Reads the device status.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn status(&mut self) -> Result<Status, DriverError> {
        self.registers.status()
    }

    /// Returns an error if DEVICE_NEEDS_RESET is set.
    ///
    /// # Errors
    /// [`DriverError::NeedsReset`].
    pub fn needs_no_reset(&mut self) -> Result<(), DriverError> {
        self.registers.needs_no_reset()
    }

    /// Sets bits of the status.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn set_status(&mut self, more: Status) -> Result<(), DriverError> {
        self.registers.set_status(more)
    }

    /// Returns the features that the device offers.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn offered(&mut self) -> Result<u64, DriverError> {
        self.registers.offered()
    }

    fn make_queues(&mut self) -> Result<(), DriverError> {
        let Options { pairs, buffer, entries, .. } = self.options;
        for pair in 0..pairs {
            let ring = self.make_queue(2 * pair, entries)?;
            let merges = self.features.contains(Features::MRG_RXBUF);
            self.receive.push(Receiving::new(ring, &mut self.arena, buffer, merges)?);
            let ring = self.make_queue(2 * pair + 1, entries)?;
            self.transmit.push(Sending::new(ring));
        }
        if self.features.contains(Features::CTRL_VQ) {
            let multi = self.features.contains(Features::MQ);
            let at = offset_of!(Config, max_virtqueue_pairs) as u64;
            let most = if multi { self.registers.read_field16(at)? } else { 1 };
            let ring = self.make_queue(2 * most, entries.min(16))?;
            self.control = Some((2 * most, ring));
        }
        Ok(())
    }

    /// Makes and enables queue `number` with `entries` entries, with the vector of its number if
    /// there is one.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn make_queue(&mut self, number: u16, entries: u16) -> Result<Ring, DriverError> {
        let (arena, rings) = (&mut self.arena, self.rings);
        self.registers.make_queue(arena, rings, number, entries, number)
    }

    /// Resets queue `number` and waits until that is done (section 2.6.1).
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn reset_queue(&mut self, number: u16) -> Result<(), DriverError> {
        self.registers.reset_queue(number)
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

    /// Reads the MAC address alone, as Linux does: 8 reads of a register, where
    /// [`Driver::config`] has 17.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn mac(&mut self) -> Result<[u8; 6], DriverError> {
        let mut mac = [0; 6];
        self.registers.read_array(offset_of!(Config, mac) as u64, &mut mac)?;
        Ok(mac)
    }

    /// Notifies the device of queue `number`.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn notify(&mut self, number: u16) -> Result<(), DriverError> {
        self.registers.notify(number)
    }

    /// Makes the frames of transmit queue `pair` visible to the device, and notifies the device if
    /// it wants that.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn flush(&mut self, pair: u16) -> Result<(), DriverError> {
        if self.transmit[usize::from(pair)].ring.publish()? {
            self.notify(2 * pair + 1)?;
        }
        Ok(())
    }

    /// Runs a command of the control queue and waits for its end.
    ///
    /// # Errors
    /// [`DriverError`]; [`DriverError::Refused`].
    pub fn command(&mut self, class: u8, number: u8, data: &[u8]) -> Result<(), DriverError> {
        let len = 2 + data.len();
        let at = self.arena.allocate(len + 1)?;
        let memory = self.arena.memory().clone();
        memory.write(at, &[&[class, number], data, &[0xff]].concat())?;
        let (queue, ring) = self.control.as_mut().ok_or(DriverError::Refused)?;
        let buffers = [Buffer::readable(at, len as u32), Buffer::writable(at + len as u64, 1)];
        ring.push(&buffers)?;
        let (queue, notify) = (*queue, ring.publish()?);
        if notify {
            self.notify(queue)?;
        }
        for look in (1..=LOOKS).cycle() {
            let used = self.control.as_mut().map_or(Ok(None), |(_, ring)| ring.pop())?;
            if used.is_some() {
                break;
            }
            if look == LOOKS {
                self.needs_no_reset()?;
            }
            self.registers.idle()?;
        }
        let mut ack = [0];
        memory.read(at + len as u64, &mut ack)?;
        if ack == [command::OK] { Ok(()) } else { Err(DriverError::Refused) }
    }
}
