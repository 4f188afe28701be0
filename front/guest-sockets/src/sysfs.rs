//! The function in sysfs: its address, and the kernel's driver for user space.

use std::fmt::{Display, Formatter};
use std::fs::{read_dir, read_to_string, write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use slipway_sgiov_spec::function::{DEVICE, VENDOR};

const DRIVER: &str = "uio_pci_generic";

/// A socket function on the PCI bus.
pub struct Function {
    bus: PathBuf,
    /// The PCI address, such as `0000:00:06.0`.
    address: String,
}

impl Display for Function {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.address)
    }
}

impl Function {
    /// Finds the first socket function on the bus.
    ///
    /// # Errors
    /// If there is none.
    pub fn find(sysfs: &Path) -> Result<Self> {
        let bus = sysfs.join("bus/pci");
        let devices = bus.join("devices");
        let entries = read_dir(&devices)
            .with_context(|| format!("no PCI bus: {} (is sysfs mounted?)", devices.display()))?;
        let mut addresses: Vec<String> = entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|address| is_socket_function(&devices.join(address)))
            .collect();
        addresses.sort();
        let Some(address) = addresses.into_iter().next() else {
            bail!(
                "no PCI function {VENDOR:04x}:{DEVICE:04x}: this sandbox was started without \
                 sockets"
            );
        };
        Ok(Self { bus, address })
    }

    /// Returns the function's folder in sysfs.
    pub fn folder(&self) -> PathBuf {
        self.bus.join("devices").join(&self.address)
    }

    /// Returns whether the kernel has an interrupt for the function's pin.
    pub fn has_interrupt(&self) -> bool {
        number(&self.folder().join("irq")).is_some_and(|irq| irq != 0)
    }

    /// Binds the function to the kernel's driver for user space. Returns the driver's device file.
    ///
    /// # Errors
    /// If the driver is missing, or does not take the function.
    pub fn bind(&self) -> Result<PathBuf> {
        let folder = self.folder();
        let drivers = self.bus.join("drivers").join(DRIVER);
        if !drivers.exists() {
            bail!("the kernel has no driver {DRIVER}: load the modules uio and {DRIVER}");
        }
        let bound = folder.join("driver");
        let own = || bound.canonicalize().is_ok_and(|path| path.ends_with(DRIVER));
        if !own() {
            put(&folder.join("driver_override"), DRIVER)?;
            if bound.exists() {
                put(&bound.join("unbind"), &self.address)?;
            }
            put(&self.bus.join("drivers_probe"), &self.address)?;
        }
        if !own() {
            bail!("{DRIVER} did not take {self}: the kernel's log says why");
        }
        let entries = read_dir(folder.join("uio"));
        let entry = entries.ok().and_then(|mut entries| entries.next()?.ok());
        let name = entry.with_context(|| format!("{DRIVER} has made no device for {self}"))?;
        Ok(Path::new("/dev").join(name.file_name()))
    }
}

fn put(path: &Path, text: &str) -> Result<()> {
    write(path, text).with_context(|| format!("cannot write {text} to {}", path.display()))
}

fn number(path: &Path) -> Option<u64> {
    let text = read_to_string(path).ok()?;
    let text = text.trim();
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

fn is_socket_function(folder: &Path) -> bool {
    let is = |file: &str, wanted: u16| number(&folder.join(file)) == Some(wanted.into());
    is("vendor", VENDOR) && is("device", DEVICE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(sysfs: &Path, address: &str, vendor: &str, device: &str) -> PathBuf {
        let folder = sysfs.join("bus/pci/devices").join(address);
        std::fs::create_dir_all(&folder).unwrap();
        for (file, text) in [("vendor", vendor), ("device", device), ("irq", "20\n")] {
            write(folder.join(file), text).unwrap();
        }
        folder
    }

    #[test]
    fn the_function_is_found_and_what_is_missing_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let sysfs = dir.path();
        let error = |outcome: Result<Function>| outcome.err().map(|error| format!("{error:#}"));
        assert!(error(Function::find(sysfs)).unwrap().contains("no PCI bus"));
        add(sysfs, "0000:00:04.0", "0x1b36\n", "0x0010\n");
        add(sysfs, "0000:00:05.0", "0x1af4\n", "0x1041\n");
        assert!(error(Function::find(sysfs)).unwrap().contains("1af4:10f5"));
        let folder = add(sysfs, "0000:00:06.0", "0x1af4\n", "0x10f5\n");
        let function = Function::find(sysfs).unwrap();
        assert_eq!(
            (function.to_string().as_str(), function.has_interrupt()),
            ("0000:00:06.0", true)
        );
        assert_eq!(function.folder(), folder);
        assert!(format!("{:#}", function.bind().unwrap_err()).contains("load the modules"));
        std::fs::create_dir_all(sysfs.join("bus/pci/drivers").join(DRIVER)).unwrap();
        assert!(format!("{:#}", function.bind().unwrap_err()).contains("did not take"));
        assert_eq!(read_to_string(folder.join("driver_override")).unwrap(), DRIVER);
        assert_eq!(read_to_string(sysfs.join("bus/pci/drivers_probe")).unwrap(), "0000:00:06.0");
        std::os::unix::fs::symlink(
            sysfs.join("bus/pci/drivers").join(DRIVER),
            folder.join("driver"),
        )
        .unwrap();
        std::fs::create_dir_all(folder.join("uio/uio3")).unwrap();
        assert_eq!(function.bind().unwrap(), Path::new("/dev/uio3"));
    }
}
