//! Layers as a snapshotter of containerd's keeps them. An EROFS file is used where it is: it is
//! read once for its digest and once for the image, and no file system of its maker's is mounted.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::beneath::{self, FolderPolicy};
use super::folder;
use crate::digest::DigestReader;
use crate::manifest::{self, Layer, Plan};
use crate::root::Form;
use crate::{Digest, Error, Limits, Result};

/// Opens the layers at `paths`, the uppermost first, and plans an image of them with an empty
/// config. Upper directories are packed into unnamed files in `dir`. Returns the layers' files by
/// their digests.
pub(crate) fn open(
    paths: &[PathBuf],
    dir: &Path,
    limits: &Limits,
) -> Result<(Plan, Vec<(Digest, File)>)> {
    if paths.len() > limits.layers {
        let reason = format!("{} layers are more than the limit of {}", paths.len(), limits.layers);
        return Err(Error::too_large("the image", reason));
    }
    let (mut layers, mut files) = (Vec::new(), Vec::new());
    for path in paths.iter().rev() {
        let found =
            beneath::find(path, FolderPolicy::Any).map_err(|e| Error::io("read", path, e))?;
        let (layer, file) = match found.meta.is_dir() {
            true => folder::pack_layer(path, dir, limits, Form::Changes)?,
            false => open_erofs(path, limits)?,
        };
        files.push((layer.digest, file));
        layers.push(layer);
    }
    let name = paths.first().map(|path| path.display().to_string()).unwrap_or_default();
    manifest::check_layers(&layers, limits, &name)?;
    Ok((manifest::without_config(layers, &name)?, files))
}

/// Opens a file that no other user may change: it is read twice, and the image is kept under the
/// digest of the first time. Nor may another user put it there, by a folder or a link on the way:
/// it could be one that only the caller may read.
fn open_unchangeable(path: &Path) -> io::Result<File> {
    let found = beneath::find(path, FolderPolicy::Unchangeable)?;
    if !found.meta.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    beneath::check_unchangeable(&found.meta)?;
    found.read()
}

fn open_erofs(path: &Path, limits: &Limits) -> Result<(Layer, File)> {
    let failed = |e| Error::io("read", path, e);
    let file = open_unchangeable(path).map_err(failed)?;
    let most = limits.layer_uncompressed;
    let mut reader = DigestReader::new((&file).take(most.saturating_add(1)));
    io::copy(&mut reader, &mut io::sink()).map_err(failed)?;
    let (digest, size) = (reader.digest(), reader.count());
    if size > most {
        let reason = format!("it has more than {most} bytes");
        return Err(Error::too_large(format!("layer {}", path.display()), reason));
    }
    Ok((Layer { digest, size, diff_id: digest, form: Form::Erofs, toc: None }, file))
}
