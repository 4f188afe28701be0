//! Descriptors that a peer sent.

#![allow(unsafe_code)] // a field is taken out of a value that has a destructor

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::Bin;

/// A descriptor that came from a peer. Closing it may take for ever, so its drop hands it to the
/// peer's [`Bin`].
pub struct Foreign {
    file: ManuallyDrop<OwnedFd>,
    bin: Bin,
}

impl Foreign {
    /// Wraps `file`, which is then closed through `bin`.
    pub fn new(file: OwnedFd, bin: &Bin) -> Self {
        Self { file: ManuallyDrop::new(file), bin: bin.clone() }
    }

    /// Duplicates the descriptor. The duplicate is closed through the same bin.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn try_clone(&self) -> std::io::Result<Self> {
        Ok(Self::new(self.file.as_fd().try_clone_to_owned()?, &self.bin))
    }

    /// Returns the descriptor as one that any thread may close. Only for a file whose last close
    /// never waits, whatever the peer does with its own descriptors of it, such as an eventfd
    /// ([`is_eventfd`](crate::is_eventfd)); or for a thread that may wait for this peer, such as
    /// those of its bin.
    pub fn into_owned(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped or used again, so its descriptor has one owner; the bin
        // is read out once, and dropped here.
        let (file, bin) =
            unsafe { (ManuallyDrop::take(&mut this.file), std::ptr::read(&this.bin)) };
        drop(bin);
        file
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: nothing uses the field after this.
        self.bin.discard(unsafe { ManuallyDrop::take(&mut self.file) });
    }
}

impl AsFd for Foreign {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl std::fmt::Debug for Foreign {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Foreign").field(&self.file).finish()
    }
}
