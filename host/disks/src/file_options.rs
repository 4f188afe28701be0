//! The part of its file system that a file leaves to others.

use slipway_block::Reserve;
use slipway_plane_api::v1;

/// Returns the reserve that a file is to keep. The first write that is refused for it is told in
/// the daemon's log, since a guest decides how many there are.
pub fn reserve(file: &v1::FileDisk) -> Option<Reserve> {
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
