//! The NVMe functions of a sandbox: the disks behind each, and their addresses in the guest.
//!
//! The first function has the image as namespace 1, the volatile layer as 2 and volumes from 3. An
//! image in shared pages (`shared_root`) is no namespace. A volume with a function of its own is
//! namespace 1 of that function. On the guest's bus these functions come first, then the functions
//! of the network (`network`), of sockets (`sockets`) and of directories of the host (`shares`),
//! then the devices that the VMM emulates.

use std::path::{Path, PathBuf};

use slipway_agent_protocol::v1 as agent_v1;
use slipway_hypervisor::VmSpec;
use slipway_plane_api::v1 as plane_v1;
use slipway_plane_api::v1::disk::Kind;
use tonic::Status;

use crate::container::OWN;
use crate::node::Node;
use crate::record::{Added, Device, Disks, Record, Volume};
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::{Error, Result, network, process, shares, volume};

/// The id of the image's namespace in the first function.
const IMAGE_NSID: u32 = 1;
const VOLATILE_NSID: u32 = 2;
const FIRST_VOLUME_NSID: u32 = 3;
/// The greatest identifier of a namespace (`slipway-nvme`).
const MOST_NSID: u32 = 1024;
/// The times that other identifiers are chosen for the disks of a container, because somebody else
/// has attached a disk with one of them meanwhile.
const RACES: usize = 16;
/// The only namespace of a function that one volume has for itself.
const OWN_NSID: u32 = 1;

/// Returns the plane's ids of the sandbox's NVMe functions, in their order on the bus. The first id
/// is the sandbox's own.
pub fn ids(record: &Record) -> impl Iterator<Item = String> {
    let (id, own) = (record.id.clone(), of(record, Device::Function).count());
    (0..=own).map(move |number| match number {
        0 => id.clone(),
        number => format!("{id}.{number}"),
    })
}

/// Returns the volumes behind devices of one kind.
fn of(record: &Record, device: Device) -> impl Iterator<Item = &Volume> {
    record.volumes.iter().filter(move |volume| volume.device == device)
}

/// Creates the missing disks of the sandbox. Returns the namespaces of each function, in the order
/// of [`ids`].
///
/// # Errors
/// The errors of [`volume::volatile_template`] and [`volume::create_scratch`].
pub async fn describe(
    node: &Node,
    sandbox: &Sandbox,
    record: &Record,
) -> Result<Vec<Vec<plane_v1::Namespace>>> {
    let (cache, size) = (node.config.cache_dir(), node.config.volatile_layer_bytes);
    let volumes = record.volumes.clone();
    let made = sandbox.lane.run(move || {
        volume::create_scratch(&volumes)?;
        volume::volatile_template(&cache, size)
    });
    let template = made.await?;
    let has_image = record.shared_root.is_none();
    let first_nsid = if has_image { IMAGE_NSID } else { VOLATILE_NSID };
    let mut first = Vec::new();
    if !record.pod {
        first.extend(has_image.then(|| image_disk(&record.settings.image_path)));
        first.push(volatile_disk(&template));
    }
    first.extend(of(record, Device::Namespace).map(volume_disk));
    let own = of(record, Device::Function).map(|volume| vec![volume_disk(volume)]);
    let own = own.map(|disks| numbered(OWN_NSID, disks));
    Ok(std::iter::once(numbered(first_nsid, first)).chain(own).collect())
}

fn image_disk(path: &Path) -> plane_v1::Disk {
    disk(0, Kind::File(plane_v1::FileDisk { path: text(path), read_only: true, pin: false }))
}

fn volatile_disk(template: &Path) -> plane_v1::Disk {
    disk(0, Kind::Overlay(plane_v1::OverlayDisk { base_path: text(template), limit_bytes: 0 }))
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn disk(block_size: u32, kind: Kind) -> plane_v1::Disk {
    plane_v1::Disk { block_size, kind: Some(kind) }
}

fn volume_disk(volume: &Volume) -> plane_v1::Disk {
    let file =
        plane_v1::FileDisk { path: text(&volume.path), read_only: volume.read_only, pin: false };
    disk(volume.block_size, Kind::File(file))
}

fn numbered(first: u32, disks: Vec<plane_v1::Disk>) -> Vec<plane_v1::Namespace> {
    let namespaces = (first..).zip(disks);
    namespaces.map(|(nsid, disk)| plane_v1::Namespace { nsid, disk: Some(disk) }).collect()
}

/// Returns the sockets of the functions, in the order of [`ids`].
pub fn sockets<'a>(node: &Node, record: &'a Record) -> impl Iterator<Item = PathBuf> + use<'a> {
    let run_dir = node.run_dir(&record.id);
    (0..ids(record).count()).map(move |number| run_dir.join(format!("nvme-{number}.sock")))
}

/// Makes the plane serve the functions. When this returns, their sockets accept the VMM.
///
/// # Errors
/// [`Error::Plane`].
pub async fn serve(
    node: &Node,
    record: &Record,
    uid: u32,
    memory: &plane_v1::ClientMemory,
    functions: Vec<Vec<plane_v1::Namespace>>,
) -> Result<Vec<PathBuf>> {
    for ((id, namespaces), socket) in ids(record).zip(functions).zip(sockets(node, record)) {
        let request = plane_v1::CreateEndpointRequest {
            virtio_net: None,
            memory: Some(*memory),
            socket_path: text(&socket),
            owner: Some(plane_v1::Owner { uid, gid: uid }),
            nvme: Some(plane_v1::NvmeController {
                serial: id.to_uppercase(),
                namespaces,
                // slipway-vmm rings without messages; QEMU does not ask for the page.
                doorbells: plane_v1::nvme_controller::DoorbellMode::Rung.into(),
                ..Default::default()
            }),
            id,
        };
        let created = node.plane.clone().create_endpoint(request).await;
        created.map_err(|status| Error::Plane(status.message().to_owned()))?;
    }
    Ok(sockets(node, record).collect())
}

/// Removes the functions of [`serve`]. Missing ones are no error.
///
/// # Errors
/// [`Error::Plane`] with the first failure. The other functions are removed even so.
pub async fn remove(node: &Node, record: &Record) -> Result<()> {
    let mut removed = Ok(());
    for id in ids(record) {
        let request = plane_v1::RemoveEndpointRequest { id };
        match node.plane.clone().remove_endpoint(request).await {
            Err(status) if status.code() != tonic::Code::NotFound => {
                removed = removed.and(Err(Error::Plane(status.message().to_owned())));
            }
            _ => {}
        }
    }
    removed
}

/// Attaches an image and a volatile layer to the first function of a pod that runs, for one of its
/// containers. The identifiers of the two are in the container's record on disk before they are
/// attached, so that a later daemon detaches them. After an error neither is attached.
///
/// # Errors
/// [`Error::Plane`]; [`Error::Stopped`] if the container has ended; [`Error::File`] if the record
/// is not saved; the errors of [`volume::volatile_template`].
pub async fn attach_root(node: &Node, target: &Target, image: &Path) -> Result<Disks> {
    let sandbox = &target.sandbox;
    let (cache, size) = (node.config.cache_dir(), node.config.volatile_layer_bytes);
    let template = sandbox.lane.run(move || volume::volatile_template(&cache, size)).await?;
    let mut races = RACES;
    loop {
        let disks = reserve(node, target).await?;
        let both = [image_disk(image), volatile_disk(&template)];
        let Err(status) = attach_both(node, &sandbox.id, disks, both).await else {
            return Ok(disks);
        };
        forget(target);
        // A number that was taken since it was chosen is no fault of the disk's.
        if status.code() != tonic::Code::AlreadyExists || races == 0 {
            return Err(Error::Plane(status.message().to_owned()));
        }
        races -= 1;
    }
}

/// Detaches the disks of [`attach_root`]. Missing ones are no error.
///
/// # Errors
/// [`Error::Plane`] with the first failure. The other disk is detached even so.
pub async fn detach_root(node: &Node, sandbox: &Sandbox, disks: Disks) -> Result<()> {
    let image = detach(node, &sandbox.id, disks.image).await;
    image.and(detach(node, &sandbox.id, disks.volatile).await)
}

/// Chooses the identifiers of a container's namespaces, among those that the pod's first function
/// has free, and saves them in the container's record.
async fn reserve(node: &Node, target: &Target) -> Result<Disks> {
    let request = plane_v1::GetEndpointRequest { id: target.sandbox.id.clone() };
    let function = node.plane.clone().get_endpoint(request).await;
    let function = function.map_err(|status| Error::Plane(status.message().to_owned()))?;
    // Disks that users attached are among them.
    let used: Vec<u32> = function.into_inner().namespaces.iter().map(|one| one.nsid).collect();
    let mut chosen = Err(Error::Stopped);
    let saved = target
        .sandbox
        .update(|record| chosen = choose(record, &target.container.name, &used))
        .await;
    match saved {
        Ok(()) => chosen,
        Err(error) => {
            forget(target);
            Err(error)
        }
    }
}

/// Chooses the identifiers of the namespaces of container `name`, and enters them into its record.
/// They are not in `used`, no other container has them, and they are not among those that were
/// detached last: a guest that has not noticed yet that a namespace is gone would take the new one
/// for it.
fn choose(record: &mut Record, name: &str, used: &[u32]) -> Result<Disks> {
    let recorded = record.added.iter().filter_map(|added| added.disks);
    let recorded = recorded.flat_map(|disks| [disks.image, disks.volatile]);
    let mut taken: Vec<u32> = used.iter().copied().chain(recorded).collect();
    let none = || Error::Plane("the function has no namespace left".to_owned());
    let image = take_next(&mut record.attached, &mut taken).ok_or_else(none)?;
    let volatile = take_next(&mut record.attached, &mut taken).ok_or_else(none)?;
    let disks = Disks { image, volatile };
    let added = record.added_mut(name).filter(|added| added.state.is_live());
    added.ok_or(Error::Stopped)?.disks = Some(disks);
    Ok(disks)
}

/// Takes the identifier after the one that was used last, or the next one that is not taken.
/// Returns `None` if all are.
fn take_next(attached: &mut u32, taken: &mut Vec<u32>) -> Option<u32> {
    let next = |_| {
        let nsid = *attached % MOST_NSID + 1;
        *attached = attached.wrapping_add(1);
        nsid
    };
    let nsid = (0..MOST_NSID).map(next).find(|nsid| !taken.contains(nsid))?;
    taken.push(nsid);
    Some(nsid)
}

/// Takes the identifiers of a container's namespaces, which are not attached, out of its record in
/// memory.
fn forget(target: &Target) {
    target.sandbox.note(|record| {
        if let Some(added) = record.added_mut(&target.container.name) {
            added.disks = None;
        }
    });
}

/// Attaches the image and the volatile layer of a container to a function. After an error neither
/// is attached.
async fn attach_both(
    node: &Node,
    function: &str,
    disks: Disks,
    [image, volatile]: [plane_v1::Disk; 2],
) -> std::result::Result<(), Status> {
    attach(node, function, disks.image, image).await?;
    let attached = attach(node, function, disks.volatile, volatile).await;
    if attached.is_err()
        && let Err(error) = detach(node, function, disks.image).await
    {
        tracing::warn!(function, %error, "the image of a container that does not start stays");
    }
    attached
}

async fn attach(
    node: &Node,
    function: &str,
    nsid: u32,
    disk: plane_v1::Disk,
) -> std::result::Result<(), Status> {
    let (endpoint_id, disk) = (function.to_owned(), Some(disk));
    let request = plane_v1::AttachDiskRequest { endpoint_id, nsid, disk };
    node.plane.clone().attach_disk(request).await.map(drop)
}

async fn detach(node: &Node, function: &str, nsid: u32) -> Result<()> {
    let namespace = Some(plane_v1::detach_disk_request::Namespace::Nsid(nsid));
    let request = plane_v1::DetachDiskRequest { endpoint_id: function.to_owned(), namespace };
    match node.plane.clone().detach_disk(request).await {
        Err(status) if status.code() != tonic::Code::NotFound => {
            Err(Error::Plane(status.message().to_owned()))
        }
        _ => Ok(()),
    }
}

/// Returns the request with which the agent creates the container, with these files.
pub fn create_request(
    record: &Record,
    files: Vec<agent_v1::File>,
) -> agent_v1::CreateContainerRequest {
    let (masked, read_only_paths) = record.settings.process.security.paths();
    agent_v1::CreateContainerRequest {
        id: OWN.to_owned(),
        root: Some(agent_v1::RootFilesystem {
            image: record.shared_root.is_none().then(|| block_device(0, IMAGE_NSID)),
            volatile_layer: Some(block_device(0, VOLATILE_NSID)),
            read_only: record.settings.read_only,
            shared_image: record.shared_root.is_some(),
        }),
        volumes: volumes(record),
        process: Some(process::agent_spec(&record.settings.process)),
        hostname: record.hostname.clone(),
        privileged: record.settings.privileged,
        names: network::names(record),
        sockets: record.sockets.is_some(),
        files,
        masked,
        read_only_paths,
        shares: shares::for_agent(&record.shares),
        ..Default::default()
    }
}

/// Returns the request with which the agent creates a container of a pod.
pub fn create_added(
    record: &Record,
    added: &Added,
    disks: Disks,
    files: Vec<agent_v1::File>,
) -> agent_v1::CreateContainerRequest {
    let (masked, read_only_paths) = added.settings.process.security.paths();
    agent_v1::CreateContainerRequest {
        id: added.name.clone(),
        root: Some(agent_v1::RootFilesystem {
            image: Some(block_device(0, disks.image)),
            volatile_layer: Some(block_device(0, disks.volatile)),
            read_only: added.settings.read_only,
            shared_image: false,
        }),
        process: Some(process::agent_spec(&added.settings.process)),
        hostname: added.hostname.clone(),
        privileged: added.settings.privileged,
        names: network::names(record),
        files,
        masked,
        read_only_paths,
        in_pod: true,
        shares_processes: added.shares_processes,
        termination_message_path: added.message_path.clone(),
        shares: shares::for_agent(&added.shares),
        resources: Some(added.limits.into()),
        ..Default::default()
    }
}

/// Names a block device by its PCI address, since there may be several NVMe controllers.
fn block_device(function: usize, nsid: u32) -> agent_v1::BlockDevice {
    agent_v1::BlockDevice { pci_address: VmSpec::function_address(function), nsid }
}

fn volumes(record: &Record) -> Vec<agent_v1::Volume> {
    let (mut nsids, mut own) = (FIRST_VOLUME_NSID.., 1..);
    let served = [record.network.is_some(), record.sockets.is_some(), record.begins_with_shares()];
    let served = served.iter().filter(|served| **served).count();
    let mut emulated = ids(record).count() + served..;
    let mut place = |device: Device| {
        Some(match device {
            Device::Namespace => block_device(0, nsids.next()?),
            Device::Function => block_device(own.next()?, OWN_NSID),
            Device::VmmNvme => block_device(emulated.next()?, 1),
            // A virtio block device has no namespaces: the function is the disk.
            Device::VmmVirtioBlk => block_device(emulated.next()?, 0),
        })
    };
    let volumes = record.volumes.iter().map(|volume| agent_v1::Volume {
        name: volume.name.clone(),
        device: place(volume.device),
        read_only: volume.read_only,
        mount_point: volume.mount_point.clone(),
        device_path: volume.device_path.clone(),
    });
    volumes.collect()
}

#[cfg(test)]
mod tests {
    use slipway_hypervisor::DiskModel;

    use super::*;
    use crate::adopt::tests::{added_of, record_of};
    use crate::emulated;
    use crate::record::SandboxState;

    fn volume(name: &str, device: Device) -> Volume {
        Volume {
            name: name.to_owned(),
            path: PathBuf::from("/v"),
            scratch_bytes: None,
            read_only: false,
            mount_point: String::new(),
            block_size: 0,
            device,
            device_path: String::new(),
        }
    }

    #[test]
    fn identifiers_of_a_containers_disks_are_free_and_recorded() {
        let added = |name| added_of(name, SandboxState::Starting);
        let added = Vec::from(["a", "b", "c"].map(added));
        let mut record = Record { added, ..record_of(SandboxState::Running) };
        let disks = |image, volatile| Disks { image, volatile };
        assert_eq!(choose(&mut record, "a", &[1, 3]).unwrap(), disks(2, 4));
        assert_eq!(record.added[0].disks, Some(disks(2, 4)));
        // Those of the first container are not attached yet.
        record.attached = 0;
        assert_eq!(choose(&mut record, "b", &[]).unwrap(), disks(1, 3));
        // What was detached last is not used again before all others were.
        record.added[1].disks = None;
        assert_eq!(choose(&mut record, "b", &[]).unwrap(), disks(5, 6));
        record.attached = MOST_NSID - 1;
        assert_eq!(choose(&mut record, "c", &[1]).unwrap(), disks(MOST_NSID, 3));
        let all: Vec<u32> = (1..=MOST_NSID).collect();
        assert!(matches!(choose(&mut record, "c", &all), Err(Error::Plane(_))));
        record.added[2].state = SandboxState::Exited;
        assert!(matches!(choose(&mut record, "c", &[]), Err(Error::Stopped)));
        assert!(matches!(choose(&mut record, "d", &[]), Err(Error::Stopped)));
    }

    #[test]
    fn an_image_is_a_namespace_or_shared_pages() {
        let record = record_of(SandboxState::Running);
        let root = |record: &Record| create_request(record, Vec::new()).root.unwrap();
        let disk = root(&record);
        assert_eq!(disk.image.map(|image| image.nsid), Some(IMAGE_NSID));
        assert!(!disk.shared_image);
        let shared = root(&Record { shared_root: Some((1, 2)), ..record });
        assert_eq!((shared.image, shared.shared_image), (None, true));
        assert_eq!(shared.volatile_layer, disk.volatile_layer);
    }

    #[test]
    fn every_volume_is_found_where_its_device_is() {
        let devices = [Device::VmmNvme, Device::Function, Device::Namespace, Device::VmmVirtioBlk];
        let names = ["a", "b", "c", "d"];
        let mut volumes_of: Vec<_> =
            names.iter().zip(devices).map(|(name, device)| volume(name, device)).collect();
        volumes_of.push(volume("e", Device::Function));
        volumes_of.push(volume("f", Device::Namespace));
        let record = Record { volumes: volumes_of, ..record_of(SandboxState::Running) };
        let ids: Vec<String> = ids(&record).collect();
        assert_eq!(ids, ["0123456789ab", "0123456789ab.1", "0123456789ab.2"]);
        let places = volumes(&record).into_iter().map(|volume| {
            let device = volume.device.unwrap();
            (volume.name, device.pci_address, device.nsid)
        });
        let expected = [
            ("a", "0000:00:07.0", 1),
            ("b", "0000:00:05.0", 1),
            ("c", "0000:00:04.0", 3),
            ("d", "0000:00:08.0", 0),
            ("e", "0000:00:06.0", 1),
            ("f", "0000:00:04.0", 4),
        ];
        let expected =
            expected.map(|(name, address, nsid)| (name.to_owned(), address.to_owned(), nsid));
        assert_eq!(places.collect::<Vec<_>>(), expected);
        let with_sockets = Record { sockets: Some("/s".into()), ..record.clone() };
        let last = volumes(&with_sockets).swap_remove(3).device.unwrap();
        assert_eq!(last.pci_address, "0000:00:09.0");
        let shares = vec![crate::record::Share::default(); 2];
        let with_shares = Record { shares, ..with_sockets };
        let last = volumes(&with_shares).swap_remove(3).device.unwrap();
        assert_eq!(last.pci_address, "0000:00:0a.0");
        let models: Vec<_> = emulated::disks(&record).iter().map(|disk| disk.model).collect();
        assert_eq!(models, [DiskModel::Nvme, DiskModel::VirtioBlk]);
    }
}
