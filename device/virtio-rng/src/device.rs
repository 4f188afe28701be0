//! The device.

use slipway_pci::{Access, Description, Function, Interrupt, Progress, StateError, TurnLength};
use slipway_ram::Memory;
use slipway_virtio::layout::Kind;
use slipway_virtio::queue::{Broken, Chain};
use slipway_virtio::registers::Offer;
use slipway_virtio::{Configured, Local, MAX_VECTORS, Transport};
use slipway_virtio_spec::RingFeatures;
use slipway_virtio_spec::entropy::{DEVICE_TYPE, REQUEST_QUEUE};

/// The number of MSI-X vectors: one for the queue, one for changes of the configuration.
pub const VECTORS: u16 = 2;
/// Most bytes of one buffer that are filled.
pub const LONGEST: usize = 1024;
/// Most buffers that one poll fills.
const BUFFERS: usize = 16;
/// Most entries of the queue. Linux has one buffer at a time in it.
const QUEUE_SIZE: u16 = 8;

/// An entropy device: no class of its own.
const KIND: Kind = Kind { device_type: DEVICE_TYPE, class: 0x00_ff_00, config_size: 0 };

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

/// A mistake in the parts, made by the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartsError {
    /// There is no interrupt, or there are more than the MSI-X table has room for.
    #[error("an entropy device needs 1 to 256 interrupts")]
    Interrupts,
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
    /// [`PartsError`] when the parts do not fit together.
    pub fn new(parts: Parts) -> Result<Self, PartsError> {
        if !(1..=MAX_VECTORS).contains(&parts.interrupts.len()) {
            return Err(PartsError::Interrupts);
        }
        let offer = Offer {
            queues: 1,
            queue_size: QUEUE_SIZE,
            features: (RingFeatures::VERSION_1 | RingFeatures::EVENT_IDX).bits(),
            accepts: |_| true,
        };
        let local = Local::new(&KIND, &offer, parts.memory, parts.interrupts);
        Ok(Self { local, source: parts.source })
    }

    /// Returns the transport, for a host that routes interrupts by its MSI-X table and looks up the
    /// addresses of BARs.
    pub fn transport(&mut self) -> &mut Transport {
        &mut self.local.transport
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
    fn description(&self) -> &Description {
        self.local.transport.description()
    }

    fn config_read(&mut self, offset: u16, into: &mut [u8]) {
        if let Some((at, len)) = self.local.transport.config_read(offset, into) {
            self.read(0, at, &mut into[..len]);
        }
    }

    fn config_write(&mut self, offset: u16, from: &[u8]) {
        match self.local.transport.config_write(offset, from) {
            Configured::Done => {}
            Configured::Reset => self.reset(),
            Configured::Window(at, len) => drop(self.write(0, at, &from[..len])),
        }
    }

    fn read(&mut self, bar: u8, offset: u64, into: &mut [u8]) -> Access {
        self.local.read(bar, offset, into, &[])
    }

    fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> Access {
        self.local.write(bar, offset, from)
    }

    fn notified(&mut self) {
        // Each poll looks at all queues.
    }

    fn set_turn(&mut self, _: TurnLength) {}

    fn poll(&mut self) -> Progress {
        if !self.local.begin() {
            return Progress::Idle(None);
        }
        let served = self.serve();
        match self.local.checked(served) {
            Some(true) => Progress::Busy,
            _ => Progress::Idle(None),
        }
    }

    fn rest(&mut self) -> Progress {
        self.poll()
    }

    fn reset(&mut self) {
        self.local.reset();
    }

    fn quiesce(&mut self) -> bool {
        self.local.quiesce()
    }

    fn save(&self) -> Vec<u8> {
        crate::state::save(self.local.transport.save())
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), StateError> {
        let restored = crate::state::load(state).and_then(|state| self.local.restore(state));
        if restored.is_err() {
            self.reset();
        }
        restored
    }
}
