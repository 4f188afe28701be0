//! The start of a sandbox, stage by stage.
//!
//! The order of the stages is the cheapest that satisfies each stage's needs. The NVMe function is
//! served before the VMM starts, so that the VMM never waits for it. Work that the guest does not
//! depend on is done while the guest boots.

mod machine;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use slipway_agent_protocol::v1 as agent_v1;
use slipway_cgroup::{Group, Limits};
use slipway_hypervisor::{FreePages, GuestMemory, Spare, Vm, VmSpec};
use slipway_plane_api::v1 as plane_v1;
use slipway_telemetry::monotonic_ns;

use self::machine::{begin_memory, choose_parent, vm_spec};
use crate::agent::{Agent, Hello};
use crate::carrier::OutputCarrier;
use crate::configure::configure;
use crate::memory::client_memory;
use crate::node::Node;
use crate::reach::reach;
use crate::record::{BootRecord, ControlGroup, Record, SandboxState, ShareServer};
use crate::running::{Carry, Running, blame, or_end};
use crate::sandbox::Sandbox;
use crate::shelf::Ahead;
use crate::snapshot::go_on::go_on;
use crate::sockets::ServedFunction;
use crate::stages::{Stages, dma_stages, guest_stages};
use crate::target::Target;
use crate::templates::Template;
use crate::{
    Error, Result, automatic, cgroup, copies, fork, function, network, oom_score, placement,
    pod_disks, pod_functions, reporting, resize, root, shares, sockets, spares,
};

pub(crate) use self::machine::{accelerator, leaves_choice};

/// A guest whose agent answers.
pub(crate) struct Booted {
    pub(crate) vm: Arc<dyn Vm>,
    pub(crate) agent: Agent,
    /// The device and inode number of the file of its memory.
    memory: (u64, u64),
    /// The template that the machine began with.
    template: Option<Arc<Template>>,
    /// The time at which the VMM ran, CLOCK_MONOTONIC.
    pub(crate) at_ns: u64,
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
        let begun = pod_functions::begin_sockets(node, sandbox, &agent);
        stages.run(sockets::STAGE, or_end(&*vm, begun)).await?;
    }
    let record = if record.plugged.own.is_some() {
        let joined = pod_functions::own::join(node, sandbox, &agent);
        stages.run("hardware", or_end(&*vm, joined)).await?;
        sandbox.record()
    } else {
        record
    };
    let log_bytes = node.config.log_bytes;
    let learning = fork::learn(node, &record, template.as_deref(), memory);
    let carried = if record.origin.is_some() {
        let gone_on = go_on(sandbox, &agent, &record, network, learning, log_bytes);
        stages.run("container", or_end(&*vm, async { gone_on.await.map(Some) })).await
    } else {
        let network = network.filter(|_| record.network.as_ref().is_some_and(|one| one.wait));
        let container = container(sandbox, &agent, &record, network, learning, log_bytes);
        stages.run("container", or_end(&*vm, container)).await
    };
    let carry = match carried {
        // A guest that answers has refused what the container asks for: its machine is sound.
        Err(error @ (Error::Agent(_) | Error::Refused(_))) if agent.hello().await.is_ok() => {
            return Err(error);
        }
        carried => trusted(node, sandbox, &template, carried).await?,
    };
    if template.is_none() {
        // A stage of the guest, such as its NVMe driver's, may not have ended at the first call.
        guest_stages(sandbox, &or_end(&*vm, agent.hello()).await?, at_ns);
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
    let (uid, ahead, spare) = match spares::take(node, sandbox) {
        Some(Ahead { spare, uid, group }) => (uid, Some(group), Some(spare)),
        None => (node.uids.claim()?, None, None),
    };
    choose_parent(node, sandbox, uid).await;
    let (taken, group) = cgroup::choose(node, sandbox, ahead);
    record_start(sandbox, uid, group).await?;
    let (template, memory) = stages.run("memory", begin_memory(node, sandbox, uid)).await?;
    if let Some(template) = &template {
        fork::note_room(sandbox, &template.manifest);
    }
    let saved_mac = template.as_ref().and_then(|template| template.manifest.mac.clone());
    sandbox.note(|record| {
        if let Some(network) = &mut record.network {
            network.begin_with(saved_mac);
        }
    });
    let boot = Boot { node, sandbox, stages, uid };
    let mut spec = boot.describe(memory, template.as_deref()).await?;
    let client = boot.note_machine(&mut spec, template.as_deref()).await?;
    let record = sandbox.record();
    spec.cgroup_procs = stages.run("cgroup", boot.confine(taken)).await?;
    let mut functions = stages.run("rootfs", describe_disks(node, sandbox, &record)).await?;
    // The guest of a template has seen no disk; those of its forks come later. That of a snapshot
    // goes on with its disks.
    let later = match template {
        Some(_) if record.origin.is_none() => functions.iter_mut().map(std::mem::take).collect(),
        _ => Vec::new(),
    };
    let run_dir = spec.run_dir.clone();
    sandbox.lane.run(move || make_run_dir(&run_dir)).await?;
    let serve = boot.serve(&record, &spec.cgroup_procs, &client, functions);
    // `_asked` is held until the VMM runs; from then on the VMM's connection keeps the function.
    let (paths, _asked) = stages.run("vf-attach", serve).await?;
    spec.vfio_user_sockets = paths;
    let vm = boot.launch(spec, spare).await?;
    let at_ns = monotonic_ns();
    let agent = match &template {
        None => boot.first_answer(&*vm, at_ns).await?,
        Some(_) => boot.resume(&*vm, &template, &record, later).await?,
    };
    dma_stages(node, stages, &record.id).await?;
    let memory = (client.device, client.inode);
    Ok(Booted { vm, agent, memory, template, at_ns })
}

/// Describes the namespaces of each of a sandbox's NVMe functions. A pod that comes back from a
/// file has those of its containers among them.
///
/// # Errors
/// The errors of [`function::describe`] and [`pod_disks::saved`].
async fn describe_disks(
    node: &Node,
    sandbox: &Sandbox,
    record: &Record,
) -> Result<Vec<Vec<plane_v1::Namespace>>> {
    let mut functions = function::describe(node, sandbox, record).await?;
    let saved = pod_disks::saved(node, sandbox, record).await?;
    if let Some(first) = functions.first_mut() {
        first.extend(saved);
    }
    Ok(functions)
}

/// Records that a sandbox starts. This is on disk before anything is started: a later daemon ends
/// processes with this user id, and a server of shares, and gives the control group back.
async fn record_start(sandbox: &Sandbox, uid: u32, group: Option<ControlGroup>) -> Result<()> {
    let recorded = sandbox.update(|record| {
        record.state = SandboxState::Starting;
        record.confinement.cgroup = group;
        record.vmm_uid = Some(uid);
        if record.begins_with_shares() {
            record.share_server = ShareServer::Starting;
        }
    });
    recorded.await
}

/// A start of a guest that is under way.
struct Boot<'a> {
    node: &'a Node,
    sandbox: &'a Arc<Sandbox>,
    stages: &'a Stages<'a>,
    /// The user of the VMM.
    uid: u32,
}

impl Boot<'_> {
    /// Describes the VM, which goes on as `template` was saved, if there is one.
    ///
    /// # Errors
    /// [`Error::Template`] if its machine is, or is to be, a template's, and its VMM saves none.
    async fn describe(&self, memory: GuestMemory, template: Option<&Template>) -> Result<VmSpec> {
        let &Self { node, sandbox, uid, .. } = self;
        let record = sandbox.record();
        let mut spec = vm_spec(node, &record, uid, memory).await?;
        let name = record.saving.as_template.as_ref().or(record.template.as_ref());
        if let Some(name) = name
            && !node.hypervisor.capabilities(&spec).await?.saves_machines
        {
            let why = "its VMM is QEMU; templates need slipway-vmm, and so KVM (`slipway doctor`)";
            return Err(Error::Template { name: name.clone(), why: why.to_owned() });
        }
        spec.restore = template.map(|template| Arc::clone(&template.machine));
        if template.is_some_and(|template| template.manifest.shape.reports()) {
            spec.free_pages = FreePages::Kept;
        }
        Ok(spec)
    }

    /// Gives a VM that boots its shared root, if the node shares roots, and the device that free
    /// pages are reported to, if they are wanted back. A fork has that device if its template has
    /// it. Notes the machine in the sandbox's record. Returns the guest's memory as the servers of
    /// its functions know it.
    async fn note_machine(
        &self,
        spec: &mut VmSpec,
        template: Option<&Template>,
    ) -> Result<plane_v1::ClientMemory> {
        let &Self { node, sandbox, stages, .. } = self;
        let record = sandbox.record();
        let begins = template.map(|template| template.manifest.shape.reports());
        match reporting::not_wanted(&record, begins, node.config.free_page_reporting) {
            Some(why) => reporting::note(sandbox, why),
            None => stages.run("reporting", reporting::offer(node, sandbox, spec)).await?,
        }
        // Behind that stage, whose initramfs has the guest's driver: a snapshot names its files.
        let booted = boot_record(spec, template);
        let may_share = !record.pod && record.plugged.own.is_none();
        if record.has_own_machine() && may_share && node.config.shares_roots()? {
            stages.run("shared-root", root::share(node, sandbox, spec)).await?;
        }
        let client = client_memory(spec)?;
        resize::check_vmm(node, &record, spec).await?;
        let overhead = node.hypervisor.overhead(spec).await? + shares::memory(&record);
        sandbox.note(|record| {
            record.booted = Some(booted);
            record.plugged.client_memory = Some((&client).into());
            record.memory.overhead_bytes = overhead;
        });
        Ok(client)
    }

    /// Makes the VMM's control group, or takes the one of the pool. Returns the files by which
    /// processes enter it.
    async fn confine(&self, taken: Option<Group>) -> Result<Vec<PathBuf>> {
        let limits = self.sandbox.look(limits);
        let files = cgroup::prepare(self.node, self.sandbox, taken, limits).await?;
        match placement::apply(self.sandbox).await? {
            // Version 1 has CPU sets in a hierarchy of their own.
            true => Ok(cgroup::procs_files(self.sandbox).await),
            false => Ok(files),
        }
    }

    /// Has all functions of the VM served. Returns their sockets in the order of the bus, and the
    /// socket function, which ends when it is dropped before the VMM has connected to it.
    async fn serve(
        &self,
        record: &Record,
        cgroup_procs: &[PathBuf],
        client: &plane_v1::ClientMemory,
        functions: Vec<Vec<plane_v1::Namespace>>,
    ) -> Result<(Vec<PathBuf>, Option<ServedFunction>)> {
        let &Self { node, sandbox, uid, .. } = self;
        // The plane opens disks for one, and waits for the reactor of a switch for the other. Both
        // end before this returns, also if one fails: what is made is released then.
        let (disks, interfaces) = tokio::join!(
            function::serve(node, record, uid, client, functions),
            network::serve(node, sandbox, uid, client),
        );
        let mut paths = disks?;
        paths.extend(interfaces?);
        let asked = sockets::serve(node, record, uid, client).await?;
        paths.extend(asked.as_ref().map(|asked| asked.socket.clone()));
        paths.extend(shares::serve(node, sandbox, cgroup_procs, client).await?);
        Ok((paths, asked))
    }

    /// Starts the VMM, or has the one that was started ahead run the VM, and records it.
    ///
    /// # Errors
    /// Those of the VMM, of its placement and of saving the record; [`Error::Stopped`] if the
    /// sandbox is being stopped.
    async fn launch(&self, spec: VmSpec, spare: Option<Spare>) -> Result<Arc<dyn Vm>> {
        let &Self { node, sandbox, stages, .. } = self;
        let launched = stages.run("vmm", spares::launch(node, spare, &spec)).await;
        if sandbox.look(|record| record.saving.is_for_template()) {
            sandbox.hold_memory(Some(spec.memory.clone()));
        }
        // If the VMM has ended already, this drops the last reference to the guest's memory, which
        // takes a while.
        sandbox.bin.discard_value(spec);
        let vm: Arc<dyn Vm> = launched?;
        if node.keeps {
            vm.detach();
        }
        sandbox.set_vm(Some(Arc::clone(&vm)));
        sandbox.update(|record| record.vm = Some(vm.record())).await?;
        placement::apply(sandbox).await?;
        oom_score::apply(node, sandbox).await;
        if sandbox.is_stopping() {
            return Err(Error::Stopped);
        }
        Ok(vm)
    }

    /// Waits until a guest that boots since `at_ns` has its agent.
    async fn first_answer(&self, vm: &dyn Vm, at_ns: u64) -> Result<Agent> {
        let &Self { node, sandbox, .. } = self;
        sandbox.enter("kernel");
        let booted = boot(node, sandbox, vm).await;
        let (agent, hello) = booted.inspect_err(|error| {
            sandbox.trace_stage("kernel", (at_ns, monotonic_ns()), Some(error));
        })?;
        guest_stages(sandbox, &hello, at_ns);
        Ok(agent)
    }

    /// Waits until the agent of a template's or a snapshot's guest answers, and gives the guest the
    /// disks that come `later`.
    async fn resume(
        &self,
        vm: &dyn Vm,
        template: &Option<Arc<Template>>,
        record: &Record,
        later: Vec<Vec<plane_v1::Namespace>>,
    ) -> Result<Agent> {
        let &Self { node, sandbox, stages, .. } = self;
        // The guest looks at its disks once it has answered.
        let resumed = stages.run("resume", boot(node, sandbox, vm)).await;
        let (agent, _) = trusted(node, sandbox, template, resumed).await?;
        or_end(vm, fork::check_memory(record, vm)).await?;
        let disks = function::ids(record).collect::<Vec<_>>().into_iter().zip(later);
        stages.run("disks", fork::attach(node, disks)).await?;
        if record.forks_with_shares() {
            stages.run("shares", or_end(vm, shares::add(node, sandbox))).await?;
            oom_score::apply(node, sandbox).await;
        }
        Ok(agent)
    }
}

/// Returns the files that the guest of a VM boots, or that the guest of its template has booted.
fn boot_record(spec: &VmSpec, template: Option<&Template>) -> BootRecord {
    match template {
        Some(template) => template.manifest.shape.booted(),
        None => BootRecord {
            kernel: spec.kernel.clone(),
            initramfs: spec.initramfs.clone(),
            cpu_template: spec.cpu_template.to_string(),
            reporting: spec.free_pages != FreePages::Unreported,
        },
    }
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

/// Returns the limits of a sandbox's VMM.
fn limits(record: &Record) -> Limits {
    Limits {
        memory_bytes: record.memory_bytes.saturating_add(record.memory.overhead_bytes),
        cpus: cgroup::cpu_time(record.cpus.count),
        threads: 64 + record.cpus.max + shares::threads(record),
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

/// Configures the guest, creates the container and runs its process once `network` is configured
/// and `learning` has ended. Returns the task that carries the container's output. A pod has no
/// container at first.
async fn container(
    sandbox: &Arc<Sandbox>,
    agent: &Agent,
    record: &Record,
    network: Option<network::Configuring>,
    learning: impl Future<Output = ()>,
    log_bytes: u64,
) -> Result<Option<Carry>> {
    configure(agent, record).await?;
    if record.pod {
        if let Some(network) = network {
            network.done().await?;
        }
        learning.await;
        return Ok(None);
    }
    let own = Target::own(Arc::clone(sandbox));
    let its = own.container.take_copies();
    let create = sandbox.look(|record| function::create_request(record, its));
    agent.check_container(&create)?;
    copies::create(agent, create).await?;
    let carrier = OutputCarrier::attach(&own, agent, log_bytes, None).await?;
    if let Some(network) = network {
        network.done().await?;
    }
    learning.await;
    let start = agent_v1::StartContainerRequest { id: own.container.name.clone() };
    agent.call(|mut client| async move { client.start_container(start).await }).await?;
    Ok(Some(carrier.carry(&own, agent)))
}
