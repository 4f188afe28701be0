//! A small real virtio-net driver, for unit tests, fuzzing and benchmarks.
//!
//! [`Driver`] is generic over [`RegisterAccess`], so that it runs on a device by direct calls
//! ([`Direct`]) as well as over a socket. Queues and buffers lie in an [`Arena`] of memory that
//! driver and device both reach. The driver polls and takes no interrupts. A [`Ring`] is one of its
//! queues, which may go to a thread of its own.

mod arena;
mod frames;
mod ring;

use slipway_ram::Fault;
use slipway_virtio_spec::net::{Config, Features, control as command};
use slipway_virtio_spec::pci::common;
use slipway_virtio_spec::{RingFeatures, Status};
use zerocopy::FromBytes;

use crate::layout::{COMMON, DEVICE, NOTIFY, NOTIFY_MULTIPLIER};

pub use arena::Arena;
pub use frames::{Received, Receiving, Sending};
pub use ring::{Buffer, Ring, Used};
pub use slipway_pci::driver::{AccessError, Direct, RegisterAccess};

/// The reason why the driver could not go on.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// A register access failed, or waiting for the device took too long.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// DEVICE_NEEDS_RESET is set.
    #[error("the device needs a reset")]
    NeedsReset,
    /// The device does not offer, or does not accept, the features that the driver wants.
    #[error("the device does not do with the features {0:#x}")]
    Features(u64),
    /// A command of the control queue was refused.
    #[error("the device refused a command")]
    Refused,
    /// The arena is used up, or a ring is full.
    #[error("no memory left for DMA")]
    Memory,
    /// Memory of the arena is gone.
    #[error(transparent)]
    Fault(#[from] Fault),
}

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
        self.set_status(Status::ACKNOWLEDGE)?;
        self.set_status(Status::DRIVER)?;
        self.negotiate()?;
        self.make_queues()?;
        self.set_status(Status::DRIVER_OK)?;
        self.needs_no_reset()
    }

    /// Resets the device and waits until that is done.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn reset(&mut self) -> Result<(), DriverError> {
        self.registers.write(COMMON.start + common::DEVICE_STATUS, &[0])?;
        while !self.status()?.is_empty() {
            self.registers.idle()?;
        }
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
        let mut byte = [0];
        self.registers.read(COMMON.start + common::DEVICE_STATUS, &mut byte)?;
        Ok(Status::from_bits_retain(byte[0]))
    }

    /// Returns an error if DEVICE_NEEDS_RESET is set.
    ///
    /// # Errors
    /// [`DriverError::NeedsReset`].
    pub fn needs_no_reset(&mut self) -> Result<(), DriverError> {
        match self.status()?.contains(Status::DEVICE_NEEDS_RESET) {
            true => Err(DriverError::NeedsReset),
            false => Ok(()),
        }
    }

    /// Sets bits of the status.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn set_status(&mut self, more: Status) -> Result<(), DriverError> {
        let status = self.status()? | more;
        Ok(self.registers.write(COMMON.start + common::DEVICE_STATUS, &[status.bits()])?)
    }

    /// Returns the features that the device offers.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn offered(&mut self) -> Result<u64, DriverError> {
        let mut bits = 0;
        for half in 0..2 {
            self.write32(common::DEVICE_FEATURE_SELECT, half)?;
            bits |= u64::from(self.read32(common::DEVICE_FEATURE)?) << (32 * half);
        }
        Ok(bits)
    }

    fn negotiate(&mut self) -> Result<(), DriverError> {
        let wanted = self.options.features.bits() | self.options.rings.bits();
        let accepted = self.offered()? & wanted;
        for half in 0..2 {
            self.write32(common::DRIVER_FEATURE_SELECT, half)?;
            self.write32(common::DRIVER_FEATURE, (accepted >> (32 * half)) as u32)?;
        }
        self.set_status(Status::FEATURES_OK)?;
        if !self.status()?.contains(Status::FEATURES_OK) {
            return Err(DriverError::Features(accepted));
        }
        self.features = Features::from_bits_truncate(accepted);
        self.rings = RingFeatures::from_bits_truncate(accepted);
        Ok(())
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
            let most = if multi { self.config()?.max_virtqueue_pairs.get() } else { 1 };
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
        let event_index = self.rings.contains(RingFeatures::EVENT_IDX);
        let ring = Ring::new(&mut self.arena, entries, event_index)?;
        self.write16(common::QUEUE_SELECT, number)?;
        self.write16(common::QUEUE_SIZE, entries)?;
        self.write16(common::QUEUE_VECTOR, number)?;
        for (at, area) in [
            (common::QUEUE_DESC, ring.places[0]),
            (common::QUEUE_DRIVER, ring.places[1]),
            (common::QUEUE_DEVICE, ring.places[2]),
        ] {
            self.write32(at, area as u32)?;
            self.write32(at + 4, (area >> 32) as u32)?;
        }
        self.write16(common::QUEUE_ENABLE, 1)?;
        Ok(ring)
    }

    /// Resets queue `number` and waits until that is done (section 2.6.1).
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn reset_queue(&mut self, number: u16) -> Result<(), DriverError> {
        self.write16(common::QUEUE_SELECT, number)?;
        self.write16(common::QUEUE_RESET, 1)?;
        let mut word = [1; 2];
        while word != [0; 2] {
            self.registers.read(COMMON.start + common::QUEUE_RESET, &mut word)?;
            self.registers.idle()?;
        }
        Ok(())
    }

    /// Reads the device's configuration.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn config(&mut self) -> Result<Config, DriverError> {
        let mut bytes = [0; size_of::<Config>()];
        for (at, byte) in (DEVICE.start..).zip(&mut bytes) {
            self.registers.read(at, std::slice::from_mut(byte))?;
        }
        Config::read_from_bytes(&bytes).map_err(|_| DriverError::Memory)
    }

    /// Notifies the device of queue `number`.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn notify(&mut self, number: u16) -> Result<(), DriverError> {
        Ok(self.registers.post(notification(number), &number.to_le_bytes())?)
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
        loop {
            let used = self.control.as_mut().map_or(Ok(None), |(_, ring)| ring.pop())?;
            if used.is_some() {
                break;
            }
            self.needs_no_reset()?;
            self.registers.idle()?;
        }
        let mut ack = [0];
        memory.read(at + len as u64, &mut ack)?;
        if ack == [command::OK] { Ok(()) } else { Err(DriverError::Refused) }
    }

    fn read32(&mut self, at: u64) -> Result<u32, DriverError> {
        let mut bytes = [0; 4];
        self.registers.read(COMMON.start + at, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn write32(&mut self, at: u64, value: u32) -> Result<(), DriverError> {
        Ok(self.registers.write(COMMON.start + at, &value.to_le_bytes())?)
    }

    fn write16(&mut self, at: u64, value: u16) -> Result<(), DriverError> {
        Ok(self.registers.write(COMMON.start + at, &value.to_le_bytes())?)
    }
}

/// Returns the offset in BAR0 at which queue `number` is notified.
pub fn notification(number: u16) -> u64 {
    NOTIFY.start + u64::from(NOTIFY_MULTIPLIER) * u64::from(number)
}
