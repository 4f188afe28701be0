//! A message that does not fit the socket: its beginning is read from the socket and held in
//! lasting memory.
//!
//! A message stays in the socket until its effect is safe, so all of it must have arrived first.
//! But the amount that a socket holds is bounded by the *sender's* buffer, which the client
//! controls: about 200 KiB by default, where a message may have 1 MiB. A client that sends a larger
//! message would wait for the server to read, and the server for the rest.
//!
//! So such a message is read, part by part, into memory that outlives the process. The kernel
//! records how much of it has arrived, within the call that reads: recvmmsg(2) stores the number of
//! bytes into the message header that it is given, which lies in this memory (see the head of
//! [`super`]). Two headers take turns. Before each call, the other header's total is set to the
//! bytes that have arrived and its count to zero, and then one store makes it the valid one. So at
//! every instant the total is the number of bytes that were read.
//!
//! A held part belongs to one message number and is invalid for any other: when the number rises,
//! the held message has ended like any other message.
//!
//! Messages with descriptors are small and never held, since a descriptor arrives with a byte of
//! the stream.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use slipway_peer::Bin;
use slipway_ram::Lasting;
use slipway_vfio_user_spec::{HEADER_LEN, Header};
use zerocopy::FromBytes;

use super::call::{Descriptors, HEADER, last_error, prepare};
use crate::fault;
use slipway_vfio_user_wire::{End, MAX_MESSAGE, Message};

/// A page of state, then the message.
const HEAD: usize = 4096;
pub(super) const LEN: usize = HEAD + MAX_MESSAGE.next_multiple_of(4096);

/// Words: the message's number and its length.
const NUMBER: usize = 0;
const SIZE: usize = 1;
/// Words: the index of the valid header, and for each header the bytes that had been read before
/// its call.
const WHICH: usize = 2;
const BEFORE: [usize; 2] = [3, 4];
/// The offset of the headers in bytes.
const HEADERS: usize = 64;

/// The number of no message: nothing is held.
const NONE: u64 = u64::MAX;

/// The beginning of a message that does not fit the socket, in lasting memory.
pub(super) struct Inbox(Lasting);

impl Inbox {
    pub fn new(memory: Lasting) -> Self {
        // The kernel stores to this page within a call; with the page resident the store cannot
        // fault.
        // SAFETY: our own mapping, at least a page long.
        let _ = unsafe { rustix::mm::mlock(memory.as_ptr().cast(), HEAD) };
        Self(memory)
    }

    /// Returns whether a part of message `number` is held.
    pub fn holds(&self, number: u64) -> bool {
        let size = self.get(SIZE) as usize;
        self.get(NUMBER) == number && (HEADER_LEN..=MAX_MESSAGE).contains(&size)
    }

    /// Begins to hold message `number`, of `size` bytes, at most [`MAX_MESSAGE`].
    pub fn begin(&self, number: u64, size: usize) {
        self.set(NUMBER, NONE);
        self.turn(0, 0);
        self.set(SIZE, size as u64);
        self.set(NUMBER, number);
    }

    /// Reads more of the held message. Returns all of it, or `None` if the rest has not arrived.
    pub fn take(&self, socket: BorrowedFd<'_>, bin: &Bin) -> Result<Option<Message>, End> {
        let size = self.get(SIZE) as usize;
        loop {
            let here = self.received();
            if here > size {
                return Err(End::Broken("more of a message was kept than it has"));
            }
            if here == size {
                return self.message(size).map(Some);
            }
            let which = 1 - self.which();
            self.turn(which, here);
            match self.read(socket, (which, here, size), bin) {
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Err(End::Closed),
                Err(error) => return Err(error.into()),
                Ok(true) => {
                    return Err(End::Broken("descriptors with a message that comes in parts"));
                }
                Ok(false) if self.received() == here => {
                    return Err(End::Broken("the client hung up within a message"));
                }
                Ok(false) => fault::point("part"),
            }
        }
    }

    /// Reads the bytes that have arrived, and returns whether descriptors came with them.
    fn read(
        &self,
        socket: BorrowedFd<'_>,
        (which, here, size): (usize, usize, usize),
        bin: &Bin,
    ) -> Result<bool, Errno> {
        let into = self.0.as_ptr().wrapping_add(HEAD + here);
        let mut part = libc::iovec { iov_base: into.cast(), iov_len: size - here };
        // SAFETY: the header is in our mapping, aligned, and not used by anybody else.
        let header = unsafe { prepare(self.header(which), &mut part) };
        let mut control = Descriptors::new();
        control.attach(header);
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        #[allow(
            clippy::disallowed_methods,
            reason = "the kernel notes in lasting memory what was read; there is room for all \
                descriptors"
        )]
        // SAFETY: the header refers to `part` and `control`, which live through the call, and
        // `part` to bytes of our mapping: `here` and `size` are at most [`MAX_MESSAGE`].
        let taken =
            unsafe { libc::recvmmsg(socket.as_raw_fd(), header, 1, flags, std::ptr::null_mut()) };
        if taken < 0 {
            return Err(last_error());
        }
        // SAFETY: filled by the call just made, and read once.
        Ok(unsafe { control.discard(header, bin) } > 0)
    }

    fn message(&self, size: usize) -> Result<Message, End> {
        let mut bytes = vec![0; size];
        let from = self.0.as_ptr().wrapping_add(HEAD);
        // SAFETY: `size` is at most [`MAX_MESSAGE`], which fits our mapping; no call writes there
        // now.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), size) };
        let payload = bytes.split_off(HEADER_LEN);
        let header = Header::read_from_bytes(&bytes).unwrap_or_default();
        if header.size.get() as usize != size {
            return Err(End::Broken("a message of another length than was announced"));
        }
        Ok(Message { header, payload, files: Vec::new(), excess: false })
    }

    /// Makes header `which` the valid one, with `before` bytes read before its call.
    fn turn(&self, which: usize, before: usize) {
        self.set(BEFORE[which], before as u64);
        // SAFETY: within our mapping, aligned.
        unsafe { (&raw mut (*self.header(which)).msg_len).write_volatile(0) };
        self.set(WHICH, which as u64);
    }

    fn received(&self) -> usize {
        let which = self.which();
        // SAFETY: within our mapping, aligned; written by the kernel in a call of this thread, or
        // of a thread of a process that has ended.
        let count = unsafe { (&raw const (*self.header(which)).msg_len).read_volatile() };
        (self.get(BEFORE[which]) as usize).saturating_add(count as usize)
    }

    fn which(&self) -> usize {
        usize::from(self.get(WHICH) == 1)
    }

    fn header(&self, at: usize) -> *mut libc::mmsghdr {
        self.0.as_ptr().wrapping_add(HEADERS + at * HEADER).cast()
    }

    fn get(&self, word: usize) -> u64 {
        self.0.words()[word].load(Ordering::Acquire)
    }

    fn set(&self, word: usize, value: u64) {
        self.0.words()[word].store(value, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use slipway_vfio_user_spec::Command;
    use zerocopy::IntoBytes;

    use super::*;

    fn message(len: usize) -> Vec<u8> {
        let header = Header::command(7, Command::RegionWrite, len);
        let payload = (0..len).map(|at| (at * 31 % 251) as u8);
        header.as_bytes().iter().copied().chain(payload).collect()
    }

    #[test]
    fn a_message_that_no_socket_holds_arrives_whole_whoever_reads_its_parts() {
        let (ours, mut clients) = UnixStream::pair().unwrap();
        let sent = message(MAX_MESSAGE - HEADER_LEN);
        let memory = Lasting::heap(LEN);
        Inbox::new(memory.clone()).begin(3, sent.len());
        clients.set_nonblocking(true).unwrap();
        let mut fits = 0;
        while let Ok(more) = clients.write(&sent[fits..]) {
            fits += more;
        }
        assert!(fits < sent.len(), "a socket holds it");
        assert!(Inbox::new(memory.clone()).take(ours.as_fd(), &Bin::new()).unwrap().is_none());
        clients.set_nonblocking(false).unwrap();
        let sending = {
            let rest = sent[fits..].to_vec();
            std::thread::spawn(move || clients.write_all(&rest).unwrap())
        };
        let got = loop {
            // A new inbox each time, as in another process.
            let inbox = Inbox::new(memory.clone());
            assert!(inbox.holds(3) && !inbox.holds(2) && !inbox.holds(4));
            if let Some(got) = inbox.take(ours.as_fd(), &Bin::new()).unwrap() {
                break got;
            }
            std::thread::yield_now();
        };
        sending.join().unwrap();
        assert!(got.payload == sent[HEADER_LEN..] && got.files.is_empty());
        // A repeated call returns the message again.
        let again = Inbox::new(memory).take(ours.as_fd(), &Bin::new()).unwrap().unwrap();
        assert!(again.payload == got.payload);
    }

    #[test]
    fn what_a_killed_reader_read_counts_once() {
        let (ours, mut clients) = UnixStream::pair().unwrap();
        let sent = message(100);
        let memory = Lasting::heap(LEN);
        let inbox = Inbox::new(memory.clone());
        inbox.begin(0, sent.len());
        clients.write_all(&sent[..40]).unwrap();
        assert!(inbox.take(ours.as_fd(), &Bin::new()).unwrap().is_none());
        assert_eq!(inbox.received(), 40);
        // Killed after it selected the other header, and before it read.
        inbox.turn(1 - inbox.which(), 40);
        assert_eq!(Inbox::new(memory.clone()).received(), 40);
        clients.write_all(&sent[40..]).unwrap();
        let got = Inbox::new(memory).take(ours.as_fd(), &Bin::new()).unwrap().unwrap();
        assert_eq!(got.payload, sent[HEADER_LEN..]);
    }

    #[test]
    fn a_client_that_hangs_up_within_a_message_ends_it() {
        let (ours, mut clients) = UnixStream::pair().unwrap();
        let inbox = Inbox::new(Lasting::heap(LEN));
        inbox.begin(0, 100);
        clients.write_all(&message(84)[..50]).unwrap();
        drop(clients);
        let ended = inbox.take(ours.as_fd(), &Bin::new());
        assert!(matches!(ended, Err(End::Broken(_))), "{ended:?}");
    }

    #[test]
    fn what_was_left_in_it_is_checked() {
        let (ours, _clients) = UnixStream::pair().unwrap();
        let inbox = Inbox::new(Lasting::heap(LEN));
        assert!(!inbox.holds(0), "nothing was ever there");
        inbox.begin(0, 100);
        inbox.set(SIZE, u64::MAX);
        assert!(!inbox.holds(0));
        inbox.begin(0, 100);
        inbox.set(BEFORE[0], u64::MAX);
        assert!(inbox.take(ours.as_fd(), &Bin::new()).is_err());
    }
}
