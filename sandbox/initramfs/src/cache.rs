//! Cache files, which are either complete or absent.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// Returns the path of the file in `cache` with exactly `content`, and writes the file if it is
/// absent. Its name consists of `stem`, a digest of the content, and `extension`.
pub(crate) fn by_content(
    cache: &Path,
    stem: &str,
    extension: &str,
    content: &[u8],
) -> Result<PathBuf> {
    let path = cache.join(format!("{stem}-{}.{extension}", digest(content)));
    // Files are renamed into place when complete, so the length is a check against a damaged disk.
    if !fs::metadata(&path).is_ok_and(|meta| meta.len() == content.len() as u64) {
        publish(&path, content)?;
    }
    Ok(path)
}

/// Writes a file under a temporary name and renames it into place, so that a reader sees either the
/// old or the new content. All users can read the file: the VM runs as another user, and nothing in
/// it is secret.
pub(crate) fn publish(path: &Path, content: &[u8]) -> Result<()> {
    let failed = |source| Error::file("write", path, source);
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory).map_err(failed)?;
    let aside = path.with_extension(format!("{}.tmp", std::process::id()));
    let write = || {
        let mut file = fs::File::create(&aside)?;
        file.write_all(content)?;
        file.sync_data()?;
        fs::rename(&aside, path)
    };
    write().map_err(|source| {
        let _ = fs::remove_file(&aside);
        failed(source)
    })
}

/// Returns the first 128 bits of the SHA-256, in hexadecimal.
pub(crate) fn digest(content: &[u8]) -> String {
    hex::encode(&Sha256::digest(content)[..16])
}
