//! Pages that guests share: a sealed copy of a file, in memory.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

use crate::{Error, Result};

/// The sizes of shared pages that `slipway-vmm --pmem` takes: whole units, at least one.
const UNIT: u64 = 2 << 20;

/// The name of the file, as `/proc` shows it.
const NAME: &str = "shared-root";

/// The seals with which nobody can change what other guests read, or take a page away.
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::WRITE).union(SealFlags::GROW).union(SealFlags::SEAL);

/// Pages that guests read in place and cannot write, and that any number of guests may share.
/// Clones are the same pages, which are freed with the last descriptor and mapping of their file.
#[derive(Clone, Debug)]
pub struct SharedPages {
    file: Arc<OwnedFd>,
    bytes: u64,
    identity: (u64, u64),
}

impl SharedPages {
    /// Returns the size in bytes of the pages of a file of `len` bytes: whole 2 MiB, at least one.
    pub fn space(len: u64) -> u64 {
        len.max(1).checked_next_multiple_of(UNIT).unwrap_or(u64::MAX)
    }

    /// Copies the first `len` bytes of `from` into memory, filled up to [`SharedPages::space`] with
    /// zeros. Waits for the disk of `from`.
    ///
    /// # Errors
    /// [`Error::System`]: the file cannot be read, or memory or descriptors are missing.
    pub fn copy_of(from: &File, len: u64) -> Result<Self> {
        let copied = || -> io::Result<OwnedFd> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let mut file = File::from(rustix::fs::memfd_create(NAME, flags)?);
            if io::copy(&mut from.take(len), &mut file)? != len {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            file.set_len(Self::space(len))?;
            rustix::fs::fcntl_add_seals(&file, SEALS)?;
            // Kernels before 6.7 share a sealed file only by a descriptor that cannot write.
            Ok(File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?.into())
        };
        let file = copied().map_err(|error| Error::system("copying into shared pages", error))?;
        Self::of(file)
    }

    /// Returns the pages with this [identity](SharedPages::identity) that process `pid` has a
    /// descriptor of, as a VMM has that an earlier launcher gave them. Returns `None` if it has no
    /// such descriptor. The process is not trusted: no other file is opened, or waited for.
    ///
    /// # Errors
    /// [`Error::System`]: the descriptors cannot be listed.
    pub fn of_process(pid: i32, identity: (u64, u64)) -> Result<Option<Self>> {
        let failed = |error: io::Error| Error::system("listing a VMM's descriptors", error);
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if let Some(pages) = Self::at(&path)
                && pages.identity == identity
            {
                return Ok(Some(pages));
            }
        }
        Ok(None)
    }

    /// Opens the file that a link of `/proc` leads to. Returns `None` if that is something else.
    fn at(link: &Path) -> Option<Self> {
        // A link to a file of another file system, which could wait, has another text.
        let text = fs::read_link(link).ok()?;
        let is_named = text.to_str()?.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")? == NAME;
        let pages = is_named.then(|| Self::of(open(link).ok()?).ok())??;
        let seals = rustix::fs::fcntl_get_seals(&*pages.file);
        seals.is_ok_and(|seals| seals.contains(SEALS)).then_some(pages)
    }

    fn of(file: OwnedFd) -> Result<Self> {
        let found = rustix::fs::fstat(file.as_fd());
        let found = found.map_err(|errno| Error::system("looking at shared pages", errno))?;
        let bytes = u64::try_from(found.st_size).unwrap_or(0);
        Ok(Self { file: Arc::new(file), bytes, identity: (found.st_dev, found.st_ino) })
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the device and inode number of the file, which no other file has while this one
    /// exists.
    pub fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// Returns a descriptor of the file, for reading only. Nobody else has its open file
    /// description, whose position and flags one VMM could set for another to read.
    pub(crate) fn descriptor(&self) -> Result<OwnedFd> {
        let link = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        open(Path::new(&link)).map_err(|errno| Error::system("opening shared pages", errno))
    }
}

/// Opens the file that a link of `/proc` leads to, for reading. Another process may have exchanged
/// it for one that would make an open wait.
fn open(link: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    rustix::fs::open(link, flags, Mode::empty())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{Seek, Write};
    use std::os::unix::fs::FileExt;

    use super::*;

    /// Makes shared pages that begin with `content`.
    pub(crate) fn pages(content: &[u8]) -> SharedPages {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file.rewind().unwrap();
        SharedPages::copy_of(&file, content.len() as u64).unwrap()
    }

    #[test]
    fn a_copy_is_padded_and_nobody_can_change_it() {
        let pages = pages(b"image");
        assert_eq!(pages.bytes(), UNIT);
        let file = File::from(pages.descriptor().unwrap());
        let mut bytes = [1; 6];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"image\0");
        assert!((&file).write(b"other").is_err());
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let again = File::options().write(true).open(path).unwrap();
        assert!((&again).write(b"other").is_err());
        for bytes in [0, 2 * UNIT] {
            assert!(again.set_len(bytes).is_err());
        }
    }

    #[test]
    fn each_descriptor_has_a_position_of_its_own() {
        let pages = pages(b"image");
        let [one, other] = [(); 2].map(|()| File::from(pages.descriptor().unwrap()));
        (&one).seek(std::io::SeekFrom::Start(0x5ec2e7)).unwrap();
        assert_eq!((&other).stream_position().unwrap(), 0);
    }

    #[test]
    fn a_file_that_became_shorter_is_no_image() {
        let file = tempfile::tempfile().unwrap();
        assert!(SharedPages::copy_of(&file, 1).is_err());
        assert_eq!([0, 1, UNIT, UNIT + 1].map(SharedPages::space), [UNIT, UNIT, UNIT, 2 * UNIT]);
        assert_eq!(SharedPages::space(u64::MAX), u64::MAX);
    }

    #[test]
    fn pages_are_found_again_by_their_identity() {
        let (one, two) = (pages(b"one"), pages(b"two"));
        assert_ne!(one.identity(), two.identity());
        let me = std::process::id().cast_signed();
        let found = SharedPages::of_process(me, two.identity()).unwrap().unwrap();
        let mut bytes = [0; 3];
        File::from(found.descriptor().unwrap()).read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"two");
        // Memory of a guest's that has the name and could change.
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let open = rustix::fs::memfd_create(NAME, flags).unwrap();
        let status = rustix::fs::fstat(&open).unwrap();
        let identity = (status.st_dev, status.st_ino);
        assert!(SharedPages::of_process(me, identity).unwrap().is_none());
        assert!(SharedPages::of_process(me, (0, 0)).unwrap().is_none());
        assert!(SharedPages::of_process(i32::MAX, one.identity()).is_err());
    }
}
