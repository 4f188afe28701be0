//! The device.

use serde::{Deserialize, Serialize};
use slipway_pci::{Function, Interrupt, StateError};
use slipway_ram::Memory;
use slipway_virtio::layout::DeviceKind;
use slipway_virtio::queue::{Broken, Chain};
use slipway_virtio::registers::Offer;
use slipway_virtio::state::{decode, encode};
use slipway_virtio::{InterruptCount, Local, function_on_local};
use slipway_virtio_spec::pmem::{self, Config, DEVICE_TYPE, REQUEST_QUEUE};

/// Version of the saved state. A state of another version is refused.
pub const STATE_VERSION: u32 = 1;

/// The mark of a state of this kind of device.
const DEVICE: &str = "virtio-pmem";

/// The place of the memory, which a successor has to be made with. It is saved for the check.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Range {
    start: u64,
    bytes: u64,
}

/// The number of MSI-X vectors: one for the queue, one for changes of the configuration.
pub const VECTORS: u16 = 2;
/// Most requests that one poll answers.
const REQUESTS: usize = 16;
/// Most entries of the queue. A request of Linux takes two.
const QUEUE_SIZE: u16 = 64;

/// A memory controller of no class of its own.
const KIND: DeviceKind =
    DeviceKind { device_type: DEVICE_TYPE, class: 0x05_80_00, config_size: size_of::<Config>() };

/// The parts that a host hands to [`Pmem::new`].
pub struct Parts {
    /// The guest's memory, by guest-physical addresses: where the queue is.
    pub memory: Memory,
    /// One handle per MSI-X vector, in order, 1 to 256; [`VECTORS`] suffice.
    pub interrupts: Vec<Interrupt>,
    /// The guest-physical address of the device's memory. The host makes it readable there.
    pub start: u64,
    /// The bytes of the device's memory.
    pub bytes: u64,
}

/// A persistent memory device; the crate's head describes it.
pub struct Pmem {
    local: Local,
    config: Config,
}

impl Pmem {
    /// Makes a device in its state after power-on.
    ///
    /// # Errors
    /// [`InterruptCount`].
    pub fn new(parts: Parts) -> Result<Self, InterruptCount> {
        let offer = Offer { queue_size: QUEUE_SIZE, ..Offer::SINGLE };
        let local = Local::new(&KIND, &offer, parts.memory, parts.interrupts)?;
        let config = Config { start: parts.start.into(), size: parts.bytes.into() };
        Ok(Self { local, config })
    }

    /// Answers the waiting requests, as many as one poll may. Returns whether there were any. If
    /// not, the driver will notify of the next one.
    fn serve(&mut self) -> Result<bool, Broken> {
        let Some((memory, queue)) = self.local.queue(REQUEST_QUEUE) else { return Ok(false) };
        let mut chain = Chain::default();
        let mut answered = 0;
        while answered < REQUESTS
            && let Some(head) = queue.queue.take(memory, &mut chain)?
        {
            let written = chain.scatter(memory, &answer(memory, &chain)?)?;
            queue.queue.report(memory, head, written as u32)?;
            answered += 1;
        }
        queue.publish(memory)?;
        Ok(answered > 0)
    }

    fn config(&self) -> Config {
        self.config
    }

    fn range(&self) -> Range {
        Range { start: self.config.start.get(), bytes: self.config.size.get() }
    }
}

/// Returns the response to the request in `chain`: nobody writes the memory, so a flush is done.
fn answer(memory: &Memory, chain: &Chain) -> Result<[u8; pmem::RESPONSE], Broken> {
    let mut request = [0; pmem::REQUEST];
    let whole = chain.gather(memory, &mut request)? == request.len();
    if !whole || chain.writable_len() < pmem::RESPONSE as u64 {
        return Err(Broken::Chain);
    }
    let response = match u32::from_le_bytes(request) {
        pmem::FLUSH => pmem::DONE,
        _ => pmem::FAILED,
    };
    Ok(response.to_le_bytes())
}

impl Function for Pmem {
    function_on_local!(serve, config);

    fn save(&self) -> Vec<u8> {
        encode(DEVICE, STATE_VERSION, self.local.transport.save(), self.range())
    }

    fn take_over(&mut self, state: &[u8]) -> Result<(), StateError> {
        let (transport, saved): (_, Range) = decode(DEVICE, STATE_VERSION, state)?;
        let own = self.range();
        if saved != own {
            return Err(StateError::Inconsistent(format!("{saved:x?} in place of {own:x?}")));
        }
        self.local.restore(transport)
    }
}
