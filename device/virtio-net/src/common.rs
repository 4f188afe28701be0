//! State that both directions of the data path use: its rules and its memory.

use std::sync::Arc;

use slipway_pci::Interrupt;
use slipway_ram::{Memory, View};
use slipway_virtio::Virtqueue;
use slipway_virtio::queue::Broken;
use slipway_virtio_spec::net::Features;

use crate::counters::Live;
use crate::filter::{Filter, Steering};

/// The rules of the data path that may change while frames move.
#[derive(Clone)]
pub(crate) struct Rules {
    /// The negotiated features, with only those of the driver's offloads that are on now.
    pub features: Features,
    /// Queue pairs in use.
    pub pairs: u16,
    /// Bytes of the longest frame that the driver may be given whole.
    pub longest: usize,
    pub filter: Filter,
    /// The interrupt that tells the driver that the device needs a reset.
    pub config: Option<Interrupt>,
}

/// State that all queues use.
pub(crate) struct Common {
    pub memory: Memory,
    pub view: View,
    pub rules: Rules,
    pub steering: Steering,
    pub live: Arc<Live>,
}

impl Common {
    /// Makes the entries that were reported to `virtqueue` visible to the driver, and interrupts
    /// once if the driver wants that.
    #[inline]
    pub fn publish(&self, virtqueue: &mut Virtqueue) -> Result<(), Broken> {
        if virtqueue.publish(&self.memory)? {
            self.live.interrupts.add(1);
        }
        Ok(())
    }
}
