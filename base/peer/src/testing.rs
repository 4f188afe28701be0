//! Helpers for tests that play hostile peers.

use std::io::{ErrorKind, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

/// Longer than any test.
const HOUR: Duration = Duration::from_secs(3600);

/// Returns a TCP socket and its other end. The last close of the first lasts an hour, in whichever
/// thread it happens, because the socket holds bytes that the other end never reads. Keep the other
/// end: without it, the close ends earlier.
///
/// # Errors
/// The kernel's error: there is no loopback interface, or no descriptor left.
pub fn lingering() -> Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut socket = TcpStream::connect(listener.local_addr()?)?;
    let (other, _) = listener.accept()?;
    socket.set_nonblocking(true)?;
    let full = loop {
        if let Err(error) = socket.write(&[0; 65536]) {
            break error;
        }
    };
    socket.set_nonblocking(false)?;
    set_socket_linger(&socket, Some(HOUR))?;
    if full.kind() == ErrorKind::WouldBlock { Ok((socket, other)) } else { Err(full) }
}
