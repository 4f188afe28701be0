//! Templates of volatile layers that an older build made: `volatile-SIZE.ext4` in the cache, where
//! every user of the host can open them. Newer ones are in a directory of their own
//! (`volume::under_layer`).
//!
//! A sandbox that outlives its daemon has its layer on such a file, and a user who locks the file
//! takes the layer from the sandbox: the next daemon cannot open it. So a daemon closes these files
//! before its plane opens any, and removes each as soon as no disk is on it.

use std::path::{Path, PathBuf};

use slipway_lock::Lock;

use crate::{Error, Result};

/// Closes the files to other users. One that another user has opened before stays open to that
/// user.
///
/// # Errors
/// [`Error::File`].
pub fn close(cache: &Path) -> Result<()> {
    let closed = slipway_private::close_files(cache, is_old);
    closed.map_err(std::io::Error::other).map_err(Error::file("cannot close old files in", cache))
}

/// Removes the files that no disk is on. The plane has taken over the disks of an earlier daemon,
/// each of which holds the lock of its file.
pub(crate) fn remove_unused(cache: &Path) {
    for path in list(cache) {
        match Lock::try_existing(&path) {
            // The lock is held until the file is gone, so that no disk is opened meanwhile.
            Ok(_lock) => {
                if let Err(error) = std::fs::remove_file(&path) {
                    tracing::warn!(path = %path.display(), %error, "an old file stays");
                }
            }
            Err(slipway_lock::Error::Held { .. }) => {}
            Err(error) => tracing::warn!(%error, "an old file stays"),
        }
    }
}

fn list(cache: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(cache).into_iter().flatten().flatten();
    let old = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_old));
    old.map(|entry| entry.path()).collect()
}

/// Returns whether a file of the cache has the name of an old template.
fn is_old(name: &str) -> bool {
    let size = name.strip_prefix("volatile-").and_then(|rest| rest.strip_suffix(".ext4"));
    size.is_some_and(|size| !size.is_empty() && size.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    #[test]
    fn old_files_are_closed_and_go_once_no_disk_is_on_them() {
        let cache = tempfile::tempdir().unwrap();
        let [used, unused, other] = ["volatile-4096.ext4", "volatile-8192.ext4", "initramfs-1"]
            .map(|name| cache.path().join(name));
        for path in [&used, &unused, &other] {
            std::fs::write(path, "content").unwrap();
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o644)).unwrap();
        }
        close(cache.path()).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!([&used, &unused, &other].map(|path| mode(path)), [0o600, 0o600, 0o644]);
        let disk = Lock::try_existing(&used).unwrap();
        remove_unused(cache.path());
        assert!(used.exists() && !unused.exists() && other.exists());
        assert_eq!(std::fs::read(&used).unwrap(), b"content", "the disk goes on with it");
        drop(disk);
        remove_unused(cache.path());
        assert!(!used.exists() && other.exists());
        // A node without a cache has nothing to close.
        close(&cache.path().join("missing")).unwrap();
    }

    #[test]
    fn nothing_else_in_the_cache_is_an_old_file() {
        assert!(is_old("volatile-2147483648.ext4"));
        for name in ["volatile-.ext4", "volatile-x.ext4", "volatile-1", "1.ext4", "layers", ""] {
            assert!(!is_old(name), "{name}");
        }
    }
}
