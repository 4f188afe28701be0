//! The start of a sandbox, stage by stage, and its end.
//!
//! The order of the stages is the cheapest that satisfies each stage's needs. The NVMe function is
//! served before the VMM starts, so that the VMM never waits for it. Work that the guest does not
//! depend on is done while the guest boots.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use slipway_agent_protocol::v1 as agent_v1;
use slipway_hypervisor::{Accel, AccelChoice, Credentials, GuestMemory, Vm, VmSpec};
use slipway_plane_api::v1 as plane_v1;
use slipway_telemetry::monotonic_ns;

use crate::agent::{Agent, Hello, process};
use crate::cgroup::{Cgroup, Limits};
use crate::error::MOST_MESSAGE;
use crate::lock::lock;
use crate::node::Node;
use crate::record::{Record, State};
use crate::sandbox::Sandbox;
use crate::time::realtime_ns;
use crate::{Error, Result, function, log, name, network, sockets, stdio};

/// Host memory that a VMM needs beside its guest's memory: QEMU's own, the translator's cache under
/// software emulation, page tables.
const VMM_OVERHEAD_BYTES: u64 = 768 << 20;
/// Guest memory that a VMM may have mapped at two addresses at once while it rearranges mappings.
const MAPPED_TWICE_BYTES: u64 = 16 << 20;
/// The name of the only container of a sandbox. The agent's protocol allows several.
pub(crate) const CONTAINER: &str = "main";

/// How long a command that lost its daemon tries to reach the next one.
pub const RETURN: Duration = Duration::from_secs(30);

/// Runs a sandbox from its start to its end. The record tells how it ended.
pub async fn live(node: Arc<Node>, sandbox: Arc<Sandbox>) {
    let ended = match start(&node, &sandbox).await {
        Ok(running) => running.wait(&sandbox).await,
        Err(error) => Err(sockets::blame(&sandbox.record(), error).await),
    };
    end_life(&node, &sandbox, ended).await;
    remove_ended(&node, &sandbox).await;
}

/// Runs an adopted sandbox, which outlived its daemon, to its end.
pub async fn live_on(node: Arc<Node>, sandbox: Arc<Sandbox>, running: Running) {
    let ended = running.wait(&sandbox).await;
    end_life(&node, &sandbox, ended).await;
    remove_later(node, sandbox).await;
}

/// Removes an ended sandbox if it is to be removed. Before that, clients that lost the sandbox with
/// the earlier daemon get [`RETURN`] to come back for its output and its exit status.
pub async fn remove_later(node: Arc<Node>, sandbox: Arc<Sandbox>) {
    if sandbox.record().remove {
        tokio::time::sleep(RETURN.saturating_sub(node.age())).await;
        remove_ended(&node, &sandbox).await;
    }
}

async fn remove_ended(node: &Node, sandbox: &Sandbox) {
    if sandbox.record().remove {
        match node.remove(&sandbox.id, false).await {
            // Another call removed the sandbox first.
            Err(Error::NoSandbox(_)) => {}
            removed => note(sandbox, removed),
        }
    }
}

async fn end_life(node: &Node, sandbox: &Sandbox, ended: Result<u32>) {
    let stopping = sandbox.update(|record| record.state = State::Stopping).await;
    note(sandbox, stopping);
    sandbox.set_agent(None);
    let released = release(node, sandbox).await;
    note(sandbox, released);
    let finished = sandbox.update(|record| finish(record, ended, sandbox.is_stopping())).await;
    note(sandbox, finished);
    sandbox.fanout.close();
    node.settled();
}

/// Logs a failure while a sandbox ends. Such a failure must not keep the rest of the sandbox from
/// being released.
fn note(sandbox: &Sandbox, outcome: Result<()>) {
    if let Err(error) = outcome {
        tracing::warn!(sandbox = sandbox.name, %error, "while it ended");
    }
}

fn finish(record: &mut Record, ended: Result<u32>, stopped: bool) {
    record.vm = None;
    record.vmm_uid = None;
    match ended {
        Ok(status) => {
            record.state = State::Exited;
            record.exit_status = Some(status);
        }
        Err(_) if stopped => {
            record.state = State::Exited;
            record.exit_status = Some(128 + libc::SIGKILL as u32);
            record.reason = "killed".to_owned();
        }
        Err(error) => {
            record.state = State::Failed;
            record.exit_status = Some(exit_status_of(&error));
            // The message may contain text of a VMM's or an engine's beside ours.
            record.reason = slipway_printable::line(&error.to_string(), MOST_MESSAGE);
        }
    }
}

/// Returns the exit status that container runtimes use when the container has none of its own: 125,
/// and as in a shell 127 for a program that was not found and 126 for one that cannot be executed.
fn exit_status_of(error: &Error) -> u32 {
    match error {
        Error::Exec { status, .. } => *status,
        Error::VmEnded(_) => 128 + libc::SIGKILL as u32,
        _ => 125,
    }
}

/// A sandbox whose container runs.
pub struct Running {
    vm: Arc<dyn Vm>,
    agent: Agent,
    carry: tokio::task::JoinHandle<Result<()>>,
}

impl Running {
    /// Makes the handle; `carry` is the task that carries the container's output.
    pub fn new(vm: Arc<dyn Vm>, agent: Agent, carry: tokio::task::JoinHandle<Result<()>>) -> Self {
        Self { vm, agent, carry }
    }

    /// Waits for the container's end and returns its exit status.
    async fn wait(self, sandbox: &Sandbox) -> Result<u32> {
        let ended = tokio::select! {
            ended = self.agent.wait(process(CONTAINER, "")) => match ended {
                Ok(ended) => ended,
                Err(error) => return Err(blame(&*self.vm, error).await),
            },
            ended = self.vm.wait() => return Err(Error::vm_ended(&ended)),
        };
        // The container's output was sent completely by now; let it reach the log and attached
        // clients.
        let carried = tokio::time::timeout(Duration::from_secs(60), self.carry).await;
        if !matches!(carried, Ok(Ok(Ok(())))) {
            tracing::warn!(sandbox = sandbox.name, "output may be cut: {carried:?}");
        }
        // The exit status is recorded before the agent ends, since only the agent knows it, too.
        let recorded = sandbox.update(|record| {
            record.exit_status = Some(ended.status);
            if ended.out_of_memory {
                let killed = "the guest ran out of memory; `--memory` gives it more";
                killed.clone_into(&mut record.reason);
            }
        });
        recorded.await?;
        shut_down(&self.agent, &*self.vm).await;
        Ok(ended.status)
    }
}

/// Returns the better explanation of a failed call of the agent. The agent's port breaks a moment
/// before the VMM is known to have ended, and then the VMM's last message tells more.
async fn blame(vm: &dyn Vm, error: Error) -> Error {
    match tokio::time::timeout(Duration::from_secs(3), vm.wait()).await {
        Ok(ended) => Error::vm_ended(&ended),
        Err(_) => error,
    }
}

/// Waits for an answer of the agent, or for the end of the VMM, after which there will be none.
async fn or_end<T>(vm: &dyn Vm, asked: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::select! {
        outcome = asked => match outcome {
            Err(error @ Error::Agent(_)) => Err(blame(vm, error).await),
            outcome => outcome,
        },
        ended = vm.wait() => Err(Error::vm_ended(&ended)),
    }
}

/// Asks the guest to write back its volumes and power off, then kills the VMM.
async fn shut_down(agent: &Agent, vm: &dyn Vm) {
    let asked =
        agent.call(|mut client| async move { client.shutdown(agent_v1::ShutdownRequest {}).await });
    // The guest powers off within a moment; the VMM is killed soon after in any case.
    let gone = tokio::time::timeout(Duration::from_secs(10), async {
        tokio::select! { _ = asked => {} _ = vm.wait() => return }
        let _ = tokio::time::timeout(Duration::from_millis(300), vm.wait()).await;
    });
    let _ = gone.await;
    end(vm).await;
}

/// Kills the VMM and waits until it is reaped. Returns `false` if it is not reaped in time.
async fn end(vm: &dyn Vm) -> bool {
    if let Err(error) = vm.kill() {
        tracing::warn!(%error, "the VMM could not be killed");
    }
    tokio::time::timeout(Duration::from_secs(10), vm.wait()).await.is_ok()
}

/// The recorder of stages on the sandbox's timeline.
struct Stages<'a> {
    sandbox: &'a Sandbox,
}

impl Stages<'_> {
    /// Runs one stage. Returns [`Error::Stopped`] instead if the sandbox is being stopped.
    async fn run<T>(
        &self,
        name: &'static str,
        stage: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        if self.sandbox.is_stopping() {
            return Err(Error::Stopped);
        }
        self.sandbox.enter(name);
        let start = monotonic_ns();
        let outcome = stage.await;
        self.record(name, start, monotonic_ns());
        outcome
    }

    /// Records a stage in memory; the record's next update saves it.
    fn record(&self, name: &'static str, start_ns: u64, end_ns: u64) {
        self.sandbox.note(|record| record.timeline.record(name, start_ns, end_ns));
    }
}

async fn start(node: &Node, sandbox: &Arc<Sandbox>) -> Result<Running> {
    let stages = Stages { sandbox };
    let uid = node.claim_uid()?;
    // The user id is saved before anything is started: a later daemon ends processes with this user
    // id.
    let recorded = sandbox.update(|record| {
        record.state = State::Starting;
        record.vmm_uid = Some(uid);
    });
    recorded.await?;
    let record = sandbox.record();
    let run_dir = node.run_dir(&record.id);
    let (id, limits) = (record.id.clone(), limits(&record));
    let cgroup = sandbox.lane.run(move || {
        let cgroup = Cgroup::of(&id);
        cgroup.create(limits).map(|()| cgroup)
    });
    let cgroup = stages.run("cgroup", cgroup).await?;
    let functions = stages.run("rootfs", function::describe(node, sandbox, &record)).await?;
    sandbox.lane.run(move || make_run_dir(&run_dir)).await?;
    let memory = GuestMemory::new(record.memory_bytes)?;
    let attach = async {
        let mut paths = function::serve(node, &record, uid, &memory, functions).await?;
        paths.extend(network::serve(node, &record, uid, &memory).await?);
        let asked = sockets::serve(node, &record, uid, &memory).await?;
        paths.extend(asked.as_ref().map(|asked| asked.socket.clone()));
        Ok((paths, asked))
    };
    // `_asked` is held until the VMM runs; from then on the VMM's connection keeps the function.
    let (paths, _asked) = stages.run("vf-attach", attach).await?;
    let spec = vm_spec(node, &record, uid, &cgroup, memory.clone(), paths).await?;
    let launched = {
        let launch = async { Ok(Arc::from(node.hypervisor.launch(&spec).await?)) };
        stages.run("vmm", launch).await
    };
    // If the VMM has ended already, this drops the last reference to the guest's memory, which
    // takes a while.
    sandbox.bin.discard_value((spec, memory));
    let vm: Arc<dyn Vm> = launched?;
    if node.keeps {
        vm.detach();
    }
    sandbox.set_vm(Some(Arc::clone(&vm)));
    sandbox.update(|record| record.vm = Some(vm.record().clone())).await?;
    if sandbox.is_stopping() {
        return Err(Error::Stopped);
    }
    let booted = monotonic_ns();
    sandbox.enter("kernel");
    let (agent, hello) = boot(node, sandbox, &*vm).await?;
    guest_stages(sandbox, &hello, booted);
    dma_stages(node, &stages, &record.id).await?;
    let network = network::begin(sandbox, &agent, &record);
    if record.sockets.is_some() {
        stages.run(sockets::STAGE, or_end(&*vm, sockets::start(&agent))).await?;
    }
    let container = container(sandbox, &agent, &record, network, node.config.log_bytes);
    let carry = stages.run("container", or_end(&*vm, container)).await?;
    // A stage of the guest, such as its NVMe driver's, may not have ended at the first call.
    guest_stages(sandbox, &or_end(&*vm, agent.hello()).await?, booted);
    sandbox.set_agent(Some(agent.clone()));
    sandbox.update(|record| record.state = State::Running).await?;
    Ok(Running { vm, agent, carry })
}

fn limits(record: &Record) -> Limits {
    Limits {
        memory_bytes: record.memory_bytes + VMM_OVERHEAD_BYTES,
        // One CPU more is for the VMM's own threads: the VMM must answer while the guest computes.
        cpus: record.cpus + 1,
        threads: 64 + record.cpus,
    }
}

/// Returns the memory that a client of a function may pass: this guest's memory only. Otherwise a
/// VMM could pass file after file, and the servers of the function would be charged for the pages
/// that they touch.
pub(crate) fn client_memory(memory: &GuestMemory) -> Result<plane_v1::ClientMemory> {
    let (device, inode) = memory.identity()?;
    let limit_bytes = memory.bytes() + MAPPED_TWICE_BYTES;
    Ok(plane_v1::ClientMemory { limit_bytes, device, inode })
}

/// Returns the path of the socket that leads to the agent's port.
pub fn agent_socket(run_dir: &Path) -> PathBuf {
    run_dir.join("agent.sock")
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

async fn vm_spec(
    node: &Node,
    record: &Record,
    uid: u32,
    cgroup: &Cgroup,
    memory: GuestMemory,
    vfio_user_sockets: Vec<PathBuf>,
) -> Result<VmSpec> {
    let boot = node.boot.files(record.kernel.as_deref(), record.sockets.is_some()).await?;
    let run_dir = node.run_dir(&record.id);
    Ok(VmSpec {
        name: record.name.clone(),
        memory,
        cpus: record.cpus,
        kernel: boot.kernel,
        initramfs: boot.initramfs,
        cmdline: Vec::new(),
        agent_socket: agent_socket(&run_dir),
        vfio_user_sockets,
        disks: function::emulated(record),
        console_log: node.store(&record.id).console(),
        run_dir,
        credentials: Some(Credentials { uid, gid: uid }),
        cgroup_procs: cgroup.procs_files(),
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
        _ => Err(Error::Invalid(format!("\"{word}\" is no accelerator: auto, kvm or tcg"))),
    }
}

/// Waits until the guest's agent answers. Fails when the VMM ends or the deadline passes.
async fn boot(node: &Node, sandbox: &Sandbox, vm: &dyn Vm) -> Result<(Agent, Hello)> {
    let socket = agent_socket(&node.run_dir(&sandbox.id));
    let deadline = Duration::from_secs(node.config.boot_timeout_s);
    tokio::select! {
        connected = Agent::connect(&node.guests, &socket, &sandbox.bin) => match connected {
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

/// Records the stages that the guest measured, on the host's clock. The kernel's stage begins when
/// the VMM runs, since the kernel's own clock begins only after the loader. The agent's stage ends
/// when the host has its answer. The network's stage is left out: the code that waits for the
/// network records it.
fn guest_stages(sandbox: &Sandbox, hello: &Hello, booted: u64) {
    sandbox.note(|record| {
        for stage in hello.stages.iter().filter(|stage| stage.name != network::STAGE) {
            let (start, end) = match stage.name {
                "kernel" => (booted.min(stage.start_ns), stage.end_ns),
                "agent" => (stage.start_ns, hello.at_ns),
                _ => (stage.start_ns, stage.end_ns),
            };
            if record.timeline.stage(stage.name).is_none() {
                record.timeline.record(stage.name, start, end);
            }
        }
    });
}

/// Records how long the plane took to map the guest's memory, by the plane's own clock. The image
/// is a backend of the function and is never mapped for DMA: its stage is empty by design, and is
/// recorded so that a comparison with FastIOV's figure shows it.
async fn dma_stages(node: &Node, stages: &Stages<'_>, id: &str) -> Result<()> {
    let request = plane_v1::GetEndpointRequest { id: id.to_owned() };
    let reply = node.plane.clone().get_endpoint(request).await;
    let endpoint = reply.map_err(|status| Error::Plane(status.message().to_owned()))?.into_inner();
    let Some(times) = endpoint.times else { return Ok(()) };
    if times.client_attached_ns > 0 {
        stages.record("vf-attach", times.client_connected_ns, times.client_attached_ns);
    }
    let start = times.first_dma_map_ns;
    stages.record("dma-ram", start, start.saturating_add(times.dma_map_total_ns));
    stages.record("dma-image", start, start);
    Ok(())
}

/// Creates the container and runs its process. Returns the task that carries its output.
async fn container(
    sandbox: &Arc<Sandbox>,
    agent: &Agent,
    record: &Record,
    network: Option<network::Configuring>,
    log_bytes: u64,
) -> Result<tokio::task::JoinHandle<Result<()>>> {
    let configure = agent_v1::ConfigureRequest {
        hostname: record.hostname.clone(),
        realtime_ns: realtime_ns(),
        entropy: (0..4).flat_map(|_| name::random().to_ne_bytes()).collect(),
    };
    agent.call(|mut client| async move { client.configure(configure).await }).await?;
    let create = function::create_request(record);
    agent.call(|mut client| async move { client.create_container(create).await }).await?;
    let ended = || Error::Agent("its input was taken already".to_owned());
    let input = lock(&sandbox.input_end).take().ok_or_else(ended)?;
    let (output, _) = stdio::resume(agent, process(CONTAINER, ""), 0, input).await?;
    let path = sandbox.store.log();
    let opened = sandbox.lane.run(move || {
        log::Writer::open(&path, log_bytes).map_err(Error::file("cannot write", &path))
    });
    let writer = opened.await?;
    if let Some(network) = network.filter(|_| record.network.as_ref().is_some_and(|one| one.wait)) {
        network.done().await?;
    }
    let start = agent_v1::StartContainerRequest { id: CONTAINER.to_owned() };
    agent.call(|mut client| async move { client.start_container(start).await }).await?;
    let (carried, agent, container) = (Arc::clone(sandbox), agent.clone(), process(CONTAINER, ""));
    let lane = sandbox.lane.clone();
    let carry = async move { carried.fanout.carry(agent, container, output, writer, lane).await };
    Ok(tokio::spawn(carry))
}

/// Converts a process of the record to the agent's form.
pub fn process_spec(process: &crate::record::Process) -> agent_v1::ProcessSpec {
    let limits = process.limits.iter().map(|(name, soft, hard)| agent_v1::ResourceLimit {
        name: name.clone(),
        soft: *soft,
        hard: *hard,
    });
    agent_v1::ProcessSpec {
        args: process.args.clone(),
        env: process.env.clone(),
        cwd: process.cwd.clone(),
        user: process.user.clone(),
        terminal: process.terminal,
        rows: process.rows,
        columns: process.columns,
        stdin: process.stdin,
        limits: limits.collect(),
    }
}

/// Ends the VMM of a sandbox that another daemon started. The daemon may not have recorded the
/// VMM's process, but it recorded the user id before the start, and only this sandbox uses that id.
/// Returns whether no process is left.
async fn end_leftover(record: &Record, run_dir: PathBuf) -> bool {
    const PATIENCE: Duration = Duration::from_secs(5);
    let (vm, uid, name) = (record.vm.clone(), record.vmm_uid, record.name.clone());
    let cgroup = crate::cgroup::name(&record.id);
    let ended = tokio::task::spawn_blocking(move || {
        if let Some(Err(error)) = vm.map(|vm| slipway_hypervisor::reap_leftover(&vm, PATIENCE)) {
            tracing::warn!(sandbox = name, %error, "its VMM may still run");
        }
        uid.is_none_or(|uid| {
            let owned = crate::proc::Owned { uid, run_dir: &run_dir, cgroup: &cgroup };
            crate::proc::kill_all(&owned, PATIENCE)
        })
    });
    let ended = ended.await.unwrap_or(false);
    if !ended {
        tracing::warn!(sandbox = record.name, "a process of its is left");
    }
    ended
}

/// Removes the control groups. They empty a moment after their last process was reaped, so the
/// removal is retried.
async fn remove_cgroup(sandbox: &Sandbox) -> Result<()> {
    const TRIES: u32 = 100;
    const AGAIN: Duration = Duration::from_millis(10);
    let mut tries = 1;
    loop {
        let id = sandbox.id.clone();
        match sandbox.lane.run(move || Cgroup::of(&id).remove()).await {
            Err(_) if tries < TRIES => tries += 1,
            removed => return removed,
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Releases everything that a live sandbox holds on the host. Missing resources are no error, so
/// this also cleans up after a daemon that was killed.
///
/// # Errors
/// The first failure. The remaining resources are released even so.
pub async fn release(node: &Node, sandbox: &Sandbox) -> Result<()> {
    let record = sandbox.record();
    let ended = if let Some(vm) = sandbox.vm() {
        sandbox.set_vm(None);
        end(&*vm).await
    } else {
        end_leftover(&record, node.run_dir(&record.id)).await
    };
    let endpoint = function::remove(node, &record).await;
    let network = network::release(node, &record).await;
    let run_dir = node.run_dir(&record.id);
    let dir = sandbox.lane.run(move || match std::fs::remove_dir_all(&run_dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::file("cannot remove", &run_dir)(error))
        }
        _ => Ok(()),
    });
    let dir = dir.await;
    let cgroup = remove_cgroup(sandbox).await;
    // The user id is free again only if no process has it: two sandboxes must never share one.
    if let Some(uid) = record.vmm_uid.filter(|_| ended) {
        node.return_uid(uid);
    }
    endpoint.and(network).and(dir).and(cgroup)
}
