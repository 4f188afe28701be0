//! Files of the host that a container has copies of, and whether they have changed since.
//!
//! A directory is one of the container's own in the guest, and so is a part of one of Kubernetes'
//! volumes (`subPath`), which stays as it was when the container was made. What there is no room
//! for is shared with the host, as other directories are.
//!
//! A source is resolved once, when the container is made, as a mount's is. Later it is opened
//! without following any link: whoever can write to a directory above must not choose another file
//! of the host.

mod part;

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use serde::{Deserialize, Serialize};
use slipway_mounts::Mounted;
use slipway_sandbox_api::copies::CopyError;
use slipway_sandbox_api::v1;

use crate::spec::{self, Mount};
use crate::store::name;

/// The kind of the files with the records of copies.
pub const RECORDS: &str = "copy";
/// The memory in which a guest has a file is whole pages of this size, bytes.
const PAGE: usize = 4096;
/// The bits of a directory's mode.
const MODE: u32 = 0o7777;

/// The room for copies in a container.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// The most memory that the files take, bytes.
    pub bytes: usize,
    /// The most files.
    pub files: usize,
    /// The most directories of the container's own, single files in place of one included.
    pub dirs: usize,
}

/// The copies that are made of mounts of the host's files, and the mounts that stay shares.
#[derive(Default)]
pub struct Copied {
    /// The copies that follow the host's files.
    pub copies: Vec<Copy>,
    /// The files of all copies.
    pub files: Vec<v1::File>,
    /// The directories of the container's own.
    pub dirs: Vec<v1::FileDir>,
    /// The mounts that are shared with the host.
    pub shares: Vec<v1::Share>,
}

/// A file or directory of the host that a container has a copy of.
#[derive(Debug, Serialize, Deserialize)]
pub struct Copy {
    mount: Mount,
    /// The mount's source without links.
    source: PathBuf,
    /// The version that the container has; `None` until it has one.
    stamp: Option<Stamp>,
    /// The paths of the copies, and of those that an attempt to put them may have left.
    paths: BTreeSet<String>,
    /// The paths that a later mount has its own files at.
    hidden: BTreeSet<String>,
}

/// The version of a mount's files. It changes when they do.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Stamp {
    /// A volume of Kubernetes': the directory that its link `..data` names.
    Version(PathBuf),
    /// Inode, size, and the time of its last change in ns.
    File(u64, u64, i128),
}

impl Stamp {
    /// Returns the version of what was opened at `path`.
    fn of(path: &Path) -> io::Result<Self> {
        if let Ok(version) = fs::read_link(path.join("..data")) {
            return Ok(Self::Version(version));
        }
        let status = fs::metadata(path)?;
        let changed = i128::from(status.ctime()) * 1_000_000_000 + i128::from(status.ctime_nsec());
        Ok(Self::File(status.ino(), status.size(), changed))
    }
}

/// A version of a copy, to be noted with [`Copy::has`] or [`Copy::may_have`].
pub struct Version {
    stamp: Stamp,
    paths: BTreeSet<String>,
}

/// An open source, and a path that leads to it whatever becomes of its own.
struct Opened {
    path: PathBuf,
    _file: OwnedFd,
}

impl Copy {
    /// Resolves a mount's source.
    fn new(mount: Mount) -> Result<Self, String> {
        let unread = |source| CopyError::Read { path: PathBuf::from(&mount.source), source };
        let source = fs::canonicalize(&mount.source)
            .map_err(|error| spec::refused(&mount, &unread(error).to_string()))?;
        let (paths, hidden) = (BTreeSet::new(), BTreeSet::new());
        Ok(Self { mount, source, stamp: None, paths, hidden })
    }

    /// Returns the beginning of the names of the files in the store with a container's copies.
    pub fn files(task: &str) -> String {
        name(RECORDS, &[task]) + "-"
    }

    /// Returns the name of the file in the store with this copy of a container.
    pub fn file(&self, task: &str) -> String {
        Self::files(task) + &name("of", &[&self.mount.destination])
    }

    fn open(&self) -> io::Result<Opened> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let no_links = ResolveFlags::NO_SYMLINKS;
        let file = rustix::fs::openat2(CWD, &self.source, flags, Mode::empty(), no_links)?;
        Ok(Opened { path: format!("/proc/self/fd/{}", file.as_raw_fd()).into(), _file: file })
    }

    /// Reads the files again if they have changed. Returns `None` if they have not, else the new
    /// version, and the request for it without the container's name. May wait for a file system of
    /// the host.
    ///
    /// # Errors
    /// One line that names the file. A volume without a version that had one is an error, too: the
    /// host is about to remove it, which is no reason to remove the container's files.
    pub fn change(&self) -> Result<Option<(Version, v1::PutFilesRequest)>, String> {
        self.changed().map_err(|error| self.refused(&error))
    }

    fn changed(&self) -> Result<Option<(Version, v1::PutFilesRequest)>, CopyError> {
        let failed = |source| CopyError::Read { path: self.source.clone(), source };
        let opened = self.open().map_err(failed)?;
        // Before the files: what changes meanwhile is read again.
        let stamp = Stamp::of(&opened.path).map_err(failed)?;
        if self.stamp.as_ref() == Some(&stamp) {
            return Ok(None);
        }
        if let (Some(Stamp::Version(_)), Stamp::File(..)) = (&self.stamp, &stamp) {
            return Err(failed(io::Error::other("the volume has no version any more")));
        }
        let read = spec::read_copy(&self.mount, &opened.path);
        // An error names the source, not the descriptor.
        let mut files = read.map_err(|error| error.moved(&opened.path, &self.source))?;
        files.retain(|file| !self.hidden.contains(&file.path));
        let paths: BTreeSet<_> = files.iter().map(|file| file.path.clone()).collect();
        let gone = self.paths.difference(&paths).filter(|path| !self.hidden.contains(*path));
        let removed = gone.cloned().collect();
        let request = v1::PutFilesRequest { name: String::new(), files, removed };
        Ok(Some((Version { stamp, paths }, request)))
    }

    fn refused(&self, error: &CopyError) -> String {
        spec::refused(&self.mount, &error.to_string())
    }

    /// Notes that the container has a version.
    pub fn has(&mut self, version: Version) {
        (self.stamp, self.paths) = (Some(version.stamp), version.paths);
    }

    /// Notes that the container may have files of a version: the next one removes those that it
    /// does not replace.
    pub fn may_have(&mut self, version: Version) {
        self.paths.extend(version.paths);
    }
}

/// Returns whether [`read`] may give a container directories of its own. Reads nothing.
pub fn need_dirs(mounts: &[Mount], shares: &[v1::Share]) -> bool {
    mounts.iter().any(|mount| spec::is_small_volume(&mount.source)) || part::is_among(shares)
}

/// Reads the files of mounts that are to be copied, and of those shares that are parts of small
/// volumes. A later mount takes the place of an earlier one. May wait for a file system of the
/// host.
///
/// # Errors
/// One line that names the file.
pub fn read(mounts: Vec<Mount>, shares: Vec<v1::Share>, room: Room) -> Result<Copied, String> {
    // Without the host's mounts a part is shared.
    let mounted = part::is_among(&shares).then(|| slipway_mounts::read().unwrap_or_default());
    read_with(mounts, shares, room, &mounted.unwrap_or_default())
}

fn read_with(
    mounts: Vec<Mount>,
    shares: Vec<v1::Share>,
    room: Room,
    mounted: &[Mounted],
) -> Result<Copied, String> {
    let mut copied = Copied::default();
    for mount in mounts {
        copied.add(Copy::new(mount)?, room)?;
    }
    for share in shares {
        match part::read(&share, mounted).filter(|(_, files)| copied.has_room(files, true, room)) {
            Some((dir, files)) => {
                copied.dirs.push(dir);
                copied.put(files);
            }
            None => copied.shares.push(share),
        }
    }
    Ok(copied)
}

impl Copied {
    /// Adds the files of a copy that has no version yet, or a share if there is no room for them.
    fn add(&mut self, mut copy: Copy, room: Room) -> Result<(), String> {
        let share = spec::share(&copy.mount);
        let (version, request) = match copy.changed() {
            Ok(Some(read)) => read,
            Ok(None) => return Ok(()),
            Err(CopyError::TooLarge(_)) => {
                self.shares.push(share);
                return Ok(());
            }
            Err(error) => return Err(copy.refused(&error)),
        };
        let dir = fs::symlink_metadata(&copy.source).ok().filter(fs::Metadata::is_dir);
        let dir = dir.map(|status| file_dir(&share, &status));
        if self.is_hidden(&copy.mount) || !self.has_room(&request.files, dir.is_some(), room) {
            self.shares.push(share);
            return Ok(());
        }
        self.put(request.files);
        self.dirs.extend(dir);
        copy.has(version);
        self.copies.push(copy);
        Ok(())
    }

    /// Adds files in the place of earlier ones with their paths.
    fn put(&mut self, files: Vec<v1::File>) {
        let paths: BTreeSet<_> = files.iter().map(|file| file.path.clone()).collect();
        for earlier in &mut self.copies {
            earlier.hidden.extend(paths.iter().cloned());
        }
        self.files.retain(|file| !paths.contains(&file.path));
        self.files.extend(files);
    }

    /// Returns whether a share, for want of room, would hide the copies of a mount. A volume is a
    /// mount in the guest, too.
    fn is_hidden(&self, mount: &Mount) -> bool {
        let is_below = |share: &v1::Share| Path::new(&mount.destination).starts_with(&share.path);
        !spec::is_small_volume(&mount.source) && self.shares.iter().any(is_below)
    }

    fn has_room(&self, files: &[v1::File], is_dir: bool, room: Room) -> bool {
        let has_dir = !is_dir || self.dirs.len() < room.dirs;
        has_dir
            && self.files.len() + files.len() <= room.files
            && self.bytes() + memory(files) <= room.bytes
    }

    /// Returns the memory that the files take, bytes.
    pub fn bytes(&self) -> usize {
        memory(&self.files)
    }
}

fn memory(files: &[v1::File]) -> usize {
    files.iter().map(|file| file.content.len().next_multiple_of(PAGE)).sum()
}

/// Returns the container's own directory, or file, in place of a share.
fn file_dir(share: &v1::Share, status: &fs::Metadata) -> v1::FileDir {
    v1::FileDir {
        path: share.path.trim_end_matches('/').to_owned(),
        read_only: share.read_only,
        mode: status.mode() & MODE,
        uid: status.uid(),
        gid: status.gid(),
        file: !status.is_dir(),
        ..v1::FileDir::default()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn paths(files: &[v1::File]) -> Vec<&str> {
        files.iter().map(|file| file.path.as_str()).collect()
    }

    const ROOM: Room = Room { bytes: 1 << 20, files: 100, dirs: 10 };

    /// Reads mounts for which there is room.
    fn read(mounts: Vec<Mount>) -> (Vec<Copy>, Vec<v1::File>) {
        let copied = read_with(mounts, Vec::new(), ROOM, &[]).unwrap();
        assert_eq!(copied.shares, []);
        (copied.copies, copied.files)
    }

    fn mount(source: &Path, destination: &str) -> Mount {
        Mount {
            source: source.display().to_string(),
            destination: destination.to_owned(),
            kind: "bind".to_owned(),
            options: Vec::new(),
        }
    }

    #[test]
    fn a_file_of_a_later_mount_is_neither_replaced_nor_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (etc, resolver) = (dir.path().join("etc"), dir.path().join("resolver"));
        fs::create_dir(&etc).unwrap();
        for file in [etc.join("resolv.conf"), etc.join("app"), resolver.clone()] {
            fs::write(file, "").unwrap();
        }
        let mounts = vec![mount(&etc, "/etc"), mount(&resolver, "/etc/resolv.conf")];
        let (mut copies, files) = read(mounts);
        assert_eq!(paths(&files), ["/etc/app", "/etc/resolv.conf"]);
        // Its directory changes with a file in it.
        fs::rename(etc.join("app"), etc.join("new")).unwrap();
        let (version, request) = copies[0].change().unwrap().unwrap();
        assert_eq!(
            (paths(&request.files), request.removed),
            (vec!["/etc/new"], vec!["/etc/app".to_owned()])
        );
        copies[0].has(version);
        fs::remove_file(etc.join("resolv.conf")).unwrap();
        let (_, request) = copies[0].change().unwrap().unwrap();
        assert_eq!((paths(&request.files), request.removed.len()), (vec!["/etc/new"], 0));
    }

    #[test]
    fn a_new_version_is_read_and_the_old_one_removed() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("pods/0-1/volumes/kubernetes.io~configmap/app");
        let version = |name: &str, file: &str| {
            fs::create_dir_all(volume.join(name)).unwrap();
            fs::write(volume.join(name).join(file), name).unwrap();
            let aside = volume.join("..data_tmp");
            symlink(name, &aside).unwrap();
            fs::rename(aside, volume.join("..data")).unwrap();
        };
        version("..1", "a");
        let hosts = dir.path().join("hosts");
        fs::write(&hosts, "one").unwrap();
        let mounts = vec![mount(&hosts, "/etc/hosts"), mount(&volume, "/c")];
        let (mut copies, files) = read(mounts);
        assert_eq!(paths(&files), ["/etc/hosts", "/c/..1/a", "/c/..data", "/c/a"]);
        assert!(copies.iter().all(|copy| copy.change().unwrap().is_none()));
        version("..2", "b");
        assert!(copies[0].change().unwrap().is_none());
        let (version_2, request) = copies[1].change().unwrap().unwrap();
        assert_eq!(paths(&request.files), ["/c/..2/b", "/c/..data", "/c/b"]);
        assert_eq!(request.files[1].link, "..2");
        assert_eq!(request.removed, ["/c/..1/a", "/c/a"]);
        // The next version removes the files that a failed attempt may have left.
        copies[1].may_have(version_2);
        version("..3", "a");
        let (version_3, request) = copies[1].change().unwrap().unwrap();
        assert_eq!(request.removed, ["/c/..1/a", "/c/..2/b", "/c/b"]);
        copies[1].has(version_3);
        assert!(copies[1].change().unwrap().is_none());
        // A file that was replaced, with as many bytes.
        fs::write(dir.path().join("new"), "two").unwrap();
        fs::rename(dir.path().join("new"), &hosts).unwrap();
        let (_, request) = copies[0].change().unwrap().unwrap();
        assert_eq!((&request.files[0].content[..], request.removed.len()), (&b"two"[..], 0));
        // A volume that the host is removing: an error that names it, and nothing is removed.
        fs::remove_file(volume.join("..data")).unwrap();
        let error = copies[1].change().err().unwrap();
        assert!(error.contains("app") && error.contains("no version any more"), "{error}");
        symlink("..4", volume.join("..data")).unwrap();
        let error = copies[1].change().err().unwrap();
        assert!(error.contains("app/..4") && !error.contains("/proc"), "{error}");
        // A link in its place, or in that of a directory above, is not followed.
        let secret = tempfile::tempdir().unwrap();
        fs::write(secret.path().join("hosts"), "secret").unwrap();
        fs::remove_file(&hosts).unwrap();
        symlink(secret.path().join("hosts"), &hosts).unwrap();
        assert!(copies[0].change().is_err());
        let moved = volume.with_file_name("moved");
        fs::rename(&volume, &moved).unwrap();
        symlink(secret.path(), &volume).unwrap();
        assert!(copies[1].change().is_err());
    }

    /// Makes a volume of Kubernetes' with these files of one byte each, and returns its directory.
    fn volume(dir: &Path, kind: &str, files: usize) -> PathBuf {
        let volume = dir.join(format!("pods/0-1/volumes/kubernetes.io~{kind}/app"));
        fs::create_dir_all(volume.join("..1")).unwrap();
        symlink("..1", volume.join("..data")).unwrap();
        for file in 0..files {
            fs::write(volume.join(format!("..1/{file}")), "x").unwrap();
            symlink(format!("..data/{file}"), volume.join(file.to_string())).unwrap();
        }
        volume
    }

    #[test]
    fn a_directory_is_one_of_the_containers_own() {
        let dir = tempfile::tempdir().unwrap();
        let volume = volume(dir.path(), "secret", 1);
        let options = vec!["rbind".to_owned(), "ro".to_owned()];
        let mount = Mount { options, ..mount(&volume, "/etc/app/") };
        let copied = read_with(vec![mount], Vec::new(), ROOM, &[]).unwrap();
        let status = fs::metadata(&volume).unwrap();
        let (mode, uid, gid) = (status.mode() & MODE, status.uid(), status.gid());
        let path = "/etc/app".to_owned();
        let expected = v1::FileDir { path, read_only: true, mode, uid, gid, ..Default::default() };
        assert_eq!(copied.dirs, [expected]);
        assert_eq!(copied.bytes(), PAGE);
    }

    #[test]
    fn volumes_without_room_are_shared() {
        let dir = tempfile::tempdir().unwrap();
        let volume = volume(dir.path(), "configmap", 2);
        let dirs = |room| {
            let copied = read_with(vec![mount(&volume, "/c")], Vec::new(), room, &[]).unwrap();
            let (files, copies) = (copied.files.len(), copied.copies.len());
            assert_eq!((copied.dirs.len(), copied.dirs.len()), (copies, 1 - copied.shares.len()));
            assert_eq!(files, 5 * copies, "two files, and three links");
            copied.dirs.len()
        };
        let room = Room { bytes: 2 * PAGE, files: 5, dirs: 1 };
        assert_eq!(dirs(room), 1);
        for less in [Room { bytes: 2 * PAGE - 1, ..room }, Room { files: 4, ..room }] {
            assert_eq!(dirs(less), 0, "{less:?}");
        }
        assert_eq!(dirs(Room { dirs: 0, ..room }), 0);
        // A volume that is too large in itself.
        fs::write(volume.join("..1/0"), vec![0; 3 << 20]).unwrap();
        assert_eq!(dirs(Room { bytes: usize::MAX, ..ROOM }), 0);
    }

    #[test]
    fn a_file_below_a_volume_without_room_is_shared_too() {
        let dir = tempfile::tempdir().unwrap();
        let (etc, hosts) = (volume(dir.path(), "projected", 1), dir.path().join("hosts"));
        fs::write(&hosts, "").unwrap();
        let mounts = vec![mount(&etc, "/etc"), mount(&hosts, "/etc/hosts")];
        let copied = read_with(mounts, Vec::new(), Room { dirs: 0, ..ROOM }, &[]).unwrap();
        let shares: Vec<_> = copied.shares.iter().map(|share| share.path.as_str()).collect();
        assert_eq!((shares, copied.files.len()), (vec!["/etc", "/etc/hosts"], 0));
    }

    #[test]
    fn a_part_of_a_volume_is_a_file_of_the_containers_own() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().canonicalize().unwrap();
        let volume = volume(&at, "configmap", 1);
        let point = at.join("pods/0-1/volume-subpaths/app/web/0");
        fs::create_dir_all(point.parent().unwrap()).unwrap();
        fs::write(&point, "part").unwrap();
        let on = |root: PathBuf, point: PathBuf| {
            let device = "8:1".to_owned();
            Mounted { device, root, point, ..Mounted::default() }
        };
        let all = on("/".into(), "/".into());
        let share = v1::Share {
            source: point.display().to_string(),
            path: "/etc/app.conf".to_owned(),
            read_only: true,
            ..v1::Share::default()
        };
        let read = |mounted: &[Mounted], room| {
            read_with(Vec::new(), vec![share.clone()], room, mounted).unwrap()
        };
        let copied = read(&[all.clone(), on(volume.join("..1/0"), point.clone())], ROOM);
        assert_eq!((copied.copies.len(), copied.shares.len()), (0, 0), "it does not follow");
        let (dir, file) = (&copied.dirs[0], &copied.files[0]);
        assert_eq!((dir.path.as_str(), dir.file, dir.read_only), ("/etc/app.conf", true, true));
        assert_eq!((file.path.as_str(), &file.content[..]), ("/etc/app.conf", &b"part"[..]));
        // It has the place of a volume's file, which no new version changes.
        let over = v1::Share { path: "/c/0".to_owned(), ..share.clone() };
        let its = [all.clone(), on(volume.join("..1/0"), point.clone())];
        let copied = read_with(vec![mount(&volume, "/c")], vec![over], ROOM, &its).unwrap();
        assert_eq!(paths(&copied.files), ["/c/..1/0", "/c/..data", "/c/0"]);
        assert_eq!((&copied.files[2].content[..], copied.dirs.len()), (&b"part"[..], 2));
        assert!(copied.copies[0].hidden.contains("/c/0"));
        // A part of another volume, or one for which there is no room, is shared.
        let other = on(at.join("elsewhere"), point.clone());
        assert_eq!(read(&[all, other], ROOM).shares, std::slice::from_ref(&share));
        assert_eq!(read(&its, Room { dirs: 0, ..ROOM }).shares, std::slice::from_ref(&share));
    }
}
