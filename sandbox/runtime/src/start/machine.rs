//! The machine of a sandbox that is about to start: its memory, and the description of its VM.

use std::path::Path;
use std::sync::Arc;

use slipway_hypervisor::{
    AccelChoice, Capabilities, Credentials, Error as HypervisorError, FreePages, GuestMemory, Page,
    Topology, VmSpec, WireError,
};

use crate::memory::of_host;
use crate::node::Node;
use crate::record::{Needs, Record};
use crate::sandbox::Sandbox;
use crate::templates::{Choice, Template};
use crate::{Error, Result, automatic, cgroup, emulated, fork, pod_functions, resize};

/// Finds the template that a sandbox begins with, if any, and makes the sandbox's memory. A sandbox
/// for which the node chose the template boots if it cannot have that memory.
pub(super) async fn begin_memory(
    node: &Node,
    sandbox: &Sandbox,
    uid: u32,
) -> Result<(Option<Arc<Template>>, GuestMemory)> {
    give_room(node, sandbox, uid).await?;
    if let Some(template) = choose(node, sandbox, uid).await? {
        match guest_memory(node, sandbox, &sandbox.record(), Some(&template)).await {
            Ok(memory) => return Ok((Some(template), memory)),
            Err(error) => automatic::decline(sandbox, &error),
        }
    }
    let template = fork::template(node, sandbox).await?;
    let memory = guest_memory(node, sandbox, &sandbox.record(), template.as_deref()).await?;
    Ok((template, memory))
}

/// Returns the template that the node chooses for a sandbox. Returns `None` if the sandbox boots,
/// with the reason in its record, or if it leaves no choice.
///
/// # Errors
/// There is no VMM for the sandbox, or its boot files cannot be made.
async fn choose(node: &Node, sandbox: &Sandbox, uid: u32) -> Result<Option<Arc<Template>>> {
    if sandbox.choice() == Choice::Request {
        return Ok(None);
    }
    if !leaves_choice(node, sandbox, uid).await? {
        automatic::boots(sandbox, "its VMM is QEMU, or the node makes no templates");
        return Ok(None);
    }
    automatic::choose(node, sandbox).await
}

/// Gives a pod that boots, and names no most memory, the room for more that the node's settings
/// give to pods, if its VMM and its kernel can add memory. A fork asks for its template's room.
///
/// # Errors
/// There is no VMM for the pod, or its boot files cannot be made.
async fn give_room(node: &Node, sandbox: &Sandbox, uid: u32) -> Result<()> {
    let record = sandbox.record();
    let most = resize::of_pod(record.memory_bytes, node.config.pod_max_memory_percent, of_host());
    let may_fork = sandbox.choice() != Choice::Request;
    if most == record.memory_bytes || may_fork || !resize::takes_room(&record) {
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
/// saves machines. `uid` is the VMM's user; any of the node's does if none is to start.
///
/// # Errors
/// There is no VMM for the sandbox, or its boot files cannot be made.
pub(crate) async fn leaves_choice(node: &Node, sandbox: &Sandbox, uid: u32) -> Result<bool> {
    if sandbox.choice() == Choice::Request || node.config.auto_templates == 0 {
        return Ok(false);
    }
    Ok(capabilities(node, &sandbox.record(), uid).await?.saves_machines)
}

/// Chooses the parent of a pod's control group. If the settings leave the choice and the pod's VMM
/// is QEMU, the VMM gets a group of the node's own in place of the pod's: kubelet's limit of a pod
/// leaves no room for QEMU. If the VMM cannot be found, it gets a group of the node's own as well;
/// the start then fails at a later stage.
pub(super) async fn choose_parent(node: &Node, sandbox: &Sandbox, uid: u32) {
    let record = sandbox.record();
    if node.config.pod_cgroups.is_some() || !record.confinement.asks_for_group() {
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
    let spec = vm_spec(node, record, uid, GuestMemory::new(record.memory_file_bytes())?).await?;
    Ok(node.hypervisor.capabilities(&spec).await?)
}

/// Makes the memory of a sandbox, or takes it of the pool: as that of its template, if it has one,
/// or as recycled pages. A machine that boots and is to be saved, or has room for more memory, has
/// memory of its own. The room is at the end of the memory, also at that of a template. The socket
/// engine and the server of shares, other processes, know no memory of the pool.
async fn guest_memory(
    node: &Node,
    sandbox: &Sandbox,
    record: &Record,
    template: Option<&Template>,
) -> Result<GuestMemory> {
    let bytes = record.memory_file_bytes();
    if let Some(template) = template {
        let (path, name) = (node.config.pool_socket(), template.memory);
        let topology = Arc::clone(&node.topology);
        let forked = move || Ok(GuestMemory::of_template(&path, bytes, name, &topology)?);
        return sandbox.lane.run(forked).await;
    }
    let alone = record.sockets.is_none() && !record.may_share() && !record.saving.is_for_template();
    if !alone || record.hot_bytes() > 0 || !node.config.uses_pool()? {
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
pub(super) async fn vm_spec(
    node: &Node,
    record: &Record,
    uid: u32,
    memory: GuestMemory,
) -> Result<VmSpec> {
    let boot = node.boot.files(record.kernel.as_deref(), Needs::of(record)).await?;
    let run_dir = node.run_dir(&record.id);
    Ok(VmSpec {
        name: record.name.clone(),
        memory,
        hot_memory: resize::hot_regions(record),
        free_pages: FreePages::Unreported,
        shared: None,
        restore: None,
        cpus: record.cpus.boot,
        cpu_template: node.config.cpu_template()?,
        kernel: boot.kernel,
        initramfs: boot.initramfs,
        cmdline: resize::kernel_words(record),
        agent_socket: node.agent_socket(&record.id),
        vfio_user_sockets: Vec::new(),
        plug_slots: pod_functions::plug_slots(record),
        plug_cpus: record.cpus.max - record.cpus.boot,
        disks: emulated::disks(record),
        nic: emulated::interface(record),
        assigned: emulated::assigned(record),
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
pub(crate) fn accelerator(word: &str) -> Result<AccelChoice> {
    word.parse().map_err(Error::Invalid)
}
