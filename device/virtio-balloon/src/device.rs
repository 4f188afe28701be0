//! The device.

use slipway_pci::{Function, Interrupt, StateError};
use slipway_ram::Memory;
use slipway_virtio::layout::DeviceKind;
use slipway_virtio::queue::{Broken, Chain, Range};
use slipway_virtio::registers::Offer;
use slipway_virtio::state::{decode, encode};
use slipway_virtio::{InterruptCount, Local, function_on_local};
use slipway_virtio_spec::balloon::{Config, DEVICE_TYPE, Features, queue};

/// Version of the saved state. A state of another version is refused.
pub const STATE_VERSION: u32 = 1;

/// The mark of a state of this kind of device.
const DEVICE: &str = "virtio-balloon";

/// The number of queues: up to the last one that may be that of reports.
const QUEUES: u16 = queue::REPORTING + 1;
/// The number of MSI-X vectors: one for each queue, one for changes of the configuration.
pub const VECTORS: u16 = QUEUES + 1;
/// Most entries of a queue. Linux reports 32 ranges at a time, and needs as many entries.
const QUEUE_SIZE: u16 = 32;
/// The bytes that are given back at a time: 2 MiB, a huge page of x86-64.
pub const PIECE: u64 = 2 << 20;
/// Most pieces of one report that are given back, some milliseconds of the kernel's time: 128 MiB,
/// the largest report of Linux.
pub const PIECES: usize = 64;

/// A device of no class of its own.
const KIND: DeviceKind =
    DeviceKind { device_type: DEVICE_TYPE, class: 0x00_ff_00, config_size: size_of::<Config>() };

/// Gives back the pages of the [`PIECE`] bytes from a guest-physical address on, a multiple of
/// [`PIECE`]: they read as zeros afterwards, or as before. Returns `false` if the guest does not
/// have all of them as memory. Must not wait for a peer.
pub type Discard = Box<dyn FnMut(u64) -> bool + Send>;

/// The parts that a host hands to [`Balloon::new`].
pub struct Parts {
    /// The guest's memory, by guest-physical addresses: where the queues are.
    pub memory: Memory,
    /// One handle per MSI-X vector, in order, 1 to 256; [`VECTORS`] give every queue one.
    pub interrupts: Vec<Interrupt>,
    /// The host's side of the memory.
    pub discard: Discard,
}

/// A balloon that is never inflated; the crate's head describes it.
pub struct Balloon {
    local: Local,
    discard: Discard,
}

impl Balloon {
    /// Makes a device in its state after power-on.
    ///
    /// # Errors
    /// [`InterruptCount`].
    pub fn new(parts: Parts) -> Result<Self, InterruptCount> {
        let offer = Offer {
            queues: QUEUES,
            queue_size: QUEUE_SIZE,
            features: Offer::SINGLE.features | Features::PAGE_REPORTING.bits(),
            ..Offer::SINGLE
        };
        let local = Local::new(&KIND, &offer, parts.memory, parts.interrupts)?;
        Ok(Self { local, discard: parts.discard })
    }

    /// Returns the configuration: no page is asked for.
    fn config(&self) -> Config {
        Config::default()
    }

    /// Serves the next report of any queue. Returns whether there was one. If not, the driver will
    /// notify of the next one.
    fn serve(&mut self) -> Result<bool, Broken> {
        let mut chain = Chain::default();
        for number in queue::REPORTING_WITHOUT_OTHERS..QUEUES {
            let Some((memory, queue)) = self.local.queue(number) else { continue };
            let Some(head) = queue.queue.take_writable(memory, &mut chain)? else { continue };
            let mut given = chain.writable.iter().copied().flat_map(pieces).take(PIECES);
            if !given.all(|piece| (self.discard)(piece)) {
                return Err(Broken::Memory);
            }
            queue.queue.report(memory, head, 0)?;
            queue.publish(memory)?;
            return Ok(true);
        }
        Ok(false)
    }
}

/// Returns the addresses of the whole pieces in a range.
fn pieces((at, len): Range) -> impl Iterator<Item = u64> {
    let end = at.saturating_add(len.into()) / PIECE * PIECE;
    let first = at.checked_next_multiple_of(PIECE).unwrap_or(end);
    (first..end).step_by(PIECE as usize)
}

impl Function for Balloon {
    function_on_local!(serve, config);

    fn save(&self) -> Vec<u8> {
        encode(DEVICE, STATE_VERSION, self.local.transport.save(), ())
    }

    fn take_over(&mut self, state: &[u8]) -> Result<(), StateError> {
        let (transport, ()) = decode(DEVICE, STATE_VERSION, state)?;
        self.local.restore(transport)
    }
}
