//! Use of a disk while something is measured.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};

/// Bytes of a sector in the kernel's counters (`Documentation/block/stat.rst`).
const SECTOR: u64 = 512;

/// Requests and bytes, of reads and writes together: those of a block device, or, where files are
/// on none that counts, the bytes of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUse {
    /// Requests that the device completed. `None` if they were not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,
    /// Bytes.
    pub bytes: u64,
}

/// The counters of a disk.
#[derive(Clone, Debug)]
pub(super) struct Disk(Option<PathBuf>);

impl Disk {
    /// Finds the counters of the disk on which `folder` is.
    ///
    /// # Errors
    /// The folder is not there.
    pub(super) fn of(folder: &Path) -> Result<Self> {
        let device = std::fs::metadata(folder)?.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let counters = PathBuf::from(format!("/sys/dev/block/{major}:{minor}/stat"));
        Ok(Self(counters.exists().then_some(counters)))
    }

    /// Returns the counts since boot, or since this process began. `None` if they cannot be read.
    pub(super) fn counts(&self) -> Option<DiskUse> {
        match &self.0 {
            Some(path) => of_device(&std::fs::read_to_string(path).ok()?),
            None => of_process(&std::fs::read_to_string("/proc/self/io").ok()?),
        }
    }
}

impl DiskUse {
    /// Returns what was counted after `before`.
    pub(super) fn since(self, before: Self) -> Self {
        let requests = self.requests.zip(before.requests);
        Self {
            requests: requests.map(|(now, before)| now.saturating_sub(before)),
            bytes: self.bytes.saturating_sub(before.bytes),
        }
    }
}

/// Reads the counters of a block device: reads, merged reads, sectors, ms, and the same of writes.
fn of_device(text: &str) -> Option<DiskUse> {
    let fields = text.split_ascii_whitespace().map_while(|word| word.parse().ok());
    let fields: Vec<u64> = fields.collect();
    let sum =
        |first: usize, second: usize| Some(fields.get(first)?.saturating_add(*fields.get(second)?));
    Some(DiskUse { requests: Some(sum(0, 4)?), bytes: sum(2, 6)?.saturating_mul(SECTOR) })
}

/// Reads the counters of a process (proc(5), `/proc/PID/io`).
fn of_process(text: &str) -> Option<DiskUse> {
    let value = |name: &str| -> Option<u64> {
        text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    };
    let bytes = value("read_bytes:")?.saturating_add(value("write_bytes:")?);
    Some(DiskUse { requests: None, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_parsed() {
        let text = "   10   1   80   5   20   2   160   7   0   9   12   0  0  0  0\n";
        let device = of_device(text).unwrap();
        assert_eq!(device, DiskUse { requests: Some(30), bytes: 240 * SECTOR });
        assert_eq!(of_device("10 1 80"), None);
        let text = "rchar: 1\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 1\n";
        let process = of_process(text).unwrap();
        assert_eq!(process, DiskUse { requests: None, bytes: 12288 });
        assert_eq!(of_process("rchar: 1\n"), None);
        let before = DiskUse { requests: Some(10), bytes: SECTOR };
        assert_eq!(device.since(before), DiskUse { requests: Some(20), bytes: 239 * SECTOR });
        assert_eq!(process.since(before).requests, None);
    }
}
