//! How far the current message has come.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use slipway_ram::Lasting;

use crate::doorbells::SharedPage;
use crate::fault;
use crate::wire::{End, MAX_MESSAGE};

/// Calls that a reply may take: each sends some bytes of it.
const SENDS: usize = 60;
const HEADER: usize = size_of::<libc::mmsghdr>();
/// Words of state, then the headers that the kernel writes to; a page in all.
const HEADERS: usize = 128;
const HEAD: usize = 4096;
const REPLY: usize = (MAX_MESSAGE + 4096).next_multiple_of(4096);
pub(super) const LEN: usize = HEAD + REPLY;

const _: () = assert!(HEADERS + (SENDS + 1) * HEADER <= HEAD);

/// Words.
const STAGE: usize = 0;
/// Number of the current message, among those whose end is recorded.
const NUMBER: usize = 1;
/// Its length in the socket.
const SIZE: usize = 2;
const REPLY_LEN: usize = 3;
/// Writes done of a multiple write.
const DONE: usize = 4;

/// 1: the descriptor of the page of doorbells comes with the reply's first byte.
const PAGE: usize = 5;

/// Values of [`STAGE`].
const FRESH: u64 = 0;
const REPLYING: u64 = 1;
const MULTI: u64 = 2;

/// What is left to do for the current message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Nothing: the next one may be looked at.
    Done,
    /// The socket takes no more of the reply now.
    Blocked,
}

/// See the module's head.
pub(crate) struct Steps {
    memory: Lasting,
    scratch: Vec<u8>,
    /// What clients map.
    page: Option<Arc<SharedPage>>,
}

impl Steps {
    pub fn new(memory: Lasting) -> Self {
        // The kernel stores to this page within a call; a page that is there never fails it.
        // SAFETY: our own mapping, at least a page long.
        let _ = unsafe { rustix::mm::mlock(memory.as_ptr().cast(), HEAD) };
        Self { memory, scratch: Vec::new(), page: None }
    }

    /// Clients map this page.
    pub fn share(&mut self, page: Arc<SharedPage>) {
        self.page = Some(page);
    }

    /// A new client: whatever was is over.
    pub fn clear(&self) {
        self.set(NUMBER, self.number() + 1);
        self.set(STAGE, FRESH);
    }

    pub fn number(&self) -> u64 {
        self.get(NUMBER)
    }

    /// Whether the end of the current message is recorded: it is not to be applied.
    pub fn is_replying(&self) -> bool {
        self.get(STAGE) == REPLYING
    }

    /// Records how the current message, of `size` bytes, ends (step 4): with this reply, which brings
    /// the page of doorbells if `page`, or none.
    pub fn record(&self, size: usize, reply: &[&[u8]], page: bool) -> Result<(), End> {
        self.clear_counts();
        let len: usize = reply.iter().map(|part| part.len()).sum();
        if len > REPLY {
            return Err(End::Broken("a reply longer than a message"));
        }
        let mut at = self.memory.as_ptr().wrapping_add(HEAD);
        for part in reply {
            // SAFETY: `len` bytes fit the reply's area, which is ours alone.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), at, part.len()) };
            at = at.wrapping_add(part.len());
        }
        self.set(SIZE, size as u64);
        self.set(REPLY_LEN, len as u64);
        self.set(PAGE, page.into());
        self.set(STAGE, REPLYING);
        fault::point("recorded");
        Ok(())
    }

    /// Begins a multiple write of a message of `size` bytes, or goes on with it. Gives the number of
    /// writes that are done.
    pub fn begin_multi(&self, size: usize) -> usize {
        if self.get(STAGE) != MULTI {
            self.clear_counts();
            self.set(SIZE, size as u64);
            self.set(DONE, 0);
            self.set(STAGE, MULTI);
        }
        self.get(DONE) as usize
    }

    /// `done` writes of a multiple write are done.
    pub fn set_done(&self, done: usize) {
        self.set(DONE, done as u64);
        fault::point("multi");
    }

    /// Goes on with what is recorded: steps 5 and 6. Also what a successor begins with.
    pub fn go_on(&mut self, socket: BorrowedFd<'_>) -> Result<Progress, End> {
        match self.get(STAGE) {
            REPLYING => {
                if !self.is_consumed() && !self.send(socket)? {
                    return Ok(Progress::Blocked);
                }
                fault::point("replied");
                self.consume(socket)?;
            }
            MULTI if self.is_consumed() => self.over(),
            _ => {}
        }
        Ok(Progress::Done)
    }

    /// Ends a message that needs no record and has no reply.
    pub fn end_quietly(&mut self, socket: BorrowedFd<'_>, size: usize) -> Result<(), End> {
        if self.get(STAGE) == MULTI {
            return self.consume(socket);
        }
        self.scratch.resize(size.max(self.scratch.len()), 0);
        match rustix::net::recv(socket, &mut self.scratch[..size], rustix::net::RecvFlags::DONTWAIT)
        {
            Ok((count, _)) if count == size => Ok(()),
            Ok(_) | Err(Errno::AGAIN) => Err(End::Broken("a message came apart")),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the message off the socket; the kernel records that it was.
    fn consume(&mut self, socket: BorrowedFd<'_>) -> Result<(), End> {
        let size = self.get(SIZE) as usize;
        if !self.is_consumed() {
            self.scratch.resize(size.max(self.scratch.len()), 0);
            let mut part =
                libc::iovec { iov_base: self.scratch.as_mut_ptr().cast(), iov_len: size };
            let header = self.prepare(SENDS, &mut part);
            // SAFETY: the header lies in our mapping and refers to `part` and the scratch buffer,
            // which live through the call and have that length.
            let taken = unsafe {
                libc::recvmmsg(
                    socket.as_raw_fd(),
                    header,
                    1,
                    libc::MSG_DONTWAIT,
                    std::ptr::null_mut(),
                )
            };
            if taken < 0 {
                return Err(last_error().into());
            }
            if !self.is_consumed() {
                return Err(End::Broken("a message came apart"));
            }
        }
        fault::point("consumed");
        self.over();
        Ok(())
    }

    fn over(&self) {
        // In this order: a snapshot that has this number's effect must not count for the next.
        self.set(NUMBER, self.number() + 1);
        self.set(STAGE, FRESH);
    }

    /// Whether all of the reply was sent.
    fn send(&mut self, socket: BorrowedFd<'_>) -> Result<bool, End> {
        let len = self.get(REPLY_LEN) as usize;
        loop {
            let counts = (0..SENDS).map(|at| self.count(at)).take_while(|count| *count > 0);
            let (calls, sent) = counts.fold((0, 0), |(calls, sum), count| (calls + 1, sum + count));
            if sent >= len {
                return Ok(true);
            }
            if calls == SENDS {
                return Err(End::Broken("the client does not read its replies"));
            }
            let from = self.memory.as_ptr().wrapping_add(HEAD + sent);
            let mut part = libc::iovec { iov_base: from.cast(), iov_len: len - sent };
            let header = self.prepare(calls, &mut part);
            let mut control = Control([0; 24]);
            let file = match &self.page {
                Some(page) if sent == 0 && self.get(PAGE) == 1 => {
                    Some(page.file().map_err(|_| Errno::MFILE)?)
                }
                _ => None,
            };
            if let Some(file) = &file {
                control.attach(header, file);
            }
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            // SAFETY: the header lies in our mapping and refers to `part`, and that to the reply's
            // area, within its bounds, and to `control`; both live through the call.
            let outcome = unsafe { libc::sendmmsg(socket.as_raw_fd(), header, 1, flags) };
            if outcome < 0 {
                match last_error() {
                    Errno::AGAIN => return Ok(false),
                    Errno::INTR => {}
                    Errno::PIPE | Errno::CONNRESET => return Err(End::Closed),
                    other => return Err(other.into()),
                }
            }
        }
    }

    /// Header number `at`, for a call with one part. Its count stays as it is.
    fn prepare(&self, at: usize, part: &mut libc::iovec) -> *mut libc::mmsghdr {
        let header = self.header(at);
        // SAFETY: zeros are a valid header; the place is within our mapping and aligned; the count
        // is left alone.
        unsafe {
            let mut fresh: libc::msghdr = std::mem::zeroed();
            fresh.msg_iov = part;
            fresh.msg_iovlen = 1;
            (&raw mut (*header).msg_hdr).write(fresh);
        }
        header
    }

    fn header(&self, at: usize) -> *mut libc::mmsghdr {
        self.memory.as_ptr().wrapping_add(HEADERS + at * HEADER).cast()
    }

    /// What the kernel stored in header `at`.
    fn count(&self, at: usize) -> usize {
        // SAFETY: within our mapping, aligned; written by the kernel in a call of this thread, or
        // of a thread of a process that is no more.
        unsafe { (&raw const (*self.header(at)).msg_len).read_volatile() as usize }
    }

    fn clear_counts(&self) {
        for at in 0..=SENDS {
            // SAFETY: as above.
            unsafe { (&raw mut (*self.header(at)).msg_len).write_volatile(0) };
        }
    }

    fn is_consumed(&self) -> bool {
        self.count(SENDS) as u64 == self.get(SIZE)
    }

    fn get(&self, word: usize) -> u64 {
        self.memory.words()[word].load(Ordering::Acquire)
    }

    fn set(&self, word: usize, value: u64) {
        self.memory.words()[word].store(value, Ordering::Release);
    }
}

/// Room for one descriptor: a header of 16 bytes, the number, and what aligns the next header.
#[repr(C, align(8))]
struct Control([u8; 24]);

impl Control {
    /// Has the message of `header` bring a copy of `file`.
    fn attach(&mut self, header: *mut libc::mmsghdr, file: &OwnedFd) {
        let len = size_of::<libc::c_int>() as u32;
        // SAFETY: the header is in our mapping, and what it refers to is this buffer, which is
        // aligned and has room for a control message with one descriptor (CMSG_SPACE is 24).
        unsafe {
            let message = &raw mut (*header).msg_hdr;
            (*message).msg_control = self.0.as_mut_ptr().cast();
            (*message).msg_controllen = libc::CMSG_SPACE(len) as _;
            let first = libc::CMSG_FIRSTHDR(message);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(len) as _;
            libc::CMSG_DATA(first).cast::<libc::c_int>().write_unaligned(file.as_raw_fd());
        }
    }
}

// SAFETY: computes a number.
const _: () = assert!(unsafe { libc::CMSG_SPACE(size_of::<libc::c_int>() as u32) } == 24);

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
