//! The machine's output: standard output of the process, or what a launcher put in its place.

use std::os::fd::OwnedFd;
use std::sync::Mutex;

use rustix::event::PollFlags;

/// Bytes that a pipe with room takes without waiting (`PIPE_BUF`).
const AT_ONCE: usize = 4096;

/// The destination of what the guest prints, for all threads.
pub struct Output {
    /// One writer at a time: between the question whether there is room and the write, no other may
    /// take the room.
    file: Mutex<OwnedFd>,
}

impl Output {
    /// Makes the output that writes to `file`.
    pub fn new(file: OwnedFd) -> Self {
        Self { file: Mutex::new(file) }
    }

    /// Writes bytes that the file takes at once, and drops the others: a guest must not be able to
    /// stop its CPU or the event loop by output that nobody reads.
    pub fn write_or_drop(&self, bytes: &[u8]) {
        let file = self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for part in bytes.chunks(AT_ONCE) {
            if slipway_peer::ready(&*file, PollFlags::OUT).is_empty() {
                return;
            }
            let _ = rustix::io::write(&*file, part);
        }
    }
}
