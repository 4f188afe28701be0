//! The functions of forks: an NVMe controller with a root image, a volatile layer and a volume, and
//! a network interface at a switch.
//!
//! They are made by the calls with which a sandbox that begins with a template has its functions
//! (`sandbox/runtime`, `start.rs`): both are served without disks before the VMM starts, the VMM
//! loads their saved states, and the disks come once the guest has answered.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use slipway_hypervisor::{Credentials, GuestMemory};
use slipway_plane_api::v1::disk::Kind;
use slipway_plane_api::v1::nvme_controller::DoorbellMode;
use slipway_plane_api::{PlaneClient, v1};

/// The ids of the controller and of the interface, and the name of the interface's switch.
const NVME: &str = "bench";
const NET: &str = "bench.net";
const SWITCH: &str = "bench";
/// The MAC address of the machine that is saved, which the guests of its forks have, too, and the
/// one that a fork has at the switch, whose port translates it.
const SAVED_MAC: &str = "02:00:00:00:00:01";
const FORK_MAC: &str = "02:00:00:00:00:02";
/// The files of the disks, and the bytes of each.
const IMAGE: &str = "image";
const LAYER: &str = "layer";
const VOLUME: &str = "volume";
const DISK: u64 = 64 << 20;

/// The VM that functions are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// One that boots and is saved.
    Saved,
    /// One that goes on as the saved one.
    Fork,
}

/// Makes both functions of one VM at a time, and removes them.
pub(super) struct Functions {
    plane: PlaneClient,
    /// Has the files of the disks, and the functions' sockets.
    folder: PathBuf,
}

impl Functions {
    /// Makes the files of the disks in `folder`, and the switch. The plane has no functions but
    /// those that are made here.
    ///
    /// # Errors
    /// The folder cannot be written to, or the plane refuses the switch.
    pub(super) async fn new(plane: PlaneClient, folder: &Path) -> Result<Self> {
        for name in [IMAGE, LAYER, VOLUME] {
            File::create(folder.join(name))?.set_len(DISK)?;
        }
        let request = v1::CreateSwitchRequest { name: SWITCH.to_owned(), ..Default::default() };
        plane.clone().create_switch(request).await.context("a switch for forks")?;
        Ok(Self { plane, folder: folder.to_owned() })
    }

    /// Has both functions served, without disks, for the VMM of a guest with this memory that runs
    /// as `user`. Returns their sockets in the order of the bus.
    ///
    /// # Errors
    /// The plane refuses one of them.
    pub(super) async fn serve(
        &self,
        memory: &GuestMemory,
        user: Option<Credentials>,
        role: Role,
    ) -> Result<Vec<PathBuf>> {
        let (device, inode) = memory.identity()?;
        let memory = Some(v1::ClientMemory { device, inode, ..Default::default() });
        let owner = user.map(|user| v1::Owner { uid: user.uid, gid: user.gid });
        let (mac, peer_mac) = match role {
            Role::Saved => (SAVED_MAC, ""),
            Role::Fork => (FORK_MAC, SAVED_MAC),
        };
        let nvme =
            v1::NvmeController { doorbells: DoorbellMode::Rung.into(), ..Default::default() };
        let net = v1::VirtioNet {
            switch: SWITCH.to_owned(),
            mac: mac.to_owned(),
            peer_mac: peer_mac.to_owned(),
            queue_pairs: 1,
            spoof_check: true,
            ..Default::default()
        };
        for (id, nvme, virtio_net) in [(NVME, Some(nvme), None), (NET, None, Some(net))] {
            let socket_path = text(&self.folder.join(id));
            let id = id.to_owned();
            let request =
                v1::CreateEndpointRequest { id, socket_path, owner, nvme, virtio_net, memory };
            self.plane.clone().create_endpoint(request).await.context("a function of a fork")?;
        }
        Ok([NVME, NET].map(|id| self.folder.join(id)).to_vec())
    }

    /// Gives the controller its disks.
    ///
    /// # Errors
    /// The plane refuses one of them.
    pub(super) async fn attach(&self) -> Result<()> {
        let path = |name: &str| text(&self.folder.join(name));
        let file = |name: &str, read_only: bool| {
            Kind::File(v1::FileDisk { path: path(name), read_only, ..Default::default() })
        };
        let layer = v1::OverlayDisk { base_path: path(LAYER), limit_bytes: 0 };
        let disks = [file(IMAGE, true), Kind::Overlay(layer), file(VOLUME, false)];
        for (nsid, kind) in (1..).zip(disks) {
            let disk = Some(v1::Disk { block_size: 0, kind: Some(kind) });
            let request = v1::AttachDiskRequest { endpoint_id: NVME.to_owned(), disk, nsid };
            self.plane.clone().attach_disk(request).await.context("a disk of a fork")?;
        }
        Ok(())
    }

    /// Removes the functions that are there.
    ///
    /// # Errors
    /// One does not end.
    pub(super) async fn remove(&self) -> Result<()> {
        let listed = self.plane.clone().list_endpoints(v1::ListEndpointsRequest {}).await?;
        for v1::Endpoint { id, .. } in listed.into_inner().endpoints {
            let request = v1::RemoveEndpointRequest { id };
            self.plane.clone().remove_endpoint(request).await.context("the end of a function")?;
        }
        Ok(())
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use slipway_plane::{Plane, Settings};
    use slipway_vfio_user_client::RemoteFunction;

    use super::*;

    /// Connects to a function as a VMM does.
    fn connect(socket: &Path, memory: &GuestMemory) -> RemoteFunction {
        let connection = UnixStream::connect(socket).unwrap();
        let function = RemoteFunction::new(connection.into(), Duration::from_secs(60)).unwrap();
        let file = memory.descriptor().unwrap();
        function.map(0, memory.bytes(), file.as_fd(), 0, true).unwrap();
        function
    }

    #[test]
    fn functions_of_forks_go_on_as_the_saved_ones_and_get_their_disks() {
        let folder = tempfile::tempdir().unwrap();
        let plane = Plane::new(Settings::default()).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let client = PlaneClient::new(runtime.block_on(plane.connect()).unwrap());
        let functions = runtime.block_on(Functions::new(client, folder.path())).unwrap();
        let memory = GuestMemory::new(1 << 20).unwrap();
        let serve = |role| {
            let sockets = runtime.block_on(functions.serve(&memory, None, role)).unwrap();
            sockets.iter().map(|socket| connect(socket, &memory)).collect::<Vec<_>>()
        };
        let booted = serve(Role::Saved);
        let states: Vec<_> = booted.iter().map(|function| function.save().unwrap()).collect();
        drop(booted);
        runtime.block_on(functions.remove()).unwrap();
        for _ in 0..2 {
            assert!(plane.list().is_empty());
            let forked = serve(Role::Fork);
            forked.iter().zip(&states).for_each(|(function, state)| function.load(state).unwrap());
            runtime.block_on(functions.attach()).unwrap();
            let disks = plane.get(NVME).unwrap().namespaces;
            let disks: Vec<_> =
                disks.iter().map(|disk| (disk.nsid, disk.kind.as_str(), disk.read_only)).collect();
            assert_eq!(disks, [(1, "file", true), (2, "overlay", false), (3, "file", false)]);
            let ports = &plane.fabric().list_switches()[0].ports;
            let macs: Vec<_> = ports.iter().map(|port| (&*port.mac, &*port.peer_mac)).collect();
            assert_eq!(macs, [(FORK_MAC, SAVED_MAC)]);
            // The functions have their clients still, as those of a VM that is not gone.
            runtime.block_on(functions.remove()).unwrap();
        }
        assert!(plane.list().is_empty());
    }

    #[test]
    fn what_was_made_of_a_fork_that_fails_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let plane = Plane::new(Settings::default()).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let client = PlaneClient::new(runtime.block_on(plane.connect()).unwrap());
        let functions = runtime.block_on(Functions::new(client, folder.path())).unwrap();
        let memory = GuestMemory::new(1 << 20).unwrap();
        runtime.block_on(functions.serve(&memory, None, Role::Fork)).unwrap();
        std::fs::remove_file(folder.path().join(VOLUME)).unwrap();
        let error = runtime.block_on(functions.attach()).unwrap_err();
        assert!(format!("{error:#}").contains(VOLUME), "{error:#}");
        runtime.block_on(functions.remove()).unwrap();
        assert!(plane.list().is_empty());
    }
}
