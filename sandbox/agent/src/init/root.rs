//! The container's root: image, volatile layer, overlay, and the file systems on top of it.
//!
//! Mount flags are those of the OCI runtime specification's Linux defaults.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{CWD, FileType, Mode, OFlags, makedev, mknodat};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, mount_remount, unmount,
};

use slipway_agent_protocol::v1::Share;

use super::{
    ContainerSpec, Device, VolumeSpec, dev, empty_dirs, file_dirs, files, hidden, shares, sockets,
    tree, volume,
};
use crate::{copies, machine, sysctl};

const NO_EXEC: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// A mount that is to be attached in the container.
struct Detached {
    share: Share,
    tree: OwnedFd,
    /// Set if it is write-protected once all mounts are attached: it gets the places of those below
    /// it, as kubelet makes them in such volumes.
    protected: bool,
}

/// Builds the root, makes it this process's `/` and mounts everything in it.
pub fn enter(spec: &ContainerSpec, privileged: bool) -> Result<()> {
    if !spec.hostname.is_empty() {
        rustix::system::sethostname(spec.hostname.as_bytes())
            .with_context(|| format!("hostname {:?}", spec.hostname))?;
    }
    sysctl::set_all(&spec.sysctls)?;
    // The modes below are exact; the container's program gets the usual umask 022.
    rustix::process::umask(Mode::empty());
    // Mounts made here must not propagate to the agent's namespace.
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .context("making mounts private")?;
    let devices = if privileged { devices_beside(&spec.volumes)? } else { Vec::new() };
    let sockets = spec.sockets.as_ref().map(sockets::Detached::take).transpose()?;
    let shared_memory = clone_tree(&spec.shared_memory)?;
    let message = clone_tree(&spec.message)?;
    let root = assemble(spec)?;
    let mounts = open_mounts(spec)?;
    pivot(&root)?;
    write_files(spec)?;
    mount_system(privileged)?;
    mount_shared_memory(shared_memory.as_ref())?;
    dev::populate(&devices)?;
    // Before the mounts that an orchestrator asks for: one may be put on it.
    let null = rustix::fs::open("/dev/null", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    spec.volumes.iter().try_for_each(volume::publish)?;
    attach(spec, &mounts, message.as_ref(), sockets)?;
    hidden::hide(spec.masked.as_ref(), spec.read_only_paths.as_ref(), privileged, &null)?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    Ok(())
}

/// Clones the mount at `path`, which is out of reach once the root is another one. Returns `None`
/// if the path is empty.
fn clone_tree(path: &str) -> Result<Option<OwnedFd>> {
    match path {
        "" => Ok(None),
        path => tree::clone(Path::new(path)).map(Some),
    }
}

/// Writes the files that the root has in place of the image's.
fn write_files(spec: &ContainerSpec) -> Result<()> {
    files::write_etc(spec.names.as_ref())?;
    files::write_machine_id()?;
    // Before anything is mounted on the root: a link of the image leads into the image only.
    let root = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    spec.files.iter().try_for_each(|file| copies::put(root.as_fd(), file))
}

/// Attaches the mounts that come from outside of the container, and protects those that it may not
/// write to once all are there.
fn attach(
    spec: &ContainerSpec,
    mounts: &[Detached],
    message: Option<&OwnedFd>,
    sockets: Option<sockets::Detached>,
) -> Result<()> {
    for Detached { share, tree, .. } in mounts {
        shares::attach(share, tree)?;
    }
    if let Some(message) = message {
        let (path, file) = (spec.message_path.clone(), true);
        shares::attach(&Share { path, file, ..Share::default() }, message)?;
    }
    if let Some(sockets) = sockets {
        sockets.attach()?;
    }
    for Detached { share, tree, .. } in mounts.iter().filter(|mount| mount.protected) {
        file_dirs::protect(tree, &share.path)?;
    }
    Ok(())
}

/// Returns the mounts of the host's files and of directories of the sandbox and of the container's
/// own, in the order in which they are attached: a mount comes before those below it.
fn open_mounts(spec: &ContainerSpec) -> Result<Vec<Detached>> {
    let shares = spec.shares.iter().cloned().zip(shares::open_all(&spec.shares)?);
    let dirs = empty_dirs::open_all(Path::new(&spec.empty_dirs_at), &spec.empty_dirs)?;
    let others = shares.chain(dirs);
    let mut all: Vec<_> =
        others.map(|(share, tree)| Detached { share, tree, protected: false }).collect();
    for dir in &spec.file_dirs {
        let (share, tree) = file_dirs::open(dir)?;
        all.push(Detached { share, tree, protected: dir.read_only });
    }
    all.sort_by_key(|mount| Path::new(&mount.share.path).components().count());
    Ok(all)
}

/// Returns the sandbox's device nodes, for a container that has `volumes` beside them. The device
/// of a volume takes the place of a node with the same path.
fn devices_beside(volumes: &[VolumeSpec]) -> Result<Vec<dev::Node>> {
    let taken = volumes.iter().map(volume::path).collect::<Result<Vec<_>>>()?;
    Ok(dev::without(dev::list(Path::new("/dev"))?, &taken))
}

/// Mounts image, volatile layer and overlay below a tmpfs. Returns the overlay's path.
fn assemble(spec: &ContainerSpec) -> Result<PathBuf> {
    let base = Path::new(&spec.base);
    // The tmpfs must not be NODEV: the nodes of the image and the volatile layer are in it.
    mount("tmpfs", base, "tmpfs", MountFlags::NOSUID, c"mode=0700,size=1m")
        .with_context(|| format!("covering {}", spec.base))?;
    let directory = |name: &str| -> Result<PathBuf> {
        let path = base.join(name);
        std::fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(path)
    };
    let image = directory("image")?;
    let device = spec.image.context("the root has no image")?;
    let node = node(base, "image-device", device)?;
    let flags = MountFlags::RDONLY | MountFlags::NODEV;
    mount(&node, &image, "erofs", flags, image_options(spec.shared_image))
        .context("mounting the image (EROFS)")?;
    let volatile = directory("volatile")?;
    mount_volatile(spec.volatile, base, &volatile)?;
    let root = directory("root")?;
    let (upper, work) = (volatile.join("upper"), volatile.join("work"));
    for path in [&upper, &work] {
        // An upper layer from a start that did not complete is used again.
        if !path.is_dir() {
            std::fs::create_dir(path).with_context(|| path.display().to_string())?;
        }
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    }
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        image.display(),
        upper.display(),
        work.display()
    );
    let options = CString::new(options)?;
    mount("overlay", &root, "overlay", MountFlags::NODEV, options.as_c_str())
        .context("mounting the overlay")?;
    Ok(root)
}

/// Returns the options for the image. Files in memory that the host shares are read and mapped in
/// place: a copy in the page cache would be the sandbox's own.
fn image_options(shared: bool) -> &'static CStr {
    if shared { c"dax=always" } else { c"" }
}

fn mount_volatile(device: Option<Device>, base: &Path, target: &Path) -> Result<()> {
    let Some(device) = device else {
        return mount("tmpfs", target, "tmpfs", MountFlags::NODEV, c"mode=0755")
            .context("mounting the volatile layer (tmpfs)");
    };
    let node = node(base, "volatile-device", device)?;
    // The layer ends with the sandbox, so nothing in it is worth waiting for a disk. It is memory
    // of the host, which has a bound: a file that is removed gives its memory back.
    let options = c"nobarrier,noauto_da_alloc,noinit_itable,discard";
    mount(&node, target, "ext4", MountFlags::NODEV | MountFlags::NOATIME, options)
        .context("mounting the volatile layer (ext4)")
}

fn node(base: &Path, name: &str, device: Device) -> Result<PathBuf> {
    let path = base.join(name);
    let number = makedev(device.major, device.minor);
    mknodat(CWD, &path, FileType::BlockDevice, Mode::from_raw_mode(0o600), number)
        .with_context(|| path.display().to_string())?;
    Ok(path)
}

/// Makes `root` this mount namespace's `/`. The sandbox's root disappears from it.
pub fn pivot(root: &Path) -> Result<()> {
    rustix::process::chdir(root)?;
    // pivot_root(2), "pivot_root(".", ".")": the old root is stacked on the new one.
    rustix::process::pivot_root(".", ".").context("pivot_root")?;
    unmount(".", UnmountFlags::DETACH).context("leaving the sandbox's root")?;
    rustix::process::chdir("/")?;
    Ok(())
}

fn mount_system(privileged: bool) -> Result<()> {
    let read_only = if privileged { MountFlags::empty() } else { MountFlags::RDONLY };
    files::mount_point("/proc")?;
    mount("proc", "/proc", "proc", NO_EXEC, c"").context("mounting /proc")?;
    files::mount_point("/sys")?;
    mount("sysfs", "/sys", "sysfs", NO_EXEC | read_only, c"").context("mounting /sys")?;
    // The mount shows the container's own cgroup as the top. Some kernels lack the directory.
    if Path::new("/sys/fs/cgroup").is_dir() {
        mount("cgroup2", "/sys/fs/cgroup", "cgroup2", NO_EXEC | read_only, c"")
            .context("mounting /sys/fs/cgroup")?;
    }
    files::mount_point("/dev")?;
    mount("tmpfs", "/dev", "tmpfs", MountFlags::NOSUID, c"mode=0755,size=65536k")
        .context("mounting /dev")?;
    let extra: [(&str, &str, &CStr, MountFlags); 2] = [
        (
            "/dev/pts",
            "devpts",
            c"newinstance,ptmxmode=0666,mode=0620,gid=5",
            MountFlags::NOSUID | MountFlags::NOEXEC,
        ),
        ("/dev/mqueue", "mqueue", c"", NO_EXEC),
    ];
    for (path, kind, options, flags) in extra {
        files::mount_point(path)?;
        match mount(kind, path, kind, flags, options) {
            Ok(()) => {}
            // The kernel has no POSIX message queues.
            Err(rustix::io::Errno::NODEV) if kind == "mqueue" => {}
            Err(error) => bail!("mounting {path}: {error}"),
        }
    }
    Ok(())
}

/// Mounts /dev/shm: the pod's, or one of the container's own.
fn mount_shared_memory(of_pod: Option<&OwnedFd>) -> Result<()> {
    const PATH: &str = "/dev/shm";
    files::mount_point(PATH)?;
    match of_pod {
        Some(tree) => tree::attach(tree, PATH),
        None => mount("tmpfs", PATH, "tmpfs", NO_EXEC, machine::SHARED_MEMORY_OPTIONS)
            .with_context(|| format!("mounting {PATH}")),
    }
}

/// Write-protects the root. File systems that are mounted on it keep their own state.
pub fn make_read_only() -> Result<()> {
    mount_remount("/", MountFlags::BIND | MountFlags::RDONLY | MountFlags::NODEV, c"")
        .context("making the root read-only")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_in_shared_memory_is_read_in_place() {
        assert_eq!(image_options(true), c"dax=always");
        assert_eq!(image_options(false), c"");
    }
}
