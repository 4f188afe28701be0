//! The state of a machine that was saved, and the memory of machines that begin with one.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};

use crate::{Error, Result};

/// The most bytes of a machine's state without its memory. CPUs take some 20 KiB each, functions
/// what they have in flight.
pub(crate) const MOST_STATE: u64 = 64 << 20;
/// The bytes that are copied at once.
const PIECE: usize = 1 << 20;
/// A page, the unit in which memory is kept or left out.
const PAGE: usize = 4096;

/// The state of a machine without its memory, as [`Vm::save`](crate::Vm::save) has written it.
#[derive(Debug)]
pub struct SavedMachine {
    /// The file, at its beginning. The VMM may still write to it.
    pub file: OwnedFd,
    /// The bytes of the state, at the beginning of the file.
    pub bytes: u64,
}

impl SavedMachine {
    /// Makes an empty file for a state. It cannot grow beyond the most that a state has.
    pub(crate) fn file() -> Result<OwnedFd> {
        let failed = |errno| Error::system("making a file for a machine's state", errno);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(c"machine-state", flags).map_err(failed)?;
        rustix::fs::ftruncate(&file, MOST_STATE).map_err(failed)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(failed)?;
        Ok(file)
    }
}

/// The memory of a template: what the memory of each fork begins with. Nobody can change it. Clones
/// are the same memory.
#[derive(Clone, Debug)]
pub struct TemplateMemory {
    file: Arc<File>,
    bytes: u64,
}

impl TemplateMemory {
    /// Copies the memory in `from`, a sparse file of `bytes` bytes. Waits for its disk. The copy
    /// has holes where the file has them.
    ///
    /// # Errors
    /// [`Error::System`]: the file cannot be read, or memory or descriptors are missing.
    pub fn load(from: &File, bytes: u64) -> Result<Self> {
        let failed = |error: io::Error| Error::system("loading a template's memory", error);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(c"template-memory", flags);
        let file = File::from(file.map_err(|errno| failed(errno.into()))?);
        file.set_len(bytes).map_err(failed)?;
        copy_pages(from, bytes, &file).map_err(failed)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(|errno| failed(errno.into()))?;
        Ok(Self { file: Arc::new(file), bytes })
    }

    /// Returns the file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl AsFd for TemplateMemory {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Copies the pages among the first `len` bytes of `from` that have bytes other than zeros to the
/// same places of `to`. Returns the number of bytes that were copied.
///
/// # Errors
/// Those of reading and writing.
pub fn copy_pages(from: &File, len: u64, to: &File) -> io::Result<u64> {
    let mut copied = 0;
    for_each_page(from, len, |at, page| {
        copied += page.len() as u64;
        to.write_all_at(page, at)
    })?;
    Ok(copied)
}

/// Calls `each` for every page among the first `len` bytes of `file` that has bytes other than
/// zeros, with its place, in their order. Holes of the file are passed over.
///
/// # Errors
/// Those of reading, and of `each`.
pub fn for_each_page(
    file: &File,
    len: u64,
    mut each: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let (mut at, mut piece) = (0, vec![0; PIECE]);
    while let Some(from) = next_data(file, at)?.filter(|from| *from < len) {
        at = from / PAGE as u64 * PAGE as u64;
        let most = usize::try_from(len - at).map_or(PIECE, |left| left.min(PIECE));
        let read = file.read_at(&mut piece[..most], at)?;
        if read == 0 {
            break;
        }
        for page in piece[..read].chunks(PAGE) {
            if page.iter().any(|byte| *byte != 0) {
                each(at, page)?;
            }
            at += page.len() as u64;
        }
    }
    Ok(())
}

/// Returns the place of the next bytes of a sparse file from `at` on (lseek(2), SEEK_DATA).
fn next_data(file: &File, at: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Ok(from) => Ok(Some(from)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn sparse() -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 * MIB).unwrap();
        file.write_all_at(b"first", 100).unwrap();
        file.write_all_at(&[7; 3 * PAGE], 2 * MIB - 8).unwrap();
        // Zeros that take memory are as good as a hole.
        file.write_all_at(&[0; PAGE], 3 * MIB).unwrap();
        file
    }

    #[test]
    fn memory_is_copied_with_its_holes_and_cannot_be_changed() {
        let from = sparse();
        let memory = TemplateMemory::load(&from, 4 * MIB).unwrap();
        let (mut one, mut two) = (vec![0; 4 << 20], vec![0; 4 << 20]);
        from.read_exact_at(&mut one, 0).unwrap();
        memory.file().read_exact_at(&mut two, 0).unwrap();
        assert!(one == two);
        assert_eq!(memory.file().metadata().unwrap().blocks() * 512, 5 * PAGE as u64);
        assert!(memory.file().write_at(b"x", 0).is_err());
        assert!(memory.file().set_len(0).is_err());
    }

    #[test]
    fn each_page_with_bytes_is_visited_once() {
        let mut places = Vec::new();
        let visited = for_each_page(&sparse(), 4 * MIB, |at, page| {
            assert_eq!(page.len(), PAGE);
            places.push(at / PAGE as u64);
            Ok(())
        });
        visited.unwrap();
        assert_eq!(places, [0, 511, 512, 513, 514]);
    }

    #[test]
    fn a_state_has_room_and_no_more() {
        let file = File::from(SavedMachine::file().unwrap());
        file.write_all_at(b"state", 0).unwrap();
        assert!(file.write_at(b"x", MOST_STATE).is_err());
    }
}
