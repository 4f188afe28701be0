//! The descriptors that the event loop waits for.

use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec};

/// A wait for any of several descriptors, each with a token that says what it stands for. It is
/// made anew for each wait: there are a few dozen at most, and waits are rare.
pub struct Watch<'a, T> {
    fds: Vec<PollFd<'a>>,
    tokens: Vec<T>,
}

impl<'a, T: Copy> Watch<'a, T> {
    /// Makes a wait for nothing.
    pub fn new() -> Self {
        Self { fds: Vec::new(), tokens: Vec::new() }
    }

    /// Adds a wait for `fd` to become readable.
    pub fn read(&mut self, fd: BorrowedFd<'a>, token: T) {
        self.add(fd, PollFlags::IN, token);
    }

    /// Adds a wait for `flags` of `fd`. Errors and hang-ups are always waited for.
    pub fn add(&mut self, fd: BorrowedFd<'a>, flags: PollFlags, token: T) {
        self.fds.push(PollFd::from_borrowed_fd(fd, flags));
        self.tokens.push(token);
    }

    /// Waits, for `timeout` at most if there is one, and returns what has become ready.
    ///
    /// # Errors
    /// An error of poll(2).
    pub fn wait(mut self, timeout: Option<Timespec>) -> rustix::io::Result<Vec<(T, PollFlags)>> {
        let timeout = timeout.as_ref();
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut self.fds, timeout))?;
        let ready = self.fds.iter().zip(&self.tokens);
        let ready = ready.filter(|(fd, _)| !fd.revents().is_empty());
        Ok(ready.map(|(fd, token)| (*token, fd.revents())).collect())
    }
}
