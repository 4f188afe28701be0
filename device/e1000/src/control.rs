//! A device's handle for other threads.

use std::sync::Arc;
use std::time::Duration;

use slipway_switch::Exchange;

use crate::common::Shared;
use crate::path::DataPath;
use crate::{Counters, PartsError};

/// A handle to a device for other threads. It is cheap to clone, and harmless after the device is
/// gone.
#[derive(Clone)]
pub struct Control {
    pub(crate) exchange: Arc<Exchange<DataPath>>,
    pub(crate) shared: Arc<Shared>,
}

impl Control {
    /// Returns the counts so far.
    pub fn counters(&self) -> Counters {
        let interrupts = self.shared.line.with(|line| line.interrupts());
        self.shared.live.snapshot(interrupts)
    }

    /// Returns whether the driver runs and the link is up.
    pub fn is_up(&self) -> bool {
        self.exchange.is_up()
    }

    /// Sets the shortest time between two interrupts, whatever the driver asks for. Zero leaves it
    /// to the driver.
    ///
    /// # Errors
    /// [`PartsError::Interval`] if it is longer than
    /// [`LONGEST_INTERVAL`](crate::LONGEST_INTERVAL).
    pub fn set_interval(&self, interval: Duration) -> Result<(), PartsError> {
        if interval > crate::LONGEST_INTERVAL {
            return Err(PartsError::Interval(interval));
        }
        let floor = interval.as_nanos() as u64;
        let now = self.shared.clock.nanos();
        self.shared.line.with(|line| line.set_floor(now, floor));
        Ok(())
    }
}
