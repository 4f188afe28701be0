//! Layers: which there are, and their identity.
//!
//! A snapshotter's committed layers never change, so what they hold together is found again by a
//! key of their identities. The writable part above them is left out while it is empty.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::containerd::Mount;
use crate::lazy::Image;

/// The content of a root.
#[derive(Debug, PartialEq)]
pub struct Content {
    /// The place where it is.
    pub source: Source,
    /// The identity of content that does not change. `None`: the content is one container's.
    pub key: Option<String>,
}

/// The place of a root's content.
#[derive(Debug, PartialEq)]
pub enum Source {
    /// A folder.
    Folder(PathBuf),
    /// Folders of layers, the uppermost first, and options to mount them as an overlay.
    Layers(Vec<PathBuf>, Vec<String>),
    /// EROFS files of layers, the uppermost first. The first may be an upper directory of
    /// overlayfs.
    Erofs(Vec<PathBuf>),
    /// A file system.
    Device(Mount),
    /// Layers that are not on the host: the image is in the node's cache, or is pulled into it.
    Lazy(Image),
}

/// The options of an overlay.
#[derive(Debug, Default)]
pub struct Overlay<'a> {
    /// The layers, as the option has them.
    pub lower: &'a str,
    /// The writable layer.
    pub upper: Option<&'a str>,
    /// The options that matter for what a reader sees.
    pub rest: Vec<String>,
}

/// Returns the options of an overlay.
///
/// # Errors
/// One line: it has an option that is not known.
pub fn options(mount: &Mount) -> Result<Overlay<'_>, String> {
    let mut overlay = Overlay::default();
    for option in &mount.options {
        match option.split_once('=') {
            Some(("lowerdir", list)) => overlay.lower = list,
            Some(("upperdir", path)) => overlay.upper = Some(path),
            // They matter only for the writable layer, which is not mounted.
            Some(("workdir" | "fsync" | "nfs_export" | "uuid" | "X-containerd.mkdir.path", _)) => {}
            Some(("index" | "userxattr" | "metacopy" | "redirect_dir" | "xino", _)) => {
                overlay.rest.push(option.clone());
            }
            Some((name, _)) => {
                return Err(format!(
                    "the root's overlay has the option {name}, which is not supported"
                ));
            }
            None => {}
        }
    }
    overlay.rest.extend(mount.options.iter().filter(|option| *option == "userxattr").cloned());
    Ok(overlay)
}

/// Returns the writable layer if something is in it.
///
/// # Errors
/// One line: it cannot be read.
pub fn changed(upper: Option<&str>) -> Result<Option<PathBuf>, String> {
    let Some(upper) = upper.map(PathBuf::from) else { return Ok(None) };
    let entries = std::fs::read_dir(&upper);
    let mut entries = entries.map_err(|error| format!("{}: {error}", upper.display()))?;
    Ok(entries.next().is_some().then_some(upper))
}

/// Returns the key of layers: a digest of what tells each of them from every other folder or file
/// of this host that is or was there.
///
/// # Errors
/// One line: a layer is not there.
pub fn key_of(layers: &[PathBuf]) -> Result<String, String> {
    let mut digest = Sha256::new();
    for layer in layers {
        let metadata =
            std::fs::metadata(layer).map_err(|error| format!("{}: {error}", layer.display()))?;
        let path = layer.as_os_str().as_encoded_bytes();
        digest.update((path.len() as u64).to_le_bytes());
        digest.update(path);
        for number in
            [metadata.dev(), metadata.ino(), metadata.ctime() as u64, metadata.ctime_nsec() as u64]
        {
            digest.update(number.to_le_bytes());
        }
    }
    Ok(hex::encode(&digest.finalize()[..16]))
}
