//! Makes an NVMe controller of disks, and serves it on a socket.

use std::collections::BTreeMap;
use std::sync::Arc;

use slipway_block::Budget;
use slipway_disks::{Disks, Wakes, watch_all};
use slipway_nvme::{Activity, Controller, Identity, Io, Limits, Namespace, Parts, doorbell_count};
use slipway_pci::Interrupt;
use slipway_plane_api::v1;
use slipway_reactor::Handle;
use slipway_vfio_user::{Config, DoorbellMode, Endpoint, EndpointParts, LaneHome};

use crate::door::{Door, rates};
use crate::id::identity;
use crate::keep::{KeptPlace, endpoint_parts};
use crate::namespace::{self, Listed};
use crate::{Error, snoop};

/// The number of queue pairs that a function offers: as many as its sandbox could have CPUs.
const QUEUE_PAIRS: u16 = 64;

/// The control thread's record of a controller that a reactor serves.
pub struct Nvme {
    /// The attached namespaces, by number.
    pub namespaces: BTreeMap<u32, Listed>,
    /// The means to reach the controller.
    pub door: Door,
    /// The wake descriptors of the endpoint's own disks, then those of each lane's.
    pub wakes: Vec<Wakes>,
    /// The means to trace the controller.
    pub snoop: snoop::Target,
    /// The memory of the endpoint's overlays.
    pub overlays: Budget,
    /// The means to read what the controller's I/O commands have moved.
    pub activity: Activity,
    /// The way in which the guest rings the doorbells.
    pub doorbells: v1::nvme_controller::DoorbellMode,
    /// The period in microseconds in which mapped doorbells are looked at; zero for other
    /// doorbells.
    pub sweep_period_us: u32,
    /// The limits, or `None` if there never were any.
    pub limits: Option<v1::Limits>,
}

impl Nvme {
    /// Returns what I/O commands have moved, for the interface.
    pub fn io(&self) -> v1::EndpointIo {
        let Io { reads, read_bytes, writes, written_bytes, media_errors } = self.activity.get();
        v1::EndpointIo { reads, writes, read_bytes, written_bytes, media_errors }
    }
}

/// A controller that is to be made.
pub struct NewController<'a> {
    /// The id of its endpoint.
    pub id: &'a str,
    /// The description of the controller.
    pub wanted: &'a v1::NvmeController,
    /// The named disks of the plane.
    pub disks: &'a Disks,
    /// The memory of the endpoint's overlays.
    pub overlays: Budget,
    /// The reactors, each with the plane's number: the endpoint's own first, then one for each
    /// lane.
    pub reactors: &'a [(usize, Handle)],
}

/// Makes a controller, and an endpoint that serves it on the socket of `config`. In a `place` that
/// a predecessor used, the controller continues where the predecessor was.
///
/// # Errors
/// [`Error::Disk`] for a disk that cannot be opened, [`Error::Invalid`] for one that cannot be kept
/// or that is missing, [`Error::Socket`], [`Error::Controller`], [`Error::Resources`].
pub fn serve(
    new: NewController<'_>,
    config: Config,
    mut place: Option<&mut KeptPlace>,
) -> Result<(Endpoint, Nvme), Error> {
    let socket = config.location.socket();
    let unserved = |source| Error::Socket { path: socket.clone(), source };
    let sweep_period_us = sweep_period_us(&config);
    let wakes = new.reactors.iter().map(|_| Wakes::new()).collect::<Result<Vec<_>, _>>()?;
    let (namespaces, listed) = open_namespaces(&new, &wakes, place.as_deref_mut())?;
    let mut parts = endpoint_parts(&config, place.as_deref_mut()).map_err(unserved)?;
    let limits = bounds(&new);
    let mut controller = Controller::new(Parts {
        memory: parts.memory(),
        interrupts: interrupts(&parts),
        doorbells: parts.doorbells(doorbell_count(QUEUE_PAIRS)).map_err(unserved)?,
        namespaces,
        clock: parts.clock(),
        identity: Identity::new(&serial(new.id, &new.wanted.serial)),
        limits,
        journal: place.as_ref().map(|place| place.journal.clone()),
    })?;
    // The present limits, or the initial ones if they were never changed.
    let limited = place.as_ref().and_then(|place| place.limits()).or(new.wanted.limits);
    controller.limit(rates(&limited.unwrap_or_default()));
    let handed = parts.hand_down(&mut controller);
    handed.map_err(|error| Error::Resources(error.to_string()))?;
    let (mailbox, activity) = (controller.mailbox(), controller.activity());
    let mut homes = homes(new.reactors, &wakes)?;
    let LaneHome { reactor, wakes: wake } = homes.remove(0);
    let endpoint = Endpoint::new(config, parts, Box::new(controller), wake, &reactor);
    let mut endpoint = endpoint.map_err(unserved)?;
    endpoint.spread(homes).map_err(unserved)?;
    let door = Door { mailbox, control: endpoint.control() };
    let nvme = Nvme {
        namespaces: listed,
        snoop: snoop::Target::new(door.mailbox.clone(), limits, door.control.clone()),
        door,
        wakes,
        overlays: new.overlays,
        activity,
        doorbells: new.wanted.doorbells(),
        sweep_period_us,
        limits: limited,
    };
    Ok((endpoint, nvme))
}

/// Returns the period in microseconds in which mapped doorbells are looked at; zero for others.
fn sweep_period_us(config: &Config) -> u32 {
    match config.doorbells {
        DoorbellMode::Trapped | DoorbellMode::Rung => 0,
        DoorbellMode::Mapped => config.sweep_period.as_micros() as u32,
    }
}

/// Returns the bounds of a controller's queues.
fn bounds(new: &NewController<'_>) -> Limits {
    let lanes = new.reactors.len() as u16;
    Limits { queue_pairs: QUEUE_PAIRS, lanes, ..Limits::default() }
}

/// Returns the reactors with the wake descriptors of their disks: the endpoint's own first, then
/// one for each lane.
fn homes(reactors: &[(usize, Handle)], wakes: &[Wakes]) -> Result<Vec<LaneHome>, Error> {
    let homes = reactors.iter().zip(wakes).map(|((_, reactor), wakes)| {
        Ok(LaneHome { reactor: reactor.clone(), wakes: vec![wakes.descriptor()?] })
    });
    homes.collect()
}

/// Opens the disks of a controller's namespaces and watches their descriptors. Returns the
/// namespaces, and their records by number.
fn open_namespaces(
    new: &NewController<'_>,
    wakes: &[Wakes],
    mut place: Option<&mut KeptPlace>,
) -> Result<(Vec<Namespace>, BTreeMap<u32, Listed>), Error> {
    let (mut made, mut listed) = (Vec::new(), BTreeMap::new());
    for one in &new.wanted.namespaces {
        let identity = identity(new.id, one)?;
        let lasts =
            place.as_deref_mut().map(|place| place.predecessor_disk(one.nsid)).transpose()?;
        let opened = namespace::open(one, (new.disks, &new.overlays), lasts, wakes.len() - 1)?;
        if let (Some(place), Some(content)) = (&mut place, &opened.content) {
            place.put_content(one.nsid, content.file())?;
        }
        watch_all(wakes, &opened)?;
        let (record, namespace) = namespace::make(one, identity, opened);
        listed.insert(one.nsid, record);
        made.push(namespace);
    }
    // Stores the slots of the disks' contents.
    place.map_or(Ok(()), KeptPlace::store)?;
    Ok((made, listed))
}

/// Returns one interrupt for each queue, including the admin queue.
fn interrupts(parts: &EndpointParts) -> Vec<Interrupt> {
    let sink = parts.interrupts();
    (0..=QUEUE_PAIRS).map(|vector| Interrupt::new(Arc::clone(&sink), vector)).collect()
}

fn serial(id: &str, wanted: &str) -> String {
    let text = if wanted.is_empty() { id } else { wanted };
    text.chars().take(20).collect()
}
