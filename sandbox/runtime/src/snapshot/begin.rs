//! A sandbox that begins with a snapshot: its machine, its container and its disks are those of the
//! snapshot, and its names and addresses are its own.
//!
//! `Node::create` calls the functions of this module in turn: [`chosen`] finds the snapshot.
//! [`complete`] gives the request the snapshot's machine, and refuses a request that the snapshot
//! cannot meet (`asked.rs`). [`settings`] and [`record`] fill in the record, and [`link`] gives the
//! sandbox the disks.

use std::path::Path;
use std::sync::Arc;

use super::asked::first_refused;
use super::disks::copy_now;
use crate::memory::most_to_ask_for;
use crate::node::Node;
use crate::record::{Cpus, LAYER, Placement, Record, Run, Settings, Store, Volume};
use crate::sandbox::Sandbox;
use crate::templates::{AUTO, Manifest, Snapshot, Template, apart};
use crate::v1::RunSpec;
use crate::{Error, Result, network};

/// Returns the snapshot with which a sandbox is to begin. Returns `None` if the sandbox boots or
/// begins with a template, or if its request has an image or makes a pod and there is neither a
/// snapshot nor a template of the name in it.
///
/// # Errors
/// - [`Error::Template`]: the files of the snapshot or template are not as they were written.
/// - [`Error::NoTemplate`]: there is neither of this name, and the request names no image.
/// - [`Error::Invalid`]: the name is a template's, which has no container, and the request names no
///   image.
pub(crate) async fn chosen(node: &Node, spec: &RunSpec) -> Result<Option<Arc<Template>>> {
    let has_image = spec.makes_pod || !spec.image.is_empty() || !spec.image_digest.is_empty();
    if spec.template.is_empty() || (spec.template == AUTO && has_image) {
        return Ok(None);
    }
    if spec.template == AUTO {
        return Err(needs_image(AUTO));
    }
    match node.templates.get(&spec.template).await {
        Ok(template) if template.manifest.snapshot.is_some() => Ok(Some(template)),
        Ok(_) if has_image => Ok(None),
        Ok(_) => Err(needs_image(&spec.template)),
        // `Node::check_new` reports a missing template, after the errors of the request itself.
        Err(Error::NoTemplate(_)) if has_image => Ok(None),
        Err(error) => Err(error),
    }
}

/// Makes the error of a request that begins with template `name` and names no image.
fn needs_image(name: &str) -> Error {
    Error::Invalid(format!(
        "{name} is a template, without a container: name an image, slipway run --from {name} IMAGE"
    ))
}

/// Returns the request `asked` for a sandbox that begins with the snapshot of `manifest`, completed
/// with the snapshot's machine. A request that names no size of its layers gets that of
/// [`layers_bytes`], with at most `most` bytes for volumes.
///
/// # Errors
/// [`Error::Invalid`] if the request names something that the snapshot has already or cannot get.
pub(crate) fn complete(asked: &RunSpec, manifest: &Manifest, most: u64) -> Result<RunSpec> {
    let Some(snapshot) = &manifest.snapshot else { return Ok(asked.clone()) };
    if let Some(what) = first_refused(asked) {
        return Err(Error::Invalid(format!(
            "{} is a snapshot, whose container goes on: leave out {what}",
            manifest.name
        )));
    }
    let shape = &manifest.shape;
    let mut spec = RunSpec {
        memory_bytes: shape.memory_bytes,
        max_memory_bytes: most_to_ask_for(shape.memory_bytes, shape.room_bytes),
        cpus: shape.cpus,
        max_cpus: shape.max_cpus,
        kernel: snapshot.kernel.as_ref().map_or_else(String::new, |path| text(path)),
        accelerator: snapshot.accelerator.clone(),
        ..asked.clone()
    };
    if spec.layers_bytes == 0 {
        spec.layers_bytes = layers_bytes(snapshot, most);
    }
    match &shape.interface {
        None if spec.network.is_empty() => spec.network = network::NONE.to_owned(),
        None => {}
        Some(interface) => {
            (spec.nic, spec.queues) = (interface.nic.as_str().to_owned(), interface.queues);
        }
    }
    Ok(spec)
}

/// Returns the bytes of memory that the layers of a sandbox with this snapshot may hold: those of
/// the snapshot's container, and for volumes the bytes of their disks, but at most `most`.
///
/// Volumes are overlays in memory, too, and a guest may fill them, as it could before the snapshot.
/// The bound keeps a snapshot with large volumes from the memory of all sandboxes' layers, for
/// which its user has not asked.
fn layers_bytes(snapshot: &Snapshot, most: u64) -> u64 {
    let volumes = snapshot.files.iter().filter(|file| file.name != LAYER);
    let volumes = volumes.map(|file| file.bytes).fold(0, u64::saturating_add);
    snapshot.layers_bytes.saturating_add(volumes.min(most))
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Returns the settings of a snapshot's container, on the CPUs and nodes of `placement`.
///
/// # Errors
/// [`Error::NoImage`] if the container's image is gone.
pub(crate) async fn settings(snapshot: &Snapshot, placement: Placement) -> Result<Settings> {
    let (path, image) = (snapshot.settings.image_path.clone(), snapshot.settings.image.clone());
    if !apart(move || Ok(path.exists())).await? {
        return Err(Error::NoImage(image));
    }
    Ok(Settings { placement, ..snapshot.settings.clone() })
}

/// Completes the record of a new sandbox, whose files are in `store`, with the snapshot's memory,
/// volumes, CPUs and origin.
pub(crate) fn record(record: Record, snapshot: &Snapshot, store: &Store) -> Record {
    let own = |volume: &Volume| match volume.overlay {
        true => Volume { path: store.dir().join(&volume.path), ..volume.clone() },
        false => volume.clone(),
    };
    let memory = record.memory.with_plugged(snapshot.plugged_bytes);
    Record {
        memory_bytes: record.memory_bytes.max(memory.granted_bytes),
        memory,
        origin: Some(snapshot.origin.clone()),
        volumes: snapshot.volumes.iter().map(own).collect(),
        run: Run { paused: snapshot.paused, ..record.run },
        cpus: Cpus { count: snapshot.cpus, ..record.cpus },
        ..record
    }
}

/// Gives a new sandbox the files of the snapshot's disks, to which nobody writes: hard links, or
/// copies if the sandbox's directory is on another file system.
///
/// # Errors
/// [`Error::File`] if a file cannot be linked or copied.
pub(crate) async fn link(node: &Node, sandbox: &Sandbox, template: &Template) -> Result<()> {
    let Manifest { name, snapshot, .. } = &template.manifest;
    let (from, to) = (node.templates.place(name), sandbox.store.dir().to_owned());
    let files = snapshot.iter().flat_map(|one| &one.files);
    let names: Vec<_> = files.map(|file| file.name.clone()).collect();
    apart(move || names.iter().try_for_each(|name| link_one(&from.join(name), &to.join(name))))
        .await
}

/// Makes the file `to` a hard link to `from`, or a copy if `from` is on another file system.
///
/// # Errors
/// [`Error::File`].
pub(crate) fn link_one(from: &Path, to: &Path) -> Result<()> {
    match std::fs::hard_link(from, to) {
        Err(error) if error.kind() == std::io::ErrorKind::CrossesDevices => {
            copy_now(from.to_owned(), to.to_owned())
        }
        linked => linked.map_err(Error::file("cannot create", to)),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::adopt::tests::record_of;
    use crate::record::{Device, MemoryBounds, Needs, Origin, SandboxState};
    use crate::templates::DiskFile;
    use crate::templates::manifest::tests::manifest;

    /// Returns a snapshot with a volume of its own and a volume of the host.
    pub(crate) fn snapshot() -> Snapshot {
        let record = record_of(SandboxState::Running);
        let volume = |name: &str, overlay| Volume {
            name: name.to_owned(),
            path: if overlay { format!("volume-{name}").into() } else { "/data".into() },
            scratch_bytes: None,
            read_only: !overlay,
            mount_point: String::new(),
            block_size: 0,
            device: Device::Namespace,
            device_path: String::new(),
            host_device: None,
            file: None,
            stamp: None,
            overlay,
        };
        Snapshot {
            sandbox: "one".to_owned(),
            origin: Origin { disks: "0123456789ab".into(), slots: 1, needs: Needs::default() },
            settings: record.settings,
            paused: false,
            cpus: 2,
            layers_bytes: 32 << 20,
            kernel: None,
            accelerator: "kvm".to_owned(),
            volumes: vec![volume("own", true), volume("shared", false)],
            files: Vec::new(),
            paused_ns: 1,
            plugged_bytes: 0,
        }
    }

    #[test]
    fn a_request_gets_the_machine_of_its_snapshot() {
        let mut manifest = manifest("web");
        manifest.snapshot = Some(snapshot());
        let spec = complete(&RunSpec::default(), &manifest, 0).unwrap();
        assert_eq!((spec.memory_bytes, spec.cpus, spec.max_cpus), (128 << 20, 1, 2));
        assert_eq!((spec.nic.as_str(), spec.network.as_str()), ("virtio", ""));
        assert_eq!((spec.layers_bytes, spec.accelerator.as_str()), (32 << 20, "kvm"));
        let asked = RunSpec { layers_bytes: 64 << 20, ..RunSpec::default() };
        assert_eq!(complete(&asked, &manifest, 0).unwrap().layers_bytes, 64 << 20);
        assert_eq!(spec.max_memory_bytes, 0);
        let mut grows = manifest.clone();
        grows.shape.room_bytes = 256 << 20;
        let spec = complete(&RunSpec::default(), &grows, 0).unwrap();
        assert_eq!((spec.memory_bytes, spec.max_memory_bytes), (128 << 20, 384 << 20));
        let mut alone = manifest.clone();
        alone.shape.interface = None;
        assert_eq!(complete(&asked, &alone, 0).unwrap().network, "none");
        let refused = |asked: RunSpec| complete(&asked, &manifest, 0).unwrap_err().to_string();
        let image = RunSpec { image: "debian:12".to_owned(), ..RunSpec::default() };
        assert!(refused(image).ends_with("goes on: leave out the image"));
        let command = RunSpec { command: vec!["true".to_owned()], ..RunSpec::default() };
        assert!(refused(command).contains("the command"));
        assert!(refused(RunSpec { cpus: 1, ..RunSpec::default() }).contains("CPUs"));
        assert!(refused(RunSpec { makes_pod: true, ..RunSpec::default() }).contains("pod"));
    }

    #[test]
    fn volumes_have_a_bounded_part_of_the_memory_of_all_layers() {
        let mut manifest = manifest("web");
        let file = |name: &str, bytes| DiskFile {
            name: name.to_owned(),
            bytes,
            data_bytes: 0,
            sha256: String::new(),
        };
        let files = vec![file(LAYER, 1 << 30), file("volume-own", 8 << 20)];
        manifest.snapshot = Some(Snapshot { files, ..snapshot() });
        let with = |asked: u64, most: u64| {
            let asked = RunSpec { layers_bytes: asked, ..RunSpec::default() };
            complete(&asked, &manifest, most).unwrap().layers_bytes >> 20
        };
        assert_eq!([with(0, u64::MAX), with(0, 3 << 20), with(64 << 20, 0)], [40, 35, 64]);
    }

    #[test]
    fn what_a_snapshot_has_is_not_passed_over() {
        let mut manifest = manifest("web");
        manifest.snapshot = Some(snapshot());
        let asked = |change: fn(&mut RunSpec)| {
            let mut spec = RunSpec::default();
            change(&mut spec);
            complete(&spec, &manifest, 0).map_err(|error| error.to_string())
        };
        let refused = |change: fn(&mut RunSpec), what: &str| {
            let error = asked(change).unwrap_err();
            assert!(error.ends_with(&format!("leave out {what}")), "{error}");
            assert!(!error.contains('\n'), "{error}");
        };
        refused(|spec| spec.terminal = true, "the terminal and standard input");
        refused(|spec| spec.stdin = true, "the terminal and standard input");
        refused(|spec| spec.nic = "e1000".to_owned(), "the kind of its interface");
        refused(|spec| spec.queues = 2, "the kind of its interface");
        refused(|spec| spec.free_page_reporting = Some(false), "--free-page-reporting");
        refused(|spec| spec.interrupt_interval_ns = 1, "the kind of its interface");
        refused(|spec| spec.emulated_nic = Some(Default::default()), "the kind of its interface");
        refused(|spec| spec.assigned_function = Some(Default::default()), "a function of the host");
        refused(|spec| spec.accelerator = "tcg".to_owned(), "the accelerator");
        refused(|spec| spec.pod = "web".to_owned(), "the pod");
        refused(|spec| spec.shares_processes = true, "what only containers of pods have");
        refused(|spec| spec.processes_of = "a".into(), "what only containers of pods have");
        refused(|spec| spec.resources = Some(Default::default()), "its limits");
        refused(|spec| spec.oom_score_adj = Some(0), "the settings of its process");
        refused(
            |spec| spec.termination_message_path = "/m".to_owned(),
            "what only containers of pods have",
        );
        let own = asked(|spec| {
            (spec.rows, spec.columns, spec.wait_network) = (24, 80, true);
            spec.placement = Some(Default::default());
            spec.network_namespace = "/run/netns/a".to_owned();
        });
        let own = own.unwrap();
        assert!(own.wait_network && own.placement.is_some() && own.rows == 24);
    }

    #[test]
    fn a_record_has_links_to_the_disks_that_were_copied() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), "ba9876543210");
        let new = record(record_of(SandboxState::Created), &snapshot(), &store);
        let paths: Vec<_> = new.volumes.iter().map(|volume| volume.path.clone()).collect();
        assert_eq!(paths, [store.dir().join("volume-own"), "/data".into()]);
        assert_eq!((new.cpus.count, new.disks_id()), (2, "0123456789ab"));
    }

    #[test]
    fn a_record_has_the_memory_that_was_plugged_within_its_room() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), "ba9876543210");
        let begun = |room: u64, plugged_bytes: u64| {
            let memory = MemoryBounds::new(128 << 20, (128 << 20) + room);
            let new = record_of(SandboxState::Created);
            let new = Record { memory_bytes: 128 << 20, memory, ..new };
            let new = record(new, &Snapshot { plugged_bytes, ..snapshot() }, &store);
            assert_eq!((new.ram_bytes(), new.memory_file_bytes()), (128 << 20, (128 << 20) + room));
            assert_eq!(new.memory_bytes, new.memory.granted_bytes);
            new.memory_bytes >> 20
        };
        assert_eq!([begun(0, 0), begun(256 << 20, 0), begun(256 << 20, 64 << 20)], [128, 128, 192]);
        assert_eq!([begun(0, 64 << 20), begun(256 << 20, u64::MAX)], [128, 384], "a changed file");
    }

    #[test]
    fn a_file_is_linked_once() {
        let dir = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| dir.path().join(name));
        std::fs::write(&from, "x").unwrap();
        link_one(&from, &to).unwrap();
        std::fs::remove_file(&from).unwrap();
        assert_eq!(std::fs::read(&to).unwrap(), b"x");
        assert!(link_one(&from, &to).is_err());
    }
}
