//! Assembles an endpoint from disks, controller and socket.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use slipway_block::Budget;
use slipway_fabric::SwitchHandle;
use slipway_nvme::{ChangeError, Controller, Identity, Limits, Namespace, Parts, doorbell_count};
use slipway_pci::Interrupt;
use slipway_plane_api::{v1, vf_v1};
use slipway_ram::LateFiles;
use slipway_reactor::Handle;
use slipway_telemetry::monotonic_ns;
use slipway_vfio_user::{
    Admission, Config, Control, DoorbellMode, Endpoint, EndpointParts, LaneHome, MemoryFile,
    RegionKind, Stats,
};

use crate::disk::{self, Opened};
use crate::disks::Disks;
use crate::door::{Door, namespace, rates};
use crate::id::check_id;
use crate::keep::{KeptPlace, Lasts};
use crate::network::{self, Attached};
use crate::wakes::{Wakes, watch_all};
use crate::{Error, overlays, snoop};

/// The longest path of a Unix socket, without the terminating zero (unix(7)).
const SOCKET_PATH: usize = 107;
/// The time that a client may take from its connection until it has negotiated. A launcher connects
/// before it starts its VMM, which takes long on a node that starts many at once.
const HANDSHAKE: Duration = Duration::from_secs(60);
/// The number of queue pairs that a function offers: as many as its sandbox could have CPUs.
const QUEUE_PAIRS: u16 = 64;

/// The control thread's record of an endpoint that a reactor serves.
pub struct Served {
    id: String,
    /// The numbers of the endpoint's reactors: its own first, then those of its lanes.
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
}

/// An NVMe controller.
struct Nvme {
    namespaces: BTreeMap<u32, v1::NamespaceStatus>,
    door: Door,
    /// The wake descriptors of the endpoint's own disks, then those of each lane's.
    wakes: Vec<Wakes>,
    snoop: snoop::Target,
    /// The memory of the endpoint's overlays.
    overlays: Budget,
    doorbells: v1::nvme_controller::DoorbellMode,
    /// The period in microseconds; zero if doorbells are trapped.
    sweep_period_us: u32,
    limits: Option<v1::Limits>,
}

impl Served {
    /// Makes the endpoint that `request` describes, and hands it to the first of `reactors` and its
    /// lanes to the others. Each reactor is given by the plane's number and its handle. On return
    /// the endpoint's socket listens, unless the endpoint is to be `shut` at first.
    ///
    /// In a `place` that a predecessor used, the endpoint continues where the predecessor was.
    pub fn create(
        (request, shut): (&v1::CreateEndpointRequest, bool),
        (disks, overlays, late): (&Disks, &Budget, &LateFiles),
        switch: Option<&SwitchHandle>,
        reactors: Vec<(usize, Handle)>,
        mut place: Option<KeptPlace>,
    ) -> Result<Self, Error> {
        let created_ns = monotonic_ns();
        check_id(&request.id)?;
        let wanted = request.nvme.clone().unwrap_or_default();
        let config = Config { late: late.clone(), shut, ..config(request, &wanted)? };
        let socket = config.location.socket();
        let unserved = |source| Error::Socket { path: socket.clone(), source };
        let nobody = || Error::Invalid("an endpoint needs a reactor".to_owned());
        let (_, handle) = reactors.first().ok_or_else(nobody)?;
        let (endpoint, kind) = match (&request.virtio_net, switch) {
            (Some(net), Some(switch)) => {
                let config = Config { doorbells: network::doorbells(net), ..config };
                let mut parts = endpoint_parts(&config, place.as_mut()).map_err(unserved)?;
                let (device, attached) =
                    network::make(&request.id, net, &mut parts, switch, place.as_ref())?;
                let endpoint = Endpoint::new(config, parts, device, Vec::new(), handle);
                (endpoint.map_err(unserved)?, FunctionKind::Network(attached))
            }
            (Some(net), None) => {
                let unknown = slipway_fabric::Error::UnknownSwitch(net.switch.clone());
                return Err(unknown.into());
            }
            (None, _) => {
                let overlays = overlays::of_endpoint(&request.id, wanted.overlay_bytes, overlays);
                let around = (disks, overlays, &*reactors);
                nvme(request, &wanted, config, around, place.as_mut())?
            }
        };
        let control = endpoint.control();
        let stopped = |_| Error::Resources("the reactor has stopped".to_owned());
        handle.add(Box::new(endpoint)).map_err(stopped)?;
        let (id, ready_ns) = (request.id.clone(), monotonic_ns());
        let reactors = reactors.iter().map(|(number, _)| *number).collect();
        Ok(Self { id, reactors, socket, created_ns, ready_ns, control, kind, place })
    }

    fn nvme(&self) -> Result<&Nvme, Error> {
        match &self.kind {
            FunctionKind::Nvme(nvme) => Ok(nvme),
            FunctionKind::Network(_) => Err(Error::Network(self.id.clone())),
        }
    }

    /// Returns the counters of an e1000, or `None` for another function.
    pub fn e1000(&self) -> Option<v1::E1000Counters> {
        match &self.kind {
            FunctionKind::Network(attached) => attached.e1000(),
            FunctionKind::Nvme(_) => None,
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

    /// Sets the endpoint's limits, also for a successor.
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
            FunctionKind::Nvme(_) => {
                Err(Error::Invalid("a function without a port has no addresses".to_owned()))
            }
        }
    }

    /// Opens an endpoint that was made shut to one client, also for a successor.
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
        self.reactors[0] = reactor;
        self.control.relocate(handle);
    }

    /// Returns the handle that closes the endpoint.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// Returns the means to reach the endpoint's controller.
    pub fn door(&self) -> Result<Door, Error> {
        Ok(self.nvme()?.door.clone())
    }

    /// Reserves a namespace number for the disk of `wanted`: the requested one, or the lowest free
    /// one for 0. Watches the disk's descriptor, and has a successor attach the disk likewise.
    pub fn reserve(
        &mut self,
        wanted: &v1::Namespace,
        opened: Opened,
    ) -> Result<(v1::NamespaceStatus, Namespace), Error> {
        let FunctionKind::Nvme(nvme) = &mut self.kind else {
            return Err(Error::Network(self.id.clone()));
        };
        let free = |nsid: &u32| !nvme.namespaces.contains_key(nsid);
        // A number that is too high is refused by the controller.
        let nsid = wanted.nsid;
        let chosen = if nsid == 0 { (1..).find(free) } else { Some(nsid).filter(free) };
        let nsid = chosen.ok_or(ChangeError::Taken(nsid))?;
        watch_all(&nvme.wakes, &opened)?;
        if let Some(place) = &mut self.place {
            let wanted = v1::Namespace { nsid, ..wanted.clone() };
            let described = place.attach(wanted, opened.content.as_ref());
            described.or_else(|error| place.detach(&[nsid]).and(Err(error)))?;
        }
        let (status, namespace) = namespace(&self.id, nsid, opened);
        nvme.namespaces.insert(nsid, status.clone());
        Ok((status, namespace))
    }

    /// Removes the namespaces that `chosen` picks, also for a successor; returns their numbers.
    pub fn take(
        &mut self,
        chosen: impl Fn(&v1::NamespaceStatus) -> bool,
    ) -> Result<Vec<u32>, Error> {
        let FunctionKind::Nvme(nvme) = &mut self.kind else {
            return Err(Error::Network(self.id.clone()));
        };
        let taken = nvme.namespaces.iter().filter(|(_, one)| chosen(one));
        let taken: Vec<u32> = taken.map(|(nsid, _)| *nsid).collect();
        if let Some(place) = &mut self.place {
            place.detach(&taken)?;
        }
        nvme.namespaces.retain(|nsid, _| !taken.contains(nsid));
        Ok(taken)
    }

    /// Stores the new size of a named disk; returns the namespaces that are this disk.
    pub fn resized(&mut self, name: &str, size_bytes: u64) -> Vec<u32> {
        let FunctionKind::Nvme(nvme) = &mut self.kind else { return Vec::new() };
        let same = nvme.namespaces.values_mut().filter(|one| one.disk == name);
        let noted = same.map(|one| {
            one.size_bytes = size_bytes;
            one.nsid
        });
        noted.collect()
    }

    /// Returns the endpoint's namespaces that are the named disk `name`.
    pub fn uses(&self, name: &str) -> Vec<v1::DiskUser> {
        let FunctionKind::Nvme(nvme) = &self.kind else { return Vec::new() };
        let same = nvme.namespaces.values().filter(|one| one.disk == name);
        let users = same.map(|one| v1::DiskUser {
            endpoint_id: self.id.clone(),
            nsid: one.nsid,
            read_only: one.read_only,
        });
        users.collect()
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
            }),
            namespaces: nvme
                .into_iter()
                .flat_map(|nvme| nvme.namespaces.values().cloned())
                .collect(),
            doorbells: nvme.map_or(0, |nvme| nvme.doorbells.into()),
            sweep_period_us: nvme.map_or(0, |nvme| nvme.sweep_period_us),
            limits: nvme.and_then(|nvme| nvme.limits),
            reactor: self.reactors[0] as u32,
            lane_reactors: self.reactors[1..].iter().map(|number| *number as u32).collect(),
            overlays: nvme.map(|nvme| overlays::describe(&nvme.overlays)),
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

/// Returns the parts of an endpoint, with a predecessor's state if there is any.
fn endpoint_parts(
    config: &Config,
    place: Option<&mut KeptPlace>,
) -> std::io::Result<EndpointParts> {
    match place {
        Some(place) => EndpointParts::kept(config, place.kept()),
        None => Ok(EndpointParts::new(config)),
    }
}

/// Makes an NVMe controller on a socket.
fn nvme(
    request: &v1::CreateEndpointRequest,
    wanted: &v1::NvmeController,
    config: Config,
    (disks, overlays, reactors): (&Disks, Budget, &[(usize, Handle)]),
    mut place: Option<&mut KeptPlace>,
) -> Result<(Endpoint, FunctionKind), Error> {
    let socket = config.location.socket();
    let sweep_period_us = match config.doorbells {
        DoorbellMode::Trapped | DoorbellMode::Rung => 0,
        DoorbellMode::Mapped => config.sweep_period.as_micros() as u32,
    };
    let unserved = |source| Error::Socket { path: socket.clone(), source };
    let wakes = reactors.iter().map(|_| Wakes::new()).collect::<Result<Vec<_>, _>>()?;
    let (namespaces, status) =
        namespaces(request, wanted, (disks, &overlays), &wakes, place.as_deref_mut())?;
    let mut parts = endpoint_parts(&config, place.as_deref_mut()).map_err(unserved)?;
    let lanes = reactors.len() as u16;
    let limits = Limits { queue_pairs: QUEUE_PAIRS, lanes, ..Limits::default() };
    let mut controller = Controller::new(Parts {
        memory: parts.memory(),
        interrupts: interrupts(&parts),
        doorbells: parts.doorbells(doorbell_count(QUEUE_PAIRS)).map_err(unserved)?,
        namespaces,
        clock: parts.clock(),
        identity: Identity::new(&serial(&request.id, &wanted.serial)),
        limits,
        journal: place.as_ref().map(|place| place.journal.clone()),
    })?;
    // The present limits, or the initial ones if they were never changed.
    let limited = place.as_ref().and_then(|place| place.limits()).or(wanted.limits);
    controller.limit(rates(&limited.unwrap_or_default()));
    let handed = parts.hand_down(&mut controller);
    handed.map_err(|error| Error::Resources(error.to_string()))?;
    let mailbox = controller.mailbox();
    let homes = reactors.iter().zip(&wakes).map(|((_, reactor), wakes)| {
        Ok(LaneHome { reactor: reactor.clone(), wakes: vec![wakes.descriptor()?] })
    });
    let mut homes = homes.collect::<Result<Vec<_>, Error>>()?;
    let LaneHome { reactor, wakes: wake } = homes.remove(0);
    let endpoint = Endpoint::new(config, parts, Box::new(controller), wake, &reactor);
    let mut endpoint = endpoint.map_err(unserved)?;
    endpoint.spread(homes).map_err(unserved)?;
    let door = Door { mailbox, control: endpoint.control() };
    let snoop = snoop::Target::new(door.mailbox.clone(), limits, door.control.clone());
    let nvme = Nvme {
        namespaces: status,
        door,
        wakes,
        snoop,
        overlays,
        doorbells: wanted.doorbells(),
        sweep_period_us,
        limits: limited,
    };
    Ok((endpoint, FunctionKind::Nvme(nvme)))
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

type Namespaces = (Vec<Namespace>, BTreeMap<u32, v1::NamespaceStatus>);

fn namespaces(
    request: &v1::CreateEndpointRequest,
    wanted: &v1::NvmeController,
    disks: (&Disks, &Budget),
    wakes: &[Wakes],
    mut place: Option<&mut KeptPlace>,
) -> Result<Namespaces, Error> {
    let (mut made, mut status) = (Vec::new(), BTreeMap::new());
    for one in &wanted.namespaces {
        let lasts = place.as_deref_mut().map(|place| place.found(one.nsid)).transpose()?;
        let opened = disk::open(one, disks, lasts, wakes.len() - 1)?;
        if let (Some(place), Some(file)) = (&mut place, &opened.content) {
            place.put_content(one.nsid, file)?;
        }
        watch_all(wakes, &opened)?;
        let (described, namespace) = namespace(&request.id, one.nsid, opened);
        status.insert(one.nsid, described);
        made.push(namespace);
    }
    // Stores the slots of the disks' contents.
    place.map_or(Ok(()), KeptPlace::store)?;
    Ok((made, status))
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
