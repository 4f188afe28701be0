//! Templates that the node makes by itself, of the machines that sandboxes ask for.
//!
//! A sandbox that asks for the template [`AUTO`] begins with the one that has its machine, if there
//! is one. Otherwise it boots, and once it runs the node makes that template for those that come
//! later. The template's name tells its machine, so a machine that differs in anything has another
//! one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::boot::Needs;
use crate::lock::lock;
use crate::node::Node;
use crate::record::Record;
use crate::sandbox::Sandbox;
use crate::save::{self, Saves};
use crate::templates::{Boots, Manifest, Shape, apart, digest};
use crate::{Error, Result, fork, network, v1};

/// The word for the template that the node chooses, and makes if there is none.
pub(crate) const AUTO: &str = "auto";
/// The beginning of the names of templates that the node makes by itself.
const PREFIX: &str = "auto-";
/// The hexadecimal digits of a machine's digest in such a name.
const DIGITS: usize = 12;
/// The most such templates of a node. One more takes the place of the one that was used last
/// longest ago.
const MOST: usize = 8;
/// The time after which a template that could not be made is tried again.
const AGAIN: Duration = Duration::from_secs(600);

/// The state of the templates that a node makes by itself.
#[derive(Default)]
pub(crate) struct Automatic {
    /// Held while one is made: each takes a machine's memory and time.
    making: tokio::sync::Mutex<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The names of those that are being made, or wait for it.
    pending: BTreeSet<String>,
    /// The times at which sandboxes of this daemon last began with them.
    used: BTreeMap<String, Instant>,
    /// The times at which they could not be made.
    failed: BTreeMap<String, Instant>,
}

/// Checks the name of a template that a user makes.
///
/// # Errors
/// [`Error::Invalid`]: it is a name of the node's.
pub(crate) fn check_chosen(name: &str) -> Result<()> {
    if name == AUTO || is_automatic(name) {
        let what =
            format!("\"{name}\" stands for templates of the node's own: choose another name");
        return Err(Error::Invalid(what));
    }
    Ok(())
}

fn is_automatic(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Has a recorded sandbox, whose interface is known, begin with the template of its machine. If
/// there is none, the sandbox boots and [`make_later`] makes it. A sandbox that can be no fork
/// boots.
///
/// # Errors
/// Those of finding the sandbox's boot files.
pub(crate) async fn choose(node: &Node, sandbox: &Sandbox) -> Result<()> {
    let record = sandbox.record();
    if fork::cannot_fork(&record).is_some() || record.memory.room() > 0 {
        return Ok(());
    }
    let name = name_of(node, &record).await?;
    match node.templates.get(&name).await {
        Ok(_) => {
            lock(&node.automatic.state).used.insert(name.clone(), Instant::now());
            sandbox.note(|record| record.template = Some(name));
        }
        Err(Error::NoTemplate(_)) => sandbox.want_template(name),
        Err(error @ Error::Template { .. }) => {
            remove(node, &name, &error).await;
            sandbox.want_template(name);
        }
        Err(error) => tracing::warn!(sandbox = sandbox.name, %error, "it boots"),
    }
    Ok(())
}

/// Makes the template that a sandbox would have begun with, in a task of its own. Called once the
/// sandbox runs, which needs the CPUs more.
pub(crate) fn make_later(node: &Arc<Node>, sandbox: &Sandbox) {
    let Some(name) = sandbox.wanted_template() else { return };
    if !node.automatic.enqueue(name) {
        return;
    }
    let (node, name, record) = (Arc::clone(node), name.to_owned(), sandbox.record());
    tokio::spawn(async move {
        let made = make(&node, &name, &record).await;
        let mut state = lock(&node.automatic.state);
        state.pending.remove(&name);
        match made {
            Ok(()) => tracing::info!(template = name, "made for sandboxes to come"),
            Err(error) => {
                tracing::warn!(template = name, %error, "not made; such sandboxes boot");
                state.failed.insert(name, Instant::now());
            }
        }
    });
}

/// Removes the template of a sandbox whose machine failed, if the node made it by itself: the next
/// sandbox boots, and has the template made anew.
pub(crate) async fn distrust(node: &Node, record: &Record, error: &Error) {
    let machine_failed = matches!(
        error,
        Error::VmEnded(_) | Error::Agent(_) | Error::Template { .. } | Error::Hypervisor(_)
    );
    // A guest whose container was made went on well.
    let went_on = record.timeline.stage("container").is_some();
    if let Some(name) = record.template.as_ref().filter(|name| is_automatic(name))
        && machine_failed
        && !went_on
    {
        remove(node, name, error).await;
    }
}

async fn remove(node: &Node, name: &str, why: &Error) {
    tracing::warn!(template = name, error = %why, "removed, since nothing begins with it");
    match node.templates.remove(name).await {
        Ok(()) | Err(Error::NoTemplate(_)) => {}
        Err(error) => tracing::warn!(template = name, %error, "not removed"),
    }
}

impl Automatic {
    /// Notes that a template is to be made. Returns `false` if it is already, or could not be made
    /// a while ago.
    fn enqueue(&self, name: &str) -> bool {
        let mut state = lock(&self.state);
        state.failed.retain(|_, at| at.elapsed() < AGAIN);
        !state.failed.contains_key(name) && state.pending.insert(name.to_owned())
    }

    /// Returns those of the node's own templates in `all` that go before one more is made.
    fn surplus(&self, all: &[Manifest]) -> Vec<String> {
        let state = lock(&self.state);
        let mut own: Vec<_> = all.iter().filter(|one| is_automatic(&one.name)).collect();
        // Those that this daemon has not used go first, the oldest before the others.
        own.sort_by_key(|one| (state.used.get(&one.name).copied(), one.created_ns));
        let count = (own.len() + 1).saturating_sub(MOST);
        own.into_iter().take(count).map(|one| one.name.clone()).collect()
    }
}

/// Makes a template of the machine that a sandbox has.
async fn make(node: &Arc<Node>, name: &str, record: &Record) -> Result<()> {
    let _turn = node.automatic.making.lock().await;
    let all = node.templates.list().await;
    if all.iter().any(|one| one.name == name) {
        return Ok(());
    }
    for surplus in node.automatic.surplus(&all) {
        tracing::info!(template = surplus, "removed for another");
        node.templates.remove(&surplus).await?;
    }
    let saves = Saves { name: name.to_owned(), mtu: mtu(record) };
    save::make(node, saves, machine(record)).await.map(drop)
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

/// Returns the name of the template of the sandbox's machine.
async fn name_of(node: &Node, record: &Record) -> Result<String> {
    let needs = Needs::of_template();
    let boot = node.boot.files(record.kernel.as_deref(), needs).await?;
    let cpu_template = node.config.cpu_template()?;
    let boots = Boots { needs, kernel: &boot.kernel, initramfs: &boot.initramfs, cpu_template };
    let shape = Shape::of(record, &boots);
    // The kernel may be replaced by another one under the same path.
    let kernel = boot.kernel.clone();
    let status =
        apart(move || std::fs::metadata(&kernel).map_err(Error::file("cannot read", kernel)));
    let status = status.await?;
    Ok(name_of_shape(&shape, status.len(), status.modified().ok()))
}

fn name_of_shape(shape: &Shape, kernel: u64, changed: Option<std::time::SystemTime>) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let told = format!("{version} {shape:?} {kernel} {changed:?}");
    format!("{PREFIX}{}", &digest(told.as_bytes())[..DIGITS])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::templates::manifest::tests::{manifest, shape};

    #[test]
    fn the_name_tells_the_machine() {
        let name = |change: fn(&mut Shape)| {
            let mut shape = shape();
            change(&mut shape);
            name_of_shape(&shape, 1, None)
        };
        let same = name(|_| ());
        assert_eq!((same.clone(), same.len()), (name(|_| ()), PREFIX.len() + DIGITS));
        let mut others = vec![
            name(|shape| shape.memory_bytes *= 2),
            name(|shape| shape.cpus = 2),
            name(|shape| shape.interface.as_mut().unwrap().mtu = 1450),
            name(|shape| shape.interface = None),
            name(|shape| shape.initramfs = "/j".into()),
            name_of_shape(&shape(), 2, None),
            same,
        ];
        others.sort();
        others.dedup();
        assert_eq!(others.len(), 7, "{others:?}");
        assert!(crate::name::check_template(&others[0]).is_ok());
    }

    #[test]
    fn names_of_the_nodes_own_templates_cannot_be_chosen() {
        assert!(check_chosen("web").is_ok() && check_chosen("automatic").is_ok());
        for name in [AUTO, "auto-0123456789ab"] {
            assert!(check_chosen(name).unwrap_err().to_string().contains("of the node's own"));
        }
    }

    #[test]
    fn one_template_more_takes_the_place_of_the_one_used_longest_ago() {
        let automatic = Automatic::default();
        let own = |at: u64| {
            let mut own = manifest(&format!("{PREFIX}{at}"));
            own.created_ns = at;
            own
        };
        let mut all: Vec<_> = (1..MOST as u64).map(own).collect();
        all.push(manifest("web"));
        assert!(automatic.surplus(&all).is_empty(), "there is room, and the user's do not count");
        all.push(own(MOST as u64));
        assert_eq!(automatic.surplus(&all), ["auto-1"], "the oldest, of those that nobody used");
        lock(&automatic.state).used.insert("auto-1".to_owned(), Instant::now());
        assert_eq!(automatic.surplus(&all), ["auto-2"]);
    }

    #[test]
    fn a_template_is_made_once_at_a_time_and_not_at_once_after_a_failure() {
        let automatic = Automatic::default();
        assert!(automatic.enqueue("auto-a") && !automatic.enqueue("auto-a"));
        assert!(automatic.enqueue("auto-b"));
        let mut state = lock(&automatic.state);
        state.pending.clear();
        state.failed.insert("auto-a".to_owned(), Instant::now());
        drop(state);
        assert!(!automatic.enqueue("auto-a") && automatic.enqueue("auto-b"));
    }
}
