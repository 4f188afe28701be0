//! Snapshots: sandboxes that are saved while they run, each with its container and its disks.
//!
//! A snapshot is kept beside the templates, and a sandbox begins with it as with a template
//! (`fork`). Most of the memory of the one that is saved is copied while it runs. Then it stands
//! still ([`create`]): the agent stops its container's processes, the VMM saves the machine and the
//! rest of its memory, and the content of its disks is copied. Then it goes on. A sandbox that
//! begins with a snapshot ([`begin`]) has links to the files of the disks and writes over them in
//! memory, so that the snapshot can be removed. Its container goes on ([`go_on`]) once the guest
//! has the sandbox's names, addresses and random numbers. A snapshot can be [moved] to another
//! node, as a directory of the host (`folder`).

mod asked;
pub(crate) mod begin;
mod disks;
mod folder;
pub(crate) mod go_on;
pub(crate) mod host_files;
mod memory_file;
pub(crate) mod moved;

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_hypervisor::Vm;

use crate::agent::Agent;
use crate::node::Node;
use crate::pause::{containers, freeze_all};
use crate::record::{Device, Origin, Record, ShareServer, Volume};
use crate::running::or_end;
use crate::sandbox::Sandbox;
use crate::templates::pages::measure_pages;
use crate::templates::{
    Boots, Manifest, Saved, Shape, Snapshot, Unfinished, apart, check_chosen, create_file, digest,
};
use crate::{Error, Result, VERSION, network, pod_functions};

pub(crate) use self::disks::Copied;
pub(crate) use self::memory_file::{MemoryFile, copy_ahead};

/// The time within which a VMM that was saved goes on.
const RESUME: Duration = Duration::from_secs(20);
/// The pause between two attempts to have it go on.
const AGAIN: Duration = Duration::from_millis(50);
/// The pause between attempts after that time.
const LATER: Duration = Duration::from_secs(5);
/// The longest time that copies of the disks may take: meanwhile the sandbox stands still.
const DISKS: Duration = Duration::from_secs(120);
/// The longest time for which a sandbox stands still to be saved, with its disks.
pub(crate) const LONGEST: Duration = Duration::from_secs(240);

/// Saves the running sandbox `named` as the snapshot `name`. The sandbox goes on. Returns when all
/// of the snapshot is on disk.
///
/// # Errors
/// [`Error::Invalid`] if the sandbox cannot be saved, with the reason; [`Error::TemplateTaken`];
/// [`Error::WrongState`] if its container does not run; the error of the step that failed. Nothing
/// of a snapshot is left then.
pub(crate) async fn create(node: &Node, named: &str, name: &str) -> Result<Manifest> {
    check_chosen(name)?;
    let sandbox = node.find(named)?;
    if let Some(why) = sandbox.look(cannot_save) {
        let what = format!("sandbox {} cannot be saved as a snapshot: {why}", sandbox.name);
        return Err(Error::Invalid(what));
    }
    let volumes = sandbox.look(|record| record.volumes.clone());
    let volumes = host_files::identify(&sandbox.looks, volumes).await?;
    // The image is noted while the sandbox has it: it may be removed before the save ends.
    let image = sandbox.look(|record| record.settings.image_digest.clone());
    let unfinished = node.templates.begin_snapshot(name, &image).await?;
    let saved = async {
        let SavedSandbox { record, machine, volumes, paused } =
            stand_still(node, (&sandbox, volumes), &unfinished).await?;
        let parts = describe(node, &record, volumes, paused).await?;
        Ok::<_, Error>((record, machine, parts))
    };
    let (record, machine, parts) = match saved.await {
        Ok(saved) => saved,
        Err(error) => {
            discard(unfinished).await;
            return Err(error);
        }
    };
    let its = name.to_owned();
    apart(move || finish(unfinished, &record, &its, &machine, parts)).await
}

/// Removes the files of a save that failed. What is left, the next daemon removes.
pub(crate) async fn discard(unfinished: Unfinished) {
    // Freeing the space of a guest's memory takes a while, and this thread serves others.
    let removed = apart(move || {
        drop(unfinished);
        Ok(())
    });
    let _ = removed.await;
}

/// A sandbox that was saved and goes on.
struct SavedSandbox {
    /// Its record when it stood still.
    record: Record,
    /// The machine's state.
    machine: Vec<u8>,
    /// The volumes of those that begin with the snapshot.
    volumes: Vec<Volume>,
    /// For how long it stood still.
    paused: Duration,
}

/// Has a sandbox with these volumes stand still while the files of its snapshot are written. It
/// goes on afterwards in any case: if it does not at once, a task tries on.
///
/// # Errors
/// [`Error::WrongState`] if its container does not run; the error of the step that failed.
async fn stand_still(
    node: &Node,
    (sandbox, volumes): (&Arc<Sandbox>, Vec<Volume>),
    unfinished: &Unfinished,
) -> Result<SavedSandbox> {
    // One save at a time, of a machine that keeps its size.
    let _size = sandbox.wait_to_change_size().await;
    // The agent does not configure the interface: in a fork it would do so, too.
    let _network = sandbox.configuring.lock().await;
    sandbox.agent()?;
    let vm = sandbox.live_vm()?;
    let memory = copy_ahead(node, &*vm, &sandbox.record(), unfinished).await?;
    // From here on no process begins, and nobody else pauses the container. Not before: a guest
    // may have its memory copied for minutes.
    let _turn = sandbox.own.pausing.write().await;
    // The container may have ended, or been paused, since.
    let agent = sandbox.agent()?;
    let record = Record { volumes, ..sandbox.record() };
    let noted = sandbox.update(|record| record.saving.under_way = true).await;
    let begun = Instant::now();
    // Also if the record was not written, the VMM is told to go on: it notes writes until then.
    let saved = match noted {
        Ok(()) => {
            let files = (unfinished, memory);
            save(node, &record, (&*vm, &agent), files, Copied::Written).await
        }
        Err(error) => Err(error),
    };
    let resumed = resume(sandbox, &*vm, &agent).await;
    let paused = begun.elapsed();
    if resumed.is_err() {
        tokio::spawn(resume_later(Arc::clone(sandbox), vm, agent));
    }
    let (machine, volumes) = match (saved, resumed) {
        (Ok(saved), Ok(())) => saved,
        (Err(error), Ok(())) | (Ok(_), Err(error)) => return Err(error),
        (Err(first), Err(second)) => {
            let name = &sandbox.name;
            let what = format!("{first}; and {name} does not go on yet: {second}");
            return Err(Error::Agent(what));
        }
    };
    Ok(SavedSandbox { record, machine, volumes, paused })
}

/// Tries to have a sandbox go on until it does, or ends.
pub(crate) async fn resume_later(sandbox: Arc<Sandbox>, vm: Arc<dyn Vm>, agent: Agent) {
    loop {
        tokio::time::sleep(LATER).await;
        // Not amid the next save, which has it go on, too.
        let _size = sandbox.wait_to_change_size().await;
        let _turn = sandbox.own.pausing.write().await;
        if !sandbox.state().is_live() || sandbox.look(|record| !record.saving.under_way) {
            return;
        }
        match resume(&sandbox, &*vm, &agent).await {
            Ok(()) | Err(Error::VmEnded(_)) => return,
            Err(error) => {
                tracing::warn!(sandbox = sandbox.name, %error, "it stands still after a save");
            }
        }
    }
}

/// The reason for which a sandbox of another version cannot be saved: it has the VMM of that
/// version, and that of this one refuses its saved machine.
const OTHER_VERSION: &str = "another version of Slipway started it; run it anew";

/// Returns why a sandbox cannot be saved as a snapshot, or `None` if it can.
///
/// Test of the reasons: `what_no_snapshot_has_is_named`, below. `docs/snapshots.md`, *What cannot
/// be saved*, lists them.
pub(crate) fn cannot_save(record: &Record) -> Option<&'static str> {
    if record.pod { Some("it is a pod") } else { cannot_save_machine(record) }
}

/// Returns why the machine of a sandbox or a pod cannot be saved, or `None` if it can. Reasons that
/// lie with the containers of a pod are the caller's matter.
pub(crate) fn cannot_save_machine(record: &Record) -> Option<&'static str> {
    let own_device = record.volumes.iter().any(|volume| volume.device != Device::Namespace);
    let of_host =
        |volume: &Volume| volume.host_device.is_some() && !volume.read_only && !volume.overlay;
    let shares = !record.shares.is_empty() || record.share_server != ShareServer::None;
    let sockets = "it has a socket function, to which its guest's connections belong (--sockets)";
    let reasons = [
        (record.booted.is_none() || record.version != VERSION, OTHER_VERSION),
        (record.sockets.is_some(), sockets),
        (record.plugged.own.is_some(), "it has a function of hardware"),
        (shares, "it has directories of the host"),
        (own_device, "a volume of its has a device of its own"),
        (
            record.volumes.iter().any(of_host),
            "it writes to a block device of the host, whose content cannot be copied",
        ),
        (record.shared_root.is_some(), "its root is in shared pages"),
        (record.emulated_nic.is_some(), "its interface is the VMM's own"),
        (record.assigned_function.is_some(), "its VMM has a function of hardware"),
        (!network::further::of(record).is_empty(), "it has several network interfaces"),
    ];
    reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why)
}

/// Stops a sandbox, and copies its memory and its disks. Returns the machine's state, and the
/// volumes of those that begin with the snapshot. The sandbox stands still when this returns.
pub(crate) async fn save(
    node: &Node,
    record: &Record,
    (vm, agent): (&dyn Vm, &Agent),
    (unfinished, memory): (&Unfinished, MemoryFile),
    copied: Copied,
) -> Result<(Vec<u8>, Vec<Volume>)> {
    if !record.run.paused {
        or_end(vm, freeze_all(agent, &containers(record), true)).await?;
    }
    vm.pause().await?;
    let (bytes, sink) = (record.memory_file_bytes(), memory.sink());
    let machine = match memory.ahead {
        true => vm.save_rest(bytes, sink).await?,
        false => vm.save_with_memory(bytes, sink).await?,
    };
    let volumes = disks::copy(node, record, unfinished, copied);
    let volumes = disks::within(DISKS, record, volumes).await?;
    Ok((machine, volumes))
}

/// Has a sandbox go on that was stopped to be saved, however far that came.
///
/// # Errors
/// The error of the step that failed. The record still says that the sandbox is being saved then,
/// so that the next daemon tries again.
pub(crate) async fn resume(sandbox: &Sandbox, vm: &dyn Vm, agent: &Agent) -> Result<()> {
    resume_vm(vm).await?;
    let stopped = sandbox.look(|record| (!record.run.paused).then(|| containers(record)));
    if let Some(stopped) = stopped {
        or_end(vm, freeze_all(agent, &stopped, false)).await?;
    }
    sandbox.update(|record| record.saving.under_way = false).await
}

/// Has a VMM go on. One that still saves refuses for a moment.
///
/// # Errors
/// [`Error::Hypervisor`] with the refusal after [`RESUME`]; [`Error::VmEnded`].
pub(crate) async fn resume_vm(vm: &dyn Vm) -> Result<()> {
    let until = Instant::now() + RESUME;
    loop {
        let resumed = tokio::select! {
            resumed = vm.resume() => resumed,
            ended = vm.wait() => return Err(Error::vm_ended(&ended)),
        };
        match resumed {
            Err(_) if Instant::now() < until => tokio::time::sleep(AGAIN).await,
            resumed => return Ok(resumed?),
        }
    }
}

/// Describes the machine and the container of a sandbox that was saved. The files of the disks are
/// left out. The volumes of a pod are those of its containers.
pub(crate) async fn describe(
    node: &Node,
    record: &Record,
    volumes: Vec<Volume>,
    paused: Duration,
) -> Result<(Shape, Snapshot)> {
    let needs = record.booted_needs();
    let other = || Error::Invalid(format!("sandbox {}: {OTHER_VERSION}", record.name));
    let booted = record.booted.as_ref().ok_or_else(other)?;
    let (kernel, initramfs) = (&booted.kernel, &booted.initramfs);
    let cpu_template = node.config.cpu_template()?;
    let mut shape = Shape::of(record, &Boots { needs, kernel, initramfs, cpu_template });
    // The settings may have changed since.
    shape.cpu_template.clone_from(&booted.cpu_template);
    let slots = pod_functions::plug_slots(record);
    let snapshot = Snapshot {
        sandbox: record.name.clone(),
        origin: Origin { disks: record.disks_id().to_owned(), slots, needs },
        settings: record.settings.clone(),
        paused: record.run.paused,
        cpus: record.cpus.count,
        layers_bytes: record.layers_bytes,
        kernel: record.kernel.clone(),
        accelerator: record.accelerator.clone(),
        volumes,
        files: Vec::new(),
        paused_ns: u64::try_from(paused.as_nanos()).unwrap_or(u64::MAX),
        plugged_bytes: plugged(record),
    };
    Ok((shape, snapshot))
}

/// Returns the bytes that a guest may have plugged beside the memory that it began with. They are
/// more than it has if its VMM did not tell how far the guest has followed.
fn plugged(record: &Record) -> u64 {
    record.memory.granted_bytes.saturating_sub(record.ram_bytes()).min(record.memory.room())
}

/// Writes the machine's state, and gives the snapshot its description and its name.
pub(crate) fn finish(
    unfinished: Unfinished,
    record: &Record,
    name: &str,
    machine: &[u8],
    (shape, mut snapshot): (Shape, Snapshot),
) -> Result<Manifest> {
    let path = unfinished.machine();
    let written = create_file(&path).and_then(|file| file.write_all_at(machine, 0));
    written.map_err(Error::file("cannot write", &path))?;
    let machine_sha256 = digest(machine);
    let path = unfinished.memory();
    let bytes = record.memory_file_bytes();
    let measured = std::fs::File::open(&path).and_then(|file| measure_pages(&file, bytes));
    let (touched_bytes, memory_sha256) = measured.map_err(Error::file("cannot read", &path))?;
    snapshot.files = disks::measure(record, &snapshot.volumes, &unfinished)?;
    // Forks are given the room of their volumes once more.
    let counted = disks::overlays(&record.volumes, &snapshot.files);
    snapshot.layers_bytes = snapshot.layers_bytes.saturating_sub(counted);
    let saved = Saved { touched_bytes, machine_sha256, memory_sha256 };
    let mut manifest = Manifest::new(record, name, shape, saved);
    manifest.snapshot = Some(snapshot);
    unfinished.finish(&manifest)?;
    Ok(manifest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::record_of;
    use crate::record::{
        EmulatedNic, HostDevice, MemoryBounds, Needs, OwnFunction, SandboxState, Share,
    };

    #[test]
    fn what_no_snapshot_has_is_named() {
        let booted = crate::templates::manifest::tests::shape().booted();
        let record = || Record {
            booted: Some(booted.clone()),
            version: VERSION.to_owned(),
            ..record_of(SandboxState::Running)
        };
        assert_eq!(cannot_save(&record()), None);
        let mut reports = record();
        reports.reporting.note(String::new());
        assert_eq!((cannot_save(&reports), reports.booted_needs().reporting), (None, true));
        for version in ["", "0.0.1"] {
            let other = Record { version: version.to_owned(), ..record() };
            assert_eq!(cannot_save(&other), Some(OTHER_VERSION));
        }
        assert_eq!(cannot_save(&Record { booted: None, ..record() }), Some(OTHER_VERSION));
        let why = |change: fn(&mut Record)| {
            let mut record = record();
            change(&mut record);
            cannot_save(&record).unwrap()
        };
        assert!(why(|record| record.pod = true).contains("a pod"));
        assert!(why(|record| record.sockets = Some("/s".into())).contains("socket function"));
        assert!(why(|record| record.shares = vec![Share::default()]).contains("directories"));
        let grows = Record { memory: MemoryBounds::new(1, 2), ..record() };
        assert_eq!(cannot_save(&grows), None, "with room for more memory");
        let granted = Record { memory: grows.memory.with_plugged(1), ..grows.clone() };
        assert_eq!([&record(), &grows, &granted].map(plugged), [0, 0, 1]);
        assert!(why(|record| record.shared_root = Some((1, 2))).contains("shared pages"));
        let mut hardware = record();
        hardware.plugged.own = Some(OwnFunction { pool: "vfs".into(), addresses: Vec::new() });
        assert!(cannot_save(&hardware).unwrap().contains("a function of hardware"));
        let [model, tap, mac] = ["e1000", "tap0", "5a:11:0a:d5:00:02"].map(str::to_owned);
        let emulated_nic = Some(EmulatedNic { model, tap, mac });
        let emulated = Record { emulated_nic, ..record() };
        assert!(cannot_save(&emulated).unwrap().contains("the VMM's own"));
        let volume = |read_only, overlay, device| Volume {
            name: "v".to_owned(),
            path: "/dev/sdb".into(),
            scratch_bytes: None,
            read_only,
            mount_point: String::new(),
            block_size: 0,
            device,
            device_path: String::new(),
            host_device: Some(HostDevice { number: 1, sequence: 2 }),
            file: None,
            stamp: None,
            overlay,
        };
        let with = |volume| cannot_save(&Record { volumes: vec![volume], ..record() });
        assert!(with(volume(false, false, Device::Namespace)).unwrap().contains("block device"));
        assert!(with(volume(true, false, Device::Function)).unwrap().contains("of its own"));
        assert_eq!(with(volume(true, false, Device::Namespace)), None);
        assert_eq!(with(volume(false, true, Device::Namespace)), None);
    }

    #[test]
    fn a_fork_of_a_fork_knows_the_disks_of_the_first() {
        let mut record = record_of(SandboxState::Running);
        assert_eq!(record.disks_id(), record.id);
        let needs = Needs { bridge: true, ..Default::default() };
        record.template = Some("web".to_owned());
        assert_eq!(record.booted_needs(), Needs::of_template(false));
        let booted = crate::templates::manifest::tests::shape().booted();
        record.booted = Some(crate::record::BootRecord { reporting: true, ..booted });
        assert_eq!(record.booted_needs(), Needs { reporting: true, ..Needs::of_template(false) });
        record.origin = Some(Origin { disks: "ffffffffffff".to_owned(), slots: 1, needs });
        assert_eq!((record.disks_id(), record.booted_needs()), ("ffffffffffff", needs));
    }
}
