//! Creation of a sandbox: its record is checked and saved, and its network is joined.
//!
//! [`Node::create`] takes these steps, each of which is a function here: it completes the request
//! (`complete`), makes the record (`record_of_new`) and checks it (`check_new`), makes the sandbox
//! (`sandbox_of_new`), and saves it and joins its network (`keep`). Up to there nothing of the
//! sandbox is left if a step fails; afterwards `abandon` removes it.
//!
//! A new setting of a sandbox is a field of `RunSpec` (`sandbox.proto`) and of [`Record`] with
//! `#[serde(default)]`, which [`Node::create`] checks and fills in. `refuse_machine` of
//! `pod/request.rs` refuses it for a container of a pod, or `Added` has it too. `first_refused` of
//! `snapshot/asked.rs` says whether a fork may have another value. What a fork of a template cannot
//! have otherwise than its machine is in `Shape` too (`templates/manifest.rs`), by which templates
//! of `--from auto` are chosen (`automatic`). The setting comes from `front/cli` (`args/run.rs`,
//! `spec.rs`; `fixed` in `snapshot.rs` names what forks cannot choose; `run_of` in
//! `template/container.rs` fills in every option of `slipway run`), and by an annotation from
//! `front/shim` (`spec`). The test of `record.rs` has each key of a record on disk (`KEYS`).
//!
//! From the record it goes on to who carries it out:
//! - the guest as a whole: `ConfigureRequest` of `agent.proto` (`configure.rs`, and
//!   `machine.rs` of `sandbox/agent`);
//! - one container: `CreateContainerRequest` there (`create_request` of `function.rs`, for a pod
//!   `create_added`), which `Plan::spec` of the agent (`container/plan.rs`) makes a part of
//!   `ContainerSpec` (`init/mod.rs`). A fork's container is there already, and is told by
//!   `RejoinRequest` (`snapshot/go_on.rs`);
//! - the VMM: `VmSpec` (`vm_spec` of `start/machine.rs`), and from there `front/vmm` (`args`);
//! - the plane: `CreateEndpointRequest` (`serve` of `function.rs` for disks, `network.rs`).
//!
//! Tests: `sandbox/runtime/tests`, whose `harness` runs the daemon with a guest of the test's own,
//! those of `pod/request.rs` and `snapshot/begin.rs`, and a script of `tests/e2e`.
//! `docs/sandboxes.md` or the page of its subject has it, and `docs/pods.md` if pods have it.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use slipway_telemetry::{Timeline, realtime_ns};

use crate::files::Lane;
use crate::memory::of_host;
use crate::node::{Node, remove_files};
use crate::record::{
    self, Confinement, Cpus, EmptyDirs, FreePageReporting, MemoryBounds, Needs, OwnFunction,
    PluggedFunctions, Process, Record, Run, SandboxState, Saving, Settings, ShareServer, Store,
    Volume,
};
use crate::sandbox::Sandbox;
use crate::save::Saves;
use crate::security::Security;
use crate::snapshot::{begin, host_files};
use crate::templates::{AUTO, Snapshot, Template};
use crate::v1::RunSpec;
use crate::{
    Error, Result, VERSION, automatic, cgroup, copies, cpus, empty_dirs, emulated, layers, name,
    network, placement, pod, pod_functions, process, resize, shares, sockets, start, volume,
};

/// The least memory of a sandbox: with less, no kernel boots and mounts an image.
const LEAST_MEMORY: u64 = slipway_hypervisor::VmSpec::MIN_MEMORY;
/// The part of the memory of all layers that the volumes of one sandbox that begins with a snapshot
/// have unless more is asked for: one of so many.
const FORKED_VOLUMES: u64 = 4;

/// A request for a new sandbox, completed by what the node and a snapshot give.
struct NewSandbox<'a> {
    /// The request, without the hardware function and with the snapshot's machine.
    spec: Cow<'a, RunSpec>,
    /// The hardware function that the sandbox asks for.
    own_function: Option<OwnFunction>,
    /// The snapshot with which the sandbox begins, or `None` if its guest boots or it is a fork.
    begins: Option<Arc<Template>>,
    /// The template that is made of the sandbox's machine.
    saves: Option<Saves>,
}

impl NewSandbox<'_> {
    /// Returns the snapshot's part of the template with which the sandbox begins.
    fn snapshot(&self) -> Option<&Snapshot> {
        self.begins.as_ref()?.manifest.snapshot.as_ref()
    }
}

impl Node {
    /// Records a new sandbox.
    ///
    /// # Errors
    /// An error that says in one line what is wrong with `spec`. Nothing of the sandbox is left
    /// then.
    pub async fn create(&self, spec: &RunSpec) -> Result<Arc<Sandbox>> {
        self.create_saving(spec, None).await
    }

    /// Records a new sandbox, whose machine is saved as a template if `saves` names one.
    ///
    /// # Errors
    /// The errors of [`Node::create`].
    pub(crate) async fn create_saving(
        &self,
        spec: &RunSpec,
        saves: Option<Saves>,
    ) -> Result<Arc<Sandbox>> {
        let new = self.complete(spec, saves).await?;
        let (lane, id) = (self.lane(), name::new_id());
        let store = self.store(&id);
        let record = self.record_of_new(&new, id, &store, &lane).await?;
        self.check_new(&record).await?;
        let sandbox = self.sandbox_of_new(&new, record, store, lane)?;
        self.enter(&sandbox)?;
        if let Err(error) = self.keep(&sandbox, &new).await {
            self.abandon(&sandbox).await;
            return Err(error);
        }
        self.settled();
        Ok(sandbox)
    }

    /// Completes a request for a sandbox: chooses the snapshot with which the sandbox begins, and
    /// parts the request from the hardware function that it asks for.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the parts of the request exclude each other, and errors of the
    /// snapshot and of the function's pool.
    async fn complete<'a>(
        &self,
        spec: &'a RunSpec,
        saves: Option<Saves>,
    ) -> Result<NewSandbox<'a>> {
        let own_function = pod_functions::own::chosen(self, spec, saves.is_some()).await?;
        let spec = match own_function {
            Some(_) => Cow::Owned(pod_functions::own::without(spec)),
            None => Cow::Borrowed(spec),
        };
        let begins = begin::chosen(self, &spec).await?;
        let spec = match &begins {
            Some(template) => {
                let most = layers::of_node(&self.config) / FORKED_VOLUMES;
                Cow::Owned(begin::complete(&spec, &template.manifest, most)?)
            }
            None => spec,
        };
        pod_functions::refuse(&spec)?;
        empty_dirs::refuse(&spec)?;
        Ok(NewSandbox { spec, own_function, begins, saves })
    }

    /// Returns the record of a new sandbox, whose files are to be in `store`. Looks at the files of
    /// the host that the sandbox names, on `lane` where that may last.
    ///
    /// # Errors
    /// [`Error::Invalid`], and errors of the image, the volumes and the host's files.
    async fn record_of_new(
        &self,
        new: &NewSandbox<'_>,
        id: String,
        store: &Store,
        lane: &Lane,
    ) -> Result<Record> {
        let spec = &*new.spec;
        let settings = self.settings_of_new(spec, new.snapshot(), lane).await?;
        let (asked, files) = (spec.volumes.clone(), store.clone());
        let volumes = lane.run(move || volume::check(&asked, &files)).await?;
        let own_function = new.own_function.clone();
        if let Some(own) = &own_function {
            pod_functions::own::check(own, &volumes)?;
        }
        let shares = shares::check(&self.looks, &spec.shares).await?;
        let as_template = new.saves.as_ref().map(|saves| saves.name.clone());
        let record = self.record(spec, settings, id, volumes)?;
        let record = match &new.saves {
            Some(saves) => record.saved_without_sockets(saves.socket_room),
            None => record,
        };
        let plugged = PluggedFunctions { own: own_function, ..record.plugged };
        let saving = Saving { as_template, ..record.saving };
        let record = Record { shares, saving, plugged, ..record };
        let max = cpus::most_of_new(&record, spec, self.config.pod_max_cpus);
        let record = Record { cpus: Cpus { max, ..record.cpus }, ..record };
        Ok(match new.snapshot() {
            Some(snapshot) => begin::record(record, snapshot, store),
            None => record,
        })
    }

    /// Returns a new sandbox with what its record does not have: the template to begin with, and
    /// the files of the host that its container gets copies of.
    ///
    /// # Errors
    /// The errors of [`copies::check`] and [`automatic::choice`].
    fn sandbox_of_new(
        &self,
        new: &NewSandbox<'_>,
        record: Record,
        store: Store,
        lane: Lane,
    ) -> Result<Arc<Sandbox>> {
        let copies = copies::check(&new.spec)?;
        let sandbox = Sandbox::new(record, store, lane);
        sandbox.set_choice(automatic::choice(&self.config, &new.spec)?);
        sandbox.set_begins(new.begins.clone());
        sandbox.own.set_copies(copies);
        Ok(sandbox)
    }

    /// Returns the settings of a new sandbox: those of its container, those of the snapshot with
    /// which it begins, or those of a pod.
    ///
    /// # Errors
    /// [`Error::Invalid`], and errors of the image and of the snapshot's files.
    async fn settings_of_new(
        &self,
        spec: &RunSpec,
        snapshot: Option<&Snapshot>,
        lane: &Lane,
    ) -> Result<Settings> {
        let placement = placement::of_new(spec.placement.as_ref(), lane).await?;
        match snapshot {
            Some(snapshot) => {
                host_files::check(&self.looks, &snapshot.volumes).await?;
                begin::settings(snapshot, placement).await
            }
            None if spec.makes_pod => of_pod(spec),
            None => pod::settings(&self.image(spec).await?, spec, placement),
        }
    }

    /// Refuses a new sandbox that could not start: its record is too large, or its kernel, template
    /// or socket engine is not what it has to be.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::TooLarge`], [`Error::NoTemplate`] and errors of the boot files.
    async fn check_new(&self, record: &Record) -> Result<()> {
        record::check_size(record)?;
        self.boot.files(record.kernel.as_deref(), Needs::of(record)).await?;
        if let Some(name) = &record.template {
            let template = self.templates.get(name).await?;
            if record.reporting.asked == Some(true) && !template.manifest.shape.reports() {
                let why = format!(
                    "--free-page-reporting cannot be had with {name}, whose guest does not report: \
                     leave it out, or make the template with it"
                );
                return Err(Error::Invalid(why));
            }
        }
        if let Some(engine) = &record.sockets {
            sockets::check(engine).await?;
        }
        Ok(())
    }

    /// Removes a sandbox that was created and is not to be started.
    pub(crate) async fn abandon(&self, sandbox: &Sandbox) {
        for undone in [network::release(self, &sandbox.record()).await, remove_files(sandbox).await]
        {
            if let Err(error) = undone {
                tracing::warn!(sandbox = sandbox.name, %error, "left by a sandbox not started");
            }
        }
        self.forget(sandbox);
        sandbox.give_up();
    }

    /// Saves a new sandbox's record and links the disks of the snapshot that it begins with. Then
    /// joins its network, or gives an interface of its own to a machine that is saved without one
    /// in a network.
    ///
    /// Where a network's lease is all that there is beside the record, the record is saved once,
    /// with the lease: a daemon that is killed between the two leaves a lease of no sandbox, which
    /// the next one frees. Until then the sandbox's directory says that a record is to come, for
    /// which the removal of images waits (`images`).
    async fn keep(&self, sandbox: &Sandbox, new: &NewSandbox<'_>) -> Result<()> {
        let store = sandbox.store.clone();
        sandbox.lane.run(move || store.create()).await?;
        let version = sandbox.note(|_| {});
        let leaves_more = new.begins.is_some() || new.saves.is_some();
        if leaves_more || !new.spec.network_namespace.is_empty() {
            sandbox.save(version).await?;
        }
        if let Some(snapshot) = &new.begins {
            begin::link(self, sandbox, snapshot).await?;
        }
        match &new.saves {
            Some(saves) if saves.mtu > 0 => {
                network::isolate(self, sandbox, &new.spec, saves.mtu).await?;
            }
            _ => network::join(self, sandbox, &new.spec).await?,
        }
        sandbox.save(version).await
    }

    /// Returns the path below which the node's own control groups are.
    fn own_groups(&self) -> PathBuf {
        PathBuf::from(self.cgroups.hierarchies().path_of(""))
    }

    /// Returns whether a pod has room for a socket function that its containers may ask for, if it
    /// boots. One with the template that it names has the template's room.
    fn has_socket_slot(&self, spec: &RunSpec) -> bool {
        let may_boot = ["", AUTO].contains(&spec.template.as_str());
        spec.makes_pod && may_boot && self.config.pod_sockets > 0
    }

    /// Returns the record of a sandbox as `spec` asks for it. Every field is named here: the first
    /// group is what the request says, the second what it leaves to the caller, and the third what
    /// happens to a sandbox later.
    ///
    /// # Errors
    /// [`Error::Invalid`] and errors of the control group.
    fn record(
        &self,
        spec: &RunSpec,
        settings: Settings,
        id: String,
        volumes: Vec<Volume>,
    ) -> Result<Record> {
        let name = if spec.name.is_empty() { name::new_name() } else { spec.name.clone() };
        name::check(&name)?;
        start::accelerator(&spec.accelerator)?;
        let asked = if spec.cpus == 0 { self.config.cpus } else { spec.cpus };
        let (cpus, max_cpus) = cpus::of_new(asked, spec.max_cpus)?;
        let limits = pod::limits_of_new(spec.resources.as_ref())?;
        let otherwise = self.config.memory_bytes.saturating_add(limits.huge_bytes());
        let (memory_bytes, memory) = memory_of_new(spec, otherwise)?;
        let function_slots = if spec.makes_pod { self.config.pod_functions } else { 0 };
        Ok(Record {
            settings,
            pod: spec.makes_pod,
            max_containers: pod::max_containers(spec)?,
            template: Some(spec.template.clone()).filter(|name| !["", AUTO].contains(&&**name)),
            memory_bytes,
            memory,
            bound: pod::bound_of_new(spec, of_host())?,
            layers_bytes: layers::of_new(spec.layers_bytes, &self.config)?,
            cpus: Cpus::of_new(cpus, max_cpus),
            limits,
            hostname: process::or(&spec.hostname, &name),
            volumes,
            kernel: (!spec.kernel.is_empty()).then(|| PathBuf::from(&spec.kernel)),
            accelerator: process::or(&spec.accelerator, &self.config.accelerator),
            labels: spec.labels.clone().into_iter().collect(),
            remove: spec.remove,
            emulated_nic: emulated::nic(spec)?,
            assigned_function: emulated::function(spec)?,
            sockets: (!spec.socket_engine.is_empty()).then(|| PathBuf::from(&spec.socket_engine)),
            plugged: PluggedFunctions::of_new(function_slots, self.has_socket_slot(spec)),
            reporting: FreePageReporting::of_new(spec.free_page_reporting),
            confinement: Confinement {
                control_group: cgroup::asked(&spec.control_group, &self.own_groups())?,
                least_memory_bytes: spec.least_memory_bytes,
                ..Confinement::default()
            },

            origin: None,
            shares: Vec::new(),

            state: SandboxState::Created,
            created_ns: realtime_ns(),
            version: VERSION.to_owned(),
            template_why_not: String::new(),
            booted: None,
            saving: Saving::default(),
            added: Vec::new(),
            attached: 0,
            empty_dirs: EmptyDirs::default(),
            run: Run::default(),
            changing_limits: false,
            network: None,
            trees: 0,
            share_server: ShareServer::None,
            shared_root: None,
            vmm_uid: None,
            vm: None,
            timeline: Timeline::new(name.clone()),
            id,
            name,
        })
    }
}

/// Returns the settings of a pod, which has no container.
///
/// # Errors
/// [`Error::Invalid`] if `spec` describes a container.
fn of_pod(spec: &RunSpec) -> Result<Settings> {
    let has_image = !spec.image.is_empty() || !spec.image_digest.is_empty();
    let has_copies = !spec.files.is_empty() || !spec.file_dirs.is_empty();
    let has_files = has_copies || !spec.volumes.is_empty() || !spec.shares.is_empty();
    let runs = !spec.command.is_empty() || spec.placement.is_some();
    if has_image || runs || has_files {
        let why =
            "a pod has no image, command, CPU set, files or volumes: its containers have them";
        return Err(Error::Invalid(why.to_owned()));
    }
    let process =
        Process { security: Security::new(spec.security.as_ref())?, ..Process::default() };
    Ok(Settings { process, ..Settings::default() })
}

/// Returns the bytes of memory with which a sandbox begins, and the memory that it can be given.
/// `otherwise` are the bytes for a request that names none.
///
/// # Errors
/// [`Error::Invalid`].
fn memory_of_new(spec: &RunSpec, otherwise: u64) -> Result<(u64, MemoryBounds)> {
    let bytes = memory(spec.memory_bytes, otherwise)?;
    let most = resize::of_new(bytes, spec.max_memory_bytes, of_host())?;
    let is_named = spec.max_memory_bytes > 0;
    Ok((bytes, MemoryBounds { is_named, ..MemoryBounds::new(bytes, most) }))
}

/// Returns the bytes of memory of a sandbox that asks for `asked`, or for 0 if it names none: whole
/// MiB.
///
/// # Errors
/// [`Error::Invalid`] if no guest could boot with as little, or the host does not have as much.
fn memory(asked: u64, otherwise: u64) -> Result<u64> {
    let bytes = if asked == 0 { otherwise } else { asked };
    if bytes < LEAST_MEMORY {
        return Err(Error::Invalid(format!(
            "{} of memory is too little for a sandbox: at least {} MiB",
            if bytes < 1 << 20 { format!("{bytes} bytes") } else { format!("{} MiB", bytes >> 20) },
            LEAST_MEMORY >> 20
        )));
    }
    let total = of_host();
    if bytes > total {
        return Err(Error::Invalid(format!(
            "{} MiB of memory is more than this host has, {} MiB",
            bytes >> 20,
            total >> 20
        )));
    }
    Ok(bytes.next_multiple_of(1 << 20))
}
