//! A sandbox that begins with a template: its machine is that of the template, and its disks come
//! once its guest runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use slipway_hypervisor::{MemoryDevice, Vm};
use slipway_plane_api::v1 as plane_v1;

use crate::node::Node;
use crate::record::{Device, Needs, Network, Record};
use crate::sandbox::Sandbox;
use crate::templates::{Boots, Manifest, Shape, Template, working_set};
use crate::{Error, Result, network, resize};

/// Returns the template that a sandbox is a fork of, or `None` if it boots.
///
/// # Errors
/// [`Error::NoTemplate`]; [`Error::Template`] if the sandbox cannot be a fork of it, with what
/// differs.
pub(crate) async fn template(node: &Node, sandbox: &Sandbox) -> Result<Option<Arc<Template>>> {
    let record = &sandbox.record();
    let Some(name) = &record.template else { return Ok(None) };
    let no = |why: String| Error::Template { name: name.clone(), why };
    if let Some(why) = cannot_fork(record) {
        return Err(no(why.to_owned()));
    }
    let template = match sandbox.take_begins() {
        Some(snapshot) => snapshot,
        None => node.templates.get(name).await?,
    };
    check(node, record, &template.manifest).await?;
    Ok(Some(template))
}

/// Checks that a sandbox with this record can have the machine of a template.
///
/// # Errors
/// [`Error::Template`] with what differs; those of [`Known::files`](crate::boot::Known::files).
pub(crate) async fn check(node: &Node, record: &Record, template: &Manifest) -> Result<()> {
    let Manifest { name, shape: has, .. } = template;
    let differs = |why| Error::Template { name: name.clone(), why };
    if let Some(why) = lacks_room(record, has.needs) {
        return Err(differs(why.to_owned()));
    }
    let boot = node.boot.files(record.kernel.as_deref(), has.needs).await?;
    let (needs, cpu_template) = (has.needs, node.config.cpu_template()?);
    let boots = Boots { needs, kernel: &boot.kernel, initramfs: &boot.initramfs, cpu_template };
    has.check(&Shape::of(record, &boots)).map_err(differs)
}

/// Returns why a sandbox with this record cannot be a fork of a template with these needs, whose
/// machine has no room for a function that the sandbox is to be given.
fn lacks_room(record: &Record, needs: Needs) -> Option<&'static str> {
    let why = "it has no room for a socket function: make it with --sockets, or leave that out";
    (record.sockets.is_some() && !needs.sockets).then_some(why)
}

/// Notes in the record of a fork that is about to start the room that its template's machine has
/// for functions.
pub(crate) fn note_room(sandbox: &Sandbox, template: &Manifest) {
    sandbox.note(|record| record.plugged.fork_socket_slot = template.shape.needs.sockets);
}

/// Has the pool copy ahead, for the forks to come, what this fork of `template` has touched so far,
/// and keeps that beside the template. The first fork of a template does so, or a later one if that
/// fails. `file` is the device and inode number of the fork's memory.
///
/// The caller does this before the program of the fork's container begins: the next forks may be
/// another tenant's, who could tell from the time of a fault which pages the program has touched.
pub(crate) async fn learn(
    node: &Node,
    record: &Record,
    template: Option<&Template>,
    file: (u64, u64),
) {
    // All of its memory was copied for the server of its shares, or the socket engine.
    let is_whole = record.forks_with_shares() || record.forks_with_sockets();
    let Some(template) = template.filter(|_| !is_whole) else { return };
    let Some(attempt) = Attempt::begin(&template.learnt) else { return };
    match working_set::touched(&node.plane, &template.memory, file).await {
        Ok(ranges) => {
            attempt.succeed();
            let path = working_set::path(&node.templates.place(&template.manifest.name));
            let kept = working_set::keep(path, template.memory.to_string(), ranges).await;
            if let Err(error) = kept {
                tracing::debug!(%error, "a later daemon does not know what forks need");
            }
        }
        Err(status) => {
            tracing::debug!(error = status.message(), "nothing is copied ahead");
        }
    }
}

/// An attempt to learn what forks of a template touch. If it is dropped before it has succeeded, as
/// when its sandbox is stopped, a later fork attempts it.
struct Attempt<'a>(Option<&'a AtomicBool>);

impl<'a> Attempt<'a> {
    /// Begins an attempt. Returns `None` if another one is under way, or has succeeded.
    fn begin(learnt: &'a AtomicBool) -> Option<Self> {
        (!learnt.swap(true, Ordering::Relaxed)).then(|| Self(Some(learnt)))
    }

    /// Ends the attempt: no later fork makes one.
    fn succeed(mut self) {
        self.0 = None;
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if let Some(learnt) = self.0 {
            learnt.store(false, Ordering::Relaxed);
        }
    }
}

/// Returns why a sandbox with this record cannot be a fork, or `None` if it can. Whether its
/// template's machine has room for its functions is the question of [`lacks_room`].
///
/// Tests of the reasons: below, and in `network/further.rs`, `network/pooled.rs`, `shares/mod.rs`.
/// `docs/templates.md`, *What cannot be a fork*, lists them.
pub(crate) fn cannot_fork(record: &Record) -> Option<&'static str> {
    let own = record.volumes.iter().any(|volume| volume.device != Device::Namespace);
    let reasons = [
        (
            !network::further::of(record).is_empty(),
            "a sandbox with several network interfaces boots: leave the template out",
        ),
        (
            record.network.as_ref().is_some_and(Network::is_lent),
            "a sandbox with a function of its namespace boots: leave the template out",
        ),
        (own, "volumes of a fork are namespaces: leave out the volume's device"),
    ];
    reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why)
}

/// Checks that the machine of a fork has no more memory plugged, and is asked for no more, than the
/// fork's record says. Anybody may have written the description of a snapshot that was moved, and
/// nobody reads the state of its machine before it runs.
///
/// # Errors
/// [`Error::Template`] if it has more; the errors of [`resize::memory_device`].
pub(crate) async fn check_memory(record: &Record, vm: &dyn Vm) -> Result<()> {
    if record.memory.room() == 0 {
        return Ok(());
    }
    let device = resize::memory_device(vm, resize::DEVICE).await?;
    let Some(why) = has_too_much(record, &device) else { return Ok(()) };
    Err(Error::Template { name: record.template.clone().unwrap_or_default(), why })
}

/// Returns why a machine with this device of hot-plug memory is not that of a fork with this
/// record, or `None` if it is.
fn has_too_much(record: &Record, device: &MemoryDevice) -> Option<String> {
    let most = record.memory.granted_bytes.saturating_sub(record.memory.boot_bytes);
    let has = device.plugged.max(device.requested);
    let [has_mib, most_mib] = [has, most].map(|bytes| bytes >> 20);
    let why = format!("its guest has {has_mib} MiB plugged, and its description says {most_mib}");
    (has > most).then_some(why)
}

/// Attaches the disks of a fork to its functions, whose guests learn of them by the event of the
/// controller.
///
/// # Errors
/// [`Error::Plane`].
pub(crate) async fn attach(
    node: &Node,
    disks: impl Iterator<Item = (String, Vec<plane_v1::Namespace>)>,
) -> Result<()> {
    for (endpoint_id, namespaces) in disks {
        for plane_v1::Namespace { nsid, disk, .. } in namespaces {
            let endpoint_id = endpoint_id.clone();
            let request = plane_v1::AttachDiskRequest { endpoint_id, nsid, disk };
            let attached = node.plane.clone().attach_disk(request).await;
            attached.map_err(Error::plane)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::record_of;
    use crate::pod_functions::plug_slots;
    use crate::record::{MemoryBounds, SandboxState};

    #[test]
    fn a_fork_has_sockets_if_its_template_has_room_for_them() {
        let plain = record_of(SandboxState::Starting);
        let asks = Record { sockets: Some("/e".into()), ..plain.clone() };
        let mut template = Record { pod: true, ..asks.clone() };
        template.saving.as_template = Some("web".into());
        let template = template.saved_without_sockets(true);
        assert_eq!((template.sockets.is_some(), plug_slots(&template)), (false, 2));
        let needs = Needs::of(&template);
        assert_eq!(needs, Needs::of_template(true));
        let without = Needs::of_template(false);
        assert!(lacks_room(&asks, without).unwrap().contains("--sockets"));
        for (record, needs) in [(&asks, needs), (&plain, needs), (&plain, without)] {
            assert_eq!((cannot_fork(record), lacks_room(record, needs)), (None, None));
            let mut fork = Record { template: Some("web".into()), ..record.clone() };
            fork.plugged.fork_socket_slot = needs.sockets;
            // The bus of a fork is its template's, also if the fork asks for no sockets.
            assert_eq!(plug_slots(&fork), 1 + usize::from(needs.sockets));
            assert_eq!(fork.booted_needs(), needs);
            assert!(!fork.begins_with_sockets());
            assert_eq!(fork.forks_with_sockets(), record.sockets.is_some());
        }
        assert!(asks.begins_with_sockets() && !asks.forks_with_sockets());
    }

    #[test]
    fn a_fork_has_no_more_memory_plugged_than_its_description_says() {
        let memory = MemoryBounds::new(128 << 20, 384 << 20).with_plugged(64 << 20);
        let record = Record { memory, ..record_of(SandboxState::Starting) };
        let why = |requested_mib: u64, plugged_mib: u64| {
            let (bytes, node, block) = (256 << 20, 0, 2 << 20);
            let (requested, plugged) = (requested_mib << 20, plugged_mib << 20);
            has_too_much(&record, &MemoryDevice { bytes, node, block, requested, plugged })
        };
        assert_eq!([why(0, 0), why(64, 64), why(64, 2)], [None, None, None]);
        assert!(why(64, 66).unwrap().contains("has 66 MiB plugged"));
        assert!(why(256, 64).unwrap().ends_with("says 64"));
    }

    #[test]
    fn a_later_fork_learns_what_an_earlier_one_did_not() {
        let learnt = AtomicBool::new(false);
        let first = Attempt::begin(&learnt).unwrap();
        assert!(Attempt::begin(&learnt).is_none(), "one at a time");
        drop(first);
        Attempt::begin(&learnt).unwrap().succeed();
        assert!(Attempt::begin(&learnt).is_none() && learnt.load(Ordering::Relaxed));
    }

    #[test]
    fn a_template_has_room_for_sockets_only_if_they_are_asked_for() {
        // Of a node whose settings give pods the room.
        let mut pod = Record { pod: true, ..record_of(SandboxState::Starting) };
        pod.saving.as_template = Some("web".into());
        pod.plugged.socket_slot = true;
        let saved = pod.saved_without_sockets(false);
        assert_eq!((Needs::of(&saved), plug_slots(&saved)), (Needs::of_template(false), 1));
    }
}
