//! The files that become disks of sandboxes: scratch volumes, the disk of the directories that the
//! containers of a pod share, and the templates of volatile layers.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use slipway_space::Space;

use super::space_of;
use crate::record::Volume;
use crate::{Error, Result, name};

/// The largest disk of directories that the containers of a pod share, if the settings have no
/// size, in bytes.
const MOST_SHARED: u64 = 64 << 30;
/// The unit of the size of such a disk, in bytes.
const SHARED_UNIT: u64 = 16 << 20;
/// The way in which mkfs.ext4 makes inode tables: as zeros on the disk, so that no guest writes
/// them later, which would take memory.
const TABLES: &str = "lazy_itable_init=0,nodiscard";
/// The way for a large disk: no tables, which would take space of the host. No guest writes them
/// that mounts it with `noinit_itable`.
const NO_TABLES: &str = "lazy_itable_init=1,nodiscard";

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

/// Makes the file with the directories that the containers of a pod share, an empty ext4, unless it
/// is there. It is sparse, and has `most` bytes, or as many as the file system allows; 0 stands for
/// 64 GiB, but not over half of the file system. Returns the bytes that its file system is to keep
/// free while guests write to it.
///
/// # Errors
/// [`Error::Tool`] if mkfs.ext4 fails or is missing; [`Error::File`]; [`Error::Invalid`] if there
/// is no space.
pub fn create_shared(path: &Path, most: u64) -> Result<u64> {
    let space = space_of(path.parent().unwrap_or(Path::new("/")))?;
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

/// Makes a file with an empty ext4, which replaces one that is there. Nobody finds an incomplete
/// one at `path`: it is made beside it. If the daemon is killed meanwhile, that file goes with the
/// sandbox's directory, or [`remove_unfinished`] removes it.
fn make_ext4(path: &Path, size: u64, tables: &str) -> Result<()> {
    make_beside(path, size, tables, |new| fs::rename(new, path))
}

/// Makes a file with an empty ext4 as [`make_ext4`] does, unless somebody else has made one at
/// `path` meanwhile. That one stays, since a sandbox may be using it already: its disks are lost
/// when the daemon restarts and finds another file there.
fn make_ext4_once(path: &Path, size: u64, tables: &str) -> Result<()> {
    make_beside(path, size, tables, |new| {
        if let Err(error) = fs::hard_link(new, path)
            && error.kind() != std::io::ErrorKind::AlreadyExists
        {
            return Err(error);
        }
        fs::remove_file(new)
    })
}

/// Makes a file with an empty ext4 beside `path`, and has `keep` put it there.
fn make_beside(
    path: &Path,
    size: u64,
    tables: &str,
    keep: impl FnOnce(&Path) -> std::io::Result<()>,
) -> Result<()> {
    let last = path.file_name().unwrap_or_default().to_string_lossy();
    let new = path.with_file_name(format!(".{last}.{}", name::new_id()));
    let made = sparse(&new, size).and_then(|()| format_ext4(&new, tables));
    let kept = made.and_then(|()| keep(&new).map_err(Error::file("cannot create", path)));
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
fn volatile_template(cache: &Path, size: u64) -> Result<PathBuf> {
    let dir = layers(cache);
    let path = dir.join(format!("{size}.ext4"));
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(cache).map_err(Error::file("cannot create", cache))?;
    // VMMs read other files of the cache, and nobody but the daemon this one.
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir);
    made.map_err(Error::file("cannot create", &dir))?;
    make_ext4_once(&path, size, TABLES).map(|()| path)
}

/// Returns the path of the empty ext4 file system under a container's volatile layer: that of all
/// layers of this size, or, with `own`, one that is made anew at that path, where it replaces that
/// of an earlier start.
///
/// # Errors
/// [`Error::Tool`] if mkfs.ext4 fails or is missing; [`Error::File`].
pub fn under_layer(cache: &Path, size: u64, own: Option<PathBuf>) -> Result<PathBuf> {
    match own {
        None => volatile_template(cache, size),
        Some(path) => make_ext4(&path, size, TABLES).map(|()| path),
    }
}

/// Removes the templates of volatile layers that an earlier daemon had begun and not finished. To
/// be called before any sandbox begins.
pub fn remove_unfinished(cache: &Path) {
    let entries = fs::read_dir(layers(cache)).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b".")) {
        if let Err(error) = fs::remove_file(entry.path()) {
            tracing::warn!(path = %entry.path().display(), %error, "an unfinished layer stays");
        }
    }
}

/// Returns the directory of the templates of volatile layers.
fn layers(cache: &Path) -> PathBuf {
    cache.join("layers")
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

    use super::super::check;
    use super::super::tests::{file, of_file, scratch};
    use super::*;
    use crate::record::Store;

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
    fn of_two_starts_that_make_the_template_at_once_the_first_ones_stays() {
        use std::os::unix::fs::MetadataExt;
        let cache = tempfile::tempdir().unwrap();
        let path = cache.path().join("8.ext4");
        if let Err(Error::Tool { reason, .. }) = make_ext4_once(&path, 8 << 20, TABLES) {
            println!("SKIPPED: of_two_starts_that_make_the_template_at_once: {reason}");
            return;
        }
        let identity = || fs::metadata(&path).map(|file| (file.ino(), file.mtime_nsec())).unwrap();
        let first = identity();
        make_ext4_once(&path, 8 << 20, TABLES).unwrap();
        assert_eq!(identity(), first);
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn a_layer_without_a_template_is_formatted_for_each_start() {
        use std::os::unix::fs::MetadataExt;
        let (cache, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = store.path().join("layer-main.ext4");
        let make = || under_layer(cache.path(), 8 << 20, Some(path.clone()));
        let first = match make() {
            Ok(first) => first,
            Err(Error::Tool { reason, .. }) => {
                println!(
                    "SKIPPED: a_layer_without_a_template_is_formatted_for_each_start: {reason}"
                );
                return;
            }
            Err(error) => panic!("{error}"),
        };
        // The open file keeps its inode number from being used again.
        let earlier = fs::File::open(&first).unwrap();
        assert_eq!((&first, &make().unwrap()), (&path, &path));
        let status = fs::metadata(&path).unwrap();
        assert_ne!(status.ino(), earlier.metadata().unwrap().ino());
        assert_eq!((status.len(), status.permissions().mode() & 0o7777), (8 << 20, 0o600));
        assert_eq!(fs::read_dir(store.path()).unwrap().count(), 1);
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0, "no template was made");
        let shared = under_layer(cache.path(), 8 << 20, None).unwrap();
        assert_eq!(shared, volatile_template(cache.path(), 8 << 20).unwrap());
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
    fn scratch_volumes_are_files_of_their_size_for_root_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (store, file) = (Store::new(dir.path(), "store"), file());
        store.create().unwrap();
        let specs = [scratch("data", (1 << 20) + 1), of_file("mine", file.path())];
        let volumes = check(&specs, &store).unwrap();
        create_scratch(&volumes).unwrap();
        let status = fs::metadata(&volumes[0].path).unwrap();
        // No block of a namespace is half in the file.
        assert_eq!((status.len(), status.permissions().mode() & 0o7777), ((1 << 20) + 4096, 0o600));
        assert_eq!(file.as_file().metadata().unwrap().len(), 1 << 20);
        // What is there is not made anew.
        assert!(create_scratch(&volumes).is_err());
        create_scratch(&volumes[1..]).unwrap();
    }

    #[test]
    fn what_a_killed_daemon_had_begun_is_removed() {
        let cache = tempfile::tempdir().unwrap();
        remove_unfinished(cache.path());
        fs::create_dir(layers(cache.path())).unwrap();
        let [whole, begun] =
            ["4096.ext4", ".4096.ext4.0123456789ab"].map(|name| layers(cache.path()).join(name));
        for path in [&whole, &begun] {
            fs::write(path, "content").unwrap();
        }
        remove_unfinished(cache.path());
        assert!(whole.exists() && !begun.exists());
    }
}
