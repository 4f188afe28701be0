//! Disks of the sandbox's PCI functions, found in sysfs: namespaces of NVMe controllers, and virtio
//! block devices.
//!
//! A PCI function ADDR has its controller at `bus/pci/devices/ADDR/nvme/nvmeC`, and the
//! controller's directory has its namespaces as `nvmeCnN`. With native multipath, a controller has
//! paths `nvmeScCnN` instead (without a device number), and the namespace is the subsystem's disk
//! `nvmeSnN`. The number N in a name is a count. The namespace identifier is in the attribute
//! `nsid`.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use slipway_agent_protocol::v1::BlockDevice;

use crate::init::Device;
use crate::stages::{self, Stages};
use crate::{machine, uevent};

/// The longest wait for a controller or a namespace to appear.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The longest wait for a namespace whose time is only for the record.
const RECORD_PATIENCE: Duration = Duration::from_secs(60);

/// The namespace identifier that stands for the lowest one of a controller.
const LOWEST: u32 = u32::MAX;
/// The time in which no lower namespace has to appear. Linux finds a controller's namespaces side
/// by side, and so in any order.
const SETTLED: Duration = Duration::from_millis(50);

/// A namespace of a controller.
#[derive(Debug, PartialEq, Eq)]
pub struct Namespace {
    /// The namespace identifier.
    pub nsid: u32,
    /// The name of the disk, as in `/sys/class/block`.
    pub disk: String,
}

/// Returns the device number of `wanted`. Waits for the driver if the device is not there yet.
pub async fn find(sysfs: &Path, wanted: &BlockDevice) -> Result<Device> {
    if wanted.nsid == 0 {
        machine::load_extra_modules();
    }
    let mut found = uevent::wait_for(PATIENCE, || look(sysfs, wanted)).await?;
    while wanted.nsid == LOWEST && found.is_some() {
        tokio::time::sleep(SETTLED).await;
        let now = look(sysfs, wanted)?;
        if now == found {
            break;
        }
        found = now;
    }
    found.ok_or_else(|| absent(sysfs, wanted))
}

/// Waits until `count` controllers take commands.
pub async fn await_ready(sysfs: &Path, count: u32) -> Result<()> {
    let probe = || {
        let ready = controllers(sysfs)?.iter().filter(|controller| is_live(controller)).count();
        Ok::<_, anyhow::Error>((ready >= count as usize).then_some(()))
    };
    match uevent::wait_for(PATIENCE, probe).await? {
        Some(()) => Ok(()),
        None => bail!("{count} NVMe controllers were not ready within {} s", PATIENCE.as_secs()),
    }
}

/// Returns whether a controller takes commands (Linux, *ABI/testing/sysfs-nvme*, `state`).
fn is_live(controller: &Path) -> bool {
    std::fs::read_to_string(controller.join("state")).is_ok_and(|state| state.trim() == "live")
}

/// Waits for the first namespace and records its time. Ends without one when the machine is about
/// to be saved: its forks would look for namespaces again and again, and the time of theirs is no
/// time of a boot.
pub async fn record_first(stages: &Stages, sysfs: PathBuf) {
    let probe = || Ok::<_, Infallible>(any(&sysfs).then(stages::now));
    tokio::select! {
        Ok(at) = uevent::wait_for(RECORD_PATIENCE, probe) => stages.driver_ends(at),
        () = stages.prepared() => {}
    }
}

/// Returns whether any namespace exists.
fn any(sysfs: &Path) -> bool {
    let all = controllers(sysfs).unwrap_or_default();
    all.iter().any(|controller| !namespaces(controller).is_empty())
}

fn look(sysfs: &Path, wanted: &BlockDevice) -> Result<Option<Device>> {
    if wanted.nsid == 0 {
        return virtio(sysfs, &wanted.pci_address);
    }
    let Some(controller) = controller(sysfs, &wanted.pci_address)? else { return Ok(None) };
    let mut namespaces = namespaces(&controller);
    namespaces.retain(|namespace| [LOWEST, namespace.nsid].contains(&wanted.nsid));
    let Some(found) = namespaces.iter().min_by_key(|namespace| namespace.nsid) else {
        return Ok(None);
    };
    number(&sysfs.join("class/block").join(&found.disk))
}

/// Returns the virtio block device of the function at `address`: `virtioN/block/vdX` in the
/// function's directory. Returns `None` if it is not there yet.
fn virtio(sysfs: &Path, address: &str) -> Result<Option<Device>> {
    let function = function(sysfs, address)?;
    let devices = entries(&function).into_iter().map(|entry| entry.join("block"));
    match devices.flat_map(|block| entries(&block)).next() {
        Some(disk) => number(&disk),
        None => Ok(None),
    }
}

/// Returns the device number of the disk with this directory. Returns `None` if the disk is not
/// there yet.
pub fn number(disk: &Path) -> Result<Option<Device>> {
    match std::fs::read_to_string(disk.join("dev")) {
        Ok(text) => parse_number(&text).map(Some),
        // The disk's own directory appears a moment later.
        Err(_) => Ok(None),
    }
}

/// Returns the directory of the PCI function at `address`.
///
/// # Errors
/// `address` is no PCI address.
pub fn function(sysfs: &Path, address: &str) -> Result<PathBuf> {
    let ordinary = |byte: u8| byte.is_ascii_hexdigit() || byte == b':' || byte == b'.';
    if address.is_empty() || !address.bytes().all(ordinary) || address.contains("..") {
        bail!("{address:?} is not a PCI address");
    }
    Ok(sysfs.join("bus/pci/devices").join(address))
}

fn parse_number(text: &str) -> Result<Device> {
    let (major, minor) = text.trim().split_once(':').context("malformed device number")?;
    Ok(Device { major: major.parse()?, minor: minor.parse()? })
}

fn controller(sysfs: &Path, address: &str) -> Result<Option<PathBuf>> {
    if address.is_empty() {
        let mut all = controllers(sysfs)?;
        if all.len() > 1 {
            bail!("there are {} NVMe controllers, so one must be named by address", all.len());
        }
        return Ok(all.pop());
    }
    let directory = function(sysfs, address)?.join("nvme");
    Ok(entries(&directory).into_iter().next())
}

fn controllers(sysfs: &Path) -> Result<Vec<PathBuf>> {
    Ok(entries(&sysfs.join("class/nvme")))
}

/// Returns a directory's entries, or none if the directory does not exist.
pub fn entries(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
}

/// Returns the namespaces of the controller at `directory`.
pub fn namespaces(directory: &Path) -> Vec<Namespace> {
    entries(directory).iter().filter_map(|path| namespace(path)).collect()
}

fn namespace(path: &Path) -> Option<Namespace> {
    let disk = disk_name(path.file_name()?.to_str()?)?;
    let nsid = std::fs::read_to_string(path.join("nsid")).ok()?.trim().parse().ok()?;
    Some(Namespace { nsid, disk })
}

/// Returns the disk's name for an entry: `nvme0n1` for itself, and for the path `nvme0c3n1`.
/// Returns `None` if the entry is not a namespace.
fn disk_name(entry: &str) -> Option<String> {
    let rest = entry.strip_prefix("nvme")?;
    let (instance, namespace) = rest.split_once('n')?;
    let (subsystem, path) = match instance.split_once('c') {
        Some((subsystem, path)) => (subsystem, Some(path)),
        None => (instance, None),
    };
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let ok = number(subsystem) && number(namespace) && path.is_none_or(number);
    ok.then(|| format!("nvme{subsystem}n{namespace}"))
}

fn absent(sysfs: &Path, wanted: &BlockDevice) -> anyhow::Error {
    let place = match wanted.pci_address.as_str() {
        address if wanted.nsid == 0 => format!("the virtio block device {address}"),
        "" => "the NVMe controller".to_owned(),
        address => format!("the NVMe controller {address}"),
    };
    let found = controller(sysfs, &wanted.pci_address).ok().flatten();
    let seconds = PATIENCE.as_secs();
    match found {
        None => anyhow!("{place} did not appear within {seconds} s"),
        Some(_) if wanted.nsid == LOWEST => anyhow!("{place} has no namespace after {seconds} s"),
        Some(controller) => {
            let there: Vec<u32> = namespaces(&controller).iter().map(|ns| ns.nsid).collect();
            anyhow!(
                "namespace {} of {place} did not appear within {seconds} s (there are: {there:?})",
                wanted.nsid
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sysfs(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        root
    }

    fn device(pci_address: &str, nsid: u32) -> BlockDevice {
        BlockDevice { pci_address: pci_address.into(), nsid }
    }

    #[tokio::test]
    async fn controllers_are_ready_when_they_are_live() {
        let root =
            sysfs(&[("class/nvme/nvme0/state", "live\n"), ("class/nvme/nvme1/state", "new")]);
        await_ready(root.path(), 1).await.unwrap();
        let (path, wait) = (root.path().to_owned(), await_ready(root.path(), 2));
        let live = async {
            tokio::task::yield_now().await;
            std::fs::write(path.join("class/nvme/nvme1/state"), "live").unwrap();
        };
        let (ready, ()) = tokio::join!(wait, live);
        ready.unwrap();
    }

    #[tokio::test]
    async fn nobody_looks_for_a_namespace_of_a_machine_that_is_saved() {
        let (root, stages) = (sysfs(&[]), Stages::new(0));
        let looking = record_first(&stages, root.path().to_owned());
        tokio::pin!(looking);
        tokio::select! {
            () = &mut looking => panic!("there is no namespace"),
            () = tokio::task::yield_now() => stages.prepare(),
        }
        tokio::time::timeout(RECORD_PATIENCE / 2, looking).await.unwrap();
        assert!(stages.list().iter().all(|stage| stage.name != "vf-driver"));
    }

    #[test]
    fn by_address_and_by_being_the_only_one() {
        let root = sysfs(&[
            ("bus/pci/devices/0000:00:04.0/nvme/nvme0/nvme0n1/nsid", "7\n"),
            ("class/nvme/nvme0/nvme0n1/nsid", "7\n"),
            ("class/nvme/nvme0/hwmon0/name", "nvme\n"),
            ("class/block/nvme0n1/dev", "259:3\n"),
        ]);
        let found = Some(Device { major: 259, minor: 3 });
        assert_eq!(look(root.path(), &device("0000:00:04.0", 7)).unwrap(), found);
        assert_eq!(look(root.path(), &device("", 7)).unwrap(), found);
        assert_eq!(look(root.path(), &device("", 1)).unwrap(), None);
        assert_eq!(look(root.path(), &device("0000:00:05.0", 7)).unwrap(), None);
        assert!(look(root.path(), &device("../../class", 7)).is_err());
        assert!(any(root.path()));
        let error = absent(root.path(), &device("", 1)).to_string();
        assert!(error.contains("namespace 1") && error.contains("[7]"), "{error}");
    }

    #[test]
    fn multipath_names_lead_to_the_subsystems_disk() {
        let root = sysfs(&[
            ("bus/pci/devices/0000:00:04.0/nvme/nvme3/nvme1c3n2/nsid", "2"),
            ("class/block/nvme1n2/dev", "259:8"),
        ]);
        let found = look(root.path(), &device("0000:00:04.0", 2)).unwrap();
        assert_eq!(found, Some(Device { major: 259, minor: 8 }));
    }

    #[test]
    fn the_lowest_namespace_of_a_controller_can_be_asked_for() {
        let root = sysfs(&[
            ("bus/pci/devices/0000:00:04.0/nvme/nvme0/nvme0n1/nsid", "9\n"),
            ("bus/pci/devices/0000:00:04.0/nvme/nvme0/nvme0n2/nsid", "3\n"),
            ("bus/pci/devices/0000:00:05.0/nvme/nvme1/state", "live\n"),
            ("class/block/nvme0n1/dev", "259:0\n"),
            ("class/block/nvme0n2/dev", "259:1\n"),
        ]);
        let found = Some(Device { major: 259, minor: 1 });
        assert_eq!(look(root.path(), &device("0000:00:04.0", LOWEST)).unwrap(), found);
        let empty = device("0000:00:05.0", LOWEST);
        assert_eq!(look(root.path(), &empty).unwrap(), None);
        let error = absent(root.path(), &empty).to_string();
        assert!(error.contains("0000:00:05.0 has no namespace"), "{error}");
    }

    #[test]
    fn several_controllers_need_an_address() {
        let root = sysfs(&[("class/nvme/nvme0/x", ""), ("class/nvme/nvme1/x", "")]);
        assert!(look(root.path(), &device("", 1)).is_err());
        assert!(!any(root.path()));
    }

    #[test]
    fn a_virtio_block_device_is_found_by_its_function() {
        let root = sysfs(&[
            ("bus/pci/devices/0000:00:05.0/virtio2/block/vda/dev", "254:0\n"),
            ("bus/pci/devices/0000:00:05.0/msi_irqs/24", ""),
        ]);
        let found = Some(Device { major: 254, minor: 0 });
        assert_eq!(look(root.path(), &device("0000:00:05.0", 0)).unwrap(), found);
        assert_eq!(look(root.path(), &device("0000:00:06.0", 0)).unwrap(), None);
        assert!(look(root.path(), &device("", 0)).is_err());
        let error = absent(root.path(), &device("0000:00:06.0", 0)).to_string();
        assert!(error.contains("virtio block device 0000:00:06.0"), "{error}");
    }

    #[test]
    fn names_that_are_no_namespaces() {
        for name in ["nvme0", "nvme0n1p1", "nvmen1", "nvme0cn1", "ng0n1", "hwmon0", "nvme0n"] {
            assert_eq!(disk_name(name), None, "{name}");
        }
        assert_eq!(disk_name("nvme12n3").as_deref(), Some("nvme12n3"));
    }
}
