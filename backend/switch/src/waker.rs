//! The way from a port to its switch.

use std::sync::Arc;

use crate::index::PortIndex;

/// A switch that other threads can make look at one of its ports.
pub(crate) trait Wake: Send + Sync {
    /// Gives the port a turn soon. A switch that has ended ignores it.
    fn wake(&self, port: PortIndex);
}

/// Wakes a switch for one of its ports; see [`Port::attached`](crate::Port::attached). Any thread
/// may use it.
#[derive(Clone)]
pub struct Waker {
    switch: Arc<dyn Wake>,
    port: PortIndex,
}

impl Waker {
    pub(crate) fn new(switch: Arc<dyn Wake>, port: PortIndex) -> Self {
        Self { switch, port }
    }

    /// Gives the port a turn.
    pub fn wake(&self) {
        self.switch.wake(self.port);
    }
}
