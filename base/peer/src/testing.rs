//! The means of tests that play hostile peers.

use std::io::{ErrorKind, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

/// Longer than any test.
const HOUR: Duration = Duration::from_secs(3600);

/// Returns a TCP socket whose last close lasts an hour, wherever that is, since it holds bytes that
/// its other end never takes; and that other end, which keeps the close from ending earlier.
///
/// # Errors
/// What the kernel says: there is no loopback interface, or no descriptor left.
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
