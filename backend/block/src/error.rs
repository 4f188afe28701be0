//! Errors in making or opening a disk.

use std::io;
use std::path::PathBuf;

/// The reason why a disk could not be made or opened. Every message names the thing and its fault.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A system call on the file failed.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The attempted action, an infinitive.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The path is neither a regular file, nor a block device, nor an NVMe namespace's generic
    /// device.
    #[error(
        "{} is neither a regular file nor a block device nor an NVMe namespace (/dev/ngXnY)",
        .0.display()
    )]
    Kind(PathBuf),
    /// The NVMe namespace cannot hold a disk.
    #[error("cannot use {}: {why}", path.display())]
    Namespace {
        /// The namespace's generic character device.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// Another disk has the file open, and one of the two writes.
    #[error("{} is in use as a disk already; two writers would corrupt it", .0.display())]
    InUse(PathBuf),
    /// The size of a block device cannot be changed.
    #[error("{} is a device: its size is not this host's to change", .0.display())]
    Fixed(PathBuf),
    /// The size is less than one block, or not a multiple of the block size where it must be one.
    #[error("{bytes} bytes are no whole, positive number of blocks of {block_size} bytes")]
    Size {
        /// The size, in bytes.
        bytes: u64,
        /// Block size, in bytes.
        block_size: u32,
    },
    /// The block size is not a power of two from 512 to 4096.
    #[error("a block size of {0} bytes: it must be a power of two from 512 to 4096")]
    BlockSize(u32),
    /// The size exceeds the file system's capacity, so the file could never be filled.
    #[error(
        "a disk of {wanted} bytes cannot fit on the file system of {}, which holds {capacity} \
         bytes",
        path.display()
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that the file system holds when it is empty.
        capacity: u64,
    },
    /// The host has no memory, or no address space, for a disk in memory.
    #[error("no memory for a disk of {bytes} bytes: {source}")]
    Memory {
        /// Bytes asked for.
        bytes: u64,
        /// The kernel's error.
        source: io::Error,
    },
    /// The state that a predecessor left cannot be used.
    #[error("what was kept of the overlay is of no use: {0}")]
    Kept(&'static str),
    /// The base of an overlay was written, so the overlay's blocks belong to another disk.
    #[error("{} has changed under an overlay over it: the overlay cannot be copied", .0.display())]
    Changed(PathBuf),
    /// The memory file of an overlay cannot be read.
    #[error("cannot read the memory of an overlay: {0}")]
    Content(io::Error),
    /// io_uring is not available: the kernel lacks it, or `kernel.io_uring_disabled` or a seccomp
    /// filter forbids it (container engines' filters do).
    #[error("cannot set up io_uring (is kernel.io_uring_disabled set, or a filter active?): {0}")]
    Ring(io::Error),
    /// The descriptor that wakes a sleeping thread could not be made.
    #[error("cannot make a descriptor to wait on: {0}")]
    Wake(io::Error),
}
