//! The parts of a device.

use std::sync::Arc;
use std::time::Duration;

use slipway_doorbells::Doorbells;
use slipway_e1000_spec::{THROTTLE_UNIT, register};
use slipway_pci::Interrupt;
use slipway_ram::Memory;
use slipway_switch::Mac;
use slipway_telemetry::Clock;

/// The longest interval between interrupts that a host can enforce: that of the largest value of
/// ITR.
pub const LONGEST_INTERVAL: Duration = Duration::from_nanos(u16::MAX as u64 * THROTTLE_UNIT);

/// The registers that the device reads from doorbell cells, in the order of the cells.
pub(crate) const TAILS: [u32; DOORBELLS] = [register::TDT, register::RDT];
/// The number of doorbell cells of a device.
pub const DOORBELLS: usize = 2;

/// The parts that a host hands to [`Device::new`](crate::Device::new).
pub struct Parts {
    /// The guest's memory.
    pub memory: Memory,
    /// A handle of the function's sink, whose pin is used. The function has no vectors.
    pub interrupt: Interrupt,
    /// [`DOORBELLS`] cells for the tails. A client that stores to a cell has had the answers to all
    /// earlier writes of registers.
    pub doorbells: Doorbells,
    /// The clock of all timers.
    pub clock: Arc<dyn Clock>,
    /// The properties of the device.
    pub settings: Settings,
}

/// The properties of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The MAC address in the EEPROM, a unicast one.
    pub mac: Mac,
    /// `true` if the device has the communication status block, and says so by its subsystem ID.
    pub csb: bool,
    /// The shortest time between two interrupts, whatever the driver asks for; at most
    /// [`LONGEST_INTERVAL`]. Zero leaves it to the driver.
    pub interval: Duration,
}

impl Settings {
    /// Returns the settings of a plain 82540EM.
    pub const fn new(mac: Mac) -> Self {
        Self { mac, csb: false, interval: Duration::ZERO }
    }
}

/// A mistake in the parts, made by the program or its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartsError {
    /// The address is not that of a single interface.
    #[error("{0} is no address of one interface")]
    Mac(Mac),
    /// The interval between interrupts is too long.
    #[error("an interval between interrupts is 0 to 16.7 ms, not {0:?}; choose a shorter one")]
    Interval(Duration),
    /// The number of doorbell cells is another one.
    #[error("the device has {DOORBELLS} doorbells, not {0}")]
    Doorbells(usize),
}

impl Settings {
    /// Checks the settings.
    ///
    /// # Errors
    /// [`PartsError`].
    pub fn check(&self) -> Result<(), PartsError> {
        if !self.mac.is_unicast() {
            return Err(PartsError::Mac(self.mac));
        }
        if self.interval > LONGEST_INTERVAL {
            return Err(PartsError::Interval(self.interval));
        }
        Ok(())
    }
}
