//! The device as a PCI function: the driver's requests go to the file server, and replies back.
//!
//! A poll writes the replies that are ready (`answer`) and then begins new requests (`begin`), a
//! bounded number of each. `flight` remembers where the reply to each request goes.

use slipway_pci::{Access, Description, Function, Interrupt, Progress, StateError};
use slipway_ram::Memory;
use slipway_virtio::layout::DeviceKind;
use slipway_virtio::queue::{Broken, Chain};
use slipway_virtio::registers::Offer;
use slipway_virtio::{InterruptCount, Local};
use slipway_virtio_spec::RingFeatures;
use slipway_virtio_spec::fs::{
    Config, DEVICE_TYPE, FIRST_REQUEST_QUEUE, HIGH_PRIORITY_QUEUE, RequestHeader, TAG,
};
use zerocopy::IntoBytes;

use crate::flight::{Flights, ReplySlot};
use crate::{FileServer, Reply, Request};

/// The number of MSI-X vectors: one for each queue, one for changes of the configuration.
pub const VECTORS: u16 = 3;
/// Most entries of a queue. Linux fills a request of 1 MiB from single pages only if the queue has
/// more entries than that.
pub const QUEUE_SIZE: u16 = 1024;
/// Most bytes of a request: 1 MiB of data behind a page of headers and names.
pub const LONGEST_REQUEST: usize = (1 << 20) + 4096;
/// Most bytes of a reply: 1 MiB of data behind a page of headers.
pub const LONGEST_REPLY: usize = (1 << 20) + 4096;

/// Most requests of one queue that a poll begins, and most replies that it writes.
const REQUESTS: usize = 16;
/// The queues, in the order in which they are served.
const QUEUES: [u16; 2] = [HIGH_PRIORITY_QUEUE, FIRST_REQUEST_QUEUE];
/// A mass storage controller of no class of its own.
const KIND: DeviceKind =
    DeviceKind { device_type: DEVICE_TYPE, class: 0x01_80_00, config_size: size_of::<Config>() };

/// The parts that a host hands to [`Fs::new`].
pub struct Parts {
    /// The guest's memory, by guest-physical addresses.
    pub memory: Memory,
    /// One handle per MSI-X vector, in order, 1 to 256; [`VECTORS`] suffice.
    pub interrupts: Vec<Interrupt>,
    /// The name by which the guest mounts the file system, 1 to 36 bytes.
    pub tag: String,
    /// The file system.
    pub server: Box<dyn FileServer>,
    /// The identity of the file server's session: a state that was saved with another session is
    /// refused.
    pub session: u64,
}

/// A mistake in the parts, made by the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartsError {
    /// The number of interrupts is out of range.
    #[error(transparent)]
    Interrupts(#[from] InterruptCount),
    /// The tag is empty or too long, or has a zero byte.
    #[error("the tag of a file system device has 1 to 36 bytes, none of them zero")]
    Tag,
}

/// A file system device; the crate's head describes it.
pub struct Fs {
    local: Local,
    config: Config,
    server: Box<dyn FileServer>,
    session: u64,
    flights: Flights,
}

impl Fs {
    /// Makes a device in its state after power-on.
    ///
    /// # Errors
    /// [`PartsError`] when the parts do not fit together.
    pub fn new(parts: Parts) -> Result<Self, PartsError> {
        let offer = Offer {
            queues: QUEUES.len() as u16,
            queue_size: QUEUE_SIZE,
            features: Offer::SINGLE.features | RingFeatures::INDIRECT_DESC.bits(),
            ..Offer::SINGLE
        };
        Ok(Self {
            config: config(&parts.tag)?,
            local: Local::new(&KIND, &offer, parts.memory, parts.interrupts)?,
            server: parts.server,
            session: parts.session,
            flights: Flights::default(),
        })
    }

    /// Returns the file server.
    pub fn server(&mut self) -> &mut dyn FileServer {
        &mut *self.server
    }

    /// Begins waiting requests and writes ready replies, as many as one poll may. Returns whether
    /// there were any.
    fn serve(&mut self) -> Result<bool, Broken> {
        let mut busy = self.answer()?;
        for queue in QUEUES {
            busy |= self.begin(queue)?;
        }
        Ok(busy)
    }

    /// Writes the replies that are ready. Returns whether there were any.
    fn answer(&mut self) -> Result<bool, Broken> {
        let mut answered = 0;
        while answered < REQUESTS
            && let Some(reply) = self.server.take_reply()
        {
            answered += 1;
            self.write(reply)?;
        }
        if answered > 0 {
            for queue in QUEUES {
                if let Some((memory, queue)) = self.local.queue(queue) {
                    queue.publish(memory)?;
                }
            }
        }
        Ok(answered > 0)
    }

    fn write(&mut self, reply: Reply) -> Result<(), Broken> {
        let Some(place) = self.flights.end(reply.ticket) else { return Ok(()) };
        let Some((memory, queue)) = self.local.queue(place.queue) else { return Ok(()) };
        let bytes = &reply.bytes[..reply.bytes.len().min(LONGEST_REPLY)];
        let written = place.chain.scatter(memory, bytes)?;
        queue.queue.report(memory, place.head, written as u32)
    }

    /// Begins the requests that wait in a queue, as many as may be under way. Returns whether there
    /// were any. If not, the driver will notify of the next one, or a reply will make room.
    fn begin(&mut self, number: u16) -> Result<bool, Broken> {
        let mut begun = 0;
        while begun < REQUESTS && self.flights.has_room() {
            let Some((memory, queue)) = self.local.queue(number) else { break };
            let mut chain = Chain::default();
            let Some(head) = queue.queue.take(memory, &mut chain)? else { break };
            let message = message(memory, &chain)?;
            let room = chain.writable_len().min(LONGEST_REPLY as u64) as usize;
            let bytes = message.len() + room;
            let ticket = self.flights.begin(ReplySlot { queue: number, head, chain }, bytes);
            self.server.begin(Request { ticket, message, room });
            begun += 1;
        }
        Ok(begun > 0)
    }

    /// If the device was reset, forgets the driver's requests, and has the file server forget the
    /// driver.
    fn settle(&mut self) {
        if self.local.take_reset() {
            self.flights.forget_places();
            self.server.end_session();
        }
    }

    /// Writes the replies that are ready, and begins nothing: what a fuzz target does before it
    /// saves a state.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn finish_requests(&mut self) {
        if self.local.begin() {
            let answered = self.answer();
            self.local.checked(answered);
        } else {
            self.discard();
        }
    }

    /// Takes the replies to requests of before a reset, so that they make room. Returns whether
    /// there were any.
    fn discard(&mut self) -> bool {
        let mut any = false;
        while let Some(reply) = self.server.take_reply() {
            self.flights.end(reply.ticket);
            any = true;
        }
        any
    }
}

fn config(tag: &str) -> Result<Config, PartsError> {
    if tag.is_empty() || tag.len() > TAG || tag.bytes().any(|byte| byte == 0) {
        return Err(PartsError::Tag);
    }
    let mut padded = [0; TAG];
    padded[..tag.len()].copy_from_slice(tag.as_bytes());
    Ok(Config { tag: padded, num_request_queues: 1.into(), notify_buf_size: 0.into() })
}

/// Copies the request out of the buffers that the device reads.
fn message(memory: &Memory, chain: &Chain) -> Result<Vec<u8>, Broken> {
    let len = usize::try_from(chain.readable_len()).map_err(|_| Broken::Chain)?;
    if !(size_of::<RequestHeader>()..=LONGEST_REQUEST).contains(&len) {
        return Err(Broken::Chain);
    }
    let mut message = vec![0; len];
    chain.gather(memory, &mut message)?;
    Ok(message)
}

impl Function for Fs {
    fn description(&self) -> &Description {
        self.local.transport.description()
    }

    fn config_read(&mut self, offset: u16, into: &mut [u8]) {
        self.local.config_read(offset, into, self.config.as_bytes());
    }

    fn config_write(&mut self, offset: u16, from: &[u8]) {
        self.local.config_write(offset, from);
        self.settle();
    }

    fn read(&mut self, bar: u8, offset: u64, into: &mut [u8]) -> Access {
        self.local.read(bar, offset, into, self.config.as_bytes())
    }

    fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> Access {
        let access = self.local.write(bar, offset, from);
        self.settle();
        access
    }

    fn poll(&mut self) -> Progress {
        if !self.local.begin() {
            return if self.discard() { Progress::Busy } else { Progress::Idle(None) };
        }
        let served = self.serve();
        self.local.progress(served)
    }

    fn reset(&mut self) {
        self.local.reset();
        self.settle();
    }

    fn quiesce(&mut self) -> bool {
        // Requests under way are copies; their replies are written by polls only.
        self.local.quiesce()
    }

    fn save(&self) -> Vec<u8> {
        crate::state::save(self.local.transport.save(), self.session, !self.flights.is_empty())
    }

    fn take_over(&mut self, state: &[u8]) -> Result<(), StateError> {
        let (transport, own) = crate::state::load(state)?;
        own.check(self.session)?;
        self.local.restore(transport)
    }
}
