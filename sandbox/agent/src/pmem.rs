//! Pages that the sandbox shares with others: the persistent memory `pmem0`, which has its image.

use std::path::Path;

use anyhow::{Result, anyhow};

use crate::init::Device;
use crate::nvme::{PATIENCE, number};
use crate::{machine, uevent};

/// Returns the device number of the shared pages. Loads their drivers and waits for the device.
pub async fn find(sysfs: &Path) -> Result<Device> {
    tokio::task::spawn_blocking(machine::load_pmem_modules).await?;
    let disk = sysfs.join("class/block/pmem0");
    let found = uevent::wait_for(PATIENCE, || number(&disk)).await?;
    let seconds = PATIENCE.as_secs();
    found.ok_or_else(|| anyhow!("the shared pages (pmem0) did not appear within {seconds} s"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_pages_are_found_by_the_name_of_their_disk() {
        let sysfs = tempfile::tempdir().unwrap();
        let disk = sysfs.path().join("class/block/pmem0");
        std::fs::create_dir_all(&disk).unwrap();
        std::fs::write(disk.join("dev"), "259:7\n").unwrap();
        let found = find(sysfs.path()).await.unwrap();
        assert_eq!(found, Device { major: 259, minor: 7 });
    }
}
