//! Opening and creating the file behind a disk.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use super::job::Alignment;
use crate::check::is_block_size;
use crate::{BaseIdentity, Geometry, OpenError};

/// How to open a [`FileDisk`](crate::FileDisk).
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// Opens the file for reading only; the disk refuses writes. Any number of such disks share a
    /// file.
    pub read_only: bool,
    /// Bytes in a logical block: a power of two, 512 to 4096.
    pub block_size: u32,
    /// Bypasses the host's page cache (O_DIRECT) where file system and block size allow it. False
    /// for what many disks read: the page cache holds it once for all.
    pub direct: bool,
    /// Has the kernel find and pin pages of the guest's memory once, where data bypasses the page cache,
    /// and not for each request. They stay as long as they are mapped for the device: what a guest gives
    /// back without an unmap is not given back, and the device goes on with what it was.
    pub pin: bool,
    /// A descriptor that the kernel holds until every request of this disk has ended, even when the
    /// process is killed: who waits for a lock on it to go knows that.
    pub witness: Option<Arc<OwnedFd>>,
}

impl Default for FileOptions {
    /// Writable, 512-byte blocks, direct where possible, nothing pinned.
    fn default() -> Self {
        Self { read_only: false, block_size: 512, direct: true, pin: false, witness: None }
    }
}

pub(super) struct Opened {
    pub fd: OwnedFd,
    /// What O_DIRECT asks of requests; None when the page cache is used.
    pub direct: Option<Alignment>,
    pub geometry: Geometry,
}

/// Names a failed system call.
pub(crate) fn failed(path: &Path, action: &'static str) -> impl FnOnce(Errno) -> OpenError {
    move |errno| OpenError::File { path: path.to_owned(), action, source: errno.into() }
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
    // io_uring would hand a non-blocking descriptor's EAGAIN to us instead of waiting.
    let flags = rustix::fs::fcntl_getfl(&fd).map_err(failed(path, "look at"))?;
    let flags = flags - OFlags::NONBLOCK;
    rustix::fs::fcntl_setfl(&fd, flags).map_err(failed(path, "set up"))?;
    let wanted = if options.direct { direct_alignment(&fd, options.block_size) } else { None };
    let direct = wanted.filter(|_| rustix::fs::fcntl_setfl(&fd, flags | OFlags::DIRECT).is_ok());
    let geometry =
        Geometry { block_size: options.block_size, blocks, read_only: options.read_only };
    Ok(Opened { fd, direct, geometry })
}

/// Opens, looks at what it is, and locks it.
fn open_descriptor(path: &Path, options: &FileOptions) -> Result<OwnedFd, OpenError> {
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    // Without O_NONBLOCK opening a FIFO would wait for its other end.
    let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let open = |flags| match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(fd) => Ok(fd),
        Err(Errno::BUSY) => Err(OpenError::InUse(path.to_owned())),
        Err(errno) => Err(failed(path, "open")(errno)),
    };
    let mut fd = open(flags)?;
    match file_type(&fd, path)? {
        FileType::RegularFile => {}
        // On a block device O_EXCL refuses what is mounted or in other exclusive use (open(2)).
        FileType::BlockDevice if !options.read_only => fd = open(flags | OFlags::EXCL)?,
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
        reason = "other programs look at this lock; it does not wait, and who holds it is told of by an error"
    )]
    let locked = rustix::fs::flock(&fd, mode);
    match locked {
        Ok(()) => Ok(fd),
        Err(Errno::WOULDBLOCK) => Err(OpenError::InUse(path.to_owned())),
        Err(errno) => Err(failed(path, "lock")(errno)),
    }
}

pub(crate) fn file_type(fd: &OwnedFd, path: &Path) -> Result<FileType, OpenError> {
    let stat = rustix::fs::fstat(fd).map_err(failed(path, "look at"))?;
    Ok(FileType::from_raw_mode(stat.st_mode))
}

/// See [`FileDisk::identity`](crate::FileDisk::identity). A device's own file is touched by others; of
/// it only the number counts.
pub(super) fn identity(fd: &OwnedFd) -> Result<BaseIdentity, Errno> {
    let stat = rustix::fs::fstat(fd)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => Ok([stat.st_rdev, u64::MAX, 0, 0]),
        _ => Ok([stat.st_dev, stat.st_ino, stat.st_mtime.cast_unsigned(), stat.st_mtime_nsec]),
    }
}

/// Size in bytes. A block device tells its size as the end to seek to.
pub(super) fn size(fd: &OwnedFd, path: &Path) -> Result<u64, OpenError> {
    rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0)).map_err(failed(path, "find the size of"))
}

/// What O_DIRECT wants, where the file system says so (`STATX_DIOALIGN`, Linux 6.1) and a block of
/// the disk is no smaller than that.
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
/// [`OpenError::TooLarge`] when the file system could not hold it even when empty;
/// [`OpenError::File`] when the path exists or anything else fails, and then no file is left.
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
        // Just created, by us alone.
        let _ = rustix::fs::unlink(path);
        failed(path, "set the size of")(errno)
    })
}

/// Bytes that the file system of `directory` holds when it is empty; without limit where it does
/// not know.
pub(super) fn capacity(directory: &Path) -> Result<u64, Errno> {
    let stat = rustix::fs::statvfs(directory)?;
    match stat.f_blocks.saturating_mul(stat.f_frsize) {
        0 => Ok(u64::MAX),
        bytes => Ok(bytes),
    }
}
