//! The kernel's view of a PCI function: its driver, its IOMMU group, and whether something of the
//! host uses it.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::driver_state::VFIO_PCI;
use crate::{DriverState, Error, PciAddress};

/// The upper 16 bits of a PCI-to-PCI bridge's class code. Bridges stay with their driver.
const BRIDGE: &str = "0x0604";
/// `IFF_UP` of an interface's flags.
const UP: u32 = 1;

/// A mounted sysfs.
#[derive(Clone, Debug)]
pub struct Sysfs {
    root: PathBuf,
}

impl Default for Sysfs {
    fn default() -> Self {
        Self::at("/sys")
    }
}

/// A function that is bound to vfio-pci.
#[derive(Debug)]
#[must_use = "the function is to be given back to its driver"]
pub struct Binding {
    address: PciAddress,
    /// The state from before. A function that had vfio-pci then keeps it.
    prior: DriverState,
}

impl Binding {
    /// Returns the binding that an earlier process made, or had begun to make or to end, of a
    /// function whose state before that was `prior`.
    pub fn of_earlier(address: PciAddress, prior: DriverState) -> Self {
        Self { address, prior }
    }
}

impl Sysfs {
    /// Returns the sysfs that is mounted at `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn device(&self, address: PciAddress) -> PathBuf {
        self.root.join("bus/pci/devices").join(address.to_string())
    }

    /// Returns the name of the function's driver, or `None` if it has none.
    pub fn driver(&self, address: PciAddress) -> Option<String> {
        link_name(&self.device(address).join("driver"))
    }

    /// Returns the number of the function's IOMMU group.
    ///
    /// # Errors
    /// [`Error::NoIommu`].
    pub fn group(&self, address: PciAddress) -> Result<u32, Error> {
        let name = link_name(&self.device(address).join("iommu_group"));
        name.and_then(|name| name.parse().ok()).ok_or(Error::NoIommu(address))
    }

    /// Returns the name of the function's device in `/dev/vfio/devices`, or `None` if the kernel
    /// has no such devices. To be called on a function that is bound.
    pub fn cdev(&self, address: PciAddress) -> Option<String> {
        names(&self.device(address).join("vfio-dev")).into_iter().next()
    }

    /// Checks that this process may have the function: alone, behind an IOMMU, and used by nothing
    /// of the host.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn check(&self, address: PciAddress) -> Result<(), Error> {
        if !self.root.join("bus/pci/drivers").join(VFIO_PCI).exists() {
            return Err(Error::NoDriver);
        }
        let device = self.device(address);
        if !device.exists() {
            return Err(Error::Unknown(address));
        }
        let own = address.to_string();
        if self.is_bridge(&own) {
            return Err(Error::Unfit { address, why: "is a bridge: name a function behind it" });
        }
        let group = self.group(address)?;
        let members = names(&device.join("iommu_group/devices"));
        let other = members.into_iter().find(|name| *name != own && !self.is_bridge(name));
        if let Some(other) = other {
            return Err(Error::Shared { address, group, other });
        }
        match self.driver(address) {
            Some(driver) if driver != VFIO_PCI => match self.used(&device) {
                Some(used) => Err(Error::InUse { address, driver, used }),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn is_bridge(&self, name: &str) -> bool {
        let class = self.root.join("bus/pci/devices").join(name).join("class");
        std::fs::read_to_string(class).is_ok_and(|class| class.starts_with(BRIDGE))
    }

    /// Returns the use that the host makes of a function by its driver, and how to end that.
    /// Returns `None` if there is none.
    fn used(&self, device: &Path) -> Option<String> {
        let virtual_functions = std::fs::read_to_string(device.join("sriov_numvfs"));
        let count = virtual_functions.ok().and_then(|text| text.trim().parse::<u32>().ok());
        if let Some(count @ 1..) = count {
            return Some(format!("and has {count} virtual functions: name those instead"));
        }
        interface(device).or_else(|| self.disk(device))
    }

    /// Returns the use that the host makes of the disks on a function. Nothing tells whether a disk
    /// is in use, so each counts as that.
    fn disk(&self, device: &Path) -> Option<String> {
        disk(device).or_else(|| self.block_device(device)).map(|disk| {
            let file = device.join("driver/unbind");
            format!("which has the disk {disk}: unbind it first, through {}", file.display())
        })
    }

    /// Returns the name of a block device on a function, however far behind it: those of SATA, SAS
    /// and USB.
    fn block_device(&self, device: &Path) -> Option<String> {
        let device = device.canonicalize().ok()?;
        let is_behind =
            |disk: &PathBuf| disk.canonicalize().is_ok_and(|disk| disk.starts_with(&device));
        let disk = entries(&self.root.join("class/block")).into_iter().find(is_behind)?;
        Some(disk.file_name()?.to_str()?.to_owned())
    }

    /// Returns the driver and the override of a function.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub fn driver_state(&self, address: PciAddress) -> Result<DriverState, Error> {
        if !self.device(address).exists() {
            return Err(Error::Unknown(address));
        }
        let driver = self.driver(address).unwrap_or_default();
        Ok(DriverState { driver, only: self.only(address) })
    }

    /// Binds a function that was checked to vfio-pci, unless it is bound already. May wait for the
    /// driver that it has. `prior` is the state to which [`Sysfs::give_back`] returns it: its
    /// [`Sysfs::driver_state`], or the one from before an earlier process bound it.
    ///
    /// # Errors
    /// [`Error::Sysfs`], [`Error::NotBound`]; the function is with its driver again then, as far as
    /// that takes it.
    pub fn bind(&self, address: PciAddress, prior: DriverState) -> Result<Binding, Error> {
        let binding = Binding { address, prior };
        if self.driver(address).as_deref() == Some(VFIO_PCI) {
            return Ok(binding);
        }
        match self.hand_over(address) {
            Ok(()) => Ok(binding),
            Err(error) => {
                let _ = self.give_back(binding);
                Err(error)
            }
        }
    }

    fn hand_over(&self, address: PciAddress) -> Result<(), Error> {
        let device = self.device(address);
        write(&device.join("driver_override"), VFIO_PCI)?;
        self.part(address)?;
        self.probe(address)?;
        let is_bound = self.driver(address).as_deref() == Some(VFIO_PCI);
        is_bound.then_some(()).ok_or(Error::NotBound(address))
    }

    /// Has the kernel look for a driver of a function. It finds none for a VF whose physical
    /// function has `sriov_drivers_autoprobe` off, unless the VF has an override.
    fn probe(&self, address: PciAddress) -> Result<(), Error> {
        write(&self.root.join("bus/pci/drivers_probe"), &address.to_string())
    }

    /// Returns the override of a function, empty if it has none.
    fn only(&self, address: PciAddress) -> String {
        let text = std::fs::read_to_string(self.device(address).join("driver_override"));
        // As the kernel writes the absence of a name.
        text.map(|text| text.trim().replace("(null)", "")).unwrap_or_default()
    }

    /// Parts a function from its driver, if it has one.
    fn part(&self, address: PciAddress) -> Result<(), Error> {
        match self.driver(address) {
            Some(_) => write(&self.device(address).join("driver/unbind"), &address.to_string()),
            None => Ok(()),
        }
    }

    /// Gives a function back to the driver that it had before it was bound, and its override. May
    /// wait for a program that has it open.
    ///
    /// # Errors
    /// [`Error::Sysfs`].
    pub fn give_back(&self, binding: Binding) -> Result<(), Error> {
        let Binding { address, prior: DriverState { driver, only } } = binding;
        if driver == VFIO_PCI {
            return Ok(());
        }
        let file = self.device(address).join("driver_override");
        // An empty line takes the override away.
        write(&file, &format!("{driver}\n"))?;
        self.part(address)?;
        if !driver.is_empty() {
            self.probe(address)?;
        }
        if only != driver {
            write(&file, &format!("{only}\n"))?;
        }
        Ok(())
    }
}

/// Returns the use that the host makes of the network interfaces on a function.
fn interface(device: &Path) -> Option<String> {
    for net in std::iter::once(device.to_owned()).chain(virtio(device)).map(|at| at.join("net")) {
        let interfaces = names(&net);
        if interfaces.is_empty() && net.exists() {
            // Of interfaces, sysfs shows those of its own network namespace.
            return Some("whose interface is in another network namespace: end what has it".into());
        }
        if let Some(name) = interfaces.iter().find(|name| is_up(&net.join(name))) {
            return Some(format!("whose interface is up: `ip link set {name} down`"));
        }
    }
    None
}

fn is_up(interface: &Path) -> bool {
    let flags = std::fs::read_to_string(interface.join("flags")).unwrap_or_default();
    let flags = u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16);
    flags.is_ok_and(|flags| flags & UP != 0)
}

/// Returns the folders of a function's virtio devices.
fn virtio(device: &Path) -> impl Iterator<Item = PathBuf> {
    let is_virtio = |name: &String| name.starts_with("virtio");
    names(device).into_iter().filter(is_virtio).map(move |name| device.join(name))
}

/// Returns the name of a disk on a function: of an NVMe controller or of a virtio block device.
fn disk(device: &Path) -> Option<String> {
    let nvme = device.join("nvme");
    let namespaces = names(&nvme).into_iter().flat_map(|name| names(&nvme.join(name)));
    let blocks = virtio(device).flat_map(|folder| names(&folder.join("block")));
    namespaces.filter(|name| name.starts_with("nvme")).chain(blocks).next()
}

/// Returns the name of the file that a link leads to.
fn link_name(link: &Path) -> Option<String> {
    let target = std::fs::read_link(link).ok()?;
    Some(target.file_name()?.to_str()?.to_owned())
}

/// Returns the paths in a folder, sorted; none if there is no such folder.
fn entries(folder: &Path) -> Vec<PathBuf> {
    names(folder).into_iter().map(|name| folder.join(name)).collect()
}

/// Returns the names in a folder, sorted; none if there is no such folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    let written = OpenOptions::new().write(true).open(path);
    let written = written.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| Error::Sysfs { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, read_to_string, remove_file, write};
    use std::os::unix::fs::symlink;

    use super::*;

    const ADDRESS: &str = "0000:01:10.0";

    fn address() -> PciAddress {
        ADDRESS.parse().unwrap()
    }

    /// A tree with vfio-pci, an Ethernet VF without a driver, and a bridge in its group.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            let root = tree.0.path();
            for driver in ["vfio-pci", "igbvf"] {
                create_dir_all(root.join("bus/pci/drivers").join(driver)).unwrap();
                write(root.join("bus/pci/drivers").join(driver).join("unbind"), "").unwrap();
            }
            write(root.join("bus/pci/drivers_probe"), "").unwrap();
            tree.function(ADDRESS, "0x020000");
            tree.function("0000:00:01.0", "0x060400");
            tree
        }

        fn sysfs(&self) -> Sysfs {
            Sysfs::at(self.0.path())
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join("bus/pci/devices").join(ADDRESS).join(name)
        }

        /// Adds a function to IOMMU group 7.
        fn function(&self, name: &str, class: &str) {
            let device = self.0.path().join("bus/pci/devices").join(name);
            let group = self.0.path().join("kernel/iommu_groups/7/devices");
            create_dir_all(&device).unwrap();
            create_dir_all(&group).unwrap();
            write(device.join("class"), format!("{class}\n")).unwrap();
            write(device.join("driver_override"), "").unwrap();
            symlink(group.parent().unwrap(), device.join("iommu_group")).unwrap();
            symlink(&device, group.join(name)).unwrap();
        }

        fn set_driver(&self, driver: &str) {
            let _ = remove_file(self.path("driver"));
            let driver = self.0.path().join("bus/pci/drivers").join(driver);
            symlink(driver, self.path("driver")).unwrap();
        }

        fn add(&self, name: &str, text: &str) {
            create_dir_all(self.path(name).parent().unwrap()).unwrap();
            write(self.path(name), text).unwrap();
        }

        fn state(&self) -> DriverState {
            self.sysfs().driver_state(address()).unwrap()
        }

        /// Binds a function that is bound already, and gives it back to `prior`.
        fn give_back_bound(&self, prior: DriverState) {
            let binding = self.sysfs().bind(address(), prior).unwrap();
            self.sysfs().give_back(binding).unwrap();
        }

        fn refusal(&self) -> String {
            self.sysfs().check(address()).unwrap_err().to_string()
        }
    }

    #[test]
    fn a_function_that_nobody_uses_can_be_had() {
        let tree = Tree::new();
        let sysfs = tree.sysfs();
        sysfs.check(address()).unwrap();
        assert_eq!((sysfs.driver(address()), sysfs.group(address()).unwrap()), (None, 7));
        assert_eq!(sysfs.cdev(address()), None);
        create_dir_all(tree.path("vfio-dev/vfio3")).unwrap();
        assert_eq!(sysfs.cdev(address()).as_deref(), Some("vfio3"));
        tree.set_driver("igbvf");
        tree.add("net/eth1/flags", "0x1002\n");
        sysfs.check(address()).unwrap();
    }

    #[test]
    fn each_reason_has_its_next_step() {
        let tree = Tree::new();
        let other: PciAddress = "0000:02:00.0".parse().unwrap();
        assert!(matches!(tree.sysfs().check(other), Err(Error::Unknown(_))));
        let bridge = tree.sysfs().check("0000:00:01.0".parse().unwrap()).unwrap_err().to_string();
        assert!(bridge.contains("0000:00:01.0 is a bridge"), "{bridge}");
        tree.set_driver("igbvf");
        tree.add("net/eth1/flags", "0x1003\n");
        assert!(tree.refusal().contains("`ip link set eth1 down`"), "{}", tree.refusal());
        tree.add("net/eth1/flags", "0x1002\n");
        tree.add("sriov_numvfs", "4\n");
        assert!(tree.refusal().contains("4 virtual functions"), "{}", tree.refusal());
        tree.add("sriov_numvfs", "0\n");
        tree.add("nvme/nvme2/nvme2n1/size", "8");
        assert!(tree.refusal().contains("the disk nvme2n1"), "{}", tree.refusal());
        // A controller of SATA has its disks farther away, a virtio device its interface.
        std::fs::remove_dir_all(tree.path("nvme")).unwrap();
        tree.sysfs().check(address()).unwrap();
        tree.add("virtio3/net/eth2/flags", "0x1003\n");
        assert!(tree.refusal().contains("`ip link set eth2 down`"), "{}", tree.refusal());
        tree.add("virtio3/net/eth2/flags", "0x1002\n");
        tree.sysfs().check(address()).unwrap();
        std::fs::remove_dir_all(tree.path("virtio3/net/eth2")).unwrap();
        assert!(tree.refusal().contains("in another network namespace"), "{}", tree.refusal());
        std::fs::remove_dir_all(tree.path("virtio3")).unwrap();
        let class = tree.0.path().join("class/block");
        create_dir_all(&class).unwrap();
        create_dir_all(tree.path("ata1/host0/block/sda")).unwrap();
        symlink(tree.path("ata1/host0/block/sda"), class.join("sda")).unwrap();
        assert!(tree.refusal().contains("the disk sda"), "{}", tree.refusal());
        // A function of vfio-pci has nothing of the sort.
        tree.set_driver("vfio-pci");
        tree.sysfs().check(address()).unwrap();
        tree.function("0000:01:10.2", "0x020000");
        assert!(tree.refusal().contains("shares IOMMU group 7 with 0000:01:10.2"));
        remove_file(tree.path("iommu_group")).unwrap();
        assert!(tree.refusal().contains("has no IOMMU group"));
        std::fs::remove_dir_all(tree.0.path().join("bus/pci/drivers/vfio-pci")).unwrap();
        assert!(tree.refusal().contains("modprobe vfio-pci"));
    }

    #[test]
    fn a_function_that_is_bound_already_stays_so() {
        let tree = Tree::new();
        tree.set_driver("vfio-pci");
        tree.give_back_bound(tree.state());
        assert_eq!(read_to_string(tree.path("driver_override")).unwrap(), "");
    }

    #[test]
    fn a_function_that_an_earlier_process_bound_goes_back_to_its_driver() {
        let tree = Tree::new();
        tree.set_driver("vfio-pci");
        tree.give_back_bound(DriverState::new("igbvf", "igbvf").unwrap());
        assert_eq!(read_to_string(tree.path("driver_override")).unwrap(), "igbvf\n");
        let drivers = tree.0.path().join("bus/pci/drivers");
        assert_eq!(read_to_string(drivers.join("vfio-pci/unbind")).unwrap(), ADDRESS);
        assert_eq!(read_to_string(tree.0.path().join("bus/pci/drivers_probe")).unwrap(), ADDRESS);
        let other = "0000:02:00.0".parse().unwrap();
        assert!(matches!(tree.sysfs().driver_state(other), Err(Error::Unknown(_))));
    }

    /// No kernel answers what is written here, so the function keeps its driver.
    #[test]
    fn a_function_that_vfio_does_not_take_goes_back() {
        let tree = Tree::new();
        tree.set_driver("igbvf");
        let refused = tree.sysfs().bind(address(), tree.state()).unwrap_err();
        assert!(matches!(refused, Error::NotBound(_)), "{refused}");
        let drivers = tree.0.path().join("bus/pci/drivers");
        assert_eq!(read_to_string(drivers.join("igbvf/unbind")).unwrap(), ADDRESS);
        assert_eq!(read_to_string(tree.0.path().join("bus/pci/drivers_probe")).unwrap(), ADDRESS);
        let left = read_to_string(tree.path("driver_override")).unwrap();
        assert!(left.starts_with('\n'), "the override is left: {left:?}");
    }
}
