//! The keeper's process.

use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SocketFlags, SocketType};
use rustix::process::{Resource, getrlimit, setrlimit};
use slipway_lock::Lock;
use slipway_peer::{Bin, Peer};

use crate::wire::{self, BATCH, CLEAR, PUT, TAKE};
use crate::{Keeper, SHELF, SLOTS};

/// Pause after accept(2) has failed for want of descriptors or memory.
const RETRY: Duration = Duration::from_millis(10);

/// The longest wait for a keeper that has the lock and does not listen: it has just begun, or is
/// about to end.
const TAKEOVER: Duration = Duration::from_secs(60);

/// The pause between two looks at such a keeper.
const LOOK: Duration = Duration::from_millis(10);

/// The number of daemons that may wait for the keeper.
const BACKLOG: i32 = 4;

/// The descriptors that the keeper holds.
struct Table {
    slots: Box<[Option<OwnedFd>]>,
    shelves: Box<[ShelfState]>,
    held: usize,
}

/// The state of one shelf.
#[derive(Default)]
struct ShelfState {
    files: usize,
    /// The bin through which descriptors of this shelf are closed.
    bin: Bin,
}

impl Table {
    fn new() -> Self {
        let shelves = (0..SLOTS / SHELF).map(|_| ShelfState::default()).collect();
        Self { slots: (0..SLOTS).map(|_| None).collect(), shelves, held: 0 }
    }

    /// Replaces the descriptor in a slot. If the slot does not exist, `file` is closed. Closing is
    /// done by a disposal thread: it may take as long as the endpoint's client likes.
    fn set(&mut self, slot: u32, file: Option<OwnedFd>) {
        let place = self.slots.get_mut(slot as usize);
        let shelf = self.shelves.get_mut((slot / SHELF) as usize);
        let (Some(place), Some(shelf)) = (place, shelf) else {
            return file.into_iter().for_each(|file| Bin::new().discard(file));
        };
        shelf.files += usize::from(file.is_some());
        self.held += usize::from(file.is_some());
        let Some(old) = std::mem::replace(place, file) else { return };
        shelf.files -= 1;
        self.held -= 1;
        shelf.bin.discard(old);
        if shelf.files == 0 {
            // The next endpoint on this shelf is another peer and must not wait behind this one.
            shelf.bin = Bin::new();
        }
    }

    fn send_all(&self, to: BorrowedFd<'_>) -> Result<(), Errno> {
        let mut numbers = [0u8; BATCH * 4];
        let mut files = [to; BATCH];
        let mut count = 0;
        for (slot, file) in self.slots.iter().enumerate() {
            let Some(file) = file else { continue };
            numbers[count * 4..][..4].copy_from_slice(&(slot as u32).to_ne_bytes());
            files[count] = file.as_fd();
            count += 1;
            if count == BATCH {
                wire::send(to, &numbers, &files)?;
                count = 0;
            }
        }
        if count > 0 {
            wire::send(to, &numbers[..count * 4], &files[..count])?;
        }
        // A packet that names no slot ends the list.
        wire::send(to, &u32::MAX.to_ne_bytes(), &[])
    }
}

/// Serves at `path` until no client is connected and nothing is held. Replaces a stale socket at
/// `path`, on which nobody listens. Meanwhile the process holds a lock beside the socket: a file
/// with the extension `lock` in place of the socket's.
///
/// # Errors
/// `AddrInUse` if another keeper listens there; the socket or its lock cannot be made.
pub fn serve(path: &Path) -> std::io::Result<()> {
    raise_descriptor_limit();
    let mut table = Table::new();
    // Declared before the listener, so released after it: the next keeper finds no socket.
    let _lock = take_over(path, TAKEOVER)?;
    let listener = listen(path)?;
    // A client without a request only checks whether a keeper is there, which is no reason to end.
    let mut asked = false;
    loop {
        let client = match rustix::net::accept_with(&listener, SocketFlags::CLOEXEC) {
            Ok(client) => client,
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                // If this process ended, it would lose what it holds.
                std::thread::sleep(RETRY);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let bin = Bin::new();
        // An error ends this client only; the descriptors that it put stay.
        if Peer::of(&client).is_ok_and(|peer| peer.uid == rustix::process::geteuid().as_raw()) {
            let _ = serve_client(client.as_fd(), &mut table, &bin, &mut asked);
        }
        // Unread messages of the client are closed with its connection.
        bin.discard(client);
        if asked && table.held == 0 && !waits(&listener) {
            let _ = std::fs::remove_file(path);
            return Ok(());
        }
    }
}

/// Serves one client until it hangs up. Descriptors that it sends and that are not kept go to
/// `bin`. Sets `asked` if it makes a request.
fn serve_client(
    client: BorrowedFd<'_>,
    table: &mut Table,
    bin: &Bin,
    asked: &mut bool,
) -> Result<(), Errno> {
    loop {
        let mut request = [0u8; 8];
        let (count, mut files) = wire::receive(client, &mut request, bin)?;
        if count != request.len() {
            return Ok(());
        }
        *asked = true;
        let word = |at: usize| {
            u32::from_ne_bytes([request[at], request[at + 1], request[at + 2], request[at + 3]])
        };
        match (word(0), files.pop()) {
            // From here on the descriptor is closed through its shelf's bin.
            (PUT, Some(file)) => table.set(word(4), Some(file.into_owned())),
            (CLEAR, _) => table.set(word(4), None),
            (TAKE, _) => table.send_all(client)?,
            _ => return Ok(()),
        }
    }
}

/// Returns whether another client waits in the backlog.
fn waits(listener: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut polled = [PollFd::new(listener, PollFlags::IN)];
    rustix::event::poll(&mut polled, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Takes the lock of the keeper at `path`. Without it, two keepers that begin at once could each
/// take the other one's socket for a stale one: a socket refuses connections before it listens.
/// Waits up to `patience` for a keeper that has the lock and does not listen.
///
/// # Errors
/// `AddrInUse` if another keeper listens at `path`; the lock cannot be taken.
fn take_over(path: &Path, patience: Duration) -> std::io::Result<Lock> {
    let (lock, begun) = (path.with_extension("lock"), Instant::now());
    loop {
        match Lock::try_take(&lock) {
            // Keepers of earlier versions hold no lock.
            Ok(_) | Err(slipway_lock::Error::Held { .. }) if Keeper::is_there(path) => {
                return Err(Error::new(ErrorKind::AddrInUse, "another keeper listens there"));
            }
            Ok(lock) => return Ok(lock),
            Err(slipway_lock::Error::Held { .. }) if begun.elapsed() < patience => {
                std::thread::sleep(LOOK);
            }
            Err(error) => return Err(Error::other(error)),
        }
    }
}

/// Listens at `path`, where the socket of a keeper that was killed may be. The caller has the lock.
fn listen(path: &Path) -> std::io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    slipway_private::listen(path, SocketType::SEQPACKET, None, BACKLOG)
}

/// Raises the limit of descriptors as far as the system allows: a device has about a hundred.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use rustix::net::{AddressFamily, SocketAddrUnix};

    use super::*;

    #[test]
    fn a_socket_that_does_not_listen_yet_is_not_taken_for_a_stale_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keeper.sock");
        // A keeper between bind(2) and listen(2).
        let lock = take_over(&path, Duration::ZERO).unwrap();
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        let bound = std::fs::metadata(&path).unwrap().ino();
        assert!(!Keeper::is_there(&path));
        let error = take_over(&path, Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("keeper.lock is locked by"), "{error}");
        assert_eq!(std::fs::metadata(&path).unwrap().ino(), bound);
        rustix::net::listen(&socket, BACKLOG).unwrap();
        let error = take_over(&path, TAKEOVER).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
        // A keeper of an earlier version holds no lock.
        drop(lock);
        let error = take_over(&path, TAKEOVER).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
        assert_eq!(std::fs::metadata(&path).unwrap().ino(), bound);
        // A keeper that was killed leaves its socket.
        drop(socket);
        let _lock = take_over(&path, Duration::ZERO).unwrap();
        let _listener = listen(&path).unwrap();
        assert!(Keeper::is_there(&path));
    }
}
