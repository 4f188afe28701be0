//! Functions of pools that are hardware: virtual functions (VFs) of a device of the host. The plane
//! serves them at sockets as it serves its own functions, and the guest has the device's driver.
//!
//! A VF that is a network interface gets a MAC address through its physical function, and the check
//! that its frames have that address. Where the driver of the physical function sets no addresses,
//! the VF keeps its own. VLANs and rates are those of its pool, which the plane sets, or as the
//! host's administrator set them there.

use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use slipway_netlink::{Netlink, is_supported, physical_link};
use slipway_plane_api::vf_v1::template::Hardware;

use crate::record::GivenNic;
use crate::sandbox::Sandbox;
use crate::{Error, Result};

/// The directory of the host's PCI functions.
const DEVICES: &str = "/sys/bus/pci/devices";
/// The file with the host's own identifier, which stays over its restarts (machine-id(5)).
const MACHINE_ID: &str = "/etc/machine-id";

/// The uses that a container has for hardware functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Disk,
    Interface,
}

/// Returns the address on the host of the function `number` of a pool, or nothing if the pool has
/// no such function.
pub(super) fn address(hardware: &Hardware, number: u32) -> &str {
    hardware.addresses.get(number as usize).map_or("", String::as_str)
}

/// Returns the interface that the function at `address` is to be in a guest. Returns `None` if the
/// function is a disk.
///
/// # Errors
/// [`Error::Plane`] if the function is of another class.
pub(super) async fn interface(sandbox: &Sandbox, address: &str) -> Result<Option<GivenNic>> {
    let function = directory(address);
    match sandbox.lane.run(move || class(&function)).await {
        Some(Class::Disk) => Ok(None),
        Some(Class::Interface) => Ok(Some(GivenNic::default())),
        None => Err(Error::Plane(format!(
            "the PCI function {address} is neither an NVMe controller nor a network interface, \
             which are all that a container can be given"
        ))),
    }
}

/// Gives the VF at `address` its MAC address, before a guest has the VF. Returns the MAC address,
/// or an empty text if the VF keeps its own.
///
/// # Errors
/// [`Error::Plane`] with the error of the physical function's driver.
pub(super) async fn set_mac(sandbox: &Sandbox, address: &str) -> Result<String> {
    let function = directory(address);
    let set = sandbox.lane.run(move || set_mac_of(&function)).await;
    set.map_err(|error| {
        Error::Plane(format!("the physical function of {address} sets no MAC address: {error}"))
    })
}

fn directory(address: &str) -> PathBuf {
    Path::new(DEVICES).join(address)
}

/// Returns the class of a PCI function by its class code (PCI Code and ID Assignment
/// Specification): 01h with 08h is non-volatile memory, 02h a network controller.
fn class(function: &Path) -> Option<Class> {
    let text = std::fs::read_to_string(function.join("class")).ok()?;
    let code = u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()?;
    match (code >> 16, (code >> 8) & 0xff) {
        (0x01, 0x08) => Some(Class::Disk),
        (0x02, _) => Some(Class::Interface),
        _ => None,
    }
}

fn set_mac_of(function: &Path) -> io::Result<String> {
    let Some((name, number)) = physical_link(function) else { return Ok(String::new()) };
    let mut netlink = Netlink::open()?;
    let Some(link) = netlink.link(&name)? else { return Ok(String::new()) };
    let host = std::fs::read(MACHINE_ID).unwrap_or_default();
    let mac = mac(&host, function);
    if !is_supported(netlink.set_vf_mac(link.index, number, mac))? {
        return Ok(String::new());
    }
    // A driver that sets addresses need not check those of frames.
    is_supported(netlink.set_vf_spoof_check(link.index, number, true))?;
    Ok(mac.map(|byte| format!("{byte:02x}")).join(":"))
}

/// Returns the address of a VF of this host: locally administered, and the same each time.
fn mac(host: &[u8], function: &Path) -> [u8; 6] {
    let name = function.file_name().unwrap_or_default();
    let hash = Sha256::new().chain_update(host).chain_update(name.as_encoded_bytes()).finalize();
    [0x5a, 0x13, hash[0], hash[1], hash[2], hash[3]]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_a_disk_or_an_interface_by_its_class() {
        let function = tempfile::tempdir().unwrap();
        let of = |code: &str| {
            std::fs::write(function.path().join("class"), code).unwrap();
            class(function.path())
        };
        assert_eq!(class(function.path()), None);
        assert_eq!(of("0x010802\n"), Some(Class::Disk));
        assert_eq!(of("0x020000\n"), Some(Class::Interface));
        assert_eq!(of("0x020700\n"), Some(Class::Interface));
        for other in ["0x010000\n", "0x030000\n", "020000", "0x", ""] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn the_address_of_a_vf_is_its_own_on_its_host() {
        let of = |host: &[u8], name: &str| mac(host, &directory(name));
        assert_eq!(of(b"a", "0000:01:10.0"), of(b"a", "0000:01:10.0"));
        assert_ne!(of(b"a", "0000:01:10.0"), of(b"a", "0000:01:10.2"));
        assert_ne!(of(b"a", "0000:01:10.0"), of(b"b", "0000:01:10.0"));
        assert_eq!(of(b"a", "0000:01:10.0")[0] & 3, 2);
    }

    #[test]
    fn a_pool_has_an_address_for_each_function() {
        let addresses = vec!["0000:01:10.0".into()];
        let hardware = Hardware { addresses, ..Default::default() };
        assert_eq!((address(&hardware, 0), address(&hardware, 1)), ("0000:01:10.0", ""));
    }
}
