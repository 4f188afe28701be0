//! Templates of VFs, and the endpoints that follow from them.

use std::net::IpAddr;
use std::path::Path;

use sha2::{Digest, Sha256};
use slipway_plane_api::v1;
use slipway_plane_api::v1::disk::Kind as DiskKind;
use slipway_plane_api::vf_v1::{self, template::Kind};
use slipway_switch::Mac;
use slipway_vfio::PciAddress;

use super::limits;

/// The most VFs of a pool.
const MOST: u32 = 1024;
/// The longest name of a pool: ".1023" behind it is an id.
const NAME: usize = 32;

/// Checks a pool's name and its template.
///
/// # Errors
/// A sentence about the fault.
pub(super) fn check(name: &str, template: &vf_v1::Template) -> Result<(), String> {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    if !(1..=NAME).contains(&name.len()) || !name.bytes().all(is_word) {
        return Err(format!(
            "\"{name}\" is no pool's name: 1 to {NAME} letters, digits, '-' or '_'"
        ));
    }
    let count = template.count;
    if !(1..=MOST).contains(&count) {
        return Err(format!("a pool has 1 to {MOST} VFs, not {count}"));
    }
    if template.set_size > count {
        return Err(format!("a devset of {} VFs is larger than the pool", template.set_size));
    }
    match &template.kind {
        Some(Kind::Nvme(nvme)) => {
            match nvme.disk.as_ref().and_then(|disk| disk.kind.as_ref()) {
                Some(DiskKind::Ram(_) | DiskKind::Overlay(_)) => Ok(()),
                _ => Err("the disk of a VF is ram or overlay: only those are empty for each owner"
                    .into()),
            }
        }
        Some(Kind::Nic(nic)) if nic.switch.is_empty() => {
            Err("a VF of kind nic needs a switch".into())
        }
        Some(Kind::Nic(_)) => Ok(()),
        Some(Kind::Hardware(hardware)) => {
            limits::check(hardware.vlan, hardware.max_rate)?;
            check_addresses(&addresses(template)?, count)
        }
        None => Err("a pool's VFs are of kind nvme, nic or hardware".into()),
    }
}

/// Checks that a pool of hardware has an address for each of its VFs, and none twice.
fn check_addresses(addresses: &[PciAddress], count: u32) -> Result<(), String> {
    let given = addresses.len();
    if given != count as usize {
        return Err(format!(
            "a pool of {count} VFs of hardware has {count} addresses, not {given}"
        ));
    }
    let is_twice = |at: usize| addresses[..at].contains(&addresses[at]);
    match (0..given).find(|at| is_twice(*at)) {
        Some(at) => Err(format!("PCI function {} is named twice", addresses[at])),
        None => Ok(()),
    }
}

/// Returns the addresses of a pool of hardware, by the numbers of its VFs; none for another kind.
///
/// # Errors
/// A sentence about a text that is no address.
pub(super) fn addresses(template: &vf_v1::Template) -> Result<Vec<PciAddress>, String> {
    let Some(Kind::Hardware(hardware)) = &template.kind else { return Ok(Vec::new()) };
    let address = |text: &String| text.parse::<PciAddress>().map_err(|error| error.to_string());
    hardware.addresses.iter().map(address).collect()
}

/// Returns a template with its number of VFs, where that follows from the hardware.
pub(super) fn counted(template: vf_v1::Template) -> vf_v1::Template {
    let count = match &template.kind {
        Some(Kind::Hardware(hardware)) if template.count == 0 => {
            u32::try_from(hardware.addresses.len()).unwrap_or(u32::MAX)
        }
        _ => template.count,
    };
    vf_v1::Template { count, ..template }
}

/// Checks the client of an owner that takes a VF of this template.
///
/// # Errors
/// A sentence about the fault.
pub(super) fn check_client(
    template: &vf_v1::Template,
    client: &vf_v1::Client,
) -> Result<(), String> {
    let (has_port, is_hardware) = match template.kind {
        Some(Kind::Nic(_)) => (true, false),
        Some(Kind::Hardware(_)) => (false, true),
        _ => (false, false),
    };
    if !(client.mac.is_empty() || has_port || is_hardware)
        || !(client.addresses.is_empty() || has_port)
    {
        return Err("a VF that is no network interface has no addresses".into());
    }
    if is_hardware {
        limits::check(client.vlan, client.max_rate)?;
        if client.max_burst > 0 || client.receive_rate > 0 {
            return Err("hardware bounds what a VF sends, without a burst, and not what it \
                        receives: leave out the burst, and the rate of what is received"
                .into());
        }
    } else if client.vlan > 0 || client.no_spoof_check {
        return Err("a VLAN and the check of addresses are settings of hardware".into());
    }
    if !client.mac.is_empty() && client.mac.parse::<Mac>().is_err() {
        return Err(format!("\"{}\" is no MAC address", client.mac));
    }
    match client.addresses.iter().find(|text| text.parse::<IpAddr>().is_err()) {
        Some(text) => Err(format!("\"{text}\" is no IP address")),
        None => Ok(()),
    }
}

/// Returns whether a client has settings that the physical function of hardware holds it to.
pub(super) fn has_settings(client: &vf_v1::Client) -> bool {
    let vf_v1::Client { mac, max_rate, vlan, no_spoof_check, .. } = client;
    !mac.is_empty() || *max_rate > 0 || *vlan > 0 || *no_spoof_check
}

/// Returns the id of a VF's endpoint.
pub(super) fn id(pool: &str, number: u32) -> String {
    format!("{pool}.{number}")
}

/// Returns the request for a VF's endpoint, whose socket is in `sockets`.
pub(super) fn request(
    pool: &str,
    number: u32,
    template: &vf_v1::Template,
    sockets: &Path,
) -> v1::CreateEndpointRequest {
    let id = id(pool, number);
    let socket_path = sockets.join(&id).to_string_lossy().into_owned();
    let (mut nvme, mut virtio_net) = (None, None);
    match &template.kind {
        Some(Kind::Nic(nic)) => {
            virtio_net = Some(v1::VirtioNet {
                switch: nic.switch.clone(),
                mac: mac(&id),
                mtu: nic.mtu,
                spoof_check: true,
                ..Default::default()
            });
        }
        Some(Kind::Nvme(template)) => {
            let namespaces =
                vec![v1::Namespace { nsid: 1, disk: template.disk.clone(), ..Default::default() }];
            let doorbells = v1::nvme_controller::DoorbellMode::Rung.into();
            let overlay_bytes = template.layers_bytes;
            let rest = v1::NvmeController::default();
            nvme = Some(v1::NvmeController { namespaces, doorbells, overlay_bytes, ..rest });
        }
        Some(Kind::Hardware(_)) | None => {}
    }
    v1::CreateEndpointRequest {
        id,
        socket_path,
        owner: template.user,
        nvme,
        virtio_net,
        memory: None,
    }
}

/// Returns the address of a VF: locally administered, and the same each time.
fn mac(id: &str) -> String {
    let hash = Sha256::digest(id.as_bytes());
    format!("5a:12:{:02x}:{:02x}:{:02x}:{:02x}", hash[0], hash[1], hash[2], hash[3])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nvme(kind: Option<DiskKind>, count: u32, set_size: u32) -> vf_v1::Template {
        let disk = Some(v1::Disk { block_size: 0, kind });
        let kind = Some(Kind::Nvme(vf_v1::template::Nvme { disk, layers_bytes: 0 }));
        vf_v1::Template { kind, count, set_size, user: None }
    }

    #[test]
    fn templates_that_cannot_be_are_refused() {
        let ram = || Some(DiskKind::Ram(v1::RamDisk { size_bytes: 1 << 20 }));
        check("fast", &nvme(ram(), 8, 4)).unwrap();
        let null = Some(DiskKind::Null(v1::NullDisk { size_bytes: 1 << 20 }));
        let bad = [
            ("", nvme(ram(), 8, 4)),
            ("a.b", nvme(ram(), 8, 4)),
            ("a/b", nvme(ram(), 8, 4)),
            ("fast", nvme(ram(), 0, 0)),
            ("fast", nvme(ram(), 1025, 0)),
            ("fast", nvme(ram(), 8, 9)),
            ("fast", nvme(null, 8, 4)),
            ("fast", nvme(None, 8, 4)),
            ("fast", vf_v1::Template { count: 1, ..Default::default() }),
        ];
        for (name, template) in bad {
            assert!(check(name, &template).is_err(), "{name} {template:?}");
        }
    }

    fn hardware(addresses: &[&str], count: u32) -> vf_v1::Template {
        let addresses = addresses.iter().map(|&text| text.to_owned()).collect();
        let hardware = vf_v1::template::Hardware { addresses, ..Default::default() };
        let kind = Some(Kind::Hardware(hardware));
        vf_v1::Template { kind, count, ..Default::default() }
    }

    #[test]
    fn a_pool_of_hardware_has_an_address_for_each_vf() {
        let (first, second) = ("0000:01:10.0", "0000:01:10.2");
        let pair = counted(hardware(&[first, second], 0));
        assert_eq!(pair.count, 2);
        check("nics", &pair).unwrap();
        check("nics", &hardware(&[first, second], 2)).unwrap();
        assert_eq!(addresses(&pair).unwrap()[1].to_string(), second);
        let bad = [
            (hardware(&[first, second], 1), "1 addresses, not 2"),
            (hardware(&[first], 2), "2 addresses, not 1"),
            (hardware(&[], 0), "1 to 1024 VFs"),
            (hardware(&[first, first], 2), "named twice"),
            (hardware(&["01:10.0"], 1), "no PCI address"),
        ];
        for (template, why) in bad {
            let refused = check("nics", &template).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
        let request = request("nics", 1, &pair, Path::new("/run"));
        assert_eq!((request.id.as_str(), request.nvme, request.virtio_net), ("nics.1", None, None));
    }

    #[test]
    fn the_client_of_hardware_has_what_a_physical_function_sets() {
        let (rest, hardware) = (vf_v1::Client::default(), hardware(&["0000:01:10.0"], 1));
        let mac = "02:00:00:00:00:01".to_owned();
        let good = vf_v1::Client { mac, vlan: 5, no_spoof_check: true, ..rest.clone() };
        check_client(&hardware, &good).unwrap();
        assert!(has_settings(&good) && !has_settings(&rest));
        let ram = nvme(Some(DiskKind::Ram(v1::RamDisk { size_bytes: 1 << 20 })), 1, 0);
        assert!(check_client(&ram, &vf_v1::Client { vlan: 5, ..rest.clone() }).is_err());
        for bad in [
            vf_v1::Client { addresses: vec!["10.0.0.1".into()], ..rest.clone() },
            vf_v1::Client { vlan: 4095, ..rest.clone() },
            vf_v1::Client { max_rate: 1, ..rest.clone() },
            vf_v1::Client { max_rate: 125_000, max_burst: 1, ..rest.clone() },
            vf_v1::Client { receive_rate: 125_000, ..rest.clone() },
            vf_v1::Client { mac: "02:00".into(), ..rest.clone() },
        ] {
            assert!(check_client(&hardware, &bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn addresses_are_for_network_interfaces() {
        let kind = Some(Kind::Nic(vf_v1::template::Nic { switch: "a".into(), mtu: 0 }));
        let nic = vf_v1::Template { kind, count: 1, ..Default::default() };
        let ram = nvme(Some(DiskKind::Ram(v1::RamDisk { size_bytes: 1 << 20 })), 1, 0);
        let client = |mac: &str, address: &str| vf_v1::Client {
            mac: mac.into(),
            addresses: vec![address.into()],
            ..Default::default()
        };
        check_client(&nic, &client("02:00:00:00:00:01", "10.0.0.1")).unwrap();
        check_client(&ram, &vf_v1::Client::default()).unwrap();
        for (template, client) in [
            (&ram, client("", "10.0.0.1")),
            (&nic, client("02:00", "10.0.0.1")),
            (&nic, client("", "10.0.0")),
        ] {
            assert!(check_client(template, &client).is_err(), "{client:?}");
        }
    }

    #[test]
    fn the_overlay_of_a_vf_is_bounded() {
        let layer = v1::OverlayDisk { base_path: "/a".into(), limit_bytes: 0 };
        let disk = Some(v1::Disk { block_size: 0, kind: Some(DiskKind::Overlay(layer)) });
        for layers_bytes in [0, 1 << 20] {
            let nvme = vf_v1::template::Nvme { disk: disk.clone(), layers_bytes };
            let kind = Some(Kind::Nvme(nvme));
            let template = vf_v1::Template { kind, count: 1, ..Default::default() };
            let request = request("fast", 0, &template, Path::new("/run"));
            assert_eq!(request.nvme.unwrap().overlay_bytes, layers_bytes);
        }
    }

    #[test]
    fn the_address_of_a_vf_is_its_own_and_stays() {
        assert_eq!(mac("fast.0"), mac("fast.0"));
        assert_ne!(mac("fast.0"), mac("fast.1"));
        assert!(mac("fast.0").starts_with("5a:12:"));
    }
}
