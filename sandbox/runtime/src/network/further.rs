//! Further interfaces of a sandbox: those that its network namespace has beside the first one, as
//! Multus or a runtime with several networks makes them. Their functions follow that of the first
//! interface on the guest's bus.

use std::path::PathBuf;

use slipway_plane_api::v1 as plane_v1;

use super::{create, function_id, model, virtio_net};
use crate::Result;
use crate::node::Node;
use crate::record::{FurtherInterface, Nic, Record};

/// Returns the further interfaces of a sandbox.
pub fn of(record: &Record) -> &[FurtherInterface] {
    record.network.as_ref().map_or(&[][..], |network| &network.further)
}

/// Returns the plane's ids of their functions, in their order.
pub fn ids(record: &Record) -> impl Iterator<Item = String> {
    let first = function_id(&record.id);
    (1..=of(record).len()).map(move |number| format!("{first}{number}"))
}

/// Returns the sockets of their functions, in their order.
pub fn sockets(node: &Node, record: &Record) -> impl Iterator<Item = PathBuf> {
    let run_dir = node.run_dir(&record.id);
    (1..=of(record).len()).map(move |number| run_dir.join(format!("net-{number}.sock")))
}

/// Makes the plane serve their functions. When this returns, their sockets accept the VMM.
///
/// # Errors
/// [`Error::Plane`](crate::Error::Plane).
pub async fn serve(
    node: &Node,
    record: &Record,
    uid: u32,
    memory: &plane_v1::ClientMemory,
) -> Result<Vec<PathBuf>> {
    let Some(network) = &record.network else { return Ok(Vec::new()) };
    for ((one, id), socket) in network.further.iter().zip(ids(record)).zip(sockets(node, record)) {
        let rates = one.settings.rates;
        let port = plane_v1::VirtioNet {
            switch: one.switch.clone(),
            mac: one.mac.clone(),
            peer_mac: String::new(),
            mtu: one.mtu,
            addresses: one.settings.sorted_addresses(),
            model: model(Nic::Virtio).into(),
            interrupt_interval_ns: 0,
            max_rate: rates.max_rate,
            max_burst: rates.max_burst,
            receive_rate: rates.receive_rate,
            receive_burst: rates.receive_burst,
            ..virtio_net(record, network)
        };
        create(node, (id, socket.as_path()), uid, memory, port).await?;
    }
    Ok(sockets(node, record).collect())
}

/// Removes their functions. Missing ones are no error.
///
/// # Errors
/// [`Error::Plane`](crate::Error::Plane): the first failure. The others are removed even so.
pub async fn remove(node: &Node, record: &Record) -> Result<()> {
    node.remove_functions(ids(record)).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::record_of;
    use crate::record::{NamespaceInterface, Network, PortRates, SandboxState};

    /// Makes the record of a sandbox with further interfaces of these names.
    fn with_further(names: &[&str]) -> Record {
        let further = |name: &&str| FurtherInterface {
            switch: format!("uplink.{name}"),
            mac: "02:00:00:00:00:02".into(),
            mtu: 1500,
            settings: NamespaceInterface {
                interface: (*name).to_owned(),
                addresses: vec![("fd00::2".into(), 64), ("10.1.1.2".into(), 24)],
                routes: Vec::new(),
                neighbours: Vec::new(),
                rates: PortRates::default(),
                traceparent: String::new(),
            },
        };
        let further = names.iter().map(further).collect();
        let network = Some(Network { further, ..Network::default() });
        Record { network, ..record_of(SandboxState::Running) }
    }

    #[test]
    fn each_has_a_function_and_an_earlier_record_has_none() {
        let record = with_further(&["net1", "net2"]);
        assert!(ids(&record).eq(["0123456789ab.net1", "0123456789ab.net2"]));
        assert_eq!(of(&record)[0].settings.sorted_addresses(), ["10.1.1.2", "fd00::2"]);
        let text = serde_json::to_value(&record).unwrap();
        assert_eq!(text["network"]["further"][1]["settings"]["interface"], "net2");
        let alone = serde_json::to_value(with_further(&[])).unwrap();
        assert!(alone["network"].as_object().unwrap().get("further").is_none());
        assert!(of(&serde_json::from_value::<Record>(alone).unwrap()).is_empty());
        assert!(of(&record_of(SandboxState::Running)).is_empty());
    }

    #[test]
    fn a_sandbox_with_several_interfaces_is_no_fork() {
        let why = |record: &Record| crate::fork::cannot_fork(record);
        assert!(why(&with_further(&["net1"])).unwrap().contains("several network interfaces"));
        assert_eq!(why(&with_further(&[])), None);
    }
}
