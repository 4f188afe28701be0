//! The record of a volume.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use slipway_plane_api::v1 as plane_v1;

/// A block volume of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// The volume's name; the container finds it at `/dev/slipway/NAME` if it has no path.
    pub name: String,
    /// The file on the host that backs the volume.
    pub path: PathBuf,
    /// The size of a scratch volume in bytes, or `None` for a file of the user's, which is never
    /// removed.
    pub scratch_bytes: Option<u64>,
    /// Set if the volume is read-only in the container.
    pub read_only: bool,
    /// The path at which the volume's file system is mounted; empty: it is not mounted.
    pub mount_point: String,
    /// The size of a logical block in bytes, 512 or 4096; 0 stands for 512.
    #[serde(default)]
    pub block_size: u32,
    /// The device that the guest drives.
    #[serde(default)]
    pub device: Device,
    /// The path of the device in the container; empty: that of its name.
    #[serde(default)]
    pub device_path: String,
    /// The host's device that `path` led to when the volume was checked; `None`: a regular file.
    #[serde(default)]
    pub host_device: Option<HostDevice>,
    /// The device and inode number of the regular file that `path` led to when the volume was
    /// checked; `None`: not known, or no such file.
    #[serde(default)]
    pub file: Option<(u64, u64)>,
    /// The size and time of change of that file when a snapshot was made that refers to it and does
    /// not copy it; `None`: there is no such snapshot, or an earlier version made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stamp: Option<FileStamp>,
    /// Set if what the guest writes is kept in memory, over the file, and lost with the sandbox.
    #[serde(default)]
    pub overlay: bool,
}

/// The size and time of change of a regular file of the host. If one of them differs later, the
/// file has another content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStamp {
    /// The size in bytes.
    pub size_bytes: u64,
    /// The time of the last change of its content, in seconds since the epoch.
    pub modified_s: i64,
    /// The nanoseconds of that time.
    pub modified_ns: i64,
}

impl From<&Metadata> for FileStamp {
    fn from(status: &Metadata) -> Self {
        Self {
            size_bytes: status.size(),
            modified_s: status.mtime(),
            modified_ns: status.mtime_nsec(),
        }
    }
}

/// A device of the host, told from others that had or get its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostDevice {
    /// The device number, as of stat(2).
    pub number: u64,
    /// The kernel's sequence number of a block device (diskseq); 0 if there is none.
    pub sequence: u64,
}

impl From<plane_v1::DeviceIdentity> for HostDevice {
    fn from(plane_v1::DeviceIdentity { number, sequence }: plane_v1::DeviceIdentity) -> Self {
        Self { number, sequence }
    }
}

impl From<HostDevice> for plane_v1::DeviceIdentity {
    fn from(HostDevice { number, sequence }: HostDevice) -> Self {
        Self { number, sequence }
    }
}

/// The device behind a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// A namespace of the sandbox's first NVMe function, which the plane serves.
    #[default]
    Namespace,
    /// Namespace 1 of an NVMe function of the volume's own, which the plane serves.
    Function,
    /// An NVMe controller that the VMM emulates, for comparisons.
    VmmNvme,
    /// A virtio block device that the VMM emulates, for comparisons.
    VmmVirtioBlk,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_of_an_earlier_version_names_no_device_of_the_host() {
        let json = r#"{"name": "v", "path": "/dev/sdb", "scratch_bytes": null, "read_only": false,
            "mount_point": ""}"#;
        let volume: Volume = serde_json::from_str(json).unwrap();
        assert_eq!((volume.device, volume.host_device), (Device::Namespace, None));
        let host_device = Some(HostDevice { number: 0x810, sequence: 7 });
        let json = serde_json::to_string(&Volume { host_device, ..volume }).unwrap();
        let volume: Volume = serde_json::from_str(&json).unwrap();
        assert_eq!((volume.host_device, volume.stamp), (host_device, None));
        assert!(!json.contains("stamp"), "{json}");
    }
}
