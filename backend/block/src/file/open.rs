//! Opening and creating the file behind a disk.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use slipway_space::Space;

use super::job::Alignment;
use super::thin::Reserve;
use crate::check::is_block_size;
use crate::{BaseIdentity, Geometry, OpenError};

/// Options for opening a [`FileDisk`](crate::FileDisk).
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// Opens the file for reading only; the disk refuses writes. Any number of such disks may open
    /// the same file.
    pub read_only: bool,
    /// Bytes in a logical block: a power of two, 512 to 4096.
    pub block_size: u32,
    /// Bypasses the host's page cache (O_DIRECT) if file system and block size allow it. Use
    /// `false` for a file that many disks read: the page cache then holds it once for all.
    pub direct: bool,
    /// Pins pages of guest memory in the kernel once, and not for each request, if data bypasses
    /// the page cache. Pages stay pinned as long as they are mapped for the device: pages that a
    /// guest gives back without an unmap are not freed, and the device goes on using the old ones.
    pub pin: bool,
    /// A descriptor that the kernel holds until every request of this disk has ended, even if the
    /// process is killed: a process that waits for a lock on it learns when they have.
    pub witness: Option<Arc<OwnedFd>>,
    /// The part of the file system that this file leaves to others as it grows. `None`: it takes
    /// what it can get. Ignored for devices and for files that are only read.
    pub reserve: Option<Reserve>,
}

impl Default for FileOptions {
    /// Writable, 512-byte blocks, direct where possible, nothing pinned, no reserve.
    fn default() -> Self {
        Self {
            read_only: false,
            block_size: 512,
            direct: true,
            pin: false,
            witness: None,
            reserve: None,
        }
    }
}

pub(super) struct Opened {
    pub fd: OwnedFd,
    /// The alignment that O_DIRECT requires, or `None` if the page cache is used.
    pub direct: Option<Alignment>,
    pub geometry: Geometry,
}

/// Returns a closure that makes an [`OpenError::File`] of a failed system call.
pub(crate) fn failed<E: Into<std::io::Error>>(
    path: &Path,
    action: &'static str,
) -> impl FnOnce(E) -> OpenError {
    move |error| OpenError::File { path: path.to_owned(), action, source: error.into() }
}

pub(super) fn open(path: &Path, options: &FileOptions) -> Result<Opened, OpenError> {
    if !is_block_size(options.block_size) {
        return Err(OpenError::BlockSize(options.block_size));
    }
    let fd = open_descriptor(path, options)?;
    let bytes = size(&fd, path)?;
    let blocks = bytes / u64::from(options.block_size);
    if blocks == 0 {
        return Err(OpenError::Size { bytes, block_size: options.block_size });
    }
    // io_uring would return a non-blocking descriptor's EAGAIN instead of waiting.
    let flags = rustix::fs::fcntl_getfl(&fd).map_err(failed(path, "look at"))?;
    let flags = flags - OFlags::NONBLOCK;
    rustix::fs::fcntl_setfl(&fd, flags).map_err(failed(path, "set up"))?;
    let wanted = if options.direct { direct_alignment(&fd, options.block_size) } else { None };
    let direct = wanted.filter(|_| rustix::fs::fcntl_setfl(&fd, flags | OFlags::DIRECT).is_ok());
    let geometry =
        Geometry { block_size: options.block_size, blocks, read_only: options.read_only };
    Ok(Opened { fd, direct, geometry })
}

/// Opens the file, checks its type, and locks it.
fn open_descriptor(path: &Path, options: &FileOptions) -> Result<OwnedFd, OpenError> {
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    // Without O_NONBLOCK, opening a FIFO would wait for its other end.
    let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let open = |flags| match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(fd) => Ok(fd),
        Err(Errno::BUSY) => Err(OpenError::InUse(path.to_owned())),
        Err(errno) => Err(failed(path, "open")(errno)),
    };
    let mut fd = open(flags)?;
    match file_type(&fd, path)? {
        FileType::RegularFile => {}
        // On a block device, O_EXCL fails if it is mounted or in other exclusive use (open(2)).
        FileType::BlockDevice if !options.read_only => {
            let claimed = open(flags | OFlags::EXCL)?;
            check_same(path, &fd, &claimed)?;
            fd = claimed;
        }
        FileType::BlockDevice => {}
        _ => return Err(OpenError::Kind(path.to_owned())),
    }
    let mode = if options.read_only {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    #[allow(
        clippy::disallowed_methods,
        reason = "other programs look at this lock; it does not wait; an error names its holder"
    )]
    let locked = rustix::fs::flock(&fd, mode);
    match locked {
        Ok(()) => Ok(fd),
        Err(Errno::WOULDBLOCK) => Err(OpenError::InUse(path.to_owned())),
        Err(errno) => Err(failed(path, "lock")(errno)),
    }
}

/// Checks that two descriptors, which `path` led to one after the other, are of one device or file.
fn check_same(path: &Path, first: &OwnedFd, second: &OwnedFd) -> Result<(), OpenError> {
    let identity = |fd| identity(fd).map_err(failed(path, "look at"));
    if identity(first)? == identity(second)? {
        return Ok(());
    }
    Err(failed(path, "open the same device again at")(Errno::STALE))
}

pub(crate) fn file_type(fd: &OwnedFd, path: &Path) -> Result<FileType, OpenError> {
    let stat = rustix::fs::fstat(fd).map_err(failed(path, "look at"))?;
    Ok(FileType::from_raw_mode(stat.st_mode))
}

/// See [`FileDisk::identity`](crate::FileDisk::identity). A device node's own timestamps change for
/// other reasons, so only the device number counts.
pub(crate) fn identity(fd: &OwnedFd) -> Result<BaseIdentity, Errno> {
    let stat = rustix::fs::fstat(fd)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => Ok([stat.st_rdev, u64::MAX, 0, 0]),
        _ => Ok([stat.st_dev, stat.st_ino, stat.st_mtime.cast_unsigned(), stat.st_mtime_nsec]),
    }
}

/// Returns the size in bytes. The size of a block device is the offset of its end.
pub(super) fn size(fd: &OwnedFd, path: &Path) -> Result<u64, OpenError> {
    rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0)).map_err(failed(path, "find the size of"))
}

/// Returns the alignment that O_DIRECT requires, or `None` if the file system does not report it
/// (`STATX_DIOALIGN`, Linux 6.1) or the disk's blocks are not a multiple of it.
fn direct_alignment(fd: &OwnedFd, block_size: u32) -> Option<Alignment> {
    let flags = StatxFlags::DIOALIGN;
    let stat = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, flags).ok()?;
    if !StatxFlags::from_bits_retain(stat.stx_mask).contains(flags) {
        return None;
    }
    let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    // Bounce buffers are aligned to a page.
    let usable = memory.is_power_of_two() && memory <= 4096 && offset > 0;
    let usable = usable && block_size.is_multiple_of(offset);
    usable.then_some(Alignment { memory: memory as usize, offset: u64::from(offset) })
}

/// Creates a new file of `bytes` bytes that takes space only as it is written.
///
/// # Errors
/// [`OpenError::TooLarge`] if the file system could not hold the file even when empty;
/// [`OpenError::File`] if the path exists or a system call fails, in which case no new file is
/// left.
pub fn create_sparse(path: &Path, bytes: u64) -> Result<(), OpenError> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let capacity =
        capacity(parent).map_err(failed(parent, "find the size of the file system of"))?;
    if bytes > capacity {
        return Err(OpenError::TooLarge { path: path.to_owned(), wanted: bytes, capacity });
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let fd =
        rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(failed(path, "create"))?;
    rustix::fs::ftruncate(fd.as_fd(), bytes).map_err(|errno| {
        // This call created the file.
        let _ = rustix::fs::unlink(path);
        failed(path, "set the size of")(errno)
    })
}

/// Returns the capacity in bytes of the empty file system of `directory`, or `u64::MAX` if the file
/// system does not report it.
pub(super) fn capacity(directory: &Path) -> std::io::Result<u64> {
    Ok(Space::at(directory)?.size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_leads_elsewhere_at_the_second_opening_is_refused() {
        let (one, other) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let (one, other) = (OwnedFd::from(one), OwnedFd::from(other));
        let path = Path::new("/dev/sdx");
        assert!(check_same(path, &one, &one.try_clone().unwrap()).is_ok());
        let refused = check_same(path, &one, &other).unwrap_err().to_string();
        assert!(refused.contains("/dev/sdx") && refused.contains("same device"), "{refused}");
    }
}
