//! Listening sockets.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Gid, Mode, Uid};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Listens at `path`, where only this process's user can connect, or the user `owner` (and root)
/// if there is one: nobody else can at any time. `backlog` is the most connections that wait to be
/// accepted. After an error no socket is left at the path.
///
/// # Errors
/// The errors of socket(2), bind(2), chown(2) and listen(2): something is at the path
/// (`EADDRINUSE`), or the path is longer than 107 bytes.
pub fn listen(
    path: &Path,
    kind: SocketType,
    owner: Option<u32>,
    backlog: i32,
) -> io::Result<OwnedFd> {
    let socket = bind(path, kind)?;
    let finished = give(path, owner).and_then(|()| Ok(rustix::net::listen(&socket, backlog)?));
    if finished.is_err() {
        let _ = std::fs::remove_file(path);
    }
    finished.map(|()| socket)
}

/// Listens at `path` as [`listen`] does for this process's user, for connections of streams. Must
/// be called within a tokio runtime that has I/O enabled.
///
/// # Errors
/// The errors of [`listen`]; the runtime cannot watch the socket.
#[cfg(feature = "tokio")]
pub fn listen_async(path: &Path, backlog: i32) -> io::Result<tokio::net::UnixListener> {
    let socket = listen(path, SocketType::STREAM, None, backlog)?;
    let listener = std::os::unix::net::UnixListener::from(socket);
    listener.set_nonblocking(true)?;
    tokio::net::UnixListener::from_std(listener)
}

/// Makes a socket at `path` that refuses connections until it listens.
fn bind(path: &Path, kind: SocketType) -> io::Result<OwnedFd> {
    let too_long = |_| {
        let why = "the path is too long for a socket: 107 bytes at most";
        io::Error::new(io::ErrorKind::InvalidInput, why)
    };
    let address = SocketAddrUnix::new(path).map_err(too_long)?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    // Before bind(2), which gives the socket's path this mode: the path never has another one.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &address)?;
    Ok(socket)
}

fn give(path: &Path, owner: Option<u32>) -> io::Result<()> {
    let Some(owner) = owner else { return Ok(()) };
    let (user, group) = (Uid::from_raw(owner), Gid::from_raw(owner));
    Ok(rustix::fs::chownat(CWD, path, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_bound_socket_is_closed_to_others_and_refuses_everybody_until_it_listens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let socket = bind(&path, SocketType::STREAM).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        let refused = UnixStream::connect(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        rustix::net::listen(&socket, 1).unwrap();
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_socket_is_its_owners_and_accepts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        // Only root can give the socket to another user.
        let uid = rustix::process::geteuid().as_raw();
        let uid = if uid == 0 { 7 } else { uid };
        let listener = listen(&path, SocketType::STREAM, Some(uid), 1).unwrap();
        let found = std::fs::metadata(&path).unwrap();
        assert_eq!((found.uid(), found.mode() & 0o7777), (uid, 0o600));
        let _client = UnixStream::connect(&path).unwrap();
        UnixListener::from(listener).accept().unwrap();
    }

    #[test]
    fn what_is_at_the_path_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "precious").unwrap();
        let error = listen(&path, SocketType::SEQPACKET, None, 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        let long = dir.path().join("x".repeat(200));
        let error = listen(&long, SocketType::STREAM, None, 1).unwrap_err().to_string();
        assert!(error.contains("too long"), "{error}");
    }
}
