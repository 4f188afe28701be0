//! Saving a machine as a template: the machine of a pod without containers is saved, and ends.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use slipway_agent_protocol::v1::PrepareRequest;
use slipway_agent_protocol::v1::agent_client::AgentClient;
use slipway_hypervisor::GuestMemory;
use slipway_telemetry::trace::Call;

use crate::node::Node;
use crate::record::Needs;
use crate::running::or_end;
use crate::sandbox::Sandbox;
use crate::stages::Stages;
use crate::start::{Booted, boot_guest};
use crate::templates::pages::copy_pages;
use crate::templates::{Boots, Manifest, Saved, Shape, Unfinished, apart, create_file, digest};
use crate::{Error, Result, function, name, v1};

/// A template that is to be made.
pub(crate) struct Saves {
    /// Its name.
    pub name: String,
    /// The MTU of its interface, which is in no network; 0 if the interface is in the network that
    /// the machine names, or there is none.
    pub mtu: u32,
    /// Set if it has room for socket functions of its forks.
    pub socket_room: bool,
}

/// Makes a template of a machine, which is described as a pod's. Returns when that is done.
///
/// # Errors
/// [`Error::Template`] if the machine has ended without it, with the reason; those of
/// [`Node::create`].
pub(crate) async fn make(node: &Arc<Node>, saves: Saves, machine: v1::RunSpec) -> Result<Manifest> {
    let spec = v1::RunSpec {
        name: format!("template-{}", name::new_id()),
        makes_pod: true,
        remove: true,
        detach: true,
        ..machine
    };
    let name = saves.name.clone();
    let sandbox = node.create_saving(&spec, Some(saves)).await?;
    let output = sandbox.own.fanout.attach(&sandbox.name);
    node.start(&sandbox, Call::default());
    sandbox.wait_state(|state| !state.is_live()).await;
    // The output, of which there is none, is closed once the sandbox is removed.
    if let Ok(mut output) = output {
        while output.recv().await.is_some() {}
    }
    let (created_ns, why) = sandbox.look(|record| (record.created_ns, record.run.reason.clone()));
    // Even if it was stopped a moment later.
    let is_ours = |one: &Manifest| one.name == name && one.created_ns >= created_ns;
    let made = node.templates.list().await.into_iter().find(is_ours);
    made.ok_or_else(|| Error::Template { name, why: format!("it was not saved: {why}") })
}

/// Boots the sandbox's guest, waits until its drivers are in place, and saves its machine as the
/// template `name`. The caller ends the sandbox.
///
/// # Errors
/// The error of the first step that failed. Nothing of a template is left then.
pub(crate) async fn template(node: &Node, sandbox: &Arc<Sandbox>, name: &str) -> Result<()> {
    let stages = Stages::of(sandbox);
    let unfinished = node.templates.begin(name).await?;
    let booted = boot_guest(node, sandbox, &stages).await?;
    stages.run("prepare", prepare(sandbox, &booted)).await?;
    stages.run("save", save(node, sandbox, booted, unfinished, name)).await
}

/// Waits until the guest's drivers serve all functions.
async fn prepare(sandbox: &Sandbox, booted: &Booted) -> Result<()> {
    let request = sandbox.look(|record| PrepareRequest {
        nvme_controllers: function::ids(record).count() as u32,
        interfaces: u32::from(record.network.is_some()),
    });
    let prepare = move |mut client: AgentClient<_>| async move { client.prepare(request).await };
    or_end(&*booted.vm, booted.agent.call(prepare)).await.map(drop)
}

async fn save(
    node: &Node,
    sandbox: &Sandbox,
    booted: Booted,
    unfinished: Unfinished,
    name: &str,
) -> Result<()> {
    let Booted { vm, agent, .. } = booted;
    // The connection is the host's. A fork's agent sees the next one begin.
    drop(agent);
    // Work that the guest has not finished would be done again by each fork.
    vm.rest().await;
    vm.pause().await?;
    let machine = vm.save().await?;
    let memory = sandbox.memory().ok_or(Error::Stopped)?;
    let record = sandbox.record();
    let needs = Needs::of(&record);
    let boot = node.boot.files(record.kernel.as_deref(), needs).await?;
    let cpu_template = node.config.cpu_template()?;
    let boots = Boots { needs, kernel: &boot.kernel, initramfs: &boot.initramfs, cpu_template };
    let shape = Shape::of(&record, &boots);
    let name = name.to_owned();
    apart(move || {
        let saved = write(&machine, &memory, &unfinished)?;
        unfinished.finish(&Manifest::new(&record, &name, shape, saved))
    })
    .await
}

/// Writes the files of a template.
fn write(machine: &[u8], memory: &GuestMemory, unfinished: &Unfinished) -> Result<Saved> {
    let path = unfinished.machine();
    let written = create_file(&path).and_then(|file| file.write_all_at(machine, 0));
    written.map_err(Error::file("cannot write", &path))?;
    let machine_sha256 = digest(machine);
    let path = unfinished.memory();
    let from = File::from(memory.descriptor()?);
    let copied = copy_memory(&from, memory.bytes(), &path);
    let (touched_bytes, memory_sha256) = copied.map_err(Error::file("cannot write", &path))?;
    Ok(Saved { touched_bytes, machine_sha256, memory_sha256 })
}

/// Writes the memory in `from`, of `len` bytes, to `path` as a sparse file. Returns the number of
/// bytes that it has, and their digest.
fn copy_memory(from: &File, len: u64, path: &Path) -> std::io::Result<(u64, String)> {
    let file = create_file(path)?;
    file.set_len(len)?;
    copy_pages(from, len, &file)
}
