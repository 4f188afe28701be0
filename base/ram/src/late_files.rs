//! Memory of clients that a process knows by its file: late memory, and files that clients share.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use slipway_peer::Bin;

use crate::sealed_files::SealedFiles;
use crate::{LateMemory, Permissions, Region, Template};

/// The late memory of a process, found by the file that a client passes, and mappings that clients
/// share. Clones share both.
///
/// A client of late memory holds a descriptor of it that can be neither read, nor written, nor
/// mapped, so that it cannot get around its faults. It names the file, and this process maps its
/// own descriptor of it.
///
/// The same file is another's memory once it was recycled and added again. A client has messages of
/// its own read after its end, so each names only memory that was there when it came
/// ([`LateFiles::added`]).
///
/// # What is trusted
/// Files are told apart by device and inode number, which are no proof: all users' files of huge
/// pages are on one device, and the kernel gives them 32-bit inode numbers that wrap, so that a
/// user who makes enough files has one with the numbers of another's memory. Therefore the caller
/// says what a file is to its client, by its own configuration and not by what the client passed:
/// - the client's memory: [`LateFiles::region`];
/// - pages that the client shares with others: [`LateFiles::shared`];
/// - neither: [`Region::of_peer`], which knows no other client's file.
///
/// So a client gets at no late memory but one with the numbers that its configuration names. If two
/// have these numbers, neither is given.
#[derive(Clone, Debug, Default)]
pub struct LateFiles {
    known: Arc<Mutex<Known>>,
    sealed: SealedFiles,
}

#[derive(Debug, Default)]
struct Known {
    /// The number of additions so far.
    added: u64,
    /// Each memory with the number of its addition.
    all: Vec<(u64, Weak<LateMemory>)>,
}

impl LateFiles {
    fn lock(&self) -> MutexGuard<'_, Known> {
        // Changed in single calls: a panic leaves it consistent.
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds `memory`, until it is dropped. If it is there already, this is a new addition of it.
    pub fn add(&self, memory: &Arc<LateMemory>) {
        let mut known = self.lock();
        known.added += 1;
        let number = known.added;
        let others = |one: &Weak<_>| one.strong_count() > 0 && one.as_ptr() != Arc::as_ptr(memory);
        known.all.retain(|(_, one)| others(one));
        known.all.push((number, Arc::downgrade(memory)));
    }

    /// Removes `memory`: its file is any file from now on.
    pub fn remove(&self, memory: &Arc<LateMemory>) {
        self.lock().all.retain(|(_, one)| !std::ptr::eq(one.as_ptr(), Arc::as_ptr(memory)));
    }

    /// Returns the number of additions so far, for a client that comes now.
    pub fn added(&self) -> u64 {
        self.lock().added
    }

    /// Returns the late memory of `file` and the number of its addition, or `None` if the file is
    /// another's. Never blocks, whatever the file is.
    ///
    /// # Errors
    /// `EACCES` if several files have the numbers of `file`.
    pub(crate) fn find(
        &self,
        file: BorrowedFd<'_>,
    ) -> std::io::Result<Option<(u64, Arc<LateMemory>)>> {
        let known = self.lock();
        if known.all.is_empty() || !slipway_peer::is_memory_file(file) {
            return Ok(None);
        }
        let identity = |file: BorrowedFd<'_>| {
            rustix::fs::fstat(file).ok().map(|stat| (stat.st_dev, stat.st_ino))
        };
        let Some(wanted) = identity(file) else { return Ok(None) };
        let all = known.all.iter().filter_map(|(number, one)| Some((*number, one.upgrade()?)));
        let mut found = all.filter(|(_, memory)| identity(memory.file().as_fd()) == Some(wanted));
        match (found.next(), found.next()) {
            (Some(_), Some(_)) => Err(rustix::io::Errno::ACCESS.into()),
            (one, _) => Ok(one),
        }
    }

    /// Makes a template of `file`, memory of a VM that does not run. Late memory is known by any
    /// descriptor of it, and gives only bytes that its user was given. Other files are copied as
    /// they are. Waits for the copy.
    ///
    /// # Errors
    /// `EACCES` if several memories have the numbers of `file`; those of [`Template::copy_of`].
    pub fn template(&self, file: BorrowedFd<'_>) -> std::io::Result<Template> {
        match self.find(file)? {
            Some((_, memory)) => memory.freeze(),
            None => Template::copy_of(file),
        }
    }

    /// Maps `len` bytes at `offset` of a file that a client passed, like [`Region::of_peer`], and
    /// as late memory if it is that. The client came after `added` additions. To be called only for
    /// a file that this process's configuration names as the client's own memory.
    ///
    /// # Errors
    /// As for [`Region::of_peer`], and for [`Region::late`]; `EACCES` for late memory that was
    /// added after the client came.
    pub fn region(
        &self,
        (file, added): (BorrowedFd<'_>, u64),
        offset: u64,
        len: u64,
        permissions: Permissions,
        bin: &Bin,
    ) -> std::io::Result<Region> {
        match self.find(file)? {
            Some((number, _)) if number > added => Err(rustix::io::Errno::ACCESS.into()),
            Some((_, memory)) => Region::late(&memory, offset, len, permissions, bin),
            None => Region::of_peer(file, offset, len, permissions, bin),
        }
    }

    /// Maps `len` bytes at `offset` of a file that a client passed, like [`Region::of_peer`]. A
    /// whole file that is sealed against shrinking and writing (`F_SEAL_SHRINK`, `F_SEAL_WRITE`) is
    /// mapped once for all clients that may only read it. To be called only for a file that this
    /// process's configuration names as one that the client shares with others.
    ///
    /// # Errors
    /// As for [`Region::of_peer`].
    pub fn shared(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        permissions: Permissions,
        bin: &Bin,
    ) -> std::io::Result<Region> {
        match self.sealed.map(file, (offset, len), permissions)? {
            Some(mapping) => Ok(Region::of(mapping, len, permissions)),
            None => Region::of_peer(file, offset, len, permissions, bin),
        }
    }
}
