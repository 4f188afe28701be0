//! A PCI function without a kernel driver: found, taken and accessed through sysfs.
//!
//! This is for a machine without an IOMMU in front of the function, such as a sandbox: the function
//! gets physical addresses, and nothing restricts it to its own memory. So it is only for root of a
//! machine that nobody else uses.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use slipway_ram::RegisterWindow;

/// Class of an NVMe controller: mass storage, non-volatile memory, NVM Express.
const NVME: &str = "0x010802";
/// The Command register in configuration space (PCI Local Bus 3.0, 6.2.2), and its bits for a
/// driver that polls: Memory Space, Bus Master, Interrupt Disable.
const COMMAND: u64 = 4;
const DRIVER: u16 = 1 << 1 | 1 << 2 | 1 << 10;
/// The bit that lets the function access memory.
const BUS_MASTER: u16 = 1 << 2;

/// Takes the NVMe controller whose only namespace is the block device `disk` from the kernel's
/// driver. Returns its PCI address, by which it is opened from now on.
///
/// # Errors
/// If the disk belongs to no such controller, or is in use.
pub fn take(disk: &Path) -> Result<String> {
    let at = || disk.display().to_string();
    // A mount or an array holds the disk exclusively, too, so this fails if there is one.
    let open = OpenOptions::new().read(true).custom_flags(libc_excl()).open(disk);
    let number = open.with_context(at)?.metadata()?.rdev();
    let sysfs = Path::new("/sys");
    let controller = controller_of(sysfs, number).with_context(at)?;
    let address = address_of(&controller).with_context(at)?;
    let unbind = sysfs.join("bus/pci/devices").join(&address).join("driver/unbind");
    fs::write(&unbind, &address).with_context(|| format!("{address}: taking its driver away"))?;
    Ok(address)
}

/// Returns O_EXCL, which opens a block device exclusively.
fn libc_excl() -> i32 {
    rustix::fs::OFlags::EXCL.bits() as i32
}

/// Returns the folder of the NVMe controller whose only disk has device number `number`.
fn controller_of(sysfs: &Path, number: u64) -> Result<PathBuf> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let disk = fs::canonicalize(sysfs.join(format!("dev/block/{major}:{minor}")))?;
    let parent = disk.parent().context("no disk of a controller")?;
    // With native multipath the disk belongs to its subsystem, which has links to controllers.
    let mut controllers: Vec<PathBuf> = entries(parent, "nvme")
        .into_iter()
        .filter(|entry| entry.is_symlink())
        .filter_map(|entry| fs::canonicalize(entry).ok())
        .collect();
    if controllers.is_empty() {
        controllers.push(parent.to_owned());
    }
    ensure!(controllers.len() == 1, "{} controllers have this disk", controllers.len());
    let controller = controllers.swap_remove(0);
    let namespaces =
        entries(&controller, "nvme").into_iter().filter(|entry| entry.join("nsid").exists());
    let count = namespaces.count();
    ensure!(count == 1, "its controller has {count} namespaces, and the kernel needs the others");
    Ok(controller)
}

/// Returns the entries of a folder whose names begin with `prefix`.
fn entries(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let entries = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let named = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(prefix))
    };
    entries.filter(named).collect()
}

/// Returns the address of the PCI function above `controller`.
fn address_of(controller: &Path) -> Result<String> {
    let above = controller.ancestors().filter_map(|dir| dir.file_name()?.to_str());
    let address = above.into_iter().find(|name| is_address(name));
    address.map(str::to_owned).context("its controller is no PCI function")
}

/// Returns whether `text` has the form `0000:00:05.0`.
fn is_address(text: &str) -> bool {
    let shape = "xxxx:xx:xx.x";
    text.len() == shape.len()
        && text.bytes().zip(shape.bytes()).all(|(byte, shape)| match shape {
            b'x' => byte.is_ascii_hexdigit(),
            mark => byte == mark,
        })
}

/// An NVMe controller's function, which may access memory as long as this value lives.
pub(super) struct PciFunction {
    pub registers: Arc<RegisterWindow>,
    config: File,
    enable: PathBuf,
}

impl PciFunction {
    /// Enables the function at `address` and maps its registers, at least `least` bytes of them.
    pub fn open(address: &str, least: u64) -> Result<Self> {
        ensure!(is_address(address), "{address}: no PCI address");
        let dir = Path::new("/sys/bus/pci/devices").join(address);
        let class = fs::read_to_string(dir.join("class")).context("there is no such function")?;
        ensure!(class.trim() == NVME, "class {} is no NVMe controller's", class.trim());
        ensure!(!dir.join("driver").exists(), "a driver of the kernel's still has it");
        let open = |name| OpenOptions::new().read(true).write(true).open(dir.join(name));
        let config = open("config").context("its configuration space")?;
        let enable = dir.join("enable");
        fs::write(&enable, "1").context("switching it on")?;
        // An error in the next steps leaves the function enabled: only dropping `Self` disables it.
        let bar = open("resource0").context("its registers")?;
        let len = bar.metadata()?.len();
        ensure!(len >= least, "{len} bytes of registers are fewer than {least}");
        let window = RegisterWindow::map(&bar, 0, 0, usize::try_from(len)?);
        let registers = Arc::new(window.context("mapping its registers")?);
        let function = Self { registers, config, enable };
        function.command(|command| command | DRIVER)?;
        Ok(function)
    }

    fn command(&self, change: impl FnOnce(u16) -> u16) -> Result<()> {
        let mut bytes = [0; 2];
        self.config.read_exact_at(&mut bytes, COMMAND)?;
        let command = change(u16::from_le_bytes(bytes));
        self.config.write_all_at(&command.to_le_bytes(), COMMAND).context("PCI Command")
    }
}

impl Drop for PciFunction {
    fn drop(&mut self) {
        // Stops the function's access to memory, which may soon belong to somebody else.
        let _ = self.command(|command| command & !BUS_MASTER);
        let _ = fs::write(&self.enable, "0");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const FUNCTION: &str = "devices/pci0000:00/0000:00:05.0/nvme/nvme1";

    fn number() -> u64 {
        rustix::fs::makedev(259, 3)
    }

    fn sysfs(disk: &str, namespaces: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for namespace in namespaces {
            let dir = root.path().join(FUNCTION).join(namespace);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("nsid"), "1\n").unwrap();
        }
        fs::create_dir_all(root.path().join(FUNCTION).join("ng1n1")).unwrap();
        fs::create_dir_all(root.path().join(disk)).unwrap();
        fs::create_dir_all(root.path().join("dev/block")).unwrap();
        symlink(root.path().join(disk), root.path().join("dev/block/259:3")).unwrap();
        root
    }

    #[test]
    fn a_disk_leads_to_its_function() {
        let root = sysfs(&format!("{FUNCTION}/nvme1n1"), &["nvme1n1"]);
        let controller = controller_of(root.path(), number()).unwrap();
        assert_eq!(address_of(&controller).unwrap(), "0000:00:05.0");
    }

    #[test]
    fn a_subsystems_disk_leads_to_its_only_controller() {
        let subsystem = "devices/virtual/nvme-subsystem/nvme-subsys1";
        let root = sysfs(&format!("{subsystem}/nvme1n1"), &["nvme1c1n1"]);
        let link = root.path().join(subsystem).join("nvme1");
        symlink(root.path().join(FUNCTION), link).unwrap();
        let controller = controller_of(root.path(), number()).unwrap();
        assert_eq!(address_of(&controller).unwrap(), "0000:00:05.0");
        symlink(root.path().join(FUNCTION), root.path().join(subsystem).join("nvme2")).unwrap();
        let error = controller_of(root.path(), number()).unwrap_err().to_string();
        assert!(error.contains("2 controllers"), "{error}");
    }

    #[test]
    fn a_controller_with_other_disks_stays_the_kernels() {
        let root = sysfs(&format!("{FUNCTION}/nvme1n1"), &["nvme1n1", "nvme1n2"]);
        let error = controller_of(root.path(), number()).unwrap_err().to_string();
        assert!(error.contains("2 namespaces"), "{error}");
        assert!(controller_of(root.path(), number() + 1).is_err());
        let other = root.path().join("devices/virtual/block/loop0");
        assert!(address_of(&other).is_err());
        assert!(PciFunction::open("../../../etc", 1).is_err());
    }
}
