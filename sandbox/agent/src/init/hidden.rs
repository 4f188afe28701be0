//! Paths of a container that are hidden or read-only.
//!
//! The paths are the host's, but what lies there may be the image's. So links are followed within
//! the container's root, and no link of procfs is, which could lead out of it. The mounts are made
//! on what was opened, through `/proc/self/fd` of the container's own procfs.

use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::{Context, Result, bail};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_bind, mount_bind_recursive, mount_remount};
use slipway_agent_protocol::v1::Paths;

/// Paths with information about the machine that a container does not need.
const MASKED: &[&str] = &[
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];
/// Paths of kernel settings, which belong to the sandbox and not to the container.
const READ_ONLY: &[&str] =
    &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Hides the paths `masked` and write-protects the paths `read_only`. A list that is absent stands
/// for the usual one, and in a privileged container for none. Paths that do not exist are left out.
/// `null` is `/dev/null`, opened before anything could be mounted on it.
pub fn hide(
    masked: Option<&Paths>,
    read_only: Option<&Paths>,
    privileged: bool,
    null: &OwnedFd,
) -> Result<()> {
    // A masked path may be below a read-only one, whose mount would cover it again.
    for path in list(read_only, READ_ONLY, privileged) {
        protect(path).with_context(|| format!("protecting {path}"))?;
    }
    for path in list(masked, MASKED, privileged) {
        mask(path, null).with_context(|| format!("masking {path}"))?;
    }
    Ok(())
}

fn list<'a>(given: Option<&'a Paths>, usual: &[&'a str], privileged: bool) -> Vec<&'a str> {
    match given {
        Some(given) => given.paths.iter().map(String::as_str).collect(),
        None if privileged => Vec::new(),
        None => usual.to_vec(),
    }
}

/// Covers a file with the device `null`, and a directory with an empty file system.
fn mask(path: &str, null: &OwnedFd) -> Result<()> {
    let Some(target) = open(path)? else { return Ok(()) };
    let stat = rustix::fs::fstat(&target)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        let options = c"size=0,nr_inodes=1";
        mount("tmpfs", own(&target), "tmpfs", MountFlags::RDONLY, options)?;
    } else {
        mount_bind(own(null), own(&target))?;
    }
    Ok(())
}

/// Puts a read-only mount of the path on the path. Mounts below it stay as they are.
fn protect(path: &str) -> Result<()> {
    let Some(target) = open(path)? else { return Ok(()) };
    mount_bind_recursive(own(&target), own(&target))?;
    // Opened again, the path is the mount.
    let Some(mount) = open(path)? else { bail!("it is gone") };
    let kept = rustix::fs::fstatvfs(&mount)?.f_flag;
    let flags = [
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
    ];
    let kept = flags.iter().filter(|(flag, _)| kept.contains(*flag)).map(|(_, flag)| *flag);
    let flags = kept.fold(MountFlags::BIND | MountFlags::RDONLY, MountFlags::union);
    mount_remount(own(&mount), flags, c"")?;
    Ok(())
}

/// Opens what the path stands for, only to name it. Returns `None` if there is nothing.
fn open(path: &str) -> Result<Option<OwnedFd>> {
    if !path.starts_with('/') {
        bail!("it is not an absolute path");
    }
    let (flags, within) = (OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::NO_MAGICLINKS);
    match rustix::fs::openat2(CWD, path, flags, Mode::empty(), within) {
        Ok(target) if is_root(&target)? => bail!("it is the whole root"),
        Ok(target) => Ok(Some(target)),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(Errno::LOOP) => bail!("a link of procfs is not followed"),
        Err(error) => Err(error.into()),
    }
}

fn is_root(target: &OwnedFd) -> Result<bool> {
    let (target, root) = (rustix::fs::fstat(target)?, rustix::fs::stat("/")?);
    Ok((target.st_dev, target.st_ino) == (root.st_dev, root.st_ino))
}

fn own(target: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", target.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use rustix::mount::{MountPropagationFlags, mount_change};
    use rustix::thread::UnshareFlags;

    use super::*;

    #[test]
    fn given_paths_replace_the_usual_ones() {
        let given = Paths { paths: vec!["/a".into()] };
        assert_eq!(list(Some(&given), MASKED, true), ["/a"]);
        assert_eq!(list(Some(&Paths::default()), MASKED, false), [""; 0]);
        assert_eq!(list(None, MASKED, false), MASKED);
        assert_eq!(list(None, MASKED, true), [""; 0]);
    }

    #[test]
    fn a_file_is_masked_with_the_device_whatever_is_mounted_on_it() {
        if !rustix::process::geteuid().is_root() {
            println!(
                "SKIPPED: a_file_is_masked_with_the_device_whatever_is_mounted_on_it: needs root"
            );
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let (file, covered) = (at("file"), at("covered"));
        let masked = std::thread::spawn(move || {
            // SAFETY: the thread ends with the test, and no other uses its descriptors' paths.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }
                .unwrap();
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
            std::fs::write(&file, "seen").unwrap();
            std::fs::write(&covered, "").unwrap();
            mount_bind("/dev/null", &covered).unwrap();
            let null = open(&covered).unwrap().unwrap();
            mount_bind(&file, &covered).unwrap();
            assert_eq!(std::fs::read_to_string(&covered).unwrap(), "seen");
            mask(&file, &null).unwrap();
            std::fs::read_to_string(&file).unwrap()
        });
        assert_eq!(masked.join().unwrap(), "");
    }

    #[test]
    fn links_are_followed_but_those_of_procfs() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(at("file"), "").unwrap();
        for (target, link) in [("file", "link"), ("/proc/self/exe", "magic"), ("/", "root")] {
            std::os::unix::fs::symlink(target, at(link)).unwrap();
        }
        let said = |path: &str| format!("{:#}", open(path).unwrap_err());
        assert!(open(&at("link")).unwrap().is_some());
        assert!(open(&at("missing")).unwrap().is_none());
        assert!(open(&at("file/below")).unwrap().is_none());
        assert!(said(&at("magic")).contains("link of procfs"));
        assert!(said(&at("root")).contains("the whole root"));
        assert!(said("relative").contains("not an absolute path"));
    }
}
