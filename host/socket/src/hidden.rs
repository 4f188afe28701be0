//! Descriptors that are hidden from the program.
//!
//! They are moved to high numbers, so that the program's own stay as low as ever, and recorded, so
//! that a loop that closes every number spares them.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use rustix::process::{Resource, Rlimit};

/// Descriptor numbers that can be recorded as hidden; a larger one is never hidden.
pub const NUMBERS: usize = 1 << 20;
/// The first hidden number, if the limit allows.
const BASE: RawFd = 16_384;

static NOTED: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];
/// The number where hidden descriptors begin; 0 if not decided yet.
static FROM: AtomicI32 = AtomicI32::new(0);

fn bit(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((NOTED.get(fd / 64)?, 1 << (fd % 64)))
}

/// Returns whether `fd` is hidden from the program.
#[inline]
pub fn is_hidden(fd: RawFd) -> bool {
    bit(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

/// Returns the first hidden number under the hard limit `most`.
fn base(most: u64) -> RawFd {
    if most > BASE as u64 * 2 { BASE } else { RawFd::try_from(most / 2).unwrap_or(64) }
}

/// A descriptor that survives execve(2) for the new image to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survivor {
    /// The connection for [`Family::resume`](crate::Family::resume).
    Ticket = 1,
    /// The list of which descriptor number is which endpoint.
    Numbers = 2,
}

impl Survivor {
    /// Returns the lowest number that a survivor may have in this image.
    pub fn first() -> RawFd {
        Self::Numbers.places().0
    }

    /// Returns this survivor's number, and the numbers where this image may find the one of its
    /// predecessor, which may have had another limit.
    pub fn places(self) -> (RawFd, [RawFd; 2]) {
        let hard = rustix::process::getrlimit(Resource::Nofile).maximum.unwrap_or(1 << 20);
        let own = base(hard.min(1 << 20)) - self as RawFd;
        (own, [own, BASE - self as RawFd])
    }
}

/// Returns the number where hidden descriptors begin. The first call raises the soft limit to the
/// hard one, so that there are numbers beyond the program's.
fn begin() -> RawFd {
    let known = FROM.load(Ordering::Relaxed);
    if known > 0 {
        return known;
    }
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let (soft, hard) = (limit.current.unwrap_or(1 << 20), limit.maximum.unwrap_or(1 << 20));
    if soft < hard.min(1 << 20) {
        let raised = Rlimit { current: Some(hard.min(1 << 20)), maximum: limit.maximum };
        // If this fails, there are fewer descriptors for all.
        let _ = rustix::process::setrlimit(Resource::Nofile, raised);
    }
    let from = base(hard.min(1 << 20));
    FROM.store(from, Ordering::Relaxed);
    from
}

/// A descriptor that was moved to a high number and recorded as hidden.
#[derive(Debug)]
pub struct Hidden(OwnedFd);

impl Hidden {
    /// Moves and records `fd`.
    ///
    /// # Errors
    /// There are no numbers left.
    pub fn new(fd: OwnedFd) -> std::io::Result<Self> {
        let fd = rustix::io::fcntl_dupfd_cloexec(&fd, begin()).unwrap_or(fd);
        if let Some((word, bit)) = bit(fd.as_raw_fd()) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        Ok(Self(fd))
    }

    /// Returns the descriptor to a caller that keeps it open for ever; it stays recorded as hidden.
    pub fn into_inner(self) -> OwnedFd {
        let raw = self.0.as_raw_fd();
        std::mem::forget(self);
        // SAFETY: this value owned the descriptor, and is gone without closing it.
        unsafe { OwnedFd::from_raw_fd(raw) }
    }
}

impl AsFd for Hidden {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Hidden {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        if let Some((word, bit)) = bit(self.0.as_raw_fd()) {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

/// Closes a descriptor by the system call itself: libc's close(2) may be replaced in the program,
/// see `front/preload`.
pub fn close(fd: OwnedFd) {
    // SAFETY: the descriptor was owned, and is not used again.
    unsafe { rustix::io::close(fd.into_raw_fd()) };
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_hidden_descriptor_is_noted_while_it_lives() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let low = reader.as_raw_fd();
        let hidden = Hidden::new(reader).unwrap();
        let high = hidden.as_raw_fd();
        assert!(is_hidden(high) && !is_hidden(low) && !is_hidden(writer.as_raw_fd()));
        assert!(high > low);
        drop(hidden);
        assert!(!is_hidden(high) && !is_hidden(-1) && !is_hidden(RawFd::MAX));
    }
}
