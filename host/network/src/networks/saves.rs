//! Saves of leases: one write for all sandboxes that wait for one.
//!
//! A change of leases is made and counted under the lock of the table of networks
//! (`NetworkTable::note_change`). The lease is written without that lock, so that other sandboxes
//! change leases meanwhile. All of these are in the next write, which the first of them makes: the
//! others find their changes saved when their turn comes.

use super::Networks;
use super::namespaces::blocking;
use crate::Result;

impl Networks {
    /// Returns when the change number `change` of a network's leases is in its file: it survives a
    /// crash of the daemon. A network that was removed meanwhile has no file.
    ///
    /// # Errors
    /// [`crate::Error::File`]: the file has the old leases.
    pub(super) async fn save_leases(&self, name: &str, change: u64) -> Result<()> {
        let _turn = self.lease_locks.take(name).await;
        let state = self.state.lock().await;
        let Some(network) = state.networks.get(name).filter(|one| one.saved < change) else {
            return Ok(());
        };
        let (changes, file) = (network.changes, self.ledger.leases_of(network)?);
        drop(state);
        blocking(move || file.write()).await?;
        // Still the same network: a removal takes the turn.
        if let Some(network) = self.state.lock().await.networks.get_mut(name) {
            network.saved = changes;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::Ipv4Addr;
    use std::path::PathBuf;
    use std::sync::Arc;

    use slipway_plane_api::PlaneClient;
    use tokio::task::JoinSet;
    use tonic::transport::Endpoint;

    use super::*;
    use crate::ledger::{Lease, Network};
    use crate::networks::Settings;
    use crate::reach::Policy;
    use crate::{Error, Mac};

    const NAME: &str = "blue";
    const SANDBOXES: u8 = 100;

    struct Rig {
        /// Removed when the test ends.
        _place: tempfile::TempDir,
        dir: PathBuf,
        networks: Arc<Networks>,
    }

    /// Opens networks with one network. No plane is there: nothing here calls it.
    async fn rig() -> Rig {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("networks");
        let settings = Settings {
            dir: dir.clone(),
            ports_dir: place.path().to_owned(),
            table: "slipway_test".into(),
            resolv_conf: place.path().join("resolv.conf"),
            reach: Policy::default(),
            forwarding: place.path().join("forwarding.json"),
        };
        let plane = PlaneClient::new(Endpoint::from_static("http://127.0.0.1:1").connect_lazy());
        let networks = Arc::new(Networks::open(settings, plane).unwrap());
        let (subnet, prefix) = ("10.1.2.0/24".parse().unwrap(), "fd00:1::/64".parse().unwrap());
        let network = Network::new(NAME.into(), "slip0".into(), subnet, prefix);
        networks.ledger.save(&network).unwrap();
        networks.state.lock().await.networks.insert(NAME.into(), network);
        Rig { _place: place, dir, networks }
    }

    /// Enters the lease of a sandbox. Returns the number of the change.
    async fn enter(networks: &Networks, number: u8) -> u64 {
        let ipv4 = Ipv4Addr::new(10, 1, 2, number);
        let lease = Lease {
            name: format!("web-{number}"),
            mac: Mac::derived(ipv4),
            ipv4,
            ipv6: format!("fd00:1::{number}").parse().unwrap(),
            published: Vec::new(),
            attached: false,
            sequence: 0,
        };
        let mut state = networks.state.lock().await;
        let network = state.networks.get_mut(NAME).unwrap();
        network.leases.insert(format!("sandbox-{number}"), lease);
        state.note_change(NAME).unwrap()
    }

    /// Returns the leases that the next daemon would find.
    fn on_disk(networks: &Networks) -> BTreeMap<String, Lease> {
        networks.ledger.load().unwrap().remove(0).leases
    }

    /// Enters and saves leases at once, while a first write is under way. Each task checks that its
    /// own lease is on the disk when its save returns.
    async fn save_at_once(rig: &Rig) {
        let under_way = rig.networks.lease_locks.take(NAME).await;
        let mut tasks = JoinSet::new();
        for number in 1..=SANDBOXES {
            let networks = Arc::clone(&rig.networks);
            tasks.spawn(async move {
                let change = enter(&networks, number).await;
                networks.save_leases(NAME, change).await.unwrap();
                assert!(on_disk(&networks).contains_key(&format!("sandbox-{number}")), "{number}");
            });
        }
        let all = u64::from(SANDBOXES);
        while rig.networks.state.lock().await.networks[NAME].changes < all {
            tokio::task::yield_now().await;
        }
        drop(under_way);
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        assert_eq!(on_disk(&rig.networks).len(), usize::from(SANDBOXES));
    }

    #[tokio::test]
    async fn one_write_saves_all_leases_that_wait_for_it() {
        let rig = rig().await;
        save_at_once(&rig).await;
        // A file has a second one from its second content on (`slipway_replace`).
        let second = rig.dir.join(format!("{NAME}.leases.new"));
        assert!(!second.exists(), "written more than once");
        let change = enter(&rig.networks, SANDBOXES + 1).await;
        rig.networks.save_leases(NAME, change).await.unwrap();
        assert!(second.exists());
    }

    #[tokio::test]
    async fn a_write_that_fails_saves_nothing_for_anybody() {
        let rig = rig().await;
        let first = enter(&rig.networks, 1).await;
        rig.networks.save_leases(NAME, first).await.unwrap();
        let obstacle = rig.dir.join(format!("{NAME}.leases.new"));
        std::fs::create_dir(&obstacle).unwrap();
        let changes = [enter(&rig.networks, 2).await, enter(&rig.networks, 3).await];
        for change in changes {
            let saved = rig.networks.save_leases(NAME, change).await;
            assert!(matches!(saved, Err(Error::File { .. })));
        }
        assert_eq!(on_disk(&rig.networks).len(), 1);
        std::fs::remove_dir(&obstacle).unwrap();
        rig.networks.save_leases(NAME, changes[0]).await.unwrap();
        assert_eq!(on_disk(&rig.networks).len(), 3);
    }

    #[tokio::test]
    async fn leases_of_a_removed_network_are_not_written() {
        let rig = rig().await;
        let change = enter(&rig.networks, 1).await;
        rig.networks.state.lock().await.networks.get_mut(NAME).unwrap().leases.clear();
        rig.networks.remove(NAME).await.unwrap();
        rig.networks.save_leases(NAME, change).await.unwrap();
        assert!(!rig.dir.join(format!("{NAME}.leases")).exists());
    }
}
