//! Devices that the VMM emulates itself, or has by VFIO, which Slipway's are measured against.

use slipway_hypervisor::{DiskModel, EmulatedDisk, NicModel};

use crate::record::{AssignedFunction, Device, EmulatedNic, Record};
use crate::v1::{self, RunSpec};
use crate::{Error, Result, network};

/// Returns the disks whose devices the VMM emulates.
pub fn disks(record: &Record) -> Vec<EmulatedDisk> {
    let disks = record.volumes.iter().filter_map(|volume| {
        let model = match volume.device {
            Device::Namespace | Device::Function => return None,
            Device::VmmNvme => DiskModel::Nvme,
            Device::VmmVirtioBlk => DiskModel::VirtioBlk,
        };
        Some(EmulatedDisk { model, path: volume.path.clone(), read_only: volume.read_only })
    });
    disks.collect()
}

/// Checks the network interface that the VMM is to emulate, if `spec` asks for one.
///
/// # Errors
/// [`Error::Invalid`] for an unknown model, or if the sandbox has an interface in a network, too.
pub fn nic(spec: &RunSpec) -> Result<Option<EmulatedNic>> {
    let Some(v1::EmulatedNic { model, tap, mac }) = spec.emulated_nic.clone() else {
        return Ok(None);
    };
    if spec.network != network::NONE {
        let what = "a sandbox with a network interface of the VMM's own is in no network";
        return Err(Error::Invalid(what.to_owned()));
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    // Names that begin so are the networks'.
    if !(1..16).contains(&tap.len()) || !tap.bytes().all(plain) || tap.starts_with("slip") {
        let what = format!(
            "\"{tap}\" is no name of a TAP interface: 1 to 15 letters, digits, - and _, not slip…"
        );
        return Err(Error::Invalid(what));
    }
    if !is_mac(&mac) {
        return Err(Error::Invalid(format!("\"{mac}\" is no MAC address")));
    }
    let nic = EmulatedNic { model, tap, mac };
    if nic_model(&nic).is_none() {
        let what = format!("\"{}\" is no interface of the VMM's own: e1000 or virtio", nic.model);
        return Err(Error::Invalid(what));
    }
    Ok(Some(nic))
}

fn is_mac(text: &str) -> bool {
    let byte = |pair: &str| pair.len() == 2 && u8::from_str_radix(pair, 16).is_ok();
    text.split(':').count() == 6 && text.split(':').all(byte)
}

fn nic_model(nic: &EmulatedNic) -> Option<NicModel> {
    match nic.model.as_str() {
        "e1000" => Some(NicModel::E1000),
        "virtio" => Some(NicModel::VirtioNet),
        _ => None,
    }
}

/// Returns the network interface that the VMM emulates.
pub fn interface(record: &Record) -> Option<slipway_hypervisor::EmulatedNic> {
    let nic = record.emulated_nic.as_ref()?;
    let (model, tap, mac) = (nic_model(nic)?, nic.tap.clone(), nic.mac.clone());
    Some(slipway_hypervisor::EmulatedNic { model, tap, mac })
}

/// Returns the function of the host that the VMM is to have by VFIO, if `spec` asks for one.
///
/// # Errors
/// [`Error::Invalid`] for a text that is no PCI address; for a pod; for a machine that does not
/// boot.
pub fn function(spec: &RunSpec) -> Result<Option<AssignedFunction>> {
    let Some(v1::AssignedFunction { pci_address, iommu }) = spec.assigned_function.clone() else {
        return Ok(None);
    };
    if spec.makes_pod || !spec.pod.is_empty() || !spec.template.is_empty() {
        let what = "a pod, or a machine that begins with a template, has no function of the VMM's";
        return Err(Error::Invalid(what.to_owned()));
    }
    let plain = |byte: u8| byte.is_ascii_hexdigit() || b":.".contains(&byte);
    if !(12..=16).contains(&pci_address.len()) || !pci_address.bytes().all(plain) {
        let what = format!("\"{pci_address}\" is no PCI address such as 0000:01:10.0");
        return Err(Error::Invalid(what));
    }
    Ok(Some(AssignedFunction { pci_address, iommu }))
}

/// Returns the function of the host that the VMM has by VFIO.
pub fn assigned(record: &Record) -> Option<slipway_hypervisor::AssignedFunction> {
    let AssignedFunction { pci_address, iommu } = record.assigned_function.clone()?;
    Some(slipway_hypervisor::AssignedFunction { address: pci_address, iommu })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::record_of;
    use crate::record::SandboxState;

    #[test]
    fn an_interface_is_checked_and_given_to_the_vmm() {
        let asked = |model: &str, network: &str| RunSpec {
            network: network.to_owned(),
            emulated_nic: Some(v1::EmulatedNic {
                model: model.to_owned(),
                tap: "tap0".to_owned(),
                mac: "52:54:00:00:00:01".to_owned(),
            }),
            ..RunSpec::default()
        };
        assert_eq!(nic(&RunSpec::default()).unwrap(), None);
        let emulated_nic = nic(&asked("virtio", "none")).unwrap();
        let given = interface(&Record { emulated_nic, ..record_of(SandboxState::Running) });
        assert_eq!(given.unwrap().model, NicModel::VirtioNet);
        for (tap, mac) in [
            ("", "52:54:00:00:00:01"),
            ("tap%d", "52:54:00:00:00:01"),
            ("slip1", "52:54:00:00:00:01"),
            ("a-name-of-16-long", "52:54:00:00:00:01"),
            ("tap0", "52:54"),
        ] {
            let (tap, mac, model) = (tap.to_owned(), mac.to_owned(), "e1000".to_owned());
            let emulated_nic = Some(v1::EmulatedNic { model, tap, mac });
            let bad = RunSpec { emulated_nic, ..asked("e1000", "none") };
            assert!(matches!(nic(&bad), Err(Error::Invalid(_))), "{bad:?}");
        }
        for bad in [asked("e1001", "none"), asked("e1000", ""), asked("e1000", "default")] {
            assert!(matches!(nic(&bad), Err(Error::Invalid(_))), "{bad:?}");
        }
    }

    #[test]
    fn a_function_of_the_host_is_checked_and_given_to_the_vmm() {
        let asked = |address: &str| RunSpec {
            assigned_function: Some(v1::AssignedFunction {
                pci_address: address.to_owned(),
                iommu: true,
            }),
            ..RunSpec::default()
        };
        assert_eq!(function(&RunSpec::default()).unwrap(), None);
        let assigned_function = function(&asked("0000:01:10.0")).unwrap();
        let given = assigned(&Record { assigned_function, ..record_of(SandboxState::Running) });
        assert!(given.is_some_and(|given| given.iommu && given.address == "0000:01:10.0"));
        let pod = RunSpec { makes_pod: true, ..asked("0000:01:10.0") };
        let fork = RunSpec { template: "auto".to_owned(), ..asked("0000:01:10.0") };
        for bad in [asked(""), asked("01:10.0"), asked("0000:01:10.0/.."), pod, fork] {
            assert!(matches!(function(&bad), Err(Error::Invalid(_))), "{bad:?}");
        }
    }
}
