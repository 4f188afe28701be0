//! The driver's side of the transport, for the small real drivers of unit tests, fuzzing and
//! benchmarks.
//!
//! [`Start`] has the steps of an initialisation (section 3.1.1) for whatever reaches registers:
//! [`Direct`] calls, or a socket. Queues and buffers lie in an [`Arena`] of memory that driver and
//! device both reach. A [`Ring`] is one queue, which may go to a thread of its own. [`SingleQueue`]
//! is the whole driver of a device that has one.

mod arena;
mod ring;
mod single;

use slipway_ram::Fault;
use slipway_virtio_spec::pci::common;
use slipway_virtio_spec::{RingFeatures, Status};

use crate::layout::{COMMON, DEVICE};

pub use crate::layout::notification;
pub use arena::Arena;
pub use ring::{Buffer, Ring, Used};
pub use single::SingleQueue;
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

/// The steps by which a driver initialises any virtio device (section 3.1.1).
pub trait Start: RegisterAccess {
    /// Resets the device and waits until that is done.
    ///
    /// # Errors
    /// [`DriverError`].
    fn reset(&mut self) -> Result<(), DriverError> {
        self.write(COMMON.start + common::DEVICE_STATUS, &[0])?;
        while !self.status()?.is_empty() {
            self.idle()?;
        }
        Ok(())
    }

    /// Reads the device status.
    ///
    /// # Errors
    /// [`DriverError`].
    fn status(&mut self) -> Result<Status, DriverError> {
        let mut byte = [0];
        self.read(COMMON.start + common::DEVICE_STATUS, &mut byte)?;
        Ok(Status::from_bits_retain(byte[0]))
    }

    /// Returns an error if DEVICE_NEEDS_RESET is set.
    ///
    /// # Errors
    /// [`DriverError::NeedsReset`].
    fn needs_no_reset(&mut self) -> Result<(), DriverError> {
        match self.status()?.contains(Status::DEVICE_NEEDS_RESET) {
            true => Err(DriverError::NeedsReset),
            false => Ok(()),
        }
    }

    /// Sets bits of the status.
    ///
    /// # Errors
    /// [`DriverError`].
    fn set_status(&mut self, more: Status) -> Result<(), DriverError> {
        let status = self.status()? | more;
        Ok(self.write(COMMON.start + common::DEVICE_STATUS, &[status.bits()])?)
    }

    /// Returns the features that the device offers.
    ///
    /// # Errors
    /// [`DriverError`].
    fn offered(&mut self) -> Result<u64, DriverError> {
        let mut bits = 0;
        for half in 0..2 {
            self.write32(COMMON.start + common::DEVICE_FEATURE_SELECT, half)?;
            let word = self.read32(COMMON.start + common::DEVICE_FEATURE)?;
            bits |= u64::from(word) << (32 * half);
        }
        Ok(bits)
    }

    /// Accepts those of the `wanted` features that the device offers, and returns them. The device
    /// must have been reset.
    ///
    /// # Errors
    /// [`DriverError::Features`].
    fn negotiate(&mut self, wanted: u64) -> Result<u64, DriverError> {
        self.set_status(Status::ACKNOWLEDGE)?;
        self.set_status(Status::DRIVER)?;
        let accepted = self.offered()? & wanted;
        for half in 0..2 {
            self.write32(COMMON.start + common::DRIVER_FEATURE_SELECT, half)?;
            self.write32(COMMON.start + common::DRIVER_FEATURE, (accepted >> (32 * half)) as u32)?;
        }
        self.set_status(Status::FEATURES_OK)?;
        match self.status()?.contains(Status::FEATURES_OK) {
            true => Ok(accepted),
            false => Err(DriverError::Features(accepted)),
        }
    }

    /// Makes queue `number` with `entries` entries in `arena`, and enables it with MSI-X vector
    /// `vector`. The queue has event indexes if they are among `features`.
    ///
    /// # Errors
    /// [`DriverError`].
    fn make_queue(
        &mut self,
        arena: &mut Arena,
        features: RingFeatures,
        number: u16,
        entries: u16,
        vector: u16,
    ) -> Result<Ring, DriverError> {
        let ring = Ring::new(arena, entries, features.contains(RingFeatures::EVENT_IDX))?;
        for (at, value) in [
            (common::QUEUE_SELECT, number),
            (common::QUEUE_SIZE, entries),
            (common::QUEUE_VECTOR, vector),
        ] {
            self.write(COMMON.start + at, &value.to_le_bytes())?;
        }
        for (at, area) in [
            (common::QUEUE_DESC, ring.places[0]),
            (common::QUEUE_DRIVER, ring.places[1]),
            (common::QUEUE_DEVICE, ring.places[2]),
        ] {
            self.write32(COMMON.start + at, area as u32)?;
            self.write32(COMMON.start + at + 4, (area >> 32) as u32)?;
        }
        self.write(COMMON.start + common::QUEUE_ENABLE, &1_u16.to_le_bytes())?;
        Ok(ring)
    }

    /// Resets queue `number` and waits until that is done (section 2.6.1).
    ///
    /// # Errors
    /// [`DriverError`].
    fn reset_queue(&mut self, number: u16) -> Result<(), DriverError> {
        self.write(COMMON.start + common::QUEUE_SELECT, &number.to_le_bytes())?;
        self.write(COMMON.start + common::QUEUE_RESET, &1_u16.to_le_bytes())?;
        let mut word = [1; 2];
        while word != [0; 2] {
            self.read(COMMON.start + common::QUEUE_RESET, &mut word)?;
            self.idle()?;
        }
        Ok(())
    }

    /// Reads the first bytes of the device configuration, one by one.
    ///
    /// # Errors
    /// [`DriverError`].
    fn read_config(&mut self, into: &mut [u8]) -> Result<(), DriverError> {
        for (at, byte) in (DEVICE.start..).zip(into) {
            self.read(at, std::slice::from_mut(byte))?;
        }
        Ok(())
    }

    /// Reads bytes of the device configuration from byte `at` on, one by one, all of the same state
    /// of the device (section 2.5.3.1).
    ///
    /// # Errors
    /// [`DriverError`].
    fn read_array(&mut self, at: u64, into: &mut [u8]) -> Result<(), DriverError> {
        let mut generation = self.generation()?;
        loop {
            for (at, byte) in (DEVICE.start + at..).zip(&mut *into) {
                self.read(at, std::slice::from_mut(byte))?;
            }
            let before = std::mem::replace(&mut generation, self.generation()?);
            if before == generation {
                return Ok(());
            }
            self.idle()?;
        }
    }

    /// Reads the 16-bit field at byte `at` of the device configuration.
    ///
    /// # Errors
    /// [`DriverError`].
    fn read_field16(&mut self, at: u64) -> Result<u16, DriverError> {
        let mut bytes = [0; 2];
        self.read(DEVICE.start + at, &mut bytes)?;
        Ok(u16::from_le_bytes(bytes))
    }

    /// Reads the number of the device configuration's state.
    ///
    /// # Errors
    /// [`DriverError`].
    fn generation(&mut self) -> Result<u8, DriverError> {
        let mut byte = [0];
        self.read(COMMON.start + common::CONFIG_GENERATION, &mut byte)?;
        Ok(byte[0])
    }

    /// Notifies the device of queue `number`.
    ///
    /// # Errors
    /// [`DriverError`].
    fn notify(&mut self, number: u16) -> Result<(), DriverError> {
        Ok(self.post(notification(number), &number.to_le_bytes())?)
    }
}

impl<R: RegisterAccess> Start for R {}
