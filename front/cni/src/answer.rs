//! Results, in the form of each version of CNI.
//!
//! A new key of a result is added in `added`, for the versions that have it. What the daemon knows
//! comes in `Attachment` of `network.proto`, which `describe_attachment` of `host/network`
//! (`networks/attachments.rs`) fills in. CHECK compares what the daemon has, not this text. Tests
//! are below; `docs/cni.md` has it, and `tests/e2e/76-cni.sh` reads results. A further version of
//! CNI is one of `VERSIONS` (`configuration`), with its form here.

use serde_json::{Map, Value, json};
use slipway_plane_api::network_v1::Attachment;

use crate::configuration::VERSIONS;
use crate::environment::Environment;

/// Returns the answer of VERSION, to a runtime that said `version`.
pub fn versions(version: &str) -> Value {
    json!({ "cniVersion": version, "supportedVersions": VERSIONS })
}

/// Returns the result of ADD.
pub fn added(
    version: &str,
    environment: &Environment,
    attachment: &Attachment,
    dns: Option<&Value>,
) -> Value {
    let mut interface = json!({
        "name": environment.interface,
        "mac": attachment.mac,
        "sandbox": environment.namespace,
    });
    if version == "1.1.0" {
        interface["mtu"] = attachment.mtu.into();
        if !attachment.socket_path.is_empty() {
            interface["socketPath"] = attachment.socket_path.as_str().into();
        }
        if !attachment.pci_address.is_empty() {
            interface["pciID"] = attachment.pci_address.as_str().into();
        }
    }
    let mut answer = Map::new();
    answer.insert("cniVersion".to_owned(), version.into());
    answer.insert("interfaces".to_owned(), json!([interface]));
    answer.insert("ips".to_owned(), ips(version, attachment));
    answer.insert("routes".to_owned(), routes(attachment));
    let own = json!({ "nameservers": attachment.name_servers });
    answer.insert("dns".to_owned(), dns.cloned().unwrap_or(own));
    Value::Object(answer)
}

fn ips(version: &str, attachment: &Attachment) -> Value {
    let Attachment { ipv4, ipv4_prefix, ipv4_gateway, ipv6, ipv6_prefix, ipv6_gateway, .. } =
        attachment;
    let all = [("4", ipv4, ipv4_prefix, ipv4_gateway), ("6", ipv6, ipv6_prefix, ipv6_gateway)];
    let there = all.into_iter().filter(|(_, address, ..)| !address.is_empty());
    let ip = |(family, address, prefix, gateway): (&str, &String, &u32, &String)| {
        let mut ip = json!({ "interface": 0, "address": format!("{address}/{prefix}") });
        if !gateway.is_empty() {
            ip["gateway"] = gateway.as_str().into();
        }
        // Up to 0.4.0 each address says its family.
        if version.starts_with("0.") {
            ip["version"] = family.into();
        }
        ip
    };
    there.map(ip).collect()
}

fn routes(attachment: &Attachment) -> Value {
    let route = |one: &slipway_plane_api::network_v1::InterfaceRoute| {
        let mut route = json!({ "dst": format!("{}/{}", one.destination, one.prefix) });
        if !one.gateway.is_empty() {
            route["gw"] = one.gateway.as_str().into();
        }
        route
    };
    attachment.routes.iter().map(route).collect()
}

#[cfg(test)]
mod tests {
    use slipway_plane_api::network_v1::InterfaceRoute;

    use super::*;

    fn answer(version: &str, ipv6: &str, [socket_path, pci_address]: [&str; 2]) -> Value {
        let environment = Environment::of(
            [
                ("CNI_COMMAND", "ADD"),
                ("CNI_CONTAINERID", "c1"),
                ("CNI_IFNAME", "net1"),
                ("CNI_NETNS", "/run/netns/c1"),
            ]
            .into_iter()
            .map(|(name, value)| (name.into(), value.into())),
        );
        let route = InterfaceRoute {
            destination: "0.0.0.0".into(),
            gateway: "10.1.0.1".into(),
            ..Default::default()
        };
        let attachment = Attachment {
            mac: "5a:11:0a:01:00:02".into(),
            ipv4: "10.1.0.2".into(),
            ipv4_prefix: 24,
            ipv4_gateway: "10.1.0.1".into(),
            ipv6: ipv6.into(),
            ipv6_prefix: 64,
            mtu: 1500,
            name_servers: vec!["10.1.0.1".into()],
            socket_path: socket_path.into(),
            pci_address: pci_address.into(),
            routes: vec![route],
            ..Default::default()
        };
        added(version, &environment.unwrap(), &attachment, None)
    }

    #[test]
    fn a_result_has_the_form_of_its_version() {
        assert_eq!(
            answer("1.1.0", "fd00::2", ["", ""]),
            json!({
                "cniVersion": "1.1.0",
                "interfaces": [{
                    "name": "net1", "mac": "5a:11:0a:01:00:02", "sandbox": "/run/netns/c1",
                    "mtu": 1500,
                }],
                "ips": [
                    { "interface": 0, "address": "10.1.0.2/24", "gateway": "10.1.0.1" },
                    { "interface": 0, "address": "fd00::2/64" },
                ],
                "routes": [{ "dst": "0.0.0.0/0", "gw": "10.1.0.1" }],
                "dns": { "nameservers": ["10.1.0.1"] },
            })
        );
        let hardware = ["/run/slipway/vf/nics.0", "0000:01:10.0"];
        let old = answer("0.4.0", "", hardware);
        assert_eq!(old["ips"].as_array().unwrap().len(), 1);
        assert_eq!(
            (&old["ips"][0]["version"], &old["interfaces"][0]["mtu"]),
            (&json!("4"), &Value::Null)
        );
        // The fields are of 1.1.0.
        for field in ["socketPath", "pciID"] {
            assert!(old["interfaces"][0].get(field).is_none(), "{field}");
        }
        let pooled = answer("1.1.0", "", hardware);
        assert_eq!(pooled["interfaces"][0]["socketPath"], "/run/slipway/vf/nics.0");
        assert_eq!(pooled["interfaces"][0]["pciID"], "0000:01:10.0");
    }
}
