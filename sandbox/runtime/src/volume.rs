//! Volumes and the volatile layer: the files on the host that become NVMe namespaces. These
//! functions wait for the disk, so a daemon calls them in the sandbox's [lane](crate::files::Lane).

use std::fs;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use slipway_plane_api::v1::DeviceIdentity;
use slipway_space::Space;

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
/// The largest disk of directories that the containers of a pod share, if the settings have no
/// size, and the unit of its size.
const MOST_SHARED: u64 = 64 << 30;
const SHARED_UNIT: u64 = 16 << 20;
/// The way in which mkfs.ext4 makes inode tables: as zeros on the disk, so that no guest writes
/// them later, which would take memory.
const TABLES: &str = "lazy_itable_init=0,nodiscard";
/// The way for a large disk: no tables, which would take space of the host. No guest writes them
/// that mounts it with `noinit_itable`.
const NO_TABLES: &str = "lazy_itable_init=1,nodiscard";

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
        let (path, scratch_bytes, host_device, file) = match &spec.source {
            Some(Source::SizeBytes(size)) => {
                check_size(&spec.name, *size, store.dir())?;
                (store.dir().join(format!("volume-{}.img", spec.name)), Some(*size), None, None)
            }
            Some(Source::Path(path)) => {
                let Existing { path, host_device, file } = existing(path)?;
                (path, None, host_device, file)
            }
            None => return Err(Error::Invalid(format!("volume {} has no source", spec.name))),
        };
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

/// A file or device of the host.
struct Existing {
    /// The path without symbolic links.
    path: PathBuf,
    /// The device, if it is one.
    host_device: Option<HostDevice>,
    /// The device and inode number of a regular file.
    file: Option<(u64, u64)>,
}

/// Finds a file or device of the host.
fn existing(path: &str) -> Result<Existing> {
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
    Ok(Existing { path: full, host_device: found.map(HostDevice::from), file })
}

/// Creates the files of scratch volumes, sparse. A volume that the container mounts gets an empty
/// ext4.
///
/// # Errors
/// [`Error::File`]; [`Error::Tool`] when mkfs.ext4 fails or is missing.
pub fn create_scratch(volumes: &[Volume]) -> Result<()> {
    for volume in volumes {
        let Some(size) = volume.scratch_bytes else { continue };
        sparse(&volume.path, size)?;
        if !volume.mount_point.is_empty() {
            format_ext4(&volume.path, TABLES)?;
        }
    }
    Ok(())
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
    let free = space(there)?.free;
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
fn space(path: &Path) -> Result<Space> {
    Space::at(path).map_err(Error::file("cannot ask", path))
}

/// Makes the file with the directories that the containers of a pod share, an empty ext4, unless it
/// is there. It is sparse, and has `most` bytes, or as many as the file system allows; 0 stands for
/// 64 GiB, but not over half of the file system. Returns the bytes that its file system is to keep
/// free while guests write to it.
///
/// # Errors
/// [`Error::Tool`] if mkfs.ext4 fails or is missing; [`Error::File`]; [`Error::Invalid`] if there
/// is no space.
pub fn create_shared(path: &Path, most: u64) -> Result<u64> {
    let space = space(path.parent().unwrap_or(Path::new("/")))?;
    if path.exists() {
        return Ok(space.reserve());
    }
    let size = shared_size(&space, most);
    if size == 0 {
        return Err(Error::Invalid(format!(
            "there is no space for emptyDir volumes at {}: free at least {} MiB",
            path.display(),
            SHARED_UNIT >> 20
        )));
    }
    make_ext4(path, size, NO_TABLES)?;
    Ok(space.reserve())
}

/// Returns the size of a new disk of shared directories: `most` bytes, or for 0 as many as
/// [`MOST_SHARED`], but not over half of the file system; and no more than is free beyond its
/// reserve. It is a multiple of [`SHARED_UNIT`], and 0 if there is no space.
fn shared_size(space: &Space, most: u64) -> u64 {
    let most = if most == 0 { MOST_SHARED.min(space.size / 2) } else { most };
    most.min(space.beyond(space.reserve())) / SHARED_UNIT * SHARED_UNIT
}

/// Makes a file with an empty ext4. Nobody finds an incomplete one at `path`.
fn make_ext4(path: &Path, size: u64, tables: &str) -> Result<()> {
    let last = path.file_name().unwrap_or_default().to_string_lossy();
    let new = path.with_file_name(format!(".{last}.{}", name::new_id()));
    let made = sparse(&new, size).and_then(|()| format_ext4(&new, tables));
    let kept =
        made.and_then(|()| fs::rename(&new, path).map_err(Error::file("cannot create", path)));
    if kept.is_err() {
        let _ = fs::remove_file(&new);
    }
    kept
}

fn sparse(path: &Path, size: u64) -> Result<()> {
    // Nobody else reads it, or locks it, which takes no more than reading.
    let mut options = fs::File::options();
    let file = options.write(true).create_new(true).mode(0o600).open(path);
    let file = file.map_err(Error::file("cannot create", path))?;
    // The size is a multiple of 4096, so that no logical block of a namespace straddles the end.
    file.set_len(size.next_multiple_of(4096)).map_err(Error::file("cannot size", path))
}

/// Returns the path of the empty ext4 file system whose copies on write are the volatile layers. It
/// is made once for each size.
///
/// # Errors
/// [`Error::Tool`] if mkfs.ext4 fails or is missing; [`Error::File`].
pub fn volatile_template(cache: &Path, size: u64) -> Result<PathBuf> {
    let dir = cache.join("layers");
    let path = dir.join(format!("{size}.ext4"));
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(cache).map_err(Error::file("cannot create", cache))?;
    // VMMs read other files of the cache, and nobody but the daemon this one.
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir);
    made.map_err(Error::file("cannot create", &dir))?;
    make_ext4(&path, size, TABLES).map(|()| path)
}

/// Makes an empty ext4 in a file of zeros, with [`TABLES`] or [`NO_TABLES`].
fn format_ext4(path: &Path, tables: &str) -> Result<()> {
    let tool = |reason: String| Error::Tool { program: "mkfs.ext4".to_owned(), reason };
    let output = std::process::Command::new("mkfs.ext4")
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        // No journal, since the file system ends with its sandbox. A namespace with blocks of 4096
        // bytes takes no smaller block of the file system.
        .args(["-q", "-F", "-m", "0", "-b", "4096", "-O", "^has_journal", "-E"])
        .arg(tables)
        .arg(path)
        .output()
        .map_err(|error| tool(format!("{error}; `apt-get install e2fsprogs` brings it")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(tool(String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_disk_of_shared_directories_leaves_space_to_others() {
        let of = |size: u64, free: u64, most: u64| {
            shared_size(&Space { size: size << 30, free: free << 30 }, most << 30) >> 30
        };
        assert_eq!([of(1000, 900, 0), of(100, 90, 0)], [64, 50]);
        // 1 GiB stays free.
        assert_eq!([of(100, 20, 0), of(100, 20, 80), of(100, 90, 80)], [19, 19, 80]);
        assert_eq!([of(100, 1, 0), of(100, 0, 0), of(100, 1, 9)], [0, 0, 0]);
        let unknown = Space { size: u64::MAX, free: u64::MAX };
        assert_eq!(shared_size(&unknown, 0), MOST_SHARED);
        let odd = Space { size: 1 << 40, free: 1 << 40 };
        assert_eq!(shared_size(&odd, SHARED_UNIT + 1), SHARED_UNIT);
    }

    #[test]
    fn other_users_cannot_open_the_volatile_layers_template() {
        let cache = tempfile::tempdir().unwrap();
        let path = match volatile_template(cache.path(), 8 << 20) {
            Ok(path) => path,
            Err(Error::Tool { reason, .. }) => {
                println!("SKIPPED: other_users_cannot_open_the_volatile_layers_template: {reason}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        assert_eq!(volatile_template(cache.path(), 8 << 20).unwrap(), path);
    }

    #[test]
    fn the_disk_of_shared_directories_is_made_once_and_takes_little_space() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("empty-dirs.img");
        let keep_free = match create_shared(&path, 0) {
            Ok(keep_free) => keep_free,
            Err(error @ (Error::Tool { .. } | Error::Invalid(_))) => {
                println!(
                    "SKIPPED: the_disk_of_shared_directories_is_made_once_and_takes_little_space: \
                     {error}"
                );
                return;
            }
            Err(error) => panic!("{error}"),
        };
        assert!(keep_free > 0);
        let status = fs::metadata(&path).unwrap();
        assert!((SHARED_UNIT..=MOST_SHARED).contains(&status.len()), "{}", status.len());
        assert!(status.blocks() * 512 <= 64 << 20, "{} blocks", status.blocks());
        assert_eq!(status.permissions().mode() & 0o7777, 0o600);
        assert_eq!(create_shared(&path, SHARED_UNIT).unwrap(), keep_free);
        assert_eq!(fs::metadata(&path).unwrap().ino(), status.ino());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
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
