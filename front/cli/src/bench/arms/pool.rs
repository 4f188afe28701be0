//! The pool of virtual functions of a measurement.

use anyhow::Result;
use slipway_plane_api::{NetworkClient, VfClient, network_v1};
use slipway_runtime::Config;

use super::own;
use crate::args::NodeArgs;
use crate::client::{answer, connect_functions, connect_networks, refused};
use crate::vf;

/// A pool of network functions on the switch of a network, with this process's name.
pub struct Pool {
    networks: NetworkClient,
    functions: VfClient,
}

impl Pool {
    /// Makes the pool, with a function for each of `count` sandboxes.
    ///
    /// # Errors
    /// There is no such network, or no function can be made.
    pub async fn make(node: &NodeArgs, config: &Config, on: &str, count: u32) -> Result<Self> {
        let mut networks = connect_networks(node, config).await?;
        let functions = connect_functions(node, config).await?;
        let port = network_v1::CreatePortRequest {
            network: on.to_owned(),
            name: own(),
            ..Default::default()
        };
        networks.create_port(port).await.map_err(refused)?;
        let mut pool = Self { networks, functions };
        if let Err(error) = pool.fill(on, count).await {
            // The first error is the one that tells.
            let _ = pool.remove().await;
            return Err(error);
        }
        Ok(pool)
    }

    /// Makes the functions, on the switch of the network `on`, which has its name.
    async fn fill(&mut self, on: &str, count: u32) -> Result<()> {
        let request = network_v1::GetNetworkRequest { name: on.to_owned() };
        let mtu = answer(self.networks.get_network(request).await)?.mtu;
        vf::make_nics(&mut self.functions, &own(), on, count, mtu).await
    }

    /// Removes the pool, and the port that kept its switch.
    ///
    /// # Errors
    /// The daemon refuses or goes away.
    pub async fn remove(mut self) -> Result<()> {
        let pool = vf::remove(&mut self.functions, &own()).await;
        let request = network_v1::RemovePortRequest { name: own() };
        let port = self.networks.remove_port(request).await;
        pool.and(port.map(drop).map_err(refused))
    }
}
