//! Copies of regular files that are open as disks.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::common::{Common, measure};
use super::open::{failed, file_type};
use super::target::CopyTarget;
use crate::OpenError;

/// The content of a regular file that is open as a disk. It is read from the disk's own open file,
/// whatever its path leads to by now. This value does not keep the file open, or locked.
#[derive(Clone)]
pub struct FileContent {
    common: Weak<Common>,
    /// The path by which the file was opened, for errors.
    path: PathBuf,
}

impl FileContent {
    /// Describes the content of an open file, or returns `None` if that is a device.
    pub(crate) fn of(common: &Arc<Common>, path: &Path) -> Option<Self> {
        let kind = file_type(&common.fd, path).ok()?;
        let regular = kind == FileType::RegularFile;
        regular.then(|| Self { common: Arc::downgrade(common), path: path.to_owned() })
    }

    /// Copies what the disk reads at present to `to`, an empty file, which gets the disk's size.
    /// Returns that size, and the bytes of data that were written; the rest are holes. `path` is
    /// the path of `to`, for errors: the copy ends if that file is removed. If the disk is written
    /// meanwhile, the copy has some of that. The file is not synchronized.
    ///
    /// # Errors
    /// [`OpenError::File`]; also if the disk was closed, or its file is shorter than the disk.
    pub fn copy_to(&self, to: &File, path: &Path) -> Result<(u64, u64), OpenError> {
        let closed = || failed(&self.path, "read")(Errno::BADF);
        let common = self.common.upgrade().ok_or_else(closed)?;
        let bytes = common.geometry().bytes();
        self.check_length(&common, bytes)?;
        let from = self.reader(&common)?;
        let mut target = CopyTarget::new(to, path, bytes)?;
        target.copy_data((&from, &self.path), 0..bytes)?;
        // If the file was truncated meanwhile, the bytes beyond its end were read as a hole.
        self.check_length(&common, bytes)?;
        Ok((bytes, target.written))
    }

    /// Returns the present size in bytes of the file, which may be more than that of the disk.
    ///
    /// # Errors
    /// [`OpenError::File`]; also if the disk was closed.
    pub fn file_bytes(&self) -> Result<u64, OpenError> {
        let closed = || failed(&self.path, "read")(Errno::BADF);
        let common = self.common.upgrade().ok_or_else(closed)?;
        measure(&common.fd, &self.path)
    }

    /// Returns the number of writes that were refused since the file was opened, because they would
    /// have taken of the reserve that it keeps.
    pub fn refused_writes(&self) -> u64 {
        let thin = self.common.upgrade().and_then(|common| common.thin.clone());
        thin.map_or(0, |thin| thin.refused())
    }

    /// Checks that the file has the bytes of the disk: reads beyond its end fail.
    fn check_length(&self, common: &Common, bytes: u64) -> Result<(), OpenError> {
        if measure(&common.fd, &self.path)? >= bytes {
            return Ok(());
        }
        let cut = io::Error::new(io::ErrorKind::UnexpectedEof, "it is shorter than its disk");
        Err(failed(&self.path, "read")(cut))
    }

    /// Returns the open file for reads of any alignment. A descriptor with O_DIRECT refuses those,
    /// so the file behind it is opened once more, by its descriptor and not by its path.
    fn reader(&self, common: &Common) -> Result<File, OpenError> {
        if common.direct.is_none() {
            let same = common.fd.try_clone().map(File::from);
            return same.map_err(failed(&self.path, "open"));
        }
        let there = format!("/proc/self/fd/{}", common.fd.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(there, flags, Mode::empty());
        opened.map(File::from).map_err(failed(&self.path, "open"))
    }
}
