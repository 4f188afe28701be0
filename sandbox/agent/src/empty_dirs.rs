//! Directories of the sandbox that containers of a pod share by name: Kubernetes' `emptyDir`.
//!
//! A directory in memory is a tmpfs of its own, which bounds its size, or a hugetlbfs, whose pages
//! the limits of containers bound. The others are in an ext4 on one disk, which the host attaches
//! for all of them: a tmpfs would hold their data in the guest's memory, and a container's volatile
//! layer ends with that container. The file systems are mounted outside of containers, and stay
//! until the sandbox ends.
//!
//! A container gets clones of the mounts (`init/empty_dirs`), each with the directory as its root.
//! So it reaches neither other directories nor what is beside them on the disk.

use std::ffi::CString;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use rustix::fs::{CWD, Dev, FileType, Mode, mknodat};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use slipway_agent_protocol::HUGE_PAGE;
use slipway_agent_protocol::v1::EmptyDir;

use crate::lock::lock;
use crate::name;

/// The most directories of a container.
const MOST: usize = 64;
/// The mount point of the disk, beside the directories in memory.
const DISK: &str = "disk";
/// The directory of those in memory.
const MEMORY: &str = "memory";
/// The bits of a directory's mode.
const MODE: u32 = 0o7777;

/// Makes the directories that a container names and that are not there yet. `disk` is the device
/// number of the disk.
///
/// # Errors
/// A name or path that is none, or a file system that cannot be mounted.
pub async fn make(at: &Path, disk: Option<Dev>, dirs: &[EmptyDir]) -> Result<()> {
    if dirs.is_empty() {
        return Ok(());
    }
    check(dirs)?;
    let (at, dirs) = (at.to_owned(), dirs.to_vec());
    // Mounting and making directories wait for the disk.
    let made = tokio::task::spawn_blocking(move || make_all(&at, disk, &dirs)).await;
    made.context("making directories of the sandbox")?
}

fn check(dirs: &[EmptyDir]) -> Result<()> {
    if dirs.len() > MOST {
        bail!("{} directories of the sandbox are too many: at most {MOST}", dirs.len());
    }
    for EmptyDir { name, sub_path, .. } in dirs {
        name::check(name).context("a directory of the sandbox")?;
        let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
        if !Path::new(sub_path).components().all(plain) {
            bail!("{sub_path:?} is no path below the directory {name}");
        }
    }
    Ok(())
}

/// Returns the path of the directory `name`, or `None` if it was not made.
pub fn path(at: &Path, name: &str) -> Option<PathBuf> {
    [DISK, MEMORY].map(|kind| at.join(kind).join(name)).into_iter().find(|path| path.is_dir())
}

fn make_all(at: &Path, disk: Option<Dev>, dirs: &[EmptyDir]) -> Result<()> {
    /// Held while a directory exists whose file system may not be mounted yet, or whose mode and
    /// owner may not be its own.
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = lock(&MAKING);
    for dir in dirs.iter().filter(|dir| path(at, &dir.name).is_none()) {
        let made = make_base(at).and_then(|()| match (dir.in_memory, disk) {
            (true, _) if dir.huge_pages => make_of_huge_pages(at, dir),
            (true, _) => make_in_memory(at, dir),
            (false, Some(disk)) => make_on_disk(at, disk, dir),
            (false, None) => bail!("no disk given"),
        });
        made.with_context(|| format!("making the directory {}", dir.name))?;
    }
    Ok(())
}

/// Mounts the file system of the mount points, on which nobody else stores anything.
fn make_base(at: &Path) -> Result<()> {
    mount_once(at, |at| {
        // Not NODEV: the node of the disk is in it.
        mount("tmpfs", at, "tmpfs", MountFlags::NOSUID, c"mode=0700,size=1m")?;
        let made = std::fs::create_dir(at.join(MEMORY));
        Ok(made.inspect_err(|_| {
            let _ = unmount(at, UnmountFlags::DETACH);
        })?)
    })
}

fn make_in_memory(at: &Path, dir: &EmptyDir) -> Result<()> {
    let options = CString::new(tmpfs_options(dir))?;
    mount_once(&at.join(MEMORY).join(&dir.name), |path| {
        Ok(mount("tmpfs", path, "tmpfs", MountFlags::NODEV, options.as_c_str())?)
    })
}

fn make_of_huge_pages(at: &Path, dir: &EmptyDir) -> Result<()> {
    let options = CString::new(format!("pagesize={HUGE_PAGE},uid={},gid={}", dir.uid, dir.gid))?;
    mount_once(&at.join(MEMORY).join(&dir.name), |path| {
        mount("hugetlbfs", path, "hugetlbfs", MountFlags::NODEV, options.as_c_str())?;
        // The option `mode` of hugetlbfs has no set-group-ID.
        let permissions = std::fs::Permissions::from_mode(dir.mode & MODE);
        let set = std::fs::set_permissions(path, permissions);
        Ok(set.inspect_err(|_| {
            let _ = unmount(path, UnmountFlags::DETACH);
        })?)
    })
}

fn tmpfs_options(EmptyDir { size_bytes, mode, uid, gid, .. }: &EmptyDir) -> String {
    // For tmpfs a size of 0 is no bound.
    let size = if *size_bytes == 0 { "50%".to_owned() } else { size_bytes.to_string() };
    format!("mode={:o},uid={uid},gid={gid},size={size}", mode & MODE)
}

fn make_on_disk(at: &Path, disk: Dev, dir: &EmptyDir) -> Result<()> {
    mount_once(&at.join(DISK), |path| mount_disk(&at.join("device"), disk, path))?;
    let path = at.join(DISK).join(&dir.name);
    std::fs::create_dir(&path)?;
    // The mode after the owner, with whom some bits go.
    let owned = chown(&path, Some(dir.uid), Some(dir.gid));
    let permissions = std::fs::Permissions::from_mode(dir.mode & MODE);
    let made = owned.and_then(|()| std::fs::set_permissions(&path, permissions));
    Ok(made.inspect_err(|_| drop(std::fs::remove_dir(&path)))?)
}

fn mount_disk(node: &Path, disk: Dev, path: &Path) -> Result<()> {
    // An earlier attempt may have left one, of another disk.
    let _ = std::fs::remove_file(node);
    mknodat(CWD, node, FileType::BlockDevice, Mode::from_raw_mode(0o600), disk)
        .context("the disk's node")?;
    // As for volatile layers: the data ends with the sandbox, so nothing in it is worth waiting for
    // the disk, and a file that is removed gives its space on the host back.
    let options = c"nobarrier,noauto_da_alloc,noinit_itable,discard";
    mount(node, path, "ext4", MountFlags::NODEV | MountFlags::NOATIME, options)
        .context("mounting the disk")
}

/// Makes the directory `path` and has `mount` mount a file system there, unless that was done. The
/// caller sees to it that no other call is under way for `path`.
pub fn mount_once(path: &Path, mount: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    match std::fs::create_dir(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
        made => made.with_context(|| path.display().to_string())?,
    }
    mount(path).inspect_err(|_| drop(std::fs::remove_dir(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir(name: &str, sub_path: &str) -> EmptyDir {
        EmptyDir { name: name.into(), sub_path: sub_path.into(), ..EmptyDir::default() }
    }

    #[test]
    fn names_and_paths_that_lead_elsewhere_are_refused() {
        check(&[dir("cache", ""), dir("cache", "a/b"), dir("a.b-c", "..a")]).unwrap();
        for wrong in [
            dir("", ""),
            dir("..", ""),
            dir("a/b", ""),
            dir("lost+found", ""),
            dir("cache", "/etc"),
            dir("cache", "../other"),
            dir("cache", "a/../../other"),
        ] {
            assert!(check(std::slice::from_ref(&wrong)).is_err(), "{wrong:?}");
        }
        check(&vec![dir("cache", ""); MOST]).unwrap();
        assert!(check(&vec![dir("cache", ""); MOST + 1]).is_err());
    }

    #[test]
    fn a_directory_in_memory_has_a_bound() {
        let of = |size_bytes| {
            let (mode, uid, gid) = (0o42777, 7, 2000);
            tmpfs_options(&EmptyDir { size_bytes, mode, uid, gid, ..EmptyDir::default() })
        };
        assert_eq!(of(0), "mode=2777,uid=7,gid=2000,size=50%");
        assert_eq!(of(8 << 20), "mode=2777,uid=7,gid=2000,size=8388608");
    }
}
