//! The plane: reactors and the endpoints on them.

mod hardware;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, MutexGuard, OnceLock};
use std::time::Duration;

use slipway_block::Budget;
use slipway_disks::Disks;
use slipway_fabric::Fabric;
use slipway_keeper::Keeper;
use slipway_plane_api::{v1, vf_v1};
use slipway_pool::{Left, Pool};
use slipway_ram::LateFiles;
use slipway_reactor::{Handle, Reactor};
use slipway_telemetry::{Clock, stamp_clock};

use crate::balance::{Balancer, Loads};
use crate::endpoint::{NewEndpoint, Resources, Served};
use crate::keep::{KeptPlace, MOST_LANES, PlaneKeeper};
use crate::table::{Endpoints, Slot};
use crate::{Error, Settings, snoop};

/// The time that an endpoint may take to finish its I/O and end. A disk that hangs longer is
/// reported, and its endpoint ends when the disk responds.
const CLOSE: Duration = Duration::from_secs(30);

/// The node's devices. Clones share them.
#[derive(Clone)]
pub struct Plane {
    shared: Arc<Shared>,
}

struct Shared {
    /// The clock for stamps of traced commands; made when it is first needed.
    stamps: OnceLock<Arc<dyn Clock>>,
    endpoints: Arc<Endpoints>,
    /// The balancer; absent with one reactor. Declared before the reactors, since it moves
    /// endpoints between them.
    _balancer: Option<Balancer>,
    loads: Arc<Loads>,
    reactors: Vec<Reactor>,
    keep: Option<PlaneKeeper>,
    pool: Option<Pool>,
    /// Set if the pool holds memory for sandboxes to come.
    holds_memory: bool,
    /// The files of the pool's memory.
    late: LateFiles,
    disks: Disks,
    /// The memory of all overlays.
    overlays: Budget,
    fabric: Fabric,
}

impl Plane {
    /// Starts the reactors, without endpoints.
    ///
    /// # Errors
    /// No threads or descriptors are left.
    pub fn new(settings: Settings) -> std::io::Result<Self> {
        Self::start(settings, None, Vec::new())
    }

    /// Starts the reactors, with named disks and endpoints that outlive this process (see `keep`),
    /// including those that the last process left with `keeper`.
    ///
    /// Waits until the last process and all of its requests have ended. `witness` is the path of a
    /// file whose lock tells that, the same for both processes. On return, [`Plane::list`] returns
    /// the endpoints that continue; an unwanted one is removed like any other. To end without
    /// ending its endpoints, such a process just exits.
    ///
    /// # Errors
    /// No threads or descriptors are left; the last process does not end; or it was a build that
    /// left another layout, and then everything that it left stays. An endpoint that cannot
    /// continue for another reason is reported and removed.
    pub fn with_keeper(
        settings: Settings,
        keeper: Keeper,
        witness: &Path,
    ) -> std::io::Result<Self> {
        let (keep, found) = PlaneKeeper::open(keeper, witness)?;
        let plane = Self::start(settings, Some(keep), found.memory)?;
        for (request, place) in found.disks {
            if let Err(error) = plane.add_disk(&request, Some(place)) {
                tracing::error!(%error, name = request.name, "a disk is lost");
            }
        }
        for place in found.endpoints {
            let (number, request) = (place.number(), place.request());
            if let Err(error) = plane.create_at((&request, false), Some(place)) {
                tracing::error!(%error, id = request.id, "an endpoint is lost");
                plane.give_back(Some(number));
            }
        }
        Ok(plane)
    }

    fn start(
        settings: Settings,
        keep: Option<PlaneKeeper>,
        left: Vec<Left>,
    ) -> std::io::Result<Self> {
        let late = LateFiles::default();
        let pool = pool(&settings, keep.as_ref(), &late, left)?;
        let reactors = spawn_reactors(&settings)?;
        let endpoints = Arc::<Endpoints>::default();
        let handles: Vec<Handle> = reactors.iter().map(Reactor::handle).collect();
        let loads = Arc::new(Loads::new(handles.len()));
        let balancer = match handles.len() {
            1 => None,
            _ => Some(Balancer::start(handles.clone(), endpoints.clone(), loads.clone())?),
        };
        let shared = Shared {
            stamps: OnceLock::new(),
            endpoints,
            _balancer: balancer,
            loads,
            reactors,
            fabric: Fabric::new(handles, keep.is_some()),
            keep,
            pool,
            holds_memory: settings.pool.is_some() || settings.spare_bytes > 0,
            late,
            disks: Disks::default(),
            overlays: Budget::new(settings.overlays),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Makes an endpoint; blocks while disks are opened.
    ///
    /// # Errors
    /// [`Error`]; nothing is left then.
    pub fn create(&self, request: &v1::CreateEndpointRequest) -> Result<v1::Endpoint, Error> {
        self.create_at((request, false), None)
    }

    /// Makes an endpoint that refuses clients until [`open_endpoint`](Self::open_endpoint); blocks
    /// while disks are opened. If it is kept, a successor finds it shut as well.
    ///
    /// # Errors
    /// [`Error`]; nothing is left then.
    pub(crate) fn create_shut(
        &self,
        request: &v1::CreateEndpointRequest,
    ) -> Result<v1::Endpoint, Error> {
        self.create_at((request, true), None)
    }

    /// Has an endpoint admit clients. Changes nothing if it admits them already. Does not block.
    ///
    /// # Errors
    /// [`Error::Unknown`]; [`Error::Resources`] if the endpoint has ended.
    pub(crate) fn open_endpoint(&self, id: &str) -> Result<(), Error> {
        let opened = self.with_endpoint(id, |served| served.control().open())?;
        opened.map_err(|error| Error::Resources(format!("endpoint {id} is not opened: {error}")))
    }

    /// Has an endpoint admit one client from now on, also one that was made shut. Its port is bound
    /// to the client's addresses and gets its rates, and the function has its MAC address. Waits
    /// for the reactor of the switch.
    ///
    /// # Errors
    /// [`Error::Unknown`]; [`Error::Invalid`] and [`Error::Fabric`] for addresses that the port
    /// cannot have; [`Error::Socket`] if the socket cannot be given to the client's user.
    pub(crate) fn open_endpoint_for(&self, id: &str, client: &vf_v1::Client) -> Result<(), Error> {
        let has_addresses = !(client.mac.is_empty() && client.addresses.is_empty());
        let (record, binding) =
            self.with_endpoint(id, |served| (served.record(), served.binding(id)))?;
        match binding {
            // Without addresses, too: the client may have rates, and an earlier one had addresses.
            Ok(binding) => binding.bind(client)?,
            Err(error) if has_addresses => return Err(error),
            // A function without a port.
            Err(_) => {}
        }
        self.with_endpoint(id, |served| {
            served.is_still(record)?;
            served.open_for(client)
        })?
    }

    /// Returns the MAC address that the virtio network function `id` has for its next driver.
    /// Returns `None` for any other endpoint.
    pub(crate) fn mac_of(&self, id: &str) -> Option<String> {
        self.with_endpoint(id, |served| served.mac()).ok().flatten()
    }

    /// Ends an endpoint without waiting for that: its client is disconnected, and no other is
    /// admitted. The endpoint is still to be [removed](Self::remove).
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub(crate) fn end_endpoint(&self, id: &str) -> Result<(), Error> {
        self.with_endpoint(id, |served| served.control().close())
    }

    fn create_at(
        &self,
        (request, shut): (&v1::CreateEndpointRequest, bool),
        place: Option<KeptPlace>,
    ) -> Result<v1::Endpoint, Error> {
        let id = request.id.clone();
        let switch = match (&request.virtio_net, &place) {
            (None, _) => None,
            (Some(net), None) => Some(self.fabric().switch(&net.switch)?),
            // The switch is made, or taken over, later.
            (Some(net), Some(_)) => Some(self.fabric().switch_or_new(&net.switch)?),
        };
        let lanes = request.nvme.as_ref().map_or(1, |nvme| nvme.lanes.max(1) as usize);
        // A network function begins on the reactor of its switch.
        let reactors = self.reserve(&id, lanes, switch.as_ref().map(|switch| switch.reactor))?;
        let _sizes = self.shared.disks.sizes_stay();
        let place = match (place, &self.shared.keep) {
            (None, Some(keep)) => keep.make(request).map(Some),
            (place, _) => Ok(place),
        };
        let number = place.as_ref().ok().and_then(|place| Some(place.as_ref()?.number()));
        let handle = |number: usize| (number, self.shared.reactors[number].handle());
        let reactors = reactors.into_iter().map(handle).collect();
        let Shared { disks, overlays, late, .. } = &*self.shared;
        let resources = Resources { disks, overlays, late };
        let served = place.and_then(|place| {
            let switch = switch.as_ref();
            let new = NewEndpoint { request, shut, switch, reactors, place };
            Served::create(new, &resources)
        });
        match served {
            Ok(served) => {
                let described = served.describe();
                self.lock().insert(id, Slot::Served(Box::new(served)));
                Ok(described)
            }
            Err(error) => {
                self.give_back(number);
                self.lock().remove(&id);
                Err(error)
            }
        }
    }

    /// Reserves `id` for an endpoint, and a reactor for each lane: `at`, or those with least to do.
    ///
    /// # Errors
    /// [`Error::Exists`].
    fn reserve(&self, id: &str, lanes: usize, at: Option<usize>) -> Result<Vec<usize>, Error> {
        let mut endpoints = self.lock();
        if endpoints.contains_key(id) {
            return Err(Error::Exists(id.to_owned()));
        }
        let reactors = match at {
            Some(reactor) => vec![reactor],
            None => {
                let mut counts = vec![0; self.shared.reactors.len()];
                let placed = endpoints.values().flat_map(|slot| slot.reactors());
                placed.for_each(|number| counts[*number] += 1);
                let bound = self.shared.keep.as_ref().map_or(usize::MAX, |_| MOST_LANES.into());
                let most = counts.len().min(bound);
                self.shared.loads.choose(counts, lanes.min(most))
            }
        };
        endpoints.insert(id.to_owned(), Slot::Reserved(reactors.clone()));
        Ok(reactors)
    }

    /// Ends an endpoint and waits until nothing of it is left; blocks.
    ///
    /// # Errors
    /// [`Error::Unknown`]; [`Error::Resources`] if a disk does not finish its requests.
    pub fn remove(&self, id: &str) -> Result<(), Error> {
        let slot = match self.lock().get_mut(id) {
            Some(slot @ Slot::Served(_)) => {
                let reserved = Slot::Reserved(slot.reactors().to_vec());
                std::mem::replace(slot, reserved)
            }
            // Another caller is making or removing it, and has to finish that.
            Some(Slot::Reserved(_)) | None => return Err(Error::Unknown(id.to_owned())),
        };
        let Slot::Served(served) = slot else { return Err(Error::Unknown(id.to_owned())) };
        let (control, place) = (served.control(), served.place());
        // It may be the last to hold the memory of overlays, so it is dropped without the lock.
        drop(served);
        control.close();
        let closed = control.wait_closed(CLOSE);
        match (closed, &self.shared.keep, place) {
            (false, Some(keep), Some(number)) => {
                keep.give_back_later(number, move || control.wait_closed(Duration::ZERO));
            }
            _ => self.give_back(place),
        }
        self.lock().remove(id);
        if closed {
            return Ok(());
        }
        Err(Error::Resources(format!("endpoint {id} still waits for its disks, or its hardware")))
    }

    fn give_back(&self, place: Option<u32>) {
        if let (Some(keep), Some(number)) = (&self.shared.keep, place) {
            keep.give_back(number);
        }
    }

    /// Returns the present state of the endpoint `id`.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub fn get(&self, id: &str) -> Result<v1::Endpoint, Error> {
        match self.lock().get(id) {
            Some(Slot::Served(served)) => Ok(served.describe()),
            _ => Err(Error::Unknown(id.to_owned())),
        }
    }

    /// Traces an endpoint: a report comes each interval until the receiver is dropped.
    ///
    /// # Errors
    /// [`Error::Unknown`]; [`Error::Snooped`]; [`Error::Invalid`] if the interval is out of range.
    pub(crate) async fn snoop(&self, request: &v1::SnoopRequest) -> Result<snoop::Reports, Error> {
        let target = match self.lock().get(&request.id) {
            Some(Slot::Served(served)) => served.snoop()?,
            _ => return Err(Error::Unknown(request.id.clone())),
        };
        let shared = Arc::clone(&self.shared);
        let clock =
            tokio::task::spawn_blocking(move || Arc::clone(shared.stamps.get_or_init(stamp_clock)));
        let clock = clock.await.map_err(|error| Error::Resources(error.to_string()))?;
        snoop::start(target, clock, request).await
    }

    /// Returns all switches, by name, with the counters of the e1000s at their ports; blocks.
    pub fn list_switches(&self) -> Vec<v1::Switch> {
        let mut switches = self.fabric().list_switches();
        let endpoints = self.lock();
        for port in switches.iter_mut().flat_map(|switch| &mut switch.ports) {
            if let Some(Slot::Served(served)) = endpoints.get(&port.name) {
                port.e1000 = served.e1000();
            }
        }
        switches
    }

    /// Returns all endpoints, by id.
    pub fn list(&self) -> Vec<v1::Endpoint> {
        let endpoints = self.lock();
        let served = endpoints.values().filter_map(|slot| match slot {
            Slot::Served(served) => Some(served.describe()),
            Slot::Reserved(_) => None,
        });
        served.collect()
    }

    /// Moves an endpoint to reactor number `reactor`, from 0. Its client does not notice. With
    /// several reactors, endpoints also move by themselves, from a busy one to an idle one.
    ///
    /// # Errors
    /// [`Error::Unknown`]; [`Error::Invalid`] if there is no such reactor.
    pub fn relocate(&self, id: &str, reactor: usize) -> Result<(), Error> {
        let there = self.shared.reactors.get(reactor).map(Reactor::handle);
        let handle = there.ok_or_else(|| Error::Invalid(format!("no reactor {reactor}")))?;
        self.with_endpoint(id, |served| served.relocate(reactor, &handle))
    }

    /// Returns whether the pool holds memory for sandboxes to come.
    pub(crate) fn holds_memory(&self) -> bool {
        self.shared.holds_memory
    }

    /// Returns the pool of memory, or `None` if there is none.
    pub fn pool(&self) -> Option<&Pool> {
        self.shared.pool.as_ref()
    }

    /// Returns the time for which each reactor has had work since it started.
    pub(crate) fn busy(&self) -> Vec<Duration> {
        self.shared.reactors.iter().map(|reactor| reactor.handle().busy()).collect()
    }

    /// Returns the switches, with their ports and captures.
    pub fn fabric(&self) -> &Fabric {
        &self.shared.fabric
    }

    /// Removes a switch; blocks until its ports are gone.
    ///
    /// # Errors
    /// [`Error::Fabric`] if there is no such switch.
    pub fn remove_switch(&self, name: &str) -> Result<(), Error> {
        self.fabric().remove_switch(name)?;
        // Functions that had a port at the switch tell their drivers that the carrier is gone.
        self.each_endpoint(|_, served| served.look_at_link());
        Ok(())
    }

    /// Changes settings of a port; blocks until the switch has adopted them and they are stored for
    /// a successor.
    ///
    /// # Errors
    /// Those of [`Fabric::set_port`]; [`Error::Invalid`] if the settings cannot be kept. Nothing
    /// has changed then.
    pub fn set_port(&self, request: &v1::SetPortRequest) -> Result<v1::SwitchPort, Error> {
        self.fabric().set_port(request, |port| {
            match self.with_endpoint(&port.name, |served| served.port_changed(port)) {
                // Ports of no function are not stored: the creator of their switch makes them anew.
                Err(Error::Unknown(_)) => Ok(()),
                kept => kept?,
            }
        })
    }

    /// Returns the budget of all overlays.
    pub(crate) fn overlays(&self) -> &Budget {
        &self.shared.overlays
    }

    /// Returns the named disks.
    pub(crate) fn disks(&self) -> &Disks {
        &self.shared.disks
    }

    /// Returns the keeper's side of the plane, or `None` if nothing outlives the process.
    pub(crate) fn keep(&self) -> Option<&PlaneKeeper> {
        self.shared.keep.as_ref()
    }

    /// Calls `look` with an endpoint while all endpoints are locked: `look` must be short and wait
    /// for nothing.
    pub(crate) fn with_endpoint<T>(
        &self,
        id: &str,
        look: impl FnOnce(&mut Served) -> T,
    ) -> Result<T, Error> {
        match self.lock().get_mut(id) {
            Some(Slot::Served(served)) => Ok(look(served)),
            _ => Err(Error::Unknown(id.to_owned())),
        }
    }

    /// Calls `look` with every endpoint while all are locked: `look` must be short and wait for
    /// nothing.
    pub(crate) fn each_endpoint<T>(&self, mut look: impl FnMut(&str, &mut Served) -> T) -> Vec<T> {
        let mut endpoints = self.lock();
        let served = endpoints.iter_mut().filter_map(|(id, slot)| match slot {
            Slot::Served(served) => Some(look(id, served)),
            Slot::Reserved(_) => None,
        });
        served.collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        self.shared.endpoints.lock()
    }
}

/// Starts the reactors of a plane: at least one.
fn spawn_reactors(settings: &Settings) -> std::io::Result<Vec<Reactor>> {
    let spawn = |number: u32| {
        Reactor::spawn(slipway_reactor::Settings {
            name: format!("reactor-{number}"),
            poll_budget: settings.poll_budget,
            on_panic: Arc::new(|what: &str| tracing::error!(what, "a device was dropped")),
            on_stall: Arc::new(|what: &str| tracing::warn!(what, "a reactor went on without it")),
            ..Default::default()
        })
    };
    (0..settings.reactors.max(1)).map(spawn).collect()
}

/// Makes the pool, if there is to be one or a predecessor's sandboxes have memory of one, and goes
/// on with that.
fn pool(
    settings: &Settings,
    keep: Option<&PlaneKeeper>,
    files: &LateFiles,
    left: Vec<Left>,
) -> std::io::Result<Option<Pool>> {
    let needed = settings.pool.is_some() || !left.is_empty();
    if !needed && !settings.templates {
        return Ok(None);
    }
    let of_pool = slipway_pool::Settings {
        limit: settings.pool.unwrap_or(0),
        spare_bytes: settings.spare_bytes,
        ahead: true,
        files: files.clone(),
        shelves: keep.map(PlaneKeeper::memory_shelves),
        zero_first: !settings.late_zeroing,
    };
    let pool = match Pool::new(of_pool) {
        Err(error) if !needed => {
            tracing::info!(%error, "there is no memory of templates");
            return Ok(None);
        }
        made => made?,
    };
    pool.resume(left)?;
    Ok(Some(pool))
}
