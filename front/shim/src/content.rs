//! The content of a root: the layers or the folder for which containerd's mounts stand.

use std::path::PathBuf;

use crate::containerd::Mount;
use crate::layers::{Content, Overlay, Source, changed, key_of, options};
use crate::mount::is_bind;
use crate::{erofs, lazy};

/// The file system type of an EROFS that is mounted (statfs(2)).
const EROFS: u64 = 0xe0f5_e1e2;

/// Finds out where the content of a root is: in its mounts, or without any in `folder`.
///
/// # Errors
/// One line: the mounts are of a kind that is not supported, or their files are not there.
pub fn content(mounts: &[Mount], folder: Option<PathBuf>) -> Result<Content, String> {
    match mounts {
        [] => {
            let folder = folder.ok_or("the container has no root")?;
            Ok(Content { source: Source::Folder(folder), key: None })
        }
        mounts if erofs::is_of_snapshotter(mounts) => erofs::content(mounts),
        [mount] if mount.r#type == "overlay" => overlay(mount),
        [mount] if is_bind(&mount.r#type, &mount.options) => bind(mount),
        [mount] => Ok(Content { source: Source::Device(mount.clone()), key: None }),
        more => Err(format!(
            "the root has {} mounts on each other, which is not supported: use the snapshotter \
             overlayfs or erofs",
            more.len()
        )),
    }
}

/// Takes a bind mount. A read-only one is a layer that was committed; in others their container's
/// files may be.
fn bind(mount: &Mount) -> Result<Content, String> {
    let path = PathBuf::from(&mount.source);
    if let Some(image) = lazy::image_of(std::slice::from_ref(&path))? {
        return Ok(Content { source: Source::Lazy(image), key: None });
    }
    let is_fixed = mount.options.iter().any(|option| option == "ro");
    let key = if is_fixed { key_of_folders(std::slice::from_ref(&path))? } else { None };
    Ok(Content { source: Source::Folder(path), key })
}

/// Takes an overlay apart.
fn overlay(mount: &Mount) -> Result<Content, String> {
    let Overlay { lower, upper, rest } = options(mount)?;
    let mut layers: Vec<_> = lower.split(':').map(PathBuf::from).collect();
    if layers.iter().any(|layer| !layer.is_absolute()) {
        return Err("the root's overlay names no layers".to_owned());
    }
    if let Some(files) = erofs::files_of(&layers) {
        return erofs::chain(files, changed(upper)?);
    }
    let changed = changed(upper)?;
    if let Some(image) = lazy::image_of(&layers)? {
        lazy::check_unchanged(&image, changed.as_deref())?;
        return Ok(Content { source: Source::Lazy(image), key: None });
    }
    let key = if changed.is_some() { None } else { key_of_folders(&layers)? };
    if let Some(upper) = changed {
        layers.insert(0, upper);
    }
    let source = match <[PathBuf; 1]>::try_from(layers) {
        Ok([only]) => Source::Folder(only),
        Err(layers) => Source::Layers(layers, rest),
    };
    Ok(Content { source, key })
}

/// Returns the key of folders. Returns `None` if one is an EROFS that is mounted: device numbers of
/// such mounts come again, and the times in it are the image's.
fn key_of_folders(layers: &[PathBuf]) -> Result<Option<String>, String> {
    let is_erofs = |path: &PathBuf| {
        rustix::fs::statfs(path).is_ok_and(|found| found.f_type as u64 & 0xffff_ffff == EROFS)
    };
    match layers.iter().any(is_erofs) {
        true => Ok(None),
        false => key_of(layers).map(Some),
    }
}

#[cfg(test)]
#[path = "tests/content.rs"]
mod tests;
