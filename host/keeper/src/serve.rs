//! The keeper's process.

use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, getrlimit, setrlimit};
use slipway_peer::{Bin, Peer};

use crate::wire::{self, BATCH, CLEAR, PUT, TAKE};
use crate::{SHELF, SLOTS};

/// Pause after accept(2) has failed for want of descriptors or memory.
const RETRY: Duration = Duration::from_millis(10);

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
/// `path`, on which nobody listens.
///
/// # Errors
/// The socket cannot be made, for example because another keeper listens there.
pub fn serve(path: &Path) -> std::io::Result<()> {
    raise_descriptor_limit();
    let mut table = Table::new();
    let listener = bind(path)?;
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

fn bind(path: &Path) -> std::io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)
        .map_err(|_| Error::new(ErrorKind::InvalidInput, "the path is too long for a socket"))?;
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let client = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    if rustix::net::connect(client, &address) == Err(Errno::CONNREFUSED) {
        std::fs::remove_file(path)?;
    }
    slipway_private::listen(path, kind, None, BACKLOG)
}

/// Raises the limit of descriptors as far as the system allows: a device has about a hundred.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
