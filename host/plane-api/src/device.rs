//! The identities of devices behind disks.
//!
//! A disk is described by a path, and a name below /dev may go from one device to another: a LUN is
//! taken away, and the next one gets its name and its number. Those who keep the description of a
//! disk keep the identity of its device beside the path.

use std::fmt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::v1::DeviceIdentity;

impl DeviceIdentity {
    /// Returns the identity of the block or character device that a path leads to at present, or
    /// `None` if it leads to none.
    pub fn at(path: &Path) -> Option<Self> {
        let found = std::fs::metadata(path).ok()?;
        let (number, kind) = (found.rdev(), found.file_type());
        match (kind.is_block_device(), kind.is_char_device()) {
            (true, _) => Some(Self { number, sequence: sequence(number).unwrap_or(0) }),
            (_, true) => Some(Self { number, sequence: 0 }),
            _ => None,
        }
    }
}

impl fmt::Display for DeviceIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = (rustix::fs::major(self.number), rustix::fs::minor(self.number));
        match self.sequence {
            0 => write!(f, "{major}:{minor}"),
            sequence => write!(f, "{major}:{minor} (diskseq {sequence})"),
        }
    }
}

/// Returns the kernel's sequence number of a block device. A partition has its disk's.
fn sequence(number: u64) -> Option<u64> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let device = format!("/sys/dev/block/{major}:{minor}");
    let read = |name: &str| std::fs::read_to_string(format!("{device}/{name}")).ok();
    // The entry is a link, so that its parent is that of the partition's directory.
    let text = read("diskseq").or_else(|| read("../diskseq"))?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_devices_have_an_identity() {
        let null = DeviceIdentity::at(Path::new("/dev/null")).unwrap();
        assert_eq!((null.number, null.sequence), (rustix::fs::makedev(1, 3), 0));
        assert_eq!(null.to_string(), "1:3");
        assert_eq!(DeviceIdentity { sequence: 7, ..null }.to_string(), "1:3 (diskseq 7)");
        assert_eq!(DeviceIdentity::at(Path::new("/")), None);
        assert_eq!(DeviceIdentity::at(Path::new("/no/such/path")), None);
    }
}
