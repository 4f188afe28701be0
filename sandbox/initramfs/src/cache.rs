//! Files that are either whole or not there.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// The file in `cache` that holds exactly `content`, written if it is not there. Its name is made
/// of `stem`, a digest of the content, and `extension`.
pub(crate) fn by_content(
    cache: &Path,
    stem: &str,
    extension: &str,
    content: &[u8],
) -> Result<PathBuf> {
    let path = cache.join(format!("{stem}-{}.{extension}", digest(content)));
    // Files get their name when they are whole, so the length is a check against a damaged disk.
    if !fs::metadata(&path).is_ok_and(|meta| meta.len() == content.len() as u64) {
        publish(&path, content)?;
    }
    Ok(path)
}

/// Writes a file aside and renames it into place. Whoever looks sees the old state or the new one.
/// Readable by all: the VM runs as another user, and nothing in it is secret.
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

/// First 128 bits of the SHA-256, in hexadecimal.
pub(crate) fn digest(content: &[u8]) -> String {
    hex::encode(&Sha256::digest(content)[..16])
}
