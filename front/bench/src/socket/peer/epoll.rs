//! Waits for many connections, by the C library's epoll.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result};

use super::connection::{Connection, is_early};

/// The most events taken in a call.
const EVENTS: usize = 256;

/// Readable.
pub const IN: u32 = libc::EPOLLIN as u32;
/// Writable.
pub const OUT: u32 = libc::EPOLLOUT as u32;
/// Report a connection once when it becomes ready.
pub const EDGE: u32 = libc::EPOLLET as u32;

/// An epoll set.
pub struct Epoll {
    fd: OwnedFd,
    events: Vec<libc::epoll_event>,
}

impl Epoll {
    /// Makes a set of `connections`, which become non-blocking and are known by their indexes.
    pub fn of(connections: &mut [Connection], events: u32) -> Result<Self> {
        #[allow(unsafe_code)] // a preloaded library must see the call
        // SAFETY: no memory is passed; the descriptor is new and has no other owner.
        let fd = unsafe {
            let fd = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error()).context("epoll_create1");
            }
            OwnedFd::from_raw_fd(fd)
        };
        let none = libc::epoll_event { events: 0, u64: 0 };
        let epoll = Self { fd, events: vec![none; EVENTS] };
        for (at, connection) in (0..).zip(connections) {
            connection.set_nonblocking(true)?;
            let mut event = libc::epoll_event { events, u64: at };
            #[allow(unsafe_code)] // a preloaded library must see the call
            // SAFETY: the event is valid for the length of the call.
            let result = unsafe {
                libc::epoll_ctl(
                    epoll.fd.as_raw_fd(),
                    libc::EPOLL_CTL_ADD,
                    connection.as_fd().as_raw_fd(),
                    &raw mut event,
                )
            };
            if result < 0 {
                return Err(io::Error::last_os_error()).context("epoll_ctl");
            }
        }
        Ok(epoll)
    }

    /// Waits until connections are ready. Returns the index and the events of each, or nothing
    /// after `timeout_ms`; -1 waits for ever.
    pub fn wait(&mut self, timeout_ms: i32) -> Result<impl Iterator<Item = (usize, u32)> + '_> {
        let count = loop {
            #[allow(unsafe_code)] // a preloaded library must see the call
            // SAFETY: there is room for as many events as are asked for.
            let count = unsafe {
                libc::epoll_wait(
                    self.fd.as_raw_fd(),
                    self.events.as_mut_ptr(),
                    EVENTS as i32,
                    timeout_ms,
                )
            };
            match usize::try_from(count) {
                Ok(count) => break count,
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error).context("epoll_wait");
                    }
                }
            }
        };
        Ok(self.events.iter().take(count).map(|event| (event.u64 as usize, event.events)))
    }
}

/// Waits until every connection has ended.
pub fn until_all_ended(connections: Vec<Connection>) -> Result<()> {
    let mut connections = connections;
    let mut epoll = Epoll::of(&mut connections, IN)?;
    let mut open: Vec<Option<Connection>> = connections.into_iter().map(Some).collect();
    let (mut left, mut buffer) = (open.len(), [0; 64]);
    while left > 0 {
        for (at, _) in epoll.wait(-1)? {
            let Some(connection) = open.get_mut(at).and_then(Option::as_mut) else { continue };
            match connection.receive(&mut buffer) {
                Ok(count) if count > 0 => {}
                Err(error) if is_early(&error) => {}
                _ => {
                    open[at] = None;
                    left -= 1;
                }
            }
        }
    }
    Ok(())
}
