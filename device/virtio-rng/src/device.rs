//! The device.

use serde::{Deserialize, Serialize};
use slipway_pci::{Function, Interrupt, StateError};
use slipway_ram::Memory;
use slipway_virtio::layout::DeviceKind;
use slipway_virtio::queue::{Broken, Chain};
use slipway_virtio::registers::Offer;
use slipway_virtio::state::{decode, encode};
use slipway_virtio::{InterruptCount, Local, function_on_local};
use slipway_virtio_spec::entropy::{DEVICE_TYPE, REQUEST_QUEUE};

/// Version of the saved state. A state of another version is refused.
pub const STATE_VERSION: u32 = 1;

/// The mark of a state of this kind of device.
const DEVICE: &str = "virtio-rng";

/// The device's own state: nothing, since a successor's bytes come from the successor's source.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceState {}

/// The number of MSI-X vectors: one for the queue, one for changes of the configuration.
pub const VECTORS: u16 = 2;
/// Most bytes of one buffer that are filled.
pub const LONGEST: usize = 1024;
/// Most buffers that one poll fills.
const BUFFERS: usize = 16;
/// Most entries of the queue. Linux has one buffer at a time in it.
const QUEUE_SIZE: u16 = 8;

/// An entropy device: no class of its own.
const KIND: DeviceKind = DeviceKind { device_type: DEVICE_TYPE, class: 0x00_ff_00, config_size: 0 };

/// A source of random bytes: fills all of its argument, 1 to [`LONGEST`] bytes. Must not block.
pub type Source = Box<dyn FnMut(&mut [u8]) + Send>;

/// The parts that a host hands to [`Rng::new`].
pub struct Parts {
    /// The guest's memory, by guest-physical addresses.
    pub memory: Memory,
    /// One handle per MSI-X vector, in order, 1 to 256; [`VECTORS`] suffice.
    pub interrupts: Vec<Interrupt>,
    /// The random bytes.
    pub source: Source,
}

/// An entropy device; the crate's head describes it.
pub struct Rng {
    local: Local,
    source: Source,
}

impl Rng {
    /// Makes a device in its state after power-on.
    ///
    /// # Errors
    /// [`InterruptCount`].
    pub fn new(parts: Parts) -> Result<Self, InterruptCount> {
        let offer = Offer { queue_size: QUEUE_SIZE, ..Offer::SINGLE };
        let local = Local::new(&KIND, &offer, parts.memory, parts.interrupts)?;
        Ok(Self { local, source: parts.source })
    }

    /// Returns the configuration, which has no bytes.
    fn config(&self) -> [u8; 0] {
        []
    }

    /// Fills the waiting buffers, as many as one poll may. Returns whether there were any. If not,
    /// the driver will notify of the next one.
    fn serve(&mut self) -> Result<bool, Broken> {
        let Some((memory, queue)) = self.local.queue(REQUEST_QUEUE) else { return Ok(false) };
        let mut chain = Chain::default();
        let mut filled = 0;
        while filled < BUFFERS
            && let Some(head) = queue.queue.take_writable(memory, &mut chain)?
        {
            let mut bytes = [0; LONGEST];
            let len = chain.writable_len().min(LONGEST as u64) as usize;
            (self.source)(&mut bytes[..len]);
            let written = chain.scatter(memory, &bytes[..len])?;
            queue.queue.report(memory, head, written as u32)?;
            filled += 1;
        }
        queue.publish(memory)?;
        Ok(filled > 0)
    }
}

impl Function for Rng {
    function_on_local!(serve, config);

    fn save(&self) -> Vec<u8> {
        encode(DEVICE, STATE_VERSION, self.local.transport.save(), DeviceState {})
    }

    fn take_over(&mut self, state: &[u8]) -> Result<(), StateError> {
        let (transport, DeviceState {}) = decode(DEVICE, STATE_VERSION, state)?;
        self.local.restore(transport)
    }
}
