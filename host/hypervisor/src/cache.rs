//! Small files in which results that are expensive to get are kept.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Returns a text that identifies a file in its present state: a replaced or changed file has
/// another.
pub(crate) fn file_identity(path: &Path) -> std::io::Result<String> {
    let meta = fs::metadata(path)?;
    let (dev, ino, size) = (meta.dev(), meta.ino(), meta.size());
    let changed = (meta.ctime(), meta.ctime_nsec());
    Ok(format!("{} {dev}:{ino} {size} {}.{:09}", path.display(), changed.0, changed.1))
}

/// Reads a cache file. Returns `None` if it does not exist or is damaged.
pub(crate) fn read_cached<T: for<'de> Deserialize<'de>>(file: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(file).ok()?).ok()
}

/// Replaces a cache file atomically. A cache that cannot be written only costs time.
pub(crate) fn write_cached<T: Serialize>(file: &Path, value: &T) {
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(file.parent().unwrap_or(Path::new(".")))?;
        let unfinished = file.with_extension(format!("{}.tmp", std::process::id()));
        fs::write(&unfinished, serde_json::to_vec(value)?)?;
        fs::rename(&unfinished, file)
    };
    if let Err(error) = write() {
        tracing::debug!(file = %file.display(), %error, "cache not written");
    }
}
