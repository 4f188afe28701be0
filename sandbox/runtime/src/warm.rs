//! Templates that the node makes by itself, for sandboxes to come.

use std::sync::Arc;
use std::time::Duration;

use crate::memory::{most_to_ask_for, of_host};
use crate::node::Node;
use crate::record::Record;
use crate::sandbox::Sandbox;
use crate::save::{self, Saves};
use crate::stages::Stages;
use crate::start::leaves_choice;
use crate::{Error, Result, automatic, network, v1};

/// The number of sandboxes for each CPU of the host up to which they boot side by side. The boots
/// of so many take as long as two in a row, and so as long as one boot, a save and their forks: a
/// fork takes a twentieth of a boot, and a save less than a boot.
const BOOTS_PER_CPU: usize = 2;

/// Makes the template that a sandbox would have begun with, in a task of its own. Called once the
/// sandbox runs, which needs the CPUs more.
pub(crate) fn make_later(node: &Arc<Node>, sandbox: &Sandbox) {
    if let Some(name) = sandbox.wanted_template() {
        make_apart(node, name, sandbox.record());
    }
}

/// Returns whether sandboxes that are started together, so many, run sooner if they wait for their
/// template than if they boot.
fn pays(at_once: u32) -> bool {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    at_once as usize > cpus.saturating_mul(BOOTS_PER_CPU)
}

/// Has the template made with which a sandbox is to begin that is about to start, if it is one of
/// so many that this pays, and waits for it. Does nothing for other sandboxes.
///
/// # Errors
/// There is no VMM for the sandbox, or its boot files cannot be made; [`Error::Stopped`] if it is
/// asked to end meanwhile.
pub(crate) async fn make_first(node: &Arc<Node>, sandbox: &Sandbox) -> Result<()> {
    let pays = pays(sandbox.choice().at_once());
    if !pays || !leaves_choice(node, sandbox, node.config.vmm_uid_base).await? {
        return Ok(());
    }
    Stages::of(sandbox).run("template", make_and_wait(node, sandbox)).await
}

/// Has the template of a sandbox made, if the node has none, and waits until it is made, or cannot
/// be, but not longer than a guest may take to boot.
async fn make_and_wait(node: &Arc<Node>, sandbox: &Sandbox) -> Result<()> {
    let Some(name) = automatic::missing(node, sandbox).await? else { return Ok(()) };
    make_apart(node, &name, sandbox.record());
    let longest = Duration::from_secs(node.config.boot_timeout_s);
    tokio::select! {
        () = node.automatic.settled(&name) => Ok(()),
        () = sandbox.stopped() => Err(Error::Stopped),
        () = tokio::time::sleep(longest) => Ok(()),
    }
}

/// Makes a template of the machine in a sandbox's record, in a task of its own, unless it is being
/// made, or could not be made a while ago.
fn make_apart(node: &Arc<Node>, name: &str, record: Record) {
    let Some(pending) = node.automatic.begin(name) else { return };
    let node = Arc::clone(node);
    tokio::spawn(async move {
        let name = &pending.name;
        match make(&node, name, &record).await {
            Ok(()) => tracing::info!(template = name, "made for sandboxes to come"),
            Err(Error::Closed) => {}
            Err(error) => {
                tracing::warn!(template = name, %error, "not made; such sandboxes boot");
                node.automatic.failed(name);
            }
        }
    });
}

/// Makes a template of the machine that a sandbox has, and removes what is too many then.
async fn make(node: &Arc<Node>, name: &str, record: &Record) -> Result<()> {
    let _turn = node.automatic.making.lock().await;
    if node.templates.list().await.iter().any(|one| one.name == name) {
        return Ok(());
    }
    save::make(node, saves(name, record), machine(record)).await?;
    node.automatic.used(name);
    let all = node.templates.list().await;
    for surplus in node.automatic.surplus(&all, node.config.auto_templates as usize) {
        tracing::info!(template = surplus, "removed for another");
        if let Err(error) = node.templates.remove(&surplus).await {
            tracing::warn!(template = surplus, %error, "not removed");
        }
    }
    Ok(())
}

/// Returns the template of a sandbox's machine that is to be made: with an interface as the
/// sandbox's, if that has one, and with room for sockets if the sandbox has them, or has the room.
fn saves(name: &str, record: &Record) -> Saves {
    let mtu = record.network.as_ref().map_or(0, |network| network.mtu);
    Saves { name: name.to_owned(), mtu, socket_room: record.may_have_sockets() }
}

/// Describes the machine that a sandbox has.
fn machine(record: &Record) -> v1::RunSpec {
    let kernel = record.kernel.as_ref().map(|path| path.to_string_lossy().into_owned());
    let machine = v1::RunSpec {
        // The sandbox may have been given memory since it began.
        memory_bytes: record.ram_bytes(),
        max_memory_bytes: most_to_ask_for(record.ram_bytes(), record.memory.room()),
        // Regions are rounded up when they are made. No request may name more than the host has.
        bound_memory_bytes: record.bound.most_limit().min(of_host()),
        cpus: record.cpus.count,
        max_cpus: record.cpus.max,
        kernel: kernel.unwrap_or_default(),
        accelerator: record.accelerator.clone(),
        ..v1::RunSpec::default()
    };
    match &record.network {
        None => v1::RunSpec { network: network::NONE.to_owned(), ..machine },
        Some(network) => {
            v1::RunSpec { nic: network.nic.as_str().to_owned(), queues: network.queues, ..machine }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{BoundMemory, MemoryBounds};

    #[test]
    fn few_sandboxes_boot_and_many_wait_for_their_template() {
        let cpus = std::thread::available_parallelism().unwrap().get() as u32;
        assert!(!pays(0) && !pays(1) && !pays(2 * cpus));
        assert!(pays(2 * cpus + 1) && pays(u32::MAX));
    }

    #[test]
    fn a_template_has_the_room_for_memory_of_its_sandbox_and_nothing_plugged() {
        let plain = crate::adopt::tests::record_of(crate::record::SandboxState::Running);
        let memory = MemoryBounds::new(256 << 20, 512 << 20).with_plugged(64 << 20);
        let grown = Record { memory_bytes: 320 << 20, memory, ..plain.clone() };
        let described = |record| {
            let machine = machine(record);
            (machine.memory_bytes, machine.max_memory_bytes)
        };
        assert_eq!(described(&grown), (256 << 20, 512 << 20));
        assert_eq!(described(&plain), (1, 0));
    }

    #[test]
    fn a_template_has_the_regions_of_its_pod_and_nothing_plugged() {
        let plain = crate::adopt::tests::record_of(crate::record::SandboxState::Running);
        let mut pod = Record { pod: true, bound: BoundMemory::of_regions(128 << 20), ..plain };
        pod.bound.granted_bytes[2] = 68 << 20;
        let spec = v1::RunSpec { makes_pod: true, ..machine(&pod) };
        let regions = crate::pod::bound_of_new(&spec, of_host()).unwrap();
        assert_eq!(regions, BoundMemory::of_regions(128 << 20));
    }

    #[test]
    fn a_template_has_room_for_sockets_if_its_sandboxes_have_them_or_the_room() {
        let plain = crate::adopt::tests::record_of(crate::record::SandboxState::Running);
        let asks = Record { sockets: Some("/e".into()), ..plain.clone() };
        // Of a node with `pod_sockets`.
        let mut pod = Record { pod: true, ..plain.clone() };
        pod.plugged.socket_slot = true;
        for (record, room) in [(plain, false), (asks, true), (pod, true)] {
            assert_eq!(saves("auto-0", &record).socket_room, room);
            let saved = record.saved_without_sockets(room);
            assert_eq!((saved.sockets.is_some(), saved.has_socket_slot()), (false, room));
        }
    }
}
