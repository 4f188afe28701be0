//! The progress of the current message, in lasting memory.

use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::net::RecvFlags;
use slipway_peer::Bin;
use slipway_ram::Lasting;

use super::call::{Control, Descriptors, HEADER, last_error, prepare};
use super::inbox::Inbox;
use crate::doorbells::SharedPage;
use crate::fault;
use slipway_vfio_user_wire::{End, MAX_MESSAGE, Message};

/// The largest number of calls that send a reply; each sends some bytes of it.
const SENDS: usize = 60;
/// The offset in bytes of the message headers that the kernel writes to; the words lie before them.
const HEADERS: usize = 128;
/// The size in bytes of words and headers: a page, which is locked in memory. The reply follows it.
const HEAD: usize = 4096;
/// The most bytes of a reply: as much as a message may have, and a page more.
const REPLY: usize = (MAX_MESSAGE + 4096).next_multiple_of(4096);
/// The size in bytes of the journal's lasting memory: words and headers, then the reply.
pub(super) const LEN: usize = HEAD + REPLY;

const _: () = assert!(ATTACHMENTS < HEADERS / size_of::<u64>());
const _: () = assert!(HEADERS + (SENDS + 1) * HEADER <= HEAD);

/// The index of the word with the [`Stage`] of the current message.
const STAGE: usize = 0;
/// The index of the word with the number of the current message: of the messages that have ended.
const NUMBER: usize = 1;
/// The index of the word with the length of the current message in the socket, in bytes.
const SIZE: usize = 2;
/// The index of the word with the length of the recorded reply in bytes; 0 for no reply.
const REPLY_LEN: usize = 3;
/// The index of the word with the number of writes done of a multiple write.
const DONE: usize = 4;
/// The index of the word with the [`Attachments`] that are sent with the reply's first byte.
const ATTACHMENTS: usize = 5;

/// The record of the current message. The numbers are those in lasting memory: another meaning of
/// one raises `LAYOUT` of [`super`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing is recorded: a successor applies the message from its beginning.
    Fresh = 0,
    /// The message was applied, and its reply is recorded: it is sent, and the message consumed.
    Replying = 1,
    /// A multiple write has begun: the word [`DONE`] counts the writes that are not repeated.
    MultipleWrite = 2,
}

impl Stage {
    /// Returns the stage of a word. An unknown word, which no version wrote, is as fresh memory.
    fn from_word(word: u64) -> Self {
        [Self::Replying, Self::MultipleWrite]
            .into_iter()
            .find(|stage| *stage as u64 == word)
            .unwrap_or(Self::Fresh)
    }
}

/// The result of continuing with the current message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Nothing is left to do for the message; the next one may be read.
    Done,
    /// The socket accepts no more of the reply at present.
    Blocked,
}

/// The descriptors that a reply carries, in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attachments {
    /// The eventfd that the client raises.
    pub bell: bool,
    /// The doorbell page.
    pub page: bool,
}

impl Attachments {
    fn word(self) -> u64 {
        u64::from(self.page) | u64::from(self.bell) << 1
    }

    fn from_word(word: u64) -> Self {
        Self { page: word & 1 != 0, bell: word & 2 != 0 }
    }
}

/// The steps of the current message, recorded so that a successor can continue with them.
pub(crate) struct MessageJournal {
    memory: Lasting,
    /// The beginning of a message that does not fit the socket.
    inbox: Inbox,
    /// The buffer for messages that are read from the socket to consume them.
    scratch: Vec<u8>,
    /// The doorbell page that clients map.
    page: Option<Arc<SharedPage>>,
    /// The eventfd that the client raises.
    bell: Option<Arc<OwnedFd>>,
    /// The bin that closes descriptors of consumed messages.
    bin: Bin,
}

impl MessageJournal {
    /// Opens the journal in `memory`, of [`LEN`] bytes: a new one if they are zero, and otherwise a
    /// predecessor's. The same holds for `inbox`.
    pub fn new(memory: Lasting, inbox: Lasting, bin: &Bin) -> Self {
        // The kernel stores to this page within a call; with the page resident the store cannot
        // fault.
        // SAFETY: our own mapping, at least a page long.
        let _ = unsafe { rustix::mm::mlock(memory.as_ptr().cast(), HEAD) };
        let inbox = Inbox::new(inbox);
        Self { memory, inbox, scratch: Vec::new(), page: None, bell: None, bin: bin.clone() }
    }

    /// Sets the doorbell page, whose descriptor replies carry.
    pub fn share(&mut self, page: Arc<SharedPage>) {
        self.page = Some(page);
    }

    /// Sets the eventfd that replies carry.
    pub fn hang(&mut self, bell: Arc<OwnedFd>) {
        self.bell = Some(bell);
    }

    /// Ends the current message without a trace, for a new client.
    pub fn clear(&mut self) {
        self.bell = None;
        self.over();
    }

    /// Returns the number of the current message: how many messages have ended before it, over all
    /// clients of the endpoint.
    pub fn number(&self) -> u64 {
        self.get(NUMBER)
    }

    /// Returns whether the current message is held: its first part is no longer in the socket.
    pub fn holds(&self) -> bool {
        self.inbox.holds(self.number())
    }

    /// Begins to hold the current message, of `size` bytes, whose beginning is in the socket.
    pub fn hold(&self, size: usize) {
        self.inbox.begin(self.number(), size);
    }

    /// Reads more of the held message. Returns all of it, or `None` if the rest has not arrived.
    pub fn take_held(&self, socket: BorrowedFd<'_>) -> Result<Option<Message>, End> {
        self.inbox.take(socket, &self.bin)
    }

    /// Returns whether the end of the current message is recorded, so that it must not be applied
    /// again.
    pub fn is_replying(&self) -> bool {
        self.stage() == Stage::Replying
    }

    /// Records the end of the current message, which has `size` bytes (step 4). An empty `reply`
    /// means none.
    pub fn record(
        &self,
        size: usize,
        reply: &[&[u8]],
        attachments: Attachments,
    ) -> Result<(), End> {
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
        self.set(ATTACHMENTS, attachments.word());
        self.set_stage(Stage::Replying);
        fault::point("recorded");
        Ok(())
    }

    /// Begins or continues the multiple write in a message of `size` bytes. Returns the number of
    /// writes that are done.
    pub fn begin_multi(&self, size: usize) -> usize {
        if self.stage() != Stage::MultipleWrite {
            self.clear_counts();
            self.set(SIZE, size as u64);
            self.set(DONE, 0);
            self.set_stage(Stage::MultipleWrite);
        }
        self.get(DONE) as usize
    }

    /// Records that `done` writes of a multiple write are done.
    pub fn set_done(&self, done: usize) {
        self.set(DONE, done as u64);
        fault::point("multi");
    }

    /// Continues with the recorded reply: steps 5 and 6. A successor begins with this, too.
    pub fn go_on(&mut self, socket: BorrowedFd<'_>) -> Result<Progress, End> {
        match self.stage() {
            Stage::Replying => {
                if !self.is_consumed() && !self.send(socket)? {
                    return Ok(Progress::Blocked);
                }
                fault::point("replied");
                self.consume(socket)?;
            }
            Stage::MultipleWrite if self.is_consumed() => self.over(),
            Stage::MultipleWrite | Stage::Fresh => {}
        }
        Ok(Progress::Done)
    }

    /// Ends a message that needs no record and has no reply.
    pub fn end_quietly(&mut self, socket: BorrowedFd<'_>, size: usize) -> Result<(), End> {
        if self.stage() == Stage::MultipleWrite {
            return self.consume(socket);
        }
        if self.holds() {
            self.over();
            return Ok(());
        }
        self.scratch.resize(size.max(self.scratch.len()), 0);
        let parts = &mut [IoSliceMut::new(&mut self.scratch[..size])];
        match slipway_peer::receive(socket, parts, &self.bin, RecvFlags::DONTWAIT) {
            Ok(received) if received.bytes == size => Ok(()),
            Ok(_) | Err(Errno::AGAIN) => Err(End::Broken("a message came apart")),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the message from the socket; the kernel records that it was read. A held message was
    /// read before.
    fn consume(&mut self, socket: BorrowedFd<'_>) -> Result<(), End> {
        let size = self.get(SIZE) as usize;
        if self.holds() {
            // SAFETY: within our mapping, aligned; the kernel writes there in calls of this thread.
            unsafe { (&raw mut (*self.header(SENDS)).msg_len).write_volatile(size as u32) };
        } else if !self.is_consumed() {
            self.scratch.resize(size.max(self.scratch.len()), 0);
            let mut part =
                libc::iovec { iov_base: self.scratch.as_mut_ptr().cast(), iov_len: size };
            let header = self.prepare(SENDS, &mut part);
            let mut control = Descriptors::new();
            control.attach(header);
            let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
            #[allow(
                clippy::disallowed_methods,
                reason = "the kernel notes in lasting memory that it was read; there is room for \
                    all descriptors"
            )]
            // SAFETY: the header lies in our mapping and refers to `part`, the scratch buffer, and
            // `control`, which live through the call and have those lengths.
            let taken = unsafe {
                libc::recvmmsg(socket.as_raw_fd(), header, 1, flags, std::ptr::null_mut())
            };
            if taken > 0 {
                // SAFETY: filled by the call just made, and read once.
                unsafe { control.discard(header, &self.bin) };
            }
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

    /// Ends the current message; the next one begins.
    fn over(&self) {
        // The number changes first: a snapshot with this number's effect must not count for the
        // next message.
        self.set(NUMBER, self.number() + 1);
        self.set_stage(Stage::Fresh);
    }

    /// Sends the rest of the reply. Returns whether all of it was sent.
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
            let mut control = Control::new();
            // Borrowed by number until the call has ended.
            let files = if sent == 0 { self.attached()? } else { Vec::new() };
            control.attach(header, &files);
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

    /// Returns the descriptors that the recorded reply carries.
    fn attached(&self) -> Result<Vec<OwnedFd>, End> {
        let wanted = Attachments::from_word(self.get(ATTACHMENTS));
        let bell = self.bell.as_ref().filter(|_| wanted.bell);
        let page = self.page.as_ref().filter(|_| wanted.page);
        let bell = bell.map(|bell| bell.try_clone());
        let files = bell.into_iter().chain(page.map(|page| page.file()));
        Ok(files.collect::<Result<_, _>>().map_err(|_| Errno::MFILE)?)
    }

    /// Prepares header number `at` for a call with one part. Its count stays as it is.
    fn prepare(&self, at: usize, part: &mut libc::iovec) -> *mut libc::mmsghdr {
        // SAFETY: the header is within our mapping, aligned, and not used by anybody else.
        unsafe { prepare(self.header(at), part) }
    }

    /// Returns the address of header `at`: each below [`SENDS`] is of a call that sends the reply,
    /// and that one is of the call that consumes the message.
    fn header(&self, at: usize) -> *mut libc::mmsghdr {
        self.memory.as_ptr().wrapping_add(HEADERS + at * HEADER).cast()
    }

    /// Returns the count that the kernel stored in header `at`.
    fn count(&self, at: usize) -> usize {
        // SAFETY: within our mapping, aligned; written by the kernel in a call of this thread, or
        // of a thread of a process that has ended.
        unsafe { (&raw const (*self.header(at)).msg_len).read_volatile() as usize }
    }

    /// Clears what the kernel stored for the message before.
    fn clear_counts(&self) {
        for at in 0..=SENDS {
            // SAFETY: within our mapping, aligned; the kernel writes there only in calls of this
            // thread.
            unsafe { (&raw mut (*self.header(at)).msg_len).write_volatile(0) };
        }
    }

    /// Returns whether the current message was read from the socket.
    fn is_consumed(&self) -> bool {
        self.count(SENDS) as u64 == self.get(SIZE)
    }

    fn stage(&self) -> Stage {
        Stage::from_word(self.get(STAGE))
    }

    fn set_stage(&self, stage: Stage) {
        self.set(STAGE, stage as u64);
    }

    fn get(&self, word: usize) -> u64 {
        self.memory.words()[word].load(Ordering::Acquire)
    }

    fn set(&self, word: usize, value: u64) {
        self.memory.words()[word].store(value, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn journal(memory: &Lasting, inbox: &Lasting) -> MessageJournal {
        MessageJournal::new(memory.clone(), inbox.clone(), &Bin::new())
    }

    fn fresh() -> (Lasting, Lasting) {
        (Lasting::heap(LEN), Lasting::heap(super::super::inbox::LEN))
    }

    #[test]
    fn a_stage_is_read_as_it_was_written_and_an_unknown_one_as_fresh() {
        for stage in [Stage::Fresh, Stage::Replying, Stage::MultipleWrite] {
            assert_eq!(Stage::from_word(stage as u64), stage);
        }
        assert_eq!(Stage::from_word(3), Stage::Fresh);
        assert_eq!(Stage::from_word(u64::MAX), Stage::Fresh);
    }

    #[test]
    fn a_successor_sends_the_recorded_reply_and_consumes_the_message() {
        let (ours, mut clients) = UnixStream::pair().unwrap();
        let (memory, inbox) = fresh();
        clients.write_all(b"request").unwrap();
        let first = journal(&memory, &inbox);
        first.record(7, &[b"re", b"ply"], Attachments::default()).unwrap();
        drop(first);
        let mut successor = journal(&memory, &inbox);
        assert!(successor.is_replying() && successor.number() == 0);
        assert_eq!(successor.go_on(ours.as_fd()).unwrap(), Progress::Done);
        assert!(!successor.is_replying() && successor.number() == 1);
        // Nothing is left to do: the reply is sent once.
        assert_eq!(successor.go_on(ours.as_fd()).unwrap(), Progress::Done);
        drop(ours);
        let mut reply = Vec::new();
        clients.read_to_end(&mut reply).unwrap();
        assert_eq!(reply, b"reply");
    }

    #[test]
    fn a_successor_continues_a_multiple_write_where_it_was() {
        let (ours, mut clients) = UnixStream::pair().unwrap();
        let (memory, inbox) = fresh();
        clients.write_all(b"writes").unwrap();
        let first = journal(&memory, &inbox);
        assert_eq!(first.begin_multi(6), 0);
        first.set_done(2);
        let mut successor = journal(&memory, &inbox);
        assert_eq!(successor.go_on(ours.as_fd()).unwrap(), Progress::Done);
        assert_eq!((successor.begin_multi(6), successor.number()), (2, 0));
        successor.end_quietly(ours.as_fd(), 6).unwrap();
        assert_eq!((successor.begin_multi(6), successor.number()), (0, 1));
    }
}
