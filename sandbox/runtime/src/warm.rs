//! Templates that the node makes by itself, for sandboxes to come.

use std::sync::Arc;

use crate::node::Node;
use crate::record::Record;
use crate::sandbox::Sandbox;
use crate::save::{self, Saves};
use crate::{Error, Result, network, v1};

/// Makes the template that a sandbox would have begun with, in a task of its own. Called once the
/// sandbox runs, which needs the CPUs more.
pub(crate) fn make_later(node: &Arc<Node>, sandbox: &Sandbox) {
    let Some(name) = sandbox.wanted_template() else { return };
    let Some(pending) = node.automatic.begin(name) else { return };
    let (node, record) = (Arc::clone(node), sandbox.record());
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
    let saves = Saves { name: name.to_owned(), mtu: mtu(record) };
    save::make(node, saves, machine(record)).await?;
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

/// Returns the MTU of the sandbox's interface; 0 if it has none.
fn mtu(record: &Record) -> u32 {
    record.network.as_ref().map_or(0, |network| network.mtu)
}

/// Describes the machine that a sandbox has.
fn machine(record: &Record) -> v1::RunSpec {
    let kernel = record.kernel.as_ref().map(|path| path.to_string_lossy().into_owned());
    let machine = v1::RunSpec {
        memory_bytes: record.memory_bytes,
        cpus: record.cpus,
        max_cpus: record.max_cpus,
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
