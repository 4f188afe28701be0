//! Assembles an endpoint from its function and its socket, and changes it.
//!
//! A new option of an endpoint is a field of the request in `plane.proto`, whose absence (0) stands
//! for what was before: the keeper has the request itself (`keep::place::Description`), and the
//! next daemon makes the endpoint by it. So no version changes, and an older build ignores the
//! field. `config` here has options of the server, `controller` and `network` those of the
//! function. What can be changed later is described first and changed then
//! (`Endpoint::set_limits`). `Endpoint::describe` shows it; the command line has it in
//! `args/endpoint.rs`, and in `request` and `as_json` of `endpoint.rs`. Functions of pools get it
//! in `vf::template::request`. `docs/disks.md` or `docs/networks.md` has it. Tests:
//! `host/plane/tests`, `plane/disks.rs` or `network.rs`, and `kept.rs`, which asks the next plane.
//!
//! A new limit of a controller is a field of `Limits`, in place of the request: `door::rates` makes
//! a rate of it for `slipway_nvme`'s limiter. `LimitArgs` of `args/endpoint.rs` has it, and
//! `limits_of` and `show_limits` of the command line's `endpoint.rs`.

mod hardware;
mod inspect;
mod namespaces;

use std::path::PathBuf;
use std::time::Duration;

use slipway_block::Budget;
use slipway_disks::{Disks, Lasts, overlays};
use slipway_fabric::SwitchHandle;
use slipway_plane_api::{v1, vf_v1};
use slipway_ram::LateFiles;
use slipway_reactor::Handle;
use slipway_telemetry::monotonic_ns;
use slipway_vfio_user::{
    Admission, Config, Control, DoorbellMode, Endpoint, MemoryFile, RegionKind, Stats,
};

use crate::controller::{self, NewController, Nvme};
use crate::door::Door;
use crate::id::{RecordId, check_id};
use crate::keep::{KeptPlace, endpoint_parts};
use crate::namespace::Listed;
use crate::network::{self, Attached};
use crate::{Error, snoop};

/// The longest path of a Unix socket, without the terminating zero (unix(7)).
const SOCKET_PATH: usize = 107;
/// The time that a client may take from its connection until it has negotiated. A launcher connects
/// before it starts its VMM, which takes long on a node that starts many at once.
const HANDSHAKE: Duration = Duration::from_secs(60);

/// An endpoint that is to be made.
pub struct NewEndpoint<'a> {
    /// The description of the endpoint.
    pub request: &'a v1::CreateEndpointRequest,
    /// Set if the endpoint refuses clients until it is opened for one.
    pub shut: bool,
    /// The switch of a network function; `None` for a controller, or if there is no such switch.
    pub switch: Option<&'a SwitchHandle>,
    /// The reactors, each with the plane's number: the endpoint's own first, then one for each
    /// lane.
    pub reactors: Vec<(usize, Handle)>,
    /// The place where the endpoint is kept, if it is. In a place that a predecessor used, the
    /// endpoint continues where the predecessor was.
    pub place: Option<KeptPlace>,
}

/// The plane's resources that endpoints share.
pub struct Resources<'a> {
    /// The named disks.
    pub disks: &'a Disks,
    /// The budget of all overlays.
    pub overlays: &'a Budget,
    /// The files of memory whose pages come late.
    pub late: &'a LateFiles,
}

/// The control thread's record of an endpoint that a reactor serves.
pub struct Served {
    id: String,
    record: RecordId,
    /// The numbers of the endpoint's reactors: its own first, then those of its lanes. Hardware has
    /// none.
    reactors: Vec<usize>,
    socket: PathBuf,
    created_ns: u64,
    ready_ns: u64,
    control: Control,
    kind: FunctionKind,
    /// The place where the endpoint is kept, if it is.
    place: Option<KeptPlace>,
}

/// The kind of an endpoint's function.
enum FunctionKind {
    Nvme(Nvme),
    /// A network function, whose port is detached when this is dropped.
    Network(Attached),
    /// Real hardware.
    Hardware,
}

impl Served {
    /// Makes an endpoint and hands it and its lanes to their reactors. On return the endpoint's
    /// socket listens, unless the endpoint is to be shut at first.
    ///
    /// # Errors
    /// [`Error`]; nothing is left then but the place, which is the caller's to give back.
    pub fn create(new: NewEndpoint<'_>, resources: &Resources<'_>) -> Result<Self, Error> {
        let created_ns = monotonic_ns();
        let NewEndpoint { request, shut, switch, reactors, mut place } = new;
        check_id(&request.id)?;
        let nvme = request.nvme.clone().unwrap_or_default();
        let config = Config { late: resources.late.clone(), shut, ..config(request, &nvme)? };
        let socket = config.location.socket();
        let nobody = || Error::Invalid("an endpoint needs a reactor".to_owned());
        let (_, handle) = reactors.first().ok_or_else(nobody)?;
        let (endpoint, kind) = match (&request.virtio_net, switch) {
            (Some(net), Some(switch)) => {
                let port = NewPort { id: &request.id, net, switch };
                network_function(port, config, handle, place.as_mut())?
            }
            (Some(net), None) => {
                let unknown = slipway_fabric::Error::UnknownSwitch(net.switch.clone());
                return Err(unknown.into());
            }
            (None, _) => {
                let Resources { disks, overlays, .. } = *resources;
                let overlays = overlays::of_endpoint(&request.id, nvme.overlay_bytes, overlays);
                let reactors = &*reactors;
                let new =
                    NewController { id: &request.id, wanted: &nvme, disks, overlays, reactors };
                let (endpoint, nvme) = controller::serve(new, config, place.as_mut())?;
                (endpoint, FunctionKind::Nvme(nvme))
            }
        };
        let control = endpoint.control();
        let stopped = |_| Error::Resources("the reactor has stopped".to_owned());
        handle.add(Box::new(endpoint)).map_err(stopped)?;
        let (id, ready_ns) = (request.id.clone(), monotonic_ns());
        let reactors = reactors.iter().map(|(number, _)| *number).collect();
        let record = RecordId::new();
        Ok(Self { id, record, reactors, socket, created_ns, ready_ns, control, kind, place })
    }

    /// Returns the identity of this record, which an endpoint that is made later with the same id
    /// does not have.
    pub fn record(&self) -> RecordId {
        self.record
    }

    /// Checks that this is the record with the identity `record`.
    ///
    /// # Errors
    /// [`Error::Unknown`] if the endpoint was removed, and this one made with the same id.
    pub fn is_still(&self, record: RecordId) -> Result<(), Error> {
        if self.record == record { Ok(()) } else { Err(Error::Unknown(self.id.clone())) }
    }

    fn nvme(&self) -> Result<&Nvme, Error> {
        match &self.kind {
            FunctionKind::Nvme(nvme) => Ok(nvme),
            FunctionKind::Network(_) | FunctionKind::Hardware => {
                Err(Error::Network(self.id.clone()))
            }
        }
    }

    /// Returns the counters of an e1000, or `None` for another function.
    pub fn e1000(&self) -> Option<v1::E1000Counters> {
        match &self.kind {
            FunctionKind::Network(attached) => attached.e1000(),
            FunctionKind::Nvme(_) | FunctionKind::Hardware => None,
        }
    }

    /// Returns the MAC address that a virtio network function has for its next driver, or `None`
    /// for another function.
    pub fn mac(&self) -> Option<String> {
        match &self.kind {
            FunctionKind::Network(attached) => attached.mac().map(|mac| mac.to_string()),
            FunctionKind::Nvme(_) | FunctionKind::Hardware => None,
        }
    }

    /// Returns the means to trace the endpoint's controller.
    ///
    /// # Errors
    /// [`Error::Network`] if the endpoint has no controller.
    pub fn snoop(&self) -> Result<snoop::Target, Error> {
        Ok(self.nvme()?.snoop.clone())
    }

    /// Returns the budget of the endpoint's overlays.
    ///
    /// # Errors
    /// [`Error::Network`] if the endpoint has no controller.
    pub fn overlays(&self) -> Result<Budget, Error> {
        Ok(self.nvme()?.overlays.clone())
    }

    /// Returns the number of the place where the endpoint is kept, or `None` if it is not kept.
    pub fn place(&self) -> Option<u32> {
        self.place.as_ref().map(KeptPlace::number)
    }

    /// Returns the resources for opening a new disk of the endpoint, or `None` if the endpoint is
    /// not kept.
    pub fn lasts(&self) -> Option<Lasts> {
        self.place.as_ref().map(KeptPlace::lasts)
    }

    /// Sets the endpoint's limits, also for a successor. The caller tells the controller.
    ///
    /// # Errors
    /// [`Error::Network`] if the endpoint has no controller; [`Error::Invalid`] if the limits are
    /// not kept. Nothing has changed then.
    pub fn set_limits(&mut self, limits: v1::Limits) -> Result<(), Error> {
        let FunctionKind::Nvme(nvme) = &mut self.kind else {
            return Err(Error::Network(self.id.clone()));
        };
        if let Some(place) = &mut self.place {
            place.limit(limits)?;
        }
        nvme.limits = Some(limits);
        Ok(())
    }

    /// Sets the settings of the endpoint's port, also for a successor.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the settings cannot be kept.
    pub fn port_changed(&mut self, port: &v1::SwitchPort) -> Result<(), Error> {
        self.look_at_link();
        self.place.as_mut().map_or(Ok(()), |place| place.set_port(port))
    }

    /// Returns the means to bind the port of the network function `id` to other addresses.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the endpoint is no network function.
    pub fn binding(&self, id: &str) -> Result<network::Binding, Error> {
        match &self.kind {
            FunctionKind::Network(attached) => Ok(attached.binding(id)),
            FunctionKind::Nvme(_) | FunctionKind::Hardware => {
                Err(Error::Invalid("a function without a port has no addresses".to_owned()))
            }
        }
    }

    /// Opens an endpoint that was made shut to one client, also for a successor.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the client cannot be kept; [`Error::Socket`] if the socket cannot be
    /// made, or cannot be given to the client's user.
    pub fn open_for(&mut self, client: &vf_v1::Client) -> Result<(), Error> {
        if let Some(place) = &mut self.place {
            place.dedicate(client)?;
        }
        let (limit_bytes, memory_file, shared_file) = files(client.memory.as_ref());
        let admission = Admission {
            owner: client.user.map(|user| (user.uid, user.gid)),
            max_dma_bytes: limit_bytes.unwrap_or(Config::at("").max_dma_bytes),
            memory_file,
            shared_file,
        };
        let opened = self.control.open_for(admission);
        let socket = &self.socket;
        opened.map_err(|source| Error::Socket { path: socket.clone(), source })
    }

    /// Has a network function check its link, and notify its driver if the link has changed.
    pub fn look_at_link(&self) {
        if matches!(self.kind, FunctionKind::Network(_)) {
            self.control.poke();
        }
    }

    /// Returns the numbers of the endpoint's reactors: its own, and those of its lanes.
    pub fn reactors(&self) -> &[usize] {
        &self.reactors
    }

    /// Moves the endpoint to another reactor.
    pub fn relocate(&mut self, reactor: usize, handle: &Handle) {
        // Hardware stays on its own thread.
        if let Some(own) = self.reactors.first_mut() {
            *own = reactor;
            self.control.relocate(handle);
        }
    }

    /// Returns the handle that closes the endpoint.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// Returns the means to reach the endpoint's controller.
    ///
    /// # Errors
    /// [`Error::Network`] if the endpoint has no controller.
    pub fn door(&self) -> Result<Door, Error> {
        Ok(self.nvme()?.door.clone())
    }

    /// Returns the endpoint's state for the interface.
    pub fn describe(&self) -> v1::Endpoint {
        let stats = self.control.stats();
        let nvme = self.nvme().ok();
        v1::Endpoint {
            id: self.id.clone(),
            socket_path: self.socket.to_string_lossy().into_owned(),
            client_pid: stats.client.as_ref().map_or(0, |client| client.pid),
            dma_regions: regions(&stats),
            times: Some(self.times(&stats)),
            counters: Some(v1::EndpointCounters {
                messages: stats.messages,
                errors: stats.errors.iter().map(|(_, count)| count).sum(),
                clients: stats.connections,
                refused_files: stats.refused_files,
                held: stats.held as u64,
                stalls: stats.stalls,
                zeroed_for_hardware_bytes: stats.zeroed_for_hardware,
            }),
            namespaces: nvme
                .into_iter()
                .flat_map(|nvme| nvme.namespaces.values().map(Listed::describe))
                .collect(),
            doorbells: nvme.map_or(0, |nvme| nvme.doorbells.into()),
            sweep_period_us: nvme.map_or(0, |nvme| nvme.sweep_period_us),
            limits: nvme.and_then(|nvme| nvme.limits),
            reactor: self.reactors.first().map_or(0, |number| *number as u32),
            lane_reactors: self.reactors.iter().skip(1).map(|number| *number as u32).collect(),
            overlays: nvme.map(|nvme| overlays::describe(&nvme.overlays)),
            io: nvme.map(Nvme::io),
        }
    }

    fn times(&self, stats: &Stats) -> v1::EndpointTimes {
        v1::EndpointTimes {
            created_ns: self.created_ns,
            ready_ns: self.ready_ns,
            client_connected_ns: stats.connected_at.unwrap_or(0),
            client_attached_ns: stats.attached_at.unwrap_or(0),
            first_dma_map_ns: stats.first_dma_map_at.unwrap_or(0),
            last_dma_map_ns: stats.last_dma_map_at.unwrap_or(0),
            dma_map_total_ns: stats.dma_map_ns,
        }
    }
}

/// A network function that is to be made, and attached to a switch by a port of its name.
struct NewPort<'a> {
    id: &'a str,
    net: &'a v1::VirtioNet,
    switch: &'a SwitchHandle,
}

/// Makes a network function on a socket.
fn network_function(
    new: NewPort<'_>,
    config: Config,
    reactor: &Handle,
    mut place: Option<&mut KeptPlace>,
) -> Result<(Endpoint, FunctionKind), Error> {
    let config = Config { doorbells: network::doorbells(new.net), ..config };
    let socket = config.location.socket();
    let unserved = |source| Error::Socket { path: socket.clone(), source };
    let mut parts = endpoint_parts(&config, place.as_deref_mut()).map_err(unserved)?;
    let NewPort { id, net, switch } = new;
    let (device, attached) = network::make(id, net, &mut parts, switch, place.as_deref())?;
    let endpoint = Endpoint::new(config, parts, device, Vec::new(), reactor).map_err(unserved)?;
    Ok((endpoint, FunctionKind::Network(attached)))
}

fn regions(stats: &Stats) -> Vec<v1::DmaRegion> {
    let regions = stats.regions.iter().map(|region| v1::DmaRegion {
        iova: region.iova,
        size_bytes: region.len,
        message_only: region.kind == RegionKind::Remote,
        guarded: region.kind == RegionKind::Guarded,
    });
    regions.collect()
}

fn config(request: &v1::CreateEndpointRequest, nvme: &v1::NvmeController) -> Result<Config, Error> {
    let path = &request.socket_path;
    if !path.starts_with('/') || path.len() > SOCKET_PATH {
        return Err(Error::Invalid(format!(
            "\"{path}\" is no path for a socket: absolute, at most {SOCKET_PATH} bytes"
        )));
    }
    let mut config = Config::at(path);
    config.handshake_deadline = HANDSHAKE;
    if let Some(owner) = &request.owner {
        config.owner = Some((owner.uid, owner.gid));
        config.allowed_uid = Some(owner.uid);
    }
    let (limit, memory_file, shared_file) = files(request.memory.as_ref());
    config.max_dma_bytes = limit.unwrap_or(config.max_dma_bytes);
    (config.memory_file, config.shared_file) = (memory_file, shared_file);
    config.doorbells = match nvme.doorbells() {
        v1::nvme_controller::DoorbellMode::Trapped => DoorbellMode::Trapped,
        v1::nvme_controller::DoorbellMode::Mapped => DoorbellMode::Mapped,
        v1::nvme_controller::DoorbellMode::Rung => DoorbellMode::Rung,
    };
    if nvme.sweep_period_us > 0 {
        config.sweep_period = Duration::from_micros(nvme.sweep_period_us.into());
    }
    Ok(config)
}

/// Returns what a client may hand over: the most bytes, if there is a limit, its own file, and that
/// which it shares with others.
fn files(
    memory: Option<&v1::ClientMemory>,
) -> (Option<u64>, Option<MemoryFile>, Option<MemoryFile>) {
    let Some(memory) = memory else { return (None, None, None) };
    let v1::ClientMemory { limit_bytes, device, inode, shared_device, shared_inode } = *memory;
    let file = |device, inode| (inode > 0).then_some(MemoryFile { device, inode });
    let limit = (limit_bytes > 0).then_some(limit_bytes);
    (limit, file(device, inode), file(shared_device, shared_inode))
}
