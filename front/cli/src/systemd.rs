//! Messages to the service manager that started this program.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

/// Reports to the service manager that this program serves, if it asked for that (sd_notify(3)).
pub fn ready() {
    if let Some(path) = std::env::var_os("NOTIFY_SOCKET") {
        tell(&path);
    }
}

/// Tells the socket at `path`, or with this abstract name if it begins with `@`. A manager that is
/// not there is no reason not to serve.
fn tell(path: &OsStr) {
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name),
        None => SocketAddrUnix::new(path),
    };
    // A manager that does not read must not hold up this program.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None);
    if let (Ok(address), Ok(socket)) = (address, socket) {
        let _ = rustix::net::sendto(&socket, b"READY=1", SendFlags::NOSIGNAL, &address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manager_is_told_at_its_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        tell(path.as_os_str());
        let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        tell(path.as_os_str());
        let mut text = [0; 16];
        let count = manager.recv(&mut text).unwrap();
        assert_eq!(&text[..count], b"READY=1");
    }
}
