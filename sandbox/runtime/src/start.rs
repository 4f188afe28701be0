//! The start of a sandbox, stage by stage.
//!
//! The order of the stages is the cheapest that satisfies each stage's needs. The NVMe function is
//! served before the VMM starts, so that the VMM never waits for it. Work that the guest does not
//! depend on is done while the guest boots.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use slipway_agent_protocol::v1 as agent_v1;
use slipway_cgroup::Limits;
use slipway_hypervisor::{
    Accel, AccelChoice, Capabilities, Credentials, Error as HypervisorError, GuestMemory, Page,
    Topology, Vm, VmSpec, WireError,
};
use slipway_telemetry::monotonic_ns;

use crate::agent::{Agent, Hello};
use crate::carrier::Carrier;
use crate::cgroup;
use crate::configure::configure;
use crate::memory::{client_memory, of_host};
use crate::node::Node;
use crate::reach::reach;
use crate::record::{BootRecord, Needs, Record, SandboxState, ShareServer};
use crate::running::{Carry, Running, blame, or_end};
use crate::sandbox::Sandbox;
use crate::snapshot::go_on::go_on;
use crate::stages::{Stages, dma_stages, guest_stages};
use crate::target::Target;
use crate::templates::Template;
use crate::{
    Error, Result, automatic, emulated, fork, function, network, placement, pod_functions, resize,
    root, shares, sockets,
};

/// A guest whose agent answers.
pub(crate) struct Booted {
    pub(crate) vm: Arc<dyn Vm>,
    pub(crate) agent: Agent,
    /// The device and inode number of the file of its memory.
    memory: (u64, u64),
    /// The template that the machine began with.
    template: Option<Arc<Template>>,
    /// The time at which the VMM ran.
    at_ns: u64,
}

/// Starts a sandbox. When this returns, its container runs.
///
/// # Errors
/// The error of the first stage that failed. The caller releases what the sandbox holds.
pub(crate) async fn start(node: &Node, sandbox: &Arc<Sandbox>) -> Result<Running> {
    let stages = Stages::of(sandbox);
    let booted = boot_guest(node, sandbox, &stages).await?;
    let Booted { vm, agent, memory, template, at_ns } = booted;
    let record = sandbox.record();
    let saved_mac = template.as_ref().and_then(|template| template.manifest.mac.clone());
    let network = network::begin(sandbox, &agent, &record, saved_mac);
    if record.sockets.is_some() {
        stages.run(sockets::STAGE, or_end(&*vm, sockets::start(&agent))).await?;
    }
    let log_bytes = node.config.log_bytes;
    let carried = if record.origin.is_some() {
        let gone_on = go_on(sandbox, &agent, &record, network, log_bytes);
        stages.run("container", or_end(&*vm, async { gone_on.await.map(Some) })).await
    } else {
        let network = network.filter(|_| record.network.as_ref().is_some_and(|one| one.wait));
        let container = container(sandbox, &agent, &record, network, log_bytes);
        stages.run("container", or_end(&*vm, container)).await
    };
    let carry = match carried {
        // A guest that answers has refused what the container asks for: its machine is sound.
        Err(error @ Error::Agent(_)) if agent.hello().await.is_ok() => return Err(error),
        carried => trusted(node, sandbox, &template, carried).await?,
    };
    match &template {
        // All of its memory was copied for the server of its shares.
        Some(_) if record.forks_with_shares() => {}
        Some(template) => fork::learn(node, template, memory).await,
        // A stage of the guest, such as its NVMe driver's, may not have ended at the first call.
        None => guest_stages(sandbox, &or_end(&*vm, agent.hello()).await?, at_ns),
    }
    sandbox.set_agent(Some(agent.clone()));
    sandbox.update(|record| record.state = SandboxState::Running).await?;
    Ok(Running::new(vm, agent, carry))
}

/// Starts a sandbox's VMM, and waits until the agent of its guest answers. The guest boots, or goes
/// on as the sandbox's template was saved; then its disks are there when this returns.
///
/// # Errors
/// The error of the first stage that failed. The caller releases what the sandbox holds.
pub(crate) async fn boot_guest(
    node: &Node,
    sandbox: &Arc<Sandbox>,
    stages: &Stages<'_>,
) -> Result<Booted> {
    let uid = node.uids.claim()?;
    choose_parent(node, sandbox, uid).await;
    let (taken, group) = cgroup::choose(node, sandbox);
    // Saved before anything is started: a later daemon ends processes with this user id, and a
    // server of shares, and gives the control group back.
    let recorded = sandbox.update(|record| {
        record.state = SandboxState::Starting;
        record.cgroup = group;
        record.vmm_uid = Some(uid);
        if record.begins_with_shares() {
            record.share_server = ShareServer::Starting;
        }
    });
    recorded.await?;
    let (template, memory) = stages.run("memory", begin_memory(node, sandbox, uid)).await?;
    let record = sandbox.record();
    let run_dir = node.run_dir(&record.id);
    let mut spec = vm_spec(node, &record, uid, memory.clone()).await?;
    let name = record.saves.as_ref().or(record.template.as_ref());
    if let Some(name) = name
        && !node.hypervisor.capabilities(&spec).await?.saves_machines
    {
        let why = "its VMM is QEMU; templates need slipway-vmm, and so KVM (`slipway doctor`)";
        return Err(Error::Template { name: name.clone(), why: why.to_owned() });
    }
    spec.restore = template.as_ref().map(|template| Arc::clone(&template.machine));
    let booted = match &template {
        Some(template) => template.manifest.shape.booted(),
        None => BootRecord {
            kernel: spec.kernel.clone(),
            initramfs: spec.initramfs.clone(),
            cpu_template: spec.cpu_template.to_string(),
        },
    };
    let boots = name.is_none();
    if boots && !record.pod && node.config.shares_roots()? {
        stages.run("shared-root", root::share(node, sandbox, &mut spec)).await?;
    }
    let client = client_memory(&spec)?;
    resize::check_vmm(node, &record, &spec).await?;
    let overhead = node.hypervisor.overhead(&spec).await? + shares::memory(&record);
    sandbox.note(|record| {
        record.booted = Some(booted);
        record.client_memory = Some((&client).into());
        record.memory.overhead_bytes = overhead;
    });
    let record = sandbox.record();
    let limits = limits(&record);
    let prepared = async {
        let files = cgroup::prepare(node, sandbox, taken, limits).await?;
        match placement::apply(sandbox).await? {
            // Version 1 has CPU sets in a hierarchy of their own.
            true => Ok(cgroup::procs_files(sandbox).await),
            false => Ok(files),
        }
    };
    spec.cgroup_procs = stages.run("cgroup", prepared).await?;
    let mut functions = stages.run("rootfs", function::describe(node, sandbox, &record)).await?;
    // The guest of a template has seen no disk; those of its forks come later. That of a snapshot
    // goes on with its disks.
    let later = match template {
        Some(_) if record.origin.is_none() => functions.iter_mut().map(std::mem::take).collect(),
        _ => Vec::new(),
    };
    sandbox.lane.run(move || make_run_dir(&run_dir)).await?;
    let attach = async {
        let mut paths = function::serve(node, &record, uid, &client, functions).await?;
        paths.extend(network::serve(node, sandbox, uid, &client).await?);
        let asked = sockets::serve(node, &record, uid, &client).await?;
        paths.extend(asked.as_ref().map(|asked| asked.socket.clone()));
        paths.extend(shares::serve(node, sandbox, &spec.cgroup_procs, &client).await?);
        Ok((paths, asked))
    };
    // `_asked` is held until the VMM runs; from then on the VMM's connection keeps the function.
    let (paths, _asked) = stages.run("vf-attach", attach).await?;
    spec.vfio_user_sockets = paths;
    let launched = {
        let launch = async { Ok(Arc::from(node.hypervisor.launch(&spec).await?)) };
        stages.run("vmm", launch).await
    };
    if record.saves.is_some() {
        sandbox.hold_memory(Some(memory.clone()));
    }
    // If the VMM has ended already, this drops the last reference to the guest's memory, which
    // takes a while.
    sandbox.bin.discard_value((spec, memory));
    let vm: Arc<dyn Vm> = launched?;
    if node.keeps {
        vm.detach();
    }
    sandbox.set_vm(Some(Arc::clone(&vm)));
    sandbox.update(|record| record.vm = Some(vm.record())).await?;
    placement::apply(sandbox).await?;
    if sandbox.is_stopping() {
        return Err(Error::Stopped);
    }
    let at_ns = monotonic_ns();
    let agent = match &template {
        None => {
            sandbox.enter("kernel");
            let booted = boot(node, sandbox, &*vm).await;
            let (agent, hello) = booted.inspect_err(|error| {
                sandbox.trace_stage("kernel", (at_ns, monotonic_ns()), Some(error));
            })?;
            guest_stages(sandbox, &hello, at_ns);
            agent
        }
        Some(_) => {
            // The guest looks at its disks once it has answered.
            let resumed = stages.run("resume", boot(node, sandbox, &*vm)).await;
            let (agent, _) = trusted(node, sandbox, &template, resumed).await?;
            let disks = function::ids(&record).collect::<Vec<_>>().into_iter().zip(later);
            stages.run("disks", fork::attach(node, disks)).await?;
            if record.forks_with_shares() {
                stages.run("shares", or_end(&*vm, shares::add(node, sandbox))).await?;
            }
            agent
        }
    };
    dma_stages(node, stages, &record.id).await?;
    let memory = (client.device, client.inode);
    Ok(Booted { vm, agent, memory, template, at_ns })
}

/// Returns the outcome of a stage of a sandbox that may be a fork. A machine that failed is held
/// against its template.
async fn trusted<T>(
    node: &Node,
    sandbox: &Sandbox,
    template: &Option<Arc<Template>>,
    outcome: Result<T>,
) -> Result<T> {
    if let (Err(error), Some(template)) = (&outcome, template) {
        automatic::distrust(node, sandbox, template, error).await;
    }
    outcome
}

/// Finds the template that a sandbox begins with, if any, and makes the sandbox's memory. A sandbox
/// for which the node chose the template boots if it cannot have that memory.
async fn begin_memory(
    node: &Node,
    sandbox: &Sandbox,
    uid: u32,
) -> Result<(Option<Arc<Template>>, GuestMemory)> {
    give_room(node, sandbox, uid).await?;
    if leaves_choice(node, sandbox, uid).await?
        && let Some(template) = automatic::choose(node, sandbox).await?
    {
        match guest_memory(node, sandbox, &sandbox.record(), Some(&template)).await {
            Ok(memory) => return Ok((Some(template), memory)),
            Err(error) => automatic::decline(sandbox, &error),
        }
    }
    let template = fork::template(node, sandbox).await?;
    let memory = guest_memory(node, sandbox, &sandbox.record(), template.as_deref()).await?;
    Ok((template, memory))
}

/// Gives a pod that boots, and names no most memory, the room for more that the node's settings
/// give to pods, if its VMM and its kernel can add memory. A fork has the memory of its template,
/// which is of one size.
///
/// # Errors
/// There is no VMM for the pod, or its boot files cannot be made.
async fn give_room(node: &Node, sandbox: &Sandbox, uid: u32) -> Result<()> {
    let record = sandbox.record();
    let most = resize::of_pod(record.memory_bytes, node.config.pod_max_memory_percent, of_host());
    if most == record.memory_bytes || sandbox.is_automatic() || !resize::takes_room(&record) {
        return Ok(());
    }
    if !capabilities(node, &record, uid).await?.plugs_memory {
        return Ok(());
    }
    let needs = Needs { memory: true, ..Needs::of(&record) };
    if let Err(error) = node.boot.files(record.kernel.as_deref(), needs).await {
        tracing::info!(sandbox = sandbox.name, %error, "no room for more memory");
        return Ok(());
    }
    sandbox.note(|record| record.memory.max_bytes = most);
    Ok(())
}

/// Returns whether a sandbox leaves the choice of its template to the node, and has a VMM that
/// saves machines.
async fn leaves_choice(node: &Node, sandbox: &Sandbox, uid: u32) -> Result<bool> {
    if !sandbox.is_automatic() || node.config.auto_templates == 0 {
        return Ok(false);
    }
    Ok(capabilities(node, &sandbox.record(), uid).await?.saves_machines)
}

/// Has the VMM of a pod be in one of the node's control groups, not in the pod's own, if it is QEMU
/// and the settings leave the choice: kubelet's limit of a pod leaves no room for QEMU. So it is if
/// the VMM cannot be told; the start then fails at a later stage.
async fn choose_parent(node: &Node, sandbox: &Sandbox, uid: u32) {
    let record = sandbox.record();
    if node.config.pod_cgroups.is_some() || record.control_group.is_empty() {
        return;
    }
    let found = capabilities(node, &record, uid).await;
    if !found.is_ok_and(|vmm| vmm.plugs_memory) {
        sandbox.note(cgroup::leave_asked);
    }
}

/// Returns what the VMM of a sandbox can do.
///
/// # Errors
/// There is no VMM for the sandbox, or its boot files cannot be made.
async fn capabilities(node: &Node, record: &Record, uid: u32) -> Result<Capabilities> {
    let spec = vm_spec(node, record, uid, GuestMemory::new(record.memory_bytes)?).await?;
    Ok(node.hypervisor.capabilities(&spec).await?)
}

/// Returns the limits of a sandbox's VMM.
fn limits(record: &Record) -> Limits {
    Limits {
        memory_bytes: record.memory_bytes.saturating_add(record.memory.overhead_bytes),
        cpus: cgroup::cpu_time(record.cpus),
        threads: 64 + record.max_cpus + shares::threads(record),
    }
}

/// Creates the directory of the sandbox's sockets. The VMM has no rights in it, since a later
/// daemon trusts the names in it.
fn make_run_dir(dir: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let mut builder = std::fs::DirBuilder::new();
    let made = builder.recursive(true).mode(0o711).create(dir.parent().unwrap_or(dir));
    made.and_then(|()| builder.recursive(false).mode(0o700).create(dir))
        .map_err(Error::file("cannot create", dir))
}

/// Makes the memory of a sandbox, or takes it of the pool: as that of its template, if it has one,
/// or as recycled pages. A machine that is to be saved, or has room for more memory, has memory of
/// its own, with that room at its end. The socket engine and the server of shares, other processes,
/// know no memory of the pool.
async fn guest_memory(
    node: &Node,
    sandbox: &Sandbox,
    record: &Record,
    template: Option<&Template>,
) -> Result<GuestMemory> {
    let bytes = record.memory_bytes + record.memory.room();
    if let Some(template) = template {
        let (path, name) = (node.config.pool_socket(), template.memory);
        let topology = Arc::clone(&node.topology);
        let forked = move || Ok(GuestMemory::of_template(&path, bytes, name, &topology)?);
        return sandbox.lane.run(forked).await;
    }
    let alone = record.sockets.is_none() && !record.may_share() && record.saves.is_none();
    if !alone || record.memory.room() > 0 || !node.config.uses_pool()? {
        return Ok(GuestMemory::new(bytes)?);
    }
    let (path, page) = (node.config.pool_socket(), node.config.pool_page()?);
    let topology = Arc::clone(&node.topology);
    sandbox.lane.run(move || Ok(of_pool(&path, bytes, page, &topology)?)).await
}

/// Takes memory of the pool, of base pages where huge ones are not to be had.
fn of_pool(
    path: &Path,
    bytes: u64,
    page: Page,
    topology: &Topology,
) -> slipway_hypervisor::Result<GuestMemory> {
    match GuestMemory::of_pool(path, bytes, page, topology) {
        Err(HypervisorError::Pool(WireError::Refused(reason))) if page == Page::Huge => {
            tracing::warn!(reason, "no huge pages for a sandbox; it gets base pages");
            GuestMemory::of_pool(path, bytes, Page::Base, topology)
        }
        other => other,
    }
}

/// Describes the VM, without its control groups and the sockets of its functions.
async fn vm_spec(node: &Node, record: &Record, uid: u32, memory: GuestMemory) -> Result<VmSpec> {
    let boot = node.boot.files(record.kernel.as_deref(), Needs::of(record)).await?;
    let run_dir = node.run_dir(&record.id);
    Ok(VmSpec {
        name: record.name.clone(),
        memory,
        hot_memory: resize::hot_regions(record),
        shared: None,
        restore: None,
        cpus: record.boot_cpus,
        cpu_template: node.config.cpu_template()?,
        kernel: boot.kernel,
        initramfs: boot.initramfs,
        cmdline: resize::kernel_words(record),
        agent_socket: node.agent_socket(&record.id),
        vfio_user_sockets: Vec::new(),
        plug_slots: pod_functions::plug_slots(record),
        plug_cpus: record.max_cpus - record.boot_cpus,
        disks: emulated::disks(record),
        nic: emulated::interface(record),
        console_log: node.store(&record.id).console(),
        run_dir,
        credentials: Some(Credentials { uid, gid: uid }),
        cgroup_procs: Vec::new(),
        accel: accelerator(&record.accelerator)?,
    })
}

/// Parses the name of an accelerator.
///
/// # Errors
/// [`Error::Invalid`] if there is no such accelerator.
pub fn accelerator(word: &str) -> Result<AccelChoice> {
    match word {
        "" | "auto" => Ok(AccelChoice::Auto),
        "kvm" => Ok(AccelChoice::Only(Accel::Kvm)),
        "tcg" => Ok(AccelChoice::Only(Accel::Tcg)),
        "hollow" => Ok(AccelChoice::Only(Accel::Hollow)),
        _ => Err(Error::Invalid(format!("\"{word}\" is no accelerator: auto, kvm, tcg or hollow"))),
    }
}

/// Waits until the guest's agent answers. Fails when the VMM ends or the deadline passes.
async fn boot(node: &Node, sandbox: &Sandbox, vm: &dyn Vm) -> Result<(Agent, Hello)> {
    let socket = node.agent_socket(&sandbox.id);
    let deadline = Duration::from_secs(node.config.boot_timeout_s);
    let connect = async {
        match sandbox.look(|record| record.origin.is_some()) {
            // The guest was saved amid a conversation with another host.
            true => reach(node, sandbox, &socket).await,
            false => Agent::connect(&node.guests, &socket, &sandbox.bin).await,
        }
    };
    tokio::select! {
        connected = connect => match connected {
            Err(error) => Err(blame(vm, error).await),
            connected => connected,
        },
        ended = vm.wait() => Err(Error::vm_ended(&ended)),
        () = tokio::time::sleep(deadline) => Err(Error::Agent(format!(
            "the guest did not reach its agent within {} s; is the kernel one for this machine?",
            deadline.as_secs()
        ))),
    }
}

/// Configures the guest, creates the container and runs its process once `network` is configured.
/// Returns the task that carries the container's output. A pod has no container at first.
async fn container(
    sandbox: &Arc<Sandbox>,
    agent: &Agent,
    record: &Record,
    network: Option<network::Configuring>,
    log_bytes: u64,
) -> Result<Option<Carry>> {
    configure(agent, record).await?;
    if record.pod {
        if let Some(network) = network {
            network.done().await?;
        }
        return Ok(None);
    }
    let own = Target::own(Arc::clone(sandbox));
    let files = own.container.take_copies();
    let create = sandbox.look(|record| function::create_request(record, files));
    agent.check_process(create.process.as_ref())?;
    agent.call(|mut client| async move { client.create_container(create).await }).await?;
    let carrier = Carrier::attach(&own, agent, log_bytes, None).await?;
    if let Some(network) = network {
        network.done().await?;
    }
    let start = agent_v1::StartContainerRequest { id: own.container.name.clone() };
    agent.call(|mut client| async move { client.start_container(start).await }).await?;
    Ok(Some(carrier.carry(&own, agent)))
}
