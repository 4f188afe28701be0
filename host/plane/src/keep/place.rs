//! The place where one endpoint is kept.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use prost::Message;
use slipway_disks::{Lasts, device};
use slipway_keeper::Shelf;
use slipway_plane_api::{v1, vf_v1};
use slipway_ram::{Lasting, Snapshots};
use slipway_vfio_user::{Config, EndpointParts, HOST_SLOTS, KEPT_LEN, Kept};

use crate::Error;

/// The size in bytes of the memory for two copies of the description.
pub const DESCRIPTION_LEN: usize = 256 << 10;

/// The description of an endpoint's present state.
#[derive(Clone, PartialEq, Message)]
pub struct Description {
    /// The request that would make the endpoint as it is now, with its present disks.
    #[prost(message, optional, tag = "1")]
    pub request: Option<v1::CreateEndpointRequest>,
    /// The endpoint's limits, if they were changed since it was made.
    #[prost(message, optional, tag = "2")]
    pub limits: Option<v1::Limits>,
    /// The slots of the contents of disks in memory, by namespace.
    #[prost(btree_map = "uint32, uint32", tag = "3")]
    pub contents: BTreeMap<u32, u32>,
    /// The devices that disks were on when they were described, by namespace.
    #[prost(btree_map = "uint32, message", tag = "4")]
    pub devices: BTreeMap<u32, v1::DeviceIdentity>,
}

impl Description {
    fn request(&mut self) -> &mut v1::CreateEndpointRequest {
        self.request.get_or_insert_default()
    }

    fn namespaces(&mut self) -> &mut Vec<v1::Namespace> {
        &mut self.request().nvme.get_or_insert_default().namespaces
    }
}

/// The place where one endpoint is kept.
pub struct KeptPlace {
    /// The number of the endpoint's shelf.
    pub(super) number: u32,
    pub(super) shelf: Shelf,
    stored: Snapshots,
    description: Description,
    session: Lasting,
    /// The journal of the controller or network function.
    pub journal: Lasting,
    /// The descriptors that a predecessor left, by slot.
    left_descriptors: BTreeMap<u32, OwnedFd>,
    witness: Arc<OwnedFd>,
}

impl KeptPlace {
    /// Makes a place in `memory`, which is the part after the head. `left_descriptors` holds what a
    /// predecessor left on the shelf.
    pub(super) fn new(
        number: u32,
        shelf: Shelf,
        memory: &Lasting,
        witness: Arc<OwnedFd>,
        left_descriptors: BTreeMap<u32, OwnedFd>,
    ) -> Option<Self> {
        let (stored, rest) = memory.split(DESCRIPTION_LEN)?;
        let (session, journal) = rest.split(KEPT_LEN)?;
        let stored = Snapshots::new(&stored)?;
        let description = Description::default();
        Some(Self {
            number,
            shelf,
            stored,
            description,
            session,
            journal,
            left_descriptors,
            witness,
        })
    }

    /// Reads the description that a predecessor stored, and clears the contents that it does not
    /// name. Returns whether there is a valid one.
    pub(super) fn load(&mut self) -> bool {
        let stored = self.stored.load();
        let read = stored.and_then(|stored| Description::decode(stored.as_slice()).ok());
        let Some(description) = read.filter(|read| read.request.is_some()) else { return false };
        self.description = description;
        self.clear_unnamed();
        true
    }

    /// Clears the contents that a predecessor was killed over: it had not described them yet, or
    /// not taken them off the shelf. Their memory would last as long as the endpoint.
    fn clear_unnamed(&mut self) {
        let named = |slot: &u32| self.description.contents.values().any(|taken| taken == slot);
        let left = self.left_descriptors.keys().copied();
        let unnamed: Vec<u32> =
            left.filter(|slot| HOST_SLOTS.contains(slot) && !named(slot)).collect();
        for slot in unnamed {
            self.left_descriptors.remove(&slot);
            self.clear_slot(slot);
        }
    }

    /// Returns the number of the endpoint's shelf.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the request that would make the endpoint as it is now.
    pub fn request(&self) -> v1::CreateEndpointRequest {
        self.description.request.clone().unwrap_or_default()
    }

    /// Returns the endpoint's limits, or `None` if they are those that it was made with.
    pub fn limits(&self) -> Option<v1::Limits> {
        self.description.limits
    }

    /// Stores `request` as the description of a new endpoint.
    pub(super) fn describe(&mut self, request: &v1::CreateEndpointRequest) -> Result<(), Error> {
        self.change(|description| {
            description.request = Some(request.clone());
            description.devices = devices_of(request);
        })
    }

    /// Stores the endpoint's new limits.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the description is too long with them. What was stored stays.
    pub fn limit(&mut self, limits: v1::Limits) -> Result<(), Error> {
        self.change(|description| description.limits = Some(limits))
    }

    /// Stores the new settings of the endpoint's port.
    ///
    /// # Errors
    /// As [`KeptPlace::limit`].
    pub fn set_port(&mut self, port: &v1::SwitchPort) -> Result<(), Error> {
        self.change(|description| {
            let net = description.request().virtio_net.get_or_insert_default();
            (net.spoof_check, net.trust, net.vlan) = (port.spoof_check, port.trust, port.vlan);
            (net.link, net.max_rate, net.max_burst) = (port.link, port.max_rate, port.max_burst);
            (net.receive_rate, net.receive_burst) = (port.receive_rate, port.receive_burst);
        })
    }

    /// Stores the client that the endpoint is opened for.
    ///
    /// # Errors
    /// As [`KeptPlace::limit`].
    pub fn dedicate(&mut self, client: &vf_v1::Client) -> Result<(), Error> {
        self.change(|description| {
            let request = description.request();
            (request.owner, request.memory) = (client.user.or(request.owner), client.memory);
            if let Some(net) = &mut request.virtio_net {
                net.addresses.clone_from(&client.addresses);
                if !client.mac.is_empty() {
                    net.mac.clone_from(&client.mac);
                }
                if client.max_rate > 0 {
                    (net.max_rate, net.max_burst) = (client.max_rate, client.max_burst);
                }
                if client.receive_rate > 0 {
                    let rate = (client.receive_rate, client.receive_burst);
                    (net.receive_rate, net.receive_burst) = rate;
                }
            }
        })
    }

    /// Adds a namespace to the description. `content` is the content of its disk, if that is kept
    /// here.
    ///
    /// # Errors
    /// As [`KeptPlace::limit`], and those of [`KeptPlace::put_content`]. Nothing is kept of the
    /// namespace then, so that another attempt may have another content.
    pub fn attach(
        &mut self,
        namespace: v1::Namespace,
        content: Option<&OwnedFd>,
    ) -> Result<(), Error> {
        if let Some(file) = content {
            self.put_content(namespace.nsid, file)?;
        }
        let nsid = namespace.nsid;
        let device = namespace.disk.as_ref().and_then(device::of);
        let described = self.change(|description| {
            description.devices.extend(device.map(|device| (nsid, device)));
            description.namespaces().push(namespace);
        });
        if described.is_err() {
            self.clear_content(nsid);
        }
        described
    }

    /// Removes these namespaces from the description.
    ///
    /// # Errors
    /// As [`KeptPlace::limit`].
    pub fn detach(&mut self, nsids: &[u32]) -> Result<(), Error> {
        let mut slots = Vec::new();
        self.change(|description| {
            description.namespaces().retain(|one| !nsids.contains(&one.nsid));
            description.devices.retain(|nsid, _| !nsids.contains(nsid));
            slots.extend(nsids.iter().filter_map(|nsid| description.contents.remove(nsid)));
        })?;
        slots.into_iter().for_each(|slot| self.clear_slot(slot));
        Ok(())
    }

    /// Takes the content of a disk off the shelf. The stored description does not have it.
    fn clear_content(&mut self, nsid: u32) {
        if let Some(slot) = self.description.contents.remove(&nsid) {
            self.clear_slot(slot);
        }
    }

    fn clear_slot(&self, slot: u32) {
        // An error means that the keeper is gone, and then it holds nothing.
        let _ = self.shelf.clear(slot);
    }

    /// Changes the description and stores it. A description that is too long is not stored, and the
    /// endpoint keeps its earlier description.
    fn change(&mut self, change: impl FnOnce(&mut Description)) -> Result<(), Error> {
        let before = self.description.clone();
        change(&mut self.description);
        if self.stored.store(&self.description.encode_to_vec()) {
            return Ok(());
        }
        // The one that was stored last is the one before.
        self.description = before;
        Err(too_long())
    }

    /// Stores the description, from which a successor continues.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is too long. Then no description is stored, and a successor does
    /// not know the endpoint.
    pub fn store(&mut self) -> Result<(), Error> {
        if self.stored.store(&self.description.encode_to_vec()) {
            return Ok(());
        }
        // No successor is better than one with other disks.
        let _ = self.stored.store(&[]);
        Err(too_long())
    }

    /// Returns the parts of the place that the vfio-user endpoint uses, with the descriptors that a
    /// predecessor left and no [disk](Self::predecessor_disk) has taken.
    pub fn session_parts(&mut self) -> Kept {
        let found = std::mem::take(&mut self.left_descriptors);
        Kept { shelf: self.shelf.clone(), memory: self.session.clone(), found }
    }

    /// Returns the resources for opening a new disk of the endpoint.
    pub fn lasts(&self) -> Lasts {
        Lasts { witness: self.witness.clone(), content: None, device: None }
    }

    /// Returns the resources for opening the disk that namespace `nsid` had under a predecessor.
    ///
    /// # Errors
    /// The content of the disk is missing, and a new content would make it another disk.
    pub fn predecessor_disk(&mut self, nsid: u32) -> Result<Lasts, Error> {
        let device = self.description.devices.get(&nsid).copied();
        let lasts = Lasts { device, ..self.lasts() };
        let Some(slot) = self.description.contents.get(&nsid) else { return Ok(lasts) };
        let content = self.left_descriptors.remove(slot);
        let lost = || Error::Resources(format!("the content of namespace {nsid} was not kept"));
        Ok(Lasts { content: Some(content.ok_or_else(lost)?), ..lasts })
    }

    /// Leaves the content of a disk in memory on the shelf, unless that of namespace `nsid` is
    /// there already, from a predecessor. The slot is in the stored description only after
    /// [`KeptPlace::store`] or the next change, so that one store does for all disks of an
    /// endpoint. A successor that comes before makes the disk anew, which no client has used.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the endpoint has as many disks in memory as its shelf has slots for;
    /// [`Error::Resources`] if the keeper is gone.
    pub fn put_content(&mut self, nsid: u32, file: &OwnedFd) -> Result<(), Error> {
        let known = &mut self.description.contents;
        if known.contains_key(&nsid) {
            return Ok(());
        }
        let free = HOST_SLOTS.clone().find(|slot| !known.values().any(|taken| taken == slot));
        let slot =
            free.ok_or_else(|| Error::Invalid("too many disks in memory to be kept".into()))?;
        let put = self.shelf.put(slot, file.as_fd());
        put.map_err(|error| Error::Resources(error.to_string()))?;
        known.insert(nsid, slot);
        Ok(())
    }
}

/// Returns the identities of the devices of an endpoint's disks, by namespace.
fn devices_of(request: &v1::CreateEndpointRequest) -> BTreeMap<u32, v1::DeviceIdentity> {
    let namespaces = request.nvme.iter().flat_map(|nvme| &nvme.namespaces);
    let identity = |one: &v1::Namespace| Some((one.nsid, device::of(one.disk.as_ref()?)?));
    namespaces.filter_map(identity).collect()
}

fn too_long() -> Error {
    Error::Invalid("the endpoint's description is too long to be kept".into())
}

/// Returns the parts of an endpoint, with a predecessor's state if there is any.
///
/// # Errors
/// The errors of [`EndpointParts::kept`].
pub fn endpoint_parts(
    config: &Config,
    place: Option<&mut KeptPlace>,
) -> std::io::Result<EndpointParts> {
    match place {
        Some(place) => EndpointParts::kept(config, place.session_parts()),
        None => Ok(EndpointParts::new(config)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use slipway_keeper::Keeper;
    use slipway_vfio_user::KEPT_SLOTS;

    use super::*;

    /// Makes a place with a keeper of its own, which is a thread. Returns its memory, too.
    fn place(dir: &std::path::Path) -> (KeptPlace, Lasting) {
        let path = dir.join("keeper");
        let served = path.clone();
        std::thread::spawn(move || slipway_keeper::serve(&served));
        let keeper = loop {
            match Keeper::connect(&path) {
                Ok(keeper) => break Arc::new(keeper),
                Err(_) => std::thread::yield_now(),
            }
        };
        let memory = Lasting::new("test", DESCRIPTION_LEN + KEPT_LEN + 4096).unwrap();
        let witness = Arc::new(std::fs::File::open("/dev/null").unwrap().into());
        let shelf = Shelf::new(keeper, 0..KEPT_SLOTS);
        (KeptPlace::new(0, shelf, &memory, witness, BTreeMap::new()).unwrap(), memory)
    }

    /// Returns a request whose description has some more than `len` bytes.
    fn request(len: usize) -> v1::CreateEndpointRequest {
        let nvme = v1::NvmeController { serial: "x".repeat(len), ..Default::default() };
        v1::CreateEndpointRequest { nvme: Some(nvme), ..Default::default() }
    }

    /// Stores the longest request that fits, and returns its `len`.
    fn fill(place: &mut KeptPlace) -> usize {
        let mut len = DESCRIPTION_LEN / 2;
        while place.describe(&request(len)).is_err() {
            len -= 1;
        }
        len
    }

    #[test]
    fn devices_are_known_by_the_namespaces_that_are_on_one() {
        let disk = |path: &str| {
            let file = v1::FileDisk { path: path.to_owned(), ..Default::default() };
            Some(v1::Disk { block_size: 0, kind: Some(v1::disk::Kind::File(file)) })
        };
        let namespace = |nsid, path| v1::Namespace { nsid, disk: disk(path), ..Default::default() };
        let namespaces = vec![namespace(1, "/no/such/path"), namespace(2, "/dev/null")];
        let nvme = Some(v1::NvmeController { namespaces, ..Default::default() });
        let request = v1::CreateEndpointRequest { nvme, ..Default::default() };
        assert_eq!(devices_of(&request).into_keys().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn a_change_that_is_too_long_to_be_kept_leaves_what_was_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (mut place, memory) = place(dir.path());
        let len = fill(&mut place);
        let limits = v1::Limits { commands_per_second: 1, ..Default::default() };
        let count = || memory.words()[0].load(Ordering::Relaxed);
        let changes = count();
        assert!(matches!(place.limit(limits), Err(Error::Invalid(_))));
        let namespace = v1::Namespace { nsid: 1, ..Default::default() };
        assert!(matches!(place.attach(namespace, None), Err(Error::Invalid(_))));
        assert_eq!(count(), changes, "something else was stored meanwhile");
        // A successor reads what was stored.
        place.description = Description::default();
        assert!(place.load());
        assert_eq!((place.request(), place.limits()), (request(len), None));
        place.describe(&request(len - 64)).unwrap();
        place.limit(limits).unwrap();
        assert!(place.load());
        assert_eq!(place.limits(), Some(limits));
    }

    #[test]
    fn a_namespace_that_cannot_be_kept_leaves_no_content() {
        let dir = tempfile::tempdir().unwrap();
        let (mut place, _memory) = place(dir.path());
        let len = fill(&mut place);
        let namespace = || v1::Namespace { nsid: 1, ..Default::default() };
        let content = || OwnedFd::from(tempfile::tempfile().unwrap());
        let (first, second) = (content(), content());
        assert!(matches!(place.attach(namespace(), Some(&first)), Err(Error::Invalid(_))));
        assert!(place.description.contents.is_empty());
        place.describe(&request(len - 64)).unwrap();
        place.attach(namespace(), Some(&second)).unwrap();
        // A successor finds the second one alone.
        drop(place);
        let keeper = Keeper::connect(&dir.path().join("keeper")).unwrap();
        let taken = keeper.take(std::time::Duration::from_secs(60)).unwrap();
        let inode = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
        let found: Vec<_> = taken.iter().map(|(_, file)| inode(file)).collect();
        assert_eq!(found, [inode(&second)]);
    }

    #[test]
    fn a_successor_clears_content_that_no_namespace_has() {
        let dir = tempfile::tempdir().unwrap();
        let (mut place, _memory) = place(dir.path());
        place.describe(&request(1)).unwrap();
        let content = || OwnedFd::from(tempfile::tempfile().unwrap());
        let named = content();
        let namespace = v1::Namespace { nsid: 1, ..Default::default() };
        place.attach(namespace, Some(&named)).unwrap();
        // A predecessor was killed between the changes of the description and of the shelf.
        let other = HOST_SLOTS.end - 1;
        place.shelf.put(other, content().as_fd()).unwrap();
        place.left_descriptors =
            BTreeMap::from([(HOST_SLOTS.start, content()), (other, content())]);
        assert!(place.load());
        assert!(place.predecessor_disk(1).unwrap().content.is_some());
        assert!(place.left_descriptors.is_empty());
        drop(place);
        let keeper = Keeper::connect(&dir.path().join("keeper")).unwrap();
        let taken = keeper.take(std::time::Duration::from_secs(60)).unwrap();
        let inode = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
        let found: Vec<_> = taken.iter().map(|(_, file)| inode(file)).collect();
        assert_eq!(found, [inode(&named)]);
    }
}
