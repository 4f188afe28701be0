//! The files and sockets that a VMM is given as descriptors.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::{EmulatedDisk, EmulatedNic, Error, Result};

/// The number of connections to the agent's port, or to the control channel, that may wait for
/// the VMM.
const BACKLOG: i32 = 4;

/// Runs `work`, which blocks on files, on a thread for blocking work.
pub(crate) async fn elsewhere<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Error::system("a file operation", io::Error::other(error))))
}

/// Paths that are removed on drop, unless the owner is [finished](RemoveOnDrop::finish).
pub(crate) struct RemoveOnDrop(pub(crate) Vec<PathBuf>);

impl RemoveOnDrop {
    pub(crate) fn finish(mut self) -> Vec<PathBuf> {
        std::mem::take(&mut self.0)
    }
}

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

/// Removes the files that a VM has left in its directory.
pub(crate) fn remove(paths: &[PathBuf]) {
    for path in paths {
        let _ = fs::remove_file(path);
    }
}

/// Listens at `path`, where nobody but root can connect, and replaces a socket that an earlier run
/// left. After an error no socket is left.
pub(crate) fn listen(path: &Path) -> Result<OwnedFd> {
    let failed = |source: io::Error| Error::file("listen on", path, source);
    remove_stale(path).map_err(failed)?;
    slipway_private::listen(path, SocketType::STREAM, None, BACKLOG).map_err(failed)
}

/// Removes a socket that an earlier run left. Any other file is an error.
fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => fs::remove_file(path),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file is in the way")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Opens a disk's file with the rights that the guest is to have. Returns it, and whether it is a
/// block device.
pub(crate) fn open_disk(disk: &EmulatedDisk) -> Result<(OwnedFd, bool)> {
    use rustix::fs::FileType;
    let failed = |source: io::Error| Error::file("use the disk", &disk.path, source);
    let access = if disk.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    // QEMU accepts a descriptor only if it has exactly the flags that QEMU would have opened it
    // with.
    let flags = access | OFlags::DIRECT | OFlags::CLOEXEC;
    let fd =
        rustix::fs::open(&disk.path, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
    let stat = rustix::fs::fstat(&fd).map_err(|errno| failed(errno.into()))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok((fd, false)),
        FileType::BlockDevice => Ok((fd, true)),
        _ => Err(failed(io::Error::other("it is neither a file nor a block device"))),
    }
}

/// Creates the TAP interface of an emulated network interface. It disappears with its last
/// descriptor.
pub(crate) fn open_tap(nic: &EmulatedNic) -> Result<OwnedFd> {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    const IFF_TUN_EXCL: libc::c_int = 0x8000;
    let path = Path::new("/dev/net/tun");
    let failed = |source: io::Error| Error::file("make a TAP interface by", path, source);
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file =
        rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
    // SAFETY: all zeros is a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays 0.
    let room = request.ifr_name.len() - 1;
    if nic.tap.is_empty() || nic.tap.len() > room {
        let text = format!("\"{}\" is no name of 1 to {room} bytes", nic.tap);
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, text)));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(nic.tap.bytes()) {
        *to = from as libc::c_char;
    }
    let kind = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | IFF_TUN_EXCL;
    request.ifr_ifru.ifru_flags = kind as libc::c_short;
    // SAFETY: the request takes a pointer to an `ifreq`, owned by this function.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF as _, &raw mut request) };
    if done != 0 { Err(failed(io::Error::last_os_error())) } else { Ok(file) }
}

/// Connects to a vfio-user socket without waiting.
pub(crate) fn connect(path: &Path) -> Result<OwnedFd> {
    let failed = |source: io::Error| Error::file("use the vfio-user socket", path, source);
    // A socket address holds at most 107 bytes of a path, which this name never needs.
    let named = open_socket(path)?;
    let name = format!("/proc/self/fd/{}", named.as_raw_fd());
    let address = SocketAddrUnix::new(name).map_err(|errno| failed(errno.into()))?;
    let kind = SocketType::STREAM;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)
        .and_then(|socket| {
            rustix::net::connect(&socket, &address)?;
            rustix::io::ioctl_fionbio(&socket, false)?;
            Ok(socket)
        })
        .map_err(|errno| failed(errno.into()))
}

/// Opens a path-only descriptor of a socket.
pub(crate) fn open_socket(path: &Path) -> Result<OwnedFd> {
    let failed = |source: io::Error| Error::file("use the vfio-user socket", path, source);
    let fd = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| failed(errno.into()))?;
    let stat = rustix::fs::fstat(&fd).map_err(|errno| failed(errno.into()))?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Socket {
        return Err(failed(io::Error::other("it is no socket")));
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_socket_is_reached_by_any_path_and_what_is_none_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let long = directory.path().join("c".repeat(60)).join("d".repeat(60));
        fs::create_dir_all(&long).unwrap();
        let (short, path) = (directory.path().join("s"), long.join("s"));
        let listener = std::os::unix::net::UnixListener::bind(&short).unwrap();
        fs::rename(&short, &path).unwrap();
        let socket = connect(&path).unwrap();
        let flags = rustix::fs::fcntl_getfl(&socket).unwrap();
        assert!(!flags.contains(OFlags::NONBLOCK), "the VMM decides about it");
        listener.accept().unwrap();
        drop(listener);
        for (absent, reason) in
            [(path, "refused"), (long.join("x"), "No such"), (long, "no socket")]
        {
            let error = connect(&absent).unwrap_err().to_string();
            assert!(error.starts_with("cannot use the vfio-user socket"), "{error}");
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_file_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let _socket = listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        assert!(listen(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }
}
