//! Why a disk could not be made.

use std::io;
use std::path::PathBuf;

/// Why a disk could not be made or opened. Every message says what was wrong with what.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A system call on the file failed.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was tried, an infinitive.
        action: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// Neither a regular file nor a block device, nor an NVMe namespace's generic device.
    #[error("{} is neither a regular file nor a block device nor an NVMe namespace (/dev/ngXnY)", .0.display())]
    Kind(PathBuf),
    /// An NVMe namespace that no disk can be on.
    #[error("cannot use {}: {why}", path.display())]
    Namespace {
        /// Its generic character device.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Another disk has the file open, and one of the two writes.
    #[error("{} is in use as a disk already; two writers would corrupt it", .0.display())]
    InUse(PathBuf),
    /// A block device has the size that it has.
    #[error("{} is a device: its size is not this host's to change", .0.display())]
    Fixed(PathBuf),
    /// Not even one block, or no whole number of blocks where that is needed.
    #[error("{bytes} bytes are no whole, positive number of blocks of {block_size} bytes")]
    Size {
        /// The size, in bytes.
        bytes: u64,
        /// Block size, in bytes.
        block_size: u32,
    },
    /// Not a power of two from 512 to 4096.
    #[error("a block size of {0} bytes: it must be a power of two from 512 to 4096")]
    BlockSize(u32),
    /// The file could never be filled.
    #[error(
        "a disk of {wanted} bytes cannot fit on the file system of {}, which holds {capacity} bytes",
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
    /// No memory, or no address space, for a disk in memory.
    #[error("no memory for a disk of {bytes} bytes: {source}")]
    Memory {
        /// Bytes asked for.
        bytes: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// What a predecessor left cannot be gone on with.
    #[error("what was kept of the overlay is of no use: {0}")]
    Kept(&'static str),
    /// io_uring is not to be had: a kernel without it, `kernel.io_uring_disabled`, or a seccomp
    /// filter (those of container engines forbid it).
    #[error("cannot set up io_uring (is kernel.io_uring_disabled set, or a filter active?): {0}")]
    Ring(io::Error),
    /// No descriptor to wake a sleeping thread by.
    #[error("cannot make a descriptor to wait on: {0}")]
    Wake(io::Error),
}
