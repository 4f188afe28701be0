//! Volumes and the volatile layer: the files on the host that become NVMe namespaces. Volumes that
//! are asked for are checked here, and `images` makes files. These functions wait for the disk,
//! so a daemon calls them in the sandbox's [lane](crate::files::Lane).

mod images;

use std::fs;
use std::path::{Path, PathBuf};

use slipway_plane_api::v1::DeviceIdentity;
use slipway_space::Space;

pub use self::images::{create_scratch, create_shared, remove_unfinished, under_layer};
use crate::copies::is_plain;
use crate::record::{Device, HostDevice, Store, Volume};
use crate::v1::VolumeSpec;
use crate::v1::volume_spec::{Device as Asked, Source};
use crate::{Error, Result, name};

/// Names in a container's own /dev.
const OWN: [&str; 16] = [
    "console", "fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "slipway", "stderr",
    "stdin", "stdout", "tty", "urandom", "zero",
];
/// The most volumes of a container of a pod.
const MOST_IN_POD: usize = 32;
/// The smallest volume, which has room for a file system.
const LEAST_BYTES: u64 = 1 << 20;

/// Checks the requested volumes against the host's current state.
///
/// # Errors
/// [`Error::Invalid`]: a bad or duplicate name or device path, a missing file, a size below 1 MiB
/// or above the free space of the disk.
pub fn check(specs: &[VolumeSpec], store: &Store) -> Result<Vec<Volume>> {
    let mut volumes: Vec<Volume> = Vec::new();
    for spec in specs {
        name::check(&spec.name)?;
        if volumes.iter().any(|volume| volume.name == spec.name) {
            return Err(Error::Invalid(format!("two volumes are called \"{}\"", spec.name)));
        }
        let device_path = check_device_path(spec)?;
        check_apart(&spec.name, &device_path, &volumes)?;
        let Backing { path, scratch_bytes, host_device, file } = backing(spec, store)?;
        volumes.push(Volume {
            name: spec.name.clone(),
            path,
            scratch_bytes,
            read_only: spec.read_only,
            mount_point: spec.mount_point.clone(),
            block_size: check_block_size(spec)?,
            device: check_device(spec)?,
            device_path,
            host_device,
            file,
            stamp: None,
            overlay: false,
        });
    }
    Ok(volumes)
}

/// Checks the requested volumes of a container of a pod: files and block devices of the host. A
/// volume that goes with the sandbox would have no end with the container.
///
/// # Errors
/// [`Error::Invalid`], as for [`check`]; a volume of another kind, or too many.
pub fn check_in_pod(specs: &[VolumeSpec], store: &Store) -> Result<Vec<Volume>> {
    if specs.len() > MOST_IN_POD {
        let text = format!("{} volumes are too many: at most {MOST_IN_POD}", specs.len());
        return Err(Error::Invalid(text));
    }
    for spec in specs {
        let on_host = matches!(spec.source, Some(Source::Path(_)));
        if !on_host || spec.device != i32::from(Asked::Plane) {
            return Err(Error::Invalid(format!(
                "volume {}: a container of a pod has files and block devices of the host, as \
                 namespaces of the pod's function: file:PATH",
                spec.name
            )));
        }
    }
    check(specs, store)
}

fn check_block_size(spec: &VolumeSpec) -> Result<u32> {
    match spec.block_size {
        0 | 512 | 4096 => Ok(spec.block_size),
        other => {
            let why = "a logical block has 512 or 4096 bytes";
            Err(Error::Invalid(format!("volume {}: {other} bytes: {why}", spec.name)))
        }
    }
}

fn check_device(spec: &VolumeSpec) -> Result<Device> {
    let invalid = |why| Error::Invalid(format!("volume {}: {why}", spec.name));
    let device = match Asked::try_from(spec.device) {
        Ok(Asked::Plane) => return Ok(Device::Namespace),
        Ok(Asked::PlaneFunction) => return Ok(Device::Function),
        Ok(Asked::VmmNvme) => Device::VmmNvme,
        Ok(Asked::VmmVirtioBlk) => Device::VmmVirtioBlk,
        Err(_) => return Err(invalid("no such device")),
    };
    match spec.block_size {
        0 | 512 => Ok(device),
        _ => Err(invalid("a disk of the VMM's own has blocks of 512 bytes")),
    }
}

/// Checks that a device can have its path in the container: below /dev, and beside what a container
/// has there of its own.
fn check_device_path(VolumeSpec { name, device_path: path, .. }: &VolumeSpec) -> Result<String> {
    let refused = |why| Err(Error::Invalid(format!("volume {name}: {path:?}: {why}")));
    if path.is_empty() {
        return Ok(String::new());
    }
    let Some(below) = path.strip_prefix("/dev/") else {
        return refused("the path of a device is one below /dev");
    };
    if let Err(why) = is_plain(path) {
        return refused(why);
    }
    let first = below.split('/').next().unwrap_or(below);
    match OWN.contains(&first) {
        true => refused("a container has a device or directory of its own there"),
        false => Ok(path.clone()),
    }
}

/// Checks that the device of the volume `name` has a path of its own among `others`: no other
/// one's, and none above or below another one's.
fn check_apart(name: &str, device_path: &str, others: &[Volume]) -> Result<()> {
    let path = Path::new(device_path);
    let meets = |other: &&Volume| {
        let taken = Path::new(&other.device_path);
        // Every path begins with the empty one, which stands for the path by the volume's name,
        // `/dev/slipway/NAME`: no volume has a path of its own there (`OWN`).
        let given = !device_path.is_empty() && !other.device_path.is_empty();
        given && (path.starts_with(taken) || taken.starts_with(path))
    };
    others.iter().find(meets).map_or(Ok(()), |other| {
        Err(Error::Invalid(format!(
            "volume {name}: {device_path:?}: volume {} has {:?}; a device needs a path of its own",
            other.name, other.device_path
        )))
    })
}

/// The file or device behind a volume.
struct Backing {
    /// The path, without symbolic links.
    path: PathBuf,
    /// The size of a scratch volume in bytes; `None` for what is there already.
    scratch_bytes: Option<u64>,
    /// The device, if it is one.
    host_device: Option<HostDevice>,
    /// The device and inode number of a regular file that is there already.
    file: Option<(u64, u64)>,
}

/// Finds the file or device of a volume, or the place of its file in `store`.
fn backing(spec: &VolumeSpec, store: &Store) -> Result<Backing> {
    match &spec.source {
        Some(Source::SizeBytes(size)) => {
            check_size(&spec.name, *size, store.dir())?;
            let path = store.dir().join(format!("volume-{}.img", spec.name));
            Ok(Backing { path, scratch_bytes: Some(*size), host_device: None, file: None })
        }
        Some(Source::Path(path)) => existing(path),
        None => Err(Error::Invalid(format!("volume {} has no source", spec.name))),
    }
}

/// Finds a file or device of the host.
fn existing(path: &str) -> Result<Backing> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let invalid = |why: String| Error::Invalid(format!("volume file {path}: {why}"));
    let full = fs::canonicalize(path).map_err(|error| invalid(error.to_string()))?;
    let kind = fs::metadata(&full).map_err(|error| invalid(error.to_string()))?;
    // The plane checks whether a character device is an NVMe namespace's.
    let device = kind.file_type().is_block_device() || kind.file_type().is_char_device();
    if !kind.is_file() && !device {
        return Err(invalid("neither a file nor a block device".to_owned()));
    }
    if kind.is_file() && (kind.len() < 512 || !kind.len().is_multiple_of(512)) {
        return Err(invalid(format!(
            "{} bytes are not a multiple of 512; `truncate -s` gives it a size",
            kind.len()
        )));
    }
    let found = if device { DeviceIdentity::at(&full) } else { None };
    let file = (!device).then(|| (kind.dev(), kind.ino()));
    let host_device = found.map(HostDevice::from);
    Ok(Backing { path: full, scratch_bytes: None, host_device, file })
}

/// Refuses a scratch volume that is smaller than 1 MiB or could never be filled.
fn check_size(name: &str, size: u64, dir: &Path) -> Result<()> {
    if size < LEAST_BYTES {
        return Err(Error::Invalid(format!("volume {name}: {size} bytes are less than 1 MiB")));
    }
    check_fits(name, size, dir)
}

/// Refuses a volume whose file in `dir`, or in the directory that `dir` is to be made in, could
/// never be filled.
///
/// # Errors
/// [`Error::Invalid`], [`Error::File`].
pub(crate) fn check_fits(name: &str, size: u64, dir: &Path) -> Result<()> {
    let there = dir.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    let free = space_of(there)?.free;
    if size > free {
        return Err(Error::Invalid(format!(
            "volume {name} of {} MiB is larger than what {} has free, {} MiB",
            size >> 20,
            there.display(),
            free >> 20
        )));
    }
    Ok(())
}

/// Returns the space of the file system of `path`.
fn space_of(path: &Path) -> Result<Space> {
    Space::at(path).map_err(Error::file("cannot ask", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the description of a scratch volume of so many bytes.
    pub(super) fn scratch(name: &str, size: u64) -> VolumeSpec {
        let source = Some(Source::SizeBytes(size));
        VolumeSpec { name: name.to_owned(), source, ..VolumeSpec::default() }
    }

    /// Returns the description of a file's volume.
    pub(super) fn of_file(name: &str, path: &Path) -> VolumeSpec {
        let source = Some(Source::Path(path.to_str().unwrap().to_owned()));
        VolumeSpec { name: name.to_owned(), source, ..VolumeSpec::default() }
    }

    /// Makes a file of 1 MiB.
    pub(super) fn file() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(LEAST_BYTES).unwrap();
        file
    }

    #[test]
    fn a_scratch_volume_has_a_size_that_its_disk_can_hold() {
        let dir = tempfile::tempdir().unwrap();
        // Its directory is not there yet.
        let store = Store::new(dir.path(), "store");
        let checked = |size| check(&[scratch("data", size)], &store);
        let volume = checked(LEAST_BYTES).unwrap().remove(0);
        assert_eq!(volume.path, store.dir().join("volume-data.img"));
        assert_eq!(volume.scratch_bytes, Some(LEAST_BYTES));
        assert!(volume.host_device.is_none() && volume.file.is_none());
        let small = checked(LEAST_BYTES - 1).unwrap_err().to_string();
        assert!(small.contains("volume data: 1048575 bytes are less than 1 MiB"), "{small}");
        // Some file systems do not tell what is free.
        if space_of(dir.path()).unwrap().free < u64::MAX {
            let large = checked(u64::MAX).unwrap_err().to_string();
            assert!(large.contains("volume data") && large.contains("has free"), "{large}");
        }
    }

    #[test]
    fn names_are_unique_and_every_volume_has_a_source() {
        let store = Store::new(Path::new("/"), "store");
        let file = file();
        let twice = ["one", "one"].map(|name| of_file(name, file.path()));
        let said = check(&twice, &store).unwrap_err().to_string();
        assert!(said.contains("two volumes are called \"one\""), "{said}");
        let none = VolumeSpec { name: "none".to_owned(), ..VolumeSpec::default() };
        let said = check(&[none], &store).unwrap_err().to_string();
        assert!(said.contains("volume none has no source"), "{said}");
    }

    #[test]
    fn blocks_have_512_or_4096_bytes_and_those_of_the_vmm_512() {
        let spec = |device: i32, block_size| VolumeSpec {
            device,
            block_size,
            ..scratch("data", LEAST_BYTES)
        };
        for (block_size, is_right) in [(0, true), (512, true), (4096, true), (1024, false)] {
            let checked = check_block_size(&spec(0, block_size));
            assert_eq!(checked.is_ok(), is_right, "{block_size}");
        }
        for (asked, block_size, device) in [
            (Asked::Plane, 4096, Some(Device::Namespace)),
            (Asked::PlaneFunction, 4096, Some(Device::Function)),
            (Asked::VmmNvme, 0, Some(Device::VmmNvme)),
            (Asked::VmmVirtioBlk, 512, Some(Device::VmmVirtioBlk)),
            (Asked::VmmNvme, 4096, None),
            (Asked::VmmVirtioBlk, 4096, None),
        ] {
            let checked = check_device(&spec(asked.into(), block_size)).ok();
            assert_eq!(checked, device, "{asked:?}, {block_size}");
        }
        assert!(check_device(&spec(99, 512)).is_err());
    }

    #[test]
    fn a_container_of_a_pod_has_some_files_of_the_host() {
        let store = Store::new(Path::new("/"), "store");
        let file = file();
        let many = |count: usize| -> Vec<VolumeSpec> {
            (0..count).map(|number| of_file(&format!("v{number}"), file.path())).collect()
        };
        let most = check_in_pod(&many(MOST_IN_POD), &store).unwrap();
        assert!(most.iter().all(|volume| volume.scratch_bytes.is_none()));
        let said = check_in_pod(&many(MOST_IN_POD + 1), &store).unwrap_err().to_string();
        assert!(said.contains("33 volumes are too many"), "{said}");
        let own = VolumeSpec { device: Asked::PlaneFunction.into(), ..of_file("own", file.path()) };
        for other in [scratch("data", LEAST_BYTES), own] {
            let said = check_in_pod(std::slice::from_ref(&other), &store).unwrap_err().to_string();
            assert!(said.contains(&other.name) && said.contains("file:PATH"), "{said}");
        }
    }

    #[test]
    fn two_devices_do_not_share_a_path() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), "store");
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let path = file.path().to_str().unwrap();
        let checked = |paths: [&str; 2]| {
            let specs = [("first", paths[0]), ("second", paths[1])].map(|(name, device_path)| {
                let source = Some(Source::Path(path.to_owned()));
                let (name, device_path) = (name.to_owned(), device_path.to_owned());
                VolumeSpec { name, device_path, source, ..VolumeSpec::default() }
            });
            check(&specs, &store).map(drop)
        };
        for apart in [["", ""], ["/dev/xvda", ""], ["/dev/xvda", "/dev/xvdab"]] {
            checked(apart).unwrap();
        }
        for same in [["/dev/xvda", "/dev/xvda"], ["/dev/a", "/dev/a/b"], ["/dev/a/b", "/dev/a"]] {
            let said = checked(same).unwrap_err().to_string();
            assert!(said.contains("volume second") && said.contains("volume first"), "{said}");
            assert!(!said.contains('\n'), "{said}");
        }
    }

    #[test]
    fn a_device_of_the_host_is_recorded_and_a_file_is_none() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let regular = existing(file.path().to_str().unwrap()).unwrap();
        assert!(regular.host_device.is_none() && regular.file.is_some());
        let link = file.path().with_extension("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        let null = Some(HostDevice { number: rustix::fs::makedev(1, 3), sequence: 0 });
        let found = existing(link.to_str().unwrap());
        fs::remove_file(&link).unwrap();
        let found = found.unwrap();
        assert_eq!((found.path, found.host_device), (PathBuf::from("/dev/null"), null));
        assert_eq!(found.file, None);
    }

    #[test]
    fn a_device_has_a_path_of_its_own_below_dev() {
        let checked = |path: &str| {
            let (name, device_path) = ("v".to_owned(), path.to_owned());
            check_device_path(&VolumeSpec { name, device_path, ..VolumeSpec::default() })
        };
        for path in ["", "/dev/xvda", "/dev/disks/one"] {
            assert_eq!(checked(path).unwrap(), path);
        }
        for path in
            ["xvda", "/etc/x", "/dev/", "/dev/../x", "/dev/null", "/dev/pts/0", "/dev/slipway/b"]
        {
            assert!(checked(path).is_err(), "{path}");
        }
    }
}
