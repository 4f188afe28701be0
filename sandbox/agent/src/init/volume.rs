//! Volumes: block devices of the container, mounted where requested.

use std::io::{Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{FileType, makedev};
use rustix::mount::{MountFlags, mount};

use super::{VolumeSpec, dev, files};

/// The directory of device nodes.
const DEVICES: &str = "/dev";
/// The offset and the value of ext4's s_magic (kernel documentation, "ext4 Data Structures", Super
/// Block).
const EXT4_MAGIC: (u64, [u8; 2]) = (0x400 + 0x38, [0x53, 0xef]);

/// Creates the volume's device node, and mounts the volume if it has a mount point.
pub fn publish(volume: &VolumeSpec) -> Result<()> {
    let path = node(volume)?;
    if volume.mount_point.is_empty() {
        return Ok(());
    }
    let at = &volume.mount_point;
    if !holds_ext4(&path).with_context(|| format!("volume {}: reading", volume.name))? {
        bail!(
            "volume {name} holds no ext4 file system, so it cannot be mounted on {at}; use it \
             without a mount point and make one: mkfs.ext4 {path}",
            name = volume.name,
            path = path.display(),
        );
    }
    files::create_directory(at).with_context(|| format!("volume {}", volume.name))?;
    let mut flags = MountFlags::NODEV;
    if volume.read_only {
        flags |= MountFlags::RDONLY;
    }
    mount(&path, at.as_str(), "ext4", flags, c"")
        .with_context(|| format!("mounting volume {} on {at}", volume.name))
}

fn node(volume: &VolumeSpec) -> Result<PathBuf> {
    let device = volume.device.with_context(|| format!("volume {}: no device", volume.name))?;
    let path = path(volume)?;
    let directory = path.parent().unwrap_or(Path::new(DEVICES));
    std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    let mode = if volume.read_only { 0o440 } else { 0o660 };
    dev::make(&path, FileType::BlockDevice, mode, makedev(device.major, device.minor))?;
    Ok(path)
}

/// Returns the path of the volume's device node. `/dev` has nothing of the image's, so no link
/// leads out of it.
pub fn path(volume: &VolumeSpec) -> Result<PathBuf> {
    if volume.device_path.is_empty() {
        return Ok(Path::new(DEVICES).join("slipway").join(&volume.name));
    }
    let path = PathBuf::from(&volume.device_path);
    let below = path.strip_prefix(DEVICES).is_ok_and(|below| {
        below.file_name().is_some()
            && below.components().all(|part| matches!(part, Component::Normal(_)))
    });
    if !below {
        bail!("volume {}: {} is no path below {DEVICES}", volume.name, path.display());
    }
    Ok(path)
}

fn holds_ext4(path: &Path) -> std::io::Result<bool> {
    let mut device = std::fs::File::open(path)?;
    let (offset, magic) = EXT4_MAGIC;
    device.seek(SeekFrom::Start(offset))?;
    let mut found = [0; 2];
    match device.read_exact(&mut found) {
        Ok(()) => Ok(found == magic),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_the_path_of_its_name_or_one_of_its_own() {
        let at = |device_path: &str| {
            let device_path = device_path.to_owned();
            path(&VolumeSpec { name: "data".into(), device_path, ..VolumeSpec::default() })
        };
        assert_eq!(at("").unwrap(), Path::new("/dev/slipway/data"));
        assert_eq!(at("/dev/xvda").unwrap(), Path::new("/dev/xvda"));
        assert_eq!(at("/dev/disks/a").unwrap(), Path::new("/dev/disks/a"));
        for wrong in ["/etc/passwd", "/dev", "/dev/", "/dev/../etc/x", "dev/x", "/devices/x"] {
            assert!(at(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_magic_number_decides() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(!holds_ext4(file.path()).unwrap(), "an empty volume");
        let mut bytes = vec![0; 2048];
        std::fs::write(file.path(), &bytes).unwrap();
        assert!(!holds_ext4(file.path()).unwrap());
        bytes[0x438..0x43a].copy_from_slice(&[0x53, 0xef]);
        std::fs::write(file.path(), &bytes).unwrap();
        assert!(holds_ext4(file.path()).unwrap());
    }
}
