//! The options with which the file of a disk is opened.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use slipway_block::{FileOptions, Reserve};
use slipway_plane_api::v1;

/// Returns the options for `file`, in blocks of `block_size` bytes. A file that is only read goes
/// through the page cache, which holds it once for all disks that read it. `witness` is the file
/// that each of the disk's rings refers to.
pub fn file_options(
    file: &v1::FileDisk,
    block_size: u32,
    witness: Option<Arc<OwnedFd>>,
) -> FileOptions {
    let (read_only, pin, reserve) = (file.read_only, file.pin, reserve(file));
    FileOptions { read_only, block_size, direct: !read_only, pin, witness, reserve }
}

/// Returns the reserve that a file is to keep. The first write that is refused for it is told in
/// the daemon's log, since a guest decides how many there are.
fn reserve(file: &v1::FileDisk) -> Option<Reserve> {
    let (path, bytes) = (file.path.clone(), file.keep_free_bytes);
    let report = move || {
        tracing::warn!(
            path,
            keep_free_bytes = bytes,
            "its file system has no more than the space that stays free: writes to new blocks fail"
        );
    };
    (bytes > 0).then(|| Reserve::new(bytes, report))
}
