//! The device as a PCI function: it answers the driver's requests to plug and unplug blocks.
//!
//! `region` decides each request. A request that gives memory back may take several polls, and the
//! next one waits for it.

use slipway_pci::{Function, Progress, StateError};
use slipway_ram::Memory;
use slipway_virtio::layout::DeviceKind;
use slipway_virtio::queue::{Broken, Chain};
use slipway_virtio::registers::Offer;
use slipway_virtio::{Local, function_on_local};
use slipway_virtio_spec::mem::{Config, DEVICE_TYPE, Features, REQUEST_QUEUE, Request, Response};
use zerocopy::IntoBytes;

use crate::region::{Decision, GiveBack, Region};
use crate::{Geometry, Parts, PartsError, RequestError};

/// The number of MSI-X vectors: one for the queue, one for changes of the configuration.
pub const VECTORS: u16 = 2;
/// Most requests that one poll answers.
const REQUESTS: usize = 16;
/// Most entries of the queue. A request of Linux takes two, and it has one at a time.
const QUEUE_SIZE: u16 = 16;

/// A memory controller of no class of its own.
const KIND: DeviceKind =
    DeviceKind { device_type: DEVICE_TYPE, class: 0x05_80_00, config_size: size_of::<Config>() };

/// A request whose blocks are given back.
struct GiveBackRequest {
    /// The request's entry and buffers. `None` if its driver has reset the device.
    asked: Option<(u16, Chain)>,
    blocks: GiveBack,
}

/// A memory device; the crate's head describes it.
pub struct Mem {
    local: Local,
    region: Region,
    work: Option<GiveBackRequest>,
}

impl Mem {
    /// Makes a device in its state after power-on, without plugged blocks.
    ///
    /// # Errors
    /// [`PartsError`] when the parts do not fit together.
    pub fn new(parts: Parts) -> Result<Self, PartsError> {
        if !parts.geometry.is_sound() {
            return Err(PartsError::Geometry);
        }
        let offer = Offer {
            queue_size: QUEUE_SIZE,
            features: Offer::SINGLE.features | Features::all().bits(),
            accepts: |bits| {
                Features::from_bits_truncate(bits).contains(Features::UNPLUGGED_INACCESSIBLE)
            },
            ..Offer::SINGLE
        };
        let local = Local::new(&KIND, &offer, parts.memory, parts.interrupts)?;
        Ok(Self { local, region: Region::new(parts.geometry, parts.host), work: None })
    }

    /// Returns the place of the region.
    pub fn geometry(&self) -> &Geometry {
        &self.region.geometry
    }

    /// Asks the driver to have `bytes` bytes plugged, a number of whole blocks; tells it at once.
    ///
    /// # Errors
    /// [`RequestError`]; nothing has changed.
    pub fn request(&mut self, bytes: u64) -> Result<(), RequestError> {
        if self.region.request(bytes)? {
            self.local.transport.config_changed();
        }
        Ok(())
    }

    /// Returns the bytes that the driver is asked to have plugged.
    pub fn requested(&self) -> u64 {
        self.region.requested
    }

    /// Returns the bytes of the blocks that are plugged.
    pub fn plugged(&self) -> u64 {
        self.region.plugged()
    }

    /// Goes on with the request under way, or answers the waiting ones, as much as one poll may.
    /// Returns whether there were any. If not, the driver will notify of the next one.
    fn serve(&mut self) -> Result<bool, Broken> {
        if self.work.is_some() {
            return self.give_back();
        }
        let Some((memory, queue)) = self.local.queue(REQUEST_QUEUE) else { return Ok(false) };
        let mut chain = Chain::default();
        let mut answered = 0;
        while answered < REQUESTS
            && let Some(head) = queue.queue.take(memory, &mut chain)?
        {
            answered += 1;
            match self.region.decide(&read(memory, &chain)?) {
                Decision::Answer(kind, state) => {
                    let written = respond(memory, &chain, kind, state)?;
                    queue.queue.report(memory, head, written)?;
                }
                Decision::GiveBack(blocks) => {
                    self.work = Some(GiveBackRequest { asked: Some((head, chain)), blocks });
                    break;
                }
            }
        }
        queue.publish(memory)?;
        Ok(answered > 0)
    }

    /// Gives back a piece of the request under way, and answers it after the last one. Returns
    /// `false` if there is no such request.
    fn give_back(&mut self) -> Result<bool, Broken> {
        let Some(work) = &mut self.work else { return Ok(false) };
        if let Some(kind) = self.region.give_back(&mut work.blocks) {
            self.end(kind)?;
        }
        Ok(true)
    }

    /// Ends the request under way with a response of type `kind`, if anybody waits for it.
    fn end(&mut self, kind: u16) -> Result<(), Broken> {
        if let Some((head, chain)) = self.work.take().and_then(|work| work.asked)
            && let Some((memory, queue)) = self.local.queue(REQUEST_QUEUE)
        {
            let written = respond(memory, &chain, kind, 0)?;
            queue.queue.report(memory, head, written)?;
            queue.publish(memory)?;
        }
        Ok(())
    }

    fn config(&self) -> Config {
        self.region.config()
    }

    /// Has the request under way go on without an answer. Its blocks are given back by polls, not
    /// by the thread that resets the device.
    fn forget(&mut self) {
        if let Some(work) = &mut self.work {
            work.asked = None;
        }
    }

    /// Forgets the driver's request if the device was reset.
    fn settle(&mut self) {
        if self.local.take_reset() {
            self.forget();
        }
    }
}

/// Reads the request in `chain`, all of it whatever its type.
fn read(memory: &Memory, chain: &Chain) -> Result<Request, Broken> {
    let mut request = Request::default();
    let whole = chain.gather(memory, request.as_mut_bytes())? == size_of::<Request>();
    if !whole || chain.writable_len() < size_of::<Response>() as u64 {
        return Err(Broken::Chain);
    }
    Ok(request)
}

/// Writes the response to the request in `chain`. Returns its bytes.
fn respond(memory: &Memory, chain: &Chain, kind: u16, state: u16) -> Result<u32, Broken> {
    let response = Response { kind: kind.into(), state: state.into(), ..Response::default() };
    Ok(chain.scatter(memory, response.as_bytes())? as u32)
}

impl Function for Mem {
    function_on_local!(registers, config, settle);

    fn poll(&mut self) -> Progress {
        let served = if self.local.begin() {
            self.serve()
        } else {
            self.forget();
            self.give_back()
        };
        self.local.progress(served)
    }

    fn quiesce(&mut self) -> bool {
        // A successor takes no request that is half done, and the rest of it may take seconds: the
        // driver asks again.
        if let Some(work) = &self.work {
            let kind = self.region.give_up(&work.blocks);
            let ended = self.end(kind);
            self.local.checked(ended);
        }
        self.local.quiesce()
    }

    fn save(&self) -> Vec<u8> {
        crate::state::save(self.local.transport.save(), &self.region)
    }

    fn take_over(&mut self, state: &[u8]) -> Result<(), StateError> {
        let (transport, saved) = crate::state::load(state, &self.region.geometry)?;
        if self.region.blocks.plugged() != 0 {
            return Err(StateError::Inconsistent("blocks are plugged already".into()));
        }
        self.local.restore(transport)?;
        let usable = saved.usable.unwrap_or(self.region.geometry.bytes);
        if !self.region.restore(&saved.plugged, saved.requested, usable) {
            return Err(StateError::Inconsistent("blocks that cannot be plugged".into()));
        }
        Ok(())
    }
}
