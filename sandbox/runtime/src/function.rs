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

use crate::config::Config;
use crate::container::OWN;
use crate::copies::Copies;
use crate::node::Node;
use crate::record::{Added, BoundMemory, Device, Disks, EmptyDir, Record, Settings, Volume};
use crate::sandbox::Sandbox;
use crate::{Error, Result, layers, network, pod_functions, process, shares, volume};

/// The id of the image's namespace in the first function.
const IMAGE_NSID: u32 = 1;
/// The id of the volatile layer's namespace in the first function.
pub(crate) const VOLATILE_NSID: u32 = 2;
/// The id of the namespace of the first volume in the first function.
pub(crate) const FIRST_VOLUME_NSID: u32 = 3;
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
/// of [`ids`]. Those of a pod's containers are left out. If an image is not there in full, the
/// fetcher runs when this returns.
///
/// # Errors
/// The errors of [`volume::under_layer`] and [`volume::create_scratch`]; [`Error::Tool`] if
/// the fetcher cannot be started.
pub async fn describe(
    node: &Node,
    sandbox: &Sandbox,
    record: &Record,
) -> Result<Vec<Vec<plane_v1::Namespace>>> {
    let (cache, size) = (node.config.cache_dir(), layers::size(&node.config, record));
    let template = match record.origin {
        Some(_) => sandbox.store.layer(),
        None => {
            let volumes = record.volumes.clone();
            // The containers of a pod bring theirs.
            let has_own = !record.pod && !node.config.layer_template;
            let own = has_own.then(|| sandbox.store.own_layer(OWN));
            let made = sandbox.lane.run(move || {
                volume::create_scratch(&volumes)?;
                volume::under_layer(&cache, size, own)
            });
            made.await?
        }
    };
    if record.has_lazy_image() {
        sandbox.hold_fetcher(Some(node.fetcher.hold().await?));
    }
    let has_image = record.shared_root.is_none();
    let first_nsid = if has_image { IMAGE_NSID } else { VOLATILE_NSID };
    let mut first = Vec::new();
    if !record.pod {
        first.extend(has_image.then(|| image_disk(&node.config, &record.settings)));
        first.push(volatile_disk(&template));
    }
    first.extend(of(record, Device::Namespace).map(volume_disk));
    let own = of(record, Device::Function).map(|volume| vec![volume_disk(volume)]);
    let own = own.map(|disks| numbered(OWN_NSID, disks));
    let mut first = numbered(first_nsid, first);
    if let Some(origin) = &record.origin {
        first.iter_mut().for_each(|one| one.identity.clone_from(&origin.disks));
    }
    Ok(std::iter::once(first).chain(own).collect())
}

/// Returns the identifiers of the namespaces of [`describe`] in the first function.
pub(crate) fn own_namespaces(record: &Record) -> std::ops::Range<u32> {
    let has_image = record.shared_root.is_none();
    let first = if has_image { IMAGE_NSID } else { VOLATILE_NSID };
    let root = if record.pod { 0 } else { FIRST_VOLUME_NSID - first };
    let volumes = of(record, Device::Namespace).map(|_| 1).sum::<u32>();
    first..first + root + volumes
}

/// Describes the disk of a container's image. One that was not there in full when the container was
/// made is read through the fetcher, also once it is.
pub(crate) fn image_disk(config: &Config, settings: &Settings) -> plane_v1::Disk {
    let path = text(&settings.image_path);
    if !settings.lazy {
        return disk(
            0,
            Kind::File(plane_v1::FileDisk { path, read_only: true, ..Default::default() }),
        );
    }
    let digits = settings.image_digest.trim_start_matches("sha256:");
    // The plane refuses a digest of another length.
    let digest = hex::decode(digits).unwrap_or_default();
    let socket_path = text(&config.fetch_socket());
    disk(0, Kind::Lazy(plane_v1::LazyDisk { path, digest, socket_path }))
}

/// Describes the disk in a file of the daemon's own, whose file system keeps `keep_free_bytes`
/// bytes free.
pub(crate) fn file_disk(path: &Path, keep_free_bytes: u64) -> plane_v1::Disk {
    let file = plane_v1::FileDisk { path: text(path), keep_free_bytes, ..Default::default() };
    disk(0, Kind::File(file))
}

pub(crate) fn volatile_disk(template: &Path) -> plane_v1::Disk {
    disk(0, overlay(template))
}

fn overlay(base: &Path) -> Kind {
    Kind::Overlay(plane_v1::OverlayDisk { base_path: text(base), limit_bytes: 0 })
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn disk(block_size: u32, kind: Kind) -> plane_v1::Disk {
    plane_v1::Disk { block_size, kind: Some(kind) }
}

pub(crate) fn volume_disk(volume: &Volume) -> plane_v1::Disk {
    if volume.overlay && !volume.read_only {
        return disk(volume.block_size, overlay(&volume.path));
    }
    let file = plane_v1::FileDisk {
        path: text(&volume.path),
        read_only: volume.read_only,
        pin: false,
        device: volume.host_device.map(Into::into),
        keep_free_bytes: 0,
    };
    disk(volume.block_size, Kind::File(file))
}

fn numbered(first: u32, disks: Vec<plane_v1::Disk>) -> Vec<plane_v1::Namespace> {
    let namespaces = (first..).zip(disks);
    let namespace =
        |(nsid, disk)| plane_v1::Namespace { nsid, disk: Some(disk), ..Default::default() };
    namespaces.map(namespace).collect()
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
                overlay_bytes: record.layers_bytes,
                // slipway-vmm rings without messages; QEMU does not ask for the page.
                doorbells: plane_v1::nvme_controller::DoorbellMode::Rung.into(),
                ..Default::default()
            }),
            id,
        };
        let created = node.plane.clone().create_endpoint(request).await;
        created.map_err(Error::plane)?;
    }
    Ok(sockets(node, record).collect())
}

/// Removes the functions of [`serve`]. Missing ones are no error.
///
/// # Errors
/// [`Error::Plane`] with the first failure. The other functions are removed even so.
pub async fn remove(node: &Node, record: &Record) -> Result<()> {
    node.remove_functions(ids(record)).await
}

/// Returns the request with which the agent creates the container, with these files.
pub fn create_request(record: &Record, copies: Copies) -> agent_v1::CreateContainerRequest {
    let (masked, read_only_paths) = record.settings.process.security.paths();
    agent_v1::CreateContainerRequest {
        id: OWN.to_owned(),
        root: Some(agent_v1::RootFilesystem {
            image: record.shared_root.is_none().then(|| block_device(0, IMAGE_NSID)),
            volatile_layer: Some(block_device(0, VOLATILE_NSID)),
            read_only: record.settings.read_only,
            shared_image: record.shared_root.is_some(),
        }),
        volumes: volumes(record).into_iter().chain(pod_functions::own::volume(record)).collect(),
        process: Some(process::agent_spec(&record.settings.process)),
        hostname: record.hostname.clone(),
        privileged: record.settings.privileged,
        names: network::names(record),
        sockets: record.sockets.is_some(),
        files: copies.files,
        file_dirs: copies.dirs,
        masked,
        read_only_paths,
        shares: shares::for_agent(&record.shares),
        resources: Some(record.limits.into()),
        ..Default::default()
    }
}

/// Returns the request with which the agent creates a container of a pod.
pub fn create_added(
    record: &Record,
    added: &Added,
    disks: &Disks,
    copies: Copies,
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
        volumes: volumes_of(record, added, disks),
        process: Some(process::agent_spec(&added.settings.process)),
        hostname: added.hostname.clone(),
        privileged: added.settings.privileged,
        names: network::names(record),
        sockets: record.sockets.is_some() || added.sockets.is_some(),
        files: copies.files,
        file_dirs: copies.dirs,
        masked,
        read_only_paths,
        in_pod: true,
        shares_processes: added.shares_processes,
        processes_of: added.processes_of.clone(),
        termination_message_path: added.message_path.clone(),
        shares: shares::for_agent(&added.shares),
        resources: Some(added.limits.into()),
        empty_dirs: empty_dirs(record, added),
        empty_dirs_disk: record.empty_dirs.disk.map(|nsid| block_device(0, nsid)),
        memory_node: memory_node(record, added),
    }
}

/// Returns the NUMA node of the guest for a container of a pod, or 0 if it has no region of its
/// own. Returns `None` in a pod without such regions, whose guest has one node.
fn memory_node(record: &Record, added: &Added) -> Option<u32> {
    let has_regions = record.bound.room() > 0;
    has_regions.then(|| added.region.map_or(0, |region| u32::from(BoundMemory::node(region))))
}

/// Returns the directories of the guest in a container of a pod. None in memory may be larger than
/// that.
fn empty_dirs(record: &Record, added: &Added) -> Vec<agent_v1::EmptyDir> {
    let bounded = |dir: &EmptyDir| EmptyDir {
        size_bytes: dir.size_bytes.min(record.memory_bytes),
        ..dir.clone()
    };
    added.empty_dirs.iter().map(|dir| bounded(dir).into()).collect()
}

/// Names a block device by its PCI address, since there may be several NVMe controllers.
fn block_device(function: usize, nsid: u32) -> agent_v1::BlockDevice {
    agent_v1::BlockDevice { pci_address: VmSpec::function_address(function), nsid }
}

fn volumes(record: &Record) -> Vec<agent_v1::Volume> {
    let (mut nsids, mut own) = (FIRST_VOLUME_NSID.., 1..);
    let (sockets, shares) = (record.begins_with_sockets(), record.begins_with_shares());
    let served = [record.network.is_some(), sockets, shares];
    let served = served.iter().filter(|served| **served).count();
    let served = served + network::further::of(record).len();
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
    record.volumes.iter().map(|volume| agent_volume(volume, place(volume.device))).collect()
}

/// Returns the volumes of a container of a pod.
fn volumes_of(record: &Record, added: &Added, disks: &Disks) -> Vec<agent_v1::Volume> {
    let all = added.volumes.iter().zip(&disks.volumes);
    let own = all.map(|(volume, nsid)| agent_volume(volume, Some(block_device(0, *nsid))));
    own.chain(pod_functions::volumes(record, added)).collect()
}

fn agent_volume(volume: &Volume, device: Option<agent_v1::BlockDevice>) -> agent_v1::Volume {
    agent_v1::Volume {
        name: volume.name.clone(),
        device,
        read_only: volume.read_only,
        mount_point: volume.mount_point.clone(),
        device_path: volume.device_path.clone(),
    }
}

#[cfg(test)]
mod tests {
    use slipway_hypervisor::DiskModel;

    use super::*;
    use crate::adopt::tests::{added_of, record_of};
    use crate::emulated;
    use crate::record::{HostDevice, SandboxState};

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
            host_device: None,
            file: None,
            stamp: None,
            overlay: false,
        }
    }

    #[test]
    fn an_image_is_a_namespace_or_shared_pages() {
        let record = record_of(SandboxState::Running);
        let root = |record: &Record| create_request(record, Copies::default()).root.unwrap();
        let disk = root(&record);
        assert_eq!(disk.image.map(|image| image.nsid), Some(IMAGE_NSID));
        assert!(!disk.shared_image);
        let shared = root(&Record { shared_root: Some((1, 2)), ..record });
        assert_eq!((shared.image, shared.shared_image), (None, true));
        assert_eq!(shared.volatile_layer, disk.volatile_layer);
    }

    #[test]
    fn every_container_of_a_sandbox_with_a_socket_function_has_the_library() {
        let (state, disks) =
            (SandboxState::Running, Disks { image: 1, volatile: 2, volumes: vec![] });
        for sockets in [None, Some(PathBuf::from("/s"))] {
            let record = Record { sockets: sockets.clone(), ..record_of(state) };
            let added = create_added(&record, &added_of("a", state), &disks, Copies::default());
            let own = create_request(&record, Copies::default());
            assert_eq!((added.sockets, own.sockets), (sockets.is_some(), sockets.is_some()));
        }
    }

    #[test]
    fn directories_of_a_pod_are_on_its_disk_or_no_larger_than_its_memory() {
        let state = SandboxState::Running;
        let mut record = Record { memory_bytes: 1 << 20, ..record_of(state) };
        let sized = |size_bytes| EmptyDir { size_bytes, ..EmptyDir::default() };
        let empty_dirs = [0, 7, u64::MAX].map(sized).to_vec();
        let added = Added { empty_dirs, ..added_of("a", state) };
        let disks = Disks { image: 1, volatile: 2, volumes: vec![] };
        let request = |record: &Record| create_added(record, &added, &disks, Copies::default());
        let sizes: Vec<_> = request(&record).empty_dirs.iter().map(|dir| dir.size_bytes).collect();
        assert_eq!(sizes, [0, 7, 1 << 20]);
        assert_eq!(request(&record).empty_dirs_disk, None);
        record.empty_dirs.disk = Some(9);
        assert_eq!(request(&record).empty_dirs_disk, Some(block_device(0, 9)));
    }

    #[test]
    fn an_image_that_is_not_there_in_full_is_read_through_the_fetcher() {
        let mut settings = record_of(SandboxState::Running).settings;
        let config = Config { run_dir: "/r".into(), ..Config::default() };
        let kind = |settings: &Settings| image_disk(&config, settings).kind;
        let file = plane_v1::FileDisk { path: "/i".into(), read_only: true, ..Default::default() };
        assert_eq!(kind(&settings), Some(Kind::File(file)));
        settings.lazy = true;
        settings.image_digest = format!("sha256:{}", "0f".repeat(32));
        let socket_path = "/r/fetch.sock".to_owned();
        let lazy = plane_v1::LazyDisk { path: "/i".into(), digest: vec![15; 32], socket_path };
        assert_eq!(kind(&settings), Some(Kind::Lazy(lazy)));
    }

    #[test]
    fn the_plane_is_told_which_device_of_the_host_is_meant() {
        let described = |volume: &Volume| match volume_disk(volume).kind {
            Some(Kind::File(file)) => file.device,
            other => panic!("{other:?}"),
        };
        let file = volume("v", Device::Namespace);
        assert_eq!(described(&file), None);
        let host_device = Some(HostDevice { number: 0x810, sequence: 7 });
        let device = plane_v1::DeviceIdentity { number: 0x810, sequence: 7 };
        assert_eq!(described(&Volume { host_device, ..file }), Some(device));
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
