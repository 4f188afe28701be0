//! PCI functions of this host, as sysfs shows them, and what giving them away needs.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

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

/// Returns the vendor and device identifiers of the PCI function at `address`, as `0x80860x2701`.
/// `root` is the root directory.
///
/// # Errors
/// There is no such function.
pub fn identity(root: &Path, address: &str) -> Result<String> {
    let device = root.join("sys/bus/pci/devices").join(address);
    let text = |name: &str| {
        let text = std::fs::read_to_string(device.join(name));
        text.with_context(|| format!("this host has no PCI function {address}"))
    };
    Ok(format!("{}{}", text("vendor")?.trim(), text("device")?.trim()))
}

/// Checks that the function at `address` is an NVMe controller that loads may write to: it is bound
/// to vfio-pci, so nothing of the host has its disks. `root` is the root directory.
///
/// # Errors
/// There is no such controller, or the host has it; with the next step.
pub fn check_spare_disk(root: &Path, address: &str) -> Result<()> {
    let device = root.join("sys/bus/pci/devices").join(address);
    let Ok(class) = std::fs::read_to_string(device.join("class")) else {
        bail!("this host has no PCI function {address}: `lspci -D` lists them");
    };
    let class = class.trim();
    ensure!(class.starts_with(NVME), "{address} is no NVMe controller: its class is {class}");
    let driver = std::fs::read_link(device.join("driver")).ok();
    let driver = driver.as_ref().and_then(|path| path.file_name()?.to_str());
    if driver == Some("vfio-pci") {
        return Ok(());
    }
    if let Some((disk, place)) = mounted(root, &device) {
        bail!("{address} has the disk {disk}, which is mounted at {place}: name another function");
    }
    let (has, part) = match driver {
        Some(driver) => {
            (format!("has the driver {driver}"), format!("echo {address} >driver/unbind; "))
        }
        None => ("has no driver".to_owned(), String::new()),
    };
    let device = device.display();
    bail!(
        "{address} {has}, and the content of its disk would be lost: if it may be, `cd {device}; \
         modprobe vfio-pci; echo vfio-pci >driver_override; {part}echo {address} \
         >/sys/bus/pci/drivers_probe`"
    )
}

/// The upper 16 bits of an NVMe controller's class code.
const NVME: &str = "0x0108";

/// Returns a mounted disk of an NVMe controller, and where it is mounted. Returns `None` if none
/// is.
fn mounted(root: &Path, device: &Path) -> Option<(String, String)> {
    let mountinfo = std::fs::read(root.join("proc/self/mountinfo")).ok()?;
    let mounts: Vec<_> = slipway_mounts::parse(&mountinfo).collect();
    let names = |directory: &Path| {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| name.starts_with("nvme")).collect::<Vec<_>>()
    };
    let controllers = device.join("nvme");
    let disks = names(&controllers).into_iter().flat_map(|name| names(&controllers.join(name)));
    disks.map(|name| whole(&name)).find_map(|disk| {
        let is_of = |source: &str| {
            let rest = source.strip_prefix("/dev/").and_then(|name| name.strip_prefix(&*disk));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('p'))
        };
        let mounted = mounts.iter().find(|one| is_of(&one.source));
        mounted.map(|one| (disk.clone(), one.point.display().to_string()))
    })
}

/// Returns the name of the disk of a namespace: with multipath, a controller has `nvme0c1n1` for
/// the disk `nvme0n1`.
fn whole(name: &str) -> String {
    let parts = name.split_once('c').zip(name.rsplit_once('n'));
    parts.map_or_else(
        || name.to_owned(),
        |((subsystem, _), (_, nsid))| format!("{subsystem}n{nsid}"),
    )
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
    fn a_disk_is_spared_unless_vfio_has_it() {
        const ADDRESS: &str = "0000:01:00.0";
        let root = tempfile::tempdir().unwrap();
        let refusal = || check_spare_disk(root.path(), ADDRESS).unwrap_err().to_string();
        assert!(refusal().contains("no PCI function"), "{}", refusal());
        let device = root.path().join("sys/bus/pci/devices").join(ADDRESS);
        std::fs::create_dir_all(device.join("nvme/nvme3/nvme3c1n1")).unwrap();
        let write = |name: &str, text: &str| std::fs::write(device.join(name), text).unwrap();
        write("class", "0x020000\n");
        assert!(refusal().contains("no NVMe controller: its class is 0x020000"), "{}", refusal());
        write("class", "0x010802\n");
        assert!(refusal().contains("has no driver"), "{}", refusal());
        symlink("../../../bus/pci/drivers/nvme", device.join("driver")).unwrap();
        assert!(refusal().contains("has the driver nvme"), "{}", refusal());
        assert!(refusal().contains("echo 0000:01:00.0 >driver/unbind; "), "{}", refusal());
        std::fs::create_dir_all(root.path().join("proc/self")).unwrap();
        let mounts = "\
30 1 259:9 / /a rw - ext4 /dev/nvme3n10 rw
31 1 259:2 / /my\\040data rw - ext4 /dev/nvme3n1p2 rw
";
        std::fs::write(root.path().join("proc/self/mountinfo"), mounts).unwrap();
        assert!(refusal().contains("nvme3n1, which is mounted at /my data"), "{}", refusal());
        std::fs::remove_file(device.join("driver")).unwrap();
        symlink("../../../bus/pci/drivers/vfio-pci", device.join("driver")).unwrap();
        check_spare_disk(root.path(), ADDRESS).unwrap();
        write("vendor", "0x8086\n");
        write("device", "0x2701\n");
        assert_eq!(identity(root.path(), ADDRESS).unwrap(), "0x80860x2701");
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
