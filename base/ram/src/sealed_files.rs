//! Mappings that clients share: files that nobody can change, found by their identity.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};

use rustix::fs::SealFlags;

use crate::{Mapping, Permissions, pages};

/// The device and inode number of a file.
type Identity = (u64, u64);

/// The mappings of files that are sealed against shrinking and writing, such as an image's file
/// system that many guests read. Each is made once, however many clients pass a descriptor of the
/// file, and unmapped after the last of them.
///
/// A client shares address space with others here and nothing else: its configuration names the
/// file, whose bytes nobody can change any more.
///
/// A file is known by its device and inode number. Files of base pages have inode numbers of 64
/// bits on a device of their own, so no two such files have the same. Inode numbers of files of
/// huge pages wrap after 32 bits, and any user makes such files; so only a file that the client's
/// configuration names is looked up ([`crate::LateFiles::shared`]).
#[derive(Clone, Debug, Default)]
pub(crate) struct SealedFiles(Arc<Mutex<HashMap<Identity, Weak<Mapping>>>>);

impl SealedFiles {
    /// Maps all `len` bytes of `file` for reading, or finds the mapping that is there. Returns
    /// `None` for a file that may change, a part of a file, and a mapping that may be written:
    /// each client has such a mapping of its own. Never waits, whatever the file is.
    ///
    /// # Errors
    /// As for [`Mapping::file`].
    pub fn map(
        &self,
        file: BorrowedFd<'_>,
        (offset, len): (u64, u64),
        permissions: Permissions,
    ) -> std::io::Result<Option<Mapping>> {
        if offset != 0 || permissions != Permissions::READ_ONLY || !is_sealed(file) {
            return Ok(None);
        }
        let stat = rustix::fs::fstat(file)?;
        if u64::try_from(stat.st_size) != Ok(len) {
            return Ok(None);
        }
        let size = usize::try_from(len).map_err(|_| std::io::ErrorKind::InvalidInput)?;
        // Changed in single calls: a panic leaves it consistent.
        let mut all = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // The inode number of a file of base pages that is mapped is no other file's.
        let identity = (stat.st_dev, stat.st_ino);
        if let Some(mapping) = all.get(&identity).and_then(Weak::upgrade) {
            return Ok(Some(Mapping::sharing(&mapping)));
        }
        let mapping = Arc::new(Mapping::file(file, 0, size, permissions, pages::own())?);
        all.retain(|_, mapping| mapping.strong_count() > 0);
        all.insert(identity, Arc::downgrade(&mapping));
        Ok(Some(Mapping::sharing(&mapping)))
    }
}

/// Returns whether nobody can change or shorten the file. Only files in memory have seals.
fn is_sealed(file: BorrowedFd<'_>) -> bool {
    let seals = SealFlags::SHRINK | SealFlags::WRITE;
    rustix::fs::fcntl_get_seals(file).is_ok_and(|found| found.contains(seals))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd, OwnedFd};

    use rustix::fs::MemfdFlags;

    use super::*;

    const LEN: u64 = 0x3000;

    fn file(seals: SealFlags) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("sealed", flags).unwrap();
        rustix::fs::ftruncate(&file, LEN).unwrap();
        rustix::io::pwrite(&file, b"image", 0x1000).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        std::fs::File::open(path).unwrap().into()
    }

    fn sealed() -> OwnedFd {
        file(SealFlags::SHRINK | SealFlags::WRITE)
    }

    fn read_only(known: &SealedFiles, file: &OwnedFd) -> Mapping {
        known.map(file.as_fd(), (0, LEN), Permissions::READ_ONLY).unwrap().unwrap()
    }

    #[test]
    fn a_file_is_mapped_once() {
        let known = SealedFiles::default();
        let (one, other) = (sealed(), sealed());
        let first = read_only(&known, &one);
        let again = read_only(&known, &one.try_clone().unwrap());
        let apart = read_only(&known, &other);
        assert_eq!(first.address(0, 1), again.address(0, 1));
        assert_ne!(first.address(0, 1), apart.address(0, 1));
        drop(first);
        let mut bytes = [0; 5];
        assert!(again.read(0x1000, &mut bytes));
        assert_eq!(&bytes, b"image");
        assert_eq!(again.permissions(), Permissions::READ_ONLY);
        drop(again);
        assert!(known.0.lock().unwrap().values().filter_map(Weak::upgrade).count() == 1);
        read_only(&known, &one);
        assert_eq!(known.0.lock().unwrap().len(), 2, "those that are gone leave nothing");
    }

    #[test]
    fn what_may_change_is_not_shared() {
        let known = SealedFiles::default();
        let refused = |file: &OwnedFd, range, permissions| {
            known.map(file.as_fd(), range, permissions).unwrap().is_none()
        };
        let whole = (0, LEN);
        for seals in [SealFlags::empty(), SealFlags::SHRINK, SealFlags::WRITE] {
            assert!(refused(&file(seals), whole, Permissions::READ_ONLY), "{seals:?}");
        }
        let sealed = sealed();
        assert!(refused(&sealed, whole, Permissions::READ_WRITE));
        assert!(refused(&sealed, (0, 0x1000), Permissions::READ_ONLY));
        assert!(refused(&sealed, (0x1000, LEN), Permissions::READ_ONLY));
        let other = std::fs::File::open("/proc/self/maps").unwrap().into();
        assert!(refused(&other, whole, Permissions::READ_ONLY));
        assert!(known.0.lock().unwrap().is_empty());
    }
}
