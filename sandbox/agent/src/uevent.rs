//! Waiting for devices to appear: the kernel's uevents (netlink(7), NETLINK_KOBJECT_UEVENT) tell
//! when to look again, and sysfs tells which devices exist.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep, timeout_at};

/// The longest time between two looks. An event may precede the attribute files of its device, and
/// a burst may overflow the socket, so the code looks again even without an event.
const TICK: Duration = Duration::from_millis(20);

/// Calls `probe` now, and again after every device event, until it finds something or fails.
/// Returns `None` after `patience`.
pub async fn wait_for<T, E>(
    patience: Duration,
    mut probe: impl FnMut() -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    if let Some(found) = probe()? {
        return Ok(Some(found));
    }
    let deadline = Instant::now() + patience;
    // Without events (in a network namespace that gets none), the tick alone triggers new looks.
    let events = subscribe().ok();
    loop {
        if let Some(found) = probe()? {
            return Ok(Some(found));
        }
        if timeout_at(deadline, next(events.as_ref())).await.is_err() {
            return probe();
        }
    }
}

fn subscribe() -> std::io::Result<AsyncFd<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let kind = SocketType::DGRAM;
    let socket = socket_with(AddressFamily::NETLINK, kind, flags, Some(KOBJECT_UEVENT))?;
    bind(&socket, &SocketAddrNetlink::new(0, 1))?;
    crate::file::register(socket, Interest::READABLE)
}

/// Returns after one or more events, or after [`TICK`].
async fn next(events: Option<&AsyncFd<OwnedFd>>) {
    let Some(events) = events else { return sleep(TICK).await };
    tokio::select! {
        () = sleep(TICK) => {}
        ready = events.readable() => {
            let mut message = [0u8; 1];
            // The content of an event does not matter; a datagram is removed even if it is read in
            // part.
            #[allow(clippy::disallowed_methods, reason = "a netlink socket's peer is the kernel")]
            while recv(events.get_ref(), &mut message, RecvFlags::empty()).is_ok() {}
            if let Ok(mut guard) = ready {
                guard.clear_ready();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_probe_is_repeated_until_it_finds_or_fails() {
        let mut calls = 0;
        let found = wait_for(Duration::from_secs(60), || {
            calls += 1;
            Ok::<_, ()>((calls == 4).then_some("here"))
        });
        assert_eq!(found.await, Ok(Some("here")));
        assert_eq!(calls, 4);
        assert_eq!(wait_for(Duration::ZERO, || Ok::<Option<()>, ()>(None)).await, Ok(None));
        assert_eq!(wait_for::<(), _>(Duration::from_secs(60), || Err("no")).await, Err("no"));
    }
}
