//! The list of repositories that a lazily pulled image can be fetched from.
//!
//! The map names the one of the first pull. Anybody can offer a copy of another one's manifest, and
//! be the first to pull it. So every later pull of the image, whose repository has just sent the
//! same manifest, adds its own to `HEX.origins` beside the map.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::source::registry::Origin;
use crate::{Error, Result};

/// The most repositories of an image. Of more, the oldest are left out.
const MOST: usize = 64;

/// Reads the list at `path`, newest last. A list that is missing or was cut off by a power cut is
/// empty: pulls fill it again.
pub(crate) fn read(path: &Path) -> Vec<Origin> {
    let bytes = std::fs::read(path).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

/// Adds an origin to the list at `path`, unless it has the repository. The caller holds the lock of
/// the cache's index.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn add(path: &Path, origin: &Origin) -> Result<()> {
    let mut origins = read(path);
    if origins.iter().any(|known| known.place() == origin.place()) {
        return Ok(());
    }
    origins.push(origin.clone());
    let surplus = origins.len().saturating_sub(MOST);
    write(path, &origins[surplus..])
}

/// Replaces the list at `path`. The caller holds the lock of the cache's index.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn write(path: &Path, origins: &[Origin]) -> Result<()> {
    let new = path.with_extension("origins-new");
    let write = || {
        let mut options = File::options();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        options.open(&new)?.write_all(&serde_json::to_vec(origins)?)?;
        std::fs::rename(&new, path)
    };
    write().map_err(|e| Error::io("write", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(name: &str) -> Origin {
        Origin { reference: name.parse().unwrap(), plain_http: false }
    }

    #[test]
    fn a_list_has_each_repository_once_and_the_newest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.origins");
        assert!(read(&path).is_empty());
        for name in ["a.test/x:1", "b.test/x:1", "a.test/x:2", "a.test/y"] {
            add(&path, &origin(name)).unwrap();
        }
        assert_eq!(read(&path), ["a.test/x:1", "b.test/x:1", "a.test/y"].map(origin));
        for number in 0..MOST {
            add(&path, &origin(&format!("c.test/{number}"))).unwrap();
        }
        let list = read(&path);
        assert_eq!((list.len(), &list[0]), (MOST, &origin("c.test/0")));
        std::fs::write(&path, "[{").unwrap();
        assert!(read(&path).is_empty());
    }
}
