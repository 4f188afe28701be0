//! A PCI function of the host that a VMM has by VFIO itself.
//!
//! The VMM opens the function's IOMMU group by its path, which only root may do. So its user owns
//! the group's device from before the process starts until the VMM has opened all that it needs.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};

use crate::{AssignedFunction, Credentials, Error, Result};

/// The driver that keeps functions for programs.
const VFIO_PCI: &str = "vfio-pci";

/// The right of a VM's user to open an IOMMU group. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct GroupGrant {
    /// The group's device.
    device: PathBuf,
    /// The owner from before: user and group.
    before: (u32, u32),
}

impl GroupGrant {
    /// Checks that `function` can be had, and lets `user` open its group; `None` is the launcher's
    /// own user.
    ///
    /// # Errors
    /// [`Error::BadSpec`] if there is no such function, or it is not bound to vfio-pci;
    /// [`Error::File`] if the owner of the group's device cannot be changed.
    pub(crate) fn new(function: &AssignedFunction, user: Option<Credentials>) -> Result<Self> {
        Self::on_host(Path::new("/"), function, user)
    }

    /// Does that on the host whose root directory is `root`.
    fn on_host(
        root: &Path,
        function: &AssignedFunction,
        user: Option<Credentials>,
    ) -> Result<Self> {
        let device = root.join("dev/vfio").join(group(root, &function.address)?);
        let failed = |source| Error::file("use the IOMMU group", &device, source);
        let found = fs::metadata(&device).map_err(failed)?;
        let before = (found.uid(), found.gid());
        if let Some(Credentials { uid, gid }) = user {
            chown(&device, Some(uid), Some(gid)).map_err(failed)?;
        }
        Ok(Self { device, before })
    }
}

impl Drop for GroupGrant {
    fn drop(&mut self) {
        let (uid, gid) = self.before;
        // The device is gone if the function has left vfio-pci meanwhile.
        let _ = chown(&self.device, Some(uid), Some(gid));
    }
}

/// Returns the number of the IOMMU group of the function at `address`, as text.
///
/// # Errors
/// [`Error::BadSpec`].
fn group(root: &Path, address: &str) -> Result<String> {
    let bad = |what: String| Err(Error::BadSpec { what });
    let plain = |byte: u8| byte.is_ascii_hexdigit() || b":.".contains(&byte);
    let function = root.join("sys/bus/pci/devices").join(address);
    if !address.bytes().all(plain) || !function.join("class").exists() {
        return bad(format!("there is no PCI function {address}: `lspci -D` lists them"));
    }
    if link_name(&function.join("driver")).as_deref() != Some(VFIO_PCI) {
        let how = "write that to its driver_override, unbind it, and write its address to \
                   /sys/bus/pci/drivers_probe";
        return bad(format!("{address} is not bound to {VFIO_PCI}: {how}"));
    }
    match link_name(&function.join("iommu_group")) {
        Some(group) => Ok(group),
        None => bad(format!("{address} is behind no IOMMU: `slipway doctor` says what it lacks")),
    }
}

/// Returns the name of the file that a link leads to.
fn link_name(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, remove_file, write};
    use std::os::unix::fs::symlink;

    use super::*;

    const ADDRESS: &str = "0000:01:10.0";

    fn granted(root: &Path, address: &str) -> Result<GroupGrant> {
        let function = AssignedFunction { address: address.into(), iommu: false };
        GroupGrant::on_host(root, &function, None)
    }

    #[test]
    fn a_function_is_had_if_vfio_keeps_it() {
        let root = tempfile::tempdir().unwrap();
        let refusal = |address| granted(root.path(), address).unwrap_err().to_string();
        let function = root.path().join("sys/bus/pci/devices").join(ADDRESS);
        assert!(refusal(ADDRESS).contains("no PCI function"));
        create_dir_all(&function).unwrap();
        write(function.join("class"), "0x010802\n").unwrap();
        assert!(refusal(ADDRESS).contains("not bound to vfio-pci"));
        symlink("../drivers/nvme", function.join("driver")).unwrap();
        assert!(refusal(ADDRESS).contains("not bound to vfio-pci"));
        remove_file(function.join("driver")).unwrap();
        symlink("../drivers/vfio-pci", function.join("driver")).unwrap();
        assert!(refusal(ADDRESS).contains("no IOMMU"));
        symlink("../../kernel/iommu_groups/7", function.join("iommu_group")).unwrap();
        assert!(refusal(ADDRESS).contains("dev/vfio/7"));
        create_dir_all(root.path().join("dev/vfio")).unwrap();
        write(root.path().join("dev/vfio/7"), "").unwrap();
        granted(root.path(), ADDRESS).unwrap();
        assert!(refusal("0000:01:10.0/..").contains("no PCI function"));
        assert!(refusal("").contains("no PCI function"));
    }
}
