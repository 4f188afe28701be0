//! The process.

use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, getrlimit, setrlimit};
use slipway_peer::Peer;

use crate::SLOTS;
use crate::wire::{self, BATCH, CLEAR, PUT, TAKE};

/// What it holds.
struct Table {
    slots: Box<[Option<OwnedFd>]>,
    held: usize,
}

impl Table {
    fn new() -> Self {
        Self { slots: (0..SLOTS).map(|_| None).collect(), held: 0 }
    }

    /// Replaces what is in a slot; a slot that does not exist closes the descriptor.
    fn set(&mut self, slot: u32, file: Option<OwnedFd>) {
        let Some(place) = self.slots.get_mut(slot as usize) else { return };
        self.held += usize::from(file.is_some());
        self.held -= usize::from(place.is_some());
        *place = file;
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
        // A packet that names no slot: the end.
        wire::send(to, &u32::MAX.to_ne_bytes(), &[])
    }
}

/// Serves at `path`, until nobody is connected and nothing is held. A socket of this name that
/// nobody listens on is replaced.
///
/// # Errors
/// The socket cannot be made, for example because another keeper listens there.
pub fn serve(path: &Path) -> std::io::Result<()> {
    raise_descriptor_limit();
    let mut table = Table::new();
    let listener = bind(path)?;
    // Who asks nothing only looks whether a keeper is there, which is no reason to end.
    let mut asked = false;
    loop {
        let client = match rustix::net::accept_with(&listener, SocketFlags::CLOEXEC) {
            Ok(client) => client,
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            Err(error) => return Err(error.into()),
        };
        // A client that breaks off has ended; what it put stays.
        if Peer::of(&client).is_ok_and(|peer| peer.uid == rustix::process::geteuid().as_raw()) {
            let _ = attend(client.as_fd(), &mut table, &mut asked);
        }
        drop(client);
        if asked && table.held == 0 && !waits(&listener) {
            let _ = std::fs::remove_file(path);
            return Ok(());
        }
    }
}

/// One client, until it hangs up. `asked`: it made a request.
fn attend(client: BorrowedFd<'_>, table: &mut Table, asked: &mut bool) -> Result<(), Errno> {
    loop {
        let mut request = [0u8; 8];
        let mut came = None;
        // More than one descriptor: all but the last are closed here.
        let count = wire::receive(client, &mut request, |file| came = Some(file))?;
        if count != request.len() {
            return Ok(());
        }
        *asked = true;
        let word = |at: usize| {
            u32::from_ne_bytes([request[at], request[at + 1], request[at + 2], request[at + 3]])
        };
        match word(0) {
            PUT if came.is_some() => table.set(word(4), came),
            CLEAR => table.set(word(4), None),
            TAKE => table.send_all(client)?,
            _ => return Ok(()),
        }
    }
}

/// Whether somebody has connected already.
fn waits(listener: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut polled = [PollFd::new(listener, PollFlags::IN)];
    rustix::event::poll(&mut polled, Some(&now)).is_ok_and(|ready| ready > 0)
}

fn bind(path: &Path) -> std::io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)
        .map_err(|_| Error::new(ErrorKind::InvalidInput, "the path is too long for a socket"))?;
    let socket = || {
        let kind = SocketType::SEQPACKET;
        rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
    };
    if rustix::net::connect(socket()?, &address) == Err(Errno::CONNREFUSED) {
        std::fs::remove_file(path)?;
    }
    let listener = socket()?;
    // The name gets this mode: nobody else may connect.
    rustix::fs::fchmod(&listener, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&listener, &address)?;
    rustix::net::listen(&listener, 4)?;
    Ok(listener)
}

/// As many as the system allows: a device has about a hundred.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
