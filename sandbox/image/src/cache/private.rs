//! Access to the cache for its owner only: files are created so, and those that an older version or
//! a copy left open to others are closed.

use std::fs::{DirBuilder, File, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use crate::{Error, Result};

const FOLDER: u32 = 0o700;
const FILE: u32 = 0o600;
/// The permission bits of other users.
const OTHERS: u32 = 0o077;

/// Creates the folder `dir` if it is missing, and removes the rights of other users from an
/// existing one.
pub(super) fn make(dir: &Path) -> Result<()> {
    let failed = |e| Error::io("create", dir, e);
    if let Some(parent) = dir.parent() {
        // The folders above are not the cache's own: VMMs pass through them to theirs.
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    match DirBuilder::new().mode(FOLDER).create(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(failed(e)),
        _ => {}
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
    close(&File::from(open), dir, FOLDER)
}

/// Removes the rights of other users from the files in `dir`. A process that has opened a file can
/// still read it.
pub(super) fn close_files(dir: &Path) -> Result<()> {
    for path in super::listing(dir)? {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // A lock's file needs more than another mode; `slipway_lock` handles it.
        if !(name.ends_with(".erofs") || name.starts_with("index.json")) {
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(open) => close(&File::from(open), &path, FILE)?,
            // Another process has removed the file meanwhile.
            Err(rustix::io::Errno::NOENT) => {}
            Err(e) => return Err(Error::io("open", &path, e.into())),
        }
    }
    Ok(())
}

/// Sets `mode` on an open file or folder if other users have any right to it.
fn close(open: &File, path: &Path, mode: u32) -> Result<()> {
    let failed = |e| Error::io("look at", path, e);
    let meta = open.metadata().map_err(failed)?;
    let me = rustix::process::geteuid().as_raw();
    if meta.uid() != me {
        return Err(Error::ForeignCache { path: path.to_owned(), owner: meta.uid(), me });
    }
    if meta.mode() & OTHERS == 0 {
        return Ok(());
    }
    open.set_permissions(Permissions::from_mode(mode)).map_err(|e| Error::io("close", path, e))
}
