//! The times of a measurement.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The times of one turn of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// The time of load before the measurement.
    pub warm_up: Duration,
    /// The measured time.
    pub time: Duration,
}
