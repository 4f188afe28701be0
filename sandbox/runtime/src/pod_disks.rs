//! The disks of a pod's containers: namespaces of the pod's first NVMe function, which come and go
//! while its guest runs. One more holds directories that the containers share; it stays. A pod that
//! comes back from a file has them from the start of its VMM ([`saved`]).
//!
//! The identifiers are in a container's record, or the pod's, on disk before they are attached, so
//! that a later daemon detaches them.

use slipway_plane_api::v1 as plane_v1;
use tonic::{Code, Status};

use crate::config::Config;
use crate::function::{file_disk, image_disk, volatile_disk, volume_disk};
use crate::node::Node;
use crate::record::{Added, Disks, Record, Settings, Store, Volume};
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::{Error, Result, function, layers, volume};

/// The greatest identifier of a namespace (`slipway-nvme`).
const MOST_NSID: u32 = 1024;
/// The times that other identifiers are chosen for the disks of a container, because somebody else
/// has attached a disk with one of them meanwhile.
const RACES: usize = 16;

/// Attaches the image that `settings` name, a volatile layer and volumes for a container of a pod
/// that runs. After an error none of them stays attached; a function that does not answer releases
/// them later.
///
/// # Errors
/// [`Error::Plane`]; [`Error::Stopped`] if the container has ended; [`Error::File`] if the record
/// is not saved; the errors of [`volume::under_layer`] and of the fetcher's start.
pub async fn attach(
    node: &Node,
    target: &Target,
    settings: &Settings,
    volumes: &[Volume],
) -> Result<Disks> {
    let sandbox = &target.sandbox;
    let size = sandbox.look(|record| layers::size(&node.config, record));
    let cache = node.config.cache_dir();
    let has_own = !node.config.layer_template;
    let own = has_own.then(|| sandbox.store.own_layer(&target.container.name));
    let under = sandbox.lane.run(move || volume::under_layer(&cache, size, own)).await?;
    if settings.lazy {
        sandbox.hold_fetcher(Some(node.fetcher.hold().await?));
    }
    let root = [image_disk(&node.config, settings), volatile_disk(&under)];
    let all: Vec<plane_v1::Disk> =
        root.into_iter().chain(volumes.iter().map(volume_disk)).collect();
    let mut races = RACES;
    loop {
        let disks = reserve(node, target, volumes.len()).await?;
        let Err(status) = attach_all(node, &sandbox.id, &disks, &all).await else {
            return Ok(disks);
        };
        forget(target);
        // A number that was taken since it was chosen is no fault of the disk's.
        if status.code() != Code::AlreadyExists || races == 0 {
            return Err(Error::plane(status));
        }
        races -= 1;
    }
}

/// Describes the disks that the containers of a pod had when it was saved, and the one of the
/// directories that they share, with the identity by which the guest knows them. Returns an empty
/// list if the sandbox is no pod that comes back from a file.
///
/// # Errors
/// The errors of [`shared_disk`].
pub async fn saved(
    node: &Node,
    sandbox: &Sandbox,
    record: &Record,
) -> Result<Vec<plane_v1::Namespace>> {
    if !record.pod || record.origin.is_none() {
        return Ok(Vec::new());
    }
    let mut disks = of_added(&node.config, &sandbox.store, record);
    if let Some(nsid) = record.empty_dirs.disk {
        disks.push((nsid, shared_disk(node, sandbox).await?));
    }
    let namespace = |(nsid, disk)| plane_v1::Namespace {
        nsid,
        disk: Some(disk),
        identity: record.disks_id().to_owned(),
    };
    Ok(disks.into_iter().map(namespace).collect())
}

/// Describes the disks that the containers of a pod had when it was saved, with their identifiers.
fn of_added(config: &Config, store: &Store, record: &Record) -> Vec<(u32, plane_v1::Disk)> {
    let of_one = |(added, disks): (&Added, &Disks)| {
        let layer = volatile_disk(&store.saved_layer(&added.name));
        let root = [image_disk(config, &added.settings), layer];
        let all = root.into_iter().chain(added.volumes.iter().map(volume_disk));
        disks.all().zip(all).collect::<Vec<_>>()
    };
    record.added_with_disks().flat_map(of_one).collect()
}

/// Detaches the disks of [`attach`]. Missing ones are no error.
///
/// # Errors
/// [`Error::Plane`] with the first failure. The other disks are detached even so.
pub async fn detach(node: &Node, sandbox: &Sandbox, disks: &Disks) -> Result<()> {
    let mut detached = Ok(());
    for nsid in disks.all() {
        detached = detached.and(detach_one(node, &sandbox.id, nsid).await);
    }
    detached
}

/// Chooses the identifiers of a container's namespaces, among those that the pod's first function
/// has free, and saves them in the container's record.
async fn reserve(node: &Node, target: &Target, volumes: usize) -> Result<Disks> {
    let used = used(node, &target.sandbox.id).await?;
    let (name, mut chosen) = (&target.container.name, Err(Error::Stopped));
    let saved = target.sandbox.update(|record| chosen = choose(record, name, volumes, &used)).await;
    match saved {
        Ok(()) => chosen,
        Err(error) => {
            forget(target);
            Err(error)
        }
    }
}

/// Returns the identifiers of the namespaces that a function has; disks that users attached are
/// among them.
pub(crate) async fn used(node: &Node, function: &str) -> Result<Vec<u32>> {
    Ok(numbers(&attached(node, function).await?))
}

/// Returns the identifiers of these namespaces.
fn numbers(attached: &[plane_v1::NamespaceStatus]) -> Vec<u32> {
    attached.iter().map(|one| one.nsid).collect()
}

/// Returns the namespaces that a function has.
async fn attached(node: &Node, function: &str) -> Result<Vec<plane_v1::NamespaceStatus>> {
    let request = plane_v1::GetEndpointRequest { id: function.to_owned() };
    let found = node.plane.clone().get_endpoint(request).await.map_err(Error::plane)?;
    Ok(found.into_inner().namespaces)
}

/// Returns the identifiers that the first function of a sandbox has by the record: of its root and
/// its volumes, and of the disks of a pod.
pub(crate) fn of_record(record: &Record) -> Vec<u32> {
    let pods = all_taken(record, &[]);
    function::own_namespaces(record).chain(pods).collect()
}

/// Describes the disk of the directories that the containers of a pod share. Its file is made
/// unless it is there.
///
/// # Errors
/// The errors of [`volume::create_shared`].
pub async fn shared_disk(node: &Node, sandbox: &Sandbox) -> Result<plane_v1::Disk> {
    let (path, most) = (sandbox.store.empty_dirs(), node.config.empty_dirs_bytes);
    let file = path.clone();
    let keep_free = sandbox.lane.run(move || volume::create_shared(&file, most)).await?;
    Ok(file_disk(&path, keep_free))
}

/// Attaches the disk of the directories that the containers of a pod share, unless it is attached.
/// The caller holds the pod's turn ([`Sandbox::empty_dirs`]).
///
/// # Errors
/// [`Error::Plane`]; [`Error::File`] if the record is not saved.
pub async fn attach_shared(node: &Node, sandbox: &Sandbox, disk: &plane_v1::Disk) -> Result<()> {
    let mut races = RACES;
    loop {
        let attached = attached(node, &sandbox.id).await?;
        let recorded = sandbox.look(|record| record.empty_dirs.disk);
        if recorded.is_some_and(|nsid| is_attached(disk, nsid, &attached)) {
            return Ok(());
        }
        let used = numbers(&attached);
        let mut chosen = Err(Error::Stopped);
        sandbox.update(|record| chosen = choose_shared(record, &used)).await?;
        let outcome = attach_one(node, &sandbox.id, chosen?, disk).await;
        let Err(status) = outcome else { return Ok(()) };
        sandbox.note(|record| record.empty_dirs.disk = None);
        if status.code() != Code::AlreadyExists || races == 0 {
            return Err(Error::plane(status));
        }
        races -= 1;
    }
}

/// Returns whether namespace `nsid` among the `attached` ones is the file `disk`. A user may have
/// detached that, and attached another disk in its place.
fn is_attached(disk: &plane_v1::Disk, nsid: u32, attached: &[plane_v1::NamespaceStatus]) -> bool {
    let Some(plane_v1::disk::Kind::File(file)) = &disk.kind else { return false };
    attached.iter().any(|one| one.nsid == nsid && one.path == file.path)
}

/// Chooses the identifier of the namespace with the directories that the containers of a pod share,
/// as [`choose`] does, and enters it into the record.
fn choose_shared(record: &mut Record, used: &[u32]) -> Result<u32> {
    let mut taken = all_taken(record, used);
    let nsid = take_next(&mut record.attached, &mut taken).ok_or_else(full)?;
    record.empty_dirs.disk = Some(nsid);
    Ok(nsid)
}

/// Returns the identifiers in `used`, and those that the record of a pod has for its disks.
fn all_taken(record: &Record, used: &[u32]) -> Vec<u32> {
    let recorded = record.added.iter().filter_map(|added| added.disks.as_ref());
    let recorded = recorded.flat_map(Disks::all).chain(record.empty_dirs.disk);
    used.iter().copied().chain(recorded).collect()
}

fn full() -> Error {
    Error::Plane("the function has no namespace left".to_owned())
}

/// Chooses the identifiers of the namespaces of container `name`, and enters them into its record.
/// They are not in `used`, no other container has them, and they are not among those that were
/// detached last: a guest that has not noticed yet that a namespace is gone would take the new one
/// for it.
fn choose(record: &mut Record, name: &str, volumes: usize, used: &[u32]) -> Result<Disks> {
    let mut taken = all_taken(record, used);
    let attached = &mut record.attached;
    let mut take = || take_next(attached, &mut taken).ok_or_else(full);
    let (image, volatile) = (take()?, take()?);
    let volumes = (0..volumes).map(|_| take()).collect::<Result<_>>()?;
    let disks = Disks { image, volatile, volumes };
    let added = record.added_mut(name).filter(|added| added.state.is_live());
    added.ok_or(Error::Stopped)?.disks = Some(disks.clone());
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

/// Attaches the disks of a container to a function. After an error none of them stays attached.
async fn attach_all(
    node: &Node,
    function: &str,
    disks: &Disks,
    all: &[plane_v1::Disk],
) -> std::result::Result<(), Status> {
    for (at, (nsid, disk)) in disks.all().zip(all).enumerate() {
        if let Err(status) = attach_one(node, function, nsid, disk).await {
            for nsid in disks.all().take(at) {
                if let Err(error) = detach_one(node, function, nsid).await {
                    tracing::warn!(function, nsid, %error, "a disk of no container stays");
                }
            }
            return Err(status);
        }
    }
    Ok(())
}

async fn attach_one(
    node: &Node,
    function: &str,
    nsid: u32,
    disk: &plane_v1::Disk,
) -> std::result::Result<(), Status> {
    let (endpoint_id, disk) = (function.to_owned(), Some(disk.clone()));
    let request = plane_v1::AttachDiskRequest { endpoint_id, nsid, disk };
    node.plane.clone().attach_disk(request).await.map(drop)
}

async fn detach_one(node: &Node, function: &str, nsid: u32) -> Result<()> {
    let namespace = Some(plane_v1::detach_disk_request::Namespace::Nsid(nsid));
    let request = plane_v1::DetachDiskRequest { endpoint_id: function.to_owned(), namespace };
    Error::unless_gone(node.plane.clone().detach_disk(request).await)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use slipway_plane_api::v1::disk::Kind;

    use super::*;
    use crate::adopt::tests::{added_of, record_of};
    use crate::record::SandboxState;
    use crate::snapshot::begin::tests::snapshot;

    #[test]
    fn a_pod_that_comes_back_has_the_disks_that_its_containers_had() {
        let store = Store::new(Path::new("/s"), "0123456789ab");
        let state = SandboxState::Running;
        let mut pod = Record { pod: true, ..record_of(state) };
        let disks = Some(Disks { image: 7, volatile: 9, volumes: vec![8] });
        let volumes = snapshot().volumes.split_off(1);
        pod.added = vec![added_of("a", state), Added { disks, volumes, ..added_of("b", state) }];
        let described = of_added(&Config::default(), &store, &pod);
        let kinds = described.into_iter().map(|(nsid, disk)| (nsid, disk.kind));
        let file = |path: &str| {
            let path = path.to_owned();
            Kind::File(plane_v1::FileDisk { path, read_only: true, ..Default::default() })
        };
        let layer = volatile_disk(&store.saved_layer("b")).kind;
        let expected = [(7, Some(file("/i"))), (9, layer), (8, Some(file("/data")))];
        assert_eq!(kinds.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_disk_of_shared_directories_has_an_identifier_of_its_own() {
        let added = vec![added_of("a", SandboxState::Starting)];
        let mut record = Record { added, ..record_of(SandboxState::Running) };
        assert_eq!(choose_shared(&mut record, &[1]).unwrap(), 2);
        assert_eq!(record.empty_dirs.disk, Some(2));
        // It is taken although it is not attached yet.
        record.attached = 0;
        let disks = choose(&mut record, "a", 0, &[]).unwrap();
        assert_eq!((disks.image, disks.volatile), (1, 3));
        let all: Vec<u32> = (1..=MOST_NSID).collect();
        assert!(matches!(choose_shared(&mut record, &all), Err(Error::Plane(_))));
    }

    #[test]
    fn another_disk_in_the_place_of_the_shared_one_is_not_taken_for_it() {
        let disk = file_disk(Path::new("/s/empty-dirs.img"), 0);
        let status = |nsid, path: &str| plane_v1::NamespaceStatus {
            nsid,
            path: path.to_owned(),
            ..Default::default()
        };
        let own = status(2, "/s/empty-dirs.img");
        assert!(is_attached(&disk, 2, &[status(1, "/i"), own.clone()]));
        assert!(!is_attached(&disk, 1, &[status(1, "/i"), own.clone()]));
        assert!(!is_attached(&disk, 2, &[status(2, "/users")]), "a user's");
        assert!(!is_attached(&disk, 2, &[status(2, "")]), "a disk in memory");
        assert_eq!(numbers(&[own]), [2]);
    }

    #[test]
    fn identifiers_of_a_containers_disks_are_free_and_recorded() {
        let added = |name| added_of(name, SandboxState::Starting);
        let added = Vec::from(["a", "b", "c"].map(added));
        let mut record = Record { added, ..record_of(SandboxState::Running) };
        let disks = |image, volatile| Disks { image, volatile, volumes: Vec::new() };
        assert_eq!(choose(&mut record, "a", 0, &[1, 3]).unwrap(), disks(2, 4));
        assert_eq!(record.added[0].disks, Some(disks(2, 4)));
        // The first container's identifiers are taken although its disks are not attached yet.
        record.attached = 0;
        assert_eq!(choose(&mut record, "b", 0, &[]).unwrap(), disks(1, 3));
        // An identifier that was detached is used again only after all others.
        record.added[1].disks = None;
        assert_eq!(choose(&mut record, "b", 0, &[]).unwrap(), disks(5, 6));
        // Each volume has one.
        record.added[1].disks = None;
        let (image, volatile, volumes) = (7, 8, vec![10, 11]);
        let expected = Disks { image, volatile, volumes };
        assert_eq!(choose(&mut record, "b", 2, &[9]).unwrap(), expected);
        record.attached = MOST_NSID - 1;
        assert_eq!(choose(&mut record, "c", 0, &[1]).unwrap(), disks(MOST_NSID, 3));
        let all: Vec<u32> = (1..=MOST_NSID).collect();
        assert!(matches!(choose(&mut record, "c", 0, &all), Err(Error::Plane(_))));
        record.added[2].state = SandboxState::Exited;
        assert!(matches!(choose(&mut record, "c", 0, &[]), Err(Error::Stopped)));
        assert!(matches!(choose(&mut record, "d", 0, &[]), Err(Error::Stopped)));
    }
}
