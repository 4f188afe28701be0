//! Access to the cache for its owner only: files are created so, and those that an older version or
//! a copy left open to others are closed (`slipway_private`).

use std::path::Path;

use crate::{Error, Result};

/// Creates the folder `dir` if it is missing, and removes the rights of other users from an
/// existing one.
pub(super) fn make(dir: &Path) -> Result<()> {
    slipway_private::make_folder(dir).map_err(of_cache)
}

/// Removes the rights of other users from the files in `dir`. A process that has opened a file can
/// still read it.
pub(super) fn close_files(dir: &Path) -> Result<()> {
    // A lock's file needs more than another mode; `slipway_lock` handles it.
    let ours = |name: &str| {
        [".erofs", ".map", ".origins"].iter().any(|end| name.ends_with(end))
            || name.starts_with("index.json")
    };
    slipway_private::close_files(dir, ours).map_err(of_cache)
}

fn of_cache(error: slipway_private::Error) -> Error {
    error.into()
}
