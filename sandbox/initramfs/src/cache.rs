//! Cache files, which are either complete or absent.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
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

/// Returns whether a file's name is one of [`by_content`].
pub(crate) fn is_named_by_content(path: &Path) -> bool {
    let name = path.file_stem().and_then(|stem| stem.to_str());
    let digest = name.and_then(|name| name.rsplit_once('-')).map_or("", |(_, digest)| digest);
    digest.len() == 32 && digest.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns the file in the directory of `link` to which it leads. Returns `None` if either is
/// absent.
pub(crate) fn linked(link: &Path) -> Option<PathBuf> {
    let name = fs::read_link(link).ok()?;
    let path = link.parent()?.join(name.file_name()?);
    path.is_file().then_some(path)
}

/// Has `link` lead to `path`, a file in its directory.
pub(crate) fn link(link: &Path, path: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default();
    let aside = link.with_extension(format!("{}.tmp", std::process::id()));
    let _ = fs::remove_file(&aside);
    let linked = symlink(name, &aside).and_then(|()| fs::rename(&aside, link));
    linked.map_err(|source| Error::file("write", link, source))
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
