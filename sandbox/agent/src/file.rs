//! Descriptors of pipes and terminals, registered with the runtime.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The most bytes that are dropped at once: as many as wait in a pipe of a user without rights
/// (/proc/sys/fs/pipe-max-size), and more than wait in a terminal.
const MOST_DROPPED: usize = 1 << 20;

/// Registers `fd` with the current runtime.
pub fn register(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd refers to one open descriptor from now until the AsyncFd, its owner
    // then, has deregistered and dropped it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// A pipe's end or a terminal's master side.
///
/// A terminal whose other side is closed reports EIO, which is treated as end of file.
#[derive(Debug)]
pub struct AsyncFile(AsyncFd<OwnedFd>);

impl AsyncFile {
    /// Makes `fd` non-blocking and registers it. Must be called inside the runtime.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(AsyncFile(register(fd, Interest::READABLE | Interest::WRITABLE)?))
    }

    /// Reads the available bytes, up to `buffer`'s length. Returns 0 at the end of file, and
    /// `WouldBlock` if no bytes are available.
    pub fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::io::read(self.0.get_ref(), &mut *buffer) {
                Ok(length) => return Ok(length),
                Err(Errno::IO) => return Ok(0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Reads and drops what is there, up to [`MOST_DROPPED`] bytes.
    pub fn drop_available(&self) {
        let (mut buffer, mut dropped) = ([0; 4096], 0);
        while dropped < MOST_DROPPED
            && let Ok(length @ 1..) = self.read_now(&mut buffer)
        {
            dropped += length;
        }
    }

    /// Returns the number of bytes that can be read at once.
    pub fn available(&self) -> usize {
        let bytes = rustix::io::ioctl_fionread(self.0.get_ref()).unwrap_or(0);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// Reads into `buffer` when bytes are available. Returns 0 at the end of file.
    pub fn poll_read(
        &self,
        context: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.0.poll_read_ready(context))?;
            match self.read_now(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => guard.clear_ready(),
                result => return Poll::Ready(result),
            }
        }
    }

    /// Writes all of `bytes`, and waits for the reader as long as it takes.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut guard = self.0.writable().await?;
            match rustix::io::write(self.0.get_ref(), bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(Errno::AGAIN) => guard.clear_ready(),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reads and drops everything up to the end of file.
    pub async fn discard(&self) {
        let mut buffer = [0; 4096];
        while matches!(
            std::future::poll_fn(|context| self.poll_read(context, &mut buffer)).await,
            Ok(length) if length > 0
        ) {}
    }
}

impl AsFd for AsyncFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}
