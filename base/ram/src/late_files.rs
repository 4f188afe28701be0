//! Memory of clients that a process knows by its file: late memory, and files that clients share.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use slipway_peer::Bin;

use crate::sealed_files::SealedFiles;
use crate::{LateMemory, Permissions, Region};

/// The late memory of a process, found by the file that a client passes, and mappings that clients
/// share. Clones share both.
///
/// A client of late memory holds a descriptor of it that can be neither read nor mapped, so that it
/// cannot get around its faults. It names the file, and this process maps its own descriptor of it.
#[derive(Clone, Debug, Default)]
pub struct LateFiles {
    late: Arc<Mutex<Vec<Weak<LateMemory>>>>,
    sealed: SealedFiles,
}

impl LateFiles {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<LateMemory>>> {
        // Changed in single calls: a panic leaves it consistent.
        self.late.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds `memory`, until it is dropped.
    pub fn add(&self, memory: &Arc<LateMemory>) {
        let mut all = self.lock();
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(memory));
    }

    /// Removes `memory`: its file is any file from now on.
    pub fn remove(&self, memory: &Arc<LateMemory>) {
        self.lock().retain(|one| !std::ptr::eq(one.as_ptr(), Arc::as_ptr(memory)));
    }

    /// Returns the late memory of `file`, or `None` if the file is another's. Never blocks,
    /// whatever the file is.
    pub fn find(&self, file: BorrowedFd<'_>) -> Option<Arc<LateMemory>> {
        let all = self.lock();
        if all.is_empty() || !slipway_peer::is_memory_file(file) {
            return None;
        }
        let identity = |file: BorrowedFd<'_>| {
            rustix::fs::fstat(file).ok().map(|stat| (stat.st_dev, stat.st_ino))
        };
        let wanted = identity(file)?;
        let mut memory = all.iter().filter_map(Weak::upgrade);
        memory.find(|memory| identity(memory.file().as_fd()) == Some(wanted))
    }

    /// Maps `len` bytes at `offset` of a file that a client passed, like [`Region::of_peer`], and
    /// as late memory if it is that. A whole file that is sealed against shrinking and writing
    /// (`F_SEAL_SHRINK`, `F_SEAL_WRITE`) is mapped once for all clients that may only read it.
    ///
    /// # Errors
    /// As for [`Region::of_peer`], and for [`Region::late`].
    pub fn region(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        permissions: Permissions,
        bin: &Bin,
    ) -> std::io::Result<Region> {
        if let Some(memory) = self.find(file) {
            return Region::late(&memory, offset, len, permissions, bin);
        }
        match self.sealed.map(file, (offset, len), permissions)? {
            Some(mapping) => Ok(Region::of(mapping, len, permissions)),
            None => Region::of_peer(file, offset, len, permissions, bin),
        }
    }
}
