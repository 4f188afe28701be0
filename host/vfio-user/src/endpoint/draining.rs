//! The state "draining": the endpoint cleans up after a client.

use std::time::{Duration, Instant};

use slipway_reactor::Step;

use super::RETRY;
use super::facts::RECHECK;
use crate::device::Device;

/// The cleanup after a client.
pub struct Draining {
    /// The time at which a function that does not become quiet is reset all the same.
    deadline: Instant,
    retry_at: Instant,
}

impl Draining {
    /// Begins a cleanup in which the function has until `patience` has passed to become quiet.
    pub fn new(now: Instant, patience: Duration) -> Self {
        Self { deadline: now + patience, retry_at: now }
    }

    /// Quiesces and renews the device. Returns whether that is done.
    pub fn step(&mut self, device: &mut Device, now: Instant) -> bool {
        if now < self.retry_at {
            return false;
        }
        if !device.is_held() && !device.function.quiesce() && now < self.deadline {
            return false;
        }
        if device.renew().is_err() {
            // There is no memory for new doorbells, and the old client could still ring the old
            // ones.
            self.retry_at = now + RETRY;
            return false;
        }
        true
    }

    /// Returns the endpoint's step until the next one of the cleanup.
    pub fn next(&self, now: Instant) -> Step {
        Step::Idle(Some(self.retry_at.max(now + RECHECK)))
    }
}
