//! PCI functions of this host, as sysfs shows them, and what giving them away needs.

use std::path::Path;

use anyhow::{Result, bail};

/// The directory of all PCI functions in sysfs.
pub const DEVICES: &str = "/sys/bus/pci/devices";

/// Parses the address of a PCI function, `DOMAIN:BUS:DEVICE.FUNCTION` in hexadecimal, with or
/// without the domain. Returns it as sysfs has it.
///
/// # Errors
/// A sentence that shows what an address is.
pub fn parse_address(text: &str) -> Result<String, String> {
    let wrong = || format!("\"{text}\" is no PCI address, such as 0000:01:10.0");
    let (rest, function) = text.rsplit_once('.').ok_or_else(wrong)?;
    let parts: Vec<&str> = rest.split(':').collect();
    let (domain, bus, device) = match parts[..] {
        [bus, device] => ("0", bus, device),
        [domain, bus, device] => (domain, bus, device),
        _ => return Err(wrong()),
    };
    let number = |digits: &str, most: u32| {
        let are_digits = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u32::from_str_radix(digits, 16).ok();
        number.filter(|number| are_digits && *number <= most).ok_or_else(wrong)
    };
    let (domain, bus) = (number(domain, u32::MAX)?, number(bus, 0xff)?);
    let (device, function) = (number(device, 0x1f)?, number(function, 7)?);
    Ok(format!("{domain:04x}:{bus:02x}:{device:02x}.{function}"))
}

/// Returns the addresses of the virtual functions of a physical function, in the order of their
/// numbers. `devices` is [`DEVICES`].
///
/// # Errors
/// There is no such function; it has no virtual functions, with the command that makes some.
pub fn virtual_functions(devices: &Path, physical: &str) -> Result<Vec<String>> {
    let directory = devices.join(physical);
    let Ok(entries) = std::fs::read_dir(&directory) else {
        bail!("this host has no PCI function {physical}");
    };
    let mut functions = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(number) = name.to_str().and_then(|name| name.strip_prefix("virtfn")) else {
            continue;
        };
        let (number, target) = (number.parse::<u32>(), std::fs::read_link(entry.path()));
        let address = target.ok().and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
        if let (Ok(number), Some(address)) = (number, address) {
            functions.push((number, address));
        }
    }
    if functions.is_empty() {
        bail!("{}", no_functions(&directory, physical));
    }
    functions.sort_unstable();
    Ok(functions.into_iter().map(|(_, address)| address).collect())
}

/// Returns a sentence about a physical function without virtual ones.
fn no_functions(directory: &Path, physical: &str) -> String {
    let most = std::fs::read_to_string(directory.join("sriov_totalvfs")).unwrap_or_default();
    match most.trim().parse::<u32>() {
        Ok(most) if most > 0 => {
            let path = directory.display();
            format!(
                "{physical} has no virtual functions yet: echo 0 >{path}/sriov_drivers_autoprobe; \
                 echo N >{path}/sriov_numvfs makes N, at most {most}"
            )
        }
        _ => format!("{physical} is no physical function with SR-IOV, or its driver offers none"),
    }
}

/// Returns what this host lacks for giving PCI functions to guests. Returns `None` if it lacks
/// nothing. `root` is the root directory.
pub fn lacks(root: &Path) -> Option<&'static str> {
    let groups = std::fs::read_dir(root.join("sys/kernel/iommu_groups"));
    if groups.is_ok_and(|mut groups| groups.next().is_none()) || !has(root, "sys/class/iommu") {
        return Some(
            "the IOMMU is off: intel_iommu=on (Intel) on the kernel's command line, and VT-d or \
             AMD-Vi in the firmware's settings",
        );
    }
    if !has(root, "sys/bus/pci/drivers/vfio-pci") && !has_module(root, "/vfio-pci.ko") {
        return Some("the kernel has no module vfio-pci");
    }
    let is_loaded = has(root, "dev/vfio/vfio") || has(root, "dev/iommu");
    (!is_loaded).then_some("there is neither /dev/iommu nor /dev/vfio/vfio: modprobe vfio-pci")
}

fn has(root: &Path, path: &str) -> bool {
    root.join(path).exists()
}

/// Returns whether the running kernel has a module whose file's path ends so, packed or not.
fn has_module(root: &Path, end: &str) -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let directory = root.join("lib/modules").join(release);
    let is_listed = |list: &str| {
        let text = std::fs::read_to_string(directory.join(list)).unwrap_or_default();
        text.contains(end)
    };
    is_listed("modules.dep") || is_listed("modules.builtin")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn addresses_are_as_sysfs_has_them() {
        assert_eq!(parse_address("01:10.0").as_deref(), Ok("0000:01:10.0"));
        assert_eq!(parse_address("0000:AF:1f.7").as_deref(), Ok("0000:af:1f.7"));
        assert_eq!(parse_address("10000:e1:00.0").as_deref(), Ok("10000:e1:00.0"));
        for wrong in ["", "1", "01:10", "01:20.0", "01:10.8", "100:00.0", "+1:00.0", "a:b:c:d.0"] {
            assert!(parse_address(wrong).unwrap_err().contains("no PCI address"), "{wrong}");
        }
    }

    #[test]
    fn virtual_functions_come_in_the_order_of_their_numbers() {
        let devices = tempfile::tempdir().unwrap();
        let found = |address| virtual_functions(devices.path(), address);
        let why = |address| found(address).unwrap_err().to_string();
        assert!(why("0000:01:00.0").contains("no PCI function 0000:01:00.0"));
        let physical = devices.path().join("0000:01:00.0");
        std::fs::create_dir(&physical).unwrap();
        assert!(why("0000:01:00.0").contains("no physical function"));
        std::fs::write(physical.join("sriov_totalvfs"), "7\n").unwrap();
        let hint = why("0000:01:00.0");
        assert!(hint.contains("sriov_numvfs makes N, at most 7"), "{hint}");
        for number in [10, 2, 0] {
            let target = format!("../0000:01:10.{}", number % 8);
            symlink(target, physical.join(format!("virtfn{number}"))).unwrap();
        }
        let functions = found("0000:01:00.0").unwrap();
        assert_eq!(functions, ["0000:01:10.0", "0000:01:10.2", "0000:01:10.2"]);
    }

    #[test]
    fn a_host_says_what_it_lacks() {
        let root = tempfile::tempdir().unwrap();
        let make = |path: &str| std::fs::create_dir_all(root.path().join(path)).unwrap();
        assert!(lacks(root.path()).unwrap().contains("IOMMU"));
        make("sys/kernel/iommu_groups");
        make("sys/class/iommu/dmar0");
        assert!(lacks(root.path()).unwrap().contains("IOMMU"));
        make("sys/kernel/iommu_groups/0");
        assert!(lacks(root.path()).unwrap().contains("vfio-pci"));
        make("sys/bus/pci/drivers/vfio-pci");
        assert!(lacks(root.path()).unwrap().contains("/dev/iommu"));
        make("dev/vfio/vfio");
        assert_eq!(lacks(root.path()), None);
    }
}
